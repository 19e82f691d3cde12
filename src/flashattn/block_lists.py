"""Blocks of scores as kernels read them: the one tensor that a `BlockMask` is, taken apart and put together.

A mask is cut into blocks of 128 queries by 128 keys. Of a block with all of its pairs kept nothing but the place is there; of one with
some, a tile of bits too; of one with none, nothing. Equal tiles are there once. int32, one-dimensional, these parts one after the other:

    header     HEADER numbers: batch, heads, seqlen_q, seqlen_k, entries, tiles, and where each of the other parts starts
    row offsets, row entries        the blocks of each block of queries: entries offsets[i] to offsets[i + 1] of list
                                    i = (batch entry * blocks of queries + block of queries) * heads + head, by rising key
    column offsets, column entries  the same, of each block of keys
    words      [tiles, 128, 4]: bit c % 32 of word c // 32 of row r says whether a block's query r keeps its key c

An entry is three numbers: the block on the other side, its tile or FULL, and its head. batch and heads are 1 where all share a mask.

The surprising fact: the lists of a block are ordered by head last, so that the heads that read one key/value head are one stretch of
entries, which dK and dV walk in one loop whether these heads share a mask or not.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 128
WORDS = BLOCK // 32  # of a row of a tile
HEADER, ENTRY = 16, 3
FULL = -1
TO_THE_TOP = sum(1 << (56 - 7 * i) for i in range(8))
ALL_EIGHT = sum(1 << (8 * i) for i in range(8))  # of `eights`
AT_ONCE = 1 << 22  # pairs that are looked at together
MOST = 2**31 - 1  # words of a mask, whose places are 32-bit


class Blocks(NamedTuple):
    """The kept blocks, each once: int64 [entries] each, in the order of `order_of` rows. tile: FULL, or a row of words, int32
    [tiles, 128, WORDS]."""

    entry: Tensor
    head: Tensor
    row: Tensor
    column: Tensor
    tile: Tensor
    words: Tensor


class Sizes(NamedTuple):
    """batch and heads are 1 where all share a mask."""

    batch: int
    heads: int
    seqlen_q: int
    seqlen_k: int

    @property
    def blocks_q(self) -> int:
        return -(-self.seqlen_q // BLOCK)

    @property
    def blocks_k(self) -> int:
        return -(-self.seqlen_k // BLOCK)

    @property
    def possible(self) -> int:
        """Blocks that a mask of these sizes may keep."""
        return self.batch * self.heads * self.blocks_q * self.blocks_k


def list_of(sizes: Sizes, blocks: Blocks, by_columns: bool = False) -> Tensor:
    """The list that each block is in."""
    count, place = (sizes.blocks_k, blocks.column) if by_columns else (sizes.blocks_q, blocks.row)
    return (blocks.entry * count + place) * sizes.heads + blocks.head


def pack(sizes: Sizes, blocks: Blocks) -> Tensor:
    """The tensor of a mask, with the blocks in any order. ValueError where it would have more than 2^31 words."""
    parts = []
    for by_columns, count in ((False, sizes.blocks_q), (True, sizes.blocks_k)):
        other, others = (blocks.row, sizes.blocks_q) if by_columns else (blocks.column, sizes.blocks_k)
        key = list_of(sizes, blocks, by_columns) * others + other
        key, order = key.sort()
        starts = torch.arange(sizes.batch * count * sizes.heads + 1, device=key.device) * others
        parts += [torch.searchsorted(key, starts), torch.stack([other, blocks.tile, blocks.head], 1)[order].flatten()]
    parts.append(blocks.words.flatten())
    starts, at = [], HEADER
    for place, part in enumerate(parts):
        at += -at % 4 if place == len(parts) - 1 else 0  # rows of words lie in 16 bytes each
        starts.append(at)
        at += part.numel()
    if at > MOST:
        what = f"a mask of {len(blocks.tile)} blocks and {len(blocks.words)} distinct tiles"
        raise ValueError(f"{what} takes {at} words: expected at most {MOST}")
    header = [*sizes, len(blocks.tile), len(blocks.words), *starts]
    packed = torch.zeros(at, dtype=torch.int32, device=blocks.words.device)
    packed[: len(header)] = torch.tensor(header, dtype=torch.int32, device="cpu")
    for start, part in zip(starts, parts, strict=True):
        packed[start : start + part.numel()] = part
    return packed


def unpack(packed: Tensor) -> tuple[Sizes, Blocks, Tensor, Tensor]:
    """(sizes, blocks, offsets of rows, offsets of columns). Reads the header, which waits for a GPU."""
    header = packed[:HEADER].tolist()
    sizes, entries, tiles, starts = Sizes(*header[:4]), header[4], header[5], header[6:11]
    offsets_q, rows, offsets_k, _ = (packed[start:end] for start, end in pairwise(starts))
    words = packed[starts[4] :].view(tiles, BLOCK, WORDS)
    offsets_k = offsets_k[: sizes.batch * sizes.blocks_k * sizes.heads + 1]
    column, tile, head = rows[: ENTRY * entries].view(entries, ENTRY).long().unbind(1)
    place = torch.searchsorted(offsets_q[1:].contiguous(), torch.arange(entries, dtype=torch.int32, device=packed.device), right=True)
    row, entry = place // sizes.heads % max(1, sizes.blocks_q), place // (sizes.heads * max(1, sizes.blocks_q))
    return sizes, Blocks(entry, head, row, column, tile, words), offsets_q, offsets_k


def existing(sizes: Sizes, row: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, columns) that exist of blocks at these places: 128 but at the ends."""
    return (sizes.seqlen_q - row * BLOCK).clamp(max=BLOCK), (sizes.seqlen_k - column * BLOCK).clamp(max=BLOCK)


def bits_of(words: Tensor) -> Tensor:
    """[..., 128, WORDS] -> bool [..., 128, 128]"""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & 1).bool().flatten(-2)


def eights(bits: Tensor) -> Tensor:
    """bool [..., 8 n] -> int64 [..., n], a byte for each: 1 or 0."""
    return bits.contiguous().view(torch.int64)


def words_of(bits: Tensor) -> Tensor:
    """bool [..., 128, 128] -> [..., 128, WORDS]. A product puts byte i of 8 at bit 56 + i: no two of its terms share a place."""
    packed = ((eights(bits) * TO_THE_TOP) >> 56) & 0xFF
    return packed.to(torch.uint8).view(torch.int32)


def dense_of(sizes: Sizes, blocks: Blocks) -> Tensor:
    """bool [entries, 128, 128] of these blocks; what doesn't exist is False."""
    bits = torch.ones(len(blocks.tile), BLOCK, BLOCK, dtype=torch.bool, device=blocks.tile.device)
    partial = blocks.tile != FULL
    bits[partial] = bits_of(blocks.words[blocks.tile[partial]])
    rows, columns = existing(sizes, blocks.row, blocks.column)
    place = torch.arange(BLOCK, device=bits.device)
    return bits & (place < rows[:, None])[:, :, None] & (place < columns[:, None])[:, None, :]


def check_format(packed: Tensor) -> None:
    """ValueError unless this can be the tensor of a mask, without a look at what it holds."""
    if packed.dtype != torch.int32 or packed.dim() != 1 or not packed.is_contiguous() or len(packed) < HEADER:
        came = f"{packed.dtype} of shape {tuple(packed.shape)}"
        raise ValueError(f"blocks is {came}: expected BlockMask.packed, int32, one-dimensional and contiguous, of {HEADER} numbers or more")


def check_parts(packed: Tensor) -> None:
    """ValueError unless the header tells of as many numbers as there are. Reads it, which waits for a GPU."""
    *sizes, entries, tiles = header = packed[:6].tolist()
    if min(header) < 0:
        raise ValueError(f"a mask of {Sizes(*sizes)}, {entries} blocks and {tiles} tiles: expected BlockMask.packed")
    starts, at, own = [], HEADER, Sizes(*sizes)
    for count in (own.blocks_q, own.blocks_k):
        for length in (own.batch * count * own.heads + 1, ENTRY * entries):
            starts.append(at)
            at += length
    starts.append(at + -at % 4)
    length = starts[-1] + tiles * BLOCK * WORDS
    if packed[6:11].tolist() != starts or len(packed) != length:
        came = f"{len(packed)} numbers for a mask of {own}, {entries} blocks and {tiles} tiles"
        raise ValueError(f"{came}: expected BlockMask.packed, here of {length} numbers with parts at {starts}")


def check_packed(packed: Tensor, batch: int, heads: int, seqlen_q: int, seqlen_k: int, device: torch.device) -> None:
    """ValueError unless this can be the tensor of a mask for a call of these sizes. What it holds is read on a CPU alone."""
    check_format(packed)
    if packed.device != device:
        raise ValueError(f"blocks is on {packed.device} and q on {device}: expected one device")
    if packed.device.type == "cpu":
        own = Sizes(*packed[:4].tolist())
        shared = (own.batch == batch or (own.batch and batch % own.batch == 0)) and own.heads in (1, heads)
        if not shared or own[2:] != (seqlen_q, seqlen_k):
            raise ValueError(f"blocks is of {own} and the call of {Sizes(batch, heads, seqlen_q, seqlen_k)}: expected the same, or shared")
