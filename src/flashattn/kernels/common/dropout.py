"""Which pairs of a query and a key dropout keeps: a function of a seed, an offset, sequence, head and the two positions, of nothing else.

The same function in words, and in plain PyTorch, is flashattn/dropout.py. `sequence_words` once a program, `head_keys` once a head,
`row_keys` and `column_keys` for the positions of a tile, and `kept` for each pair. All take what they are given, in any layout and shape.

The surprising fact: p, a float, is what a kernel is told, and not how many words drop a pair. Triton compiles anew for integers of other
widths and for multiples of 16, and never for another float.
Source: Philox, Salmon et al. 2011, section 3.3; the constants of the mixer, Wellons 2018 (hash-prospector, "lowbias32").
"""

import triton
import triton.language as tl

ROW: tl.constexpr = tl.constexpr(0xC2B2AE35)
ROW_MIX: tl.constexpr = tl.constexpr(0x85EBCA6B)
COLUMN: tl.constexpr = tl.constexpr(0x9E3779B9)
FIRST: tl.constexpr = tl.constexpr(0x7FEB352D)
SECOND: tl.constexpr = tl.constexpr(0x846CA68B)


@triton.jit
def wrapped(x, MULTIPLIER: tl.constexpr):
    """The product modulo 2^32, on purpose: with TRITON_DEBUG=1 an operator would complain."""
    return tl.mul(x, MULTIPLIER, sanitize_overflow=False)


@triton.jit
def shifted(x, y):
    """The sum modulo 2^32."""
    return tl.add(x, y, sanitize_overflow=False)


@triton.jit
def folded(x, SHIFT: tl.constexpr):
    return x ^ (x >> SHIFT)


@triton.jit
def mix(x):
    return folded(wrapped(folded(wrapped(folded(x, 16), FIRST), 15), SECOND), 16)


@triton.jit
def sequence_words(rng, sequence):
    """Two random words of a sequence, uint32. rng: a pointer to int64 (seed, offset)."""
    seed = tl.load(rng)
    offset = tl.load(rng + 1)
    number = sequence.to(tl.uint32)
    rows, columns, _, _ = tl.philox(seed, offset.to(tl.uint32), (offset >> 32).to(tl.uint32), number, number * 0)
    return rows, columns


@triton.jit
def head_keys(words, head):
    """(key of rows, key of columns) of a query head."""
    rows, columns = words
    number = head.to(tl.uint32)
    return mix(shifted(rows, number)), mix(shifted(columns, number))


@triton.jit
def row_keys(key, row):
    """row: positions of queries in their sequence, any integers."""
    return row_keys_of(row_starts(key, row))


@triton.jit
def row_starts(key, row):
    """The half of `row_keys` that grows by a constant from row to row."""
    return wrapped(shifted(key, row.to(tl.uint32)), ROW)


@triton.jit
def row_keys_of(starts):
    return wrapped(folded(starts, 16), ROW_MIX)


@triton.jit
def column_keys(key, column):
    return shifted(key, wrapped(column.to(tl.uint32), COLUMN))


@triton.jit
def last_dropped(p):
    """The largest word, as a signed number, that drops a pair. p is at least 2^-32."""
    return (tl.cast(p * 4294967296.0, tl.int64) - 2147483649).to(tl.int32)


@triton.jit
def pair_words(row_key, column_key):
    """The random words of pairs, int32, of keys that broadcast."""
    word = wrapped(folded(wrapped(row_key ^ column_key, FIRST), 15), SECOND)
    return word.to(tl.int32, bitcast=True)


@triton.jit
def kept(row_key, column_key, dropped):
    """Whether pairs are kept. dropped: `last_dropped`."""
    return pair_words(row_key, column_key) > dropped


@triton.jit
def marked(p, keep):
    """Probabilities with the sign of what is dropped turned: one number a pair, of which come `unmarked` and `left_gradient`."""
    return tl.where(keep, p, -p)


@triton.jit
def unmarked(p):
    """p of the pairs that are kept, and 0 of others, which are negative."""
    return tl.maximum(p, 0.0)


@triton.jit
def left_gradient(weight, dp, rescale):
    """(the weight as it is without dropout, dp with its factor). weight: of `marked` probabilities; where it is 0, dp does not matter."""
    return tl.abs(weight), tl.where(weight > 0.0, dp, 0.0) * rescale
