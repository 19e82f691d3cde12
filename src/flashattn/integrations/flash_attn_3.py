"""FlashAttention-3's functions (its module is called `flash_attn_interface`), where they differ from flash-attn 2.8's.

    from flashattn.integrations.flash_attn_3 import flash_attn_func      # was: from flash_attn_interface import flash_attn_func

Other than in `flash_attn`, whose arguments mean the same here where they have the same name:

- There are no dropout_p and alibi_slopes, so softmax_scale follows v (or the lengths) directly.
- return_attn_probs=True gives (out, softmax_lse), two results and not three. The betas of FA3 always gave these two; its later versions
  and this one give out alone without it.
- qkv may also be [batch, seqlen, H + 2 H_kv, D] with num_heads_q=H.
- num_splits, pack_gqa and sm_margin are about how to run and change no result: accepted and not used.
- qv, q_descale, k_descale, v_descale, attention_chunk, seqused_q and seqused_k raise NotImplementedError unless they are None or 0.

There are no kvpacked functions in FA3. The surprising fact: a positional call written for 2.8 runs here too, with dropout_p=0.0 taken for
softmax_scale=0, which averages the values. Use keywords.
"""

from torch import Tensor

from ..api import attention, attention_varlen
from .flash_attn import flash_attn_with_kvcache, slices
from .options import refuse_given, wanted, window_of

__all__ = ["flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

Result = Tensor | tuple[Tensor, Tensor]


def _options(function, causal, softmax_scale, window_size, softcap, deterministic, return_attn_probs) -> dict:
    options = {"causal": bool(causal), "softmax_scale": softmax_scale, "window": window_of(window_size), "deterministic": deterministic}
    return options | {"return_lse": bool(return_attn_probs)} | wanted(function, softcap=softcap)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """Attention of q ``[batch, seqlen_q, H, D]`` to k ``[batch, seqlen_k, H_kv, D]``, v ``[batch, seqlen_k, H_kv, D_v]``.

    Returns out ``[batch, seqlen_q, H, D_v]`` or, with return_attn_probs, (out, softmax_lse ``[batch, H, seqlen_q]``). Arguments and errors:
    the docstring of this module.
    """
    refuse_given(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk)
    return attention(q, k, v, **_options(attention, causal, softmax_scale, window_size, softcap, deterministic, return_attn_probs))


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of qkv ``[batch, seqlen, 3, H, D]``, or of ``[batch, seqlen, H + 2 H_kv, D]`` and num_heads_q = H."""
    if qkv.dim() == 5:
        q, k, v = slices("qkv", qkv, 3, 2)
    else:
        if qkv.dim() != 4 or num_heads_q is None:
            shape = tuple(qkv.shape)
            raise ValueError(f"qkv has shape {shape}: expected [batch, seqlen, 3, heads, dim], or 4 dimensions and num_heads_q")
        heads_kv, rest = divmod(qkv.shape[2] - num_heads_q, 2)
        if heads_kv < 1 or rest:
            raise ValueError(f"num_heads_q={num_heads_q} of the {qkv.shape[2]} heads of qkv: expected an even number left, at least 2")
        q, k, v = qkv.split((num_heads_q, heads_kv, heads_kv), dim=2)
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap,
        deterministic=deterministic, sm_margin=sm_margin, return_attn_probs=return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """Attention of packed sequences, as in `flash_attn.flash_attn_varlen_func`. Returns out ``[total_q, H, D_v]`` or (out, softmax_lse
    ``[H, total_q]``)."""
    refuse_given(
        seqused_q=seqused_q, seqused_k=seqused_k, qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
        attention_chunk=attention_chunk,
    )  # fmt: skip
    options = _options(attention_varlen, causal, softmax_scale, window_size, softcap, deterministic, return_attn_probs)
    limits = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    return attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **limits, **options)
