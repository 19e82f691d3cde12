"""`BlockMask`: which pairs of a query and a key a call keeps, at the cost of the blocks that keep some. Data alone: see block_lists.py.

No constructor but `from_mask`, which is given one, ever holds a matrix of all pairs; of all blocks, only `from_layout` and the patterns do,
in blocks as coarse as theirs. Each makes blocks of bits a few hundred at a time, and of equal tiles one. The surprising fact: `&` and `|`
ask nothing of how a mask was made. A block that is full, or not there, is a tile of ones, or of zeros, for the moment, and there are few
different pairs of tiles to combine.

Over 300 lines because a public docstring says all that a caller has to know.
"""

from collections.abc import Callable, Iterable
from copy import copy

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from .block_lists import (
    ALL_EIGHT,
    AT_ONCE,
    BLOCK,
    FULL,
    WORDS,
    Blocks,
    Sizes,
    bits_of,
    check_format,
    check_parts,
    dense_of,
    eights,
    existing,
    pack,
    unpack,
    words_of,
)  # fmt: skip
from .checks import check_options
from .problem import canonical_window

ABSENT = -2  # the tile of a block that isn't kept


class BlockMask:
    """A mask of [batch or 1, heads_q or 1, seqlen_q, seqlen_k] pairs, True = attend, for :func:`attention`'s ``block_mask``.

    The pairs are cut into blocks of 128 queries by 128 keys. Blocks without a kept pair cost a call nothing: neither time nor memory, and
    their keys are not read. Memory: 12 bytes for each kept block, twice, and 2 KiB for each distinct tile of 128 x 128 bits of a block that
    keeps some of its pairs; the diagonal of a causal mask is one such tile.

    Made by the class methods below, combined by ``&`` and ``|``, and moved by ``to``. To make one takes time and waits for a GPU, so it
    should be made once and used by many calls, of all layers; not inside of ``torch.compile``.

    packed: the int32 tensor that kernels read, and all that there is to save: ``BlockMask(packed)`` is the mask again.
    ValueError for another tensor. shape: (batch, heads, seqlen_q, seqlen_k), the first two 1 where all share the mask. kept_blocks, tiles:
    how many blocks are kept, and of how many distinct tiles. density: kept blocks among all, 0 to 1.

    Source: Dao et al. 2022 (FlashAttention), section 3.3 and algorithm 5, for skipping blocks; Dong et al. 2024 (FlexAttention), section 4,
    for full and partial blocks.
    """

    def __init__(self, packed: Tensor):
        check_format(packed)
        check_parts(packed)
        with torch.inference_mode(False):  # one that is made in inference serves training too
            self.packed = packed.clone() if packed.is_inference() else packed
        self.batch, self.heads, self.seqlen_q, self.seqlen_k, self.kept_blocks, self.tiles = packed[:6].tolist()

    # ------------------------------------------------------------------------------------------------------------------ what it is

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.seqlen_q, self.seqlen_k

    @property
    def device(self) -> torch.device:
        return self.packed.device

    @property
    def density(self) -> float:
        possible = Sizes(*self.shape).possible
        return self.kept_blocks / possible if possible else 0.0

    def __repr__(self) -> str:
        sizes = Sizes(*self.shape)
        kept = f"{self.kept_blocks} of {sizes.possible} blocks, {self.tiles} distinct tiles"
        return f"BlockMask({', '.join(f'{name}={size}' for name, size in sizes._asdict().items())}: {kept}, device={str(self.device)!r})"

    def to(self, device: torch.device | str) -> "BlockMask":
        moved = copy(self)
        moved.packed = self.packed.to(device)
        return moved

    def kept_pairs(self, batch: int | None = None, heads: int | None = None) -> int | None:
        """How many pairs are kept: of so many batch entries and heads, by default of those that the mask has. None for one without
        memory."""
        if self.device.type == "meta" or isinstance(self.packed, FakeTensor):
            return None
        sizes, blocks, _, _ = unpack(self.packed)
        of_tiles = [bits_of(some).sum((-1, -2)) for some in blocks.words.split(AT_ONCE // BLOCK**2)]
        rows, columns = existing(sizes, blocks.row, blocks.column)
        full = blocks.tile == FULL
        partial = torch.cat(of_tiles)[blocks.tile[~full]].sum() if of_tiles else 0
        times = (self.batch if batch is None else batch) * (self.heads if heads is None else heads)
        return int((rows * columns)[full].sum() + partial) * times // max(1, self.batch * self.heads)

    def to_dense(self) -> Tensor:
        """bool ``[batch, heads, seqlen_q, seqlen_k]``, as `shape` has them: all pairs in memory, to look at."""
        sizes, blocks, _, _ = unpack(self.packed)
        dense = torch.zeros(*sizes[:2], sizes.blocks_q, sizes.blocks_k, BLOCK, BLOCK, dtype=torch.bool, device=self.device)
        dense[blocks.entry, blocks.head, blocks.row, blocks.column] = dense_of(sizes, blocks)
        dense = dense.transpose(3, 4).flatten(4, 5).flatten(2, 3)
        return dense[:, :, : self.seqlen_q, : self.seqlen_k]

    # ---------------------------------------------------------------------------------------------------------------- how it is made

    @classmethod
    def from_mask(cls, mask: Tensor) -> "BlockMask":
        """Of a mask in memory, bool ``[..., seqlen_q, seqlen_k]`` with up to four dimensions, ``[batch or 1, heads or 1]`` the first two.

        TypeError for another dtype, ValueError for another number of dimensions.
        """
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            raise TypeError(f"mask is {_kind(mask)}: expected a torch.bool tensor")
        if not 2 <= mask.dim() <= 4:
            raise ValueError(f"mask has shape {tuple(mask.shape)}: expected [seqlen_q, seqlen_k], [heads, ...] or [batch, heads, ...]")
        mask = mask[(None,) * (4 - mask.dim())]
        return cls._evaluated(Sizes(*mask.shape), mask.device, lambda b, h, rows, keys: mask[b, h, rows, keys])

    @classmethod
    def from_mask_mod(
        cls,
        mask_mod: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
        batch: int | None,
        heads: int | None,
        seqlen_q: int,
        seqlen_k: int,
        device: torch.device | str = "cpu",
    ) -> "BlockMask":
        """Of a function ``mask_mod(b, h, q_idx, kv_idx)`` that says whether a pair is kept: FlexAttention's, as they are.

        It is called with int64 tensors that stand for one number each (under ``torch.vmap``), a piece of at most 4 million pairs at a time,
        and may read other tensors on `device` at these places. batch, heads: None or 1 where the function doesn't look at b, or h. Time:
        all pairs, once; for windows and documents `from_window` and `from_document_ids` look at what is kept alone.

        TypeError for a function that returns something else than a bool tensor; ValueError for sizes that are none.
        """
        sizes = _sizes(batch=1 if batch is None else batch, heads=1 if heads is None else heads, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
        device = torch.device(device)

        def scalar(number: int) -> Tensor:
            return torch.tensor(number, device=device)

        def evaluate(b: int, h: int, rows: slice, keys: slice) -> Tensor:
            row, key = (torch.arange(at.start, at.stop, device=device) for at in (rows, keys))
            over_keys = torch.vmap(mask_mod, (None, None, None, 0))
            found = torch.vmap(over_keys, (None, None, 0, None))(scalar(b), scalar(h), row, key)
            if not isinstance(found, Tensor) or found.dtype != torch.bool or found.shape != (len(row), len(key)):
                came = f"{found.dtype} of shape {tuple(found.shape[2:])}" if isinstance(found, Tensor) else type(found).__name__
                raise TypeError(f"mask_mod returned {came} for a pair: expected one torch.bool")
            return found

        return cls._evaluated(sizes, device, evaluate)

    @classmethod
    def from_layout(
        cls, layout: Tensor, block_size: int = BLOCK, *, seqlen_q: int | None = None, seqlen_k: int | None = None
    ) -> "BlockMask":
        """Of whole blocks: bool ``[..., blocks of queries, blocks of keys]``, dimensions as in `from_mask`, each of block_size x block_size
        pairs, a multiple of 128. seqlen_q, seqlen_k: default all of the blocks; the last may end earlier.
        """
        if not isinstance(layout, Tensor) or layout.dtype != torch.bool:
            raise TypeError(f"layout is {_kind(layout)}: expected a torch.bool tensor")
        if not 2 <= layout.dim() <= 4:
            raise ValueError(f"layout has shape {tuple(layout.shape)}: expected 2 to 4 dimensions, the last two blocks of queries and keys")
        if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1 or block_size % BLOCK:
            raise ValueError(f"block_size={block_size!r}: expected a multiple of {BLOCK}")
        layout = layout[(None,) * (4 - layout.dim())]
        lengths = []
        for name, length, blocks in (("seqlen_q", seqlen_q, layout.shape[2]), ("seqlen_k", seqlen_k, layout.shape[3])):
            lengths.append(blocks * block_size if length is None else length)
            if -(-lengths[-1] // block_size) != blocks:
                raise ValueError(f"{name}={length} with {blocks} blocks of {block_size}: expected one that ends in the last of them")
        sizes = _sizes(batch=layout.shape[0], heads=layout.shape[1], seqlen_q=lengths[0], seqlen_k=lengths[1])
        for dim in (2, 3):
            layout = layout.repeat_interleave(block_size // BLOCK, dim)
        entry, head, row, column = layout[:, :, : sizes.blocks_q, : sizes.blocks_k].nonzero().unbind(1)
        return cls._of(sizes, Blocks(entry, head, row, column, torch.full_like(entry, FULL), _no_words(layout.device)))

    @classmethod
    def from_document_ids(cls, ids: Tensor, *, causal: bool = False) -> "BlockMask":
        """Documents packed in rows: query i of an entry keeps key j where ``ids[b, i] == ids[b, j]``, and with `causal` ``j <= i``.

        ids: integers ``[batch, seqlen]`` or ``[seqlen]`` (then for all entries), in any order. Negative ones are padding: such rows keep
        nothing and nobody keeps them. Memory: the tokens and the kept blocks; time: the kept blocks. Where documents are not
        contiguous time is that of all pairs of blocks, and memory holds the numbers of those whose documents may meet. The
        same as `attention_varlen` of the documents one behind the other.

        TypeError for ids that are no integers, ValueError for another number of dimensions.
        """
        if not isinstance(ids, Tensor) or ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
            raise TypeError(f"ids is {_kind(ids)}: expected a tensor of integers")
        if ids.dim() not in (1, 2):
            raise ValueError(f"ids has shape {tuple(ids.shape)}: expected [batch, seqlen] or [seqlen]")
        if not isinstance(causal, bool):
            raise ValueError(f"causal={causal!r}: expected a bool")
        ids = (ids[None] if ids.dim() == 1 else ids).long()
        sizes = Sizes(ids.shape[0], 1, ids.shape[1], ids.shape[1])
        first = torch.nn.functional.pad(_first_places(ids), (0, -sizes.seqlen_q % BLOCK), value=-1).view(-1, BLOCK)
        row, column = _meeting(first, sizes.blocks_q, causal)
        alike = (first[:, 0] >= 0) & (first == first[:, :1]).all(1)
        full = alike[row] & alike[column] & (first[row, 0] == first[column, 0]) & ((column < row) | (not causal))
        below = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=ids.device).tril_()

        def blocks() -> Iterable[tuple[Tensor, ...]]:
            for r, c in zip(*(x[~full].split(AT_ONCE // BLOCK**2) for x in (row, column)), strict=True):
                bits = (first[r][:, :, None] == first[c][:, None, :]) & (first[r] >= 0)[:, :, None]
                yield r, c, bits & (below | (c < r)[:, None, None]) if causal else bits

        found, tiles = [(row[full], column[full], torch.full_like(row[full], FULL))], [_no_words(ids.device)]
        for r, c, bits in blocks():
            kept = bits.flatten(1).any(1)
            words, place = _distinct(words_of(bits[kept]))
            found.append((r[kept], c[kept], place + sum(map(len, tiles))))
            tiles.append(words)
        (r, c, place), words = (torch.cat(x) for x in zip(*found, strict=True)), torch.cat(tiles)
        blocks_q = max(1, sizes.blocks_q)
        return cls._of(sizes, _classified(sizes, Blocks(r // blocks_q, r * 0, r % blocks_q, c % blocks_q, place, words)))

    @classmethod
    def from_window(
        cls, seqlen_q: int, seqlen_k: int, *, causal: bool | str = False, window: tuple[int | None, int | None] | None = None,
        device: torch.device | str = "cpu",
    ) -> "BlockMask":  # fmt: skip
        """What the options `causal` and `window` of :func:`attention` keep, to combine with another mask: ``mask & from_window(...)``. Time
        and memory: the kept blocks. Raises what they raise there.
        """
        window, _ = check_options(causal, window, None, False)
        left, right, top_left = canonical_window(causal, window)
        sizes, device = _sizes(batch=1, heads=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k), torch.device(device)
        reach = seqlen_q + seqlen_k
        diagonal = 0 if top_left else seqlen_k - seqlen_q
        low = diagonal - (reach if left is None else min(left, reach))  # of kept key - query
        high = diagonal + (reach if right is None else min(right, reach))
        row = torch.arange(sizes.blocks_q, device=device)
        last_row = (row * BLOCK + BLOCK).clamp(max=seqlen_q) - 1
        first = (row * BLOCK + low).clamp(min=0) // BLOCK  # of the blocks of keys; each key from there to the last is kept by some row
        count = (((last_row + high).clamp(-1, seqlen_k - 1) + BLOCK) // BLOCK - first).clamp(min=0)
        begin = count.cumsum(0) - count
        row = row.repeat_interleave(count)
        column = first[row] + torch.arange(len(row), device=device) - begin[row]
        rows, columns = existing(sizes, row, column)
        offset = (column - row) * BLOCK
        full = (offset - (rows - 1) >= low) & (offset + columns - 1 <= high)
        kinds, place = torch.stack([offset, rows, columns], 1)[~full].unique(dim=0, return_inverse=True)
        i = torch.arange(BLOCK, device=device)
        distance = kinds[:, 0, None, None] + i - i[:, None]
        bits = (distance >= low) & (distance <= high) & (i[:, None] < kinds[:, 1, None, None]) & (i < kinds[:, 2, None, None])
        tile = torch.full_like(row, FULL).masked_scatter_(~full, place)
        return cls._of(sizes, Blocks(row * 0, row * 0, row, column, tile, words_of(bits)))

    @classmethod
    def local_global(
        cls, seqlen_q: int, seqlen_k: int, *, local_blocks: int = 1, global_blocks: int = 1, block_size: int = BLOCK,
        causal: bool = False, device: torch.device | str = "cpu",
    ) -> "BlockMask":  # fmt: skip
        """Neighbours, and a few that all see: with blocks R of queries and C of keys, block (R, C) is kept where |R - C| <= local_blocks,
        or R or C is one of the first global_blocks. causal: of these the keys ``j <= i + seqlen_k - seqlen_q`` alone.

        Source: Beltagy et al. 2020 (Longformer), section 3.1; Zaheer et al. 2020 (BigBird), section 2; by blocks, Dao et al. 2022
        (FlashAttention), section 3.3.
        """
        _sizes(local_blocks=local_blocks, global_blocks=global_blocks)
        return cls._pattern(
            seqlen_q, seqlen_k, block_size, causal, device,
            lambda row, column: ((row - column).abs() <= local_blocks) | (row < global_blocks) | (column < global_blocks),
        )  # fmt: skip

    @classmethod
    def butterfly(
        cls, seqlen_q: int, seqlen_k: int, *, max_stride: int | None = None, global_blocks: int = 0, block_size: int = BLOCK,
        causal: bool = False, device: torch.device | str = "cpu",
    ) -> "BlockMask":  # fmt: skip
        """The sum of the factors of a butterfly, as of a fast Fourier transform: block (R, C) is kept where R and C differ in at most one
        binary digit, which is worth at most max_stride (default: any). So each of n blocks of queries keeps 1 + log2 n blocks of keys, and
        log2 n layers connect everything. global_blocks, causal: as in `local_global`; they stand for the low-rank part.

        Source: Dao et al. 2021 (Pixelated Butterfly), section 3, the flat block butterfly; for attention Dao et al. 2022 (FlashAttention),
        section 3.3.
        """
        _sizes(global_blocks=global_blocks, **({} if max_stride is None else {"max_stride": max_stride}))

        def keep(row: Tensor, column: Tensor) -> Tensor:
            digits = row ^ column
            near = digits & (digits - 1) == 0
            near = near if max_stride is None else near & (digits <= max_stride)
            return near | (row < global_blocks) | (column < global_blocks)

        return cls._pattern(seqlen_q, seqlen_k, block_size, causal, device, keep)

    # -------------------------------------------------------------------------------------------------------------- how it is combined

    def __and__(self, other: "BlockMask") -> "BlockMask":
        """Pairs that both keep. Batch and heads broadcast; ValueError for sizes or devices that don't fit."""
        return self._combined(other, torch.bitwise_and) if isinstance(other, BlockMask) else NotImplemented

    def __or__(self, other: "BlockMask") -> "BlockMask":
        """Pairs that either keeps."""
        return self._combined(other, torch.bitwise_or) if isinstance(other, BlockMask) else NotImplemented

    def _combined(self, other: "BlockMask", combine: Callable[[Tensor, Tensor], Tensor]) -> "BlockMask":
        if self.shape[2:] != other.shape[2:] or any(a != b and 1 not in (a, b) for a, b in zip(self.shape, other.shape, strict=True)):
            raise ValueError(f"masks have shapes {self.shape} and {other.shape}: expected the same seqlens, and batch and heads equal or 1")
        if self.device != other.device:
            raise ValueError(f"masks are on {self.device} and {other.device}: expected one device, see BlockMask.to")
        # of sizes 1 and 0 it is 0, as in torch
        batch, heads = (a if b == 1 else b for a, b in zip(self.shape[:2], other.shape[:2], strict=True))
        sizes = Sizes(batch, heads, *self.shape[2:])
        parts = [_spread(mask, sizes) for mask in (self, other)]
        if combine is torch.bitwise_and:
            (keys, _, _), (key, tile, _) = parts
            keys = keys[_looked_up(keys, key, tile) != ABSENT]
        else:
            keys = torch.cat([key for key, _, _ in parts]).unique()
        tiles = [_looked_up(keys, key, tile) for key, tile, _ in parts]
        column, rest = keys % max(1, sizes.blocks_k), keys // max(1, sizes.blocks_k)
        row, lane = rest % max(1, sizes.blocks_q), rest // max(1, sizes.blocks_q)
        kinds, place = torch.stack([*tiles, *existing(sizes, row, column)], 1).unique(dim=0, return_inverse=True)
        whole = _existing_words(kinds[:, 2], kinds[:, 3])
        of_kinds = (_words_of_kinds(kinds[:, i], words, whole) for i, (_, _, words) in enumerate(parts))
        blocks = Blocks(lane // max(1, sizes.heads), lane % max(1, sizes.heads), row, column, place, combine(*of_kinds))
        return self._of(sizes, _classified(sizes, blocks))

    # ------------------------------------------------------------------------------------------------------------------------- parts

    @classmethod
    def _of(cls, sizes: Sizes, blocks: Blocks) -> "BlockMask":
        return cls(pack(sizes, blocks))

    @classmethod
    def _evaluated(cls, sizes: Sizes, device: torch.device, evaluate: Callable[[int, int, slice, slice], Tensor]) -> "BlockMask":
        """Of a function that gives any rectangle of pairs, bool [rows, keys]."""
        keys_step = min(max(1, sizes.blocks_k), AT_ONCE // BLOCK**2) * BLOCK
        rows_step = max(1, AT_ONCE // BLOCK // keys_step) * BLOCK
        found, before = [], 0
        for lane in range(sizes.batch * sizes.heads):
            b, h = divmod(lane, sizes.heads)
            for i in range(0, sizes.seqlen_q, rows_step):
                for j in range(0, sizes.seqlen_k, keys_step):
                    rows, keys = slice(i, min(i + rows_step, sizes.seqlen_q)), slice(j, min(j + keys_step, sizes.seqlen_k))
                    bits = evaluate(b, h, rows, keys)
                    bits = torch.nn.functional.pad(bits, (0, -bits.shape[1] % BLOCK, 0, -bits.shape[0] % BLOCK))
                    bits = bits.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).transpose(1, 2).contiguous()
                    together = eights(bits).flatten(2)
                    row, column = (together != 0).any(-1).nonzero().unbind(1)
                    full = (together[row, column] == ALL_EIGHT).all(-1)  # at the ends `_classified` finds out
                    words, place = _distinct(words_of(bits[row[~full], column[~full]]))
                    tile = torch.full_like(row, FULL).masked_scatter_(~full, place + before)
                    found.append((row * 0 + b, row * 0 + h, row + i // BLOCK, column + j // BLOCK, tile, words))
                    before += len(words)
        if not found:
            nothing = torch.zeros(0, dtype=torch.int64, device=device)
            return cls._of(sizes, Blocks(*[nothing] * 5, _no_words(device)))
        *places, words = map(torch.cat, zip(*found, strict=True))
        return cls._of(sizes, _classified(sizes, Blocks(*places, words)))

    @classmethod
    def _pattern(cls, seqlen_q, seqlen_k, block_size, causal, device, keep: Callable[[Tensor, Tensor], Tensor]) -> "BlockMask":
        """Of whole blocks by their numbers, and with `causal` no later keys."""
        _sizes(seqlen_q=seqlen_q, seqlen_k=seqlen_k)
        if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
            raise ValueError(f"block_size={block_size!r}: expected a multiple of {BLOCK}")
        row, column = (torch.arange(-(-length // block_size), device=device) for length in (seqlen_q, seqlen_k))
        mask = cls.from_layout(keep(row[:, None], column[None, :]), block_size, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
        return mask & cls.from_window(seqlen_q, seqlen_k, causal=causal, device=device) if causal else mask


def check_block_mask(mask, q: Tensor, k: Tensor, causal, window, seqlens_k=None, has_mods: bool = False) -> Tensor | None:
    """The tensor of a mask for q and k in the order [batch, rows, heads, dim]; None for none."""
    if mask is None:
        return None
    if not isinstance(mask, BlockMask):
        made = "as BlockMask.from_mask makes of a bool tensor"
        raise TypeError(f"block_mask is a {type(mask).__name__}: expected a flashattn.BlockMask, {made}")
    if causal is not False or window is not None:
        came = f"causal={causal!r}" if causal is not False else f"window={window!r}"
        made = f"block_mask & BlockMask.from_window(seqlen_q, seqlen_k, {came}, device=q.device)"
        raise ValueError(f"{came} beside a block_mask: expected one that says both, block_mask={made}, made once")
    if seqlens_k is not None:
        instead = "as BlockMask.from_mask_mod(lambda b, h, q, k: k < seqlens_k[b], ...) or negative ids of from_document_ids do"
        raise NotImplementedError(f"seqlens_k beside a block_mask is not implemented: say it in the mask, {instead}")
    if has_mods:
        instead = "a mask_mod's function makes one, BlockMask.from_mask_mod, and softcap, alibi_slopes and bias are options"
        raise NotImplementedError(f"a score_mod or mask_mod beside a block_mask is not implemented: {instead}")
    batch, rows, heads, keys = q.shape[0], q.shape[1], q.shape[2], k.shape[1]
    if mask.batch not in (1, batch) or mask.heads not in (1, heads) or (mask.seqlen_q, mask.seqlen_k) != (rows, keys):
        expected = f"({batch} or 1, {heads} or 1, {rows}, {keys})"
        raise ValueError(f"block_mask has shape {mask.shape}: expected [batch, heads_q, seqlen_q, seqlen_k] {expected}")
    if mask.packed.device != q.device:
        raise ValueError(f"block_mask is on {mask.packed.device} and q on {q.device}: expected one device, see BlockMask.to")
    if hasattr(q, "placements"):
        raise NotImplementedError(
            "block_mask of a DTensor is not implemented: call attention with q.to_local() and so on, and the mask of the shard"
        )
    return mask.packed


def _kind(x) -> str:
    return str(x.dtype) if isinstance(x, Tensor) else type(x).__name__


def _sizes(**sizes: int) -> Sizes | None:
    """TypeError and ValueError for sizes that are none, by name; Sizes if these are all of them."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name} is {size!r}: expected an int")
        if size < 0:
            raise ValueError(f"{name}={size}: expected 0 or more")
    return Sizes(**sizes) if len(sizes) == len(Sizes._fields) else None


def _no_words(device) -> Tensor:
    return torch.zeros(0, BLOCK, WORDS, dtype=torch.int32, device=device)


def _distinct(words: Tensor) -> tuple[Tensor, Tensor]:
    """(the distinct ones, which of them each is)"""
    if not len(words):
        return words, torch.zeros(0, dtype=torch.int64, device=words.device)
    found, place = words.flatten(1).unique(dim=0, return_inverse=True)
    return found.unflatten(1, (BLOCK, WORDS)), place


def _existing_words(rows: Tensor, columns: Tensor) -> Tensor:
    """The words of blocks of which so many rows and columns exist, all kept: [..., 128, WORDS]."""
    i = torch.arange(BLOCK, device=rows.device)
    return words_of((i[:, None] < rows[:, None, None]) & (i < columns[:, None, None]))


def _classified(sizes: Sizes, blocks: Blocks) -> Blocks:
    """Without blocks that keep nothing, FULL where they keep all that exists, and each tile once and only if it is one of the rest."""
    words, kinds = _distinct(blocks.words)
    rows, columns = existing(sizes, blocks.row, blocks.column)
    given = blocks.tile != FULL
    tile = torch.where(given, 0, blocks.tile)
    tile[given] = kinds[blocks.tile[given]]
    # a tile is full or not by how much of its block exists
    ends, end = torch.stack([rows, columns], 1).unique(dim=0, return_inverse=True)
    full = torch.stack([(words == whole).flatten(1).all(1) for whole in _existing_words(*ends.unbind(1))]) if len(ends) else ends.bool()
    tile = torch.where(given & full[end, tile], FULL, tile) if len(words) else tile
    partial = tile != FULL
    kept = ~partial
    kept[partial] = (words != 0).flatten(1).any(1)[tile[partial]]
    used, place = tile[kept & partial].unique(return_inverse=True)
    tile = tile.masked_scatter(kept & partial, place)
    return Blocks(*(x[kept] for x in (blocks.entry, blocks.head, blocks.row, blocks.column, tile)), words[used])


def _spread(mask: BlockMask, sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """(number of each block among all of `sizes`, rising; its tile; the words), as if each entry and head had its own."""
    own, blocks, _, _ = unpack(mask.packed)
    lanes = torch.arange(sizes.batch * sizes.heads, device=mask.device).view(sizes.batch, sizes.heads)
    copies = lanes.unflatten(0, (-1, own.batch)).unflatten(2, (-1, own.heads)) if lanes.numel() else lanes.view(0, 1, 0, 1)
    lane = copies[:, blocks.entry, :, blocks.head] if lanes.numel() else lanes.new_zeros(0, 0, 0)
    key = (lane * sizes.blocks_q + blocks.row.view(-1, 1, 1)[: len(lane)]) * sizes.blocks_k + blocks.column.view(-1, 1, 1)[: len(lane)]
    key, order = key.flatten().sort()
    return key, blocks.tile.view(-1, 1, 1)[: len(lane)].expand_as(lane).flatten()[order], blocks.words


def _looked_up(keys: Tensor, key: Tensor, tile: Tensor) -> Tensor:
    """The tiles of blocks with these numbers, ABSENT where there is none."""
    if not len(key):
        return torch.full_like(keys, ABSENT)
    place = torch.searchsorted(key, keys).clamp(max=len(key) - 1)
    return torch.where(key[place] == keys, tile[place], ABSENT)


def _words_of_kinds(tile: Tensor, words: Tensor, whole: Tensor) -> Tensor:
    """Of a FULL block those in `whole`, of an ABSENT one zeros."""
    found = torch.cat([words, _no_words(words.device).new_zeros(2, BLOCK, WORDS)])[tile]  # FULL and ABSENT are the last two
    return torch.where((tile == FULL)[:, None, None], whole, found)


def _first_places(ids: Tensor) -> Tensor:
    """Where the id of each token came first, counted over all entries, so that documents of other entries have others; -1 for padding."""
    entry = torch.arange(ids.shape[0], device=ids.device)[:, None]
    values, number = ids.unique(return_inverse=True)
    _, key = (entry * max(1, len(values)) + number).unique(return_inverse=True)
    place = torch.arange(ids.numel(), device=ids.device)
    first = torch.full_like(place, ids.numel()).scatter_reduce_(0, key.flatten(), place, "amin")
    return first[key].masked_fill(ids < 0, -1)


def _meeting(first: Tensor, blocks: int, causal: bool) -> tuple[Tensor, Tensor]:
    """(row, column) of pairs of blocks, counted over all entries, whose ranges of `first` [blocks of all entries, 128] meet."""
    real = (first >= 0).any(1).nonzero().squeeze(1)
    found = first[real]
    low, high = found.masked_fill(found < 0, torch.iinfo(torch.int64).max).amin(1), found.amax(1)
    so_far = found.flatten().cummax(0).values if found.numel() else found.flatten()
    if bool(((found.flatten() == so_far) | (found.flatten() < 0)).all()):  # contiguous documents: what a block meets is a stretch
        begin, end = torch.searchsorted(high, low), torch.searchsorted(low, high, right=True)
        place = torch.arange(len(real), device=first.device)
        count = ((torch.minimum(end, place + 1) if causal else end) - begin).clamp(min=0)
        row = place.repeat_interleave(count)
        column = begin[row] + torch.arange(len(row), device=first.device) - (count.cumsum(0) - count)[row]
        return real[row], real[column]
    rows, columns = [], []
    for some in torch.arange(len(real), device=first.device).split(max(1, AT_ONCE // max(1, len(real)))):
        meets = (low[some, None] <= high) & (low <= high[some, None])
        meets &= (real <= real[some, None]) | (not causal)
        r, c = meets.nonzero().unbind(1)
        rows.append(real[some][r])
        columns.append(real[c])
    return torch.cat(rows), torch.cat(columns)
