"""What must hold whatever the numbers: invariances of attention, each on random shapes and features.

hypothesis draws shapes, features and seeds, never elements. A property that holds to the bit is asserted to the bit. One that holds only
for real numbers has no tolerance of its own: either side is compared with the same oracle.

The surprising fact: hypothesis begins with the first value of everything that it draws from, and in the interpreter two examples are
all there is time for. So the ugly values come first, where it would have the simple ones.
"""

from typing import NamedTuple

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from flashattn.reference import keep_mask
from support import (
    WHERE,
    WHERE_DTYPE,
    Data,
    Expected,
    Results,
    assert_close_to_oracle,
    check,
    compare,
    dense,
    expect,
    packed,
    run,
    same_bits,
    with_extras,
)

EAGER, INTERPRETER, GPU = ("eager", "cpu"), ("portable", "cpu"), ("portable", "cuda")
HALF = {EAGER: torch.bfloat16, INTERPRETER: torch.float16, GPU: torch.bfloat16}
# On a GPU few head dims and counts, since each is a compilation.
ROWS = {EAGER: (65, 100, 7, 64, 2, 1), INTERPRETER: (65, 7, 2, 1), GPU: (300, 1025, 65, 7, 2, 1)}
DIMS = {EAGER: (24, 40, 8, 3, 1), INTERPRETER: (24, 16, 3), GPU: (64,)}
HEADS = {EAGER: ((4, 2), (2, 2), (6, 1)), INTERPRETER: ((2, 1), (1, 1)), GPU: ((4, 2),)}
BATCH = {EAGER: (2, 1), INTERPRETER: (1,), GPU: (2,)}
EXAMPLES = {EAGER: 15, INTERPRETER: 2, GPU: 4}  # on a GPU every new mask compiles four kernels

LIMITS = st.sampled_from([5, None, 0, 1, 64, 1000])
EXTRAS = st.fixed_dictionaries({"slopes": st.sampled_from(["entry", "", "head"]), "sinks": st.sampled_from([0.5, None, -20.0])})
CAPS = st.sampled_from([1.5, None, 30.0, 0.1])
MASKS = st.fixed_dictionaries({"causal": st.sampled_from([True, False, "top-left"]), "window": st.tuples(LIMITS, LIMITS) | st.none()})


def examples(where, **strategies):
    """Runs the decorated function on as many examples as a tier can afford, without a search for simpler ones if it fails."""
    return lambda function: settings(max_examples=EXAMPLES[where], phases=[Phase.generate])(given(**strategies)(function))()


def options(where, dtype):
    return {
        "dim": st.sampled_from(DIMS[where]),
        "heads": st.sampled_from(HEADS[where]),
        "seed": st.integers(0, 99),
        "dtype": st.just(dtype or HALF[where]),
        "device": st.just(where[1]),
    }


def split_heads(arguments):
    heads, heads_kv = arguments["heads"]
    return {**arguments, "heads": heads, "heads_kv": heads_kv}


def shapes(where, dtype=None, **fixed):
    """Arguments of `dense`."""
    drawn = {
        "batch": st.sampled_from(BATCH[where]),
        "seqlen_q": st.sampled_from(ROWS[where]),
        "seqlen_k": st.sampled_from(ROWS[where]),
        **options(where, dtype),
    }
    return st.fixed_dictionaries(drawn | {name: st.just(value) for name, value in fixed.items()}).map(split_heads)


def sequences(where, dtype=None):
    """Arguments of `packed`: up to a few sequences, empty ones too."""
    lengths = st.lists(st.tuples(*[st.sampled_from((*ROWS[where], 0))] * 2), min_size=2, max_size=3 if where == INTERPRETER else 6)
    unzip = lambda pairs: dict(zip(("lens_q", "lens_k"), map(list, zip(*pairs, strict=True)), strict=True))  # noqa: E731
    return st.builds(lambda lens, rest: {**lens, **split_heads(rest)}, lengths.map(unzip), st.fixed_dictionaries(options(where, dtype)))


class Cut(NamedTuple):
    """One sequence of a packed batch."""

    rows: slice
    keys: slice

    def nan_elsewhere(self, name: str, x: torch.Tensor) -> torch.Tensor:
        dim, kept = (0 if name != "dlse" else 1), (self.keys if name in ("k", "v") else self.rows)
        at = torch.arange(x.shape[dim], device=x.device)
        outside = ((at < kept.start) | (at >= kept.stop)).view(-1, *[1] * (x.dim() - 1 - dim))
        return x.masked_fill(outside, float("nan"))

    def data(self, data: Data) -> Data:
        """As a dense batch of one."""
        parts = {"q": data.q[self.rows], "k": data.k[self.keys], "v": data.v[self.keys], "dout": data.dout[self.rows]}
        return Data(**{name: x[None] for name, x in parts.items()}, dlse=data.dlse[None, :, self.rows])

    def results(self, found: Results) -> Results:
        parts = (found.out[self.rows], found.lse[:, self.rows], found.dq[self.rows], found.dk[self.keys], found.dv[self.keys])
        return Results(*(x[None] for x in parts))


def check_and_expect(data, impl, **options) -> Expected:
    expected = expect(data, **options)
    compare(run(data, impl, **options), expected, data.q.dtype)
    return expected


# ------------------------------------------------------------------------------------------------------------------------ any call


@pytest.mark.parametrize("impl, device, dtype", WHERE_DTYPE)
def test_a_call(impl, device, dtype):
    where = (impl, device)

    scales = st.sampled_from([None, -0.7, 0.0, 1.3])

    @examples(where, shape=shapes(where, dtype=dtype), mask=MASKS, scale=scales, bhsd=st.booleans(), extras=EXTRAS, softcap=CAPS)
    def a_call(shape, mask, scale, bhsd, extras, softcap):
        layout = "bhsd" if bhsd else "bshd"
        check(with_extras(dense(**shape), **extras), impl, **mask, softmax_scale=scale, layout=layout, softcap=softcap)


@pytest.mark.parametrize("impl, device, dtype", WHERE_DTYPE)
def test_a_packed_call(impl, device, dtype):
    where, tails = (impl, device), st.sampled_from([0, 3, 130])

    @examples(where, sequences=sequences(where, dtype=dtype), mask=MASKS, tail_q=tails, tail_k=tails, extras=EXTRAS, softcap=CAPS)
    def a_packed_call(sequences, mask, tail_q, tail_k, extras, softcap):
        check(with_extras(packed(**sequences, tail_q=tail_q, tail_k=tail_k), **extras), impl, **mask, softcap=softcap)


# ------------------------------------------------------------------------------------------------------------------ equal to the bit


@pytest.mark.parametrize("impl, device", WHERE)
def test_two_runs(impl, device):
    where = (impl, device)

    @examples(where, shape=shapes(where), mask=MASKS, deterministic=st.booleans(), extras=EXTRAS, softcap=CAPS)
    def two_runs(shape, mask, deterministic, extras, softcap):
        data = with_extras(dense(**shape), **extras)
        first, second = (run(data, impl, **mask, deterministic=deterministic, softcap=softcap) for _ in range(2))
        assert same_bits(first, second)


@pytest.mark.parametrize("impl, device", WHERE)
def test_two_layouts(impl, device):
    where = (impl, device)

    @examples(where, shape=shapes(where), mask=MASKS, strides=st.sampled_from(["contiguous", "heads_first"]))
    def two_layouts(shape, mask, strides):
        data = dense(**shape, strides=strides)
        assert same_bits(run(data, impl, **mask, layout="bshd"), run(data, impl, **mask, layout="bhsd"))


@pytest.mark.parametrize("impl, device", WHERE)
def test_causal_is_a_window(impl, device):
    where = (impl, device)

    @examples(where, shape=shapes(where), left=LIMITS, right=LIMITS)
    def causal_is_a_window(shape, left, right):
        data = dense(**shape)
        causal = run(data, impl, causal=True)
        assert same_bits(causal, run(data, impl, window=(None, 0)))
        assert same_bits(run(data, impl, causal=True, window=(left, right)), run(data, impl, window=(left, 0)))
        reaches_everything = run(data, impl, causal=True, window=(shape["seqlen_k"] - 1, None))
        assert same_bits(causal, reaches_everything)


@pytest.mark.parametrize("impl, device", WHERE)
def test_keys_that_no_query_sees(impl, device):
    """Their dk and dv are exactly 0, and other numbers in their place don't change a bit elsewhere."""
    where = (impl, device)

    rows = {"seqlen_q": 5, "seqlen_k": max(ROWS[where])}

    @examples(where, shape=shapes(where, **rows), left=st.sampled_from([30, 0, 1]), causal=st.sampled_from([True, "top-left"]))
    def keys_that_no_query_sees(shape, left, causal):
        data, mask = dense(**shape), {"causal": causal, "window": (left, None)}
        far = ~keep_mask(shape["seqlen_q"], shape["seqlen_k"], **mask, device=device).any(0)
        assert far.any()
        first = run(data, impl, **mask)
        assert not first.dk[:, far].any() and not first.dv[:, far].any()
        data.k[:, far], data.v[:, far] = 100.0, -100.0
        assert same_bits(first, run(data, impl, **mask))


# ------------------------------------------------------------------------------------------------------- equal as far as the oracle


@pytest.mark.parametrize("impl, device", WHERE)
def test_packed_sequences_are_each_alone(impl, device):
    """To the bit for neighbours of other numbers, NaN too; and within the tolerance for a dense call of one sequence."""
    where = (impl, device)

    @examples(where, sequences=sequences(where), mask=MASKS)
    def each_alone(sequences, mask):
        data = packed(**sequences)
        whole, cu_q, cu_k = run(data, impl, **mask), data.cu_q.tolist(), data.cu_k.tolist()
        for n in range(len(cu_q) - 1):
            rows, keys = slice(*cu_q[n : n + 2]), slice(*cu_k[n : n + 2])
            cut = Cut(rows, keys)
            with_nan = data.with_(**{name: cut.nan_elsewhere(name, getattr(data, name)) for name in ("q", "k", "v", "dout", "dlse")})
            assert same_bits(cut.results(whole), cut.results(run(with_nan, impl, **mask)))
            alone = cut.data(data)
            compare(cut.results(whole), check_and_expect(alone, impl, **mask), alone.q.dtype)


@pytest.mark.parametrize("impl, device", WHERE)
def test_grouped_heads_are_repeated_heads(impl, device):
    where = (impl, device)

    @examples(where, shape=shapes(where, dtype=torch.float32), mask=MASKS)
    def repeated_heads(shape, mask):
        data, heads_kv = dense(**shape), shape["heads_kv"]
        k, v = (x.repeat_interleave(shape["heads"] // heads_kv, dim=2) for x in (data.k, data.v))
        repeated = run(data.with_(k=k, v=v), impl, **mask)
        dk, dv = (x.unflatten(2, (heads_kv, -1)).sum(3) for x in (repeated.dk, repeated.dv))
        compare(repeated._replace(dk=dk, dv=dv), check_and_expect(data, impl, **mask), torch.float32)


@pytest.mark.parametrize("impl, device", WHERE)
def test_the_order_of_keys(impl, device):
    where = (impl, device)

    @examples(where, shape=shapes(where))
    def order_of_keys(shape):
        data = dense(**shape)
        order = torch.randperm(shape["seqlen_k"], generator=torch.Generator().manual_seed(shape["seed"])).to(device)
        found = run(data.with_(k=data.k[:, order], v=data.v[:, order]), impl)
        back = order.argsort()
        compare(found._replace(dk=found.dk[:, back], dv=found.dv[:, back]), expect(data), data.q.dtype)


@pytest.mark.parametrize("impl, device", WHERE)
def test_a_constant_in_a_row_of_scores_changes_only_lse(impl, device):
    """One more dimension, in which the keys are 1 and the queries c_i, adds scale * c_i to the scores of row i."""
    where = (impl, device)
    fixed = {"dim": 63} if where == GPU else {}

    @examples(where, shape=shapes(where, **fixed), mask=MASKS)
    def constant_in_a_row(shape, mask):
        data, dim = dense(**shape), shape["dim"]
        mask["softmax_scale"] = dim**-0.5
        c = (torch.arange(shape["seqlen_q"], device=device) % 17 - 8) / 2
        q = torch.cat([data.q, c.to(data.q.dtype)[None, :, None, None].expand(*data.q.shape[:-1], 1)], dim=-1)
        k = torch.cat([data.k, torch.ones_like(data.k[..., :1])], dim=-1)
        found = check(data.with_(q=q, k=k), impl, **mask)
        expected = expect(data, **mask)
        moved = expected.oracle.lse + dim**-0.5 * c.double()
        lse = Expected(*(x._replace(lse=moved if x is expected.oracle else x.lse) for x in expected[:3]), *expected[3:])
        compare(found._replace(dq=found.dq[..., :dim], dk=found.dk[..., :dim]), lse, data.q.dtype)


@pytest.mark.parametrize("impl, device, dtype", WHERE_DTYPE)
def test_values_of_one_give_one(impl, device, dtype):
    """The probabilities that are multiplied with the values are those that are summed to divide by."""
    where = (impl, device)

    @examples(where, shape=shapes(where, dtype=dtype), mask=MASKS)
    def values_of_one(shape, mask):
        data = dense(**shape)
        data.v.fill_(1.0)
        expected = check_and_expect(data, impl, **mask)
        ones = (~expected.empty).double().transpose(1, 2)[..., None].expand(data.dout.shape)
        assert_close_to_oracle(run(data, impl, grads="", **mask).out, ones, expected.peer.out, dtype)
