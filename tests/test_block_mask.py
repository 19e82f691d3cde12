"""Block masks: how they are made, and calls with them against the oracle, which is given the same mask as booleans of all pairs.

The surprising fact: what a kernel must not read can be asked of NaN only where no pair of a whole block is kept, for a tile takes in what
lies beside a kept key. So there NaN stands in keys and values, and in what comes back for rows without keys.

Over 300 lines, since a mask is made in seven ways and what a call does with it is asked of each kernel.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashattn import BlockMask, attention, block_mask, explain
from flashattn.dispatch.configs import portable, sm90
from flashattn.dispatch.table import KERNELS
from flashattn.problem import Problem
from flashattn.reference import attention_reference, keep_mask
from support import WHERE, compare, dense, expect, run, with_extras
from test_variants import EAGER, GPU, HALF, INTERPRETER

pytestmark = pytest.mark.thinned

LENGTHS = st.sampled_from([0, 1, 127, 128, 129, 300])


# -------------------------------------------------------------------------------------------------------------------------- how it is made


def pairs(*shape, seed=0, density=0.6):
    """Booleans of which some blocks are full and some empty, the rest mixed; row 3 keeps nothing."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.rand(*shape[:2], *(-(-size // 128) for size in shape[2:]), generator=generator)
    blocks = blocks.repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, : shape[2], : shape[3]]
    mask = (blocks < density) & ((blocks < density / 3) | (torch.rand(shape, generator=generator) < 0.7))
    mask[:, :, 3:4] = False
    return mask


@given(LENGTHS, LENGTHS, st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 3)]), st.integers(0, 99), st.sampled_from([1 << 22, 1 << 15]))
@settings(max_examples=25)
def test_of_booleans_and_combined(rows, keys, lanes, seed, at_once):
    """Whatever is looked at together."""
    before, block_mask.AT_ONCE = block_mask.AT_ONCE, at_once
    try:
        dense_mask, other = pairs(*lanes, rows, keys, seed=seed), pairs(lanes[0], 1, rows, keys, seed=seed + 1)
        mask, second = BlockMask.from_mask(dense_mask), BlockMask.from_mask(other)
        assert torch.equal(mask.to_dense(), dense_mask) and mask.kept_pairs() == dense_mask.sum()
        assert torch.equal((mask & second).to_dense(), dense_mask & other)
        assert torch.equal((second | mask).to_dense(), dense_mask | other)
    finally:
        block_mask.AT_ONCE = before


@given(
    LENGTHS,
    LENGTHS,
    st.sampled_from([False, True, "top-left"]),
    st.sampled_from([None, (0, 0), (5, None), (None, 3), (200, 130), (140, 1000)]),
)
@settings(max_examples=25)
def test_of_windows(rows, keys, causal, window):
    expected = keep_mask(rows, keys, causal=causal, window=window)
    assert torch.equal(BlockMask.from_window(rows, keys, causal=causal, window=window).to_dense()[0, 0], expected)


@given(LENGTHS, st.booleans(), st.sampled_from(["packed", "padded", "any"]), st.integers(0, 99))
@settings(max_examples=25)
def test_of_documents(length, causal, order, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = (torch.rand(2, length, generator=generator) < 0.02).cumsum(1) * 7 % 11
    if order == "any":
        ids = torch.randint(-1, 4, (2, length), generator=generator)
    if order == "padded":
        ids[0, length // 2 :] = -1
    expected = (ids[:, :, None] == ids[:, None]) & (ids >= 0)[:, :, None]
    expected = expected.tril() if causal else expected
    assert torch.equal(BlockMask.from_document_ids(ids, causal=causal).to_dense()[:, 0], expected)


def test_of_a_function():
    """One that indexes tensors and says it of each entry and head; and one that looks at neither."""
    start = torch.tensor([3, 150])
    mask = BlockMask.from_mask_mod(lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (kv_idx >= start[b] * h), 2, 3, 140, 300)
    b, h, i, j = torch.meshgrid(*map(torch.arange, (2, 3, 140, 300)), indexing="ij")
    assert torch.equal(mask.to_dense(), (i >= j) & (j >= start[b] * h))
    assert BlockMask.from_mask_mod(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 300, 300).shape == (1, 1, 300, 300)
    with pytest.raises(TypeError, match=r"mask_mod returned torch\.int64"):
        BlockMask.from_mask_mod(lambda b, h, q_idx, kv_idx: q_idx - kv_idx, None, None, 3, 3)


def test_of_layouts_and_patterns():
    layout = torch.rand(2, 1, 2, 3, generator=torch.Generator().manual_seed(0)) < 0.5
    found = BlockMask.from_layout(layout, 256, seqlen_q=300, seqlen_k=700)
    assert torch.equal(found.to_dense(), layout.repeat_interleave(256, 2).repeat_interleave(256, 3)[:, :, :300, :700])
    row, column = torch.arange(1000)[:, None] // 128, torch.arange(900)[None] // 128
    near = BlockMask.local_global(1000, 900, local_blocks=1, global_blocks=2)
    assert torch.equal(near.to_dense()[0, 0], ((row - column).abs() <= 1) | (row < 2) | (column < 2))
    differ = sum((row >> n & 1) != (column >> n & 1) for n in range(3))
    wings = BlockMask.butterfly(1000, 900, causal=True)
    assert torch.equal(wings.to_dense()[0, 0], (differ <= 1) & keep_mask(1000, 900, causal=True))
    assert BlockMask.butterfly(1024, 1024).kept_blocks == 8 * 4 and BlockMask.butterfly(1024, 1024, max_stride=1).kept_blocks == 8 * 2


def test_a_mask_is_its_tensor():
    mask = BlockMask.from_window(300, 400, causal=True)
    assert torch.equal(BlockMask(mask.packed.clone()).to_dense(), mask.to_dense()) and repr(BlockMask(mask.packed)) == repr(mask)


def test_memory_is_that_of_kept_blocks():
    """One tile for a diagonal, and nothing of all blocks: a million tokens have 67 million pairs of blocks."""
    ids = torch.arange(1 << 10).repeat_interleave(1 << 10)
    mask = BlockMask.from_document_ids(ids, causal=True)
    assert mask.shape == (1, 1, 1 << 20, 1 << 20) and mask.tiles == 1 and mask.kept_blocks == (1 << 10) * 36
    assert mask.packed.numel() < 2**18 and mask.kept_pairs() == (1 << 10) * ((1 << 10) * ((1 << 10) + 1) // 2)
    assert "36864 of 67108864 blocks, 1 distinct tiles" in repr(mask) and mask.density == 36864 / 67108864


@pytest.mark.parametrize("make, message", [
    (lambda: BlockMask.from_mask(torch.ones(3, 3)), r"mask is torch\.float32: expected a torch\.bool"),
    (lambda: BlockMask.from_mask(torch.ones(3, dtype=torch.bool)), r"mask has shape \(3,\): expected"),
    (lambda: BlockMask.from_layout(torch.ones(2, 2, dtype=torch.bool), 64), "block_size=64: expected a multiple of 128"),
    (lambda: BlockMask.from_layout(torch.ones(2, 2, dtype=torch.bool), seqlen_q=300), "seqlen_q=300 with 2 blocks of 128"),
    (lambda: BlockMask.from_document_ids(torch.ones(3)), "expected a tensor of integers"),
    (lambda: BlockMask.from_window(-1, 3), "seqlen_q=-1: expected 0 or more"),
    (lambda: BlockMask.from_window(3, 3, causal="left"), "causal='left': expected"),
    (lambda: BlockMask.from_window(3, 4) & BlockMask.from_window(4, 4), r"masks have shapes \(1, 1, 3, 4\) and \(1, 1, 4, 4\)"),
])  # fmt: skip
def test_what_no_mask_is_made_of(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


# --------------------------------------------------------------------------------------------------------------------------- calls with it

SIZES = {
    EAGER: {"seqlen_q": 140, "seqlen_k": 257, "batch": 2, "heads": 4, "heads_kv": 2, "dim": 24},
    INTERPRETER: {"seqlen_q": 20, "seqlen_k": 150, "batch": 1, "heads": 2, "heads_kv": 1, "dim": 16},
    GPU: {"seqlen_q": 700, "seqlen_k": 1203, "batch": 2, "heads": 6, "heads_kv": 2, "dim": 64},
}


def sized(impl, device, **changes):
    extras = {name: changes.pop(name) for name in ("slopes", "sinks") if name in changes}
    return with_extras(dense(**{"dtype": HALF[impl, device], "device": device, **SIZES[impl, device], **changes}), **extras)


def mask_of(data, batch=False, heads=False, seed=0):
    (entries, rows, of_q, _), keys = data.q.shape, data.k.shape[1]
    dense_mask = pairs(entries if batch else 1, of_q if heads else 1, rows, keys, seed=seed)
    dense_mask[..., : min(9, rows), -1:] |= seed % 2 == 1
    return BlockMask.from_mask(dense_mask.to(data.q.device))


def check(data, impl, mask, **options):
    """Against the oracle with a bias of booleans in the place of the mask, or with both in a bias."""
    found = run(data, impl, block_mask=mask, **options)
    keep, bias = mask.to_dense(), data.bias
    if bias is not None:
        keep = bias & keep if bias.dtype == torch.bool else bias.masked_fill(~keep, -torch.inf)
    compare(found, expect(data.with_(bias=keep), **options), data.q.dtype, None if bias is None else bias.dtype)
    return found


@pytest.mark.parametrize("batch, heads", [(False, False), (True, True), (False, True), (True, False)])
@pytest.mark.parametrize("impl, device", WHERE)
def test_who_shares_a_mask(impl, device, batch, heads):
    """Heads that share a key/value head have masks of their own, or one."""
    of_interpreter = {} if (impl, device) != INTERPRETER else {"batch": 2} if batch else {"seqlen_q": 130, "seqlen_k": 40}
    data = sized(impl, device, **of_interpreter)
    check(data, impl, mask_of(data, batch, heads, seed=1))


@pytest.mark.parametrize("lengths", [(1, 129), (127, 1), (300, 128), (3, 300)], ids=str)
@pytest.mark.parametrize("impl, device", WHERE)
def test_lengths(impl, device, lengths):
    data = sized(impl, device, seqlen_q=lengths[0], seqlen_k=lengths[1], **({"heads": 1} if (impl, device) == INTERPRETER else {}))
    check(data, impl, mask_of(data, seed=1))


@pytest.mark.parametrize("dtype, dim", [(torch.float16, 72), (torch.float32, 40), (torch.float16, 136)])
@pytest.mark.parametrize("impl, device", WHERE)
def test_head_dims(impl, device, dtype, dim):
    rows = {"seqlen_q": 5, "seqlen_k": 140, "heads": 1} if (impl, device) == INTERPRETER else {}
    data = sized(impl, device, dtype=dtype, dim=dim, dim_v=dim - 7, **rows)
    check(data, impl, mask_of(data, seed=1))


@pytest.mark.parametrize("others", [
    {"softcap": 1.5, "slopes": "entry", "dropout_p": 0.3, "dropout_seed": 5}, {"sinks": 0.5, "softcap": 0.8},
    {"bias": torch.bfloat16, "sinks": 0.5}, {"bias": torch.bool, "dropout_p": 0.3, "dropout_seed": 5},
], ids=lambda others: "-".join(others))  # fmt: skip
@pytest.mark.parametrize("impl, device", WHERE)
def test_beside_the_other_variants(impl, device, others):
    options = {name: x for name, x in others.items() if name not in ("slopes", "sinks", "bias")}
    data = sized(impl, device, **{name: x for name, x in others.items() if name in ("slopes", "sinks")})
    if "bias" in others:
        shape, generator = (1, data.q.shape[2], data.q.shape[1], data.k.shape[1]), torch.Generator(device).manual_seed(3)
        numbers = torch.randn(shape, generator=generator, device=device)
        data = data.with_(bias=numbers < 0.7 if others["bias"] == torch.bool else numbers.to(others["bias"]))
    check(data, impl, mask_of(data, heads="sinks" in others, seed=2), **options)


@pytest.mark.parametrize("impl, device", WHERE)
def test_large_biases(impl, device):
    """Whose rows are shifted by a maximum and a sum made again, of the kept keys alone."""
    data = sized(impl, device, seqlen_q=20)
    data = data.with_(bias=torch.full((1, 1, 1, data.k.shape[1]), -3e4, device=device))
    keep = torch.zeros(20, data.k.shape[1], dtype=torch.bool, device=device)
    keep[:, 131:] = keep[:9, :7] = True
    found = run(data, impl, block_mask=BlockMask.from_mask(keep), lse_grad=False)
    expected = run(data.with_(bias=torch.where(keep, -3e4, -torch.inf)), "eager", lse_grad=False)
    for name in ("out", "lse", "dq", "dk", "dv"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=2e-2, atol=2e-2, msg=name)
    torch.testing.assert_close(found.dbias[0, 0], expected.dbias.sum(0, keepdim=True), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("sinks", [None, 0.5], ids=["", "sinks"])
@pytest.mark.parametrize("impl, device", WHERE)
def test_nothing_leaks_from_what_nobody_keeps(impl, device, sinks):
    """A head that keeps nothing, keys that nobody keeps, and rows without keys for which NaN comes back."""
    data = sized(impl, device, **({} if sinks is None else {"sinks": sinks}), seqlen_q=20, seqlen_k=300)
    keep = torch.zeros(1, data.q.shape[2], *data.q.shape[1:2], 300, dtype=torch.bool, device=device)
    keep[:, :-1, 10:, :120] = keep[:, :-1, 10:, 257:] = True
    clean = run(data, impl, block_mask=BlockMask.from_mask(keep))
    k, v, dout, dlse = (x.clone() for x in (data.k, data.v, data.dout, data.dlse))
    k[:, 128:256] = v[:, 128:256] = dout[:, :10] = dout[:, :, -1] = torch.nan
    if sinks is None:
        dlse[:, :, :10] = dlse[:, -1] = torch.nan
    found = run(data.with_(k=k, v=v, dout=dout, dlse=dlse), impl, block_mask=BlockMask.from_mask(keep))
    for name, a, b in zip(found._fields, found, clean, strict=True):
        assert a is None or torch.equal(a, b), name
    assert not found.out[:, :10].any() and not found.out[:, :, -1].any() and not found.dk[:, 128:256].any() and found.out[:, 10:, 0].all()
    assert (found.lse[:, -1] == (-torch.inf if sinks is None else data.sinks[-1])).all()


@pytest.mark.parametrize("impl, device", WHERE)
def test_documents_are_packed_sequences(impl, device):
    """Each with its own diagonal, and padding behind them."""
    lengths = [70, 1, 59]
    data = sized(impl, device, dtype=torch.float16, batch=1, seqlen_q=140, seqlen_k=140, heads=1, heads_kv=1)
    ids = torch.tensor([5, 2, 9], device=device).repeat_interleave(torch.tensor(lengths, device=device))
    ids = torch.nn.functional.pad(ids, (0, 10), value=-1)
    found = run(data, impl, block_mask=BlockMask.from_document_ids(ids, causal=True), lse_grad=False)
    cu = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    alone = data.with_(q=data.q[0], k=data.k[0], v=data.v[0], dout=data.dout[0], dlse=data.dlse[0], cu_q=cu, cu_k=cu)
    expected = run(alone, "eager", causal=True, lse_grad=False)
    for name in ("out", "dq", "dk", "dv"):
        torch.testing.assert_close(getattr(found, name)[0], getattr(expected, name), rtol=1e-3, atol=1e-3, msg=name)
    assert (found.lse[0, :, 130:] == -torch.inf).all() and not found.out[0, 130:].any()


def test_the_oracle_takes_a_mask():
    data = sized(*EAGER, dtype=torch.float32)
    mask = mask_of(data, batch=True)
    found = attention_reference(data.q, data.k, data.v, block_mask=mask, return_lse=True)
    expected = attention_reference(data.q, data.k, data.v, bias=mask.to_dense(), return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)) and (found[1] == -torch.inf).any()


# ------------------------------------------------------------------------------------------------------------------- PyTorch around it


def test_one_graph_and_the_same_bits():
    data = sized(*EAGER, dtype=torch.float32)
    mask = mask_of(data, heads=True)

    def step(q, k, v, mask):
        return attention(q, k, v, block_mask=mask, return_lse=True, impl="eager")

    leaves = [x.detach().requires_grad_() for x in (data.q, data.k, data.v)]
    results = []
    for function in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        out, lse = function(*leaves, mask)
        results.append([out, lse, *torch.autograd.grad([out, lse], leaves, [data.dout, data.dlse.nan_to_num()])])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_vmap_shares_the_mask_of_each_entry():
    data = sized(*EAGER, dtype=torch.float32)
    mask = mask_of(data, batch=True, heads=True)
    q, k, v = (torch.stack([x, x.flip(0)]) for x in (data.q, data.k, data.v))
    found = torch.vmap(lambda *qkv: attention(*qkv, block_mask=mask, impl="eager"))(q, k, v)
    assert torch.equal(found, torch.stack([attention(*qkv, block_mask=mask, impl="eager") for qkv in zip(q, k, v, strict=True)]))


def test_a_mask_made_in_inference_serves_training():
    with torch.inference_mode():
        mask = BlockMask.from_window(4, 4, causal=True)
    q = torch.randn(1, 4, 1, 8, requires_grad=True)
    attention(q, q, q, block_mask=mask, impl="eager").sum().backward()
    assert q.grad.isfinite().all()


def test_a_tensor_that_is_no_mask_is_refused():
    packed = BlockMask.from_window(300, 300, causal=True).packed
    assert BlockMask(packed.clone()).density == BlockMask(packed).density
    for wrong in (packed[:-500].clone(), packed[:-1].clone(), torch.arange(100, dtype=torch.int32), -packed):
        with pytest.raises(ValueError, match=r"expected BlockMask\.packed"):
            BlockMask(wrong)


def test_only_the_first_derivative():
    q = torch.randn(1, 4, 1, 8, requires_grad=True)
    mask = BlockMask.from_window(4, 4, causal=True)
    with pytest.raises(NotImplementedError, match="attention with a block mask is not implemented"):
        torch.func.jvp(lambda x: attention(x, x, x, block_mask=mask, impl="eager"), (q.detach(),), (q.detach(),))
    (first,) = torch.autograd.grad(attention(q, q, q, block_mask=mask, impl="eager").sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative of flashattn's attention with a block mask"):
        first.sum().backward()


@pytest.mark.parametrize("options, error, message", [
    ({"block_mask": torch.ones(4, 4, dtype=torch.bool)}, TypeError, "block_mask is a Tensor: expected a flashattn.BlockMask"),
    ({"causal": True}, ValueError, r"causal=True beside a block_mask: expected.*from_window\(seqlen_q, seqlen_k, causal=True"),
    ({"window": (3, 0)}, ValueError, r"window=\(3, 0\) beside a block_mask"),
    ({"mask_mod": "prefix_lm", "mask_mod_aux": (torch.tensor([1, 2]),)}, NotImplementedError, "mask_mod beside a block_mask is not"),
    ({"seqlens_k": torch.tensor([3, 4], dtype=torch.int32)}, NotImplementedError, "seqlens_k beside a block_mask is not"),
    ({"block_mask": BlockMask.from_window(4, 5)}, ValueError, r"shape \(1, 1, 4, 5\): expected \[batch.*\] \(2 or 1, 3 or 1, 4, 4\)"),
    ({"block_mask": BlockMask.from_window(4, 4).to("meta")}, ValueError, "block_mask is on meta and q on cpu: expected one device"),
], ids=str)  # fmt: skip
def test_what_a_call_does_not_take(options, error, message):
    q = torch.randn(2, 4, 3, 8)
    with pytest.raises(error, match=message):
        attention(q, q, q, **{"block_mask": BlockMask.from_window(4, 4), **options})


def test_the_operator_takes_no_other_tensor():
    q = torch.randn(1, 4, 4, 8)
    options = None, None, None, 0.0, 0.0, None
    for blocks, message in (
        (torch.zeros(3, dtype=torch.int32), r"blocks is torch\.int32 of shape \(3,\)"),
        (BlockMask.from_window(4, 4).packed.long(), r"blocks is torch\.int64 of shape"),
        (BlockMask.from_window(5, 4).packed, "expected the same, or shared"),
        (BlockMask.from_mask(torch.ones(1, 2, 4, 4, dtype=torch.bool)).packed, "expected the same, or shared"),  # of heads in turn
    ):
        with pytest.raises(ValueError, match=message):
            torch.ops.flashattn.attn_fwd(q, q, q, *options, blocks, None, None, None, None, 1.0, None, None, False, False, None)


def test_explain_tells_what_is_kept():
    mask = BlockMask.from_layout(torch.eye(4, dtype=torch.bool))
    q = torch.zeros(2, 512, 4, 64)
    plain, found = explain(q, q, q), explain(q, q, q, block_mask=mask)
    assert "block mask that keeps 0.25 of the blocks" in str(found) and found.density == 0.25
    assert {name: 4 * flops for name, flops in found.flops.items()} == plain.flops
    meta = torch.zeros(2, 512, 4, 64, device="meta")
    assert explain(meta, meta, meta, block_mask=mask.to("meta")).flops == plain.flops
    problem = Problem("bfloat16", 2, 512, 512, 4, 4, 64, 64, 0.1, capability=(9, 0), aligned=True, blocks=True)
    reasons = {kernel.name: kernel.reasons(problem, "forward") for kernel in KERNELS}
    assert "a block mask" in reasons["hopper"] and not reasons["portable"]


def test_tiles_divide_blocks():
    for name, row in {**portable.ROWS, **sm90.ROWS}.items():
        assert 128 % row.block_m == 0 and (128 % row.block_n == 0 or name[0] == "delta"), name


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_at_large_sizes_sdpa_agrees(dim):
    """4096 tokens of documents under a butterfly, in bfloat16, against SDPA's own masked kernel."""
    data = dense(4096, batch=2, heads=8, dim=dim, dtype=torch.bfloat16, device="cuda")
    ids = (torch.rand(2, 4096, device="cuda", generator=torch.Generator("cuda").manual_seed(0)) < 1 / 500).cumsum(1)
    mask = BlockMask.from_document_ids(ids, causal=True) | BlockMask.butterfly(4096, 4096, device="cuda")
    leaves = [x.detach().requires_grad_() for x in (data.q, data.k, data.v)]
    keep, results = mask.to_dense(), []

    def peer(*qkv):
        return torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in qkv), attn_mask=keep).transpose(1, 2)

    for call in (lambda *qkv: attention(*qkv, block_mask=mask, impl="portable"), peer):
        out = call(*leaves)
        results.append([out, *torch.autograd.grad(out, leaves, data.dout)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
