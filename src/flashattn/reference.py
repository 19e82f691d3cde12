"""The oracle: attention as the formula reads, with the whole score matrix in memory.

Nothing here is clever, so that it can be trusted: torch operations in the dtype of the inputs, gradients by autograd. In float64 it is
the truth that every kernel is measured against; the same function in bfloat16 is the peer whose error sets the tolerance.

Legend of the einsum letters: b batch, h head, i query row, j key row, d head_dim, e head_dim_v.

The surprising fact: masking with -inf is right for the outputs and wrong for the gradients. A row without keys would be softmax of all
-inf, which is NaN, and 0 * NaN is NaN in every gradient that the row touches. So such a row gets finite scores first, and its results
are overwritten afterwards: `masked_fill` passes no gradient back through what it overwrites, not even one that is NaN itself.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from einops import einsum, rearrange, repeat
from torch import Tensor

from flashattn.dropout import dropout_mask
from flashattn.mods import MaskMod, ScoreMod, apply_mask_mod, apply_score_mod, indices
from flashattn.problem import canonical_dropout, canonical_window, default_scale


def online_softmax(scores: Iterable[float], values: Iterable[Any]) -> Iterator[tuple[float, float, Any]]:
    """Softmax-weighted sum of a stream, one (score, value) at a time; yields the state (m, l, o) after each.

    After scores s_1 ... s_t and values v_1 ... v_t

        m = max s_j        l = sum e^(s_j - m)        o = sum e^(s_j - m) v_j

    so that o / l is softmax(s) . v and m + ln l is ln sum e^(s_j), over what has been seen so far. A new score s keeps this true with

        m' = max(m, s)     l' = l e^(m - m') + e^(s - m')     o' = o e^(m - m') + e^(s - m') v

    No exponent is ever positive, so nothing overflows, and nothing seen earlier is needed again: the memory does not grow with the
    stream. That is why attention needs no T x T matrix. The kernels take a tile of keys a step where this takes one key.

        scores            1.0       3.0       2.0       3.5
        values            1         2         3         4
        e^(m - m')        -         0.1353    1         0.6065     a new maximum shrinks all that was summed before
        e^(s - m')        1         1         0.3679    1
        m                 1.0       3.0       3.0       3.5
        l                 1         1.1353    1.5032    1.9117
        o                 1         2.1353    3.2390    5.9645     5.9645 / 1.9117 = 3.1199, the attention output

    >>> for m, l, o in online_softmax([1.0, 3.0, 2.0, 3.5], [1, 2, 3, 4]):
    ...     print(f"m {m:.1f}  l {l:.4f}  o {o:.4f}  o/l {o / l:.4f}")
    m 1.0  l 1.0000  o 1.0000  o/l 1.0000
    m 3.0  l 1.1353  o 2.1353  o/l 1.8808
    m 3.0  l 1.5032  o 3.2390  o/l 2.1547
    m 3.5  l 1.9117  o 5.9645  o/l 3.1199

    scores: real numbers, natural units; -inf is a masked key. values: as many numbers, or vectors of one shape (anything with + and *).
    m and l are floats, o is unnormalised and of the kind of the values. Until a key that is not masked comes, the state is
    (-inf, 0.0, 0.0). Raises ValueError when one stream ends before the other.

    Source: Milakov and Gimelshein, Online normalizer calculation for softmax (2018), section 3, for m and l; Dao et al., FlashAttention
    (2022), section 3.1, for o beside them; Dao, FlashAttention-2 (2023), section 3.1.1, for leaving o unnormalised until the end.
    """
    m, l, o = -math.inf, 0.0, 0.0
    for score, value in zip(scores, values, strict=True):
        score = float(score)
        if score != -math.inf:
            m_new = max(m, score)
            rescale, weight = math.exp(m - m_new), math.exp(score - m_new)
            m, l, o = m_new, l * rescale + weight, o * rescale + weight * value
        yield m, l, o


def keep_mask(seqlen_q: int, seqlen_k: int, *, causal=False, window=None, device=None) -> Tensor:
    """bool [seqlen_q, seqlen_k], True where query i attends to key j: i + d - left <= j <= i + d + right.

    The diagonal d is seqlen_k - seqlen_q, or 0 with causal="top-left"; `causal` caps right at 0. A limit of None is no limit.
    """
    left, right, top_left = canonical_window(causal, window)
    reach = seqlen_q + seqlen_k  # a limit near 2^63 would overflow
    i = torch.arange(seqlen_q, device=device)[:, None] + (0 if top_left else seqlen_k - seqlen_q)
    j = torch.arange(seqlen_k, device=device)
    keep = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if left is not None:
        keep &= j >= i - min(left, reach)
    if right is not None:
        keep &= j <= i + min(right, reach)
    return keep


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    score_mod_aux: Sequence[Tensor] = (),
    mask_mod: MaskMod | None = None,
    mask_mod_aux: Sequence[Tensor] = (),
    block_mask: Any = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    seqlens_k: Tensor | list[int] | None = None,
    layout: str = "bshd",
    return_lse: bool = False,
    first_entry: int = 0,
) -> Tensor | tuple[Tensor, Tensor]:
    """out_i = sum_j p_ij v_j,   p_ij = e^(s_ij - lse_i),   lse_i = ln (e^sink + sum_j e^(s_ij))   over the kept keys j, where

        s_ij = softcap tanh(scale q_i . k_j / softcap) - slope |i + seqlen_k - seqlen_q - j| + bias_ij

    Then the twin of a score_mod changes s_ij, and that of a mask_mod says which j are kept beside those of causal and window.
    With dropout, p_ij is multiplied by keep_ij / (1 - dropout_p), where keep is `dropout_mask` of the seed; lse is not touched.

    A row without keys gives out 0, lse -inf (or its sink) and exactly zero gradients in q, k, v and bias; a key whose bias is -inf, or
    False, or whose score a score_mod makes -inf, is none.

    q [batch, seqlen_q, heads_q, head_dim], k [batch, seqlen_k, heads_kv, head_dim], v [batch, seqlen_k, heads_kv, head_dim_v]; with
    layout="bhsd" the two middle dimensions are swapped. Query head h reads key/value head h // (heads_q // heads_kv).
    causal: False, True (bottom-right) or "top-left"; window: (left, right), see `keep_mask`. softmax_scale: default 1 / sqrt(head_dim).
    softcap: None or 0 for none. alibi_slopes: [heads_q] or [batch, heads_q], None for 0. sinks: [heads_q], None for -inf. bias: broadcast
    to [batch, heads_q, seqlen_q, seqlen_k]; of booleans True is 0 and False -inf; None for 0. score_mod, mask_mod: records, with the
    tensors that they read; first_entry: the number of the first batch entry, as they are told it.
    seqlens_k: [batch], how many keys each batch entry has, from the first on: as if the others weren't there.
    block_mask: a `flashattn.BlockMask`, or anything whose to_dense() is bool [batch or 1, heads_q or 1, seqlen_q, seqlen_k], True where a
    pair is kept; None for all.
    dropout_seed: int, or int64 (seed, offset); or the mask itself, bool [batch, heads_q, seqlen_q, seqlen_k], True where a pair is kept.
    Returns out [batch, seqlen_q, heads_q, head_dim_v] (in the order of `layout`) and with return_lse also lse, natural logarithm,
    [batch, heads_q, seqlen_q]. Both have the dtype of q, in which everything is computed but the distance times its slope and the sum with
    a bias, which are rounded to it; both are differentiable any number of times.

    Sources: Vaswani et al., Attention Is All You Need (2017), section 3.2.1; Gemma Team, Gemma 2 (2024), section 2, for the softcap; Press
    et al., Train Short, Test Long (2021), section 3, for the slopes; Xiao et al., Efficient Streaming Language Models with Attention Sinks
    (2023), section 3, and OpenAI, gpt-oss (2025), section 2, for a learned sink in the denominator.
    """
    if layout not in ("bshd", "bhsd"):
        raise ValueError(f"layout={layout!r}: expected 'bshd' or 'bhsd'")
    if layout == "bhsd":
        q, k, v = (rearrange(x, "b h s d -> b s h d") for x in (q, k, v))
    if seqlens_k is not None:
        options = {"causal": causal, "window": window, "softmax_scale": softmax_scale, "softcap": softcap, "sinks": sinks}
        options |= {"score_mod": score_mod, "score_mod_aux": score_mod_aux, "mask_mod": mask_mod, "mask_mod_aux": mask_mod_aux}
        extras = alibi_slopes, bias, dropout_p, dropout_seed
        out, lse = _of_used_keys(q, k, v, torch.as_tensor(seqlens_k).tolist(), *extras, **options)
        out = rearrange(out, "b s h e -> b h s e") if layout == "bhsd" else out
        return (out, lse) if return_lse else out
    group = q.shape[2] // k.shape[2]
    k, v = (repeat(x, "b s h d -> b s (h g) d", g=group) for x in (k, v))
    scale = default_scale(q.shape[-1]) if softmax_scale is None else softmax_scale

    keep = keep_mask(q.shape[1], k.shape[1], causal=causal, window=window, device=q.device)
    keep = keep if block_mask is None else keep & block_mask.to_dense()
    attended = keep if bias is None else keep & (bias if bias.dtype == torch.bool else bias != -math.inf)
    scores = attention_scores(q, k, scale, softcap=softcap, alibi_slopes=alibi_slopes, bias=bias)
    entries, row, key = (torch.arange(size, device=q.device) for size in (q.shape[0], q.shape[1], k.shape[1]))
    where = indices(entries + first_entry, slice(0, q.shape[2]), row, key)
    if score_mod is not None:
        scores = apply_score_mod(score_mod, scores, where, score_mod_aux)
        attended = attended & (scores != -math.inf)
    if mask_mod is not None:
        keep = (keep & apply_mask_mod(mask_mod, where, tuple(mask_mod_aux))).expand(scores.shape)
        attended = attended & keep
    empty = ~attended.any(dim=-1)  # [seqlen_q], or with a bias [..., seqlen_q] of as many dimensions as it has
    scores = scores.masked_fill(~keep, -math.inf)
    nothing = empty[..., None]  # neither a key nor a sink
    if sinks is not None:  # one more key, of value 0
        column = repeat(sinks.to(q.dtype), "h -> b h i 1", b=q.shape[0], i=q.shape[1])
        nothing = nothing & (column == -math.inf)
        scores = torch.cat([scores, column], dim=-1)
    scores = scores.masked_fill(nothing, 0.0)
    p = scores.softmax(dim=-1)[..., : k.shape[1]]
    if dropout_p:
        p = dropped(p, dropout_p, dropout_seed)
    out = einsum(p, v, "b h i j, b j h e -> b i h e").masked_fill(_rows_first(empty), 0.0)
    if layout == "bhsd":
        out = rearrange(out, "b s h e -> b h s e")
    if not return_lse:
        return out
    # the gradient of logsumexp is e^(s - lse), which of large scores is no softmax: shifted, they aren't large
    peak = scores.detach().amax(dim=-1, keepdim=True) if scores.shape[-1] else scores.new_zeros(())
    peak = torch.where(peak.isfinite(), peak, 0.0)
    lse = (scores - peak).logsumexp(dim=-1) + peak.squeeze(-1)
    return out, lse.masked_fill(nothing.squeeze(-1), -math.inf)


def _of_used_keys(q, k, v, lengths: list[int], alibi_slopes, bias, dropout_p, dropout_seed, **options) -> tuple[Tensor, Tensor]:
    """`attention_reference` of each batch entry alone, with the keys that it has."""
    outs, lses = [], []
    for n, used in enumerate(lengths):
        own = options | {"alibi_slopes": alibi_slopes[n] if alibi_slopes is not None and alibi_slopes.dim() == 2 else alibi_slopes}
        if bias is not None:
            whole = bias.expand(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
            own["bias"] = whole[n : n + 1, ..., :used]
        if dropout_p:
            is_mask = isinstance(dropout_seed, Tensor) and dropout_seed.dtype == torch.bool
            sizes = q.shape[0], q.shape[2], q.shape[1], k.shape[1]
            mask = dropout_seed if is_mask else dropout_mask(dropout_p, dropout_seed, *sizes, device=q.device)
            own |= {"dropout_p": dropout_p, "dropout_seed": mask[n : n + 1, ..., :used]}
        out, lse = attention_reference(q[n : n + 1], k[n : n + 1, :used], v[n : n + 1, :used], **own, return_lse=True, first_entry=n)
        outs.append(out)
        lses.append(lse)
    if not outs:
        return q.new_zeros(*q.shape[:-1], v.shape[-1]), q.new_zeros(q.shape[0], q.shape[2], q.shape[1])
    return torch.cat(outs), torch.cat(lses)


def _rows_first(empty: Tensor) -> Tensor:
    """[..., heads, seqlen_q] or [seqlen_q], to broadcast with [batch, seqlen_q, heads, dim]."""
    return (empty[None] if empty.dim() == 1 else empty).transpose(-1, -2)[..., None]


def attention_scores(
    q: Tensor, k: Tensor, scale: float, *, softcap: float | None = None, alibi_slopes: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """s_ij [batch, heads, seqlen_q, seqlen_k] of q [batch, seqlen_q, heads, head_dim] and k with as many heads; no mask. As above."""
    scores = einsum(q, k, "b i h d, b j h d -> b h i j") * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        scores = (scores - alibi_slopes[..., None, None] * distances(q.shape[1], k.shape[1], q.device)).to(q.dtype)
    if bias is not None:
        scores = scores.masked_fill(~bias, -math.inf) if bias.dtype == torch.bool else (scores + bias).to(q.dtype)
    return scores


def dropped(p: Tensor, dropout_p: float, dropout_seed: int | Tensor) -> Tensor:
    """p [batch, heads, seqlen_q, seqlen_k] after dropout. dropout_p is rounded to float32, as kernels have it."""
    is_mask = isinstance(dropout_seed, Tensor) and dropout_seed.dtype == torch.bool
    keep = dropout_seed if is_mask else dropout_mask(dropout_p, dropout_seed, *p.shape, device=p.device)
    dropout_p = canonical_dropout(dropout_p)
    return p.masked_fill(~keep, 0.0) / (1.0 - dropout_p if dropout_p < 1.0 else 1.0)


def distances(seqlen_q: int, seqlen_k: int, device=None) -> Tensor:
    """|i + seqlen_k - seqlen_q - j|: how far a key is from the diagonal that ends in the bottom-right corner."""
    i = torch.arange(seqlen_q, device=device)[:, None] + seqlen_k - seqlen_q
    return (i - torch.arange(seqlen_k, device=device)).abs()


def attention_varlen_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | list[int],
    cu_seqlens_k: Tensor | list[int],
    *,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    score_mod_aux: Sequence[Tensor] = (),
    mask_mod: MaskMod | None = None,
    mask_mod_aux: Sequence[Tensor] = (),
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | list[Tensor] | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Packed sequences, each alone: rows cu_seqlens_q[n] : cu_seqlens_q[n + 1] of q see rows cu_seqlens_k[n] : cu_seqlens_k[n + 1] of k, v.

    q [total_q, heads_q, head_dim], k [total_k, heads_kv, head_dim], v [total_k, heads_kv, head_dim_v]; options as in
    `attention_reference`, the diagonal being each sequence's own, as are the positions that mods are told, and dropout that of batch entry
    n in sequence n (or dropout_seed is a list of masks). Returns out [total_q, heads_q, head_dim_v] and with return_lse also lse [heads_q,
    total_q]. Rows past the last cu_seqlens give out 0, lse -inf and zero gradients whatever they hold.
    """
    cu_q, cu_k = (torch.as_tensor(cu).tolist() for cu in (cu_seqlens_q, cu_seqlens_k))
    if len(cu_q) != len(cu_k):
        raise ValueError(f"cu_seqlens_q has {len(cu_q)} entries and cu_seqlens_k has {len(cu_k)}: expected batch + 1 in both")
    outs, lses = [], []
    options = {"causal": causal, "window": window, "softmax_scale": softmax_scale, "softcap": softcap, "sinks": sinks}
    options |= {"dropout_p": dropout_p, "score_mod": score_mod, "score_mod_aux": score_mod_aux}
    options |= {"mask_mod": mask_mod, "mask_mod_aux": mask_mod_aux}
    for n, ((q0, q1), (k0, k1)) in enumerate(zip(pairwise(cu_q), pairwise(cu_k), strict=True)):
        alone = (x[None, a:b] for x, a, b in ((q, q0, q1), (k, k0, k1), (v, k0, k1)))
        slopes = alibi_slopes[n] if alibi_slopes is not None and alibi_slopes.dim() == 2 else alibi_slopes
        if dropout_p:
            is_masks = isinstance(dropout_seed, list)
            sizes = n + 1, q.shape[1], q1 - q0, k1 - k0
            options["dropout_seed"] = dropout_seed[n] if is_masks else dropout_mask(dropout_p, dropout_seed, *sizes, device=q.device)[n:]
        out, lse = attention_reference(*alone, **options, alibi_slopes=slopes, return_lse=True, first_entry=n)
        outs.append(out[0])
        lses.append(lse[0])
    tail = q.shape[0] - cu_q[-1]
    out = torch.cat([*outs, q.new_zeros(tail, q.shape[1], v.shape[-1])])
    lse = torch.cat([*lses, q.new_full((q.shape[1], tail), -math.inf)], dim=-1)
    return (out, lse) if return_lse else out
