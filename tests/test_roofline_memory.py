"""The laboratory: the memory of attention, against algorithms that are walked through tile by tile.

The surprising fact: with tiles of 128 rows and nothing found in L2, flash attention moves half of what standard attention moves, not a
hundredth. The rest is what L2, larger blocks of queries and no write of the scores at all give a real kernel.
"""

import math

import pytest

from flashattn import online_softmax
from flashattn.roofline import find, memory
from flashattn.roofline.cli import TALLY
from flashattn.roofline.work import PASSES, matmul

H100 = find("H100")


def test_the_score_matrix_of_128_000_rows():
    full, working = memory.score_bytes(128_000), memory.working_set(128, 128, 128)
    assert round(full / 1e9, 1) == 32.8 and round(128 * full / 1e12, 1) == 4.2
    assert working == 128 * 1024 and full / working == 250_000
    assert round(4 * 128_000**2 * 128 / 1e12, 2) == 8.39
    products = matmul(128_000, 128, 128_000).flops + matmul(128_000, 128_000, 128).flops
    assert products == 4 * 128_000**2 * 128


def test_4096_rows_on_an_h100():
    full = memory.score_bytes(4096)
    assert round(full / 1e6, 1) == 33.6
    out_and_back = memory.standard(4096, 128).total - 4 * 2 * 4096 * 128  # without Q, K, V and O
    assert out_and_back == 4 * full and round(out_and_back / 1e6) == 134
    assert round(out_and_back / H100.bandwidth * 1e6) == 40
    assert round(4 * 4096**2 * 128 / H100.peak("bfloat16") * 1e6, 1) == 8.7


@pytest.mark.parametrize("direction", PASSES)
def test_standard_attention_moves_what_its_steps_move(direction):
    n, d, size = 96, 16, 2
    nd, nn = n * d * size, n * n * size
    steps = {
        "forward": [(2 * nd, nn), (nn, nn), (nn + nd, nd)],  # S = Q K^T, P = softmax S, O = P V
        "backward": [(nn + nd, nd), (2 * nd, nn), (2 * nn, nn), (nn + nd, nd), (nn + nd, nd)],  # dV, dP, dS, dQ, dK
    }[direction]
    found = memory.standard(n, d, size, direction)
    assert (found.read, found.written) == tuple(map(sum, zip(*steps, strict=True)))


class Memory:
    """Counts what a tiled algorithm touches, tile by tile."""

    def __init__(self, size: int) -> None:
        self.size, self.read, self.written = size, 0, 0

    def load(self, rows, width, size=None):
        self.read += rows * width * (size or self.size)

    def store(self, rows, width, size=None):
        self.written += rows * width * (size or self.size)


def tiles(n, block):
    return [min(block, n - start) for start in range(0, n, block)]


def walk(n, d, block_q, block_k, direction, fused) -> Memory:
    seen = Memory(2)
    if direction == "forward":
        for rows in tiles(n, block_q):
            seen.load(rows, d)
            for columns in tiles(n, block_k):
                seen.load(2 * columns, d)
            seen.store(rows, d)
            seen.store(rows, 1, 4)
        return seen
    for rows in tiles(n, block_q):  # delta
        seen.load(2 * rows, d)
        seen.store(rows, 1, 4)
    for columns in tiles(n, block_k):
        seen.load(2 * columns, d)
        for rows in tiles(n, block_q):
            seen.load(2 * rows, d)
            seen.load(2 * rows, 1, 4)
            if fused:
                seen.load(rows, d, 4)
                seen.store(rows, d, 4)
        seen.store(2 * columns, d)
    for rows in tiles(n, block_q):
        if fused:
            seen.load(rows, d, 4)
        else:
            seen.load(2 * rows, d)
            seen.load(2 * rows, 1, 4)
            for columns in tiles(n, block_k):
                seen.load(2 * columns, d)
        seen.store(rows, d)
    return seen


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("direction", PASSES)
@pytest.mark.parametrize("sizes", [(96, 16, 32, 16), (100, 8, 32, 24), (7, 3, 16, 16)])
def test_flash_attention_moves_what_its_tiles_move(sizes, direction, fused):
    found, seen = memory.flash(*sizes, direction=direction, fused=fused), walk(*sizes, direction, fused)
    assert (found.read, found.written) == (seen.read, seen.written)


def test_what_fits_on_chip_and_why_not():
    chip = memory.residence(128, 128, 128, H100)
    assert (chip.smem, chip.registers, chip.reasons()) == (96 * 1024, 128 * 1024, [])
    big = memory.residence(256, 256, 256, H100).reasons()
    assert len(big) == 2 and "384 KB, a program may have 227 of shared memory" in big[0] and "512 KB, the register file has 256" in big[1]
    assert memory.residence(64, 64, 256, find("RTX 4090")).reasons() == memory.residence(64, 64, 256, H100).reasons() == []
    assert len(memory.residence(128, 64, 256, find("RTX 4090")).reasons()) == 1, "an Ada SM has 100 KB"


def test_block_sizes_of_the_first_flash_attention():
    """M / 4 d keys, and no more queries than d; with four tiles of that size the memory is full."""
    assert memory.fa1_blocks(192 * 1024, 64) == (64, 384)
    assert memory.fa1_blocks(192 * 1024, 128) == (128, 192)
    assert memory.fa1_blocks(100 * 1024, 128, 4) == (50, 50)
    assert memory.fa1_blocks(2 * 1000, 64) == (4, 4), "1000 / 256, rounded up"


def test_asymptotic_counts():
    """N d + N^2 against N^2 d^2 / M, which is d^2 / M of the other when N is large: 18 times as little at d = 64 and 144 KB."""
    standard, flash = memory.asymptotic(65536, 64, 144 * 1024)
    assert standard == 65536 * 64 + 65536**2
    assert flash == 65536**2 * 64**2 / (72 * 1024)
    assert standard / flash == pytest.approx(18, rel=0.01)
    assert memory.asymptotic(2 * 65536, 64, 144 * 1024)[1] == 4 * flash == 2 * memory.asymptotic(2 * 65536, 64, 2 * 144 * 1024)[1]


BAD = [
    (lambda: memory.score_bytes(0), ValueError, "seqlen=0"),
    (lambda: memory.standard(8, 8, direction="up"), ValueError, "direction='up'"),
    (lambda: memory.standard(8, -1), ValueError, "head_dim=-1"),
    (lambda: memory.flash(8, 8, 0, 8), ValueError, "block_q=0"),
    (lambda: memory.flash(8, 8, 8, 8, direction="up"), ValueError, "direction='up'"),
    (lambda: memory.residence(8, 8, 2.5, H100), TypeError, "head_dim=2.5"),
    (lambda: memory.working_set(8, True, 8), TypeError, "block_k=True"),
    (lambda: memory.fa1_blocks(0, 8), ValueError, "on_chip=0"),
    (lambda: memory.asymptotic(8, 8, 0), ValueError, "on_chip=0"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD, ids=[message for *_, message in BAD])
def test_impossible_sizes_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_the_running_tally_two_scores_at_a_time():
    """The state after each pair is what a tally by pairs gives: the old sums shrink once a pair, by its maximum."""
    states = list(online_softmax(TALLY, range(1, 9)))[1::2]
    m, l, o = -math.inf, 0.0, 0.0
    for pair, state in zip(range(0, 8, 2), states, strict=True):
        scores = TALLY[pair : pair + 2]
        new = max(m, *scores)
        weights = [math.exp(score - new) for score in scores]
        shrink = math.exp(m - new)
        l = l * shrink + sum(weights)
        o = o * shrink + weights[0] * (pair + 1) + weights[1] * (pair + 2)
        m = new
        assert state == pytest.approx((m, l, o))
    weights = [math.exp(score) for score in TALLY]
    assert o / l == pytest.approx(sum(w * value for w, value in zip(weights, range(1, 9), strict=True)) / sum(weights))
    assert f"{o / l:.4f}" == "4.8046"
