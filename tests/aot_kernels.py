"""Kernels for test_aot.py: one that fits every GPU, one that can't keep its values in registers. And two for test_recompilation.py.

In a file of their own because a kernel is bound to the compiler or to the interpreter when its module is loaded; only the workers that
compile load this one.
"""

from typing import NamedTuple

import triton
import triton.language as tl


@triton.jit
def product_kernel(a, b, c, size, BLOCK: tl.constexpr):
    rows = tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        cols = start + rows
        a_tile = tl.load(a + rows[:, None] * size + cols[None, :])
        b_tile = tl.load(b + cols[:, None] * size + rows[None, :])
        acc = tl.dot(a_tile, b_tile, acc)
    tl.store(c + rows[:, None] * size + rows[None, :], acc)


@triton.jit
def hoarder_kernel(x, out, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    values = tl.load(x + offsets)
    total = tl.sum(values, 0)
    tl.store(out + offsets, values / total)


class Sizes(NamedTuple):
    total: int
    batch: int


@triton.jit(do_not_specialize=("sizes", "total", "batch"))
def sizes_in_a_tuple_kernel(out, sizes):
    tl.store(out, sizes.total + sizes.batch)


@triton.jit(do_not_specialize=("total", "batch"))
def sizes_as_arguments_kernel(out, total, batch):
    tl.store(out, total + batch)
