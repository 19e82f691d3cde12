"""The oracle has no oracle but the formula itself: element by element in Python, finite differences, and torch's own attention."""

import doctest
import itertools
import math

import pytest
import torch
from einops import rearrange
from hypothesis import given
from hypothesis import strategies as st

from flashattn import reference
from flashattn.reference import attention_reference, attention_varlen_reference, keep_mask, online_softmax

MASKS = [
    {},
    {"causal": True},
    {"causal": "top-left"},
    {"window": (2, 1)},
    {"window": (0, 0)},
    {"window": (None, 1)},
    {"window": (1, None)},
    {"causal": True, "window": (1, 3)},
    {"causal": "top-left", "window": (1, None)},
]
SIZES = [(3, 3), (3, 7), (7, 3), (1, 5), (5, 1)]


def inputs(rows_q, rows_k, *, batch=2, heads=4, heads_kv=2, dim=5, dim_v=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, rows_q, heads, dim), (batch, rows_k, heads_kv, dim), (batch, rows_k, heads_kv, dim_v)
    return [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]


def by_hand(q, k, v, scale, causal=False, window=None, softcap=None, slopes=None, sinks=None):
    """out and lse from the words of the contract, one number at a time."""
    (batch, rows_q, heads, dim), (_, rows_k, heads_kv, dim_v) = q.shape, v.shape
    q, k, v = (x.tolist() for x in (q, k, v))
    out = torch.zeros(batch, rows_q, heads, dim_v, dtype=torch.float64)
    lse = torch.full((batch, heads, rows_q), -math.inf, dtype=torch.float64)
    left, right = window or (None, None)
    for b, i, h in itertools.product(range(batch), range(rows_q), range(heads)):
        diagonal = i if causal == "top-left" else i + rows_k - rows_q
        weights = {}
        for j in range(rows_k):
            if (causal and j > diagonal) or (left is not None and j < diagonal - left) or (right is not None and j > diagonal + right):
                continue
            score = scale * sum(q[b][i][h][d] * k[b][j][h // (heads // heads_kv)][d] for d in range(dim))
            if softcap:
                score = softcap * math.tanh(score / softcap)
            if slopes is not None:
                score -= float(slopes[b][h] if slopes.dim() == 2 else slopes[h]) * abs(i + rows_k - rows_q - j)
            weights[j] = math.exp(score)
        total = sum(weights.values()) + (0.0 if sinks is None else math.exp(sinks[h]))
        if total:
            lse[b, h, i] = math.log(total)
            for e in range(dim_v):
                out[b, i, h, e] = sum(w * v[b][j][h // (heads // heads_kv)][e] for j, w in weights.items()) / total
    return out, lse


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("rows_q, rows_k", SIZES)
def test_the_formula(rows_q, rows_k, mask):
    q, k, v = inputs(rows_q, rows_k)
    for scale in (None, 0.7, 0.0, -1.3):
        out, lse = attention_reference(q, k, v, softmax_scale=scale, return_lse=True, **mask)
        expected, expected_lse = by_hand(q.detach(), k.detach(), v.detach(), 5**-0.5 if scale is None else scale, **mask)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-12)


def extras(name, heads=4, batch=2):
    """One of softcap, slopes of heads or of entries, sinks (one of them -inf), or all, as the oracle takes them."""
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.rand(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    sinks = draw(heads) * 4 - 2
    sinks[1] = -math.inf
    found = {"softcap": 0.9, "alibi_slopes": draw(batch, heads) if name != "head" else draw(heads), "sinks": sinks}
    names = {"softcap": ["softcap"], "head": ["alibi_slopes"], "entry": ["alibi_slopes"], "sinks": ["sinks"], "all": list(found)}
    return {key: found[key] for key in names[name]}


@pytest.mark.parametrize("name", ["softcap", "head", "entry", "sinks", "all"])
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"causal": "top-left"}, {"causal": "top-left", "window": (1, None)}], ids=str)
@pytest.mark.parametrize("rows_q, rows_k", SIZES)
def test_the_formula_with_what_else_scores_have(rows_q, rows_k, mask, name):
    q, k, v = inputs(rows_q, rows_k)
    options = extras(name)
    out, lse = attention_reference(q, k, v, softmax_scale=-0.7, return_lse=True, **mask, **options)
    slopes = {"slopes": options.pop("alibi_slopes")} if "alibi_slopes" in options else {}
    expected, expected_lse = by_hand(q.detach(), k.detach(), v.detach(), -0.7, **mask, **options, **slopes)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-12)


def test_one_row_with_everything_on_paper():
    """Two keys with products 1 and 2, a cap of 2, a slope of 1/4 over a distance of 1 and of 0, a sink of 0."""
    q, k, v = torch.ones(1, 1, 1, 1), torch.tensor([1.0, 2.0]).view(1, 2, 1, 1), torch.tensor([3.0, 5.0]).view(1, 2, 1, 1)
    options = {"softmax_scale": 1.0, "softcap": 2.0, "alibi_slopes": torch.tensor([0.25]), "sinks": torch.zeros(1)}
    out, lse = attention_reference(*(x.double() for x in (q, k, v)), return_lse=True, **options)
    first, second = math.exp(2 * math.tanh(0.5) - 0.25), math.exp(2 * math.tanh(1.0))
    assert math.isclose(lse.item(), math.log(first + second + 1))
    assert math.isclose(out.item(), (3 * first + 5 * second) / (first + second + 1))
    first, second = 1.962529, 4.586825  # e^(0.924234 - 0.25), e^1.523188
    assert math.isclose(lse.item(), math.log(first + second + 1), rel_tol=1e-6)


@pytest.mark.parametrize("mask", [{}, {"causal": True}], ids=str)
def test_alibi_is_an_explicit_mask(mask):
    """Which scaled_dot_product_attention adds to its scores."""
    q, k, v = (rearrange(x, "b s h d -> b h s d") for x in inputs(4, 6, heads_kv=4))
    slopes = extras("entry")["alibi_slopes"]
    distance = torch.tensor([[abs(i + 2 - j) for j in range(6)] for i in range(4)], dtype=torch.float64)
    added = (-slopes[:, :, None, None] * distance).masked_fill(~keep_mask(4, 6, **mask), -math.inf)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=added)
    torch.testing.assert_close(attention_reference(q, k, v, alibi_slopes=slopes, layout="bhsd", **mask), expected)


@pytest.mark.parametrize("name", ["softcap", "entry", "sinks", "all"])
@pytest.mark.parametrize("rows_q, rows_k", [(3, 4), (4, 2)])
def test_gradients_by_finite_differences_with_what_else_scores_have(rows_q, rows_k, name):
    options = extras(name, heads=2, batch=1)
    sinks = options.pop("sinks", None)
    finite_sinks = [] if sinks is None else [torch.tensor([0.3, -1.0], dtype=torch.float64, requires_grad=True)]

    def finite(q, k, v, *sinks):
        more = {"sinks": sinks[0]} if sinks else {}
        out, lse = attention_reference(q, k, v, return_lse=True, causal=True, **options, **more)
        return out, lse[lse.isfinite()]

    assert torch.autograd.gradcheck(finite, inputs(rows_q, rows_k, batch=1, heads=2, heads_kv=1, dim=2, dim_v=2) + finite_sinks)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("rows_q, rows_k", [(3, 4), (4, 2)])
def test_gradients_by_finite_differences(rows_q, rows_k, mask):
    def finite(q, k, v):
        out, lse = attention_reference(q, k, v, return_lse=True, **mask)
        return out, lse[lse.isfinite()]  # the difference of two -inf is no derivative

    assert torch.autograd.gradcheck(finite, inputs(rows_q, rows_k, batch=1, dim=2, dim_v=2))


def test_second_derivatives_by_finite_differences():
    assert torch.autograd.gradgradcheck(
        lambda q, k, v: attention_reference(q, k, v, causal=True, return_lse=True), inputs(2, 3, batch=1, heads=2, heads_kv=1, dim=2)
    )


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_against_scaled_dot_product_attention(layout):
    q, k, v = inputs(4, 6)
    heads_first = [rearrange(x, "b s h d -> b h s d") for x in (q, k, v)]
    for causal, masked in ((False, None), ("top-left", None), (True, keep_mask(4, 6, causal=True))):
        expected = torch.nn.functional.scaled_dot_product_attention(
            *heads_first, attn_mask=masked, is_causal=causal == "top-left", enable_gqa=True
        )
        if layout == "bhsd":
            out = attention_reference(*heads_first, causal=causal, layout=layout)
        else:
            out = rearrange(attention_reference(q, k, v, causal=causal), "b s h d -> b h s d")
        torch.testing.assert_close(out, expected)


def test_the_two_alignments_of_causal():
    assert keep_mask(2, 4, causal=True).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert keep_mask(2, 4, causal="top-left").int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0]]
    assert keep_mask(4, 2, causal=True).int().tolist() == [[0, 0], [0, 0], [1, 0], [1, 1]]
    assert keep_mask(4, 2, causal="top-left").int().tolist() == [[1, 0], [1, 1], [1, 1], [1, 1]]


@pytest.mark.parametrize("window", [(None, 2**63 - 1), (2**63 - 1, None), (2**63 - 1, 2**63 - 1)])
@pytest.mark.parametrize("rows_q, rows_k", [(5, 5), (7, 5), (5, 7)])
def test_the_widest_window_is_none(rows_q, rows_k, window):
    assert keep_mask(rows_q, rows_k, window=window).all()


@pytest.mark.parametrize(
    "rows_q, rows_k, mask, empty", [(5, 2, {"causal": True}, 3), (7, 3, {"causal": "top-left", "window": (1, 0)}, 3), (3, 0, {}, 3)]
)
def test_rows_without_keys_give_nothing_and_take_nothing(rows_q, rows_k, mask, empty):
    q, k, v = inputs(rows_q, rows_k)
    out, lse = attention_reference(q, k, v, return_lse=True, **mask)
    rows = lse[0, 0] == -math.inf
    assert rows.sum() == empty
    assert not out[:, rows].any() and (lse[..., rows] == -math.inf).all() and lse[..., ~rows].isfinite().all()

    dout, dlse = torch.ones_like(out), torch.ones_like(lse)
    expected = torch.autograd.grad([out, lse], [q, k, v], [dout, dlse], retain_graph=True)
    dout[:, rows], dlse[..., rows] = math.nan, math.inf  # (lse ** 2).sum() sends -inf there
    gradients = torch.autograd.grad([out, lse], [q, k, v], [dout, dlse])
    assert not gradients[0][:, rows].any()
    for gradient, same in zip(gradients, expected, strict=True):
        assert gradient.isfinite().all() and torch.equal(gradient, same)


@pytest.mark.parametrize("shape", [(0, 3, 3), (2, 0, 3), (2, 3, 0), (2, 0, 0)])
def test_nothing_to_do_is_not_an_error(shape):
    batch, rows_q, rows_k = shape
    q, k, v = inputs(rows_q, rows_k, batch=batch)
    out, lse = attention_reference(q, k, v, causal=True, return_lse=True)
    assert out.shape == (batch, rows_q, 4, 3) and lse.shape == (batch, 4, rows_q) and not out.any()
    for gradient, x in zip(torch.autograd.grad([out.sum() + lse.sum()], [q, k, v]), (q, k, v), strict=True):
        assert gradient.shape == x.shape and not gradient.any()


def test_rows_without_keys_owe_their_sink_what_comes_for_lse_and_no_more():
    q, k, v = inputs(5, 2)
    sinks = torch.tensor([0.5, -math.inf, 1e4, -1e4], dtype=torch.float64, requires_grad=True)
    out, lse = attention_reference(q, k, v, causal=True, sinks=sinks, return_lse=True)
    assert not out[:, :3].any() and torch.equal(lse[:, :, :3], sinks.detach()[:, None].expand(2, 4, 3))
    dout, dlse = torch.ones_like(out), torch.zeros_like(lse)
    dout[:, :3], dlse[..., :3] = math.nan, 2.0
    *gradients, dsinks = torch.autograd.grad([out, lse], [q, k, v, sinks], [dout, dlse])
    assert all(x.isfinite().all() for x in gradients) and not gradients[0][:, :3].any()
    assert dsinks[1] == 0 and dsinks[3] == 2 * 3 * 2, "entries, rows, dlse"


@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window": (1, 0)}], ids=str)
def test_packed_sequences_are_alone(mask):
    lens_q, lens_k = [2, 0, 3, 1, 0], [3, 2, 0, 4, 0]
    cu_q, cu_k = ([0, *itertools.accumulate(lens)] for lens in (lens_q, lens_k))
    q, k, v = (x[0].detach() for x in inputs(sum(lens_q) + 2, sum(lens_k) + 3, batch=1))
    q[cu_q[-1] :], k[cu_k[-1] :], v[cu_k[-1] :] = math.nan, math.nan, math.inf
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, lse = attention_varlen_reference(q, k, v, torch.tensor(cu_q, dtype=torch.int32), cu_k, return_lse=True, **mask)
    loss = 0.0
    for q0, q1, k0, k1 in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False):
        alone, alone_lse = attention_reference(q[None, q0:q1], k[None, k0:k1], v[None, k0:k1], return_lse=True, **mask)
        assert torch.equal(out[q0:q1], alone[0]) and torch.equal(lse[:, q0:q1], alone_lse[0])
        loss = loss + alone.square().sum() + alone_lse[alone_lse.isfinite()].sum()
    assert not out[cu_q[-1] :].any() and (lse[:, cu_q[-1] :] == -math.inf).all()
    gradients = torch.autograd.grad(out.square().sum() + lse[lse.isfinite()].sum(), [q, k, v])
    for gradient, expected in zip(gradients, torch.autograd.grad(loss, [q, k, v]), strict=True):
        assert gradient.isfinite().all()
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_everything_is_in_the_dtype_of_the_inputs(dtype):
    out, lse = attention_reference(*(x.to(dtype) for x in inputs(3, 3)), return_lse=True)
    assert out.dtype == lse.dtype == dtype


def test_the_examples_in_the_docstrings():
    found = doctest.testmod(reference)
    assert found.attempted and not found.failed


def test_online_softmax_on_the_worked_example():
    scores, values = [1.0, 3.0, 2.0, 3.5], [1, 2, 3, 4]
    for n, (m, l, o) in enumerate(online_softmax(scores, values), start=1):
        assert m == max(scores[:n])
        assert math.isclose(l, sum(math.exp(s - m) for s in scores[:n]))
        assert math.isclose(o, sum(math.exp(s - m) * v for s, v in zip(scores[:n], values, strict=False)))
    assert n == 4 and math.isclose(o / l, 3.1199, abs_tol=5e-5) and math.isclose(m + math.log(l), 4.1480, abs_tol=5e-5)


@given(st.lists(st.floats(-1e5, 1e5) | st.just(-math.inf), min_size=1, max_size=20))
def test_online_softmax_is_softmax_after_every_step(scores):
    values = torch.randn(len(scores), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for n, (m, l, o) in enumerate(online_softmax(scores, values), start=1):
        seen = torch.tensor(scores[:n], dtype=torch.float64)
        if (seen == -math.inf).all():
            assert (m, l, o) == (-math.inf, 0.0, 0.0)
            continue
        torch.testing.assert_close(o / l, seen.softmax(0) @ values[:n])
        torch.testing.assert_close(m + math.log(l), seen.logsumexp(0).item())


def test_online_softmax_refuses_streams_of_different_length():
    assert list(online_softmax([], [])) == []
    with pytest.raises(ValueError):
        list(online_softmax([1.0, 2.0], [1.0]))
