"""The queue of tiles: what the n-th tile is, which keys it visits, and who takes it next.

Longest first: under a causal mask the last rows have the most keys. Inside a wave, heads whose keys and values fit in L2 together, all
heads take their last rows, then all the rows before them. The surprising fact: a program that draws its next tile when one *begins*, and
not when its loads are issued, undoes this: long tiles then start last (1.09 of the ideal time, against 1.00, at head dim 256, 4096 keys).
"""

from typing import NamedTuple

from ..common.bounds import key_range
from ..common.index import locate, tile_in_order
from .channel import Task
from .gluon import gl, gluon
from .layouts import ROWS

# Numbers that change from call to call, as arguments of the kernel (see structs.py). A lane is a head of a batch entry, or in a packed
# batch a head; it has `slots` tiles, of which packed ones may be empty. wave: lanes that advance together. per_wave, tiles: slots times
# wave, and times lanes: the loading warp has no registers for what can be computed before.
SIZES = ("total_q", "total_k", "batch", "heads_q", "group", "slots", "lanes", "wave", "per_wave", "tiles", "left", "right")


class Walk(NamedTuple):
    """The arguments of the kernel that say what there is to do."""

    cu_q: object
    cu_k: object
    total_q: object
    total_k: object
    batch: object
    heads_q: object
    group: object
    slots: object
    lanes: object
    wave: object
    per_wave: object
    tiles: object
    left: object
    right: object
    counter: object


@gluon.jit
def draw(index, walk, TILE: gl.constexpr):
    """The next tile of this program."""
    if TILE.tickets:
        following = gl.atomic_add(walk.counter, 1) + gl.num_programs(0)
    else:
        following = index + gl.num_programs(0)
    return following


@gluon.jit
def find(index, walk, SPEC: gl.constexpr, TILE: gl.constexpr):
    """(number, task, row of the tensor where its blocks of keys end) of the tile `index` or, where it has no rows, of the next that has."""
    index, task, k_end = look(index, walk, SPEC, TILE)
    if SPEC.varlen:
        while (task.blocks > 0) & (task.rows <= 0):
            index, task, k_end = look(draw(index, walk, TILE), walk, SPEC, TILE)
    return index, task, k_end


@gluon.jit
def look(index, walk, SPEC: gl.constexpr, TILE: gl.constexpr):
    """As `find`, but the tile may have no rows. One without keys visits a block all the same, of which the mask keeps nothing."""
    BLOCK: gl.constexpr = ROWS * TILE.consumers
    slot, lane = tile_in_order(gl.minimum(index, walk.tiles - 1), walk.per_wave, walk.lanes, walk.wave)
    tile, entry, head, q_start, rows_q, k_start, rows_k, sequence = locate(
        walk.slots - 1 - slot, lane, walk.heads_q, walk.cu_q, walk.cu_k, BLOCK, walk.total_q, walk.total_k, walk.batch, SPEC.varlen
    )
    m0 = tile * BLOCK
    diagonal = 0 if SPEC.top_left else rows_k - rows_q
    lo, _, _, hi = key_range(m0, rows_q, rows_k, diagonal, walk.left, walk.right, SPEC, BLOCK, TILE.n)
    hi = gl.maximum(hi, lo + TILE.n)
    blocks = gl.where(index < walk.tiles, (hi - lo) // TILE.n, 0)
    if SPEC.alibi or SPEC.sinks or SPEC.dropout:
        entry = sequence
    task = Task(blocks, entry, head, q_start + m0, rows_q - m0, m0 + diagonal, rows_k, hi)
    return index, task, k_start + hi


@gluon.jit
def leave(walk, TILE: gl.constexpr):
    """The last program to leave sets the counter back, for the next launch on this stream."""
    if TILE.tickets:
        if gl.atomic_add(walk.counter + 1, 1) == gl.num_programs(0) - 1:
            gl.store(walk.counter, 0)
            gl.store(walk.counter + 1, 0)
