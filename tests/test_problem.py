"""The description of a call: the mask as two limits around a diagonal, and its exact count."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashattn.problem import Problem, canonical_window, default_scale, kept_pairs, reachable_window

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
    reachable = reachable_window(left, right, top_left, rows_q + more_q, rows_k + more_k)
    assert kept(rows_q, rows_k, *reachable, top_left) == kept(rows_q, rows_k, left, right, top_left)
    exact = reachable_window(left, right, top_left, rows_q, rows_k)
    for name, limit in zip(("left", "right"), exact, strict=True):
        alone = {"left": None, "right": None, name: limit}
        cuts = len(kept(rows_q, rows_k, **alone, top_left=top_left)) < rows_q * rows_k
        assert limit is None or cuts, f"{name}={limit} cuts nothing off and is still there"


def test_equal_calls_are_one_key():
    a, b = problem(3, 4, None, 0, False), problem(3, 4, None, 0, False)
    assert a == b and len({a, b}) == 1 and a != problem(3, 4, None, 0, True)
    with pytest.raises(AttributeError):
        a.batch = 2


def test_grouped_heads_and_diagonals():
    grouped = Problem("bfloat16", 2, 5, 9, 12, 3, 64, 32, 1.0)
    assert (grouped.group, grouped.itemsize, grouped.diagonal()) == (4, 2, 4)
    assert problem(5, 9, None, None, True).diagonal() == 0
