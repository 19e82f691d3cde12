"""Attention for tensors on a CPU, or on a device without Triton: plain torch, exact, memory linear in length.

Queries are taken a chunk of rows at a time, each against only the stretch of keys that its rows can see, so a window or a causal mask
costs about what it keeps and no score matrix is larger than a chunk (Rabe and Staats, Self-attention Does Not Need O(n^2) Memory, 2021,
section 2, here without their second loop, over keys). With a block mask a chunk is a block of queries, or a part of one, against the keys
of the blocks that it keeps, gathered. Half precision is computed in float32, score to result.

Legend: H pairs of (batch entry, key/value head), M rows of a chunk times the query heads that share a key/value head, N keys that the
chunk sees, D head_dim, V head_dim_v. Folding the sharing heads into the rows makes grouped heads an ordinary matrix product, and sums
their dK and dV for nothing.

The surprising fact: the backward reads neither `out` nor `lse`. A chunk holds whole rows of scores, so delta is summed as
rowsum(p * dp) of the very numbers it is subtracted from, where a kernel that sees only a tile needs rowsum(dout * out), equal on paper
and rounded differently (FlashAttention, 2022, appendix B.2). A row with a single key gets a gradient of exactly 0 this way, and scores of
1e5, whose lse is rounded to 1e-2, cost no accuracy.

Over 300 lines because one pass over a chunk has everything that scores can have, and the backward, the tangents and the second derivatives
repeat what the forward did.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from flashattn.block_lists import BLOCK, Blocks, Sizes, dense_of, list_of, unpack
from flashattn.dropout import head_keys, kept
from flashattn.mods import MaskMod, ScoreMod, apply_mask_mod, apply_score_mod, indices
from flashattn.problem import Problem, check_lengths, check_used

CHUNK_SCORES = 1 << 19  # float32 scores of one chunk: 2 MiB, so that the passes over it run in cache
LOG2_E = math.log2(math.e)
MIN_ROWS = 64  # rows of a matrix product, below which it is too thin to be fast
Draw = tuple[Tensor, Tensor]  # of dropout, see `_draw`
Keys = slice | Tensor  # of a chunk: a stretch, or with a block mask positions


def forward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    rng: Tensor | None = None,
    aux: Sequence[Tensor] = (),
    blocks: Tensor | None = None,
    token: object = None,
) -> tuple[Tensor, Tensor]:
    """out_i = sum_j p_ij v_j and lse_i = ln (e^sink + sum_j e^(s_ij)), over the keys that `problem` keeps.

    q [batch, seqlen_q, heads_q, head_dim], k [..., heads_kv, head_dim], v [..., heads_kv, head_dim_v] of any strides; packed calls have
    [total, heads, dim] and int32 cu_seqlens. Returns out, contiguous, in the dtype of q, and lse, float32, natural
    logarithm, [batch, heads_q, seqlen_q] or [heads_q, total_q]. Rows without keys, and rows past the last cu_seqlens, have out 0 and
    lse -inf, or the sink for the former. slopes: float32 [heads_q] or [batch, heads_q]; sinks: float32 [heads_q]; bias: of a dense call,
    [batch, heads_q, seqlen_q, seqlen_k] with sizes of 1 for what is shared, any strides; rng: int64 [2], the seed and offset of dropout,
    which multiplies p_ij in the first sum with 0 or 1 / (1 - dropout); aux: what the mods read, whose twins run; blocks: of a block
    mask, see block_lists.py. cu_seqlens_k: where `problem` says used_k, the lengths of keys.
    Raises ValueError for cu_seqlens that fall or reach past the tensor, as lengths do. token is for launchers; nothing is launched here.
    """
    with _without_autocast(q.device):
        if problem.used_k:
            out = q.new_zeros(*q.shape[:-1], v.shape[-1])
            lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -math.inf, dtype=torch.float32)
            for at, used in _same_used(k, cu_seqlens_k):
                parts = q[at], k[at, :used], v[at, :used], _of_sequences(slopes, at), sinks, _of_used(bias, at, used)
                out[at], lse[at] = _dense_forward(problem, *parts, _draw(problem, rng, at), _mods(problem, aux, at, q.device))
            return out, lse
        if not problem.varlen:
            given = _draw(problem, rng, range(problem.batch)), _mods(problem, aux, range(problem.batch), q.device)
            return _dense_forward(problem, q, k, v, slopes, sinks, bias, *given, blocks)
        out = q.new_zeros(*q.shape[:-1], v.shape[-1])
        lse = q.new_full((q.shape[1], q.shape[0]), -math.inf, dtype=torch.float32)
        for sequences, at_q, at_k in _same_lengths(q, k, cu_seqlens_q, cu_seqlens_k):
            n = len(sequences)
            part_qkv = (_unpack(x, at, n) for x, at in ((q, at_q), (k, at_k), (v, at_k)))
            given = _draw(problem, rng, sequences), _mods(problem, aux, sequences, q.device)
            extras = _of_sequences(slopes, sequences), sinks, None, *given
            part, part_lse = _dense_forward(problem, *part_qkv, *extras)
            out[at_q] = part.flatten(0, 1)
            lse[:, at_q] = rearrange(part_lse, "n h s -> h (n s)")
        return out, lse


def backward(
    problem: Problem,
    needs: tuple[bool, ...],
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    rng: Tensor | None = None,
    aux: Sequence[Tensor] = (),
    blocks: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of a loss that has gradient dout in out and dlse in lse:

        dv_j = sum_i p_ij dout_i                     ds_ij = p_ij (dp_ij - delta_i),   dp_ij = dout_i . v_j
        dq_i = scale sum_j ds_ij k_j                 delta_i = sum_j p_ij dp_ij - dlse_i
        dk_j = scale sum_i ds_ij q_i

    since d lse_i / d s_ij = p_ij; a score_mod sends ds through the derivative of its twin, and a softcap multiplies it by 1 - tanh^2; with
    dropout, p_ij in the sum of dv_j, and dp_ij, have the factor that p_ij had in out. A sink is a key of value 0 that every row sees, so
    its gradient is -sum_i e^(sink - lse_i) delta_i; it is float32 and given for each batch entry, [batch, heads_q], or [1, heads_q] of a
    packed call. That of a bias is p_ij (dp_ij - delta_i), summed in float32 along the dimensions in which it has size 1. dout, dlse: shaped
    like out and lse, any strides, None for a gradient of zero. needs: which of dq, dk, dv, dsinks and dbias to compute; the others are
    None. Gradients are contiguous, with the shape and dtype of their input, and exactly 0 for queries without keys, for keys that no query
    sees and for rows past the last cu_seqlens.

    Source: Dao et al., FlashAttention (2022), appendix B.2; the gradient into lse follows from the line above.
    """
    with _without_autocast(q.device):
        if problem.used_k:
            *grads, _ = _zero_gradients(problem, needs, q, k)
            dbias = torch.zeros(bias.shape, device=q.device) if needs[4] else None
            for at, used in _same_used(k, cu_seqlens_k):
                part = (_at(dout, at), _at(dlse, at), q[at], k[at, :used], _at(v, at, used), _of_sequences(slopes, at), sinks)
                part_bias = _of_used(bias if dbias is None else bias.float(), at, used)
                given = part_bias, _draw(problem, rng, at), _mods(problem, aux, at, q.device)
                *parts, part_dbias = _dense_backward(problem, needs, *part, *given)
                _put(grads, parts, at, used)
                if dbias is not None:
                    into = dbias[..., :used] if dbias.shape[3] > 1 else dbias
                    into[slice(None) if dbias.shape[0] == 1 else at] += part_dbias
            return (*grads, None if dbias is None else dbias.to(bias.dtype))
        if not problem.varlen:
            given = _draw(problem, rng, range(problem.batch)), _mods(problem, aux, range(problem.batch), q.device)
            return _dense_backward(problem, needs, dout, dlse, q, k, v, slopes, sinks, bias, *given, blocks)
        grads = _zero_gradients(problem, needs, q, k)
        for sequences, at_q, at_k in _same_lengths(q, k, cu_seqlens_q, cu_seqlens_k):
            n = len(sequences)
            part_dout = None if dout is None else _unpack(dout, at_q, n)
            part_dlse = None if dlse is None else rearrange(dlse[:, at_q], "h (n s) -> n h s", n=n)
            part_qkv = (None if x is None else _unpack(x, at, n) for x, at in ((q, at_q), (k, at_k), (v, at_k)))
            given = _draw(problem, rng, sequences), _mods(problem, aux, sequences, q.device)
            extras = _of_sequences(slopes, sequences), sinks, None, *given
            *parts, dsinks, _ = _dense_backward(problem, needs, part_dout, part_dlse, *part_qkv, *extras)
            for grad, part, at in zip(grads, parts, (at_q, at_k, at_k), strict=False):
                if grad is not None:
                    grad[at] = part.flatten(0, 1)
            if dsinks is not None:
                grads[3].add_(dsinks.sum(0))
        return grads


def tangent(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tq: Tensor | None,
    tk: Tensor | None,
    tv: Tensor | None,
    tsinks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, tout, tlse): the forward and its derivative along tangents of q, k, v and sinks, of which some may be None:

        tout_i = sum_j p_ij ((ts_ij - mu_i) v_j + tv_j)     tlse_i = mu_i = sum_j p_ij ts_ij,   ts_ij = scale (tq_i . k_j + q_i . tk_j)

    where a softcap multiplies ts by 1 - tanh^2, and a sink is a key of value 0. Tangents are shaped like what they are of, but tsinks like
    the gradient of sinks: of each batch entry. Rows without keys have tout 0 and tlse 0, or the tangent of the sink.
    """
    with _without_autocast(q.device):
        if problem.used_k:
            out, tout = (q.new_zeros(*q.shape[:-1], v.shape[-1]) for _ in range(2))
            lse, tlse = (q.new_zeros((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32) for _ in range(2))
            for at, used in _same_used(k, cu_seqlens_k):
                parts = q[at], k[at, :used], v[at, :used], _at(tq, at), _at(tk, at, used), _at(tv, at, used), _at(tsinks, at)
                found = _dense_tangent(problem, *parts, _of_sequences(slopes, at), sinks)
                out[at], lse[at], tout[at], tlse[at] = found
            return out, lse, tout, tlse
        if not problem.varlen:
            return _dense_tangent(problem, q, k, v, tq, tk, tv, tsinks, slopes, sinks)
        out, tout = (q.new_zeros(*q.shape[:-1], v.shape[-1]) for _ in range(2))
        lse, tlse = (q.new_full((q.shape[1], q.shape[0]), value, dtype=torch.float32) for value in (-math.inf, 0.0))
        for sequences, at_q, at_k in _same_lengths(q, k, cu_seqlens_q, cu_seqlens_k):
            n = len(sequences)
            places = (q, at_q), (k, at_k), (v, at_k), (tq, at_q), (tk, at_k), (tv, at_k)
            parts = [None if x is None else _unpack(x, at, n) for x, at in places]
            part_tsinks = None if tsinks is None else tsinks.expand(n, -1)
            *found, found_tlse = _dense_tangent(problem, *parts, part_tsinks, _of_sequences(slopes, sequences), sinks)
            out[at_q], part_lse, tout[at_q] = found[0].flatten(0, 1), found[1], found[2].flatten(0, 1)
            lse[:, at_q], tlse[:, at_q] = (rearrange(x, "n h s -> h (n s)") for x in (part_lse, found_tlse))
        return out, lse, tout, tlse


def second(
    problem: Problem,
    needs: tuple[bool, bool, bool, bool],
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    tq: Tensor | None,
    tk: Tensor | None,
    tv: Tensor | None,
    tsinks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """The derivative along tangents of what `backward` gives for fixed dout and dlse, or, which is the same, the gradients of
    G = dout . tout + dlse . tlse (`tangent`) in q, k, v and sinks: the Hessian of dout . out + dlse . lse times the tangents.

    With dp_ij = dout_i . v_j, delta_i and ds_ij as in `backward`, and e_ij = dp_ij - delta_i, G is the sum over all i and j of
    p_ij (ts_ij e_ij + dout_i . tv_j); a sink is a key with v = 0. With c_ij the derivative of G in p_ij, a_ij that in the scaled product,

        c_ij = ts_ij e_ij + dout_i . tv_j - mu_i dp_ij           a_ij = p_ij (c_ij - sum_k p_ik c_ik)
        hq_i = scale sum_j (a_ij k_j + ds_ij tk_j)               hv_j = sum_i p_ij (ts_ij - mu_i) dout_i
        hk_j = scale sum_i (a_ij q_i + ds_ij tq_i)               hsink = sum_i a_i of the sink

    where a softcap multiplies a by w = 1 - tanh^2 and adds p e times the tangent of w. v may be None if only tv is given. As for the rest,
    see `backward`.
    """
    with _without_autocast(q.device):
        if problem.used_k:
            grads = _zero_gradients(problem, needs, q, k)[:4]
            for at, used in _same_used(k, cu_seqlens_k):
                part = _at(dout, at), _at(dlse, at), q[at], k[at, :used], _at(v, at, used), _at(tq, at)
                part = *part, *(_at(x, at, used) for x in (tk, tv)), _at(tsinks, at), _of_sequences(slopes, at), sinks
                _put(grads, _dense_second(problem, needs, *part), at, used)
            return grads
        if not problem.varlen:
            return _dense_second(problem, needs, dout, dlse, q, k, v, tq, tk, tv, tsinks, slopes, sinks)
        grads = _zero_gradients(problem, needs, q, k)[:4]
        for sequences, at_q, at_k in _same_lengths(q, k, cu_seqlens_q, cu_seqlens_k):
            n = len(sequences)
            part_dlse = None if dlse is None else rearrange(dlse[:, at_q], "h (n s) -> n h s", n=n)
            places = (dout, at_q), (q, at_q), (k, at_k), (v, at_k), (tq, at_q), (tk, at_k), (tv, at_k)
            part_dout, *parts = (None if x is None else _unpack(x, at, n) for x, at in places)
            part_tsinks = None if tsinks is None else tsinks.expand(n, -1)
            extras = _of_sequences(slopes, sequences), sinks
            *parts, dsinks = _dense_second(problem, needs, part_dout, part_dlse, *parts, part_tsinks, *extras)
            for grad, part, at in zip(grads, parts, (at_q, at_k, at_k), strict=False):
                if grad is not None:
                    grad[at] = part.flatten(0, 1)
            if dsinks is not None:
                grads[-1].add_(dsinks.sum(0))
        return grads


def _dense_forward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    sinks: Tensor | None,
    bias: Tensor | None = None,
    draw: Draw | None = None,
    mods: "_Mods | None" = None,
    blocks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -math.inf, dtype=torch.float32)
    if sinks is not None:
        lse.copy_(sinks[:, None])
    groups = (k.shape[2], problem.group)
    q, out_grouped, lse_grouped = q.unflatten(2, groups), out.unflatten(2, groups), lse.unflatten(1, groups)
    for batch, heads, chunks in _walk(problem, q, k, blocks):
        k_HND, v_HNV = _keys_first(k[batch, :, heads]), _keys_first(v[batch, :, heads])
        per_head = _extras_of(groups, slopes, sinks, q.shape[0], batch, heads)
        for rows, keys, keep in chunks:
            q_HMD = _fold(q[batch, rows, heads])
            extras = (*per_head, _kept_bias(_bias_of(bias, groups, q.shape[0], batch, heads, rows, keys), keep))
            found = _exp_scores(problem, q_HMD, k_HND, rows, keys, extras, *_diagonals(problem, q, k), _mods_at(mods, groups, batch, heads))
            e_HMN, m_HM, l_HM, *_ = found
            if draw is not None:
                _drop(problem, draw, groups, batch, heads, rows, keys, e_HMN)
            _unfold(torch.bmm(e_HMN, v_HNV[:, keys]).div_(l_HM), into=out_grouped[batch, rows, heads])
            lse_HM = m_HM + l_HM.log()
            if problem.natural:
                lse_HM = torch.where(m_HM == math.inf, math.inf, lse_HM)
            lse_chunk = lse_grouped[batch, heads, :, rows]
            lse_chunk.copy_(lse_HM.view(lse_chunk.shape))
    return out, lse


def _dense_backward(
    problem: Problem,
    needs: tuple[bool, ...],
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    slopes: Tensor | None,
    sinks: Tensor | None,
    bias: Tensor | None = None,
    draw: Draw | None = None,
    mods: "_Mods | None" = None,
    blocks: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    dq, dk, dv, dsinks, _ = _zero_gradients(problem, needs, q, k)
    dbias = torch.zeros(bias.shape, device=q.device) if needs[4] else None
    if dout is None and dlse is None:
        return dq, dk, dv, dsinks, None if dbias is None else dbias.to(bias.dtype)
    groups = (k.shape[2], problem.group)
    owed = None  # to the sinks, by each row; by one without keys what comes for its lse, which is the sink
    if dsinks is not None:
        owed = torch.zeros(q.shape[0], q.shape[2], q.shape[1], device=q.device)
        owed = owed if dlse is None else owed.add_(dlse).masked_fill_(sinks[:, None] == -math.inf, 0.0)
        owed = owed.unflatten(1, groups)
    q = q.unflatten(2, groups)
    dout = None if dout is None else dout.unflatten(2, groups)
    dlse = None if dlse is None else dlse.unflatten(1, groups)
    for batch, heads, chunks in _walk(problem, q, k, blocks):
        k_HND, v_HNV = _keys_first(k[batch, :, heads]), None if v is None else _keys_first(v[batch, :, heads])
        dk_HND = None if dk is None else torch.zeros_like(k_HND)
        dv_HNV = None if dv is None else k_HND.new_zeros(*k_HND.shape[:-1], problem.head_dim_v)
        per_head = _extras_of(groups, slopes, sinks, q.shape[0], batch, heads)
        for rows, keys, keep in chunks:
            q_HMD = _fold(q[batch, rows, heads])
            extras = (*per_head, _kept_bias(_bias_of(bias, groups, q.shape[0], batch, heads, rows, keys), keep))
            scores = _exp_scores(
                problem, q_HMD, k_HND, rows, keys, extras, *_diagonals(problem, q, k), _mods_at(mods, groups, batch, heads), derivative=True
            )
            e_HMN, l_HM = scores.e_HMN, scores.l_HM
            # p = e / l; dividing the short rows of dout by l instead saves a pass over the scores
            dout_HMV = None if dout is None else _fold(dout[batch, rows, heads]) / l_HM
            if dout is not None and scores.keyless_HM is not None:  # a probability of 0 would keep a NaN
                dout_HMV.masked_fill_(scores.keyless_HM, 0.0)
            left_HMN = e_HMN  # by dropout
            if draw is not None and dout is not None:
                left_HMN = e_HMN.clone()
                _drop(problem, draw, groups, batch, heads, rows, keys, left_HMN)
            if dv is not None and dout is not None:
                _add_product(dv_HNV, keys, left_HMN.mT, dout_HMV)
            if dq is None and dk is None and owed is None and dbias is None:
                continue
            dlse_HM = None if dlse is None else dlse[batch, heads, :, rows].reshape(l_HM.shape)
            ds_HMN, delta_HM = _score_gradient(scores, left_HMN, dout_HMV, None if v_HNV is None else v_HNV[:, keys], dlse_HM)
            if scores.modified is not None:
                ds_HMN = _before_score_mod(scores.modified, ds_HMN)
            if dbias is not None:
                _add_bias_gradient(dbias, ds_HMN.unflatten(0, (-1, k[batch, :, heads].shape[2])), groups[1], batch, heads, rows, keys)
            if scores.tanh_HMN is not None:
                ds_HMN.addcmul_(ds_HMN * scores.tanh_HMN, scores.tanh_HMN, value=-1)
            if owed is not None:
                owed_chunk = owed[batch, heads, :, rows]
                owed_HM = (scores.sink_HM / l_HM).mul_(delta_HM).neg_()
                if problem.takes_keys:  # what comes for a row's lse may be anything where neither keys nor a sink have made it
                    owed_HM.masked_fill_(scores.sink_HM == 0, 0.0)
                owed_chunk.copy_(owed_HM.view(owed_chunk.shape))
            if dq is not None:
                dq_HMD = torch.bmm(ds_HMN, k_HND[:, keys]).mul_(problem.softmax_scale)
                _unfold(dq_HMD, into=dq.unflatten(2, groups)[batch, rows, heads])
            if dk is not None:
                _add_product(dk_HND, keys, ds_HMN.mT, q_HMD, problem.softmax_scale)
        for grad, grad_HND in ((dk, dk_HND), (dv, dv_HNV)):
            if grad is not None:
                grad[batch, :, heads] = rearrange(grad_HND, "(b h) n d -> b n h d", h=k[batch, :, heads].shape[2])
    return dq, dk, dv, None if owed is None else owed.sum(-1).flatten(1), None if dbias is None else dbias.to(bias.dtype)


def _dense_tangent(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, tq, tk, tv, tsinks, slopes: Tensor | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out, tout = (q.new_zeros(*q.shape[:-1], v.shape[-1]) for _ in range(2))
    lse, tlse = (q.new_full((q.shape[0], q.shape[2], q.shape[1]), value, dtype=torch.float32) for value in (-math.inf, 0.0))
    if sinks is not None:
        lse.copy_(sinks[:, None])
        if tsinks is not None:
            tlse.copy_(tsinks[..., None]).masked_fill_(sinks[:, None] == -math.inf, 0.0)
    groups = (k.shape[2], problem.group)
    q, tq, out_grouped, tout_grouped = (None if x is None else x.unflatten(2, groups) for x in (q, tq, out, tout))
    lse_grouped, tlse_grouped = lse.unflatten(1, groups), tlse.unflatten(1, groups)
    for batch, heads, chunks in _blocks(problem, q, k):
        k_HND, v_HNV, tk_HND, tv_HNV = (None if x is None else _keys_first(x[batch, :, heads]) for x in (k, v, tk, tv))
        extras = *_extras_of(groups, slopes, sinks, q.shape[0], batch, heads), None
        for rows, keys in chunks:
            q_HMD, tq_HMD = (None if x is None else _fold(x[batch, rows, heads]) for x in (q, tq))
            scores = _exp_scores(problem, q_HMD, k_HND, rows, keys, extras, *_diagonals(problem, q, k))
            tsink_HM = None if tsinks is None else _rows_of_heads(tsinks.unflatten(1, groups)[batch, heads], rows)
            moved = _moved(problem, scores, q_HMD, k_HND[:, keys], tq_HMD, None if tk is None else tk_HND[:, keys], tsink_HM)
            _unfold(torch.bmm(moved.p_HMN, v_HNV[:, keys]), into=out_grouped[batch, rows, heads])
            tout_HMV = torch.bmm(moved.tp_HMN, v_HNV[:, keys])
            if tv is not None:
                tout_HMV.baddbmm_(moved.p_HMN, tv_HNV[:, keys])
            _unfold(tout_HMV, into=tout_grouped[batch, rows, heads])
            for whole, part in ((lse_grouped, scores.m_HM + scores.l_HM.log()), (tlse_grouped, moved.mu_HM)):
                chunk = whole[batch, heads, :, rows]
                chunk.copy_(part.view(chunk.shape))
    return out, lse, tout, tlse


class _Moved(NamedTuple):
    """Probabilities p, the tangents ts of scores and ta of scaled products (None: 0), mu = sum p ts over keys and sink, tp = p (ts - mu);
    of a sink, its probability and its tangent (None: there is none)."""

    p_HMN: Tensor
    ts_HMN: Tensor | None
    ta_HMN: Tensor | None
    mu_HM: Tensor
    tp_HMN: Tensor
    sink_HM: Tensor | None
    tsink_HM: Tensor | None


def _moved(problem: Problem, scores: "_Scores", q_HMD: Tensor, k_HND: Tensor, tq_HMD, tk_HND, tsink_HM) -> _Moved:
    """How tangents move the probabilities of a chunk. Where p is 0 by the mask, ts is made 0: it may be anything."""
    p_HMN = scores.e_HMN / scores.l_HM
    sink_HM = None if scores.sink_HM is None else scores.sink_HM / scores.l_HM
    ta_HMN = ts_HMN = None
    products = [(a, b) for a, b in ((tq_HMD, k_HND), (q_HMD, tk_HND)) if a is not None and b is not None]
    mu_HM = torch.zeros_like(scores.l_HM)
    for a, b in products:
        ta_HMN = torch.baddbmm(p_HMN if ta_HMN is None else ta_HMN, a, b.mT, beta=float(ta_HMN is not None), alpha=problem.softmax_scale)
    if products:
        ta_HMN = ta_HMN.masked_fill_(p_HMN == 0.0, 0.0)
        ts_HMN = ta_HMN if scores.tanh_HMN is None else ta_HMN * (1 - scores.tanh_HMN.square())
        mu_HM = (p_HMN * ts_HMN).sum(-1, keepdim=True)
    if tsink_HM is not None:
        tsink_HM = tsink_HM.masked_fill(sink_HM == 0.0, 0.0)
        mu_HM = mu_HM + sink_HM * tsink_HM
    tp_HMN = p_HMN * (-mu_HM if ts_HMN is None else ts_HMN - mu_HM)
    return _Moved(p_HMN, ts_HMN, ta_HMN, mu_HM, tp_HMN, sink_HM, tsink_HM)


def _dense_second(
    problem: Problem, needs: tuple[bool, bool, bool, bool], dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor,
    v: Tensor | None, tq, tk, tv, tsinks, slopes: Tensor | None, sinks: Tensor | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    hq, hk, hv, hsinks, _ = _zero_gradients(problem, needs, q, k)
    if dout is None and dlse is None:
        return hq, hk, hv, hsinks
    groups = (k.shape[2], problem.group)
    q, tq, dout, hq_grouped = (None if x is None else x.unflatten(2, groups) for x in (q, tq, dout, hq))
    dlse, owed = (None if x is None else x.unflatten(1, groups) for x in (dlse, hsinks))
    for batch, heads, chunks in _blocks(problem, q, k):
        k_HND, v_HNV, tk_HND, tv_HNV = (None if x is None else _keys_first(x[batch, :, heads]) for x in (k, v, tk, tv))
        hk_HND = None if hk is None else torch.zeros_like(k_HND)
        hv_HNV = None if hv is None else k_HND.new_zeros(*k_HND.shape[:-1], problem.head_dim_v)
        extras = *_extras_of(groups, slopes, sinks, q.shape[0], batch, heads), None
        for rows, keys in chunks:
            q_HMD, tq_HMD, dout_HMV = (None if x is None else _fold(x[batch, rows, heads]) for x in (q, tq, dout))
            scores = _exp_scores(problem, q_HMD, k_HND, rows, keys, extras, *_diagonals(problem, q, k))
            tsink_HM = None if tsinks is None else _rows_of_heads(tsinks.unflatten(1, groups)[batch, heads], rows)
            moved = _moved(problem, scores, q_HMD, k_HND[:, keys], tq_HMD, None if tk is None else tk_HND[:, keys], tsink_HM)
            if hv is not None and dout is not None:
                hv_HNV[:, keys].baddbmm_(moved.tp_HMN.mT, dout_HMV)
            dlse_HM = None if dlse is None else dlse[batch, heads, :, rows].reshape(scores.l_HM.shape)
            if hq is None and hk is None and hsinks is None:
                continue
            values = (None if x is None else x[:, keys] for x in (v_HNV, tv_HNV))
            a_HMN, ds_HMN, a_sink_HM = _second_scores(problem, scores, moved, dout_HMV, dlse_HM, *values)
            if hsinks is not None:
                part = owed[batch, heads]
                part += a_sink_HM.view(*part.shape, -1).sum(-1)
            if hq is not None:
                hq_HMD = torch.bmm(a_HMN, k_HND[:, keys])
                if tk is not None:
                    hq_HMD.baddbmm_(ds_HMN, tk_HND[:, keys])
                _unfold(hq_HMD.mul_(problem.softmax_scale), into=hq_grouped[batch, rows, heads])
            if hk is not None:
                hk_HND[:, keys].baddbmm_(a_HMN.mT, q_HMD, alpha=problem.softmax_scale)
                if tq is not None:
                    hk_HND[:, keys].baddbmm_(ds_HMN.mT, tq_HMD, alpha=problem.softmax_scale)
        for grad, grad_HND in ((hk, hk_HND), (hv, hv_HNV)):
            if grad is not None:
                grad[batch, :, heads] = rearrange(grad_HND, "(b h) n d -> b n h d", h=k[batch, :, heads].shape[2])
    return hq, hk, hv, hsinks


def _second_scores(problem: Problem, scores: "_Scores", moved: _Moved, dout_HMV, dlse_HM, v_HNV, tv_HNV):
    """(a, ds, a of the sink) of a chunk, see `second`; ds is None where scores have no tangents."""
    p_HMN, ts_HMN, ta_HMN, mu_HM, _, sink_HM, tsink_HM = moved
    minus_delta_HM = torch.zeros_like(mu_HM) if dlse_HM is None else dlse_HM.clone()
    dp_HMN = c_HMN = ds_HMN = None
    if dout_HMV is not None and v_HNV is not None:
        dp_HMN = torch.bmm(dout_HMV, v_HNV.mT)
        minus_delta_HM -= (p_HMN * dp_HMN).sum(-1, keepdim=True)
    e_HMN = minus_delta_HM if dp_HMN is None else dp_HMN + minus_delta_HM
    if ts_HMN is not None:
        c_HMN = ts_HMN * e_HMN
    if dout_HMV is not None and tv_HNV is not None:
        dtp_HMN = torch.bmm(dout_HMV, tv_HNV.mT)
        c_HMN = dtp_HMN if c_HMN is None else c_HMN.add_(dtp_HMN)
    c_HMN = torch.zeros_like(p_HMN) if c_HMN is None else c_HMN
    if dp_HMN is not None:
        c_HMN = c_HMN.addcmul_(mu_HM, dp_HMN, value=-1)
    mean_HM = (p_HMN * c_HMN).sum(-1, keepdim=True)
    a_sink_HM = None
    if sink_HM is not None:
        c_sink_HM = torch.zeros_like(mu_HM) if tsink_HM is None else tsink_HM * minus_delta_HM
        mean_HM += sink_HM * c_sink_HM
        a_sink_HM = sink_HM * (c_sink_HM - mean_HM)
    a_HMN = c_HMN.sub_(mean_HM).mul_(p_HMN)
    if ts_HMN is not None:
        ds_HMN = p_HMN * e_HMN
    if scores.tanh_HMN is not None:
        w_HMN = 1 - scores.tanh_HMN.square()
        a_HMN.mul_(w_HMN)
        if ts_HMN is not None:
            ds_HMN.mul_(w_HMN)
            a_HMN.addcmul_(ds_HMN * ta_HMN, scores.tanh_HMN, value=-2 / problem.softcap)
    return a_HMN, ds_HMN, a_sink_HM


def _rows_of_heads(x: Tensor, rows: slice) -> Tensor:
    """[b, h, group], a number for each head -> [b h, group rows, 1]"""
    return x.flatten(0, 1).float()[..., None].expand(-1, -1, rows.stop - rows.start).reshape(x.shape[0] * x.shape[1], -1, 1)


def _zero_gradients(problem: Problem, needs: tuple[bool, ...], q: Tensor, k: Tensor) -> tuple[Tensor | None, ...]:
    """zeros_like would keep the strides of the inputs, an expanded one's too. None for that of a bias, which is not summed in its dtype."""
    *shapes, sinks = (q.shape, k.shape, (*k.shape[:-1], problem.head_dim_v), (q.shape[0] if q.dim() == 4 else 1, q.shape[-2]))
    kinds = [*((shape, q.dtype) for shape in shapes), (sinks, torch.float32)]
    found = (torch.zeros(s, dtype=t, device=q.device) if need else None for (s, t), need in zip(kinds, needs, strict=False))
    return (*found, None)


def _of_sequences(slopes: Tensor | None, sequences: list[int]) -> Tensor | None:
    return slopes if slopes is None or slopes.dim() == 1 else slopes[sequences]


def _extras_of(groups, slopes: Tensor | None, sinks: Tensor | None, size: int, batch: slice, heads: slice) -> tuple[Tensor | None, ...]:
    """Slopes [b h, group, 1, 1] and sinks [h, group, 1] of a block of heads."""
    if slopes is not None:
        slopes = slopes.expand(size, -1).unflatten(1, groups)[batch, heads].flatten(0, 1)[..., None, None]
    return slopes, None if sinks is None else sinks.unflatten(0, groups)[heads][..., None]


def _bias_of(bias: Tensor | None, groups, size: int, batch: slice, heads: slice, rows: slice, keys: Keys) -> Tensor | None:
    """[b, h, group, rows, keys] of a chunk, as a view; what is shared has size 1 or is expanded."""
    if bias is None:
        return None
    bias = bias.expand(size, groups[0] * groups[1], -1, -1).unflatten(1, groups)[batch, heads]
    rows, keys = (slice(None) if bias.shape[dim] == 1 else at for dim, at in ((3, rows), (4, keys)))
    return bias[..., rows, keys]


def _kept_bias(bias: Tensor | None, keep: Tensor | None) -> Tensor | None:
    """A bias, or a mask of booleans, together with what a block mask keeps: to a chunk it is one more mask."""
    if bias is None or keep is None:
        return keep if bias is None else bias
    return bias & keep if bias.dtype == torch.bool else torch.where(keep, bias, -math.inf)


def _add_product(into: Tensor, keys: Keys, a: Tensor, b: Tensor, alpha: float = 1.0) -> None:
    """into[:, keys] += alpha a b"""
    if isinstance(keys, slice):
        into[:, keys].baddbmm_(a, b, alpha=alpha)
    else:
        into.index_add_(1, keys, torch.bmm(a, b), alpha=alpha)


def _add_bias_gradient(dbias: Tensor, ds: Tensor, group: int, batch: slice, heads: slice, rows: slice, keys: Keys) -> None:
    """ds [b, h, (group m), n], summed over what the bias shares."""
    ds = rearrange(ds, "b h (g m) n -> b (h g) m n", g=group)
    shared = [dim for dim, size in enumerate(dbias.shape) if size == 1]
    heads = slice(heads.start * group, heads.stop * group)
    at = [slice(None) if size == 1 else place for size, place in zip(dbias.shape, (batch, heads, rows, keys), strict=True)]
    dbias[tuple(at)] += ds.sum(shared, keepdim=True) if shared else ds


def _draw(problem: Problem, rng: Tensor | None, sequences: Sequence[int]) -> Draw | None:
    """Keys of the rows and of the columns of these sequences, int32 [sequences, heads_q]; None without dropout."""
    if not problem.dropout:
        return None
    return head_keys(rng, torch.tensor(sequences, dtype=torch.int64, device=rng.device), problem.heads_q)


def _drop(problem: Problem, draw: Draw, groups, batch: slice, heads: slice, rows: slice, keys: Keys, e_HMN: Tensor) -> None:
    """Multiply the factors of dropout into a chunk [b h, group m, n], in place."""
    of_heads = tuple(key.unflatten(1, groups)[batch, heads] for key in draw)
    chunk = e_HMN.view(*of_heads[0].shape, -1, e_HMN.shape[-1])
    chunk.masked_fill_(~kept(of_heads, rows, keys, problem.dropout), 0.0).mul_(problem.rescale)


class _Scores(NamedTuple):
    """e = e^(s - m) with 0 where masked, the maximum m and the sum l of e of each row: p = e / l and lse = m + ln l. sink: e^(sink - m),
    in l too. tanh: of a softcap. keyless: with a bias or mods, rows that they leave no key; with no sink either, l is 1 and m -inf.
    modified: what a score_mod was given and what it made of it, [b, h group, m, n], with the graph of its twin between them."""

    e_HMN: Tensor
    m_HM: Tensor
    l_HM: Tensor
    sink_HM: Tensor | None
    tanh_HMN: Tensor | None
    keyless_HM: Tensor | None
    modified: tuple[Tensor, Tensor] | None = None


class _Mods(NamedTuple):
    """Of a call, and, as `_mods_at` gives them, of a block of heads. where: batch entries and heads, as twins take them."""

    score: ScoreMod | None
    mask: MaskMod | None
    score_aux: tuple[Tensor, ...]
    mask_aux: tuple[Tensor, ...]
    sequences: Tensor
    heads: slice = slice(None)


def _exp_scores(
    problem: Problem, q_HMD: Tensor, k_HND: Tensor, rows: slice, keys: Keys, extras: tuple[Tensor | None, ...],
    diagonal: int, aligned: int, mods: _Mods | None = None, derivative: bool = False,
) -> _Scores:  # fmt: skip
    """The scale is applied to s - m, not to the scores: large scores that are close to each other then lose nothing by it. Only its sign
    has to be known earlier, for the maximum; but what is added to scores, or compared with them, is in their units. e is taken as a power
    of 2 because the exp of the math library under torch is up to 70 times slower where the result underflows, and masked scores do nothing
    else. Every row here has a key, so l is at least 1, unless a bias or a mod takes all of them away; what a block mask takes is in
    the bias. derivative: keep what it takes.
    """
    slopes, sinks, bias = extras
    scale, tanh_HMN, sink_HM = problem.softmax_scale, None, None
    in_units = problem.alibi or problem.sinks or problem.natural
    modified = None
    factor, magnitude = (math.copysign(1.0, scale), abs(scale)) if scale else (0.0, 1.0)
    if problem.softcap:
        factor, magnitude = problem.inner, problem.softcap
    elif in_units:
        factor, magnitude = scale, 1.0
    beta_0 = q_HMD.new_zeros(1, 1, 1)
    s_HMN = torch.baddbmm(beta_0, q_HMD, k_HND[:, keys].mT, beta=0, alpha=factor)
    if problem.softcap:
        tanh_HMN = s_HMN.tanh_()
        s_HMN = tanh_HMN * (problem.softcap if in_units else 1.0)
        magnitude = 1.0 if in_units else magnitude
    s_grouped = s_HMN.unflatten(1, (problem.group, -1))
    row = torch.arange(rows.start, rows.stop, device=q_HMD.device)[:, None]
    if slopes is not None:
        column = torch.arange(keys.start, keys.stop, device=q_HMD.device) if isinstance(keys, slice) else keys
        distance = row + aligned - column
        s_grouped.addcmul_(slopes, distance.abs().float(), value=-1)
    if bias is not None:
        s_bhgmn = s_grouped.unflatten(0, (bias.shape[0], -1))
        s_bhgmn.masked_fill_(~bias, -math.inf) if bias.dtype == torch.bool else s_bhgmn.add_(bias)
    if mods is not None:
        s_HMN, modified = _modified(mods, s_HMN, problem.group, rows, keys, derivative)
        s_grouped = s_HMN.unflatten(1, (problem.group, -1))
    i = row + diagonal
    # only the columns that some row of the chunk may not see: at either end, about as many as the chunk has rows
    if problem.window_right is not None:
        first = max(keys.start, rows.start + diagonal + problem.window_right + 1)
        j = torch.arange(first, max(first, keys.stop), device=q_HMD.device)
        s_grouped[..., first - keys.start :].masked_fill_(j > i + problem.window_right, -math.inf)
    if problem.window_left is not None:
        last = min(keys.stop, rows.stop - 1 + diagonal - problem.window_left)
        j = torch.arange(keys.start, max(keys.start, last), device=q_HMD.device)
        s_grouped[..., : len(j)].masked_fill_(j < i - problem.window_left, -math.inf)
    m_HM = s_HMN.amax(dim=-1, keepdim=True)
    keyless_HM = m_HM == -math.inf if problem.takes_keys else None
    if sinks is not None:
        m_grouped = m_HM.view(-1, *sinks.shape[:-1], len(row))  # [b, h, group, m]
        m_HM = torch.maximum(m_grouped, sinks).view(m_HM.shape)
    if problem.takes_keys:
        m_HM = m_HM.masked_fill(m_HM == -math.inf, 0.0)
    if sinks is not None:
        sink_HM = torch.exp(sinks - m_HM.view(m_grouped.shape)).view(m_HM.shape)
    e_HMN = s_HMN.sub_(m_HM).mul_(magnitude * LOG2_E).exp2_()
    l_HM = e_HMN.sum(dim=-1, keepdim=True)
    l_HM = l_HM if sink_HM is None else l_HM + sink_HM
    if problem.takes_keys:
        m_HM, l_HM = m_HM.masked_fill(l_HM == 0, -math.inf), l_HM.masked_fill(l_HM == 0, 1.0)
    return _Scores(e_HMN, m_HM * magnitude, l_HM, sink_HM, tanh_HMN, keyless_HM, modified)


def _mods(problem: Problem, aux: Sequence[Tensor], sequences: Sequence[int], device: torch.device) -> _Mods | None:
    """sequences: their numbers, which a mod is told."""
    if problem.score_mod is None and problem.mask_mod is None:
        return None
    score = None if problem.score_mod is None else ScoreMod.records[problem.score_mod]
    mask = None if problem.mask_mod is None else MaskMod.records[problem.mask_mod]
    count = 0 if score is None else len(score.aux)
    return _Mods(score, mask, tuple(aux[:count]), tuple(aux[count:]), torch.tensor(sequences, dtype=torch.int64, device=device))


def _mods_at(mods: _Mods | None, groups: tuple[int, int], batch: slice, heads: slice) -> _Mods | None:
    """Of a block of batch entries and key/value heads."""
    if mods is None:
        return None
    _, group = groups
    return mods._replace(sequences=mods.sequences[batch], heads=slice(heads.start * group, min(heads.stop, groups[0]) * group))


def _modified(mods: _Mods, s_HMN: Tensor, group: int, rows: slice, keys: slice, derivative: bool):
    """(scores that are nobody else's, masked; what `_Scores` has of the score_mod)."""
    device, modified = s_HMN.device, None
    row, key = (torch.arange(side.start, side.stop, device=device) for side in (rows, keys))
    where = indices(mods.sequences, mods.heads, row, key)
    s_bhmn = s_HMN.view(len(mods.sequences), -1, len(row), len(key))  # heads of a group are neighbours
    if mods.score is not None:
        with _recording() if derivative else contextlib.nullcontext():
            before = s_bhmn.detach().requires_grad_(derivative)
            after = apply_score_mod(mods.score, before, where, mods.score_aux)
        modified = (before, after) if derivative else None
        s_bhmn = after.detach().clone(memory_format=torch.contiguous_format)
    if mods.mask is not None:
        s_bhmn = s_bhmn.masked_fill_(~apply_mask_mod(mods.mask, where, mods.mask_aux), -math.inf)
    return s_bhmn.view(s_HMN.shape), modified


def _before_score_mod(modified: tuple[Tensor, Tensor], ds_HMN: Tensor) -> Tensor:
    """The gradient of what a score_mod was given. Where none comes none goes on, whatever the derivative is there."""
    before, after = modified
    ds = ds_HMN.view(before.shape)
    if not after.requires_grad:  # it knows nothing of the scores
        return torch.zeros_like(ds_HMN)
    with _recording():
        (found,) = torch.autograd.grad(after, before, ds, allow_unused=True)
    return torch.zeros_like(ds_HMN) if found is None else found.masked_fill(ds == 0, 0.0).view(ds_HMN.shape)


@contextlib.contextmanager
def _recording() -> Iterator[None]:
    """Autograd, below which operators run, for what is inside."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.AutogradOther, torch._C.DispatchKey.ADInplaceOrView):
        excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded), torch.enable_grad():
        yield


def _score_gradient(
    scores: _Scores, left_HMN: Tensor, dout_HMV: Tensor | None, v_HNV: Tensor, dlse_HM: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(ds, delta): ds = p (dp - delta), not yet times the 1 - tanh^2 of a softcap, with p = e / l and dout already divided by l.

    left: e with the factors of dropout, which dp has too.
    """
    if dout_HMV is None:
        ds_HMN, delta_HM = scores.e_HMN.mul_(dlse_HM / scores.l_HM), -dlse_HM
    else:
        p_dp_HMN = torch.bmm(dout_HMV, v_HNV.mT).mul_(left_HMN)
        delta_HM = p_dp_HMN.sum(dim=-1, keepdim=True)
        if dlse_HM is not None:
            delta_HM -= dlse_HM
        ds_HMN = p_dp_HMN.addcmul_(scores.e_HMN, delta_HM / scores.l_HM, value=-1)
    if scores.keyless_HM is not None:
        ds_HMN.masked_fill_(scores.keyless_HM, 0.0)
    return ds_HMN, delta_HM


def _walk(
    problem: Problem, q: Tensor, k: Tensor, blocks: Tensor | None
) -> Iterator[tuple[slice, slice, Iterable[tuple[slice, Keys, Tensor | None]]]]:
    """`_blocks`, or the same of a block mask: (batch entries, key/value heads, chunks (query rows, keys, which pairs of these are kept)).

    kept: bool [b, h, group, rows, keys] with sizes of 1 for what shares it, None for all but what the problem masks.
    """
    if blocks is None:
        for batch, heads, chunks in _blocks(problem, q, k):
            yield batch, heads, [(rows, keys, None) for rows, keys in chunks]
        return
    sizes, found, _, _ = unpack(blocks)
    heads_kv, group = q.shape[2:4]
    own_batch, own_heads = sizes.batch > 1, sizes.heads > 1
    widest = max(1, int(torch.bincount(list_of(sizes, found)).max()) * BLOCK) if len(found.tile) else 1
    pairs = max(1, CHUNK_SCORES // (group * BLOCK * widest))
    step_h = 1 if own_heads else min(heads_kv, pairs)
    step_b = 1 if own_batch else max(1, pairs // heads_kv)
    rows = max(-(-MIN_ROWS // group), CHUNK_SCORES // (group * widest))
    for b in range(0, q.shape[0], step_b):
        for h in range(0, heads_kv, step_h):
            mine = found.entry == b % max(1, sizes.batch)
            if own_heads:
                mine &= (found.head >= h * group) & (found.head < (h + 1) * group)
            own = Blocks(*(x[mine] for x in found[:-1]), found.words)
            chunks = _chunks(sizes, own, rows, *((h * group, group) if own_heads else (0, 1)))
            yield slice(b, b + step_b), slice(h, h + step_h), chunks


def _chunks(sizes: Sizes, blocks: Blocks, most: int, first_head: int, heads: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Of the blocks of one entry and of so many heads, in at most so many rows. Keys of a block that any of these keeps are gathered for
    all."""
    lengths = blocks.row.unique_consecutive(return_counts=True)[1].tolist()
    for row, column, head, tile in zip(*(x.split(lengths) for x in (blocks.row, blocks.column, blocks.head, blocks.tile)), strict=True):
        columns, place = column.unique(return_inverse=True)
        keep = torch.zeros(heads, len(columns), BLOCK, BLOCK, dtype=torch.bool, device=columns.device)
        keep[head - first_head, place] = dense_of(sizes, Blocks(head, head, row, column, tile, blocks.words))
        keep = keep.transpose(1, 2).flatten(2)
        keys = (columns[:, None] * BLOCK + torch.arange(BLOCK, device=columns.device)).flatten()
        exists = keys < sizes.seqlen_k
        keys, keep, first = keys[exists], keep[None, None, :, :, exists], int(row[0]) * BLOCK
        end = min(first + BLOCK, sizes.seqlen_q)
        for i in range(first, end, most):
            yield slice(i, min(i + most, end)), keys, keep[..., i - first : min(i + most, end) - first, :]


def _blocks(problem: Problem, q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice, list[tuple[slice, slice]]]]:
    """Cut a call into blocks of (batch entries, key/value heads), each with its chunks (query rows, keys that they see).

    Rows without keys are in no chunk. q [batch, seqlen_q, heads_kv, group, head_dim], k [batch, seqlen_k, heads_kv, head_dim].

    A chunk gets at least MIN_ROWS rows, then as many heads and batch entries as CHUNK_SCORES allows, then more rows if there is room: one
    chunk when everything fits, and a loop over heads only where each turn is long.
    """
    batch, seqlen_q, heads_kv, group = q.shape[:4]
    seqlen_k, (diagonal, _) = k.shape[1], _diagonals(problem, q, k)
    left, right = problem.window_left, problem.window_right
    first = 0 if right is None else max(0, -diagonal - right)
    stop = seqlen_q if left is None else min(seqlen_q, seqlen_k - diagonal + left)
    if first >= stop or 0 in (batch, heads_kv, seqlen_k):
        return

    windowed = left is not None and right is not None

    def scores(rows: int) -> int:
        """of one pair of (batch entry, key/value head)"""
        return group * rows * (min(seqlen_k, rows + left + right) if windowed else seqlen_k)

    rows = min(stop - first, -(-MIN_ROWS // group))
    pairs = max(1, CHUNK_SCORES // scores(rows))
    step_b, step_h = max(1, min(batch, pairs // heads_kv)), min(heads_kv, pairs)
    widest = max(rows, (left + right) // 2) if windowed else stop - first  # the chunk computes rows + window keys to keep window keys a row
    rows = min(stop - first, widest, max(rows, rows * CHUNK_SCORES // (step_b * step_h * scores(rows))))
    chunks = []
    for i in range(first, stop, rows):
        end = min(i + rows, stop)
        start_key = 0 if left is None else max(0, i + diagonal - left)
        end_key = seqlen_k if right is None else min(seqlen_k, end + diagonal + right)
        chunks.append((slice(i, end), slice(start_key, end_key)))
    for b in range(0, batch, step_b):
        for h in range(0, heads_kv, step_h):
            yield slice(b, b + step_b), slice(h, h + step_h), chunks


def _diagonals(problem: Problem, q: Tensor, k: Tensor) -> tuple[int, int]:
    """Key on the diagonal of query row 0, which in a packed call is each sequence's own: of the mask, and of ALiBi."""
    aligned = k.shape[1] - q.shape[1]
    return 0 if problem.top_left else aligned, aligned


def _fold(x: Tensor) -> Tensor:
    """[b, m, h, g, d] -> float32 [b h, g m, d]"""
    return rearrange(x, "b m h g d -> (b h) (g m) d").float()


def _unfold(x: Tensor, *, into: Tensor) -> None:
    """The inverse of `_fold`, with the rounding to the dtype of the destination."""
    b, m, h, g, _ = into.shape
    into.copy_(rearrange(x, "(b h) (g m) d -> b m h g d", b=b, m=m, h=h, g=g))


def _keys_first(x: Tensor) -> Tensor:
    """[b, n, h, d] -> contiguous float32 [b h, n, d]"""
    return rearrange(x, "b n h d -> (b h) n d").contiguous().float()


def _same_used(k: Tensor, lengths: Tensor) -> list[tuple[list[int], int]]:
    """(batch entries, how many keys they have), of each number of keys."""
    found: dict[int, list[int]] = {}
    values = lengths.tolist()
    check_used(values, k.shape[1])  # on a GPU nobody else has looked
    for entry, used in enumerate(values):
        found.setdefault(used, []).append(entry)
    return [(at, used) for used, at in found.items()]


def _at(x: Tensor | None, at: list[int], used: int | None = None) -> Tensor | None:
    """Of these batch entries; used: the first keys alone."""
    return None if x is None else x[at] if used is None else x[at, :used]


def _of_used(bias: Tensor | None, at: list[int], used: int) -> Tensor | None:
    if bias is None:
        return None
    return (bias if bias.shape[0] == 1 else bias[at])[..., : used if bias.shape[3] > 1 else None]


def _put(grads, parts, at: list[int], used: int) -> None:
    """Gradients of q, k, v and sinks of these batch entries in their place."""
    for grad, part, cut in zip(grads, parts, (None, used, used, None), strict=True):
        if grad is not None:
            grad[at if cut is None else (at, slice(cut))] = part


def _same_lengths(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor
) -> Iterator[tuple[list[int], slice | Tensor, slice | Tensor]]:
    """Packed sequences of equal lengths, together: (which, where their rows are in q, where in k).

    Each such set is a dense batch, so eighty thousand short sequences are a few hundred turns of the loop. Sequences that lie one behind
    the other are a slice, others are gathered.
    """
    cu_q, cu_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    check_lengths("q", cu_q, len(q))  # on a GPU nobody else has looked
    check_lengths("k", cu_k, len(k))
    starts: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for n, ((q0, q1), (k0, k1)) in enumerate(zip(pairwise(cu_q), pairwise(cu_k), strict=True)):
        starts.setdefault((q1 - q0, k1 - k0), []).append((n, q0, k0))
    for lengths, found in starts.items():
        sequences, *firsts = map(list, zip(*found, strict=True))
        at_q, at_k = (_places(first, n, q.device) for first, n in zip(firsts, lengths, strict=True))
        yield sequences, at_q, at_k


def _places(starts: list[int], length: int, device: torch.device) -> slice | Tensor:
    if all(b - a == length for a, b in pairwise(starts)):
        return slice(starts[0], starts[-1] + length)
    return (torch.tensor(starts, device=device)[:, None] + torch.arange(length, device=device)).flatten()


def _unpack(x: Tensor, at: slice | Tensor, n: int) -> Tensor:
    return x[at].unflatten(0, (n, -1))


def _without_autocast(device: torch.device) -> contextlib.AbstractContextManager:
    """Autocast would turn the float32 products below it back into half precision."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()
