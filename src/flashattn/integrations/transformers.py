"""attn_implementation="flashattn" for the models of Transformers.

    from flashattn.integrations.transformers import register
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation=register())

Dense, causal and bidirectional attention, grouped heads, sliding windows, softcap and sinks; batches padded on either side, sequences
packed in a row (found by their position_ids, or told by cu_seq_lens_q and cu_seq_lens_k), and caches of keys. On a CPU it runs too, in
plain PyTorch. Rows of padding get 0 where the attention is causal; "eager" has some number there.

Masks of 4 dimensions, of booleans or added, and the position_bias of T5 and its kin, with its gradient, are the bias of `attention`; and a
mask function beyond causal, bidirectional, windows and packing becomes a mask of booleans, [batch, 1, queries, keys].

What has no meaning here raises NotImplementedError by its name and never goes to another implementation: head masks,
block tables. Attention weights are never returned.

The surprising fact: Transformers takes every name with "flash" in it for a build of flash-attn, loads it from a hub, and lets models refuse
it. `register` therefore also puts an entry before that check.
"""

import inspect
from functools import wraps

import torch
from torch import Tensor

from ..api import attention, attention_varlen
from .options import refuse, refuse_given, wanted
from .packing import Rows, cu_seqlens_of_positions, rows_of_mask

__all__ = ["register"]

NAME = "flashattn"
OTHERS = "use attn_implementation='eager' or 'sdpa'"
MASKS = {  # functions of transformers.masking_utils that say nothing which the call of the layer doesn't say too
    "add_offsets_to_mask_function", "and_masks", "bidirectional_mask_function", "causal_mask_function", "chunked_overlay",
    "packed_sequence_mask_function", "padding_mask_function", "remap_positions_for_packed_sequence", "sliding_window_bidirectional_overlay",
    "sliding_window_overlay",
}  # fmt: skip


def _parts(function) -> set[str]:
    """Names of the functions that a mask function was made of."""
    found, left = set(), [function]
    while left:
        function = left.pop()
        found.add(getattr(function, "__qualname__", repr(function)).partition(".")[0])
        for cell in getattr(function, "__closure__", None) or ():
            held = cell.cell_contents
            left += [part for part in (held if isinstance(held, (tuple, list)) else (held,)) if callable(part)]
    return found


def mask(
    batch_size: int, q_length: int, kv_length: int, q_offset=0, kv_offset: int = 0, mask_function=None, attention_mask=None,
    use_vmap: bool = False, device=None, **kwargs,
) -> Tensor | None:  # fmt: skip
    """The mask that layers get: bool [batch, rows_k], which of their first rows_k keys count; None if all do; bool [batch, 1, q_length,
    kv_length] where the mask function is none of MASKS. Made once a model's forward.

    Transformers' arguments: what the rows are (q_offset, kv_offset: the first one's position), the function that tells pairs, which is the
    layers' own business, and the mask of the caller, bool [batch, positions].
    """
    parts = set() if torch.compiler.is_compiling() else _parts(mask_function)
    if use_vmap or parts - MASKS:  # a model's own (or_mask_function, and_mask_function) or one not known here
        from transformers.masking_utils import sdpa_mask

        whole = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False, "use_vmap": use_vmap, "device": device}
        return sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **whole)
    if attention_mask is None and "causal_mask_function" in parts:
        filled = int(q_offset) + q_length - kv_offset
        if filled < kv_length:  # a cache of a fixed size
            return torch.ones(batch_size, filled, dtype=torch.bool, device=device)
    if attention_mask is None:
        return None
    kept = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    if kept.shape[1] == kv_length and not torch.compiler.is_compiling() and bool(kept.all()):
        return None
    return kept


def _packed(query, key, value, queries: Rows, keys: Rows, limits: dict, options: dict) -> Tensor:
    found = attention_varlen(
        queries.take(query), keys.take(key), keys.take(value), queries.cu_seqlens.int(), keys.cu_seqlens.int(), **limits, **options
    )
    return queries.put(found, query.shape[0], query.shape[2])


def _bias(position_bias: Tensor | None, attention_mask: Tensor | None, rows_k: int) -> Tensor | None:
    """Both in one for the first rows_k keys; attention_mask: bool [batch, keys], or of 4 dimensions, bool or added."""
    bias = None if position_bias is None else position_bias[..., :rows_k]
    if attention_mask is None:
        return bias
    mask = attention_mask[..., :rows_k]
    mask = mask[:, None, None] if mask.dim() == 2 else mask
    if bias is None:
        return mask
    return bias.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else bias + mask


def forward(
    module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0, scaling: float | None = None,
    sliding_window: int | None = None, softcap: float | None = None, is_causal: bool | None = None, s_aux: Tensor | None = None,
    position_ids: Tensor | None = None, cu_seq_lens_q: Tensor | None = None, cu_seq_lens_k: Tensor | None = None, max_length_q=None,
    max_length_k=None, deterministic: bool | None = None, position_bias: Tensor | None = None, **kwargs,
) -> tuple[Tensor, None]:  # fmt: skip
    """What a layer calls: [batch, heads, rows, dim] tensors in, ([batch, rows, heads, dim], None) out.

    attention_mask: what `mask` gave. sliding_window: keys that a causal query sees, itself among them, or those on each side and itself.
    s_aux: sinks, one a head. position_bias: what broadcasts to [batch, heads, rows_q, rows_k], added to scores. dropout: a
    probability, 0.0 where the layer isn't training. The rest as in Transformers' own implementations.
    """
    refuse_given(**{name: kwargs.get(name) for name in ("head_mask", "block_table")})
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    window = None if sliding_window is None else (sliding_window - 1, 0 if causal else sliding_window - 1)
    options = {"causal": causal, "window": window, "softmax_scale": scaling, "deterministic": bool(deterministic)}
    options |= wanted(attention, dropout_p=dropout, softcap=softcap, sinks=s_aux)
    batch, _, rows_q, _ = query.shape
    if attention_mask is not None and attention_mask.dim() == 4:  # says all that there is to say
        options |= {"causal": False, "window": None, "bias": _bias(position_bias, attention_mask, key.shape[2])}
    elif attention_mask is not None:
        if attention_mask.dim() != 2:
            shapes = "[batch, keys] or [batch, heads, queries, keys]"
            refuse(f"a mask of shape {tuple(attention_mask.shape)}", f"pass one of {shapes}, or {OTHERS}")
        rows_k = attention_mask.shape[1]
        if rows_k > key.shape[2]:
            raise ValueError(f"attention_mask has shape {tuple(attention_mask.shape)} and the layer {key.shape[2]} keys: expected no more")
        key, value = key[:, :, :rows_k], value[:, :, :rows_k]
        aligned = causal or window is not None  # then the queries are the last of these rows
        if aligned and (rows_q > rows_k or (not causal and rows_q != rows_k)):
            refuse(f"a window between {rows_q} queries and {rows_k} padded keys")
        sides = None if position_bias is not None else rows_of_mask(attention_mask, rows_q, aligned)
        if sides is not None:
            return _packed(query, key, value, *sides, {}, options), None
    elif cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        refuse_given(**{"position_bias of packed sequences": position_bias})
        limits = {"max_seqlen_q": max_length_q, "max_seqlen_k": max_length_k}
        return _packed(query, key, value, Rows(None, cu_seq_lens_q), Rows(None, cu_seq_lens_k), limits, options), None
    elif causal and position_ids is not None and position_ids.dim() == 2 and 1 < rows_q == key.shape[2] == position_ids.shape[1]:
        cu_seqlens = cu_seqlens_of_positions(position_ids, batch)
        if cu_seqlens is not None:
            refuse_given(**{"position_bias of packed sequences": position_bias})
            side = Rows(None, cu_seqlens)
            return _packed(query, key, value, side, side, {}, options), None
    if position_bias is not None and "bias" not in options:
        options["bias"] = _bias(position_bias, attention_mask, key.shape[2])
    return attention(query, key, value, layout="bhsd", **options).transpose(1, 2), None


def register() -> str:
    """Make attn_implementation="flashattn" known to Transformers, in this process, and return that name. Twice is once.

    ImportError without Transformers; NotImplementedError for a version whose attention interfaces are others (before 5).
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, __version__, masking_utils
    except ImportError as error:
        raise ImportError("flashattn.integrations.transformers needs Transformers: pip install 'flashattn[integrations]'") from error
    arguments = inspect.signature(masking_utils.flash_attention_mask).parameters
    choose = getattr(PreTrainedModel, "_check_and_adjust_attn_implementation", None)
    if choose is None or "q_offset" not in arguments:
        refuse(f"the attention interface of Transformers {__version__}", "install transformers>=5")
    AttentionInterface.register(NAME, forward)
    AttentionMaskInterface.register(NAME, mask)
    if not hasattr(choose, "__flashattn__"):

        @wraps(choose)
        def _check_and_adjust_attn_implementation(self, attn_implementation, *args, **options):
            return NAME if attn_implementation == NAME else choose(self, attn_implementation, *args, **options)

        _check_and_adjust_attn_implementation.__flashattn__ = True
        PreTrainedModel._check_and_adjust_attn_implementation = _check_and_adjust_attn_implementation
    return NAME
