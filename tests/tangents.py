"""What the tests of forward-mode derivatives share: one jvp through any implementation, and the oracle's, with what float32 may lose.

    moving = tangents_of(data, "qkvs")                           # random tangents of these inputs
    check_jvp(data, moving, impl, causal=True)                   # out, lse and their tangents against flashattn.reference

The oracle is torch.func.jvp of the reference in float64, its peer the same in the dtype of the inputs; the tolerance is support.py's, and
`_magnitude` derives what it needs beside them.
"""

import math
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from flashattn import attention, attention_varlen
from flashattn.problem import default_scale
from flashattn.reference import attention_reference, attention_scores, attention_varlen_reference, distances, keep_mask
from support import TANH, Data, assert_close_to_oracle

NAMES = ("q", "k", "v", "sinks")


class Moved(NamedTuple):
    out: Tensor
    lse: Tensor
    tout: Tensor
    tlse: Tensor


def tangents_of(data: Data, which: str = "qkvs", seed: int = 100) -> dict[str, Tensor]:
    """Normal tangents of the inputs named by a letter each; NaN where the input is."""
    generator = torch.Generator(data.q.device).manual_seed(seed)

    def like(x):
        numbers = torch.randn(x.shape, generator=generator, device=x.device, dtype=torch.float32).to(x.dtype)
        return numbers.masked_fill(x.isnan(), math.nan)

    drawn = {name: like(getattr(data, name)) for name in NAMES if getattr(data, name) is not None}
    return {name: x for name, x in drawn.items() if name[0] in which}


def attend(data: Data, impl: str | None, inputs: dict[str, Tensor], dtype=None, layout="bshd", **options):
    """(out, lse) of the library, or with impl "reference" of the oracle in dtype, where `inputs` stand in for those in data."""
    given = {name: getattr(data, name) for name in NAMES} | inputs
    if dtype is not None:
        kinds = dict.fromkeys("qkv", dtype) | {"sinks": torch.promote_types(torch.float32, dtype)}
        given = {name: x if x is None else x.to(kinds[name]) for name, x in given.items()}
    q, k, v, sinks = given.values()
    options = options | {name: x for name, x in (("sinks", sinks), ("alibi_slopes", data.slopes)) if x is not None}
    if impl != "reference":
        options |= {"impl": impl}
    cu = (data.cu_q, data.cu_k) if data.packed else ()
    call = {
        (False, False): attention, (False, True): attention_varlen,
        (True, False): attention_reference, (True, True): attention_varlen_reference,
    }[impl == "reference", data.packed]  # fmt: skip
    if layout == "bhsd":
        out, lse = call(*(x.transpose(1, 2) for x in (q, k, v)), return_lse=True, layout=layout, **options)
        return out.transpose(1, 2), lse
    return call(q, k, v, *cu, return_lse=True, **options)


def jvp(data: Data, moving: dict[str, Tensor], impl: str | None, dtype=None, **options) -> Moved:
    names = list(moving)
    primals = tuple(getattr(data, name) for name in names)
    tangents = tuple(moving.values())

    def call(*inputs):
        return attend(data, impl, dict(zip(names, inputs, strict=True)), dtype, **options)

    (out, lse), (tout, tlse) = torch.func.jvp(call, primals, tangents)
    return Moved(out, lse, tout, tlse)


def expected_jvp(data: Data, moving: dict[str, Tensor], peer_dtype=None, **options) -> tuple[Moved, Moved, Moved]:
    """(oracle, peer, magnitudes); a peer in float32 for lse and its tangent, which are float32 whatever the inputs."""
    oracle = jvp(data, moving, "reference", torch.float64, **options)
    peer = jvp(data, moving, "reference", peer_dtype or data.q.dtype, **options)
    return oracle, peer, _magnitude(data, moving, options)


def check_jvp(data: Data, moving: dict[str, Tensor], impl: str | None, *, layout="bshd", peer_dtype=None, **options) -> Moved:
    found = jvp(data, moving, impl, layout=layout, **options)
    expected = expected_jvp(data, moving, peer_dtype, **options)
    compare_jvp(found, *expected, data.q.dtype)
    return found


def compare_jvp(found: Moved, oracle: Moved, peer: Moved, magnitude: Moved, dtype) -> None:
    for name, actual, ref, low, most in zip(Moved._fields, found, oracle, peer, magnitude, strict=True):
        assert actual.dtype == (torch.float32 if "lse" in name else dtype), f"{name}: {actual.dtype}"
        assert_close_to_oracle(actual, ref, low, dtype, magnitude=most, what=name)
    empty = oracle.lse == -torch.inf
    assert not found.tlse[empty].any() and not found.tout[empty.transpose(-1, -2)].any(), "rows without keys don't move"


def _magnitude(data: Data, moving: dict[str, Tensor], options) -> Moved:
    """Of each result, what float32 roundoff inside it is relative to."""
    given = {name: getattr(data, name) for name in NAMES}
    given |= {f"t{name}": moving.get(name, None if x is None else torch.zeros_like(x)) for name, x in given.items()}
    given = {name: x if x is None else x.float().nan_to_num(neginf=-math.inf) for name, x in given.items()}
    if not data.packed:
        return Moved(*_dense_magnitude(given, data.slopes, options))
    out = torch.zeros(*data.q.shape[:-1], data.v.shape[-1], device=data.q.device)
    lse = torch.zeros(data.q.shape[1], data.q.shape[0], device=data.q.device)
    whole = Moved(out, lse, out.clone(), lse.clone())
    cu_q, cu_k = data.cu_q.tolist(), data.cu_k.tolist()
    for n, ((q0, q1), (k0, k1)) in enumerate(zip(pairwise(cu_q), pairwise(cu_k), strict=True)):
        at = {"q": slice(q0, q1), "k": slice(k0, k1), "v": slice(k0, k1)}
        alone = {name: x if x is None or "sinks" in name else x[None, at[name[-1]]] for name, x in given.items()}
        slopes = data.slopes[n] if data.slopes is not None and data.slopes.dim() == 2 else data.slopes
        for name, total, part in zip(Moved._fields, whole, _dense_magnitude(alone, slopes, options), strict=True):
            (total[:, q0:q1] if "lse" in name else total[q0:q1]).copy_(part[0])
    return whole


def _dense_magnitude(x: dict[str, Tensor | None], slopes, options):
    """In units of eps, the exponent of a probability is off by w_ij = 2 t_ij + 2 with t_ij = |scale| |q_i|.|k_j| (see support.py, which
    also has what softcap and ALiBi add to t), and the tangent of a score by

        o_ij = g |scale| (|tq_i|.|k_j| + |q_i|.|tk_j|) + |ts_ij| + (what g = 1 - tanh^2 is off) |ts_ij / g|

    Hence out is off by a_i = sum_j p_ij w_ij (|v_j| + |out_i|), lse by sum_j p_ij (t_ij + 2), its tangent mu by
    b_i = sum_j p_ij (w_ij |ts_ij - mu_i| + o_ij), and tout = sum_j p_ij x_j - mu out with x_j = ts_ij v_j + tv_j and the mean x of these by
    sum_j p_ij (w_ij (|ts_ij| |v_j| + |tv_j| + |x|) + o_ij |v_j|) + |mu_i| a_i + b_i |out_i|. A sink is a key with v = 0.
    """
    q, k, v, sinks, tq, tk, tv, tsinks = x.values()
    scale = default_scale(q.shape[-1]) if options.get("softmax_scale") is None else options["softmax_scale"]
    cap = options.get("softcap")
    out, lse = attention_reference(q, k, v, return_lse=True, sinks=sinks, alibi_slopes=slopes, **options)
    k, v, tk, tv = (one.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for one in (k, v, tk, tv))
    over_dim, over_j = "bihd,bjhd->bhij", "bhij,bjhd->bihd"
    product = lambda a, b: torch.einsum(over_dim, a, b)  # noqa: E731
    keep = keep_mask(q.shape[1], k.shape[1], causal=options.get("causal", False), window=options.get("window"), device=q.device)
    s = attention_scores(q, k, scale, softcap=cap, alibi_slopes=slopes)
    p = torch.where(keep, torch.exp(s - lse[..., None]), 0.0)
    t = abs(scale) * product(q.abs(), k.abs())
    ts = scale * (product(tq, k) + product(q, tk))
    o = abs(scale) * (product(tq.abs(), k.abs()) + product(q.abs(), tk.abs()))
    if cap:
        tanh = attention_scores(q, k, scale, softcap=cap) / cap
        g = 1 - tanh.square()
        off_g = 2 * tanh.abs() * (g * t / cap + TANH * tanh.abs()) + 1
        t = g * t + (TANH + 1) * cap * tanh.abs()
        o, ts = g * o + off_g * ts.abs(), g * ts
    if slopes is not None:
        bias = slopes[..., None, None] * distances(q.shape[1], k.shape[1], q.device)
        t = t + 2 * bias.abs() + (s + bias).abs()
    o, w = o + ts.abs(), 2 * t + 2
    mu = (p * ts).sum(-1)
    if sinks is not None:
        p_sink = torch.exp(sinks[:, None] - lse).nan_to_num()
        sink, tsink = sinks[:, None].nan_to_num(neginf=0.0), tsinks[:, None]
        mu = mu + p_sink * tsink
    off_mu = (p * (w * (ts - mu[..., None]).abs() + o)).sum(-1)
    if sinks is not None:
        off_mu = off_mu + p_sink * ((2 * sink.abs() + 2) * (tsink - mu).abs() + tsink.abs())
    weight = (p * w).sum(-1)
    rows = lambda a: a.transpose(1, 2)[..., None]  # noqa: E731  [b, h, i] -> [b, i, h, 1]
    off_out = torch.einsum(over_j, p * w, v.abs()) + rows(weight) * out.abs()
    mean = torch.einsum(over_j, p * ts, v) + torch.einsum(over_j, p, tv)
    off_mean = torch.einsum(over_j, p * (w * ts.abs() + o), v.abs()) + torch.einsum(over_j, p * w, tv.abs()) + rows(weight) * mean.abs()
    return off_out, (p * (t + 2)).sum(-1), off_mean + rows(mu).abs() * off_out + rows(off_mu) * out.abs(), off_mu
