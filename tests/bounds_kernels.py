"""The kernels of test_bounds.py: the two questions of kernels/common/bounds.py, and the mask, for many tiles or pairs at once.

In a file of its own because a kernel is bound to the compiler or to the interpreter when its module is loaded. Both questions are
arithmetic on numbers, so a whole block of tiles is asked about in one go, a tile a lane.
"""

import triton
import triton.language as tl

from flashattn.kernels.common.bounds import key_range, query_range
from flashattn.kernels.common.mask import first_kept, keep_mask, last_key


@triton.jit
def bounds_kernel(
    first, rows_q, rows_k, left, right, out, tiles, SPEC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    OVER_KEYS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """out[4, tiles] = the range of what the tiles from `first` on visit: keys for query tiles, or with OVER_KEYS rows for key tiles."""
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = lane < tiles
    start = tl.load(first + lane, mask=inside, other=0)
    rows_q_ = tl.load(rows_q + lane, mask=inside, other=1)
    rows_k_ = tl.load(rows_k + lane, mask=inside, other=1)
    left_ = tl.load(left + lane, mask=inside, other=0)
    right_ = tl.load(right + lane, mask=inside, other=0)
    diagonal = rows_q_ * 0
    if not SPEC.top_left:
        diagonal = rows_k_ - rows_q_
    if OVER_KEYS:
        lo, full_lo, full_hi, hi = query_range(start, rows_q_, rows_k_, diagonal, left_, right_, SPEC, BLOCK_M, BLOCK_N)
    else:
        lo, full_lo, full_hi, hi = key_range(start, rows_q_, rows_k_, diagonal, left_, right_, SPEC, BLOCK_M, BLOCK_N)
    tl.store(out + lane, lo, mask=inside)
    tl.store(out + tiles + lane, full_lo, mask=inside)
    tl.store(out + 2 * tiles + lane, full_hi, mask=inside)
    tl.store(out + 3 * tiles + lane, hi, mask=inside)


@triton.jit
def mask_kernel(q_pos, k_pos, rows_k, left, right, out, pairs, SPEC: tl.constexpr, LANES: tl.constexpr):
    """out[2, pairs]: does the row at q_pos keep the key at k_pos? Asked of the pair, and of the row."""
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = lane < pairs
    q = tl.load(q_pos + lane, mask=inside, other=0)
    k = tl.load(k_pos + lane, mask=inside, other=0)
    rows = tl.load(rows_k + lane, mask=inside, other=1)
    left_ = tl.load(left + lane, mask=inside, other=0)
    right_ = tl.load(right + lane, mask=inside, other=0)
    tl.store(out + lane, keep_mask(q, k, k < rows, left_, right_, SPEC).to(tl.int32), mask=inside)
    keep = k <= last_key(q, rows, right_, SPEC)
    if SPEC.left:
        keep = keep & (k >= first_kept(q, left_))
    tl.store(out + pairs + lane, keep.to(tl.int32), mask=inside)
