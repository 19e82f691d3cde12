"""Gradients as a user meets them: of some inputs, through lse, under checkpointing, the same in every run, and in how much memory.

The surprising fact: a row without keys may be sent anything. lse is -inf there, so a loss as plain as (lse ** 2).sum() sends it an
infinite gradient, and what it must pass on is still 0. Over 300 lines: a gradient is asked for by every way that torch has.
"""

import gc
from itertools import product

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from flashattn import attention, attention_varlen
from support import WHERE, Results, check, compare, dense, expect, packed, run, same_bits

pytestmark = pytest.mark.thinned(2)

EAGER, INTERPRETER, GPU = ("eager", "cpu"), ("portable", "cpu"), ("portable", "cuda")
HALF = {EAGER: torch.bfloat16, INTERPRETER: torch.float16, GPU: torch.bfloat16}
SIZES = {
    EAGER: {"seqlen_q": 30, "seqlen_k": 70, "batch": 2, "heads": 4, "heads_kv": 2, "dim": 24},
    INTERPRETER: {"seqlen_q": 5, "seqlen_k": 9, "batch": 1, "heads": 2, "heads_kv": 1, "dim": 24},
    GPU: {"seqlen_q": 1001, "seqlen_k": 1203, "batch": 2, "heads": 4, "heads_kv": 2, "dim": 64},
}
SUBSETS = ["".join(names) for names in product(("q", ""), ("k", ""), ("v", "")) if any(names)]
MIB = 1 << 20


def sized(impl, device, kind="dense", **changes):
    size = {"dtype": HALF[impl, device], "device": device, **SIZES[impl, device], **changes}
    if kind == "dense":
        return dense(**size)
    rows_q, rows_k = size.pop("seqlen_q"), size.pop("seqlen_k")
    del size["batch"]
    return packed([rows_q // 2, 0, rows_q - rows_q // 2], [rows_k // 3, 4, rows_k - rows_k // 3], **size)


def leaves(data, grads="qkv"):
    return [getattr(data, name).detach().requires_grad_(name in grads) for name in "qkv"]


def attend(data, inputs, impl, **options):
    """(out, lse)"""
    if data.packed:
        return attention_varlen(*inputs, data.cu_q, data.cu_k, impl=impl, return_lse=True, **options)
    return attention(*inputs, impl=impl, return_lse=True, **options)


class Saved(torch.autograd.graph.saved_tensors_hooks):
    """Collects what is saved for backward."""

    def __init__(self):
        self.tensors = []
        super().__init__(lambda x: self.tensors.append(x) or x, lambda x: x)

    def __enter__(self):
        super().__enter__()
        return self

    def addresses(self):
        return sorted(x.data_ptr() for x in self.tensors)


# ---------------------------------------------------------------------------------------------------------- only what is asked for


class WatchBackward(TorchDispatchMode):
    """Collects the results of the backward operator."""

    def __init__(self):
        super().__init__()
        self.results = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.flashattn.attn_bwd.default:
            self.results.append(result)
        return result


@pytest.mark.parametrize("kind", ["dense", "packed"])
@pytest.mark.parametrize("grads", SUBSETS)
@pytest.mark.parametrize("impl, device", WHERE)
def test_only_the_gradients_asked_for(impl, device, grads, kind):
    """The right numbers; and nothing saved, computed or returned for the others. dv alone needs neither v nor out."""
    data = sized(impl, device, kind)
    check(data, impl, grads=grads, causal=True)
    inputs = leaves(data, grads)
    with Saved() as saved:
        out, lse = attend(data, inputs, impl)
    kept = [inputs[0], inputs[1], lse, *([] if grads == "v" else [inputs[2], out]), *([data.cu_q, data.cu_k] if data.packed else [])]
    assert saved.addresses() == sorted(x.data_ptr() for x in kept)
    with WatchBackward() as watch:
        torch.autograd.grad((out, lse), [x for x in inputs if x.requires_grad], (data.dout, data.dlse))
    [gradients] = watch.results
    assert [x.numel() for x in gradients] == [x.numel() if x.requires_grad else 0 for x in inputs] + [0, 0], "neither sinks nor a bias"


@pytest.mark.gpu
@pytest.mark.parametrize("grads", SUBSETS)
def test_a_gradient_not_asked_for_takes_no_memory(grads):
    data = dense(4096, batch=8, heads=4, heads_kv=2, dim=64, dtype=torch.bfloat16, device="cuda")
    inputs = leaves(data, grads)
    out, lse = attend(data, inputs, "portable")
    # What earlier calls left must not be given back halfway. Autograd's thread keeps the last gradients until it has something else to do.
    torch.ones(1, device="cuda", requires_grad=True).sum().backward()
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gradients = torch.autograd.grad(out, [x for x in inputs if x.requires_grad], data.dout)
    least = sum(x.nbytes for x in gradients) + (lse.nbytes if grads != "v" else 0)  # delta has the size of lse
    smallest = data.k.nbytes
    assert torch.cuda.max_memory_allocated() - before < least + smallest // 2


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("impl, device", WHERE)
def test_without_gradients_nothing_is_kept(impl, device, context):
    data = sized(impl, device)
    inputs = leaves(data)
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    with context(), Saved() as saved:
        out, lse = attend(data, inputs, impl)
    assert not saved.tensors and not out.requires_grad and out.grad_fn is None and lse.grad_fn is None
    if device == "cuda":
        assert torch.cuda.memory_allocated() - before <= out.nbytes + lse.nbytes + MIB
    assert same_bits(Results(out, lse, None, None, None), run(data, impl, grads=""))


# ------------------------------------------------------------------------------------------------------------------------- losses

LOSSES = {
    "lse": lambda out, lse: lse.square().sum(),
    "out": lambda out, lse: out.float().sin().sum(),
    "both": lambda out, lse: lse.square().sum() + out.sum(),
    "first-rows": lambda out, lse: lse[..., :2].sum() + out[:, :3].float().square().sum(),
}


def gradients_of(loss, *tensors):
    inputs = [x.detach().requires_grad_() for x in tensors]
    return torch.autograd.grad(loss(*inputs), inputs, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("impl, device", WHERE)
def test_losses(impl, device, loss):
    data = sized(impl, device)
    inputs = leaves(data)
    out, lse = attend(data, inputs, impl, causal=True)
    LOSSES[loss](out, lse).backward()
    dout, dlse = gradients_of(LOSSES[loss], out, lse)
    found = Results(out.detach(), lse.detach(), *(x.grad for x in inputs))
    compare(found, expect(data.with_(dout=dout, dlse=dlse), causal=True), data.q.dtype)
    if loss == "lse":
        assert not inputs[2].grad.any()


@pytest.mark.parametrize("kind", ["dense", "packed"])
@pytest.mark.parametrize("into, value", [("lse", -torch.inf), ("lse", torch.nan), ("out", torch.inf), ("out", torch.nan)])
@pytest.mark.parametrize("impl, device", WHERE)
def test_rows_without_keys_may_be_sent_anything(impl, device, into, value, kind):
    rows = SIZES[impl, device]["seqlen_q"], SIZES[impl, device]["seqlen_k"]
    data = sized(impl, device, kind, seqlen_q=rows[1], seqlen_k=rows[0])  # more queries than keys: causal leaves the first ones none
    first = check(data, impl, causal=True)
    empty = first.lse == -torch.inf
    assert empty.any() and not empty.all()
    if into == "lse":
        data = data.with_(dlse=data.dlse.masked_fill(empty, value))
    else:
        data = data.with_(dout=data.dout.masked_fill(empty.transpose(-1, -2)[..., None], value))
    assert same_bits(first, run(data, impl, causal=True))


@pytest.mark.parametrize("impl, device", WHERE)
def test_a_plain_loss_of_lse_with_rows_without_keys(impl, device):
    data = sized(impl, device, seqlen_q=9, seqlen_k=4)
    inputs = leaves(data)
    out, lse = attend(data, inputs, impl, causal=True)
    (lse.square().sum() + out.sum()).backward()
    assert all(x.grad.isfinite().all() for x in inputs)
    assert not inputs[0].grad[:, :5].any()


@pytest.mark.parametrize("sink", [1e8, 1e12, 1e30])
@pytest.mark.parametrize("impl, device", WHERE)
def test_sinks_that_lse_does_not_resolve(impl, device, sink):
    """e^(sink - lse) is at most 1, however lse is rounded: their gradient stays within what comes."""
    data = dense(20, 9, batch=2, heads=6, dim=24, dtype=torch.float32, device=device)
    results = run(data.with_(sinks=sink / (3 + torch.arange(6, device=device))), impl, causal=True)
    assert (results.dsinks.abs() <= 1.001 * data.dlse.abs().sum((0, 2))).all() and not results.out.any()


@pytest.mark.parametrize("impl, device", WHERE)
def test_a_second_derivative_through_out_or_lse_and_no_third(impl, device):
    """The numbers are asked in test_second.py."""
    data = sized(impl, device)
    for through in (0, 1):
        inputs = leaves(data)
        result = attend(data, inputs, impl)[through]
        (dq,) = torch.autograd.grad(result.float().square().sum(), inputs[:1], create_graph=True)
        (second,) = torch.autograd.grad(dq.float().square().sum(), inputs[:1], create_graph=True)
        assert second.isfinite().all() and second.any()
        with pytest.raises(NotImplementedError, match="a third derivative of flashattn's attention is not implemented"):
            second.float().sum().backward()


# ----------------------------------------------------------------------------------------------------------------- the same again


@pytest.mark.parametrize("kind", ["dense", "packed"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("impl, device", WHERE)
def test_checkpointing(impl, device, reentrant, kind):
    data = sized(impl, device, kind)
    inputs = leaves(data)
    out, lse = checkpoint(lambda *inputs: attend(data, inputs, impl, causal=True), *inputs, use_reentrant=reentrant)
    gradients = torch.autograd.grad((out, lse), inputs, (data.dout, data.dlse)) if not reentrant else backward(out, lse, data, inputs)
    assert same_bits(Results(out.detach(), lse.detach(), *gradients), run(data, impl, causal=True))


def backward(out, lse, data, inputs):
    """Reentrant checkpointing works with backward() alone."""
    torch.autograd.backward((out, lse), (data.dout, data.dlse))
    return [x.grad for x in inputs]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["dense", "packed"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_thirty_runs(dim, kind):
    data = sized(*GPU, kind, seqlen_q=2000, seqlen_k=3000, heads=8, heads_kv=2, dim=dim)
    first = run(data, "portable", causal=True, deterministic=True)
    assert all(same_bits(first, run(data, "portable", causal=True, deterministic=True)) for _ in range(29))


# ------------------------------------------------------------------------------------------------------------------------- memory


def peak(call, rows, dim, layout, causal, batch=1):
    """Most bytes at once of a forward and a backward, inputs and results included."""
    shape = (batch, rows, 8, dim) if layout == "bshd" else (batch, 8, rows, dim)
    torch.zeros(1, device="cuda", requires_grad=True).sum().backward()  # autograd's thread keeps the last gradients until its next task
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(3))
    out = call(q, k, v, causal)
    gradients = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert len(gradients) == 3
    return torch.cuda.max_memory_allocated() - before


def ours(q, k, v, causal):
    return attention(q, k, v, causal=causal, impl="portable")


def ours_packed(q, k, v, causal):
    cu = torch.tensor([0, q.shape[1] // 3, q.shape[1]], dtype=torch.int32, device="cuda")
    return attention_varlen(q[0], k[0], v[0], cu, cu, causal=causal, impl="portable")


def ours_packed_equal(q, k, v, causal):
    """The batch entries as sequences; one tensor says where they start, for queries and keys."""
    cu = torch.arange(0, q.shape[0] + 1, dtype=torch.int32, device="cuda") * q.shape[1]
    out = attention_varlen(*(x.flatten(0, 1) for x in (q, k, v)), cu, cu, causal=causal, impl="portable")
    return out.view(*q.shape[:-1], -1)


def flash(q, k, v, causal):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(q, k, v, is_causal=causal)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("call", [ours, ours_packed])
def test_memory_is_linear_in_length(call, dim, causal):
    short, long = (peak(call, rows, dim, "bshd", causal) for rows in (8192, 16384))
    assert short > 7 * 8192 * 8 * dim * 2  # q, k, v, out and three gradients
    assert long <= 2 * short + MIB


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_memory_is_no_more_than_flash_attention_takes(dim, causal):
    assert peak(ours, 8192, dim, "bshd", causal) <= 1.15 * peak(flash, 8192, dim, "bhsd", causal)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_memory_of_packed_sequences_is_that_of_a_batch_of_them(dim, causal):
    """Also where a mask might leave rows without keys: with one tensor of lengths for both sides none can be, and nothing is copied."""
    packed, batch = (peak(call, 2048, dim, "bshd", causal, batch=4) for call in (ours_packed_equal, ours))
    assert packed <= batch + MIB
    assert packed <= 1.15 * peak(flash, 2048, dim, "bhsd", causal, batch=4)
