"""Any strides in, and tensors too large for 32 bits or for one grid dimension.

Strided inputs are views of storages that are NaN elsewhere. What is too large for the oracle is compared with it in parts that nothing
outside of them has a say in: batch entries, heads, packed sequences, and stretches of rows under a window.

The surprising fact: an offset beyond 2^31 needs no tensor of that many elements, only a view with strides that are large enough. But
what the library allocates is contiguous, so its own offsets need the elements.
"""

import pytest
import torch

from flashattn import attention
from support import STRIDES, WHERE, Data, Expected, Results, check, compare, dense, expect, packed, run, same_bits

pytestmark = pytest.mark.thinned(2)

EAGER, INTERPRETER, GPU = ("eager", "cpu"), ("portable", "cpu"), ("portable", "cuda")
SIZES = {
    EAGER: {"seqlen_q": 30, "seqlen_k": 70, "batch": 2, "heads": 4, "heads_kv": 2, "dim": 24, "dtype": torch.bfloat16},
    INTERPRETER: {"seqlen_q": 5, "seqlen_k": 9, "batch": 2, "heads": 2, "heads_kv": 1, "dim": 24, "dtype": torch.float16},
    GPU: {"seqlen_q": 301, "seqlen_k": 703, "batch": 2, "heads": 4, "heads_kv": 2, "dim": 64, "dtype": torch.bfloat16},
}


def sized(impl, device, **changes):
    return dense(**{"device": device, **SIZES[impl, device], **changes})


# ------------------------------------------------------------------------------------------------------------------------ strides


@pytest.mark.parametrize("name", STRIDES)
@pytest.mark.parametrize("impl, device", WHERE)
def test_any_strides(impl, device, name):
    data = sized(impl, device, strides=name)
    before = [x.clone() for x in (data.q, data.k, data.v)]
    check(data, impl, causal=True)
    assert all(torch.equal(x, y) for x, y in zip((data.q, data.k, data.v), before, strict=True)), "an input was written to"


@pytest.mark.parametrize("strides", [
    {"q": "fused", "k": "heads_first", "v": "every_second_row"},
    {"q": "expanded_batch", "k": "odd_offset", "v": "dim_not_last"},
    {"q": "padded_dim", "k": "expanded_heads", "v": "contiguous", "dout": "heads_first"},
    {"q": "heads_first", "k": "expanded_batch", "v": "scalar", "dout": "every_second_row"},
], ids=lambda strides: "-".join(strides.values()))  # fmt: skip
@pytest.mark.parametrize("impl, device", WHERE)
def test_each_tensor_with_strides_of_its_own(impl, device, strides):
    check(sized(impl, device, strides=strides), impl, causal=True)


@pytest.mark.parametrize("name", STRIDES)
@pytest.mark.parametrize("impl, device", WHERE)
def test_any_strides_of_the_incoming_gradient(impl, device, name):
    data = sized(impl, device, strides={"dout": name})
    check(data.with_(dlse=data.dlse.transpose(1, 2).contiguous().transpose(1, 2)), impl, causal=True)


@pytest.mark.parametrize("impl, device", WHERE)
def test_the_gradient_of_a_sum(impl, device):
    """sum().backward() sends one number with all strides 0."""
    data = sized(impl, device)
    one = torch.ones((), device=device)
    data = data.with_(dout=one.to(data.q.dtype).expand(data.dout.shape), dlse=one.expand(data.dlse.shape))
    expected = check(data, impl, causal=True)
    inputs = [x.detach().requires_grad_() for x in (data.q, data.k, data.v)]
    out, lse = attention(*inputs, causal=True, impl=impl, return_lse=True)
    (out.sum() + lse.sum()).backward()
    assert same_bits(expected, Results(out.detach(), lse.detach(), *(x.grad for x in inputs)))


@pytest.mark.parametrize("impl, device", WHERE)
def test_slices_of_a_fused_projection(impl, device):
    data = sized(impl, device)
    batch, rows, heads, dim = data.k.shape
    generator = torch.Generator(device).manual_seed(1)
    for order in ("three first", "heads first"):
        shape = (batch, rows, 3, heads, dim) if order == "three first" else (batch, rows, heads, 3, dim)
        qkv = torch.randn(shape, generator=generator, device=device).to(data.q.dtype)
        q, k, v = qkv.unbind(shape.index(3))
        dout = torch.randn(batch, heads, rows, dim, generator=generator, device=device).to(q.dtype).transpose(1, 2)
        dlse = torch.ones((), device=device).expand(batch, heads, rows)
        check(Data(q, k, v, dout, dlse), impl, causal=True)
        check(Data(q[:, ::2], k, v, dout[:, ::2], dlse[..., ::2]), impl, window=(3, 5))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("impl, device", WHERE)
def test_a_query_against_part_of_a_cache(impl, device, layout):
    """One row of queries, and keys that are the used beginning of a longer buffer; the rest is NaN."""
    used = 70 if device == "cpu" else 1500
    cache = sized(impl, device, seqlen_q=1, seqlen_k=used + 60, used_k=used, strides="heads_first" if layout == "bhsd" else "contiguous")
    assert cache.k[:, used:].isnan().all()
    check(cache.with_(k=cache.k[:, :used], v=cache.v[:, :used]), impl, layout=layout, causal=True)


@pytest.mark.parametrize("name", ["heads_first", "fused", "every_second_row", "padded_dim", "odd_offset", "dim_not_last", "expanded_heads"])
@pytest.mark.parametrize("impl, device", WHERE)
def test_any_strides_of_packed_tensors(impl, device, name):
    options = {name: size for name, size in SIZES[impl, device].items() if name in ("heads", "heads_kv", "dim", "dtype")}
    check(packed([5, 0, 30, 1], [7, 3, 20, 0], device=device, strides=name, **options), impl, causal=True)


# -------------------------------------------------------------------------------------------------------------------- large offsets

BATCH, ROWS, HEADS, DIM = 3, 70, 3, 64
OFFSETS = {  # strides of [batch, rows, heads], elements
    "batch": (1 << 30, HEADS * DIM, DIM),
    "batch-64-bit": ((1 << 31) + 64, HEADS * DIM, DIM),
    "heads": (ROWS * DIM, DIM, 1 << 30),
    "rows": (HEADS * DIM, 1 << 25, DIM),
}


@pytest.mark.big(16)
@pytest.mark.parametrize("heads_kv", [HEADS, 1])
@pytest.mark.parametrize("name", OFFSETS)
def test_offsets_beyond_31_bits(name, heads_kv):
    small = dense(ROWS, batch=BATCH, heads=HEADS, heads_kv=heads_kv, dim=DIM, dtype=torch.bfloat16, device="cuda")
    span = sum((n - 1) * stride for n, stride in zip((BATCH, ROWS, HEADS), OFFSETS[name], strict=True)) + DIM
    assert span > 1 << 31
    apart = BATCH * ROWS * HEADS * DIM  # elements between the beginnings of q, k, v and dout, which therefore don't overlap
    storage = torch.full((span + 4 * apart,), float("nan"), dtype=torch.bfloat16, device="cuda")
    large = {}
    for i, tensor in enumerate(("q", "k", "v", "dout")):
        values = getattr(small, tensor)
        large[tensor] = storage.as_strided(values.shape, (*OFFSETS[name], 1), i * apart)
        large[tensor].copy_(values)
    check(small.with_(**large), "portable", causal=True)


# ------------------------------------------------------------------------------------------------------------------- large tensors


def large(batch, rows, heads, dim):
    """Drawn in bfloat16, where `dense` draws in float32: that would take three times the memory."""
    generator = torch.Generator("cuda").manual_seed(0)
    options = {"generator": generator, "device": "cuda"}
    q, k, v, dout = (torch.randn(batch, rows, heads, dim, dtype=torch.bfloat16, **options) for _ in range(4))
    return Data(q, k, v, dout, torch.randn(batch, heads, rows, **options))


def compare_part(data, results, batch=slice(None), heads=slice(None), **options):
    """Some batch entries and heads against the oracle; as many heads of queries as of keys."""
    wide = lambda x: x[batch][:, :, heads].clone()  # noqa: E731
    flat = lambda x: x[batch][:, heads].clone()  # noqa: E731
    part = Data(*(wide(x) for x in (data.q, data.k, data.v, data.dout)), flat(data.dlse))
    found = Results(wide(results.out), flat(results.lse), *(wide(x) for x in (results.dq, results.dk, results.dv)))
    compare(found, expect(part, **options), data.q.dtype)


def ends_and_middle(n, around, width=3):
    """Slices at both ends of n things, and around one of them."""
    return [slice(0, width), slice(around - 1, around - 1 + width), slice(n - width, n)]


@pytest.mark.gpu
@pytest.mark.parametrize("batch, heads, rows, dim", [
    (8300, 1, 16, 128),
    (70_000, 16, 1, 64),
    pytest.param(28_800, 15, 16, 72, marks=pytest.mark.big(30)),
])  # fmt: skip
def test_more_batch_entries_and_heads_than_a_grid_dimension_takes(batch, heads, rows, dim):
    data = large(batch, rows, heads, dim)
    results = run(data, "portable", causal=True)
    for at in ends_and_middle(batch, (1 << 16) // heads % batch):
        compare_part(data, results, batch=at, causal=True)


@pytest.mark.big(60)
@pytest.mark.parametrize("name, batch, heads", [("batch", 147_000, 4), ("heads", 1, 588_000)])
def test_more_than_2_31_elements(name, batch, heads):
    data = large(batch, 64, heads, 64)
    assert data.q.numel() > 1.1 * (1 << 31)
    results = run(data, "portable", causal=True)
    n = max(batch, heads)
    for at in ends_and_middle(n, around=n * (1 << 31) // data.q.numel()):
        compare_part(data, results, **{name: at}, causal=True)


@pytest.mark.big(60)
def test_more_than_2_31_elements_in_packed_sequences():
    rows, dim, length = 18_500_000, 128, 3000
    data = large(1, rows, 1, dim)
    assert data.q.numel() > 1.1 * (1 << 31)
    cu = torch.arange(0, rows, length, dtype=torch.int32, device="cuda")  # the last rows belong to no sequence
    flat = {name: getattr(data, name)[0] for name in ("q", "k", "v", "dout", "dlse")}
    found = run(Data(**flat, cu_q=cu, cu_k=cu), "portable", causal=True)
    results = Results(*(x[None] for x in found[:5]))
    for start in (0, (1 << 31) // dim // length * length, int(cu[-2])):
        compare_rows(data, results, slice(start, start + length), slice(0, length), causal=True)
    assert not any(x[:, int(cu[-1]) :].any() for x in (results.out, results.dq, results.dk, results.dv))


@pytest.mark.gpu
@pytest.mark.parametrize("rows, heads, dim, left", [
    (70_000, 16, 64, 1000),
    pytest.param(18_500_000, 1, 128, 100, marks=pytest.mark.big(60), id="more-than-2-31-elements"),
])  # fmt: skip
def test_one_long_sequence(rows, heads, dim, left):
    """Under a window, a stretch of rows depends on the `left` rows before it, for its keys, and after it, for its dk and dv."""
    data = large(1, rows, heads, dim)
    results = run(data, "portable", window=(left, 0))
    stretch = 200
    for first in (0, (1 << 31) // (heads * dim) % rows, rows - stretch):
        outer = slice(max(0, first - left), min(rows, first + stretch + left))
        inner = slice(first - outer.start, first - outer.start + stretch)
        compare_rows(data, results, outer, inner, window=(left, 0))


def compare_rows(data, results, outer, inner, **options):
    """The rows `inner` of the rows `outer`: the oracle is given the rows `outer` and no others."""

    def cut(found: Results, at: slice) -> Results:
        wide = [x if x is None else x[:, at] for x in (found.out, *found[2:])]
        return Results(wide[0], found.lse[:, :, at], *wide[1:])

    part = Data(*(x[:, outer] for x in (data.q, data.k, data.v, data.dout)), data.dlse[:, :, outer])
    expected = expect(part, **options)
    found = [cut(results, inner) for results in expected[:3]]
    compare(cut(cut(results, outer), inner), Expected(*found, expected.empty[:, :, inner], expected.unseen[:, inner]), data.q.dtype)
