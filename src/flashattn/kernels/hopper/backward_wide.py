"""The backward on Hopper for head dims above 128: a program is 64 keys of one head. See backward.py, and gradient_wide.py for the steps.

Legend as there. The surprising fact: the 64 KB of a step's dQ go through 32 KB of shared memory, which the warpgroups use in turns, and
that is faster than adding straight from registers, 512 contiguous bytes a warp and instruction (red.v4), without any.
"""

from ..common.score import slope_of_head
from ..structs import Extras
from .channel import WARPGROUP, Ring, arrive, fill, make_barriers, make_ring, sync
from .gluon import async_load, async_store, barrier, fence_async_shared, gl, gluon, mbarrier, store_wait, warpgroup_mma_wait
from .gradient import BOTH, BOTH_AND_LOADER
from .gradient_wide import (
    DO,
    DQ_EMPTY,
    DQ_FULL,
    DS_FULL,
    P_FULL,
    Memory,
    Q,
    await_do,
    await_own,
    await_q,
    clear_block,
    columns,
    columns_of,
    first_column,
    part_at,
    part_of,
    stage,
    start_dp,
    start_dq,
    start_given,
    start_own,
    start_scores,
    store_ds,
    store_p,
)  # fmt: skip
from .layouts import ROWS, accumulator, rows_of, shared
from .send import send
from .visits import find, first_place, next_place


@gluon.jit
def load(q_desc, k_desc, v_desc, do_desc, rows_desc, memory, grid, SPEC: gl.constexpr, TILE: gl.constexpr):
    """The loading warp: K, then a block of queries with its row numbers, V, its dO, and so on."""
    NEED_DS: gl.constexpr = SPEC.need_dq or SPEC.need_dk
    PARTS: gl.constexpr = TILE.d // 64
    PARTS_V: gl.constexpr = TILE.dv // 64
    BYTES: gl.constexpr = 2 * ROWS * TILE.d + 8 * ROWS
    visit = find(grid, SPEC, TILE)
    if visit.steps > 0:
        fill(memory.k, 0, False, k_desc, visit.entry, visit.k_row, visit.head_kv, Q, 0, PARTS)
    place = first_place(visit, grid, SPEC, TILE)
    for turn in range(visit.steps):
        slot = turn % TILE.stages
        row = visit.q_row + place.m0
        if turn >= TILE.stages:
            sync(Q + slot, BOTH_AND_LOADER)
        full = memory.q.full.index(slot)
        mbarrier.expect(full, BYTES)
        async_load(rows_desc, [place.block, 0], full, memory.rows.index(slot))
        for part in gl.static_range(PARTS):
            async_load(q_desc, [visit.entry, row, place.head, 64 * part], full, memory.q.tiles.index(part_at(slot, part, PARTS)))
        if NEED_DS:
            if turn == 0:
                fill(memory.v, 0, False, v_desc, visit.entry, visit.k_row, visit.head_kv, Q, 0, PARTS_V)
        fill(
            memory.do, turn % TILE.do_stages, turn >= TILE.do_stages, do_desc, visit.entry, row, place.head, DO, 2 * WARPGROUP, PARTS_V
        )  # fmt: skip
        place = next_place(place, visit, grid, SPEC, TILE)


@gluon.jit
def write_columns(
    acc, ring, out, visit, heads_kv, WARPGROUP_ID: gl.constexpr, WIDTH: gl.constexpr, HEAD_DIM: gl.constexpr, SPEC: gl.constexpr
):
    """A warpgroup's columns of dK or dV, through the memory of K or V, which nobody reads any more. out: see backward.write_tile."""
    COLUMNS: gl.constexpr = acc.shape[1]
    FIRST: gl.constexpr = first_column(WIDTH, WARPGROUP_ID)
    tile = columns(ring, 0, FIRST, COLUMNS, WIDTH)
    tile.store(acc.to(tile.dtype))
    if SPEC.varlen:
        LAYOUT: gl.constexpr = rows_of(COLUMNS, 4)
        rows_N = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
        cols = FIRST + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))[None, :]
        offsets = ((visit.k_row + rows_N).to(gl.int64) * heads_kv + visit.head_kv) * HEAD_DIM + cols
        gl.store(out + offsets, tile.load(LAYOUT), mask=(rows_N < visit.keys) & (cols < HEAD_DIM))
    else:
        fence_async_shared()
        barrier()
        for part in gl.static_range(COLUMNS // 64):
            async_store(out, [visit.entry, visit.k_row, visit.head_kv, FIRST + 64 * part], ring.tiles.index(FIRST // 64 + part))


@gluon.jit
def write(dk_ND, dv_NV, memory, dk, dv, visit, grid, scale, WARPGROUP_ID: gl.constexpr, SPEC: gl.constexpr, TILE: gl.constexpr):
    sync(P_FULL, BOTH)  # the other warpgroup's last products have been made
    if SPEC.need_dv:
        write_columns(dv_NV, memory.v, dv, visit, grid.heads_kv, WARPGROUP_ID, TILE.dv, TILE.head_dim_v, SPEC)
    if SPEC.need_dk:
        write_columns(dk_ND * scale, memory.k, dk, visit, grid.heads_kv, WARPGROUP_ID, TILE.d, TILE.head_dim, SPEC)
    store_wait(0)


@gluon.jit
def make_p(memory, dk, dv, grid, scale, scale_log2, SPEC: gl.constexpr, TILE: gl.constexpr):
    """Warpgroup 0. An iteration finishes step i - 1 and begins step i."""
    SCORES: gl.constexpr = TILE.d // part_of(TILE.d)
    DQ: gl.constexpr = 1 if SPEC.need_dq else 0
    visit = find(grid, SPEC, TILE)
    dk_ND = gl.zeros([ROWS, columns_of(TILE.d, 0)], gl.float32, accumulator(columns_of(TILE.d, 0)))
    dv_NV = gl.zeros([ROWS, columns_of(TILE.dv, 0)], gl.float32, accumulator(columns_of(TILE.dv, 0)))
    if visit.steps > 0:
        place = first_place(visit, grid, SPEC, TILE)
        mbarrier.wait(memory.k.full.index(0), 0)
        clear_block(memory.k, 0, visit.keys, TILE.d, SPEC)
        await_q(memory, 0, TILE)
        clear_block(memory.q, 0, visit.rows_q - place.m0, TILE.d, SPEC)
        extras = Extras(
            grid.extras.inner, slope_of_head(grid.extras, visit.sequence, grid.batch, place.head, SPEC), None, None, grid.extras.cap
        )
        s_NM = warpgroup_mma_wait(0, deps=(start_scores(memory, 0, TILE),))
        first_p = store_p(s_NM, extras, memory, 0, place.m0, visit, grid, scale_log2, SPEC, TILE)
        if SPEC.need_dv:
            await_do(memory, 0, place.m0, visit, SPEC, TILE)
            dv_NV, first_op = start_own(first_p, memory.p.index(0), memory.do, 0, dv_NV, 0, TILE.dv, TILE)
            dv_NV = await_own(0, dv_NV, first_op, TILE)
            arrive(DO, BOTH_AND_LOADER)
        for turn in range(1, visit.steps):
            place = next_place(place, visit, grid, SPEC, TILE)
            extras = Extras(
                grid.extras.inner,
                slope_of_head(grid.extras, visit.sequence, grid.batch, place.head, SPEC),
                None,
                None,
                grid.extras.cap,
            )
            sync(DS_FULL, BOTH)
            if not SPEC.need_dv:
                arrive(DO + (turn - 1) % TILE.do_stages, BOTH_AND_LOADER)
            if SPEC.need_dk:
                dk_ND = start_given(memory.ds.index((turn - 1) % 2), memory.q, (turn - 1) % TILE.stages, dk_ND, 0, TILE.d)
            await_q(memory, turn, TILE)
            clear_block(memory.q, turn % TILE.stages, visit.rows_q - place.m0, TILE.d, SPEC)
            s_NM = start_scores(memory, turn, TILE)
            if SPEC.need_dk:
                dk_ND = warpgroup_mma_wait(SCORES, deps=(dk_ND,))
            arrive(Q + (turn - 1) % TILE.stages, BOTH_AND_LOADER)
            s_NM = warpgroup_mma_wait(0, deps=(s_NM,))
            p_NM = store_p(s_NM, extras, memory, turn, place.m0, visit, grid, scale_log2, SPEC, TILE)
            if SPEC.need_dv:
                await_do(memory, turn, place.m0, visit, SPEC, TILE)
                dv_NV, p_op = start_own(p_NM, memory.p.index(turn % 2), memory.do, turn % TILE.do_stages, dv_NV, 0, TILE.dv, TILE)
            if SPEC.need_dq:
                dq_MD = start_dq(memory, turn - 1, 0, TILE)
            if SPEC.need_dv:
                dv_NV = await_own(DQ, dv_NV, p_op, TILE)
                arrive(DO + turn % TILE.do_stages, BOTH_AND_LOADER)
            if SPEC.need_dq:
                dq_MD = warpgroup_mma_wait(0, deps=(dq_MD,))
                stage(dq_MD, memory, 0)
        last = visit.steps - 1
        sync(DS_FULL, BOTH)
        if SPEC.need_dk:
            dk_ND = start_given(memory.ds.index(last % 2), memory.q, last % TILE.stages, dk_ND, 0, TILE.d)
        if SPEC.need_dq:
            dq_MD = warpgroup_mma_wait(0, deps=(start_dq(memory, last, 0, TILE),))
            stage(dq_MD, memory, 0)
        if SPEC.need_dk:
            dk_ND = warpgroup_mma_wait(0, deps=(dk_ND,))
    write(dk_ND, dv_NV, memory, dk, dv, visit, grid, scale, 0, SPEC, TILE)


@gluon.jit
def make_ds(memory, dk, dv, grid, scale, SPEC: gl.constexpr, TILE: gl.constexpr):
    """Warpgroup 1. Without need of ds it makes dV alone, and DS_FULL says only that it has come so far."""
    NEED_DS: gl.constexpr = SPEC.need_dq or SPEC.need_dk
    LAYOUT: gl.constexpr = accumulator(ROWS)
    DK: gl.constexpr = 1 if SPEC.need_dk else 0
    DQ: gl.constexpr = 1 if SPEC.need_dq else 0
    DV: gl.constexpr = 1 if SPEC.need_dv else 0
    visit = find(grid, SPEC, TILE)
    dk_ND = gl.zeros([ROWS, columns_of(TILE.d, 1)], gl.float32, accumulator(columns_of(TILE.d, 1)))
    dv_NV = gl.zeros([ROWS, columns_of(TILE.dv, 1)], gl.float32, accumulator(columns_of(TILE.dv, 1)))
    if visit.steps > 0:
        mbarrier.wait(memory.k.full.index(0), 0)
        if NEED_DS:
            mbarrier.wait(memory.v.full.index(0), 0)
            clear_block(memory.v, 0, visit.keys, TILE.dv, SPEC)
    place = first_place(visit, grid, SPEC, TILE)
    for turn in range(visit.steps):
        if NEED_DS:
            await_q(memory, turn, TILE)
        await_do(memory, turn, place.m0, visit, SPEC, TILE)
        if NEED_DS:
            dp_NM = start_dp(memory, turn, TILE)
        sync(P_FULL, BOTH)
        if SPEC.need_dv:
            dv_NV = start_given(memory.p.index(turn % 2), memory.do, turn % TILE.do_stages, dv_NV, 1, TILE.dv)
        if NEED_DS:
            p_NM = memory.p.index(turn % 2).load(LAYOUT)
            dp_NM = warpgroup_mma_wait(DV, deps=(dp_NM,))
            ds_NM = store_ds(dp_NM, p_NM, memory, turn, TILE)
        else:
            arrive(DS_FULL, BOTH)
        if SPEC.need_dk:
            dk_ND, ds_op = start_own(ds_NM, memory.ds.index(turn % 2), memory.q, turn % TILE.stages, dk_ND, 1, TILE.d, TILE)
        if SPEC.need_dq:
            if TILE.own:
                barrier()
            dq_MD = start_dq(memory, turn, 1, TILE)
        if SPEC.need_dv:
            dv_NV = warpgroup_mma_wait(DK + DQ, deps=(dv_NV,))
        arrive(DO + turn % TILE.do_stages, BOTH_AND_LOADER)
        if SPEC.need_dk:
            dk_ND = await_own(DQ, dk_ND, ds_op, TILE)
        arrive(Q + turn % TILE.stages, BOTH_AND_LOADER)
        if SPEC.need_dq:
            dq_MD = warpgroup_mma_wait(0, deps=(dq_MD,))
            stage(dq_MD, memory, 1)
        place = next_place(place, visit, grid, SPEC, TILE)
    write(dk_ND, dv_NV, memory, dk, dv, visit, grid, scale, 1, SPEC, TILE)


@gluon.jit
def gradients_wide(
    q_desc, k_desc, v_desc, do_desc, rows_desc, dq_desc, dk, dv, turns, grid, scale, scale_log2, SPEC: gl.constexpr, TILE: gl.constexpr
):
    """The kernel attn_bwd_hopper for large head dims."""
    gl.static_assert(TILE.stages == 2, "scores are made before q of the step before is given back")
    REGISTERS: gl.constexpr = TILE.registers
    FEW: gl.constexpr = TILE.load_registers
    PARTS: gl.constexpr = TILE.d // 64
    PARTS_V: gl.constexpr = TILE.dv // 64
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(0, 32, 2)
    DTYPE: gl.constexpr = q_desc.dtype
    NEED_DS: gl.constexpr = SPEC.need_dq or SPEC.need_dk
    memory = Memory(
        make_ring(q_desc, TILE.stages, PARTS), make_ring(do_desc, TILE.do_stages, PARTS_V),
        gl.allocate_shared_memory(gl.float32, [TILE.stages, 1, 2 * ROWS], LAYOUT),
        make_ring(k_desc, 1, (PARTS + 1) // 2 * 2),  # seen as pairs of parts too
        Ring(gl.allocate_shared_memory(DTYPE, [PARTS_V, 1, ROWS, 1, 64], shared(64, 4)), make_barriers(1, 1)),  # dV leaves through it
        gl.allocate_shared_memory(DTYPE, [2, ROWS, ROWS], shared(ROWS, 2)),
        gl.allocate_shared_memory(DTYPE, [2, ROWS, ROWS], shared(ROWS, 2)) if NEED_DS else None,
        gl.allocate_shared_memory(gl.float32, [2, 16, 256], LAYOUT) if SPEC.need_dq else None,
    )  # fmt: skip
    fence_async_shared()
    if SPEC.need_dq:
        gl.warp_specialize([
            (make_p, (memory, dk, dv, grid, scale, scale_log2, SPEC, TILE)),
            (make_ds, (memory, dk, dv, grid, scale, SPEC, TILE)),
            (load, (q_desc, k_desc, v_desc, do_desc, rows_desc, memory, grid, SPEC, TILE)),
            (send, (dq_desc, turns, memory.dq, grid, 0, DQ_EMPTY, DQ_FULL, SPEC, TILE)),
            (send, (dq_desc, turns, memory.dq, grid, 1, DQ_EMPTY, DQ_FULL, SPEC, TILE)),
        ], [4, 1, 1, 1], [REGISTERS, FEW, FEW, FEW])  # fmt: skip
    else:
        gl.warp_specialize([
            (make_p, (memory, dk, dv, grid, scale, scale_log2, SPEC, TILE)),
            (make_ds, (memory, dk, dv, grid, scale, SPEC, TILE)),
            (load, (q_desc, k_desc, v_desc, do_desc, rows_desc, memory, grid, SPEC, TILE)),
        ], [4, 1], [REGISTERS, FEW])  # fmt: skip
