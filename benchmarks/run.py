"""The benchmark: `python -m benchmarks.run --suite NAME`, a suite of benchmarks/workloads.py, or host_overhead or memory, which take the
options of the module of that name.

For every workload and direction: bind all providers, ask the gate, time those that passed in one interleaved run, write the JSON.
A provider that cannot run, or is wrong, gets a row with the reason and no number.

Surprising fact: compiling takes longer than measuring. `--warm N` first lets N processes fill the disk caches of Triton and
Inductor side by side; the measuring process then only loads.
"""

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from benchmarks import host_overhead, memory, report
from benchmarks.workloads import DIRECTIONS, SUITES, Workload, select
from flashattn.roofline.calls import Closures, Inputs, Provider, attempt
from flashattn.roofline.gate import Gate, admit
from flashattn.roofline.gpus import GPU, detect
from flashattn.roofline.measure import Ceilings, measure_ceilings
from flashattn.roofline.peers import choose
from flashattn.roofline.timing import Call, Clock, clock_for, gpu_state, interleave


def measure(
    workload: Workload, direction: str, providers: tuple[Provider, ...], gate: Gate, clock: Clock, rounds: int, slice_ms: float,
    gpu: GPU | None = None, ceilings: Ceilings = report.NO_CEILINGS,
) -> list[dict]:  # fmt: skip
    """Rows of one workload and direction, one for each provider: gated, then timed together."""
    admitted, found = admit(workload, direction, providers, gate)
    ordered = [provider.name for provider in providers if provider.name in admitted]
    calls = {name: Call(admitted[name].call(direction), partial(admitted[name].entered, direction)) for name in ordered}
    samples, broken = attempt(lambda: interleave(calls, clock, rounds, slice_ms)) if calls else ({}, None)
    rows = []
    for provider in providers:
        entry = found[provider.name]
        if entry["failure"] or broken:
            numbers = report.empty_row() | {"error": None, "failure": entry["failure"] or f"timing stopped: {broken}"}
            entry = {key: entry[key] for key in ("against", "difference")}
        else:
            numbers = report.measured_row(workload, direction, provider.name, samples[provider.name], samples, gpu, ceilings)
        rows.append({"workload": workload.name, "direction": direction, "provider": provider.name} | numbers | entry)
    return rows


def warm(tasks: list[Workload], directions: tuple[str, ...], providers: tuple[Provider, ...], device: torch.device) -> None:
    """Compiles what the tasks need by running it once. Failures are left for the gate to report."""
    for workload in tasks:
        for provider in providers:
            closures = provider.closures(Inputs(workload, device))
            if isinstance(closures, Closures):
                for direction in directions:
                    attempt(partial(closures.results, direction))


def warm_tasks(workloads: tuple[Workload, ...], shard: int, shards: int) -> list[Workload]:
    """This shard's part of the workloads and their reduced kinds, each once."""
    return list(dict.fromkeys([*(w.reduced() for w in workloads), *workloads]))[shard::shards]


def warm_in_parallel(module: str, argv: list[str], processes: int) -> None:
    """Runs `module` with `--warm-shard i/processes` for every i, all at once."""
    start = time.monotonic()
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # the processes are the parallelism
    workers = [
        subprocess.Popen([sys.executable, "-m", module, *argv, "--warm-shard", f"{index}/{processes}"], env=environment)
        for index in range(processes)
    ]
    failed = [index for index, worker in enumerate(workers) if worker.wait()]
    if failed:
        print(f"warming processes {failed} failed; what they left is compiled during the run", flush=True)
    print(f"compiled in {processes} processes: {time.monotonic() - start:.0f} s", flush=True)


ELSEWHERE = {"host_overhead": host_overhead.main, "memory": memory.main}  # suites that count something else than time on the GPU


def numbers(text: str) -> tuple[int, ...]:
    """'1k,4096,16k' -> (1024, 4096, 16384)"""
    return tuple(int(part[:-1]) * 1024 if part.endswith("k") else int(part) for part in text.split(",") if part)


def names(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.run", description="Attention providers, gated and timed in one interleaved run.")
    p.add_argument("--suite", required=True, choices=SUITES, help=f"or {', '.join(ELSEWHERE)}, which have options of their own")
    p.add_argument("--directions", type=names, default=DIRECTIONS, help="fwd,bwd")
    p.add_argument("--providers", type=names, default=None, help="see flashattn/roofline/peers.py; default: our kernels, fast peers")
    p.add_argument("--rounds", type=int, default=7, help="turns of each provider; the median is kept (default 7)")
    p.add_argument("--slice-ms", type=float, default=25.0, help="milliseconds of back-to-back calls in one turn (default 25)")
    p.add_argument("--seqlens", type=numbers, default=None, help="only these lengths, as 1k,4k,16k")
    p.add_argument("--head-dims", type=numbers, default=None, help="only these head dims, as 64,128")
    p.add_argument("--match", default="", help="only workloads with this text in their name, as causal")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--json", type=Path, default=None, help="result file (default benchmarks/results/<gpu>-<suite>.json)")
    p.add_argument("--warm", type=int, default=0, metavar="N", help="compile in N processes first")
    p.add_argument("--warm-shard", default=None, help=argparse.SUPPRESS)
    return p


def run_suite(
    args: argparse.Namespace, workloads: tuple[Workload, ...], providers: tuple[Provider, ...], command: str, say: Callable[..., None]
) -> list[dict]:
    """Measures every workload, writing the record after each (workload, direction); the rows of this run."""
    device = torch.device(args.device)
    gpu = report.device_name(device)
    record = report.Record(args.json or report.result_path(device, args.suite), args.suite, gpu)
    gate, clock = Gate(device), clock_for(device)
    date, versions = report.today(), report.versions(device)
    run = {"date": date, "command": command, "versions": versions, "gpu_start": gpu_state(device), "gpu_end": None}
    known, ceilings = detect(gpu), report.NO_CEILINGS
    if device.type == "cuda":
        ceilings = measure_ceilings(device, torch.bfloat16, clock)
        run["ceilings"] = asdict(ceilings)
        say(f"a matmul reaches {ceilings.peak / 1e12:.0f} TFLOP/s, a copy {ceilings.bandwidth / 1e9:.0f} GB/s")
    record.begin(run)
    common = {"suite": args.suite, "gpu": gpu, "date": date, "command": command, "versions": versions}
    rows: list[dict] = []
    start = time.monotonic()
    for index, workload in enumerate(workloads, 1):
        for direction in args.directions:
            new = measure(workload, direction, providers, gate, clock, args.rounds, args.slice_ms, known, ceilings)
            run["gpu_end"] = gpu_state(device)
            state = run["gpu_end"] or {}
            hot = {"sm_mhz": state.get("clocks.sm"), "watts": state.get("power.draw")}
            new = [common | row | hot for row in new]
            record.replace(new)
            record.write()
            rows += new
            speeds = " ".join(f"{row['provider']}:{row['tflops']:.4g}" for row in new if row["ms"] is not None)
            say(f"[{index}/{len(workloads)} {time.monotonic() - start:.0f} s] {workload.name} {direction} TFLOP/s {speeds or 'none'}", 1)
    say(f"wrote {record.path}")
    return rows


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--suite")
    asked, rest = first.parse_known_args(argv)
    if asked.suite in ELSEWHERE:
        return ELSEWHERE[asked.suite](rest)
    command_line = parser()
    args = command_line.parse_args(argv)
    try:
        workloads = select(args.suite, args.seqlens, args.head_dims, args.match)
        providers = choose(args.providers, everyone=args.suite == "smoke")
    except ValueError as error:
        command_line.error(str(error))
    if unknown := [name for name in args.directions if name not in DIRECTIONS]:
        command_line.error(f"unknown direction {', '.join(unknown)}; known are {', '.join(DIRECTIONS)}")
    if args.device == "cpu" and args.suite != "smoke":
        command_line.error(f"suite {args.suite!r} needs a GPU; on a CPU only --suite smoke makes sense")
    if args.warm_shard:
        shard, shards = (int(part) for part in args.warm_shard.split("/"))
        compiled = tuple(provider for provider in providers if provider.compiles)
        warm(warm_tasks(workloads, shard, shards), args.directions, compiled, torch.device(args.device))
        return 0
    if args.warm:
        warm_in_parallel("benchmarks.run", argv, args.warm)
    command = "python -m benchmarks.run " + shlex.join(argv)
    with report.progress(len(workloads) * len(args.directions)) as say:
        rows = run_suite(args, workloads, providers, command, say)
    report.print_table(*report.pivot(rows), title=f"TFLOP/s, {report.device_name(torch.device(args.device))}, suite {args.suite}")
    print("\n".join(["", *report.failures(rows)]))
    return 0 if any(row["ms"] is not None for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
