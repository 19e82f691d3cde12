"""What a warpgroup of the backward does with a block of queries: five products, of which two make operands for the others.

Legend: M queries of a block, N the 64 keys of a warpgroup, D query/key dim, V value dim. Transposed, s_NM = K q^T and dp_NM = V dO^T lie
in registers as p_NM and ds_NM are wanted there by dV += p_NM dO and dK += ds_NM q. For dQ = ds^T K the keys are summed over, and they
belong to two warpgroups: ds goes through shared memory, and each warpgroup makes half of dQ over the keys of both.

Ends of tensors. A row of queries that does not exist has lse = inf and delta = 0 from the preprocess, and zeros for q and dO (from TMA, or
by `clear_rows`), so for finite keys its p is exactly 0: no mask. A key that doesn't exist has a score of 0, whose p = exp(-lse) may
overflow: masked.

Who waits for whom. In lock step both warpgroups store their ds, meet, and read both: with two slots nobody overwrites what may be read, for
the products that read a slot were waited for before the meeting in between. Delayed, a warpgroup announces its ds of step i and makes dQ of
step i - 1, when the other has announced that: they never stand still, and may be one step apart. The surprising fact: this takes three
slots, and is safe only because a warpgroup waits for the other's ds of step i - 1 *before* it stores its own of step i. By then the other
has finished step i - 2, in which it made dQ of step i - 3 from the slot that is overwritten. Announcements alternate between two barriers,
for the other may announce step i + 1 before step i was taken note of.
Over 300 lines because the ways to order the five products share what they are made of.
Method: Shah et al. 2024 (FlashAttention-3), algorithm 3.
"""

from typing import NamedTuple

from ..common.dropout import left_gradient, unmarked
from ..common.score import biased, capped, score_gradient, score_weight, slope_of_head
from ..common.softmax import probabilities
from ..structs import Extras
from .channel import WARPGROUP, arrive, sync
from .cut import masked
from .distance import distances
from .drop import marked_transposed
from .gluon import async_add, barrier, fence_async_shared, gl, gluon, mbarrier, reinterpret, store_wait, warpgroup_mma, warpgroup_mma_wait
from .layouts import ROWS, accumulator, in_fours, operand, shared

# Hardware barriers. Triton takes 0 to 5 in a kernel of five partitions.
DQ_EMPTY = gl.constexpr(6)  # + warpgroup: its half of dQ has left shared memory
DQ_FULL = gl.constexpr(8)  # + warpgroup: and is there
DS = gl.constexpr(10)  # + 2 warpgroup + parity of the step: its ds is there; in lock step the first, where both meet
EMPTY = gl.constexpr(14)  # + slot of q and dO
BOTH = gl.constexpr(2 * WARPGROUP.value)
ONE_AND_WRITER = gl.constexpr(WARPGROUP.value + 32)
BOTH_AND_LOADER = gl.constexpr(2 * WARPGROUP.value + 32)

# Which blocks are masked (TILE.mask): none, all that are visited, those that need it, or the first, which alone does.
ALWAYS, BRANCH, ONCE = gl.constexpr(1), gl.constexpr(2), gl.constexpr(3)


class Memory(NamedTuple):
    """Shared memory: rings of k and v have a slot for each warpgroup's keys, those of q and dO `stages`, whose row numbers lie in `rows`.

    ds: [slot, warpgroup], M queries by 64 keys each, transposed. dq: a warpgroup's half of dQ on its way out, in the order of registers.
    """

    q: object
    do: object
    rows: object
    k: object
    v: object
    ds: object
    dq: object


@gluon.jit
def numbers(rows, slot, FIRST: gl.constexpr, TILE: gl.constexpr):
    """lse (FIRST = 0) or delta (1; -delta if dP starts from it) of the queries of a slot, one for each column of a product."""
    M: gl.constexpr = TILE.m
    SLOTS: gl.constexpr = 2 * TILE.stages
    LAYOUT: gl.constexpr = gl.SliceLayout(0, accumulator(M))
    flat = reinterpret(rows, gl.float32, [SLOTS, M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    row = flat.index(2 * slot + FIRST)
    if TILE.fours:
        row = reinterpret(row, gl.float32, [M], in_fours(M))
    return row.load(LAYOUT)


@gluon.jit
def transposed(tile, ROWS_OF: gl.constexpr, WIDTH: gl.constexpr):
    return reinterpret(tile, tile.dtype, [ROWS_OF, WIDTH], shared(WIDTH, 2)).permute((1, 0))


@gluon.jit
def clear_rows(tile, rows, N: gl.constexpr, WIDTH: gl.constexpr):
    """Zero the rows of a tile from `rows` on: they belong to the next sequence, and a factor of 0 would keep their NaN.

    Every warpgroup that reads the tile does it. What exists is written as it was read, while another may read it: all values agree.
    """
    PARTS: gl.constexpr = WIDTH // 64
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    columns = reinterpret(tile, tile.dtype, [PARTS, N, 64], shared(64, 2))
    exists_N = gl.arange(0, N, gl.SliceLayout(1, LAYOUT)) < rows
    for part in gl.static_range(PARTS):
        values = columns.index(part).load(LAYOUT)
        columns.index(part).store(gl.where(exists_N[:, None], values, gl.zeros_like(values)))


@gluon.jit
def start_dq(memory, turn, WARPGROUP_ID: gl.constexpr, TILE: gl.constexpr):
    """A warpgroup's half of dQ of a step, in flight: 64 of the 128 columns, or of 128 queries 64. Two products, one for 64 keys each."""
    D: gl.constexpr = TILE.d
    DTYPE: gl.constexpr = memory.k.tiles.dtype
    HALVES: gl.constexpr = TILE.m // 64
    SLOTS: gl.constexpr = 3 if TILE.delayed else 2
    slot = turn % SLOTS
    keys = reinterpret(memory.k.tiles, DTYPE, [D // 32, 64, 64], shared(64, 2))  # 64 columns of a warpgroup's keys
    ds = reinterpret(memory.ds, DTYPE, [SLOTS * 2 * HALVES, 64, 64], shared(64, 2))  # 64 queries of them
    dq = gl.zeros([64, 64], gl.float32, accumulator(64))
    for half in gl.static_range(2):
        if D == 128:
            of_keys, of_queries = 2 * half + WARPGROUP_ID, 0
        else:
            of_keys, of_queries = half, WARPGROUP_ID
        ds_MN = ds.index((slot * 2 + half) * HALVES + of_queries).permute((1, 0))
        dq = warpgroup_mma(ds_MN, keys.index(of_keys), dq, use_acc=half > 0, is_async=True)
    return dq


@gluon.jit
def send_dq(dq, memory, dq_desc, block, WARPGROUP_ID: gl.constexpr, TILE: gl.constexpr):
    """To shared memory, 16 contiguous bytes a thread (four numbers of its rows r and r + 8), and from there, all 16 KB contiguous, away."""
    tile = memory.dq.index(WARPGROUP_ID)
    if TILE.writers:
        sync(DQ_EMPTY + WARPGROUP_ID, ONE_AND_WRITER)
    else:
        store_wait(0)
    values = dq.reshape([4, 2, 8, 8, 4, 2]).permute((0, 3, 2, 4, 1, 5)).reshape([4096])
    reinterpret(tile, gl.float32, [4096], gl.SwizzledSharedLayout(1, 1, 1, [0])).store(values)
    fence_async_shared()
    if TILE.writers:
        arrive(DQ_FULL + WARPGROUP_ID, ONE_AND_WRITER)
    else:
        async_add(dq_desc, [(block * 2 + WARPGROUP_ID) * 16, 0], tile)


@gluon.jit
def start_s(memory, turn, visit, WARPGROUP_ID: gl.constexpr, TILE: gl.constexpr):
    """Scores of a block of queries, in flight. Of one behind the last step they are of what the slot held before, and nobody looks."""
    M: gl.constexpr = TILE.m
    D: gl.constexpr = TILE.d
    slot = turn % TILE.stages
    k_ND = reinterpret(memory.k.tiles.index(WARPGROUP_ID), memory.q.tiles.dtype, [ROWS, D], shared(D, 2))
    if turn < visit.steps:
        mbarrier.wait(memory.q.full.index(slot), (turn // TILE.stages) & 1)
    zeros_NM = gl.zeros([ROWS, M], gl.float32, accumulator(M))
    return warpgroup_mma(k_ND, transposed(memory.q.tiles.index(slot), M, D), zeros_NM, use_acc=False, is_async=True)


@gluon.jit
def mask_scores(s_NM, m0, visit, grid, FIRST: gl.constexpr, WARPGROUP_ID: gl.constexpr, SPEC: gl.constexpr, TILE: gl.constexpr):
    if TILE.mask == ALWAYS or (TILE.mask == ONCE and FIRST):
        s_NM = masked(s_NM, m0, visit, grid, WARPGROUP_ID, SPEC, TILE)
    elif TILE.mask == BRANCH:
        if (m0 < visit.full_lo) | (m0 >= visit.full_hi):
            s_NM = masked(s_NM, m0, visit, grid, WARPGROUP_ID, SPEC, TILE)
    return s_NM


@gluon.jit
def start(
    s_NM, memory, turn, place, visit, grid, scale_log2,
    FIRST: gl.constexpr, WARPGROUP_ID: gl.constexpr, SPEC: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """(p of a block, its weight, its dP in flight); without need of dQ and dK no dP. With dropout p and weight have the signs of `marked`.

    s_NM: its scores, if they were made ahead.
    """
    m0 = place.m0
    M: gl.constexpr = TILE.m
    D: gl.constexpr = TILE.d
    DV: gl.constexpr = TILE.dv
    NEED_DS: gl.constexpr = SPEC.need_dq or SPEC.need_dk
    DTYPE: gl.constexpr = memory.q.tiles.dtype
    slot = turn % TILE.stages
    full = (turn // TILE.stages) & 1
    k_ND = reinterpret(memory.k.tiles.index(WARPGROUP_ID), DTYPE, [ROWS, D], shared(D, 2))
    zeros_NM = gl.zeros([ROWS, M], gl.float32, accumulator(M))
    extras = Extras(
        grid.extras.inner, slope_of_head(grid.extras, visit.sequence, grid.batch, place.head, SPEC), None, None, grid.extras.cap
    )
    if not TILE.ahead:
        mbarrier.wait(memory.q.full.index(slot), full)
    if SPEC.varlen:
        if m0 + M > visit.rows_q:
            mbarrier.wait(memory.do.full.index(slot), full)
            clear_rows(memory.q.tiles.index(slot), visit.rows_q - m0, M, D)
            clear_rows(memory.do.tiles.index(slot), visit.rows_q - m0, M, DV)
            fence_async_shared()
            barrier()
    if TILE.ahead:  # a branch is cheap while no product is in flight; behind the sign of the scale, which turns -inf round
        gl.static_assert(not (SPEC.softcap or SPEC.alibi), "what is masked would be capped or biased again")
        s_NM = mask_scores(capped(s_NM, extras, SPEC, True), m0, visit, grid, FIRST, WARPGROUP_ID, SPEC, TILE)
    else:
        s_NM = warpgroup_mma(k_ND, transposed(memory.q.tiles.index(slot), M, D), zeros_NM, use_acc=False, is_async=True)
    mbarrier.wait(memory.do.full.index(slot), full)
    dp_NM = s_NM
    if NEED_DS:
        v_NV = reinterpret(memory.v.tiles.index(WARPGROUP_ID), DTYPE, [ROWS, DV], shared(DV, 2))
        do_VM = transposed(memory.do.tiles.index(slot), M, DV)
        if TILE.init:
            start_NM = gl.expand_dims(numbers(memory.rows, slot, 1, TILE), 0).broadcast_to([ROWS, M])
            dp_NM = warpgroup_mma(v_NV, do_VM, start_NM, is_async=True)
        else:
            dp_NM = warpgroup_mma(v_NV, do_VM, zeros_NM, use_acc=False, is_async=True)
        if not TILE.ahead:
            s_NM = warpgroup_mma_wait(1, deps=(s_NM,))
    elif not TILE.ahead:
        s_NM = warpgroup_mma_wait(0, deps=(s_NM,))
    t_NM = s_NM
    if not TILE.ahead:
        t_NM = capped(s_NM, extras, SPEC, True)
    distance_NM = None
    if SPEC.alibi:  # of keys from queries: its sign doesn't matter
        distance_NM = distances(s_NM, visit.n0 + WARPGROUP_ID * ROWS - m0 - visit.diagonal, M)
    s_NM = biased(t_NM, extras, distance_NM, None, SPEC)
    if not TILE.ahead:
        s_NM = mask_scores(s_NM, m0, visit, grid, FIRST, WARPGROUP_ID, SPEC, TILE)
    lse_M = numbers(memory.rows, slot, 0, TILE)  # read ahead, while s is in flight, it costs 3 %
    p_NM = probabilities(s_NM, gl.expand_dims(lse_M, 0), scale_log2)
    if SPEC.dropout:
        p_NM = marked_transposed(p_NM, m0, visit.n0 + WARPGROUP_ID * ROWS, visit.words, place.head, grid.extras.dropout, M)
    return p_NM, score_weight(p_NM, t_NM, SPEC), dp_NM


@gluon.jit
def finish_ds(weight_NM, dp_NM, memory, turn, grid, SPEC: gl.constexpr, TILE: gl.constexpr):
    """ds in 16 bits, when dP is there."""
    ds_NM = weight_NM
    if SPEC.need_dq or SPEC.need_dk:
        delta_M = 0.0
        if not TILE.init:
            delta_M = gl.expand_dims(numbers(memory.rows, turn % TILE.stages, 1, TILE), 0)
        dp_NM = warpgroup_mma_wait(0, deps=(dp_NM,))
        if SPEC.dropout:
            weight_NM, dp_NM = left_gradient(weight_NM, dp_NM, grid.extras.rescale)
        ds_NM = score_gradient(weight_NM, dp_NM, delta_M)
    return ds_NM.to(memory.q.tiles.dtype)


@gluon.jit
def add_dv(p_NM, memory, turn, dv_NV, SPEC: gl.constexpr, TILE: gl.constexpr):
    """dV + p dO, in flight. Returned with the operand, which must stay in its registers."""
    M: gl.constexpr = TILE.m
    DV: gl.constexpr = TILE.dv
    if SPEC.dropout:
        p_NM = unmarked(p_NM)
    p_NM = gl.convert_layout(p_NM.to(memory.q.tiles.dtype), operand(DV))
    if SPEC.need_dv:
        do_MV = reinterpret(memory.do.tiles.index(turn % TILE.stages), p_NM.dtype, [M, DV], shared(DV, 2))
        dv_NV = warpgroup_mma(p_NM, do_MV, dv_NV, is_async=True)
    return p_NM, dv_NV


@gluon.jit
def add_dk(ds_NM, memory, turn, dk_ND, SPEC: gl.constexpr, TILE: gl.constexpr):
    """dK + ds q, in flight, as add_dv."""
    M: gl.constexpr = TILE.m
    D: gl.constexpr = TILE.d
    ds_NM = gl.convert_layout(ds_NM, operand(D))
    if SPEC.need_dk:
        q_MD = reinterpret(memory.q.tiles.index(turn % TILE.stages), ds_NM.dtype, [M, D], shared(D, 2))
        dk_ND = warpgroup_mma(ds_NM, q_MD, dk_ND, is_async=True)
    return ds_NM, dk_ND


@gluon.jit
def store_ds(ds_NM, memory, turn, WARPGROUP_ID: gl.constexpr, TILE: gl.constexpr):
    SLOTS: gl.constexpr = 3 if TILE.delayed else 2
    memory.ds.index(turn % SLOTS * 2 + WARPGROUP_ID).store(ds_NM)
    fence_async_shared()
