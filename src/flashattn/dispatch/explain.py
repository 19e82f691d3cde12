"""`flashattn.explain`: the choice made for a problem, in words and numbers, from the same table and rows that the call uses."""

from dataclasses import dataclass

from ..problem import Problem, kept_pairs
from .configs import Config
from .select import select
from .table import KERNELS, padded_head_dim

PASSES = ("forward", "delta", "dkdv", "dq")


@dataclass(frozen=True)
class Explanation:
    """kernel: its name. passed_over: {name: reasons} of the kernels before it in the table. tiles: {pass: Config}, empty for plain PyTorch.

    flops and bytes are {"forward": ..., "backward": ...}: kept pairs only, and every tensor read or written once. Packed calls have
    upper bounds, as if each sequence had the maximal lengths, because lengths live on the GPU.
    """

    problem: Problem
    kernel: str
    passed_over: dict[str, list[str]]
    tiles: dict[str, Config]
    flops: dict[str, int]
    bytes: dict[str, int]

    def __str__(self) -> str:
        p = self.problem
        bound = "at most " if p.varlen else ""
        window = "".join(
            f", {side} {limit}" for side, limit in (("left", p.window_left), ("right", p.window_right)) if limit is not None
        )  # fmt: skip
        lines = [
            f"attention {p.dtype} on {p.device}{'' if p.capability is None else ' sm_%d%d' % p.capability}: batch {p.batch}, "
            f"seqlen {p.seqlen_q} x {p.seqlen_k}{' (packed, upper bounds)' if p.varlen else ''}, heads {p.heads_q}/{p.heads_kv}, "
            f"head_dim {p.head_dim}/{p.head_dim_v}{', window' + window if window else ''}{', top-left' if p.top_left else ''}",
            f"  kernel: {self.kernel}",
        ]
        lines += [f"  not {name}: {'; '.join(reasons)}" for name, reasons in self.passed_over.items()]
        for name, row in self.tiles.items():
            tile = f"{row.block_m} rows" if name == "delta" else f"{row.block_m} rows x {row.block_n} keys"
            dims = f"head_dim padded to {padded_head_dim(p.head_dim)}/{padded_head_dim(p.head_dim_v)}"
            lines.append(f"  {name}: tile {tile}, {dims}, {row.num_warps} warps, {row.num_stages} stages")
        lines += [
            f"  {name}: {bound}{self.flops[name] / 1e9:.3f} GFLOP, {bound}{self.bytes[name] / 1e6:.3f} MB" for name in ("forward", "backward")
        ]  # fmt: skip
        return "\n".join(lines)


def work(problem: Problem) -> tuple[dict[str, int], dict[str, int]]:
    """(FLOPs, bytes) of forward and backward: two products forward and five backward, over the kept pairs; tensors once each."""
    pairs = problem.batch * kept_pairs(problem)
    if problem.varlen:
        pairs = min(pairs, problem.total_q * problem.seqlen_k)
    pairs *= problem.heads_q
    flops = {
        "forward": 2 * pairs * (problem.head_dim + problem.head_dim_v),
        "backward": 2 * pairs * (3 * problem.head_dim + 2 * problem.head_dim_v),
    }
    rows_q = problem.total_q if problem.varlen else problem.batch * problem.seqlen_q
    rows_k = problem.total_k if problem.varlen else problem.batch * problem.seqlen_k
    both = problem.head_dim + problem.head_dim_v
    once = problem.itemsize * both * (rows_q * problem.heads_q + rows_k * problem.heads_kv)
    lse = 4 * rows_q * problem.heads_q
    # backward: reads q, out, dO, k, v and lse, writes dq, dk, dv
    return flops, {"forward": once + lse, "backward": 2 * once + lse + problem.itemsize * problem.head_dim_v * rows_q * problem.heads_q}


def explain(problem: Problem, impl: str | None) -> Explanation:
    kernel = select(problem, impl)
    earlier = KERNELS[: KERNELS.index(kernel)]
    passed_over = {row.name: row.reasons(problem) or [f"impl={impl!r} was asked for"] for row in earlier}
    tiles = {name: kernel.config(problem, name) for name in PASSES}
    flops, moved = work(problem)
    return Explanation(problem, kernel.name, passed_over, {name: row for name, row in tiles.items() if row is not None}, flops, moved)
