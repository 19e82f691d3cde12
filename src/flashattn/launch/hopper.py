"""Launches the Hopper kernels: tensor maps, the number of programs, the counter that they draw tiles from.

The surprising fact: a packed tensor is a dense one of one batch entry here. Its sequences are told apart by rows, which a tensor map can't
do, so what arrives of the next sequence is masked and what would be written there is written without a tensor map.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from threading import Lock

import torch

from ..dispatch.configs.hopper import HopperConfig
from ..dispatch.table import hopper_padded, hopper_rows
from ..kernels.hopper.forward import attn_fwd_hopper
from ..kernels.hopper.layouts import Tile
from ..kernels.structs import Seqlens
from ..problem import Problem
from .cache import run, stream_of
from .common import as_bytes, bias_strides, contiguous_rows, extras_of, on_device, results, scale_log2, spec_of, totals, walk_order
from .hopper_backward import backward
from .maps import described

__all__ = ["backward", "forward", "forward_launch"]

# {consumers: registers of theirs, of the loading warp, of any thread at the start}. At head dim 256 warpgroups need what there is, as does
# the loading warp where it looks for packed sequences.
REGISTERS, LARGE_REGISTERS = {2: (232, 40, 168), 3: (160, 32, 128)}, {2: (240, 24, 168), 3: (160, 32, 128)}
SHARED_MEMORY = 227 * 1024
BARRIERS = 512  # bytes, more than enough
PER_THREAD = 2  # the handle by which every thread means a stream of its own
STREAMS = 1024  # of a device that have a counter; more get a fresh one at every launch

_rows_of = lru_cache(maxsize=1024)(hopper_rows)


def _part(d: int, varlen: bool) -> int:
    """Q and K come in parts of equal width, a power of two. Halves of 256 are for the compiler: dense calls spill without, packed with."""
    if d & (d - 1):
        return d // 3
    return d if varlen else min(d, 128)


def _mask_is_first(problem: Problem) -> bool:
    """Whether only the first block that a warpgroup visits needs a mask: see unseen_blocks."""
    if problem.window_left is not None:
        return False
    if problem.window_right is None:
        return True
    return not problem.varlen and (problem.diagonal() + problem.window_right) % 64 == 0


@lru_cache(maxsize=1024)
def _tile(problem: Problem, config: HopperConfig) -> Tile:
    d, dv = hopper_padded(problem)
    registers, load_registers, _ = (LARGE_REGISTERS if dv == 256 and not problem.varlen else REGISTERS)[config.consumers]
    elements = config.block_m * (d + dv) + config.num_stages * config.block_n * (d + dv)
    return Tile(
        consumers=config.consumers,
        n=config.block_n,
        d=d,
        part_d=_part(d, problem.varlen),
        dv=dv,
        head_dim_v=problem.head_dim_v if problem.varlen else 0,
        stages=config.num_stages,
        registers=registers,
        load_registers=load_registers,
        pinned=config.pinned,
        paired=config.paired,
        lazy=config.lazy,
        tickets=config.tickets,
        lead=config.lead,
        alias=2 * elements + BARRIERS > SHARED_MEMORY,
        mask_loop=not _mask_is_first(problem),
    )


def _bias_align(bias) -> int:
    """Elements that rows of a bias are aligned to, of 16 bytes: a launch that is made again knows no more of an address."""
    *steps, last = bias_strides(bias)
    return math.gcd(16 // bias.element_size(), bias.data_ptr() // bias.element_size(), *steps) if last == 1 else 1


@lru_cache(maxsize=64)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@lru_cache(maxsize=64)
def _zeros(device: torch.device) -> list[torch.Tensor]:
    """Pairs of zeros that live as long as the process, each aligned as any allocation is, for Triton compiles another kernel otherwise.

    Made by a thread of its own, which has the device's default stream and none of the memory pools that may be in use where this is called
    from: what lies in the pool of a CUDA graph is overwritten by other graphs.
    """

    def make():
        with torch.cuda.device(device):
            fours = torch.zeros(STREAMS, 4, dtype=torch.int32, device=device)
            torch.cuda.current_stream().synchronize()
        return list(fours.unbind())

    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(make).result()


_counters: dict[tuple[int, int], torch.Tensor] = {}
_counters_lock = Lock()


def _counter(device: torch.device) -> torch.Tensor:
    """Two zeros, which a launch leaves as zeros: one pair a stream, since launches on one stream follow each other.

    A graph that is being captured gets a pair of its own, made zero in the graph: it may be replayed on any stream.
    """
    key = device.index, stream_of(device.index)
    if torch.cuda.is_current_stream_capturing() or key[1] == PER_THREAD:
        return torch.zeros(2, dtype=torch.int32, device=device)
    counter = _counters.get(key)
    if counter is None:
        with _counters_lock:
            used = sum(index == device.index for index, _ in _counters)
            if used == STREAMS:
                return torch.zeros(2, dtype=torch.int32, device=device)
            counter = _counters.setdefault(key, _zeros(device)[used])
    return counter


def forward_launch(
    problem: Problem, config: HopperConfig, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, counter, slopes=None, sinks=None,
    bias=None, rng=None,
):  # fmt: skip
    """(kernel, grid, arguments, options): what `forward` launches and what is compiled ahead of time in tests."""
    tile = _tile(problem, config)
    if bias is not None:
        tile = tile._replace(bias_align=_bias_align(bias))
    spec = spec_of(problem, problem.seqlen_k % config.block_n != 0, forward=True)
    lanes, slots, wave = walk_order(problem, config.block_m, least=config.heads)
    window = problem.window_left or 0, problem.window_right or 0
    args = (
        described(q, 64, tile.part_d), described(k, tile.n, tile.part_d), described(v, tile.n, tile.dv),
        out if problem.varlen else described(out, 64, tile.dv), lse, Seqlens(cu_seqlens_q, cu_seqlens_k),
        counter if tile.tickets else None, *totals(problem), problem.batch, problem.heads_q, problem.group,
        slots, lanes, wave, slots * wave, slots * lanes, *window,
        scale_log2(problem), extras_of(problem, slopes, sinks, bias, rng), spec, tile,
    )  # fmt: skip
    options = {"num_warps": 4, "maxnreg": REGISTERS[config.consumers][2], "enable_fp_fusion": True}
    return attn_fwd_hopper, (min(_multiprocessors(q.device), slots * lanes),), args, options


def _lse_without_keys(problem: Problem, lse, cu_seqlens_q, sinks):
    """Of a call without keys: -inf, or the sinks in all rows but those past the end of a packed batch."""
    lse.fill_(float("-inf")) if sinks is None else lse.copy_(sinks.unsqueeze(-1).expand_as(lse))
    if problem.varlen and sinks is not None:
        lse.masked_fill_(torch.arange(lse.shape[-1], device=lse.device) >= cu_seqlens_q[-1], float("-inf"))
    return lse


def forward(
    problem: Problem, q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, slopes=None, sinks=None, bias=None, rng=None, aux=(), token=None
):
    """(out, lse) of attention. slopes, sinks, bias, rng, token: see portable.forward; aux is none, since these kernels take no mods."""
    if token is None:
        q, k, v = contiguous_rows(q), contiguous_rows(k), contiguous_rows(v)
    out, lse = results(problem, q)
    if k.numel() == 0:  # a tensor map of nothing can't be made
        return out.zero_(), _lse_without_keys(problem, lse, cu_seqlens_q, sinks)
    if out.numel() > 0:
        config = _rows_of(problem)["forward"]
        with on_device(q):
            counter = _counter(q.device) if config.tickets else None
            tensors = (q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, counter, slopes, sinks, as_bytes(bias), rng)
            run("hopper", problem, tensors, partial(forward_launch, problem, config, *tensors), token)
    return out, lse
