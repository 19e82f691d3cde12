"""Named attention workloads, and how much work each one is.

A workload is plain data, so tests, benchmarks and tuning speak of the same shapes by the same names. Work is counted exactly, by
`flashattn.explain`'s own formulas: only the (query, key) pairs that the mask keeps, one multiply-add as two FLOPs, softmax not counted (the
field's convention). Packed sequences are counted one by one, where `explain`, which knows no lengths, has an upper bound.

Surprising fact: papers halve the FLOPs of a causal square; the exact count is S (S + 1) / 2 pairs, 0.2 % more at S = 512.
"""

import random
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from flashattn.dispatch.explain import work
from flashattn.problem import Problem, canonical_window, default_scale

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

    def flops(self, direction: str) -> int:
        """FLOPs of one call.

        Forward: 2 pairs (D + Dv), the products Q K^T and P V; 4 B H Sq Sk D without a mask and with D = Dv.
        Backward: 2 pairs (3 D + 2 Dv): Q K^T again, dO V^T, P^T dO, dS K, dS^T Q; 2.5 times the forward when D = Dv.
        """
        _check_direction(direction)
        return _work(self, PASSES[direction])[0]

    def minimal_bytes(self, direction: str) -> int:
        """Fewest bytes through device memory: every input read once, every output written once.

        Forward: q, k, v in, out and the fp32 lse out. Backward: q, k, v, out, dout and lse in, dq, dk, dv out.
        """
        _check_direction(direction)
        return _work(self, PASSES[direction])[1]

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
def _work(workload: Workload, direction: str) -> tuple[int, int]:
    """(FLOPs, bytes). A packed call is its sequences, each a dense call of one batch entry."""
    whole = workload.problem()
    alone = replace(whole, batch=1, varlen=False, total_q=0, total_k=0)
    problems = [replace(alone, seqlen_q=length, seqlen_k=length) for length in workload.lengths] if workload.packed else [whole]
    counted = [work(problem) for problem in problems]
    return sum(flops[direction] for flops, _ in counted), sum(moved[direction] for _, moved in counted)


def _check_direction(direction: str) -> None:
    if direction not in DIRECTIONS:
        raise ValueError(f"direction is {direction!r}; known are {', '.join(DIRECTIONS)}")


def square(name: str, batch: int, seqlen: int, heads_q: int, heads_kv: int, head_dim: int, causal: bool, dtype="bfloat16") -> Workload:
    """Self-attention: as many keys as queries, one head dim."""
    return Workload(name, batch, seqlen, seqlen, heads_q, heads_kv, head_dim, head_dim, causal, None, dtype)


def packed(
    name: str, lengths: tuple[int, ...], heads_q: int, heads_kv: int, head_dim: int, causal: bool = True, dtype="bfloat16"
) -> Workload:
    """Self-attention of packed sequences."""
    longest = max(lengths)
    return Workload(name, len(lengths), longest, longest, heads_q, heads_kv, head_dim, head_dim, causal, None, dtype, lengths)


def fa3_grid() -> tuple[Workload, ...]:
    """The grid of the FlashAttention-3 paper (Shah et al. 2024, section 4.1): 16 384 tokens a batch, heads x head dim = 2048."""
    return tuple(
        square(
            f"fa3-d{head_dim}-s{seqlen}{'-causal' if causal else ''}",
            16384 // seqlen, seqlen, 2048 // head_dim, 2048 // head_dim, head_dim, causal,
        )
        for head_dim in (64, 128, 256)
        for causal in (False, True)
        for seqlen in (512, 1024, 2048, 4096, 8192, 16384)
    )


def llama3_8b() -> tuple[Workload, ...]:
    """The attention of Llama 3 8B (32 query heads, 8 key/value heads, head dim 128, causal) on 16 384 tokens."""
    return tuple(
        square(f"llama3-8b-s{seqlen}", 16384 // seqlen, seqlen, 32, 8, 128, True) for seqlen in (1024, 2048, 4096, 8192, 16384)
    )


# Documents as they come: a few long ones hold most of the tokens, most are short, and no length is a multiple of a tile.
MIXED = (5213, 3071, 2047, 1543, 1021, 809, 613, 509, 397, 331, 257, 199, 127, 101, 67, 43, 19, 11, 5, 1)


def packed_16k() -> tuple[Workload, ...]:
    """16 384 tokens of packed causal sequences, heads x head dim = 2048: of equal lengths, to compare with a dense batch, and mixed."""
    equal = (4096,) * 4
    return (
        packed("packed-16k", equal, 16, 16, 128),
        packed("packed-16k-d64", equal, 32, 32, 64),
        packed("packed-16k-mixed", MIXED, 16, 16, 128),
        packed("packed-16k-d64-mixed", MIXED, 32, 32, 64),
        packed("packed-16k-llama3-8b-mixed", MIXED, 32, 8, 128),
    )


def odd_head_dims() -> tuple[Workload, ...]:
    """Head dims that are no power of two, on 16 384 tokens: 72 of SigLIP, 80 of Phi-2, 96 of Phi-3, 192 with 128 of DeepSeek-V3."""
    dims = {"d72": (72, 72, 16), "d80": (80, 80, 32), "d96": (96, 96, 32), "d192-128": (192, 128, 16)}
    return tuple(
        Workload(f"dims-{name}-s4096{'-causal' if causal else ''}", 4, 4096, 4096, heads, heads, head_dim, head_dim_v, causal)
        for name, (head_dim, head_dim_v, heads) in dims.items()
        for causal in (False, True)
    )


def _drawn(total: int, least: int, most: int) -> tuple[int, ...]:
    """Lengths drawn evenly from [least, most], the same every time; the last is what is left."""
    draw, lengths = random.Random(0), []
    while total > 0:
        lengths.append(min(draw.randint(least, most), total))
        total -= lengths[-1]
    return tuple(lengths)


def kinds() -> tuple[Workload, ...]:
    """Kinds of calls beside the plain causal one that they are to be compared with, by FLOPs of kept pairs: grouped heads, a window of
    1024 keys, packed sequences of very different lengths."""
    window = [(64, 32), (128, 16)]
    lengths = _drawn(32768, 64, 8192)
    return (
        square("mha-64-s8192", 2, 8192, 64, 64, 128, True),
        square("gqa-64-8-s8192", 2, 8192, 64, 8, 128, True),
        *(square(f"causal-d{head_dim}-s16384", 1, 16384, heads, heads, head_dim, True) for head_dim, heads in window),
        *(
            replace(square(f"window-1024-d{head_dim}-s16384", 1, 16384, heads, heads, head_dim, True), window=(1023, 0))
            for head_dim, heads in window
        ),
        *(packed(f"packed-32k-drawn-d{head_dim}", lengths, heads, heads, head_dim) for head_dim, heads in window),
    )


def smoke() -> tuple[Workload, ...]:
    """Tiny shapes that take every path of the benchmark in seconds on a CPU; their speeds mean nothing.

    float16, because Triton's interpreter takes the bits of bfloat16 operands of a dot for integers.
    """
    return (
        square("smoke-d64-s128", 1, 128, 2, 2, 64, False, "float16"),
        square("smoke-d64-s192-causal", 2, 192, 2, 2, 64, True, "float16"),
        square("smoke-gqa-s128-causal", 1, 128, 4, 2, 32, True, "float16"),
        packed("smoke-packed-causal", (100, 1, 27), 2, 1, 32, dtype="float16"),
    )


SUITES = {"fa3": fa3_grid(), "llama3": llama3_8b(), "packed": packed_16k(), "dims": odd_head_dims(), "kinds": kinds(), "smoke": smoke()}
WORKLOADS = {workload.name: workload for suite in SUITES.values() for workload in suite}


def select(
    suite: str, seqlens: tuple[int, ...] | None = None, head_dims: tuple[int, ...] | None = None, match: str = ""
) -> tuple[Workload, ...]:
    """The workloads of a suite whose (longest) length, head dim and name (a substring) were asked for; ValueError when none is left."""
    if suite not in SUITES:
        raise ValueError(f"suite is {suite!r}; known are {', '.join(SUITES)}")
    chosen = tuple(
        w
        for w in SUITES[suite]
        if (not seqlens or w.seqlen_q in seqlens) and (not head_dims or w.head_dim in head_dims) and match in w.name
    )
    if not chosen:
        raise ValueError(f"no workload of suite {suite!r} has seqlens {seqlens}, head_dims {head_dims} and {match!r} in its name")
    return chosen
