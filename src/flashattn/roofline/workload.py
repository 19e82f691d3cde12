"""One attention call as plain data: what is measured has a name, a shape and an exact amount of work.

`benchmarks/workloads.py` has the suites of them. Work is counted by `roofline.work`; packed sequences are counted one by one, where
`explain`, which knows no lengths, has an upper bound.

Surprising fact: reduced to a size that an oracle can judge, most workloads of a suite are the same one.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from ..problem import Problem, canonical_window, default_scale
from .work import Work, attention

DIRECTIONS = ("fwd", "bwd")
PASSES = dict(zip(DIRECTIONS, ("forward", "backward"), strict=True))
GATE_LENGTH = 1024  # fp64 scores of this length still fit everywhere, and it spans several tiles of every kernel


@dataclass(frozen=True)
class Workload:
    """One attention call: shapes, mask, dtype. `causal` and `window` mean what they mean in `flashattn.attention`.

    lengths: of packed sequences, as many queries as keys in each; `batch` is then their number and `seqlen_*` the longest.
    """

    name: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    causal: bool | str = False
    window: tuple[int | None, int | None] | None = None
    dtype: str = "bfloat16"
    lengths: tuple[int, ...] = ()

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def group(self) -> int:
        return self.heads_q // self.heads_kv

    @property
    def packed(self) -> bool:
        return bool(self.lengths)

    @property
    def rows(self) -> tuple[int, int, int]:
        """(batch entries, query rows of one, key rows of one) of the tensors; packed sequences share one entry."""
        return (1, sum(self.lengths), sum(self.lengths)) if self.packed else (self.batch, self.seqlen_q, self.seqlen_k)

    def problem(self) -> Problem:
        left, right, top_left = canonical_window(self.causal, self.window)
        _, total_q, total_k = self.rows if self.packed else (0, 0, 0)
        return Problem(
            dtype=self.dtype, batch=self.batch, seqlen_q=self.seqlen_q, seqlen_k=self.seqlen_k, heads_q=self.heads_q,
            heads_kv=self.heads_kv, head_dim=self.head_dim, head_dim_v=self.head_dim_v, softmax_scale=default_scale(self.head_dim),
            window_left=left, window_right=right, top_left=top_left, varlen=self.packed, total_q=total_q, total_k=total_k,
        )

    def pairs(self) -> int:
        """(query, key) pairs that the mask keeps, over all query heads and batch entries."""
        return self.flops("fwd") // (2 * (self.head_dim + self.head_dim_v))

    def work(self, direction: str) -> Work:
        """FLOPs and the fewest bytes of one call, as `flashattn.roofline.work.attention` counts them, packed sequences one by one."""
        if direction not in DIRECTIONS:
            raise ValueError(f"direction is {direction!r}; known are {', '.join(DIRECTIONS)}")
        return _work(self, PASSES[direction])

    def flops(self, direction: str) -> int:
        return self.work(direction).flops

    def minimal_bytes(self, direction: str) -> int:
        return self.work(direction).bytes

    def reduced(self, limit: int = GATE_LENGTH) -> "Workload":
        """The same kind of call (dtype, head dims, group, mask, tile-crossing lengths) small enough for the fp64 oracle.

        The name is dropped: workloads of one kind reduce to equal values, so the oracle judges each kind once.
        """
        heads_kv = min(self.heads_kv, 2)
        lengths = tuple(min(length, limit) for length in self.lengths)
        return replace(
            self, name="reduced", batch=len(lengths) or 2, seqlen_q=min(self.seqlen_q, limit), seqlen_k=min(self.seqlen_k, limit),
            heads_q=heads_kv * self.group, heads_kv=heads_kv, lengths=lengths,
        )


@lru_cache(maxsize=1024)
def _work(workload: Workload, direction: str) -> Work:
    lengths = [(length, length) for length in workload.lengths] or None
    return attention(workload.problem(), direction, lengths)


def square(name: str, batch: int, seqlen: int, heads_q: int, heads_kv: int, head_dim: int, causal: bool, dtype="bfloat16") -> Workload:
    """Self-attention: as many keys as queries, one head dim."""
    return Workload(name, batch, seqlen, seqlen, heads_q, heads_kv, head_dim, head_dim, causal, None, dtype)


def packed(
    name: str, lengths: tuple[int, ...], heads_q: int, heads_kv: int, head_dim: int, causal: bool = True, dtype="bfloat16"
) -> Workload:
    """Self-attention of packed sequences."""
    longest = max(lengths)
    return Workload(name, len(lengths), longest, longest, heads_q, heads_kv, head_dim, head_dim, causal, None, dtype, lengths)
