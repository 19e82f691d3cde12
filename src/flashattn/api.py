"""The public functions: what a call means, its defaults, its checks, and one call down.

Layout is settled here by transposed views (strides carry it, nothing is copied), so everything below sees [batch, rows, heads, dim].
Over 300 lines because a public docstring says all that a caller has to know.
"""

import math
from collections.abc import Sequence

import torch

from . import torch_ops
from .block_mask import BlockMask, check_block_mask
from .checks import (
    TORCH_DTYPES,
    check_bias,
    check_cu_seqlens,
    check_dropout,
    check_layout,
    check_mod,
    check_mod_shapes,
    check_options,
    check_seed,
    check_seqlens_k,
    check_sinks,
    check_slopes,
    check_softcap,
    check_tensors,
    refuse_packed_bias,
)
from .dispatch.select import check_impl
from .dropout import seed_tensor
from .mods import MaskMod, ScoreMod, added_by
from .problem import canonical_window, default_scale


def _autocast(q, k, v):
    """Under autocast attention runs in the autocast dtype, like a matrix product."""
    if not (isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)):
        return q, k, v  # check_tensors has the words for it
    device = q.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # to ask about "meta" is an error
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    return tuple(tensor.to(dtype) if tensor.dtype in TORCH_DTYPES else tensor for tensor in (q, k, v))


def _prepare(q, k, v, causal, window, softmax_scale, layout, deterministic, impl):
    """Checked tensors in [batch, rows, heads, dim] (or packed: `layout` None) order, and the options every operator call takes."""
    window, softmax_scale = check_options(causal, window, softmax_scale, deterministic)
    check_impl(impl)
    q, k, v = _autocast(q, k, v)
    check_tensors(q, k, v, layout)
    if layout == "bhsd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    left, right, top_left = canonical_window(causal, window)
    scale = default_scale(q.shape[-1]) if softmax_scale is None else softmax_scale
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    return q, k, v, (scale, left, right, top_left, deterministic, impl)


def _extras(q, k, softcap, alibi_slopes, sinks, bias, dropout_p, dropout_seed=None, generator=None, sequences=None):
    """(alibi_slopes, sinks, bias, softcap, dropout_p, rng) as operators take them, checked; `sequences` of a packed call, else None."""
    softcap = check_softcap(softcap)
    check_slopes(alibi_slopes, q, q.shape[-2], q.shape[0] if sequences is None else sequences)
    check_sinks(sinks, q, q.shape[-2])
    if sequences is None:
        bias = check_bias(bias, q, (q.shape[0], q.shape[2], q.shape[1], k.shape[1]))
    else:
        refuse_packed_bias(bias)
    dropout_p, seed = check_dropout(dropout_p), check_seed(dropout_seed, generator, q.device)
    if dropout_p and hasattr(q, "placements"):  # the mask of a shard is that of its place in the whole, which no shard knows
        raise NotImplementedError(
            f"dropout_p={dropout_p} of a DTensor is not implemented: call attention with q.to_local() and so on, and a seed of each rank"
        )
    rng = seed_tensor(seed, generator, q.device) if dropout_p else None
    return alibi_slopes, None if sinks is None else sinks.float(), bias, softcap, dropout_p, rng


def _mods(q, score_mod, score_mod_aux, mask_mod, mask_mod_aux, packed=False) -> tuple:
    """(score_mod, mask_mod, what they read) as operators take them, checked."""
    score, score_aux = check_mod("score_mod", ScoreMod, score_mod, score_mod_aux, q, packed)
    mask, mask_aux = check_mod("mask_mod", MaskMod, mask_mod, mask_mod_aux, q, packed)
    return torch_ops.NO_MODS if score is None and mask is None else (score, mask, (*score_aux, *mask_aux))


def _fit(mods, q, k, sequences=None) -> None:
    """ValueError unless what mods read has the shapes that they say."""
    score, mask, aux = mods
    for name, kind, key in (("score_mod", ScoreMod, score), ("mask_mod", MaskMod, mask)):
        if key is not None:
            record = kind.records[key]
            check_mod_shapes(name, record, aux[: len(record.aux)], q, k, sequences)
            aux = aux[len(record.aux) :]


def _learned(q, k, bias, mods) -> tuple:
    """(bias, mods) of a dense call, where what a score_mod adds is a bias if it reads something that requires a gradient."""
    score, mask, aux = mods
    if score is None or not torch.is_grad_enabled():
        return bias, mods
    record = ScoreMod.records[score]
    mine, others = aux[: len(record.aux)], aux[len(record.aux) :]
    if not any(x.requires_grad for x in mine):
        return bias, mods
    added = added_by(record, mine, q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    if bias is not None:
        bias = check_bias(bias, q, (q.shape[0], q.shape[2], q.shape[1], k.shape[1]))
        added = added.masked_fill(~bias, -math.inf) if bias.dtype == torch.bool else added + bias
    return added, torch_ops.NO_MODS if mask is None else (None, mask, others)


def _call(args, mods):
    """(out, lse) of the arguments of an operator."""
    score_mod, mask_mod, aux = mods
    return torch_ops.attn_fwd(*args) if mods is torch_ops.NO_MODS else torch_ops.attn_mod_fwd(*args, score_mod, mask_mod, *aux)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    score_mod: ScoreMod | str | None = None,
    score_mod_aux: Sequence[torch.Tensor] = (),
    mask_mod: MaskMod | str | None = None,
    mask_mod_aux: Sequence[torch.Tensor] = (),
    block_mask: BlockMask | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | torch.Tensor | None = None,
    generator: torch.Generator | None = None,
    seqlens_k: torch.Tensor | None = None,
    layout: str = "bshd",
    return_lse: bool = False,
    deterministic: bool = False,
    impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    r"""Exact attention, differentiable in q, k, v, sinks and bias.

    .. math::
        s_{ij} = \text{softmax\_scale} \; q_i \cdot k_j, \qquad
        \text{lse}_i = \ln \sum_{j \in K(i)} e^{s_{ij}}, \qquad
        \text{out}_i = \sum_{j \in K(i)} e^{s_{ij} - \text{lse}_i} \, v_j

    where K(i) is the set of keys that row i keeps. With the options for it, in this order, scores are capped, lowered by distance and
    biased, and a sink joins the denominator:

    .. math::
        s'_{ij} = \text{softcap} \, \tanh(s_{ij} / \text{softcap})
            - \text{slope} \; |i + \text{seqlen}_k - \text{seqlen}_q - j| + \text{bias}_{ij}, \qquad
        \text{lse}_i = \ln \Big( e^{\text{sink}} + \sum_{j \in K(i)} e^{s'_{ij}} \Big)

    A score_mod changes :math:`s'` after all this, one score at a time, and a mask_mod takes keys out of K(i).

    Dropout comes last: each :math:`e^{s_{ij} - \text{lse}_i}` is multiplied by :math:`z_{ij}`, 0 with probability dropout_p and else
    ``1 / (1 - dropout_p)``. lse is that of all the keys, dropped or not.

    The score matrix never exists in memory: tiles of keys stream past a block of queries under the online softmax, and the backward
    rebuilds the probabilities from lse.

    Derivatives, dense and packed, all in memory linear in the lengths. Gradients. Forward-mode ones along tangents of q, k, v and sinks,
    of which some may have none (``torch.func.jvp``, ``jacfwd``, ``torch.autograd.forward_ad``): one fused kernel gives out, lse and their
    tangents, and no other runs. Second ones (``create_graph=True``, ``torch.func.hessian``, the gradient of a jvp, the jvp of a gradient):
    recomputed in plain PyTorch a chunk of rows at a time, whatever `impl` says. With a dot for a tangent and p for the probabilities,

    .. math::
        \dot s_{ij} = \text{softmax\_scale} \, (\dot q_i \cdot k_j + q_i \cdot \dot k_j), \qquad
        \dot{\text{lse}}_i = \sum_j p_{ij} \dot s_{ij}, \qquad
        \dot{\text{out}}_i = \sum_j p_{ij} (\dot s_{ij} v_j + \dot v_j) - \dot{\text{lse}}_i \, \text{out}_i

    Not there: third derivatives, and the tangent of a tangent (``jvp`` of ``jvp``); ``detach()`` what needs none, as the tangent in the
    target of consistency training. One graph of ``torch.compile`` (fullgraph=True) can't hold ``torch.func``'s transforms of attention;
    where the graph may break they work. ``torch.vmap`` of dense calls works over all of them.

    Args:
        q: queries ``[batch, seqlen_q, heads_q, head_dim]``; float16, bfloat16 or float32; head_dim 1 to 256. Any strides; a last dimension
            that is not contiguous is copied once.
        k: keys ``[batch, seqlen_k, heads_kv, head_dim]``; query head h reads key/value head ``h // (heads_q // heads_kv)``, so
            heads_q must be a multiple of heads_kv (grouped- and multi-query attention).
        v: values ``[batch, seqlen_k, heads_kv, head_dim_v]``; head_dim_v 1 to 256, may differ from head_dim.
        causal: False; True: query i keeps keys ``j <= i + seqlen_k - seqlen_q`` (the diagonal ends in the bottom-right corner);
            ``"top-left"``: ``j <= i``, the meaning of ``scaled_dot_product_attention(is_causal=True)``. They differ when the lengths do.
        window: ``(left, right)``, the number of keys kept each side of that diagonal, itself included and always kept; None is no limit,
            0 the diagonal alone. ``causal`` is the window ``(None, 0)``; together they keep what both keep.
        softmax_scale: factor of the scores, at most 1.7e38 in magnitude (half of the largest float32); default ``1 / sqrt(head_dim)``.
            Triton kernels take one below 2**-120 for 0.
        softcap: a bound of the scores, which tanh bends towards it; positive, any size. None or 0 is none. The tanh of ``"hopper"`` is the
            GPU's instruction, within 2**-11 of its size; that of the others is exact to float32.
        alibi_slopes: float32 ``[heads_q]`` or ``[batch, heads_q]``: what a step away from the diagonal costs a score. The diagonal is the
            bottom-right one, with ``causal="top-left"`` too. No derivative: a tensor that requires a gradient or has a tangent is refused.
        sinks: ``[heads_q]``, float32, float16 or bfloat16: a learned logit of each head, in natural units, that takes its share of the
            softmax and gives nothing. -inf is none, and so is less than -2e38; nothing above 2e38. Differentiable.
        bias: ``[batch, heads_q, seqlen_q, seqlen_k]`` or what broadcasts to it, in that order whatever `layout` says: sizes of 1, expanded
            dimensions and missing leading ones; any strides. float32, float16 or bfloat16, whatever q has, is added to the scores; -inf
            takes a key away, and a finite number, however low, does not: a row of nothing but the lowest is an average. bool: True attends,
            False is -inf. None is none. Differentiable: the gradient has its shape and dtype, summed in float32 along dimensions of size 1,
            without a copy as large as the sum's terms (one that was expanded is of the size it was expanded to: pass size 1 instead).
        score_mod: what changes every score, a :class:`ScoreMod` or the name of one: of `flashattn.mods`, ``"softcap"``, ``"alibi"`` and
            ``"relative_bias"`` (T5), or your own. A score that it makes -inf is taken away. Differentiable in q, k, v, sinks and bias if it
            has a derivative; if it has none, the backward says so when it runs, unless it needs none (that of v). It runs in the
            ``"portable"`` kernels and, its twin, in ``"eager"``. None is none.
        mask_mod: what keeps keys, beside causal and window: a :class:`MaskMod` or the name of one: ``"documents"``, ``"prefix_lm"``, or
            your own. All keys that causal and window keep are walked, so it saves no time: a block_mask does. None is none.
        score_mod_aux, mask_mod_aux: the tensors that they read, as many as the records name, on q's device, of the shapes that
            these say, any strides and any dtype but complex; other sizes, where 1 or a multiple of 16 becomes something else, compile
            kernels anew. Differentiable are those of a score_mod that ``adds``, as ``"alibi"`` and ``"relative_bias"`` do: where one
            requires a gradient the call is one with a bias. Others that require a gradient are refused.
        block_mask: a :class:`BlockMask` ``[batch or 1, heads_q or 1, seqlen_q, seqlen_k]`` on q's device: the pairs that are kept, at the
            cost of the blocks of 128 x 128 that keep some. What no pair of a block keeps is not read: NaN in keys that nobody keeps, in
            blocks of their own, change nothing. Instead of causal and window: ``mask & BlockMask.from_window(...)`` says both. Default
            None. ``"portable"`` and ``"eager"`` take one.
        dropout_p: probability, 0 to 1, that a pair of a query and a key gives nothing; default 0.0, no dropout. It is up to the caller to
            pass 0.0 in evaluation. With 1.0 out is 0, and so are the gradients but those that come through lse.
        dropout_seed: what decides which pairs: an int, or an int64 tensor of two, (seed, offset), on q's device; an int is the seed with
            offset 0. The same seed drops the same pairs, whatever kernel, layout and dtype: :func:`dropout_mask` tells which. Default None:
            both are drawn, on the device, as a random tensor of torch is, so ``torch.manual_seed``, the saved state of activation
            checkpointing, and graphs of CUDA that are replayed each see to it that masks repeat or differ as those of torch do.
        generator: the ``torch.Generator`` to draw them from, instead of torch's default one of the device. Not under activation
            checkpointing, which restores the default ones alone, so that a call made again would drop others: pass dropout_seed there. Nor
            inside of ``torch.compile``, which takes no generators.
        seqlens_k: int32 ``[batch]`` on q's device, or None: how many keys each batch entry has, from the first on, 0 to seqlen_k; padding
            that is not read. As if the others weren't there: NaN in them changes nothing, their gradients are 0, and the bottom-right
            corner, for ``causal``, a window and ALiBi, is that of the keys there are. So ``causal=True`` is for a few new queries against a
            cache, and ``"top-left"`` for queries that are padded on the right as keys are; those of the padding are rows like others, and
            have to be finite where there is a backward. Nothing waits for the values. Not for ``"hopper"``; nor the backward of
            ``"portable"`` beside a bias. Padding on the left, and of queries, is for :func:`attention_varlen`.
        layout: ``"bshd"`` as above, or ``"bhsd"``: q, k, v and out are ``[batch, heads, seqlen, dim]`` (nothing is copied).
        return_lse: also return lse.
        deterministic: promise gradients that are bitwise equal from run to run; ``torch.use_deterministic_algorithms(True)`` asks for it
            too. Only ``"hopper"`` has to be asked, for dq, and takes longer then: parts of dq wait for their turn.
        impl: None: for each pass, forward and backward, the first kernel of the table that can run it. ``"hopper"`` (Gluon: compute
            capability 9.0; float16 and bfloat16; every row of q, k and v aligned to 16 bytes and no dimension expanded; head_dim_v, and
            for the backward head_dim too, a multiple of 8), ``"portable"`` (Triton) or
            ``"eager"`` (plain PyTorch, linear memory): that one or an error, never another.

    Returns:
        out ``[batch, seqlen_q, heads_q, head_dim_v]`` in q's dtype (under autocast: the autocast dtype). With ``return_lse``: (out, lse),
        lse float32 ``[batch, heads_q, seqlen_q]``, natural logarithm, sinks included, differentiable. A row with no key to see: out 0,
        lse -inf or the sink of its head, gradients 0 (that of lse goes to the sink).

    Raises:
        ValueError: shapes, devices or option values that don't fit together; on the CPU, and on a GPU when ``FLASHATTN_CHECK=1`` is set
            (that synchronises), values of seqlens_k outside of 0 to seqlen_k, which else are taken for the nearest of these.
        TypeError: dtypes, non-tensors.
        NotImplementedError: head_dim over 256; alibi_slopes that require a gradient; dropout, mods or a block_mask of a DTensor; a
            block_mask beside seqlens_k or a mod; ``impl`` names a kernel that can't run the call (with its reasons); a third derivative; a
            forward-mode one of a forward-mode one; with a bias, a mod, a block_mask or dropout any but the first in reverse; a mod's aux
            that require a gradient; in the backward, a score_mod without a derivative.

    float32 products are IEEE float32 unless ``torch.backends.cuda.matmul`` allows tf32.

    Source: Dao et al. 2022 (FlashAttention), section 3.1 and appendix B; Dao 2023 (FlashAttention-2), section 3; Milakov & Gimelshein 2018
    (online softmax), section 3. softcap: Gemma Team 2024 (Gemma 2), section 2. alibi_slopes: Press et al. 2021 (ALiBi), section 3. sinks:
    Xiao et al. 2023 (StreamingLLM), section 3; learned ones, OpenAI 2025 (gpt-oss), section 2. dropout_p: Vaswani et al. 2017, section 5.4.
    Tangents: Lu & Song 2024 (sCM), appendix on a flash attention with them.
    """
    dropout = dropout_p, dropout_seed, generator
    mods = torch_ops.NO_MODS
    if not (score_mod is None and mask_mod is None and score_mod_aux == () and mask_mod_aux == ()):
        mods = _mods(q, score_mod, score_mod_aux, mask_mod, mask_mod_aux)
    key = None
    if seqlens_k is None and block_mask is None and mods is torch_ops.NO_MODS:
        key = torch_ops.key_of(
            q, k, v, causal, window, softmax_scale, layout, deterministic, impl, softcap, alibi_slopes, sinks, bias, dropout
        )
    forward = torch_ops.known(key)
    if forward is not None:
        if layout == "bhsd":
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out, lse = forward(q, k, v, None, None)
    else:
        check_layout(layout)
        q, k, v, options = _prepare(q, k, v, causal, window, softmax_scale, layout, deterministic, impl)
        check_seqlens_k(seqlens_k, q, q.shape[0])
        _fit(mods, q, k)
        bias, mods = _learned(q, k, bias, mods)
        extras = _extras(q, k, softcap, alibi_slopes, sinks, bias, *dropout)
        blocks = check_block_mask(block_mask, q, k, causal, window, seqlens_k, mods is not torch_ops.NO_MODS)
        seqlens_k = None if seqlens_k is None else seqlens_k.contiguous()
        out, lse = _call((q, k, v, *extras, blocks, None, seqlens_k, None, None, *options), mods)
        if key is not None:
            torch_ops.remember(key, q, k, v, options)
    if layout == "bhsd":
        out = out.transpose(1, 2)
    return (out, lse) if return_lse else out


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    max_seqlen_q: int | torch.Tensor | None = None,
    max_seqlen_k: int | torch.Tensor | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    score_mod: ScoreMod | str | None = None,
    score_mod_aux: Sequence[torch.Tensor] = (),
    mask_mod: MaskMod | str | None = None,
    mask_mod_aux: Sequence[torch.Tensor] = (),
    dropout_p: float = 0.0,
    dropout_seed: int | torch.Tensor | None = None,
    generator: torch.Generator | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    r"""Exact attention of a packed batch: sequences of different lengths one after another, without padding.

    Sequence b has the query rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]`` and the key rows ``cu_seqlens_k[b]`` to
    ``cu_seqlens_k[b + 1]``; each is :func:`attention` on its own, with its own diagonal.

    Args:
        q: ``[total_q, heads_q, head_dim]``. k: ``[total_k, heads_kv, head_dim]``. v: ``[total_k, heads_kv, head_dim_v]``. Dtypes, heads
            and strides as in :func:`attention`.
        cu_seqlens_q, cu_seqlens_k: int32 ``[batch + 1]``, cumulative lengths in rows, on q's device: 0 first, never falling, the last at
            most total. Lengths may be 0. Rows past the last entry belong to nobody: they are never read into a result, their out and
            gradients are 0 and their lse is -inf.
        max_seqlen_q, max_seqlen_k: an upper bound of the longest sequence in rows, or None. A hint for the order of work; results don't
            depend on it and no device synchronisation is needed without it. A tensor is accepted and not read.
        causal, window, softmax_scale, softcap, sinks, return_lse, deterministic, impl: as in :func:`attention`.
        score_mod, score_mod_aux, mask_mod, mask_mod_aux: as in :func:`attention`; the batch that they are told is the number of the
            sequence, and positions are counted in it.
        dropout_p, dropout_seed, generator: as in :func:`attention`; sequence b has the mask of batch entry b.
        alibi_slopes: float32 ``[heads_q]`` or ``[batch, heads_q]``, then those of each sequence; each has its own diagonal.
        bias: only None: the sequences of a packed call share no ``[seqlen_q, seqlen_k]``. NotImplementedError for another says what works.

    Returns:
        out ``[total_q, heads_q, head_dim_v]``; with ``return_lse`` also lse ``[heads_q, total_q]``, float32, natural logarithm.

    Raises:
        As :func:`attention`. The *values* of cu_seqlens are validated on the CPU, and on a GPU when ``FLASHATTN_CHECK=1`` is set (that
        synchronises); without it, bad values on a GPU give wrong rows but never an access outside the tensors; the ``"hopper"`` backward of
        a deterministic call may not end.

    Source: as :func:`attention`.
    """
    q, k, v, options = _prepare(q, k, v, causal, window, softmax_scale, None, deterministic, impl)
    limits = check_cu_seqlens(
        q,
        {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k},
        {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k},
    )
    sequences = cu_seqlens_q.shape[0] - 1
    extras = _extras(q, k, softcap, alibi_slopes, sinks, bias, dropout_p, dropout_seed, generator, sequences)
    mods = _mods(q, score_mod, score_mod_aux, mask_mod, mask_mod_aux, packed=True)
    _fit(mods, q, k, sequences)
    out, lse = _call((q, k, v, *extras, None, cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous(), *limits, *options), mods)
    return (out, lse) if return_lse else out


def explain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    *,
    max_seqlen_q: int | torch.Tensor | None = None,
    max_seqlen_k: int | torch.Tensor | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    score_mod: ScoreMod | str | None = None,
    score_mod_aux: Sequence[torch.Tensor] = (),
    mask_mod: MaskMod | str | None = None,
    mask_mod_aux: Sequence[torch.Tensor] = (),
    block_mask: BlockMask | None = None,
    dropout_p: float = 0.0,
    seqlens_k: torch.Tensor | None = None,
    layout: str = "bshd",
    deterministic: bool = False,
    impl: str | None = None,
    gpu: str | None = None,
) -> torch_ops.Explanation:
    """What :func:`attention` (or, with cu_seqlens, :func:`attention_varlen`) would run for this call, without running it.

    Arguments as there; tensors on the ``meta`` device or fakes of fixed sizes do, for their shapes. Returns an `Explanation`: print it,
    or read its fields: the kernel of each pass ("forward", "backward", and "tangent" for forward-mode derivatives), why the ones before it
    in the table can't run, the tiles, FLOPs (4 * pairs * dim forward, 2.5 times that backward, 3 times with tangents, kept pairs only),
    the least bytes that must move, and the roofline: the least time that a GPU's peak and bandwidth allow, and which of the two binds.
    `.measured(forward=ms, backward=ms)` adds how near a measured time comes to it.

    gpu: whose roofline, a name in `flashattn.roofline.GPUS` as "H200"; default: the GPU of the tensors, if it is in that table. It doesn't
    change which kernel is chosen.

    Raises what the call itself would raise, but doesn't read the values of cu_seqlens; ValueError for an unknown `gpu`.
    """
    check_layout(layout)
    max_seqlens, limits, blocks = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}, (None, None), None
    if cu_seqlens_q is None and cu_seqlens_k is None:
        for name, limit in max_seqlens.items():
            if limit is not None:
                raise ValueError(f"{name}={limit!r} without cu_seqlens: expected both cu_seqlens, or no {name}")
        q, k, v, options = _prepare(q, k, v, causal, window, softmax_scale, layout, deterministic, impl)
        check_seqlens_k(seqlens_k, q, q.shape[0])
        mods = _mods(q, score_mod, score_mod_aux, mask_mod, mask_mod_aux)
        _fit(mods, q, k)
        bias, mods = _learned(q, k, bias, mods)
        extras = _extras(q, k, softcap, alibi_slopes, sinks, bias, dropout_p)
        blocks = check_block_mask(block_mask, q, k, causal, window, seqlens_k, mods is not torch_ops.NO_MODS)
        cu_seqlens_k = seqlens_k
    else:
        if seqlens_k is not None:
            raise ValueError("seqlens_k with cu_seqlens: expected one of them, packed sequences have their lengths in cu_seqlens_k")
        if layout != "bshd":
            raise ValueError(f"layout={layout!r} with cu_seqlens: expected none, packed tensors are [total, heads, dim]")
        if block_mask is not None:
            raise ValueError("block_mask with cu_seqlens: expected none, documents of a dense call are BlockMask.from_document_ids")
        q, k, v, options = _prepare(q, k, v, causal, window, softmax_scale, None, deterministic, impl)
        limits = check_cu_seqlens(q, {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}, max_seqlens)
        extras = _extras(q, k, softcap, alibi_slopes, sinks, bias, dropout_p, sequences=cu_seqlens_q.shape[0] - 1)
        mods = _mods(q, score_mod, score_mod_aux, mask_mod, mask_mod_aux, packed=True)
        _fit(mods, q, k, cu_seqlens_q.shape[0] - 1)
    *options, impl = options
    options.append(torch_ops.aligned(q, k, v))
    problem = torch_ops.describe(q, k, v.shape[-1], cu_seqlens_q, cu_seqlens_k, *limits, *options, extras[:5], mods, blocks)
    gpu = torch_ops.gpu_name(q.device) if gpu is None else gpu
    kept = (None, None) if block_mask is None else (block_mask.density, block_mask.kept_pairs(*q.shape[:3:2]))
    return torch_ops.explain(problem, impl, gpu, *kept)
