"""The kernels in order of preference, and what each can't do.

A row names its launcher by a dotted path, resolved on first use, so this file imports neither Triton nor PyTorch.
`reasons(problem, direction)` lists why a kernel can't run that pass of a problem; an empty list means that it can. The two directions are
chosen apart: all that a backward gets from a forward is (out, lse).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from ..problem import DTYPES, Problem
from .configs import Config, portable, sm90

DIRECTIONS = ("forward", "backward")
TABLES = {(9, 0): sm90.ROWS}  # by the capability of NVIDIA GPUs
OLDEST_CAPABILITY = (8, 0)
MOST_ROWS = 1 << 30  # of a sequence under a window that is wider than the diagonal


@dataclass(frozen=True)
class Kernel:
    """rows: {pass: tile} of a problem. launch: the module with a function for each of `directions`."""

    name: str
    reasons: Callable[[Problem, str], list[str]]
    rows: Callable[[Problem], dict[str, Config]]
    launch: str
    directions: tuple[str, ...] = DIRECTIONS


def padded_head_dim(head_dim: int) -> int:
    """Head dims run in blocks of a power of two, at least 16 (the matrix units' shortest reduction); the rest reads as zero."""
    return max(16, 1 << (head_dim - 1).bit_length())


@lru_cache(maxsize=1)
def interpreter_reasons() -> list[str]:
    """Triton before 3.7 takes the int() of an array with one element, which numpy refuses from 2.4 on."""
    try:
        found = {name: version(name) for name in ("triton", "numpy")}
    except PackageNotFoundError:  # a build under another name
        return []
    triton, numpy = (tuple(map(int, text.split(".")[:2])) for text in found.values())
    if triton >= (3, 7) or numpy < (2, 4):
        return []
    return [f"the interpreter of Triton {found['triton']} fails with numpy {found['numpy']}: install numpy<2.4 or triton>=3.7"]


def portable_reasons(problem: Problem, direction: str) -> list[str]:
    found = []
    if find_spec("triton") is None:
        found.append("triton is not installed")
    if problem.interpret:
        found += interpreter_reasons()
        if problem.dtype == "bfloat16":
            found.append("Triton's interpreter multiplies the bits of bfloat16 as integers: use float16 or float32 there")
    elif problem.device == "cpu":
        found.append("CPU tensors run in Triton's interpreter only: set TRITON_INTERPRET=1 before importing triton")
    if problem.device == "hip":
        found.append("AMD GPUs (ROCm) are untested, and no tile was chosen for them")
    elif problem.device not in ("cuda", "cpu"):
        found.append(f"Triton kernels are launched on CUDA devices, not on {problem.device!r}")
    if (problem.window_left or problem.window_right) and max(problem.seqlen_q, problem.seqlen_k) > MOST_ROWS:
        found.append(f"a window over more than {MOST_ROWS} rows: its limits are 32-bit sums")
    if problem.capability is not None and problem.capability < OLDEST_CAPABILITY:
        found.append(f"compute capability {problem.capability[0]}.{problem.capability[1]}: tested from 8.0 on")
    return found


def _kinds(problem: Problem) -> tuple[str, ...]:
    """Which special rows serve a problem, the last first: "padded" head dims are no power of two, rows of "unaligned" ones start at no
    multiple of 16 bytes; an "open" problem masks nothing and groups no heads."""
    dims, lengths = (problem.head_dim, problem.head_dim_v), (problem.seqlen_q, problem.seqlen_k)
    if any(padded_head_dim(dim) != dim for dim in dims):
        return ("padded", "unaligned") if any(dim * problem.itemsize % 16 for dim in dims) else ("padded",)
    masked = problem.varlen or (problem.window_left, problem.window_right) != (None, None) or any(length % 128 for length in lengths)
    return () if masked or problem.group > 1 else ("open",)


def portable_rows(problem: Problem) -> dict[str, Config]:
    """{pass: tile} in the order of running. dK and dV are one pass, or two where the table has rows for each."""
    key = (problem.itemsize, max(padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v), 64))
    rows = {**portable.ROWS, **TABLES.get(problem.capability, {})}
    found = {}
    for wanted in (key, *((*key, kind) for kind in _kinds(problem))):
        found |= {name: row for (name, *rest), row in rows.items() if tuple(rest) == wanted}
    names = ("forward", "delta", *(("dk", "dv") if "dk" in found else ("dkdv",)), "dq")
    return {name: found[name] for name in names}


def eager_reasons(problem: Problem, direction: str) -> list[str]:
    return [] if problem.dtype in DTYPES else [f"dtype {problem.dtype}"]


KERNELS = (
    Kernel("portable", portable_reasons, portable_rows, "flashattn.launch.portable"),
    Kernel("eager", eager_reasons, lambda problem: {}, "flashattn.eager"),
)
