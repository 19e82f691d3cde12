"""An edge of the mask, where it crosses a product of 64 rows: every row has a limit, and keeps the columns on one side of it.

The surprising fact: what is compared matters more than the comparison. With the number of a column in a register for each of a thread's 16
or 32 columns, the compiler keeps these from tile to tile and has no registers left; in groups of 8, a thread needs the numbers of two
columns, and a group's is an immediate. An edge then takes two instructions an element.
"""

from ..common.mask import first_kept, keep_mask, last_kept
from .gluon import gl, gluon
from .layouts import ROWS


@gluon.jit
def cut(s, limit, UPPER: gl.constexpr, COLUMNS: gl.constexpr):
    """Scores with -inf in the columns above (or below) a row's limit, itself a column. limit: in any layout over the rows."""
    GROUPS: gl.constexpr = COLUMNS // 8
    s_RGC = s.reshape([ROWS, GROUPS, 8])
    LAYOUT: gl.constexpr = s_RGC.type.layout
    group_RGC = 8 * gl.arange(0, GROUPS, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    column_C = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    limit = gl.convert_layout(limit, gl.SliceLayout(1, gl.SliceLayout(1, LAYOUT)))
    past_RGC = (column_C[None, :] - limit[:, None])[:, None, :]
    keep = past_RGC <= -group_RGC if UPPER else past_RGC >= -group_RGC
    return gl.convert_layout(gl.where(keep, s_RGC, float("-inf")).reshape([ROWS, COLUMNS]), s.type.layout)


@gluon.jit
def masked(s_NM, m0, visit, grid, WARPGROUP_ID: gl.constexpr, SPEC: gl.constexpr, TILE: gl.constexpr):
    """Transposed scores of the block of queries at row m0, -inf where the mask says no: asked of keys, left and right change places and the
    diagonal its sign."""
    if SPEC.left or TILE.ahead:
        key_N = WARPGROUP_ID * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, s_NM.type.layout))
        q_pos_N = key_N + (visit.n0 - m0 - visit.diagonal)
        first_N = first_kept(q_pos_N, grid.right) if SPEC.right else q_pos_N * 0
        if SPEC.ragged:
            first_N = gl.where(key_N < visit.keys, first_N, TILE.m)
        if SPEC.right or SPEC.ragged:
            s_NM = cut(s_NM, first_N, False, TILE.m)
        if SPEC.left:
            s_NM = cut(s_NM, last_kept(q_pos_N, grid.left), True, TILE.m)
    else:
        s_NM = masked_below(s_NM, m0, visit, grid, WARPGROUP_ID, SPEC, TILE)
    return s_NM


@gluon.jit
def masked_below(s_NM, m0, visit, grid, WARPGROUP_ID: gl.constexpr, SPEC: gl.constexpr, TILE: gl.constexpr):
    """Without a left limit. A diagonal for each group of 8 columns takes more registers than `cut` and fewer instructions, 617 of 636."""
    GROUPS: gl.constexpr = TILE.m // 8
    s_NGC = s_NM.reshape([ROWS, GROUPS, 8])
    LAYOUT: gl.constexpr = s_NGC.type.layout
    key_N = WARPGROUP_ID * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    first_G = 8 * gl.arange(0, GROUPS, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    column_C = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    k_pos_NG = (key_N + (visit.n0 - m0 - visit.diagonal))[:, None] - first_G[None, :]
    if SPEC.ragged:
        inside = (key_N < visit.keys)[:, None][:, :, None]
    else:
        inside = gl.full([ROWS, 1, 1], True, gl.int1, LAYOUT)
    keep = keep_mask(column_C[None, :][:, None, :], k_pos_NG[:, :, None], inside, grid.left, grid.right, SPEC)
    return gl.convert_layout(gl.where(keep, s_NGC, float("-inf")).reshape([ROWS, 8 * GROUPS]), s_NM.type.layout)
