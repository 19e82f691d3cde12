"""From the program id to rows of a sequence: the grid order, packed sequences, tile loads and stores.

Everything runs on grid x. Offsets are 64-bit from the first multiplication on. A packed batch needs neither the longest length nor
a prefix sum: sequence b owns the tile slots from cu[b] // BLOCK + b, which is always enough for its rows, and that map is monotone,
so a program finds its sequence by bisection. The rows past cu[batch] form one more sequence, whose other side is empty: that is how
they come out as zeros. Bad cumulative lengths are clamped into the tensor, so they can never reach outside it.
"""

import triton
import triton.language as tl


@triton.jit
def tile_in_order(index, per_wave, lanes, wave):
    """(slot, lane) of the index-th tile: inside a wave, of per_wave tiles, all lanes take slot 0, then all take slot 1, ..."""
    first = index // per_wave * wave
    rest = index % per_wave
    width = tl.minimum(lanes - first, wave)
    return rest // width, first + rest % width


@triton.jit
def program_tile(total, batch, heads, wave, BLOCK: tl.constexpr, VARLEN: tl.constexpr):
    """(slot, slots, lane): a lane is a head of a batch entry; inside a wave all lanes take slot 0, then all take slot 1, ..."""
    if VARLEN:
        slots = total // BLOCK + batch + 1
        lanes = heads
    else:
        slots = tl.cdiv(total, BLOCK)
        lanes = heads * batch
    slot, lane = tile_in_order(tl.program_id(0), slots * wave, lanes, wave)
    return slot, slots, lane


@triton.jit
def sequence_of_slot(slot, cu, batch, total, BLOCK: tl.constexpr):
    """The last sequence b whose first slot cu[b] // BLOCK + b is not past `slot`; b = batch is the tail after all sequences."""
    low = slot * 0
    high = low + batch
    while low < high:
        middle = (low + high + 1) // 2
        start = tl.minimum(tl.maximum(tl.load(cu + middle), 0), total)
        if start // BLOCK + middle <= slot:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def packed_range(b, cu, batch, total):
    """(first row, rows) of sequence b, clamped into [0, total]; the tail for b = batch."""
    start = tl.minimum(tl.maximum(tl.load(cu + b), 0), total)
    end = tl.where(b < batch, tl.load(cu + b + 1, mask=b < batch, other=0), total)  # `other` would be cut to 32 bits
    end = tl.maximum(tl.minimum(end, total), start)
    return start, end - start


@triton.jit
def used_rows(lengths, entry, total):
    """Rows of a batch entry that has a length, clamped into [0, total]."""
    return tl.minimum(tl.maximum(tl.load(lengths + entry), 0), total)


@triton.jit
def locate(slot, lane, heads, mine, other, BLOCK: tl.constexpr, total_mine, total_other, batch, VARLEN: tl.constexpr):
    """Where a program works: (tile, batch entry, head, first row and rows of its own side, first row and rows of the other side, sequence).

    A sequence of a dense batch is its batch entry; of a packed one, whose batch entry is 0, it may be `batch`, the rows past the end.

    `mine` and `other` are the cumulative lengths of the side that the grid tiles and of the side that the loop walks; of a dense batch
    None, or the lengths themselves.
    """
    if VARLEN:
        head = lane
        b = sequence_of_slot(slot, mine, batch, total_mine, BLOCK)
        my_start, my_rows = packed_range(b, mine, batch, total_mine)
        tile = slot - (my_start // BLOCK + b)
        other_start, other_rows = packed_range(b, other, batch, total_other)
        other_rows = tl.where(b < batch, other_rows, 0)
        entry = b * 0
    else:
        head = lane % heads
        entry = lane // heads
        b = entry
        tile = slot
        my_start = slot * 0
        my_rows = my_start + total_mine
        other_start = my_start
        other_rows = my_start + total_other
        if mine is not None:
            my_rows = used_rows(mine, entry, my_rows)
        if other is not None:
            other_rows = used_rows(other, entry, other_rows)
    return tile, entry, head, my_start, my_rows, other_start, other_rows, b


@triton.jit
def wide(x):
    """64 bits, also of a Python int: the interpreter's loop variables are ints."""
    return x + tl.full((), 0, tl.int64)


@triton.jit
def step(index, stride, ALIGN: tl.constexpr):
    """index * stride in 64 bits. ALIGN (see Tile) keeps loads wide when a stride is no multiple of 16, the only divisor that Triton
    looks for. The hint must sit on the product itself: on an argument it is lost in inlining, and on a sum when a term folds away.
    """
    offset = wide(index) * stride
    if ALIGN > 1:  # a hint of 1 would make the compiler forget what it knows
        offset = tl.multiple_of(offset, ALIGN)
    return offset


@triton.jit
def existing(first, rows, BLOCK: tl.constexpr, RAGGED: tl.constexpr = True):
    """Positions of a tile as mods are given them: past the end, which a tile reaches if RAGGED, the last one again, so that what they read
    by it is there. (Positions that aren't bounded are known to follow each other, and what is read by them comes in vectors.)"""
    position = first + tl.arange(0, BLOCK)
    if RAGGED:
        position = tl.minimum(position, rows - 1)
    return position


@triton.jit
def rows_pointer(view, entry, head, row, ALIGN: tl.constexpr):
    """Pointer to element 0 of a row."""
    return view.ptr + (step(entry, view.stride_b, ALIGN) + step(head, view.stride_h, ALIGN) + step(row, view.stride_n, ALIGN))


@triton.jit
def head_pointer(tensor, entry, head, heads, total):
    """Pointer to row 0 of a head of a contiguous [batch, heads, rows] tensor (lse and delta)."""
    return tensor + (wide(entry) * heads + head) * total


@triton.jit
def tile_pointers(view, base, BLOCK: tl.constexpr, BLOCK_DIM: tl.constexpr, ALIGN: tl.constexpr):
    """Pointers to the BLOCK rows from `base`. A loop makes them once and adds a scalar: made anew in each iteration they save registers
    and cost a fifth of the speed.
    """
    offsets = wide(tl.arange(0, BLOCK))[:, None] * view.stride_n
    if ALIGN > 1:
        offsets = tl.multiple_of(offsets, (ALIGN, ALIGN))
    return base + (offsets + tl.arange(0, BLOCK_DIM)[None, :])


@triton.jit
def load_tile(pointers, rows, DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_DIM: tl.constexpr, MASKED: tl.constexpr):
    """A tile of which `rows` rows exist (read only when MASKED); what does not exist reads as zero."""
    if MASKED:
        keep = tl.arange(0, BLOCK)[:, None] < rows
        if DIM != BLOCK_DIM:
            keep = keep & (tl.arange(0, BLOCK_DIM)[None, :] < DIM)
        tile = tl.load(pointers, mask=keep, other=0.0)
    elif DIM != BLOCK_DIM:
        tile = tl.load(pointers, mask=tl.arange(0, BLOCK_DIM)[None, :] < DIM, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def load_row(pointer, rows, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    if MASKED:
        values = tl.load(pointer + offs, mask=offs < rows, other=0.0)
    else:
        values = tl.load(pointer + offs)
    return values


@triton.jit
def store_tile(pointers, tile, rows, DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_DIM: tl.constexpr):
    keep = tl.arange(0, BLOCK)[:, None] < rows
    if DIM != BLOCK_DIM:
        keep = keep & (tl.arange(0, BLOCK_DIM)[None, :] < DIM)
    tl.store(pointers, tile.to(pointers.dtype.element_ty), mask=keep)
