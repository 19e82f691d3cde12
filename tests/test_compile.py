"""Every row of the config tables compiles for the GPUs it serves, fits their shared memory and spills nothing.

No GPU is needed. A row is compiled as the launcher would launch it, for a few variants of attention that between them pair up mask,
packing, ragged head dims, grouped heads and dtypes. Rows tuned for Hopper take all of them; a row of the portable table takes the two
hardest on each architecture, unless FLASHATTN_COMPILE_ALL=1.
"""

import os
from dataclasses import dataclass

import pytest
import torch

from aot import Job
from flashattn.dispatch.table import portable_rows
from flashattn.problem import Problem

pytestmark = pytest.mark.compile_only


@dataclass(frozen=True)
class Variant:
    left: int | None = None
    right: int | None = None
    top_left: bool = False
    varlen: bool = False
    ragged_lengths: bool = False
    ragged_dim: bool = False  # 8 less than the padded head dim
    group: int = 1
    half: str = "bfloat16"
    scale: float = 0.1
    tf32: bool = False


VARIANTS = {
    "plain": Variant(),
    "grouped": Variant(group=4),
    "causal-ragged": Variant(right=0, ragged_lengths=True, ragged_dim=True, half="float16", group=4),
    "packed-window": Variant(left=300, right=5, varlen=True, group=2),
    "topleft": Variant(right=0, top_left=True, ragged_dim=True, half="float16", scale=-0.1, tf32=True),
}
HARDEST = ("causal-ragged", "packed-window")
CAPABILITIES = {80: (8, 0), 90: (9, 0), 100: (10, 0)}


def problem_of(variant: Variant, itemsize: int, largest_dim: int, cc: int) -> Problem:
    dim = largest_dim - 8 * variant.ragged_dim
    length = 4096 - 3 * variant.ragged_lengths
    packed = 2 * length if variant.varlen else 0
    return Problem(
        dtype="float32" if itemsize == 4 else variant.half,
        batch=2,
        seqlen_q=length,
        seqlen_k=length,
        heads_q=8,
        heads_kv=8 // variant.group,
        head_dim=dim,
        head_dim_v=dim,
        softmax_scale=variant.scale,
        window_left=variant.left,
        window_right=variant.right,
        top_left=variant.top_left,
        varlen=variant.varlen,
        total_q=packed,
        total_k=packed,
        tf32=variant.tf32 and itemsize == 4,
        capability=CAPABILITIES[cc],
    )


def build(name: str, itemsize: int, largest_dim: int, cc: int, variant: str):
    """What `JITFunction.warmup` needs for one pass, from the library's own launcher; the tensors have shapes and nothing else."""
    from flashattn.launch import portable as launch

    problem = problem_of(VARIANTS[variant], itemsize, largest_dim, cc)
    row = portable_rows(problem)[name]
    dtype = getattr(torch, problem.dtype)

    def tensor(rows, heads, dim):
        shape = (problem.batch * rows, heads, dim) if problem.varlen else (problem.batch, rows, heads, dim)
        return torch.empty(shape, dtype=dtype, device="meta")

    q, out = (tensor(problem.seqlen_q, problem.heads_q, dim) for dim in (problem.head_dim, problem.head_dim_v))
    k, v = (tensor(problem.seqlen_k, problem.heads_kv, dim) for dim in (problem.head_dim, problem.head_dim_v))
    rows = (problem.heads_q, problem.total_q) if problem.varlen else (problem.batch, problem.heads_q, problem.seqlen_q)
    lse = torch.empty(rows, dtype=torch.float32, device="meta")
    cu = (torch.empty(problem.batch + 1, dtype=torch.int32, device="meta"),) * 2 if problem.varlen else (None, None)
    if name == "forward":
        kernel, _, args, options = launch.forward_launch(problem, row, q, k, v, out, lse, *cu)
    elif name == "delta":
        kernel, _, args, options = launch.delta_launch(problem, row, out, out, lse, lse)
    elif name == "dq":
        kernel, _, args, options = launch.dq_launch(problem, row, q, k, v, out, lse, lse, q, *cu)
    else:
        dk, dv = (gradient if gradient_name in name else None for gradient_name, gradient in (("dk", k), ("dv", v)))
        kernel, _, args, options = launch.dkdv_launch(problem, row, q, k, v, out, lse, lse, dk, dv, *cu)
    return kernel, args, options


def jobs() -> list[Job]:
    everything = os.environ.get("FLASHATTN_COMPILE_ALL") == "1"
    found = []
    for cc in CAPABILITIES:
        for itemsize in (2, 4):
            for dim in (64, 128, 256):
                tuned = itemsize == 2 and cc == 90
                names = portable_rows(problem_of(VARIANTS["plain"], itemsize, dim, cc))
                for name in names:
                    variants = ("causal-ragged",) if name == "delta" else VARIANTS if everything or tuned else HARDEST
                    found += [Job("test_compile.build", (name, itemsize, dim, cc, variant), cc) for variant in variants]
                if itemsize == 4 and cc == 80 and not everything:
                    found += [Job("test_compile.build", (name, itemsize, dim, cc, "topleft"), cc) for name in names if name != "delta"]
    return found


@pytest.mark.parametrize("job", jobs(), ids=str)
def test_a_shipped_row_compiles_fits_and_spills_nothing(compiled):
    assert compiled.problems() == []
