"""`python -m flashattn info`, `support` and `warmup`: options in, tables or JSON out. What is wrong ends in one line on stderr and exit
code 2; a warmup of which calls failed ends with 1.

Surprising fact: an answer of many columns is no use in a mail to somebody who helps. `info` says why a kernel can't run in sentences.
"""

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from . import ahead
from .dispatch import support
from .info import info
from .roofline.cli import numbers, show
from .roofline.report import Answer, Table, units

CAUSAL = {"no": False, "yes": True, "top-left": "top-left"}


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
def cli() -> None:
    """What runs on this machine, and compiling it ahead. `python -m flashattn.roofline` has the commands about speed."""


def told(found: dict) -> Answer:
    """The tables of `info`."""
    versions = Table("Versions", ("what", "version"), [(name, value or "-") for name, value in found["versions"].items()])
    rows = [(gpu["name"], gpu["capability"], units(gpu["memory"]), gpu["roofline"] or "-") for gpu in found["gpus"]]
    header = ("GPU", "capability", "memory", "in the roofline's table")
    tables = [versions, Table("GPUs", header, rows or [("none that torch finds", "-", "-", "-")])]
    lines, notes = [], []
    for name, dtypes in found["kernels"].items():
        cells, against = [], {}
        for dtype, passes in dtypes.items():
            can = [direction for direction, reasons in passes.items() if not reasons]
            cells.append("both passes" if len(can) == len(passes) else f"{can[0]} only" if can else "no")
            for reason in dict.fromkeys(reason for reasons in passes.values() for reason in reasons):
                against.setdefault(reason, []).append(dtype)
        lines.append((name, *cells))
        notes += [f"Not {name} ({', '.join(kinds)}): {reason}." for reason, kinds in against.items()]
    dtypes = next(iter(found["kernels"].values()))
    tables.append(Table(f"Kernels on {found['device']!r}; the first of a column that can is taken", ("kernel", *dtypes), lines))
    settings = [f"{name}={value}" for name, value in found["settings"].items() if value is not None]
    return Answer(found, tables, [*notes, f"Settings: {', '.join(settings) or 'none'}."])


@cli.command("info")
@click.option("--json", "as_json", is_flag=True, help="instead of tables")
def info_command(as_json: bool) -> None:
    """Versions, GPUs, the kernels that can run here and why the others can't."""
    show(told(info()), as_json)


@cli.command("support")
def support_command() -> None:
    """Which kernel runs which feature, on which GPU, and why another can't: a table in Markdown."""
    click.echo(support.table(), nl=False)


def pairs(text: str) -> list[int | tuple[int, int]]:
    """'64,192x128' -> [64, (192, 128)]; ValueError for anything else."""
    found = []
    for part in text.split(","):
        sizes = numbers(part.replace("x", ","))
        if len(sizes) not in (1, 2):
            raise ValueError(f"{part!r}: expected a number, or two as 192x128")
        found.append(sizes[0] if len(sizes) == 1 else sizes)
    return found


@cli.command("warmup")
@click.option("--head-dim", default="128", show_default=True, help="some, as 64,128; 192x128 where that of values differs")
@click.option("--seqlen", default="4k", show_default=True, help="some, as 4k,1000; 1x4k where that of keys differs")
@click.option("--heads", type=int, default=16, show_default=True)
@click.option("--heads-kv", type=int, help="default: as many as heads")
@click.option("--batch", type=int, default=1, show_default=True)
@click.option("--dtype", default="bfloat16", show_default=True, help="some of " + ", ".join(ahead.DTYPES))
@click.option("--causal", default="yes", show_default=True, help="some of " + ", ".join(CAUSAL))
@click.option("--window", help="keys left and right of the diagonal, as 128,0; - for no limit")
@click.option("--varlen", type=click.Choice(["no", "yes", "both"]), default="no", show_default=True, help="packed sequences")
@click.option("--forward-only", is_flag=True, help="no gradients")
@click.option("--deterministic", is_flag=True)
@click.option("--processes", type=int, help="default: as many as cores, at most 8")
@click.option("--json", "as_json", is_flag=True, help="instead of a table")
@click.pass_context
def warmup_command(context, head_dim, seqlen, dtype, causal, window, varlen, forward_only, processes, as_json, **sizes) -> None:
    """Compile ahead what calls like these will need, every combination, in parallel."""
    if unknown := set(causal.split(",")) - set(CAUSAL):
        raise ValueError(f"causal={causal}: expected some of {', '.join(CAUSAL)}, not {', '.join(sorted(unknown))}")
    sides = None if window is None else tuple(None if side == "-" else numbers(side)[0] for side in window.split(","))
    masks, packed = [CAUSAL[word] for word in causal.split(",")], {"no": False, "yes": True, "both": (False, True)}[varlen]
    options = sizes | {
        "head_dim": pairs(head_dim), "seqlen": pairs(seqlen), "dtype": dtype.split(","), "causal": masks, "window": sides, "varlen": packed,
        "backward": not forward_only,
    }  # fmt: skip
    total = len(ahead.calls_of(**options))
    ahead.check_gpu()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("compiling", total=total)
        found = ahead.warmup(**options, processes=processes, progress=lambda result: bar.update(task, advance=1))
    data = {"calls": [{"call": str(one.call), "seconds": one.seconds, "error": one.error} for one in found]}
    rows = [(str(one.call), f"{one.seconds:.1f}", one.error or "ready") for one in found]
    show(Answer(data, [Table("Compiled ahead", ("call", "seconds", "result"), rows)]), as_json)
    context.exit(int(any(one.error for one in found)))


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0; 1 if calls of a warmup failed; 2 with one line on stderr."""
    try:
        return cli.main(argv, prog_name="python -m flashattn", standalone_mode=False) or 0
    except click.ClickException as error:
        complaint = error.format_message()
    except (ValueError, TypeError, RuntimeError) as error:
        complaint = str(error)
    except click.Abort:
        complaint = "interrupted"
    click.echo(f"flashattn: {complaint}", err=True)
    return 2
