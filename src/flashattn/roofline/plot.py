"""Pictures: the roofline with operations and kernels on it, and lines against the length. Needs matplotlib.

Surprising fact: on logarithmic axes both limits are straight lines, so distance from the roof reads as a factor anywhere in the picture.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .bound import bound_of, ridge
from .gpus import GPU
from .report import operations


@dataclass(frozen=True)
class Point:
    """label, FLOP/byte, FLOP/s."""

    label: str
    intensity: float
    flops: float


def _figure():
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("plots need matplotlib: pip install 'flashattn[roofline]'") from error
    figure = Figure(figsize=(9, 6), layout="constrained")
    return figure, figure.subplots()


def attained(gpu: GPU, dtype: str = "bfloat16") -> list[Point]:
    """The classic operations where the model lets them be: on the roof."""
    return [Point(name, work.intensity, bound_of(work, gpu, dtype).attainable) for name, work in operations(dtype).items()]


def roofline(gpu: GPU, dtype: str, measured: Sequence[Point] = (), ceilings: tuple[float, float] | None = None):
    """FLOP/s against FLOP/byte: the roof of the data sheet, the operations under it, what was measured.

    ceilings: (FLOP/s, bytes/s) that a matmul and a copy reached; drawn dashed.
    """
    figure, axes = _figure()
    peak, bandwidth = gpu.peak(dtype), gpu.bandwidth
    low, high = 0.3, max(20000.0, *(point.intensity * 2 for point in measured)) if measured else 20000.0
    roofs = [(peak, bandwidth, "-", f"{gpu.name}: {peak / 1e12:g} TFLOP/s, {bandwidth / 1e12:g} TB/s")]
    if ceilings:
        roofs.append((*ceilings, "--", f"measured: {ceilings[0] / 1e12:.3g} TFLOP/s, {ceilings[1] / 1e12:.3g} TB/s"))
    for top, slope, style, label in roofs:
        xs = [low, top / slope, high]
        axes.plot(xs, [min(top, slope * x) / 1e12 for x in xs], style, color="black", label=label)
    axes.axvline(ridge(gpu, dtype), color="grey", linewidth=0.6)
    axes.annotate(f"ridge {ridge(gpu, dtype):.0f}", (ridge(gpu, dtype), low * bandwidth / 1e12), color="grey")
    marks = "osD^v<>Phx"
    for index, point in enumerate(attained(gpu, dtype)):
        axes.plot(point.intensity, point.flops / 1e12, marks[index % len(marks)], mfc="none", label=point.label)
    for index, point in enumerate(measured):  # after ten colours the same again with a black edge
        edge = {"markeredgecolor": "black"} if index >= 10 else {}
        axes.plot(point.intensity, point.flops / 1e12, marks[index % len(marks)], color=f"C{index % 10}", label=point.label, **edge)
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte of device memory", ylabel="TFLOP/s", xlim=(low, high))
    axes.set_title(f"Roofline, {dtype}: open marks are the model's, filled ones were measured")
    axes.legend(fontsize=7, loc="lower right")
    return figure


def against_length(series: dict[str, dict[int, float]], ylabel: str, title: str, log: bool = False):
    """Lines of {name: {length: value}}; ours are thicker. ValueError when there is nothing to draw."""
    if not any(series.values()):
        raise ValueError(f"nothing to draw for {title!r}")
    figure, axes = _figure()
    for name, values in series.items():
        lengths = sorted(values)
        axes.plot(lengths, [values[n] for n in lengths], "o-", label=name, linewidth=2.5 if name.startswith("flashattn") else 1.2)
    axes.set_xscale("log", base=2)
    ticks = sorted({length for values in series.values() for length in values})
    axes.set_xticks(ticks, [f"{length}" for length in ticks], fontsize=8)
    axes.set(xlabel="sequence length", ylabel=ylabel, title=title)
    if log:
        axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def save(figure, path: Path) -> Path:
    """PNG or SVG, by the end of the name; ValueError for another one."""
    if path.suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"out={str(path)!r}: expected a name that ends in .png or .svg")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path
