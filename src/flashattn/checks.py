"""Tensors -> typed errors, before anything runs. Every message names the argument, what came and what was expected.

Nothing here reads a value on the GPU, so nothing synchronises; with FLASHATTN_CHECK=1 the cumulative lengths are read and validated
(on the CPU they always are).
"""

import os
from itertools import pairwise

import torch

from .problem import DTYPES, MAX_HEAD_DIM

LAYOUTS = ("bshd", "bhsd")
MOST = 2**63 - 1  # integers travel in 64 bits
MOST_SCALE = torch.finfo(torch.float32).max / 2  # scores are float32, in base 2: the scale times log2 e must be finite too


def check_options(causal, window, softmax_scale, deterministic) -> None:
    if not isinstance(deterministic, bool):
        raise TypeError(f"deterministic={deterministic!r}: expected a bool")
    if not (causal is True or causal is False or causal == "top-left"):
        raise ValueError(f"causal={causal!r}: expected False, True (bottom-right) or 'top-left'")
    if window is not None:
        if not isinstance(window, (tuple, list)) or len(window) != 2:
            raise ValueError(f"window={window!r}: expected None or (left, right)")
        for side, limit in zip(("left", "right"), window, strict=True):
            if limit is None:
                continue
            if isinstance(limit, bool) or not isinstance(limit, (int, torch.SymInt)):
                raise TypeError(f"window {side}={limit!r}: expected a number of keys (int) or None")
            if limit < 0:
                raise ValueError(f"window {side}={limit}: expected >= 0 (0 keeps the diagonal itself), or None for no limit")
            if limit > MOST:
                raise ValueError(f"window {side}={limit}: expected at most 2**63 - 1, or None for no limit")
    if softmax_scale is not None:
        if isinstance(softmax_scale, (bool, torch.Tensor)) or not isinstance(softmax_scale, (int, float, torch.SymFloat)):
            raise TypeError(f"softmax_scale is a {type(softmax_scale).__name__}: expected a float or None (1 / sqrt(head_dim))")
        if not abs(softmax_scale) <= MOST_SCALE:  # nor is NaN
            raise ValueError(f"softmax_scale={softmax_scale}: expected a finite number, at most {MOST_SCALE:.2g} in magnitude")


def check_layout(layout) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}: expected one of {LAYOUTS}")


def check_tensors(tensors: dict[str, torch.Tensor], order: str) -> None:
    """What q, k and v must have in common; `order` names the dimensions, e.g. "batch seqlen heads head_dim"."""
    names = order.split()
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}: expected a torch.Tensor")
        if tensor.layout != torch.strided:
            raise TypeError(f"{name} has layout {tensor.layout}: expected torch.strided (dense)")
        if tensor.dim() != len(names):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}: expected {len(names)} dimensions [{', '.join(names)}]")
        if str(tensor.dtype).removeprefix("torch.") not in DTYPES:
            raise TypeError(f"{name} has dtype {tensor.dtype}: expected one of {', '.join(DTYPES)}")
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    for what in ("dtype", "device"):
        if not getattr(q, what) == getattr(k, what) == getattr(v, what):
            came = ", ".join(f"{name} has {what} {getattr(tensor, what)}" for name, tensor in tensors.items())
            raise (TypeError if what == "dtype" else ValueError)(f"{came}: expected one {what} for q, k and v")
    heads = names.index("heads")
    for i, name in enumerate(names[:-1]):
        if k.shape[i] != v.shape[i]:
            raise ValueError(f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}: expected the same {name}")
        if name == "batch" and q.shape[i] != k.shape[i]:
            raise ValueError(f"q has batch {q.shape[i]} and k has batch {k.shape[i]}: expected the same")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q has head_dim {q.shape[-1]} and k has head_dim {k.shape[-1]}: expected the same (only v's may differ)")
    for name, tensor in (("q", q), ("v", v)):
        if tensor.shape[-1] < 1:
            raise ValueError(f"{name} has head_dim 0: expected 1 to {MAX_HEAD_DIM}")
        if tensor.shape[-1] > MAX_HEAD_DIM:
            raise NotImplementedError(f"{name} has head_dim {tensor.shape[-1]}: implemented are 1 to {MAX_HEAD_DIM}")
    if k.shape[heads] < 1 or q.shape[heads] < 1 or q.shape[heads] % k.shape[heads] != 0:
        raise ValueError(f"q has {q.shape[heads]} heads and k has {k.shape[heads]}: expected a multiple of k's (heads_q % heads_kv == 0)")


def check_cu_seqlens(q, cu_seqlens: dict[str, torch.Tensor], max_seqlens: dict[str, object]) -> None:
    for name, tensor in cu_seqlens.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}: expected an int32 tensor [batch + 1]")
        if tensor.dtype != torch.int32:
            raise TypeError(f"{name} has dtype {tensor.dtype}: expected torch.int32")
        if tensor.dim() != 1 or tensor.shape[0] < 1:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}: expected [batch + 1], starting with 0")
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device} and q on {q.device}: expected one device")
    (name_q, cu_q), (name_k, cu_k) = cu_seqlens.items()
    if cu_q.shape[0] != cu_k.shape[0]:
        raise ValueError(f"{name_q} has {cu_q.shape[0]} entries and {name_k} has {cu_k.shape[0]}: expected batch + 1 in both")
    for name, limit in max_seqlens.items():
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, (int, torch.SymInt, torch.Tensor))):
            raise TypeError(f"{name}={limit!r}: expected a number of rows (int), a tensor or None")
        if isinstance(limit, (int, torch.SymInt)) and limit < 0:
            raise ValueError(f"{name}={limit}: expected >= 0")
        if isinstance(limit, (int, torch.SymInt)) and limit > MOST:
            raise ValueError(f"{name}={limit}: expected at most 2**63 - 1, or None for no limit")


def check_cu_seqlens_values(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k) -> None:
    """Values of the cumulative lengths: 0 first, never falling, within the tensor, no sequence longer than its stated maximum."""
    if q.is_cuda and os.environ.get("FLASHATTN_CHECK") != "1":
        return
    for side, cu, rows, limit in (("q", cu_seqlens_q, q.shape[0], max_seqlen_q), ("k", cu_seqlens_k, k.shape[0], max_seqlen_k)):
        values = cu.tolist()
        lengths = [end - start for start, end in pairwise(values)]
        if values[0] != 0:
            raise ValueError(f"cu_seqlens_{side} starts with {values[0]}: expected 0")
        if min(lengths, default=0) < 0:
            entry = lengths.index(min(lengths))
            fall = f"falls from {values[entry]} to {values[entry + 1]} at entry {entry + 1}"
            raise ValueError(f"cu_seqlens_{side} {fall}: expected never falling")
        if values[-1] > rows:
            raise ValueError(f"cu_seqlens_{side} ends with {values[-1]} but {side} has {rows} rows: expected at most that")
        if limit is not None and max(lengths, default=0) > limit:
            raise ValueError(f"max_seqlen_{side}={limit} but a sequence has {max(lengths)} rows: expected at least that")
