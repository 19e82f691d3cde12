"""Launches what only natural scores need, for the backward of any kernel: the shifts of rows, and the gradient of a bias.

The gradient's memory is its own, and where few tiles would leave the GPU idle (a bias of [heads, 1, 1], or of 128 x 128) parts of their
sums in float32: at most PROGRAMS tiles, 16 MiB of 64 x 64. Nothing grows with what shares a bias.

The surprising fact: a gradient's shape is not told by its strides, those of [1, h, m, n] and [b, h, m, n] being the same, so what is shared
is in the name of a launch that is remembered.
"""

from functools import lru_cache, partial

import torch

from ..dispatch.table import portable_rows
from ..kernels.portable.bias import attn_bwd_dbias, attn_bwd_shifts
from ..kernels.structs import Seqlens
from ..problem import Problem
from .cache import run
from .common import as_bytes, extras_of, mods_of, options_of, scale_log2, spec_of, tile_of, totals, view_of, walk_order

PROGRAMS = 1024

_rows_of = lru_cache(maxsize=1024)(portable_rows)


def shifts_launch(problem: Problem, config, q, k, lse, shifts, cu_seqlens_q, cu_seqlens_k, slopes, sinks, bias, blocks=None, *aux):
    """(kernel, grid, arguments, options) of the pass that says what to subtract from the scores of a row."""
    lanes, slots, wave = walk_order(problem, config.block_m)
    views = view_of(q), view_of(k)
    window = problem.window_left or 0, problem.window_right or 0
    sizes = (*totals(problem), problem.batch, problem.heads_q, problem.heads_kv, wave, *window)
    spec = spec_of(problem, True, forward=True)
    extras, tile = extras_of(problem, slopes, sinks, bias, aux=aux, blocks=blocks), tile_of(problem, config, *views)
    seqlens = Seqlens(cu_seqlens_q, cu_seqlens_k)
    args = (*views, lse, shifts, seqlens, extras, *sizes, scale_log2(problem), spec, tile, *mods_of(problem, gradient=False))
    return attn_bwd_shifts, (slots * lanes,), args, options_of(config)


def shared_by(bias) -> tuple[bool, bool, bool, bool]:
    """Whether batch entries, heads, rows and keys share a gradient of this shape."""
    return tuple(size == 1 for size in bias.shape)


def splits_of(problem: Problem, config, shared: tuple[bool, ...]) -> tuple[int, int]:
    """(tiles of the gradient, parts that the sum of each is made in)."""
    rows = (problem.batch, problem.heads_q, -(-problem.seqlen_q // config.block_m), -(-problem.seqlen_k // config.block_n))
    tiles = steps = 1
    for count, one in zip(rows, shared, strict=True):
        tiles, steps = (tiles, steps * count) if one else (tiles * count, steps)
    return tiles, min(steps, max(1, PROGRAMS // max(1, tiles)))


def dbias_launch(
    problem: Problem, config, splits: int, shared, q, k, v, dout, shifts, delta, dbias, slopes, bias, rng=None, blocks=None, *aux
):  # fmt: skip
    """dbias: contiguous, in the dtype of the bias, or with `splits` > 1 so many in float32, one after the other."""
    views = view_of(q), view_of(k), view_of(v), view_of(dout)
    window = problem.window_left or 0, problem.window_right or 0
    ragged = problem.seqlen_q % config.block_m != 0 or problem.seqlen_k % config.block_n != 0
    sizes = (*totals(problem), problem.batch, problem.heads_q, problem.heads_kv, *window)
    args = (
        *views, shifts, delta, dbias, extras_of(problem, slopes, None, bias, rng, aux, blocks), *sizes, scale_log2(problem), splits,
        spec_of(problem, ragged), shared, tile_of(problem, config, *views), *mods_of(problem),
    )  # fmt: skip
    return attn_bwd_dbias, (splits_of(problem, config, shared)[0] * splits,), args, options_of(config)


def shifts_of(problem: Problem, q, k, lse, slopes, sinks, bias, cu_seqlens_q=None, cu_seqlens_k=None, blocks=None, aux=()):
    """See `attn_bwd_shifts`. lse: contiguous [batch, heads_q, rows], or packed [heads_q, rows]."""
    *heads, rows = lse.shape
    shifts = torch.empty(*heads, 2, rows, dtype=torch.float32, device=lse.device)
    tensors = (q, k, lse, shifts, cu_seqlens_q, cu_seqlens_k, slopes, sinks, as_bytes(bias), blocks, *aux)
    run("shifts", problem, tensors, partial(shifts_launch, problem, _rows_of(problem)["forward"], *tensors))
    return shifts


def bias_gradient(problem: Problem, q, k, v, dout, shifts, delta, slopes, bias, rng=None, blocks=None, aux=()):
    """The gradient of a bias, with its shape and dtype, contiguous."""
    if 0 in (*bias.shape, *q.shape, *k.shape):
        return torch.zeros(bias.shape, dtype=bias.dtype, device=bias.device)
    config, shared = _rows_of(problem)["dbias"], shared_by(bias)
    _, splits = splits_of(problem, config, shared)
    dtype = bias.dtype if splits == 1 else torch.float32
    parts = torch.empty((splits, *bias.shape), dtype=dtype, device=bias.device)
    tensors = (q, k, v, dout, shifts, delta, parts, slopes, bias, rng, blocks, *aux)
    prepare = partial(dbias_launch, problem, config, splits, shared, *tensors)
    run(f"dbias {splits} {shared}", problem, tensors, prepare)
    return parts[0] if splits == 1 else parts.sum(0).to(bias.dtype)
