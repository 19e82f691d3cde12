"""A call to attention, described without tensors.

A `Problem` is frozen and hashable, so choosing a kernel for it is a pure function that can be cached and tested without a GPU.
Everything that two spellings of a call have in common is settled here, once: `causal=True` *is* the window `(None, 0)`, a window
that reaches past every key *is* no window, the two diagonals of a square *are* one, so kernels know one mask: two optional limits
around one diagonal.

The surprising fact: with unequal lengths the diagonal ends in the bottom-right corner (query i sees keys up to
i + seqlen_k - seqlen_q), as in FlashAttention >= 2.1 and unlike `scaled_dot_product_attention(is_causal=True)`.
"""

import math
import struct
from dataclasses import dataclass
from itertools import pairwise

DTYPES = ("float16", "bfloat16", "float32")
BIAS_ITEMSIZE = {"bool": 1, "float16": 2, "bfloat16": 2, "float32": 4}
MAX_HEAD_DIM = 256
LEAST_SOFTCAP, MOST_SOFTCAP = 2.0**-120, 2.0**64
LEAST_DROPOUT = 2.0**-32  # of the 2^32 random words of a pair, one
MOST_INNER = 2.0**126


@dataclass(frozen=True)
class Problem:
    """One attention call. Lengths of a packed (`varlen`) call are totals of rows; `seqlen_*` are then upper bounds of one sequence.

    window_left, window_right: how far left and right of the diagonal a query sees; None is without limit, 0 the diagonal itself.
    top_left: the diagonal is j = i; otherwise j = i + seqlen_k - seqlen_q (of each sequence).
    aligned: every row of q, k and v starts at a multiple of 16 bytes and no dimension is expanded: what Hopper's copy engine can address.
    softcap: see `canonical_softcap`. alibi, sinks: whether there are such tensors. dropout: the probability, see `canonical_dropout`.
    used_k: each batch entry of a dense call has its own number of keys, at most seqlen_k, from the first on.
    bias: dtype of the additive bias, "bool" of a mask; None without. bias_dims: the dimensions along which it differs, of "bhqk" (batch
    entries, query heads, queries, keys); those of size 1 and expanded ones are left out.
    score_mod, mask_mod: keys of mods (mods.py), None without. mod_aux: (dtype, shape) of the tensors that they read, in this order.
    blocks: whether there is a block mask, which then is the only one: there are no limits.
    device: what torch calls it, but "hip" is an AMD GPU and "cuda" none. capability: of a "cuda" device; None if it isn't known.
    """

    dtype: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    softmax_scale: float
    window_left: int | None = None
    window_right: int | None = None
    top_left: bool = False
    varlen: bool = False
    total_q: int = 0
    total_k: int = 0
    deterministic: bool = False
    tf32: bool = False
    device: str = "cuda"
    capability: tuple[int, int] | None = None
    interpret: bool = False
    aligned: bool = False
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    bias: str | None = None
    bias_dims: str = ""
    dropout: float = 0.0
    used_k: bool = False
    score_mod: str | None = None
    mask_mod: str | None = None
    mod_aux: tuple[tuple[str, tuple[int, ...]], ...] = ()
    blocks: bool = False

    @property
    def natural(self) -> bool:
        """Whether scores are in natural units, see kernels/common/score.py; others' are in base 2."""
        return bool(self.bias or self.score_mod)

    @property
    def takes_keys(self) -> bool:
        """Whether any row may be left without keys by more than its position."""
        return bool(self.bias or self.score_mod or self.mask_mod or self.blocks)

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads_q // self.heads_kv if self.heads_kv else 1

    @property
    def inner(self) -> float:
        """The factor of a product under the tanh of a softcap: finite in float32, where tanh has long been 1."""
        return max(-MOST_INNER, min(self.softmax_scale / self.softcap, MOST_INNER))

    @property
    def rescale(self) -> float:
        """What dropout multiplies the probabilities with that it leaves; 0 where it leaves none."""
        return 1.0 / (1.0 - self.dropout) if self.dropout < 1.0 else 0.0

    @property
    def itemsize(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def bias_bytes(self) -> int:
        """Of memory that the bias has, each number once; 0 without."""
        sizes = {"b": self.batch, "h": self.heads_q, "q": self.seqlen_q, "k": self.seqlen_k}
        return math.prod(sizes[dim] for dim in self.bias_dims) * BIAS_ITEMSIZE[self.bias] if self.bias else 0

    def diagonal(self) -> int:
        """Column of the diagonal in query row 0 (dense calls; in packed ones each sequence has its own)."""
        return 0 if self.top_left else self.seqlen_k - self.seqlen_q


def default_scale(head_dim: int) -> float:
    return 1.0 / math.sqrt(head_dim)


def canonical_softcap(softcap: float | None) -> float:
    """The cap as kernels read it; 0 is none.

    Within bounds where float32, flushed to 0 below 2^-126, holds cap and scale / cap alike. Below, all scores of a row are equal as far as
    float32 can tell. Above, cap * tanh(s / cap) is s for all |s| < 2^51: what it takes off, s^3 / (3 cap^2), is less than a rounding of s.
    """
    return min(max(float(softcap), LEAST_SOFTCAP), MOST_SOFTCAP) if softcap else 0.0


def canonical_dropout(dropout_p: float) -> float:
    """The probability as kernels read it, which is the nearest float32: its product with 2^32, cut to a whole number, is how many of 2^32
    random words drop a pair, and 1 / (1 - p) is made of the same number. Less than one word is none, 0."""
    (p,) = struct.unpack("f", struct.pack("f", dropout_p))
    return p if p >= LEAST_DROPOUT else 0.0


def canonical_window(
    causal: bool | str, window: tuple[int | None, int | None] | None
) -> tuple[int | None, int | None, bool]:
    """(causal, window) as the caller writes them -> (window_left, window_right, top_left) as the kernels read them."""
    left, right = (None, None) if window is None else window
    if causal:
        right = 0 if right is None else min(right, 0)
    return left, right, causal == "top-left"


def reachable_window(
    left: int | None, right: int | None, top_left: bool, rows_q: int, rows_k: int, bounds: bool
) -> tuple[int | None, int | None, bool]:
    """(left, right, top_left) without the limits that cut nothing off, and bottom-right wherever both diagonals keep the same.

    bounds: `rows_*` are upper bounds, in a packed call and where keys have lengths, so there only a call without limits is known to have no
    use for its diagonal. What is left fits 32 bits.
    """
    reach_left, reach_right = (rows_q, rows_k) if top_left else (rows_k, rows_q)
    left = None if left is None or left >= reach_left - 1 else left
    right = None if right is None or right >= reach_right - 1 else right
    return left, right, top_left and (left is not None or right is not None) and (bounds or rows_q != rows_k)


def check_lengths(side: str, values: list[int], rows: int, limit: int | None = None) -> None:
    """ValueError unless cumulative lengths of `side` "q" or "k" start with 0, never fall, end within `rows`, by at most `limit` each."""
    lengths = [end - start for start, end in pairwise(values)]
    if values[0] != 0:
        raise ValueError(f"cu_seqlens_{side} starts with {values[0]}: expected 0")
    if min(lengths, default=0) < 0:
        entry = lengths.index(min(lengths))
        fall = f"falls from {values[entry]} to {values[entry + 1]} at entry {entry + 1}"
        raise ValueError(f"cu_seqlens_{side} {fall}: expected never falling")
    if values[-1] > rows:
        raise ValueError(f"cu_seqlens_{side} ends with {values[-1]} but {side} has {rows} rows: expected at most that")
    if limit is not None and max(lengths, default=0) > limit:
        raise ValueError(f"max_seqlen_{side}={limit} but a sequence has {max(lengths)} rows: expected at least that")


def check_used(values: list[int], rows: int) -> None:
    """ValueError unless each of the lengths of keys is one of 0 to `rows`."""
    for entry, value in enumerate(values):
        if not 0 <= value <= rows:
            raise ValueError(f"seqlens_k has {value} at entry {entry} but k has {rows} rows: expected 0 to {rows}")


def window_pairs(rows: int, columns: int, diagonal: int, left: int | None, right: int | None) -> int:
    """Number of pairs (i, j), 0 <= i < rows and 0 <= j < columns, with i + diagonal - left <= j <= i + diagonal + right: exact, in closed
    form. A limit of None is none.

    The columns of row i begin at clip(i + diagonal - left, 0, columns) and end before clip(i + diagonal + right + 1, 0, columns); both
    sum over the rows to arithmetic progressions.
    """

    def clipped_sum(first: int) -> int:
        """sum over i in [0, rows) of clip(first + i, 0, columns)"""
        rising_from = min(max(-first, 0), rows)
        rising_to = min(max(columns - first, rising_from), rows)
        steps = rising_to - rising_from
        return steps * first + (rising_from + rising_to - 1) * steps // 2 + (rows - rising_to) * columns

    ends = rows * columns if right is None else clipped_sum(diagonal + right + 1)
    starts = 0 if left is None else clipped_sum(diagonal - left)
    return ends - starts  # left and right are >= 0, so no row ends before it starts


def kept_pairs(problem: Problem) -> int:
    """Number of (query, key) pairs that the mask keeps, in one head of one batch entry."""
    return window_pairs(problem.seqlen_q, problem.seqlen_k, problem.diagonal(), problem.window_left, problem.window_right)
