"""Dropout on the Hopper kernels, asked for by name: the mask is the one of every other kernel, and numbers are the oracle's.

Few shapes, since each kind of call is compiled for seconds. The surprising fact: a warpgroup finds its rows in a packed sequence from the
cumulative lengths, and columns in groups of eight, so a mask that is right in the first tile says nothing about the next: masks are whole.
"""

from itertools import combinations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from flashattn import attention, attention_varlen, dropout_mask, explain
from support import check, dense, packed, run, same_bits, with_extras
from test_hopper import BFLOAT16, FLOAT16, gpu, on_hopper
from test_hopper_backward import PACKED
from test_hopper_variants import MASKS
from test_variants import VARIANTS

pytestmark = [gpu, on_hopper]
DIMS = [64, 128, 192, 256]
DROPPED = {"dropout_p": 0.3, "dropout_seed": 5}


def grads_of(dim: int) -> str:
    """Large head dims have no backward of this kernel with dropout."""
    return "" if dim > 128 else "qkvs"


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dim", DIMS)
def test_against_the_oracle(dim, mask):
    lengths = {"none": (301, 703), "causal": (703, 301), "window": (512, 640)}[mask]
    data = dense(*lengths, batch=2, heads=4, heads_kv=2, dim=dim, dim_v=min(dim, 128) if dim == 192 else dim, **BFLOAT16)
    check(data, "hopper", grads=grads_of(dim), **DROPPED, **MASKS[mask])


@pytest.mark.parametrize("case", range(len(PACKED)))
@pytest.mark.parametrize("dim", [64, 128])
def test_packed(dim, case):
    queries, keys, tails = PACKED[case]
    for mask in ({"causal": True}, {"causal": "top-left"}):
        check(packed(queries, keys, heads=4, heads_kv=2, dim=dim, **tails, **FLOAT16), "hopper", **DROPPED, **mask)


@pytest.mark.parametrize("variant", VARIANTS)
def test_beside_other_variants(variant):
    extras, options = VARIANTS[variant]
    data = with_extras(dense(301, 703, batch=2, heads=4, heads_kv=2, dim=128, **BFLOAT16), **extras)
    check(data, "hopper", causal=True, **DROPPED, **options)


@pytest.mark.parametrize("grads", ["q", "k", "v", "kv", "qv"])
def test_only_what_is_asked_for(grads):
    check(dense(301, heads=4, heads_kv=2, dim=64, **BFLOAT16), "hopper", grads=grads, causal=True, **DROPPED)


@pytest.mark.parametrize("p", [1e-3, 0.9, 1.0])
def test_probabilities(p):
    found = check(dense(301, 257, heads=4, dim=128, **BFLOAT16), "hopper", dropout_p=p, dropout_seed=5)
    if p == 1.0:
        assert not found.out.any() and not found.dv.any()


@pytest.mark.parametrize("heads_kv", [1, 4])
@pytest.mark.parametrize("rows, dim", [((448, 256), 64), ((320, 128), 128), ((130, 256), 256)])
def test_what_is_kept_is_the_mask(rows, dim, heads_kv):
    """In the forward from out, v being the identity; in the backward from dv, dout being it: one mask for both, and for all head dims."""
    rows_q, rows_k = rows
    values = min(rows_k, dim)
    q, k = torch.zeros(2, rows_q, 4, dim, **BFLOAT16), torch.zeros(2, rows_k, heads_kv, dim, **BFLOAT16)
    v = torch.zeros(2, rows_k, heads_kv, dim, **BFLOAT16)
    mask = dropout_mask(0.3, 7, 2, 4, rows_q, rows_k, device="cuda")
    for first in range(0, rows_k, values):
        v.zero_()[:, first : first + values, :, :values] = torch.eye(values, **BFLOAT16)[None, :, None]
        out = attention(q, k, v, dropout_p=0.3, dropout_seed=7, impl="hopper")
        assert torch.equal(out.transpose(1, 2) != 0, mask[..., first : first + values])
    if dim > 128 or heads_kv != 4:
        return
    for first in range(0, rows_q, dim):
        size = min(dim, rows_q - first)
        leaf = v.clone().requires_grad_()
        dout = torch.zeros(2, rows_q, 4, dim, **BFLOAT16)
        dout[:, first : first + size, :, :size] = torch.eye(size, **BFLOAT16)[None, :, None]
        (dv,) = torch.autograd.grad(attention(q, k, leaf, dropout_p=0.3, dropout_seed=7, impl="hopper"), leaf, dout)
        assert torch.equal(dv.permute(0, 2, 3, 1)[:, :, :size] != 0, mask[:, :, first : first + size])


def test_a_sequence_has_the_mask_of_its_number():
    lens_q, lens_k = [130, 0, 70, 300], [128, 5, 0, 200]
    total = sum(lens_k)
    q, k = torch.zeros(sum(lens_q), 4, 64, **BFLOAT16), torch.zeros(total, 2, 64, **BFLOAT16)
    cu_q, cu_k = (torch.tensor([0, *lens], device="cuda").cumsum(0).int() for lens in (lens_q, lens_k))
    for n, (q0, q1, k0, k1) in enumerate(zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False)):
        mask = dropout_mask(0.4, 9, 4, 4, int(q1 - q0), int(k1 - k0), device="cuda")[n]
        for first in range(0, int(k1 - k0), 64):
            size = min(64, int(k1 - k0) - first)
            v = torch.zeros(total, 2, 64, **BFLOAT16)
            v[k0 + first : k0 + first + size, :, :size] = torch.eye(size, **BFLOAT16)[:, None]
            out = attention_varlen(q, k, v, cu_q, cu_k, dropout_p=0.4, dropout_seed=9, impl="hopper")
            assert torch.equal(out[q0:q1, :, :size].transpose(0, 1) != 0, mask[..., first : first + size])


def test_deterministic():
    data = dense(1024, batch=2, heads=4, heads_kv=2, dim=128, **BFLOAT16)
    first = run(data, "hopper", deterministic=True, causal=True, **DROPPED)
    assert all(same_bits(run(data, "hopper", deterministic=True, causal=True, **DROPPED), first) for _ in range(10))


@pytest.mark.parametrize("dim, backward", [(64, "hopper"), (128, "hopper"), (256, "portable")])
def test_what_is_chosen(dim, backward):
    data = dense(512, heads=4, dim=dim, **BFLOAT16)
    chosen = explain(data.q, data.k, data.v, dropout_p=0.1).kernels
    assert (chosen["forward"], chosen["backward"]) == ("hopper", backward)


@pytest.mark.parametrize("dim", [128, 256])
def test_both_passes_have_one_mask_also_where_kernels_differ(dim):
    """v is linear: the gradient of sum(out * c) in v, times v, sums to sum(out * c)."""
    data = dense(512, batch=2, heads=4, heads_kv=2, dim=dim, **BFLOAT16)
    leaf = data.v.clone().requires_grad_()
    out = attention(data.q, data.k, leaf, dropout_p=0.5, causal=True)
    (dv,) = torch.autograd.grad(out, leaf, data.dout)
    found, expected = ((x.double() * y.double()).sum() for x, y in ((dv, data.v), (out, data.dout)))
    size = (out.double() * data.dout).square().sum().sqrt()
    assert (found - expected).abs() < 0.05 * size


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant):
    data = dense(300, batch=2, heads=4, heads_kv=2, dim=64, **BFLOAT16)
    found = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        leaves = [x.clone().requires_grad_() for x in (data.q, data.k, data.v)]

        def call(*inputs):
            return attention(*inputs, dropout_p=0.5, causal=True, deterministic=True, impl="hopper")

        out = checkpoint(call, *leaves, use_reentrant=reentrant) if wrapped else call(*leaves)
        out.backward(data.dout)
        found.append([out.detach(), *(x.grad for x in leaves)])
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


@pytest.mark.parametrize("seed, repeats", [(None, False), (3, True)])
def test_replays_of_a_graph(seed, repeats):
    """Each has a mask of its own, the same in both passes; with a seed that is given, one mask."""
    data = dense(384, heads=4, dim=64, **BFLOAT16)
    leaf = data.v.clone().requires_grad_()

    def step():
        out = attention(data.q, data.k, leaf, dropout_p=0.5, dropout_seed=seed, impl="hopper")
        return out, torch.autograd.grad(out, leaf, data.dout)[0]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, dv = step()
    outs = []
    for _ in range(3):
        graph.replay()
        outs.append(out.detach().clone())
        found, expected = ((x.double() * y.double()).sum() for x, y in ((dv, data.v), (out, data.dout)))
        assert (found - expected).abs() < 0.05 * (out.double() * data.dout).square().sum().sqrt()
    assert [torch.equal(a, b) for a, b in combinations(outs, 2)] == [repeats] * 3
