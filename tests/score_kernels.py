"""The kernel of test_score.py; in a file of its own as those of test_bounds.py are."""

import triton
import triton.language as tl

from flashattn.kernels.common.score import tanh


@triton.jit
def tanh_kernel(x, out, size, FAST: tl.constexpr, LANES: tl.constexpr):
    at = tl.program_id(0) * LANES + tl.arange(0, LANES)
    tl.store(out + at, tanh(tl.load(x + at, mask=at < size, other=0.0), FAST), mask=at < size)
