"""The description of a call: the mask as two limits around a diagonal, and its exact count."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashattn.problem import Problem, canonical_softcap, canonical_window, check_lengths, default_scale, kept_pairs, reachable_window

LENGTHS = st.integers(0, 40)
LIMITS = st.none() | st.integers(0, 50)


def keeps(i, j, rows_q, rows_k, left, right, top_left):
    """The mask as the contract words it, one pair at a time."""
    diagonal = i if top_left else i + rows_k - rows_q
    return (left is None or j >= diagonal - left) and (right is None or j <= diagonal + right)


def kept(rows_q, rows_k, left, right, top_left):
    return {(i, j) for i, j in itertools.product(range(rows_q), range(rows_k)) if keeps(i, j, rows_q, rows_k, left, right, top_left)}


def problem(rows_q, rows_k, left, right, top_left):
    return Problem(
        "float32", 1, rows_q, rows_k, 1, 1, 8, 8, default_scale(8), window_left=left, window_right=right, top_left=top_left, device="cpu"
    )


@given(LENGTHS, LENGTHS, LIMITS, LIMITS, st.booleans())
def test_kept_pairs_is_the_count(rows_q, rows_k, left, right, top_left):
    assert kept_pairs(problem(rows_q, rows_k, left, right, top_left)) == len(kept(rows_q, rows_k, left, right, top_left))


@pytest.mark.parametrize(
    "rows_q, rows_k, left, right, top_left, count",
    [
        (4, 4, None, 0, False, 10),  # a triangle with its diagonal
        (3, 7, None, 0, False, 5 + 6 + 7),  # bottom right: the last query sees every key
        (3, 7, None, 0, True, 1 + 2 + 3),
        (7, 3, None, 0, False, 0 + 0 + 0 + 0 + 1 + 2 + 3),  # four queries without a key
        (7, 3, None, 0, True, 1 + 2 + 3 * 5),
        (5, 5, 0, 0, False, 5),  # 0 is the diagonal itself, not "unlimited"
        (5, 5, 1, 0, False, 1 + 2 * 4),
        (1 << 40, 1 << 40, None, 0, False, (1 << 79) + (1 << 39)),
        (0, 5, None, None, False, 0),
        (5, 0, None, None, False, 0),
    ],
)
def test_kept_pairs_of_known_masks(rows_q, rows_k, left, right, top_left, count):
    assert kept_pairs(problem(rows_q, rows_k, left, right, top_left)) == count


@pytest.mark.parametrize(
    "causal, window, canonical",
    [
        (False, None, (None, None, False)),
        (True, None, (None, 0, False)),
        ("top-left", None, (None, 0, True)),
        (False, (3, None), (3, None, False)),
        (True, (3, 5), (3, 0, False)),
        (True, (None, 5), (None, 0, False)),
        ("top-left", (0, None), (0, 0, True)),
    ],
)
def test_causal_is_a_window(causal, window, canonical):
    assert canonical_window(causal, window) == canonical


@given(LENGTHS, LENGTHS, LIMITS, LIMITS, st.booleans(), st.integers(0, 5), st.integers(0, 5))
def test_limits_out_of_reach_are_dropped_without_changing_the_mask(rows_q, rows_k, left, right, top_left, more_q, more_k):
    reachable = reachable_window(left, right, top_left, rows_q + more_q, rows_k + more_k, bounds=True)
    assert kept(rows_q, rows_k, *reachable) == kept(rows_q, rows_k, left, right, top_left)
    exact = reachable_window(left, right, top_left, rows_q, rows_k, bounds=False)
    assert kept(rows_q, rows_k, *exact) == kept(rows_q, rows_k, left, right, top_left)
    for name, limit in zip(("left", "right"), exact, strict=False):
        alone = {"left": None, "right": None, name: limit}
        cuts = len(kept(rows_q, rows_k, **alone, top_left=top_left)) < rows_q * rows_k
        assert limit is None or cuts or 0 in (rows_q, rows_k), f"{name}={limit} cuts nothing off and is still there"


@pytest.mark.parametrize(
    "limits, rows_q, rows_k, varlen, corner",
    [
        ((None, 0), 5, 5, False, False),  # a square has one diagonal
        ((3, 2), 5, 5, False, False),
        ((None, 0), 5, 6, False, True),
        ((None, 0), 5, 5, True, True),  # equal totals, but of sequences with lengths of their own
        ((None, None), 5, 6, False, False),
        ((None, None), 5, 6, True, False),
        ((9, 9), 5, 6, False, False),  # no limit is left
        ((9, 4), 5, 6, False, True),
    ],
)
def test_both_corners_are_one_where_they_keep_the_same(limits, rows_q, rows_k, varlen, corner):
    assert reachable_window(*limits, True, rows_q, rows_k, varlen)[2] is corner
    assert reachable_window(*limits, False, rows_q, rows_k, varlen)[2] is False
    if not corner:
        assert reachable_window(*limits, True, rows_q, rows_k, varlen) == reachable_window(*limits, False, rows_q, rows_k, varlen)


@pytest.mark.parametrize("cap, canonical", [
    (None, 0.0), (0, 0.0), (30, 30.0), (1e-300, 2.0**-120), (2.0**-120, 2.0**-120), (1e300, 2.0**64), (2.0**63, 2.0**63),
])  # fmt: skip
def test_caps_are_within_what_float32_holds(cap, canonical):
    found = canonical_softcap(cap)
    assert found == canonical and type(found) is float


@pytest.mark.parametrize("scale", [1e-38, 0.1, -1.7e38, 1.7e38, 0.0])
def test_what_is_under_the_tanh_is_finite_in_float32(scale):
    for cap in (2.0**-120, 1.0, 2.0**64):
        inner = replace(problem(3, 4, None, 0, False), softmax_scale=scale, softcap=cap).inner
        assert abs(inner) < 3.4e38 and (inner > 0) == (scale > 0) and (inner < 0) == (scale < 0)


def test_equal_calls_are_one_key():
    a, b = problem(3, 4, None, 0, False), problem(3, 4, None, 0, False)
    assert a == b and len({a, b}) == 1 and a != problem(3, 4, None, 0, True)
    with pytest.raises(AttributeError):
        a.batch = 2


@pytest.mark.parametrize(
    "values, limit, message",
    [
        ([1, 8], None, "cu_seqlens_k starts with 1: expected 0"),
        ([0, 5, 3, 8], None, "cu_seqlens_k falls from 5 to 3 at entry 2: expected never falling"),
        ([0, 9], None, "cu_seqlens_k ends with 9 but k has 8 rows: expected at most that"),
        ([0, 3, 8], 4, "max_seqlen_k=4 but a sequence has 5 rows: expected at least that"),
    ],
)
def test_cumulative_lengths_that_lie_are_refused(values, limit, message):
    with pytest.raises(ValueError) as caught:
        check_lengths("k", values, 8, limit)
    assert str(caught.value) == message


@pytest.mark.parametrize("values, limit", [([0], 0), ([0, 8], 8), ([0, 0, 3, 3], None)])
def test_cumulative_lengths_that_are_right_are_not(values, limit):
    check_lengths("k", values, 8, limit)


def test_grouped_heads_and_diagonals():
    grouped = Problem("bfloat16", 2, 5, 9, 12, 3, 64, 32, 1.0)
    assert (grouped.group, grouped.itemsize, grouped.diagonal()) == (4, 2, 4)
    assert problem(5, 9, None, None, True).diagonal() == 0
