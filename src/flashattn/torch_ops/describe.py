"""Tensors -> Problem: the last place that looks at a tensor before a kernel is chosen."""

import os
from functools import lru_cache

import torch
from torch._subclasses import FakeTensor

from ..problem import Problem, canonical_dropout, canonical_softcap, reachable_window

NO_BIAS = None, ""
NO_MODS = None, None, ()


@lru_cache(maxsize=64)
def _machine(device: torch.device) -> tuple[str, tuple[int, int] | None]:
    """(device, capability) as a Problem has them; no capability for a fake CUDA tensor where there is no CUDA, too.

    torch gives an AMD GPU the type of device, and even the capabilities, of an NVIDIA one: gfx90a says (9, 0) as a Hopper does.
    """
    if device.type == "cuda" and torch.version.hip:
        return "hip", None
    return device.type, torch.cuda.get_device_capability(device) if device.type == "cuda" and torch.cuda.is_available() else None


def gpu_name(device: torch.device) -> str | None:
    """Name in the roofline's table of the GPU that holds a tensor; None if it isn't there, or there is no GPU."""
    from ..roofline.gpus import detect

    found = detect(torch.cuda.get_device_name(device)) if device.type == "cuda" and torch.cuda.is_available() else None
    return found and found.name


def _tf32_allowed() -> bool:
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


@lru_cache(maxsize=4096)
def _steps_are_aligned(itemsize: int, *shapes_and_strides) -> bool:
    for shape, strides in zip(shapes_and_strides[::2], shapes_and_strides[1::2], strict=True):
        *steps, last = strides
        if last != 1 and shape[-1] > 1:  # the launcher copies it
            steps = [shape[-1]]
        else:
            steps = [step for step, size in zip(steps, shape, strict=False) if size > 1]
        if not all(step > 0 and step * itemsize % 16 == 0 for step in steps):
            return False
    return True


def _start(tensor) -> int:
    """Address of element 0; of a fake tensor, which has none, as if its memory started aligned. A copy will be aligned."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        return 0
    return tensor.storage_offset() * tensor.element_size() if isinstance(tensor, FakeTensor) else tensor.data_ptr()


def aligned(q, k, v) -> bool:
    """See Problem. A tensor whose last dimension is not contiguous counts as the copy that the launcher makes."""
    if (_start(q) | _start(k) | _start(v)) & 15:
        return False
    return _steps_are_aligned(q.element_size(), q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride())


def _biased(bias) -> tuple[str, str]:
    """(dtype, dimensions along which it differs), as a Problem has them."""
    dims = zip("bhqk", bias.shape, bias.stride(), strict=True)
    return str(bias.dtype).removeprefix("torch."), "".join(dim for dim, size, stride in dims if size != 1 and stride != 0)


def describe(
    q, k, head_dim_v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    softmax_scale, window_left, window_right, top_left, deterministic, aligned=False, extras=(None, None, None, 0.0, 0.0),
    mods=NO_MODS, blocks=None,
) -> Problem:  # fmt: skip
    """The Problem of a call, from its (already checked) tensors. extras: alibi_slopes, sinks, bias, softcap and dropout_p. cu_seqlens_k: of
    a dense call, the lengths of keys. mods: keys of the score_mod and of the mask_mod, and the tensors that they read. blocks: the tensor
    of a block mask."""
    slopes, sinks, bias, softcap, dropout_p = extras
    return _problem(
        q.dtype, q.shape, k.shape, head_dim_v, None if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1, max_seqlen_q, max_seqlen_k,
        softmax_scale, window_left, window_right, top_left, deterministic,
        q.dtype == torch.float32 and q.is_cuda and _tf32_allowed(), os.environ.get("TRITON_INTERPRET") == "1", aligned, *_machine(q.device),
        slopes is not None, sinks is not None, softcap, dropout_p, *(NO_BIAS if bias is None else _biased(bias)),
        cu_seqlens_q is None and cu_seqlens_k is not None,
        *(NO_MODS if mods is NO_MODS else (*mods[:2], tuple((str(x.dtype).removeprefix("torch."), tuple(x.shape)) for x in mods[2]))),
        blocks is not None,
    )  # fmt: skip


@lru_cache(maxsize=4096)  # a training step asks the same again and again, and to fill in twenty fields takes longer than to find them
def _problem(
    dtype, shape_q, shape_k, head_dim_v, sequences, max_seqlen_q, max_seqlen_k,
    softmax_scale, window_left, window_right, top_left, deterministic,
    tf32, interpret, aligned, device, capability, alibi, sinks, softcap, dropout_p, bias, bias_dims, used_k,
    score_mod, mask_mod, mod_aux, blocks,
) -> Problem:  # fmt: skip
    """`sequences` is None in a dense call."""
    varlen = sequences is not None
    rows_q, rows_k = shape_q[-3], shape_k[-3]
    window_left, window_right, top_left = reachable_window(window_left, window_right, top_left, rows_q, rows_k, varlen or used_k)
    return Problem(
        dtype=str(dtype).removeprefix("torch."),
        batch=sequences if varlen else shape_q[0],
        seqlen_q=rows_q if max_seqlen_q is None else min(max_seqlen_q, rows_q),
        seqlen_k=rows_k if max_seqlen_k is None else min(max_seqlen_k, rows_k),
        heads_q=shape_q[-2],
        heads_kv=shape_k[-2],
        head_dim=shape_q[-1],
        head_dim_v=head_dim_v,
        softmax_scale=float(softmax_scale),  # 1 and 1.0 are one key here, and kernels take a float
        window_left=window_left,
        window_right=window_right,
        top_left=top_left,
        varlen=varlen,
        total_q=rows_q if varlen else 0,
        total_k=rows_k if varlen else 0,
        deterministic=deterministic,
        tf32=tf32,
        device=device,
        capability=capability,
        interpret=interpret,
        aligned=aligned,
        softcap=canonical_softcap(softcap),
        alibi=alibi,
        sinks=sinks,
        bias=bias,
        bias_dims=bias_dims,
        dropout=canonical_dropout(dropout_p) if dropout_p else 0.0,
        used_k=used_k,
        score_mod=score_mod,
        mask_mod=mask_mod,
        mod_aux=mod_aux,
        blocks=blocks,
    )
