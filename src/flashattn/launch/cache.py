"""Launches a kernel again without asking Triton again which compiled one it is.

For every launch Triton specialises each argument and spells out the result to find the compiled kernel: 35 to 75 us on the host, more than
a small kernel runs. Here a launch is found by what decides the specialisation: the problem, the strides, and where pointers stand in
relation to 16 bytes. Only the pointers are new.

The surprising fact: what is called is the compiled kernel's own `run`, with the arguments that `JITFunction.run` ends in. That is no public
interface, so it is used for the versions of Triton that were read (KNOWN) and left alone in others, and tests/test_launch_cache.py
looks for that call in the sources of the Triton that it finds.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton

KNOWN = (3, 6), (3, 9)
MOST = 4096  # launches remembered; lengths that never repeat would fill any memory


class Pointers(NamedTuple):
    """Place in the arguments of `count` pointers and, if they begin a tuple, what follows them there; None: a pointer by itself."""

    place: int
    count: int
    rest: tuple | None


class Launch(NamedTuple):
    compiled: object
    grid: tuple
    args: tuple
    pointers: list[Pointers]


_launches: dict[tuple, Launch] = {}
_relaunches = KNOWN[0] <= tuple(map(int, triton.__version__.split(".")[:2])) <= KNOWN[1]


def _launch(compiled, grid, args) -> Launch:
    """Without the tensors, which would live as long as this does."""
    pointers, kept = [], list(args)
    for place, arg in enumerate(args):
        members = arg if isinstance(arg, tuple) else (arg,)
        count = sum(isinstance(member, torch.Tensor) for member in members)
        if count:
            pointers.append(Pointers(place, count, tuple(arg[count:]) if isinstance(arg, tuple) else None))
            kept[place] = None
    return Launch(compiled, (grid[0], 1, 1), tuple(kept), pointers)


def _with_pointers(launch: Launch, addresses: list[int]) -> list:
    args, used = list(launch.args), 0
    for place, count, rest in launch.pointers:
        args[place] = addresses[used] if rest is None else (*addresses[used : used + count], *rest)
        used += count
    return args


def _stream(device: int) -> int:
    return triton.runtime.driver.active.get_current_stream(device)


def _hooked() -> bool:
    """Profilers want what the long way tells them, or kernels of their own making. A hook is a chain of calls, a function or None."""
    knobs = triton.knobs
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave) or knobs.compilation.instrumentation_mode)


def run(name: str, problem, tensors, prepare: Callable[[], tuple]) -> None:
    """Launch what `prepare` returns, (kernel, grid, arguments, options), or what it returned for another call like this one.

    tensors: those among the arguments, in their order, with None for one that may be there but isn't.
    """
    addresses, key = [], [name, problem]
    for tensor in tensors:
        if tensor is None:
            key.append(None)
        else:
            address = tensor.data_ptr()
            addresses.append(address)
            key += (address & 15, tensor.stride())
    device = tensors[0].device.index
    key = (device, *key)
    remembers = _relaunches and not _hooked()
    launch = _launches.get(key) if remembers else None
    if launch is not None:
        compiled, args = launch.compiled, _with_pointers(launch, addresses)
        compiled.run(*launch.grid, _stream(device), compiled.function, compiled.packed_metadata, None, None, None, *args)
        return
    kernel, grid, args, options = prepare()
    compiled = kernel[grid](*args, **options) if grid[0] else None  # to launch nothing is an error
    if remembers and compiled is not None:  # the interpreter compiles nothing
        if len(_launches) >= MOST:
            _launches.clear()
        launch = _launch(compiled, grid, args)
        if sum(place.count for place in launch.pointers) != len(addresses):
            raise RuntimeError(f"{name}: {len(addresses)} tensors were named, which are not those among the arguments")
        _launches[key] = launch
