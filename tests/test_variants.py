"""Softcap, ALiBi and sinks against the oracle: alone and together, under masks, in packed batches, with scales and numbers that hurt.

The surprising fact: a sink gives a row without keys a finite lse, by which such rows were known before; so each test of what must not
leak out of them is asked again here.
"""


from itertools import product

import pytest
import torch

from flashattn import attention, eager
from support import EPS32, WHERE, WHERE_DTYPE, check, dense, expect, packed, run, same_bits, with_extras

pytestmark = pytest.mark.thinned(3)

EAGER, INTERPRETER, GPU = ("eager", "cpu"), ("portable", "cpu"), ("portable", "cuda")
HALF = {EAGER: torch.bfloat16, INTERPRETER: torch.float16, GPU: torch.bfloat16}
SIZES = {
    EAGER: {"seqlen_q": 70, "seqlen_k": 130, "batch": 2, "heads": 6, "heads_kv": 2, "dim": 24},
    INTERPRETER: {"seqlen_q": 17, "seqlen_k": 70, "batch": 1, "heads": 3, "heads_kv": 1, "dim": 24},
    GPU: {"seqlen_q": 501, "seqlen_k": 1203, "batch": 2, "heads": 6, "heads_kv": 2, "dim": 64},
}
LENGTHS = {
    EAGER: ([100, 0, 7, 65, 30], [90, 3, 0, 130, 64]),
    INTERPRETER: ([20, 0, 7, 2], [70, 3, 0, 1]),
    GPU: ([1000, 0, 7, 513, 300], [900, 3, 0, 1300, 64]),
}
# Tensors, and numbers that are options
VARIANTS = {
    "softcap": ({}, {"softcap": 1.5}),
    "alibi": ({"slopes": "head"}, {}),
    "sinks": ({"sinks": 0.0}, {}),
    "softcap-alibi": ({"slopes": "entry"}, {"softcap": 0.8}),
    "all": ({"slopes": "entry", "sinks": 0.5}, {"softcap": 2.0}),
}
MASKS = ({}, {"causal": True}, {"causal": "top-left", "window": (9, None)}, {"window": (20, 5)})


def sized(impl, device, kind="dense", extras=None, **changes):
    size = {"dtype": HALF[impl, device], "device": device, **SIZES[impl, device], **changes}
    if kind == "packed":
        size = {name: x for name, x in size.items() if name not in ("seqlen_q", "seqlen_k", "batch")}
        return with_extras(packed(*LENGTHS[impl, device], **size, tail_q=5, tail_k=3), **(extras or {}))
    return with_extras(dense(**size), **(extras or {}))


def some(masks, where, turn, dtype=torch.bfloat16):
    """The interpreter has time for one of them; on a GPU each compiles kernels of its own."""
    count = {EAGER: len(masks), INTERPRETER: 1, GPU: 2 if dtype == torch.bfloat16 else 1}[where]
    return [masks[(turn + n) % len(masks)] for n in range(count)]


@pytest.mark.parametrize("kind", ["dense", "packed"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("impl, device, dtype", WHERE_DTYPE)
def test_variants_under_masks(impl, device, dtype, variant, kind):
    extras, options = VARIANTS[variant]
    turn = list(VARIANTS).index(variant) + (kind == "packed") + 2 * (dtype == torch.float32)
    for mask in some(MASKS, (impl, device), turn, dtype):
        check(sized(impl, device, kind, extras, dtype=dtype), impl, **options, **mask)


@pytest.mark.parametrize("sizes", [(1000, 8), (1, 1)], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_fallback_in_many_chunks(variant, sizes, monkeypatch):
    """Of rows, of heads and of batch entries."""
    monkeypatch.setattr(eager, "CHUNK_SCORES", sizes[0])
    monkeypatch.setattr(eager, "MIN_ROWS", sizes[1])
    extras, options = VARIANTS[variant]
    for kind, mask in product(("dense", "packed"), MASKS[1:3]):
        check(sized(*EAGER, kind, extras, seqlen_q=40, seqlen_k=30), "eager", **options, **mask)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("impl, device", WHERE)
def test_more_queries_than_keys(impl, device, variant):
    """Rows without keys; with top-left ALiBi keeps its diagonal, which then is not the mask's."""
    extras, options = VARIANTS[variant]
    rows = SIZES[impl, device]["seqlen_k"], SIZES[impl, device]["seqlen_q"]
    for mask in some([{"causal": True}, {"causal": "top-left", "window": (5, None)}], (impl, device), list(VARIANTS).index(variant)):
        check(sized(impl, device, extras=extras, seqlen_q=rows[0], seqlen_k=rows[1]), impl, **options, **mask)


@pytest.mark.parametrize("scale", [-0.4, 0.0, 1e-30])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("impl, device", WHERE)
def test_scales(impl, device, variant, scale):
    extras, options = VARIANTS[variant]
    rows = {"seqlen_q": 5, "seqlen_k": 9} if (impl, device) == INTERPRETER else {}
    results = check(sized(impl, device, extras=extras, **rows), impl, **options, softmax_scale=scale, causal=True)
    if scale == 0.0:
        assert not results.dq.any() and not results.dk.any()


@pytest.mark.parametrize("dim", [72, 113])
@pytest.mark.parametrize("impl, device", WHERE)
def test_head_dims(impl, device, dim):
    rows = {"seqlen_q": 5, "seqlen_k": 9} if (impl, device) == INTERPRETER else {}
    extras, options = VARIANTS["all"]
    check(sized(impl, device, extras=extras, dim=dim, dim_v=40, **rows), impl, **options, causal=True)


# ----------------------------------------------------------------------------------------------------------------------- softcap


@pytest.mark.parametrize("times", [0.01, 1.0, 20.0])
@pytest.mark.parametrize("impl, device, dtype", WHERE_DTYPE)
def test_scores_from_far_below_a_cap_to_far_above(impl, device, dtype, times):
    data = sized(impl, device, dtype=dtype)
    data.q.mul_(10.0 * times**0.5)
    data.k.mul_(times**0.5)
    for cap in (10.0, 15.0):
        check(data, impl, softcap=cap, causal=True, peer_dtype=torch.float32)


@pytest.mark.parametrize("cap", [1e-38, 1e-20, 1e4, 1e20, 1e30])
@pytest.mark.parametrize("impl, device", WHERE)
def test_caps_of_any_size(impl, device, cap):
    """A huge one is none, and a tiny one makes all scores equal, as far as float32 can tell."""
    rows = {"seqlen_q": 5, "seqlen_k": 9} if (impl, device) == INTERPRETER else {}
    data = sized(impl, device, dtype=torch.float32, **rows)
    check(data, impl, softcap=cap, causal=True)
    check(with_extras(data, slopes="head"), impl, softcap=cap, causal=True)


@pytest.mark.parametrize("caps", [(1e-300, 1e-37), (1e300, 1e20)])
@pytest.mark.parametrize("impl, device", WHERE)
def test_caps_past_float32_are_the_last_within(impl, device, caps):
    """Where the naive formula itself overflows, or is 0 times infinity."""
    rows = {"seqlen_q": 5, "seqlen_k": 9} if (impl, device) == INTERPRETER else {}
    data = sized(impl, device, extras={"slopes": "head"}, **rows)
    past, within = (run(data, impl, softcap=cap) for cap in caps)
    assert same_bits(past, within)


@pytest.mark.parametrize("impl, device", WHERE)
def test_no_cap(impl, device):
    data = sized(impl, device)
    expected = run(data, impl)
    for cap in (None, 0, 0.0):
        assert same_bits(run(data, impl, softcap=cap), expected)


# ------------------------------------------------------------------------------------------------------------------------- alibi


@pytest.mark.parametrize("impl, device", WHERE)
def test_slopes_of_zero_and_slopes_of_entries(impl, device):
    """A slope of 0 costs nothing; slopes that are the same for every entry may be given once."""
    data = sized(impl, device)
    heads, batch = data.q.shape[2], data.q.shape[0]
    zero, plain = check(data.with_(slopes=torch.zeros(heads, device=device)), impl), expect(data)
    error = (zero.lse.double() - plain.oracle.lse).abs().amax()
    assert error < 1e-4
    slopes = torch.rand(heads, device=device)
    expanded = data.with_(slopes=slopes.expand(batch, heads))
    assert same_bits(run(data.with_(slopes=slopes), impl), run(expanded, impl))


@pytest.mark.parametrize("impl, device", WHERE)
def test_alibi_is_one_more_dimension_under_a_causal_mask(impl, device):
    """Where no key is ahead, -slope |i + d - j| is a constant of the row and slope * j: a dimension in which q is slope and k is j."""
    data = sized(impl, device, dtype=torch.float32, heads=1, heads_kv=1, seqlen_q=30, seqlen_k=50, dim=15)
    slope = torch.tensor([0.25], device=device)
    wide = torch.cat([data.q, torch.full_like(data.q[..., :1], 0.25)], -1)
    keys = torch.arange(50, device=device, dtype=torch.float32)[None, :, None, None].expand(*data.k.shape[:-1], 1)
    options = {"causal": True, "softmax_scale": 1.0}
    found = run(data.with_(slopes=slope), impl, **options)
    other = run(data.with_(q=wide, k=torch.cat([data.k, keys], -1)), impl, **options)
    torch.testing.assert_close(found.out, other.out, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.dv, other.dv, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("impl, device", WHERE)
def test_steep_slopes_leave_the_diagonal(impl, device):
    data = sized(impl, device, seqlen_q=40, seqlen_k=70)
    data = data.with_(slopes=torch.full((data.q.shape[2],), 1e4, device=device))
    results = check(data, impl, peer_dtype=torch.float32)
    group = data.q.shape[2] // data.k.shape[2]
    assert torch.equal(results.out, data.v[:, 30:].repeat_interleave(group, dim=2))


# ------------------------------------------------------------------------------------------------------------------------- sinks


@pytest.mark.parametrize("impl, device", WHERE)
def test_sinks_of_minus_infinity_are_none(impl, device):
    for kind in ("dense", "packed"):
        data = sized(impl, device, kind)
        none = data.with_(sinks=torch.full((data.q.shape[-2],), -torch.inf, device=device))
        found = run(none, impl, causal=True)
        assert same_bits(found._replace(dsinks=None), run(data, impl, causal=True)) or impl == "eager"
        check(none, impl, causal=True)
        assert torch.equal(found.dsinks, torch.zeros_like(none.sinks))


@pytest.mark.parametrize("sink", [1e4, -1e4, 90.0])
@pytest.mark.parametrize("impl, device, dtype", WHERE_DTYPE)
def test_large_sinks(impl, device, dtype, sink):
    """1e4 leaves the keys nothing, -1e4 nothing to the sink but rows without keys."""
    rows = {"seqlen_q": 20, "seqlen_k": 9}
    data = sized(impl, device, dtype=dtype, extras={"sinks": sink}, **rows)
    results = check(data, impl, causal=True)
    assert results.lse.isfinite()[:, :2].all()
    if sink == 1e4:
        assert not results.out[:, :, :2].any()
    assert torch.equal(results.out[:, :11], torch.zeros_like(results.out[:, :11]))
    rows_lse = results.lse[:, :2, :11]
    assert ((rows_lse - data.sinks[None, :2, None]).abs() <= 2 * EPS32 * rows_lse.abs()).all()


@pytest.mark.parametrize("impl, device", WHERE)
def test_a_sink_is_a_key_of_value_zero(impl, device):
    """In a dimension of its own, where queries are 1 and the key is the sink."""
    data = sized(impl, device, dtype=torch.float32, heads=1, heads_kv=1, batch=1, dim=15)
    data = data.with_(sinks=torch.tensor([0.7], device=device))
    q = torch.cat([data.q, torch.ones_like(data.q[..., :1])], -1)
    k = torch.cat([torch.nn.functional.pad(data.k, (0, 1)), torch.zeros_like(q[:, :1])], 1)
    k[:, -1, :, -1] = 0.7
    v = torch.nn.functional.pad(data.v, (0, 0, 0, 0, 0, 1))
    found, other = (run(x, impl, softmax_scale=1.0) for x in (data, data.with_(q=q, k=k, v=v, sinks=None)))
    for name in ("out", "lse"):
        torch.testing.assert_close(getattr(found, name), getattr(other, name), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.dsinks, other.dk[0, -1, :, -1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("impl, device", WHERE)
def test_no_keys_at_all(impl, device):
    data = sized(impl, device, extras={"sinks": 0.0, "slopes": "head"}, seqlen_k=0)
    results = check(data, impl)
    rows = data.dlse.sum((0, 2)).masked_fill(data.sinks == -torch.inf, 0.0)
    torch.testing.assert_close(results.dsinks, rows)
    assert same_bits(run(data.with_(dout=torch.full_like(data.dout, torch.nan)), impl), results)


@pytest.mark.parametrize("kind", ["dense", "packed"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("impl, device", WHERE)
def test_rows_without_keys_may_be_sent_anything(impl, device, value, kind):
    """By dout; not a bit changes, in the sinks' gradient neither. By dlse it is the sinks that are owed it, and nobody else."""
    rows = {"seqlen_q": 20, "seqlen_k": 9} if (impl, device) == INTERPRETER else {"seqlen_q": 90, "seqlen_k": 70}
    data = sized(impl, device, kind, {"sinks": 0.0}, **rows)
    # without a mask it is a packed sequence that has rows and no keys
    for mask in ({"causal": True}, {} if kind == "packed" else {"causal": "top-left", "window": (3, None)}):
        first = check(data, impl, **mask)
        empty = expect(data, **mask).empty.expand(data.dlse.shape)
        assert empty.any() and not empty.all()
        other = data.with_(dout=data.dout.masked_fill(empty.transpose(-1, -2)[..., None], value))
        assert same_bits(first, run(other, impl, **mask))
        owed = run(data.with_(dlse=data.dlse.masked_fill(empty, value)), impl, **mask)
        assert same_bits(first._replace(dsinks=None), owed._replace(dsinks=None))
        assert not owed.dsinks[:2].isfinite().any() and owed.dsinks[2] == first.dsinks[2]


@pytest.mark.parametrize("grads", ["s", "qs", "ks", "vs", "q", "kv", ""])
@pytest.mark.parametrize("kind", ["dense", "packed"])
@pytest.mark.parametrize("impl, device", WHERE)
def test_only_the_gradients_asked_for(impl, device, grads, kind):
    rows = {"seqlen_q": 5, "seqlen_k": 9} if (impl, device) == INTERPRETER else {}
    extras, options = VARIANTS["all"]
    data = sized(impl, device, kind, extras, **rows)
    results = check(data, impl, grads=grads, causal=True, **options)
    assert [x is not None for x in results[2:]] == [name in grads for name in "qkvsb"]


@pytest.mark.parametrize("lse_grad", [True, False])
@pytest.mark.parametrize("impl, device", WHERE)
def test_gradients_of_out_alone_and_of_lse_alone(impl, device, lse_grad):
    data = sized(impl, device, extras={"sinks": 0.0})
    check(data, impl, lse_grad=lse_grad)
    if lse_grad:
        leaf = data.sinks.clone().requires_grad_()
        _, lse = attention(data.q, data.k, data.v, sinks=leaf, return_lse=True, impl=impl)
        (found,) = torch.autograd.grad(lse, leaf, data.dlse)
        share = torch.exp(leaf[:, None] - lse).detach()
        torch.testing.assert_close(found, (share * data.dlse).sum((0, 2)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("impl, device", WHERE)
def test_sinks_in_the_dtype_of_q_get_a_gradient_of_it(impl, device):
    data = sized(impl, device, extras={"sinks": 0.0})
    half = data.with_(sinks=data.sinks.to(data.q.dtype))
    found, wide = run(half, impl, causal=True), run(half.with_(sinks=half.sinks.float()), impl, causal=True)
    assert found.dsinks.dtype == data.q.dtype and torch.equal(found.dsinks, wide.dsinks.to(data.q.dtype))
    assert same_bits(found._replace(dsinks=None), wide._replace(dsinks=None))


@pytest.mark.parametrize("impl, device", WHERE)
def test_two_runs_and_two_layouts_give_the_same_bits(impl, device):
    extras, options = VARIANTS["all"]
    for kind in ("dense", "packed"):
        data = sized(impl, device, kind, extras)
        first = run(data, impl, causal=True, **options)
        assert same_bits(first, run(data, impl, causal=True, **options))
    data = sized(impl, device, extras=extras)
    assert same_bits(run(data, impl, **options, layout="bhsd"), run(data, impl, **options))
