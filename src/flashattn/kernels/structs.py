"""What a kernel is told, in a few named tuples instead of forty scalars.

Members of the runtime structs may be None, which costs nothing: Triton drops them at compile time. `Spec` and `Tile` travel as
one constexpr argument each. The surprising facts: a jit function must never be a field of these, since Triton's disk cache would
key on its name and not on its source; and Triton compiles a kernel anew for a member that is 1 or a multiple of 16, whatever
`do_not_specialize` says, so numbers that change from call to call are arguments of their own, named in SIZES.
"""

from typing import NamedTuple

# total_q, total_k: rows of a dense batch entry, or of all packed sequences. wave: heads that advance together, so that what they share
# stays in L2. left, right: keys each side of the diagonal that a query keeps, read only where `Spec.left` / `Spec.right` say so.
SIZES = ("total_q", "total_k", "batch", "heads_q", "heads_kv", "wave", "left", "right")


class View(NamedTuple):
    """A tensor [batch, rows, heads, dim] by its strides in elements; dim is contiguous. Packed tensors have no batch (stride 0)."""

    ptr: object
    stride_b: int
    stride_h: int
    stride_n: int


class Seqlens(NamedTuple):
    """Cumulative lengths [batch + 1] of packed sequences. In a dense call cu_q is None, and so is cu_k unless each batch entry has its own
    number of keys: then cu_k has these, [batch]."""

    cu_q: object
    cu_k: object


class Extras(NamedTuple):
    """What scores take besides the products, in float32. Unused members are None, which leaves the kernel without any as it was.

    inner: factor of the products, signed: scale / softcap with a softcap; otherwise, with ALiBi, scale * log2 e, and in natural units
    scale. slopes: of ALiBi, in natural units, a pointer to [heads_q] (slopes_stride_b 0) or [batch, heads_q] (heads_q); what `score` is
    given has the slope of a head there instead, a number in the units of scores: Extras(extras.inner, slope_of_head(...), None, None,
    extras.cap). sinks: a pointer to [heads_q], in natural units, read by the forward alone. cap: the softcap in the units of scores, where
    something is added to what it bounds. bias: a pointer to [batch, heads_q, rows of q, rows of k] with strides in elements, 0 for what is
    shared; what a loop is given starts at its head (`bias_of_head`) and has no stride_b and stride_h. A mask of booleans comes as bytes.

    Of dropout, which is no score: rng, a pointer to int64 (seed, offset); dropout, its probability; rescale, 1 / (1 - dropout), or 0.
    blocks: of a block mask, a pointer to int32, see flashattn/block_lists.py.

    score_aux, mask_aux: tuples of `Aux`, what a score_mod and a mask_mod were given. sequence, head: where a loop is, for them: Extras(...,
    None, None, None, None, extras.score_aux, extras.mask_aux, sequence, head).
    """

    inner: object = None
    slopes: object = None
    slopes_stride_b: object = None
    sinks: object = None
    cap: object = None
    bias: object = None
    bias_stride_b: object = None
    bias_stride_h: object = None
    bias_stride_m: object = None
    bias_stride_n: object = None
    rng: object = None
    dropout: object = None
    rescale: object = None
    blocks: object = None
    score_aux: object = None
    mask_aux: object = None
    sequence: object = None
    head: object = None


class Aux(NamedTuple):
    """A tensor that a mod reads, see common/mods.py. Sizes and strides, in elements, are those of its dimensions."""

    ptr: object
    shape: tuple
    strides: tuple


class Spec(NamedTuple):
    """The variant of attention that is compiled."""

    varlen: bool
    left: bool  # the window has a left limit
    right: bool  # the window has a right limit (causal: 0)
    top_left: bool
    ragged: bool  # the walked side may end inside a tile
    sign: int  # of the softmax scale; 1 with a softcap, ALiBi, a bias or a score_mod, where `Extras.inner` has it
    prescaled: bool  # plain float32: the scale goes into an operand, and then the largest probability of a row is exactly 1
    tf32: bool
    grouped: bool  # several query heads share a key/value head; False in a forward, which doesn't ask
    need_dk: bool = False
    need_dv: bool = False
    need_dq: bool = False  # asked by the one kernel that makes all three
    softcap: bool = False
    alibi: bool = False
    dropout: bool = False
    sinks: bool = False  # False in a backward, where lse says it all
    scores_move: bool = False  # q or k has a tangent
    blocks: bool = False  # a block mask, and then no limits
    bias: int = 0  # none, or ADDED or KEPT of common/score.py
    natural: bool = False  # with a bias or a score_mod scores are in natural units, others' in base 2


class Tile(NamedTuple):
    """Extents known at compile time. Head dims are exact, so a vector load of a ragged one keeps its width; blocks are powers of two."""

    m: int
    n: int
    head_dim: int
    head_dim_v: int
    block_d: int
    block_dv: int
    align: int  # every row of every tensor starts at a multiple of this many elements
