"""Bytes of device memory that attention really moves, by Nsight Compute: `python -m benchmarks.dram`.

For standard attention and for ours, forward and backward, a small child process runs one call under `ncu` with two counters, read and
written DRAM bytes. Beside them stand what the FlashAttention paper printed, with its GPU, and what the laboratory predicts
(`flashattn.roofline.memory`): with nothing found in L2, and with every tensor moved once, between which a kernel must lie.

Caches are left as they are between kernels (--cache-control none), so that standard attention, too, may find in L2 what it has just
written. Clocks are left alone as well: bytes don't depend on them.

Surprising fact: a kernel may write less than its output. What is still in L2 when it ends is not yet in DRAM, and the counters stop there.
"""

import argparse
import csv
import io
import json
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch

from benchmarks import report
from benchmarks.workloads import WORKLOADS, Workload
from flashattn.dispatch.select import select
from flashattn.roofline import detect, memory
from flashattn.roofline.calls import Inputs
from flashattn.roofline.gate import Gate
from flashattn.roofline.measure import measure
from flashattn.roofline.peers import choose
from flashattn.roofline.timing import clock_for
from flashattn.roofline.workload import DIRECTIONS, PASSES

COUNTERS = {"dram__bytes_read.sum": "read", "dram__bytes_write.sum": "written"}
UNITS = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12}
PROVIDERS = ("standard", "flashattn")
PUBLISHED = {  # Dao et al. 2022, figure 2 left: GPT-2 medium's attention, forward and backward, with mask and dropout
    "gpu": "A100", "workload": "gpt2-medium-s1024", "standard": {"bytes": 40.3e9, "ms": 41.7}, "flashattn": {"bytes": 4.4e9, "ms": 7.3},
    "extra_flops": 0.13,
}  # fmt: skip


def parse(text: str) -> list[dict]:
    """What ncu --csv printed -> [{"kernel", "read", "written"}], one a launch, in bytes.

    ValueError, with what ncu said instead, when there is no table or a counter is missing.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        said = " ".join(line.strip() for line in lines if line.startswith("==ERROR==")) or text.strip()[-300:]
        raise ValueError(f"ncu printed no table: {said}")
    launches: dict[str, dict] = {}
    for line in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        if line.get("Metric Name") not in COUNTERS:
            continue
        launch = launches.setdefault(line["ID"], {"kernel": line["Kernel Name"]})
        value = float(line["Metric Value"].replace(",", ""))
        launch[COUNTERS[line["Metric Name"]]] = value * UNITS[line["Metric Unit"]]
    missing = [launch["kernel"] for launch in launches.values() if not {"read", "written"} <= launch.keys()]
    if missing or not launches:
        raise ValueError(f"ncu gave not both counters for {', '.join(missing) or 'any kernel'}")
    return list(launches.values())


def command(provider: str, direction: str, workload: str) -> list[str]:
    """The child under ncu."""
    child = [sys.executable, "-m", "benchmarks.dram", "--child", f"{provider}:{direction}", "--workload", workload]
    counters = ",".join(COUNTERS)
    options = ["--csv", "--print-units", "base", "--profile-from-start", "off", "--cache-control", "none", "--clock-control", "none"]
    return ["ncu", *options, "--metrics", counters, *child]


def child(provider: str, direction: str, workload: Workload) -> None:
    """One call between the profiler's start and stop, warmed up before: compiled, and its backward's graph built."""
    (chosen,) = choose((provider,))
    closures = chosen.closures(Inputs(workload, torch.device("cuda")))
    if isinstance(closures, str):
        raise ValueError(f"{provider}: {closures}")
    call = closures.call(direction)
    with closures.entered(direction):
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def predicted(workload: Workload, provider: str, direction: str, capability: tuple[int, int] | None) -> dict[str, float] | None:
    """The laboratory's bytes for a call without a mask: {"no_l2", "once"}, and for standard attention only what its steps move.

    Ours has the tiles and the way to dQ of the kernel that would be chosen. None where there is a mask, or a pass each for dK and dV, which
    the laboratory doesn't know.
    """
    problem = replace(workload.problem(), capability=capability, aligned=True)
    if problem.window_left is not None or problem.window_right is not None or workload.packed or workload.seqlen_q != workload.seqlen_k:
        return None
    heads, which = workload.batch * workload.heads_q, PASSES[direction]
    n, d, size = workload.seqlen_q, workload.head_dim, problem.itemsize
    if provider == "standard":
        return {"no_l2": heads * memory.standard(n, d, size, which).total, "once": workload.minimal_bytes(direction)}
    kernel = select(problem, which, provider.partition("-")[2] or None)
    rows = kernel.rows(problem)
    if direction == "bwd" and "dk" in rows:
        return None
    of_q, of_k = ("forward", "forward") if direction == "fwd" else ("backward", "backward") if "backward" in rows else ("dq", "dkdv")
    tiles = memory.flash(n, d, rows[of_q].block_m, rows[of_k].block_n, size, which, fused=kernel.name == "hopper")
    return {"no_l2": heads * tiles.total, "once": workload.minimal_bytes(direction)}


def totals(rows: list[dict]) -> dict[str, dict[str, float]]:
    """{provider: forward and backward together}: bytes moved, predicted without L2, milliseconds."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        one = found.setdefault(row["provider"], {"bytes": 0.0, "no_l2": 0.0, "once": 0.0, "ms": 0.0})
        one["bytes"] += row["read"] + row["written"]
        one["ms"] += row["ms"] or 0.0
        for name in ("no_l2", "once"):
            one[name] += (row["predicted"] or {}).get(name, 0.0)
    return found


def told(rows: list[dict], workload: str) -> list[str]:
    """The comparison with the paper, in sentences; nothing for another workload."""
    here = totals(rows)
    lines = [
        f"{name}: {one['bytes'] / 1e9:.1f} GB and {one['ms']:.2f} ms, forward and backward; predicted {one['no_l2'] / 1e9:.1f} GB without "
        f"L2, {one['once'] / 1e9:.1f} GB with each tensor moved once"
        for name, one in here.items()
    ]
    if workload == PUBLISHED["workload"]:
        old, new = PUBLISHED["standard"], PUBLISHED["flashattn"]
        lines.append(
            f"published ({PUBLISHED['gpu']}, with mask and dropout): {old['bytes'] / 1e9} -> {new['bytes'] / 1e9} GB, {old['ms']} -> "
            f"{new['ms']} ms, {PUBLISHED['extra_flops']:.0%} more FLOPs; counted here, in products: 7 instead of 6, {7 / 6 - 1:.0%} more"
        )
    return lines


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    p = argparse.ArgumentParser(prog="python -m benchmarks.dram", description="DRAM bytes of attention, by Nsight Compute.")
    p.add_argument("--workload", default=PUBLISHED["workload"], choices=WORKLOADS, metavar="NAME", help="see benchmarks/workloads.py")
    p.add_argument("--providers", default=",".join(PROVIDERS))
    p.add_argument("--json", type=Path, default=None)
    p.add_argument("--child", default=None, help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    if not torch.cuda.is_available():
        p.error("needs a CUDA device: DRAM bytes are counted on it")
    workload, device = WORKLOADS[args.workload], torch.device("cuda")
    if args.child:
        child(*args.child.split(":"), workload)
        return 0
    if shutil.which("ncu") is None:
        p.error("needs Nsight Compute: no ncu on the PATH")
    names, gpu = tuple(args.providers.split(",")), detect(report.device_name(device))
    try:
        chosen = choose(names)
    except ValueError as error:
        p.error(str(error))
    placed = measure(workload, DIRECTIONS, chosen, gpu, Gate(device), clock_for(device), rounds=5)
    rows = []
    for provider in names:
        for direction in DIRECTIONS:
            done = subprocess.run(command(provider, direction, args.workload), capture_output=True, text=True)
            try:
                launches = parse(done.stdout + done.stderr)
            except ValueError as error:
                p.error(f"{provider} {direction}: {error}")
            ms = [one["ms"] for one in placed[PASSES[direction]]["placed"] if one["name"] == provider]
            guess = predicted(workload, provider, direction, torch.cuda.get_device_capability(device))
            moved = {side: sum(launch[side] for launch in launches) for side in ("read", "written")}
            rows.append({"provider": provider, "direction": direction, **moved, "ms": ms[0] if ms else None, "predicted": guess,
                         "launches": launches})  # fmt: skip
            print(f"{provider} {direction}: {moved['read'] / 1e9:.3f} GB read, {moved['written'] / 1e9:.3f} GB written", flush=True)
    path = args.json or report.result_path(device, f"dram-{args.workload}")
    document = {
        "suite": "dram", "gpu": report.device_name(device), "date": report.today(), "versions": report.versions(device),
        "command": "python -m benchmarks.dram " + shlex.join(argv), "workload": asdict(workload), "published": PUBLISHED, "rows": rows,
        "totals": totals(rows),
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    print("\n".join([*told(rows, args.workload), f"wrote {path}"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
