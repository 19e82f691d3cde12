"""The laboratory: what attention moves through device memory and keeps on chip, before any kernel is written.

`standard` writes the scores S and the probabilities P to memory and reads them back; `flash` streams tiles and never does. Both are
counts of an algorithm, not of a machine: no help of the L2 is counted. A real kernel lies between `flash` here and each tensor once
(`work.attention`), since blocks of queries that run at the same time find each other's keys in L2.

Legend: N rows of queries and of keys, d head_dim, M bytes on chip; block_q, block_k rows of a tile of queries and of keys.

Surprising fact: what flash attention saves is traffic and not arithmetic. Its backward even computes the scores once more.

Source: Dao et al. 2022 (FlashAttention), sections 2.2, 3.1, 3.2 and theorem 2; Dao 2023 (FlashAttention-2), section 3.
"""

import math
from dataclasses import dataclass

from .gpus import GPU
from .work import check_sizes

ACCUMULATOR = 4  # bytes: scores and sums are fp32 in every kernel


@dataclass(frozen=True)
class Traffic:
    """Bytes of device memory that one head of one batch entry reads and writes."""

    read: int
    written: int

    @property
    def total(self) -> int:
        return self.read + self.written

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.read + other.read, self.written + other.written)


def score_bytes(seqlen: int, itemsize: int = 2) -> int:
    """The score matrix of one head: N^2 elements."""
    check_sizes(seqlen=seqlen, itemsize=itemsize)
    return itemsize * seqlen * seqlen


def standard(seqlen: int, head_dim: int, itemsize: int = 2, direction: str = "forward") -> Traffic:
    """Attention in steps through memory, one head.

    forward: S = Q K^T (Q, K in, S out), P = softmax(S) (S in, P out), O = P V (P, V in, O out): 4 N d + 4 N^2 elements.
    backward: dV = P^T dO, dP = dO V^T, dS = P (dP - rowsum(P dP)), dQ = dS K, dK = dS^T Q: P twice, dP once and dS twice in, dP and dS
    out; dO, V, K, Q and dO again in, dV, dQ, dK out: 8 N d + 7 N^2. Neither has a mask or dropout, which are passes more over N^2.

    Source: Dao et al. 2022, algorithm 0 and appendix B.
    """
    nd, nn = seqlen * head_dim * itemsize, score_bytes(seqlen, itemsize)
    check_sizes(head_dim=head_dim)
    if direction == "forward":
        return Traffic(3 * nd + 2 * nn, nd + 2 * nn)
    _check_direction(direction)
    return Traffic(5 * nd + 5 * nn, 3 * nd + 2 * nn)


def flash(
    seqlen: int, head_dim: int, block_q: int, block_k: int, itemsize: int = 2, direction: str = "forward", fused: bool = True
) -> Traffic:
    """Tiled attention, one head, no mask, nothing found in L2.

    forward: each block of queries once, all keys and values once a block of queries, out and the fp32 lse once.
    backward, fused: a block of keys and values stays on chip while all of q, dout, lse and delta pass, and its part of dQ is added to an
    fp32 array in memory (read and written). Not fused: dK and dV so, without dQ; then dQ with its block of queries on chip while all keys
    and values pass. Both first read out and dout for delta = rowsum(out dout).
    """
    check_sizes(seqlen=seqlen, head_dim=head_dim, block_q=block_q, block_k=block_k, itemsize=itemsize)
    nd, row = seqlen * head_dim * itemsize, ACCUMULATOR * seqlen
    blocks_q, blocks_k = -(-seqlen // block_q), -(-seqlen // block_k)
    if direction == "forward":
        return Traffic(nd + 2 * nd * blocks_q, nd + row)
    _check_direction(direction)
    delta = Traffic(2 * nd, row)
    dkdv = Traffic(2 * nd + blocks_k * (2 * nd + 2 * row), 2 * nd)
    if fused:
        sums = ACCUMULATOR * seqlen * head_dim
        return delta + dkdv + Traffic(blocks_k * sums, blocks_k * sums) + Traffic(sums, nd)  # at last dQ is rounded
    return delta + dkdv + Traffic(2 * nd + 2 * row + blocks_q * 2 * nd, nd)


def _check_direction(direction: str) -> None:
    if direction != "backward":
        raise ValueError(f"direction={direction!r}: expected forward or backward")


@dataclass(frozen=True)
class Residence:
    """What one program keeps where: bytes of tiles in shared memory and of fp32 accumulators in registers, against what there is."""

    q: int
    k: int
    v: int
    scores: int
    out: int
    smem_limit: int
    register_limit: int

    @property
    def smem(self) -> int:
        return self.q + self.k + self.v

    @property
    def registers(self) -> int:
        return self.scores + self.out

    def reasons(self) -> list[str]:
        """Why it doesn't fit; empty if it does."""
        found = []
        if self.smem > self.smem_limit:
            limit = f"{self.smem_limit / 1024:g} of shared memory"
            found.append(f"tiles of Q, K and V take {self.smem / 1024:g} KB, a program may have {limit}")
        if self.registers > self.register_limit:
            found.append(f"scores and output take {self.registers / 1024:g} KB, the register file has {self.register_limit / 1024:g}")
        return found


def residence(block_q: int, block_k: int, head_dim: int, gpu: GPU, itemsize: int = 2) -> Residence:
    """One tile each of Q, K and V in shared memory, a tile of scores and the output in registers, in fp32.

    A lower bound: a kernel that loads the next tile while it multiplies this one has K and V twice, and needs registers for more than
    its accumulators.
    """
    check_sizes(block_q=block_q, block_k=block_k, head_dim=head_dim, itemsize=itemsize)
    tile_q, tile_k = itemsize * block_q * head_dim, itemsize * block_k * head_dim
    on_chip = ACCUMULATOR * block_q * block_k, ACCUMULATOR * block_q * head_dim
    return Residence(tile_q, tile_k, tile_k, *on_chip, gpu.smem_per_block, gpu.registers_per_sm)


def working_set(block_q: int, block_k: int, head_dim: int, itemsize: int = 2) -> int:
    """Bytes that stand in for the score matrix: one tile each of Q, K, V and O. It doesn't depend on the length."""
    check_sizes(block_q=block_q, block_k=block_k, head_dim=head_dim, itemsize=itemsize)
    return itemsize * head_dim * (2 * block_q + 2 * block_k)


def fa1_blocks(on_chip: int, head_dim: int, itemsize: int = 2) -> tuple[int, int]:
    """(block_q, block_k) of the first FlashAttention for `on_chip` bytes, M elements of `itemsize`:
    block_k = ceil(M / 4 d), block_q = min(block_k, d), so that four tiles fit.

    Source: Dao et al. 2022, algorithm 1, line 1.
    """
    check_sizes(on_chip=on_chip, head_dim=head_dim, itemsize=itemsize)
    block_k = math.ceil(on_chip // itemsize / (4 * head_dim))
    return min(block_k, head_dim), block_k


def asymptotic(seqlen: int, head_dim: int, on_chip: int, itemsize: int = 2) -> tuple[float, float]:
    """(standard, flash) elements moved, without their constants: N d + N^2 and N^2 d^2 / M, with M the elements that fit on chip.

    Source: Dao et al. 2022, theorem 2; it holds for d <= M <= N d.
    """
    check_sizes(seqlen=seqlen, head_dim=head_dim, on_chip=on_chip, itemsize=itemsize)
    return seqlen * head_dim + seqlen**2, seqlen**2 * head_dim**2 / (on_chip / itemsize)
