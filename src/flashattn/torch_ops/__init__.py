"""The binding to PyTorch: two operators, their fake twins and their derivative. Loads no Triton."""

from ..dispatch.explain import Explanation, explain
from . import schemas
from .again import key_of, known, remember
from .autograd import attn_fwd
from .describe import aligned, describe, gpu_name

__all__ = ["Explanation", "aligned", "attn_fwd", "describe", "explain", "gpu_name", "key_of", "known", "remember", "schemas"]
