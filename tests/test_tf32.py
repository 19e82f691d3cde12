"""float32 with TF32 products: what switches them on, and how far off the results may be.

TF32 keeps 10 bits after the point, so its eps is 2^-10. PyTorch's own products under the same switch are no peer to measure against:
cuBLAS rounds operands, while tensor cores that are handed float32 cut them off, and cutting makes every product smaller and none larger,
up to 2 eps. That error doesn't average out; it is 2.5 times the peer's and would be allowed 1.5 times. So the peer is computed here, in
float32 with the operands of every product cut off, and the way a kernel does it: with delta = rowsum(dO * out), or what cancels exactly in
plain PyTorch would be allowed nothing. The tolerance is then that of support.py, unchanged.

The surprising fact: PyTorch has four spellings of the switch, and two of them can no longer be read once one of the others was used.
"""

import math
from itertools import pairwise

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flashattn.reference import keep_mask
from flashattn.torch_ops import describe
from support import Results, compare, dense, expect, packed, run, same_bits

MATMUL = torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def _restored():
    before = torch.get_float32_matmul_precision(), MATMUL.fp32_precision, torch.backends.fp32_precision
    yield
    torch.backends.fp32_precision = before[2]
    torch.set_float32_matmul_precision(before[0])
    MATMUL.fp32_precision = before[1]


# --------------------------------------------------------------------------------------------------------------------- the switch

SWITCHES = {
    "set_float32_matmul_precision": (torch.set_float32_matmul_precision, "high", "highest"),
    "allow_tf32": (lambda value: setattr(MATMUL, "allow_tf32", value), True, False),
    "cuda.matmul.fp32_precision": (lambda value: setattr(MATMUL, "fp32_precision", value), "tf32", "ieee"),
    "backends.fp32_precision": (lambda value: setattr(torch.backends, "fp32_precision", value), "tf32", "ieee"),
}


def described(dtype, device) -> bool:
    with FakeTensorMode():
        q = torch.empty(1, 8, 2, 16, dtype=dtype, device=device)
        return describe(q, q, 16, None, None, None, None, 0.25, None, None, False, False).tf32


@pytest.mark.parametrize("switch", SWITCHES)
def test_every_switch_of_pytorch_is_seen(switch):
    flip, on, off = SWITCHES[switch]
    for value in (on, off, on):
        flip(value)
        assert described(torch.float32, "cuda") == (value == on)
    assert not described(torch.bfloat16, "cuda") and not described(torch.float32, "cpu")


def test_tf32_is_off_unless_asked_for():
    assert not described(torch.float32, "cuda")


# ----------------------------------------------------------------------------------------------------------------------- the peer


def cut(x):
    """The 10 bits after the point that TF32 has."""
    return (x.contiguous().view(torch.int32) & -(1 << 13)).view(torch.float32)


def below(p):
    """A probability of 1 may be rebuilt as 1 - 2^-24 in a backward pass, of which 1 - 2^-10 is left: the most that cutting off takes."""
    return p * (1 - 2.0**-20)


def peer(data, operand, rebuilt, causal=False, window=None) -> Results:
    """Forward and backward in float32, with operand(x) for both operands x of every product; rebuilt(p): probabilities of the backward."""
    if data.packed:
        return packed_peer(data, operand, rebuilt, causal, window)
    q, k, v, dout = (x.transpose(1, 2) for x in (data.q, data.k, data.v, data.dout))  # [batch, heads, rows, dim]
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    times = lambda a, b: operand(a) @ operand(b)  # noqa: E731
    scale = q.shape[-1] ** -0.5
    keep = keep_mask(q.shape[2], k.shape[2], causal=causal, window=window, device=q.device)
    s = (scale * times(q, k.mT)).masked_fill(~keep, -math.inf)
    lse = s.logsumexp(-1)
    p = torch.where(keep, torch.exp(s - lse[..., None]), 0.0)
    out = times(p, v)
    delta = (dout * out).sum(-1) - data.dlse
    ds = torch.where(keep, p * (times(dout, v.mT) - delta[..., None]), 0.0)
    dq, dk, dv = scale * times(ds, k), scale * times(ds.mT, q), times(rebuilt(p).mT, dout)
    dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
    out, dq, dk, dv = (x.transpose(1, 2) for x in (out, dq, dk, dv))
    return Results(out, lse, dq, dk, dv)


def packed_peer(data, *how) -> Results:
    """Each sequence alone."""
    parts = []
    for (q0, q1), (k0, k1) in zip(pairwise(data.cu_q.tolist()), pairwise(data.cu_k.tolist()), strict=True):
        q, k, v, dout = (x[None, a:b] for x, a, b in ((data.q, q0, q1), (data.k, k0, k1), (data.v, k0, k1), (data.dout, q0, q1)))
        alone = data.with_(q=q, k=k, v=v, dout=dout, dlse=data.dlse[None, :, q0:q1], cu_q=None, cu_k=None)
        parts.append(peer(alone, *how))
    return Results(**{
        name: torch.cat([getattr(part, name)[0] for part in parts], dim=-1 if name == "lse" else 0)
        for name in ("out", "lse", "dq", "dk", "dv")
    })  # fmt: skip


SIZES = {
    "plain": (lambda **at: dense(256, batch=2, dim=64, **at), {}),
    "causal-grouped": (lambda **at: dense(301, 503, batch=2, heads=4, heads_kv=2, dim=128, **at), {"causal": True}),
    "values-narrower": (lambda **at: dense(190, 333, heads=4, heads_kv=1, dim=72, dim_v=24, **at), {"window": (100, 20)}),
    "rows-without-keys": (lambda **at: dense(250, 180, heads=3, dim=256, **at), {"causal": True}),
    "unaligned": (lambda **at: dense(150, 200, dim=113, **at), {}),
    "one-key": (lambda **at: dense(130, 1, dim=64, **at), {}),
    "packed": (lambda **at: packed([100, 0, 37, 200], [90, 5, 37, 150], heads=4, heads_kv=2, dim=64, **at), {"causal": True}),
}


def case_of(name, device):
    make, options = SIZES[name]
    return make(dtype=torch.float32, device=device), options


@pytest.mark.parametrize("case", SIZES)
def test_the_peer_with_whole_operands_is_attention_in_float32(case):
    data, options = case_of(case, "cpu")
    compare(peer(data, lambda x: x, lambda p: p, **options), expect(data, **options), torch.float32)


def test_cutting_off():
    x = torch.tensor([1.0, 1 + 2**-10, 1 + 2**-10 + 2**-11, -(1 + 2**-11), 3e-30, 0.0])
    assert torch.equal(cut(x), torch.tensor([1.0, 1 + 2**-10, 1 + 2**-10, -1.0, cut(x)[4], 0.0]))
    assert 0 <= (3e-30 - cut(x)[4]) / 3e-30 < 2**-10


# -------------------------------------------------------------------------------------------------------------------- the numbers


@pytest.mark.gpu
@pytest.mark.parametrize("case", SIZES)
def test_against_the_oracle(case):
    data, options = case_of(case, "cuda")
    exact = run(data, "portable", **options)
    expected = expect(data, **options)._replace(peer=peer(data, cut, below, **options))
    MATMUL.fp32_precision = "tf32"
    found = run(data, "portable", **options)
    MATMUL.fp32_precision = "ieee"
    compare(found, expected, torch.float32)
    assert not torch.equal(found.lse, exact.lse), "these are not TF32's numbers"
    assert same_bits(run(data, "portable", **options), exact), "and afterwards they are float32's again"
