"""The forward on Hopper: one warp loads, two or three warpgroups of 64 query rows each compute, and the program walks a queue of tiles.

Legend: M query rows of a warpgroup, N keys of a block, D query/key dim, V value dim, C the 8 columns of partial row sums. A tile is
`consumers` x M rows of one head. Blocks of keys are walked from the last to the first, since the ragged end and the causal diagonal, which
need a mask, are last.

The surprising fact: each warpgroup has its own copy of the code, since Triton compiles a partition for each entry of warp_specialize. So
instructions are dear here: a second loop for masked blocks costs more than the branch that saves it.
"""

from ..common.score import bias_of_head, sink_of_head, slope_of_head
from ..common.softmax import finite_shift, natural_lse, rescaling
from ..structs import Extras
from .block import Call, as_operand, first_block, next_block, release, seen_blocks, skip_block, start_values, unseen_blocks
from .channel import (
    EMPTY_K,
    EMPTY_Q,
    EMPTY_V,
    WARPGROUP,
    arrive,
    await_task,
    fill,
    forget,
    make_ring,
    make_tasks,
    pass_turn,
    publish,
    take_turn,
    task_of,
)  # fmt: skip
from .drop import draw_of
from .gluon import async_store, fence_async_shared, gl, gluon, mbarrier, reinterpret, store_wait, warpgroup_mma_wait
from .layouts import ROWS, accumulator, rows_of, shared
from .profile import forward_metadata
from .walk import SIZES, Walk, draw, find, leave


@gluon.jit
def entry_of(task, SPEC: gl.constexpr):
    """Entry of the batch in tensors. That of a packed task is its sequence where one is asked for."""
    return task.entry * 0 if SPEC.varlen and (SPEC.alibi or SPEC.sinks or SPEC.dropout) else task.entry


@gluon.jit
def load(q_desc, k_desc, v_desc, q, k, v, tasks, walk, SPEC: gl.constexpr, TILE: gl.constexpr):
    """The loading warp: Q of a tile after its first K, then K one block ahead of V, as the products need them."""
    CONSUMERS: gl.constexpr = TILE.consumers
    PARTS: gl.constexpr = TILE.d // TILE.part_d
    READERS: gl.constexpr = WARPGROUP * CONSUMERS
    index, task, k_end = find(gl.program_id(0), walk, SPEC, TILE)
    publish(tasks, 0, task)
    turn = 0
    used = 0  # blocks loaded so far
    while task.blocks > 0:
        entry, head_kv = entry_of(task, SPEC), task.head // walk.group
        row = k_end - TILE.n
        turn += 1
        following = index
        for j in range(task.blocks):
            use = used + j
            if TILE.lead == 2:
                if j == task.blocks - 1:
                    following = draw(index, walk, TILE)
            fill(k, use % TILE.stages, use >= TILE.stages, k_desc, entry, row, head_kv, EMPTY_K, READERS, PARTS)
            if j == 0:
                for warpgroup in gl.static_range(CONSUMERS):
                    fill(q, warpgroup, turn > 1, q_desc, entry, task.row + warpgroup * ROWS, task.head, EMPTY_Q, WARPGROUP, PARTS)
            else:
                before = use - 1
                fill(v, before % TILE.stages, before >= TILE.stages, v_desc, entry, row + TILE.n, head_kv, EMPTY_V, READERS, 1)
            row -= TILE.n
        used += task.blocks
        last = used - 1
        if TILE.lead == 1:
            following = draw(index, walk, TILE)
        fill(v, last % TILE.stages, last >= TILE.stages, v_desc, entry, row + TILE.n, head_kv, EMPTY_V, READERS, 1)
        if TILE.lead == 0:
            following = draw(index, walk, TILE)
        index, task, k_end = find(following, walk, SPEC, TILE)
        publish(tasks, turn, task)
    leave(walk, TILE)


@gluon.jit
def write(acc_MV, m_M, l_MC, out, lse, out_tile, task, call, WARPGROUP_ID: gl.constexpr, SPEC: gl.constexpr, TILE: gl.constexpr):
    """out and lse of a warpgroup's rows, as far as they exist."""
    entry, head, row, rows = entry_of(task, SPEC), task.head, task.row + WARPGROUP_ID * ROWS, task.rows - WARPGROUP_ID * ROWS
    WIDTH: gl.constexpr = TILE.dv
    sum_M = gl.sum(l_MC, 1)
    if SPEC.sinks:
        sink = sink_of_head(call.extras, task.entry, call.batch, head, SPEC)
        sum_M += gl.convert_layout(rescaling(sink, finite_shift(m_M), call.scale_log2, SPEC), sum_M.type.layout)
    l_M = gl.convert_layout(sum_M, gl.SliceLayout(1, accumulator(WIDTH)))
    empty_M = l_M == 0.0
    rescale = 1.0
    if SPEC.dropout:
        rescale = call.extras.rescale
    acc_MV = acc_MV * (rescale / gl.where(empty_M, 1.0, l_M))[:, None]  # off by 2 ulp of float32, which 16 bits don't show
    if SPEC.ragged or SPEC.left or SPEC.right or SPEC.bias:
        acc_MV = gl.where(empty_M[:, None], 0.0, acc_MV)
    out_MV = reinterpret(out_tile, out_tile.dtype, [ROWS, WIDTH], shared(WIDTH, 2))
    if SPEC.varlen:  # a box of TMA may reach into the next sequence
        out_MV.store(acc_MV.to(out_tile.dtype))
        LAYOUT: gl.constexpr = rows_of(WIDTH, 4)
        rows_M = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
        cols_V = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))[None, :]
        # offsets made of the tile's row: those of a tile's rows alone would be kept in registers from tile to tile
        offsets = ((row + rows_M) * call.heads_q + head).to(gl.int64) * TILE.head_dim_v + cols_V
        gl.store(out + offsets, out_MV.load(LAYOUT), mask=(rows_M < rows) & (cols_V < TILE.head_dim_v))
        if TILE.alias:
            fence_async_shared()
    else:
        if not TILE.alias:
            store_wait(0)  # the tile before has left
        out_MV.store(acc_MV.to(out_tile.dtype))
        fence_async_shared()
        async_store(out, [entry, row, head, 0], out_tile)
        if TILE.alias:
            store_wait(0)
    offs_m = gl.arange(0, ROWS, m_M.type.layout)  # last: acc has gone, and its registers are free
    lse_M = natural_lse(m_M, gl.convert_layout(sum_M, m_M.type.layout), SPEC)
    gl.store(lse + ((entry * call.heads_q + head) * call.total_q + row + offs_m), lse_M, mask=offs_m < rows)


@gluon.jit
def compute(q, k, v, tasks, out_tiles, out, lse, call, WARPGROUP_ID: gl.constexpr, SPEC: gl.constexpr, TILE: gl.constexpr):
    """A warpgroup: its 64 rows of one tile after the other."""
    WIDTH: gl.constexpr = TILE.dv
    blocks = await_task(tasks, 0)
    turn = 0
    used = 0  # blocks folded so far
    if TILE.consumers - 1 == WARPGROUP_ID:  # the first warpgroup goes first
        pass_turn(WARPGROUP_ID, TILE)
    while blocks > 0:
        task = task_of(tasks, turn)
        position = task.position + WARPGROUP_ID * ROWS
        extras = Extras(
            call.extras.inner, slope_of_head(call.extras, task.entry, call.batch, task.head, SPEC), None, None, call.extras.cap,
            bias_of_head(call.extras, task.entry, task.head, SPEC), None, None, call.extras.bias_stride_m, call.extras.bias_stride_n,
        )  # fmt: skip
        drawn = None
        if SPEC.dropout:
            drawn = draw_of(call, task, WARPGROUP_ID, SPEC, TILE)
        first = 0
        missed = 0  # blocks left of the window; a tile of two warpgroups has none or, at head dim 256, no registers to tell
        if SPEC.right:
            first = unseen_blocks(position, blocks, task.hi, call, TILE)
            for block in range(first):
                skip_block(k, v, used + block, WARPGROUP_ID, TILE)
        if SPEC.left and TILE.consumers == 3:
            missed = blocks - seen_blocks(position, first, blocks, task.hi, call, TILE)
        mbarrier.wait(q.full.index(WARPGROUP_ID), turn & 1)
        p, m_M, l_MC = first_block(q, k, v, used + first, first, position, task, call, extras, drawn, WARPGROUP_ID, SPEC, TILE)
        acc_MV = gl.zeros([ROWS, WIDTH], gl.float32, accumulator(WIDTH))
        for block in range(first + 1, blocks - missed):
            p, m_M, l_MC, acc_MV = next_block(
                p, m_M, l_MC, acc_MV, q, k, v, used + block, block, position, task, call, extras, drawn, WARPGROUP_ID, SPEC, TILE
            )
        if not TILE.alias:
            arrive(EMPTY_Q + WARPGROUP_ID, WARPGROUP + 32)
        used += blocks
        last = used - missed - 1
        slot = last % TILE.stages
        mbarrier.wait(v.full.index(slot), (last // TILE.stages) & 1)
        p_MN = as_operand(p, v.tiles.dtype, TILE)
        acc_MV = start_values(p_MN, v, slot, acc_MV, TILE)
        blocks = await_task(tasks, turn + 1)  # beside the last product
        acc_MV, p_MN = warpgroup_mma_wait(0, deps=(acc_MV, p_MN))
        release(EMPTY_V, slot, TILE)
        if SPEC.left and TILE.consumers == 3:
            for use in range(used - missed, used):
                skip_block(k, v, use, WARPGROUP_ID, TILE)
        task = task_of(tasks, turn)
        forget(tasks, turn)
        out_tile = out_tiles.index((WARPGROUP_ID * TILE.d + TILE.dv - 1) // TILE.dv if TILE.alias else WARPGROUP_ID)
        write(acc_MV, m_M, l_MC, out, lse, out_tile, task, call, WARPGROUP_ID, SPEC, TILE)
        turn += 1
        if TILE.alias:
            arrive(EMPTY_Q + WARPGROUP_ID, WARPGROUP + 32)
    if WARPGROUP_ID == 0:  # as many syncs as arrivals
        take_turn(WARPGROUP_ID)
    if not SPEC.varlen:
        store_wait(0)


@gluon.jit(do_not_specialize=SIZES, launch_metadata=forward_metadata)
def attn_fwd_hopper(
    q_desc, k_desc, v_desc, out, lse, seqlens, counter, total_q, total_k, batch, heads_q, group, slots, lanes, wave, per_wave, tiles,
    left, right, scale_log2, extras, SPEC: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """out = softmax(scale * q k^T, masked) v and lse. out: a descriptor, or of packed sequences a pointer."""
    PARTS: gl.constexpr = TILE.d // TILE.part_d
    REGISTERS: gl.constexpr = TILE.registers
    gl.static_assert(TILE.stages <= 2, "there are named barriers for two slots")
    gl.static_assert(TILE.lead <= 2)
    gl.static_assert(TILE.consumers == 2 or TILE.n >= 128, "a warpgroup may miss one block of a tile, and waits for the next tile before")
    LOAD_REGISTERS: gl.constexpr = TILE.load_registers
    walk = Walk(
        seqlens.cu_q, seqlens.cu_k, total_q, total_k, batch, heads_q, group, slots, lanes, wave, per_wave, tiles, left, right, counter
    )
    call = Call(total_q, batch, heads_q, left, right, scale_log2, extras, seqlens.cu_q)
    q = make_ring(q_desc, TILE.consumers, PARTS)
    k = make_ring(k_desc, TILE.stages, PARTS)
    v = make_ring(v_desc, TILE.stages, 1)
    tasks = make_tasks(TILE.consumers)
    WIDTH: gl.constexpr = TILE.dv
    SLOTS: gl.constexpr = TILE.consumers * TILE.d // WIDTH if TILE.alias else TILE.consumers
    if TILE.alias:
        out_tiles = reinterpret(q.tiles, q_desc.dtype, [SLOTS, 1, ROWS, 1, WIDTH], shared(WIDTH, 4))
    else:
        out_tiles = gl.allocate_shared_memory(q_desc.dtype, [SLOTS, 1, ROWS, 1, WIDTH], shared(WIDTH, 4))
    fence_async_shared()
    if TILE.consumers == 2:
        gl.warp_specialize([
            (compute, (q, k, v, tasks, out_tiles, out, lse, call, 0, SPEC, TILE)),
            (compute, (q, k, v, tasks, out_tiles, out, lse, call, 1, SPEC, TILE)),
            (load, (q_desc, k_desc, v_desc, q, k, v, tasks, walk, SPEC, TILE)),
        ], [4, 1], [REGISTERS, LOAD_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (compute, (q, k, v, tasks, out_tiles, out, lse, call, 0, SPEC, TILE)),
            (compute, (q, k, v, tasks, out_tiles, out, lse, call, 1, SPEC, TILE)),
            (compute, (q, k, v, tasks, out_tiles, out, lse, call, 2, SPEC, TILE)),
            (load, (q_desc, k_desc, v_desc, q, k, v, tasks, walk, SPEC, TILE)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, LOAD_REGISTERS])  # fmt: skip
