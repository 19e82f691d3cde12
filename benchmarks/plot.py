"""Pictures of what is in benchmarks/results: `python -m benchmarks.plot` draws a roofline of the measured kernels, TFLOP/s against the
length for all providers, and memory against the length.

Surprising fact: nothing is measured here, so pictures can be drawn anew on any machine and never disagree with the tables.
"""

import argparse
import json
import re
import sys
from pathlib import Path

from benchmarks.readme import GPU, is_ours, kind
from benchmarks.report import RESULTS, plain_table
from benchmarks.workloads import WORKLOADS, Workload
from flashattn.roofline import Work, bound_of, detect, plot
from flashattn.roofline.workload import PASSES

Key = tuple[str, str]  # the kind of a workload ("D 64, causal"), direction


def measured(rows: list[dict]) -> list[tuple[Workload, dict]]:
    """Rows with a number, of workloads that are still known."""
    return [(WORKLOADS[row["workload"]], row) for row in rows if row["ms"] is not None and row["workload"] in WORKLOADS]


def speeds(rows: list[dict]) -> dict[Key, dict[str, dict[int, float]]]:
    """{(kind, direction): {provider: {length: TFLOP/s}}} of dense workloads of which more than one length was measured."""
    found: dict[Key, dict[str, dict[int, float]]] = {}
    for workload, row in measured(rows):
        if not workload.packed:
            key = (", ".join(kind(workload)), row["direction"])
            found.setdefault(key, {}).setdefault(row["provider"], {})[workload.seqlen_q] = row["tflops"]
    return {key: series for key, series in found.items() if any(len(values) > 1 for values in series.values())}


def points(rows: list[dict]) -> list[plot.Point]:
    """The fastest of our kernels at the longest length of each kind and pass."""
    best: dict[Key, tuple[int, float, plot.Point]] = {}
    for workload, row in measured(rows):
        if is_ours(row) and not workload.packed:
            key = (", ".join(kind(workload)), row["direction"])
            label = f"{PASSES[row['direction']]}, {key[0]}, S {workload.seqlen_q}"
            one = plot.Point(label, workload.work(row["direction"]).intensity, row["tflops"] * 1e12)
            best[key] = max(best.get(key, (0, 0.0, one)), (workload.seqlen_q, row["tflops"], one), key=lambda entry: entry[:2])
    return [point for _, _, point in best.values()]


def ceilings(data: dict) -> tuple[float, float] | None:
    """(FLOP/s, bytes/s) of the last run that measured them."""
    found = [run["ceilings"] for run in data["runs"] if run.get("ceilings")]
    return (found[-1]["peak"], found[-1]["bandwidth"]) if found else None


def memory_series(data: dict) -> dict[str, dict[int, float]]:
    """{provider: {length: GB of a forward and a backward, inputs included}}"""
    found: dict[str, dict[int, float]] = {}
    for row in data["rows"]:
        if row["peak_bytes"] is not None:
            found.setdefault(row["provider"], {})[row["seqlen"]] = row["peak_bytes"] / 1e9
    return found


def listed(data: dict) -> str:
    """`points` as text: how near each is to the roofline of its GPU's data sheet."""
    known, lines = detect(data["gpu"]), []
    for point in points(data["rows"]):
        roof = None if known is None else bound_of(Work(point.intensity, 1), known).attainable
        lines.append([point.label, f"{point.intensity:.0f}", f"{point.flops / 1e12:.0f}", f"{point.flops / roof:.0%}" if roof else "-"])
    return plain_table(["kernel", "FLOP/byte", "TFLOP/s", "of roofline"], lines)


def draw(results: Path, out: Path, suite: str, ending: str) -> list[Path]:
    """Every picture that the results of GPU have something for."""
    made, data = [], json.loads((results / f"{GPU}-{suite}.json").read_text(encoding="utf-8"))
    known = detect(data["gpu"])
    if known is not None:
        figure = plot.roofline(known, "bfloat16", points(data["rows"]), ceilings(data))
        made.append(plot.save(figure, out / f"{GPU}-{suite}-roofline.{ending}"))
    for (what, direction), series in sorted(speeds(data["rows"]).items()):
        figure = plot.against_length(series, "TFLOP/s", f"{data['gpu']}, {PASSES[direction]}, {what}")
        slug = re.sub(r"[^a-z0-9]+", "-", what.lower().replace(" ", "", 1))  # "D 64, causal" is d64-causal
        made.append(plot.save(figure, out / f"{GPU}-{suite}-{slug}-{direction}.{ending}"))
    for name in ("memory", "memory-paper"):
        path = results / f"{GPU}-{name}.json"
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            figure = plot.against_length(memory_series(found), "GB", f"{found['gpu']}, peak memory of forward and backward", log=True)
            made.append(plot.save(figure, out / f"{GPU}-{name}.{ending}"))
    return made


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks.plot", description="Pictures of benchmarks/results.")
    p.add_argument("--suite", default="fa3")
    p.add_argument("--results", type=Path, default=RESULTS)
    p.add_argument("--out", type=Path, default=RESULTS, help="folder (default benchmarks/results)")
    p.add_argument("--ending", choices=("png", "svg"), default="png")
    p.add_argument("--list", action="store_true", help="draw nothing, print the points of the roofline")
    args = p.parse_args(argv)
    if not (args.results / f"{GPU}-{args.suite}.json").exists():
        p.error(f"no {GPU}-{args.suite}.json in {args.results}: run python -m benchmarks.run --suite {args.suite}")
    if args.list:
        print(listed(json.loads((args.results / f"{GPU}-{args.suite}.json").read_text(encoding="utf-8"))))
        return 0
    for path in draw(args.results, args.out, args.suite, args.ending):
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
