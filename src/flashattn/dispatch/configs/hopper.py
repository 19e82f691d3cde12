"""Rows for the Gluon kernels of Hopper, bf16 and fp16.

Key: (pass, largest tile of the head dims, kind). "open": nothing is masked but the end of the keys, so every tile of queries takes as long
as the next. "masked": a window or a causal diagonal, of which, where there is a row for it, "window" is one with a left limit and "long"
one with none and at least LONG queries, so that few of a larger tile's blocks are crossed by the diagonal. "packed": sequences of lengths
that only the GPU knows; "packed long", where there is a row for it, of LONG / 2 queries on average and no left limit.
Rows of the backward are "open", "masked", "window" or "packed"; of masked calls, where there is a row for it, "grouped" is one with heads
that share keys, and "diagonal" one without whose diagonal begins at the corner of a tile, so that it crosses no other block of queries.

Figures are speeds in those of cuDNN (through SDPA) in the same interleaved run, at 1024 / 4096 / 16 384 tokens a sequence: bf16, 16 384
tokens, heads x dim 2048, one H200, 2026-11-30 and 2026-12-01, Triton 3.6.0, torch 2.11.0. They are from the making of the kernels, which
changed between them: they rank the rows and are no claim of speed. Runs differ by 3 % and cards by more, so compare within a line.
"""

from typing import NamedTuple


class HopperConfig(NamedTuple):
    """consumers: warpgroups of 64 query rows. block_n: keys of a block. num_stages: blocks of K, and of V, in shared memory.

    pinned: the row maximum is made before the wait for P V. paired: P is carried as pairs of columns. lazy: out is rescaled only where a
    maximum has grown by more than 2^8. tickets: tiles are drawn from a counter, otherwise each program takes every n-th. lead: loads still
    to come when the next tile is drawn, 0 to 2. heads: as many at least are walked side by side.
    """

    consumers: int
    block_n: int
    num_stages: int
    pinned: bool
    paired: bool
    lazy: bool
    tickets: bool
    lead: int
    heads: int

    @property
    def block_m(self) -> int:
        return 64 * self.consumers

    @property
    def num_warps(self) -> int:
        """One warp loads; three more are allocated with it and do nothing."""
        return 4 * self.consumers + 4


class HopperBackwardConfig(NamedTuple):
    """block_m: queries of a block, num_stages: blocks of Q, and of dO, in shared memory. A program has two warpgroups of 64 keys each.

    delayed: dQ of a block is made one step later, and the warpgroups need not wait for each other. init: dP starts from -delta. fours: lse
    and delta are read four at a time. writers: warps of their own send dQ away, as they always do in a deterministic call. mask: where a
    call has one, 1 masks all blocks, 2 branches to those that need it, 3 masks the first alone. heads: as many at most are walked side by
    side, as far as what they share fits in L2. A thread spills at most 288 bytes under Triton 3.6.0, and 544 under newer ones (64: 236 to
    516); with a softcap or ALiBi 1280.
    wide: for head dims above 128, a program has 64 keys and its warpgroups share out columns. Then `delayed`, `init` and `writers` say
    nothing, and the stages are of Q; those of dO are `do_stages`. own: a warpgroup multiplies what it made itself, p or ds, from its
    registers.
    down: groups of LARGE_GROUP heads or more, in sequences of up to so many queries a head of the group, are walked from the last block of
    queries to the first, of each block all heads: tiles of keys that started together then read the same queries. ahead: scores of a block
    are made while the step before ends.
    """

    block_m: int
    num_stages: int
    delayed: bool
    init: bool
    fours: bool
    writers: bool
    mask: int
    heads: int
    wide: bool = False
    do_stages: int = 0
    own: bool = False
    down: int = 0
    ahead: bool = False

    @property
    def block_n(self) -> int:
        return 64 if self.wide else 128

    @property
    def num_warps(self) -> int:
        """As for the forward; two of the other warps write."""
        return 12


LONG = 4096
LARGE_GROUP = 8
CORNER = 128  # keys of a tile, and queries of a block where there is a row for "diagonal"
BRANCH, ONCE = 2, 3  # of `mask`, as kernels/hopper/gradient.py names them

ROWS = {
    # 1.06 / 1.17 / 1.21; pinned 1.06 / 1.11 / 1.20, lazy 1.05 / 1.10 / 1.17, tickets 1.04 / 1.14 / 1.20
    ("forward", 64, "open"): HopperConfig(3, 128, 2, False, True, False, False, 0, 1),
    # at 256 / 512 / 1024 0.89 / 0.98 / 1.04; lead 1 0.90 / 0.94 / 1.01, no tickets 0.93 / 0.99 / 1.03. At lead 0 taking turns is worth 1 %
    ("forward", 64, "masked"): HopperConfig(2, 128, 2, True, False, False, True, 2, 16),
    # 0.90 / 1.10 / 1.20 where the row above has 1.00 / 1.09 / 1.13; not paired 0.89 / 1.08 / 1.15
    ("forward", 64, "long"): HopperConfig(3, 128, 2, False, True, False, True, 2, 16),
    # of 1024 keys 371 TFLOP/s, the row for "masked" 365
    ("forward", 64, "window"): HopperConfig(3, 128, 2, False, True, False, True, 2, 16),
    ("forward", 64, "packed"): HopperConfig(2, 128, 2, True, False, False, True, 1, 16),
    # 443 TFLOP/s for lengths drawn from 64 to 8192; lead 2 438, the row above 394
    ("forward", 64, "packed long"): HopperConfig(3, 128, 2, False, True, False, True, 1, 16),
    # 1.13 / 1.16 / 1.12; lazy 1.08 / 1.10 / 1.06. Elsewhere 1.07 / 1.16 / 1.11; not pinned 1.09 / 1.13 / 1.13, tickets 1.05 / 1.12 / 1.13
    ("forward", 128, "open"): HopperConfig(2, 128, 2, True, False, False, False, 0, 1),
    # 1.22 / 1.35 / 1.29; lead 1 1.19 / 1.29 / 1.27, lead 0 1.13 / 1.27 / 1.29. At lead 0 32 heads cost 2 to 4 %, 64 heads 5 to 8 %
    ("forward", 128, "masked"): HopperConfig(2, 128, 2, True, False, False, True, 2, 16),
    # of 1024 keys 529 TFLOP/s, lead 2 507; the next, of lengths drawn from 64 to 8192, 554, lead 2 538
    ("forward", 128, "window"): HopperConfig(2, 128, 2, True, False, False, True, 1, 16),
    ("forward", 128, "packed"): HopperConfig(2, 128, 2, True, False, False, True, 1, 16),
    # 1.13 / 1.15 / 1.17; pinned 1.11 / 1.11 / 1.18, not lazy 1.06 / 1.03 / 1.06. 128 keys need more shared memory than there is
    ("forward", 256, "open"): HopperConfig(2, 64, 2, False, False, True, False, 0, 1),
    # 1.18 / 1.33 / 1.39; not pinned 1.13 / 1.28 / 1.30, lead 1 1.19 / 1.30 / 1.41. Else 1.13 / 1.28 / 1.32, not lazy 1.09 / 1.22 / 1.22
    # (at 0 the loading warp spills 8 bytes under Triton 3.6.0)
    ("forward", 256, "masked"): HopperConfig(2, 64, 2, True, False, True, True, 2, 8),
    # pinned these two spill, under Triton 3.9 and 3.6, and so does lead 1, worth 3 % for a window of 1024 keys
    ("forward", 256, "window"): HopperConfig(2, 64, 2, False, False, True, True, 0, 8),
    ("forward", 256, "packed"): HopperConfig(2, 64, 2, False, False, True, True, 0, 8),
    # 1.13 / 1.25 / 1.30; writers 1.13 / 1.26 / 1.26, fours 1.10 / 1.23 / 1.27, not ahead 1.07 / 1.11 / 1.14
    ("backward", 64, "open"): HopperBackwardConfig(128, 2, True, True, False, False, 1, 1, ahead=True),
    # 1.17 / 1.29 / 1.30; 64 heads 1.15 / 1.26 / 1.31, mask 2 1.10 / 1.11 / 1.03, not init 1.05 / 1.07 / 1.04
    ("backward", 64, "masked"): HopperBackwardConfig(128, 2, True, True, True, True, 1, 16),
    # at 512 / 1024 / 4096 / 16 384 1.16 / 1.19 / 1.30 / 1.33; writers 1.15 / 1.18 / 1.29 / 1.34, the row above 1.16 / 1.17 / 1.26 / 1.28
    ("backward", 64, "diagonal"): HopperBackwardConfig(128, 2, True, True, False, False, 3, 16, ahead=True),
    # in groups of 8 at 2048 / 8192 1.43 / 1.39; not fours the same, no writers 1.41 / 1.36, the row for "masked" 1.36 / 1.21
    ("backward", 64, "grouped"): HopperBackwardConfig(128, 2, True, True, True, True, 2, 16, ahead=True),
    # of 1024 keys 360 TFLOP/s, mask 1 345, not delayed 335
    ("backward", 64, "window"): HopperBackwardConfig(128, 2, True, True, True, True, 2, 16),
    # of lengths drawn from 64 to 8192 452 TFLOP/s, writers 433, so not delayed 392
    ("backward", 64, "packed"): HopperBackwardConfig(128, 2, True, True, True, False, 1, 16),
    # 1.07 / 1.08 / 1.11; fours 1.07 / 1.06 / 1.10, init 1.04 / 1.01 / 1.06, no writers 1.02 / 1.04 / 1.06, nor delayed 1.05 / 1.02 / 1.05
    ("backward", 128, "open"): HopperBackwardConfig(64, 2, True, False, False, True, 1, 1),
    # 1.11 / 1.17 / 1.11; no writers the same, mask 1 1.07 / 1.08 / 1.07, so fours 1.10 / 1.13 / 1.10; nor delayed 1.14 / 1.13 / 1.11, where
    # 64 heads in groups of 8 take 4 % longer, and mask 2 gains nothing
    ("backward", 128, "masked"): HopperBackwardConfig(64, 2, True, False, False, True, 2, 16),
    # 64 heads in groups of 8 at 2048 / 4096 / 8192 / 16 384 1.15 / 1.13 / 1.13 / 1.10, the row above 1.08 / 1.10 / 1.14 / 1.12; groups of
    # 16 at 4096 1.10 and 0.98; of 4 at 2048 / 8192 1.21 / 1.18 and 1.25 / 1.21. Head dim 64, and windows, gain nothing
    ("backward", 128, "grouped"): HopperBackwardConfig(64, 2, True, False, False, True, 2, 16, down=512),
    # of 1024 keys 418 TFLOP/s, delayed 408, with mask 2 410; the next, packed as above, 521, delayed 518, with mask 2 505
    ("backward", 128, "window"): HopperBackwardConfig(64, 2, False, False, False, True, 1, 16),
    ("backward", 128, "packed"): HopperBackwardConfig(64, 2, False, False, False, True, 1, 16),
    # as for 256, of what fits
    ("backward", 192, "open"): HopperBackwardConfig(64, 2, False, False, True, True, 2, 1, True, 2, True),
    ("backward", 192, "masked"): HopperBackwardConfig(64, 2, False, False, True, True, 2, 16, True, 2, True),
    ("backward", 192, "packed"): HopperBackwardConfig(64, 2, False, False, True, True, 2, 16, True, 2, True),
    # 1.30 / 1.29 / 1.50; not own 1.29 / 1.27 / 1.46. dQ straight from registers (red.v4) and two stages of dO 0.95 of that from 4096 on
    ("backward", 256, "open"): HopperBackwardConfig(64, 2, False, False, True, True, 2, 1, True, 1, True),
    # 1.14 / 1.24 / 1.40; not own 1.14 / 1.22 / 1.36, mask 1 1.15 / 1.23 / 1.36
    ("backward", 256, "masked"): HopperBackwardConfig(64, 2, False, False, True, True, 2, 16, True, 1, True),
    ("backward", 256, "packed"): HopperBackwardConfig(64, 2, False, False, True, True, 2, 16, True, 1),
}
