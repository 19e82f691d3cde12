"""`flashattn.explain`: the choice made for a problem, in words and numbers, from the same table and rows that the call uses.

The roofline is imported when somebody asks: `import flashattn` needs none of it.
"""

from dataclasses import dataclass, field, replace

from ..problem import Problem
from .configs import Config
from .select import select
from .table import DIRECTIONS, KERNELS, Kernel

_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


@dataclass(frozen=True)
class Explanation:
    """Everything but `problem`, `tiles` and `padded` is {"forward": ..., "backward": ..., "tangent": ...}, since passes are chosen apart.
    "tangent" is the forward with its derivative along tangents (`torch.func.jvp`); second derivatives are always "eager".

    kernels: their names. passed_over: {name: reasons} of the kernels before each in the table. tiles: {pass: row}, without the passes that
    run in plain PyTorch. padded: {pass: (head_dim, head_dim_v)} as these tiles have them. flops and bytes: kept pairs only, and every
    tensor of rows read or written once. Packed calls have upper bounds, as if each sequence had the maximal lengths, because lengths live
    on the GPU. gpu: of the roofline's table, or None. density: the share of blocks that a block mask keeps, None without or where nobody
    knows; then FLOPs are of all pairs. bounds: {pass: `roofline.Bound`} on it, none without a GPU. measured_ms: what
    `measured` was told.
    """

    problem: Problem
    kernels: dict[str, str]
    passed_over: dict[str, dict[str, list[str]]]
    tiles: dict[str, Config]
    padded: dict[str, tuple[int, int]]
    flops: dict[str, int]
    bytes: dict[str, int]
    gpu: str | None = None
    bounds: dict = field(default_factory=dict)
    measured_ms: dict[str, float] = field(default_factory=dict)
    density: float | None = None

    def measured(self, *, forward: float | None = None, backward: float | None = None) -> "Explanation":
        """The same with measured milliseconds, of which the print tells the share of the bound. ValueError unless they are positive."""
        times = {name: ms for name, ms in (("forward", forward), ("backward", backward)) if ms is not None}
        for name, ms in times.items():
            if not ms > 0:
                raise ValueError(f"{name}={ms!r}: expected positive milliseconds")
        return replace(self, measured_ms=self.measured_ms | times)

    def __str__(self) -> str:
        p = self.problem
        where = p.device if p.capability is None else f"{p.device} sm_{p.capability[0]}{p.capability[1]}"
        lengths = "longest sequence" if p.varlen else "sequence"
        fewer = f", packed in {p.total_q} and {p.total_k} rows" if p.varlen else ", or fewer by seqlens_k" if p.used_k else ""
        lines = [
            f"attention on {where}: {p.dtype}, batch {p.batch}, heads {p.heads_q}/{p.heads_kv}, head_dim {p.head_dim}/{p.head_dim_v}",
            f"  {lengths} {p.seqlen_q} queries x {p.seqlen_k} keys{fewer}",
        ]
        if p.window_left is not None or p.window_right is not None:
            lines.append(f"  window ({p.window_left}, {p.window_right}) around the {'top-left' if p.top_left else 'bottom-right'} diagonal")
        if p.blocks:
            lines.append(f"  block mask{'' if self.density is None else f' that keeps {self.density:.3g} of the blocks of 128 x 128'}")
        variants = [f"softcap {p.softcap:g}"] * bool(p.softcap) + ["ALiBi"] * p.alibi + _bias_of(p) + ["sinks"] * p.sinks
        lines += [f"  scores with {', '.join(variants)}"] if variants else []
        of_mods = [f"{what} {getattr(p, what)!r}" for what in ("score_mod", "mask_mod") if getattr(p, what)]
        lines += [f"  with {' and '.join(of_mods)}, kept pairs counted without what it keeps"] if of_mods else []
        lines += [f"  dropout of {p.dropout:g}"] if p.dropout else []
        choices = [(f"kernel of the {direction}", kernel, self.passed_over[direction]) for direction, kernel in self.kernels.items()]
        (_, forward, why), (_, backward, why_backward), (_, tangent, _) = choices
        if forward == backward:  # then the same were passed over, each for what is against it in either pass
            both = ("kernel", forward, {name: dict.fromkeys([*reasons, *why_backward[name]]) for name, reasons in why.items()})
            choices = [both] + choices[2:] * (tangent != forward)
        for what, kernel, passed_over in choices:
            lines.append(f"  {what}: {kernel}")
            lines += [f"    not {name}: {'; '.join(reasons)}" for name, reasons in passed_over.items()]
        lines += ["  tiles:"] if self.tiles else []
        for name, row in self.tiles.items():
            tile = f"{row.block_m:3} rows" + ("" if name == "delta" else f" x {row.block_n:3} keys")  # delta sees no keys
            dims = "head_dim padded to {}/{}".format(*self.padded[name])
            lines.append(f"    {name:8} {tile + ',':20} {dims}, {row.num_warps} warps, {row.num_stages} stages")
        most = "at most " if p.varlen or p.used_k else ""
        for name, flops in self.flops.items():
            lines.append(f"  {name + ':':9} {most}{_units(flops, 'FLOP')}, {_units(self.bytes[name], 'B')} with each tensor moved once")
            lines += self._roofline(name, most)
        return "\n".join(lines)

    def _roofline(self, name: str, most: str) -> list[str]:
        """The bound of a pass and, if it was measured, how near to it and how fast it ran."""
        lines, ms = [], self.measured_ms.get(name)
        if bound := self.bounds.get(name):
            side = "by arithmetic" if bound.binds == "compute" else "by memory"
            lines.append(f"    roofline of the {self.gpu}: {most}{bound.seconds * 1e6:.4g} us, bound {side}")
        if ms is not None:
            share = f", {most}{bound.share(ms / 1e3):.1%} of that roofline" if bound else ""
            lines.append(f"    measured: {ms * 1e3:.4g} us, {most}{self.flops[name] / ms / 1e9:.4g} TFLOP/s{share}")
        return lines


def _bias_of(problem: Problem) -> list[str]:
    """A bias by its dtype and dimensions, with 1 for those that share it."""
    if not problem.bias:
        return []
    names = zip("bhqk", ("batch", "heads", "seqlen_q", "seqlen_k"), strict=True)
    dims = ", ".join(name if dim in problem.bias_dims else "1" for dim, name in names)
    return [f"{'mask' if problem.bias == 'bool' else f'bias {problem.bias}'} [{dims}]"]


def _units(number: int, unit: str) -> str:
    """Four digits and a prefix: 549.9 GFLOP."""
    steps = min(max(0, len(str(number)) - 1) // 3, len(_PREFIXES) - 1)
    return f"{number / 1000**steps:.4g} {_PREFIXES[steps]}{unit}"


def _passed_over(problem: Problem, direction: str, chosen: Kernel, impl: str | None) -> dict[str, list[str]]:
    found = {}
    for kernel in KERNELS[: KERNELS.index(chosen)]:
        missing = [] if direction in kernel.directions else [f"it has no {direction}"]
        found[kernel.name] = missing or kernel.reasons(problem, direction) or [f"impl={impl!r} was asked for"]
    return found


def explain(
    problem: Problem, impl: str | None, gpu: str | None = None, density: float | None = None, pairs: int | None = None
) -> Explanation:
    """gpu: its name in the roofline's table; ValueError for another one, None for no bound. density, pairs: of a block mask, see
    `Explanation`; the pairs that it keeps in all heads and batch entries."""
    from ..roofline.bound import bound_of
    from ..roofline.gpus import find
    from ..roofline.work import attention

    chosen = {direction: select(problem, direction, impl) for direction in DIRECTIONS}
    passed_over = {direction: _passed_over(problem, direction, kernel, impl) for direction, kernel in chosen.items()}
    tiles, padded = {}, {}
    for direction, kernel in chosen.items():  # the backward is the passes that have no direction's name, or its own
        rows = {name: row for name, row in kernel.rows(problem).items() if direction == (name if name in DIRECTIONS else "backward")}
        tiles |= rows
        padded |= dict.fromkeys(rows, kernel.padded(problem, direction))
    kernels = {direction: kernel.name for direction, kernel in chosen.items()}
    counted = {direction: attention(problem, direction, pairs=pairs) for direction in DIRECTIONS}
    flops, moved = ({name: getattr(work, what) for name, work in counted.items()} for what in ("flops", "bytes"))
    known = None if gpu is None else find(gpu)
    dtype = "tf32" if problem.tf32 else problem.dtype
    bounds = {} if known is None else {name: bound_of(work, known, dtype) for name, work in counted.items()}
    return Explanation(problem, kernels, passed_over, tiles, padded, flops, moved, known and known.name, bounds, density=density)
