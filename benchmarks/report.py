"""What was measured, as rows: the JSON that is kept and the table that is read.

A row is one (suite, workload, direction, provider): numbers when it passed the gate, else `failure` and no number. Rows of one
(workload, direction) always come from one interleaved run: measuring it again replaces them all, so ratios stay honest in a file
that several runs filled.

Surprising fact: the file is written after every workload, because a benchmark's most likely end is somebody else's time limit.
"""

import datetime
import json
import os
import platform
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import torch

from benchmarks.workloads import Workload
from flashattn.roofline.gpus import GPU
from flashattn.roofline.measure import Ceilings, place
from flashattn.roofline.timing import Sample

RESULTS = Path(__file__).parent / "results"
NOTE = (
    "Providers interleaved in one process, random normal data, medians over rounds of back-to-back calls timed with device events. "
    "L2 is not flushed: the inputs of the recorded suites exceed it. Compare rows of one workload only; clocks drift between workloads."
)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"


def slug(name: str) -> str:
    """'NVIDIA H200' -> 'h200', 'CPU (x86_64)' -> 'cpu': the first part of a result file's name."""
    plain = re.sub(r"\(.*?\)|nvidia|geforce|amd|instinct", "", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-") or "unknown"


def result_path(device: torch.device, suite: str) -> Path:
    return RESULTS / f"{slug(device_name(device))}-{suite}.json"


def versions(device: torch.device) -> dict[str, str]:
    """Of the packages whose kernels a run may time; those not installed are left out."""
    import flashattn

    found = {"flashattn": flashattn.__version__, "python": platform.python_version(), "torch": torch.__version__}
    for package in ("triton", "flash_attn", "flash_attn_3", "numpy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if device.type == "cuda":
        found["cuda"] = str(torch.version.cuda)
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found


def today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


PLACED = ("spread", "tflops", "gbps", "bound_us", "binds", "bound_share", "matmul_share", "copy_share")  # see `roofline.measure.Placed`
NO_CEILINGS = Ceilings()


def measured_row(
    workload: Workload, direction: str, provider: str, sample: Sample, peers: dict[str, Sample], gpu: GPU | None = None,
    ceilings: Ceilings = NO_CEILINGS,
) -> dict:  # fmt: skip
    """The numbers of one row. `speedup` maps each other provider of the run to its time over ours: above 1 we are faster. With a GPU of the
    table the row has its place on the roofline, with ceilings its shares of those."""
    placed = asdict(place(provider, sample, workload.work(direction), gpu, workload.dtype, ceilings))
    return {
        "ms": sample.median,
        "ms_min": min(sample.rounds),
        "ms_max": max(sample.rounds),
        "rounds": len(sample.rounds),
        **{name: placed[name] for name in PLACED},
        "speedup": {name: peer.median / sample.median for name, peer in peers.items() if name != provider},
    }


def empty_row() -> dict:
    return dict.fromkeys(("ms", "ms_min", "ms_max", "rounds", *PLACED)) | {"speedup": {}}


def group_of(row: dict) -> tuple[str, str]:
    return row["workload"], row["direction"]


class Record:
    """A result file: read if it is there, rows replaced group by group, written whole each time (never half)."""

    def __init__(self, path: Path, suite: str, gpu: str) -> None:
        self.path = path
        self.data = {"suite": suite, "gpu": gpu, "note": NOTE, "runs": [], "rows": []}
        if path.exists():
            old = json.loads(path.read_text(encoding="utf-8"))
            if (old.get("suite"), old.get("gpu")) != (suite, gpu):
                raise ValueError(f"{path} holds suite {old.get('suite')!r} of {old.get('gpu')!r}, not {suite!r} of {gpu!r}")
            self.data |= {"runs": old["runs"], "rows": old["rows"]}
        self.run: dict | None = None

    def begin(self, run: dict) -> None:
        """Notes a run (command, date, versions, state of the GPU); the dict may be added to until the last write."""
        self.run = run
        self.data["runs"].append(run)

    def replace(self, rows: list[dict]) -> None:
        """Takes in rows, dropping the old ones of the same workload and direction, and runs of which no row is left."""
        groups = {group_of(row) for row in rows}
        self.data["rows"] = [row for row in self.data["rows"] if group_of(row) not in groups] + rows
        alive = {row.get("date") for row in self.data["rows"]}
        self.data["runs"] = [run for run in self.data["runs"] if run is self.run or run["date"] in alive]

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        head = json.dumps({key: value for key, value in self.data.items() if key != "rows"}, indent=1, allow_nan=False)
        rows = ",\n".join(f"  {json.dumps(row, allow_nan=False)}" for row in self.data["rows"])  # a line each, so that diffs read well
        partial.write_text(f'{head[:-2]},\n "rows": [\n{rows}\n ]\n}}\n', encoding="utf-8")
        os.replace(partial, self.path)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def pivot(rows: list[dict]) -> tuple[list[str], list[list[str]]]:
    """(header, lines): one line a (workload, direction), TFLOP/s of every provider that has a number anywhere, the fastest of ours
    over the fastest peer, the widest spread and the largest error; how near the fastest of ours is to the roofline, where that is known."""
    names = list(dict.fromkeys(row["provider"] for row in rows if row["ms"] is not None))
    rooflined = any(row.get("bound_share") is not None for row in rows)
    header = ["workload", "pass", *names, "ours/best peer", *(["of bound"] if rooflined else []), "spread", "error"]
    groups: dict[tuple[str, str], dict[str, dict]] = {}
    for row in rows:
        if row["ms"] is not None:
            groups.setdefault(group_of(row), {})[row["provider"]] = row
    lines = []
    for (workload, direction), found in groups.items():
        own = [row["ms"] for name, row in found.items() if name.startswith("flashattn")]
        peer = [row["ms"] for name, row in found.items() if not name.startswith("flashattn")]
        ratio = f"{min(peer) / min(own):.2f}" if own and peer else "-"
        spread = f"{100 * max(row['spread'] for row in found.values()):.0f} %"
        error = f"{max(row['error'] for row in found.values()):.1e}"
        cells = [_number(found[name]["tflops"]) if name in found else "-" for name in names]
        shares = [row["bound_share"] for name, row in found.items() if name.startswith("flashattn") and row.get("bound_share") is not None]
        near = [f"{max(shares):.0%}" if shares else "-"] if rooflined else []
        lines.append([workload, direction, *cells, ratio, *near, spread, error])
    return header, lines


def failures(rows: list[dict]) -> list[str]:
    """One line for each provider and reason, with how many rows it cost."""
    counts: dict[tuple[str, str], int] = {}
    for row in rows:
        if row["failure"]:
            key = (row["provider"], row["failure"])
            counts[key] = counts.get(key, 0) + 1
    return [f"{provider}: {reason} ({count} rows)" for (provider, reason), count in counts.items()]


def plain_table(header: list[str], lines: list[list[str]]) -> str:
    widths = [max(len(line[i]) for line in [header, *lines]) for i in range(len(header))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in [header, *lines])


@contextmanager
def progress(total: int) -> Iterator[Callable[..., None]]:
    """say(text, steps): lines, and below them a bar of `total` steps where rich is installed and a person is looking."""
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        Console = None
    if Console is None or not Console().is_terminal:
        yield lambda text, steps=0: print(text, flush=True)
        return
    with Progress(transient=True) as bar:
        task = bar.add_task("", total=total)

        def say(text: str, steps: int = 0) -> None:
            bar.console.print(text, markup=False, highlight=False)
            bar.advance(task, steps)

        yield say


def print_table(header: list[str], lines: list[list[str]], title: str) -> None:
    """A rich table where rich is installed and a person is looking, else aligned text (which a log keeps whole)."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        Console = None
    if Console is None or not Console().is_terminal:
        print(f"\n{title}\n{plain_table(header, lines)}")
        return
    table = Table(title=title)
    for name in header:
        table.add_column(name, justify="left" if name in ("workload", "pass") else "right")
    for line in lines:
        table.add_row(*line)
    Console().print(table)
