"""What the numerical tests share: inputs, one run through any implementation, and the comparison with the oracle.

    data = dense(113, 203, heads=6, heads_kv=2, dim=72, dtype=torch.bfloat16, device=device, seed=0)
    check(data, impl, causal=True)                      # out, lse, dq, dk and dv against flashattn.reference

The tolerance is derived, not tuned, and derived here, which takes this file over 300 lines. An implementation may be off by twice what
plain attention in the same dtype is off by (1.5 times in the root mean square), plus one rounding of the result, plus the float32 roundoff
of what cancels inside it: see `tolerance`.

The surprising fact is that last term. With one key dq is exactly zero, so is the peer's error, and an allowance made of the two is
zero as well; but a kernel subtracts rowsum(dout * out) from dout . v, equal numbers that it summed in different orders. What float32
does to a difference is measured by what was subtracted, not by what is left.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from flashattn import attention, attention_varlen, dropout_mask, explain
from flashattn.problem import default_scale
from flashattn.reference import attention_reference, attention_scores, attention_varlen_reference, distances, dropped, keep_mask
from inputs import STRIDES, Data, dense, packed, with_extras

__all__ = [
    "DTYPES", "STRIDES", "WHERE", "WHERE_DTYPE", "Data", "Expected", "Results",
    "assert_close_to_oracle", "check", "compare", "dense", "expect", "packed", "run", "same_bits", "tolerance", "with_extras",
]  # fmt: skip

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EPS32 = torch.finfo(torch.float32).eps
BUDGET = {"cpu": 1 << 30, "cuda": 8 << 30}  # bytes for the score matrices of the reference

TANH, FAST_TANH = 3, 2**12  # roundings that a tanh is off by; the Hopper kernels' is within 2^-11 (PTX ISA, tanh.approx)
# (impl, device): `@pytest.mark.parametrize("impl, device", WHERE)` runs a test everywhere this machine can.
WHERE = [
    pytest.param("eager", "cpu", id="eager-cpu"),
    pytest.param("portable", "cpu", marks=pytest.mark.interpret, id="portable-interpreter"),
    pytest.param("portable", "cuda", marks=pytest.mark.gpu, id="portable-cuda"),
]
# (impl, device, dtype). No bfloat16 in the interpreter: it keeps the numbers as 16-bit integers and its dot multiplies those (3.6 and 3.9).
WHERE_DTYPE = [
    pytest.param(*where.values, dtype, marks=where.marks, id=f"{where.id}-{str(dtype).removeprefix('torch.')}")
    for where in WHERE
    for dtype in DTYPES
    if where.id != "portable-interpreter" or dtype != torch.bfloat16
]


# ------------------------------------------------------------------------------------------------------------------------- runs


class Results(NamedTuple):
    """What a call gave, in the order [batch, rows, heads, dim] whatever its layout; a gradient not asked for is None."""

    out: Tensor
    lse: Tensor
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dsinks: Tensor | None = None
    dbias: Tensor | None = None


def extras_of(data: Data, sinks: Tensor | None = None, bias: Tensor | None = None) -> dict[str, Tensor]:
    """The options that are tensors; sinks, bias: leaves in the place of those in data."""
    found = {"alibi_slopes": data.slopes, "sinks": data.sinks if sinks is None else sinks, "bias": data.bias if bias is None else bias}
    return {name: x for name, x in found.items() if x is not None}


def run(data: Data, impl: str | None, *, grads="qkvsb", lse_grad=True, layout="bshd", **options) -> Results:
    """attention or attention_varlen, forward and, for the inputs named in `grads` ("s": sinks, "b": a bias, if there are any), backward."""
    *inputs, sinks, bias = leaves = _leaves(data, grads)
    options = options | extras_of(data, sinks, bias)
    if data.packed:
        out, lse = attention_varlen(*inputs, data.cu_q, data.cu_k, impl=impl, return_lse=True, **options)
    elif layout == "bhsd":
        out, lse = attention(*(x.transpose(1, 2) for x in inputs), impl=impl, return_lse=True, layout=layout, **options)
        out = out.transpose(1, 2)
    else:
        out, lse = attention(*inputs, impl=impl, return_lse=True, layout=layout, **options)
    return Results(out.detach(), lse.detach(), *_gradients(out, lse, data.dout, data.dlse if lse_grad else None, leaves))


def _leaves(data: Data, grads: str, dtype: torch.dtype | None = None) -> list[Tensor | None]:
    """q, k, v in dtype, and sinks and bias, in one no narrower than theirs; the last are None if there are none."""
    leaves = [getattr(data, name).detach().to(dtype or data.q.dtype).requires_grad_(name in grads) for name in "qkv"]
    sinks = data.sinks
    if sinks is not None:
        sinks = sinks.detach().to(torch.promote_types(sinks.dtype, dtype or sinks.dtype)).requires_grad_("s" in grads)
    bias = data.bias
    if bias is not None and bias.dtype != torch.bool:  # where nothing is to be widened the strides stay what they are
        bias = bias.detach().to(torch.promote_types(bias.dtype, dtype or bias.dtype)).requires_grad_("b" in grads)
    return [*leaves, sinks, bias]


def _gradients(out, lse, dout, dlse, inputs) -> list[Tensor | None]:
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    if not wanted:
        return [None] * len(inputs)
    outputs, cotangents = ([out, lse], [dout, dlse.to(lse.dtype)]) if dlse is not None and lse.requires_grad else ([out], [dout])
    found = iter(torch.autograd.grad(outputs, wanted, cotangents, allow_unused=True, materialize_grads=True))
    return [next(found) if x is not None and x.requires_grad else None for x in inputs]


def same_bits(a: Results, b: Results) -> bool:
    return all((x is None and y is None) or torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ----------------------------------------------------------------------------------------------------------------------- oracle


class Expected(NamedTuple):
    """The oracle in float64, its low-precision peer, and for each result what its float32 roundoff is relative to (see `_magnitude`).

    empty: [.., heads, rows], queries without a key. unseen: [.., rows of k, 1], keys that no query sees.
    """

    oracle: Results
    peer: Results
    magnitude: Results
    empty: Tensor
    unseen: Tensor


def expect(data: Data, *, grads="qkvsb", lse_grad=True, peer_dtype=None, **options) -> Expected:
    """Run the reference on `data`, a few heads at a time, so that score matrices take no more than a few gigabytes."""
    dtype = peer_dtype or data.q.dtype
    oracle = _reference(data, torch.float64, grads, lse_grad, options)
    peer = _reference(data, dtype, grads, lse_grad, options)
    # lse is float32 whatever the inputs, so it is measured against what float32 makes of the same inputs
    lse = _reference(data, torch.float32, "", False, options).lse if dtype != torch.float32 else peer.lse
    magnitude = _magnitude(data, lse_grad, options)
    empty, unseen = _unkept(data, options)
    return Expected(oracle, peer._replace(lse=lse), magnitude, oracle.lse == -torch.inf if data.sinks is None else empty, unseen)


def with_masks(data: Data, options: dict, at_b=slice(None), at_h=slice(None)) -> dict:
    """The options with the mask of dropout itself in the place of its seed, for these batch entries and query heads: a list of masks, one a
    sequence, if data are packed."""
    p, seed, heads, device = options.get("dropout_p"), options.get("dropout_seed"), data.q.shape[-2], data.q.device
    if not p:
        return options
    if not data.packed:
        mask = dropout_mask(p, seed, data.q.shape[0], heads, data.q.shape[1], data.k.shape[1], device=device)[at_b, at_h]
    else:
        lengths = enumerate(zip(data.cu_q.diff().tolist(), data.cu_k.diff().tolist(), strict=True))
        mask = [dropout_mask(p, seed, n + 1, heads, *rows, device=device)[n:, at_h] for n, rows in lengths]
    return options | {"dropout_seed": mask}


def _attend(data: Data, q, k, v, options, sinks=None, bias=None):
    options = options | extras_of(data, sinks, bias)
    if data.packed:
        return attention_varlen_reference(q, k, v, data.cu_q, data.cu_k, return_lse=True, **options)
    return attention_reference(q, k, v, return_lse=True, **options)


def _pieces(data: Data, itemsize: int) -> Iterator[tuple[Data, slice, slice, slice]]:
    """(data of a piece, its batch entries, its query heads, its key/value heads): the largest pieces that fit."""
    heads, heads_kv = data.q.shape[-2], data.k.shape[-2]
    batch = 1 if data.packed else data.q.shape[0]
    if data.packed:
        lens_q, lens_k = data.cu_q.diff().long(), data.cu_k.diff().long()
        scores = int((lens_q * lens_k).sum())
    else:
        scores = data.q.shape[1] * data.k.shape[1]
    copies = 8  # scores, probabilities, their gradients, masks
    fit = max(1, BUDGET[data.q.device.type] // max(1, copies * itemsize * scores))
    batches = max(1, batch) if fit >= batch * heads else 1
    group = heads // heads_kv
    heads_kv_at_once = min(heads_kv, max(1, fit // (batches * group)))
    heads_at_once = heads_kv_at_once * group if fit >= group else 1
    for b in range(0, batch, batches):
        for h in range(0, heads, heads_at_once):
            at_b, at_h = slice(b, b + batches), slice(h, min(h + heads_at_once, heads))
            at_kv = slice(h // group, (at_h.stop - 1) // group + 1)
            heads_of = {"q": at_h, "k": at_kv, "v": at_kv, "dout": at_h, "dlse": at_h}
            piece = {name: _cut(getattr(data, name), at_b, at, data.packed) for name, at in heads_of.items()}
            slopes, sinks = (x if x is None else x[..., at_h] for x in (data.slopes, data.sinks))
            if slopes is not None and slopes.dim() == 2 and not data.packed:
                slopes = slopes[at_b]
            bias = None if data.bias is None else data.bias[bias_at(data.bias, at_b, at_h)]
            yield data.with_(**piece, slopes=slopes, sinks=sinks, bias=bias), at_b, at_h, at_kv


def bias_at(bias: Tensor, at_b: slice, at_h: slice) -> tuple:
    """Where a bias, or its gradient, has these batch entries and heads."""
    places = zip((at_b, at_h), (-4, -3), strict=True)
    return tuple(slice(None) if bias.shape[dim] == 1 else at for at, dim in places if bias.dim() >= -dim)


def _cut(x: Tensor, at_b: slice, at_h: slice, packed: bool) -> Tensor:
    return x[..., at_h, :] if packed else x[at_b][..., at_h, :]


def _zeros_like_results(data: Data, dtype, grads) -> Results:
    shapes = [x.shape if name in grads or name in ("dout", "dlse") else None for name, x in vars(data).items()]
    shapes = [*shapes[:5], None if data.sinks is None or "s" not in grads else data.sinks.shape]
    shapes.append(None if data.bias is None or "b" not in grads or data.bias.dtype == torch.bool else data.bias.shape)
    found = (shape if shape is None else torch.zeros(shape, dtype=dtype, device=data.q.device) for shape in shapes)
    q, k, v, out, lse, sinks, bias = found
    return Results(out, lse, q, k, v, sinks, bias)


def _reference(data: Data, dtype, grads, lse_grad, options) -> Results:
    total = _zeros_like_results(data, torch.float64, grads)  # one dtype for all, so that key heads cut in two are not rounded twice
    for piece, at_b, at_h, at_kv in _pieces(data, itemsize=torch.finfo(dtype).bits // 8):
        *inputs, sinks, bias = leaves = _leaves(piece, grads, dtype)
        out, lse = _attend(piece, *inputs, with_masks(data, options, at_b, at_h), sinks, bias)
        *parts, dsinks, dbias = out, lse, *_gradients(out, lse, piece.dout.to(dtype), piece.dlse if lse_grad else None, leaves)
        for sum_, part, at in zip(total, parts, (at_h, at_h, at_h, at_kv, at_kv), strict=False):
            if sum_ is not None:
                _cut(sum_, at_b, at, data.packed).add_(part.detach())
        if dsinks is not None:
            total.dsinks[at_h].add_(dsinks)
        if dbias is not None:
            total.dbias[bias_at(dbias, at_b, at_h)].add_(dbias)
    return total


def _magnitude(data: Data, lse_grad, options, off_tanh=TANH) -> Results:
    """For each result, what float32 roundoff inside it is relative to, in float32. off_tanh: see `_add_magnitude`."""
    total = _zeros_like_results(data, torch.float32, "qkvsb")
    for piece, at_b, at_h, at_kv in _pieces(data, itemsize=4):
        # rows past the last cu_seqlens are NaN in the inputs and 0 in every result
        tensors = [getattr(piece, name).detach().float().nan_to_num() for name in ("q", "k", "v", "dout", "dlse")]
        tensors[-1] = tensors[-1].transpose(-1, -2)[..., None] * lse_grad
        sums = [_cut(x, at_b, at, data.packed) for x, at in zip(total, (at_h, at_h, at_h, at_kv, at_kv), strict=False)]
        sums[1] = sums[1].transpose(-1, -2)
        dsinks = None if total.dsinks is None else total.dsinks[at_h]
        dbias = None if total.dbias is None else total.dbias[bias_at(total.dbias, at_b, at_h)]
        if not data.packed:
            masked = with_masks(data, options, at_b, at_h) | extras_of(piece)
            _add_magnitude([*sums, dsinks, dbias], tensors, data.q.dtype, masked, off_tanh)
            continue
        masks = with_masks(data, options, at_b, at_h).get("dropout_seed")
        cu_q, cu_k = data.cu_q.tolist(), data.cu_k.tolist()
        for n, (q0, q1, k0, k1) in enumerate(zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False)):
            extras = extras_of(piece if piece.slopes is None or piece.slopes.dim() == 1 else piece.with_(slopes=piece.slopes[n]))
            extras |= {"dropout_seed": masks[n]} if isinstance(masks, list) else {}
            at_q, at_k = slice(q0, q1), slice(k0, k1)
            alone = [x[None, at] for x, at in zip(tensors, (at_q, at_k, at_k, at_q, at_q), strict=True)]
            parts = [x[None, at] for x, at in zip(sums, (at_q, at_q, at_q, at_k, at_k), strict=True)]
            _add_magnitude([*parts, dsinks, None], alone, data.q.dtype, options | extras, off_tanh)
    return total


def _add_magnitude(sums, tensors, dtype, options, off_tanh) -> None:
    """Adds to (out, lse, dq, dk, dv, dsinks, dbias) the absolute values of what is added and subtracted in each, times the rounding errors
    that come with it:

    The score s_ij is off by t_ij = |scale| |q_i|.|k_j| (in units of eps), and the GPU's exponential by 2 (PTX ISA, ex2.approx: 2^-22);
    hence lse_i: sum_j p_ij (t_ij + 2). The probabilities of a row are off by the factors w_ij = 2 t_ij + 2, of which out keeps what
    doesn't cancel against the sum that it is divided by: sum_j p_ij w_ij |v_j - out_i|, at most (by Cauchy and Schwarz)
    sqrt(sum_j p_ij w_ij^2) sqrt(sum_j p_ij v_j^2 - out_i^2). In a backward pass p_ij = e^(s_ij - lse_i) is off by
    x_ij = w_ij + |lse_i|, where softmax never leaves the exponents of its row; hence
    dv_j: sum_i p_ij x_ij |dout_i|. And ds_ij = p_ij (dp_ij - delta_i + dlse_i) is off by p_ij times
    y_ij = x_ij |dp_ij - delta_i + dlse_i| + |dout_i|.|v_j| + |dout_i|.|out_i| + |dlse_i| + what rounding out to its dtype does to delta;
    hence dq_i: |scale| sum_j p_ij y_ij |k_j| and dk_j: |scale| sum_i p_ij y_ij |q_i|.

    Under a softcap a score is off by t_ij times the derivative g = 1 - tanh^2, and by off_tanh + 1 roundings of itself; ALiBi adds
    two of what it subtracts and one of the rest. ds is off by g times the above, and by what g is off, 2 |tanh| times that of tanh and a
    rounding, times |dp_ij - delta_i + dlse_i|. A sink's gradient sums p_i of the same kind, of a score that comes as it is:
    sum_i p_i (|sink| + |lse_i| + 2) |delta_i - dlse_i| and what delta is off. A bias adds a rounding of the score that it makes; its
    gradient is p_ij (dp_ij - delta_i + dlse_i), off as ds is without a softcap. Dropout multiplies
    v_j and dp_ij with z_ij wherever they stand beside p_ij above.
    """
    q, k, v, dout, dlse = tensors
    signed_scale = default_scale(q.shape[-1]) if options.get("softmax_scale") is None else options["softmax_scale"]
    scale, cap, slopes, sinks = abs(signed_scale), *(options.get(name) for name in ("softcap", "alibi_slopes", "sinks"))
    bias = options.get("bias")
    heads_kv = k.shape[2]
    out, lse = attention_reference(q, k, v, return_lse=True, **options)
    k, v = (x.repeat_interleave(q.shape[2] // heads_kv, dim=2) for x in (k, v))
    over_dim, over_j, over_i = "bihd,bjhd->bihj", "bihj,bjhd->bihd", "bihj,bihd->bjhd"
    heads_inside = lambda s: s.transpose(1, 2)  # noqa: E731  [b, h, i, j] -> [b, i, h, j]
    keep = keep_mask(q.shape[1], k.shape[1], causal=options.get("causal", False), window=options.get("window"), device=q.device)
    s = heads_inside(attention_scores(q, k, signed_scale, softcap=cap, alibi_slopes=slopes, bias=bias))
    p = torch.where(keep[:, None] & (s != -math.inf), torch.exp(s - lse.transpose(-1, -2)[..., None]), 0.0)
    z = torch.ones_like(p)
    if options.get("dropout_p"):
        z = dropped(z.transpose(1, 2), options["dropout_p"], options["dropout_seed"]).transpose(1, 2)
    spread = (torch.einsum(over_j, p * z.square(), v.square()) - out.square()).clamp_min(0.0).sqrt()
    delta = (dout * out).sum(-1, keepdim=True)
    t = scale * torch.einsum(over_dim, q.abs(), k.abs())
    g, off_g = 1.0, 0.0
    if cap:
        tanh = heads_inside(attention_scores(q, k, signed_scale, softcap=cap)) / cap
        g = 1 - tanh.square()
        off_g = 2 * tanh.abs() * (g * t / cap + off_tanh * tanh.abs()) + 1
        t = g * t + (off_tanh + 1) * cap * tanh.abs()
    if slopes is not None:
        steps = heads_inside((slopes[..., None, None] * distances(q.shape[1], k.shape[1], q.device)).expand(q.shape[0], -1, -1, -1))
        t = t + 2 * steps.abs() + torch.where(s == -math.inf, 0.0, (s + steps).abs())
    if bias is not None:
        t = t + torch.where(p > 0, s.abs(), 0.0)
    w = 2 * t + 2
    x = w + lse.abs().nan_to_num(posinf=0.0).transpose(-1, -2)[..., None]
    resid = (z * torch.einsum(over_dim, dout, v) - delta + dlse).abs()
    rounding = torch.linalg.vector_norm(dout * (out - out.to(dtype).float()), dim=-1, keepdim=True) / EPS32
    off_delta = (dout * out).abs().sum(-1, keepdim=True) + dlse.abs() + rounding
    off_dp = x * resid + z * torch.einsum(over_dim, dout.abs(), v.abs()) + off_delta
    y = g * off_dp + off_g * resid
    found = (
        (p * w.square()).sum(-1, keepdim=True).sqrt() * spread,
        (p * (t + 2)).sum(-1),
        scale * torch.einsum(over_j, p * y, k.abs()),
        scale * torch.einsum(over_i, p * y, q.abs()).unflatten(2, (heads_kv, -1)).sum(3),
        torch.einsum(over_i, p * z * x, dout.abs()).unflatten(2, (heads_kv, -1)).sum(3),
    )
    for total, part in zip(sums, found, strict=False):
        total.add_(part)
    if sums[6] is not None:
        off = heads_inside(p * off_dp)
        sums[6].add_(off.sum_to_size((*[1] * (4 - sums[6].dim()), *sums[6].shape)).view(sums[6].shape))
    if sinks is not None:
        rows = lse.transpose(-1, -2)[..., None].masked_fill(lse.transpose(-1, -2)[..., None] == -math.inf, math.inf)
        sinks = sinks[:, None].float()
        off = (sinks.abs().nan_to_num(posinf=0.0) + rows.abs().nan_to_num(posinf=0.0) + 2) * (delta - dlse).abs() + off_delta
        sums[5].add_((torch.exp(sinks - rows) * off).sum((0, 1, 3)))


def _unkept(data: Data, options) -> tuple[Tensor, Tensor]:
    """Which rows have no key, and which keys no row, of one entry and head unless a bias tells them apart. With equal scores every kept
    pair has weight, whatever the numbers."""
    rows, keys = (x[..., :1] if data.bias is not None else (x if data.packed else x[:1])[..., :1, :1] for x in (data.q, data.k))
    rows, keys = torch.zeros_like(rows, dtype=torch.float32), torch.zeros_like(keys, dtype=torch.float32)
    values = torch.ones_like(keys, requires_grad=True)
    options = {name: x for name, x in options.items() if not name.startswith("dropout")}
    bias = data.bias if data.bias is None or data.bias.dtype == torch.bool else data.bias != -torch.inf
    out, lse = _attend(data.with_(slopes=None, sinks=None, bias=None), rows, keys, values, options, bias=bias)
    return lse == -torch.inf, torch.autograd.grad(out, values, torch.ones_like(out))[0] == 0


# ------------------------------------------------------------------------------------------------------------------- comparison


def tolerance(oracle: Tensor, peer: Tensor, dtype: torch.dtype, magnitude: Tensor | None = None) -> tuple[float, float]:
    """Allowed maximum and root mean square of the error:

        max |x - oracle| <= 2   (max |peer - oracle| + eps(dtype) max |oracle| + eps(float32) max magnitude)
        rms (x - oracle) <= 1.5 (rms (peer - oracle) + eps(dtype) rms (oracle) + eps(float32) rms (magnitude))

    peer: the oracle's formula computed in `dtype`. magnitude: what cancels inside the result, see `Expected`.
    """
    error = peer.double() - oracle
    if not error.isfinite().all():
        raise ValueError("the low-precision peer is not finite, so it allows no tolerance: compare with peer_dtype=torch.float32")
    eps = torch.finfo(dtype).eps
    rounding = EPS32 * _max(magnitude), EPS32 * _rms(magnitude)
    if not math.isfinite(rounding[0] + eps * _max(oracle)):
        raise ValueError("the oracle or what cancels in it is not finite, so everything would be close to it")
    return 2 * (_max(error) + eps * _max(oracle) + rounding[0]), 1.5 * (_rms(error) + eps * _rms(oracle) + rounding[1])


def _max(x: Tensor | None) -> float:
    return 0.0 if x is None or not x.numel() else x.abs().amax().item()


def _rms(x: Tensor | None) -> float:
    return 0.0 if x is None or not x.numel() else x.double().square().mean().sqrt().item()


def assert_close_to_oracle(actual: Tensor, oracle64: Tensor, lowprec: Tensor, dtype, *, magnitude=None, what="result") -> None:
    """Fails unless `actual` is as close to the oracle as `tolerance` allows; what is infinite in the oracle must be so exactly."""
    assert actual.shape == oracle64.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(oracle64.shape)}"
    infinite = oracle64.isinf()
    same = torch.equal(actual[infinite].double(), oracle64[infinite])
    assert same, f"{what}: {int((actual.double() != oracle64)[infinite].sum())} elements should be exactly infinite"
    actual, oracle64, lowprec = (x.masked_fill(infinite, 0.0) for x in (actual, oracle64, lowprec))
    assert actual.isfinite().all(), f"{what}: {int((~actual.isfinite()).sum())} of {actual.numel()} elements are not finite"
    error = actual.double() - oracle64
    bounds = tolerance(oracle64, lowprec, dtype, magnitude)
    for measure, found, allowed in zip(("max", "rms"), (_max(error), _rms(error)), bounds, strict=True):
        where = torch.unravel_index(error.abs().argmax(), error.shape) if error.numel() else ()
        assert found <= allowed, f"{what}: {measure} error {found:.3g} > {allowed:.3g} allowed; largest at {[int(i) for i in where]}"


def compare(results: Results, expected: Expected, dtype: torch.dtype, bias_dtype: torch.dtype | None = None) -> None:
    """Every result against the oracle, and exact zeros where attention has nothing to attend to."""
    for name, actual, oracle, peer, magnitude in zip(Results._fields, results, *expected[:3], strict=True):
        if actual is not None:
            kind = torch.float32 if name in ("lse", "dsinks") else bias_dtype if name == "dbias" else dtype
            assert actual.dtype == kind, f"{name}: {actual.dtype}, expected {kind}"
            if name in ("dsinks", "dbias"):  # may be float32, made of what was rounded to dtype
                kind = max(dtype, kind, key=lambda x: torch.finfo(x).eps)
            assert_close_to_oracle(actual, oracle, peer, kind, magnitude=magnitude, what=name)
    empty = expected.empty.transpose(-1, -2)[..., None]
    for name, nothing in (("out", empty), ("dq", empty), ("dk", expected.unseen), ("dv", expected.unseen)):
        actual = getattr(results, name)
        if actual is not None:
            assert not actual.masked_select(nothing).any(), f"{name}: not exactly 0 where no pair is kept"


def check(
    data: Data, impl: str | None, *, grads="qkvsb", lse_grad=True, layout="bshd", peer_dtype=None, deterministic=False, **options
) -> Results:
    """Run and compare with the oracle; options: causal, window, softmax_scale, softcap, dropout_p with
    dropout_seed. Returns the results for further questions.

    Beside "portable" the forward of "hopper" is run and compared too, where it would be chosen: every test of the one is a test of both.
    peer_dtype: of the low-precision peer, where that of the inputs overflows.
    """
    results = run(data, impl, grads=grads, lse_grad=lse_grad, layout=layout, deterministic=deterministic, **options)
    expected = expect(data, grads=grads, lse_grad=lse_grad, peer_dtype=peer_dtype, **options)
    on_hopper = expected
    if options.get("softcap") and data.q.is_cuda:
        on_hopper = expected._replace(magnitude=_magnitude(data, lse_grad, options, FAST_TANH))
    bias_dtype = None if data.bias is None else data.bias.dtype
    compare(results, on_hopper if impl == "hopper" else expected, data.q.dtype, bias_dtype)
    explained = {name: x for name, x in (options | extras_of(data)).items() if name != "dropout_seed"}
    if impl == "portable" and explain(data.q, data.k, data.v, data.cu_q, data.cu_k, **explained).kernels["forward"] == "hopper":
        compare(run(data, "hopper", grads="", layout=layout, deterministic=deterministic, **options), on_hopper, data.q.dtype)
    return results
