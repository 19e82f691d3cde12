"""The part of README.md that tells how fast it is, from what was measured: `python -m benchmarks.readme` writes it anew.

Every number, date and command in that part comes from a file in benchmarks/results, so a new measurement and this command are all that it
takes; tests/test_docs.py fails while they differ. `--check` writes nothing and says whether they do.

Surprising fact: prose is generated too. A sentence like "faster in every cell" outlives the numbers that it was true of.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path

from benchmarks import dram
from benchmarks.dram import told
from benchmarks.memory import published
from benchmarks.report import RESULTS, group_of
from benchmarks.workloads import WORKLOADS, Workload

README = Path(__file__).parent.parent / "README.md"
BEGIN = "<!-- From benchmarks/results by `python -m benchmarks.readme`, not by hand. -->"
END = "<!-- End of what is generated. -->"
PEERS = {
    "sdpa-flash": "SDPA flash",
    "torch-varlen": "torch varlen",
    "sdpa-cudnn": "cuDNN",
    "flex": "Flex",
    **{name.lower(): name for name in ("FA2", "FA3", "FA4")},
}
GPU = "h200"  # whose results are told
DRAM = f"dram-{dram.PUBLISHED['workload']}"
SPEEDS = ("fa3", "llama3", "models", "packed", "varlen", "short", "dims")  # suites, a table each; those that nobody measured are left out
WIDTH = 140  # of a line of prose
TRAINED = {"flashattn": "flashattn", "SDPA flash": "sdpa-flash", "SDPA as torch chooses": "sdpa"}  # name: end of the file's name
# TFLOP/s that Shah et al. 2024 (FlashAttention-3, figures 5 and 6) print above their bars at these lengths: H100 80GB SXM5, fp16, the
# same tokens and heads. Head dim 64 under a causal mask, and masked backwards, are left out.
PAPER_LENGTHS = (1024, 2048, 4096, 8192, 16384)
PAPER = {
    (64, False, "fwd"): (392, 460, 476, 496, 497),
    (128, False, "fwd"): (565, 625, 638, 646, 648),
    (128, True, "fwd"): (423, 521, 579, 602, 616),
    (256, False, "fwd"): (639, 707, 736, 746, 756),
    (256, True, "fwd"): (427, 537, 612, 628, 642),
    (64, False, "bwd"): (363, 422, 453, 472, 474),
    (128, False, "bwd"): (424, 501, 542, 559, 561),
}
HOW = (
    "TFLOP/s of our kernels (a backward is counted as 2.5 forwards where the head dims are equal), and how many times as fast as a peer "
    "that is. All providers are interleaved in one run after passing the fp64 gate; compare numbers of one line only, clocks move with "
    "power."
)


def load(results: Path, suite: str) -> dict | None:
    path = results / f"{GPU}-{suite}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def is_ours(row: dict) -> bool:
    return row["provider"].startswith("flashattn")


def cells(data: dict) -> dict[tuple[str, str], dict[str, dict]]:
    """{(workload, direction): {provider: row}} of what has a number; the fastest of our kernels is "ours"."""
    found: dict[tuple[str, str], dict[str, dict]] = {}
    for row in data["rows"]:
        if row["ms"] is not None:
            cell = found.setdefault(group_of(row), {})
            if is_ours(row) and row["ms"] < cell.get("ours", {"ms": float("inf")})["ms"]:
                cell["ours"] = row
            elif not is_ours(row):
                cell[row["provider"]] = row
    return {group: cell for group, cell in found.items() if "ours" in cell}


def kind(workload: Workload) -> list[str]:
    """['D 128', 'causal'], with what else there is to tell but lengths."""
    dims = f"{workload.head_dim}" if workload.head_dim == workload.head_dim_v else f"{workload.head_dim}/{workload.head_dim_v}"
    left = workload.window and workload.window[0]
    told = {
        f"heads {workload.heads_q}/{workload.heads_kv}": workload.group > 1, "packed": workload.packed, "causal": workload.causal,
        f"window {(left or 0) + 1}": left is not None,  # of a causal call: the row's own key among them
    }  # fmt: skip
    return [f"D {dims}", *(words for words, said in told.items() if said)]


def label(workload: Workload) -> str:
    """'D 128, S 4096, causal': the kind with its lengths."""
    dims, *rest = kind(workload)
    equal = len(set(workload.lengths)) <= 1
    return ", ".join([dims, f"S {workload.seqlen_q}" if equal else f"{workload.batch} sequences to S {workload.seqlen_q}", *rest])


def ratio(cell: dict[str, dict], peer: str) -> float | None:
    """How many times as fast we are, in the same interleaved run."""
    return cell[peer]["ms"] / cell["ours"]["ms"] if peer in cell else None


def table(measured: dict[tuple[str, str], dict[str, dict]], peers: list[str]) -> list[str]:
    titles = [PEERS[peer] for peer in peers]
    header = ["", *(title for name in ("forward", "backward") for title in (name, *(f"x {title}" for title in titles)))]
    lines = [header, ["---"] * len(header)]
    for name in dict.fromkeys(workload for workload, _ in measured):
        line = [label(WORKLOADS[name])]
        for direction in ("fwd", "bwd"):
            cell = measured.get((name, direction), {})
            ratios = [ratio(cell, peer) if cell else None for peer in peers]
            line += [f"{cell['ours']['tflops']:.0f}" if cell else "-", *("-" if r is None else f"{r:.2f}" for r in ratios)]
        lines.append(line)
    return [f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines]


def beside_the_paper(data: dict, measured: dict[tuple[str, str], dict[str, dict]]) -> str:
    """What FlashAttention-3's authors published, and what it and we reach here: two GPUs, so no ratio."""
    lengths = [length for length in PAPER_LENGTHS if any(f"-s{length}" in workload for workload, _ in measured)]
    if not lengths:
        return ""
    header = ["TFLOP/s", "S", "FA3, published (H100)", *(f"{name}, {data['gpu'].rpartition(' ')[2]}" for name in ("FA3", "flashattn"))]
    lines = [header, ["---"] * len(header)]
    for (dim, causal, direction), numbers in PAPER.items():
        here = [measured.get((f"fa3-d{dim}-s{length}{'-causal' * causal}", direction), {}) for length in lengths]
        told = {"fwd": "forward", "bwd": "backward"}[direction] + f", D {dim}" + ", causal" * causal
        found = [[f"{cell[name]['tflops']:.0f}" if name in cell else "-" for cell in here] for name in ("fa3", "ours")]
        published = [str(numbers[PAPER_LENGTHS.index(length)]) for length in lengths]
        lines.append([told, *(", ".join(column) for column in ([str(length) for length in lengths], published, *found))])
    said = (
        "Beside what was published of FlashAttention-3 (Shah et al. 2024, figures 5 and 6: H100 80GB SXM5, fp16, a GPU with the same peak, "
        "less and slower memory and its own clocks):"
    )
    return "\n\n".join([wrapped(said), "\n".join(f"| {' | '.join(line)} |" for line in lines)])


def span(values: list[float], digits: int) -> str:
    """'0.95 to 1.03', or one number where both ends read alike."""
    low, high = (f"{end:.{digits}f}" for end in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def summary(measured: dict[tuple[str, str], dict[str, dict]], peers: list[str]) -> str:
    sentences = []
    for peer in peers:
        parts = []
        for direction, name in (("fwd", "forward"), ("bwd", "backward")):
            ratios = [r for (_, way), cell in measured.items() if way == direction and (r := ratio(cell, peer)) is not None]
            parts += [f"{name} {span(ratios, 2)}, ahead in {sum(r > 1 for r in ratios)} of {len(ratios)}"] if ratios else []
        sentences.append(f"{PEERS[peer]}: {'; '.join(parts)}.")
    return f"Times as fast as {' '.join(sentences)}"


def same(values: list[str], what: str) -> str:
    """The one value that all have; a README that mixes GPUs or versions would compare what can't be."""
    if len(set(values)) != 1:
        raise ValueError(f"the results differ in {what}: {sorted(set(values))}; measure them again together")
    return values[0]


def caption(data: dict, measured: dict[tuple[str, str], dict[str, dict]]) -> str:
    runs, workloads = data["runs"], [WORKLOADS[name] for name, _ in measured]
    versions = {name: same([run["versions"][name] for run in runs], name) for name in ("torch", "triton", "cudnn")}
    dates = " and ".join(dict.fromkeys(run["date"][:10] for run in runs))
    counts = {w.rows[0] * w.rows[1] for w in workloads}  # a length may not divide what the others share
    tokens = " to ".join(f"{count:,}".replace(",", " ") for count in sorted({min(counts), max(counts)}))
    widths = " or ".join(str(width) for width in sorted({w.heads_q * w.head_dim for w in workloads}))
    dtype = same([w.dtype for w in workloads], "dtype")
    cudnn = ".".join(str(int(versions["cudnn"]) // unit % 100) for unit in (10000, 100, 1))  # 91900 is 9.19.0
    return (
        f"{data['gpu']}, {dates}, torch {versions['torch']}, Triton {versions['triton']}, cuDNN {cudnn}, {dtype}, "
        f"{tokens} tokens, heads x dim {widths}; all numbers are in "
        f"[{GPU}-{data['suite']}.json](benchmarks/results/{GPU}-{data['suite']}.json)."
    )


def host_time(data: dict) -> str:
    rows = {row["provider"]: row for row in data["rows"] if row["us"] is not None}
    ours, peers = rows["flashattn"], [row["us"] for name, row in rows.items() if name.startswith("sdpa")]
    return (
        f"One small forward call costs {ours['us']:.0f} us of CPU time ({ours['us_min']:.0f} to {ours['us_max']:.0f}) against "
        f"{span(peers, 0)} us for SDPA ([measured](benchmarks/results/{GPU}-host_overhead.json), {data['date'][:10]}): use CUDA graphs "
        "when the GPU work is shorter."
    )


def memory(data: dict) -> str:
    rows = [row for row in data["rows"] if is_ours(row) and row.get("peak_over_baseline") is not None]
    lengths = " and ".join(dict.fromkeys(str(row["seqlen"]) for row in rows))
    shares = []
    for name in dict.fromkeys(row["provider"] for row in rows):
        peak, extra = (span([row[f"{which}_over_baseline"] for row in rows if row["provider"] == name], 2) for which in ("peak", "extra"))
        shares.append(f"{peak} ({extra} without the inputs) with `{name.partition('-')[2] or name}`")
    return (
        f"Peak memory of a forward and a backward at S {lengths}, in parts of what {PEERS[data['baseline']]} takes: {', '.join(shares)} "
        f"([measured](benchmarks/results/{GPU}-memory.json), {data['date'][:10]})."
    )


def paper_memory(data: dict) -> str:
    """Beside what the FlashAttention paper printed of an A100."""
    return (
        f"Peak memory of a forward and a backward at the FlashAttention paper's sizes (batch 16, 8 heads, D 64, fp16; "
        f"[measured](benchmarks/results/{GPU}-memory-paper.json), {data['date'][:10]}): {'; '.join(published(data['rows']))}."
    )


def paper_dram(data: dict) -> str:
    """The same of GPT-2 medium's attention."""
    return (
        f"Device memory that GPT-2 medium's attention moves (S 1024, D 64, 16 heads, batch 64, fp16; by `ncu`, "
        f"[measured](benchmarks/results/{GPU}-{DRAM}.json), {data['date'][:10]}): "
        f"{'; '.join(told(data['rows'], dram.PUBLISHED['workload']))}."
    )


def training(runs: dict[str, dict]) -> str:
    """runs: {name: run.json of examples/train_gpt.py}, ours first."""
    ours = next(iter(runs))
    config, date = runs[ours]["config"], runs[ours]["date"][:10]
    told = [
        f"{name} {run['final_loss']:.4f}, {run['validation_loss']:.4f}, {run['tokens_per_second'] / 1e3:.0f}k, {run['mfu']:.1%}"
        for name, run in runs.items()
    ]
    apart = [f"{abs(runs[a]['final_loss'] / runs[b]['final_loss'] - 1):.2%} ({a} and {b})" for a, b in itertools.combinations(runs, 2)]
    return (
        f"A GPT of {runs[ours]['parameters'] / 1e6:.0f}M parameters, trained {config['steps']} steps of {config['batch']} x "
        f"{config['seq']} bytes from one seed (`examples/train_gpt.py`; final loss, validation loss, tokens/s, MFU): {'; '.join(told)}. "
        f"Final losses differ by {', '.join(apart)}: attentions that round differently, and training makes more of it "
        f"([curves](benchmarks/results/{GPU}-train_gpt.png), [measured](benchmarks/results/{GPU}-train_gpt-{TRAINED[ours]}.json), {date})."
    )


def training_command(config: dict) -> str:
    backend = f" --sdpa-backend {config['sdpa_backend']}" if config["sdpa_backend"] else ""
    return f"python examples/train_gpt.py --attention {config['attention']}{backend}"


def wrapped(text: str) -> str:
    """Lines of at most WIDTH."""
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > WIDTH:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return "\n".join(lines)


def section(results: Path = RESULTS) -> str:
    """What stands between BEGIN and END, with both."""
    parts, commands = [BEGIN, wrapped(HOW)], []
    for data in filter(None, (load(results, suite) for suite in SPEEDS)):
        measured = cells(data)
        peers = [peer for peer in PEERS if any(peer in cell for cell in measured.values())]
        parts += [wrapped(caption(data, measured)), "\n".join(table(measured, peers)), wrapped(summary(measured, peers))]
        if data["suite"] == "fa3" and (beside := beside_the_paper(data, measured)):
            parts.append(beside)
        commands += [run["command"] for run in data["runs"]]
    sentences = []
    for suite, sentence in (("host_overhead", host_time), ("memory", memory), ("memory-paper", paper_memory), (DRAM, paper_dram)):
        if data := load(results, suite):
            sentences.append(sentence(data))
            commands.append(data["command"])
    parts += [wrapped(" ".join(sentences))] if sentences else []
    if runs := {name: run for name, suffix in TRAINED.items() if (run := load(results, f"train_gpt-{suffix}"))}:
        parts.append(wrapped(training(runs)))
        commands += [training_command(run["config"]) for run in runs.values()]
    code = "\n".join(["```sh", *dict.fromkeys(commands), "python -m benchmarks.readme", "```"])
    return "\n\n".join([*parts, "These commands measured it; the last one writes it down:", code, END])


def replaced(text: str, new: str) -> str:
    """The README with another section; ValueError when the marks are not there, once each and in order."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after:
        raise ValueError(f"expected {BEGIN!r} and then {END!r}, once each")
    return before + new + after


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks.readme", description="Writes the measured part of README.md.")
    p.add_argument("--check", action="store_true", help="only say whether it is what the results give; exit code 1 if not")
    args = p.parse_args(argv)
    old = README.read_text(encoding="utf-8")
    new = replaced(old, section())
    if new == old:
        print(f"{README.name} is what the results give")
    elif args.check:
        print(f"{README.name} is not what the results give: run python -m benchmarks.readme")
    else:
        README.write_text(new, encoding="utf-8")
        print(f"wrote {README}")
    return int(args.check and new != old)


if __name__ == "__main__":
    sys.exit(main())
