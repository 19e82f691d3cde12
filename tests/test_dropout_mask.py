"""The mask of dropout: the function that it says it is, and random enough that nobody could tell.

The surprising fact: what would show first is no mean and no neighbour. Keys of rows and of columns that meet in one operation depend on
each other in fours, the corners of rectangles, and positions far apart share the low bits of their keys: so these are asked too.
"""

from itertools import combinations, product

import pytest
import torch

from flashattn import dropout, dropout_mask
from flashattn.problem import canonical_dropout

SEED = 2**40 + 17, 2**63 - 5  # and an offset
M32 = 2**32 - 1


# --------------------------------------------------------------------------------------------------------------------- the function


def keeps(seed: int, offset: int, sequence: int, head: int, i: int, j: int, p: float) -> bool:
    """The docstring of dropout_mask, in whole numbers."""
    c = [offset & M32, offset >> 32 & M32, sequence, 0]
    k = [seed & M32, seed >> 32 & M32]
    for _ in range(10):  # Salmon et al. 2011, figure 4: the multipliers and the Weyl sequence of Philox-4x32
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) ^ c[1] ^ k[0], b & M32, (a >> 32) ^ c[3] ^ k[1], a & M32]
        k = [(k[0] + 0x9E3779B9) & M32, (k[1] + 0xBB67AE85) & M32]

    def mix(x):
        x = (x ^ x >> 16) * 0x7FEB352D & M32
        x = (x ^ x >> 15) * 0x846CA68B & M32
        return x ^ x >> 16

    row = (mix((c[0] + head) & M32) + i) * 0xC2B2AE35 & M32
    row = (row ^ row >> 16) * 0x85EBCA6B & M32
    column = (mix((c[1] + head) & M32) + j * 0x9E3779B9) & M32
    word = (row ^ column) * 0x7FEB352D & M32
    word = (word ^ word >> 15) * 0x846CA68B & M32
    return (word + 2**31) % 2**32 >= int(torch.tensor(p, dtype=torch.float32).double() * 2**32)


@pytest.mark.parametrize("seed, offset", [(0, 0), (1, 0), SEED, (-1, -(2**63)), (-(2**62) - 3, 1)])
def test_the_mask_is_the_function_that_it_says(seed, offset):
    """Philox's known answer for zeros (Random123, kat_vectors) first."""
    zero = torch.zeros((), dtype=torch.int64)
    assert [hex(x) for x in dropout._philox(zero, (zero,) * 4)] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]
    for p in (0.1, 0.5, 0.999):
        mask = dropout_mask(p, torch.tensor([seed, offset]), 2, 3, 7, 9)
        assert mask.shape == (2, 3, 7, 9) and mask.dtype == torch.bool
        assert mask.tolist() == [
            [[[keeps(seed, offset, n, h, i, j, p) for j in range(9)] for i in range(7)] for h in range(3)] for n in range(2)
        ]


def test_seeds_and_probabilities_in_all_their_spellings():
    for seed, same in ((7, [7, 0]), (-7, [-7, 0]), (2**64 - 7, [-7, 0]), (2**63, [-(2**63), 0])):
        assert torch.equal(dropout_mask(0.5, seed, 2, 2, 33, 17), dropout_mask(0.5, torch.tensor(same), 2, 2, 33, 17))
    assert dropout_mask(0.0, 1, 1, 1, 300, 300).all() and dropout_mask(1e-10, 1, 1, 1, 300, 300).all()
    assert not dropout_mask(1.0, 1, 1, 1, 300, 300).any()
    assert canonical_dropout(2.0**-32) == 2.0**-32 and canonical_dropout(2.0**-33) == 0.0
    more, less = dropout_mask(0.6, 1, 1, 2, 99, 99), dropout_mask(0.3, 1, 1, 2, 99, 99)
    assert (less | ~more).all() and (less & ~more).any()  # what 0.3 drops, 0.6 drops too


def test_a_part_of_a_mask_is_the_mask_of_the_part():
    whole = dropout_mask(0.5, 3, 3, 4, 40, 50)
    assert torch.equal(whole[:2, :3, :20, :30], dropout_mask(0.5, 3, 2, 3, 20, 30))


# ------------------------------------------------------------------------------------------------------------------ random numbers


def normal(p: float, seed, *shape) -> torch.Tensor:
    """The mask with mean 0 and variance 1, if it is random."""
    return (dropout_mask(p, seed, *shape).double() - (1 - p)) / (p * (1 - p)) ** 0.5


def score(x: torch.Tensor) -> float:
    """The sum of independent numbers of variance 1 as a number of standard deviations."""
    return (x.sum() / x.numel() ** 0.5).item()


# Of half a million scores of pairs of rows: rare drops meet in a Poisson distribution, whose tail is long
LARGEST = {0.02: 12.0, 0.1: 8.0, 0.5: 5.7, 0.9: 8.0}


@pytest.mark.parametrize("p", LARGEST)
def test_statistics(p):
    """Of 4 million pairs: 5 standard deviations are met once in 1.7 million draws, and these numbers are the same in every run.

    The sum of squared correlations, and of squares of blocks, is as large as chance makes it: not larger, and not smaller either.
    """
    size = 1024
    mask = normal(p, 11, 2, 2, size, size)
    assert abs(score(mask)) < 4
    for head in mask.flatten(0, 1):
        for sums in (head.sum(0), head.sum(1)):
            assert (sums / size**0.5).abs().max() < 5
        for block in (8, 32):
            sums = head.unfold(0, block, block).unfold(1, block, block).sum((-1, -2)) / block
            assert abs(score((sums.square() - 1) / sums.square().var().sqrt())) < 4
        for table in (head @ head.T, head.T @ head):  # each two rows, each two columns
            pairs = table[torch.triu_indices(size, size, 1).unbind()] / size**0.5
            assert pairs.abs().max() < LARGEST[p] and abs(score(pairs)) < 4
            # of a variance that also counts how many pairs there happen to be
            assert abs(pairs.square().mean() / head.square().mean() ** 2 - 1) < 0.01
        for lag in (1, 2, 3, 16, 17, 64, 128, 512):
            found = [head[lag:] * head[:-lag], head[:, lag:] * head[:, :-lag], head[lag:, lag:] * head[:-lag, :-lag]]
            assert max(abs(score(x)) for x in found) < 4.5


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_four_corners_are_independent(p):
    """Keys of rows and of columns that were only added, or only xored, would tell the fourth corner of a rectangle from three."""
    mask = normal(p, 12, 1, 1, 2048, 2048)[0, 0]
    for down, right in product((1, 2, 5, 16, 64, 256, 1024), repeat=2):
        sides = mask[down:] * mask[:-down]
        assert abs(score(sides[:, right:] * sides[:, :-right])) < 4.5, (down, right)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_masks_of_other_calls_sequences_and_heads_are_others(p):
    shape = 2, 2, 512, 512
    seeds = [(1, 0), (2, 0), (0, 1), (1, 1), (1 + 2**32, 0), (1, 2**32), (-1, 0), (1 - 2**63, 0)]
    masks = [head for seed in seeds for head in normal(p, torch.tensor(seed), *shape).flatten(0, 1)]
    for one, other in combinations(masks, 2):
        for i, j in ((0, 0), (0, 1), (1, 0), (3, 5)):
            assert abs(score(one[i:, j:] * other[: 512 - i, : 512 - j])) < 5


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_far_rows_and_columns(p):
    """Positions whose low bits are the same share the low bits of their keys."""
    for shape in ((1, 1, 64, 2**17), (1, 1, 2**17, 64)):
        mask = normal(p, 13, *shape)[0, 0]
        long = mask if shape[2] < shape[3] else mask.T
        assert max(abs(score(long[:, 2**e :] * long[:, : -(2**e)])) for e in range(10, 17)) < 4.5


def test_wrong_arguments_are_named():
    with pytest.raises(TypeError, match="dropout_seed is None"):
        dropout_mask(0.5, None, 1, 1, 2, 2)
    with pytest.raises(ValueError, match="dropout_p=2"):
        dropout_mask(2, 1, 1, 1, 2, 2)


def test_sizes_that_are_none():
    sizes = {"batch": 1, "heads": 2, "seqlen_q": 3, "seqlen_k": 4}
    for name in sizes:
        with pytest.raises(TypeError, match=f"{name} is 2.5: expected an int"):
            dropout_mask(0.5, 1, **sizes | {name: 2.5})
        with pytest.raises(ValueError, match=f"{name}=-1: expected 0 or more"):
            dropout_mask(0.0, 1, **sizes | {name: -1})
        assert dropout_mask(0.5, 1, **sizes | {name: 0}).numel() == 0
