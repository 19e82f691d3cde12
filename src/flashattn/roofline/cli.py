"""The commands: options in, an `Answer` out, as tables or as JSON. Whatever is wrong ends in one line on stderr and exit code 2.

Surprising fact: only `measure` needs a GPU. All others answer for any GPU of the table, or for one whose peak and bandwidth are given.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

from . import gpus as gpu_table
from . import model as models
from . import report
from .work import ITEMSIZE, check_positive, check_sizes

ATTENTION_DTYPES = ("bfloat16", "float16", "float32", "tf32")
PLAIN_WIDTH = 160  # of what goes into a file or a pipe
TALLY = [1.0, 3.0, 2.0, 3.5, 0.5, 4.0, 2.5, 1.5]  # scores of the running example; value j is j


def show(answer: report.Answer, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(answer.data, indent=1, allow_nan=False))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PLAIN_WIDTH)
    for table in answer.tables:
        console.print(table.title, markup=False)
        shown = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
        for index, name in enumerate(table.header):
            words = " ".join((name, *(row[index] for row in table.rows))).split()
            justify = "right" if index and table.header[-1] != "how much" else "left"
            shown.add_column(name, justify=justify, min_width=max(map(len, words)))  # a narrow terminal breaks lines, and no digit is lost
        for row in table.rows:
            shown.add_row(*row)
        console.print(shown, crop=False)
    for note in answer.notes:
        console.print(note, markup=False)


def current_gpu() -> gpu_table.GPU | None:
    """The GPU of this machine, if there is one and the table knows it."""
    import torch

    return gpu_table.detect(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


def choose_gpu(name: str | None, peak: float | None, bandwidth: float | None) -> gpu_table.GPU:
    """--gpu, else the GPU of this machine, else the default; --peak and --bandwidth replace what that one has."""
    if name is not None and (peak is None or bandwidth is None):
        known = gpu_table.find(name)
    else:  # what both numbers are given for need not be in the table
        known = current_gpu() or gpu_table.find(gpu_table.DEFAULT)
    if peak is None and bandwidth is None:
        return known
    told = " and ".join(f"{value:g} {unit}" for value, unit in ((peak, "TFLOP/s"), (bandwidth, "TB/s")) if value is not None)
    label = f"{name or known.name} at {told}"
    speed = known.bandwidth if bandwidth is None else bandwidth * 1e12
    if peak is None:
        return replace(known, bandwidth=gpu_table.by_hand(1.0, speed, known).bandwidth, name=label)
    return gpu_table.by_hand(peak * 1e12, speed, known, label)


def numbers(text: str) -> tuple[int, ...]:
    """'1,64,4k' -> (1, 64, 4096); ValueError for anything else."""
    try:
        found = tuple(int(part[:-1]) * 1024 if part.endswith("k") else int(part) for part in text.split(",") if part)
    except ValueError:
        found = ()
    if not found:
        raise ValueError(f"{text!r}: expected whole numbers separated by commas, as 512,4k")
    return found


def command(*options, dtypes: tuple[str, ...] = ATTENTION_DTYPES, gpu: Callable | None = choose_gpu) -> Callable:
    """A command that gives an `Answer`, with the options that all have: --json, --dtype and, for `gpu` to choose by, those of a GPU."""

    def decorate(function: Callable) -> Callable:
        @wraps(function)
        def run(as_json: bool, gpu_name: str | None = None, peak: float | None = None, bandwidth: float | None = None, **rest) -> None:
            if gpu:
                rest["gpu"] = gpu(gpu_name, peak, bandwidth)
            show(function(**rest), as_json)

        common = [click.option("--dtype", type=click.Choice(dtypes), default="bfloat16", show_default=True, help="of the products")]
        if gpu:
            common += [
                click.option("--gpu", "gpu_name", help="name in the table; default: this machine's, else " + gpu_table.DEFAULT),
                click.option("--peak", type=float, help="TFLOP/s, instead of that GPU's"),
                click.option("--bandwidth", type=float, help="TB/s, instead of that GPU's"),
            ]
        common.append(click.option("--json", "as_json", is_flag=True, help="numbers in SI units instead of tables"))
        for option in reversed([*options, *common]):
            run = option(run)
        return cli.command(function.__name__.removesuffix("_command"))(run)

    return decorate


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
def cli() -> None:
    """How close to the hardware: GPUs, operations, models, utilisation, the laboratory of attention, and measured kernels."""


@command(dtypes=tuple(ITEMSIZE), gpu=None)
def gpus_command(dtype: str) -> report.Answer:
    """The table of GPUs: dense peaks, memory, caches and sources."""
    return report.gpus(gpu_table.GPUS, dtype)


@command()
def ops_command(gpu, dtype: str) -> report.Answer:
    """Intensity, times and bound of the operations that a transformer is made of."""
    return report.ops(gpu, dtype)


@command(
    click.option("--name", "preset", type=click.Choice(models.MODELS), help="a known model; default llama3-8b unless --width is given"),
    *(click.option(f"--{name}", type=int, help=text) for name, text in
      (("width", "C"), ("heads", "H"), ("layers", "L"), ("vocab", "V"), ("heads-kv", "of keys and values; default H"),
       ("hidden", "of the MLP; default 4 C"), ("gates", "2: SwiGLU, 1: GELU (default)"))),
    click.option("--tokens", default="1,64,4096", show_default=True, help="of a forward pass, M"),
    dtypes=tuple(ITEMSIZE),
)  # fmt: skip
def model_command(gpu, dtype: str, preset: str | None, tokens: str, **sizes) -> report.Answer:
    """Work of a forward pass through all matrix products, and from how many tokens on it is bound by compute."""
    given = {name: size for name, size in sizes.items() if size is not None}
    if preset and given:
        raise ValueError(f"--name {preset} and --{', --'.join(given)}: expected a known model or its sizes")
    if given:
        missing = [name for name in ("width", "heads", "layers", "vocab") if name not in given]
        if missing:
            raise ValueError(f"a model needs --{', --'.join(missing)} too")
        return report.model("model", models.Transformer(**given), numbers(tokens), gpu, gpu_table.GPUS, dtype)
    preset = preset or "llama3-8b"
    return report.model(preset, models.MODELS[preset], numbers(tokens), gpu, gpu_table.GPUS, dtype)


@command(
    click.option("--parameters", type=float, required=True, help="N, as 405e9"),
    click.option("--tokens-per-second", type=float, help="of all GPUs together"),
    click.option("--at", type=float, help="instead of a speed: the MFU, as 0.4"),
    click.option("--tokens", type=float, help="of the whole training: also prints how long it takes"),
    click.option("--gpus", "count", type=int, default=1, show_default=True),
    *(click.option(f"--{name}", type=int, default=0, help=text) for name, text in
      (("layers", "for the attention term: L"), ("width", "C"), ("seqlen", "T"))),
    click.option("--causal", is_flag=True, help="half of the attention term"),
    dtypes=tuple(ITEMSIZE),
)  # fmt: skip
def mfu_command(gpu, dtype: str, parameters: float, count: int, **rest) -> report.Answer:
    """Model FLOPs utilisation of a training run, with and without the attention term."""
    check_sizes(gpus=count)
    check_positive(parameters=parameters, tokens=rest["tokens"], tokens_per_second=rest["tokens_per_second"])
    return report.utilisation(round(parameters), gpu, count, dtype, **rest)


@command(
    click.option("--seqlen", type=int, default=4096, show_default=True, help="N"),
    click.option("--head-dim", type=int, default=128, show_default=True, help="d"),
    click.option("--heads", type=int, default=1, show_default=True),
    click.option("--block-q", type=int, default=128, show_default=True),
    click.option("--block-k", type=int, default=128, show_default=True),
    click.option("--tally", is_flag=True, help="instead: the online softmax of eight scores, two at a time"),
)
def lab_command(gpu, dtype: str, tally: bool, **sizes) -> report.Answer:
    """What attention moves through memory and keeps on chip, in steps and in tiles."""
    if tally:
        from ..reference import online_softmax

        return report.tally(list(online_softmax(TALLY, range(1, len(TALLY) + 1))), TALLY, 2)
    check_sizes(**sizes)
    return report.laboratory(**sizes, gpu=gpu, dtype=dtype)


def measured_gpu(name: str | None, peak: float | None, bandwidth: float | None) -> gpu_table.GPU | None:
    """As `choose_gpu`, but what is measured is held against no default: None where nothing is told of a GPU that isn't in the table."""
    told = any(option is not None for option in (name, peak, bandwidth))
    return choose_gpu(name, peak, bandwidth) if told else current_gpu()


@command(
    click.option("--batch", type=int, default=4, show_default=True),
    click.option("--seqlen", type=int, default=4096, show_default=True),
    click.option("--heads", type=int, default=16, show_default=True),
    click.option("--heads-kv", type=int, help="default: as many as heads"),
    click.option("--head-dim", type=int, default=128, show_default=True),
    click.option("--causal", is_flag=True),
    click.option("--kernels", default="flashattn,sdpa-flash", show_default=True, help="names of flashattn.roofline.peers"),
    click.option("--passes", default="fwd,bwd", show_default=True),
    click.option("--rounds", type=int, default=7, show_default=True),
    click.option("--slice-ms", type=float, default=25.0, show_default=True, help="of back-to-back calls in one turn"),
    click.option("--out", type=click.Path(path_type=Path), help="also write the numbers here, for `plot --measured`"),
    dtypes=("bfloat16", "float16", "float32"),
    gpu=measured_gpu,
)
def measure_command(gpu, dtype: str, out: Path | None, **rest) -> report.Answer:
    """Time kernels of ours or of others and place them on the roofline of the data sheet and of what this GPU reaches.

    Without --gpu a GPU that the table doesn't know has no data sheet, only what it reaches.
    """
    document = timed(gpu, dtype, cuda(), **rest)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return report.measured(document)


def cuda():
    """The device that is measured; ValueError where there is none."""
    import torch

    if not torch.cuda.is_available():
        raise ValueError("measure needs a GPU: torch finds no CUDA device here; the other commands need none")
    return torch.device("cuda")


def timed(gpu, dtype, device, batch, seqlen, heads, heads_kv, head_dim, causal, kernels, passes, rounds, slice_ms) -> dict:
    """The document of `measure`: what was measured, on what, in which state, and what was found."""
    import torch

    from . import gate, measure, peers, timing
    from .workload import DIRECTIONS, square

    heads_kv, passes = heads if heads_kv is None else heads_kv, tuple(passes.split(","))
    check_sizes(batch=batch, seqlen=seqlen, heads=heads, heads_kv=heads_kv, head_dim=head_dim, rounds=rounds)
    check_positive(slice_ms=slice_ms)
    if heads % heads_kv:
        raise ValueError(f"heads={heads}: expected a multiple of heads_kv={heads_kv}")
    if unknown := set(passes) - set(DIRECTIONS):
        raise ValueError(f"passes={','.join(passes)}: expected {' and '.join(DIRECTIONS)}, not {', '.join(sorted(unknown))}")
    name = f"b{batch}-s{seqlen}-h{heads}-{heads_kv}-d{head_dim}{'-causal' if causal else ''}-{dtype}"
    workload = square(name, batch, seqlen, heads, heads_kv, head_dim, causal, dtype)
    chosen = peers.choose(tuple(part for part in kernels.split(",") if part))
    states = {"before": timing.gpu_state(device)}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("checking", total=2 * len(passes))
        found = measure.measure(
            workload, passes, chosen, gpu, gate.Gate(device), timing.clock_for(device), rounds=rounds, slice_ms=slice_ms,
            ceilings=measure.ceiling_calls(device, workload.torch_dtype),
            advance=lambda what: bar.update(task, advance=1, description=what),
        )  # fmt: skip
    states["after"] = timing.gpu_state(device)
    sizes = {"name": name, "batch": batch, "seqlen": seqlen, "heads": heads, "heads_kv": heads_kv, "head_dim": head_dim, "causal": causal}
    where = {"gpu": gpu and gpu.name, "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU", "gpu_state": states}
    return {"workload": sizes | {"dtype": dtype}, **where, "passes": found}


@cli.command("plot")
@click.option("--gpu", "gpu_name", help="name in the table; default: this machine's, else " + gpu_table.DEFAULT)
@click.option("--peak", type=float, help="TFLOP/s, instead of that GPU's")
@click.option("--bandwidth", type=float, help="TB/s, instead of that GPU's")
@click.option("--dtype", type=click.Choice(ATTENTION_DTYPES), default="bfloat16", show_default=True)
@click.option("--measured", type=click.Path(exists=True, dir_okay=False, path_type=Path), multiple=True, help="from `measure --out`")
@click.option("--out", type=click.Path(path_type=Path), default=Path("roofline.png"), show_default=True, help=".png or .svg")
def plot_command(gpu_name, peak, bandwidth, dtype, measured, out) -> None:
    """The roofline as a picture: operations, and measured kernels where there are some."""
    from . import plot

    points, ceilings = [], None
    for path in measured:
        try:
            for direction, found in json.loads(path.read_text(encoding="utf-8"))["passes"].items():
                points += [plot.Point(f"{p['name']} {direction}", p["intensity"], p["tflops"] * 1e12) for p in found["placed"]]
                reached = found["ceilings"]
                if reached["peak"] and reached["bandwidth"]:
                    ceilings = reached["peak"], reached["bandwidth"]
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ValueError(f"{path}: expected a file of `measure --out`") from None
    click.echo(f"wrote {plot.save(plot.roofline(choose_gpu(gpu_name, peak, bandwidth), dtype, points, ceilings), out)}")


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0, or 2 with one line on stderr. Without arguments it helps."""
    argv = (sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        return cli.main(argv, prog_name="python -m flashattn.roofline", standalone_mode=False) or 0
    except click.ClickException as error:
        complaint = error.format_message()
    except (ValueError, TypeError, OverflowError, OSError) as error:
        complaint = str(error)
    except click.Abort:
        complaint = "interrupted"
    click.echo(f"flashattn.roofline: {complaint}", err=True)
    return 2
