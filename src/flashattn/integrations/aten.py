"""The operators behind torch's flash backend, computed by this library's: what `sdpa.register` registers.

torch calls four: dense attention of its scaled_dot_product_attention, [batch, heads, rows, dim], causal top-left (it asks only where that
and bottom-right are the same); and the general one of torch.nn.attention.varlen, [batch, rows, heads, dim] or packed, causal bottom-right,
windows with -1 for no limit. Both with their backward.

The surprising fact: the schema promises strides. torch's fakes give results the strides of their inputs, and a compiled graph relies on it,
so a result that lies differently in memory is copied.
"""

import torch
from torch import Tensor
from torch.library import Library

from ..api import attention, attention_varlen

OPERATORS = (
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward", "_flash_attention_forward",
    "_flash_attention_backward",
)  # fmt: skip

OFF = {"BoolType": False, "FloatType": 0.0, "IntType": 0}  # by the type of an argument; others are optional


def _refuse(**arguments) -> None:
    for name, value in arguments.items():
        if value is not None and value is not False and not (isinstance(value, (int, float)) and value == 0):
            raise RuntimeError(f"flashattn as torch's flash backend: {name} is not implemented; restore_flash_attention_impl() has it")


def _limit(size: int | None) -> int | None:
    return None if size is None or size < 0 else size


def _like(x: Tensor, model: Tensor) -> Tensor:
    """x in the memory order that torch's fakes promise."""
    wanted = torch.empty_like(model)
    return x if x.stride() == wanted.stride() else wanted.copy_(x)


def _drawn(q: Tensor, dropout_p: float) -> Tensor | None:
    """The seed and offset of a call, from torch's default generator."""
    return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=q.device) if dropout_p else None


def _states(q: Tensor, rng: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """What the backward gets to know of dropout, in torch's words rng_state and unused; and no mask."""
    state = q.new_zeros(2, dtype=torch.uint64) if rng is None else rng.view(torch.uint64)
    return state, q.new_zeros((), dtype=torch.uint64), q.new_zeros(0)


def _backward(**given) -> tuple[Tensor, Tensor, Tensor]:
    """The library's operator, by the names of its arguments: what isn't given is None, False or 0."""
    operator, args = torch.ops.flashattn.attn_bwd.default, []
    for argument in operator._schema.arguments:
        off = OFF.get(argument.type.kind())
        args.append(given.pop(argument.name, argument.default_value if argument.has_default_value() else off))
    if given:
        raise TypeError(f"flashattn::attn_bwd takes no {', '.join(given)}")
    return operator(*args)[:3]


def _gradients(grad_out, q, k, v, out, lse, scale, left, right, top_left, dropout_p, rng, **lengths):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _backward(
        dout=grad_out, q=q, k=k, v=v, out=out, lse=lse, head_dim_v=v.shape[-1], softmax_scale=scale,
        window_left=left, window_right=right, top_left=top_left, deterministic=torch.are_deterministic_algorithms_enabled(),
        dropout_p=dropout_p, rng=rng.view(torch.int64) if dropout_p else None, need_dq=True, need_dk=True, need_dv=True, **lengths,
    )  # fmt: skip


@torch.no_grad()  # torch's autograd is above, and still sees inputs that require gradients
def dense_forward(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    _refuse(return_debug_mask=return_debug_mask)
    rng = _drawn(query, dropout_p)
    options = {"causal": "top-left" if is_causal else False, "softmax_scale": scale, "layout": "bhsd", "return_lse": True}
    out, lse = attention(query, key, value, dropout_p=dropout_p, dropout_seed=rng, **options)
    return _like(out, query), lse, None, None, query.shape[2], key.shape[2], *_states(query, rng)


@torch.no_grad()
def dense_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, philox_seed, philox_offset, *,
    scale=None,
):  # fmt: skip
    rows_first = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    right = 0 if is_causal else None
    found = _gradients(*rows_first, logsumexp, scale, None, right, bool(is_causal), dropout_p, philox_seed)
    return tuple(_like(x.transpose(1, 2), model) for x, model in zip(found, (query, key, value), strict=True))


@torch.no_grad()
def forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None, window_size_left=None,
    window_size_right=None, seqused_k=None, alibi_slopes=None, block_table=None, num_splits=None,
):  # fmt: skip
    _refuse(return_debug_mask=return_debug_mask)
    _refuse(seqused_k=seqused_k, alibi_slopes=alibi_slopes, block_table=block_table)
    window = _limit(window_size_left), _limit(window_size_right)
    options = {"causal": bool(is_causal), "softmax_scale": scale, "return_lse": True, "window": None if window == (None, None) else window}
    rng = _drawn(query, dropout_p)
    options |= {"dropout_p": dropout_p, "dropout_seed": rng}
    if cum_seq_q is None:
        found = attention(query, key, value, **options)
    else:
        found = attention_varlen(query, key, value, cum_seq_q, cum_seq_k, max_seqlen_q=max_q, max_seqlen_k=max_k, **options)
    return *found, *_states(query, rng)


@torch.no_grad()
def backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state, unused, *, scale=None,
    window_size_left=None, window_size_right=None,
):  # fmt: skip
    left, right = _limit(window_size_left), _limit(window_size_right)
    right = 0 if is_causal else right
    packed = cum_seq_q is not None and cum_seq_q.numel() > 0
    lengths = {"cu_seqlens_q": cum_seq_q, "cu_seqlens_k": cum_seq_k, "max_seqlen_q": max_q, "max_seqlen_k": max_k} if packed else {}
    return _gradients(grad_out, query, key, value, out, logsumexp, scale, left, right, False, dropout_p, rng_state, **lengths)


class Handle:
    """Keeps the registration alive; `remove` ends it."""

    def __init__(self, library: Library):
        self.library: Library | None = library

    def remove(self) -> None:
        if self.library is not None:
            self.library._destroy()
            self.library = None


def activate(dispatch_key: str = "CUDA") -> Handle:
    """Make these the kernels of torch's operators for a device. torch warns, once, that it had others."""
    library = Library("aten", "IMPL", dispatch_key)
    for name, function in zip(OPERATORS, (dense_forward, dense_backward, forward, backward), strict=True):
        library.impl(name, function, dispatch_key)
    return Handle(library)
