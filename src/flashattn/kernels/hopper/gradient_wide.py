"""What the two warpgroups of the backward do with a block of queries at head dims above 128: five products, each by one or by both.

Legend as in gradient.py, but N are all 64 keys of a program, for dK and dV of 128 keys don't fit in registers. Warpgroup 0 makes
s_NM = K q^T and of it p_NM; warpgroup 1 makes dp_NM = V dO^T, and with p_NM ds_NM; both lay theirs in shared memory. dV += p_NM dO,
dK += ds_NM q and dQ = ds_NM^T K are shared out by columns, so each warpgroup has 64 to 128 columns of each and needs p and ds whole.

Who waits for whom. P_FULL: warpgroup 0 has stored p of step i. DS_FULL: warpgroup 1 has stored ds of step i. They alternate, each waited
for before the other is arrived at again, so one barrier each will do. p and ds have two slots, taken in turns:
- p(i + 1) overwrites p(i - 1). Warpgroup 0 stores it after DS_FULL(i), before which warpgroup 1 has finished its product with p(i - 1).
- ds(i + 1) overwrites ds(i - 1). Warpgroup 1 stores it after P_FULL(i + 1), before which warpgroup 0 has finished its two with ds(i - 1).
A slot of q or dO is given back by both, after their last products with it (Q and DO: a named barrier a slot). Warpgroup 0 starts s of
step i before it gives back q of step i - 1, so q needs two slots.

The surprising fact: this asymmetry hides the softmax better than two equal warpgroups would. Warpgroup 0 makes dK of step i - 1 and s of
step i, takes exponentials, and makes dV of step i and dQ of step i - 1; warpgroup 1 makes dp and dV, then ds, and then dK and dQ of step i.
So while one does not multiply, the other's products run. What limits the kernel is shared memory, which operands of both factors come from.
Method: Dao 2023 (FlashAttention-2), algorithm 2.
"""

from typing import NamedTuple

from ..common.score import score_gradient
from ..common.softmax import probabilities
from .channel import arrive, sync
from .cut import masked
from .distance import scores
from .gluon import barrier, fence_async_shared, gl, gluon, mbarrier, reinterpret, warpgroup_mma, warpgroup_mma_wait
from .gradient import ALWAYS, BOTH, ONE_AND_WRITER, clear_rows, numbers
from .layouts import ROWS, accumulator, operand, shared

# Hardware barriers. Triton takes 0 to 5 in a kernel of five partitions.
P_FULL = gl.constexpr(6)
DS_FULL = gl.constexpr(7)
DQ_EMPTY = gl.constexpr(8)  # + warpgroup: its turn to store its part of dQ
DQ_FULL = gl.constexpr(10)  # + warpgroup: and it is stored
DO = gl.constexpr(12)  # + slot
Q = gl.constexpr(14)  # + slot


class Memory(NamedTuple):
    """Shared memory. Rings hold tiles of 64 rows, in parts of 64 columns: one of k and v, `stages` of q and `do_stages` of do.

    rows: lse and delta of the slots of q. p, ds: two slots of 64 keys by 64 queries each. dq: a warpgroup's part of dQ on its way out.
    """

    q: object
    do: object
    rows: object
    k: object
    v: object
    p: object
    ds: object
    dq: object


@gluon.constexpr_function
def first_column(width, which):
    """Of the part of a product that has `width` columns. Of three times 64 the part 0 has two."""
    return 0 if which == 0 else (width // 64 + 1) // 2 * 64


@gluon.constexpr_function
def columns_of(width, which):
    first = first_column(width, 1)
    return first if which == 0 else width - first


@gluon.constexpr_function
def part_of(width):
    """Columns of q and k, or v and dO, that are multiplied at a time: a power of two."""
    return 128 if width % 128 == 0 else 64


@gluon.jit
def part_at(slot, part, PARTS: gl.constexpr):
    """Where a ring has the part-th 64 columns of a tile. Of three, the first two must start at a multiple of two: 0 1 2, 2 0 1."""
    at = slot * PARTS + part
    if PARTS == 3:
        at = gl.where(part < 2, 4 * slot + part, slot + 2)
    return at


@gluon.jit
def columns(ring, slot, FIRST: gl.constexpr, COLUMNS: gl.constexpr, WIDTH: gl.constexpr):
    """[64, COLUMNS] of a tile of WIDTH columns, which come by 64."""
    PAIRS: gl.constexpr = ring.tiles.shape[0] // (COLUMNS // 64)
    at = part_at(slot, FIRST // 64, WIDTH // 64) // (COLUMNS // 64)
    return reinterpret(ring.tiles, ring.tiles.dtype, [PAIRS, ROWS, COLUMNS], shared(COLUMNS, 2)).index(at)


@gluon.jit
def nothing(turn):
    """0, which the compiler doesn't know: addresses that depend on it are made in each step and occupy no registers between steps."""
    return gl.inline_asm_elementwise("and.b32 $0, $1, 0;", "=r,r", [turn], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def start_whole(left, left_slot, right, slot, WIDTH: gl.constexpr):
    """left right^T of two tiles, in flight. As many products as part_of(WIDTH) goes into WIDTH."""
    COLUMNS: gl.constexpr = part_of(WIDTH)
    acc_NM = gl.zeros([ROWS, ROWS], gl.float32, accumulator(ROWS))
    for part in gl.static_range(WIDTH // COLUMNS):
        a_NC = columns(left, left_slot, part * COLUMNS, COLUMNS, WIDTH)
        b_MC = columns(right, slot, part * COLUMNS, COLUMNS, WIDTH)
        acc_NM = warpgroup_mma(a_NC, b_MC.permute((1, 0)), acc_NM, use_acc=part > 0, is_async=True)
    return acc_NM


@gluon.jit
def start_scores(memory, turn, TILE: gl.constexpr):
    """K q^T of a step, in flight."""
    return start_whole(memory.k, nothing(turn), memory.q, turn % TILE.stages, TILE.d)


@gluon.jit
def start_dp(memory, turn, TILE: gl.constexpr):
    """V dO^T of a step, in flight."""
    return start_whole(memory.v, nothing(turn), memory.do, turn % TILE.do_stages, TILE.dv)


@gluon.jit
def start_given(stored, ring, slot, acc, WARPGROUP_ID: gl.constexpr, WIDTH: gl.constexpr):
    """acc + x of this warpgroup's columns of a tile, in flight. stored: the p or ds that the other made."""
    b_MC = columns(ring, slot, first_column(WIDTH, WARPGROUP_ID), acc.shape[1], WIDTH)
    return warpgroup_mma(stored, b_MC, acc, is_async=True)


@gluon.jit
def start_own(x_NM, stored, ring, slot, acc, WARPGROUP_ID: gl.constexpr, WIDTH: gl.constexpr, TILE: gl.constexpr):
    """acc + x of this warpgroup's columns of a tile, in flight, and x, for await_own. x: the p or ds that it made itself, and stored."""
    if TILE.own:
        b_MC = columns(ring, slot, first_column(WIDTH, WARPGROUP_ID), acc.shape[1], WIDTH)
        x_NM = gl.convert_layout(x_NM, operand(acc.shape[1]))
        acc = warpgroup_mma(x_NM, b_MC, acc, is_async=True)
    else:
        acc = start_given(stored, ring, slot, acc, WARPGROUP_ID, WIDTH)
    return acc, x_NM


@gluon.jit
def await_own(LATER: gl.constexpr, acc, x_NM, TILE: gl.constexpr):
    """acc of start_own, when at most LATER products are still in flight. An operand must stay in its registers until then."""
    if TILE.own:
        acc, x_NM = warpgroup_mma_wait(LATER, deps=(acc, x_NM))
    else:
        acc = warpgroup_mma_wait(LATER, deps=(acc,))
    return acc


@gluon.jit
def start_dq(memory, turn, WARPGROUP_ID: gl.constexpr, TILE: gl.constexpr):
    """ds^T K of the columns that are the other warpgroup's in dK, so that the sum of both is half of all, in flight."""
    FIRST: gl.constexpr = first_column(TILE.d, 1 - WARPGROUP_ID)
    COLUMNS: gl.constexpr = columns_of(TILE.d, 1 - WARPGROUP_ID)
    k_ND = columns(memory.k, 0, FIRST, COLUMNS, TILE.d)
    zeros_MD = gl.zeros([ROWS, COLUMNS], gl.float32, accumulator(COLUMNS))
    return warpgroup_mma(memory.ds.index(turn % 2).permute((1, 0)), k_ND, zeros_MD, use_acc=False, is_async=True)


@gluon.jit
def clear_block(ring, slot, rows, WIDTH: gl.constexpr, SPEC: gl.constexpr):
    """Of packed sequences: rows of a tile from `rows` on are zero.

    K and q are cleared by warpgroup 0, for warpgroup 1 reads them after P_FULL; V by warpgroup 1, its one reader; dO by each for itself.
    """
    if SPEC.varlen:
        if rows < ROWS:
            for part in range(WIDTH // 64):
                clear_rows(ring.tiles.index(part_at(slot, part, WIDTH // 64)), rows, ROWS, 64)
            fence_async_shared()
            barrier()


@gluon.jit
def await_q(memory, turn, TILE: gl.constexpr):
    """With the row numbers."""
    mbarrier.wait(memory.q.full.index(turn % TILE.stages), (turn // TILE.stages) & 1)


@gluon.jit
def await_do(memory, turn, m0, visit, SPEC: gl.constexpr, TILE: gl.constexpr):
    slot = turn % TILE.do_stages
    mbarrier.wait(memory.do.full.index(slot), (turn // TILE.do_stages) & 1)
    clear_block(memory.do, slot, visit.rows_q - m0, TILE.dv, SPEC)


@gluon.jit
def store_p(s_NM, extras, memory, turn, m0, visit, grid, scale_log2, SPEC: gl.constexpr, TILE: gl.constexpr):
    """Probabilities of finished products, for both warpgroups."""
    s_NM = scores(s_NM, extras, visit.n0 - m0 - visit.diagonal, None, SPEC, ROWS)
    if SPEC.ragged or SPEC.left or SPEC.right:
        if TILE.mask == ALWAYS:
            s_NM = masked(s_NM, m0, visit, grid, 0, SPEC, TILE)
        else:
            if (m0 < visit.full_lo) | (m0 >= visit.full_hi):
                s_NM = masked(s_NM, m0, visit, grid, 0, SPEC, TILE)
    lse_M = numbers(memory.rows, turn % TILE.stages, 0, TILE)
    p_NM = probabilities(s_NM, gl.expand_dims(lse_M, 0), scale_log2)
    p_NM = p_NM.to(memory.p.dtype)
    memory.p.index(turn % 2).store(p_NM)
    fence_async_shared()
    arrive(P_FULL, BOTH)
    if not TILE.own:
        barrier()
    return p_NM


@gluon.jit
def store_ds(dp_NM, p_NM, memory, turn, TILE: gl.constexpr):
    """The gradient of scores, from finished dp and p as they were stored, for both warpgroups."""
    delta_M = numbers(memory.rows, turn % TILE.stages, 1, TILE)
    ds_NM = score_gradient(p_NM.to(gl.float32), dp_NM, gl.expand_dims(delta_M, 0))
    ds_NM = ds_NM.to(memory.ds.dtype)
    memory.ds.index(turn % 2).store(ds_NM)
    fence_async_shared()
    arrive(DS_FULL, BOTH)
    if not TILE.own:
        barrier()
    return ds_NM


@gluon.jit
def stage(dq_MD, memory, WARPGROUP_ID: gl.constexpr):
    """Hands a product to the writing warp, in the order of registers."""
    COLUMNS: gl.constexpr = dq_MD.shape[1]
    GROUPS: gl.constexpr = COLUMNS // 64
    NUMBERS: gl.constexpr = ROWS * COLUMNS
    sync(DQ_EMPTY + WARPGROUP_ID, ONE_AND_WRITER)
    values = dq_MD.reshape([4, 2, 8, GROUPS, 8, 4, 2]).permute((3, 0, 4, 2, 5, 1, 6)).reshape([NUMBERS])
    reinterpret(memory.dq, gl.float32, [2 // GROUPS, NUMBERS], gl.SwizzledSharedLayout(1, 1, 1, [0])).index(0).store(values)
    fence_async_shared()
    arrive(DQ_FULL + WARPGROUP_ID, ONE_AND_WRITER)
