"""Attention over parts of the keys, put together: the one formula that splits, rings and caches of keys need, in plain PyTorch.

The surprising fact: e^(lse1 - lse) is NaN in the gradient, not only in the result, where both parts are empty: so the inputs are made
finite there before anything is computed from them, and the results overwritten afterwards.
"""

import math

import torch

LAYOUTS = {4: "[batch, seqlen, heads, dim] with lse [batch, heads, seqlen]", 3: "[total, heads, dim] with lse [heads, total]"}


def merge_attention_states(
    out1: torch.Tensor, lse1: torch.Tensor, out2: torch.Tensor, lse2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Attention over the keys of two parts, from (out, lse) of each: exact, and differentiable in all four any number of times.

    .. math::
        \text{lse} = \ln \big( e^{\text{lse}_1} + e^{\text{lse}_2} \big), \qquad
        \text{out} = e^{\text{lse}_1 - \text{lse}} \, \text{out}_1 + e^{\text{lse}_2 - \text{lse}} \, \text{out}_2

    The order of the two doesn't matter, and more parts are merged one after the other. An lse of -inf is a part without keys for that row:
    the result is then the other part to the bit, whatever out holds there, and out 0, lse -inf where both are. A sink is in the lse of the
    part that was given it, so give it to one part only. Of parts with dropout, each has its own mask, over keys counted from the part's
    first: the merge is dropout over all keys if the parts have different seeds, for lse doesn't know of dropout.

    Args:
        out1, out2: ``[batch, seqlen, heads, dim]``, or packed ``[total, heads, dim]``; one shape and one floating dtype.
        lse1, lse2: ``[batch, heads, seqlen]``, or packed ``[heads, total]``; natural logarithm, as ``return_lse`` gives them.

    Returns:
        (out, lse) of the same shapes; out in its dtype, computed in float32 or in a wider one that was given, lse in that.

    Raises:
        ValueError: shapes or devices that don't fit together. TypeError: dtypes, non-tensors.

    Source: Milakov & Gimelshein 2018, section 3.1 (the sum of two partial softmaxes); Dao et al. 2022 (FlashAttention), section 3.1.
    """
    _check(out1, lse1, out2, lse2)
    wide = torch.promote_types(torch.promote_types(lse1.dtype, lse2.dtype), torch.promote_types(out1.dtype, torch.float32))
    none1, none2 = lse1 == -math.inf, lse2 == -math.inf
    none = none1 & none2
    lse1, lse2 = (lse.to(wide).masked_fill(none, 0.0) for lse in (lse1, lse2))
    lse = torch.logsumexp(torch.stack((lse1, lse2)), 0)  # the second derivative of logaddexp is NaN 89 apart
    out = _share(out1, lse1 - lse, none1, wide) + _share(out2, lse2 - lse, none2, wide)
    return out.to(out1.dtype), lse.masked_fill(none, -math.inf)


def _rows_first(x: torch.Tensor) -> torch.Tensor:
    """[.., heads, rows] as a factor of [.., rows, heads, dim]"""
    return x.transpose(-1, -2).unsqueeze(-1)


def _share(out, log_weight, none, wide):
    return _rows_first(log_weight.exp()) * out.to(wide).masked_fill(_rows_first(none), 0.0)


def _check(out1, lse1, out2, lse2) -> None:
    tensors = {"out1": out1, "lse1": lse1, "out2": out2, "lse2": lse2}
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}: expected a torch.Tensor")
        if not x.is_floating_point():
            raise TypeError(f"{name} has dtype {x.dtype}: expected a floating one")
        if x.device != out1.device:
            raise ValueError(f"{name} is on {x.device} and out1 on {out1.device}: expected one device")
    if out1.dtype != out2.dtype:
        raise TypeError(f"out1 has dtype {out1.dtype} and out2 {out2.dtype}: expected the same")
    if out1.dim() not in LAYOUTS:
        raise ValueError(f"out1 has shape {tuple(out1.shape)}: expected {' or '.join(LAYOUTS.values())}")
    if out1.shape != out2.shape:
        raise ValueError(f"out1 has shape {tuple(out1.shape)} and out2 {tuple(out2.shape)}: expected the same")
    *batch, rows, heads, _ = out1.shape
    for name, lse in (("lse1", lse1), ("lse2", lse2)):
        if tuple(lse.shape) != (*batch, heads, rows):
            raise ValueError(f"{name} has shape {tuple(lse.shape)}: expected {(*batch, heads, rows)} for out {tuple(out1.shape)}")
