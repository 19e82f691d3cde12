"""Launches the Hopper backward: workspace, tensor maps, a pass before and one after.

The workspace is float32: for each block of queries the sums of dQ and two numbers a row, lse and delta. Rows are padded to whole blocks,
of packed sequences each.

The surprising fact: what arrives as dout is not part of a Problem, so the choice of this kernel can't depend on it. Where a tensor map
can't address it (expanded by a sum, say), it is copied here.
"""

from functools import lru_cache, partial

import torch

from ..dispatch.configs.hopper import BRANCH, LARGE_GROUP, ONCE, HopperBackwardConfig
from ..dispatch.table import hopper_backward_row, hopper_padded
from ..kernels.hopper.backward import attn_bwd_hopper
from ..kernels.hopper.layouts import BackwardTile
from ..kernels.hopper.passes import attn_bwd_hopper_after, attn_bwd_hopper_before
from ..kernels.structs import Seqlens, Tile
from ..problem import Problem
from .cache import run
from .common import (
    LOG2_E,
    contiguous_rows,
    extras_of,
    lanes_and_slots,
    may_have_rows_without_keys,
    on_device,
    rows_without_keys,
    scale_log2,
    spec_of,
    totals,
    view_of,
    without_rows,
)
from .maps import described, flat

WAVE_BYTES = 40 << 20  # of Q, dO and the sums of dQ of the heads of a wave
REGISTERS, LOAD_REGISTERS, FIRST_REGISTERS = 240, 24, 168  # of a thread that computes, of one that doesn't, and of any at the start

_rows_of = lru_cache(maxsize=1024)(hopper_backward_row)


def _mask(problem: Problem, config: HopperBackwardConfig, delayed: bool) -> int:
    """Of no use where nothing is masked. A first step of its own is one of a delayed walk."""
    if not problem.varlen and (problem.window_left, problem.window_right) == (None, None) and problem.seqlen_k % config.block_n == 0:
        return 0
    return BRANCH if config.mask == ONCE and not delayed else config.mask


def _downwards(problem: Problem, config: HopperBackwardConfig) -> bool:
    return not problem.deterministic and problem.group >= LARGE_GROUP and problem.seqlen_q <= config.down * problem.group


@lru_cache(maxsize=1024)
def _tile(problem: Problem, config: HopperBackwardConfig, need_dq: bool, everything: bool) -> BackwardTile:
    """everything: all three gradients are wanted."""
    d, dv = hopper_padded(problem, "backward")
    delayed = config.delayed and need_dq
    return BackwardTile(
        m=config.block_m,
        n=config.block_n,
        d=d,
        dv=dv,
        head_dim=problem.head_dim if problem.varlen else 0,
        head_dim_v=problem.head_dim_v if problem.varlen else 0,
        stages=config.num_stages,
        registers=REGISTERS,
        load_registers=LOAD_REGISTERS,
        delayed=delayed,
        init=config.init and everything,
        fours=config.fours,
        writers=config.writers or problem.deterministic,
        mask=_mask(problem, config, delayed),
        ordered=problem.deterministic,
        wide=config.wide,
        own=config.own,
        do_stages=config.do_stages,
        down=_downwards(problem, config),
        ahead=config.ahead and everything,
    )


@lru_cache(maxsize=1024)
def _pass_tile(problem: Problem, config: HopperBackwardConfig) -> Tile:
    d, dv = hopper_padded(problem, "backward")
    return Tile(config.block_m, config.block_n, problem.head_dim, problem.head_dim_v, d, dv, 16 // problem.itemsize)


def blocks_of(problem: Problem, block: int) -> tuple[int, int]:
    """(blocks of queries of a head, heads of all batch entries): how the workspace is laid out."""
    total = totals(problem)[0]
    if problem.varlen:
        return total // block + problem.batch + 1, problem.heads_q
    return -(-total // block), problem.batch * problem.heads_q


def _order(problem: Problem, config: HopperBackwardConfig) -> tuple[int, int, int]:
    """(lanes, tiles of keys in each, lanes that advance together). A program walks the query heads of its keys one after the other, and so
    do its neighbours: what they share at a time is one head's. A wave of all that is read by a group left the last programs alone (64 heads
    in groups of 8, 8192 tokens, causal: 0.81 of the speed without groups)."""
    lanes, slots = lanes_and_slots(problem, config.block_n, over_keys=True)
    d, dv = hopper_padded(problem, "backward")
    bytes_of_lane = max(1, problem.seqlen_q * (6 * d + 2 * dv))
    most = min(max(1, WAVE_BYTES // bytes_of_lane), lanes)
    # the tiles of one head wait for each other in a deterministic call, so there several heads are better
    most = most if problem.deterministic else min(most, config.heads)
    # the last wave should be full: what it lacks is made by few multiprocessors
    return lanes, slots, max(range((most + 1) // 2, most + 1), key=lambda wave: (-(-lanes % wave), wave))


def starts_from_delta(config: HopperBackwardConfig, gradients) -> bool:
    """Whether dP starts from -delta: with fewer than all three gradients registers are not short, and it makes products wait."""
    return config.init and all(gradient is not None for gradient in gradients)


def before_launch(problem: Problem, config: HopperBackwardConfig, negative: bool, lse, out, dout, dlse, numbers, sums, turns, cu_seqlens_q):
    """negative: see starts_from_delta. out may be None, and then dout is; dlse, sums and turns too."""
    blocks, lanes = blocks_of(problem, config.block_m)
    views = [None if x is None else view_of(x) for x in (out, dout)]
    args = (
        lse, *views, dlse, numbers, sums, turns, cu_seqlens_q, totals(problem)[0], problem.batch, problem.heads_q, blocks,
        _pass_tile(problem, config), problem.varlen, negative, config.fours,
    )  # fmt: skip
    return attn_bwd_hopper_before, (blocks * lanes,), args, {"num_warps": 4, "enable_fp_fusion": True}


def after_launch(problem: Problem, config: HopperBackwardConfig, sums, dq, cu_seqlens_q):
    blocks, lanes = blocks_of(problem, config.block_m)
    args = (
        sums, view_of(dq), cu_seqlens_q, totals(problem)[0], problem.batch, problem.heads_q, blocks, problem.softmax_scale,
        _pass_tile(problem, config), problem.varlen,
    )  # fmt: skip
    return attn_bwd_hopper_after, (blocks * lanes,), args, {"num_warps": 4, "enable_fp_fusion": True}


def backward_launch(
    problem: Problem, config: HopperBackwardConfig, q, k, v, dout, numbers, sums, dk, dv, turns, cu_seqlens_q, cu_seqlens_k, slopes=None,
    rng=None,
):
    """v, sums (of dQ), dk, dv, turns, slopes and rng may be None."""
    tile = _tile(problem, config, sums is not None, all(x is not None for x in (sums, dk, dv)))
    spec = spec_of(problem, problem.seqlen_k % config.block_n != 0, need_dk=dk is not None, need_dv=dv is not None)
    spec = spec._replace(need_dq=sums is not None)
    lanes, slots, wave = _order(problem, config)
    d, dv_width = (64, 64) if tile.wide else (tile.d, tile.dv)
    outputs = (dk, dv) if problem.varlen else (described(dk, 64, d), described(dv, 64, dv_width))
    args = (
        described(q, tile.m, d), described(k, 64, d), described(v, 64, dv_width), described(dout, tile.m, dv_width),
        flat(numbers, 1, 2 * tile.m), flat(sums, 16, 256), *outputs, turns, Seqlens(cu_seqlens_q, cu_seqlens_k),
        *totals(problem), problem.batch, problem.heads_kv, problem.group, lanes, wave, slots * wave, blocks_of(problem, tile.m)[0],
        problem.window_left or 0, problem.window_right or 0, problem.softmax_scale, scale_log2(problem),
        extras_of(problem, slopes, rng=rng), spec, tile,
    )  # fmt: skip
    options = {"num_warps": 4, "maxnreg": FIRST_REGISTERS, "enable_fp_fusion": True}
    return attn_bwd_hopper, (slots * lanes,), args, options


def _addressable(tensor):
    """As a tensor map can address it: copied if it must be."""
    tensor = contiguous_rows(tensor)
    steps = [stride for stride, size in zip(tensor.stride()[:-1], tensor.shape, strict=False) if size > 1]
    if tensor.data_ptr() % 16 or any(step <= 0 or step * tensor.element_size() % 16 for step in steps):
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def _sinks_gradient(problem: Problem, config: HopperBackwardConfig, negative: bool, numbers, sinks):
    """Of each batch entry, from lse and delta as the pass before has stored them. Rows that don't exist have a delta of 0. Clamped as in
    common.sinks_gradient."""
    blocks, _ = blocks_of(problem, config.block_m)
    lse, delta = numbers.view(-1, problem.heads_q, blocks, 2, config.block_m).unbind(3)
    share = torch.where(delta == 0, 0.0, torch.exp2((sinks[:, None, None] * LOG2_E - lse).clamp(max=0.0)) * delta).sum((2, 3))
    return share if negative else share.neg_()


def _launch_all(problem: Problem, config: HopperBackwardConfig, needs, dout, dlse, q, k, v, out, lse, cu_q, cu_k, slopes, sinks, rng):
    """(dq, dk, dv, dsinks) of tensors as tensor maps can address them."""
    need_dq, need_dk, need_dv, need_dsinks, _ = needs
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device) if need_dq else None
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device) if need_dk else None
    dv = torch.empty((*k.shape[:-1], problem.head_dim_v), dtype=k.dtype, device=k.device) if need_dv else None
    blocks, lanes = blocks_of(problem, config.block_m)
    device, d = q.device, hopper_padded(problem, "backward")[0]
    negative = starts_from_delta(config, (dq, dk, dv))
    # a packed batch has numbers of blocks that nobody uses
    allocate = torch.zeros if need_dsinks and problem.varlen else torch.empty
    numbers = allocate(blocks * lanes, 2 * config.block_m, dtype=torch.float32, device=device)
    sums = turns = dsinks = None
    if dq is not None:
        sums = torch.empty(blocks * lanes * config.block_m, d, dtype=torch.float32, device=device)
        if problem.deterministic:
            turns = torch.empty(blocks * lanes, 2, dtype=torch.int32, device=device)
    if dq is None and dk is None:
        v = None
        if not need_dsinks:
            out = dlse = None
    tensors = (lse, out, None if out is None else dout, dlse, numbers, sums, turns, cu_q)
    run(f"hopper before {negative}", problem, tensors, partial(before_launch, problem, config, negative, *tensors))
    if need_dsinks:
        dsinks = _sinks_gradient(problem, config, negative, numbers, sinks)
    if need_dq or need_dk or need_dv:
        tensors = (q, k, v, dout, numbers, sums, dk, dv, turns, cu_q, cu_k, slopes, rng)
        run("hopper backward", problem, tensors, partial(backward_launch, problem, config, *tensors))
    if dq is not None:
        tensors = (sums, dq, cu_q)
        run("hopper after", problem, tensors, partial(after_launch, problem, config, *tensors))
    return dq, dk, dv, dsinks


def backward(
    problem: Problem, needs, dout, dlse, q, k, v, out, lse, cu_seqlens_q=None, cu_seqlens_k=None, slopes=None, sinks=None, bias=None,
    rng=None, aux=(),
):
    """(dq, dk, dv, dsinks, dbias): see portable.backward. There is no bias, and dbias is None."""
    q, k, lse = contiguous_rows(q), contiguous_rows(k), lse.contiguous()
    v = v if v is None else contiguous_rows(v)
    if dout is None:
        dout = torch.zeros(1, dtype=q.dtype, device=q.device).expand(*q.shape[:-1], problem.head_dim_v)
    owed = None  # to sinks, by rows without keys, whose lse they are
    if may_have_rows_without_keys(problem, cu_seqlens_q, cu_seqlens_k):
        empty = rows_without_keys(problem, lse, cu_seqlens_q, cu_seqlens_k)
        if needs[3] and dlse is not None:
            owed = torch.where(empty & (lse > float("-inf")), dlse, 0.0).sum(-1).view(-1, problem.heads_q)
        dout, dlse = without_rows(empty, dout, dlse)
    dout = _addressable(dout)
    dlse = None if dlse is None else dlse.contiguous()
    with on_device(q):
        if q.numel() == 0 or k.numel() == 0:  # a tensor map of nothing can't be made
            like = (q, k, k.new_empty(*k.shape[:-1], problem.head_dim_v))
            found = [
                torch.zeros_like(x, memory_format=torch.contiguous_format) if need else None for x, need in zip(like, needs, strict=False)
            ]
            dsinks = torch.zeros(1 if problem.varlen else problem.batch, problem.heads_q, device=q.device) if needs[3] else None
        else:
            out = None if out is None else _addressable(out)
            *found, dsinks = _launch_all(
                problem, _rows_of(problem), needs, dout, dlse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, slopes, sinks, rng
            )
    return *found, dsinks if owed is None or dsinks is None else dsinks + owed, None
