"""Masks and positions -> the rows that count and their cumulative lengths, for batches that were made for padded attention.

Everything here asks the device how many rows there are, so it waits for it; and a model asks the same of every layer. `remembered` keeps
the last answer, for as long as the tensor that was asked about is the same and unchanged.

The surprising fact: a batch that needs no packing must be found out here and not before. A mask of ones and positions that count up are
what most calls have, and the dense call is the faster one.
"""

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class Rows(NamedTuple):
    """One side of a packed call: int64 indices [total] into the flattened batch, None for all of it, and int32 cu_seqlens [batch + 1]."""

    indices: Tensor | None
    cu_seqlens: Tensor

    def take(self, x: Tensor) -> Tensor:
        """[batch, heads, rows, dim] -> [total, heads, dim]"""
        flat = x.transpose(1, 2).flatten(0, 1)
        return flat if self.indices is None else flat[self.indices]

    def put(self, x: Tensor, batch: int, rows: int) -> Tensor:
        """[total, heads, dim] -> [batch, rows, heads, dim], 0 where there is none"""
        if self.indices is not None:
            x = x.new_zeros(batch * rows, *x.shape[1:]).index_copy(0, self.indices, x)
        return x.unflatten(0, (batch, rows))


def remembered(function: Callable) -> Callable:
    """function(tensor, *numbers), not run again while it is called with the same ones. Not for a compiler, which must see what is done."""
    last: list = [None, None, None]

    def call(x: Tensor, *rest):
        if torch.compiler.is_compiling() or torch.is_inference(x):  # an inference tensor counts no changes
            return function(x, *rest)
        known, key, answer = last
        if known is None or known() is not x or key != (x._version, *rest):
            answer = function(x, *rest)
            last[:] = weakref.ref(x), (x._version, *rest), answer
        return answer

    return call


def _kept(mask: Tensor) -> Rows:
    return Rows(mask.flatten().nonzero().flatten(), pad(mask.sum(1, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0)))


def all_rows(batch: int, rows: int, device: torch.device) -> Rows:
    return Rows(None, torch.arange(batch + 1, dtype=torch.int32, device=device) * rows)


@remembered
def rows_of_mask(mask: Tensor, rows_q: int, drop_queries: bool) -> tuple[Rows, Rows] | None:
    """(queries, keys) of a bool mask [batch, rows_k] of the keys that count; None if they all do.

    The queries are the last rows_q of these rows, and those that don't count are dropped too, or (not drop_queries) all rows_q there are.
    """
    if bool(mask.all()):
        return None
    keys = _kept(mask)
    if not drop_queries:
        return all_rows(mask.shape[0], rows_q, mask.device), keys
    return (keys if rows_q == mask.shape[1] else _kept(mask[:, mask.shape[1] - rows_q :])), keys


@remembered
def cu_seqlens_of_positions(position_ids: Tensor, batch: int) -> Tensor | None:
    """int32 cumulative lengths of the sequences in [batch or 1, rows] positions, each of which counts up by 1; None for one a row."""
    starts = position_ids.diff(dim=1, prepend=position_ids[:, :1] - 2) != 1
    starts = starts.expand(batch, -1)
    if torch.compiler.is_compiling():  # of a fixed size: the sequences that there aren't are empty
        places = torch.where(starts.flatten(), torch.arange(starts.numel(), device=starts.device), starts.numel()).sort().values
        return pad(places, (0, 1), value=starts.numel()).int()
    if not bool(starts[:, 1:].any()):
        return None
    return pad(starts.flatten().nonzero().flatten(), (0, 1), value=starts.numel()).int()
