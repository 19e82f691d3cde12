"""The operators `flashattn::attn_fwd` and `attn_bwd`, `attn_jvp` (the forward with its derivative along tangents) and `attn_second` (the
derivative of the backward along tangents): schemas, implementation, fake kernels.

An operator takes tensors in [batch, rows, heads, dim] order, or packed [rows, heads, dim] with cumulative lengths, and plain numbers. Of a
dense call cu_seqlens_k, without cu_seqlens_q, are the lengths of keys themselves, [batch].
Implementations are chosen at run time, behind the schema, so torch.compile sees two opaque calls. The surprising fact: an operator
can't return "no tensor", so a gradient that was not asked for comes back as an empty one-dimensional tensor. That of sinks, which all
batch entries share, is given for each of them, [batch, heads] (packed: [1, heads]), so that vmap can fold samples into a batch; and so is
what comes as a tangent of sinks. A bias has four dimensions, [batch, heads, rows of q, rows of k], each of its size or 1, and so has its
gradient, contiguous; the operators of tangents take none, and no dropout. blocks: of a block mask, `BlockMask.packed`; of an operator's
batch entries it may have fewer, which the others share in turn, and one head for all.
"""

import torch

from ..block_lists import check_packed
from ..checks import check_cu_seqlens_values, check_seqlens_k_values
from ..dispatch.select import launcher, select
from .describe import NO_MODS, aligned, describe

LIBRARY = torch.library.Library("flashattn", "DEF")
_EXTRAS = "Tensor? alibi_slopes, Tensor? sinks"
_OPTIONS = (
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt? max_seqlen_q, SymInt? max_seqlen_k, float softmax_scale, "
    "SymInt? window_left, SymInt? window_right, bool top_left, bool deterministic, str? impl"
)
ALL = f"{_EXTRAS}, Tensor? bias, float softcap, float dropout_p, Tensor? rng, Tensor? blocks, {_OPTIONS}"
LIBRARY.define(f"attn_fwd(Tensor q, Tensor k, Tensor v, {ALL}) -> (Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.define(
    f"attn_bwd(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor? v, Tensor? out, Tensor lse, int head_dim_v, {ALL}, "
    "bool need_dq, bool need_dk, bool need_dv, bool need_dsinks, bool need_dbias) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_TANGENTS = "Tensor? tq, Tensor? tk, Tensor? tv, Tensor? tsinks"
LIBRARY.define(
    f"attn_jvp(Tensor q, Tensor k, Tensor v, {_TANGENTS}, {_EXTRAS}, float softcap, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.define(
    f"attn_second(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor? v, {_TANGENTS}, int head_dim_v, {_EXTRAS}, "
    f"float softcap, {_OPTIONS}, bool need_dq, bool need_dk, bool need_dv, bool need_dsinks) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _contiguous(*tensors):
    """As launchers take them: a few numbers a head, or two in all."""
    return [None if x is None else x.contiguous() for x in tensors]


def _named(blocks) -> dict:
    """For the launchers that take a block mask."""
    return {} if blocks is None else {"blocks": blocks}


def check_blocks(problem, blocks, q) -> None:
    if blocks is None:
        return
    limited = problem.varlen or problem.used_k or problem.window_left is not None or problem.window_right is not None
    if limited or problem.score_mod or problem.mask_mod:
        raise ValueError("blocks of a packed call, or beside lengths of keys, a window or a mod: expected none of these")
    check_packed(blocks, problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k, q.device)


def _check_rng(problem, rng) -> None:
    if problem.dropout and (rng is None or rng.dtype != torch.int64 or tuple(rng.shape) != (2,)):
        came = "None" if rng is None else f"{rng.dtype} of shape {tuple(rng.shape)}"
        raise ValueError(f"dropout_p={problem.dropout:g} with an rng that is {came}: expected int64 of shape (2,), seed and offset")


def forward(
    q, k, v, alibi_slopes, sinks, bias, softcap, dropout_p, rng, blocks, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *rest,
    mods=NO_MODS,
):  # fmt: skip
    """mods: (score_mod, mask_mod, what they read), see modded.py."""
    *options, impl = rest
    if cu_seqlens_q is not None:
        check_cu_seqlens_values(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    elif cu_seqlens_k is not None:
        check_seqlens_k_values(k, cu_seqlens_k)
    extras = alibi_slopes, sinks, bias, softcap, dropout_p
    limits = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    problem = describe(q, k, v.shape[-1], *limits, *options, aligned(q, k, v), extras, mods, blocks)
    check_blocks(problem, blocks, q)
    rng = rng if problem.dropout else None
    _check_rng(problem, rng)
    run = launcher(select(problem, "forward", impl).launch).forward
    given = cu_seqlens_q, cu_seqlens_k, *_contiguous(alibi_slopes, sinks), bias, *_contiguous(rng), mods[2]
    return run(problem, q, k, v, *given, **_named(blocks))


def backward(dout, dlse, q, k, v, out, lse, head_dim_v, alibi_slopes, sinks, bias, softcap, dropout_p, rng, blocks, *rest, mods=NO_MODS):
    *options, impl, need_dq, need_dk, need_dv, need_dsinks, need_dbias = rest
    extras = alibi_slopes, sinks, bias, softcap, dropout_p
    problem = describe(q, k, head_dim_v, *options, aligned(q, k, k if v is None else v), extras, mods, blocks)
    check_blocks(problem, blocks, q)
    rng = rng if problem.dropout else None
    _check_rng(problem, rng)
    run = launcher(select(problem, "backward", impl).launch).backward
    needs = need_dq, need_dk, need_dv, need_dsinks, need_dbias
    given = *options[:2], *_contiguous(alibi_slopes, sinks), bias, *_contiguous(rng)
    gradients = run(problem, needs, dout, dlse, q, k, v, out, lse, *given, mods[2], **_named(blocks))
    return tuple(q.new_empty(0) if gradient is None else gradient for gradient in gradients)


def jvp(q, k, v, tq, tk, tv, tsinks, alibi_slopes, sinks, softcap, *rest):
    """(out, lse, tout, tlse). tq, tk, tv: shaped like q, k, v. tsinks: [batch, heads_q], or [1, heads_q] of a packed call."""
    *options, impl = rest
    problem = describe(q, k, v.shape[-1], *options, aligned(q, k, v), (alibi_slopes, sinks, None, softcap, 0.0))
    run = launcher(select(problem, "tangent", impl).launch).tangent
    return run(problem, q, k, v, tq, tk, tv, tsinks, *options[:2], *_contiguous(alibi_slopes, sinks))


def second(dout, dlse, q, k, v, tq, tk, tv, tsinks, head_dim_v, alibi_slopes, sinks, softcap, *rest):
    *options, impl, need_dq, need_dk, need_dv, need_dsinks = rest
    problem = describe(q, k, head_dim_v, *options, False, (alibi_slopes, sinks, None, softcap, 0.0))
    run = launcher(select(problem, "second", impl).launch).second
    needs = need_dq, need_dk, need_dv, need_dsinks
    found = run(problem, needs, dout, dlse, q, k, v, tq, tk, tv, tsinks, *options[:2], *_contiguous(alibi_slopes, sinks))
    return tuple(q.new_empty(0) if gradient is None else gradient for gradient in found)


def _fake_fwd(q, k, v, alibi_slopes, sinks, bias, softcap, dropout_p, rng, blocks, cu_seqlens_q, *rest):
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    rows = (q.shape[1], q.shape[0]) if cu_seqlens_q is not None else (q.shape[0], q.shape[2], q.shape[1])
    return out, q.new_empty(rows, dtype=torch.float32)


def _fake_jvp(q, k, v, tq, tk, tv, tsinks, alibi_slopes, sinks, softcap, *rest):
    args = q, k, v, alibi_slopes, sinks, None, softcap, 0.0, None, None, *rest
    return *_fake_fwd(*args), *_fake_fwd(*args)


def _fake_second(dout, dlse, q, k, v, tq, tk, tv, tsinks, head_dim_v, alibi_slopes, sinks, *rest):
    lse = q.new_empty(0, dtype=torch.float32)
    return _fake_bwd(dout, dlse, q, k, v, None, lse, head_dim_v, alibi_slopes, sinks, None, *rest, False)[:4]


def _fake_bwd(dout, dlse, q, k, v, out, lse, head_dim_v, alibi_slopes, sinks, bias, *rest):
    need_dq, need_dk, need_dv, need_dsinks, need_dbias = rest[-5:]
    return (
        q.new_empty(q.shape if need_dq else (0,)),
        k.new_empty(k.shape if need_dk else (0,)),
        k.new_empty((*k.shape[:-1], head_dim_v) if need_dv else (0,)),
        lse.new_empty((q.shape[0] if q.dim() == 4 else 1, q.shape[-2])) if need_dsinks else q.new_empty(0),
        bias.new_empty(bias.shape) if need_dbias else q.new_empty(0),
    )


for _name, _real, _fake in (
    ("attn_fwd", forward, _fake_fwd),
    ("attn_bwd", backward, _fake_bwd),
    ("attn_jvp", jvp, _fake_jvp),
    ("attn_second", second, _fake_second),
):
    LIBRARY.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flashattn::{_name}", _fake, lib=LIBRARY)
