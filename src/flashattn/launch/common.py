"""What the launchers have in common: outputs, the variant of a problem, the order of its tiles, gradients that must not arrive.

The surprising fact: heads advance together in waves, so that what they walk is found in L2; see `walk_order`.
"""

import math
from contextlib import nullcontext

import torch

from ..kernels.structs import Spec, View
from ..problem import Problem

WAVE_BYTES = 32 << 20  # what the heads of a wave share should fit in half of Hopper's L2
SMALLEST_SCALE = 2.0**-120  # what the GPU may flush to 0 is 0


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
    """The variant to compile. Nothing in a forward depends on `grouped`, so there it says nothing."""
    return Spec(
        varlen=problem.varlen,
        left=problem.window_left is not None,
        right=problem.window_right is not None,
        top_left=problem.top_left,
        ragged=problem.varlen or ragged,
        sign=0 if abs(problem.softmax_scale) < SMALLEST_SCALE else 1 if problem.softmax_scale > 0 else -1,
        prescaled=problem.dtype == "float32",
        tf32=problem.tf32,
        grouped=not forward and problem.group > 1,
        need_dk=need_dk,
        need_dv=need_dv,
    )


def totals(problem: Problem) -> tuple[int, int]:
    return (problem.total_q, problem.total_k) if problem.varlen else (problem.seqlen_q, problem.seqlen_k)


def scale_log2(problem: Problem) -> float:
    scale = abs(problem.softmax_scale)
    return 1.0 if scale < SMALLEST_SCALE else scale * math.log2(math.e)


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
    """A dense diagonal tells. Packed lengths are on the GPU, so any limit may leave a row nothing, unless one tensor serves both sides."""
    if problem.varlen:
        limited = problem.window_left is not None or problem.window_right is not None
        return limited and cu_seqlens_q.data_ptr() != cu_seqlens_k.data_ptr()
    limit = problem.window_left if problem.top_left else problem.window_right
    return limit is not None and problem.seqlen_q - problem.seqlen_k > limit


def without_empty_rows(lse, dout, dlse):
    """Gradients that arrive for rows without keys (NaN after a normalisation, say) end here: a probability of 0 would keep a NaN."""
    empty = lse == float("-inf")
    return dout.masked_fill(empty.transpose(-1, -2).unsqueeze(-1), 0.0), None if dlse is None else dlse.masked_fill(empty, 0.0)
