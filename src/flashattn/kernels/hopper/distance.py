"""Distances from the diagonal of a product's elements, which ALiBi's bias grows with.

The surprising fact: to convert an integer takes as long as four multiplications, so a thread converts one for each pair of its rows and
neighbouring columns, and the columns of other groups of 8 lie a constant away.
"""

from ..common.score import score
from .gluon import gl, gluon
from .layouts import ROWS


@gluon.jit
def distances(s, start, COLUMNS: gl.constexpr):
    """[64, COLUMNS] of start + row - column, float32, in the layout of s."""
    GROUPS: gl.constexpr = COLUMNS // 8
    s_RGC = s.reshape([ROWS, GROUPS, 8])
    LAYOUT: gl.constexpr = s_RGC.type.layout
    row_R = start + gl.arange(0, ROWS, gl.SliceLayout(1, gl.SliceLayout(1, LAYOUT)))
    column_C = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    group_RGC = 8 * gl.arange(0, GROUPS, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    near_RC = (row_R[:, None] - column_C[None, :]).to(gl.float32)
    return gl.convert_layout((near_RC[:, None, :] - group_RGC.to(gl.float32)).reshape([ROWS, COLUMNS]), s.type.layout)


@gluon.jit
def scores(s, extras, start, SPEC: gl.constexpr, COLUMNS: gl.constexpr):
    """Raw scores of finished products; rows may be queries or keys. start: of `distances`."""
    distance = None
    if SPEC.alibi:
        distance = distances(s, start, COLUMNS)
    return score(s, extras, distance, None, SPEC, True)
