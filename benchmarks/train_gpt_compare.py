"""Two runs of `examples/train_gpt.py` side by side: do they learn the same, and at what speed?

    python benchmarks/train_gpt_compare.py runs/A/run.json runs/B/run.json --out curves.png

Exits 1 when the final losses, each the mean of the last 20 steps, differ by more than --tolerance of the smaller one, or are not finite.

The surprising fact: runs that differ only in attention take the same batches from the same weights, so their curves differ by rounding and
by nothing else. A difference in the configuration is printed, because it takes this meaning away.
"""

import argparse
import json
import statistics
from pathlib import Path

LAST = 20


def final_loss(run):
    return statistics.fmean(run["loss"][-LAST:])


def relative_difference(a, b):
    """|a - b| over the smaller; NaN, which is within no tolerance, when one of them is not finite."""
    return abs(a - b) / min(a, b)


def differences(a, b):
    """What differs besides the attention, as lines."""
    facts = [{**run["config"], "data": run["data"], "device": run["device"]} for run in (a, b)]
    names = sorted((facts[0].keys() | facts[1].keys()) - {"attention", "sdpa_backend"})
    return [f"{name}: {facts[0].get(name)} | {facts[1].get(name)}" for name in names if facts[0].get(name) != facts[1].get(name)]


def label(run):
    backend = run["config"].get("sdpa_backend")
    return run["config"]["attention"] + (f" ({backend})" if backend else "")


def table(runs):
    def show(value, spec):
        return "-" if value is None else format(value, spec)

    rows = [
        ("attention", [label(r) for r in runs], None),
        (f"final loss (last {LAST})", [show(final_loss(r), ".4f") for r in runs], None),
        ("validation loss", [show(r["validation_loss"], ".4f") for r in runs], None),
        ("tokens/s", [show(r["tokens_per_second"], ",.0f") for r in runs], [r["tokens_per_second"] for r in runs]),
        ("MFU", [show(r["mfu"], ".1%") for r in runs], [r["mfu"] for r in runs]),
    ]
    for name, texts, values in rows:
        ratio = f"{values[0] / values[1]:>9.3f}x" if values and None not in values else ""
        yield f"{name:<22}{texts[0]:>16}{texts[1]:>16}{ratio}"


def plot(path, runs):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for run, style in zip(runs, ("-", "--"), strict=True):
        speed = f", {run['tokens_per_second']:,.0f} tokens/s" if run["tokens_per_second"] else ""
        speed += f", MFU {run['mfu']:.1%}" if run["mfu"] else ""
        axes.plot(range(1, len(run["loss"]) + 1), run["loss"], style, label=f"{label(run)}{speed}")
    axes.set(xlabel="step", ylabel="training loss (nats per byte)")
    axes.set_title(f"{runs[0]['parameters']:,} parameters, {runs[0]['device']}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def main(argv=None):
    """0 when the final losses agree, 1 when not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("a", type=Path, help="run.json of one run")
    parser.add_argument("b", type=Path, help="run.json of the other")
    parser.add_argument("--out", type=Path, default=Path("train_gpt_compare.png"), help="both loss curves")
    parser.add_argument("--tolerance", type=float, default=0.005, help="of the final losses, relative")
    args = parser.parse_args(argv)
    runs = [json.loads(path.read_text()) for path in (args.a, args.b)]
    print("\n".join(table(runs)))
    for line in differences(*runs):
        print(f"not the same run: {line}")
    difference = relative_difference(*map(final_loss, runs))
    agree = difference <= args.tolerance
    print(f"final losses differ by {difference:.3%}: {'within' if agree else 'NOT within'} {args.tolerance:.2%}")
    try:
        plot(args.out, runs)
        print(f"curves in {args.out}")
    except ImportError:
        print("no plot: matplotlib is not installed (pip install matplotlib)")
    return 0 if agree else 1


if __name__ == "__main__":
    raise SystemExit(main())
