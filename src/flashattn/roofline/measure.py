"""Times a call and says where it lies: under the roofline of the data sheet, and under the ceilings that this GPU reaches today.

The ceilings are a copy and a matmul, interleaved with the call in one run, so heat and clocks fall on all of them alike. A share of the
data sheet says how well the whole machine is used; a share of a measured ceiling says how well the kernel uses what is really there.

Surprising fact: the first can't reach 100 %. A large matmul of random numbers runs at the power limit, far below the boost clock that the
data sheet multiplies with; of zeros it would be faster, since bits that don't change cost no power.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch

from .bound import Bound, bound_of
from .calls import Provider
from .gate import Gate, admit
from .gpus import GPU
from .timing import Call, Clock, Sample, interleave
from .work import Work, matmul
from .workload import PASSES, Workload

COPY_BYTES = 2**31  # read and written together, far more than any L2 holds
MATMUL_SIZE = 8192
COPY, MATMUL = "copy", "matmul"


@dataclass(frozen=True)
class Ceilings:
    """What this GPU reaches: bytes/s of a copy (read and written) and FLOP/s of a matmul; None where it wasn't measured."""

    bandwidth: float | None = None
    peak: float | None = None


@dataclass(frozen=True)
class Placed:
    """A measured call on the roofline. Shares are of 1; those without a known GPU or ceiling are None.

    ms, spread: median over rounds, and (slowest - fastest) / median. tflops, gbps: counted work over the time. peak_share, bandwidth_share:
    of the data sheet. matmul_share, copy_share: of the ceilings of the run. bound_us, binds, bound_share: the roofline of the data sheet,
    which side binds, and bound / time.
    """

    name: str
    ms: float
    spread: float
    tflops: float
    gbps: float
    intensity: float
    peak_share: float | None = None
    bandwidth_share: float | None = None
    matmul_share: float | None = None
    copy_share: float | None = None
    bound_us: float | None = None
    binds: str | None = None
    bound_share: float | None = None


def place(name: str, sample: Sample, work: Work, gpu: GPU | None, dtype: str, ceilings: Ceilings | None = None) -> Placed:
    """Where a sample of `work` lies. gpu: of the table, or None. dtype: of the products."""
    seconds = sample.median / 1e3
    flops, moved = work.flops / seconds, work.bytes / seconds
    known: dict = {}
    if gpu is not None:
        limit: Bound = bound_of(work, gpu, dtype)
        known = {"peak_share": flops / gpu.peak(dtype), "bandwidth_share": moved / gpu.bandwidth}
        known |= {"bound_us": limit.seconds * 1e6, "binds": limit.binds, "bound_share": limit.share(seconds)}
    if ceilings is not None and ceilings.peak:
        known["matmul_share"] = flops / ceilings.peak
    if ceilings is not None and ceilings.bandwidth:
        known["copy_share"] = moved / ceilings.bandwidth
    return Placed(name, sample.median, sample.spread, flops / 1e12, moved / 1e9, work.intensity, **known)


def ceiling_calls(
    device: torch.device, dtype: torch.dtype, size: int = MATMUL_SIZE, copy_bytes: int = COPY_BYTES
) -> dict[str, tuple[Call, Work]]:
    """A copy of `copy_bytes` (read and written together) and a matmul of `size`^3: all that a device has of bandwidth and of arithmetic."""
    source, target = (torch.ones(copy_bytes // 2, dtype=torch.uint8, device=device) for _ in range(2))
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.ones(size, size, device=device, dtype=dtype)
    return {
        COPY: (Call(lambda: target.copy_(source)), Work(0, copy_bytes)),
        MATMUL: (Call(lambda: torch.mm(a, b, out=out)), matmul(size, size, size, dtype.itemsize)),
    }


def ceilings_of(calls: dict[str, tuple[Call, Work]], samples: dict[str, Sample]) -> Ceilings:
    """From the samples of `ceiling_calls`. The fastest round counts: a ceiling is what can be reached."""
    seconds = {name: min(samples[name].rounds) / 1e3 for name in calls}
    bandwidth = calls[COPY][1].bytes / seconds[COPY] if COPY in calls else None
    return Ceilings(bandwidth, calls[MATMUL][1].flops / seconds[MATMUL] if MATMUL in calls else None)


def measure_ceilings(device: torch.device, dtype: torch.dtype, clock: Clock, rounds: int = 3, slice_ms: float = 25.0) -> Ceilings:
    """Both, on their own."""
    calls = ceiling_calls(device, dtype)
    return ceilings_of(calls, interleave({name: call for name, (call, _) in calls.items()}, clock, rounds, slice_ms))


def measure(
    workload: Workload,
    directions: tuple[str, ...],
    providers: tuple[Provider, ...],
    gpu: GPU | None,
    gate: Gate,
    clock: Clock,
    *,
    rounds: int = 7,
    slice_ms: float = 25.0,
    ceilings: dict[str, tuple[Call, Work]] | None = None,
    advance: Callable[[str], object] = lambda _: None,
) -> dict:
    """Providers and ceilings of one workload, interleaved pass by pass: {pass: {"placed": [...], "failures": {...}, "ceilings": {...}}}.

    gpu: of the table, or None: then nothing is said of data sheets. gate: no number without passing its oracle. ceilings: what
    `ceiling_calls` gives, or None to leave them out. advance: told what was done, for a progress bar. ValueError for rounds below 1.
    """
    found: dict = {}
    for direction in directions:
        closures, entries = admit(workload, direction, providers, gate)
        failures = {name: entry["failure"] for name, entry in entries.items() if entry["failure"]}
        advance(f"{PASSES[direction]}: checked")
        timed = {p.name: closures[p.name] for p in providers if p.name in closures}
        calls = {name: Call(c.call(direction), partial(c.entered, direction)) for name, c in timed.items()}
        limits = (ceilings or {}) if calls else {}
        samples = interleave(calls | {name: call for name, (call, _) in limits.items()}, clock, rounds, slice_ms)
        reached, work = ceilings_of(limits, samples), workload.work(direction)
        placed = [asdict(place(name, samples[name], work, gpu, workload.dtype, reached)) for name in calls]
        found[PASSES[direction]] = {"placed": placed, "failures": failures, "ceilings": asdict(reached)}
        advance(f"{PASSES[direction]}: timed")
    return found
