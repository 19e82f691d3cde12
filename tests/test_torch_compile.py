"""torch.compile of forward and backward: one graph, the bits of the plain call, and no new graph for a new length.

The surprising fact: recompilation is not an error, it is only slow, so graphs are counted. Two are right: torch.compile takes every number
for a constant until it sees it change, and makes a second graph, for any length, when it does.
"""

import shutil

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad

from flashattn import attention, attention_varlen, eager
from support import WHERE, dense, packed, with_extras

EAGER, _, GPU = WHERE
STEPS = 20  # with as many different lengths


@pytest.fixture(autouse=True)
def _forget_graphs():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function, device="cpu"):
    """(the function in one graph, a counter of graphs). On a GPU with Inductor, which plans memory by the fake strides and asserts them."""
    counter = CompileCounterWithBackend("aot_eager" if device == "cpu" else "inductor")
    return torch.compile(function, backend=counter, fullgraph=True), counter


def inputs(device, rows_q, rows_k=None, **options):
    small = {"heads": 2, "heads_kv": 1, "dim": 8, "dim_v": 3, "dtype": torch.float32}
    shape = small if device == "cpu" else {"dim": 64, "dtype": torch.bfloat16}
    if isinstance(rows_q, list):
        return packed(rows_q, rows_k, device=device, **shape, **options)
    return dense(rows_q, rows_k, batch=2, device=device, **shape, **options)


def results(function, data, *more, lse_grad=True):
    """out, lse and the three gradients of function(q, k, v, *more) -> (out, lse)."""
    qkv = [x.detach().requires_grad_() for x in (data.q, data.k, data.v)]
    out, lse = function(*qkv, *more)
    outputs, cotangents = ([out, lse], [data.dout, data.dlse]) if lse_grad else ([out], [data.dout])
    return [out, lse, *torch.autograd.grad(outputs, qkv, cotangents)]


def same(found, expected) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# ----------------------------------------------------------------------------------------------------------------- forward and backward


@pytest.mark.parametrize("impl, device", [EAGER, GPU])
@pytest.mark.parametrize("layout, strides", [("bshd", "contiguous"), ("bhsd", "heads_first")])
def test_dense(impl, device, layout, strides):
    data = inputs(device, 64, 128, strides=strides)

    def call(q, k, v):
        if layout == "bhsd":
            out, lse = attention(*(x.transpose(1, 2) for x in (q, k, v)), layout="bhsd", causal=True, return_lse=True, impl=impl)
            return out.transpose(1, 2), lse
        return attention(q, k, v, causal=True, return_lse=True, impl=impl)

    whole, counter = compiled(call, device)
    found, expected = results(whole, data), results(call, data)
    assert same(found, expected) and [x.stride() for x in found[:2]] == [x.stride() for x in expected[:2]]
    assert counter.frame_count == 1


@pytest.mark.parametrize("impl, device", [EAGER, GPU])
def test_varlen_without_maximal_lengths(impl, device):
    data = inputs(device, [5, 0, 64, 17], [16, 3, 80, 0], tail_q=2, tail_k=5)

    def call(q, k, v, cu_q, cu_k):
        return attention_varlen(q, k, v, cu_q, cu_k, window=(16, 0), return_lse=True, impl=impl)

    whole, counter = compiled(call, device)
    assert same(results(whole, data, data.cu_q, data.cu_k), results(call, data, data.cu_q, data.cu_k))
    assert counter.frame_count == 1


@pytest.mark.parametrize("impl, device", [EAGER, GPU])
@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_softcap_slopes_and_sinks(impl, device, kind):
    data = inputs(device, [5, 0, 64, 17], [16, 3, 80, 0]) if kind == "packed" else inputs(device, 64, 128)
    data = with_extras(data, slopes="entry", sinks=0.0)
    sinks = data.sinks.requires_grad_()

    def call(q, k, v, slopes, sinks):
        options = {"softcap": 2.0, "alibi_slopes": slopes, "sinks": sinks, "causal": True, "return_lse": True, "impl": impl}
        return attention_varlen(q, k, v, data.cu_q, data.cu_k, **options) if kind == "packed" else attention(q, k, v, **options)

    def both(function):
        out, lse = function(data.q, data.k, data.v, data.slopes, sinks)
        return [*results(function, data, data.slopes, sinks.detach()), *torch.autograd.grad([out, lse], sinks, [data.dout, data.dlse])]

    whole, counter = compiled(call, device)
    assert same(both(whole), both(call)) and counter.frame_count == 2, "one for each kind of input that wants a gradient"


@pytest.mark.parametrize("impl, device", [EAGER, GPU])
@pytest.mark.parametrize("batch, rows_q, rows_k", [(0, 16, 16), (2, 0, 16), (2, 16, 0)], ids=["no batch", "no queries", "no keys"])
def test_nothing_to_attend(impl, device, batch, rows_q, rows_k):
    data = inputs(device, rows_q, rows_k)
    data = data.with_(**{name: x[:batch] for name, x in vars(data).items() if x is not None})

    def call(q, k, v):
        return attention(q, k, v, return_lse=True, impl=impl)

    assert same(results(compiled(call, device)[0], data), results(call, data))


@pytest.mark.parametrize("impl, device", [EAGER, GPU])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_only_the_gradient_asked_for(impl, device, name):
    data = inputs(device, 64, 128)
    x = getattr(data, name).requires_grad_()

    def call(q, k, v):
        return attention(q, k, v, impl=impl)

    found, expected = (torch.autograd.grad(f(data.q, data.k, data.v), x, data.dout)[0] for f in (compiled(call, device)[0], call))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("impl, device", [EAGER, GPU])
def test_autocast_inside_the_graph(impl, device):
    data = inputs(device, 64, 128)
    q, k, v = data.q.float(), data.k.bfloat16(), data.v.float()

    def call(q, k, v):
        with torch.autocast(device, torch.bfloat16):
            return attention(q, k, v, impl=impl)

    found = compiled(call, device)[0](q, k, v)
    assert found.dtype == torch.bfloat16 and torch.equal(found, call(q, k, v))


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="Inductor needs a C++ compiler for the CPU")
def test_inductor_between_two_projections():
    """Inductor is free to change the strides of what it computes, so the operators must not mind what they get."""
    torch.manual_seed(0)
    x = torch.randn(2, 9, 24, requires_grad=True)
    project, back = torch.randn(24, 3 * 24), torch.randn(24, 24)

    def call(x):
        q, k, v = (x @ project).unflatten(-1, (3, 3, 8)).unbind(2)
        return attention(q, k, v, causal=True, impl="eager").relu().flatten(2) @ back

    def run(function):
        out = function(x)
        return [out, *torch.autograd.grad(out.square().sum(), x)]

    torch.testing.assert_close(run(torch.compile(call, fullgraph=True)), run(call))


def test_a_vmap_is_one_call(monkeypatch):
    """Inside of a graph it reaches the operators; without a rule torch would loop over the samples, and warn."""
    x = torch.randn(3, 2, 5, 2, 8, requires_grad=True)
    ran, forward = [], eager.forward
    monkeypatch.setattr(eager, "forward", lambda *args: ran.append(args) or forward(*args))

    def call(x):
        return torch.func.vmap(lambda x: attention(x, x, x, causal=True, impl="eager"))(x)

    found = compiled(call)[0](x)
    assert len(ran) == 1
    expected = call(x)
    cotangent = torch.randn_like(found)
    assert torch.equal(found, expected) and same(*(torch.autograd.grad(out, x, cotangent) for out in (found, expected)))


def test_a_tangent_is_refused_in_one_graph_and_not_dropped():
    """Before there was a graph: a compiled jvp that gave zeros would be believed."""
    x = torch.randn(1, 3, 2, 8)

    def tangent(x):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(attention(forward_ad.make_dual(x, x), x, x, impl="eager")).tangent

    for function in (tangent, lambda x: torch.func.jvp(lambda x: attention(x, x, x, impl="eager"), (x,), (x,))):
        with pytest.raises(Exception, match=r"torch\.func's grad, vjp or jvp, or of dual numbers, of attention"):
            compiled(function)[0](x)
        found = torch.compile(function, backend="aot_eager")(x)  # where the graph may break it breaks there
        torch.testing.assert_close(found, function(x))
        torch._dynamo.reset()


# -------------------------------------------------------------------------------------------------------------------- number of graphs


def graphs(call, impl, device, steps) -> int:
    """Compile `call`, run forward and backward of each (data, more arguments), compare some with the plain call; graphs made."""
    whole, counter = compiled(call, device)
    for i, (data, *more) in enumerate(steps):
        found = results(whole, data, *more, lse_grad=False)
        if i in (0, 1, STEPS - 1):
            assert same(found, results(call, data, *more, lse_grad=False)), f"step {i}"
    return counter.frame_count


@pytest.mark.parametrize("impl, device", [EAGER, GPU])
def test_twenty_lengths_compile_two_graphs(impl, device):
    def call(q, k, v):
        return attention(q, k, v, causal=True, return_lse=True, impl=impl)

    assert graphs(call, impl, device, ((inputs(device, 16 * i, 16 * i),) for i in range(2, STEPS + 2))) <= 2


@pytest.mark.parametrize("impl, device", [EAGER, GPU])
def test_twenty_pairs_of_lengths_compile_two_graphs(impl, device):
    def call(q, k, v):
        return attention(q, k, v, window=(16, 16), return_lse=True, impl=impl)

    assert graphs(call, impl, device, ((inputs(device, 16 * i, 16 * (40 - i)),) for i in range(2, STEPS + 2))) <= 2


@pytest.mark.parametrize("impl, device", [EAGER, GPU])
@pytest.mark.parametrize("maximum", [False, True], ids=["no maximum", "maximum"])
def test_twenty_packed_batches_compile_two_graphs(impl, device, maximum):
    """Other totals, another number of sequences and, if told, other longest ones."""

    def call(q, k, v, cu_q, cu_k, most_q, most_k):
        options = {"max_seqlen_q": most_q, "max_seqlen_k": most_k} if maximum else {}
        return attention_varlen(q, k, v, cu_q, cu_k, causal=True, return_lse=True, impl=impl, **options)

    def step(i):
        lens_q, lens_k = [3] * i + [16 * i - 3 * i], [2] * i + [32 * i + 16 - 2 * i]
        data = inputs(device, lens_q, lens_k)
        return data, data.cu_q, data.cu_k, max(lens_q), max(lens_k)

    assert graphs(call, impl, device, map(step, range(2, STEPS + 2))) <= 2


def test_twenty_windows_compile_two_graphs():
    data = inputs("cpu", 40)

    def call(q, k, v, left):
        return attention(q, k, v, window=(left, None), return_lse=True, impl="eager")

    assert graphs(call, "eager", "cpu", ((data, left) for left in range(2, STEPS + 2))) <= 2


def test_a_changing_scale_breaks_no_graph():
    """It is a constant of each graph, as in every operator that takes a float, so it costs one a value; but it must not be an error."""
    data = inputs("cpu", 7)

    def call(q, k, v, scale):
        return attention(q, k, v, softmax_scale=scale, return_lse=True, impl="eager")

    whole, _ = compiled(call)
    for scale in (0.1, 0.2, 0.3):
        assert same(results(whole, data, scale), results(call, data, scale))
