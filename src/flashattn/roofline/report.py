"""What the commands say, as data and as tables: pure functions that compute nothing which `work`, `bound`, `model` and `memory` don't.

An `Answer` has the numbers in SI units (`data`, for --json) and the same in words (`tables`, `notes`).

Surprising fact: a table of an operation is the same for every GPU but for its two times, so the row to look at is where they cross.
"""

from dataclasses import asdict, dataclass, field

from ..problem import Problem, canonical_window, default_scale
from . import memory
from .bound import bound_of, ridge, smallest_rows
from .gpus import GPU
from .model import Transformer, mfu, train_flops_per_token, training_days, useful_flops
from .work import ITEMSIZE, PASSES, Work, attention, decode, matmul, rmsnorm, scores, softmax, standard_attention


@dataclass(frozen=True)
class Table:
    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


@dataclass(frozen=True)
class Answer:
    data: dict
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def units(value: float, unit: str = "B") -> str:
    """Three digits and a prefix, in steps of 1000: '33.6 MB'."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if value < 999.5:
            return f"{value:.3g} {prefix}{unit}"
        value /= 1000
    return f"{value:.3g} E{unit}"


def duration(seconds: float) -> str:
    """'40.1 us', '7.78 ms'."""
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def kilobytes(size: float) -> str:
    """On chip, sizes are powers of two."""
    return f"{size / 1024:g} KB"


def gpus(rows: tuple[GPU, ...], dtype: str = "bfloat16") -> Answer:
    """The table of GPUs, with the ridge for `dtype`."""
    header = ("GPU", f"{dtype} TFLOP/s", "memory GB", "TB/s", "ridge", "SMs", "smem KB", "regs KB", "L2 MB")
    lines = [
        (gpu.name, f"{gpu.peak(dtype) / 1e12:g}", f"{gpu.memory / 1e9:g}", f"{gpu.bandwidth / 1e12:g}", f"{ridge(gpu, dtype):.0f}",
         f"{gpu.sms}", f"{gpu.smem_per_sm / 1024:g}", f"{gpu.registers_per_sm / 1024:g}", f"{gpu.l2 / 1024**2:g}")
        for gpu in rows if dtype in gpu.peaks
    ]  # fmt: skip
    by_source = {source: [gpu.name for gpu in rows if gpu.source == source] for source in dict.fromkeys(gpu.source for gpu in rows)}
    sources = [f"{', '.join(names)}: {source}" for source, names in by_source.items()]
    data = {"dtype": dtype, "gpus": [asdict(gpu) | {"ridge": ridge(gpu, dtype)} for gpu in rows if dtype in gpu.peaks]}
    table = Table("Dense peaks, without sparsity; ridge in FLOP/byte", header, lines)
    return Answer(data, [table], ["Sources.", *sources])


def operations(dtype: str = "bfloat16") -> dict[str, Work]:
    """The operations of the classic table and attention's own, by what they are called."""
    size = ITEMSIZE[dtype]
    left, right, top_left = canonical_window(True, None)
    call = Problem("float32" if size == 4 else "bfloat16", 1, 8192, 8192, 32, 8, 128, 128, default_scale(128), left, right, top_left)
    found = {
        "matmul [16k, 8k] x [8k, 28k]": matmul(16384, 8192, 28672, size),
        "matmul [2, 8k] x [8k, 28k]": matmul(2, 8192, 28672, size),
        "Q K^T, one head, T 8k, D 128": scores(8192, 8192, 128, size),
        "RMSNorm [16k, 8k]": rmsnorm(16384, 8192, size),
        "softmax [8k, 8k]": softmax(8192, 8192, size),
    }
    if size == 1:  # no attention of this library is in 8 bits yet
        return found
    return found | {
        "standard attention, one head, T 8k": standard_attention(8192, 8192, 128, 1, size),
        "flash forward, causal, heads 32/8, T 8k": attention(call, "forward"),
        "flash backward, causal, heads 32/8, T 8k": attention(call, "backward"),
        "decode, batch 64, heads 32/8, cache 8k": decode(64, 8192, 32, 8, 128, call.dtype),
    }


def ops(gpu: GPU, dtype: str = "bfloat16") -> Answer:
    """Intensity, both times and the side that binds, of the operations that a transformer is made of."""
    lines, data = [], {"gpu": gpu.name, "dtype": dtype, "ridge": ridge(gpu, dtype), "operations": []}
    for name, work in operations(dtype).items():
        limit = bound_of(work, gpu, dtype)
        times = {"compute_us": limit.compute_s * 1e6, "memory_us": limit.memory_s * 1e6}
        data["operations"].append({"name": name, **asdict(work), "intensity": work.intensity, **times, "binds": limit.binds})
        lines.append((name, f"{work.intensity:.1f}", *(f"{us:.1f}" for us in times.values()), limit.binds))
    header = ("operation", "FLOP/byte", "compute us", "memory us", "bound by")
    return Answer(data, [Table(f"{gpu.name}, {dtype}: ridge {ridge(gpu, dtype):.0f} FLOP/byte", header, lines)])


def model(name: str, transformer: Transformer, tokens: tuple[int, ...], gpu: GPU, table: tuple[GPU, ...], dtype="bfloat16") -> Answer:
    """All matrix products of a forward pass over M tokens, the M at which they cross the ridge, and the one of a single product."""
    size, line, passes = ITEMSIZE[dtype], [], []
    for count in tokens:
        work = transformer.forward(count, size)
        limit = bound_of(work, gpu, dtype)
        passes.append({"tokens": count, **asdict(work), "intensity": work.intensity, "seconds": limit.seconds, "binds": limit.binds})
        amounts = f"{count}", units(work.flops, "FLOP"), units(work.bytes), f"{work.intensity:.1f}"
        line.append((*amounts, duration(limit.seconds), limit.binds))
    crossing = smallest_rows(*transformer.row(size), ridge(gpu, dtype))
    one = size * 8192 * 28672, 2 * 8192 * 28672, size * (8192 + 28672)
    smallest = {g.name: smallest_rows(*one, ridge(g, dtype)) for g in table if dtype in g.peaks}
    data = {"model": name, **asdict(transformer), "parameters": transformer.parameters(), "gpu": gpu.name, "dtype": dtype, "passes": passes,
            "compute_bound_from_tokens": crossing, "smallest_batch_8192_28672": smallest}  # fmt: skip
    header = ("tokens M", "FLOPs", "bytes", "FLOP/byte", "at least", "bound by")
    title = f"{name}: {units(transformer.parameters(), '')} parameters in matrix products, one forward pass on the {gpu.name}, {dtype}"
    batches = [(key, "never" if rows is None else f"{rows}") for key, rows in smallest.items()]
    note = "never bound by compute" if crossing is None else f"bound by compute from M = {crossing} on"
    return Answer(data, [
        Table(title, header, line), Table("Smallest M that makes [M, 8192] x [8192, 28672] compute-bound", ("GPU", "M"), batches),
    ], [f"{name} on the {gpu.name}: {note}."])  # fmt: skip


def utilisation(
    parameters: int, gpu: GPU, count: int, dtype: str, *, tokens_per_second: float | None = None, at: float | None = None,
    tokens: float | None = None, layers: int = 0, width: int = 0, seqlen: int = 0, causal: bool = False,
) -> Answer:  # fmt: skip
    """MFU from tokens/s, or (`at`) useful FLOP/s and tokens/s from an MFU; with `tokens`, how long training takes.

    ValueError unless exactly one of tokens_per_second and at is given.
    """
    if (tokens_per_second is None) == (at is None):
        raise ValueError(f"tokens_per_second={tokens_per_second} and at={at}: expected one of them, a speed or a utilisation")
    peak, rows, data = gpu.peak(dtype), [], {"gpu": gpu.name, "gpus": count, "dtype": dtype, "parameters": parameters}
    plain = train_flops_per_token(parameters)
    kinds = {"6 N": plain}
    if layers or width or seqlen:
        kinds["6 N + attention"] = train_flops_per_token(parameters, layers, width, seqlen, causal)
    for name, per_token in kinds.items():
        share = mfu(per_token, tokens_per_second, peak, count) if at is None else at
        useful = useful_flops(share, peak, count) if at is not None else per_token * tokens_per_second
        found = {"flops_per_token": per_token, "mfu": share, "useful_flops": useful, "tokens_per_second": useful / per_token}
        line = [name, units(per_token, "FLOP"), f"{share:.1%}", f"{useful:.3g}", f"{useful / per_token:,.0f}"]
        if tokens is not None:
            found |= {"flops": per_token * tokens, "days": training_days(per_token * tokens, useful)}
            line += [f"{found['flops']:.3g}", f"{found['days']:.1f}"]
        data[name] = found
        rows.append(tuple(line))
    header = ("counted", "per token", "MFU", "useful FLOP/s", "tokens/s", *(("FLOPs", "days") if tokens is not None else ()))
    title = f"{units(parameters, '')} parameters on {count} x {gpu.name}, {peak / 1e12:g} TFLOP/s each"
    return Answer(data, [Table(title, header, rows)])


def laboratory(seqlen: int, head_dim: int, heads: int, block_q: int, block_k: int, gpu: GPU, dtype: str = "bfloat16") -> Answer:
    """What attention over `seqlen` rows moves and keeps: in steps through memory, and in tiles."""
    size = ITEMSIZE[dtype]
    full, chip = memory.score_bytes(seqlen, size), memory.residence(block_q, block_k, head_dim, gpu, size)
    dense = Problem("float32" if size == 4 else "bfloat16", 1, seqlen, seqlen, 1, 1, head_dim, head_dim, default_scale(head_dim))
    once = {direction: attention(dense, direction) for direction in PASSES}
    tiles = (seqlen, head_dim, block_q, block_k, size)
    traffic = {
        "S and P out and back": 4 * full,
        "standard forward": memory.standard(seqlen, head_dim, size).total,
        "flash forward": memory.flash(*tiles).total,
        "each tensor once, forward": once["forward"].bytes,
        "standard backward": memory.standard(seqlen, head_dim, size, "backward").total,
        "flash backward, dQ added in memory": memory.flash(*tiles, "backward").total,
        "flash backward, two passes": memory.flash(*tiles, "backward", fused=False).total,
        "each tensor once, backward": once["backward"].bytes,
    }
    moved = [(name, units(value), duration(value / gpu.bandwidth)) for name, value in traffic.items()]
    products = [(f"products, {name}", units(work.flops, "FLOP"), duration(work.flops / gpu.peak(dtype))) for name, work in once.items()]
    working, blocks = memory.working_set(block_q, block_k, head_dim, size), memory.fa1_blocks(gpu.smem_per_block, head_dim, size)
    standard, flash = memory.asymptotic(seqlen, head_dim, gpu.smem_per_block, size)
    kept = [
        ("score matrix, one head", units(full)), *([(f"score matrix, {heads} heads", units(heads * full))] if heads > 1 else []),
        ("tiles of Q, K, V and O", kilobytes(working)), ("score matrix / these tiles", f"{full / working:,.0f}"),
        ("Q, K and V in shared memory", f"{kilobytes(chip.smem)} of {kilobytes(chip.smem_limit)}"),
        ("scores and output in registers", f"{kilobytes(chip.registers)} of {kilobytes(chip.register_limit)}"),
        *([("doesn't fit", reason) for reason in chip.reasons()] or [("fits", "yes")]),
        ("blocks of FlashAttention 1", f"{blocks[0]} queries x {blocks[1]} keys"),
        ("order of elements moved", f"N d + N^2 = {standard:.3g}, N^2 d^2 / M = {flash:.3g}"),
    ]  # fmt: skip
    data = {
        "seqlen": seqlen, "head_dim": head_dim, "heads": heads, "block_q": block_q, "block_k": block_k, "gpu": gpu.name, "dtype": dtype,
        "score_bytes": full, "traffic": traffic, "flops": {name: work.flops for name, work in once.items()},
        "seconds": {name: value / gpu.bandwidth for name, value in traffic.items()}, "working_set": working, "reduction": full / working,
        "residence": asdict(chip), "reasons": chip.reasons(), "fa1_blocks": blocks, "asymptotic": {"standard": standard, "flash": flash},
    }  # fmt: skip
    title = f"N {seqlen}, d {head_dim}, {dtype}, {gpu.name}"
    return Answer(data, [
        Table(f"Device memory, one head: {title}", ("what", "moved", "at least"), moved + products),
        Table(f"On chip: tiles of {block_q} queries x {block_k} keys", ("what", "how much"), kept),
    ], ["Traffic of flash attention counts no help of the L2; 'each tensor once' is all the help there can be."])  # fmt: skip


def tally(states: list[tuple[float, float, float]], scores: list[float], step: int) -> Answer:
    """The running (maximum, sum, output) after every `step` scores. states: after each score, as `online_softmax` yields them."""
    rows, data = [], {"scores": scores, "step": step, "states": []}
    for end in range(step, len(states) + 1, step):
        m, l, o = states[end - 1]
        data["states"].append({"seen": end, "m": m, "l": l, "o": o, "out": o / l})
        rows.append((" ".join(f"{score:g}" for score in scores[end - step : end]), f"{m:g}", f"{l:.4f}", f"{o:.4f}", f"{o / l:.4f}"))
    header = ("scores", "maximum m", "sum l", "output o", "o / l")
    return Answer(data, [Table(f"A running tally, {step} scores at a time; value j is j", header, rows)])


def measured(document: dict) -> Answer:
    """document: what `measure` found, with what was measured and where."""
    rows, notes = [], []

    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.1%}"

    for direction, found in document["passes"].items():
        for one in found["placed"]:
            bound = "-" if one["bound_us"] is None else f"{one['bound_us']:.1f}, {one['binds']}"
            rows.append((one["name"], direction, f"{one['ms']:.4g}", f"{one['tflops']:.4g}", f"{one['gbps']:.4g}",
                         *(share(one[key]) for key in ("peak_share", "matmul_share", "bandwidth_share", "copy_share")),
                         bound, share(one["bound_share"])))  # fmt: skip
        notes += [f"{name}, {direction}: {reason}" for name, reason in found["failures"].items()]
        top = found["ceilings"]
        if top["peak"]:
            notes.append(f"{direction}: a matmul reached {top['peak'] / 1e12:.4g} TFLOP/s, a copy {top['bandwidth'] / 1e9:.4g} GB/s")
    for when, state in document["gpu_state"].items():
        if state:
            notes.append(f"{when}: SM {state['clocks.sm']} MHz, memory {state['clocks.mem']} MHz, {state['power.draw']} W of "
                         f"{state['power.limit']}, {state['temperature.gpu']} C")  # fmt: skip
    header = ("kernel", "pass", "ms", "TFLOP/s", "GB/s", "of peak", "of matmul", "of TB/s", "of copy", "bound us", "of bound")
    return Answer(document, [Table(f"{document['workload']['name']} on {document['device']}", header, rows)], notes)
