"""flashattn: exact fused attention in Triton, forward and backward, bound to PyTorch."""

from .ahead import warmup
from .api import attention, attention_varlen, explain
from .dropout import dropout_mask
from .merge import merge_attention_states
from .reference import online_softmax

__all__ = ["attention", "attention_varlen", "dropout_mask", "explain", "merge_attention_states", "online_softmax", "warmup"]
__version__ = "0.1.0"
