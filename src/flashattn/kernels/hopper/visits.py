"""Which blocks of queries a block of keys visits, in the backward: of every query head that reads its keys, one head after the other.

Each warp with a role finds this out for itself, since nothing is drawn from a queue: a program is one block of keys, and the GPU hands them
out in the order of their numbers. Inside a wave, heads whose Q, dO and dQ fit in L2 together, all heads take their first keys, then all the
next: under a causal mask the first keys are read by the most queries, so the longest come first.

The surprising fact: blocks of queries have numbers that leave no two sequences in one block. Per head there are `blocks` of them, and the
block of row m of packed sequence b is cu[b] // M + b + m // M (see kernels/common/index.py). By that number the row numbers and the sums of
dQ are stored, padded to whole blocks, and so nothing of them is ever masked.
"""

from typing import NamedTuple

from ..common.bounds import key_range, query_range
from ..common.dropout import sequence_words
from ..common.index import locate, tile_in_order
from .gluon import gl, gluon

# Numbers that change from call to call, as arguments of the kernel (see walk.py): lanes are key/value heads, per_wave counts their tiles,
# blocks those of queries that a head has.
SIZES = ("total_q", "total_k", "batch", "heads_kv", "group", "lanes", "wave", "per_wave", "blocks", "left", "right")


class Grid(NamedTuple):
    """The arguments of the kernel that say what there is to do."""

    cu_q: object
    cu_k: object
    total_q: object
    total_k: object
    batch: object
    heads_kv: object
    group: object
    lanes: object
    wave: object
    per_wave: object
    blocks: object
    left: object
    right: object
    extras: object


class Visit(NamedTuple):
    """What a program does. Rows and keys are those of the sequence; it starts at row q_row, and the tile of keys at row k_row."""

    steps: object  # blocks of queries, over all heads of the group
    entry: object  # of the batch
    sequence: object  # the same, but of a packed batch its number
    head_kv: object
    q_row: object
    rows_q: object
    k_row: object
    n0: object
    keys: object  # from n0 to the end of the sequence, which may be none or more than a tile
    diagonal: object
    lo: object
    full_lo: object  # the queries [full_lo, full_hi) of [lo, hi) need no mask
    full_hi: object
    hi: object
    words: object  # of dropout: see `sequence_words`
    block: object  # number of the block of the first head's row lo


class Place(NamedTuple):
    """Where a program is: first row of a block, query head, number of the block."""

    m0: object
    head: object
    block: object


@gluon.jit
def find(grid, SPEC: gl.constexpr, TILE: gl.constexpr):
    """What this program does; nothing if there are no queries or, in a packed batch, no keys."""
    N: gl.constexpr = TILE.n
    slot, lane = tile_in_order(gl.program_id(0), grid.per_wave, grid.lanes, grid.wave)
    if from_the_last(SPEC, TILE):
        slot = grid.per_wave // grid.wave - 1 - slot
    tile, entry, head_kv, k_start, rows_k, q_start, rows_q, sequence = locate(
        slot, lane, grid.heads_kv, grid.cu_k, grid.cu_q, N, grid.total_k, grid.total_q, grid.batch, SPEC.varlen
    )
    n0 = tile * N
    diagonal = 0 if SPEC.top_left else rows_k - rows_q
    lo, full_lo, full_hi, hi = query_range(n0, rows_q, rows_k, diagonal, grid.left, grid.right, SPEC, TILE.m, N)
    if not SPEC.left:
        full_hi = hi  # the last block may be ragged, but see `gradient.py`
    if SPEC.ragged:
        full_hi = gl.where(rows_k - n0 < N, full_lo, full_hi)
    steps = gl.where(n0 < rows_k, (hi - lo) // TILE.m * grid.group, 0)
    block = (entry * grid.heads_kv + head_kv) * grid.group * grid.blocks + lo // TILE.m
    if SPEC.varlen:
        block += q_start // TILE.m + sequence
    words = (0, 0)
    if SPEC.dropout:
        words = sequence_words(grid.extras.rng, sequence)
    return Visit(
        steps, entry, sequence, head_kv, q_start, rows_q, k_start + n0, n0, rows_k - n0, diagonal, lo, full_lo, full_hi, hi, words, block
    )  # fmt: skip


@gluon.jit
def first_place(visit, grid, SPEC: gl.constexpr, TILE: gl.constexpr):
    m0, block = visit.lo, visit.block
    if TILE.down:
        blocks = (visit.hi - visit.lo) // TILE.m - 1
        m0, block = m0 + blocks * TILE.m, block + blocks
    return Place(m0, visit.head_kv * grid.group, block)


@gluon.jit
def next_place(place, visit, grid, SPEC: gl.constexpr, TILE: gl.constexpr):
    """The next block of this head, or the first of the next. Downwards the same block of the next head, or of the first the one before."""
    if TILE.down:
        m0, head, block = place.m0, place.head + 1, place.block + grid.blocks
        over = head == (visit.head_kv + 1) * grid.group
        m0 = gl.where(over, m0 - TILE.m, m0)
        head = gl.where(over, head - grid.group, head)
        block = gl.where(over, block - grid.group * grid.blocks - 1, block)
    else:
        m0, head, block = place.m0 + TILE.m, place.head, place.block + 1
        if SPEC.grouped:
            over = m0 >= visit.hi
            m0 = gl.where(over, visit.lo, m0)
            head = gl.where(over, head + 1, head)
            block = gl.where(over, block + grid.blocks - (visit.hi - visit.lo) // TILE.m, block)
    return Place(m0, head, block)


@gluon.constexpr_function
def from_the_last(spec, tile):
    """Whether the last keys come first. Tiles that start together walk up from their diagonals, so the last tile that visits a block of
    queries reaches it first; in the other order each would wait for all before it, from the first step on."""
    return tile.ordered and spec.right


@gluon.jit
def turn_of(place, visit, grid, SPEC: gl.constexpr, TILE: gl.constexpr):
    """How many tiles of keys that visit the block of queries have their turn before this one; negative if it visits in vain, as a tile may
    that meets no query: it has no turn."""
    N: gl.constexpr = TILE.n
    tile = visit.n0 // N
    rows_k = visit.n0 + visit.keys
    lo, _, _, hi = key_range(place.m0, visit.rows_q, rows_k, visit.diagonal, grid.left, grid.right, SPEC, TILE.m, N)
    if from_the_last(SPEC, TILE):
        turn = hi // N - 1 - tile
    else:
        turn = tile - lo // N
    return turn
