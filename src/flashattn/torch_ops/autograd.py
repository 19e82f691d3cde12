"""The derivative of `flashattn::attn_fwd`, registered with the operator: `torch.library` makes the one autograd.Function of it.

Saved for backward: q, k, lse, and v and out unless dV is the only gradient (dV = p^T dO needs neither). Nothing is saved, computed
or allocated for a gradient that nobody asked for. A second derivative is not implemented and says so.
"""

import torch

from .schemas import LIBRARY

_OPTIONS = 10  # arguments of attn_fwd after q, k, v


def _setup_context(ctx, inputs, output):
    q, k, v, cu_seqlens_q, cu_seqlens_k, *options = inputs
    out, lse = output
    ctx.needs = tuple(ctx.needs_input_grad[:3])
    needs_dp = ctx.needs[0] or ctx.needs[1]
    ctx.save_for_backward(q, k, v if needs_dp else None, out if needs_dp else None, lse, cu_seqlens_q, cu_seqlens_k)
    ctx.options = options
    ctx.head_dim_v = v.shape[-1]
    ctx.set_materialize_grads(False)


def _backward(ctx, dout, dlse):
    q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k = ctx.saved_tensors
    gradients = (None, None, None)
    if dout is not None or dlse is not None:
        found = torch.ops.flashattn.attn_bwd(
            dout, dlse, q, k, v, out, lse, ctx.head_dim_v, cu_seqlens_q, cu_seqlens_k, *ctx.options, *ctx.needs
        )  # fmt: skip
        gradients = tuple(gradient if needed else None for gradient, needed in zip(found, ctx.needs, strict=True))
    return (*gradients, *[None] * _OPTIONS)


def _no_second_derivative(ctx, *gradients):
    raise NotImplementedError("the derivative of flashattn's backward is not implemented: differentiate once, or use a reference attention")


torch.library.register_autograd("flashattn::attn_fwd", _backward, setup_context=_setup_context, lib=LIBRARY)
torch.library.register_autograd("flashattn::attn_bwd", _no_second_derivative, lib=LIBRARY)
