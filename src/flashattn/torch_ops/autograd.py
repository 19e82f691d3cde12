"""The derivative of `flashattn::attn_fwd`: one autograd.Function, which the operator itself runs.

Saved for backward: q, k, lse, and v and out unless dV is the only gradient (dV = p^T dO needs neither). Nothing is saved, computed
or allocated for a gradient that nobody asked for. A second derivative is not implemented and says so.
"""

import torch

from .schemas import LIBRARY

_OPTIONS = 10  # arguments of attn_fwd after q, k, v


def _run(function, operator, *args):
    """An operator, through its Function. torch.func's transforms act on a Function itself, before an operator is dispatched."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return operator(*args)


def attn_fwd(*args):
    return _run(Attention, torch.ops.flashattn.attn_fwd, *args)


class AttentionBackward(torch.autograd.Function):
    """The gradients; differentiating them again is refused."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args):
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.flashattn.attn_bwd(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError("the derivative of flashattn's backward is not implemented: differentiate once")


class Attention(torch.autograd.Function):
    """(out, lse) of q, k, v and the options of the operator. `setup_context` is apart from `forward`, as torch.func wants it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args):
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.flashattn.attn_fwd(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, cu_seqlens_q, cu_seqlens_k, *options = inputs
        out, lse = output
        ctx.needs = tuple(ctx.needs_input_grad[:3])
        needs_dp = ctx.needs[0] or ctx.needs[1]
        ctx.save_for_backward(q, k, v if needs_dp else None, out if needs_dp else None, lse, cu_seqlens_q, cu_seqlens_k)
        ctx.options = options
        ctx.head_dim_v = v.shape[-1]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k = ctx.saved_tensors
        gradients = (None, None, None)
        if dout is not None or dlse is not None:
            args = (dout, dlse, q, k, v, out, lse, ctx.head_dim_v, cu_seqlens_q, cu_seqlens_k, *ctx.options, *ctx.needs)
            found = _run(AttentionBackward, torch.ops.flashattn.attn_bwd, *args)
            gradients = tuple(gradient if needed else None for gradient, needed in zip(found, ctx.needs, strict=True))
        return (*gradients, *[None] * _OPTIONS)


def _differentiable(function):
    """What the operator does where autograd looks: the Function if somebody wants a gradient, the kernel otherwise."""

    def run(*args):
        wanted = torch.is_grad_enabled() and any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
        return function.apply(*args) if wanted else function.forward(*args)

    return run


LIBRARY.impl("attn_fwd", _differentiable(Attention), "Autograd")
LIBRARY.impl("attn_bwd", _differentiable(AttentionBackward), "Autograd")
