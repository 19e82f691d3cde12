"""Launches the portable kernels: outputs allocated, views and grids described, one call each.

Both functions have the launcher's signature that every kernel shares. Outputs are contiguous in [batch, rows, heads, dim] whatever
the strides of the inputs. The surprising fact: the grid of a packed batch has a few slots too many instead of a device
synchronisation (see kernels/common/index.py).
"""

from dataclasses import replace
from functools import lru_cache, partial

import torch

from ..dispatch.table import portable_rows
from ..kernels.portable.backward import attn_bwd_delta, attn_bwd_dkdv, attn_bwd_dq
from ..kernels.portable.forward import attn_fwd
from ..kernels.portable.tangent import attn_jvp
from ..kernels.structs import Seqlens
from ..problem import Problem
from .bias import bias_gradient, shifts_of
from .cache import run
from .common import (
    as_bytes,
    contiguous_rows,
    extras_of,
    may_have_rows_without_keys,
    mods_of,
    on_device,
    options_of,
    ragged,
    results,
    rows_without_keys,
    scale_log2,
    sinks_gradient,
    spec_of,
    tangent_scale,
    tile_of,
    totals,
    view_of,
    walk_order,
    without_rows,
)

_rows_of = lru_cache(maxsize=1024)(portable_rows)


def _sizes(problem: Problem, block: int, over_keys: bool) -> tuple[tuple[int], tuple[int, ...]]:
    """The grid, with what structs.SIZES names."""
    lanes, slots, wave = walk_order(problem, block, over_keys)
    window = problem.window_left or 0, problem.window_right or 0
    return (slots * lanes,), (*totals(problem), problem.batch, problem.heads_q, problem.heads_kv, wave, *window)


def forward_launch(
    problem: Problem, config, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, slopes=None, sinks=None, bias=None, rng=None, blocks=None, *aux
):  # fmt: skip
    """(kernel, grid, arguments, options) of the forward: what `forward` launches and what is compiled ahead of time in tests."""
    grid, sizes = _sizes(problem, config.block_m, over_keys=False)
    views = view_of(q), view_of(k), view_of(v), view_of(out)
    spec, tile = spec_of(problem, ragged(problem, problem.seqlen_k, config.block_n), forward=True), tile_of(problem, config, *views)
    extras, mods = extras_of(problem, slopes, sinks, bias, rng, aux, blocks), mods_of(problem, gradient=False)
    args = (*views, lse, Seqlens(cu_seqlens_q, cu_seqlens_k), extras, *sizes, scale_log2(problem), spec, tile, *mods)
    return attn_fwd, grid, args, options_of(config)


def tangent_launch(
    problem: Problem, config, q, k, v, tq, tk, tv, out, tout, lse, tlse, cu_seqlens_q, cu_seqlens_k, slopes=None, sinks=None, tsinks=None
):  # fmt: skip
    """tq, tk, tv and tsinks may be None."""
    grid, sizes = _sizes(problem, config.block_m, over_keys=False)
    views = [None if tensor is None else view_of(tensor) for tensor in (q, k, v, tq, tk, tv, out, tout)]
    spec = spec_of(problem, problem.seqlen_k % config.block_n != 0, forward=True)._replace(scores_move=tq is not None or tk is not None)
    tile = tile_of(problem, config, *[view for view in views if view is not None])
    args = (
        *views, lse, tlse, Seqlens(cu_seqlens_q, cu_seqlens_k), extras_of(problem, slopes, sinks), tsinks, *sizes,
        tangent_scale(problem), scale_log2(problem), spec, tile,
    )  # fmt: skip
    return attn_jvp, grid, args, options_of(config)


def delta_launch(problem: Problem, config, out, dout, dlse, delta):
    total, batch = totals(problem)[0], 1 if problem.varlen else problem.batch
    views = view_of(out), view_of(dout)
    args = (*views, dlse, delta, total, batch, problem.heads_q, tile_of(problem, config, *views))
    return attn_bwd_delta, (-(-total // config.block_m) * batch * problem.heads_q,), args, options_of(config)


def dkdv_launch(
    problem: Problem, config, q, k, v, dout, lse, delta, dk, dv, cu_seqlens_q, cu_seqlens_k, slopes=None, bias=None, rng=None,
    blocks=None, *aux
):  # fmt: skip
    """dk or dv may be None. v and delta are for dk alone. lse: with a bias the shifts of `shifts_of`."""
    if dk is None:
        v = delta = None
    grid, sizes = _sizes(problem, config.block_n, over_keys=True)
    views, gradients = ([None if tensor is None else view_of(tensor) for tensor in some] for some in ((q, k, v, dout), (dk, dv)))
    spec = spec_of(problem, ragged(problem, problem.seqlen_q, config.block_m), need_dk=dk is not None, need_dv=dv is not None)
    tile = tile_of(problem, config, *[view for view in (*views, *gradients) if view is not None])
    args = (
        *views, lse, delta, *gradients, Seqlens(cu_seqlens_q, cu_seqlens_k), extras_of(problem, slopes, None, bias, rng, aux, blocks),
        *sizes, problem.softmax_scale, scale_log2(problem), spec, tile, *mods_of(problem),
    )  # fmt: skip
    return attn_bwd_dkdv, grid, args, options_of(config)


def dq_launch(
    problem: Problem, config, q, k, v, dout, lse, delta, dq, cu_seqlens_q, cu_seqlens_k, slopes=None, bias=None, rng=None, blocks=None,
    *aux,
):  # fmt: skip
    grid, sizes = _sizes(problem, config.block_m, over_keys=False)
    views = view_of(q), view_of(k), view_of(v), view_of(dout)
    dq_view = view_of(dq)
    spec, tile = spec_of(problem, ragged(problem, problem.seqlen_k, config.block_n)), tile_of(problem, config, *views, dq_view)
    args = (
        *views, lse, delta, dq_view, Seqlens(cu_seqlens_q, cu_seqlens_k), extras_of(problem, slopes, None, bias, rng, aux, blocks), *sizes,
        problem.softmax_scale, scale_log2(problem), spec, tile, *mods_of(problem),
    )  # fmt: skip
    return attn_bwd_dq, grid, args, options_of(config)


def forward(
    problem: Problem, q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, slopes=None, sinks=None, bias=None, rng=None, aux=(), blocks=None,
    token=None,
):  # fmt: skip
    """(out, lse) of attention. slopes, sinks: float32 and contiguous. bias: of four dimensions, each of its size or 1. rng: int64 (seed,
    offset) of dropout, contiguous. aux: what mods read. blocks: of a block mask, see block_lists.py. token: for a caller that has made this
    call before, with contiguous rows, what tells it from others."""
    if token is None:
        q, k, v = contiguous_rows(q), contiguous_rows(k), contiguous_rows(v)
    out, lse = results(problem, q)
    with on_device(q):
        tensors = (q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, slopes, sinks, as_bytes(bias), rng, blocks, *map(as_bytes, aux))
        run("forward", problem, tensors, lambda: forward_launch(problem, _rows_of(problem)["forward"], *tensors), token)
    return out, lse


def tangent(problem: Problem, q, k, v, tq, tk, tv, tsinks, cu_seqlens_q=None, cu_seqlens_k=None, slopes=None, sinks=None):
    """(out, lse, tout, tlse): the forward and its derivative along tangents of q, k, v and sinks, of which some may be None. tsinks: of
    each batch entry, float32 [batch, heads_q], or [1, heads_q] of a packed call."""
    qkv, tangents = ([None if x is None else contiguous_rows(x) for x in some] for some in ((q, k, v), (tq, tk, tv)))
    tsinks = None if tsinks is None else tsinks.contiguous()
    (out, lse), (tout, tlse) = results(problem, qkv[0]), results(problem, qkv[0])
    with on_device(q):
        tensors = (*qkv, *tangents, out, tout, lse, tlse, cu_seqlens_q, cu_seqlens_k, slopes, sinks, tsinks)
        run("tangent", problem, tensors, lambda: tangent_launch(problem, _rows_of(problem)["tangent"], *tensors))
    return out, lse, tout, tlse


def backward(
    problem: Problem, needs, dout, dlse, q, k, v, out, lse, cu_seqlens_q=None, cu_seqlens_k=None, slopes=None, sinks=None, bias=None,
    rng=None, aux=(), blocks=None,
):  # fmt: skip
    """(dq, dk, dv, dsinks, dbias), None where `needs` says so; what only an unneeded gradient uses (v, out for dv alone) may be None.

    dsinks: float32, of each batch entry, see `sinks_gradient`.
    """
    need_dq, need_dk, need_dv, need_dsinks, need_dbias = needs
    q, k, lse = contiguous_rows(q), contiguous_rows(k), lse.contiguous()
    v = v if v is None else contiguous_rows(v)
    if dout is None:  # one row of zeros serves all
        dout = torch.zeros(problem.head_dim_v, dtype=q.dtype, device=q.device).expand(*q.shape[:-1], -1)
    dout = contiguous_rows(dout)
    empty = None
    if may_have_rows_without_keys(problem, cu_seqlens_q, cu_seqlens_k):
        seen = _without_sinks(problem, q, k, v, cu_seqlens_q, cu_seqlens_k, slopes, bias, aux, blocks)
        empty = rows_without_keys(problem, lse, cu_seqlens_q, cu_seqlens_k, bias) if seen is None else seen == float("-inf")
        dout, masked_dlse = without_rows(empty, dout, dlse)
        dlse = dlse if need_dsinks else masked_dlse  # lse is the sink there, so the sink is owed what comes
    rows, aux = _rows_of(problem), [*map(as_bytes, aux)]
    delta = dq = dk = dv = dsinks = dbias = None
    with on_device(q):
        if need_dq or need_dk or need_dsinks or need_dbias:
            delta = torch.empty(lse.shape, dtype=torch.float32, device=q.device)
            dlse = None if dlse is None else dlse.contiguous()
            tensors = (contiguous_rows(out), dout, dlse, delta)
            run("delta", problem, tensors, partial(delta_launch, problem, rows["delta"], *tensors))
        if need_dsinks:
            dsinks = sinks_gradient(sinks, lse, delta)
            if empty is not None and dlse is not None:
                delta.masked_fill_(empty, 0.0)
        if problem.natural and lse.numel():
            lse = shifts_of(problem, q, k, lse, slopes, sinks, bias, cu_seqlens_q, cu_seqlens_k, blocks, aux)
            bias = as_bytes(bias)
        allocate = torch.zeros if problem.used_k else torch.empty  # keys that aren't used are in no tile
        if need_dk:
            dk = allocate(k.shape, dtype=k.dtype, device=k.device)
        if need_dv:
            dv = allocate((*k.shape[:-1], problem.head_dim_v), dtype=k.dtype, device=k.device)
        for name, outputs in {"dkdv": (dk, dv), "dk": (dk, None), "dv": (None, dv)}.items():
            if name in rows and outputs != (None, None):
                for_dk = (v, delta) if outputs[0] is not None else (None, None)
                tensors = (q, k, for_dk[0], dout, lse, for_dk[1], *outputs, cu_seqlens_q, cu_seqlens_k, slopes, bias, rng, blocks, *aux)
                run(name, problem, tensors, partial(dkdv_launch, problem, rows[name], *tensors))
        if need_dq:
            dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            tensors = (q, k, v, dout, lse, delta, dq, cu_seqlens_q, cu_seqlens_k, slopes, bias, rng, blocks, *aux)
            run("dq", problem, tensors, partial(dq_launch, problem, rows["dq"], *tensors))
        if need_dbias:
            dbias = bias_gradient(problem, q, k, v, dout, lse, delta, slopes, bias, rng, blocks, aux)
    return dq, dk, dv, dsinks, dbias


def _without_sinks(problem: Problem, q, k, v, cu_seqlens_q, cu_seqlens_k, slopes, bias, aux, blocks):
    """lse as it is without sinks, which give a row without keys an lse, where only a kernel can tell, without waiting for it, what a mod or
    a block mask left; None elsewhere."""
    if not (problem.sinks and (problem.score_mod or problem.mask_mod or problem.blocks)):
        return None
    if v is None:
        v = k.new_zeros(problem.head_dim_v).expand(*k.shape[:-1], -1)
    bare = replace(problem, sinks=False, dropout=0.0)
    return forward(bare, q, k, v, cu_seqlens_q, cu_seqlens_k, slopes, None, bias, aux=aux, blocks=blocks)[1]
