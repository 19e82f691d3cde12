"""Runs the GPU tests on this machine's GPU and keeps what came of it, for machines without one.

    python tests/gpu_record.py            run the tests marked `gpu`, write tests/gpu_record.json, fail if any failed
    python tests/gpu_record.py --check    say in one line whether that record is green and of the present sources, fail if not

n processes run a shard each, side by side: compiling kernels takes far longer than running them, and takes a CPU core each. The `big`
tests follow alone, since they need the memory. `--check` needs nothing but the standard library.

The surprising fact is the digest. It is taken of syntax trees, so comments, docstrings and layout may change without a new run on a GPU;
but Python's own dump of a tree changes between versions, so `canonical` writes one that doesn't.
"""

import argparse
import ast
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as xml
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

GRACE = 40  # seconds after the limit for the tests that run then to end

TESTS = Path(__file__).resolve().parent
SOURCE = TESTS.parent / "src" / "flashattn"
RECORD = TESTS / "gpu_record.json"
OUTCOMES = ("passed", "failed", "skipped", "xfailed", "unfinished")
UNFINISHED = "unfinished"  # how shards.py begins to say that a test was not begun
MOST_SHARDS = 14  # on a GPU: each may hold 12 GB, and for 28 of them 140 GB were not enough


# ------------------------------------------------------------------------------------------------------------------------ digest


def canonical(node) -> str:
    """A syntax tree as text that depends on the meaning of the source alone, not on the version of Python that parsed it.

    Fields that are None or empty are left out, as versions differ in which of them they have (type_params since 3.12). In f-strings,
    neighbouring literals are joined and empty ones dropped, where versions differ too. Strings are written in ASCII: which characters
    `repr` shows as they are depends on the version's Unicode tables.
    """
    if isinstance(node, ast.AST):
        fields = []
        for name in sorted({*node._fields} - {"kind"}):  # kind: u"..." or "...", the same string
            value = getattr(node, name, None)
            if name == "body" and isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                value = _without_docstring(value)
            elif name == "values" and isinstance(node, ast.JoinedStr):
                value = _joined(value)
            if value is not None and value != []:
                fields.append(f"{name}={canonical(value)}")
        return f"{type(node).__name__}({', '.join(fields)})"
    if isinstance(node, list):
        return f"[{', '.join(map(canonical, node))}]"
    return ascii(node)


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0].value if body and isinstance(body[0], ast.Expr) else None
    return body[1:] if isinstance(first, ast.Constant) and isinstance(first.value, str) else body


def _joined(values: list[ast.expr]) -> list[ast.expr]:
    joined = []
    for value in values:
        if isinstance(value, ast.Constant) and joined and isinstance(joined[-1], ast.Constant):
            joined[-1] = ast.Constant(joined[-1].value + value.value)
        elif not isinstance(value, ast.Constant) or value.value:
            joined.append(value)
    return joined


def digest(source: Path) -> str:
    """sha256 of the names and syntax trees of all Python files under `source`."""
    files = sorted((path.relative_to(source).as_posix(), path) for path in source.rglob("*.py"))
    trees = [[name, canonical(ast.parse(path.read_text(encoding="utf-8")))] for name, path in files]
    return hashlib.sha256(json.dumps(trees).encode()).hexdigest()


# ------------------------------------------------------------------------------------------------------------------------- check


def check(record: Path = RECORD, source: Path = SOURCE) -> tuple[bool, str]:
    """(is the record good, the line that says so)"""
    try:
        found = json.loads(record.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False, f"gpu record: missing; run python tests/{Path(__file__).name} on a machine with a GPU"
    except json.JSONDecodeError as error:
        return False, f"gpu record: unreadable ({error})"
    counts = ", ".join(f"{found.get(outcome, 0)} {outcome}" for outcome in OUTCOMES)
    told = f"{counts} on {found['device']}, {found['date']}"
    if found["digest"] != digest(source):
        return False, f"gpu record: stale, src/flashattn has changed since ({told})"
    if found["failed"] or found.get("unfinished") or not found["passed"]:
        return False, f"gpu record: not green ({told})"
    return True, f"gpu record: up to date ({told})"


# --------------------------------------------------------------------------------------------------------------------------- run


@dataclass
class Shard:
    """One pytest process, its log and its report."""

    name: str
    arguments: list[str]
    logs: Path
    devices: str | None = None  # CUDA_VISIBLE_DEVICES, the one to work on first
    counts: Counter = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def start(self, environment: dict) -> None:
        self.report.unlink(missing_ok=True)
        self.started = time.monotonic()
        # -vv and unbuffered, so that the log of a process that had to be killed ends in the test that hung
        command = [sys.executable, "-u", "-m", "pytest", "-vv", "--durations=10", "-p", "no:cacheprovider"]
        with open(self.log, "wb") as log:
            command += [f"--junitxml={self.report}", *self.arguments]
            if self.devices:
                environment = environment | {"CUDA_VISIBLE_DEVICES": self.devices}
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=TESTS.parent)

    @property
    def log(self) -> Path:
        return self.logs / f"{self.name}.log"

    @property
    def report(self) -> Path:
        return self.logs / f"{self.name}.xml"

    def finish(self, why: str | None = None) -> None:
        """Read the report. A process that didn't leave a whole one counts as one failure."""
        self.seconds = time.monotonic() - self.started
        code = self.process.returncode
        try:
            self.counts, self.failures = read_report(self.report)
        except (FileNotFoundError, xml.ParseError):
            self.counts["failed"], self.failures = 1, [f"{self.name} {why or f'ended with code {code} and no report'}; see {self.log}"]
        if code not in (0, 1, 5) and not self.failures:  # 1: tests failed, 5: no tests in this shard
            self.counts["failed"], self.failures = 1, [f"{self.name} ended with code {code}; see {self.log}"]

    def summary(self) -> str:
        return f"{self.name}: {told(self.counts)} in {self.seconds:.0f} s"


def told(counts: Counter) -> str:
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome]) or "no tests"


def read_report(path: Path) -> tuple[Counter, list[str]]:
    """(outcomes, one line for each failure) of a JUnit report."""
    counts, failures = Counter(), []
    for case in xml.parse(path).getroot().iter("testcase"):
        wrong = [child for child in case if child.tag in ("failure", "error")]
        skipped = case.find("skipped")
        if wrong:
            counts["failed"] += 1
            message = (wrong[0].get("message") or "").partition("\n")[0]
            failures.append(f"{case.get('classname')}::{case.get('name')}: {message}"[:300])
        elif skipped is not None:
            late = (skipped.get("message") or "").startswith(UNFINISHED)
            counts["unfinished" if late else "xfailed" if skipped.get("type") == "pytest.xfail" else "skipped"] += 1
        else:
            counts["passed"] += 1
    return counts, failures


def run_all(shards: list[Shard], deadline: float, environment: dict) -> None:
    """Start all, print a line as each ends, and end those that are still running at the deadline."""
    running = []
    try:
        for shard in shards:
            shard.start(environment)
            running.append(shard)
        while running:
            late = time.monotonic() > deadline
            for shard in list(running):
                if late:
                    shard.process.kill()
                    shard.process.wait()
                if shard.process.poll() is not None:
                    running.remove(shard)
                    shard.finish("was still running at the time limit" if late else None)
                    print(shard.summary(), *(f"\n    {line}" for line in shard.failures[:5]), flush=True)
            time.sleep(0.2)
    finally:
        for shard in running:
            shard.process.kill()


def rotated(names: list[str], by: int) -> str | None:
    """All GPUs, another one first for each shard; nothing to say where there is one."""
    by %= max(1, len(names))
    return ",".join([*names[by:], *names[:by]]) if len(names) > 1 else None


def run_tier(tests: Path, logs: Path, shards: int, seconds: float, select: str, extra: list[str], gpus: int = 1) -> Counter:
    """Run `tests`, those that `select` (a -m expression) chooses: in shards, then the big ones alone. Prints as it goes."""
    logs.mkdir(parents=True, exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // shards))
    ends = time.time() + seconds
    arguments = [f"--until={ends:.0f}", *extra, str(tests)]
    visible = [name for name in environment.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",") if name]
    parts = [
        Shard(f"shard-{i}-of-{shards}", ["-m", select, "--no-big", f"--shard={i}/{shards}", *arguments], logs, rotated(visible, i))
        for i in range(1, shards + 1)
    ]
    big = Shard("big", ["-m", f"({select}) and big", *arguments], logs)
    deadline = time.monotonic() + seconds + GRACE
    run_all(parts, deadline, environment)
    run_all([big], deadline, environment)
    return sum((shard.counts for shard in [*parts, big]), Counter())


MACHINE = """
import json, platform, numpy, torch, triton
print(json.dumps({
    "device": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    "gpus": torch.cuda.device_count(),
    "versions": {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__, "numpy": numpy.__version__},
}))
"""


def machine() -> dict:
    """Device, driver and versions, asked in another process: this one needs only the standard library, and no GPU memory."""
    done = subprocess.run([sys.executable, "-c", MACHINE], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    with contextlib.suppress(OSError, subprocess.CalledProcessError, IndexError):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found["driver"] = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    return {"driver": "unknown", **found}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the record is green and up to date")
    parser.add_argument("--shards", type=int, help=f"processes side by side; None: one a CPU, at most {MOST_SHARDS} a GPU")
    parser.add_argument("--limit", type=float, default=1800, help="seconds (%(default)s); no test begins after them")
    parser.add_argument("--logs", type=Path, default=TESTS.parent / "runs" / "gpu_record", help="folder for a log of each process")
    parser.add_argument("--record", type=Path, default=RECORD, help="where to write it (%(default)s)")
    parser.add_argument("-k", metavar="EXPRESSION", help="only the tests that pytest -k chooses; writes no record")
    options = parser.parse_args(arguments)
    if options.check:
        good, line = check(options.record)
        print(line)
        return 0 if good else 1

    found = machine()
    if not found["device"]:
        print("gpu record: this machine has no CUDA device", file=sys.stderr)
        return 2
    before, started = digest(SOURCE), time.monotonic()  # of what the tests will import, should an editor save meanwhile
    shards = options.shards or min(os.cpu_count() or 1, MOST_SHARDS * found["gpus"])
    counts = run_tier(TESTS, options.logs, shards, options.limit, "gpu", ["-k", options.k] if options.k else [], found["gpus"])
    seconds = time.monotonic() - started
    print(f"{told(counts)} in {seconds:.0f} s on {found['device']}")
    if not options.k:
        write(options.record, counts, seconds, found, before)
        print(f"wrote {options.record}")
    return 0 if counts["passed"] and not counts["failed"] and not counts["unfinished"] else 1


def write(record: Path, counts: Counter, seconds: float, found: dict, source_digest: str) -> None:
    date = datetime.now(timezone.utc).date().isoformat()
    content = {outcome: counts[outcome] for outcome in OUTCOMES}
    content |= {"seconds": round(seconds), "date": date, **found, "digest": source_digest}
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
