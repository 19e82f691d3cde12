"""The backward on Hopper: a program is 128 keys of one head, two warpgroups of 64 keys each compute, one warp loads, two send dQ away.

So for head dims up to 128; backward_wide.py has the others. Legend as in gradient.py. dK and dV stay in registers over all blocks of
queries and all query heads that read these keys; dQ is summed in global memory, in float32, by the copy engine: 16 KB at a time, in an
order that passes.py made zeros for and undoes.

The surprising facts: a plain grid, one program after the other on each multiprocessor, is a dynamic scheduler already, and the fastest that
was measured. And dQ alone depends on the order in which programs come, so only there a deterministic call has to wait: the writer of a tile
of keys lets others go first (`turns` counts them, one number for each half of a block of queries). It can't wait for ever, since a tile
waits for tiles of its head alone that started before it, as programs start in the order of their numbers (see visits.from_the_last), and
nothing else keeps a program from ending.
"""

from .backward_wide import gradients_wide
from .channel import Ring, fill, make_barriers, make_ring, sync
from .gluon import async_load, async_store, fence_async_shared, gl, gluon, mbarrier, reinterpret, store_wait, warpgroup_mma_wait
from .gradient import (
    BOTH,
    BOTH_AND_LOADER,
    DQ_EMPTY,
    DQ_FULL,
    DS,
    EMPTY,
    ONE_AND_WRITER,
    Memory,
    clear_rows,
    start_s,
)  # fmt: skip
from .layouts import ROWS, accumulator, rows_of, shared
from .profile import backward_metadata
from .send import send
from .steps import delayed_step, last_dq, step
from .visits import SIZES, Grid, find, first_place, next_place


@gluon.jit
def load(q_desc, k_desc, v_desc, do_desc, rows_desc, memory, grid, SPEC: gl.constexpr, TILE: gl.constexpr):
    """The loading warp: K, then a block of queries with its row numbers, V, its dO, and so on."""
    NEED_DS: gl.constexpr = SPEC.need_dq or SPEC.need_dk
    BYTES: gl.constexpr = 2 * TILE.m * TILE.d + 8 * TILE.m
    visit = find(grid, SPEC, TILE)
    if visit.steps > 0:
        for half in gl.static_range(2):
            fill(memory.k, half, False, k_desc, visit.entry, visit.k_row + half * ROWS, visit.head_kv, EMPTY, 0, 1)
    place = first_place(visit, grid, SPEC, TILE)
    for turn in range(visit.steps):
        slot = turn % TILE.stages
        if turn >= TILE.stages:
            sync(EMPTY + slot, BOTH_AND_LOADER)
        full = memory.q.full.index(slot)
        row = visit.q_row + place.m0
        mbarrier.expect(full, BYTES)
        async_load(q_desc, [visit.entry, row, place.head, 0], full, memory.q.tiles.index(slot))
        async_load(rows_desc, [place.block, 0], full, memory.rows.index(slot))
        if NEED_DS:
            if turn == 0:
                for half in gl.static_range(2):
                    fill(memory.v, half, False, v_desc, visit.entry, visit.k_row + half * ROWS, visit.head_kv, EMPTY, 0, 1)
        fill(memory.do, slot, False, do_desc, visit.entry, row, place.head, EMPTY, 0, 1)
        place = next_place(place, visit, grid, SPEC, TILE)


@gluon.jit
def write_tile(
    acc, memory, out, visit, heads_kv, WARPGROUP_ID: gl.constexpr, WIDTH: gl.constexpr, HEAD_DIM: gl.constexpr, SPEC: gl.constexpr
):
    """A warpgroup's dK or dV, through shared memory of its own. out: a descriptor, or of packed sequences a pointer."""
    tile = reinterpret(memory, memory.dtype, [ROWS, WIDTH], shared(WIDTH, 2))
    tile.store(acc.to(memory.dtype))
    row = visit.k_row + WARPGROUP_ID * ROWS
    if SPEC.varlen:  # a box of TMA may reach into the next sequence
        LAYOUT: gl.constexpr = rows_of(WIDTH, 4)
        rows_N = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
        cols = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))[None, :]
        offsets = ((row + rows_N).to(gl.int64) * heads_kv + visit.head_kv) * HEAD_DIM + cols
        inside = (rows_N < visit.keys - WARPGROUP_ID * ROWS) & (cols < HEAD_DIM)
        gl.store(out + offsets, tile.load(LAYOUT), mask=inside)
    else:
        fence_async_shared()
        whole = reinterpret(memory, memory.dtype, [1, ROWS, 1, WIDTH], shared(WIDTH, 4))
        async_store(out, [visit.entry, row, visit.head_kv, 0], whole)


@gluon.jit
def steps(
    dk_ND, dv_NV, s_NM, memory, dq_desc, first, place, visit, grid, scale_log2,
    WARPGROUP_ID: gl.constexpr, SPEC: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """All from number `first` on. The place is that of the step to come, in a delayed walk that of the step before."""
    for turn in range(first, visit.steps):
        if TILE.delayed:
            block = place.block
            place = next_place(place, visit, grid, SPEC, TILE)
            dk_ND, dv_NV, s_NM = delayed_step(
                dk_ND, dv_NV, s_NM, memory, dq_desc, turn, place, block, visit, grid, scale_log2, False, WARPGROUP_ID, SPEC, TILE
            )
        else:
            dk_ND, dv_NV, s_NM = step(
                dk_ND, dv_NV, s_NM, memory, dq_desc, turn, place, visit, grid, scale_log2, WARPGROUP_ID, SPEC, TILE
            )
            place = next_place(place, visit, grid, SPEC, TILE)
    return dk_ND, dv_NV, place


@gluon.jit
def compute(memory, dq_desc, dk, dv, grid, scale, scale_log2, WARPGROUP_ID: gl.constexpr, SPEC: gl.constexpr, TILE: gl.constexpr):
    """A warpgroup: dK and dV of its 64 keys, and half of what these 128 keys give to dQ."""
    NEED_DS: gl.constexpr = SPEC.need_dq or SPEC.need_dk
    D: gl.constexpr = TILE.d
    DV: gl.constexpr = TILE.dv
    M: gl.constexpr = TILE.m
    visit = find(grid, SPEC, TILE)
    dk_ND = gl.zeros([ROWS, D], gl.float32, accumulator(D))
    dv_NV = gl.zeros([ROWS, DV], gl.float32, accumulator(DV))
    if visit.steps > 0:
        for half in gl.static_range(2):
            mbarrier.wait(memory.k.full.index(half), 0)
        if NEED_DS:
            mbarrier.wait(memory.v.full.index(WARPGROUP_ID), 0)
        if SPEC.varlen:
            if visit.keys < TILE.n:  # the next sequence's keys: scores of theirs are masked, but dQ sums over all
                keys = visit.keys - WARPGROUP_ID * ROWS
                clear_rows(memory.k.tiles.index(WARPGROUP_ID), keys, ROWS, D)
                if NEED_DS:
                    clear_rows(memory.v.tiles.index(WARPGROUP_ID), keys, ROWS, DV)
                fence_async_shared()
                sync(DS, BOTH)  # a warpgroup reads the other's K
    place = first_place(visit, grid, SPEC, TILE)
    s_NM = gl.zeros([ROWS, M], gl.float32, accumulator(M))
    if TILE.ahead:
        if visit.steps > 0:
            s_NM = warpgroup_mma_wait(0, deps=(start_s(memory, 0, visit, WARPGROUP_ID, TILE),))
    if TILE.delayed:
        if visit.steps > 0:
            dk_ND, dv_NV, s_NM = delayed_step(
                dk_ND, dv_NV, s_NM, memory, dq_desc, 0, place, place.block, visit, grid, scale_log2, True, WARPGROUP_ID, SPEC, TILE
            )
            dk_ND, dv_NV, place = steps(dk_ND, dv_NV, s_NM, memory, dq_desc, 1, place, visit, grid, scale_log2, WARPGROUP_ID, SPEC, TILE)
            last_dq(memory, dq_desc, visit.steps - 1, place.block, WARPGROUP_ID, TILE)
    else:
        dk_ND, dv_NV, place = steps(dk_ND, dv_NV, s_NM, memory, dq_desc, 0, place, visit, grid, scale_log2, WARPGROUP_ID, SPEC, TILE)
    if SPEC.need_dv and SPEC.dropout:
        dv_NV = dv_NV * grid.extras.rescale
    if SPEC.need_dv:  # nobody else reads this V, and its last product is done
        write_tile(dv_NV, memory.v.tiles.index(WARPGROUP_ID), dv, visit, grid.heads_kv, WARPGROUP_ID, DV, TILE.head_dim_v, SPEC)
    if SPEC.need_dq:
        if TILE.writers:
            sync(DQ_EMPTY + WARPGROUP_ID, ONE_AND_WRITER)
        else:
            store_wait(0)
    if SPEC.need_dk:
        DTYPE: gl.constexpr = memory.k.tiles.dtype
        COPIES: gl.constexpr = 128 // D  # that fit in there
        tiles = reinterpret(memory.dq.index(WARPGROUP_ID), DTYPE, [COPIES, ROWS, D], shared(D, 2))
        write_tile(dk_ND * scale, tiles.index(0), dk, visit, grid.heads_kv, WARPGROUP_ID, D, TILE.head_dim, SPEC)
    store_wait(0)


@gluon.jit
def gradients(
    q_desc, k_desc, v_desc, do_desc, rows_desc, dq_desc, dk, dv, turns, grid, scale, scale_log2, SPEC: gl.constexpr, TILE: gl.constexpr
):
    """The kernel for head dims up to 128."""
    gl.static_assert(TILE.m * TILE.d == 8192, "each warpgroup makes 64 x 64 of dQ")
    gl.static_assert(TILE.writers or not TILE.ordered, "it is the writing warps that wait for their turn")
    REGISTERS: gl.constexpr = TILE.registers
    FEW: gl.constexpr = TILE.load_registers
    M: gl.constexpr = TILE.m
    DV: gl.constexpr = TILE.dv
    STAGES: gl.constexpr = TILE.stages
    SLOTS: gl.constexpr = 3 if TILE.delayed else 2
    NUMBERS: gl.constexpr = gl.NVMMASharedLayout(0, 32, 2)
    DTYPE: gl.constexpr = q_desc.dtype
    v = Ring(gl.allocate_shared_memory(DTYPE, [2, 1, ROWS, 1, DV], shared(DV, 4)), make_barriers(2, 1))  # dV leaves through it
    ds = gl.allocate_shared_memory(DTYPE, [2 * SLOTS, ROWS, M], shared(M, 2)) if SPEC.need_dq else None
    memory = Memory(
        make_ring(q_desc, STAGES, 1), make_ring(do_desc, STAGES, 1),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, 2 * M], NUMBERS),
        make_ring(k_desc, 2, 1), v, ds, gl.allocate_shared_memory(gl.float32, [2, 16, 256], NUMBERS),
    )  # fmt: skip
    fence_async_shared()
    if SPEC.need_dq and TILE.writers:
        gl.warp_specialize([
            (compute, (memory, dq_desc, dk, dv, grid, scale, scale_log2, 0, SPEC, TILE)),
            (compute, (memory, dq_desc, dk, dv, grid, scale, scale_log2, 1, SPEC, TILE)),
            (load, (q_desc, k_desc, v_desc, do_desc, rows_desc, memory, grid, SPEC, TILE)),
            (send, (dq_desc, turns, memory.dq, grid, 0, DQ_EMPTY, DQ_FULL, SPEC, TILE)),
            (send, (dq_desc, turns, memory.dq, grid, 1, DQ_EMPTY, DQ_FULL, SPEC, TILE)),
        ], [4, 1, 1, 1], [REGISTERS, FEW, FEW, FEW])  # fmt: skip
    else:
        gl.warp_specialize([
            (compute, (memory, dq_desc, dk, dv, grid, scale, scale_log2, 0, SPEC, TILE)),
            (compute, (memory, dq_desc, dk, dv, grid, scale, scale_log2, 1, SPEC, TILE)),
            (load, (q_desc, k_desc, v_desc, do_desc, rows_desc, memory, grid, SPEC, TILE)),
        ], [4, 1], [REGISTERS, FEW])  # fmt: skip


@gluon.jit(do_not_specialize=SIZES, launch_metadata=backward_metadata)
def attn_bwd_hopper(
    q_desc, k_desc, v_desc, do_desc, rows_desc, dq_desc, dk, dv, turns, seqlens, total_q, total_k, batch, heads_kv, group, lanes, wave,
    per_wave, blocks, left, right, scale, scale_log2, extras, SPEC: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """dK, dV (descriptors, or of packed sequences pointers) and the sums of dQ. What is not wanted, or not needed for it, is None."""
    gl.static_assert(TILE.stages <= 2, "there are named barriers for two slots")
    grid = Grid(seqlens.cu_q, seqlens.cu_k, total_q, total_k, batch, heads_kv, group, lanes, wave, per_wave, blocks, left, right, extras)
    if TILE.wide:
        gradients_wide(q_desc, k_desc, v_desc, do_desc, rows_desc, dq_desc, dk, dv, turns, grid, scale, scale_log2, SPEC, TILE)
    else:
        gradients(q_desc, k_desc, v_desc, do_desc, rows_desc, dq_desc, dk, dv, turns, grid, scale, scale_log2, SPEC, TILE)
