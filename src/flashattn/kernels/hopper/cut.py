"""An edge of the mask, where it crosses a product of 64 rows: every row has a limit, and keeps the columns on one side of it.

The surprising fact: what is compared matters more than the comparison. With the number of a column in a register for each of a thread's 16
or 32 columns, the compiler keeps these from tile to tile and has no registers left; in groups of 8, a thread needs the numbers of two
columns, and a group's is an immediate. An edge then takes two instructions an element.
"""

from .gluon import gl, gluon


@gluon.jit
def cut(s, limit, UPPER: gl.constexpr, COLUMNS: gl.constexpr):
    """Scores with -inf in the columns above (or below) a row's limit, itself a column. limit: in any layout over the rows."""
    GROUPS: gl.constexpr = COLUMNS // 8
    ROWS: gl.constexpr = s.shape[0]
    s_RGC = s.reshape([ROWS, GROUPS, 8])
    LAYOUT: gl.constexpr = s_RGC.type.layout
    group_RGC = 8 * gl.arange(0, GROUPS, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    column_C = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    limit = gl.convert_layout(limit, gl.SliceLayout(1, gl.SliceLayout(1, LAYOUT)))
    past_RGC = (column_C[None, :] - limit[:, None])[:, None, :]
    keep = past_RGC <= -group_RGC if UPPER else past_RGC >= -group_RGC
    return gl.convert_layout(gl.where(keep, s_RGC, float("-inf")).reshape([ROWS, COLUMNS]), s.type.layout)
