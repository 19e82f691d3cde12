"""flash-attn's functions, by its names, arguments and meanings (those of 2.8), computed by `attention` and `attention_varlen`.

    from flashattn.integrations.flash_attn import flash_attn_func      # was: from flash_attn import flash_attn_func

What every function here has in common; H query heads, H_kv key/value heads, D head_dim:

    dropout_p       probability of dropping a weight, drawn from torch's default generator of the device; 0.0, the default, is none.
    softmax_scale   factor of the scores; None: 1 / sqrt(D).
    causal          a query sees keys up to the diagonal that ends in the bottom-right corner.
    window_size     (left, right): keys kept each side of that diagonal, -1 for no limit; default (-1, -1).
    softcap         cap * tanh(score / cap); 0.0, the default, is none.
    alibi_slopes    float32 [H] or [batch, H]: adds -slope * |i + seqlen_k - seqlen_q - j|; None is none. They get no gradient.
    deterministic   gradients that are bitwise equal from run to run.
    return_attn_probs   return (out, softmax_lse, None) instead of out. softmax_lse: float32 [batch, H, seqlen_q], packed [H, total_q].

What differs from flash-attn: float32 and CPU tensors work; a row without keys has softmax_lse -inf (there: +inf) and out 0; softmax_lse is
differentiable; the third result, for tests of dropout, is always None (`flashattn.dropout_mask` is for that), and which weights are dropped
is another function of torch's random state; wrong arguments raise ValueError or TypeError.
FlashAttention-3 has other arguments in another order under the same names: see `flash_attn_3`.

The surprising fact: the packed functions copy nothing either way. The slices of qkv are views, whose strides the kernels take, and autograd
stacks three gradients into one tensor, where flash-attn's kernels write into its slices: one more pass over dqkv.
"""

from torch import Tensor

from ..api import attention, attention_varlen
from .install import install_as_flash_attn, uninstall_flash_attn
from .options import refuse_given, wanted, window_of
from .padding import index_first_axis, index_put_first_axis, pad_input, unpad_input

__all__ = [
    "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache", "index_first_axis", "index_put_first_axis", "install_as_flash_attn",
    "pad_input", "uninstall_flash_attn", "unpad_input",
]  # fmt: skip

Result = Tensor | tuple[Tensor, Tensor, None]


def _options(function, dropout_p, causal, softmax_scale, window_size, softcap, alibi_slopes, deterministic) -> dict:
    options = {"causal": bool(causal), "softmax_scale": softmax_scale, "window": window_of(window_size), "deterministic": deterministic}
    return options | wanted(function, dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes)


def _result(found, return_attn_probs: bool) -> Result:
    return (*found, None) if return_attn_probs else found


def slices(name: str, packed: Tensor, parts: int, dim: int) -> tuple[Tensor, ...]:
    """The `parts` tensors stacked in dimension `dim` of a packed one, as views. ValueError for another size."""
    if packed.dim() <= dim or packed.shape[dim] != parts:
        raise ValueError(f"{name} has shape {tuple(packed.shape)}: expected {parts} in dimension {dim}")
    return packed.unbind(dim)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Attention of q ``[batch, seqlen_q, H, D]`` to k, v ``[batch, seqlen_k, H_kv, D]``; H a multiple of H_kv (MQA, GQA).

    Returns out ``[batch, seqlen_q, H, D]``. The other arguments, the longer result, differences and errors: the docstring of this module.
    """
    options = _options(attention, dropout_p, causal, softmax_scale, window_size, softcap, alibi_slopes, deterministic)
    return _result(attention(q, k, v, return_lse=bool(return_attn_probs), **options), return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of qkv ``[batch, seqlen, 3, H, D]``. Returns out ``[batch, seqlen, H, D]``."""
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return flash_attn_func(*slices("qkv", qkv, 3, 2), *options)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of q ``[batch, seqlen_q, H, D]`` and kv ``[batch, seqlen_k, 2, H_kv, D]``."""
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return flash_attn_func(q, *slices("kv", kv, 2, 2), *options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """Attention of packed sequences: q ``[total_q, H, D]``, k and v ``[total_k, H_kv, D]``.

    cu_seqlens_q, cu_seqlens_k: int32 ``[batch + 1]``, where each sequence starts. max_seqlen_q, max_seqlen_k: the longest, a hint here:
    None or a tensor will do. block_table: of paged keys, not implemented.

    Returns out ``[total_q, H, D]``; rows past the last sequence are 0.
    """
    refuse_given(block_table=block_table)
    options = _options(attention_varlen, dropout_p, causal, softmax_scale, window_size, softcap, alibi_slopes, deterministic)
    limits = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    found = attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, return_lse=bool(return_attn_probs), **limits, **options)
    return _result(found, return_attn_probs)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | Tensor | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` of qkv ``[total, 3, H, D]``, one cu_seqlens and one max_seqlen for queries and keys."""
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return flash_attn_varlen_func(*slices("qkv", qkv, 3, 1), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *options)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` of q ``[total_q, H, D]`` and kv ``[total_k, 2, H_kv, D]``."""
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return flash_attn_varlen_func(q, *slices("kv", kv, 2, 1), *lengths, *options)


def flash_attn_with_kvcache(*args, **kwargs):
    """Here so that `from flash_attn import flash_attn_with_kvcache` works; a call raises NotImplementedError."""
    raise NotImplementedError(
        "flash_attn_with_kvcache is not implemented by flashattn: append to the cache yourself and call "
        "flash_attn_func on the part that is filled (causal is bottom-right, so the new rows see all of it), or, where sequences have "
        "filled different parts, flashattn.attention with seqlens_k"
    )
