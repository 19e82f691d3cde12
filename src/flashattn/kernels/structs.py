"""What a kernel is told, in a few named tuples instead of forty scalars.

Members of the runtime structs may be None, which costs nothing: Triton drops them at compile time. `Spec` and `Tile` travel as
one constexpr argument each. The surprising fact: a jit function must never be a field of these, since Triton's disk cache would
key on its name and not on its source.
"""

from typing import NamedTuple


class View(NamedTuple):
    """A tensor [batch, rows, heads, dim] by its strides in elements; dim is contiguous. Packed tensors have no batch (stride 0)."""

    ptr: object
    stride_b: int
    stride_h: int
    stride_n: int


class Seqlens(NamedTuple):
    """Rows of a dense batch entry (`cu_*` None), or the packed totals with their cumulative lengths [batch + 1]."""

    cu_q: object
    cu_k: object
    q: int
    k: int
    batch: int


class Order(NamedTuple):
    """How the one-dimensional grid maps to (tile, head): `wave` heads advance together so that what they share stays in L2."""

    tiles: int
    lanes: int
    wave: int
    heads_q: int
    heads_kv: int


class Window(NamedTuple):
    """Keys each side of the diagonal that a query keeps, the diagonal included; read only where `Spec.left` / `Spec.right` say so."""

    left: int
    right: int


class Spec(NamedTuple):
    """The variant of attention that is compiled."""

    varlen: bool
    left: bool  # the window has a left limit
    right: bool  # the window has a right limit (causal: 0)
    top_left: bool
    ragged: bool  # the walked side may end inside a tile
    sign: int  # of the softmax scale
    prescaled: bool  # float32: the scale goes into an operand, and then the largest probability of a row is exactly 1
    tf32: bool
    grouped: bool  # several query heads share a key/value head
    need_dk: bool = False
    need_dv: bool = False


class Tile(NamedTuple):
    """Extents known at compile time. Head dims are exact, so a vector load of a ragged one keeps its width; blocks are powers of two."""

    m: int
    n: int
    head_dim: int
    head_dim_v: int
    block_d: int
    block_dv: int
    align: int  # every row of every tensor starts at a multiple of this many elements
