"""Compiles Triton kernels for GPUs that this machine doesn't have, and reads what the compiler made of them.

`JITFunction.warmup` needs a driver only to learn the target, so a driver that knows nothing else is enough, down to a cubin.
A `Job` names a function by its dotted path, so that it can be sent to a worker process; `CompilePool` keeps one worker per core.

The surprising fact: Triton decides when a kernel is *defined* whether the interpreter will run it. A process with TRITON_INTERPRET=1 can
never compile, so the work is done in spawned processes that drop the variable before they import Triton. This module must therefore
not import Triton, nor anything that does, when it is loaded.
"""

import os
import re
import time
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from io import StringIO
from multiprocessing import get_context

# Most shared memory that one block may have, in bytes (CUDA C++ Programming Guide, table of compute capabilities).
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
TENSOR_MEMORY_COLUMNS = 512  # of an SM with tensor memory (compute capability 10.0); Triton counts in the same unit


@dataclass(frozen=True)
class Job:
    """One kernel to compile: `build`, "package.module.function", is called with `args` and returns (kernel, arguments, options).

    arguments: as for a launch; tensors may be on the CPU or on "meta" (only dtype and alignment are looked at), or a dtype may stand
    for a pointer. options: keyword arguments of the launch, constexprs and num_warps alike. cc: compute capability, 90 for sm_90.
    """

    build: str
    args: tuple
    cc: int

    def __str__(self):
        return f"sm_{self.cc}-{self.build.rpartition('.')[2]}-{'-'.join(map(str, self.args))}"


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a kernel. Bytes but for `registers`, of one thread, and `tensor_memory`, in columns.

    `stack` is the memory of a thread that is not in registers: everything spilled, and arrays that are indexed at run time.
    `warnings`: what ptxas says of wgmma, codes C75xx: products that it made wait for each other. `barriers`: the hardware barriers that
    Triton took; a kernel that uses some itself must take others.
    """

    name: str
    cc: int
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int
    tensor_memory: int
    num_warps: int
    seconds: float
    warnings: tuple[str, ...] = ()
    barriers: frozenset[int] = frozenset()

    @property
    def shared_limit(self) -> int:
        return SHARED_MEMORY[self.cc]

    def problems(self) -> list[str]:
        """Why this kernel must not be shipped for this GPU; empty when it may."""
        found = []
        if self.shared > self.shared_limit:
            found.append(f"{self.name} on sm_{self.cc} needs {self.shared} bytes of shared memory of {self.shared_limit}")
        if self.tensor_memory > TENSOR_MEMORY_COLUMNS:
            found.append(f"{self.name} on sm_{self.cc} needs {self.tensor_memory} columns of tensor memory of {TENSOR_MEMORY_COLUMNS}")
        if self.spill_stores or self.spill_loads:  # a few bytes of stack without either hold no spilled register
            spills = f"{self.spill_stores} bytes of spill stores, {self.spill_loads} of spill loads"
            found.append(f"{self.name} on sm_{self.cc} has {spills} and a stack of {self.stack} bytes")
        return found


_logs: dict[str, str] = {}  # what ptxas said, by the kernel


def compile_here(job: Job) -> Compiled:
    """Compile in this process, which must be able to (no interpreter), and measure."""
    import triton

    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: this process can only interpret; compile through a CompilePool")
    triton.runtime.driver.set_active(_driver(job.cc))
    triton.knobs.compilation.always_compile = True  # what comes out of the disk cache has no log
    triton.knobs.nvidia.dump_ptxas_log = True
    kernel, args, options = _built(job)
    started = time.perf_counter()
    with redirect_stdout(StringIO()) as log:
        compiled = kernel.warmup(*args, grid=(1,), **options)
    seconds = time.perf_counter() - started
    said = _logs.setdefault(compiled.hash, log.getvalue())  # two jobs may be one kernel, which a process compiles once
    registers, stack, stores, loads, warnings = _resources(said)
    ptx, metadata = compiled.asm["ptx"], compiled.metadata
    barriers = frozenset(map(int, re.findall(r"bar(?:rier)?(?:\.cta)?\.(?:sync|arrive|red)\S*\s+(\d+)", ptx)))
    tensor_memory = getattr(metadata, "tmem_size", None) or 0
    return Compiled(
        metadata.name, job.cc, registers, stack, stores, loads, metadata.shared, tensor_memory, metadata.num_warps, round(seconds, 2),
        warnings, barriers,
    )  # fmt: skip


def _built(job: Job):
    module, _, name = job.build.rpartition(".")
    return getattr(import_module(module), name)(*job.args)


def specializations_here(jobs: list[Job]) -> list[tuple[str, str]]:
    """For each job the kernel's name and the key under which Triton would look for a compiled one: as many keys, as many compilations.

    Nothing is compiled: Triton's hook before a compilation sees the key, and its answer "already done" ends the launch.
    """
    import triton

    seen = []

    def note(*, key, fn, **_):
        seen.append((fn.name, key))
        return True

    before = triton.knobs.runtime.jit_cache_hook
    triton.knobs.runtime.jit_cache_hook = note
    try:
        for job in jobs:
            triton.runtime.driver.set_active(_driver(job.cc, device=-1 - job.cc))  # where nothing was ever compiled
            kernel, args, options = _built(job)
            kernel.warmup(*args, grid=(1,), **options)
    finally:
        triton.knobs.runtime.jit_cache_hook = before
    return seen


def _driver(cc: int, device: int | None = None):
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class TargetOnly(DriverBase):
        """A driver with a target and no device. Kernels cache what they compiled by device, so each target is its own device."""

        def get_current_target(self):
            return GPUTarget("cuda", cc, 32)

        def get_current_device(self):
            return cc if device is None else device

        def get_current_stream(self, device):
            return 0

        def get_active_torch_device(self):
            raise RuntimeError("there is no device: this driver only compiles")

        def get_benchmarker(self):
            raise RuntimeError("there is no device: this driver only compiles")

        def map_python_to_cpp_type(self, ty):
            return ty

        @classmethod
        def is_active(cls):
            return True

    return TargetOnly()


def _resources(log: str) -> tuple[int, int, int, int, tuple[str, ...]]:
    """(registers, stack, spill stores, spill loads, warnings of wgmma) from what ptxas -v said: of the most demanding function in it."""
    registers = re.findall(r"Used (\d+) registers", log)
    if not registers:
        raise RuntimeError(f"no resource usage in what ptxas printed: {log!r}")
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    stack, stores, loads = (max(map(int, sizes)) for sizes in zip(*frames, strict=True))
    warnings = sorted({line.strip() for line in log.splitlines() if re.search(r"\bC75\d\d\b", line)})
    return max(map(int, registers)), stack, stores, loads, tuple(warnings)


def _start_worker():
    """Runs first in a worker, before anything can import Triton. One thread each: there is a worker for every core."""
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["OMP_NUM_THREADS"] = "1"


class CompilePool:
    """Workers that compile jobs side by side. Submit all jobs before waiting for the first, or only one core works."""

    def __init__(self, workers: int | None = None):
        self._workers = workers or os.cpu_count() or 1
        self._futures: dict[Job, Future] = {}
        self._pool = self._start(self._workers)

    @staticmethod
    def _start(workers: int) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_start_worker)

    def submit(self, job: Job) -> None:
        """Start compiling, unless this job was submitted before."""
        if job not in self._futures:
            try:
                self._futures[job] = self._pool.submit(compile_here, job)
            except BrokenProcessPool as error:
                self._futures[job] = Future()
                self._futures[job].set_exception(error)

    def result(self, job: Job) -> Compiled:
        """Wait for the job. Raises what its compilation raised."""
        self.submit(job)
        try:
            return self._futures[job].result()
        except BrokenProcessPool:
            return self._alone(job)

    def run(self, function, *args):
        """What function(*args) gives in a worker, where kernels can be compiled; the function is sent by its name."""
        return self._pool.submit(function, *args).result()

    def _alone(self, job: Job) -> Compiled:
        """A compiler that crashes takes the whole pool along: compile each unfinished job in a process of its own to find which it is."""
        with self._start(1) as pool:
            try:
                return pool.submit(compile_here, job).result()
            except BrokenProcessPool as error:
                raise RuntimeError(f"the compiler crashed on {job}") from error

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
