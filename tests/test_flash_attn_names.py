"""The drop-ins for flash-attn: every argument means what it means there, against a formula written out here.

The surprising fact: nothing here may use the library's own reference, whose windows and diagonals are spelled differently: a mistake in the
translation would be made twice.
"""

import inspect

import pytest
import torch

from flashattn import attention
from flashattn.integrations import flash_attn as fa
from flashattn.integrations import flash_attn_3 as fa3
from flashattn.integrations import options

PARAMETERS = inspect.signature(attention).parameters
needs = {name: pytest.mark.skipif(name not in PARAMETERS, reason=f"attention has no {name} yet") for name in ("softcap", "alibi_slopes")}
lacks_softcap = pytest.mark.skipif("softcap" in PARAMETERS, reason="attention has a softcap")
LENGTHS = [(5, 7), (7, 5), (4, 4)]


@pytest.fixture(autouse=True)
def _no_interpreter(monkeypatch):
    """What is tested here is above the kernels, and the names take no `impl`."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def naive(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None):
    """flash-attn's documented meaning, in float64, for one sequence [rows, heads, dim]: (out, lse [heads, rows])."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    i = torch.arange(len(q))[:, None] + len(k) - len(q)
    j = torch.arange(len(k))[None, :]
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.double()[:, None, None] * (i - j).abs()
    left, right = window_size
    keep = torch.ones(len(q), len(k), dtype=torch.bool)
    keep &= (j <= i) if causal else keep
    keep &= (j >= i - left) if left >= 0 else keep
    keep &= (j <= i + right) if right >= 0 else keep
    scores = scores.masked_fill(~keep, -torch.inf)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1).nan_to_num(), v), scores.logsumexp(-1)


def tensors(rows_q, rows_k, heads=4, heads_kv=2, batch=2, dim=8):
    generator = torch.Generator().manual_seed(0)
    shapes = ((batch, rows_q, heads, dim), (batch, rows_k, heads_kv, dim), (batch, rows_k, heads_kv, dim))
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


def expected(q, k, v, alibi_slopes=None, **options):
    slopes = [None] * len(q) if alibi_slopes is None else alibi_slopes.expand(len(q), -1)
    alone = [naive(*one, alibi_slopes=slope, **options) for *one, slope in zip(q, k, v, slopes, strict=True)]
    return tuple(torch.stack(parts) for parts in zip(*alone, strict=True))


def assert_same(found, wanted, inputs=(), wanted_inputs=None):
    torch.testing.assert_close(found, wanted.to(found.dtype))
    if inputs:
        cotangent = torch.linspace(-1, 1, found.numel(), dtype=found.dtype).view(found.shape)
        gradients = torch.autograd.grad(found, inputs, cotangent, retain_graph=True)
        torch.testing.assert_close(gradients, torch.autograd.grad(wanted, wanted_inputs or inputs, cotangent.double(), retain_graph=True))


CALLS = {
    "plain": {},
    "scale": {"softmax_scale": 0.7},
    "causal": {"causal": True},
    "window": {"window_size": (2, 1)},
    "left only": {"window_size": (1, -1)},
    "right only": {"window_size": (-1, 0)},
    "causal window": {"causal": True, "window_size": (2, 2)},
}


@pytest.mark.parametrize("rows", LENGTHS)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("function", [fa.flash_attn_func, fa3.flash_attn_func])
def test_dense(function, call, rows):
    q, k, v = tensors(*rows)
    out, lse = expected(q, k, v, **call)
    assert_same(function(q, k, v, **call), out, (q, k, v))
    found = function(q, k, v, return_attn_probs=True, **call)
    assert len(found) == (3 if function is fa.flash_attn_func else 2)
    torch.testing.assert_close(found[1], lse.float())
    if function is fa.flash_attn_func:
        assert found[2] is None


def test_positions_of_arguments():
    """q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs."""
    q, k, v = tensors(5, 7)
    out, lse, _ = fa.flash_attn_func(q, k, v, 0.0, 0.3, True, (3, 0), 0.0, None, True, True)
    wanted = expected(q, k, v, softmax_scale=0.3, causal=True, window_size=(3, 0))
    assert_same(out, wanted[0])
    assert_same(lse, wanted[1])
    out, lse = fa3.flash_attn_func(q, k, v, 0.3, True, None, None, None, None, (3, 0), 0, 0.0, 1, None, True, 0, True)
    assert_same(out, wanted[0])
    assert_same(lse, wanted[1])
    cu = torch.tensor([0, 5, 5], dtype=torch.int32)
    packed = fa.flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 5, 5, 0.0, 0.3, True, (3, 0), 0.0, None, True, True, None)
    assert [x if x is None else tuple(x.shape) for x in packed] == [(5, 4, 8), (4, 5), None]
    packed = fa3.flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 5, 5, None, None, 0.3, True)
    assert_same(packed, naive(q[0], k[0, :5], v[0, :5], softmax_scale=0.3, causal=True)[0])


def test_packed_tensors_of_a_dense_batch():
    q, k, v = tensors(6, 6, heads_kv=4)
    out, lse = expected(q, k, v, causal=True)
    qkv, kv = torch.stack([q, k, v], dim=2), torch.stack([k, v], dim=2)
    assert_same(fa.flash_attn_qkvpacked_func(qkv, causal=True), out, (q, k, v))
    assert_same(fa.flash_attn_kvpacked_func(q, kv, causal=True), out, (q, k, v))
    assert_same(fa.flash_attn_kvpacked_func(q, kv, causal=True, return_attn_probs=True)[1], lse)
    assert_same(fa3.flash_attn_qkvpacked_func(qkv, causal=True), out, (q, k, v))
    q, k, v = tensors(6, 6)
    heads = torch.cat([q, k, v], dim=2)
    assert_same(fa3.flash_attn_qkvpacked_func(heads, causal=True, num_heads_q=4), expected(q, k, v, causal=True)[0], (q, k, v))


def test_varlen_and_its_packed_tensors():
    lengths = [3, 0, 4]
    cu = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    q, k, v = (x[0] for x in tensors(7, 7, heads_kv=4, batch=1))
    alone = [naive(*one, causal=True) for one in zip(*(x.split(lengths) for x in (q, k, v)), strict=True)]
    out, lse = torch.cat([one[0] for one in alone]), torch.cat([one[1] for one in alone], dim=1)
    for maximum in (4, None, torch.tensor(4)):
        assert_same(fa.flash_attn_varlen_func(q, k, v, cu, cu, maximum, maximum, causal=True), out, (q, k, v))
    found = fa.flash_attn_varlen_qkvpacked_func(torch.stack([q, k, v], dim=1), cu, 4, causal=True, return_attn_probs=True)
    assert_same(found[0], out, (q, k, v))
    assert_same(found[1], lse)
    assert_same(fa.flash_attn_varlen_kvpacked_func(q, torch.stack([k, v], dim=1), cu, cu, 4, 4, causal=True), out, (q, k, v))


VARIANTS = [
    pytest.param("softcap", 1.5, marks=needs["softcap"]),
    pytest.param("alibi_slopes", torch.tensor([0.5, 0.25, 1.0, 2.0]), marks=needs["alibi_slopes"]),
    pytest.param("alibi_slopes", torch.arange(8.0).view(2, 4), marks=needs["alibi_slopes"]),
]


@pytest.mark.parametrize("name, value", VARIANTS)
def test_variants(name, value):
    q, k, v = tensors(5, 7)
    out, lse = expected(q, k, v, causal=True, **{name: value})
    found = fa.flash_attn_func(q, k, v, causal=True, return_attn_probs=True, **{name: value})
    assert_same(found[0], out, (q, k, v))
    assert_same(found[1], lse)
    if name == "softcap":
        assert_same(fa3.flash_attn_func(q, k, v, causal=True, softcap=value), out)
    cu_q, cu_k = (torch.arange(3, dtype=torch.int32) * rows for rows in (5, 7))
    packed = (x.flatten(0, 1) for x in (q, k, v))
    assert_same(fa.flash_attn_varlen_func(*packed, cu_q, cu_k, 5, 7, causal=True, **{name: value}), out.flatten(0, 1))


def test_dropout():
    q, k, v = tensors(5, 7)
    cu_q, cu_k = (torch.arange(3, dtype=torch.int32) * rows for rows in (5, 7))
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    calls = {
        "dense": lambda: fa.flash_attn_func(q, k, v, 0.5, causal=True),
        "kvpacked": lambda: fa.flash_attn_kvpacked_func(q, torch.stack([k, v], dim=2), 0.5, causal=True),
        "varlen": lambda: fa.flash_attn_varlen_func(*rows, cu_q, cu_k, 5, 7, 0.5, causal=True).view(q.shape),
    }
    for call in calls.values():
        torch.manual_seed(0)
        seed = torch.randint(2**63 - 1, (2,), dtype=torch.int64)
        torch.manual_seed(0)
        torch.testing.assert_close(call(), attention(q, k, v, causal=True, dropout_p=0.5, dropout_seed=seed))


@lacks_softcap
def test_what_attention_lacks_is_named():
    q, k, v = tensors(5, 7)
    with pytest.raises(NotImplementedError, match="softcap is not implemented by flashattn"):
        fa.flash_attn_func(q, k, v, softcap=1.5)
    with pytest.raises(NotImplementedError, match="alibi_slopes is not implemented"):
        fa.flash_attn_func(q, k, v, alibi_slopes=torch.ones(4))


def test_options_reach_attention_as_soon_as_it_takes_them(monkeypatch):
    monkeypatch.setitem(options.ACCEPTED, attention, frozenset({"softcap", "alibi_slopes"}))
    slopes = torch.zeros(4)
    assert options.wanted(attention, softcap=1.5, alibi_slopes=slopes) == {"softcap": 1.5, "alibi_slopes": slopes}
    assert options.wanted(attention, softcap=0.0, alibi_slopes=None) == {}
    with pytest.raises(NotImplementedError, match="sinks is not implemented"):
        options.wanted(attention, sinks=slopes)


def refusals():
    x = torch.ones(1)
    for name in ("qv", "q_descale", "k_descale", "v_descale"):
        yield fa3.flash_attn_func, (), {name: x}, f"{name} is not implemented"
    yield fa3.flash_attn_func, (), {"attention_chunk": 64}, "attention_chunk=64 is not implemented"
    cu = torch.tensor([0, 5], dtype=torch.int32)
    yield fa.flash_attn_varlen_func, (cu, cu, 5, 5), {"block_table": x}, "block_table is not implemented"
    for name in ("seqused_q", "seqused_k"):
        yield fa3.flash_attn_varlen_func, (cu, cu, 5, 5), {name: cu}, f"{name} is not implemented"


@pytest.mark.parametrize("function, more, call, message", list(refusals()), ids=lambda x: "-".join(x) if isinstance(x, dict) else None)
def test_what_is_missing_is_named(function, more, call, message):
    q, k, v = tensors(5, 5)
    q, k, v = (x[0] for x in (q, k, v)) if more else (q, k, v)
    function(q, k, v, *more)
    with pytest.raises(NotImplementedError, match=message):
        function(q, k, v, *more, **call)


def test_wrong_arguments_are_named():
    q, k, v = tensors(5, 5)
    with pytest.raises(ValueError, match=r"window_size=3: expected \(left, right\)"):
        fa.flash_attn_func(q, k, v, window_size=3)
    with pytest.raises(ValueError, match=r"qkv has shape \(2, 5, 4, 8\): expected 3 in dimension 2"):
        fa.flash_attn_qkvpacked_func(q)
    with pytest.raises(ValueError, match=r"kv has shape \(2, 5, 2, 8\): expected 2 in dimension 1"):
        fa.flash_attn_varlen_kvpacked_func(q, k, None, None, 1, 1)
    with pytest.raises(ValueError, match="num_heads_q=3 of the 4 heads"):
        fa3.flash_attn_qkvpacked_func(q, num_heads_q=3)
    with pytest.raises(ValueError, match="or 4 dimensions and num_heads_q"):
        fa3.flash_attn_qkvpacked_func(q)
    with pytest.raises(NotImplementedError, match="flash_attn_with_kvcache"):
        fa.flash_attn_with_kvcache(q, k, v)


def test_a_compiled_call_is_one_graph():
    q, k, v = tensors(5, 7)

    def call(q, k, v):
        return fa.flash_attn_func(q, k, v, causal=True, window_size=(3, -1), softcap=0.0)

    torch._dynamo.reset()
    assert torch.equal(torch.compile(call, backend="aot_eager", fullgraph=True)(q, k, v), call(q, k, v))
