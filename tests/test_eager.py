"""The fallback, called directly and held to the oracle; a chunk is made so small here that every call has many.

The surprising fact: memory is measured below the tensors that a test can see, by counting the storages that torch's operations return.
Over 300 lines because one implementation is asked everything here that the contract promises, and what only it promises.
"""

import itertools
import math
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flashattn import eager
from flashattn.problem import Problem, canonical_window, default_scale, kept_pairs
from flashattn.reference import attention_reference, keep_mask
from inputs import STRIDES, Data
from support import Results, assert_close_to_oracle, compare, expect

pytestmark = pytest.mark.thinned(2)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALL = (True, True, True)
MASKS = (
    {},
    {"causal": True},
    {"causal": "top-left"},
    {"window": (0, 0)},
    {"window": (5, 2)},
    {"window": (None, 3)},
    {"causal": True, "window": (7, None)},
)


def problem_of(q, k, v, cu_q=None, *, causal=False, window=None, softmax_scale=None):
    left, right, top_left = canonical_window(causal, window)
    scale = default_scale(q.shape[-1]) if softmax_scale is None else softmax_scale
    batch = q.shape[0] if cu_q is None else len(cu_q) - 1
    dtype = str(q.dtype).removeprefix("torch.")
    sizes = {"batch": batch, "seqlen_q": q.shape[-3], "seqlen_k": k.shape[-3], "total_q": q.shape[-3], "total_k": k.shape[-3]}
    heads = {"heads_q": q.shape[-2], "heads_kv": k.shape[-2], "head_dim": q.shape[-1], "head_dim_v": v.shape[-1], "softmax_scale": scale}
    limits = {"window_left": left, "window_right": right, "top_left": top_left}
    return Problem(dtype=dtype, **sizes, **heads, **limits, varlen=cu_q is not None, device="cpu")


def attend(q, k, v, dout=None, dlse=None, cu=(None, None), needs=ALL, **options):
    """(out, lse, (dq, dk, dv)) of the fallback, with what it promises of shapes, dtypes and strides checked."""
    problem = problem_of(q, k, v, cu[0], **options)
    out, lse = eager.forward(problem, q, k, v, *cu)
    *gradients, _, _ = eager.backward(problem, (*needs, False, False), dout, dlse, q, k, v, out, lse, *cu)
    assert out.dtype == q.dtype and lse.dtype == torch.float32 and out.is_contiguous() and lse.is_contiguous()
    assert out.shape == (*q.shape[:-1], v.shape[-1]) and lse.shape == (*q.shape[:-3], q.shape[-2], q.shape[-3])
    for x, gradient, need in zip((q, k, v), gradients, needs, strict=True):
        assert (gradient is not None) == need
        assert gradient is None or (gradient.shape == x.shape and gradient.dtype == x.dtype and gradient.is_contiguous())
    return out, lse, gradients


def check(q, k, v, dout=None, dlse=None, *, cu=(None, None), peer_dtype=None, **options):
    """The fallback against the oracle; a gradient that is None is one of zero."""
    found = attend(q, k, v, dout, dlse, cu=cu, **options)
    data = Data(q, k, v, *(torch.zeros_like(y) if dy is None else dy for y, dy in zip(found, (dout, dlse), strict=False)), *cu)
    compare(Results(*found[:2], *found[2]), expect(_without_tail(data), peer_dtype=peer_dtype, **options), q.dtype)
    return found


def _without_tail(data):
    """What rows past the last cu_seqlens hold has no meaning; the oracle gets zeros there."""
    if not data.packed:
        return data
    used_q, used_k = (torch.arange(len(x))[:, None, None] < cu[-1] for x, cu in ((data.q, data.cu_q), (data.k, data.cu_k)))
    used = {"q": used_q, "k": used_k, "v": used_k, "dout": used_q, "dlse": used_q[None, :, 0, 0]}
    return data.with_(**{name: getattr(data, name).where(rows, 0.0) for name, rows in used.items()})


def draw(rows_q, rows_k, *, batch=2, heads=4, heads_kv=2, dim=16, dim_v=None, dtype=torch.float32, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    dim_v = dim if dim_v is None else dim_v
    q, k, v = (
        normal(batch, rows_q, heads, dim) * scale,
        normal(batch, rows_k, heads_kv, dim) * scale,
        normal(batch, rows_k, heads_kv, dim_v),
    )
    dout, dlse = normal(batch, rows_q, heads, dim_v), normal(batch, heads, rows_q)
    return *(x.to(dtype) for x in (q, k, v, dout)), dlse


def packed(lens_q, lens_k, *, tail=0, **options):
    """Tensors of sequences, then `tail` rows that belong to none and hold NaN and Inf, and the two cu_seqlens."""
    q, k, v, dout, dlse = draw(sum(lens_q) + tail, sum(lens_k) + tail, batch=1, **options)
    for x, used, poison in ((q, lens_q, math.nan), (k, lens_k, math.inf), (v, lens_k, math.nan), (dout, lens_q, math.inf)):
        x[:, sum(used) :] = poison
    dlse[..., sum(lens_q) :] = math.nan
    cu = tuple(torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32) for lens in (lens_q, lens_k))
    return *(x[0] for x in (q, k, v, dout, dlse)), cu


@pytest.fixture(params=[(1 << 19, 64), (1000, 8)], ids=["one-chunk", "chunks"])
def chunking(request, monkeypatch):
    set_chunking(monkeypatch, *request.param)


def set_chunking(monkeypatch, scores, rows):
    monkeypatch.setattr(eager, "CHUNK_SCORES", scores)
    monkeypatch.setattr(eager, "MIN_ROWS", rows)


# ------------------------------------------------------------------------------------------------------------- against the oracle

LENGTHS = st.sampled_from([0, 1, 2, 3, 7, 17, 63, 64, 65, 100])
LIMITS = st.none() | st.sampled_from([0, 1, 2, 5, 16, 63, 64, 200, 1 << 62])


@settings(max_examples=60)
@given(data=st.data())
def test_any_call(data):
    pick = lambda *values: data.draw(st.sampled_from(values))  # noqa: E731
    heads_kv, group = pick(1, 2, 3), pick(1, 2, 5)
    sizes = {
        "batch": pick(0, 1, 2, 3),
        "heads": heads_kv * group,
        "heads_kv": heads_kv,
        "dim": pick(1, 3, 8, 24, 40),
        "dim_v": pick(1, 5, 8, 32),
    }
    q, k, v, dout, dlse = draw(data.draw(LENGTHS), data.draw(LENGTHS), **sizes, dtype=pick(*DTYPES), seed=data.draw(st.integers(0, 99)))
    window = data.draw(st.none() | st.tuples(LIMITS, LIMITS))
    options = {"causal": pick(False, True, "top-left"), "window": window, "softmax_scale": pick(None, None, 0.0, -0.7, 1.3)}
    with pytest.MonkeyPatch.context() as monkeypatch:
        set_chunking(monkeypatch, *pick((1, 1), (50, 7), (1000, 3), (4000, 64), (1 << 19, 64)))
        check(q, k, v, pick(dout, dout, None), pick(dlse, None), **options)


@settings(max_examples=50)
@given(data=st.data())
def test_any_packed_call(data):
    pick = lambda *values: data.draw(st.sampled_from(values))  # noqa: E731
    lengths = data.draw(st.lists(st.tuples(*[st.sampled_from([0, 1, 2, 3, 7, 33])] * 2), min_size=1, max_size=6))
    lens_q, lens_k = zip(*lengths, strict=True)
    sizes = {
        "heads": 6,
        "heads_kv": pick(2, 6),
        "dim": pick(5, 16),
        "dim_v": pick(3, 16),
        "dtype": pick(*DTYPES),
        "seed": data.draw(st.integers(0, 99)),
    }
    *tensors, cu = packed(lens_q, lens_k, tail=pick(0, 4), **sizes)
    with pytest.MonkeyPatch.context() as monkeypatch:
        set_chunking(monkeypatch, *pick((50, 7), (1 << 19, 64)))
        check(*tensors, cu=cu, **pick(*MASKS))


@pytest.mark.parametrize("causal", [False, True])
def test_every_pair_of_lengths_around_a_tile(causal, monkeypatch):
    set_chunking(monkeypatch, 4000, 16)
    lengths = (0, 1, 2, 63, 64, 65, 127, 128, 129)
    for n, (rows_q, rows_k) in enumerate(itertools.product(lengths, lengths)):
        check(*draw(rows_q, rows_k, batch=1, heads=2, heads_kv=1, dim=8, dtype=DTYPES[n % 3], seed=n), causal=causal)


@pytest.mark.parametrize("dim", [16, 40, 64, 72, 96, 104, 128, 192, 256])
def test_head_dims(dim):
    check(*draw(30, 40, batch=1, heads=2, heads_kv=1, dim=dim, dim_v=320 - dim, dtype=torch.bfloat16), causal=True)


@pytest.mark.parametrize("heads, heads_kv", [(40, 4), (7, 1), (9, 3), (64, 8), (128, 1), (6, 2), (12, 3)])
def test_grouped_heads_are_repeated_heads(heads, heads_kv, chunking):
    q, k, v, dout, dlse = draw(9, 11, heads=heads, heads_kv=heads_kv)
    out, lse, (dq, dk, dv) = check(q, k, v, dout, dlse, causal=True)
    repeated = attend(q, *(x.repeat_interleave(heads // heads_kv, dim=2) for x in (k, v)), dout, dlse, causal=True)
    torch.testing.assert_close((out, lse, dq), (*repeated[:2], repeated[2][0]))
    for gradient, many in ((dk, repeated[2][1]), (dv, repeated[2][2])):
        torch.testing.assert_close(gradient, many.unflatten(2, (heads_kv, -1)).sum(3))


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("rows_q, rows_k", [(3, 7), (7, 3), (64, 64), (40, 90), (90, 40)])
def test_masks(rows_q, rows_k, mask, chunking):
    check(*draw(rows_q, rows_k), **mask)


@pytest.mark.parametrize("left", [0, 1, 29, 30, 31])
def test_keys_outside_every_window_take_exactly_nothing(left, chunking):
    q, k, v, dout, dlse = draw(10, 30)
    k[:, : max(0, 20 - left)], v[:, : max(0, 20 - left)] = math.nan, math.inf  # not even read
    _, _, (dq, dk, dv) = attend(q, k, v, dout, dlse, causal=True, window=(left, None))
    far = ~keep_mask(10, 30, causal=True, window=(left, None)).any(0)
    assert far.sum() == max(0, 20 - left)
    assert not dk[:, far].any() and not dv[:, far].any() and all(x.isfinite().all() for x in (dq, dk, dv))


def test_two_runs_give_the_same_bits(chunking):
    tensors = draw(50, 60, dtype=torch.bfloat16)
    first, second = attend(*tensors, causal=True), attend(*tensors, causal=True)
    assert all(torch.equal(a, b) for a, b in zip(tree_leaves(first), tree_leaves(second), strict=True))


# ----------------------------------------------------------------------------------------------------------------------- nothing


@pytest.mark.parametrize("rows_q, rows_k, mask, empty", [
    (7, 3, {"causal": True}, slice(0, 4)),
    (9, 3, {"causal": "top-left", "window": (1, None)}, slice(4, 9)),
    (5, 0, {}, slice(0, 5)),
])  # fmt: skip
def test_rows_without_keys(rows_q, rows_k, mask, empty, chunking):
    tensors = draw(rows_q, rows_k)
    expected = check(*tensors, **mask)
    for x in (tensors[0], tensors[3]):
        x[:, empty] = math.nan
    tensors[4][..., empty] = -math.inf
    out, lse, gradients = attend(*tensors, **mask)
    assert not out[:, empty].any() and (lse[..., empty] == -math.inf).all() and lse.isneginf().sum() == lse[..., empty].numel()
    for gradient, same in zip(gradients, expected[2], strict=True):
        assert torch.equal(gradient, same)


@pytest.mark.parametrize("batch, rows_q, rows_k", [(0, 3, 3), (2, 0, 3), (2, 3, 0), (2, 0, 0), (0, 0, 0)])
def test_nothing_to_do_is_not_an_error(batch, rows_q, rows_k):
    for options in ({}, {"causal": True}, {"window": (0, 0)}):
        check(*draw(rows_q, rows_k, batch=batch), **options)


def test_no_gradient_came():
    q, k, v, dout, dlse = draw(5, 6)
    assert not any(gradient.any() for gradient in attend(q, k, v)[2])
    check(q, k, v, dout, None)
    check(q, k, v, None, dlse)
    assert not attend(q, k, v, None, dlse)[2][2].any()


@pytest.mark.parametrize("needs", [n for n in itertools.product((True, False), repeat=3) if any(n)])
@pytest.mark.parametrize("from_out, from_lse", [(True, True), (True, False), (False, True)])
def test_only_the_gradients_asked_for(needs, from_out, from_lse, chunking):
    q, k, v, dout, dlse = draw(20, 30)
    came = (dout if from_out else None, dlse if from_lse else None)
    every = attend(q, k, v, *came, causal=True)[2]
    for gradient, same in zip(attend(q, k, v, *came, needs=needs, causal=True)[2], every, strict=True):
        assert gradient is None or torch.equal(gradient, same)


def test_a_gradient_not_asked_for_costs_no_product():
    q, k, v, dout, dlse = draw(20, 30)
    problem = problem_of(q, k, v)
    out, lse = eager.forward(problem, q, k, v, None, None)

    def products(*needs):
        with Watch() as watch:
            eager.backward(problem, (*needs, False, False), dout, dlse, q, k, v, out, lse, None, None)
        return watch.products

    # scores; dv | scores, dp; dq | scores, dp; dk | scores, dp; dq, dk, dv
    assert [products(0, 0, 1), products(1, 0, 0), products(0, 1, 0), products(1, 1, 1)] == [2, 3, 3, 5]


# ------------------------------------------------------------------------------------------------------------------------ packed


@pytest.mark.parametrize("lens_q, lens_k, tail, options", [
    ([76, 34, 146], [1, 1, 1], 0, {"scale": 3.0}),
    ([0, 0, 1023], [0, 1, 2045], 0, {"heads": 1, "heads_kv": 1, "dim": 4}),
    ([0, 0, 0, 1], [0, 0, 0, 1], 0, {"heads": 21, "heads_kv": 7, "dim": 120}),
    ([150, 0, 150], [100, 100, 100], 0, {}),
    ([137, 349], [137, 349], 212, {}),
    ([3, 5, 3, 5, 3], [4, 4, 4, 4, 4], 2, {}),
    ([0], [0], 3, {}),
])  # fmt: skip
def test_packed(lens_q, lens_k, tail, options, chunking):
    *tensors, cu = packed(lens_q, lens_k, tail=tail, **options)
    for dtype, causal in itertools.product((torch.float32, torch.bfloat16), (False, True)):
        out, lse, gradients = check(*(x.to(dtype) for x in tensors[:4]), tensors[4], cu=cu, causal=causal)
        used = int(cu[0][-1]), int(cu[1][-1]), int(cu[1][-1])
        assert not out[used[0] :].any() and (lse[:, used[0] :] == -math.inf).all()
        assert not any(gradient[n:].any() for gradient, n in zip(gradients, used, strict=True))
    if lens_q == [150, 0, 150]:
        assert not gradients[1][100:200].any() and not gradients[2][100:200].any()


def test_packed_sequences_are_the_same_alone():
    *tensors, cu = packed([20, 31, 20, 7], [25, 31, 9, 7])
    out, lse, gradients = attend(*tensors, cu=cu, causal=True)
    for q0, q1, k0, k1 in zip(cu[0], cu[0][1:], cu[1], cu[1][1:], strict=False):
        q, k, v, dout = (x[None, a:b] for x, a, b in zip(tensors, (q0, k0, k0, q0), (q1, k1, k1, q1), strict=False))
        alone, alone_lse, alone_gradients = attend(q, k, v, dout, tensors[4][None, :, q0:q1], causal=True)
        torch.testing.assert_close((out[q0:q1], lse[:, q0:q1]), (alone[0], alone_lse[0]))
        for gradient, same, a, b in zip(gradients, alone_gradients, (q0, k0, k0), (q1, k1, k1), strict=True):
            torch.testing.assert_close(gradient[a:b], same[0])


def test_eighty_thousand_sequences_are_not_eighty_thousand_turns():
    n = 80_000
    *tensors, cu = packed([16] * n, [16] * n, heads=1, heads_kv=1, dim=4)
    with Watch() as watch:
        out, lse, gradients = attend(*tensors, cu=cu, causal=True)
    assert watch.products <= 7 * -(-n * 16 * 16 // eager.CHUNK_SCORES)
    for i in (0, 1, 40_001, n - 1):
        at = slice(16 * i, 16 * i + 16)
        alone = check(*(x[None, at] for x in tensors[:4]), tensors[4][None, :, at], causal=True)
        torch.testing.assert_close([out[at], lse[:, at], *(x[at] for x in gradients)], [x[0] for x in tree_leaves(alone)])


@pytest.mark.parametrize("cu_q, cu_k, message", [
    ([0, 5, 3, 8], [0, 3, 6, 8], r"cu_seqlens_q falls from 5 to 3"),
    ([0, 8], [0, 9], r"cu_seqlens_k ends with 9 but k has 8 rows"),
])  # fmt: skip
def test_cu_seqlens_that_lie_are_refused(cu_q, cu_k, message):
    """Here too, since nobody reads them on a GPU."""
    q, k, v, *_ = (x[0] for x in draw(8, 8, batch=1))
    with pytest.raises(ValueError, match=message):
        attend(q, k, v, cu=(torch.tensor(cu_q, dtype=torch.int32), torch.tensor(cu_k, dtype=torch.int32)))


# ----------------------------------------------------------------------------------------------------------------------- numbers


def finite_peer(dtype):
    """Plain attention in float16 overflows at scores of 65504 before they are scaled."""
    return torch.float32 if dtype == torch.float16 else dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows_q", [1, 2, 17])
@pytest.mark.parametrize("rows_k", [64, 192, 320])
def test_scores_far_from_zero(dtype, rows_q, rows_k):
    """Mean score -120 and -6e4: only the differences matter, and lse is as exact as a float32 of its size."""
    q, k, v, dout, dlse = draw(rows_q, rows_k, dtype=torch.float32)
    for shift in (-120.0, -6e4):
        q[..., -1], k[..., -1] = 16.0, shift / 4.0  # 16 * shift / 4 / sqrt(16)
        check(*(x.to(dtype) for x in (q, k, v, dout)), dlse, causal=True, peer_dtype=finite_peer(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_scores_of_a_hundred_thousand(dtype, sign, chunking):
    q, k, v, dout, dlse = draw(30, 40, dtype=torch.float32)
    q, k = (x / x.norm(dim=-1, keepdim=True) * 632.0 for x in (q, k))  # norms of 632: |q . k| up to 4e5, scores up to 1e5
    k[:, 5] = sign * q[:, 7, ::2]
    assert (q[:, 7, ::2] * k[:, 5]).sum(-1).abs().amin() / 4 > 9.9e4
    check(*(x.to(dtype) for x in (q, k, v, dout)), dlse, peer_dtype=finite_peer(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "rows_q, rows_k, mask", [(1, 1, {}), (64, 64, {"window": (0, 0)}), (5, 1, {}), (9, 4, {"causal": True, "window": (0, None)})]
)
def test_a_single_key_gets_a_gradient_of_exactly_zero(dtype, rows_q, rows_k, mask):
    q, k, v, dout, dlse = draw(rows_q, rows_k, dtype=dtype, scale=3.0)
    out, _, (dq, dk, dv) = attend(q, k, v, dout, **mask)
    assert not dq.any() and not dk.any() and dv.any()
    if rows_q == rows_k:
        assert torch.equal(out, v.repeat_interleave(2, dim=2))
    check(q, k, v, dout, dlse, **mask)


def test_a_mean_of_many_keys():
    """128k values around 1: a sum that only ever grows."""
    *tensors, dout, _ = draw(2, 1 << 17, batch=1, heads=1, heads_kv=1, dim=8, dtype=torch.bfloat16)
    tensors[0] *= 0.1
    tensors[2] += 1
    found, _, gradients = attend(*tensors, dout)

    def plain(dtype):
        inputs = [x.to(dtype).requires_grad_() for x in tensors]
        out = attention_reference(*inputs)
        return out.detach(), *torch.autograd.grad(out, inputs, dout.to(dtype))

    for actual, truth, peer in zip((found, *gradients), plain(torch.float64), plain(torch.bfloat16), strict=True):
        assert_close_to_oracle(actual, truth, peer, torch.bfloat16)


def test_values_of_one_give_one_and_a_constant_moves_only_lse(chunking):
    q, k, v, *_ = draw(20, 30)
    assert (attend(q, k, torch.ones_like(v), causal=True)[0] - 1).abs().amax() < 1e-6
    out, lse, _ = attend(q, k, v)
    moved, moved_lse, _ = attend(
        torch.cat([q, torch.full_like(q[..., :1], 8.0)], -1), torch.cat([k, torch.full_like(k[..., :1], 4.0)], -1), v, softmax_scale=0.25
    )
    torch.testing.assert_close(moved, out)
    torch.testing.assert_close(moved_lse, lse + 8.0)


def test_autocast_outside_does_not_reach_in():
    tensors = draw(20, 30)
    alone = attend(*tensors, causal=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = attend(*tensors, causal=True)
    assert all(torch.equal(a, b) for a, b in zip(tree_leaves(alone), tree_leaves(under), strict=True))


# ----------------------------------------------------------------------------------------------------------------------- strides


@pytest.mark.parametrize("name", STRIDES)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_any_strides(name, dtype, chunking):
    contiguous = draw(12, 18, heads=4, heads_kv=2, dtype=dtype)
    tensors = [STRIDES[name](x) for x in contiguous[:4]]
    before = [x.clone() for x in tensors]
    check(*tensors, contiguous[4].transpose(1, 2).contiguous().transpose(1, 2), causal=True)
    assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True)), "an input was written to"


def test_slices_of_a_fused_projection_and_the_gradient_of_a_sum():
    qkv = torch.randn(2, 15, 3, 4, 16, generator=torch.Generator().manual_seed(0))
    q, k, v = qkv.unbind(2)
    ones = torch.ones(()).expand(2, 15, 4, 16)  # what out.sum().backward() sends: every stride 0
    check(q, k, v, ones, torch.ones(()).expand(2, 4, 15), causal=True)
    check(q.transpose(1, 2).contiguous().transpose(1, 2), k[:, ::2], v[:, ::2], ones)


# ------------------------------------------------------------------------------------------------------------------ cost and memory


class Watch(TorchDispatchMode):
    """Counts matrix products; records the largest storage and the most bytes alive at once, of those allocated inside."""

    PRODUCTS = (torch.ops.aten.bmm, torch.ops.aten.baddbmm, torch.ops.aten.baddbmm_)

    def __init__(self):
        super().__init__()
        self.products = self.live = self.peak = self.largest = 0
        self.known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.products += func.overloadpacket in self.PRODUCTS
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in given | self.known:
                self._born(x.untyped_storage())
        return result

    def _born(self, storage):
        size = storage.nbytes()
        self.known.add(storage._cdata)
        self.live += size
        self.peak, self.largest = max(self.peak, self.live), max(self.largest, size)
        weakref.finalize(storage, self._died, storage._cdata, size)

    def _died(self, key, size):
        self.known.discard(key)
        self.live -= size


def watched(rows, **options):
    q, k, v, dout, dlse = draw(rows, rows, batch=1, heads=2, heads_kv=1, dim=4, dtype=torch.bfloat16)
    with Watch() as watch:
        attend(q, k, v, dout, dlse, **options)
    assert watch.live <= 0.01 * watch.peak, "the watch lost sight of something"
    return watch


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (30, 30)}], ids=str)
def test_memory_is_linear_in_length(options, monkeypatch):
    set_chunking(monkeypatch, 1 << 12, 16)
    small, large = watched(512, **options), watched(1024, **options)
    assert large.peak <= 2.1 * small.peak and large.largest <= 2 * small.largest
    assert large.largest <= 4 * 16 * 1024, "more than a chunk of scores in one tensor"


def test_the_watch_sees_a_score_matrix():
    q, k, v, *_ = draw(512, 512, batch=1, heads=1, heads_kv=1, dim=4)
    with Watch() as watch:
        attention_reference(q, k, v)
    assert watch.largest == 4 * 512 * 512 and watch.peak >= 2 * watch.largest


def test_short_sequences_are_one_chunk():
    q, k, v, dout, dlse = draw(64, 64, batch=4, heads=4, heads_kv=4, dim=16)
    with Watch() as watch:
        attend(q, k, v, dout, dlse, causal=True)
    assert watch.products == 2 + 5


def chunks_of(problem):
    q = torch.empty(1).expand(problem.batch, problem.seqlen_q, problem.heads_kv, problem.group, problem.head_dim)
    k = torch.empty(1).expand(problem.batch, problem.seqlen_k, problem.heads_kv, problem.head_dim)
    return [(batch, heads, rows, keys) for batch, heads, chunks in eager._blocks(problem, q, k) for rows, keys in chunks]


def shape_only(rows_q, rows_k, *, batch=1, heads=1, heads_kv=1, causal=False, window=None):
    left, right, top_left = canonical_window(causal, window)
    return Problem("float32", batch, rows_q, rows_k, heads, heads_kv, 1, 1, 1.0, left, right, top_left, device="cpu")


@given(st.integers(0, 30), st.integers(0, 30), st.none() | st.tuples(LIMITS, LIMITS), st.sampled_from([False, True, "top-left"]), st.data())
def test_chunks_cover_what_is_kept_once_and_no_row_without_a_key(rows_q, rows_k, window, causal, data):
    batch, heads_kv, group = (data.draw(st.integers(1, 3)) for _ in range(3))
    problem = shape_only(rows_q, rows_k, batch=batch, heads=heads_kv * group, heads_kv=heads_kv, causal=causal, window=window)
    keep = keep_mask(rows_q, rows_k, causal=causal, window=window).expand(batch, heads_kv, -1, -1)
    covered = torch.zeros(keep.shape, dtype=torch.int32)
    with pytest.MonkeyPatch.context() as monkeypatch:
        set_chunking(monkeypatch, data.draw(st.integers(1, 3000)), data.draw(st.integers(1, 16)))
        for batches, heads, rows, keys in chunks_of(problem):
            covered[batches, heads, rows, keys] += 1
            assert keep[0, 0, rows].any(-1).all(), "a row without a key"
            assert keep[0, 0, rows, keys][:, [0, -1]].any(0).all(), "a key at the end of a chunk that none of its rows sees"
    assert (covered[keep] == 1).all()
    assert (covered <= 1).all()


@pytest.mark.parametrize(
    "options, ratio", [({}, 1.0), ({"causal": True}, 1.1), ({"window": (128, 0)}, 1.7), ({"window": (1024, 1024)}, 1.6)], ids=str
)
def test_a_mask_costs_about_what_it_keeps(options, ratio):
    problem = shape_only(16384, 16384, heads=4, heads_kv=2, **options)
    computed = sum(
        problem.group * (heads.stop - heads.start) * (rows.stop - rows.start) * (keys.stop - keys.start)
        for _, heads, rows, keys in chunks_of(problem)
    )
    assert computed <= ratio * problem.heads_q * kept_pairs(problem)


def test_heads_share_the_chunks_of_a_narrow_window():
    problem = shape_only(16384, 16384, heads=64, heads_kv=32, window=(128, 0))
    assert all(heads == slice(0, 32) for _, heads, _, _ in chunks_of(problem))
