"""Interleaved timing: every provider takes its turn in every round, so heat and clocks fall on all alike.

A turn is about 25 ms of back-to-back calls between two device events: long enough that launch latency vanishes, short enough that a
round ends before the clocks drift. The number kept is the median over rounds, with its extremes beside it. L2 is not flushed between
calls: the inputs of the recorded suites (hundreds of megabytes) exceed it.

Surprising fact: who runs before you matters (a hot predecessor lowers your clock), so the order changes from round to round.
"""

import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

BUSY_CYCLES = 4_000_000  # about 2 ms


class Clock(Protocol):
    def elapsed_ms(self, call: Callable[[], object], count: int) -> float:
        """Milliseconds that `count` back-to-back calls took, all of their device work included."""


class CudaClock:
    """Device time between two events; waits for the second. The device is kept busy before the first one, while the host issues calls."""

    def elapsed_ms(self, call: Callable[[], object], count: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(BUSY_CYCLES)
        start.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)


class WallClock:
    """Host time: right for CPU tensors, where a call returns when its work is done."""

    def elapsed_ms(self, call: Callable[[], object], count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - start) * 1e3


def clock_for(device: torch.device) -> Clock:
    return CudaClock() if device.type == "cuda" else WallClock()


@dataclass(frozen=True)
class Call:
    """Something to time, and the context it must run in; the context is entered once a turn, so it costs the calls nothing."""

    run: Callable[[], object]
    entered: Callable[[], AbstractContextManager] = nullcontext


@dataclass(frozen=True)
class Sample:
    """Milliseconds per call: one value a round."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    @property
    def spread(self) -> float:
        """(slowest round - fastest round) / median."""
        return (max(self.rounds) - min(self.rounds)) / self.median if self.median else 0.0


def turn_order(names: Sequence[str], round_index: int) -> list[str]:
    """The order of one round: rotated by one every other round, and backwards in odd rounds, so that neighbours change too."""
    shift = round_index // 2 % len(names) if names else 0
    rotated = [*names[shift:], *names[:shift]]
    return rotated[::-1] if round_index % 2 else rotated


def interleave(calls: dict[str, Call], clock: Clock, rounds: int = 7, slice_ms: float = 25.0) -> dict[str, Sample]:
    """Times all calls in turn, `rounds` times, about `slice_ms` each; a first unmeasured turn warms up and sizes the slices."""
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; at least 1 is needed")
    counts = {}
    for name, call in calls.items():
        with call.entered():
            clock.elapsed_ms(call.run, 1)
            counts[name] = max(1, int(slice_ms / max(clock.elapsed_ms(call.run, 2) / 2, 1e-6)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(rounds):
        for name in turn_order(list(calls), index):
            with calls[name].entered():
                times[name].append(clock.elapsed_ms(calls[name].run, counts[name]) / counts[name])
    return {name: Sample(tuple(values)) for name, values in times.items()}


GPU_FIELDS = ("name", "driver_version", "clocks.sm", "clocks.mem", "power.draw", "power.limit", "temperature.gpu")


def gpu_state(device: torch.device) -> dict[str, str] | None:
    """Clocks (MHz), power (W) and temperature (degrees C) as nvidia-smi reports them now; None where it can't be asked. Only reads."""
    if device.type != "cuda" or shutil.which("nvidia-smi") is None:
        return None
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    query = ["nvidia-smi", f"--id=GPU-{uuid.removeprefix('GPU-')}", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        return None
    values = [value.strip() for value in answer.stdout.strip().split(",")]
    if answer.returncode or len(values) != len(GPU_FIELDS):
        return None
    return dict(zip(GPU_FIELDS, values, strict=True))
