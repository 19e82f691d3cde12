"""torch's scaled_dot_product_attention, by its arguments and meanings, computed by `attention`; and two ways to give it to others' code.

    scaled_dot_product_attention(q, k, v, is_causal=True)      # a function like torch.nn.functional's
    with routed(): model(x)                                    # what calls torch.nn.functional's gets it
    register(); torch.nn.attention.activate_flash_attention_impl("flashattn")      # torch's own flash backend is it

`routed` replaces an attribute of torch.nn.functional for a while: also for other threads, and not for those who imported the function by
name before. torch.compile takes what the attribute is when it traces, and doesn't look again: compile and run on the same side of `with`.
The registration is below that: torch decides as ever which calls are for its flash backend, on CUDA only.

The surprising fact: is_causal is top-left here. With one new query and a long cache it keeps the first key and no other.
"""

from collections import Counter
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional

from ..api import attention
from .options import refuse

__all__ = ["register", "routed", "scaled_dot_product_attention"]

NAME = "flashattn"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256


def _why_not(query, key, value, attn_mask) -> str | None:
    """What of a call isn't implemented; None if all is."""
    if attn_mask is not None and (not isinstance(attn_mask, Tensor) or attn_mask.dtype not in (torch.bool, *DTYPES)):
        return "attn_mask that is no tensor" if not isinstance(attn_mask, Tensor) else f"attn_mask of {attn_mask.dtype}"
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor) or x.is_nested or x.layout != torch.strided:
            return f"{name} that is no dense tensor"
        if x.dtype not in DTYPES:
            return f"{name} of {x.dtype}"
        if x.dim() < 2:
            return f"{name} of {x.dim()} dimensions"
        if not 1 <= x.shape[-1] <= MAX_HEAD_DIM:
            return f"{name} with a last dimension of {x.shape[-1]}"
    return None


def _bias(mask: Tensor, batch: torch.Size, heads: int, rows: int, keys: int) -> Tensor:
    """The mask as `attention` takes it, by views where possible: copied only where it differs along some of several batch dimensions."""
    whole = (*batch, heads, rows, keys)
    given = (1,) * (len(whole) - mask.dim()) + tuple(mask.shape)
    if len(given) != len(whole) or any(size not in (1, full) for size, full in zip(given, whole, strict=True)):
        raise ValueError(f"attn_mask has shape {tuple(mask.shape)}: expected what broadcasts to {whole}")
    mask = mask.view(given) if mask.dim() < len(given) else mask
    if all(size == 1 for size in given[:-3]):
        return mask.view(1, *given[-3:]) if len(given) < 4 else mask[(0,) * (len(given) - 4)]
    return mask.expand(*batch, -1, -1, -1).flatten(0, -4) if len(batch) > 1 else mask


def _same_leading(query, key, value, enable_gqa: bool) -> tuple[torch.Size, list[Tensor], torch.Size]:
    """(leading dimensions of the result, the tensors as [batch, heads, rows, dim], all batch dimensions), broadcast as matmul would, by
    views where possible."""
    tensors = [x[(None,) * max(0, 3 - x.dim())] for x in (query, key, value)]
    heads = [x.shape[-3] for x in tensors]
    if not enable_gqa:
        try:
            (most,) = torch.broadcast_shapes(*((h,) for h in heads))
        except RuntimeError:
            raise ValueError(
                f"query, key and value have {', '.join(map(str, heads))} heads: expected the same, or enable_gqa=True and a multiple"
            ) from None
        if heads[0] != most:
            heads[0] = most
        if heads[1] != heads[2]:
            heads[1:] = [most, most]
    try:
        batch = torch.broadcast_shapes(*(x.shape[:-3] for x in tensors))
    except RuntimeError:
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        raise ValueError(f"query, key and value have shapes {shapes}: expected batch dimensions that broadcast") from None
    tensors = [x.expand(*batch, h, *x.shape[-2:]) for x, h in zip(tensors, heads, strict=True)]
    count = 1
    for size in batch:
        count *= size
    flat = [x.reshape(count, *x.shape[-3:]) for x in tensors]
    leading = (*batch, heads[0]) if max(x.dim() for x in (query, key, value)) > 2 else ()
    return torch.Size(leading), flat, torch.Size(batch)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(scale * query key^T) value with torch's arguments.

    Args:
        query: ``[..., heads, seqlen_q, head_dim]``; float16, bfloat16 or float32, any strides. Leading dimensions broadcast; those of a
            tensor with fewer than three are left out.
        key, value: ``[..., heads_kv, seqlen_k, head_dim]`` and ``[..., heads_kv, seqlen_k, head_dim_v]``.
        attn_mask: what broadcasts to ``[..., heads, seqlen_q, seqlen_k]``, any strides: bool, True attends, or float16, bfloat16 or
            float32 whatever query has, added to the scores and differentiable. None is none. Where `is_causal`, or an option of
            `flashattn.attention` and `attention_varlen` (windows, padding, documents), says the same, it is faster: nothing is read.
        dropout_p: probability of dropping a weight, drawn from torch's default generator of the device; default 0.0. As in torch it is
            applied whenever it is given, in evaluation too.
        is_causal: query i sees keys j <= i, aligned top-left whatever the lengths. Default False.
        scale: of the scores; None, the default, is 1 / sqrt(head_dim).
        enable_gqa: query head h reads key/value head h // (heads / heads_kv). Without it the numbers of heads must broadcast.

    Returns:
        ``[..., heads, seqlen_q, head_dim_v]`` in the dtype of query.

    Raises:
        NotImplementedError: what is missing, by its name: float64, a last dimension over 256, nested tensors.
        ValueError, TypeError: as `flashattn.attention`, whose words they are; torch raises RuntimeError.

    Differences: a row without keys gives 0; the memory behind the result has heads next to dims, whatever the strides of query.
    """
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask with is_causal=True: expected one of them")
    missing = _why_not(query, key, value, attn_mask)
    if missing is not None:
        refuse(missing, "use torch.nn.functional.scaled_dot_product_attention for it, as `routed` does")
    leading, tensors, batch = _same_leading(query, key, value, bool(enable_gqa))
    bias = None if attn_mask is None else _bias(attn_mask, batch, tensors[0].shape[1], query.shape[-2], key.shape[-2])
    out = attention(*tensors, causal="top-left" if is_causal else False, softmax_scale=scale, bias=bias, dropout_p=dropout_p, layout="bhsd")
    return out.reshape(*leading, *out.shape[-2:])


@contextmanager
def routed():
    """Within it, torch.nn.functional.scaled_dot_product_attention is this module's, and torch's own for what this doesn't implement.

    Derivatives can't be foreseen: the forward-mode and second ones of a call with a mask or dropout raise NotImplementedError here.
    Gives a `Counter` of what became of the calls: {"flashattn": calls, "attn_mask of torch.int64": calls left to torch for it, ...}; those
    inside of a compiled graph are not counted. Of nested ones the inner one takes the calls. nn.MultiheadAttention goes through it in
    training mode; its fast path for inference, in C++, doesn't.
    """
    original, seen = functional.scaled_dot_product_attention, Counter()

    def scaled_dot_product_attention_(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        missing = _why_not(query, key, value, attn_mask)
        if missing is None and not query.dtype == key.dtype == value.dtype and not torch.is_autocast_enabled(query.device.type):
            missing = "dtypes that differ"  # torch has the words
        if not torch.compiler.is_compiling():
            seen[missing or NAME] += 1
        function = scaled_dot_product_attention if missing is None else original
        return function(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    functional.scaled_dot_product_attention = scaled_dot_product_attention_
    try:
        yield seen
    finally:
        functional.scaled_dot_product_attention = original


def register() -> str:
    """Tell torch of this implementation of its flash backend, and return its name there, "flashattn".

    torch.nn.attention.activate_flash_attention_impl("flashattn") then makes it the one that runs, on CUDA, and
    restore_flash_attention_impl() brings torch's back; nothing is activated here. NotImplementedError where torch has no such registry.
    """
    from torch.nn import attention as registry

    if not hasattr(registry, "register_flash_attention_impl"):
        raise NotImplementedError(f"torch {torch.__version__} has no register_flash_attention_impl: use `routed`, or a later torch")
    from .aten import activate

    registry.register_flash_attention_impl(NAME, register_fn=activate)
    return NAME
