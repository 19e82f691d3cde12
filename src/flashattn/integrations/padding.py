"""Padded batches to packed ones and back: what `flash_attn.bert_padding` is imported for.

The surprising fact: how long the longest sequence is must be read from the device, because flash-attn hands it out as a number. Where the
wait matters, keep `cu_seqlens` and pass None for the maximum: `attention_varlen` doesn't need it.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """Rows `indices` (int64 [n]) of x [rows, ...]: [n, ...], differentiable."""
    return x[indices]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """[first_axis_dim, ...] with values [n, ...] in the rows `indices` (int64 [n]) and 0 elsewhere, differentiable."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Take the rows that a mask keeps out of a padded batch, one sequence after another.

    Args:
        hidden_states: ``[batch, seqlen, ...]``.
        attention_mask: ``[batch, seqlen]``, bool or int; nonzero rows are kept. They may be anywhere in a sequence: left padding, right
            padding and holes are the same to it.
        unused_mask: ``[batch, seqlen]`` or None: rows that get a place too without being used. None by default.

    Returns:
        (rows ``[total, ...]``, int64 indices ``[total]`` of them in the flattened batch, int32 cumulative lengths ``[batch + 1]``, the
        longest length as an int (this waits for the device), int32 used lengths ``[batch]``), as flash-attn gives them from 2.7 on. Earlier
        versions gave four; ``rows, indices, cu_seqlens, max_seqlen, *_ = unpad_input(...)`` reads both.

    Raises:
        ValueError: masks that don't have the shape [batch, seqlen] of hidden_states.
    """
    for name, mask in (("attention_mask", attention_mask), ("unused_mask", unused_mask)):
        if mask is not None and mask.shape != hidden_states.shape[:2]:
            expected = tuple(hidden_states.shape[:2])
            raise ValueError(f"{name} has shape {tuple(mask.shape)}: expected {expected}, the [batch, seqlen] of hidden_states")
    used = attention_mask != 0
    placed = used if unused_mask is None else used | (unused_mask != 0)
    lengths = placed.sum(dim=-1, dtype=torch.int32)
    indices = placed.flatten().nonzero().flatten()
    longest = int(lengths.max()) if lengths.numel() else 0
    cu_seqlens = pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, cu_seqlens, longest, used.sum(dim=-1, dtype=torch.int32)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of `unpad_input`: rows ``[total, ...]`` back to ``[batch, seqlen, ...]``, 0 where there was padding.

    indices: the int64 ``[total]`` that `unpad_input` gave. batch, seqlen: of the padded batch.
    """
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
