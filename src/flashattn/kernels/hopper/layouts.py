"""Where the elements of tiles live, in registers and in shared memory, and what of a launch is known at compile time.

The surprising facts: a 16-bit accumulator of wgmma and its register operand A have the same elements in the same threads, so the
probabilities of one product become the operand of the next for free; and each 64 columns of a 128-byte-swizzled tile are contiguous, so a
tile can be seen as a stack of narrower ones.
"""

from typing import NamedTuple

from .gluon import gl, gluon

ROWS = gl.constexpr(64)  # query rows of a warpgroup: the M of wgmma


class Tile(NamedTuple):
    """Extents and variants of the kernel, a constexpr. Blocks are powers of two but for `d`, the sum of equal parts that are."""

    consumers: int  # warpgroups, each with 64 query rows
    n: int  # keys of a block
    d: int
    part_d: int
    dv: int
    head_dim_v: int
    stages: int  # slots for blocks of K, and of V
    registers: int  # of a thread of a consumer
    load_registers: int  # of a thread of the loading warp
    pinned: bool  # the row maximum is made before the wait for P V
    paired: bool  # probabilities are carried as pairs, which keeps the compiler from taking them apart
    lazy: bool  # the maximum follows only by steps of more than 2^8, so that out is seldom rescaled
    tickets: bool  # tiles are drawn from a counter; otherwise each program takes every n-th
    lead: int  # loads still to come when the next tile is drawn: 2 before the last K, 1 before the last V, 0 after it
    alias: bool  # out leaves through the memory of q
    mask_loop: bool  # more than the first block of a tile may need a mask
    bias_align: int = 1  # each row of a bias starts at a multiple of so many of its elements, which are neighbours if this is more than 1


class BackwardTile(NamedTuple):
    """Extents and variants of the backward, a constexpr. Extents are powers of two."""

    m: int  # queries of a block
    n: int  # keys of a program, 64 to a warpgroup, or to both
    d: int
    dv: int
    head_dim: int  # of packed calls, whose dK and dV are written without TMA; else 0
    head_dim_v: int
    stages: int  # slots for blocks of Q, dO and their row numbers
    registers: int  # of a thread of a warpgroup
    load_registers: int  # of a thread of the warps that load and write
    delayed: bool  # dQ of a block is made one step later, so that warpgroups need not wait for each other
    fours: bool  # lse and delta lie in the order in which a thread reads four at once
    init: bool  # dP starts from -delta, which then needs no registers
    writers: bool  # two warps of their own send dQ away, as they always do if `wide`; otherwise the warpgroups do
    mask: int  # 0, or ALWAYS, BRANCH or ONCE of gradient.py
    ordered: bool  # dQ is summed in the order of the keys
    wide: bool = False  # for head dims above 128: see gradient_wide.py
    own: bool = False  # then a warpgroup multiplies the p or ds that it made from its registers
    do_stages: int = 0  # then slots for blocks of dO, and `stages` for the rest
    down: bool = False  # from the last block of queries to the first, and of each all heads: see visits.next_place
    ahead: bool = False  # scores of a block are made while the step before ends


@gluon.constexpr_function
def accumulator(columns):
    """Registers of a [64, columns] product of 16-bit operands."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def operand(columns):
    """Registers of a 16-bit operand A of a product with `columns` columns."""
    return gl.DotOperandLayout(0, accumulator(columns), 2)


@gluon.constexpr_function
def in_fours(columns):
    """Shared memory of a number a column: of 16, those of a thread of a product side by side (of its pair, then of the other 8 columns)."""
    return gl.SharedLinearLayout([[1], [8], [2], [4], *[[1 << bit] for bit in range(4, columns.bit_length() - 1)]])


@gluon.constexpr_function
def shared(width, rank):
    """Shared memory of a 16-bit tile whose rows have `width` elements, as TMA writes it (rank 4) and wgmma reads it (rank 2)."""
    return gl.NVMMASharedLayout(min(128, 2 * width), 16, rank)


@gluon.constexpr_function
def rows_of(width, warps):
    """Registers of a tile that threads read and write 16 bytes at a time, rows contiguous."""
    across = min(32, width // 8)
    return gl.BlockedLayout([1, 8], [32 // across, across], [warps, 1], [1, 0])
