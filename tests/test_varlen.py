"""Packed batches against the oracle: ragged and empty sequences, rows past the end, hints of length, and cumulative lengths that lie.

The surprising fact: a packed batch of equal lengths is a dense one in another shape, which is how eighty thousand sequences are compared
with the oracle in one call.
"""

import pytest
import torch

from flashattn import attention_varlen
from support import DTYPES, WHERE, WHERE_DTYPE, Data, Results, check, compare, dense, expect, packed, run, same_bits

pytestmark = pytest.mark.thinned(2)

EAGER, INTERPRETER, GPU = ("eager", "cpu"), ("portable", "cpu"), ("portable", "cuda")
HALF = {EAGER: torch.bfloat16, INTERPRETER: torch.float16, GPU: torch.bfloat16}
HEADS = {EAGER: {"heads": 4, "heads_kv": 2, "dim": 24}, INTERPRETER: {"heads": 1, "dim": 24}, GPU: {"heads": 4, "heads_kv": 2, "dim": 64}}
# Where a test is not about lengths: sequences of several tiles, of less than one, and of none on either side.
LENGTHS = {
    EAGER: ([100, 0, 7, 65, 1, 30], [90, 3, 0, 130, 1, 64]),
    INTERPRETER: ([20, 0, 7, 2], [70, 3, 0, 1]),
    GPU: ([1000, 0, 7, 513, 1, 300], [900, 3, 0, 1300, 1, 64]),
}


def sized(impl, device, lens_q=None, lens_k=None, **changes):
    lens_q, lens_k = (lens_q, lens_k) if lens_q is not None else LENGTHS[impl, device]
    return packed(lens_q, lens_k, **{"dtype": HALF[impl, device], "device": device, **HEADS[impl, device], **changes})


# ----------------------------------------------------------------------------------------------------------------------- lengths

# lens_q, lens_k, other arguments of `packed`
CASES = {
    "one-key-each": ([76, 34, 146], [1, 1, 1], {"scale": 3.0}),
    "empty-but-one": ([0, 0, 1023], [0, 1, 2045], {}),
    "one-row-in-all": ([0, 0, 0, 1], [0, 0, 0, 1], {"heads": 21, "heads_kv": 7, "dim": 120}),
    "empty-query-side": ([150, 0, 150], [100, 100, 100], {}),
    "empty-key-side": ([40, 50, 60], [70, 0, 80], {}),
    "long-tail": ([137, 349], [137, 349], {"tail_q": 212, "tail_k": 212}),
    "tails-differ": ([5, 3, 1, 0, 17], [0, 3, 9, 4, 2], {"tail_q": 1, "tail_k": 130}),
    "around-a-tile": ([127, 128, 129, 1, 63, 64, 65], [64, 1, 128, 65, 129, 63, 127], {}),
    "all-empty": ([0, 0, 0], [0, 0, 0], {"tail_q": 3, "tail_k": 70}),
    "no-keys": ([3, 0, 70], [0, 0, 0], {}),
    "no-queries": ([0, 0, 0], [3, 0, 70], {}),
    "no-rows": ([0], [0], {}),
    "one": ([65], [130], {}),
}
CASES_WHERE = [
    pytest.param(*where.values, name, marks=where.marks, id=f"{where.id}-{name}")
    for where in WHERE
    for name, (lens_q, lens_k, _) in CASES.items()
    if where.values != INTERPRETER or sum(lens_q) + sum(lens_k) < 600
]
MASKS = ({}, {"causal": True}, {"window": (30, 5)}, {"causal": "top-left"}, {"causal": True, "window": (0, None)})


@pytest.mark.parametrize("impl, device, name", CASES_WHERE)
def test_cases(impl, device, name):
    lens_q, lens_k, options = CASES[name]
    heads = {"heads": 3, "heads_kv": 1} if (impl, device) == INTERPRETER and "heads" in options else {}
    for mask in MASKS[: 3 if device == "cuda" else 2]:
        results = check(sized(impl, device, lens_q, lens_k, **{**options, **heads}), impl, **mask)
        if name == "empty-query-side":
            assert not results.dk[100:200].any() and not results.dv[100:200].any()


@pytest.mark.parametrize("impl, device", WHERE)
def test_no_sequences_at_all(impl, device):
    results = run(sized(impl, device, [], [], tail_q=5, tail_k=3), impl, causal=True)
    assert (results.lse == -torch.inf).all()
    assert not any(x.any() for x in (results.out, results.dq, results.dk, results.dv))


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("impl, device, dtype", WHERE_DTYPE)
def test_masks_and_dtypes(impl, device, dtype, mask):
    check(sized(impl, device, dtype=dtype, tail_q=9, tail_k=2), impl, **mask)


@pytest.mark.parametrize("dim, dim_v", [(40, 40), (72, 72), (64, 128), (192, 128), (113, 24)])
@pytest.mark.parametrize("impl, device", WHERE)
def test_head_dims(impl, device, dim, dim_v):
    check(sized(impl, device, dim=dim, dim_v=dim_v, tail_q=9, tail_k=2), impl, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_long_and_short_sequences_together(dim, causal):
    lengths = [4096, 17, 1, 2500, 300, 0, 1111]
    check(sized(*GPU, lengths, lengths, dim=dim, tail_q=100, tail_k=100), "portable", causal=causal)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_eighty_thousand_sequences(dtype):
    n, rows = 80_000, 16
    together = dense(rows, batch=n, heads=2, heads_kv=1, dim=16, dtype=dtype, device="cuda")
    flat = {name: x.flatten(0, 1) for name, x in vars(together).items() if name in ("q", "k", "v", "dout")}
    cu = torch.arange(0, n * rows + 1, rows, dtype=torch.int32, device="cuda")
    found = run(Data(**flat, dlse=together.dlse.transpose(0, 1).flatten(1), cu_q=cu, cu_k=cu), "portable", causal=True)
    unpacked = {name: getattr(found, name).unflatten(0, (n, rows)) for name in ("out", "dq", "dk", "dv")}
    compare(Results(lse=found.lse.unflatten(1, (n, rows)).transpose(0, 1), **unpacked), expect(together, causal=True), dtype)


# ------------------------------------------------------------------------------------------------------------------ past the end


@pytest.mark.parametrize("impl, device", WHERE)
def test_rows_past_the_end_do_not_change_a_bit(impl, device):
    """They are NaN as they come; then infinite; then ordinary numbers."""
    data = sized(impl, device, tail_q=70, tail_k=5)
    first = check(data, impl, causal=True)
    used_q, used_k = int(data.cu_q[-1]), int(data.cu_k[-1])
    assert data.q[used_q:].isnan().all() and data.v[used_k:].isnan().all()
    assert not first.out[used_q:].any() and (first.lse[:, used_q:] == -torch.inf).all()
    for gradient, used in ((first.dq, used_q), (first.dk, used_k), (first.dv, used_k)):
        assert not gradient[used:].any()
    for filler in (torch.inf, 7.0):
        for x, used in ((data.q, used_q), (data.dout, used_q), (data.k, used_k), (data.v, used_k)):
            x[used:] = filler
        data.dlse[:, used_q:] = filler
        assert same_bits(first, run(data, impl, causal=True))


# ------------------------------------------------------------------------------------------------------------------------- hints


@pytest.mark.parametrize("impl, device", WHERE)
def test_the_longest_length_is_only_a_hint(impl, device):
    data = sized(impl, device)
    longest = [max(lens) for lens in LENGTHS[impl, device]]
    first = run(data, impl, causal=True, window=(50, None))
    tensors = [torch.tensor(n, dtype=torch.int32, device=device) for n in longest]
    for max_q, max_k in (longest, (longest[0], None), (None, longest[1]), (longest[0] + 77, 1 << 40), tensors):
        assert same_bits(first, run(data, impl, causal=True, window=(50, None), max_seqlen_q=max_q, max_seqlen_k=max_k))


@pytest.mark.parametrize("impl, device", WHERE)
def test_cumulative_lengths_of_any_stride(impl, device):
    data = sized(impl, device)
    first = run(data, impl, causal=True)
    apart = {name: torch.stack([getattr(data, name), torch.full_like(getattr(data, name), -1)], dim=1)[:, 0] for name in ("cu_q", "cu_k")}
    assert all(cu.stride() == (2,) for cu in apart.values())
    assert same_bits(first, run(data.with_(**apart), impl, causal=True))


# -------------------------------------------------------------------------------------------------------- lengths that are not so

# of 150 rows of q and of k: cu_seqlens_q, cu_seqlens_k, the error
LIES = [
    ([0, 100, 50, 150], [0, 50, 100, 150], "cu_seqlens_q falls"),
    ([0, 50, 100, 150], [0, 150, 0, 150], "cu_seqlens_k falls"),
    ([0, 50, 100, 151], [0, 50, 100, 150], "cu_seqlens_q ends with 151 but q has 150 rows"),
    ([0, 50, 100, 150], [0, 50, 100, 1 << 30], "cu_seqlens_k ends with 1073741824 but k has 150 rows"),
    ([1, 50, 100, 150], [0, 50, 100, 150], "cu_seqlens_q starts with 1"),
    ([-(1 << 31), 50, 100, 150], [-5, 50, 100, 150], "cu_seqlens_q starts with -2147483648"),
    ([0, (1 << 31) - 1, -(1 << 31), 150], [0, -(1 << 31), (1 << 31) - 1, 0], "cu_seqlens_q falls"),
]


def lying(impl, device, cu_q, cu_k):
    data = sized(impl, device, [150], [150], strides="fused")  # NaN between the rows and around them
    cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32, device=device) for cu in (cu_q, cu_k))
    return data.with_(cu_q=cu_q, cu_k=cu_k)


@pytest.mark.parametrize("cu_q, cu_k, message", LIES)
@pytest.mark.parametrize("impl, device", WHERE)
def test_cumulative_lengths_that_lie_are_refused(impl, device, cu_q, cu_k, message, monkeypatch):
    """On the CPU always, on a GPU if asked for."""
    monkeypatch.setenv("FLASHATTN_CHECK", "1" if device == "cuda" else "0")
    with pytest.raises(ValueError, match=message):
        run(lying(impl, device, cu_q, cu_k), impl)


@pytest.mark.parametrize("impl, device", WHERE)
def test_a_longest_length_that_is_too_short_is_refused(impl, device, monkeypatch):
    monkeypatch.setenv("FLASHATTN_CHECK", "1")
    data = sized(impl, device, [3, 5], [4, 2])
    for limits, message in (((4, 4), "max_seqlen_q=4 but a sequence has 5"), ((5, 3), "max_seqlen_k=3 but a sequence has 4")):
        with pytest.raises(ValueError, match=message):
            attention_varlen(data.q, data.k, data.v, data.cu_q, data.cu_k, max_seqlen_q=limits[0], max_seqlen_k=limits[1], impl=impl)


@pytest.mark.gpu
@pytest.mark.parametrize("cu_q, cu_k, message", LIES)
def test_cumulative_lengths_that_lie_stay_inside_the_tensors(cu_q, cu_k, message, monkeypatch):
    """An access outside would be an illegal one, mostly: these are gigabytes away. Which rows come out is not promised."""
    monkeypatch.delenv("FLASHATTN_CHECK", raising=False)
    run(lying(*GPU, cu_q, cu_k), "portable", causal=True)
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_cumulative_lengths_past_the_tensors_are_clamped(monkeypatch):
    monkeypatch.delenv("FLASHATTN_CHECK", raising=False)
    good = run(lying(*GPU, [0, 50, 100, 150], [0, 60, 130, 150]), "portable", causal=True)
    past = run(lying(*GPU, [-9, 50, 100, 1 << 30], [-(1 << 31), 60, 130, 151]), "portable", causal=True)
    assert same_bits(good, past)
