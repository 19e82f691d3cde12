"""What comes before and after the Hopper backward: one pass over the queries each, in plain Triton.

Legend: M query rows, D query/key dim, V value dim. Before: per row lse in base 2 and delta = rowsum(dO * out) - dlse, of a block first M of
the one and then M of the other, and zeros for the sums of dQ. After: the sums, times the scale, as dQ. Blocks are numbered as in visits.py.

The surprising facts: rows that don't exist, and rows without keys, get lse = inf, which makes each of their probabilities 0 and spares the
kernel a mask. And the sums lie in the order in which registers of a product hold them: see `undone`. Either pass takes the last head first,
since the kernel between them begins with the first head and ends with the last, and what is in L2 needs no other memory.
"""

import triton
import triton.language as tl

from ..common.index import head_pointer, load_row, load_tile, locate, rows_pointer, store_tile, tile_pointers, wide
from ..common.softmax import LOG2E
from .profile import after_metadata, before_metadata

SIZES = ("total_q", "batch", "heads_q", "blocks")


@triton.jit
def block_of_queries(cu_q, total_q, batch, heads_q, blocks, TILE: tl.constexpr, VARLEN: tl.constexpr):
    """(its number, batch entry, head, first row of the tensor, rows from there to the end of the sequence); rows <= 0: an unused number."""
    BLOCK_M: tl.constexpr = TILE.m
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    lane = index // blocks
    tile, entry, head, start, rows, _, _, _ = locate(
        index - lane * blocks, lane, heads_q, cu_q, cu_q, BLOCK_M, total_q, total_q, batch, VARLEN
    )
    return index, entry, head, start + tile * BLOCK_M, rows - tile * BLOCK_M


@triton.jit(do_not_specialize=SIZES, launch_metadata=before_metadata)
def attn_bwd_hopper_before(
    lse, out, dout, dlse, numbers, sums, turns, cu_q, total_q, batch, heads_q, blocks, TILE: tl.constexpr, VARLEN: tl.constexpr,
    NEGATIVE: tl.constexpr, FOURS: tl.constexpr,
):  # fmt: skip
    """out (and with it delta), dlse, sums and turns may be None. NEGATIVE: -delta is stored.
    FOURS: of 16 rows in the order of `in_fours` in layouts.py."""
    BLOCK_M: tl.constexpr = TILE.m
    BLOCK_DV: tl.constexpr = TILE.block_dv
    PARTS: tl.constexpr = TILE.m * TILE.block_d // 4096
    block, entry, head, row, rows = block_of_queries(cu_q, total_q, batch, heads_q, blocks, TILE, VARLEN)
    if rows > 0:
        offs_m = tl.arange(0, BLOCK_M)
        place_m = offs_m
        if FOURS:
            place_m = offs_m // 16 * 16 + offs_m // 2 % 4 * 4 + offs_m // 8 % 2 * 2 + offs_m % 2
        base = numbers + wide(block) * (2 * BLOCK_M) + place_m
        inside = offs_m < rows
        lse_M = tl.load(head_pointer(lse, entry, head, heads_q, total_q) + row + offs_m, mask=inside, other=float("-inf"))
        empty_M = lse_M == float("-inf")
        tl.store(base, tl.where(empty_M, float("inf"), lse_M * LOG2E))
        if out is not None:
            out_base = rows_pointer(out, entry, head, row, TILE.align)
            dout_base = rows_pointer(dout, entry, head, row, TILE.align)
            o_MV = load_tile(tile_pointers(out, out_base, BLOCK_M, BLOCK_DV, TILE.align), rows, TILE.head_dim_v, BLOCK_M, BLOCK_DV, True)
            do_MV = load_tile(tile_pointers(dout, dout_base, BLOCK_M, BLOCK_DV, TILE.align), rows, TILE.head_dim_v, BLOCK_M, BLOCK_DV, True)
            delta_M = tl.sum(o_MV.to(tl.float32) * do_MV.to(tl.float32), 1)
            if dlse is not None:
                delta_M -= load_row(head_pointer(dlse, entry, head, heads_q, total_q) + row, rows, BLOCK_M, True)
            if NEGATIVE:
                delta_M = -delta_M
            tl.store(base + BLOCK_M, tl.where(empty_M, 0.0, delta_M))
        if sums is not None:
            for part in tl.static_range(PARTS):
                tl.store(sums + (wide(block) * PARTS + part) * 4096 + tl.arange(0, 4096), tl.zeros([4096], tl.float32))
        if turns is not None:
            tl.store(turns + wide(block) * 2 + tl.arange(0, 2), tl.zeros([2], tl.int32))


@triton.jit
def undone(sums):
    """[64, 64] of a product of four warps from its numbers in the order (warp, 8 columns, row of 8, pair, half of 16 rows, of the pair)."""
    return sums.reshape(4, 8, 8, 4, 2, 2).permute(0, 4, 2, 1, 3, 5).reshape(64, 64)


@triton.jit
def write_half(sums, dq, entry, head, row, rows, scale, HALF: tl.constexpr, TILE: tl.constexpr):
    """64 x 64 of a block of dQ."""
    ACROSS: tl.constexpr = TILE.block_d // 64
    M0: tl.constexpr = HALF // ACROSS * 64
    D0: tl.constexpr = HALF % ACROSS * 64
    dq_MD = undone(tl.load(sums + HALF * 4096 + tl.arange(0, 4096))) * scale
    base = rows_pointer(dq, entry, head, row + M0, TILE.align) + D0
    store_tile(tile_pointers(dq, base, 64, 64, TILE.align), dq_MD, rows - M0, TILE.head_dim - D0, 64, 64)


@triton.jit(do_not_specialize=SIZES, launch_metadata=after_metadata)
def attn_bwd_hopper_after(sums, dq, cu_q, total_q, batch, heads_q, blocks, scale, TILE: tl.constexpr, VARLEN: tl.constexpr):
    """dq = scale * sums, of a block."""
    SUMS: tl.constexpr = TILE.m * TILE.block_d
    block, entry, head, row, rows = block_of_queries(cu_q, total_q, batch, heads_q, blocks, TILE, VARLEN)
    if rows > 0:
        for half in tl.static_range(SUMS // 4096):
            write_half(sums + wide(block) * SUMS, dq, entry, head, row, rows, scale, half, TILE)
