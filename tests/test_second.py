"""Double backward against the oracle's: the gradients of a gradient penalty, in the inputs and in what came from outside, of all gradients
and of some, under every mask and variant.

The surprising fact: what the incoming gradients are owed is a forward-mode derivative. G = g . (gradients) is linear in dout and dlse, and
its gradients there are the tangents of out and lse along g, so the fused kernel of test_tangents.py gives them. Over 300 lines: the
tolerance is derived here.
"""

import math
from itertools import combinations, pairwise, product

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from flashattn import attention, eager
from flashattn.problem import default_scale
from flashattn.reference import attention_reference, attention_scores, distances, keep_mask
from support import TANH, WHERE, WHERE_DTYPE, assert_close_to_oracle, dense
from tangents import NAMES, _magnitude, attend, tangents_of
from test_tangents import Asked, small
from test_variants import EAGER, MASKS, VARIANTS, sized, some

pytestmark = pytest.mark.thinned(3)

SUBSETS = ["".join(names) for n in range(1, 4) for names in combinations("qkvs", n)]


def twice(data, moving, impl, dtype=None, lse_grad=True, **options) -> dict:
    """The gradients of G = sum of moving * (gradients of out and lse, sent dout and dlse) in dout, dlse, q, k, v and sinks."""
    own = data.q.dtype if dtype is None else dtype
    inputs = {name: getattr(data, name) for name in NAMES if getattr(data, name) is not None}
    inputs = {name: x.detach().to(torch.promote_types(x.dtype, own) if name == "sinks" else own) for name, x in inputs.items()}
    inputs = {name: x.requires_grad_() for name, x in inputs.items()}
    out, lse = attend(data, impl, inputs, **options)
    sent = {"dout": data.dout.detach().to(out.dtype).requires_grad_(), "dlse": data.dlse.detach().to(lse.dtype).requires_grad_()}
    results, cotangents = ((out, lse), (sent["dout"], sent["dlse"])) if lse_grad else ((out,), (sent["dout"],))
    gradients = torch.autograd.grad(results, [inputs[name] for name in moving], cotangents, create_graph=True)
    penalty = sum((gradient.to(inputs[name].dtype) * moving[name].nan_to_num().to(inputs[name].dtype)).sum()
                  for name, gradient in zip(moving, gradients, strict=True))  # fmt: skip
    leaves = sent | inputs
    found = torch.autograd.grad(penalty, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


def check_twice(data, moving, impl, peer_dtype=None, **options) -> dict:
    found = twice(data, moving, impl, **options)
    oracle, peer = (twice(data, moving, "reference", dtype, **options) for dtype in (torch.float64, peer_dtype or data.q.dtype))
    lse_grad = options.pop("lse_grad", True)
    most = second_magnitude(data, moving, lse_grad, options)
    tangents = _magnitude(data, moving, options)
    most |= {"dout": tangents.tout, "dlse": tangents.tlse}
    for name, actual in found.items():
        assert_close_to_oracle(actual, oracle[name], peer[name], data.q.dtype, magnitude=most[name], what=f"d {name}")
    return found


def second_magnitude(data, moving, lse_grad, options) -> dict:
    """The formulas of `eager.second` with absolute values of all that is added, times how far a probability is off: see `_dense`."""
    names = {name: getattr(data, name) for name in ("dout", "dlse", *NAMES)}
    names |= {f"t{name}": moving.get(name, None if names[name] is None else torch.zeros_like(names[name])) for name in NAMES}
    given = {name: x if x is None else x.detach().float().nan_to_num(neginf=-math.inf) for name, x in names.items()}
    given["dlse"] = given["dlse"] * lse_grad
    if not data.packed:
        return _dense(given, data.slopes, options)
    whole = {name: torch.zeros_like(given[name]) for name in ("q", "k", "v", "sinks") if given[name] is not None}
    for n, ((q0, q1), (k0, k1)) in enumerate(zip(pairwise(data.cu_q.tolist()), pairwise(data.cu_k.tolist()), strict=True)):
        rows = {"k": slice(k0, k1), "v": slice(k0, k1)}
        alone = {name: x if x is None or "sinks" in name else x[None, rows.get(name[-1], slice(q0, q1))] for name, x in given.items()}
        alone["dlse"] = given["dlse"][None, :, q0:q1]
        slopes = data.slopes[n] if data.slopes is not None and data.slopes.dim() == 2 else data.slopes
        for name, part in _dense(alone, slopes, options).items():
            (whole[name] if name == "sinks" else whole[name][rows.get(name, slice(q0, q1))]).add_(part if name == "sinks" else part[0])
    return whole


def _dense(x, slopes, options) -> dict:
    """A probability is off by w_ij = 2 t_ij + 2 roundings (tests/tangents.py), a product by one, and the tangent of a score, the derivative
    g of a softcap and its own derivative by no more than w_ij of what they are made of; a product of three such factors by 3 w_ij."""
    dout, dlse, q, k, v, sinks, tq, tk, tv, tsinks = x.values()
    scale = default_scale(q.shape[-1]) if options.get("softmax_scale") is None else options["softmax_scale"]
    cap, heads_kv = options.get("softcap"), k.shape[2]
    _, lse = attention_reference(q, k, v, return_lse=True, sinks=sinks, alibi_slopes=slopes, **options)
    k, v, tk, tv = (one.repeat_interleave(q.shape[2] // heads_kv, dim=2) for one in (k, v, tk, tv))
    product_ = lambda a, b: torch.einsum("bihd,bjhd->bhij", a.abs(), b.abs())  # noqa: E731
    mean = lambda a: (p * a).sum(-1, keepdim=True)  # noqa: E731
    keep = keep_mask(q.shape[1], k.shape[1], causal=options.get("causal", False), window=options.get("window"), device=q.device)
    s = attention_scores(q, k, scale, softcap=cap, alibi_slopes=slopes)
    p = torch.where(keep, torch.exp(s - lse[..., None]), 0.0)
    t, bends = abs(scale) * product_(q, k), 0.0
    ta = abs(scale) * (product_(tq, k) + product_(q, tk))
    if cap:
        tanh = attention_scores(q, k, scale, softcap=cap) / cap
        t = t + (TANH + 1) * cap * tanh.abs()
        bends = ta * tanh.abs() * 2 / cap
    if slopes is not None:
        t = t + 3 * (slopes[..., None, None] * distances(q.shape[1], k.shape[1], q.device)) + s.abs()
    w = 3 * (2 * t + 2)
    dp, dtp, dlse = product_(dout, v), product_(dout, tv), dlse.abs()[..., None]
    mu, e = mean(ta), dp + mean(dp) + dlse
    c_sink = p_sink = 0.0
    if sinks is not None:
        p_sink = torch.exp(sinks[:, None] - lse).nan_to_num()[..., None]
        mu = mu + p_sink * tsinks.abs()[:, None, None]
        c_sink = tsinks.abs()[:, None, None] * (mean(dp) + dlse)
        w = w + 2 * sinks.abs().nan_to_num(posinf=0.0)[:, None, None]
    c = ta * e + dtp + mu * dp
    total = mean(c * w) + p_sink * c_sink * w.amax(-1, keepdim=True) if w.shape[-1] else mean(c * w)
    a, ds = p * (w * c + total + w * e * bends), p * w * e
    grouped = lambda y: y.unflatten(2, (heads_kv, -1)).sum(3)  # noqa: E731
    over_j, over_i = "bhij,bjhd->bihd", "bhij,bihd->bjhd"
    found = {
        "q": abs(scale) * (torch.einsum(over_j, a, k.abs()) + torch.einsum(over_j, ds, tk.abs())),
        "k": abs(scale) * grouped(torch.einsum(over_i, a, q.abs()) + torch.einsum(over_i, ds, tq.abs())),
        "v": grouped(torch.einsum(over_i, p * w * (ta + mu), dout.abs())),
    }
    return found if sinks is None else found | {"sinks": (p_sink * (c_sink * 6 + total)).sum((0, 2, 3))}


# ------------------------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("kind", ["dense", "packed"])
@pytest.mark.parametrize("variant", ["plain", *VARIANTS])
@pytest.mark.parametrize("impl, device, dtype", WHERE_DTYPE)
def test_variants_under_masks(impl, device, dtype, variant, kind):
    extras, options = VARIANTS.get(variant, ({}, {}))
    for mask in some(MASKS, (impl, device), len(variant) + (kind == "packed"), dtype):
        data = small(impl, device, kind, extras, dtype=dtype)
        check_twice(data, tangents_of(data), impl, **options, **mask)


@pytest.mark.parametrize("kind", ["dense", "packed"])
@pytest.mark.parametrize("which", SUBSETS)
@pytest.mark.parametrize("impl, device", [WHERE[0], WHERE[2]])
def test_a_penalty_of_some_gradients(impl, device, which, kind):
    extras, options = VARIANTS["all"]
    data = sized(impl, device, kind, extras)
    moving = tangents_of(data, which)
    with Asked() as asked:
        check_twice(data, moving, impl, causal=True, **options)
    (_, given), (_, again) = (next(call for call in asked.calls if call[0] == name) for name in ("attn_second", "attn_jvp"))
    for call in (given, again):
        assert {side for side in "qkvs" if call["tsinks" if side == "s" else f"t{side}"] is not None} == set(which)


@pytest.mark.parametrize("lse_grad", [False, True])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_one_input_alone(which, lse_grad):
    """The others are constants; dv alone keeps neither v nor out for its backward."""
    data = sized(*EAGER, dtype=torch.float32)

    def penalty(call, kind):
        leaf = getattr(data, which).to(kind).requires_grad_()
        inputs = {name: getattr(data, name).to(kind) for name in "qkv"} | {which: leaf}
        out, lse = call(*inputs.values())
        loss = out.sin().sum() + (lse.sin().sum() if lse_grad else 0.0)
        (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
        return torch.autograd.grad(gradient.square().sum() + gradient.sin().sum(), leaf)[0]

    found = penalty(lambda *x: attention(*x, causal=True, return_lse=True, impl="eager"), torch.float32)
    expected = penalty(lambda *x: attention_reference(*x, causal=True, return_lse=True), torch.float64)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("variant", ["plain", *VARIANTS])
@pytest.mark.parametrize("sizes", [(1000, 8), (1, 1)], ids=str)
def test_in_many_chunks(variant, sizes, monkeypatch):
    monkeypatch.setattr(eager, "CHUNK_SCORES", sizes[0])
    monkeypatch.setattr(eager, "MIN_ROWS", sizes[1])
    extras, options = VARIANTS.get(variant, ({}, {}))
    for kind, mask in product(("dense", "packed"), MASKS[1:3]):
        data = sized(*EAGER, kind, extras, seqlen_q=20, seqlen_k=30)
        check_twice(data, tangents_of(data), "eager", **options, **mask)


@pytest.mark.parametrize("scale", [-0.4, 0.0])
@pytest.mark.parametrize("variant", ["plain", "softcap", "all"])
def test_scales(variant, scale):
    extras, options = VARIANTS.get(variant, ({}, {}))
    data = sized(*EAGER, extras=extras)
    check_twice(data, tangents_of(data), "eager", **options, softmax_scale=scale, causal=True)


@pytest.mark.parametrize("shape", [(0, 5, 7), (2, 0, 7), (2, 5, 0), (1, 1, 1), (2, 9, 4)], ids=str)
@pytest.mark.parametrize("extras", [{}, {"sinks": 0.0}], ids=["plain", "sinks"])
@pytest.mark.parametrize("impl, device", WHERE)
def test_lengths_and_rows_without_keys(impl, device, extras, shape):
    batch, rows_q, rows_k = shape
    data = sized(impl, device, extras=extras, batch=batch, seqlen_q=rows_q, seqlen_k=rows_k)
    check_twice(data, tangents_of(data), impl, causal=True)


@pytest.mark.parametrize("kind", ["dense", "packed"])
@pytest.mark.parametrize("extras", [{}, {"sinks": 0.0}], ids=["plain", "sinks"])
def test_rows_without_keys_may_be_sent_anything(extras, kind):
    data = sized(*EAGER, kind, extras, seqlen_q=30, seqlen_k=20)
    moving = tangents_of(data)
    first = check_twice(data, moving, "eager", causal=True)
    _, lse = attend(data.with_(sinks=None), "eager", {}, causal=True)
    empty = (lse == -torch.inf).transpose(-1, -2)[..., None]
    assert empty.any() and not empty.all()
    other = twice(data.with_(dout=data.dout.masked_fill(empty, torch.nan)), moving, "eager", causal=True)
    assert all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("impl, device", WHERE)
def test_the_gradient_of_a_tangent(impl, device):
    """In the inputs and in the tangents, of tout and tlse and of out and lse beside them."""
    data = small(impl, device, "dense", VARIANTS["all"][0], dtype=torch.float32)
    moving = tangents_of(data)

    def gradients(impl, kind):
        leaves = {name: getattr(data, name).detach().to(kind).requires_grad_() for name in NAMES}
        tangents = {name: x.to(kind).requires_grad_() for name, x in moving.items()}

        def call(*inputs):
            return attend(data, impl, dict(zip(NAMES, inputs, strict=True)), causal=True, softcap=2.0)

        results = torch.func.jvp(call, tuple(leaves.values()), tuple(tangents.values()))
        loss = sum((x * (i + 1)).sin().sum() for i, x in enumerate((*results[0], *results[1])))
        return torch.autograd.grad(loss, [*leaves.values(), *tangents.values()])

    for found, expected in zip(gradients(impl, torch.float32), gradients("reference", torch.float64), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())


# ----------------------------------------------------------------------------------------------------------------------- surroundings


def test_layouts_autocast_checkpointing_and_determinism():
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(shape, generator=generator).requires_grad_() for shape in ((96, 32), (2, 12, 32)))

    def layer(x, kind="eager"):
        q, k, v = (x @ weight.to(x.dtype).T / 6).view(2, 12, 3, 4, 8).permute(2, 0, 3, 1, 4)
        if kind == "eager":
            return attention(q, k, v, causal=True, layout="bhsd", impl="eager")
        return attention_reference(q, k, v, causal=True, layout="bhsd")

    def penalty(call, x=x):
        (gradient,) = torch.autograd.grad(call(x).float().sin().sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), (weight, x))

    expected, found = penalty(lambda x: layer(x, "reference")), penalty(layer)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    torch.use_deterministic_algorithms(True)
    try:
        assert all(torch.equal(a, b) for a, b in zip(found, penalty(layer), strict=True))
    finally:
        torch.use_deterministic_algorithms(False)
    again = penalty(lambda x: checkpoint(layer, x, use_reentrant=False))
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    with torch.autocast("cpu", torch.bfloat16):
        half = penalty(layer)
    for a, b in zip(half, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0.1, atol=0.1 * b.abs().max().item())


def test_a_first_derivative_saves_and_runs_nothing_more():
    data = sized(*EAGER)
    leaves = [getattr(data, name).detach().requires_grad_() for name in "qkv"]
    with Asked() as asked:
        out, _ = attend(data, "eager", dict(zip("qkv", leaves, strict=True)))
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
            torch.autograd.grad(out, leaves, data.dout)
    assert [name for name, _ in asked.calls] == ["attn_fwd", "attn_bwd"] and not saved


@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_memory_is_linear_in_length(kind, monkeypatch):
    """No tensor that a tangent or a second derivative makes has more elements than a chunk of scores, or the inputs."""
    monkeypatch.setattr(eager, "CHUNK_SCORES", 1 << 12)
    monkeypatch.setattr(eager, "MIN_ROWS", 4)

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func.namespace != "flashattn":
                sizes = [x.untyped_storage().nbytes() for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
                self.most = max([self.most, *sizes])
            return result

    def largest(rows):
        data = dense(rows, heads=2, dim=8, dtype=torch.float32)
        inside = {"tangent": eager.tangent, "second": eager.second}
        watch = Largest()
        for name, function in inside.items():
            def watched(*args, function=function):
                with watch:
                    return function(*args)

            monkeypatch.setattr(eager, name, watched)
        if kind == "packed":
            cu = torch.tensor([0, rows // 4, rows], dtype=torch.int32)
            data = data.with_(**{name: getattr(data, name)[0] for name in ("q", "k", "v", "dout", "dlse")}, cu_q=cu, cu_k=cu)
        twice(data, tangents_of(data), "eager", causal=True)
        for name, function in inside.items():
            monkeypatch.setattr(eager, name, function)
        return watch.most

    short, long = largest(512), largest(2048)
    assert short > 0 and long <= 4 * short, "16 times as many scores"


@pytest.mark.gpu
def test_memory_on_a_gpu_is_linear_in_length():
    def peak(rows):
        data = dense(rows, heads=8, dim=64, dtype=torch.bfloat16, device="cuda")
        moving = tangents_of(data)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        twice(data, moving, None, causal=True)
        return torch.cuda.max_memory_allocated() - before

    peak(2048)
    assert peak(16384) <= 2.2 * peak(8192) + (32 << 20)


