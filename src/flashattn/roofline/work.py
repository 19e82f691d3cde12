"""How much work an operation is: FLOPs and bytes of device memory, counted exactly. The only place that knows these formulas.

A multiply-add is two FLOPs. Attention counts the products of the (query, key) pairs that the mask keeps, and not its softmax (the
field's convention); elementwise operations say what they count. Bytes are the fewest that must move: every input read once, every output
written once, so a kernel that reads a tensor twice is below the roofline and not above it.

Legend: m, k, n sizes of a product [m, k] x [k, n]; itemsize bytes of an element; `passes` are "forward" and "backward".

Surprising fact: papers halve the FLOPs of a causal square; the exact count is S (S + 1) / 2 pairs, 0.2 % more at S = 512.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import index

from ..problem import Problem, default_scale, kept_pairs, window_pairs

PASSES = ("forward", "backward")
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float8": 1, "float32": 4, "tf32": 4}
RMSNORM_FLOPS = 4  # an element: square, add, times the reciprocal root, times the weight
SOFTMAX_FLOPS = 5  # an element: maximum, subtract, exponential, add, divide


@dataclass(frozen=True)
class Work:
    """Amounts of work: flops, and bytes of device memory. They add up when operations run one after the other and nothing stays on chip
    between them."""

    flops: int
    bytes: int

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    @property
    def intensity(self) -> float:
        """FLOP/byte; 0 for no bytes."""
        return self.flops / self.bytes if self.bytes else 0.0


def check_sizes(**sizes: int) -> None:
    """TypeError and ValueError for a size that is no positive integer, by name."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name}={size!r}: expected an integer")
        if size < 1:
            raise ValueError(f"{name}={size}: expected at least 1")


def check_positive(**values: float | None) -> None:
    """ValueError for a number that is given and isn't positive and finite, by name."""
    for name, value in values.items():
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name}={value!r}: expected a positive number")


def matmul(m: int, k: int, n: int, itemsize: int = 2) -> Work:
    """[m, k] x [k, n]: 2 m k n FLOPs; m k + k n in and m n out."""
    check_sizes(m=m, k=k, n=n, itemsize=itemsize)
    return Work(2 * m * k * n, itemsize * (m * k + k * n + m * n))


def rmsnorm(rows: int, width: int, itemsize: int = 2) -> Work:
    """x / sqrt(mean(x^2)) * weight of [rows, width]: 4 FLOPs an element; x in and out, the weight once."""
    check_sizes(rows=rows, width=width, itemsize=itemsize)
    return Work(RMSNORM_FLOPS * rows * width, itemsize * (2 * rows * width + width))


def softmax(rows: int, width: int, itemsize: int = 2) -> Work:
    """Over the rows of [rows, width]: 5 FLOPs an element; in and out once."""
    check_sizes(rows=rows, width=width, itemsize=itemsize)
    return Work(SOFTMAX_FLOPS * rows * width, itemsize * 2 * rows * width)


def scores(seqlen_q: int, seqlen_k: int, head_dim: int, itemsize: int = 2) -> Work:
    """Q K^T of one head with the scores written to memory: a product [seqlen_q, head_dim] x [head_dim, seqlen_k]."""
    return matmul(seqlen_q, head_dim, seqlen_k, itemsize)


def standard_attention(seqlen_q: int, seqlen_k: int, head_dim: int, heads: int = 1, itemsize: int = 2) -> Work:
    """Forward of `heads` heads in three steps through memory: S = Q K^T, P = softmax(S), O = P V, each reading and writing all of it.

    Source: Dao et al. 2022 (FlashAttention), algorithm 0.
    """
    check_sizes(heads=heads)
    one = scores(seqlen_q, seqlen_k, head_dim, itemsize) + softmax(seqlen_q, seqlen_k, itemsize)
    one += matmul(seqlen_q, seqlen_k, head_dim, itemsize)
    return Work(heads * one.flops, heads * one.bytes)


def block_pairs(keep: Sequence[Sequence[bool]], block_q: int, block_k: int, problem: Problem) -> int:
    """Kept pairs of one head and batch entry where `keep[a][b]` says whether the block of queries a sees the block of keys b at all.

    Inside a kept block the window of `problem` still holds. ValueError unless `keep` has a row for each of the
    ceil(seqlen_q / block_q) blocks and in each an entry for the ceil(seqlen_k / block_k) others.
    """
    check_sizes(block_q=block_q, block_k=block_k)
    expected = -(-problem.seqlen_q // block_q), -(-problem.seqlen_k // block_k)
    found = len(keep), {len(row) for row in keep}
    if found[0] != expected[0] or found[1] - {expected[1]}:
        raise ValueError(f"keep is {found[0]} rows of {sorted(found[1])} blocks: expected {expected[0]} rows of {expected[1]}")
    limits, total = (problem.window_left, problem.window_right), 0
    for q0, row in zip(range(0, problem.seqlen_q, block_q), keep, strict=True):
        for k0, kept in zip(range(0, problem.seqlen_k, block_k), row, strict=True):
            if kept:  # the block's own diagonal is the whole one, seen from its corner
                rows, columns = min(block_q, problem.seqlen_q - q0), min(block_k, problem.seqlen_k - k0)
                total += window_pairs(rows, columns, problem.diagonal() + q0 - k0, *limits)
    return total


def attention(
    problem: Problem,
    direction: str,
    lengths: Iterable[tuple[int, int]] | None = None,
    blocks: tuple[Sequence[Sequence[bool]], int, int] | None = None,
    pairs: int | None = None,
) -> Work:
    """Fused attention: one pass, `direction` "forward", "backward" or "tangent", of the call that `problem` describes.

    With D = head_dim, Dv = head_dim_v and the kept pairs of all query heads and batch entries:
    forward 2 pairs (D + Dv), the products Q K^T and P V: 4 B H Sq Sk D without a mask and with D = Dv;
    backward 2 pairs (3 D + 2 Dv): Q K^T again, dO V^T, P^T dO, dS K, dS^T Q: 2.5 times the forward when D = Dv.
    tangent (the forward and its derivative along tangents of q, k and v) 6 pairs (D + Dv): three times the forward.
    Bytes: forward q, k, v in, out and the fp32 lse out; backward q, k, v, out, dout and lse in, dq, dk, dv out; tangent those of the
    forward twice. Keys and values that no query sees count as well; grouped heads share theirs. A bias is read by either pass and its
    gradient, if it can have one, written: p (dp - delta) is made on the way, so it takes no FLOPs that count.

    lengths: of the sequences of a packed call, (queries, keys) each. Without them a packed call gets an upper bound of FLOPs, as if each
    sequence had the maximal lengths. blocks: (keep, block_q, block_k) of `block_pairs`, the same for every head of a dense call. pairs:
    those kept in all heads and batch entries together, of whoever has counted them (`BlockMask.kept_pairs`).
    ValueError for an unknown direction, for lengths of a dense call or such that the packed one can't have, for blocks of a packed one.

    Source: Dao et al. 2022, algorithms 1 and 4; Dao 2023 (FlashAttention-2), section 4.1, for counting 4 and 10 FLOPs a pair and dim.
    """
    if direction not in (*PASSES, "tangent"):
        raise ValueError(f"direction={direction!r}: expected one of {', '.join(PASSES)}, tangent")
    if lengths is not None and not problem.varlen:
        raise ValueError("lengths of a dense call: expected a problem with varlen=True, or none")
    if blocks is not None and problem.varlen:
        raise ValueError("blocks of a packed call: expected a dense one")
    p = problem
    pairs = p.heads_q * _pairs_of_heads(p, lengths, blocks) if pairs is None else pairs
    rows_q = p.total_q if p.varlen else p.batch * p.seqlen_q
    rows_k = p.total_k if p.varlen else p.batch * p.seqlen_k
    once = p.itemsize * (p.head_dim + p.head_dim_v) * (rows_q * p.heads_q + rows_k * p.heads_kv)  # q, k, v and out
    lse = 4 * rows_q * p.heads_q
    if direction != "backward":
        times = 3 if direction == "tangent" else 1
        moved = (2 if direction == "tangent" else 1) * (once + lse) + p.bias_bytes
        return Work(times * 2 * pairs * (p.head_dim + p.head_dim_v), moved)
    bias = p.bias_bytes if p.bias == "bool" else 2 * p.bias_bytes
    return Work(2 * pairs * (3 * p.head_dim + 2 * p.head_dim_v), 2 * once + lse + bias)  # dout, dq, dk, dv are as large as out, q, k, v


def _pairs_of_heads(
    problem: Problem, lengths: Iterable[tuple[int, int]] | None, blocks: tuple[Sequence[Sequence[bool]], int, int] | None
) -> int:
    """Kept pairs of one query head in all batch entries."""
    p = problem
    if lengths is not None:
        alone = replace(p, batch=1, varlen=False, total_q=0, total_k=0)
        return sum(kept_pairs(replace(alone, seqlen_q=rows, seqlen_k=columns)) for rows, columns in _checked(lengths, p))
    pairs = p.batch * (kept_pairs(p) if blocks is None else block_pairs(*blocks, p))
    return min(pairs, p.total_q * p.seqlen_k, p.total_k * p.seqlen_q) if p.varlen else pairs


def _checked(lengths: Iterable[tuple[int, int]], problem: Problem) -> list[tuple[int, int]]:
    """As Python's integers: those of numpy and torch would overflow in a product."""
    found = [(index(rows), index(columns)) for rows, columns in lengths]
    for which, longest, total in ((0, problem.seqlen_q, problem.total_q), (1, problem.seqlen_k, problem.total_k)):
        side = [one[which] for one in found]
        if any(not 0 <= length <= longest for length in side) or sum(side) > total:
            found = f"lengths of {'qk'[which]} are {min(side)} to {max(side)}, {sum(side)} together"
            raise ValueError(f"{found}: expected 0 to {longest}, at most {total} together")
    return found


def decode(batch: int, seqlen_k: int, heads_q: int, heads_kv: int, head_dim: int, dtype: str = "bfloat16") -> Work:
    """One new query a sequence against a cache of `seqlen_k` keys and values: `attention` with seqlen_q = 1.

    Its intensity is about the group size heads_q / heads_kv in 16 bits, whatever the batch and the length: the cache is read once and
    each of its rows meets one query row of each head of its group. ValueError unless heads_q is a multiple of heads_kv.
    """
    check_sizes(batch=batch, seqlen_k=seqlen_k, heads_q=heads_q, heads_kv=heads_kv, head_dim=head_dim)
    if heads_q % heads_kv:
        raise ValueError(f"heads_q={heads_q}: expected a multiple of heads_kv={heads_kv}")
    return attention(Problem(dtype, batch, 1, seqlen_k, heads_q, heads_kv, head_dim, head_dim, default_scale(head_dim)), "forward")
