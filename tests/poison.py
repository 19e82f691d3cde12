"""Fills what the library allocates without initialising it: NaN, or the largest integer.

Memory fresh from the system is zero more often than not, and zero is what a forgotten store should have written: such a bug passes every
test. So under test the modules that allocate (`eager` and `launch`) see a stand-in for the module torch whose `empty` functions
fill their result, and `Tensor.new_empty` does the same when one of these modules calls it.

The surprising fact: a torch function mode, the obvious tool, is traced by torch.compile. A stand-in in the globals of just these modules
is not: they only run inside custom ops, where the tracer doesn't look.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from pkgutil import walk_packages
from types import ModuleType

import torch

ALLOCATORS = ("empty", "empty_like")  # and Tensor.new_empty; test_house.py sees to it that the library uses no others
ROOMS = ("flashattn.eager", "flashattn.launch")


def fill(tensor):
    """Garbage that shows: NaN spreads through arithmetic, the largest integer is out of every range."""
    if type(tensor) is not torch.Tensor or tensor.is_meta or not tensor.numel():
        return tensor  # of a tracer, or without memory
    with torch.no_grad():
        if tensor.dtype == torch.bool:
            return tensor.fill_(True)
        if tensor.is_floating_point() or tensor.is_complex():
            return tensor.fill_(float("nan"))
        return tensor.fill_(torch.iinfo(tensor.dtype).max)


class PoisonedTorch(ModuleType):
    """The module torch, but for its allocators."""

    def __init__(self):
        super().__init__("torch")
        for name in ALLOCATORS:
            setattr(self, name, _filling(getattr(torch, name)))

    def __getattr__(self, name):
        return getattr(torch, name)


def _filling(allocate):
    return lambda *args, **kwargs: fill(allocate(*args, **kwargs))


def _new_empty(tensor, *args, **kwargs):
    if torch.compiler.is_compiling():  # the tracer follows methods of Tensor that are written in Python: give it something it knows
        return torch.empty(*args, **{"dtype": tensor.dtype, "device": tensor.device, **kwargs})
    result = torch._C.TensorBase.new_empty(tensor, *args, **kwargs)
    caller = sys._getframe(1).f_globals.get("__name__", "")
    return fill(result) if _allocates(caller) else result


def _allocates(module: str) -> bool:
    return any(module == room or module.startswith(room + ".") for room in ROOMS)


def load_rooms():
    """Import every module that allocates: one that is imported in the middle of a test would still hold the real torch."""
    for room in ROOMS:
        if find_spec(room) is None or (room == "flashattn.launch" and find_spec("triton") is None):
            continue
        package = import_module(room)
        for module in walk_packages(getattr(package, "__path__", []), room + "."):
            import_module(module.name)


def poison(monkeypatch):
    """Until the monkeypatch is undone, allocations of the library are filled with garbage."""
    load_rooms()
    stand_in = PoisonedTorch()
    for name, module in list(sys.modules.items()):
        if _allocates(name) and getattr(module, "torch", None) is torch:
            monkeypatch.setattr(module, "torch", stand_in)
    monkeypatch.setattr(torch.Tensor, "new_empty", _new_empty)
