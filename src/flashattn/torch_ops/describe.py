"""Tensors -> Problem: the last place that looks at a tensor before a kernel is chosen."""

import os
from functools import lru_cache

import torch

from ..problem import Problem, reachable_window


@lru_cache(maxsize=64)
def _capability(device: torch.device) -> tuple[int, int] | None:
    """None for a fake CUDA tensor where there is no CUDA, too."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" and torch.cuda.is_available() else None


def _tf32_allowed() -> bool:
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def describe(
    q, k, head_dim_v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    softmax_scale, window_left, window_right, top_left, deterministic,
) -> Problem:  # fmt: skip
    """The Problem of a call, from its (already checked) tensors."""
    varlen = cu_seqlens_q is not None
    rows_q, rows_k = (q.shape[0], k.shape[0]) if varlen else (q.shape[1], k.shape[1])
    left, right = reachable_window(window_left, window_right, top_left, rows_q, rows_k)
    return Problem(
        dtype=str(q.dtype).removeprefix("torch."),
        batch=cu_seqlens_q.shape[0] - 1 if varlen else q.shape[0],
        seqlen_q=rows_q if max_seqlen_q is None else min(max_seqlen_q, rows_q),
        seqlen_k=rows_k if max_seqlen_k is None else min(max_seqlen_k, rows_k),
        heads_q=q.shape[-2],
        heads_kv=k.shape[-2],
        head_dim=q.shape[-1],
        head_dim_v=head_dim_v,
        softmax_scale=softmax_scale,
        window_left=left,
        window_right=right,
        top_left=top_left,
        varlen=varlen,
        total_q=rows_q if varlen else 0,
        total_k=rows_k if varlen else 0,
        deterministic=deterministic,
        tf32=q.dtype == torch.float32 and q.is_cuda and _tf32_allowed(),
        device=q.device.type,
        capability=_capability(q.device),
        interpret=os.environ.get("TRITON_INTERPRET") == "1",
    )
