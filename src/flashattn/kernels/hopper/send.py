"""The writing warps of the backward: each adds what one warpgroup makes of dQ to the sums in global memory.

In a deterministic call a part waits for its turn (see turns.py). The surprising fact: to ask whether it has come takes as long as to send a
part, so a warp asks before the part is made.
"""

from .channel import arrive, sync
from .gluon import async_add, gl, gluon, store_wait
from .gradient import ONE_AND_WRITER
from .gradient_wide import columns_of, first_column
from .turns import await_turn, give_turn
from .visits import find, first_place, next_place, turn_of


@gluon.jit
def send(
    dq_desc, turns, buffers, grid, WARPGROUP_ID: gl.constexpr, EMPTY: gl.constexpr, FULL: gl.constexpr, SPEC: gl.constexpr,
    TILE: gl.constexpr,
):  # fmt: skip
    """For head dims up to 128 a part is one box of 16 KB, and either warpgroup has a buffer of its own. Above, a part is up to two boxes,
    and both warpgroups use all buffers in turns, warpgroup 1 first, since it is ready first. EMPTY, FULL: + warpgroup, barriers."""
    BOXES: gl.constexpr = columns_of(TILE.d, 1 - WARPGROUP_ID) // 64 if TILE.wide else 1
    FIRST: gl.constexpr = first_column(TILE.d, 1 - WARPGROUP_ID) // 64 if TILE.wide else WARPGROUP_ID
    BUFFER: gl.constexpr = 0 if TILE.wide else WARPGROUP_ID
    NEXT: gl.constexpr = 1 - WARPGROUP_ID if TILE.wide else WARPGROUP_ID  # the warpgroup that may write into it then
    PARTS: gl.constexpr = TILE.m * TILE.d // 4096
    visit = find(grid, SPEC, TILE)
    if NEXT == 1 or not TILE.wide:
        arrive(EMPTY + NEXT, ONE_AND_WRITER)
    place = first_place(visit, grid, SPEC, TILE)
    for _ in range(visit.steps):
        number = place.block * 2 + WARPGROUP_ID
        turn = turn_of(place, visit, grid, SPEC, TILE) if TILE.ordered else 0
        if TILE.ordered:
            if turn >= 0:
                await_turn(turns + number, turn)
        sync(FULL + WARPGROUP_ID, ONE_AND_WRITER)
        if turn >= 0:
            for box in gl.static_range(BOXES):
                async_add(dq_desc, [(place.block * PARTS + FIRST + box) * 16, 0], buffers.index(BUFFER + box))
            store_wait(0)
        arrive(EMPTY + NEXT, ONE_AND_WRITER)
        if TILE.ordered:
            if turn >= 0:
                give_turn(turns + number)
        place = next_place(place, visit, grid, SPEC, TILE)
