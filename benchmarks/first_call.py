"""How long a kernel's first call takes, with an empty cache and with a full one: `python -m benchmarks.first_call`.

Each number is of a process of its own, which has touched the device and imported torch and the library before the clock starts. Cold:
with an empty cache directory of Triton; warm: with what that process left there; together: of 16 processes that share an empty one.
Triton's import, which the first call brings along where nothing else has, is a number of its own and part of none of the others.

Surprising fact: of a warm first call it is the larger part. Nothing is compiled then, and nothing is when the library is imported.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks import report

NAMES = ("triton", "forward", "backward")
FIRST_CALL = """
import sys, time, torch
from flashattn import attention
device, impl = sys.argv[1], None if sys.argv[2] == "any" else sys.argv[2]
dtype = torch.bfloat16 if device == "cuda" else torch.float32
q = torch.randn(1, 512, 4, 64, device=device, dtype=dtype, requires_grad=True)
(q @ q.mT).sum().backward()
wait = torch.cuda.synchronize if device == "cuda" else lambda: None
wait()
start = time.perf_counter()
import triton, triton.language
imported = time.perf_counter()
out = attention(q, q, q, causal=True, impl=impl)
wait()
forward = time.perf_counter()
out.sum().backward()
wait()
print(imported - start, forward - imported, time.perf_counter() - forward)
"""


def start(cache: str, device: str, impl: str) -> subprocess.Popen:
    source = str(Path(__file__).resolve().parent.parent / "src")
    environment = os.environ | {"TRITON_CACHE_DIR": cache, "PYTHONPATH": os.pathsep.join((source, os.environ.get("PYTHONPATH", "")))}
    return subprocess.Popen([sys.executable, "-c", FIRST_CALL, device, impl], env=environment, stdout=subprocess.PIPE, text=True)


def seconds(worker: subprocess.Popen) -> dict[str, float] | None:
    """Of a worker by NAMES; None if it failed."""
    said = worker.communicate()[0]
    return None if worker.returncode else dict(zip(NAMES, map(float, said.split()), strict=True))


def measure(impl: str, device: str, together: int) -> list[dict]:
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as shared:
        found = [("cold", [seconds(start(cache, device, impl))]), ("warm", [seconds(start(cache, device, impl))])]
        workers = [start(shared, device, impl) for _ in range(together)]
        found.append((f"{together} together", [seconds(worker) for worker in workers]))
    rows = []
    for state, times in found:
        done = [time for time in times if time is not None]
        slowest = {name: max((time[name] for time in done), default=None) for name in NAMES}
        rows.append({"impl": impl, "state": state, "processes": len(times), "failed": len(times) - len(done), **slowest})
    return rows


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    p = argparse.ArgumentParser(prog="python -m benchmarks.first_call", description="Seconds of first calls.")
    p.add_argument("--impls", default="hopper,portable", help="separated by commas; any: what is chosen")
    p.add_argument("--together", type=int, default=16, help="processes that share an empty cache (default 16)")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--json", type=Path, default=None)
    args = p.parse_args(argv)
    device = torch.device(args.device)
    rows = [row for impl in args.impls.split(",") for row in measure(impl, args.device, args.together)]
    document = {
        "suite": "first_call", "gpu": report.device_name(device), "date": report.today(), "versions": report.versions(device),
        "command": "python -m benchmarks.first_call " + shlex.join(argv), "rows": rows,
    }  # fmt: skip
    path = args.json or report.result_path(device, "first_call")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    shown = [["-" if row[name] is None else f"{row[name]:.2f}" for name in NAMES] for row in rows]
    lines = [[row["impl"], row["state"], *times, str(row["failed"])] for row, times in zip(rows, shown, strict=True)]
    report.print_table(["impl", "cache", *(f"{name} s" for name in NAMES), "failed"], lines, "The slowest first call, causal, D 64")
    return int(any(row["failed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
