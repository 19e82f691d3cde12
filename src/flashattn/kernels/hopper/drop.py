"""Dropout of a product of 64 rows: which of its elements are kept, rows being queries in the forward and keys in the backward.

The surprising fact: with the key of a column in a register for each of a thread's 16 or 32 columns there would be none left. In groups of
8, as in cut.py, a thread needs those of two columns, and a group's is an immediate: one addition a column, which serves two rows.
"""

from ..common.dropout import (
    COLUMN,
    ROW,
    column_keys,
    head_keys,
    kept,
    last_dropped,
    marked,
    pair_words,
    row_keys,
    row_keys_of,
    row_starts,
    sequence_words,
    shifted,
    wrapped,
)
from .gluon import gl, gluon
from .layouts import ROWS, accumulator

COLUMNS_OF_8 = gl.constexpr(8 * COLUMN.value % 2**32)
ROWS_OF_8 = gl.constexpr(8 * ROW.value % 2**32)


@gluon.jit
def draw_of(call, task, WARPGROUP_ID: gl.constexpr, SPEC: gl.constexpr, TILE: gl.constexpr):
    """(keys of a warpgroup's queries, key of the columns, the last word that is dropped) of its tile."""
    row = task.row + WARPGROUP_ID * ROWS
    if SPEC.varlen:
        row -= gl.load(call.cu_q + task.entry)
    rows, columns = head_keys(sequence_words(call.extras.rng, task.entry), task.head)
    row_M = row + gl.arange(0, ROWS, gl.SliceLayout(1, accumulator(TILE.n)))
    return row_keys(rows, row_M), columns, last_dropped(call.extras.dropout)


@gluon.jit
def dropped(p_MN, draw, n0, COLUMNS: gl.constexpr):
    """p with zeros where dropout says so, of the keys from n0 on. draw: `draw_of`."""
    GROUPS: gl.constexpr = COLUMNS // 8
    p_RGC = p_MN.reshape([ROWS, GROUPS, 8])
    LAYOUT: gl.constexpr = p_RGC.type.layout
    near_C = column_keys(draw[1], n0 + gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT))))
    group_G = gl.arange(0, GROUPS, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))).to(gl.uint32)
    columns_RGC = shifted(near_C[None, :][:, None, :], wrapped(group_G, COLUMNS_OF_8)[None, :, None])
    rows_R = gl.convert_layout(draw[0], gl.SliceLayout(1, gl.SliceLayout(1, LAYOUT)))
    words_RGC = pair_words(rows_R[:, None][:, None, :], columns_RGC)
    # as an instruction of ours: the compiler would select behind the conversion to 16 bits, which takes numbers apart, 3 instructions for 1
    p_RGC = gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gt.s32 p, $1, $2; selp.f32 $0, $3, 0f00000000, p; }",
        "=f,r,r,f", [words_RGC, draw[2], p_RGC], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip
    return gl.convert_layout(p_RGC.reshape([ROWS, COLUMNS]), p_MN.type.layout)


@gluon.jit
def marked_transposed(p_NM, m0, n0, words, head, p, COLUMNS: gl.constexpr):
    """p of the keys from n0 and of the queries from m0 on, with the sign of what is dropped turned. words: of the sequence."""
    GROUPS: gl.constexpr = COLUMNS // 8
    p_RGC = p_NM.reshape([ROWS, GROUPS, 8])
    LAYOUT: gl.constexpr = p_RGC.type.layout
    row_key, column_key = head_keys(words, head)
    near_C = row_starts(row_key, m0 + gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT))))
    group_G = gl.arange(0, GROUPS, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))).to(gl.uint32)
    rows_RGC = row_keys_of(shifted(near_C[None, :][:, None, :], wrapped(group_G, ROWS_OF_8)[None, :, None]))
    columns_R = column_keys(column_key, n0 + gl.arange(0, ROWS, gl.SliceLayout(1, gl.SliceLayout(1, LAYOUT))))
    p_RGC = marked(p_RGC, kept(rows_RGC, columns_R[:, None][:, None, :], last_dropped(p)))
    return gl.convert_layout(p_RGC.reshape([ROWS, COLUMNS]), p_NM.type.layout)
