"""The keep-mask (True = attend) of a tile of scores."""

import triton
import triton.language as tl


@triton.jit
def keep_mask(q_pos, k_pos, inside, left, right, SPEC: tl.constexpr):
    """q_pos is the row plus the diagonal's offset, so the diagonal is k_pos == q_pos; `inside`: the walked row or key exists.

    All three broadcast against each other, which is how the transposed tile of dK/dV asks the same question.
    """
    keep = inside
    if SPEC.left:
        keep = keep & (k_pos >= q_pos - left)
    if SPEC.right:
        keep = keep & (k_pos <= q_pos + right)
    return keep
