"""A call like one before takes the short way, and only such a call: what differs, or is heard, or is wrong, is looked at.

On a CPU nobody takes the short way, so there the question who listens is answered by a stand-in, and the launcher is eager's. The
surprising fact: a key that forgets something shows in the second call, so every pair of different calls is made in both orders.
"""

from itertools import permutations

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from flashattn import api, attention
from flashattn.torch_ops import again

gpu = pytest.mark.gpu


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    monkeypatch.setattr(again, "_seen", {})


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(again, "unheard", lambda *tensors: True)


def tensors(dtype=torch.float16, device="cpu", shape=(2, 5, 4, 8), seed=0):
    generator = torch.Generator(device).manual_seed(seed)
    return [torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(3)]


def test_the_second_call_is_not_looked_at(short, monkeypatch):
    q, k, v = tensors()
    first = attention(q, k, v, causal=True, impl="eager")
    monkeypatch.setattr(api, "_prepare", None)
    assert torch.equal(attention(q, k, v, causal=True, impl="eager"), first)
    other = tensors(seed=1)
    monkeypatch.undo()
    assert torch.equal(attention(*other, causal=True, impl="eager"), attention(*other, causal=True, impl="eager", window=(9, None)))


q, k, v = tensors()
CALLS = {
    "plain": ((q, k, v), {}),
    "causal": ((q, k, v), {"causal": True}),
    "top-left": ((q, k[:, :3], v[:, :3]), {"causal": "top-left"}),
    "bottom-right": ((q, k[:, :3], v[:, :3]), {"causal": True}),
    "scale": ((q, k, v), {"softmax_scale": 0.7}),
    "scale of zero": ((q, k, v), {"softmax_scale": 0.0}),
    "layout": (tuple(x.transpose(1, 2) for x in (q, k, v)), {"layout": "bhsd"}),
    "grouped": ((q, k[:, :, :2], v[:, :, :2]), {}),
    "narrow values": ((q, k, v[..., :3]), {}),
    "bfloat16": ((q.bfloat16(), k.bfloat16(), v.bfloat16()), {}),
    "transposed": ((q.transpose(1, 2).contiguous().transpose(1, 2), k, v), {}),
    "window": ((q, k, v), {"window": (1, 1)}),
    "lse": ((q, k, v), {"return_lse": True}),
    "softcap": ((q, k, v), {"softcap": 0.5}),
    "slopes": ((q, k, v), {"alibi_slopes": torch.linspace(0, 1, 4)}),
    "sinks": ((q, k, v), {"sinks": torch.linspace(-1, 1, 4)}),
    "bias": ((q, k, v), {"bias": torch.linspace(-1, 1, q.shape[1])[:, None]}),
    "mask": ((q, k, v), {"bias": torch.arange(k.shape[1]) < 4}),
}


def alone(name):
    again._seen.clear()
    inputs, options = CALLS[name]
    found = attention(*inputs, impl="eager", **options)
    return found if isinstance(found, tuple) else (found,)


def test_calls_do_not_take_each_other_for_themselves(short):
    expected = {name: alone(name) for name in CALLS}
    again._seen.clear()
    for pair in permutations(CALLS, 2):
        for name in (*pair, *pair):
            inputs, options = CALLS[name]
            found = attention(*inputs, impl="eager", **options)
            found = found if isinstance(found, tuple) else (found,)
            assert len(found) == len(expected[name]) and all(map(torch.equal, found, expected[name])), (pair, name)
    assert len(again._seen) == len(CALLS) - 7, "windows, caps, slopes, sinks and biases are always looked at; who wants lse asks the same"


WRONG = {
    "causal=1": ({"causal": 1}, ValueError),
    "causal=0": ({"causal": 0}, ValueError),
    "deterministic=0": ({"deterministic": 0}, TypeError),
    "scale=True": ({"softmax_scale": True, "causal": True}, TypeError),
    "impl": ({"impl": "triton"}, ValueError),
    "layout": ({"layout": "sbhd"}, ValueError),
    "nan": ({"softmax_scale": float("nan")}, ValueError),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_error_stays_one_after_a_call_that_is_equal_to_it(name, short):
    for causal, scale in ((True, None), (False, None), (True, 1.0), (False, 0.0)):
        attention(q, k, v, causal=causal, softmax_scale=scale, impl="eager")
    options, error = WRONG[name]
    for _ in range(2):
        with pytest.raises(error):
            attention(q, k, v, **{"impl": "eager", **options})
    with pytest.raises(TypeError):
        attention(q.tolist(), k, v)
    with pytest.raises(TypeError, match="expected one dtype"):
        attention(q, k.bfloat16(), v, impl="eager")


def test_gradients_are_wanted_after_all(short):
    attention(q, k, v, impl="eager")
    leaf = q.clone().requires_grad_()
    out = attention(leaf, k, v, impl="eager")
    assert out.requires_grad
    with torch.no_grad():
        assert not attention(leaf, k, v, impl="eager").requires_grad


def test_lengths_that_never_repeat_do_not_fill_the_memory(short, monkeypatch):
    monkeypatch.setattr(again, "MOST", 5)
    for rows in range(1, 20):
        attention(*tensors(shape=(1, rows, 2, 8)), impl="eager")
        assert len(again._seen) <= 5


class Listener(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.heard = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.heard.append(str(func))
        return func(*args, **(kwargs or {}))


@gpu
def test_who_listens_hears_the_operator():
    q, k, v = tensors(torch.bfloat16, "cuda", (2, 100, 4, 64))
    for _ in range(3):
        expected = attention(q, k, v)
    assert again._seen
    with Listener() as mode:
        assert torch.equal(attention(q, k, v), expected)
    assert any("flashattn.attn_fwd" in name for name in mode.heard)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        attention(q, k, v)
    assert any(event.name == "flashattn::attn_fwd" for event in profile.events())
    mapped = torch.func.vmap(attention)(q[:, None], k[:, None], v[:, None])
    assert torch.equal(mapped[:, 0], expected)
    with torch.autocast("cuda", torch.float16):
        assert attention(q, k, v).dtype == torch.float16


class Function(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_a_default_device_listens_to_nothing():
    assert not again._modes_listen()
    with torch.device("cpu"):
        assert not again._modes_listen()
        with Function():
            assert again._modes_listen()
    with Function(), torch.device("cpu"):
        assert again._modes_listen()


def test_what_is_asked_of_torch_is_there():
    """Private names, of which a CPU asks none: it stops at is_cuda."""
    names = ("_len_torch_dispatch_stack", "_is_torch_function_mode_enabled", "_are_functorch_transforms_active", "_get_tracing_state")
    names += ("_len_torch_function_stack", "_get_function_stack_at")
    assert all(callable(getattr(torch._C, name)) for name in names) and callable(torch._C._autograd._profiler_enabled)
    assert forward_ad._current_level == -1


@gpu
def test_a_tensor_that_is_negated_lazily():
    """x.conj().imag shares memory with x and is to be read with the other sign, which the dispatcher sees to."""
    q, k, v, dout = (torch.randn(2, 100, 4, 1, dtype=torch.complex64, device="cuda").conj().imag for _ in range(4))
    assert q.is_neg()
    expected = attention(q.clone(), k.clone(), v.clone())
    for _ in range(3):
        torch.testing.assert_close(attention(q, k, v), expected)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted = torch.autograd.grad(attention(*leaves), leaves, dout.clone())
    found = torch.autograd.grad(attention(*leaves), leaves, dout)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y)


@gpu
@pytest.mark.parametrize("offset", [0, 1, 8])
def test_an_unaligned_twin_is_another_call(offset):
    q, k, v = tensors(torch.bfloat16, "cuda", (2, 100, 4, 64))
    expected = attention(q, k, v, impl="portable")
    for _ in range(3):
        attention(q, k, v)
        shifted = torch.empty(q.numel() + offset, device="cuda", dtype=q.dtype)[offset:].view(q.shape).copy_(q)
        out = attention(shifted, k, v)
        assert (out.float() - expected.float()).abs().max() < 0.02
