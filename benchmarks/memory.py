"""Peak GPU memory of one forward and backward, at a length and at twice that length: `python -m benchmarks.memory`; at the lengths of the
FlashAttention paper's table with `--paper`, which has standard attention beside it until that no longer fits.

Exact attention never stores the scores, so all it adds to its inputs (output, lse, gradients, scratch) grows linearly: doubling the
length must double it. `extra` is the peak above the inputs; `peak` counts q, k, v and dout too.

Surprising fact: a first call may allocate things that stay (workspaces, cached tables), so the step that counts is the second.
"""

import argparse
import gc
import json
import shlex
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks import report
from benchmarks.workloads import Workload, square
from flashattn.roofline.calls import Closures, Inputs, Provider, attempt
from flashattn.roofline.gate import Gate
from flashattn.roofline.peers import choose

PROVIDERS = ("flashattn-portable", "sdpa-flash")
PAPER = Workload("memory", 16, 128, 128, 8, 8, 64, 64, False, None, "float16")  # Dao et al. 2022, appendix E.6: on an A100 of 40 GB
PAPER_LENGTHS = tuple(128 * 2**step for step in range(10))
PUBLISHED = {"standard": {4096: 17024}, "flash": {4096: 836, 65536: 13376}}  # MB there, of forward and backward


def at_length(workload: Workload, seqlen: int) -> Workload:
    return replace(workload, name=f"memory-s{seqlen}", seqlen_q=seqlen, seqlen_k=seqlen)


def peak_of_step(closures: Closures, device: torch.device) -> dict[str, int]:
    closures.training_step()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    closures.training_step()
    torch.cuda.synchronize(device)
    return {"extra_bytes": torch.cuda.max_memory_allocated(device) - before}


def measure(provider: Provider, workload: Workload, seqlens: tuple[int, ...], gate: Gate) -> list[dict]:
    """One row a length; a provider that failed the gate has rows with the reason and no bytes."""
    verdicts = [gate.judge(provider, workload, direction) for direction in ("fwd", "bwd")]
    failure = next((verdict.failure for verdict in verdicts if verdict.failure), None)
    rows = []
    for seqlen in seqlens:
        inputs = Inputs(at_length(workload, seqlen), gate.device)
        row = {"provider": provider.name, "seqlen": seqlen, "extra_bytes": None, "peak_bytes": None, "failure": failure}
        rows.append(row)
        if failure:
            continue
        closures = provider.closures(inputs)
        peak, reason = (None, closures) if isinstance(closures, str) else attempt(partial(peak_of_step, closures, gate.device))
        if reason:
            row["failure"] = reason
        else:
            size = sum(t.numel() * t.element_size() for t in inputs.ordered("bshd"))
            row |= peak | {"peak_bytes": peak["extra_bytes"] + size}
    return rows


def add_ratios(rows: list[dict], baseline: str) -> None:
    """To each row: growth (extra bytes over those at the shortest length) and the extra and peak bytes over the baseline's."""
    known = {(row["provider"], row["seqlen"]): row for row in rows if row["extra_bytes"] is not None}
    shortest = min((seqlen for _, seqlen in known), default=None)
    for row in known.values():
        first, peer = known.get((row["provider"], shortest)), known.get((baseline, row["seqlen"]))
        row["growth"] = row["extra_bytes"] / first["extra_bytes"] if first else None
        row["extra_over_baseline"] = row["extra_bytes"] / peer["extra_bytes"] if peer else None
        row["peak_over_baseline"] = row["peak_bytes"] / peer["peak_bytes"] if peer else None


def published(rows: list[dict]) -> list[str]:
    """A line for each length at which the paper printed a number: its MB, and what was measured here."""
    lines = []
    for kind, numbers in PUBLISHED.items():
        for seqlen, mb in numbers.items():
            here = [row for row in rows if row["seqlen"] == seqlen and (row["provider"] == "standard") == (kind == "standard")]
            found = ", ".join(f"{r['provider']} {r['failure'] or format(r['peak_bytes'] / 2**20, ',.0f')}" for r in here) or "nothing"
            lines.append(f"{kind} at {seqlen}: published {mb:,} MB (A100, Dao et al. 2022); measured MiB: {found}")
    return lines


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    p = argparse.ArgumentParser(prog="python -m benchmarks.memory", description="Peak memory of forward and backward at S and 2 S.")
    p.add_argument("--providers", default=None, help=f"default {','.join(PROVIDERS)}")
    p.add_argument("--baseline", default="sdpa-flash")
    p.add_argument("--paper", action="store_true", help="batch 16, 8 heads, D 64, N 128 to 65 536, fp16, no mask; standard attention too")
    p.add_argument("--seqlen", type=int, default=16384)
    p.add_argument("--heads", type=int, default=16)
    p.add_argument("--heads-kv", type=int, default=None, help="default: as many as --heads")
    p.add_argument("--head-dim", type=int, default=128)
    p.add_argument("--json", type=Path, default=None)
    args = p.parse_args(argv)
    if not torch.cuda.is_available():
        p.error("needs a CUDA device: only its allocator keeps a peak")
    device = torch.device("cuda")
    workload = square("memory", 1, args.seqlen, args.heads, args.heads if args.heads_kv is None else args.heads_kv, args.head_dim, True)
    lengths, providers, suite = (args.seqlen, 2 * args.seqlen), PROVIDERS, "memory"
    if args.paper:
        workload, lengths, providers, suite = PAPER, PAPER_LENGTHS, ("flashattn", "sdpa-flash", "standard"), "memory-paper"
    try:
        chosen = choose(tuple(args.providers.split(",")) if args.providers else providers)
    except ValueError as error:
        p.error(str(error))
    gate, rows = Gate(device), []
    for provider in chosen:
        rows += measure(provider, workload, lengths, gate)
    add_ratios(rows, args.baseline)
    document = {
        "suite": suite, "gpu": report.device_name(device), "date": report.today(), "versions": report.versions(device),
        "command": "python -m benchmarks.memory " + shlex.join(argv), "baseline": args.baseline,
        "workload": {"batch": workload.batch, "heads": workload.heads_q, "heads_kv": workload.heads_kv, "head_dim": workload.head_dim,
                     "causal": workload.causal, "dtype": workload.dtype},
        "rows": rows,
    }
    path = args.json or report.result_path(device, suite)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")

    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    lines = [
        [r["provider"], str(r["seqlen"]), f"{r['extra_bytes'] / 2**20:.1f}", f"{r['peak_bytes'] / 2**20:.1f}",
         shown(r["growth"]), shown(r["extra_over_baseline"]), shown(r["peak_over_baseline"])]
        for r in rows if r["extra_bytes"] is not None
    ]
    header = ["provider", "seqlen", "extra MiB", "peak MiB", "growth", f"extra / {args.baseline}", f"peak / {args.baseline}"]
    report.print_table(header, lines, f"Peak memory of one forward and backward{', causal' if workload.causal else ''}")
    print("\n".join(published(rows) if args.paper else []))
    print("\n".join(f"{r['provider']} at {r['seqlen']}: {r['failure']}" for r in rows if r["failure"]))
    return 0 if lines else 1


if __name__ == "__main__":
    sys.exit(main())
