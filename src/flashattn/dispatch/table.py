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
from .configs import Config, hopper, portable, sm90

DIRECTIONS = ("forward", "backward", "tangent")  # the last: the forward with its derivative along tangents
TABLES = {(9, 0): sm90.ROWS}  # by the capability of NVIDIA GPUs
OLDEST_CAPABILITY = (8, 0)
HOPPER, HOPPER_TILE = (9, 0), 192
FEW = 64  # tiles that every Hopper GPU starts at once, so that none is left to be drawn
MOST_ROWS = 1 << 30  # whose positions, shifted by the limits of a window, fit 32 bits
MOST_LANES = 1 << 30  # rows times heads, or tiles times heads
GLUON = (3, 6), (3, 9)  # versions of Triton whose Gluon was read; it is experimental and changes its names
MOST_BLOCKS = 1 << 25  # each has two parts of dQ, of 16 rows of 256 numbers
D_TILES, DV_TILES = (64, 96, 128, 192, 256), (64, 128, 256)  # of the Hopper kernels: head dims of queries and keys, and of values


@dataclass(frozen=True)
class Kernel:
    """rows: {pass: tile} of a problem. padded: its head_dim and head_dim_v as the tiles of a direction have them. launch: the module with a
    function for each of `directions`. Beside DIRECTIONS there is "second", the derivative of the backward."""

    name: str
    reasons: Callable[[Problem, str], list[str]]
    rows: Callable[[Problem], dict[str, Config]]
    padded: Callable[[Problem, str], tuple[int, int]]
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
    if problem.used_k and problem.bias and direction == "backward":
        found.append("lengths of keys (seqlens_k) beside a bias: the passes for its gradient take none")
    if (problem.window_left or problem.window_right) and max(problem.seqlen_q, problem.seqlen_k) > MOST_ROWS:
        found.append(f"a window over more than {MOST_ROWS} rows: its limits are 32-bit sums")
    if problem.capability is not None and problem.capability < OLDEST_CAPABILITY:
        found.append(f"compute capability {problem.capability[0]}.{problem.capability[1]}: tested from 8.0 on")
    return found


def _kinds(problem: Problem) -> tuple[str, ...]:
    """Which special rows serve a problem, the last first: "padded" head dims are no power of two, rows of "unaligned" ones start at no
    multiple of 16 bytes; an "open" problem masks nothing and groups no heads; a "biased" one has a bias, a mod or a block mask."""
    biased = ("biased",) * problem.takes_keys
    dims, lengths = (problem.head_dim, problem.head_dim_v), (problem.seqlen_q, problem.seqlen_k)
    if any(padded_head_dim(dim) != dim for dim in dims):
        return (*biased, "padded", "unaligned") if any(dim * problem.itemsize % 16 for dim in dims) else (*biased, "padded")
    limited = problem.used_k or (problem.window_left, problem.window_right) != (None, None)
    masked = problem.varlen or limited or any(length % 128 for length in lengths)
    return biased if masked or problem.group > 1 or biased else ("open",)


def has_bias_gradient(problem: Problem) -> bool:
    return problem.bias not in (None, "bool")


def portable_rows(problem: Problem) -> dict[str, Config]:
    """{pass: tile} in the order of running. dK and dV are one pass, or two where the table has rows for each."""
    key = (problem.itemsize, max(padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v), 64))
    rows = {**portable.ROWS, **TABLES.get(problem.capability, {})}
    found = {}
    for wanted in (key, *((*key, kind) for kind in _kinds(problem))):
        found |= {name: row for (name, *rest), row in rows.items() if tuple(rest) == wanted}
    names = ("forward", "tangent", "delta", *(("dk", "dv") if "dk" in found else ("dkdv",)), "dq", *has_bias_gradient(problem) * ("dbias",))
    return {name: found[name] for name in names}


def portable_padded(problem: Problem, direction: str) -> tuple[int, int]:
    return padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v)


@lru_cache(maxsize=1)
def gluon_reasons() -> list[str]:
    try:
        triton = version("triton")
    except PackageNotFoundError:  # none, or a build under another name
        return []
    if GLUON[0] <= tuple(map(int, triton.split(".")[:2])) <= GLUON[1]:
        return []
    return [f"Triton {triton}: the Gluon of {'.'.join(map(str, GLUON[0]))} to {'.'.join(map(str, GLUON[1]))} is known"]


def hopper_reasons(problem: Problem, direction: str) -> list[str]:
    found = hopper_backward_reasons(problem) if direction == "backward" else []
    if find_spec("triton") is None:
        found.append("triton is not installed")
    found += gluon_reasons()
    if problem.interpret:
        found.append("Gluon has no interpreter: unset TRITON_INTERPRET")
    if problem.device != "cuda" or problem.capability != HOPPER:
        where = repr(problem.device) if problem.capability is None else "one of {}.{}".format(*problem.capability)
        found.append(f"made for CUDA devices of compute capability 9.0 (H100, H200), and this is {where}")
    if problem.dtype not in ("float16", "bfloat16"):
        found.append(f"dtype {problem.dtype}: multiplies float16 and bfloat16")
    if problem.used_k:
        found.append("lengths of keys (seqlens_k): every batch entry has all of its keys here")
    if problem.score_mod:
        found.append("a score_mod: the portable kernels run it")
    if problem.mask_mod:
        found.append("a mask_mod: the portable kernels run it")
    if problem.blocks:
        found.append("a block mask")
    if problem.alibi and problem.top_left:
        found.append("ALiBi beside a top-left diagonal: it counts both from one diagonal")
    if not problem.aligned:
        found.append("TMA can't address rows that aren't aligned to 16 bytes, nor expanded dimensions")
    if problem.head_dim_v % 8:
        found.append(f"head_dim_v {problem.head_dim_v}: rows of out would not be aligned to 16 bytes")
    rows = problem.total_q + problem.batch if problem.varlen else problem.batch * problem.seqlen_q
    if rows * problem.heads_q > MOST_LANES:
        found.append(f"more than {MOST_LANES} rows of all heads: they are counted in 32 bits")
    most = MOST_ROWS - 2 * HOPPER_TILE  # what is asked of the end of a tile may lie a tile of queries and a block of keys further
    if max(problem.seqlen_q, problem.seqlen_k, problem.total_q, problem.total_k) > most:
        found.append(f"more than {most} rows: positions are 32-bit sums")
    return found


def _hopper_kinds(direction: str, problem: Problem) -> list[str]:
    """Kinds of row that serve a problem, the most special first."""
    limited = problem.window_left is not None
    if problem.varlen:
        long = problem.total_q >= hopper.LONG // 2 * problem.batch  # on average: many of which are longer
        return ["packed long", "packed"] if long and not limited else ["packed"]
    if not limited and problem.window_right is None:
        return ["open"]
    if limited:
        return ["window", "masked"]
    if direction == "forward":
        return ["long", "masked"] if problem.seqlen_q >= hopper.LONG else ["masked"]
    if problem.group > 1:
        return ["grouped", "masked"]
    at_a_corner = (problem.diagonal() + problem.window_right) % hopper.CORNER == 0 and problem.seqlen_k % hopper.CORNER == 0
    return ["diagonal", "masked"] if at_a_corner else ["masked"]


def _hopper_row(direction: str, size: int, problem: Problem):
    keys = [(direction, size, kind) for kind in _hopper_kinds(direction, problem)]
    return next(hopper.ROWS[key] for key in keys if key in hopper.ROWS)


def hopper_backward_reasons(problem: Problem) -> list[str]:
    """What is only against the backward."""
    found = []
    if problem.head_dim % 8:
        found.append(f"head_dim {problem.head_dim}: rows of dQ and dK would not be aligned to 16 bytes")
    if problem.bias:
        found.append("a bias or mask: its forward takes one, its backward doesn't")
    row = hopper_backward_row(problem)
    rows, block, block_n = problem.total_q if problem.varlen else problem.seqlen_q, row.block_m, row.block_n
    if problem.softcap and row.wide:
        found.append("a softcap at head dims above 128: one warpgroup makes ds there, and another has the tanh")
    if problem.dropout and row.wide:
        found.append("dropout at head dims above 128: both warpgroups read one p, and one of them would need it as it was before")
    blocks = rows // block + problem.batch + 1 if problem.varlen else -(-rows // block) * problem.batch
    most = MOST_BLOCKS // 2 if row.wide else MOST_BLOCKS
    if blocks * problem.heads_q > most:
        found.append(f"more than {most} blocks of queries: rows of their sums are counted in 32 bits")
    tiles = problem.total_k // block_n + problem.batch + 1 if problem.varlen else -(-problem.seqlen_k // block_n) * problem.batch
    if tiles * problem.heads_kv > MOST_LANES:
        found.append(f"more than {MOST_LANES} blocks of keys: they are counted in 32 bits")
    return found


def backward_size(problem: Problem) -> int:
    largest = max(problem.head_dim, problem.head_dim_v)
    if largest <= 128:
        return 64 if largest <= 64 else 128
    return 192 if problem.head_dim <= 192 and problem.head_dim_v <= 128 else 256


def hopper_backward_row(problem: Problem) -> hopper.HopperBackwardConfig:
    """A tanh, distances or dropout take the registers that a delayed dQ needs: without it spills are a third. Dropout is of dP, before
    -delta joins it."""
    row = _hopper_row("backward", backward_size(problem), problem)
    if row.wide:
        return row
    if problem.softcap or problem.alibi or problem.dropout:
        row = row._replace(delayed=False, fours=False, mask=1, ahead=False)
    return row._replace(init=False) if problem.dropout else row


def _in_tiles(rows: int, tile: int) -> int:
    """Rows of the tiles that so many rows take."""
    return -(-rows // tile) * tile


def hopper_rows(problem: Problem) -> dict[str, hopper.HopperConfig | hopper.HopperBackwardConfig]:
    largest = max(problem.head_dim, problem.head_dim_v)
    # 192 is a tile for queries and keys, not for values, whose tile is a power of two
    size = 64 if largest <= 64 else 128 if problem.head_dim <= 192 and problem.head_dim_v <= 128 else 256
    row = _hopper_row("forward", size, problem)
    if row.consumers == 3 and not problem.varlen and 4 * _in_tiles(problem.seqlen_q, row.block_m) >= 5 * _in_tiles(problem.seqlen_q, 128):
        row = row._replace(consumers=2)  # where a third of a tile would have no rows: 256 queries, open, 0.98 of cuDNN instead of 0.68
    if problem.bias and row.consumers == 3:  # of whose registers a bias leaves none
        row = hopper.ROWS["forward", size, "masked"]
    few = problem.batch * problem.heads_q * -(-problem.seqlen_q // row.block_m) <= FEW
    if few and not problem.varlen and size < 256:  # where it would spill
        row = row._replace(tickets=False)  # the host asks for no counter, 1 us of 25
    return {"forward": row, "backward": hopper_backward_row(problem)}


def hopper_padded(problem: Problem, direction: str = "forward") -> tuple[int, int]:
    """TMA reads as zero what a tile has beyond the tensor. In the backward queries and keys take the tile of the row, for dQ is shared out
    between warpgroups; values have their own."""
    if direction == "backward":
        size = backward_size(problem)
        return size, 128 if size == 192 else 256 if size == 256 else 64 if problem.head_dim_v <= 64 else 128
    d = next(tile for tile in D_TILES if tile >= problem.head_dim)
    dv = next(tile for tile in DV_TILES if tile >= problem.head_dim_v)
    return d, dv


def eager_reasons(problem: Problem, direction: str) -> list[str]:
    return [] if problem.dtype in DTYPES else [f"dtype {problem.dtype}"]


def eager_padded(problem: Problem, direction: str) -> tuple[int, int]:
    return problem.head_dim, problem.head_dim_v


KERNELS = (
    Kernel("hopper", hopper_reasons, hopper_rows, hopper_padded, "flashattn.launch.hopper", ("forward", "backward")),
    Kernel("portable", portable_reasons, portable_rows, portable_padded, "flashattn.launch.portable"),
    Kernel("eager", eager_reasons, lambda problem: {}, eager_padded, "flashattn.eager", (*DIRECTIONS, "second")),
)
