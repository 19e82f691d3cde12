"""The binding to PyTorch: two operators, their fake twins and their derivative. Loads no Triton."""

from ..dispatch.explain import Explanation, explain
from . import schemas
from .again import key_of, known, remember
from .autograd import attn_fwd
from .describe import NO_MODS, aligned, describe, gpu_name
from .modded import attn_mod_fwd

__all__ = [
    "NO_MODS", "Explanation", "aligned", "attn_fwd", "attn_mod_fwd", "describe", "explain", "gpu_name", "key_of", "known", "remember",
    "schemas",
]  # fmt: skip
