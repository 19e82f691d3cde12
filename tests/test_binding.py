"""The operators as PyTorch sees them: `opcheck`, fake tensors, autograd, autocast, deterministic mode.

The surprising fact: a fake kernel that gets a stride wrong breaks nothing until a compiler plans memory with it, so strides are compared
here for every way to lay out the inputs, gradients included.
"""

from itertools import product

import pytest
import torch
from torch._subclasses import FakeTensorMode

from flashattn import attention, attention_varlen, eager, explain
from flashattn.torch_ops.autograd import Attention
from support import STRIDES, WHERE, Data, dense, packed, run, same_bits, with_extras

FWD, BWD = torch.ops.flashattn.attn_fwd.default, torch.ops.flashattn.attn_bwd.default
JVP, SECOND = torch.ops.flashattn.attn_jvp.default, torch.ops.flashattn.attn_second.default
SUBSETS = [needs for needs in product((True, False), repeat=3) if any(needs)]
EAGER, INTERPRETED, GPU = WHERE
EXTRAS = "contiguous with extras", "packed with extras"
LAYOUTS = (*STRIDES, "packed", "no batch", "no queries", "no keys", *EXTRAS)


def inputs(layout: str, device: str) -> Data:
    """Small and odd, or on a GPU one size for all, so that few kernels are compiled."""
    if device == "cpu":
        rows, shape = (5, 7), {"heads": 2, "heads_kv": 1, "dim": 8, "dim_v": 3, "dtype": torch.float32}
    else:
        rows, shape = (64, 128), {"heads": 4, "heads_kv": 2, "dim": 64, "dtype": torch.bfloat16}
    if layout.endswith("with extras"):
        data = with_extras(inputs(layout.split()[0], device), slopes="entry", sinks=0.0)
        if data.packed:
            return data
        return data.with_(bias=torch.randn(1, data.q.shape[2], data.k.shape[1], data.q.shape[1], device=device).transpose(2, 3))
    if layout == "packed":
        return packed([rows[0], 0, rows[1], rows[0]], tail_q=2, tail_k=2, device=device, **shape)
    sizes = {"no batch": (0, *rows), "no queries": (2, 0, rows[1]), "no keys": (2, rows[0], 0)}
    batch, rows_q, rows_k = sizes.get(layout, (2, *rows))
    return dense(rows_q, rows_k, batch=batch, strides=layout if layout in STRIDES else "contiguous", device=device, **shape)


def options(data: Data, impl: str) -> tuple:
    """Arguments after q, k, v (and head_dim_v) of both operators: slopes, sinks, bias, softcap, dropout_p, rng, blocks, cu_seqlens,
    max_seqlens, scale, window, top_left, deterministic, impl. Data with extras have a softcap and dropout too."""
    softcap, dropout_p, rng = 0.0, 0.0, None
    if data.sinks is not None:
        softcap, dropout_p, rng = 2.0, 0.25, torch.tensor([3, 4], device=data.q.device)
    numbers = softcap, dropout_p, rng, None, data.cu_q, data.cu_k, None, None, 0.3, None, 0, False, False, impl
    return data.slopes, data.sinks, data.bias, *numbers


def forward_arguments(data: Data, impl: str, grad=False) -> tuple:
    slopes, *learned, cap = options(data, impl)[:4]
    sinks, bias = (x if x is None else x.detach().requires_grad_(grad) for x in learned)
    rest = cap, *options(data, impl)[4:]
    return *(x.detach().requires_grad_(grad) for x in (data.q, data.k, data.v)), slopes, sinks, bias, *rest


def backward_arguments(data: Data, impl: str, needs=(True, True, True), dlse=True) -> tuple:
    """As autograd gives them: a transposed dout, and v and out only where dp is needed."""
    out, lse = FWD(*forward_arguments(data, impl))
    v, out = (data.v, out) if needs[0] or needs[1] or data.sinks is not None else (None, None)
    dout = data.dout.transpose(-3, -2).contiguous().transpose(-3, -2)
    needs = *needs, data.sinks is not None, data.bias is not None
    return dout, data.dlse if dlse else None, data.q, data.k, v, out, lse, data.v.shape[-1], *options(data, impl), *needs


def tangents(data: Data, which: str, grad=False) -> list:
    """Of q, k, v and sinks, the last of each batch entry; None for what isn't named."""
    sinks = None if data.sinks is None else data.sinks.nan_to_num(neginf=0.0).expand(1 if data.packed else data.q.shape[0], -1)
    found = {"q": data.q, "k": data.k, "v": data.v, "s": sinks}
    return [x.detach().cos().requires_grad_(grad) if name in which and x is not None else None for name, x in found.items()]


def jvp_arguments(data: Data, impl: str, which="qkvs", grad=False) -> tuple:
    q, k, v, slopes, sinks, _, softcap, _, _, _, *rest = forward_arguments(data, impl, grad)  # there is no bias and no dropout
    return q, k, v, *tangents(data, which, grad), slopes, sinks, softcap, *rest


def second_arguments(data: Data, impl: str, which="qkvs", needs=(True, True, True)) -> tuple:
    needs = *needs, data.sinks is not None
    v = data.v if set(which) != {"v"} else None
    sent = data.dout, data.dlse, data.q, data.k, v
    slopes, sinks, _, softcap, _, _, _, *rest = options(data, impl)
    return *sent, *tangents(data, which), data.v.shape[-1], slopes, sinks, softcap, *rest, *needs


def cases(where, *layouts):
    return [pytest.param(*where.values, layout, marks=where.marks, id=f"{where.id}-{layout}") for layout in layouts]


# ------------------------------------------------------------------------------------------------------------------------- opcheck


@pytest.mark.parametrize(
    "impl, device, layout",
    [
        *cases(EAGER, "contiguous", "heads_first", "fused", "dim_not_last", "expanded_batch", "scalar", "packed", "no keys", *EXTRAS),
        *cases(GPU, "contiguous", "heads_first", "expanded_batch", "packed"),
    ],
)
def test_opcheck(impl, device, layout):
    """Schema (nothing mutated, nothing aliased), autograd registration, fake kernels and AOT dispatch with dynamic shapes."""
    data = inputs(layout, device)
    torch.library.opcheck(FWD, forward_arguments(data, impl, grad=True))
    torch.library.opcheck(FWD, forward_arguments(data, impl))
    torch.library.opcheck(BWD, backward_arguments(data, impl))
    torch.library.opcheck(JVP, jvp_arguments(data, impl, grad=True))
    torch.library.opcheck(SECOND, second_arguments(data, impl))


def test_opcheck_of_some_tangents():
    data = inputs("contiguous with extras", "cpu")
    for which in ("q", "k", "v", "s", "kv"):
        torch.library.opcheck(JVP, jvp_arguments(data, "eager", which), test_utils=("test_schema", "test_faketensor"))
        torch.library.opcheck(SECOND, second_arguments(data, "eager", which), test_utils=("test_schema", "test_faketensor"))


def test_opcheck_of_a_backward_without_everything():
    data = inputs("contiguous", "cpu")
    for needs in SUBSETS:
        arguments = backward_arguments(data, "eager", needs, dlse=False)
        torch.library.opcheck(BWD, arguments, test_utils=("test_schema", "test_faketensor"))


# --------------------------------------------------------------------------------------------------------------------------- fakes


def described(tensors) -> list[tuple]:
    return [(tuple(x.shape), x.stride(), x.storage_offset(), x.dtype, x.device.type) for x in tensors]


def faked(operator, arguments) -> list[tuple]:
    with FakeTensorMode() as mode:
        return described(operator(*(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments)))


@pytest.mark.parametrize(
    "impl, device, layout",
    [
        *cases(EAGER, *LAYOUTS),
        *cases(INTERPRETED, "heads_first", "packed", *EXTRAS),
        *cases(GPU, "contiguous", "expanded_batch", "packed", *EXTRAS),
    ],
)
def test_fake_results_have_the_strides_of_real_ones(impl, device, layout):
    data = inputs(layout, device)
    arguments = forward_arguments(data, impl)
    assert faked(FWD, arguments) == described(FWD(*arguments))
    moved = jvp_arguments(data, impl)
    assert faked(JVP, moved) == described(JVP(*moved))
    for needs in SUBSETS if layout == "contiguous" else SUBSETS[:1]:
        arguments = backward_arguments(data, impl, needs)
        assert faked(BWD, arguments) == described(BWD(*arguments)), needs


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "packed"])
def test_meta_tensors_get_the_shapes_and_strides_of_real_ones(layout):
    data = inputs("packed" if layout == "packed" else "heads_first", "cpu")

    def results(device):
        q, k, v = (x.to(device).requires_grad_() for x in (data.q, data.k, data.v))
        if layout == "packed":
            out, lse = attention_varlen(q, k, v, data.cu_q.to(device), data.cu_k.to(device), return_lse=True, impl="eager")
        else:
            q_, k_, v_ = (x.transpose(1, 2) if layout == "bhsd" else x for x in (q, k, v))
            out, lse = attention(q_, k_, v_, layout=layout, return_lse=True, impl="eager")
        gradients = torch.autograd.grad([out, lse], [q, k, v], [torch.ones_like(out), torch.ones_like(lse)])
        return [found[:-1] for found in described((out, lse, *gradients))]

    assert results("meta") == results("cpu")


# ------------------------------------------------------------------------------------------------------------------------ autograd


def test_without_a_gradient_to_come_nothing_is_saved():
    data = inputs("contiguous", "cpu")
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                out = attention(data.q.detach().requires_grad_(), data.k, data.v, impl="eager")
            assert not out.requires_grad and not saved
        attention(data.q, data.k, data.v, impl="eager")
        assert not saved
        attention(data.q, data.k, data.v.detach().requires_grad_(), impl="eager")
    assert len(saved) == 3, "for dv alone: q, k and lse"


class Swallow(torch.autograd.Function):
    """A loss of two results, neither of which gets a gradient."""

    @staticmethod
    def forward(ctx, out, lse):
        return out.sum() + lse.sum()

    @staticmethod
    def backward(ctx, gradient):
        return None, None


def test_a_loss_that_uses_neither_result_gives_no_gradient(monkeypatch):
    """The backward is asked, with None for both, and runs no kernel."""
    data = inputs("contiguous", "cpu")
    qkv = [x.requires_grad_() for x in (data.q, data.k, data.v)]
    loss = Swallow.apply(*attention(*qkv, return_lse=True, impl="eager"))
    asked, backward = [], Attention.backward
    monkeypatch.setattr(Attention, "backward", lambda ctx, *gradients: asked.append(gradients) or backward(ctx, *gradients))
    monkeypatch.setattr(eager, "backward", lambda *_: pytest.fail("a kernel ran"))
    assert torch.autograd.grad(loss, qkv, allow_unused=True) == (None, None, None)
    assert asked == [(None, None)]


def test_an_operator_makes_one_trip_through_the_dispatcher():
    """The first of two would only lead to the second; a trip costs as much as the checks of the arguments."""
    data = inputs("contiguous", "cpu")
    q = data.q.detach().requires_grad_()
    with torch.profiler.profile() as profile:
        attention(data.q, data.k, data.v, impl="eager")
        attention(q, data.k, data.v, impl="eager").sum().backward()
    names = [event.name for event in profile.events()]
    assert (names.count("flashattn::attn_fwd"), names.count("flashattn::attn_bwd")) == (2, 1)


# ------------------------------------------------------------------------------------------------------------------------ autocast

AUTOCAST = [  # no bfloat16 in the interpreter
    pytest.param(*where.values, half, marks=where.marks, id=where.id)
    for where, half in ((EAGER, torch.bfloat16), (INTERPRETED, torch.float16), (GPU, torch.bfloat16))
]


def call(layout: str, data: Data, q, k, v, **more):
    return attention_varlen(q, k, v, data.cu_q, data.cu_k, **more) if layout == "packed" else attention(q, k, v, **more)


@pytest.mark.parametrize("layout", ["contiguous", "packed"])
@pytest.mark.parametrize("impl, device, half", AUTOCAST)
def test_autocast_runs_mixed_inputs_in_its_dtype(impl, device, half, layout):
    """q float32 with k in half precision, as a projection and a cache give them; gradients have the dtypes of the inputs."""
    data = inputs(layout, device)
    mixed = [x.detach().to(dtype).requires_grad_() for x, dtype in zip((data.q, data.k, data.v), (torch.float32, half, half), strict=True)]
    halves = [x.detach().to(half).requires_grad_() for x in mixed]
    with torch.autocast(device, half):
        out = call(layout, data, *mixed, impl=impl)
    expected = call(layout, data, *halves, impl=impl)
    assert out.dtype == half and torch.equal(out, expected)
    found, wanted = (torch.autograd.grad(o, x, data.dout.to(half)) for o, x in ((out, mixed), (expected, halves)))
    for gradient, x, same in zip(found, mixed, wanted, strict=True):
        assert gradient.dtype == x.dtype and torch.equal(gradient, same.to(x.dtype))


@pytest.mark.parametrize("layout", ["contiguous", "packed"])
@pytest.mark.parametrize("enabled", [False, None], ids=["switched off", "absent"])
def test_without_autocast_mixed_inputs_are_refused(layout, enabled):
    data = inputs(layout, "cpu")
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled is not None):
        context = torch.autocast("cpu", enabled=False) if enabled is False else torch.no_grad()
        with context, pytest.raises(TypeError, match=r"q has dtype torch.float32, k has dtype torch.bfloat16.* expected one dtype"):
            call(layout, data, data.q, data.k.bfloat16(), data.v, impl="eager")


def test_autocast_leaves_what_it_does_not_know():
    x = torch.randn(1, 3, 2, 8)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match=r"q has dtype torch\.float64"):
        attention(x.double(), x.double(), x.double(), impl="eager")


# ------------------------------------------------------------------------------------------------------------------- deterministic


@pytest.fixture
def deterministic_algorithms():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("layout", ["contiguous", "packed"])
@pytest.mark.parametrize("impl, device", [EAGER, GPU])
def test_deterministic_mode_changes_no_bit(impl, device, layout, request):
    """torch's flag forbids some operators and fills new memory; `deterministic=True` is a promise the kernels keep anyway."""
    data = inputs(layout, device)
    before = run(data, impl, causal=True)
    assert same_bits(run(data, impl, causal=True, deterministic=True), before)
    request.getfixturevalue("deterministic_algorithms")
    assert same_bits(run(data, impl, causal=True), before)


def test_torchs_flag_asks_for_it(request):
    x = torch.zeros(1, 3, 2, 8)
    assert not explain(x, x, x).problem.deterministic and explain(x, x, x, deterministic=True).problem.deterministic
    request.getfixturevalue("deterministic_algorithms")
    assert explain(x, x, x).problem.deterministic
