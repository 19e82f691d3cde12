"""Tensor maps: what tells Hopper's copy engine where the rows of a head lie.

The surprising fact: the stride of a dimension of one element is never used, and yet must be a multiple of 16 bytes.
"""

from functools import lru_cache

from ..kernels.hopper.gluon import TensorDescriptor, gl
from ..kernels.hopper.layouts import shared

_layout = lru_cache(maxsize=16)(shared)


@lru_cache(maxsize=1)
def _plain():
    return gl.NVMMASharedLayout(0, 32, 2)


def described(tensor, rows: int, width: int) -> TensorDescriptor | None:
    """Boxes of `rows` rows and `width` elements of one head, of [batch, rows, heads, dim] or a packed tensor; None for None."""
    if tensor is None:
        return None
    if tensor.dim() == 3:
        tensor = tensor.unsqueeze(0)
    strides = [stride if size > 1 else 8 for size, stride in zip(tensor.shape[:3], tensor.stride(), strict=False)]
    return TensorDescriptor(tensor, list(tensor.shape), [*strides, 1], [1, rows, 1, width], _layout(width, 4))


def flat(tensor, rows: int, width: int) -> TensorDescriptor | None:
    """Boxes of a workspace, contiguous float32; None for None."""
    if tensor is None:
        return None
    return TensorDescriptor(tensor, [tensor.numel() // width, width], [width, 1], [rows, width], _plain())
