"""This checkout against another commit, on the same workloads in the same minutes: `python -m benchmarks.compare REF --suite fa3`.

Two processes, one on this checkout's sources and one on those of REF, take turns on the GPU: here, there, there, here, and so on. The
number kept is the median over rounds of the ratio of a round, so what changes slowly (heat, clocks) falls out of it. Both time the same
random inputs; results whose norms differ by more than rounding are an error and no speed.

Surprising fact: equal commits don't tie. Compare with HEAD first: what that shows is the noise, and smaller differences mean nothing.
"""

import argparse
import io
import json
import os
import shlex
import statistics
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks import report
from benchmarks.run import names, numbers
from benchmarks.workloads import DIRECTIONS, SUITES, select
from flashattn.roofline import timing

REPOSITORY = Path(__file__).parent.parent
WORKER = Path(__file__).with_name("compare_worker.py")
MOST_DIFFERENCE = 1e-2  # of norms: two kernels that round differently agree far better


def sources(ref: str, into: Path, repository: Path = REPOSITORY) -> Path:
    """The `src` of a commit, unpacked; ValueError for what git doesn't know."""
    done = subprocess.run(["git", "archive", ref, "src"], cwd=repository, capture_output=True)
    if done.returncode:
        raise ValueError(f"REF={ref!r}: {done.stderr.decode().strip().splitlines()[0]}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(into, filter="data")
    return into / "src"


class Side:
    """A worker on one tree. `ask` raises RuntimeError with what went wrong there."""

    def __init__(self, name: str, source: Path, device: str) -> None:
        self.name = name
        path = {"PYTHONPATH": str(source)}
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment() | path
        )
        found = self.ask(do="start", device=device, timing=timing.__file__)
        if not Path(found["file"]).is_relative_to(source):
            self.close()
            raise RuntimeError(f"{name} imported {found['file']}, which is not under {source}")

    def ask(self, **question) -> dict:
        print(json.dumps(question), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {"error": f"the worker ended with {self.process.wait()}"}
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {answer['error']}")
        return answer

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def difference(mine: list[float], theirs: list[float]) -> float:
    """The largest relative difference of two lists of norms."""
    return max((abs(a - b) / max(abs(b), 1e-30) for a, b in zip(mine, theirs, strict=True)), default=0.0)


def ratios(rounds: list[dict[str, float]], here: str, there: str) -> dict[str, float]:
    """Of the times there over here, round by round: above 1 this checkout is faster."""
    found = [one[there] / one[here] for one in rounds]
    return {"ratio": statistics.median(found), "ratio_min": min(found), "ratio_max": max(found)}


def compare(sides: tuple[Side, Side], task: dict, direction: str, impl: str | None, rounds: int, slice_ms: float) -> dict:
    """One row: milliseconds of both sides and their ratio, or the failure."""
    here, there = sides
    try:
        ready = {side.name: side.ask(do="prepare", task=task, direction=direction, impl=impl) for side in sides}
        apart = difference(ready[here.name]["norms"], ready[there.name]["norms"])
        if not apart <= MOST_DIFFERENCE:
            raise RuntimeError(f"the results differ: norms by {apart:.1e}")
        counts = {name: max(1, int(slice_ms / max(one["ms"], 1e-6))) for name, one in ready.items()}
        times = []
        for index in range(rounds):
            order = timing.turn_order([side.name for side in sides], index)
            by_name = {side.name: side for side in sides}
            times.append({name: by_name[name].ask(do="turn", count=counts[name])["ms"] for name in order})
    except RuntimeError as error:
        return {"failure": str(error)}
    ms = {name: statistics.median(one[name] for one in times) for name in counts}
    return {"failure": None, "ms": ms, "rounds": rounds, **ratios(times, here.name, there.name)}


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.compare", description="This checkout against another commit, interleaved.")
    p.add_argument("ref", metavar="REF", help="what git knows: a commit, a branch, HEAD~3")
    p.add_argument("--suite", required=True, choices=SUITES)
    p.add_argument("--directions", type=names, default=DIRECTIONS)
    p.add_argument("--impl", default=None, help="hold both to this kernel")
    p.add_argument("--seqlens", type=numbers, default=None)
    p.add_argument("--head-dims", type=numbers, default=None)
    p.add_argument("--match", default="")
    p.add_argument("--rounds", type=int, default=9)
    p.add_argument("--slice-ms", type=float, default=25.0)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--json", type=Path, default=None)
    return p


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    command_line = parser()
    args = command_line.parse_args(argv)
    if args.device == "cpu" and args.suite != "smoke":
        command_line.error(f"suite {args.suite!r} needs a GPU; on a CPU only --suite smoke makes sense")
    if args.rounds < 1:
        command_line.error(f"--rounds {args.rounds}: expected at least 1")
    if unknown := [name for name in args.directions if name not in DIRECTIONS]:
        command_line.error(f"unknown direction {', '.join(unknown)}; known are {', '.join(DIRECTIONS)}")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            workloads = select(args.suite, args.seqlens, args.head_dims, args.match)
            other = sources(args.ref, Path(folder))
        except ValueError as error:
            command_line.error(str(error))
        sides = (Side("here", REPOSITORY / "src", args.device), Side(args.ref, other, args.device))
        try:
            for workload in workloads:
                for direction in args.directions:
                    row = compare(sides, asdict(workload), direction, args.impl, args.rounds, args.slice_ms)
                    rows.append({"workload": workload.name, "direction": direction} | row)
                    print(f"{workload.name} {direction}: {row['failure'] or format(row['ratio'], '.3f')}", flush=True)
        finally:
            for side in sides:
                side.close()
    device = torch.device(args.device)
    if args.json:
        document = {
            "suite": f"compare-{args.suite}", "gpu": report.device_name(device), "date": report.today(), "ref": args.ref,
            "command": "python -m benchmarks.compare " + shlex.join(argv), "versions": report.versions(device), "rows": rows,
        }  # fmt: skip
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    good = [row for row in rows if not row["failure"]]
    lines = [
        [row["workload"], row["direction"], *(f"{row['ms'][side.name]:.4g}" for side in sides), f"{row['ratio']:.3f}",
         f"{row['ratio_min']:.3f} .. {row['ratio_max']:.3f}"]
        for row in good
    ]  # fmt: skip
    header = ["workload", "pass", "here ms", f"{args.ref} ms", "times as fast", "range"]
    report.print_table(header, lines, f"This checkout against {args.ref}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
