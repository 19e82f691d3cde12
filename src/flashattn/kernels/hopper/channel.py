"""How the warps of a program pass tiles to each other: rings of shared memory, named barriers, and the tasks of a tile queue.

A `Ring` has slots. TMA fills one and completes its mbarrier by the bytes that arrived; readers give it back through a *named* barrier,
where they arrive and the loading warp syncs. The surprising fact is why: Triton puts a barrier of the whole warpgroup in front of every
mbarrier.arrive, which costs 1 % in the inner loop. A named barrier must not be arrived at twice before it is synced. Here a reader can't
come to a slot's next use before the slot was filled again, which happens after the sync. The last arrivals of a program meet no sync.
"""

from typing import NamedTuple

from .gluon import async_load, gl, gluon, mbarrier, reinterpret

WARPGROUP = gl.constexpr(128)
PAIR = gl.constexpr(256)  # threads at a turn: the warpgroup that had it and the next
# Triton takes 0 for the first partition, 1 to start the others and from 2 on one for each of the (at most three) others.
EMPTY_Q = gl.constexpr(5)  # + warpgroup
TURN = gl.constexpr(8)  # + warpgroup
EMPTY_K = gl.constexpr(11)  # + slot
EMPTY_V = gl.constexpr(13)  # + slot


class Ring(NamedTuple):
    """slots: the tiles, `parts` of them to a slot. full: an mbarrier a slot."""

    tiles: object
    full: object


class Tasks(NamedTuple):
    """Two slots for a task; full and empty: an mbarrier a slot."""

    numbers: object
    full: object
    empty: object


class Task(NamedTuple):
    """A tile, as the warpgroups have to know it. Positions are keys of the sequence."""

    blocks: object  # of keys; 0 when there are no more tiles
    entry: object  # of the batch
    head: object
    row: object  # of the tensor, where the tile's queries start
    rows: object  # of queries, from there to the end of the sequence
    position: object  # of the diagonal in the first row
    rows_k: object  # keys of the sequence
    hi: object  # where the blocks end; they are walked from there


FIELDS = gl.constexpr(len(Task._fields))
SPACE = gl.constexpr(32)  # numbers a slot: one for each thread that writes


@gluon.jit
def arrive(barrier, THREADS: gl.constexpr):
    """Arrive at a named barrier of so many threads, and go on."""
    gl.inline_asm_elementwise("bar.arrive $1, $2; mov.u32 $0, 0;", "=r,r,r", [barrier, THREADS], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def sync(barrier, THREADS: gl.constexpr):
    """Wait at a named barrier until so many threads, these among them, have come."""
    gl.inline_asm_elementwise("bar.sync $1, $2; mov.u32 $0, 0;", "=r,r,r", [barrier, THREADS], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def take_turn(WARPGROUP_ID: gl.constexpr):
    """Warpgroups issue products in turn, so that one's softmax runs beside another's products."""
    sync(TURN + WARPGROUP_ID, PAIR)


@gluon.jit
def pass_turn(WARPGROUP_ID: gl.constexpr, TILE: gl.constexpr):
    arrive(TURN + (WARPGROUP_ID + 1) % TILE.consumers, PAIR)


@gluon.jit
def make_barriers(SLOTS: gl.constexpr, ARRIVALS: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(barriers.index(slot), count=ARRIVALS)
    return barriers


@gluon.jit
def make_ring(desc, SLOTS: gl.constexpr, PARTS: gl.constexpr):
    """A ring of tiles that `desc` describes."""
    ROWS: gl.constexpr = desc.block_shape[1]
    WIDTH: gl.constexpr = desc.block_shape[3]
    tiles = gl.allocate_shared_memory(desc.dtype, [SLOTS * PARTS, 1, ROWS, 1, WIDTH], desc.layout)
    return Ring(tiles, make_barriers(SLOTS, 1))


@gluon.jit
def make_tasks(CONSUMERS: gl.constexpr):
    numbers = gl.allocate_shared_memory(gl.int32, [2, SPACE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Tasks(numbers, make_barriers(2, 1), make_barriers(2, CONSUMERS))


@gluon.jit
def fill(ring, slot, used, desc, entry, row, head, EMPTY: gl.constexpr, READERS: gl.constexpr, PARTS: gl.constexpr):
    """Start loading a tile into a slot, when its readers (threads of them) have left; `used`: there were some."""
    if used:
        sync(EMPTY + slot, READERS + 32)
    full = ring.full.index(slot)
    WIDTH: gl.constexpr = desc.block_shape[3]
    BYTES: gl.constexpr = 2 * PARTS * desc.block_shape[1] * WIDTH  # of elements that don't exist too: they arrive as zeros
    mbarrier.expect(full, BYTES)
    for part in gl.static_range(PARTS):
        async_load(desc, [entry, row, head, part * WIDTH], full, ring.tiles.index(slot * PARTS + part))


@gluon.jit
def publish(tasks, turn, task):
    """The loading warp tells the others the `turn`-th tile of this program."""
    slot = turn % 2
    mbarrier.wait(tasks.empty.index(slot), ((turn // 2) & 1) ^ 1)
    place = gl.arange(0, SPACE, gl.BlockedLayout([1], [32], [1], [0]))
    numbers = place * 0
    for field in gl.static_range(FIELDS):
        numbers = gl.where(place == field, task[field], numbers)
    tasks.numbers.index(slot).store(numbers)
    mbarrier.arrive(tasks.full.index(slot), count=1)


@gluon.jit
def await_task(tasks, turn):
    """Blocks of the `turn`-th tile, as soon as it is known."""
    mbarrier.wait(tasks.full.index(turn % 2), (turn // 2) & 1)
    return number(tasks, turn, 0)


@gluon.jit
def task_of(tasks, turn):
    """The `turn`-th tile. What is not used is not read, and what is used late is read late: a warpgroup has no registers to spare."""
    return Task(
        number(tasks, turn, 0), number(tasks, turn, 1), number(tasks, turn, 2), number(tasks, turn, 3), number(tasks, turn, 4),
        number(tasks, turn, 5), number(tasks, turn, 6), number(tasks, turn, 7),
    )  # fmt: skip


@gluon.jit
def forget(tasks, turn):
    """A warpgroup has read all it needs."""
    mbarrier.arrive(tasks.empty.index(turn % 2), count=1)


@gluon.jit
def number(tasks, turn, FIELD: gl.constexpr):
    """A number of a task, the same in every thread."""
    numbers = reinterpret(tasks.numbers, gl.int32, [2 * SPACE, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return gl.max(numbers.index(turn % 2 * SPACE + FIELD).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
