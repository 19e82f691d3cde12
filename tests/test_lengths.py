"""Lengths of keys (`seqlens_k`): each batch entry as if it were alone with the keys that it has, whatever the others hold.

The surprising fact: the bottom-right corner is that of the keys there are. So `causal=True` is for new queries against a cache, and for
queries that are padded as keys are it is "top-left" that means what padding means.
"""

import math

import pytest
import torch
from torch.func import vmap

from aot import Job
from flashattn import attention, explain
from flashattn.dispatch.select import select
from flashattn.problem import Problem
from flashattn.reference import attention_reference
from flashattn.torch_ops import sharding
from inputs import dense, with_extras
from launches import launch_of  # noqa: F401  (of the jobs)
from support import WHERE, WHERE_DTYPE, Results, compare, expect, run, same_bits
from test_mods import curve, thirds

LENGTHS = 70, 0, 33
CASES = {
    "plain": {},
    "causal": {"causal": True},
    "top-left": {"causal": "top-left"},
    "window": {"window": (20, 1)},
    "everything": {"causal": True, "softcap": 3.0, "slopes": "entry", "sinks": 0.5},
}


def lengths(device, *values):
    return torch.tensor(values or LENGTHS, dtype=torch.int32, device=device)


def inputs(device, dtype=torch.float32, rows=7, slopes="", sinks=None, strides="contiguous"):
    data = dense(rows, 70, batch=len(LENGTHS), heads=2, heads_kv=1, dim=24, dtype=dtype, device=device, seed=3, strides=strides)
    return with_extras(data, slopes=slopes, sinks=sinks)


def dirty(data, number=math.nan):
    """With this number in the keys and values that no entry has."""
    k, v = data.k.clone(), data.v.clone()
    for n, used in enumerate(LENGTHS):
        k[n, used:] = v[n, used:] = number
    return data.with_(k=k, v=v)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("impl, device, dtype", WHERE_DTYPE)
def test_each_entry_is_as_if_alone(impl, device, dtype, case):
    options = dict(CASES[case])
    data = inputs(device, dtype, slopes=options.pop("slopes", ""), sinks=options.pop("sinks", None))
    found = run(dirty(data), impl, seqlens_k=lengths(device), **options)
    dsinks = 0.0
    for n, used in enumerate(LENGTHS):
        at = slice(n, n + 1)
        alone = {name: getattr(data, name)[at] for name in ("q", "dout", "dlse")} | {name: getattr(data, name)[at, :used] for name in "kv"}
        slopes = None if data.slopes is None else data.slopes[n]
        expected = expect(data.with_(**alone, slopes=slopes), **options)
        own = Results(found.out[at], found.lse[at], found.dq[at], found.dk[at, :used], found.dv[at, :used])
        compare(own, expected, dtype)
        assert not found.dk[n, used:].any() and not found.dv[n, used:].any(), "of keys that it hasn't"
        dsinks = dsinks + (0.0 if data.sinks is None else expected.oracle.dsinks)
    if data.sinks is not None:
        torch.testing.assert_close(found.dsinks.double(), dsinks, atol=0, rtol=0.02 if dtype != torch.float32 else 1e-4)


@pytest.mark.parametrize("impl, device", WHERE)
def test_what_an_entry_has_not_changes_no_bit(impl, device):
    data, options = inputs(device, sinks=0.0), {"seqlens_k": lengths(device), "causal": "top-left", "dropout_p": 0.3, "dropout_seed": 5}
    assert same_bits(run(dirty(data), impl, **options), run(dirty(data, 0.0), impl, **options))
    whole = inputs(device, strides="fused")
    full = {"seqlens_k": lengths(device, *[70] * len(LENGTHS)), "causal": True}
    assert same_bits(run(whole, impl, **full), run(whole, impl, causal=True)), "and all of the keys are all of them"


@pytest.mark.parametrize("impl, device", WHERE)
def test_dropout_is_that_of_the_whole(impl, device):
    data, options = inputs(device), {"seqlens_k": lengths(device), "dropout_p": 0.3, "dropout_seed": 5}
    out = attention(data.q, data.k, data.v, impl=impl, **options)
    expected = attention_reference(data.q.double(), data.k.double(), data.v.double(), **options)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(1, 2, 7, 70), (3, 1, 1, 1), (3, 1, 7, 70)], ids=str)
def test_beside_a_bias(shape):
    data, bias = inputs("cpu"), torch.randn(shape, dtype=torch.float16)
    found = run(dirty(data).with_(bias=bias), "eager", seqlens_k=lengths("cpu"), causal=True)
    leaves = [x.double().requires_grad_() for x in (data.q, data.k, data.v, bias)]
    *three, bias64 = leaves
    out, lse = attention_reference(*three, bias=bias64, seqlens_k=lengths("cpu"), causal=True, return_lse=True)
    grads = torch.autograd.grad((out, lse), leaves, (data.dout.double(), data.dlse.double().masked_fill(lse.isinf(), 0.0)))
    for ours, theirs in zip((found.out, found.dq, found.dk, found.dv), (out, *grads[:3]), strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.dbias.double(), grads[3], atol=1e-3, rtol=2e-3)
    masked = [attention(x.q, x.k, x.v, bias=bias > 0, seqlens_k=lengths("cpu"), impl="eager") for x in (data, dirty(data))]
    assert torch.equal(*masked), "a mask reads nothing more"


@pytest.mark.parametrize("impl, device", WHERE)
def test_beside_mods(impl, device):
    """Programs of scores and pairs, of far scores too, whose backward looks at the keys again."""
    data = inputs(device, rows=3, sinks=0.0)
    table = torch.tensor([[1.0, 0.5, 2.0, 1.5], [0.7, 1.2, 3000.0, 1.0]], device=device)
    start = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
    given = {"score_mod": curve, "score_mod_aux": (table,), "mask_mod": thirds, "mask_mod_aux": (start,), "seqlens_k": lengths(device)}
    found = run(dirty(data), impl, grads="qkv", **given)
    leaves = [x.double().requires_grad_() for x in (data.q, data.k, data.v)]
    given |= {"score_mod_aux": (table.double(),), "sinks": data.sinks.double()}
    out, lse = attention_reference(*leaves, return_lse=True, **given)
    assert (lse > 4096).any(), "whose float32 is off by 2^-12, and so is a probability"
    grads = torch.autograd.grad((out, lse), leaves, (data.dout.double(), data.dlse.double()))
    for ours, theirs in zip((found.out, found.dq, found.dk, found.dv), (out, *grads), strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=2e-3 * theirs.abs().max().item(), rtol=0)


@pytest.mark.parametrize("impl, device", WHERE)
def test_derivatives_forwards_and_of_derivatives(impl, device):
    data = inputs(device, rows=3, sinks=0.0)
    clean, options = (data.q, data.k, data.v), {"seqlens_k": lengths(device), "causal": True, "sinks": data.sinks}
    nan = dirty(data)
    tangents = [torch.randn_like(x) for x in clean]
    ours, theirs = ((function, [x.to(dtype) for x in primals], [x.to(dtype) for x in tangents], options | {"sinks": data.sinks.to(dtype)})
                    for function, primals, dtype in ((attention, (nan.q, nan.k, nan.v), torch.float32),
                                                     (attention_reference, clean, torch.float64)))  # fmt: skip

    def both(function, primals, tangents, options):
        named = options | ({"impl": impl} if function is attention else {})
        moved = torch.func.jvp(lambda *x: function(*x, **named), tuple(primals), tuple(tangents))
        if impl == "portable":  # whose second derivatives are eager's
            return moved
        leaves = [x.detach().requires_grad_() for x in primals]
        dq, dk = torch.autograd.grad(function(*leaves, **named).square().sum(), leaves[:2], create_graph=True)
        second = torch.autograd.grad((dq * tangents[0]).sum() + (dk[0] * tangents[1][0]).sum(), leaves)
        return (*moved, *second)

    for x, y in zip(both(*ours), both(*theirs), strict=True):
        torch.testing.assert_close(x.double(), y, atol=1e-4, rtol=1e-4)


def test_vmap_folds_the_lengths_of_samples():
    data = inputs("cpu")
    qkv = [torch.stack([x, x.flip(0)]).requires_grad_() for x in (data.q, data.k, data.v)]
    for lens, dim in ((lengths("cpu"), None), (torch.stack([lengths("cpu"), lengths("cpu").flip(0)], 1), 1)):
        call = lambda q, k, v, lens: attention(q, k, v, seqlens_k=lens, impl="eager")  # noqa: E731
        together = vmap(call, in_dims=(0, 0, 0, dim))(*qkv, lens)
        apart = torch.stack([call(*(x[i] for x in qkv), lens if dim is None else lens[:, i]) for i in range(2)])
        torch.testing.assert_close(together, apart)
        grads = [torch.autograd.grad(x.square().sum(), qkv) for x in (together, apart)]
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("dim", [None, 0, 1])
def test_gradients_inside_of_vmap(dim):
    """The backward of a folded batch has folded lengths too."""
    data, lens = inputs("cpu"), lengths("cpu")
    qkv = [torch.stack([x, x.flip(0)]).nan_to_num() for x in (data.q, data.k, data.v)]
    many = lens if dim is None else torch.stack([lens, lens.flip(0)], dim)
    call = lambda q, k, v, lens: attention(q, k, v, seqlens_k=lens, impl="eager").square().sum()  # noqa: E731
    gradients = torch.func.grad(call, argnums=(0, 1, 2))
    together = vmap(gradients, in_dims=(0, 0, 0, dim))(*qkv, many)
    apart = [gradients(*(x[i] for x in qkv), lens if dim is None else many.select(dim, i)) for i in range(2)]
    torch.testing.assert_close(list(together), [torch.stack(pair) for pair in zip(*apart, strict=True)])


@pytest.mark.parametrize("mods", [{}, {"score_mod": "alibi", "score_mod_aux": (torch.ones(4),)}], ids=["plain", "mod"])
def test_lengths_that_changed_before_the_backward_are_noticed(mods):
    q, lens = torch.randn(2, 6, 4, 8, requires_grad=True), torch.tensor([3, 6], dtype=torch.int32)
    out = attention(q, q, q, seqlens_k=lens, impl="eager", **mods)
    lens.fill_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_compiled_call_is_one_graph():
    data, lens = inputs("cpu"), lengths("cpu")
    leaves = [x.clone().requires_grad_() for x in (data.q, data.k, data.v)]

    def call(q, k, v, lens):
        return attention(q, k, v, seqlens_k=lens, causal=True, impl="eager").square().sum()

    found = torch.autograd.grad(torch.compile(call, backend="aot_eager", fullgraph=True)(*leaves, lens), leaves)
    assert all(torch.equal(a, b) for a, b in zip(found, torch.autograd.grad(call(*leaves, lens), leaves), strict=True))


def test_explain_says_who_takes_lengths():
    x = torch.empty(3, 70, 4, 64, dtype=torch.bfloat16, device="meta")
    found = explain(x, x, x, seqlens_k=torch.empty(3, dtype=torch.int32, device="meta"), causal="top-left")
    assert found.problem.used_k and found.problem.top_left, "for which length is unknown"
    assert "70 queries x 70 keys, or fewer by seqlens_k" in str(found) and "forward:  at most " in str(found)
    problem = Problem("bfloat16", 4, 70, 70, 4, 4, 64, 64, 0.125, capability=(9, 0), aligned=True, used_k=True)
    assert {select(problem, direction).name for direction in ("forward", "backward", "tangent")} == {"portable"}
    with pytest.raises(ValueError, match="seqlens_k with cu_seqlens"):
        explain(x[0], x[0], x[0], *[torch.empty(2, dtype=torch.int32, device="meta")] * 2, seqlens_k=torch.empty(1, device="meta"))


BAD = {
    "a list": ([70, 0, 33], TypeError, "seqlens_k is a list: expected a torch.Tensor or None"),
    "int64": (torch.tensor(LENGTHS), TypeError, r"seqlens_k has dtype torch.int64: expected torch.int32"),
    "too few": (lengths("cpu")[:2], ValueError, r"seqlens_k has shape \(2,\): expected \[batch\] \(3,\)"),
    "elsewhere": (lengths("meta"), ValueError, "seqlens_k is on meta and q on cpu"),
    "too long": (lengths("cpu", 70, 0, 71), ValueError, "seqlens_k has 71 at entry 2 but k has 70 rows: expected 0 to 70"),
    "negative": (lengths("cpu", 70, -1, 33), ValueError, "seqlens_k has -1 at entry 1 but k has 70 rows: expected 0 to 70"),
}


@pytest.mark.parametrize("lens, kind, words", BAD.values(), ids=BAD)
def test_bad_lengths_are_named(lens, kind, words):
    data = inputs("cpu")
    with pytest.raises(kind, match=words):
        attention(data.q, data.k, data.v, seqlens_k=lens)


def test_lengths_are_sharded_with_the_batch():
    assert [sharding._dimension("cu_seqlens_k", None, False, by) for by in (sharding.BATCH, sharding.HEADS)] == [0, None]


@pytest.mark.gpu
def test_on_a_gpu_nothing_waits_and_bad_lengths_stay_inside(monkeypatch):
    data, bad = inputs("cuda"), lengths("cuda", 1000, -5, 33)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = run(data, "portable", seqlens_k=bad, causal=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert same_bits(found, run(data, "portable", seqlens_k=lengths("cuda"), causal=True))
    monkeypatch.setenv("FLASHATTN_CHECK", "1")
    with pytest.raises(ValueError, match="seqlens_k has 1000 at entry 0"):
        run(data, "portable", seqlens_k=bad)


COMPILED = Problem("bfloat16", 4, 500, 500, 4, 2, 64, 64, 0.125, window_right=0, capability=(9, 0), used_k=True)


@pytest.mark.compile_only
@pytest.mark.parametrize("job", [Job("launches.launch_of", (COMPILED, name), 90) for name in ("forward", "dkdv")], ids=str)
def test_it_compiles_and_spills_nothing(compiled):
    assert compiled.problems() == []
