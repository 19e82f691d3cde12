"""What a warpgroup does with a block of keys: products in flight, mask, softmax.

Legend as in forward.py. The surprising fact: in a step, S of this block and P V of the one before are both in flight, and the softmax of S
runs beside P V. So the loop carries P. Method: Shah et al. 2024 (FlashAttention-3), algorithms 1 and 2.
"""

from typing import NamedTuple

from ..common.mask import first_kept, last_key
from ..common.score import sink_of_head
from ..common.softmax import finite_shift, power, raise_maximum, rescaling
from .channel import EMPTY_K, EMPTY_V, WARPGROUP, arrive, pass_turn, take_turn
from .cut import cut
from .distance import bias_of_block, scores
from .drop import dropped
from .gluon import barrier, fence_async_shared, gl, gluon, mbarrier, reinterpret, warpgroup_mma, warpgroup_mma_wait
from .layouts import ROWS, accumulator, operand, rows_of, shared

SLACK = gl.constexpr(8.0)  # powers of two, or with a bias of e, that a score may lie above the maximum in use


class Call(NamedTuple):
    """What of the call a warpgroup has to know, for any tile."""

    total_q: object
    batch: object
    heads_q: object
    left: object
    right: object
    scale_log2: object
    extras: object
    cu_q: object


@gluon.jit
def release(EMPTY: gl.constexpr, slot, TILE: gl.constexpr):
    """A warpgroup has read a slot of K or V."""
    arrive(EMPTY + slot, WARPGROUP * TILE.consumers + 32)


@gluon.jit
def start_scores(q, k, slot, WARPGROUP_ID: gl.constexpr, TILE: gl.constexpr):
    """Q K^T of a block, in flight."""
    PARTS: gl.constexpr = TILE.d // TILE.part_d
    WIDTH: gl.constexpr = TILE.part_d
    N: gl.constexpr = TILE.n
    DTYPE: gl.constexpr = q.tiles.dtype
    s_MN = gl.zeros([ROWS, N], gl.float32, accumulator(N))
    for part in gl.static_range(PARTS):
        q_MD = reinterpret(q.tiles.index(WARPGROUP_ID * PARTS + part), DTYPE, [ROWS, WIDTH], shared(WIDTH, 2))
        k_ND = reinterpret(k.tiles.index(slot * PARTS + part), DTYPE, [N, WIDTH], shared(WIDTH, 2))
        s_MN = warpgroup_mma(q_MD, k_ND.permute((1, 0)), s_MN, use_acc=part > 0, is_async=True)
    return s_MN


@gluon.jit
def start_values(p_MN, v, slot, acc_MV, TILE: gl.constexpr):
    """acc + P V of a block, in flight."""
    N: gl.constexpr = TILE.n
    WIDTH: gl.constexpr = TILE.dv
    v_NV = reinterpret(v.tiles.index(slot), v.tiles.dtype, [N, WIDTH], shared(WIDTH, 2))
    return warpgroup_mma(p_MN, v_NV, acc_MV, is_async=True)


@gluon.jit
def masked(s_MN, position, n0, rows_k, call, SPEC: gl.constexpr, TILE: gl.constexpr):
    """Scores of the block at key n0, -inf where the mask says no. Each side is asked where it can say no: few blocks lie on both edges.

    position: of the diagonal in the warpgroup's first row. Made to look as if it changed from block to block, or the compiler would keep in
    registers, of which a tile has none to spare, what follows from it.
    """
    end = n0 + TILE.n
    here = position
    if TILE.mask_loop:
        here = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [position, n0], dtype=gl.int32, is_pure=True, pack=1)
    q_pos_M = here + gl.arange(0, ROWS, gl.SliceLayout(1, s_MN.type.layout))
    if SPEC.ragged or SPEC.left or SPEC.right:
        if end > last_key(position, rows_k, call.right, SPEC) + 1:
            s_MN = cut(s_MN, last_key(q_pos_M, rows_k, call.right, SPEC) - n0, True, TILE.n)
    if SPEC.left:
        if n0 < first_kept(position + (ROWS - 1), call.left):
            s_MN = cut(s_MN, first_kept(q_pos_M, call.left) - n0, False, TILE.n)
    return s_MN


@gluon.jit
def pin(x):
    """x, which now must be computed before whatever waits next: a store that needs it, and that never happens.

    Without it the compiler sinks the row maximum below the wait for P V, and both stand still.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 a; mov.b32 a, 0; setp.eq.b32 p, $1, 0x7fabcdef; @p st.shared.b32 [a], $1; mov.b32 $0, $1; }",
        "=r,r", [x], dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def partial_sums(p_MN, TILE: gl.constexpr):
    """Row sums as far as one thread has the elements: [M, 8]. The rest of the sum waits for the end of the tile."""
    GROUPS: gl.constexpr = TILE.n // 8
    return gl.sum(p_MN.reshape([ROWS, GROUPS, 8]), 1)


@gluon.jit
def carried(p_MN, DTYPE: gl.constexpr, TILE: gl.constexpr):
    """Probabilities as the loop carries them, in 16 bits: as an operand, or two columns to a number, [M, N / 2]."""
    PAIRS: gl.constexpr = TILE.n // 2
    if TILE.paired:
        CONVERT: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if gl.bfloat16 == DTYPE else "cvt.rn.f16x2.f32 $0, $2, $1;"
        even, odd = p_MN.reshape([ROWS, PAIRS, 2]).split()
        p = gl.inline_asm_elementwise(CONVERT, "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1)
    else:
        p = gl.convert_layout(p_MN.to(DTYPE), operand(TILE.dv))
    return p


@gluon.jit
def as_operand(p, DTYPE: gl.constexpr, TILE: gl.constexpr):
    """What `carried` gave, in the registers where a product wants it."""
    N: gl.constexpr = TILE.n
    if TILE.paired:
        even, odd = gl.inline_asm_elementwise("mov.b32 {$0, $1}, $2;", "=h,=h,r", [p], dtype=(gl.int16, gl.int16), is_pure=True, pack=1)
        p_MN = gl.join(even.to(DTYPE, bitcast=True), odd.to(DTYPE, bitcast=True)).reshape([ROWS, N])
        p_MN = gl.convert_layout(p_MN, operand(TILE.dv))
    else:
        p_MN = p
    return p_MN


@gluon.jit
def clear_past(v, slot, rows, TILE: gl.constexpr):
    """Zero the rows of a block of V from `rows` on: they belong to the next sequence, and a probability of 0 would keep their NaN.

    Every warpgroup does it for itself. What exists is written as it was read, while another may read it: a race in which all values agree.
    """
    WIDTH: gl.constexpr = 64
    PARTS: gl.constexpr = TILE.dv // WIDTH
    N: gl.constexpr = TILE.n
    LAYOUT: gl.constexpr = rows_of(WIDTH, 4)
    columns = reinterpret(v.tiles.index(slot), v.tiles.dtype, [PARTS, N, WIDTH], shared(WIDTH, 2))
    exists_N = gl.arange(0, N, gl.SliceLayout(1, LAYOUT)) < rows
    for part in gl.static_range(PARTS):
        tile = columns.index(part).load(LAYOUT)
        columns.index(part).store(gl.where(exists_N[:, None], tile, gl.zeros_like(tile)))
    fence_async_shared()
    barrier()


@gluon.constexpr_function
def rescale(count):
    """(PTX, constraints) of $0.. = $count.. times $2count.., count numbers of two rows, for a warp whose factors are not all 1."""
    first, second = f"${2 * count}", f"${2 * count + 2}"  # an accumulator has two neighbours of a row, two of the other, and so on
    ask = f"setp.neu.f32 p, {first}, 0f3F800000; setp.neu.or.f32 p, {second}, 0f3F800000, p; vote.sync.any.pred p, p, 0xffffffff;"
    moves = "".join(f"mov.b32 ${i}, ${count + i};" for i in range(count))
    products = "".join(f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count))
    return f"{{ .reg .pred p; {ask} {moves} @!p bra DONE; {products} DONE: }}", ",".join(["=&f"] * count + ["f"] * 2 * count)


@gluon.jit
def rescaled(acc_MV, alpha_M, TILE: gl.constexpr):
    """acc with its rows multiplied. A branch of a warp inside one instruction, because one of Triton's would be of the whole warpgroup."""
    COUNT: gl.constexpr = TILE.dv // 2  # numbers of a thread
    PTX: gl.constexpr = rescale(COUNT)
    alpha_MV = gl.convert_layout(alpha_M, gl.SliceLayout(1, accumulator(TILE.dv)))[:, None]
    if TILE.lazy:
        acc_MV = gl.inline_asm_elementwise(PTX[0], PTX[1], [acc_MV, alpha_MV], dtype=gl.float32, is_pure=True, pack=COUNT)
    else:
        acc_MV = acc_MV * alpha_MV
    return acc_MV


@gluon.jit
def unseen_blocks(position, blocks, hi, call, TILE: gl.constexpr):
    """How many of a tile's blocks, from the last one on, lie right of the diagonal for all rows of a warpgroup. At most all but one,
    since a warpgroup without keys still needs a block to start from.

    Behind them a diagonal that is aligned to 64 crosses one block of a warpgroup's, whatever the extent of the tile.
    """
    end = (position + ROWS + call.right + TILE.n - 1) // TILE.n * TILE.n
    return gl.minimum(gl.maximum((hi - end) // TILE.n, 0), blocks - 1)


@gluon.jit
def seen_blocks(position, first, blocks, hi, call, TILE: gl.constexpr):
    """How many of a tile's blocks, from the last one on, are not left of the window for all rows of a warpgroup; at least first + 1."""
    start = gl.maximum(first_kept(position, call.left), 0)
    return gl.minimum(gl.maximum((hi - start + TILE.n - 1) // TILE.n, first + 1), blocks)


@gluon.jit
def skip_block(k, v, use, WARPGROUP_ID: gl.constexpr, TILE: gl.constexpr):
    """Gives a block back unread. It must have come: the slot may still be on its way to the readers of the block before."""
    slot = use % TILE.stages
    full = (use // TILE.stages) & 1
    mbarrier.wait(k.full.index(slot), full)
    take_turn(WARPGROUP_ID)
    pass_turn(WARPGROUP_ID, TILE)
    release(EMPTY_K, slot, TILE)
    mbarrier.wait(v.full.index(slot), full)
    release(EMPTY_V, slot, TILE)


@gluon.jit
def first_block(
    q, k, v, use, block, position, task, call, extras, drawn, WARPGROUP_ID: gl.constexpr, SPEC: gl.constexpr, TILE: gl.constexpr
):
    """(p, m, l) of the first block that a warpgroup visits, the `block`-th from the last; its product with V not yet started.

    A sink is where the maximum starts, and joins l at the end. drawn: of dropout, which leaves l alone; see `draw_of`.
    """
    slot = use % TILE.stages
    full = (use // TILE.stages) & 1
    hi = task.hi - block * TILE.n
    mbarrier.wait(k.full.index(slot), full)
    take_turn(WARPGROUP_ID)
    s_MN = start_scores(q, k, slot, WARPGROUP_ID, TILE)
    pass_turn(WARPGROUP_ID, TILE)
    bias_MN = None
    if SPEC.bias:
        m0 = task.row + WARPGROUP_ID * ROWS
        bias_MN = bias_of_block(extras, m0, hi - TILE.n, call.total_q, task.rows_k, SPEC, TILE.n, TILE.bias_align)
    s_MN = warpgroup_mma_wait(0, deps=(s_MN,))
    release(EMPTY_K, slot, TILE)
    s_MN = scores(s_MN, extras, position - hi + TILE.n, bias_MN, SPEC, TILE.n)
    s_MN = masked(s_MN, position, hi - TILE.n, task.rows_k, call, SPEC, TILE)
    m_M = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, accumulator(TILE.n)))
    if SPEC.sinks:
        m_M = gl.maximum(m_M, sink_of_head(call.extras, task.entry, call.batch, task.head, SPEC))
    m_M = raise_maximum(s_MN, m_M, call.scale_log2, SPEC)
    p_MN = power(s_MN, finite_shift(m_M), call.scale_log2, SPEC)
    if SPEC.varlen:
        if hi > task.rows_k:
            mbarrier.wait(v.full.index(slot), full)
            clear_past(v, slot, TILE.n + task.rows_k - hi, TILE)
    kept_MN = p_MN
    if SPEC.dropout:
        kept_MN = dropped(p_MN, drawn, hi - TILE.n, TILE.n)
    return carried(kept_MN, v.tiles.dtype, TILE), m_M, partial_sums(p_MN, TILE)


@gluon.jit
def next_block(
    p, m_M, l_MC, acc_MV, q, k, v, use, block, position, task, call, extras, drawn,
    WARPGROUP_ID: gl.constexpr, SPEC: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Adds P V of the block before to acc, and makes (p, m, l) of this one meanwhile."""
    slot = use % TILE.stages
    slot_v = (use - 1) % TILE.stages
    mbarrier.wait(k.full.index(slot), (use // TILE.stages) & 1)
    take_turn(WARPGROUP_ID)
    s_MN = start_scores(q, k, slot, WARPGROUP_ID, TILE)
    mbarrier.wait(v.full.index(slot_v), ((use - 1) // TILE.stages) & 1)
    p_MN = as_operand(p, v.tiles.dtype, TILE)
    acc_MV = start_values(p_MN, v, slot_v, acc_MV, TILE)
    pass_turn(WARPGROUP_ID, TILE)
    bias_MN = None
    if SPEC.bias:
        m0, n0 = task.row + WARPGROUP_ID * ROWS, task.hi - (block + 1) * TILE.n
        bias_MN = bias_of_block(extras, m0, n0, call.total_q, task.rows_k, SPEC, TILE.n, TILE.bias_align)
    s_MN = warpgroup_mma_wait(1, deps=(s_MN,))
    if not TILE.pinned:
        release(EMPTY_K, slot, TILE)
    s_MN = scores(s_MN, extras, position - task.hi + (block + 1) * TILE.n, bias_MN, SPEC, TILE.n)
    if TILE.mask_loop:
        s_MN = masked(s_MN, position, task.hi - (block + 1) * TILE.n, task.rows_k, call, SPEC, TILE)
    m_new_M = raise_maximum(s_MN, m_M, call.scale_log2, SPEC)
    if TILE.lazy:
        m_new_M = gl.where(m_new_M - m_M > SLACK, m_new_M, m_M)
    if TILE.pinned:
        m_new_M = pin(m_new_M)
        release(EMPTY_K, slot, TILE)
    shift_M = finite_shift(m_new_M)
    alpha_M = rescaling(m_M, shift_M, call.scale_log2, SPEC)
    next_p_MN = power(s_MN, shift_M, call.scale_log2, SPEC)
    sums_MC = partial_sums(next_p_MN, TILE)
    l_MC = l_MC * gl.convert_layout(alpha_M, gl.SliceLayout(1, sums_MC.type.layout))[:, None] + sums_MC
    if SPEC.dropout:
        next_p_MN = dropped(next_p_MN, drawn, task.hi - (block + 1) * TILE.n, TILE.n)
    acc_MV, p_MN = warpgroup_mma_wait(0, deps=(acc_MV, p_MN))
    release(EMPTY_V, slot_v, TILE)
    acc_MV = rescaled(acc_MV, alpha_M, TILE)
    return carried(next_p_MN, v.tiles.dtype, TILE), m_new_M, l_MC, acc_MV
