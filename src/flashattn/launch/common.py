"""What the launchers have in common: outputs, the variant of a problem, the order of its tiles, gradients that must not arrive.

The surprising fact: heads advance together in waves, so that what they walk is found in L2; see `walk_order`.
"""

import math
from contextlib import nullcontext

import torch

from ..block_lists import BLOCK
from ..dispatch.table import padded_head_dim
from ..kernels.common.score import ADDED, KEPT
from ..kernels.structs import Aux, Extras, Spec, Tile, View
from ..mods import MaskMod, ScoreMod, device_function
from ..problem import Problem

WAVE_BYTES = 32 << 20  # what the heads of a wave share should fit in half of Hopper's L2
LOOKED_AT = 1 << 24  # numbers of a bias at a time
SMALLEST_SCALE = 2.0**-120  # what the GPU may flush to 0 is 0
LOG2_E = math.log2(math.e)


def on_device(tensor):
    """Make the tensors' GPU the current one, if it isn't."""
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return nullcontext()


def contiguous_rows(tensor):
    """Launchers take any strides over [batch, rows, heads]; the last dimension must be contiguous and is copied if it isn't."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def view_of(tensor) -> View:
    stride = tensor.stride()
    return View(tensor, stride[0], stride[2], stride[1]) if tensor.dim() == 4 else View(tensor, 0, stride[1], stride[0])


def spec_of(problem: Problem, ragged: bool, forward=False, need_dk=False, need_dv=False) -> Spec:
    """The variant to compile. Nothing in a forward depends on `grouped`, nor in a backward on `sinks`: there they say nothing."""
    plain = not problem.softcap and not problem.alibi and not problem.natural
    return Spec(
        varlen=problem.varlen,
        left=problem.window_left is not None,
        right=problem.window_right is not None,
        top_left=problem.top_left,
        ragged=problem.varlen or problem.used_k or ragged,
        sign=1 if not plain else 0 if abs(problem.softmax_scale) < SMALLEST_SCALE else 1 if problem.softmax_scale > 0 else -1,
        prescaled=plain and problem.dtype == "float32",
        tf32=problem.tf32,
        grouped=not forward and problem.group > 1,
        need_dk=need_dk,
        need_dv=need_dv,
        softcap=bool(problem.softcap),
        alibi=problem.alibi,
        dropout=problem.dropout > 0,
        blocks=problem.blocks,
        sinks=forward and problem.sinks,
        bias=0 if not problem.bias else KEPT.value if problem.bias == "bool" else ADDED.value,
        natural=problem.natural,
    )


def ragged(problem: Problem, length: int, block: int) -> bool:
    """Whether a walk of tiles may meet one that doesn't exist in full; that of a block mask ends with a whole block."""
    return length % (BLOCK if problem.blocks else block) != 0


def tile_of(problem: Problem, config, *views: View) -> Tile:
    """The tile, with both head dims padded alike unless every row starts at a multiple of 16 bytes.

    Loaded element by element, values narrower than the keys (head dims 113 and 24, or an odd storage offset) give wrong products on
    Hopper under Triton 3.6.0: a compiler fault, not seen with equal widths.
    """
    head_dim, head_dim_v = problem.head_dim, problem.head_dim_v
    block_d, block_dv = padded_head_dim(head_dim), padded_head_dim(head_dim_v)
    vector = 16 // problem.itemsize
    starts = [number for view in views for number in (view.ptr.data_ptr() // problem.itemsize, *view[1:])]
    align = math.gcd(vector, *starts)
    if align < vector:
        block_d = block_dv = max(block_d, block_dv)
    return Tile(config.block_m, config.block_n, head_dim, head_dim_v, block_d, block_dv, align)


def options_of(config) -> dict:
    return {"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": True}


def totals(problem: Problem) -> tuple[int, int]:
    return (problem.total_q, problem.total_k) if problem.varlen else (problem.seqlen_q, problem.seqlen_k)


def scale_log2(problem: Problem) -> float:
    """The factor of raw scores: see kernels/common/score.py."""
    if problem.natural:
        return LOG2_E
    if problem.alibi:
        return 1.0
    scale = problem.softcap or abs(problem.softmax_scale)
    return 1.0 if scale < SMALLEST_SCALE else scale * LOG2_E


def tangent_scale(problem: Problem) -> float:
    """The factor of tangents of products, signed; of those with an operand that `scale_log2` went into already, where it does."""
    prescaled = problem.dtype == "float32" and not problem.softcap and not problem.alibi
    return problem.softmax_scale / scale_log2(problem) if prescaled else problem.softmax_scale


def extras_of(problem: Problem, slopes, sinks=None, bias=None, rng=None, aux=(), blocks=None) -> Extras:
    """slopes and sinks are float32 and contiguous, or None; bias as `as_bytes` gives it; rng: int64 [2], contiguous, or None. aux: what the
    score_mod and the mask_mod read, one behind the other, as `as_bytes` gives it. blocks: the tensor of a block mask, or None."""
    inner = cap = stride = None
    unit = 1.0 if problem.natural else LOG2_E
    if problem.softcap:
        inner = problem.inner
    elif problem.alibi or problem.natural:
        inner = problem.softmax_scale * unit
    if problem.alibi:
        stride = problem.heads_q if slopes.dim() == 2 else 0
    if problem.softcap and (problem.alibi or problem.natural):
        cap = problem.softcap * unit
    of_bias = [None] * 4 if bias is None else bias_strides(bias)
    dropout = (None, None) if rng is None else (problem.dropout, problem.rescale)
    of_mods = [None, None]
    if aux:
        found, of_score = [Aux(x, tuple(x.shape), x.stride()) for x in aux], len(aux_names(problem)[0])
        of_mods = [tuple(some) or None for some in (found[:of_score], found[of_score:])]
    return Extras(inner, slopes, stride, sinks, cap, bias, *of_bias, rng, *dropout, blocks, *of_mods)


def aux_names(problem: Problem) -> list[tuple[str, ...]]:
    """Of the tensors that the score_mod reads, and of those of the mask_mod."""
    keys = (ScoreMod, problem.score_mod), (MaskMod, problem.mask_mod)
    return [() if key is None else kind.records[key].aux for kind, key in keys]


def mods_of(problem: Problem, gradient: bool = True) -> list:
    """SCORE_MOD, with `gradient` SCORE_GRAD, and MASK_MOD of a kernel: device functions, or None."""
    score = None if problem.score_mod is None else ScoreMod.records[problem.score_mod]
    mask = None if problem.mask_mod is None else MaskMod.records[problem.mask_mod]
    functions = (score and score.forward, *((score and score.backward,) if gradient else ()), mask and mask.keep)
    return [device_function(function) for function in functions]


def bias_strides(bias) -> list[int]:
    """Of batch entries, heads, rows and keys; 0 for what has size 1."""
    return [0 if size == 1 else stride for size, stride in zip(bias.shape, bias.stride(), strict=True)]


def as_bytes(bias):
    """A mask of booleans as what kernels load; another bias, or none, as it is."""
    return bias.view(torch.uint8) if bias is not None and bias.dtype == torch.bool else bias


def lanes_and_slots(problem: Problem, block: int, over_keys: bool = False) -> tuple[int, int]:
    """(heads to walk, tiles of `block` rows in each), of queries or of keys. A packed lane is a head and has a few slots too many (see
    kernels/common/index.py), a dense one a head of a batch entry."""
    heads, total = (problem.heads_kv, totals(problem)[1]) if over_keys else (problem.heads_q, totals(problem)[0])
    return (heads, total // block + problem.batch + 1) if problem.varlen else (heads * problem.batch, -(-total // block))


def walk_order(problem: Problem, block: int, over_keys: bool = False, least: int = 1) -> tuple[int, int, int]:
    """(lanes, slots, wave): and how many lanes advance together, `least` of them at least. Tiles of queries walk keys, or with `over_keys`
    the other way round."""
    lanes, slots = lanes_and_slots(problem, block, over_keys)
    walked = problem.seqlen_q if over_keys else problem.seqlen_k
    walked_bytes = max(1, walked * problem.itemsize * (problem.head_dim + problem.head_dim_v))
    sharing = 1 if over_keys else problem.group
    return lanes, slots, min(max(max(1, WAVE_BYTES // walked_bytes) * sharing, least), lanes)


def results(problem: Problem, q):
    """(out, lse), contiguous and not yet written."""
    shape, dim, device = q.shape, problem.head_dim_v, q.device
    if dim == problem.head_dim:  # a faster spelling of the other
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    else:
        out = torch.empty((*shape[:-1], dim), dtype=q.dtype, device=device)
    rows = (shape[1], shape[0]) if problem.varlen else (shape[0], shape[2], shape[1])
    return out, torch.empty(rows, dtype=torch.float32, device=device)


def may_have_rows_without_keys(problem: Problem, cu_seqlens_q, cu_seqlens_k) -> bool:
    """A bias, a mod or a block mask may leave any row nothing, else a dense diagonal tells. Lengths are on the GPU, so any limit may leave
    a row nothing, unless one tensor serves both sides.

    Rows of sequences without any key count only where there are sinks: no tile visits them, but the gradient of the sinks sums over them.
    """
    if problem.takes_keys:
        return True
    if problem.varlen:
        limited = problem.sinks or problem.window_left is not None or problem.window_right is not None
        return limited and cu_seqlens_q.data_ptr() != cu_seqlens_k.data_ptr()
    if problem.sinks and not problem.seqlen_k:
        return True
    if problem.used_k:
        return problem.sinks or problem.window_left is not None or problem.window_right is not None
    limit = problem.window_left if problem.top_left else problem.window_right
    return limit is not None and problem.seqlen_q - problem.seqlen_k > limit


def rows_without_keys(problem: Problem, lse, cu_seqlens_q, cu_seqlens_k, bias=None):
    """bool, like lse or broadcast along its heads. A sink gives such rows an lse, so then their positions have to tell, and the bias."""
    if not problem.sinks:
        return lse == float("-inf")
    if problem.bias:
        return _rows_that_a_bias_empties(problem, bias)
    row = torch.arange(lse.shape[-1], device=lse.device)
    rows_q, rows_k = problem.seqlen_q, problem.seqlen_k
    if problem.varlen:
        starts_q, ends_q = cu_seqlens_q[:-1].long(), cu_seqlens_q[1:].long()
        sequence = torch.searchsorted(ends_q, row, right=True)
        # rows past the end are a sequence more, which has no keys
        lengths_k = torch.nn.functional.pad(cu_seqlens_k.diff().long(), (0, 1))[sequence]
        lengths_q, first = (torch.nn.functional.pad(x, (0, 1))[sequence] for x in (ends_q - starts_q, starts_q))
        row, rows_q, rows_k = row - first, lengths_q, lengths_k
    elif problem.used_k:
        rows_k = cu_seqlens_k.long().clamp(0, rows_k)[:, None, None]
    position = row if problem.top_left else row + (rows_k - rows_q)
    empty = torch.zeros_like(row, dtype=torch.bool) | (row * 0 + rows_k <= 0)
    if problem.window_left is not None:
        empty |= position - problem.window_left >= rows_k
    if problem.window_right is not None:
        empty |= position + problem.window_right < 0
    return empty


def _rows_that_a_bias_empties(problem: Problem, bias):
    """bool, like lse or with sizes of 1: rows to which mask and bias leave no key."""
    rows, keys = problem.seqlen_q, problem.seqlen_k
    column = torch.arange(keys, device=bias.device)
    found, step = [], max(1, LOOKED_AT // max(1, bias.shape[0] * bias.shape[1] * keys))
    for first in range(0, rows, step):
        position = torch.arange(first, min(first + step, rows), device=bias.device)[:, None] + problem.diagonal()
        part = bias if bias.shape[2] == 1 else bias[:, :, first : first + step]
        alive = part if part.dtype == torch.bool else part != float("-inf")
        if problem.window_left is not None:
            alive = alive & (column >= position - problem.window_left)
        if problem.window_right is not None:
            alive = alive & (column <= position + problem.window_right)
        found.append(~(alive & (column >= 0) & (position == position)).any(-1))
    return torch.cat(found, -1) if found else torch.ones(1, 1, rows, dtype=torch.bool, device=bias.device)


def without_rows(empty, dout, dlse):
    """Gradients that arrive for rows without keys (NaN after a normalisation, say) end here: a probability of 0 would keep a NaN."""
    rows = empty.unsqueeze(-1) if empty.dim() == 1 else empty.transpose(-1, -2)
    return dout.masked_fill(rows.unsqueeze(-1), 0.0), None if dlse is None else dlse.masked_fill(empty, 0.0)


def sinks_gradient(sinks, lse, delta):
    """-sum over rows of e^(sink - lse) delta, as of a key of value 0: [batch, heads_q], or [1, heads_q] of a packed call. delta is
    rowsum(dO * out) - dlse of all rows. Those past the end of a packed batch have no sink, and an lse of -inf.

    The exponent is at most 0, but for the rounding of lse, which may be larger than 1."""
    share = torch.where(lse == float("-inf"), 0.0, torch.exp((sinks.unsqueeze(-1) - lse).clamp(max=0.0)) * delta)
    return share.sum(-1).neg_().view(-1, sinks.shape[0])
