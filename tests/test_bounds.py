"""Which tiles a tile visits, and which of those need no mask, against counting pair by pair.

Every length from 1 (0 on the walked side) to past two tiles, every kind of limit, both diagonals, blocks of equal and unequal size.
The surprising fact: the answers are not merely safe but exact. A tile visits nothing that holds no pair for it, and masks no tile that
is wholly kept, so a mistake that only costs time is found as well.
"""

from itertools import product

import numpy as np
import pytest
import torch

MOST = 19  # rows on a side: more than two of the larger blocks, and no multiple of either
LIMITS = (0, 1, 3, 8, 17)  # less than the smaller block, between the two, more than both, nearly all
BLOCKS = ((8, 8), (4, 8), (8, 4))
WHERE = [
    pytest.param("cpu", marks=pytest.mark.interpret, id="interpreter"),
    pytest.param("cuda", marks=pytest.mark.gpu, id="cuda"),
]
MASKS = [
    pytest.param(*mask, id="-".join(name for name, on in zip(("left", "right", "topleft"), mask, strict=True) if on) or "none")
    for mask in product((False, True), repeat=3)
]


def cases(has_left: bool, has_right: bool) -> np.ndarray:
    """[4, cases]: rows_q, rows_k, left, right; a limit that isn't there is a number that would show if it were read."""
    lengths = range(MOST + 1)
    limits = [LIMITS if has else (1,) for has in (has_left, has_right)]
    return np.array(list(product(lengths, lengths, *limits)), dtype=np.int32).T


def kept(rows_q, rows_k, left, right, top_left: bool) -> np.ndarray:
    """[cases, query, key]: do they meet? By the definition; left and right are None or [cases]."""
    i, j = np.arange(MOST)[None, :, None], np.arange(MOST)[None, None, :]
    rows_q, rows_k = rows_q[:, None, None], rows_k[:, None, None]
    distance = j - (i if top_left else i + rows_k - rows_q)
    keep = (i < rows_q) & (j < rows_k)
    if left is not None:
        keep &= distance >= -left[:, None, None]
    if right is not None:
        keep &= distance <= right[:, None, None]
    return keep


def tiled(x: np.ndarray, block: int, axis: int, fill: bool) -> np.ndarray:
    """The axis cut into [tiles, block], filled up with `fill`."""
    tiles = -(-MOST // block)
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, tiles * block - MOST)
    x = np.pad(x, padding, constant_values=fill)
    return x.reshape(*x.shape[:axis], tiles, block, *x.shape[axis + 1 :])


def ask(device, numbers, blocks, mask, over_keys: bool) -> np.ndarray:
    """[cases, tiles of the asking side, 4] from the kernel's code; tiles past the end have answers too, which mean nothing."""
    from bounds_kernels import bounds_kernel
    from flashattn.kernels.structs import Spec

    left, right, top_left = mask
    spec = Spec(varlen=False, left=left, right=right, top_left=top_left, ragged=True, sign=1, prescaled=False, tf32=False, grouped=False)
    block = blocks[1] if over_keys else blocks[0]
    firsts = np.arange(0, MOST, block, dtype=np.int32)
    count = numbers.shape[1] * len(firsts)
    columns = [np.tile(firsts, numbers.shape[1]), *(np.repeat(column, len(firsts)) for column in numbers)]
    out = torch.full((4, count), -1, dtype=torch.int32, device=device)
    lanes = 1 << 16 if device == "cpu" else 256  # a program of the interpreter costs the same whatever its width
    arguments = [torch.from_numpy(column).to(device) for column in columns]
    bounds_kernel[(-(-count // lanes),)](*arguments, out, count, spec, *blocks, OVER_KEYS=over_keys, LANES=lanes)
    return out.cpu().numpy().T.reshape(numbers.shape[1], len(firsts), 4)


def check(answers, keep, exists, others, mine: int, walked: int) -> np.ndarray:
    """answers for keep[cases, mine, walked]; exists: [cases, mine], others: rows of the walked side. Returns [cases, my tile, its tile]:
    is it visited?"""
    asked = tiled(exists, mine, 1, False).any(2)
    lo, full_lo, full_hi, hi = np.moveaxis(answers, 2, 0)
    assert not (answers % walked).any(), "all bounds are multiples of the block"
    for low, high in ((0 * lo, lo), (lo, full_lo), (full_lo, full_hi), (full_hi, hi)):
        assert (low <= high)[asked].all(), "0 <= lo <= full_lo <= full_hi <= hi"
    assert (hi < others[:, None] + walked)[asked].all(), "no tile is past the end"

    # whether a pair is kept, and whether all are: in tiles [cases, my tile, its tile], rows of mine that don't exist being no objection
    any_kept = tiled(tiled(keep, mine, 1, False).any(2), walked, 2, False).any(3)
    no_objection = keep | ~exists[:, :, None]
    all_kept = tiled(tiled(no_objection, mine, 1, True).all(2), walked, 2, False).all(3)

    starts = np.arange(any_kept.shape[2]) * walked
    visited = (lo[..., None] <= starts) & (starts < hi[..., None]) & asked[..., None]
    full = (full_lo[..., None] <= starts) & (starts < full_hi[..., None]) & asked[..., None]
    assert not (any_kept & ~visited).any(), "every kept pair is visited"
    assert (full == (all_kept & asked[..., None])).all(), "exactly the tiles that are wholly kept need no mask"
    meets = any_kept.any(2)
    assert (visited == any_kept)[meets].all(), "no tile is visited in vain"
    assert (visited.sum(2) <= 1)[asked & ~meets].all(), "but for one by a tile that meets nobody"
    return visited


@pytest.mark.parametrize("left, right, top_left", MASKS)
@pytest.mark.parametrize("device", WHERE)
def test_ranges_are_exact_from_both_sides(device, left, right, top_left):
    mask = left, right, top_left
    numbers = cases(left, right)
    rows_q, rows_k, left_, right_ = numbers
    keep = kept(rows_q, rows_k, left_ if left else None, right_ if right else None, top_left)
    exists_q, exists_k = (np.arange(MOST) < rows[:, None] for rows in (rows_q, rows_k))
    for block_m, block_n in BLOCKS:
        keys = ask(device, numbers, (block_m, block_n), mask, over_keys=False)
        queries = ask(device, numbers, (block_m, block_n), mask, over_keys=True)
        by_rows = check(keys, keep, exists_q, rows_k, block_m, block_n)
        by_keys = check(queries, keep.transpose(0, 2, 1), exists_k, rows_q, block_n, block_m).transpose(0, 2, 1)
        pairs = tiled(tiled(keep, block_m, 1, False).any(2), block_n, 2, False).any(3)
        assert (by_rows & by_keys == pairs).all(), "one question is the inverse of the other"


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("left, right", list(product((False, True), repeat=2)))
@pytest.mark.parametrize("device", WHERE)
def test_a_row_keeps_the_keys_that_its_pairs_keep(device, left, right, ragged):
    """Near zero, where every comparison turns, and near 2**30, where differences pass 2**31."""
    from bounds_kernels import mask_kernel
    from flashattn.kernels.structs import Spec

    random = np.random.default_rng(0)
    count = 20_000
    far = random.choice([0, (1 << 30) - 400], (5, count))
    q_pos, k_pos, rows_k, left_, right_ = (random.integers(0, 40, (5, count)) + far).astype(np.int32)
    q_pos = q_pos * random.choice([-1, 1], count).astype(np.int32)
    k_pos, rows_k = (np.where(far[0] > 0, x, x % 64) for x in (k_pos, rows_k))
    if not (ragged or left):  # then every key that is asked about exists
        k_pos = np.minimum(k_pos, rows_k - 1).clip(0)
        rows_k = rows_k.clip(1)
    spec = Spec(varlen=False, left=left, right=right, top_left=False, ragged=ragged, sign=1, prescaled=False, tf32=False, grouped=False)
    out = torch.full((2, count), -1, dtype=torch.int32, device=device)
    columns = [torch.from_numpy(np.ascontiguousarray(x, dtype=np.int32)).to(device) for x in (q_pos, k_pos, rows_k, left_, right_)]
    lanes = 1 << 15 if device == "cpu" else 256
    mask_kernel[(-(-count // lanes),)](*columns, out, count, spec, LANES=lanes)
    by_pairs, by_rows = out.cpu()
    assert torch.equal(by_pairs, by_rows)
    assert ragged or left or right or by_pairs.all()
    assert by_pairs.sum() > 0 and (by_pairs.sum() < count or not (ragged or left or right))
