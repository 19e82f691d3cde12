"""The roofline: the least time that a GPU of a given peak and bandwidth can take for a given amount of work.

    time = max(FLOPs / peak, bytes / bandwidth)        ridge = peak / bandwidth        intensity = FLOPs / bytes

Work whose intensity is above the ridge is bound by arithmetic, below it by memory. Nothing is promised: both limits are reached at once
only by a kernel that overlaps its loads and its products perfectly and moves each tensor once.

Surprising fact: the ridge doubled in one generation (A100 153, H100 295 FLOP/byte in bf16), so code that was bound by arithmetic on one GPU
may be bound by memory on the next; then it fell again (H200 206, B200 281).

Source: Williams, Waterman and Patterson, Roofline: an insightful visual performance model for multicore architectures (2009), section 3.
"""

import math
from dataclasses import dataclass

from .gpus import GPU
from .work import Work


@dataclass(frozen=True)
class Bound:
    """The least time of some `work` on a GPU. compute_s, memory_s: seconds that its arithmetic and its bytes take alone. ridge: FLOP/byte
    of the GPU."""

    work: Work
    compute_s: float
    memory_s: float
    ridge: float

    @property
    def seconds(self) -> float:
        return max(self.compute_s, self.memory_s)

    @property
    def binds(self) -> str:
        """Which side takes longer: "compute" or "memory"; at the ridge itself "compute", as `smallest_rows` has it."""
        return "memory" if self.memory_s > self.compute_s else "compute"

    @property
    def attainable(self) -> float:
        """FLOP/s at which the work would run in that time; 0 for no time."""
        return self.work.flops / self.seconds if self.seconds else 0.0

    def share(self, seconds: float) -> float:
        """The bound over a measured time: 1 is as fast as the model allows. ValueError unless the time is positive."""
        if not seconds > 0:
            raise ValueError(f"seconds={seconds!r}: expected a positive time")
        return self.seconds / seconds


def ridge(gpu: GPU, dtype: str = "bfloat16") -> float:
    """FLOP/byte at which both limits of `gpu` take the same time: peak of `dtype` over bandwidth. ValueError if it has no such peak."""
    return gpu.peak(dtype) / gpu.bandwidth


def bound_of(work: Work, gpu: GPU, dtype: str = "bfloat16") -> Bound:
    """The bound of `work` on `gpu` with products in `dtype`; ValueError if the GPU has no peak for it."""
    return Bound(work, work.flops / gpu.peak(dtype), work.bytes / gpu.bandwidth, ridge(gpu, dtype))


def smallest_rows(weight_bytes: float, flops_per_row: float, bytes_per_row: float, ridge: float) -> int | None:
    """The smallest number of rows M that is bound by compute where M rows cost `flops_per_row` each and move `weight_bytes` once and
    `bytes_per_row` each: M flops >= ridge (weights + M bytes). None if no number is, because rows alone move too much.
    """
    gain = flops_per_row - ridge * bytes_per_row
    return math.ceil(ridge * weight_bytes / gain) if gain > 0 else None
