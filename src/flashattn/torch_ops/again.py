"""A dense call like one before goes straight to its launcher: what was checked, described and chosen for it then holds now too.

That is 20 us of Python, more than a small kernel runs. Everything that decides is in the key, or makes it None: somebody listens (modes,
profilers, tracers, transforms, subclasses of Tensor), wants gradients, or autocast changes dtypes. The surprising fact: True == 1 == 1.0
for a dictionary, but causal=1 is an error; so only values of the usual types have a key.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from ..dispatch.select import launcher, select
from .describe import aligned, describe

NO_DROPOUT = 0.0, None, None
MOST = 4096  # calls remembered; lengths that never repeat would fill any memory
DTYPES = (torch.bfloat16, torch.float16)  # what happens to float32 depends on torch's settings
_PLAIN = {torch.Tensor, torch.nn.Parameter}
_seen: dict[tuple, Callable] = {}


def _modes_listen() -> bool:
    """Whether somebody sees every call of a function: a mode other than the one of torch.set_default_device, which only creates."""
    if not torch._C._is_torch_function_mode_enabled():
        return False
    return any(type(torch._C._get_function_stack_at(i)) is not DeviceContext for i in range(torch._C._len_torch_function_stack()))


def unheard(*tensors) -> bool:
    """Whether nobody could tell an operator from its implementation: then its way through the dispatcher, 7 us, is saved.

    On a CPU, which takes longer than that anyway, somebody always may: tests of the operators run there.
    """
    for x in tensors:
        if not x.is_cuda or type(x) not in _PLAIN or x.is_neg():  # the dispatcher would copy a tensor that is negated lazily
            return False
    return (
        not torch._C._len_torch_dispatch_stack()
        and not _modes_listen()
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._autograd._profiler_enabled()
        and torch._C._get_tracing_state() is None
        and forward_ad._current_level < 0
    )


def wants_gradients(*tensors) -> bool:
    if torch.is_grad_enabled():
        for x in tensors:
            if x.requires_grad:
                return True
    return False


def key_of(
    q, k, v, causal, window, softmax_scale, layout, deterministic, impl, softcap=None, slopes=None, sinks=None, bias=None,
    dropout=NO_DROPOUT,
) -> tuple | None:
    """What decides how a call is made; None where it must be looked at. dropout: probability, seed and generator."""
    if torch.compiler.is_compiling() or not isinstance(q, torch.Tensor) or window is not None:
        return None
    if type(dropout[0]) is not float:
        return None
    if softcap is not None or slopes is not None or sinks is not None or bias is not None or dropout != NO_DROPOUT:
        return None
    if not (causal is True or causal is False or type(causal) is str) or not (softmax_scale is None or type(softmax_scale) is float):
        return None
    if type(layout) is not str or type(deterministic) is not bool or not (impl is None or type(impl) is str):
        return None
    if not (isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)) or q.dtype not in DTYPES or wants_gradients(q, k, v):
        return None
    if not unheard(q, k, v) or torch.is_autocast_enabled("cuda"):
        return None
    try:
        strides = q.stride(), k.stride(), v.stride()
        shapes = q.shape, k.shape, v.shape
        start = q.data_ptr() | k.data_ptr() | v.data_ptr()
    except RuntimeError:  # sparse, nested or without memory
        return None
    return (
        *shapes, *strides, start & 15, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
        causal, softmax_scale, layout, deterministic, impl,
    )  # fmt: skip


def known(key: tuple | None) -> Callable | None:
    """(q, k, v, None, None) -> (out, lse) for a call of this key that has been made, in the order [batch, rows, heads, dim]."""
    return None if key is None else _seen.get(key)


def remember(key: tuple, q, k, v, options) -> None:
    """That the call of this key was made, with these tensors in [batch, rows, heads, dim] order."""
    if not all(x.stride(-1) == 1 for x in (q, k, v)):  # it may have to be copied
        return
    *options, impl = options
    problem = describe(q, k, v.shape[-1], None, None, None, None, *options, aligned(q, k, v))
    if len(_seen) >= MOST:
        _seen.clear()
    _seen[key] = partial(launcher(select(problem, "forward", impl).launch).forward, problem, token=object())
