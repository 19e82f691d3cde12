"""flashattn: exact fused attention in Triton, forward and backward, bound to PyTorch."""

from .ahead import warmup
from .api import attention, attention_varlen, explain
from .block_mask import BlockMask
from .dropout import dropout_mask
from .merge import merge_attention_states
from .mods import MaskMod, ScoreMod
from .reference import online_softmax

__all__ = [
    "BlockMask", "MaskMod", "ScoreMod", "attention", "attention_varlen", "dropout_mask", "explain", "merge_attention_states",
    "online_softmax", "warmup",
]  # fmt: skip
__version__ = "0.1.0"
