"""Device functions of mods for test_mods.py, in a file of their own because a process either compiles or interprets what it loads."""

import triton
import triton.language as tl

from flashattn.kernels.common.mods import read


@triton.jit
def curve(score, batch, head, q_idx, kv_idx, aux):
    return score * read(aux[0], head, kv_idx % 4) + 0.1 * score * score + 0.01 * (batch + q_idx)


@triton.jit
def curve_gradient(dscore, score, batch, head, q_idx, kv_idx, aux):
    return dscore * (read(aux[0], head, kv_idx % 4) + 0.2 * score)


@triton.jit
def thirds(batch, head, q_idx, kv_idx, aux):
    return (read(aux[0], batch) + head + q_idx + kv_idx) % 3 != 0


@triton.jit
def root(score, batch, head, q_idx, kv_idx, aux):
    """-inf below zero, and no finite derivative at it."""
    return tl.where(score < 0, float("-inf"), tl.sqrt(tl.abs(score)))


@triton.jit
def root_gradient(dscore, score, batch, head, q_idx, kv_idx, aux):
    return dscore * 0.5 / tl.sqrt(tl.abs(score))
