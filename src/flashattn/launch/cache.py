"""Launches a kernel again without asking Triton again which compiled one it is.

For every launch Triton specialises each argument and spells out the result to find the compiled kernel: 35 to 75 us on the host, more than
a small kernel runs. Here a launch is found by what decides the specialisation: the problem, the strides, and where pointers stand in
relation to 16 bytes. Only the pointers are new, and where they come again too, the tensor maps made of them are used again.

The surprising fact: what is called is the compiled kernel's own `run`, with the arguments that `JITFunction.run` ends in, and then the C
function that it ends in. That is no public interface, so it is used for the versions of Triton that were read (KNOWN) and left alone in
others, and tests/test_launch_cache.py looks for these calls in the Triton that it finds.
"""

from collections.abc import Callable
from copy import copy
from types import CellType, FunctionType
from typing import NamedTuple

import torch
import triton

KNOWN = (3, 6), (3, 9)
MOST = 4096  # launches remembered; lengths that never repeat would fill any memory
HERE = object()


class Pointers(NamedTuple):
    """Place in the arguments of `count` pointers. members: of a tuple, HERE where one of them stands, in tuples inside of it too. like: a
    TensorDescriptor's."""

    place: int
    count: int
    members: tuple | None
    like: object | None


class Described:
    """What a launcher reads of a TensorDescriptor, at another address; its own `base`, so that no tensor is kept alive."""

    def __init__(self, address, like):
        self.address = address
        self.shape, self.strides, self.padding = like.shape, like.strides, like.padding
        self.round_f32_to_tf32 = getattr(like, "round_f32_to_tf32", False)

    @property
    def base(self):  # no attribute: that would be a cycle, and memory until the garbage collector comes
        return self

    def data_ptr(self):
        return self.address


class Launch(NamedTuple):
    compiled: object
    grid: tuple
    args: tuple
    pointers: list[Pointers]


_launches: dict[tuple, Launch] = {}
_calls: dict[tuple, tuple] = {}  # by the addresses too: an allocator gives the same ones again and again
_met: dict[tuple, bool] = {}  # addresses that came once
_relaunches = KNOWN[0] <= tuple(map(int, triton.__version__.split(".")[:2])) <= KNOWN[1]


def _emptied(arg):
    """An argument with HERE in the place of each tensor in it."""
    if isinstance(arg, tuple):
        return tuple(map(_emptied, arg))
    return HERE if isinstance(arg, torch.Tensor) else arg


def _places(arg) -> int:
    return sum(map(_places, arg)) if isinstance(arg, tuple) else int(arg is HERE)


def _filled(members: tuple, following) -> tuple:
    return tuple(_filled(x, following) if isinstance(x, tuple) else next(following) if x is HERE else x for x in members)


def _launch(compiled, grid, args) -> Launch:
    """Without the tensors, which would live as long as this does."""
    pointers, kept = [], list(args)
    for place, arg in enumerate(args):
        if hasattr(arg, "block_shape"):
            pointers.append(Pointers(place, 1, None, Described(0, arg)))
        else:
            members = _emptied(arg)
            count = _places(members)
            if count:
                pointers.append(Pointers(place, count, members if isinstance(arg, tuple) else None, None))
        if pointers and pointers[-1].place == place:
            kept[place] = None
    return Launch(compiled, (grid[0], 1, 1), tuple(kept), pointers)


def _with_pointers(launch: Launch, addresses: list[int]) -> list:
    args, following = list(launch.args), iter(addresses)
    for place, _, members, like in launch.pointers:
        if members is not None:
            args[place] = _filled(members, following)
        else:
            args[place] = next(following) if like is None else Described(next(following), like)
    return args


def stream_of(device: int) -> int:
    return triton.runtime.driver.active.get_current_stream(device)


def _hooked() -> bool:
    """Profilers want what the long way tells them, or kernels of their own making. A hook is a chain of calls, a function or None."""
    knobs = triton.knobs
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave) or knobs.compilation.instrumentation_mode)


def _c_call(compiled, grid, args) -> tuple | None:
    """(function, arguments before the stream, after it, the compiled kernel): what Triton's launcher ends in, with tensor maps made.

    Taken from the launcher itself, with a stand-in in the place of the C function that it calls. None if it isn't built as it was read.
    """
    launcher = copy(compiled.run)
    inner = getattr(launcher, "launch", None)
    if inner is None or launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    taken, stream = [], object()
    function = inner
    launcher.launch = stand_in = lambda *found: taken.extend(found)
    if isinstance(inner, FunctionType):  # the one that makes tensor maps first
        cells = dict(zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True))
        if "launcher" not in cells:
            return None
        function = cells["launcher"].cell_contents
        cells["launcher"] = CellType(stand_in)
        launcher.launch = FunctionType(inner.__code__, inner.__globals__, closure=tuple(cells.values()))
    launcher(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *args)
    before = next((place for place, x in enumerate(taken) if x is stream), None)
    return None if before is None else (function, taken[:before], taken[before + 1 :], compiled)  # which unloads its code when it dies


def run(name: str, problem, tensors, prepare: Callable[[], tuple], token=None) -> None:
    """Launch what `prepare` returns, (kernel, grid, arguments, options), or what it returned for another call like this one.

    tensors: those among the arguments, in their order, with None for one that may be there but isn't. token: what a caller may know that
    stands for the device, the name, the problem and all strides.
    """
    device = tensors[0].device.index
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    if token is None:
        token = (device, name, problem, *[None if tensor is None else tensor.stride() for tensor in tensors])
    remembers = _relaunches and not _hooked()
    here = (token, *addresses)
    call = _calls.get(here) if remembers else None
    if call is None:
        call = _prepared(name, here, addresses, tensors, prepare, remembers)
    if call is not None:
        function, before, after, _ = call
        function(*before, stream_of(device), *after)


def _prepared(name, here, addresses, tensors, prepare, remembers) -> tuple | None:
    """What is left to call, now and again at these addresses; None when the kernel was launched in another way."""
    token, *_ = here
    key = (token, *[address & 15 for address in addresses])
    launch = _launches.get(key) if remembers else None
    addresses = [address for address, tensor in zip(addresses, tensors, strict=True) if tensor is not None]
    if launch is not None:
        compiled, args = launch.compiled, _with_pointers(launch, addresses)
        call = _c_call(compiled, launch.grid, args) if here in _met else None  # not for addresses that don't come again
        if call is None:
            _remember(_met, here, True)
            stream = stream_of(tensors[0].device.index)
            compiled.run(*launch.grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *args)
        else:
            _remember(_calls, here, call)
        return call
    kernel, grid, args, options = prepare()
    compiled = kernel[grid](*args, **options) if grid[0] else None  # to launch nothing is an error
    if remembers and compiled is not None:  # the interpreter compiles nothing
        launch = _launch(compiled, grid, args)
        if sum(place.count for place in launch.pointers) != len(addresses):
            raise RuntimeError(f"{name}: {len(addresses)} tensors were named, which are not those among the arguments")
        _remember(_launches, key, launch)
    return None


def _remember(found: dict, key, value) -> None:
    if len(found) >= MOST:
        found.clear()
    found[key] = value
