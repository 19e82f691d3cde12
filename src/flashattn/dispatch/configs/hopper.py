"""Rows for the Gluon kernels of Hopper, bf16 and fp16.

Key: (pass, largest tile of the head dims, kind). "open": nothing is masked but the end of the keys, so every tile of queries takes as long
as the next. "masked": a window or a causal diagonal. "long": a causal diagonal and at least LONG queries, so that few of a larger tile's
blocks are crossed by it. "packed": sequences of lengths that only the GPU knows.

Figures are TFLOP/s at 1024 / 4096 / 16 384 tokens a sequence: H200, 2026-11-29, Triton 3.6.0, bf16, 16 384 tokens, heads x dim 2048, each
against neighbours in one interleaved run, of the rough kernels that these were made after. They rank the rows and are no claim of speed.
"""

from typing import NamedTuple


class HopperConfig(NamedTuple):
    """consumers: warpgroups of 64 query rows. block_n: keys of a block. num_stages: blocks of K, and of V, in shared memory.

    pingpong: warpgroups take turns at issuing products. pinned: the row maximum is made before the wait for P V. paired: P is
    carried as pairs of columns. lazy: out is rescaled only where a maximum has grown by more than 2^8. tickets: tiles are drawn from a
    counter, otherwise each program takes every n-th. lead: blocks of a tile that are still to be loaded when the next one is drawn, 0 to 2.
    heads: as many at least are walked side by side.
    """

    consumers: int
    block_n: int
    num_stages: int
    pingpong: bool
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


LONG = 4096

ROWS = {
    # 417 / 487 / 517, 2 consumers without pinning 405 / 438 / 440; paired saves 7 % of the instructions here and adds 1 % elsewhere
    ("forward", 64, "open"): HopperConfig(3, 128, 2, True, False, True, False, False, 0, 1),
    # 308 / 425 / 454; 3 consumers 268 / 413 / 476, and they spill where a mask is in the loop
    ("forward", 64, "masked"): HopperConfig(2, 128, 2, True, True, False, False, True, 1, 16),
    ("forward", 64, "long"): HopperConfig(3, 128, 2, True, False, True, False, True, 2, 16),
    ("forward", 64, "packed"): HopperConfig(2, 128, 2, True, True, False, False, True, 1, 16),
    # 581 / 650 / 668; not pinned 575 / 637 / 655
    ("forward", 128, "open"): HopperConfig(2, 128, 2, True, True, False, False, False, 0, 1),
    # 424 / 575 / 611; not pinned 4 % less, a static order 450 at 4096
    ("forward", 128, "masked"): HopperConfig(2, 128, 2, True, True, False, False, True, 2, 16),
    ("forward", 128, "packed"): HopperConfig(2, 128, 2, True, True, False, False, True, 2, 16),
    # 610 / 676 / 682; 128 keys need more shared memory than there is
    ("forward", 256, "open"): HopperConfig(2, 64, 2, True, False, False, True, False, 0, 1),
    # 459 / 590 / 628; 407 / 550 / 618 where a ticket is drawn when a tile begins
    ("forward", 256, "masked"): HopperConfig(2, 64, 2, True, True, False, True, True, 0, 8),
    ("forward", 256, "packed"): HopperConfig(2, 64, 2, True, False, False, True, True, 0, 8),
}
