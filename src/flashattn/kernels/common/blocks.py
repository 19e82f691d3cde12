"""The kept blocks of a block mask: where a tile goes in a walk of them, and which scores of a block with bits are kept.

What is in memory: flashattn/block_lists.py. A list is walked as if its blocks lay side by side: place `at` of a walk is at % 128 of the
at // 128-th block, so one loop serves both, from 0 to so many blocks times 128. Tiles divide a block, in rows and in keys.

The surprising fact: bits are read the same way for tiles [M, N] and for transposed ones, since a word is of one query and 32 keys either
way; only the axes along which queries and keys are broadcast change places.
"""

import triton
import triton.language as tl

BLOCK: tl.constexpr = tl.constexpr(128)
ENTRY: tl.constexpr = tl.constexpr(3)  # numbers of an entry: the block, its tile, its head
WORDS: tl.constexpr = tl.constexpr(4)  # of a row of a tile
FULL: tl.constexpr = tl.constexpr(-1)  # in the place of a tile


@triton.jit
def block_list(blocks, entry, head, heads, first, COLUMNS: tl.constexpr):
    """(list, length of a walk of it, how often to walk it) of the block of queries that starts at or before row `first`, or with COLUMNS
    of keys: for `heads` heads from `head` on, of which one list tells all, or which share one. list: (its entries, words, first head)."""
    rows = tl.load(blocks + (2 + COLUMNS))
    own_heads = tl.load(blocks + 1)
    own_head = head % own_heads
    together = tl.minimum(heads, own_heads)
    number = (entry % tl.load(blocks) * tl.cdiv(rows, BLOCK) + first // BLOCK) * own_heads + own_head
    offsets = blocks + tl.load(blocks + 6 + 2 * COLUMNS) + number
    begin = tl.load(offsets)
    entries = blocks + tl.load(blocks + 7 + 2 * COLUMNS) + begin.to(tl.int64) * ENTRY
    return (entries, blocks + tl.load(blocks + 10), own_head), (tl.load(offsets + together) - begin) * BLOCK, heads // together


@triton.jit
def listed_place(listed, at):
    """(row or key, tile of bits or less than 0 if the block is full) at a place of a walk."""
    at = at + tl.full((), 0, tl.int32)  # the interpreter's loop variables are Python's ints
    entry = listed[0] + at // BLOCK * ENTRY
    return tl.load(entry) * BLOCK + at % BLOCK, tl.load(entry + 1)


@triton.jit
def listed_head(listed, at):
    """Which head the block at this place of a walk is of, counted from the first."""
    at = at + tl.full((), 0, tl.int32)
    return tl.load(listed[0] + (at // BLOCK * ENTRY + 2)) - listed[2]


@triton.jit
def kept_bits(listed, tile, row, key, n0, N: tl.constexpr):
    """The keep-mask of a tile of scores in a block with bits. row, key: positions that broadcast to it, of keys N from n0 on."""
    words = listed[1] + (tile * (BLOCK * WORDS) + row % BLOCK * WORDS + n0 % BLOCK // 32)
    word = tl.load(words)
    for i in tl.static_range(1, N // 32):
        word = tl.where(key % BLOCK // 32 == n0 % BLOCK // 32 + i, tl.load(words + i), word)
    return ((word >> (key % 32)) & 1) != 0


@triton.jit
def listed_tile(listed, length, block):
    """The tile of the block with this number; less than FULL if it isn't listed. length: as `block_list` gives it."""
    low = length * 0
    high = length // BLOCK
    while low < high:
        middle = (low + high) // 2
        if tl.load(listed[0] + middle * ENTRY) < block:
            low = middle + 1
        else:
            high = middle
    there = low < length // BLOCK
    entry = listed[0] + low * ENTRY
    found = tl.load(entry, mask=there, other=0) == block
    return tl.where(there & found, tl.load(entry + 1, mask=there, other=0), FULL - 1)
