"""FLOPs and bytes of operations against counting: every multiply-add of a product and every kept pair of a mask, one by one.

The surprising fact: a closed form that is wrong by one row passes every large benchmark, and none of these.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashattn.problem import Problem, canonical_window, window_pairs
from flashattn.reference import keep_mask
from flashattn.roofline import work
from flashattn.roofline.work import PASSES, Work

SIZES, LENGTHS = st.integers(1, 6), st.integers(0, 9)
WINDOWS = st.tuples(*[st.none() | st.integers(0, 9)] * 2)
CAUSAL = st.sampled_from([False, True, "top-left"])


def problem(rows, columns, causal, window, *, batch=1, heads=(1, 1), dims=(3, 5), dtype="float16", lengths=None) -> Problem:
    left, right, top_left = canonical_window(causal, window)
    made = Problem(dtype, batch, rows, columns, *heads, *dims, 1.0, left, right, top_left)
    if lengths is None:
        return made
    return replace(made, varlen=True, total_q=sum(q for q, _ in lengths), total_k=sum(k for _, k in lengths))


def flops_of_pairs(pairs: int, dims: tuple[int, int]) -> dict[str, int]:
    """Two FLOPs for each element of the reduction of each product."""
    d, dv = dims
    products = {"forward": [d, dv], "backward": [d, dv, dv, d, d]}  # q k, p v; q k again, dout v, p dout, ds k, ds q
    return {name: sum(2 * pairs * length for length in found) for name, found in products.items()}


def bytes_of_tensors(rows_q, rows_k, heads, dims, itemsize) -> dict[str, int]:
    heads_q, heads_kv = heads
    q, out = (itemsize * rows_q * heads_q * dim for dim in dims)
    k, v = (itemsize * rows_k * heads_kv * dim for dim in dims)
    lse = 4 * rows_q * heads_q
    return {"forward": sum((q, k, v, out, lse)), "backward": sum((q, k, v, out, out, lse, q, k, v))}


@given(SIZES, SIZES, SIZES, st.sampled_from([1, 2, 4]))
def test_a_matmul_is_its_multiply_adds_and_its_matrices(m, k, n, itemsize):
    adds = sum(1 for _ in range(m) for _ in range(n) for _ in range(k))
    assert work.matmul(m, k, n, itemsize) == Work(2 * adds, itemsize * (m * k + k * n + m * n))
    assert work.scores(m, n, k, itemsize) == work.matmul(m, k, n, itemsize)


@given(SIZES, SIZES)
def test_elementwise_operations(rows, width):
    assert work.rmsnorm(rows, width) == Work(4 * rows * width, 2 * (2 * rows * width + width))
    assert work.softmax(rows, width, 4) == Work(5 * rows * width, 4 * 2 * rows * width)


@given(SIZES, SIZES, SIZES, SIZES)
def test_standard_attention_is_its_three_steps(rows, columns, dim, heads):
    steps = work.matmul(rows, dim, columns), work.softmax(rows, columns), work.matmul(rows, columns, dim)
    assert work.standard_attention(rows, columns, dim, heads) == Work(
        heads * sum(step.flops for step in steps), heads * sum(step.bytes for step in steps)
    )


HEADS, DTYPES = st.sampled_from([(1, 1), (4, 2), (6, 1)]), st.sampled_from(["float16", "float32"])


@given(LENGTHS, LENGTHS, WINDOWS, CAUSAL, st.integers(0, 2), HEADS, DTYPES)
def test_attention_is_its_kept_pairs_and_its_tensors(rows, columns, window, causal, batch, heads, dtype):
    call = problem(rows, columns, causal, window, batch=batch, heads=heads, dtype=dtype)
    pairs = batch * heads[0] * int(keep_mask(rows, columns, causal=causal, window=window).sum())
    flops, moved = flops_of_pairs(pairs, (3, 5)), bytes_of_tensors(batch * rows, batch * columns, heads, (3, 5), call.itemsize)
    assert {name: work.attention(call, name) for name in PASSES} == {name: Work(flops[name], moved[name]) for name in PASSES}


@given(st.lists(st.tuples(LENGTHS, LENGTHS), min_size=1, max_size=4), WINDOWS, CAUSAL)
def test_packed_sequences_are_counted_one_by_one(lengths, window, causal):
    longest = [max(side) for side in zip(*lengths, strict=True)]
    call = problem(*longest, causal, window, batch=len(lengths), heads=(4, 2), lengths=lengths)
    pairs = 4 * sum(int(keep_mask(*one, causal=causal, window=window).sum()) for one in lengths)
    flops, moved = flops_of_pairs(pairs, (3, 5)), bytes_of_tensors(call.total_q, call.total_k, (4, 2), (3, 5), 2)
    for name in PASSES:
        exact = work.attention(call, name, lengths)
        assert exact == Work(flops[name], moved[name])
        assert work.attention(call, name).flops >= exact.flops, "without the lengths there is an upper bound"


@pytest.mark.parametrize("library", [np.array, torch.tensor])
def test_lengths_of_other_libraries_do_not_overflow(library):
    call = problem(131072, 131072, True, None, heads=(32, 8), dims=(128, 128), lengths=[(131072, 131072)])
    found = work.attention(call, "forward", library([[131072, 131072]], dtype=(torch if library is torch.tensor else np).int32))
    assert found == work.attention(call, "forward", [(131072, 131072)]) and type(found.flops) is int


@given(st.integers(1, 9), st.integers(1, 9), WINDOWS, CAUSAL, st.integers(1, 4), st.integers(1, 4), st.data())
def test_block_masks_keep_what_both_masks_keep(rows, columns, window, causal, block_q, block_k, data):
    shape = -(-rows // block_q), -(-columns // block_k)
    keep = data.draw(st.lists(st.lists(st.booleans(), min_size=shape[1], max_size=shape[1]), min_size=shape[0], max_size=shape[0]))
    mask = keep_mask(rows, columns, causal=causal, window=window)
    pairs = sum(bool(mask[i, j]) and keep[i // block_q][j // block_k] for i in range(rows) for j in range(columns))
    call = problem(rows, columns, causal, window, batch=2, heads=(4, 2))
    assert work.block_pairs(keep, block_q, block_k, call) == pairs
    found = work.attention(call, "backward", blocks=(keep, block_q, block_k))
    assert found.flops == flops_of_pairs(2 * 4 * pairs, (3, 5))["backward"]
    assert found.bytes == work.attention(call, "backward").bytes


@given(LENGTHS, LENGTHS, st.integers(-12, 12), *[st.none() | st.integers(0, 12)] * 2)
def test_window_pairs_around_any_diagonal(rows, columns, diagonal, left, right):
    pairs = [
        (i, j) for i in range(rows) for j in range(columns)
        if (left is None or j >= i + diagonal - left) and (right is None or j <= i + diagonal + right)
    ]  # fmt: skip
    assert window_pairs(rows, columns, diagonal, left, right) == len(pairs)


def test_decode_is_attention_of_one_row():
    """Its intensity is the size of the group: in 16 bits each cached element meets a multiply-add of every query head of its group."""
    found = work.decode(3, 1000, 32, 8, 64)
    assert found.flops == 4 * 3 * 32 * 1000 * 64
    assert found.bytes == 3 * (2 * 2 * 1000 * 8 * 64 + 2 * 2 * 32 * 64 + 4 * 32)
    assert found.intensity == pytest.approx(4, rel=0.01)


def test_work_adds_up():
    assert Work(1, 2) + Work(3, 4) == Work(4, 6)
    assert Work(3, 2).intensity == 1.5


DENSE, PACKED = problem(4, 4, False, None), problem(4, 4, False, None, lengths=[(4, 4)])
BAD = [
    (lambda: work.matmul(0, 1, 1), ValueError, "m=0: expected at least 1"),
    (lambda: work.matmul(1, 1.5, 1), TypeError, r"k=1\.5: expected an integer"),
    (lambda: work.softmax(4, -2), ValueError, "width=-2"),
    (lambda: work.rmsnorm(True, 2), TypeError, "rows=True"),
    (lambda: work.standard_attention(4, 4, 4, 0), ValueError, "heads=0"),
    (lambda: work.attention(DENSE, "sideways"), ValueError, "direction='sideways'"),
    (lambda: work.attention(DENSE, "forward", [(4, 4)]), ValueError, "lengths of a dense call"),
    (lambda: work.attention(PACKED, "forward", [(-1, 4)]), ValueError, "lengths of q are -1 to -1, -1 together: expected 0 to 4"),
    (lambda: work.attention(PACKED, "forward", [(4, 5)]), ValueError, "lengths of k are 5 to 5, 5 together: expected 0 to 4"),
    (lambda: work.attention(PACKED, "forward", [(4, 4), (1, 0)]), ValueError, "lengths of q are 1 to 4, 5 together: .* at most 4"),
    (lambda: work.attention(PACKED, "forward", [(1.5, 4)]), TypeError, "integer"),
    (lambda: work.attention(PACKED, "forward", blocks=([[True]], 4, 4)), ValueError, "blocks of a packed call"),
    (lambda: work.block_pairs([[True]], 2, 4, DENSE), ValueError, r"keep is 1 rows of \[1\] blocks: expected 2 rows of 1"),
    (lambda: work.block_pairs([[True], [True, False]], 2, 4, DENSE), ValueError, "expected 2 rows of 1"),
    (lambda: work.block_pairs([[True]], 0, 4, DENSE), ValueError, "block_q=0"),
    (lambda: work.decode(1, 8, 6, 4, 8), ValueError, "heads_q=6: expected a multiple of heads_kv=4"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_impossible_shapes_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
