"""The steps of a warpgroup of the backward, one a block of queries: which of its products wait for which.

Legend and parts as in gradient.py. With scores made ahead (`TILE.ahead`) the next block's are asked for as soon as dV is done, for its
operand leaves its registers to them, and are there when the step ends: no wait for a first product, and a mask can branch while nothing is
in flight. The surprising fact: this makes a walk without masks 5 to 14 % faster at head dim 64, and gains nothing at 128, where it has no
registers, nor where the loop masks: so a diagonal that crosses the first block alone is masked in a first step of its own.
"""

from .channel import arrive, sync
from .gluon import gl, gluon, warpgroup_mma_wait
from .gradient import BOTH, BOTH_AND_LOADER, DS, EMPTY, add_dk, add_dv, finish_ds, send_dq, start, start_dq, start_s, store_ds


@gluon.jit
def finish_step(
    dk_ND, dv_NV, s_NM, ds_NM, p_op, memory, dq_desc, turn, dq_turn, block, visit,
    DQ: gl.constexpr, WARPGROUP_ID: gl.constexpr, SPEC: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """With dV in flight: dK, and with DQ the dQ of step dq_turn, for the block of that number. Gives the slot of this step back."""
    LATER: gl.constexpr = 1 if SPEC.need_dk else 0  # products that may still run when those of dV and dQ are awaited
    if TILE.ahead:
        if DQ:
            dq = start_dq(memory, dq_turn, WARPGROUP_ID, TILE)
        dv_NV, p_op = warpgroup_mma_wait(1 if DQ else 0, deps=(dv_NV, p_op))  # whose registers the scores take
        s_NM = start_s(memory, turn + 1, visit, WARPGROUP_ID, TILE)
        ds_op, dk_ND = add_dk(ds_NM, memory, turn, dk_ND, SPEC, TILE)
        if DQ:
            dq = warpgroup_mma_wait(2, deps=(dq,))
            send_dq(dq, memory, dq_desc, block, WARPGROUP_ID, TILE)
        dk_ND, ds_op, s_NM = warpgroup_mma_wait(0, deps=(dk_ND, ds_op, s_NM))
    elif DQ:
        dq = start_dq(memory, dq_turn, WARPGROUP_ID, TILE)
        ds_op, dk_ND = add_dk(ds_NM, memory, turn, dk_ND, SPEC, TILE)
        if SPEC.need_dv:
            dq, dv_NV, p_op = warpgroup_mma_wait(LATER, deps=(dq, dv_NV, p_op))
        else:
            dq = warpgroup_mma_wait(LATER, deps=(dq,))
        send_dq(dq, memory, dq_desc, block, WARPGROUP_ID, TILE)
    else:
        ds_op, dk_ND = add_dk(ds_NM, memory, turn, dk_ND, SPEC, TILE)
        if SPEC.need_dv:
            dv_NV, p_op = warpgroup_mma_wait(LATER, deps=(dv_NV, p_op))
    if SPEC.need_dk and not TILE.ahead:
        dk_ND, ds_op = warpgroup_mma_wait(0, deps=(dk_ND, ds_op))
    arrive(EMPTY + turn % TILE.stages, BOTH_AND_LOADER)
    return dk_ND, dv_NV, s_NM


@gluon.jit
def step(
    dk_ND, dv_NV, s_NM, memory, dq_desc, turn, place, visit, grid, scale_log2,
    WARPGROUP_ID: gl.constexpr, SPEC: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Adds a block of queries to dK and dV, and its part to dQ. In lock step with the other warpgroup if there is a dQ."""
    p_NM, weight_NM, dp_NM = start(s_NM, memory, turn, place, visit, grid, scale_log2, False, WARPGROUP_ID, SPEC, TILE)
    ds_NM = finish_ds(weight_NM, dp_NM, memory, turn, grid, SPEC, TILE)
    p_op, dv_NV = add_dv(p_NM, memory, turn, dv_NV, SPEC, TILE)
    if SPEC.need_dq:
        store_ds(ds_NM, memory, turn, WARPGROUP_ID, TILE)
        sync(DS, BOTH)
    return finish_step(
        dk_ND, dv_NV, s_NM, ds_NM, p_op, memory, dq_desc, turn, turn, place.block, visit, SPEC.need_dq, WARPGROUP_ID, SPEC, TILE
    )  # fmt: skip


@gluon.jit
def delayed_step(
    dk_ND, dv_NV, s_NM, memory, dq_desc, turn, place, block, visit, grid, scale_log2,
    FIRST: gl.constexpr, WARPGROUP_ID: gl.constexpr, SPEC: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """As `step`, but dQ is that of the step before (FIRST: there was none), for the block of that number."""
    p_NM, weight_NM, dp_NM = start(s_NM, memory, turn, place, visit, grid, scale_log2, FIRST, WARPGROUP_ID, SPEC, TILE)
    ds_NM = finish_ds(weight_NM, dp_NM, memory, turn, grid, SPEC, TILE)
    if not FIRST:
        sync(DS + (1 - WARPGROUP_ID) * 2 + ((turn - 1) & 1), BOTH)
    store_ds(ds_NM, memory, turn, WARPGROUP_ID, TILE)
    arrive(DS + WARPGROUP_ID * 2 + (turn & 1), BOTH)
    p_op, dv_NV = add_dv(p_NM, memory, turn, dv_NV, SPEC, TILE)
    return finish_step(
        dk_ND, dv_NV, s_NM, ds_NM, p_op, memory, dq_desc, turn, turn - 1, block, visit, not FIRST, WARPGROUP_ID, SPEC, TILE
    )  # fmt: skip


@gluon.jit
def last_dq(memory, dq_desc, turn, block, WARPGROUP_ID: gl.constexpr, TILE: gl.constexpr):
    """dQ of the last step of a delayed walk."""
    sync(DS + (1 - WARPGROUP_ID) * 2 + (turn & 1), BOTH)
    dq = warpgroup_mma_wait(0, deps=(start_dq(memory, turn, WARPGROUP_ID, TILE),))
    send_dq(dq, memory, dq_desc, block, WARPGROUP_ID, TILE)
