"""Parts of the keys, attended apart and merged: the same as all keys at once, forward and backward, empty parts too."""

import itertools
import math

import pytest
import torch

from flashattn import attention, attention_varlen, merge_attention_states
from flashattn.reference import attention_reference
from support import WHERE, Data, Results, compare, dense, expect, packed, with_extras


def states(batch=2, rows=5, heads=3, dim=4, dtype=torch.float64, seed=0, packed=False):
    generator = torch.Generator().manual_seed(seed)
    out, lse = (torch.randn(shape, generator=generator, dtype=dtype) for shape in ((batch, rows, heads, dim), (batch, heads, rows)))
    return (out[0], lse[0]) if packed else (out, lse)


@pytest.mark.parametrize("packed", [False, True])
def test_the_formula(packed):
    out1, lse1 = states(packed=packed)
    out2, lse2 = states(seed=1, packed=packed)
    out, lse = merge_attention_states(out1, lse1, out2, lse2)
    for head, row in itertools.product(range(3), range(5)):
        a, b = (float(x.view(-1, 3, 5)[0, head, row].exp()) for x in (lse1, lse2))
        expected = (a * out1.view(-1, 5, 3, 4)[0, row, head] + b * out2.view(-1, 5, 3, 4)[0, row, head]) / (a + b)
        torch.testing.assert_close(out.view(-1, 5, 3, 4)[0, row, head], expected)
        assert math.isclose(float(lse.view(-1, 3, 5)[0, head, row]), math.log(a + b), rel_tol=1e-12)


@pytest.mark.parametrize("where", ["first", "second", "both"])
def test_a_part_without_keys_changes_no_bit(where):
    """Whatever out holds there, and whatever gradient comes where both parts have none."""
    for dtype in (torch.float32, torch.bfloat16):
        (out1, lse1), (out2, lse2) = (states(dtype=torch.float32, seed=seed) for seed in (0, 1))
        out1, out2 = out1.to(dtype), out2.to(dtype)
        for name, out, lse in (("first", out1, lse1), ("second", out2, lse2)):
            if where in (name, "both"):
                lse[..., :2], out[:, :2] = -math.inf, math.nan
        leaves = [x.requires_grad_() for x in (out1, lse1, out2, lse2)]
        out, lse = merge_attention_states(*leaves)
        if where == "both":
            assert not out[:, :2].any() and (lse[..., :2] == -math.inf).all()
        else:
            other, other_lse = (out2, lse2) if where == "first" else (out1, lse1)
            assert torch.equal(out[:, :2], other[:, :2]) and torch.equal(lse[..., :2], other_lse[..., :2])
        dout, dlse = torch.ones_like(out), torch.ones_like(lse)
        if where == "both":
            dout[:, :2], dlse[..., :2] = math.nan, math.inf
        gradients = torch.autograd.grad((out, lse), leaves, (dout, dlse))
        assert all(x.isfinite().all() for x in gradients)
        for name, (dout_part, dlse_part) in (("first", gradients[:2]), ("second", gradients[2:])):
            if where in (name, "both"):
                assert not dout_part[:, :2].any() and not dlse_part[..., :2].any()


def test_gradients_by_finite_differences():
    leaves = [x.requires_grad_() for seed in (0, 1) for x in states(batch=1, rows=2, heads=2, dim=2, seed=seed)]
    assert torch.autograd.gradcheck(merge_attention_states, leaves)
    assert torch.autograd.gradgradcheck(merge_attention_states, leaves)


@pytest.mark.parametrize("apart", [200.0, math.inf])
def test_second_derivatives_where_one_part_is_all(apart):
    """Float32's e^89 is infinite, and a derivative that divides by it is 0 the first time and NaN the second."""
    (out1, lse1), (out2, lse2) = states(dtype=torch.float32), states(dtype=torch.float32, seed=1)
    leaves = [x.requires_grad_() for x in (out1, lse1 - apart, out2, lse2)]
    out, lse = merge_attention_states(*leaves)
    first = torch.autograd.grad((out.sin().sum() + lse.sin().sum()), leaves, create_graph=True)
    second = torch.autograd.grad(sum(x.square().sum() for x in first), leaves)
    zero = torch.zeros(())
    alone = [torch.cos(out2), torch.cos(lse2)], [-torch.sin(2 * out2), -torch.sin(2 * lse2)]
    for found, expected in zip((first, second), alone, strict=True):
        for x, y in zip(found, (zero, zero, *expected), strict=True):
            torch.testing.assert_close(x, y.expand_as(x))


@pytest.mark.parametrize("shift", [0.0, 1e4, -1e4])
def test_scores_far_from_zero_and_far_apart(shift):
    (out1, lse1), (out2, lse2) = states(dtype=torch.float32), states(dtype=torch.float32, seed=1)
    out, lse = merge_attention_states(out1, lse1 + shift, out2, lse2 - shift)
    if shift:
        assert torch.equal(out, out1 if shift > 0 else out2) and torch.equal(lse, lse1 + shift if shift > 0 else lse2 - shift)


def merged(data: Data, impl: str, cut: int) -> Results:
    """Attention to the keys before `cut`, and to the others, both under the mask of a causal whole: what was its diagonal is to the right
    of the first part's."""
    leaves = [getattr(data, name).detach().requires_grad_() for name in "qkv"]
    q, k, v = leaves
    sinks = None if data.sinks is None else data.sinks.detach().requires_grad_()
    first = attention(q, k[:, :cut], v[:, :cut], window=(None, k.shape[1] - cut), return_lse=True, impl=impl, sinks=sinks)
    second = attention(q, k[:, cut:], v[:, cut:], causal=True, return_lse=True, impl=impl)
    out, lse = merge_attention_states(*first, *second)
    wanted = [*leaves, *([] if sinks is None else [sinks])]
    return Results(out.detach(), lse.detach(), *torch.autograd.grad((out, lse), wanted, (data.dout, data.dlse)))


@pytest.mark.parametrize("sinks", [None, 0.5])
@pytest.mark.parametrize("cut", [0, 5, 12, 16])
@pytest.mark.parametrize("impl, device", WHERE)
def test_two_parts_of_the_keys_are_the_whole(impl, device, cut, sinks):
    """The cut leaves some rows, or all of them, nothing in one part. float32, since a part is rounded to its dtype before it is merged."""
    data = with_extras(dense(7, 16, heads=4, heads_kv=2, dim=16, dtype=torch.float32, device=device), sinks=sinks)
    expected = expect(data, causal=True)
    found = merged(data, impl, cut)
    assert found.lse.isfinite().all()
    compare(found, expected, torch.float32)


def test_packed_parts_are_the_whole():
    data = packed([3, 0, 4], [6, 2, 8], heads=2, dim=8, dtype=torch.float32)
    firsts = [slice(0, 4), slice(6, 7), slice(8, 13)], [slice(4, 6), slice(7, 8), slice(13, 16)]
    parts = []
    for keys in firsts:
        cu = torch.tensor([0, *itertools.accumulate(x.stop - x.start for x in keys)], dtype=torch.int32)
        k, v = (torch.cat([x[at] for at in keys]) for x in (data.k, data.v))
        parts += attention_varlen(data.q, k, v, data.cu_q, cu, return_lse=True, impl="eager")
    out, lse = merge_attention_states(*parts)
    expected, expected_lse = attention_varlen(data.q, data.k, data.v, data.cu_q, data.cu_k, return_lse=True, impl="eager")
    torch.testing.assert_close((out, lse), (expected, expected_lse))


def test_in_a_graph_and_in_a_vmap():
    leaves = [*states(dtype=torch.float32), *states(dtype=torch.float32, seed=1)]
    expected = merge_attention_states(*leaves)
    found = torch.compile(merge_attention_states, backend="aot_eager", fullgraph=True)(*leaves)
    assert all(map(torch.equal, found, expected))
    mapped = torch.func.vmap(merge_attention_states)(*(x[:, None] for x in leaves))
    assert all(torch.equal(x[:, 0], y) for x, y in zip(mapped, expected, strict=True))


def test_the_oracle_s_parts_in_float64():
    q, k, v = (torch.randn(1, n, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (3, 6, 6))
    first, second = (attention_reference(q, k[:, at], v[:, at], return_lse=True) for at in (slice(0, 2), slice(2, 6)))
    out, lse = merge_attention_states(*first, *second)
    torch.testing.assert_close((out, lse), attention_reference(q, k, v, return_lse=True), rtol=1e-12, atol=1e-12)


OUT, LSE = torch.zeros(2, 5, 3, 4), torch.zeros(2, 3, 5)
WRONG = {
    "a list": ([1.0], LSE, OUT, LSE, TypeError, "out1 is a list: expected a torch.Tensor"),
    "integers": (OUT, LSE.int(), OUT, LSE, TypeError, "lse1 has dtype torch.int32: expected a floating one"),
    "dtypes": (OUT, LSE, OUT.half(), LSE, TypeError, "out1 has dtype torch.float32 and out2 torch.float16: expected the same"),
    "rank": (OUT[0, 0], LSE, OUT, LSE, ValueError, r"out1 has shape \(3, 4\): expected \[batch, seqlen, heads, dim\] with lse"),
    "shapes": (OUT, LSE, OUT[:, 1:], LSE, ValueError, r"out1 has shape \(2, 5, 3, 4\) and out2 \(2, 4, 3, 4\): expected the same"),
    "lse": (OUT, LSE, OUT, LSE.mT, ValueError, r"lse2 has shape \(2, 5, 3\): expected \(2, 3, 5\) for out \(2, 5, 3, 4\)"),
    "devices": (OUT, LSE, OUT.to("meta"), LSE, ValueError, "out2 is on meta and out1 on cpu: expected one device"),
}


@pytest.mark.parametrize("out1, lse1, out2, lse2, kind, message", WRONG.values(), ids=WRONG)
def test_errors(out1, lse1, out2, lse2, kind, message):
    with pytest.raises(kind, match=message):
        merge_attention_states(out1, lse1, out2, lse2)
