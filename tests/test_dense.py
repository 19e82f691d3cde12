"""Dense attention against the oracle: lengths, head dims, dtypes, masks, grouped heads, layouts, scales and numbers that hurt.

The same questions on three tiers, at sizes that each can afford: an interpreted kernel takes a tenth of a second a tile, so the shapes
there are small and ugly; a compiled one takes seconds to compile for each kind of length and stride, so the shapes there are alike.

The surprising fact: numbers that hurt are compared with plain attention in float32, whatever their dtype. Scores of 1e5 are rounded to
multiples of 512 by bfloat16, so a peer of that dtype would allow anything.
"""

from itertools import product

import pytest
import torch

from flashattn.reference import attention_reference
from support import WHERE, WHERE_DTYPE, Results, assert_close_to_oracle, check, compare, dense, expect, run, same_bits

pytestmark = pytest.mark.thinned(2)

EAGER, INTERPRETER, GPU = ("eager", "cpu"), ("portable", "cpu"), ("portable", "cuda")
# Sizes where a test is not about them. A few tiles of rows and keys, none of them full.
SIZES = {
    EAGER: {"seqlen_q": 113, "seqlen_k": 203, "batch": 2, "heads": 4, "heads_kv": 2, "dim": 24},
    INTERPRETER: {"seqlen_q": 17, "seqlen_k": 70, "batch": 1, "heads": 2, "heads_kv": 1, "dim": 24},
    GPU: {"seqlen_q": 1001, "seqlen_k": 1203, "batch": 2, "heads": 4, "heads_kv": 2, "dim": 64},
}
# On a GPU float16 runs in the tiles of bfloat16, and twice the compilations would show nothing new about lengths.
WHERE_TILES = [where for where in WHERE_DTYPE if where.values != (*GPU, torch.float16)]
HALF = {EAGER: torch.bfloat16, INTERPRETER: torch.float16, GPU: torch.bfloat16}


def sized(impl, device, **changes):
    return dense(**{"dtype": HALF[impl, device], "device": device, **SIZES[impl, device], **changes})


# ----------------------------------------------------------------------------------------------------------------------- lengths

SMALL, LONG = (0, 1, 2, 63, 64, 65, 127, 128, 129), (500, 1023, 1025)
PAIRS = {
    EAGER: [*product(SMALL, SMALL), (1023, 500), (500, 1025)],
    INTERPRETER: [*product((0, 1, 2), (0, 1, 2)), (3, 3), (239, 1), (64, 1), (65, 129), (128, 63), (113, 203)],
    GPU: [*product((*SMALL, *LONG), (*SMALL, *LONG))],
}
PARTS = 4  # of the pairs, so that processes can share them


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("impl, device, dtype", WHERE_TILES)
def test_pairs_of_lengths(impl, device, dtype, causal, part):
    heads = 1 if (impl, device) == INTERPRETER else 2
    for n, (rows_q, rows_k) in enumerate(PAIRS[impl, device][part::PARTS]):
        shape = {"seqlen_q": rows_q, "seqlen_k": rows_k, "batch": 1, "heads": heads, "heads_kv": 1}
        check(sized(impl, device, **shape, dtype=dtype, seed=n), impl, causal=causal)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("rows_q, rows_k", [(4096, 4096), (2048, 6144)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_long_sequences_of_full_tiles(dtype, rows_q, rows_k, dim, causal):
    check(dense(rows_q, rows_k, heads=4, heads_kv=2, dim=dim, dtype=dtype, device="cuda"), "portable", causal=causal)


@pytest.mark.parametrize("batch, rows_q, rows_k", [(0, 3, 3), (2, 0, 3), (2, 3, 0), (2, 0, 0), (0, 0, 0)])
@pytest.mark.parametrize("impl, device", WHERE)
def test_nothing_to_do_is_not_an_error(impl, device, batch, rows_q, rows_k):
    for options in ({}, {"causal": True}, {"causal": "top-left"}, {"window": (0, 0)}):
        check(sized(impl, device, batch=batch, seqlen_q=rows_q, seqlen_k=rows_k), impl, **options)


# --------------------------------------------------------------------------------------------------------------------- head dims

DIMS = (1, 3, 16, 24, 40, 64, 72, 96, 104, 113, 128, 192, 256)
UNEQUAL_DIMS = ((64, 128), (128, 64), (192, 128), (24, 113), (113, 24), (3, 256), (256, 1))


@pytest.mark.parametrize("dim, dim_v", [*zip(DIMS, DIMS, strict=True), *UNEQUAL_DIMS])
@pytest.mark.parametrize("impl, device, dtype", WHERE_TILES)
def test_head_dims(impl, device, dtype, dim, dim_v):
    rows = {"seqlen_q": 5, "seqlen_k": 9, "heads": 1} if (impl, device) == INTERPRETER else {}
    check(sized(impl, device, dim=dim, dim_v=dim_v, dtype=dtype, **rows), impl, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [40, 64, 113, 128])
def test_head_dims_in_float16(dim):
    check(sized(*GPU, dim=dim, dtype=torch.float16), "portable", causal=True)


# ------------------------------------------------------------------------------------------------------------------------- masks

MASKS = {  # of n keys
    "none": lambda n: {},
    "causal": lambda n: {"causal": True},
    "top-left": lambda n: {"causal": "top-left"},
    "self": lambda n: {"window": (0, 0)},
    "not-left": lambda n: {"window": (0, None)},
    "not-right": lambda n: {"window": (None, 0)},
    "one-left": lambda n: {"window": (1, 0)},
    "one-right": lambda n: {"window": (0, 1)},
    "seq-1": lambda n: {"window": (n - 1, n - 1)},
    "seq": lambda n: {"window": (n, n)},
    "beyond": lambda n: {"window": (n + 1, 1 << 40)},
    "band": lambda n: {"window": (n // 4, n // 5)},
    "right-only": lambda n: {"window": (None, n // 7)},
    "causal-one": lambda n: {"causal": True, "window": (1, None)},
    "causal-seq-1": lambda n: {"causal": True, "window": (n - 1, None)},
    "causal-caps-right": lambda n: {"causal": True, "window": (n // 3, 5)},
    "top-left-self": lambda n: {"causal": "top-left", "window": (0, None)},
    "top-left-window": lambda n: {"causal": "top-left", "window": (n // 3, 9)},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("size", ["long", "short"])
@pytest.mark.parametrize("impl, device", WHERE)
def test_masks(impl, device, size, mask):
    """With more keys than queries, more queries than keys, and as many."""
    rows, keys = (SIZES[impl, device]["seqlen_q"], SIZES[impl, device]["seqlen_k"]) if size == "long" else (3, 7)
    heads = {"heads": 1, "heads_kv": 1} if (impl, device) == INTERPRETER else {}
    for rows_q, rows_k in ((rows, keys), (keys, rows), (keys, keys)):
        check(sized(impl, device, seqlen_q=rows_q, seqlen_k=rows_k, **heads), impl, **MASKS[mask](rows_k))


# -------------------------------------------------------------------------------------------------------------- heads and layouts

GROUPS = ((40, 4), (7, 1), (9, 3), (64, 8), (128, 1), (6, 2), (12, 3))
GROUPED = [
    pytest.param(*where.values, heads, heads_kv, marks=where.marks, id=f"{where.id}-{heads}-{heads_kv}")
    for where in WHERE
    for heads, heads_kv in GROUPS
    if where.values != INTERPRETER or heads <= 9
]


@pytest.mark.parametrize("impl, device, heads, heads_kv", GROUPED)
def test_grouped_heads(impl, device, heads, heads_kv):
    rows = {"seqlen_q": 5, "seqlen_k": 9} if (impl, device) == INTERPRETER else {}
    check(sized(impl, device, heads=heads, heads_kv=heads_kv, **rows), impl, causal=True)


@pytest.mark.parametrize("strides", ["contiguous", "heads_first"])
@pytest.mark.parametrize("impl, device", WHERE)
def test_layouts(impl, device, strides):
    data = sized(impl, device, strides=strides)
    bhsd = check(data, impl, layout="bhsd", causal=True)
    assert same_bits(bhsd, run(data, impl, layout="bshd", causal=True))


# ------------------------------------------------------------------------------------------------------------------------ scales


@pytest.mark.parametrize("scale", [-0.3, -2.0, 0.0, 1e-30, 1.0, 3])
@pytest.mark.parametrize("impl, device", WHERE)
def test_scales(impl, device, scale):
    data = sized(impl, device)
    results = check(data, impl, softmax_scale=scale, causal=True, window=(50, None))
    if scale == 0.0:
        assert not results.dq.any() and not results.dk.any()


# ----------------------------------------------------------------------------------------------------------------------- numbers

MANY_KEYS = {EAGER: (64, 192, 320), INTERPRETER: (64, 192), GPU: (64, 192, 320, 704, 1088)}


@pytest.mark.parametrize("rows_q", [1, 2, 17])
@pytest.mark.parametrize("shift", [-120.0, -6e4])
@pytest.mark.parametrize("impl, device, dtype", WHERE_DTYPE)
def test_scores_far_from_zero(impl, device, dtype, shift, rows_q):
    """Only the differences between scores matter, and lse is as exact as a float32 of its size."""
    for rows_k in MANY_KEYS[impl, device]:
        data = sized(impl, device, seqlen_q=rows_q, seqlen_k=rows_k, heads=1, heads_kv=1, dtype=dtype)
        data.q[..., -1], data.k[..., -1] = 16.0, shift / 16.0 * data.q.shape[-1] ** 0.5
        results = check(data, impl, causal=True, peer_dtype=torch.float32)
        assert (results.lse / shift - 1).abs().amax() < 0.2


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("impl, device, dtype", WHERE_DTYPE)
def test_scores_of_a_hundred_thousand(impl, device, dtype, sign):
    data = sized(impl, device, heads=2, heads_kv=1, dim=64, dtype=torch.float32)
    # norms of 900: the products reach 8e5 and the scores, of 64 dims, 1e5
    q, k = (x / x.norm(dim=-1, keepdim=True) * 900.0 for x in (data.q, data.k))
    k[:, 5] = sign * q[:, 7, ::2]
    assert (q[:, 7, ::2] * k[:, 5]).sum(-1).abs().amin() / 8 > 1e5
    data = data.with_(**{name: x.to(dtype) for name, x in {**vars(data), "q": q, "k": k}.items() if name in ("q", "k", "v", "dout")})
    check(data, impl, peer_dtype=torch.float32)


@pytest.mark.parametrize("rows_k", [128, 127])
@pytest.mark.parametrize("impl, device, dtype", WHERE_DTYPE)
def test_keys_switched_off_by_the_most_negative_number(impl, device, dtype, rows_k):
    """Whole tiles of them, which no mask touches: in base 2 their scores are -inf. What is left is attention without them."""
    off = 64
    data = sized(impl, device, seqlen_q=3, seqlen_k=rows_k, heads=2, heads_kv=1, dtype=dtype)
    data.q[..., 0], data.k[..., 0] = 1.0, 0.0
    data.k[:, :off, :, 0] = torch.finfo(dtype).min
    results = run(data, impl, softmax_scale=1.0)
    left = data.with_(k=data.k[:, off:], v=data.v[:, off:])
    assert not results.dk[:, :off].any() and not results.dv[:, :off].any()
    found = results._replace(dk=results.dk[:, off:], dv=results.dv[:, off:])
    compare(found, expect(left, softmax_scale=1.0, peer_dtype=torch.float32), dtype)


ONE_KEY = [(1, 1, {}), (70, 70, {"window": (0, 0)}), (5, 1, {}), (9, 4, {"causal": True, "window": (0, None)})]


@pytest.mark.parametrize("rows_q, rows_k, mask", ONE_KEY)
@pytest.mark.parametrize("impl, device, dtype", WHERE_TILES)
def test_a_single_key_is_its_value(impl, device, dtype, rows_q, rows_k, mask):
    """out is v and, but for the roundoff of what cancels, dq and dk are 0 when nothing comes through lse."""
    data = sized(impl, device, seqlen_q=rows_q, seqlen_k=rows_k, dtype=dtype, scale=3.0)
    results = check(data, impl, lse_grad=False, **mask)
    if rows_q == rows_k:
        assert torch.equal(results.out, data.v.repeat_interleave(2, dim=2))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_accumulators_of_many_keys(dtype):
    """Values of mean 1 at 128k keys: what is summed grows to tens of thousands before it is divided by as much."""
    data = dense(64, 1 << 17, heads=1, dim=64, dtype=dtype, device="cuda")
    data.q.mul_(0.1)
    data.v.add_(1.0)

    def reference(dtype):
        inputs = [x.to(dtype).requires_grad_() for x in (data.q, data.k, data.v)]
        out, lse = attention_reference(*inputs, return_lse=True)
        gradients = torch.autograd.grad((out, lse), inputs, (data.dout.to(dtype), data.dlse.to(dtype)))
        return Results(out.detach(), lse.detach(), *gradients)

    oracle, peer, single = reference(torch.float64), reference(dtype), reference(torch.float32)
    results = run(data, "portable")
    assert_close_to_oracle(results.lse, oracle.lse, single.lse, torch.float32, what="lse")
    for name in ("out", "dq", "dk", "dv"):
        assert_close_to_oracle(getattr(results, name), getattr(oracle, name), getattr(peer, name), dtype, what=name)
