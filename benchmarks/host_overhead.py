"""CPU time of one small forward call without gradients: `python -m benchmarks.host_overhead`.

Many calls are issued without waiting for the device and the host clock is read around them; what remains is Python, dispatch and
launch. Providers take turns, and the median over repeats is kept.

Surprising fact: the device must keep up for this to be host time. The shape is so small that each call's kernel ends before the next
call is issued, and the launch queue (about a thousand entries) never fills.
"""

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks import report
from benchmarks.workloads import square
from flashattn.roofline.calls import Inputs, attempt
from flashattn.roofline.gate import Gate
from flashattn.roofline.peers import choose
from flashattn.roofline.timing import Call, gpu_state, turn_order

SMALL = square("host-s128-d64", 1, 128, 8, 8, 64, True)
PROVIDERS = ("flashattn", "flashattn-portable", "flashattn-eager", "sdpa", "sdpa-flash")


def host_us(calls: dict[str, Call], count: int, repeats: int, wait: Callable[[], object]) -> dict[str, list[float]]:
    """Microseconds of host time per call, one value a repeat; `wait` drains the device, outside the clock."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(repeats + 1):
        for name in turn_order(list(calls), index):
            with calls[name].entered():
                wait()
                start = time.perf_counter_ns()
                for _ in range(count):
                    calls[name].run()
                spent = time.perf_counter_ns() - start
                wait()
            if index:  # the first repeat warms up
                times[name].append(spent / count / 1e3)
    return times


def measure(names: tuple[str, ...], device: torch.device, count: int, repeats: int) -> list[dict]:
    gate, inputs = Gate(device), Inputs(SMALL, device)
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else (lambda: None)
    calls, rows = {}, {}
    for provider in choose(names):
        verdict = gate.judge(provider, SMALL, "fwd")
        rows[provider.name] = {"provider": provider.name, "us": None, "error": verdict.error, "failure": verdict.failure}
        closures = verdict.failure or provider.closures(inputs)
        if isinstance(closures, str):
            rows[provider.name]["failure"] = closures
        else:
            calls[provider.name] = Call(closures.call("fwd"), partial(closures.entered, "fwd"))
    times, broken = attempt(lambda: host_us(calls, count, repeats, wait))
    for name in calls:
        if broken:
            rows[name]["failure"] = broken
        else:
            rows[name] |= {"us": statistics.median(times[name]), "us_min": min(times[name]), "us_max": max(times[name])}
    return list(rows.values())


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    p = argparse.ArgumentParser(prog="python -m benchmarks.host_overhead", description="CPU time of one small forward call.")
    p.add_argument("--providers", default=",".join(PROVIDERS))
    p.add_argument("--calls", type=int, default=200, help="calls between two waits (default 200)")
    p.add_argument("--repeats", type=int, default=15)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--json", type=Path, default=None)
    args = p.parse_args(argv)
    device = torch.device(args.device)
    start = gpu_state(device)
    rows = measure(tuple(args.providers.split(",")), device, args.calls, args.repeats)
    document = {
        "suite": "host_overhead", "gpu": report.device_name(device), "date": report.today(), "versions": report.versions(device),
        "command": "python -m benchmarks.host_overhead " + shlex.join(argv), "calls": args.calls, "repeats": args.repeats,
        "workload": {"batch": SMALL.batch, "seqlen": SMALL.seqlen_q, "heads": SMALL.heads_q, "head_dim": SMALL.head_dim,
                     "causal": SMALL.causal, "dtype": SMALL.dtype, "grad": False},
        "gpu_start": start, "gpu_end": gpu_state(device), "rows": rows,
    }
    path = args.json or report.result_path(device, "host_overhead")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    lines = [[r["provider"], f"{r['us']:.1f}", f"{r['us_min']:.1f} .. {r['us_max']:.1f}"] for r in rows if r["us"] is not None]
    report.print_table(["provider", "us per call", "min .. max"], lines, "Host time of one small forward call, no grad")
    print("\n".join(f"{r['provider']}: {r['failure']}" for r in rows if r["failure"]))
    return 0 if lines else 1


if __name__ == "__main__":
    sys.exit(main())
