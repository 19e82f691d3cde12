"""Which pairs of a query and a key dropout keeps, in plain PyTorch: `dropout_mask`, and what the eager path makes of it a chunk at a time.

The device code of the same function is kernels/common/dropout.py. Everything is arithmetic modulo 2^32, for which int32 serves: torch's
integers wrap. The surprising fact: the words of a pair cost a kernel seven instructions, and that decides what the function is. A strong
generator (Philox) runs once a sequence, a mixer once a head and half of one a row; a key of keys is one multiply-add.
"""

import torch
from torch import Tensor

from .checks import check_dropout, check_seed
from .problem import canonical_dropout

ROW, ROW_MIX, COLUMN = 0xC2B2AE35, 0x85EBCA6B, 0x9E3779B9
MIX = 0x7FEB352D, 0x846CA68B
PHILOX, PHILOX_KEYS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


def _fold(x: Tensor, shift: int) -> Tensor:
    """x ^ (x >> shift) of unsigned words in int32, whose own shift repeats the sign."""
    return x ^ ((x >> shift) & (MASK >> shift))


def _mix(x: Tensor) -> Tensor:
    for multiplier, shift in zip(MIX, (16, 15), strict=True):
        x = _fold(x, shift) * _signed(multiplier)
    return _fold(x, 16)


def _philox(seed: Tensor, counter: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Philox-4x32-10 of int64 tensors with 32 bits each; the key are the halves of seed."""
    c0, c1, c2, c3 = counter
    keys = [seed & MASK, (seed >> 32) & MASK]

    def halves(multiplier, x):
        low, high = multiplier * (x & 0xFFFF), multiplier * (x >> 16)
        whole = high + (low >> 16)
        return whole >> 16, ((whole & 0xFFFF) << 16) | (low & 0xFFFF)

    for _ in range(10):
        (high0, low0), (high2, low2) = halves(PHILOX[0], c0), halves(PHILOX[1], c2)
        c0, c1, c2, c3 = high2 ^ c1 ^ keys[0], low2, high0 ^ c3 ^ keys[1], low0
        keys = [(key + step) & MASK for key, step in zip(keys, PHILOX_KEYS, strict=True)]
    return c0, c1, c2, c3


def head_keys(rng: Tensor, sequences: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Keys of the rows and of the columns, int32 [sequences, heads]. rng: int64 (seed, offset); sequences: int64, their numbers."""
    seed, offset = rng.expand(len(sequences), 2).unbind(-1)
    rows, columns, *_ = _philox(seed, (offset & MASK, (offset >> 32) & MASK, sequences, torch.zeros_like(sequences)))
    head = torch.arange(heads, dtype=torch.int32, device=rng.device)
    return tuple(_mix(((words + 2**31) % 2**32 - 2**31).to(torch.int32)[:, None] + head) for words in (rows, columns))


def kept(keys: tuple[Tensor, Tensor], rows: slice, columns: slice | Tensor, p: float) -> Tensor:
    """bool [..., rows, columns], of keys as `head_keys` gives them. columns: a stretch, or positions. p: as `canonical_dropout` has it."""
    row_key, column_key = (key[..., None, None] for key in keys)
    i = torch.arange(rows.start, rows.stop, dtype=torch.int32, device=row_key.device)[:, None]
    stretch = isinstance(columns, slice)
    j = torch.arange(columns.start, columns.stop, dtype=torch.int32, device=row_key.device) if stretch else columns.to(torch.int32)
    row = _fold((row_key + i) * _signed(ROW), 16) * _signed(ROW_MIX)
    word = (row ^ (column_key + j * _signed(COLUMN))) * _signed(MIX[0])
    return _fold(word, 15) * _signed(MIX[1]) > int(p * 2**32) - 2**31 - 1


def seed_tensor(dropout_seed: int | Tensor | None, generator: torch.Generator | None, device: torch.device) -> Tensor:
    """int64 (seed, offset) on the device, without waiting for it. Where no seed is given: drawn as any random tensor of torch is, so that
    manual_seed, checkpointing and CUDA graphs see to it that the same one comes again, or another one."""
    if dropout_seed is None:
        return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=device, generator=generator)
    if isinstance(dropout_seed, Tensor):
        return dropout_seed
    return torch.nn.functional.pad(torch.full((1,), dropout_seed, dtype=torch.int64, device=device), (0, 1))


def dropout_mask(
    dropout_p: float,
    dropout_seed: int | Tensor,
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    *,
    device: torch.device | str | None = None,
) -> Tensor:
    r"""The pairs that a call with this seed keeps, bool ``[batch, heads, seqlen_q, seqlen_k]``: True is kept, False is dropped.

    :func:`attention` with ``dropout_p`` and ``dropout_seed`` multiplies the probabilities by ``mask / (1 - dropout_p)``, whatever kernel
    runs it. The mask is a function of the seed, the offset, the number n of a batch entry (or of a sequence of a packed call), the query
    head h, and the positions i of the query and j of the key in their sequence, all counted from 0, and of nothing else. In arithmetic
    modulo 2**32, with ``>>`` shifting zeros in:

    .. code-block:: text

        u0, u1, u2, u3 = Philox-4x32-10(key: low and high half of seed; counter: low and high half of offset, n, 0)
        mix(x):   x ^= x >> 16;  x *= 0x7feb352d;  x ^= x >> 15;  x *= 0x846ca68b;  x ^= x >> 16
        row:      r = (mix(u0 + h) + i) * 0xc2b2ae35;  r ^= r >> 16;  r *= 0x85ebca6b
        column:   c = mix(u1 + h) + j * 0x9e3779b9
        word:     w = (r ^ c) * 0x7feb352d;  w ^= w >> 15;  w *= 0x846ca68b
        keep:     (w + 2**31) % 2**32 >= floor(2**32 * p)

    where p is dropout_p rounded to float32, which the factor 1 / (1 - p) is made of too. A p below 2**-32 drops nothing.

    Args:
        dropout_p: probability of dropping a pair, 0 to 1.
        dropout_seed: int, which is the seed with offset 0; or an int64 tensor of two, (seed, offset).
        batch: how many batch entries, or sequences. heads: of queries. seqlen_q, seqlen_k: rows of queries and of keys.
        device: where to make it; default: that of a tensor dropout_seed, else the CPU.

    Raises:
        ValueError, TypeError: a probability outside of 0 to 1, a seed that is none, sizes that aren't ints of 0 or more.

    Source: Philox, Salmon et al. 2011 (Parallel random numbers: as easy as 1, 2, 3), section 3.3; the multipliers and shifts of mix, C.
    Wellons 2018 (hash-prospector, "lowbias32"); dropout of attention weights, Vaswani et al. 2017, section 5.4.
    """
    for name, size in {"batch": batch, "heads": heads, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}.items():
        if isinstance(size, bool) or not isinstance(size, int | torch.SymInt):
            raise TypeError(f"{name} is {size!r}: expected an int")
        if size < 0:
            raise ValueError(f"{name}={size}: expected 0 or more")
    device = torch.device(device or (dropout_seed.device if isinstance(dropout_seed, Tensor) else "cpu"))
    if isinstance(dropout_seed, Tensor):
        dropout_seed = dropout_seed.to(device)
    p, seed = canonical_dropout(check_dropout(dropout_p)), check_seed(dropout_seed, None, device)
    if seed is None:
        raise TypeError("dropout_seed is None: expected an int, or an int64 tensor (seed, offset)")
    if not p:
        return torch.ones(batch, heads, seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    keys = head_keys(seed_tensor(seed, None, device), torch.arange(batch, device=device), heads)
    return kept(keys, slice(0, seqlen_q), slice(0, seqlen_k), p)
