"""The derivative of `flashattn::attn_fwd`: one autograd.Function, which the operator itself runs, and another that refuses a second one.

Saved for backward: q, k, lse, and v and out unless dV is the only gradient (dV = p^T dO needs neither). Nothing is saved, computed
or allocated for a gradient that nobody asked for. A second derivative and a forward-mode one are not implemented and say so.

The surprising fact: forward-mode AD asks a Function only when it is applied. A kernel called without it drops tangents in silence.
"""

import inspect
from functools import partial

import torch
from torch.autograd import forward_ad

from . import schemas, sharding
from .again import unheard, wants_gradients
from .schemas import LIBRARY

_OPTIONS = 10  # arguments of attn_fwd after q, k, v


def _differentiable(function, *args):
    """The Function where somebody wants a derivative, else the kernel."""
    sharding.ready()
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    wanted = (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)) or (
        forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)
    )
    if wanted and torch._C._are_functorch_transforms_active():  # too deep in a transform for a Function: see _run
        raise NotImplementedError(
            "torch.compile of torch.func's grad, vjp or jvp of attention is not implemented: "
            "use torch.autograd.grad or backward() there, or compile inside of the transform"
        )
    return function.apply(*args) if wanted else function.forward(*args)


def _run(function, operator, *args):
    """The operator, without a first trip through the dispatcher that would only lead to `function`; a compiler must see the operator.

    torch.func's transforms act on a Function itself, before an operator is dispatched.
    """
    if torch.compiler.is_compiling():
        sharding.ready()
        return operator(*args)
    return function.apply(*args) if torch._C._are_functorch_transforms_active() else _differentiable(function, *args)


def attn_fwd(*args):
    if not torch.compiler.is_compiling() and not wants_gradients(*args[:3]) and unheard(*args[:3]):
        return schemas.forward(*args)
    return _run(Attention, torch.ops.flashattn.attn_fwd, *args)


def attn_bwd(*args):
    return _run(AttentionBackward, torch.ops.flashattn.attn_bwd, *args)


def _no_tangents(*_):
    raise NotImplementedError(
        "the forward-mode derivative of flashattn's attention is not implemented (forward_ad, torch.func.jvp, jacfwd, hessian): "
        "use backward(), torch.autograd.grad, torch.func.grad, vjp or jacrev, once"
    )


def _fold(info, in_dims, tensors, cu_seqlens_q):
    """(tensors with the mapped dimension made a part of the batch, whose entries are independent anyway; how to take it apart again)."""
    if cu_seqlens_q is not None:
        raise NotImplementedError(
            "vmap of attention_varlen is not implemented: pack the rows of all samples into one call, their lengths one behind the other "
            "in cu_seqlens, or loop over the samples"
        )

    def first(x, dim):
        return x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)

    mapped = [None if x is None else first(x, dim) for x, dim in zip(tensors, in_dims, strict=False)]
    sizes = next(x.shape[:2] for x in mapped if x is not None)
    return [None if x is None else x.flatten(0, 1) for x in mapped], sizes


class AttentionBackward(torch.autograd.Function):
    """The gradients; differentiating them again is refused."""

    jvp = staticmethod(_no_tangents)

    @staticmethod
    def forward(*args):
        with torch._C._AutoDispatchBelowAutograd():
            given = [x for x in args[:7] if x is not None]  # dout, dlse, q, k, v, out, lse: always q, k and lse
            return schemas.backward(*args) if unheard(*given) else torch.ops.flashattn.attn_bwd(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError("the derivative of flashattn's backward is not implemented: differentiate once")

    @staticmethod
    def vmap(info, in_dims, *args, call=attn_bwd):
        tensors, rest, needs = args[:7], args[7:], args[-3:]
        folded, sizes = _fold(info, in_dims, tensors, rest[1])
        gradients = (x.unflatten(0, sizes) if need else x for x, need in zip(call(*folded, *rest), needs, strict=True))
        return tuple(gradients), tuple(0 if need else None for need in needs)


class Attention(torch.autograd.Function):
    """(out, lse) of q, k, v and the options of the operator. `setup_context` is apart from `forward`, as torch.func wants it."""

    jvp = staticmethod(_no_tangents)

    @staticmethod
    def forward(*args):
        with torch._C._AutoDispatchBelowAutograd():
            return schemas.forward(*args) if unheard(*args[:3]) else torch.ops.flashattn.attn_fwd(*args)

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
            found = attn_bwd(*args)
            gradients = tuple(gradient if needed else None for gradient, needed in zip(found, ctx.needs, strict=True))
        return (*gradients, *[None] * _OPTIONS)

    @staticmethod
    def vmap(info, in_dims, q, k, v, *rest, call=attn_fwd):
        folded, sizes = _fold(info, in_dims, (q, k, v), rest[0])
        return tuple(x.unflatten(0, sizes) for x in call(*folded, *rest)), (0, 0)


for _function, _operator in ((Attention, torch.ops.flashattn.attn_fwd), (AttentionBackward, torch.ops.flashattn.attn_bwd)):
    _function.forward.__signature__ = inspect.signature(_function.forward)  # torch asks at every call, and to find out takes 10 us
    LIBRARY.impl(_operator._qualified_op_name, partial(_differentiable, _function), "Autograd")
    torch.library.register_vmap(_operator._qualified_op_name, partial(_function.vmap, call=_operator), lib=LIBRARY)  # in a compiled graph
