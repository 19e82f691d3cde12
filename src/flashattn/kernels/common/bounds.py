"""Which tiles of the other side a tile has to visit, and which of those need no mask.

Query i and key j meet when -left <= j - (i + diagonal) <= right. Both questions, keys for a block of rows and rows for a block of
keys, return `lo, full_lo, full_hi, hi`, multiples of the block: one loop runs over [lo, hi) and masks a tile only outside
[full_lo, full_hi). (Three loops, one a range, need twice the registers.) The second question is the first one mirrored: left and right
change places and the diagonal its sign.
"""

import triton
import triton.language as tl


@triton.jit
def visited(first, last, rows, diagonal, before, after, BLOCK: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr):
    """Ranges on the walked side (`rows` of it) for the tile [first, last] of the other: before/after are the limits if there are any."""
    if BEFORE:
        lo = tl.maximum(first + diagonal - before, 0) // BLOCK * BLOCK
        full_lo = (tl.maximum(last + diagonal - before, 0) + BLOCK - 1) // BLOCK * BLOCK
    else:
        lo = rows * 0
        full_lo = lo
    if AFTER:
        hi = tl.maximum(tl.minimum(last + diagonal + after + 1, rows), 0)
        full_hi = tl.maximum(tl.minimum(first + diagonal + after + 1, rows), 0) // BLOCK * BLOCK
    else:
        hi = rows
        full_hi = rows // BLOCK * BLOCK
    hi = (hi + BLOCK - 1) // BLOCK * BLOCK
    lo = tl.minimum(lo, hi)
    full_lo = tl.minimum(full_lo, hi)
    full_hi = tl.maximum(tl.minimum(full_hi, hi), full_lo)
    return lo, full_lo, full_hi, hi


@triton.jit
def key_range(m0, rows_q, rows_k, diagonal, left, right, SPEC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Keys for the query rows [m0, m0 + BLOCK_M)."""
    last = tl.minimum(m0 + BLOCK_M, rows_q) - 1
    return visited(m0, last, rows_k, diagonal, left, right, BLOCK_N, SPEC.left, SPEC.right)


@triton.jit
def query_range(n0, rows_q, rows_k, diagonal, left, right, SPEC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Query rows for the keys [n0, n0 + BLOCK_N)."""
    last = tl.minimum(n0 + BLOCK_N, rows_k) - 1
    return visited(n0, last, rows_q, -diagonal, right, left, BLOCK_M, SPEC.right, SPEC.left)
