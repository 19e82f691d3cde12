"""Device functions of the score and mask mods that ship with the library, and `read`, with which they read their tensors.

See flashattn/mods.py for what a mod is given. They are called on tiles either way round, so all here is elementwise.
"""

import triton
import triton.language as tl

from .index import wide
from .score import tanh


@triton.jit
def read(tensor, i, j=None, k=None, l=None):
    """tensor[i, j, k, l] of an `Aux`, or of its first dimensions where there are fewer; indices are whole numbers that broadcast."""
    offset = wide(i) * tensor.strides[0]
    if j is not None:
        offset += wide(j) * tensor.strides[1]
    if k is not None:
        offset += wide(k) * tensor.strides[2]
    if l is not None:
        offset += wide(l) * tensor.strides[3]
    return tl.load(tensor.ptr + offset)


@triton.jit
def unchanged(dscore, score, batch, head, q_idx, kv_idx, aux):
    """The derivative of what adds something to a score."""
    return dscore


@triton.jit
def softcap(score, batch, head, q_idx, kv_idx, aux):
    cap = read(aux[0], 0).to(tl.float32)
    return cap * tanh(score / cap, False)


@triton.jit
def softcap_gradient(dscore, score, batch, head, q_idx, kv_idx, aux):
    t = tanh(score / read(aux[0], 0).to(tl.float32), False)
    return dscore * (1.0 - t * t)


@triton.jit
def alibi(score, batch, head, q_idx, kv_idx, aux):
    return score - read(aux[0], head) * tl.abs(q_idx - kv_idx).to(tl.float32)


@triton.jit
def relative_bias(score, batch, head, q_idx, kv_idx, aux):
    reach = (aux[1].shape[0] - 1) // 2
    place = tl.minimum(tl.maximum(kv_idx - q_idx, -reach), reach) + reach
    return score + read(aux[0], read(aux[1], place), head)


@triton.jit
def documents(batch, head, q_idx, kv_idx, aux):
    return read(aux[0], batch, q_idx) == read(aux[1], batch, kv_idx)


@triton.jit
def prefix_lm(batch, head, q_idx, kv_idx, aux):
    return (kv_idx <= q_idx) | (kv_idx < read(aux[0], batch))
