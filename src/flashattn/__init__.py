"""flashattn: exact fused attention in Triton, forward and backward, bound to PyTorch."""

from .ahead import warmup
from .api import attention, attention_varlen, explain
from .reference import online_softmax

__all__ = ["attention", "attention_varlen", "explain", "online_softmax", "warmup"]
__version__ = "0.1.0"
