"""Problem and direction -> kernel. Cached; an explicitly named kernel never falls back, but one pass says nothing about the other."""

from functools import lru_cache
from importlib import import_module

from ..problem import Problem
from .table import KERNELS, Kernel

NAMES = tuple(kernel.name for kernel in KERNELS)


def check_impl(impl: str | None) -> None:
    if impl is not None and not (isinstance(impl, str) and impl in NAMES):
        raise ValueError(f"impl={impl!r}: expected None or one of {NAMES}")


@lru_cache(maxsize=4096)
def select(problem: Problem, direction: str, impl: str | None = None) -> Kernel:
    """The first kernel that can run this pass, "forward" or "backward"; with `impl`, that kernel or NotImplementedError with every reason.

    A named kernel that doesn't have the pass leaves it to the others.
    """
    check_impl(impl)
    having = [kernel for kernel in KERNELS if direction in kernel.directions]
    candidates = [kernel for kernel in having if kernel.name == impl] or having
    reasons = {kernel.name: kernel.reasons(problem, direction) for kernel in candidates}
    for kernel in candidates:
        if not reasons[kernel.name]:
            return kernel
    listed = "; ".join(f"{name}: {', '.join(why)}" for name, why in reasons.items())
    raise NotImplementedError(f"no kernel can run the {direction} of this call ({listed})")


@lru_cache(maxsize=64)
def launcher(path: str):
    """The module with the `forward`, `backward` or both of a kernel, imported on first use."""
    return import_module(path)
