"""The derivative of `flashattn::attn_fwd`: one autograd.Function, which the operator itself runs, and another that refuses a second one.

Saved for backward: q, k, lse, slopes and sinks, and v and out unless dV is the only gradient (dV = p^T dO needs neither). Nothing is
saved, computed or allocated for a gradient that nobody asked for. A second derivative and a forward-mode one are not implemented and say
so, as does one of slopes.

The surprising fact: forward-mode AD asks a Function only when it is applied. A kernel called without it drops tangents in silence.
"""

import inspect
from functools import partial

import torch
from torch.autograd import forward_ad

from ..checks import NO_SLOPES_GRADIENT
from . import schemas, sharding
from .again import unheard, wants_gradients
from .schemas import LIBRARY

_INPUTS, _OPTIONS = 5, 11  # arguments of attn_fwd: q, k, v, alibi_slopes, sinks; and those after them


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
    tensors = [x for x in args[:_INPUTS] if x is not None]
    if not torch.compiler.is_compiling() and not wants_gradients(*tensors) and unheard(*tensors):
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


def _fold_extras(slopes, sinks, in_dims, sizes):
    """The slopes of a folded batch, which may be those of each sample; sinks are of all entries."""
    if sinks is not None and in_dims[1] is not None:
        raise NotImplementedError("vmap over sinks is not implemented: share them between the samples, or loop over the samples")
    if slopes is None or (slopes.dim() == 1 and in_dims[0] is None):
        return slopes
    mapped = slopes.expand(sizes[0], *slopes.shape) if in_dims[0] is None else slopes.movedim(in_dims[0], 0)
    mapped = mapped.unsqueeze(1) if mapped.dim() == 2 else mapped
    return mapped.expand(*sizes, -1).flatten(0, 1)


class AttentionBackward(torch.autograd.Function):
    """The gradients; differentiating them again is refused."""

    jvp = staticmethod(_no_tangents)

    @staticmethod
    def forward(*args):
        with torch._C._AutoDispatchBelowAutograd():
            given = [x for x in (*args[:7], *args[8:10]) if x is not None]  # dout, dlse, q, k, v, out, lse; alibi_slopes, sinks
            return schemas.backward(*args) if unheard(*given) else torch.ops.flashattn.attn_bwd(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError("the derivative of flashattn's backward is not implemented: differentiate once")

    @staticmethod
    def vmap(info, in_dims, *args, call=attn_bwd):
        tensors, head_dim_v, (slopes, sinks, softcap, *rest), needs = args[:7], args[7], args[8:], args[-4:]
        folded, sizes = _fold(info, in_dims, tensors, rest[0])
        slopes = _fold_extras(slopes, sinks, in_dims[8:10], sizes)
        found = call(*folded, head_dim_v, slopes, sinks, softcap, *rest)
        gradients = (x.unflatten(0, sizes) if need else x for x, need in zip(found, needs, strict=True))
        return tuple(gradients), tuple(0 if need else None for need in needs)


class Attention(torch.autograd.Function):
    """(out, lse) of q, k, v, alibi_slopes, sinks and the options of the operator. `setup_context` is apart from `forward`, as torch.func
    wants it."""

    jvp = staticmethod(_no_tangents)

    @staticmethod
    def forward(*args):
        with torch._C._AutoDispatchBelowAutograd():
            given = [x for x in args[:_INPUTS] if x is not None]
            return schemas.forward(*args) if unheard(*given) else torch.ops.flashattn.attn_fwd(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, slopes, sinks, softcap, cu_seqlens_q, cu_seqlens_k, *options = inputs
        out, lse = output
        *needs, needs_dslopes, needs_dsinks = ctx.needs_input_grad[:_INPUTS]
        if needs_dslopes:
            raise NotImplementedError(NO_SLOPES_GRADIENT)
        ctx.needs = (*needs, needs_dsinks)
        needs_dp = ctx.needs[0] or ctx.needs[1] or needs_dsinks
        v, out = (v, out) if needs_dp else (None, None)
        ctx.save_for_backward(q, k, v, out, lse, slopes, sinks, cu_seqlens_q, cu_seqlens_k)
        ctx.softcap = softcap
        ctx.options = options
        ctx.head_dim_v = output[0].shape[-1]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, out, lse, slopes, sinks, cu_seqlens_q, cu_seqlens_k = ctx.saved_tensors
        dq = dk = dv = dsinks = None
        if dout is not None or dlse is not None:
            extras = slopes, sinks, ctx.softcap
            args = (dout, dlse, q, k, v, out, lse, ctx.head_dim_v, *extras, cu_seqlens_q, cu_seqlens_k, *ctx.options, *ctx.needs)
            found = attn_bwd(*args)
            dq, dk, dv, dsinks = (gradient if needed else None for gradient, needed in zip(found, ctx.needs, strict=True))
        return (dq, dk, dv, None, None if dsinks is None else dsinks.sum(0), *[None] * _OPTIONS)

    @staticmethod
    def vmap(info, in_dims, q, k, v, slopes, sinks, softcap, *rest, call=attn_fwd):
        folded, sizes = _fold(info, in_dims, (q, k, v), rest[0])
        slopes = _fold_extras(slopes, sinks, in_dims[3:], sizes)
        return tuple(x.unflatten(0, sizes) for x in call(*folded, slopes, sinks, softcap, *rest)), (0, 0)


for _function, _operator in ((Attention, torch.ops.flashattn.attn_fwd), (AttentionBackward, torch.ops.flashattn.attn_bwd)):
    _function.forward.__signature__ = inspect.signature(_function.forward)  # torch asks at every call, and to find out takes 10 us
    LIBRARY.impl(_operator._qualified_op_name, partial(_differentiable, _function), "Autograd")
    torch.library.register_vmap(_operator._qualified_op_name, partial(_function.vmap, call=_operator), lib=LIBRARY)  # in a compiled graph
