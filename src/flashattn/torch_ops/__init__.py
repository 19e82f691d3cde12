"""The binding to PyTorch: two operators, their fake twins and their derivative. Loads no Triton."""

from ..dispatch.explain import Explanation, explain
from . import schemas
from .autograd import attn_fwd
from .describe import describe

__all__ = ["Explanation", "attn_fwd", "describe", "explain", "schemas"]
