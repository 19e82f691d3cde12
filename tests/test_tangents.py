"""Forward-mode derivatives against the oracle's: of all inputs and of some, under every mask and variant, dense and packed, by
torch.func.jvp and by dual numbers.

The surprising fact: a tangent that is not there is not a tangent of zero. A kernel for zeros would give the right numbers and take three
times as long, so what the operator was given is asked too. Over 300 lines: every way to ask for a tangent meets every input that hurts.
"""

from collections import Counter
from itertools import combinations, product

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from flashattn import attention, eager
from flashattn.torch_ops import schemas
from support import STRIDES, WHERE, WHERE_DTYPE, dense, packed
from tangents import Moved, attend, check_jvp, compare_jvp, expected_jvp, jvp, tangents_of
from test_variants import EAGER, GPU, HALF, INTERPRETER, MASKS, VARIANTS, sized, some

pytestmark = pytest.mark.thinned(3)

SMALL = {INTERPRETER: {"seqlen_q": 5, "seqlen_k": 9}}
SUBSETS = ["".join(names) for n in range(1, 5) for names in combinations("qkvs", n)]


def small(impl, device, *args, **changes):
    return sized(impl, device, *args, **(SMALL.get((impl, device), {}) | changes))


class Asked(TorchDispatchMode):
    """The arguments of the library's operators, by their names."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "flashattn":
            names = [argument.name for argument in func._schema.arguments]
            self.calls.append((func._opname, dict(zip(names, args, strict=False))))
        return func(*args, **(kwargs or {}))


# ------------------------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("kind", ["dense", "packed"])
@pytest.mark.parametrize("variant", ["plain", *VARIANTS])
@pytest.mark.parametrize("impl, device, dtype", WHERE_DTYPE)
def test_variants_under_masks(impl, device, dtype, variant, kind):
    extras, options = VARIANTS.get(variant, ({}, {}))
    turn = len(variant) + (kind == "packed") + 2 * (dtype == torch.float32)
    for mask in some(MASKS, (impl, device), turn, dtype):
        data = sized(impl, device, kind, extras, dtype=dtype)
        check_jvp(data, tangents_of(data), impl, **options, **mask)


@pytest.mark.parametrize("kind", ["dense", "packed"])
@pytest.mark.parametrize("which", SUBSETS)
@pytest.mark.parametrize("impl, device", WHERE)
def test_some_tangents_and_no_others(impl, device, which, kind):
    """The right numbers, and nothing given to the operator for what has none."""
    if (impl, device) == INTERPRETER and kind == "packed" and len(which) > 1:
        pytest.skip("dense ones take all branches")
    extras, options = VARIANTS["all"]
    data = small(impl, device, kind, extras)
    moving = tangents_of(data, which)
    with Asked() as asked:
        check_jvp(data, moving, impl, causal=True, **options)
    [(name, given)] = asked.calls
    assert name == "attn_jvp"
    assert {side for side in "qkvs" if given["tsinks" if side == "s" else f"t{side}"] is not None} == set(which)


@pytest.mark.parametrize("dim, dim_v", [(72, 40), (113, 24), (16, 1)])
@pytest.mark.parametrize("impl, device", WHERE)
def test_head_dims(impl, device, dim, dim_v):
    data = small(impl, device, dim=dim, dim_v=dim_v)
    check_jvp(data, tangents_of(data), impl, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_head_dims_of_every_row_of_the_table(dim, dtype):
    for kind, mask in product(("dense", "packed"), ({}, {"causal": True}, {"window": (100, 0)})):
        data = sized(*GPU, kind, dim=dim, dtype=dtype, heads=8, heads_kv=2, seqlen_q=1000, seqlen_k=1536)
        check_jvp(data, tangents_of(data), "portable", **mask)
        data = sized(*GPU, kind, dim=dim, dtype=dtype, heads=4, heads_kv=4, seqlen_q=1024, seqlen_k=1024)
        check_jvp(data, tangents_of(data), "portable", **mask)


@pytest.mark.parametrize("heads, heads_kv", [(4, 4), (6, 1), (6, 3)])
@pytest.mark.parametrize("impl, device", WHERE)
def test_grouped_heads(impl, device, heads, heads_kv):
    data = small(impl, device, heads=heads, heads_kv=heads_kv)
    check_jvp(data, tangents_of(data), impl, causal=True)


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("impl, device", WHERE)
def test_strides_of_tangents(impl, device, strides):
    """Whatever the strides of the inputs."""
    data = small(impl, device, batch=2)
    moving = tangents_of(data)
    laid_out = {name: STRIDES[strides](x) for name, x in moving.items()}
    check_jvp(data, laid_out, impl, causal=True)
    if strides in ("expanded_batch", "expanded_heads", "scalar"):
        return  # torch makes no dual number of a tensor that is expanded
    swapped = data.with_(**{name: STRIDES[strides](getattr(data, name)) for name in "qkv"})
    check_jvp(swapped, moving, impl, causal=True)


@pytest.mark.parametrize("impl, device", WHERE)
def test_another_layout(impl, device):
    data = small(impl, device, batch=2)
    moving = tangents_of(data)
    assert same(jvp(data, moving, impl, layout="bhsd"), check_jvp(data, moving, impl))


def same(a: Moved, b: Moved) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("scale", [-0.4, 0.0, 1e-30, 3.0])
@pytest.mark.parametrize("variant", ["plain", *VARIANTS])
@pytest.mark.parametrize("impl, device", WHERE)
def test_scales(impl, device, variant, scale):
    extras, options = VARIANTS.get(variant, ({}, {}))
    for dtype in {HALF[impl, device], torch.float32}:
        data = small(impl, device, extras=extras, dtype=dtype)
        check_jvp(data, tangents_of(data), impl, **options, softmax_scale=scale, causal=True)


@pytest.mark.parametrize("times", [0.01, 1.0, 20.0])
@pytest.mark.parametrize("impl, device, dtype", WHERE_DTYPE)
def test_scores_from_far_below_a_cap_to_far_above(impl, device, dtype, times):
    data = small(impl, device, dtype=dtype)
    data.q.mul_(10.0 * times**0.5)
    data.k.mul_(times**0.5)
    check_jvp(data, tangents_of(data), impl, softcap=10.0, causal=True, peer_dtype=torch.float32)


@pytest.mark.parametrize("impl, device", WHERE)
def test_large_scores(impl, device):
    """Of 1e5: lse is rounded to 1e-2 there, and would be of no use to a pass that rebuilt the probabilities from it."""
    data = small(impl, device, dtype=torch.float32)
    data.q.mul_(300.0)
    data.k.mul_(300.0)
    check_jvp(data, tangents_of(data), impl, causal=True)


@pytest.mark.parametrize("sizes", [(1000, 8), (1, 1)], ids=str)
@pytest.mark.parametrize("variant", ["plain", *VARIANTS])
def test_the_fallback_in_many_chunks(variant, sizes, monkeypatch):
    monkeypatch.setattr(eager, "CHUNK_SCORES", sizes[0])
    monkeypatch.setattr(eager, "MIN_ROWS", sizes[1])
    extras, options = VARIANTS.get(variant, ({}, {}))
    for kind, mask in product(("dense", "packed"), MASKS[1:3]):
        data = sized(*EAGER, kind, extras, seqlen_q=40, seqlen_k=30)
        check_jvp(data, tangents_of(data), "eager", **options, **mask)


# --------------------------------------------------------------------------------------------------------------- what is not there


@pytest.mark.parametrize("extras", [{}, {"sinks": 0.0}], ids=["plain", "sinks"])
@pytest.mark.parametrize("kind", ["dense", "packed"])
@pytest.mark.parametrize("impl, device", WHERE)
def test_rows_without_keys(impl, device, kind, extras):
    """They don't move, but with a sink, whose tangent is that of their lse."""
    data = sized(impl, device, kind, extras, seqlen_q=20, seqlen_k=9)
    for mask in ({"causal": True}, {"causal": "top-left", "window": (3, None)}):
        check_jvp(data, tangents_of(data), impl, **mask)


@pytest.mark.parametrize("shape", [(0, 5, 7), (2, 0, 7), (2, 5, 0), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("impl, device", WHERE)
def test_lengths_of_zero_and_one(impl, device, shape):
    batch, rows_q, rows_k = shape
    data = sized(impl, device, extras={"sinks": 0.0}, batch=batch, seqlen_q=rows_q, seqlen_k=rows_k)
    check_jvp(data, tangents_of(data), impl, causal=True)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("impl, device", WHERE)
def test_tangents_of_masked_keys_and_of_no_row_are_never_seen(impl, device, value):
    """A key that no row keeps, here the last two under a window, may move by anything; so may rows past the end of a packed batch."""
    data = small(impl, device, seqlen_q=5, seqlen_k=9)
    mask = {"causal": "top-left", "window": (4, 0)}
    moving = tangents_of(data)
    first = check_jvp(data, moving, impl, **mask)
    moving["k"][:, 5:] = value
    assert same(first, jvp(data, moving, impl, **mask))
    lens = [5, 0, 3], [7, 2, 1]
    data = packed(*lens, tail_q=4, tail_k=6, heads=3, heads_kv=1, dim=24, dtype=HALF[impl, device], device=device)
    moving = tangents_of(data)
    assert moving["q"].isnan().any() and moving["v"].isnan().any()
    found = check_jvp(data, moving, impl, causal=True)
    assert not found.tout[-4:].any() and not found.tlse[:, -4:].any()


# ------------------------------------------------------------------------------------------------------------------ ways to ask for it


@pytest.fixture
def ran(monkeypatch):
    """How often a kernel of which direction was chosen and run."""
    counts, select = Counter(), schemas.select
    monkeypatch.setattr(schemas, "select", lambda problem, direction, impl: counts.update([direction]) or select(problem, direction, impl))
    return counts


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", ["dense", "packed"])
@pytest.mark.parametrize("impl, device", WHERE)
def test_dual_numbers(impl, device, kind, grad, ran):
    """One kernel gives out and its tangent, and none runs for nothing; whether or not gradients are wanted too."""
    data = small(impl, device, kind, {"sinks": 0.0})
    moving = tangents_of(data)
    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(getattr(data, name).detach().requires_grad_(grad), x) for name, x in moving.items()}
        (out, tout), (lse, tlse) = map(forward_ad.unpack_dual, attend(data, impl, duals, causal=True))
        assert out.requires_grad == tout.requires_grad == grad
    assert ran == {"tangent": 1}
    assert same(Moved(out, lse, tout, tlse), jvp(data, moving, impl, causal=True))
    assert ran == {"tangent": 2}
    compare_jvp(Moved(out, lse, tout, tlse), *expected_jvp(data, moving, causal=True), data.q.dtype)


def test_out_without_lse_and_no_grad_and_inference():
    data = sized(*EAGER)
    q, tq = data.q, tangents_of(data)["q"]
    call = lambda q: attention(q, data.k, data.v, impl="eager")  # noqa: E731
    out, tout = torch.func.jvp(call, (q,), (tq,))
    with torch.no_grad(), forward_ad.dual_level():
        again = forward_ad.unpack_dual(call(forward_ad.make_dual(q, tq)))
    assert torch.equal(again.primal, out) and torch.equal(again.tangent, tout) and tout.any()
    with forward_ad.dual_level():
        assert forward_ad.unpack_dual(call(q)).tangent is None, "without a tangent there comes none"


@pytest.mark.parametrize("impl, device", [WHERE[0], WHERE[2]])
def test_what_carries_duals_through_a_layer(impl, device):
    """Projections before and after, one fused: tangents arrive as views with strides of their own, and of a mixed dtype under autocast."""
    generator = torch.Generator(device).manual_seed(0)
    weight, x, tx = (torch.randn(shape, generator=generator, device=device) for shape in ((3 * 32, 32), (2, 20, 32), (2, 20, 32)))

    def layer(call, x):
        q, k, v = (x @ weight.T / 6).view(2, 20, 3, 4, 8).unbind(2)
        return call(q, k, v).flatten(-2) @ weight[:32]

    ours = lambda q, k, v: attention(q, k, v, causal=True, impl=impl)  # noqa: E731
    naive = lambda q, k, v: attend(dense(1, dtype=torch.float32), "reference", {"q": q, "k": k, "v": v}, causal=True)[0]  # noqa: E731
    found, expected = (torch.func.jvp(lambda x, call=call: layer(call, x), (x,), (tx,)) for call in (ours, naive))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    with torch.autocast(device, torch.bfloat16):
        half = torch.func.jvp(lambda x: layer(ours, x), (x,), (tx,))
    torch.testing.assert_close(half[1].float(), expected[1], rtol=0.1, atol=0.1 * expected[1].abs().max().item())


def test_deterministic_mode_and_checkpointing():
    data = sized(*EAGER)
    moving = tangents_of(data)
    expected = jvp(data, moving, "eager", causal=True)
    torch.use_deterministic_algorithms(True)
    try:
        assert same(expected, jvp(data, moving, "eager", causal=True))
    finally:
        torch.use_deterministic_algorithms(False)
    # the usual way to train on a tangent: it is detached, and the gradient flows through out
    leaves = [getattr(data, name).detach().requires_grad_() for name in "qkv"]

    def block(q, k, v):
        (out, lse), (tout, _) = torch.func.jvp(
            lambda *x: attend(data, "eager", dict(zip("qkv", x, strict=True)), causal=True),
            (q, k, v),
            tuple(moving[name] for name in "qkv"),
        )
        return (out - tout.detach()).float().square().sum() + lse.sum()

    alone = torch.autograd.grad(block(*leaves), leaves)
    again = torch.autograd.grad(checkpoint(block, *leaves, use_reentrant=False), leaves)
    assert all(torch.equal(a, b) for a, b in zip(alone, again, strict=True))
    out, lse = attend(data, "eager", dict(zip("qkv", leaves, strict=True)), causal=True)
    loss = (out - expected.tout).float().square().sum() + lse.sum()
    for a, b in zip(alone, torch.autograd.grad(loss, leaves), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("impl, device", WHERE)
def test_two_runs_give_the_same_bits(impl, device):
    data = small(impl, device, "dense", VARIANTS["all"][0])
    moving = tangents_of(data)
    assert same(jvp(data, moving, impl, softcap=2.0), jvp(data, moving, impl, softcap=2.0))


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_hopper_leaves_tangents_to_the_portable_kernel(dim):
    """out beside a tangent is another kernel's than out alone, and as near to the oracle; asked for by name as well."""
    data = sized(*GPU, dim=dim)
    moving = tangents_of(data)
    for impl in (None, "hopper") if torch.cuda.get_device_capability() == (9, 0) else (None,):
        assert same(check_jvp(data, moving, impl, causal=True), jvp(data, moving, "portable", causal=True))


@pytest.mark.gpu
def test_memory_is_linear_in_length():
    def peak(rows):
        data = dense(rows, heads=8, dim=64, dtype=torch.bfloat16, device="cuda")
        moving = tangents_of(data)
        jvp(data, moving, "portable", causal=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        jvp(data, moving, "portable", causal=True)
        return torch.cuda.max_memory_allocated() - before

    assert peak(8192) <= 2 * peak(4096) + (1 << 20)


