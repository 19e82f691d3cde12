"""Bad input: one test a rule, and each reads the message. It names the argument, what came, and what is expected.

The surprising fact: on a GPU the values of cu_seqlens can't be checked without waiting for it, so there they are checked only when
FLASHATTN_CHECK=1 asks; without that a bad value gives wrong rows, but nothing outside the tensors is touched. Over 300 lines because the
rules are one table.
"""

import math
import sys
from fractions import Fraction

import numpy
import pytest
import torch

from flashattn import attention, attention_varlen, explain
from flashattn.dispatch.select import launcher
from flashattn.problem import Problem
from support import WHERE

BATCH, ROWS, KEYS, HEADS, DIM = 2, 3, 4, 4, 8


def T(*shape, dtype=torch.float32, device="cpu"):
    return torch.ones(shape, dtype=dtype, device=device)


def cu(*values, dtype=torch.int32, device="cpu"):
    return torch.tensor(values, dtype=dtype, device=device)


def qkv(**changes):
    """Good dense arguments, with some changed."""
    return {"q": T(BATCH, ROWS, HEADS, DIM), "k": T(BATCH, KEYS, 2, DIM), "v": T(BATCH, KEYS, 2, DIM)} | changes


def all_of(**options):
    """Good dense arguments, all three of this dtype or device."""
    return {name: x.to(**options) for name, x in qkv().items()}


def dims(head_dim, head_dim_v=DIM):
    return qkv(q=T(BATCH, ROWS, HEADS, head_dim), k=T(BATCH, KEYS, 2, head_dim), v=T(BATCH, KEYS, 2, head_dim_v))


def kv_heads(heads):
    return qkv(k=T(BATCH, KEYS, heads, DIM), v=T(BATCH, KEYS, heads, DIM))


def varlen(**changes):
    """Good packed arguments: sequences of 1 and 4 queries, 2 and 4 keys, then one row that belongs to none."""
    tensors = {"q": T(6, HEADS, DIM), "k": T(7, 2, DIM), "v": T(7, 2, DIM)}
    return tensors | {"cu_seqlens_q": cu(0, 1, 5), "cu_seqlens_k": cu(0, 2, 6)} | changes


def raises(kind, words, function, arguments):
    with pytest.raises(kind) as caught:
        function(**arguments)
    assert type(caught.value) is kind
    message = str(caught.value)
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"


# Rule: (arguments, error, what the message says)
DENSE = {
    "q is a list": (qkv(q=[1.0]), TypeError, ("q is a list", "expected a torch.Tensor")),
    "k is an array": (qkv(k=numpy.ones((2, 4, 2, 8))), TypeError, ("k is a ndarray", "expected a torch.Tensor")),
    "v is missing": (qkv(v=None), TypeError, ("v is a NoneType", "expected a torch.Tensor")),
    "q sparse": (qkv(q=qkv()["q"].to_sparse()), TypeError, ("q has layout torch.sparse_coo", "expected torch.strided")),
    "q nested": (
        qkv(q=torch.nested.nested_tensor([T(3, 4, 8), T(2, 4, 8)])), TypeError, ("q is a nested tensor", "attention_varlen takes"),
    ),
    "q of rank 3": (qkv(q=T(3, 4, 8)), ValueError, ("q has shape (3, 4, 8)", "expected 4 dimensions [batch, seqlen, heads, head_dim]")),
    "v of rank 5": (qkv(v=T(1, 2, 4, 2, 8)), ValueError, ("v has shape (1, 2, 4, 2, 8)", "expected 4 dimensions")),
    "q of rank 3, bhsd": (qkv(q=T(3, 4, 8), layout="bhsd"), ValueError, ("expected 4 dimensions [batch, heads, seqlen, head_dim]",)),
    "float64": (all_of(dtype=torch.float64), TypeError, ("q has dtype torch.float64", "expected one of float16, bfloat16, float32")),
    "int32": (all_of(dtype=torch.int32), TypeError, ("q has dtype torch.int32", "expected one of float16, bfloat16, float32")),
    "bool": (all_of(dtype=torch.bool), TypeError, ("q has dtype torch.bool", "expected one of float16, bfloat16, float32")),
    "complex64": (all_of(dtype=torch.complex64), TypeError, ("q has dtype torch.complex64", "expected one of")),
    "float8": (all_of(dtype=torch.float8_e4m3fn), TypeError, ("q has dtype torch.float8_e4m3fn", "expected one of")),
    "v alone float64": (qkv(v=T(BATCH, KEYS, 2, DIM, dtype=torch.float64)), TypeError, ("v has dtype torch.float64", "expected one of")),
    "k bfloat16": (
        qkv(k=T(BATCH, KEYS, 2, DIM, dtype=torch.bfloat16)), TypeError,
        ("q has dtype torch.float32", "k has dtype torch.bfloat16", "v has dtype torch.float32", "expected one dtype for q, k and v"),
    ),
    "v float16": (qkv(v=T(BATCH, KEYS, 2, DIM, dtype=torch.float16)), TypeError, ("v has dtype torch.float16", "expected one dtype")),
    "two devices": (
        qkv(k=T(BATCH, KEYS, 2, DIM, device="meta")), ValueError,
        ("q has device cpu", "k has device meta", "v has device cpu", "expected one device for q, k and v"),
    ),
    "batch of k": (qkv(k=T(3, KEYS, 2, DIM), v=T(3, KEYS, 2, DIM)), ValueError, ("q has batch 2", "k has batch 3", "expected the same")),
    "batch of v": (qkv(v=T(3, KEYS, 2, DIM)), ValueError, ("k has shape (2, 4, 2, 8)", "v (3, 4, 2, 8)", "expected the same batch")),
    "length of v": (qkv(v=T(BATCH, 5, 2, DIM)), ValueError, ("k has shape (2, 4, 2, 8)", "v (2, 5, 2, 8)", "expected the same seqlen")),
    "heads of v": (qkv(v=T(BATCH, KEYS, 4, DIM)), ValueError, ("k has shape (2, 4, 2, 8)", "v (2, 4, 4, 8)", "expected the same heads")),
    "heads that don't divide": (kv_heads(3), ValueError, ("q has 4 heads", "k has 3", "expected a multiple of k's")),
    "more heads of k": (kv_heads(8), ValueError, ("q has 4 heads", "k has 8", "expected a multiple of k's")),
    "no heads": (qkv(q=T(BATCH, ROWS, 0, DIM)), ValueError, ("q has 0 heads", "k has 2", "expected a multiple of k's")),
    "no heads of k": (kv_heads(0), ValueError, ("q has 4 heads", "k has 0", "expected a multiple of k's")),
    "head_dim of k": (qkv(k=T(BATCH, KEYS, 2, 6)), ValueError, ("q has head_dim 8", "k has head_dim 6", "expected the same")),
    "head_dim 0": (dims(0), ValueError, ("q has head_dim 0", "expected 1 to 256")),
    "head_dim_v 0": (dims(8, 0), ValueError, ("v has head_dim 0", "expected 1 to 256")),
    "head_dim 257": (dims(257), NotImplementedError, ("q has head_dim 257", "implemented are 1 to 256")),
    "head_dim_v 512": (dims(8, 512), NotImplementedError, ("v has head_dim 512", "implemented are 1 to 256")),
    "layout of torch": (qkv(layout="BHSD"), ValueError, ("layout='BHSD'", "expected one of ('bshd', 'bhsd')")),
    "layout packed": (qkv(layout="packed"), ValueError, ("layout='packed'", "expected one of ('bshd', 'bhsd')")),
    "layout None": (qkv(layout=None), ValueError, ("layout=None", "expected one of ('bshd', 'bhsd')")),
    "layout array": (qkv(layout=numpy.zeros(2)), ValueError, ("layout=array", "expected one of ('bshd', 'bhsd')")),
    "layout list": (qkv(layout=["bshd"]), ValueError, ("layout=['bshd']", "expected one of ('bshd', 'bhsd')")),
}  # fmt: skip

OPTIONS = {
    "causal 3": ({"causal": 3}, ValueError, ("causal=3", "expected False, True (bottom-right) or 'top-left'")),
    "causal 1": ({"causal": 1}, ValueError, ("causal=1", "expected False, True")),
    "causal None": ({"causal": None}, ValueError, ("causal=None", "expected False, True")),
    "causal typo": ({"causal": "bottom-left"}, ValueError, ("causal='bottom-left'", "or 'top-left'")),
    "causal tensor": ({"causal": torch.tensor(True)}, ValueError, ("causal=tensor(True)", "expected False, True")),
    "window number": ({"window": 5}, ValueError, ("window=5", "expected None or (left, right)")),
    "window of one": ({"window": (5,)}, ValueError, ("window=(5,)", "expected None or (left, right)")),
    "window of three": ({"window": (1, 2, 3)}, ValueError, ("window=(1, 2, 3)", "expected None or (left, right)")),
    "window string": ({"window": "12"}, ValueError, ("window='12'", "expected None or (left, right)")),
    "window negative left": ({"window": (-1, 0)}, ValueError, ("window left=-1", ">= 0 (0 keeps the diagonal itself)", "None")),
    "window negative right": ({"window": (None, -2)}, ValueError, ("window right=-2", "expected >= 0", "None for no limit")),
    "window float": ({"window": (3.0, 0)}, TypeError, ("window left=3.0", "expected a number of keys (int) or None")),
    "window bool": ({"window": (0, True)}, TypeError, ("window right=True", "expected a number of keys (int) or None")),
    "window float of numpy": ({"window": (None, numpy.float32(3))}, TypeError, ("window right=", "expected a number of keys (int)")),
    "window bool of numpy": ({"window": (numpy.True_, 0)}, TypeError, ("window left=", "expected a number of keys (int) or None")),
    "window negative of numpy": ({"window": (numpy.int8(-1), 0)}, ValueError, ("window left=-1", "expected >= 0")),
    "window too large for int64": ({"window": (numpy.uint64(2**63), 0)}, ValueError, (f"window left={2**63}", "at most 2**63 - 1")),
    "window tensor": ({"window": (torch.tensor(3), 0)}, TypeError, ("window left=tensor(3)", "expected a number of keys (int) or None")),
    "window too large": ({"window": (2**63, 0)}, ValueError, (f"window left={2**63}", "expected at most 2**63 - 1", "None for no limit")),
    "softmax_scale nan": ({"softmax_scale": math.nan}, ValueError, ("softmax_scale=nan", "expected a finite number")),
    "softmax_scale inf": ({"softmax_scale": -math.inf}, ValueError, ("softmax_scale=-inf", "expected a finite number")),
    "softmax_scale past float32": ({"softmax_scale": 1e39}, ValueError, ("softmax_scale=1e+39", "expected a finite number, at most 1.7e")),
    "softmax_scale past float64": ({"softmax_scale": 10**400}, ValueError, ("softmax_scale=1000", "expected a finite number")),
    "softmax_scale fraction past float64": (
        {"softmax_scale": Fraction(-(10**400))}, ValueError, ("softmax_scale=-inf", "expected a finite number, at most 1.7e"),
    ),
    "softmax_scale nan of numpy": ({"softmax_scale": numpy.float16(math.nan)}, ValueError, ("softmax_scale=nan", "a finite number")),
    "softmax_scale bool of numpy": ({"softmax_scale": numpy.True_}, TypeError, ("softmax_scale is a bool", "expected a float or None")),
    "softmax_scale complex": ({"softmax_scale": 1j}, TypeError, ("softmax_scale is a complex", "expected a float or None")),
    "softmax_scale tensor": ({"softmax_scale": torch.tensor(0.1)}, TypeError, ("softmax_scale is a Tensor", "expected a float or None")),
    "softmax_scale string": ({"softmax_scale": "0.1"}, TypeError, ("softmax_scale is a str", "expected a float or None")),
    "softmax_scale bool": ({"softmax_scale": True}, TypeError, ("softmax_scale is a bool", "expected a float or None")),
    "softcap negative": ({"softcap": -1.0}, ValueError, ("softcap=-1.0", "expected a finite number > 0, or 0 or None for no cap")),
    "softcap nan": ({"softcap": math.nan}, ValueError, ("softcap=nan", "expected a finite number > 0")),
    "softcap inf": ({"softcap": math.inf}, ValueError, ("softcap=inf", "expected a finite number > 0")),
    "softcap past float64": ({"softcap": 10**400}, ValueError, ("softcap=1000", "expected a finite number > 0")),
    "softcap bool": ({"softcap": True}, TypeError, ("softcap is a bool", "expected a float or None")),
    "softcap tensor": ({"softcap": torch.tensor(5.0)}, TypeError, ("softcap is a Tensor", "expected a float or None")),
    "slopes list": ({"alibi_slopes": [0.1] * HEADS}, TypeError, ("alibi_slopes is a list", "expected a torch.Tensor or None")),
    "slopes float16": (
        {"alibi_slopes": T(HEADS, dtype=torch.float16)}, TypeError, ("alibi_slopes has dtype torch.float16", "expected torch.float32"),
    ),
    "slopes float64": ({"alibi_slopes": T(HEADS, dtype=torch.float64)}, TypeError, ("has dtype torch.float64", "expected torch.float32")),
    "slopes of other heads": (
        {"alibi_slopes": T(2)}, ValueError, ("alibi_slopes has shape (2,)", "expected [heads_q] (4,) or [batch, heads_q] (2, 4)"),
    ),
    "slopes of other entries": ({"alibi_slopes": T(3, HEADS)}, ValueError, ("shape (3, 4)", "or [batch, heads_q] (2, 4)")),
    "slopes of rank 3": ({"alibi_slopes": T(1, 1, HEADS)}, ValueError, ("alibi_slopes has shape (1, 1, 4)", "expected [heads_q] (4,)")),
    "slopes elsewhere": ({"alibi_slopes": T(HEADS, device="meta")}, ValueError, ("alibi_slopes is on meta and q on cpu", "one device")),
    "slopes sparse": ({"alibi_slopes": T(HEADS).to_sparse()}, TypeError, ("alibi_slopes has layout torch.sparse_coo",)),
    "slopes that learn": (
        {"alibi_slopes": T(HEADS).requires_grad_()}, NotImplementedError,
        ("the gradient of alibi_slopes is not implemented", "alibi_slopes.detach()"),
    ),
    "sinks number": ({"sinks": 0.5}, TypeError, ("sinks is a float", "expected a torch.Tensor or None")),
    "sinks float64": (
        {"sinks": T(HEADS, dtype=torch.float64)}, TypeError, ("sinks has dtype torch.float64", "expected torch.float32"),
    ),
    "sinks of other heads": ({"sinks": T(2)}, ValueError, ("sinks has shape (2,)", "expected [heads_q] (4,)")),
    "sinks of entries": ({"sinks": T(BATCH, HEADS)}, ValueError, ("sinks has shape (2, 4)", "expected [heads_q] (4,)")),
    "sinks elsewhere": ({"sinks": T(HEADS, device="meta")}, ValueError, ("sinks is on meta and q on cpu", "expected one device")),
    "causal array": ({"causal": numpy.ones(2)}, ValueError, ("causal=array", "expected False, True (bottom-right) or 'top-left'")),
    "impl array": ({"impl": numpy.zeros(2)}, ValueError, ("impl=array", "expected None or one of")),
    "deterministic None": ({"deterministic": None}, TypeError, ("deterministic=None", "expected a bool")),
    "deterministic string": ({"deterministic": "no"}, TypeError, ("deterministic='no'", "expected a bool")),
}  # fmt: skip

BIASES = {  # of dense calls
    "bias number": ({"bias": 0.5}, TypeError, ("bias is a float", "expected a torch.Tensor or None")),
    "bias int": (
        {"bias": T(ROWS, KEYS).int()}, TypeError,
        ("bias has dtype torch.int32", "expected torch.bool or torch.float16 or torch.bfloat16 or torch.float32"),
    ),
    "bias float64": ({"bias": T(ROWS, KEYS, dtype=torch.float64)}, TypeError, ("bias has dtype torch.float64", "expected torch.bool")),
    "bias of other keys": (
        {"bias": T(HEADS, ROWS, KEYS + 1)}, ValueError,
        (f"bias has shape ({HEADS}, {ROWS}, {KEYS + 1})", f"[batch, heads_q, seqlen_q, seqlen_k] ({BATCH}, {HEADS}, {ROWS}, {KEYS})"),
    ),
    "bias of key heads": ({"bias": T(BATCH, 2, ROWS, KEYS)}, ValueError, (f"bias has shape ({BATCH}, 2, {ROWS}, {KEYS})", "as (4, ")),
    "bias of rank 5": ({"bias": T(1, 1, 1, ROWS, KEYS)}, ValueError, (f"bias has shape (1, 1, 1, {ROWS}, {KEYS})", "broadcasts to")),
    "bias elsewhere": ({"bias": T(ROWS, KEYS, device="meta")}, ValueError, ("bias is on meta and q on cpu", "expected one device")),
    "bias sparse": ({"bias": T(ROWS, KEYS).to_sparse()}, TypeError, ("bias has layout torch.sparse_coo",)),
}

PACKED = {
    "bias": (varlen(bias=T(6, 7)), NotImplementedError, ("bias of a packed call", "attention() of the padded batch", "alibi_slopes")),
    "q of rank 4": (varlen(q=T(1, 6, 4, 8)), ValueError, ("q has shape (1, 6, 4, 8)", "expected 3 dimensions [total, heads, head_dim]")),
    "total of v": (varlen(v=T(6, 2, DIM)), ValueError, ("k has shape (7, 2, 8)", "v (6, 2, 8)", "expected the same total")),
    "heads": (varlen(k=T(7, 3, DIM), v=T(7, 3, DIM)), ValueError, ("q has 4 heads", "k has 3", "expected a multiple")),
    "k float16": (varlen(k=T(7, 2, DIM, dtype=torch.float16)), TypeError, ("k has dtype torch.float16", "expected one dtype")),
    "cu_seqlens_q list": (varlen(cu_seqlens_q=[0, 5]), TypeError, ("cu_seqlens_q is a list", "expected an int32 tensor [batch + 1]")),
    "cu_seqlens_k None": (varlen(cu_seqlens_k=None), TypeError, ("cu_seqlens_k is a NoneType", "expected an int32 tensor [batch + 1]")),
    "cu_seqlens_q int64": (
        varlen(cu_seqlens_q=cu(0, 1, 5, dtype=torch.int64)), TypeError, ("cu_seqlens_q has dtype torch.int64", "expected torch.int32"),
    ),
    "cu_seqlens_k float": (
        varlen(cu_seqlens_k=cu(0, 2, 6, dtype=torch.float32)), TypeError, ("cu_seqlens_k has dtype torch.float32", "expected torch.int32"),
    ),
    "cu_seqlens_q sparse": (
        varlen(cu_seqlens_q=cu(0, 1, 5).to_sparse()), TypeError, ("cu_seqlens_q has layout torch.sparse_coo", "expected torch.strided"),
    ),
    "cu_seqlens_q of rank 2": (varlen(cu_seqlens_q=cu([0, 5])), ValueError, ("cu_seqlens_q has shape (1, 2)", "expected [batch + 1]")),
    "cu_seqlens_k of rank 0": (varlen(cu_seqlens_k=cu(0)[0]), ValueError, ("cu_seqlens_k has shape ()", "expected [batch + 1]")),
    "cu_seqlens_q empty": (varlen(cu_seqlens_q=cu()), ValueError, ("cu_seqlens_q has shape (0,)", "expected [batch + 1], starting with 0")),
    "cu_seqlens_q elsewhere": (
        varlen(cu_seqlens_q=cu(0, 1, 5, device="meta")), ValueError, ("cu_seqlens_q is on meta", "q on cpu", "expected one device"),
    ),
    "numbers of sequences": (
        varlen(cu_seqlens_k=cu(0, 6)), ValueError, ("cu_seqlens_q has 3 entries", "cu_seqlens_k has 2", "expected batch + 1 in both"),
    ),
    "max_seqlen_q negative": (varlen(max_seqlen_q=-1), ValueError, ("max_seqlen_q=-1", "expected >= 0")),
    "max_seqlen_k float": (varlen(max_seqlen_k=4.0), TypeError, ("max_seqlen_k=4.0", "expected a number of rows (int), a tensor")),
    "max_seqlen_q bool": (varlen(max_seqlen_q=True), TypeError, ("max_seqlen_q=True", "expected a number of rows (int), a tensor")),
    "max_seqlen_q bool of numpy": (varlen(max_seqlen_q=numpy.True_), TypeError, ("max_seqlen_q=", "expected a number of rows (int)")),
    "max_seqlen_k too large": (varlen(max_seqlen_k=2**63), ValueError, (f"max_seqlen_k={2**63}", "expected at most 2**63 - 1")),
}  # fmt: skip

# Values, which are read on the CPU, and on a GPU with FLASHATTN_CHECK=1.
VALUES = {
    "q starts with 1": (varlen(cu_seqlens_q=cu(1, 2, 5)), ("cu_seqlens_q starts with 1", "expected 0")),
    "k starts with -1": (varlen(cu_seqlens_k=cu(-1, 2, 6)), ("cu_seqlens_k starts with -1", "expected 0")),
    "q falls": (varlen(cu_seqlens_q=cu(0, 5, 4)), ("cu_seqlens_q falls from 5 to 4 at entry 2", "expected never falling")),
    "k falls below 0": (varlen(cu_seqlens_k=cu(0, -2, 6)), ("cu_seqlens_k falls from 0 to -2 at entry 1", "expected never falling")),
    "q past the end": (varlen(cu_seqlens_q=cu(0, 1, 7)), ("cu_seqlens_q ends with 7", "q has 6 rows", "expected at most that")),
    "k past the end": (varlen(cu_seqlens_k=cu(0, 1, 8)), ("cu_seqlens_k ends with 8", "k has 7 rows", "expected at most that")),
    "max_seqlen_q": (varlen(max_seqlen_q=3), ("max_seqlen_q=3", "a sequence has 4 rows", "expected at least that")),
    "max_seqlen_k": (varlen(max_seqlen_k=0), ("max_seqlen_k=0", "a sequence has 4 rows", "expected at least that")),
}


def parametrize(rules: dict):
    names = "arguments, kind, words" if len(next(iter(rules.values()))) == 3 else "arguments, words"
    return pytest.mark.parametrize(names, rules.values(), ids=rules)


# --------------------------------------------------------------------------------------------------------------------------- tests


def test_what_is_changed_below_was_good():
    """And the last values that are good."""
    eager = {"impl": "eager"}
    assert attention(**qkv(), **eager).shape == (BATCH, ROWS, HEADS, DIM)
    assert attention(**dims(256, 256), **eager).shape[-1] == 256 and attention(**dims(1, 1), **eager).shape[-1] == 1
    assert attention(**qkv(window=[sys.maxsize, 2**63 - 1], softmax_scale=1), **eager).isfinite().all()
    assert attention_varlen(**varlen(max_seqlen_q=2**63 - 1), **eager).isfinite().all()
    assert attention_varlen(**varlen(max_seqlen_k=torch.tensor(0)), **eager).isfinite().all(), "a tensor is not read"
    assert attention_varlen(**varlen(max_seqlen_q=4, max_seqlen_k=4), **eager).isfinite().all()
    assert attention_varlen(**varlen(cu_seqlens_q=cu(0), cu_seqlens_k=cu(0)), **eager).count_nonzero() == 0, "no sequences"
    assert explain(**varlen()).problem.batch == 2
    for extras in ({"softcap": 0, "sinks": T(HEADS)}, {"softcap": 1e308, "alibi_slopes": T(HEADS)}, {"alibi_slopes": T(2, HEADS)}):
        assert attention(**qkv(**extras), **eager).isfinite().all() and attention_varlen(**varlen(**extras), **eager).isfinite().all()
    half = {name: x.half() for name, x in qkv().items()}
    for dtype in (torch.float16, torch.bfloat16):  # autocast may have cast q, and nobody casts sinks
        assert attention(**half, sinks=T(HEADS, dtype=dtype), **eager).isfinite().all()
    with torch.no_grad():
        assert attention(**qkv(alibi_slopes=T(HEADS).requires_grad_()), **eager).isfinite().all(), "nobody asks for a gradient"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", [numpy.int8, numpy.uint16, numpy.int64])
def test_numbers_of_numpy_are_numbers(kind):
    """They come out of arrays of lengths and configurations. No warning either, as numpy gives for a limit that float16 can't hold."""
    expected = attention(**qkv(window=(1, 0), softmax_scale=0.5), impl="eager")
    for scale in (numpy.float16(0.5), numpy.float32(0.5), numpy.float64(0.5), Fraction(1, 2)):
        assert torch.equal(attention(**qkv(window=(kind(1), kind(0)), softmax_scale=scale), impl="eager"), expected)
    most = {"max_seqlen_q": kind(4), "max_seqlen_k": kind(4)}
    assert torch.equal(attention_varlen(**varlen(**most), impl="eager"), attention_varlen(**varlen(), impl="eager"))
    problem = explain(**varlen(**most, window=[kind(0), None], softmax_scale=kind(1))).problem
    numbers = (problem.seqlen_q, problem.seqlen_k, problem.window_left, problem.softmax_scale)
    assert numbers == (4, 4, 0, 1.0) and [type(number) for number in numbers] == [int, int, int, float]


def test_a_scale_as_large_as_can_be_gives_no_nan():
    """Equal scores, however large, are an even mixture."""
    scale = torch.finfo(torch.float32).max / 2
    out = attention(**qkv(q=T(BATCH, ROWS, HEADS, DIM) * 0), softmax_scale=scale, impl="eager")
    assert torch.equal(out, torch.ones_like(out))


@parametrize(DENSE)
@pytest.mark.parametrize("function", [attention, explain])
def test_dense(function, arguments, kind, words):
    raises(kind, words, function, arguments)


@parametrize(OPTIONS)
@pytest.mark.parametrize("function, good", [(attention, qkv), (attention_varlen, varlen), (explain, qkv)])
def test_options(function, good, arguments, kind, words):
    raises(kind, words, function, good(**arguments))


@parametrize(BIASES)
@pytest.mark.parametrize("function", [attention, explain])
def test_biases(function, arguments, kind, words):
    raises(kind, words, function, qkv(**arguments))


@parametrize(PACKED)
@pytest.mark.parametrize("function", [attention_varlen, explain])
def test_packed(function, arguments, kind, words):
    raises(kind, words, function, arguments)


@parametrize(VALUES)
def test_values_on_the_cpu(arguments, words):
    raises(ValueError, words, attention_varlen, arguments)


@pytest.mark.gpu
@parametrize(VALUES)
def test_values_on_a_gpu_when_asked(arguments, words, monkeypatch):
    monkeypatch.setenv("FLASHATTN_CHECK", "1")
    raises(ValueError, words, attention_varlen, {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()})


class GuardedTorch:
    """The module torch, whose `empty` gives the middle of a larger tensor full of sevens."""

    PAD = 1 << 12  # elements on either side

    def __init__(self):
        self.wholes = []

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty(self, shape, dtype, device):
        self.wholes.append(torch.full([math.prod(shape) + 2 * self.PAD], 7.0, dtype=dtype, device=device))
        return self.wholes[-1][self.PAD : -self.PAD].view(shape)

    def empty_like(self, tensor, **_):
        return self.empty(tensor.shape, tensor.dtype, tensor.device)

    def untouched(self) -> bool:
        return all(bool((x[: self.PAD] == 7).all() and (x[-self.PAD :] == 7).all()) for x in self.wholes)


@pytest.mark.parametrize("impl, device", [*WHERE[1:], pytest.param("hopper", "cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("bad_q, bad_k", [((9, 3, 80), (0, 99, 4)), ((0, 64, 32), (0, -5, 64)), ((170, 0, -90), (0, 150, 64))])
def test_values_not_checked_touch_nothing_outside(impl, device, bad_q, bad_k, monkeypatch):
    """The kernels themselves, as a GPU runs them: nothing is written outside the results, nor does the NaN around the inputs get in.

    The values stay within the margins, so that a kernel which believes them fails this test and not the process.
    """
    if impl == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    launch = launcher(f"flashattn.launch.{impl}")
    rows, dim, name = 72, 16, "float16" if impl == "hopper" else "float32"
    problem = Problem(name, 2, rows, rows, 1, 1, dim, dim, 0.25, None, 0, varlen=True, total_q=rows, total_k=rows, device=device)
    storage = torch.full([4, rows + 256, 1, dim], math.nan, dtype=getattr(torch, name), device=device)
    q, k, v, dout = (x[128:-128].normal_() for x in storage)
    dlse = torch.ones(1, rows, device=device)
    offsets = cu(*bad_q, device=device), cu(*bad_k, device=device)
    guarded = GuardedTorch()
    for module in ("common", "portable"):  # where results are allocated
        monkeypatch.setattr(launcher(f"flashattn.launch.{module}"), "torch", guarded)
    results = out, lse = launch.forward(problem, q, k, v, *offsets)
    if impl == "portable":
        results += launch.backward(problem, (True, True, True, False, False), dout, dlse, q, k, v, out, lse, *offsets)[:3]
    assert len(guarded.wholes) == (2 if impl == "hopper" else 6) and guarded.untouched()
    assert not any(x.isnan().any() for x in results)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_cpu_tensor_among_gpu_tensors(name):
    arguments = {key: x if key == name else x.cuda() for key, x in qkv().items()}
    raises(ValueError, (f"{name} has device cpu", "cuda:0", "expected one device for q, k and v"), attention, arguments)


EXPLAIN = {
    "only cu_seqlens_q": (varlen(cu_seqlens_k=None), TypeError, ("cu_seqlens_k is a NoneType", "expected an int32 tensor")),
    "only cu_seqlens_k": (varlen(cu_seqlens_q=None), TypeError, ("cu_seqlens_q is a NoneType", "expected an int32 tensor")),
    "a layout for packed": (varlen(layout="bhsd"), ValueError, ("layout='bhsd' with cu_seqlens", "[total, heads, dim]")),
    "a maximum for dense": (qkv(max_seqlen_k=3), ValueError, ("max_seqlen_k=3 without cu_seqlens", "expected both cu_seqlens")),
}


@parametrize(EXPLAIN)
def test_explain(arguments, kind, words):
    raises(kind, words, explain, arguments)
