"""An additive bias and boolean masks against the oracle: every broadcast, dtype and stride, under masks and beside the other variants, and
the numbers that masks are made of. Over 300 lines, since all that is asked of a bias shares its inputs.

The surprising fact: a row of nothing but -1e9 tells nothing by its lse, whose float32 has no place left for ln N. So what comes back from
such rows is asked of float32, where they are an average, and of kernels that know only lse it would be N times too much.
"""

import math

import pytest
import torch

from flashattn import attention, eager, explain
from flashattn.reference import attention_reference
from support import WHERE, WHERE_DTYPE, check, dense, expect, run, same_bits, with_extras
from test_variants import EAGER, GPU, HALF, INTERPRETER

pytestmark = pytest.mark.thinned(3)

SIZES = {
    EAGER: {"seqlen_q": 43, "seqlen_k": 77, "batch": 2, "heads": 6, "heads_kv": 2, "dim": 24},
    INTERPRETER: {"seqlen_q": 7, "seqlen_k": 21, "batch": 2, "heads": 2, "heads_kv": 1, "dim": 8},
    GPU: {"seqlen_q": 301, "seqlen_k": 703, "batch": 2, "heads": 6, "heads_kv": 2, "dim": 64},
}
# of [batch, heads, rows, keys]: 1 where it is shared, and fewer dimensions
SHAPES = {
    "full": "bhqk", "entries": "1hqk", "heads": "b1qk", "both": "qk", "rows": "bh1k", "keys": "bhq1", "padding": "b11k", "per head": "h11",
    "all": "",
}  # fmt: skip
MASKS = ({}, {"causal": True}, {"causal": "top-left", "window": (9, None)}, {"window": (20, 5)})
TYPES = (torch.float32, torch.bfloat16, torch.float16)


def sized(impl, device, shape="1hqk", dtype=None, bias_dtype=torch.float32, seed=7, **changes):
    """Inputs with a normal bias of a shape in letters; of booleans one that takes a third of the keys, and all of the second row's."""
    extras = {name: changes.pop(name) for name in ("slopes", "sinks") if name in changes}
    size = {"dtype": dtype or HALF[impl, device], "device": device, **SIZES[impl, device], **changes}
    data = with_extras(dense(**size), **extras)
    sizes = {"b": size["batch"], "h": size["heads"], "q": size["seqlen_q"], "k": size["seqlen_k"], "1": 1}
    numbers = torch.randn([sizes[letter] for letter in shape], generator=torch.Generator(device).manual_seed(seed), device=device)
    if bias_dtype == torch.bool:
        numbers = numbers < 0.5
        if "q" in shape:
            numbers[..., 1, :] = False
    return data.with_(bias=numbers.to(bias_dtype))


def turn(options, *keys):
    """One of the options, another for each of neighbouring tests."""
    return options[sum(keys) % len(options)]


@pytest.mark.parametrize("bias_dtype", [*TYPES, torch.bool], ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("impl, device", WHERE)
def test_every_broadcast(impl, device, shape, bias_dtype):
    place = list(SHAPES.values()).index(shape), [*TYPES, torch.bool].index(bias_dtype)
    dtype = turn([HALF[impl, device], torch.float32], *place)
    found = check(sized(impl, device, shape, dtype, bias_dtype), impl, **turn(MASKS, *place))
    assert (found.dbias is None) == (bias_dtype == torch.bool)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("impl, device, dtype", WHERE_DTYPE)
def test_masks(impl, device, dtype, mask):
    data = sized(impl, device, turn(["1hqk", "bhqk"], MASKS.index(mask)), dtype, turn(TYPES, MASKS.index(mask)))
    check(data, impl, **mask, softmax_scale=turn([None, -0.3, 0.0], MASKS.index(mask)))


@pytest.mark.parametrize("others", [
    {"softcap": 1.5}, {"slopes": "entry"}, {"sinks": 0.5}, {"softcap": 0.8, "slopes": "head", "sinks": 0.0},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bool], ids=str)
@pytest.mark.parametrize("impl, device", WHERE)
def test_beside_the_other_variants(impl, device, bias_dtype, others):
    options = {name: x for name, x in others.items() if name == "softcap"}
    extras = {name: x for name, x in others.items() if name != "softcap"}
    check(sized(impl, device, bias_dtype=bias_dtype, **extras), impl, causal=True, **options)


@pytest.mark.parametrize("lengths", [(1, 1), (43, 1), (1, 77), (129, 65), (64, 129)], ids=str)
@pytest.mark.parametrize("impl, device", WHERE)
def test_lengths(impl, device, lengths):
    smaller = {"batch": 1} if (impl, device) == INTERPRETER else {}
    check(sized(impl, device, "1hqk", seqlen_q=lengths[0], seqlen_k=lengths[1], **smaller), impl, causal=True)


@pytest.mark.parametrize("dim", [72, 113])
@pytest.mark.parametrize("impl, device", WHERE)
def test_head_dims(impl, device, dim):
    rows = {"seqlen_q": 5, "seqlen_k": 9} if (impl, device) == INTERPRETER else {}
    check(sized(impl, device, dim=dim, dim_v=40, **rows), impl, causal=True)


STRIDES = {
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "every second": lambda x: torch.full((*x.shape[:3], 2 * x.shape[3]), math.nan, device=x.device, dtype=x.dtype)[..., ::2].copy_(x),
    "odd offset": lambda x: torch.cat([x.new_full((1,), math.nan), x.flatten()])[1:].view(x.shape),
    "expanded": lambda x: x[:1, :1].expand(x.shape),
    "expanded rows": lambda x: x[:, :, :1].expand(x.shape),
}


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("impl, device", WHERE)
def test_strides(impl, device, strides):
    """What lies between is NaN. A gradient has the shape of what came, where dimensions were expanded too."""
    data = sized(impl, device, "bhqk", torch.float32)
    data = data.with_(bias=STRIDES[strides](data.bias))
    found = check(data, impl, causal=True)
    assert same_bits(found, run(data.with_(bias=data.bias.contiguous()), impl, causal=True))
    assert found.dbias.shape == data.bias.shape


@pytest.mark.parametrize("impl, device", WHERE)
def test_layouts_and_missing_dimensions_say_the_same(impl, device):
    data = sized(impl, device, "1hqk", torch.float32)
    first = run(data, impl, causal=True)
    assert same_bits(first, run(data, impl, causal=True)) and same_bits(first, run(data, impl, causal=True, layout="bhsd"))
    short = run(data.with_(bias=data.bias[0]), impl, causal=True)
    assert same_bits(first._replace(dbias=first.dbias[0]), short)


@pytest.mark.parametrize("impl, device", WHERE)
def test_a_mask_is_a_bias_of_minus_infinity(impl, device):
    data = sized(impl, device, "b1qk", torch.float32, torch.bool)
    numbers = torch.zeros(data.bias.shape, device=device).masked_fill(~data.bias, -torch.inf)
    found = check(data.with_(bias=numbers), impl)
    assert same_bits(found._replace(dbias=None), run(data, impl))
    assert not found.dbias[~data.bias].any() and not found.dbias[:, :, 1].any()
    group = data.q.shape[2] // data.k.shape[2]
    assert found.out[:, 0].any() and not found.out[:, 1].any() and (found.lse[:, :, 1] == -torch.inf).all() and group > 1


@pytest.mark.parametrize("shape", ["1hqk", "bh1k", ""])
@pytest.mark.parametrize("impl, device", WHERE)
def test_sums_in_parts(impl, device, shape, monkeypatch):
    """However many programs share the work: one for each tile, or many."""
    data = sized(impl, device, shape, torch.float32)
    if impl == "portable":
        from flashattn.launch import bias as launch

        monkeypatch.setattr(launch, "PROGRAMS", 1)
    else:
        monkeypatch.setattr(eager, "CHUNK_SCORES", 1000)
        monkeypatch.setattr(eager, "MIN_ROWS", 8)
    check(data, impl, causal=True)


# ----------------------------------------------------------------------------------------------------------------------- numbers


def assert_as_float32(data, impl, within=2e-5, **options):
    """Results as those of the oracle in float32, which rounds as they do."""
    found = run(data, impl, **options)
    leaves = [x.detach().float().requires_grad_() for x in (data.q, data.k, data.v)]
    bias = data.bias.detach().clone().requires_grad_()
    out, lse = attention_reference(*leaves, bias=bias, sinks=data.sinks, return_lse=True, **options)
    expected = [out, lse, *torch.autograd.grad([out, lse], [*leaves, bias], [data.dout.float(), data.dlse])]
    for name, other in zip(("out", "lse", "dq", "dk", "dv", "dbias"), expected, strict=True):
        x, eps = getattr(found, name), torch.finfo(other.dtype).eps
        limits = {"rtol": max(within, 2 * eps), "atol": within if eps < 1e-6 else 1e-4}
        torch.testing.assert_close(x, other, **limits, msg=lambda text, of=name: f"{of}: {text}")
    return found


@pytest.mark.parametrize("number", ["min", -1e9, -3e4, 1e9, "max"])
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("impl, device", WHERE)
def test_rows_of_nothing_but_a_large_number(impl, device, bias_dtype, number):
    """An average of what the mask keeps, with an average's gradients; where other keys are there, nothing of those with the lowest."""
    number = getattr(torch.finfo(bias_dtype), number) if isinstance(number, str) else number
    data = sized(impl, device, "1hqk", torch.float32, bias_dtype)
    data.q.mul_(0.5)
    bias = data.bias.clone()
    bias[:, :, 2] = number
    bias[:, :, 3, 5:] = number
    bias[:, :1, 4] = number
    found = assert_as_float32(data.with_(bias=bias), impl, within=2e-3 if number == -3e4 else 2e-5, causal=True)
    if abs(number) > 1e5:
        diagonal = data.k.shape[1] - data.q.shape[1]
        mean = data.v[:, : 2 + diagonal + 1].mean(1).repeat_interleave(data.q.shape[2] // data.k.shape[2], 1)
        torch.testing.assert_close(found.out[:, 2], mean, rtol=1e-5, atol=1e-5)
    assert (found.lse[:, :, 2] != -torch.inf).all() and found.lse.isfinite().all()


@pytest.mark.parametrize("impl, device", WHERE)
def test_the_lowest_float16_keeps_what_float32_can_tell(impl, device):
    data = sized(impl, device, "1hqk", torch.float32, torch.float16)
    bias = data.bias.clone()
    bias[:, :, 2] = torch.finfo(torch.float16).min
    check(data.with_(bias=bias), impl, causal=True)


@pytest.mark.parametrize("sinks", [None, 0.5])
@pytest.mark.parametrize("impl, device", WHERE)
def test_rows_that_a_bias_empties_may_be_sent_anything(impl, device, sinks):
    """out 0, lse -inf or the sink, gradients 0, whatever comes for them."""
    data = sized(impl, device, "b1qk", torch.float32, **({} if sinks is None else {"sinks": sinks, "heads": 3, "heads_kv": 1}))
    bias = data.bias.clone()
    bias[0, :, 3] = -torch.inf
    bias[:, :, 5, : data.k.shape[1] - 4] = -torch.inf  # what the window keeps of it
    data = data.with_(bias=bias)
    options = {"window": (6, 1)} if data.q.shape[1] < 40 else {"causal": True}
    first = check(data, impl, **options)
    empty = expect(data, **options).empty.expand(data.dlse.shape)
    assert empty.any() and not empty.all()
    other = data.with_(dout=data.dout.masked_fill(empty.transpose(-1, -2)[..., None], math.nan))
    assert same_bits(first, run(other, impl, **options))
    owed = run(data.with_(dlse=data.dlse.masked_fill(empty, math.nan)), impl, **options)
    assert same_bits(first._replace(dsinks=None), owed._replace(dsinks=None))


@pytest.mark.parametrize("impl, device", WHERE)
def test_what_a_mask_hides_may_be_anything(impl, device):
    """NaN and infinities ahead of the diagonal and outside a window: not a bit changes, and their gradient is 0."""
    data = sized(impl, device, "1hqk", torch.float32)
    rows, keys = data.bias.shape[-2:]
    ahead = torch.arange(keys, device=device) - torch.arange(rows, device=device)[:, None] - (keys - rows)
    for options, hidden in (({"causal": True}, ahead > 0), ({"window": (7, 3)}, (ahead > 3) | (ahead < -7))):
        first = check(data, impl, **options)
        for value in (math.nan, math.inf, -math.inf):
            assert same_bits(first, run(data.with_(bias=data.bias.masked_fill(hidden, value)), impl, **options))
        assert hidden.any() and not first.dbias[..., hidden].any()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("impl, device", WHERE)
def test_what_no_softmax_can_bear(impl, device, value):
    """A row with a NaN or +inf is NaN, as it is by the formula, and no other row is."""
    data = sized(impl, device, "b1qk", torch.float32)
    bias = data.bias.clone()
    bias[0, :, 4, 2] = value
    data = data.with_(bias=bias)
    found = run(data, impl)
    out, lse = attention_reference(data.q, data.k, data.v, bias=bias, return_lse=True)
    assert torch.equal(found.out.isnan(), out.isnan()) and torch.equal(found.lse.isnan(), lse.isnan())
    assert torch.equal(found.lse.isinf(), lse.isinf()) and found.out[0, 4].isnan().all() and found.out[1].isfinite().all()
    assert found.dq[0, 4].isnan().all() and found.dq[1].isfinite().all() and found.dv[1].isfinite().all()


@pytest.mark.parametrize("impl, device", WHERE)
def test_nothing_to_attend_to(impl, device):
    for sizes in ({"seqlen_k": 0}, {"seqlen_q": 0}, {"batch": 0}):
        data = sized(impl, device, "bhqk", torch.float32, **sizes)
        found = run(data, impl, causal=True)
        assert not found.out.any() and (found.lse == -torch.inf).all() and found.dbias.shape == data.bias.shape
        shared = run(sized(impl, device, "11qk", torch.float32, **sizes), impl)
        assert not shared.dbias.any()


# --------------------------------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("grads", ["b", "qb", "kb", "vb", "v", "qkvs", ""])
@pytest.mark.parametrize("impl, device", WHERE)
def test_only_the_gradients_asked_for(impl, device, grads):
    rows = {"seqlen_q": 5, "seqlen_k": 9} if (impl, device) == INTERPRETER else {}
    data = sized(impl, device, sinks=0.0, heads=3, heads_kv=1, **rows)
    results = check(data, impl, grads=grads, causal=True)
    assert [x is not None for x in results[2:]] == [name in grads for name in "qkvsb"]


@pytest.mark.parametrize("lse_grad", [True, False])
@pytest.mark.parametrize("impl, device", WHERE)
def test_gradients_of_out_alone_and_of_lse_alone(impl, device, lse_grad):
    data = sized(impl, device, "b1qk", torch.float32)
    check(data, impl, lse_grad=lse_grad)
    if lse_grad:
        leaf = data.bias.clone().requires_grad_()
        _, lse = attention(data.q, data.k, data.v, bias=leaf, return_lse=True, impl=impl)
        (found,) = torch.autograd.grad(lse, leaf, data.dlse)
        _, expected = attention_reference(data.q, data.k, data.v, bias=leaf, return_lse=True)
        torch.testing.assert_close(found, torch.autograd.grad(expected, leaf, data.dlse)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("impl, device", [WHERE[0], WHERE[2]])
def test_a_constant_of_a_row_changes_lse_alone(impl, device):
    data = sized(impl, device, "bhq1", torch.float32)
    found, plain = run(data, impl), run(data.with_(bias=None), impl)
    torch.testing.assert_close(found.out, plain.out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.lse, plain.lse + data.bias.squeeze(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.dbias.squeeze(-1), data.dlse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("impl, device", [WHERE[0], WHERE[2]])
def test_alibi_is_a_bias(impl, device):
    data = sized(impl, device, "1hqk", torch.float32)
    rows, keys = data.bias.shape[-2:]
    steps = (torch.arange(rows, device=device)[:, None] + keys - rows - torch.arange(keys, device=device)).abs()
    slopes = torch.rand(data.q.shape[2], device=device)
    found = run(data.with_(bias=-slopes[:, None, None] * steps), impl, grads="qkv", causal=True)
    other = run(data.with_(bias=None, slopes=slopes), impl, causal=True)
    for one, two in zip(found[:5], other[:5], strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)


def test_what_is_kept_for_backward_is_the_bias_itself():
    """No copy of it, be it cast or expanded."""
    data = sized(*EAGER, "1hqk", torch.float32, torch.bfloat16)
    kept = []
    bias = data.bias.expand(2, -1, -1, -1).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.untyped_storage().data_ptr()) or x, lambda x: x):
        attention(data.q, data.k, data.v, bias=bias)
    assert bias.untyped_storage().data_ptr() in kept


@pytest.mark.gpu
def test_what_shares_a_bias_takes_no_memory():
    """The gradient of a bias of [1, heads, rows, keys] that 8 entries share: its own bytes and those of the others, not 8 times as many."""
    size, rows, entries = {"device": "cuda", "dtype": torch.bfloat16}, 2048, 8
    q, k, v = (torch.randn(entries, rows, 4, 64, **size, requires_grad=True) for _ in range(3))
    bias = torch.randn(1, 4, rows, rows, **size, requires_grad=True)
    out = attention(q, k, v, bias=bias)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(out, (q, k, v, bias), torch.ones_like(out))
    assert torch.cuda.max_memory_allocated() - before < 2 * bias.nbytes + 16 * q.nbytes


# -------------------------------------------------------------------------------------------------------------------- the binding


def samples(shape, dim, batch):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, batch, rows, heads, 8, generator=generator) for rows, heads in ((5, 4), (7, 2), (7, 2)))
    return q, k, v, torch.randn(shape if dim is None else (*shape[:dim], 3, *shape[dim:]), generator=generator)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("shape, dim", [
    ((1, 4, 5, 7), None), ((2, 4, 5, 7), None), ((5, 7), None), ((1, 4, 5, 7), 0), ((2, 1, 5, 7), 2), ((4, 5, 7), 3),
], ids=str)  # fmt: skip
def test_vmap(shape, dim, batch):
    """One call, and the gradient of each sample where each is asked, also of a bias that all share."""
    if batch == 1 and shape[0] == 2:
        shape = (1, *shape[1:])
    q, k, v, bias = samples(shape, dim, batch)

    def total(q, k, v, bias):
        out, lse = attention(q, k, v, bias=bias, causal=True, return_lse=True, impl="eager")
        return (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum() + lse.square().sum()

    def each(function):
        return [function(q[i], k[i], v[i], bias if dim is None else bias.select(dim, i)) for i in range(3)]

    dims = (0, 0, 0, dim)
    torch.testing.assert_close(torch.func.vmap(total, dims)(q, k, v, bias), torch.stack(each(total)))
    gradients = torch.func.grad(total, (0, 3))
    for found, alone in zip(torch.func.vmap(gradients, dims)(q, k, v, bias), zip(*each(gradients), strict=True), strict=True):
        torch.testing.assert_close(found, torch.stack(alone))


@pytest.mark.parametrize("impl, device", [WHERE[0], WHERE[2]])
def test_compiled(impl, device):
    data = sized(impl, device, "1hqk", torch.float32)

    def call(q, k, v, bias):
        return attention(q, k, v, bias=bias, causal=True, impl=impl)

    results = []
    for function in (call, torch.compile(call, fullgraph=True)):
        leaves = [x.detach().clone().requires_grad_() for x in (data.q, data.k, data.v, data.bias)]
        out = function(*leaves)
        results.append([out, *torch.autograd.grad(out, leaves, data.dout)])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("shape, bias_dtype", [("1hqk", torch.float32), ("b1qk", torch.bfloat16), ("bh1k", torch.bool)])
@pytest.mark.parametrize("impl, device", [WHERE[0], WHERE[2]])
def test_the_operators_keep_torchs_rules(impl, device, shape, bias_dtype):
    data = sized(impl, device, shape, torch.float32, bias_dtype)
    leaves = [x.detach().requires_grad_() for x in (data.q, data.k, data.v)]
    bias = data.bias if bias_dtype == torch.bool else data.bias.detach().requires_grad_()
    options = None, None, None, None, 0.3, None, 0, False, False, impl
    torch.library.opcheck(torch.ops.flashattn.attn_fwd.default, (*leaves, None, None, bias, 0.0, 0.0, None, None, *options))


def test_explain_names_a_bias_and_its_bytes():
    x = torch.empty(2, 128, 4, 64, dtype=torch.bfloat16, device="meta")
    plain = explain(x, x, x)
    full, shared, mask = (
        torch.empty(shape, dtype=dtype, device="meta")
        for shape, dtype in (((2, 4, 128, 128), torch.float32), ((1, 4, 128, 128), torch.bfloat16), ((2, 1, 1, 128), torch.bool))
    )
    for bias, says, size in (
        (full, "bias float32 [batch, heads, seqlen_q, seqlen_k]", 2 * 4 * 128 * 128 * 4),
        (shared, "bias bfloat16 [1, heads, seqlen_q, seqlen_k]", 4 * 128 * 128 * 2),
        (shared.expand(2, -1, -1, -1), "bias bfloat16 [1, heads, seqlen_q, seqlen_k]", 4 * 128 * 128 * 2),
        (mask, "mask [batch, 1, 1, seqlen_k]", 2 * 128),
    ):
        found = explain(x, x, x, bias=bias)
        assert f"  scores with {says}\n" in str(found)
        assert found.bytes["forward"] - plain.bytes["forward"] == size
        assert found.bytes["backward"] - plain.bytes["backward"] == size * (1 if bias.dtype == torch.bool else 2)
        assert found.flops == plain.flops


def test_derivatives_that_a_bias_does_not_have():
    data = sized(*EAGER, "1hqk", torch.float32)
    leaf = data.q.clone().requires_grad_()
    (first,) = torch.autograd.grad(attention(leaf, data.k, data.v, bias=data.bias).sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative of flashattn's attention with a bias is not implemented"):
        torch.autograd.grad(first.sum(), leaf)
    for bias in (data.bias, data.bias > 0):
        with pytest.raises(NotImplementedError, match="a forward-mode or second derivative of flashattn's attention with a bias"):
            torch.func.jvp(lambda q, bias=bias: attention(q, data.k, data.v, bias=bias), (data.q,), (data.q,))
    with pytest.raises(NotImplementedError, match="a forward-mode or second derivative of flashattn's attention with a bias"):
        torch.func.jvp(lambda bias: attention(data.q, data.k, data.v, bias=bias), (data.bias,), (data.bias,))
