"""What is added to a product's elements: distances from the diagonal, which ALiBi grows with, and the bias of a block.

The surprising fact: to convert an integer takes as long as four multiplications, so a thread converts one for each pair of its rows and
neighbouring columns, and the columns of other groups of 8 lie a constant away.
"""

from ..common.score import score
from .gluon import gl, gluon
from .layouts import ROWS, accumulator


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
def bias_of_block(extras, m0, n0, rows, keys, SPEC: gl.constexpr, COLUMNS: gl.constexpr, ALIGN: gl.constexpr):
    """The bias of the 64 queries from m0 on and the keys from n0 on, as scores lie: asked for while these are in flight. Two neighbours a
    thread and load, four rows of 16 or 32 bytes each a warp and instruction, whose other halves are found in L1."""
    row_M = m0 + gl.arange(0, ROWS, gl.SliceLayout(1, accumulator(COLUMNS)))
    key_N = gl.arange(0, COLUMNS, gl.SliceLayout(0, accumulator(COLUMNS)))
    rows = gl.where(n0 < keys, rows, 0)  # a warpgroup without keys may visit a block past the last one
    base = extras.bias + (n0 // COLUMNS * COLUMNS).to(gl.int64) * extras.bias_stride_n  # a multiple that the compiler sees
    offsets_M = row_M.to(gl.int64) * extras.bias_stride_m
    if ALIGN > 1:  # what is known of an argument is lost in a partition
        SIZE: gl.constexpr = extras.bias.dtype.element_ty.primitive_bitwidth // 8
        base = gl.multiple_of(base, SIZE * ALIGN)
        offsets_M = gl.multiple_of(offsets_M, ALIGN)
    inside = (row_M < rows)[:, None]
    if SPEC.ragged:
        inside = inside & (key_N < keys - n0)[None, :]
    return gl.load(base + (offsets_M[:, None] + key_N.to(gl.int64)[None, :] * extras.bias_stride_n), mask=inside, other=0)


@gluon.jit
def scores(s, extras, start, bias, SPEC: gl.constexpr, COLUMNS: gl.constexpr):
    """Raw scores of finished products; rows may be queries or keys. start: of `distances`. bias: of `bias_of_block`, or None."""
    distance = None
    if SPEC.alibi:
        distance = distances(s, start, COLUMNS)
    return score(s, extras, distance, bias, SPEC, True)
