"""The binding to PyTorch: two operators, their fake twins and their derivative. Loads no Triton."""

from ..dispatch.explain import Explanation, explain
from . import autograd, schemas
from .describe import describe

__all__ = ["Explanation", "autograd", "describe", "explain", "schemas"]
