"""Problem -> kernel. Cached; an explicitly named kernel never falls back."""

from functools import lru_cache
from importlib import import_module

from ..problem import Problem
from .table import KERNELS, Kernel

NAMES = tuple(kernel.name for kernel in KERNELS)


def check_impl(impl: str | None) -> None:
    if impl is not None and impl not in NAMES:
        raise ValueError(f"impl={impl!r}: expected None or one of {NAMES}")


@lru_cache(maxsize=4096)
def select(problem: Problem, impl: str | None = None) -> Kernel:
    """The first kernel that can run `problem`; with `impl`, that kernel or NotImplementedError with every reason."""
    check_impl(impl)
    candidates = [kernel for kernel in KERNELS if impl in (None, kernel.name)]
    reasons = {kernel.name: kernel.reasons(problem) for kernel in candidates}
    for kernel in candidates:
        if not reasons[kernel.name]:
            return kernel
    listed = "; ".join(f"{name}: {', '.join(why)}" for name, why in reasons.items())
    raise NotImplementedError(f"no kernel can run this call ({listed})")


@lru_cache(maxsize=64)
def launcher(path: str):
    """The module with `forward` and `backward` of a kernel, imported on first use."""
    return import_module(path)
