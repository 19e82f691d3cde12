"""Dropout in calls: every kernel keeps the pairs of the one mask, and its numbers are the oracle's; wrong arguments.

The surprising fact: zeros for q and k, and the identity for v, make out the mask itself, divided by what softmax and dropout divide by. So
which pairs a kernel keeps can be read off its result, exactly.
"""

from itertools import product

import pytest
import torch

from flashattn import attention, attention_varlen, dropout_mask, eager, explain, merge_attention_states
from flashattn.reference import attention_reference
from support import WHERE, WHERE_DTYPE, check, dense, packed, run, same_bits
from test_variants import MASKS, VARIANTS, sized, some

pytestmark = pytest.mark.thinned(3)

DROPPED = {"dropout_p": 0.3, "dropout_seed": 5}
SEED = 2**40 + 17, 2**63 - 5  # and an offset


def small(device):
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(shape, generator=generator, device=device) for shape in ((2, 9, 4, 16), (2, 13, 2, 16), (2, 13, 2, 16))]


# --------------------------------------------------------------------------------------------------------------- kernels keep the mask


def kept_by(impl, device, dtype, heads=3, heads_kv=1, rows=(70, 48), batch=2, layout="bshd", p=0.3, seed=SEED):
    """(which pairs a call keeps, the mask)"""
    rows_q, rows_k = rows
    q, k = (torch.zeros(batch, n, h, 16, dtype=dtype, device=device) for n, h in ((rows_q, heads), (rows_k, heads_kv)))
    v = torch.eye(rows_k, dtype=dtype, device=device)[None, :, None].expand(batch, -1, heads_kv, -1)
    rng = torch.tensor(seed, device=device)
    tensors = [x.transpose(1, 2) if layout == "bhsd" else x for x in (q, k, v)]
    out = attention(*tensors, dropout_p=p, dropout_seed=rng, layout=layout, impl=impl)
    out = out if layout == "bhsd" else out.transpose(1, 2)
    mask = dropout_mask(p, rng, batch, heads, rows_q, rows_k)
    torch.testing.assert_close(out.float(), (mask / (rows_k * (1 - p))).float(), rtol=1e-2, atol=0)
    return out != 0, mask


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("impl, device, dtype", WHERE_DTYPE)
def test_what_is_kept_is_the_mask(impl, device, dtype, layout):
    """Whatever the tile, which depends on the dtype and the head dims, and whatever the group."""
    for heads_kv in (1, 3) if device == "cuda" else (1,):
        found, mask = kept_by(impl, device, dtype, heads_kv=heads_kv, layout=layout)
        assert torch.equal(found, mask)


@pytest.mark.parametrize("rows", [(1, 1), (3, 130), (130, 3), (65, 129)])
@pytest.mark.parametrize("impl, device", WHERE)
def test_positions_count_from_the_first_row(impl, device, rows):
    found, mask = kept_by(impl, device, torch.float16, heads=2, rows=rows, batch=1, p=0.5)
    assert torch.equal(found, mask)


@pytest.mark.parametrize("impl, device", WHERE)
def test_a_sequence_has_the_mask_of_its_number(impl, device):
    """Packed with others of other lengths, none of them too."""
    lens_q, lens_k, p = [20, 0, 5, 33], [31, 4, 0, 40], 0.4
    total = sum(lens_k)
    q, k = (torch.zeros(sum(lens), heads, 16, device=device) for lens, heads in ((lens_q, 4), (lens_k, 2)))
    v = torch.eye(total, device=device)[:, None].expand(-1, 2, -1)
    cu_q, cu_k = (torch.tensor([0, *lens], device=device).cumsum(0).int() for lens in (lens_q, lens_k))
    out = attention_varlen(q, k, v, cu_q, cu_k, dropout_p=p, dropout_seed=9, impl=impl)
    expected = torch.zeros(sum(lens_q), 4, total, dtype=torch.bool, device=device)
    for n, (q0, q1, k0, k1) in enumerate(zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False)):
        mask = dropout_mask(p, 9, 4, 4, int(q1 - q0), int(k1 - k0), device=device)[n]
        expected[q0:q1, :, k0:k1] = mask.transpose(0, 1)
    assert torch.equal(out != 0, expected)


# -------------------------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("kind", ["dense", "packed"])
@pytest.mark.parametrize("impl, device, dtype", WHERE_DTYPE)
def test_against_the_oracle_under_masks(impl, device, dtype, kind):
    for mask in some(MASKS, (impl, device), (kind == "packed") + 2 * (dtype == torch.float32), dtype):
        check(sized(impl, device, kind, dtype=dtype), impl, **DROPPED, **mask)


@pytest.mark.parametrize("kind", ["dense", "packed"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("impl, device", WHERE)
def test_beside_other_variants(impl, device, variant, kind):
    extras, options = VARIANTS[variant]
    rows = {"seqlen_q": 9, "seqlen_k": 20} if impl == "portable" and device == "cpu" else {}
    check(sized(impl, device, kind, extras, **rows), impl, causal=True, **DROPPED, **options)


@pytest.mark.parametrize("of", ["bhqk", "hqk", "hk"])
@pytest.mark.parametrize("impl, device", WHERE)
def test_gradients_of_a_bias(impl, device, of):
    """Of each element, and summed over what shares it."""
    rows = {"seqlen_q": 9, "seqlen_k": 20} if device == "cpu" else {}
    data = sized(impl, device, **rows)
    sizes = dict(zip("bhqk", (data.q.shape[0], data.q.shape[2], data.q.shape[1], data.k.shape[1]), strict=True))
    bias = torch.randn([size if dim in of else 1 for dim, size in sizes.items()], dtype=data.q.dtype, device=device)
    check(data.with_(bias=bias), impl, grads="qkvb", causal=True, **DROPPED)


@pytest.mark.parametrize("sizes", [(1000, 8), (1, 1)], ids=str)
def test_the_fallback_in_many_chunks(sizes, monkeypatch):
    monkeypatch.setattr(eager, "CHUNK_SCORES", sizes[0])
    monkeypatch.setattr(eager, "MIN_ROWS", sizes[1])
    for kind, mask in product(("dense", "packed"), MASKS[:3]):
        check(sized("eager", "cpu", kind, {"sinks": 0.0}, seqlen_q=40, seqlen_k=30), "eager", **DROPPED, **mask)


@pytest.mark.parametrize("grads", ["q", "k", "v", "kv", ""])
@pytest.mark.parametrize("impl, device", WHERE)
def test_only_the_gradients_asked_for(impl, device, grads):
    rows = {"seqlen_q": 5, "seqlen_k": 9} if device == "cpu" else {}
    check(sized(impl, device, **rows), impl, grads=grads, causal=True, **DROPPED)


@pytest.mark.parametrize("head_dims", [(72, 40), (113, 24)])
@pytest.mark.parametrize("impl, device", WHERE)
def test_head_dims(impl, device, head_dims):
    rows = {"seqlen_q": 5, "seqlen_k": 9} if device == "cpu" else {}
    check(sized(impl, device, dim=head_dims[0], dim_v=head_dims[1], **rows), impl, **DROPPED)


@pytest.mark.parametrize("p", [1e-3, 0.9, 0.9999])
@pytest.mark.parametrize("impl, device", WHERE)
def test_probabilities(impl, device, p):
    rows = {"seqlen_q": 20, "seqlen_k": 40} if device == "cpu" else {}
    check(sized(impl, device, dtype=torch.float32, **rows), impl, dropout_p=p, dropout_seed=5)


@pytest.mark.parametrize("impl, device", WHERE)
def test_rows_without_keys(impl, device):
    for kind in ("dense", "packed"):
        check(sized(impl, device, kind, seqlen_q=20, seqlen_k=9), impl, causal=True, **DROPPED)
        check(sized(impl, device, kind, {"sinks": 0.0}, seqlen_q=20, seqlen_k=9), impl, causal=True, **DROPPED)
    check(sized(impl, device, seqlen_q=20, seqlen_k=0), impl, **DROPPED)


@pytest.mark.parametrize("impl, device", WHERE)
def test_a_probability_of_one_leaves_lse(impl, device):
    data = sized(impl, device, seqlen_q=20, seqlen_k=9)
    for lse_grad in (False, True):
        found = check(data, impl, lse_grad=lse_grad, dropout_p=1.0, dropout_seed=1)
        assert not found.out.any() and not found.dv.any() and found.lse.isfinite().all()
        assert bool(found.dq.any()) == bool(found.dk.any()) == lse_grad


@pytest.mark.parametrize("impl, device", WHERE)
def test_none_at_all(impl, device):
    """The bits of a call without it, and nothing drawn."""
    data = sized(impl, device, seqlen_q=20, seqlen_k=9)
    expected, state = run(data, impl), torch.get_rng_state()
    for p in (0, 0.0, 2.0**-40):
        assert same_bits(run(data, impl, dropout_p=p), expected)
    assert torch.equal(torch.get_rng_state(), state)


def test_parts_with_seeds_of_their_own_are_merged():
    """lse knows nothing of dropout: so the merge of two parts is one call whose mask is that of each part."""
    data = dense(20, 30, batch=2, heads=2, dim=8, dtype=torch.float64, device="cpu")
    q, k, v = (x.float() for x in (data.q, data.k, data.v))
    parts, masks = [], []
    for seed, keys in ((1, slice(0, 12)), (2, slice(12, 30))):
        parts += attention(q, k[:, keys], v[:, keys], dropout_p=0.4, dropout_seed=seed, return_lse=True)
        masks.append(dropout_mask(0.4, seed, 2, 2, 20, keys.stop - keys.start))
    expected = attention_reference(data.q, data.k, data.v, dropout_p=0.4, dropout_seed=torch.cat(masks, -1), return_lse=True)
    for found, other in zip(merge_attention_states(*parts), expected, strict=True):
        torch.testing.assert_close(found.double(), other, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------------------- words


@pytest.mark.parametrize("error, message, options", [
    (ValueError, r"dropout_p=-0\.1: expected a probability", {"dropout_p": -0.1}),
    (ValueError, r"dropout_p=1\.5: expected a probability", {"dropout_p": 1.5}),
    (ValueError, "dropout_p=nan", {"dropout_p": float("nan")}),
    (TypeError, "dropout_p is a str", {"dropout_p": "0.1"}),
    (TypeError, "dropout_p is a bool", {"dropout_p": True}),
    (TypeError, "dropout_p is a Tensor", {"dropout_p": torch.tensor(0.1)}),
    (TypeError, "dropout_seed is a float", {"dropout_seed": 1.0}),
    (TypeError, "dropout_seed is a bool", {"dropout_seed": True}),
    (ValueError, "dropout_seed=18446744073709551616: expected 64 bits", {"dropout_seed": 2**64}),
    (TypeError, "dropout_seed has dtype torch.int32", {"dropout_seed": torch.zeros(2, dtype=torch.int32)}),
    (ValueError, r"dropout_seed has shape \(3,\)", {"dropout_seed": torch.zeros(3, dtype=torch.int64)}),
    (ValueError, "dropout_seed is on meta and q on cpu", {"dropout_seed": torch.zeros(2, dtype=torch.int64, device="meta")}),
    (TypeError, "generator is a int", {"generator": 3}),
    (ValueError, "dropout_seed and generator are both given", {"dropout_seed": 3, "generator": torch.Generator()}),
])  # fmt: skip
@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_wrong_arguments_are_named(kind, error, message, options):
    q, k, v = small("cpu")
    cu_q, cu_k = (torch.tensor([0, rows], dtype=torch.int32) for rows in (9, 13))
    options = {"dropout_p": 0.5} | options
    with pytest.raises(error, match=message):
        attention(q, k, v, **options) if kind == "dense" else attention_varlen(q[0], k[0], v[0], cu_q, cu_k, **options)


def test_an_operator_without_a_seed_says_so():
    q, k, v = small("cpu")
    with pytest.raises(ValueError, match=r"dropout_p=0\.5 with an rng that is None"):
        torch.ops.flashattn.attn_fwd(q, k, v, *[None] * 3, 0.0, 0.5, None, *[None] * 5, 0.25, None, None, False, False, None)


def test_explain_tells_of_it():
    q, k, v = small("cpu")
    text = str(explain(q, k, v, dropout_p=0.25))
    assert "dropout of 0.25" in text and "dropout" not in str(explain(q, k, v))
    data = packed([3, 4], heads=2, dim=8, dtype=torch.float32, device="cpu")
    assert explain(data.q, data.k, data.v, data.cu_q, data.cu_k, dropout_p=0.25).problem.dropout == 0.25
