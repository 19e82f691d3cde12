"""The derivatives of `flashattn::attn_fwd`: an autograd.Function an operator, which are each other's derivatives.

With F(x) = (out, lse) of x = (q, k, v, sinks), tangents t of x and u = (dout, dlse):

    Attention            F(x)                       reverse: AttentionBackward; forwards: AttentionTangent
    AttentionBackward    H(x, u) = d/dx (u . F)     reverse: in u AttentionTangent, in x AttentionSecond;
                                                    forwards: AttentionBackward of the tangent of u, and AttentionSecond
    AttentionTangent     F(x) and F'(x) t           reverse: AttentionBackward and, in x, AttentionSecond; forwards: refused
    AttentionSecond      d/dx (u . F'(x) t)         both refused: a third derivative

for the derivative of H along t is the Hessian of u . F times t, and so is the gradient of u . F'(x) t in x. Slopes have no derivative and
say so.

Saved for backward: q, k, lse, slopes, sinks, bias and block mask, none of them copied, and the seed of dropout; and v and out unless dV
is the only gradient (dV = p^T dO needs neither). Nothing is saved, computed or allocated for a derivative that nobody asked for. With a
bias, with a block mask and with dropout, there is the first derivative, in reverse, and others say that they are missing.

The surprising fact: forward-mode AD asks a Function only after it has run, so its kernel would run for nothing. `_pushforward` takes the
tangents first and asks for out and its tangent at once; only where a transform hides them is `Attention.jvp` asked.

Over 300 lines because the four are derivatives of each other.
"""

import inspect
from functools import partial

import torch
from torch.autograd import forward_ad

from ..checks import NO_SLOPES_GRADIENT
from . import schemas, sharding
from .again import unheard, wants_gradients
from .schemas import LIBRARY

_INPUTS, _OPTIONS = 6, 14  # arguments of attn_fwd: q, k, v, alibi_slopes, sinks, bias; and those after them


def _differentiable(function, *args):
    """The Function where somebody wants a derivative, else the kernel."""
    sharding.ready()
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    moving = forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)
    wanted = moving or (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))
    # too deep in a transform for a Function (see _run); and a compiler drops tangents in silence
    if wanted and (torch._C._are_functorch_transforms_active() or (moving and torch.compiler.is_compiling())):
        raise NotImplementedError(
            "torch.compile of torch.func's grad, vjp or jvp, or of dual numbers, of attention is not implemented in one graph: "
            "use torch.autograd.grad or backward() there, compile inside of the transform, or let the graph break (fullgraph=False)"
        )
    if moving and function is Attention:
        return _pushforward(*args)
    return function.apply(*args) if wanted else function.forward(*args)


def _pushforward(*args):
    """(out, lse) with their tangents, where some of the inputs have one."""
    primals, tangents = zip(*[(None, None) if x is None else forward_ad.unpack_dual(x) for x in args[:_INPUTS]], strict=True)
    if all(x is None for x in tangents):
        return Attention.apply(*args)
    out, lse, tout, tlse = _with_tangents(*primals, *args[_INPUTS:], tangents=tangents)
    return forward_ad.make_dual(out, tout), forward_ad.make_dual(lse, tlse)


def _refuse_others(bias, dropout_p, blocks):
    for what, given in (("a bias", bias is not None), ("dropout", dropout_p), ("a block mask", blocks is not None)):
        if given:
            instead = ", or say with causal, window, alibi_slopes or softcap what the bias says" if bias is not None else ""
            raise NotImplementedError(
                f"a forward-mode or second derivative of flashattn's attention with {what} is not implemented: differentiate once, in "
                f"reverse{instead}"
            )


def _with_tangents(q, k, v, slopes, sinks, bias, softcap, dropout_p, rng, blocks, *rest, tangents):
    _refuse_others(bias, dropout_p, blocks)
    tq, tk, tv, tslopes, tsinks, _ = tangents
    if tslopes is not None:
        raise NotImplementedError(NO_SLOPES_GRADIENT)
    return attn_jvp(q, k, v, tq, tk, tv, _of_entries(tsinks, q), slopes, sinks, softcap, *rest)


def _of_entries(tsinks, q):
    """[heads] -> of each batch entry, as operators take a tangent of sinks."""
    return None if tsinks is None else tsinks.expand(q.shape[0] if q.dim() == 4 else 1, -1)


def _run(function, operator, *args):
    """The operator, without a first trip through the dispatcher that would only lead to `function`; a compiler must see the operator.

    torch.func's transforms act on a Function itself, before an operator is dispatched.
    """
    if torch.compiler.is_compiling():
        sharding.ready()
        return operator(*args)
    if not torch._C._are_functorch_transforms_active():
        return _differentiable(function, *args)
    if function is Attention and torch._C._functorch.peek_interpreter_stack().key() == torch._C._functorch.TransformType.Jvp:
        return _pushforward(*args)
    return function.apply(*args)


def attn_fwd(*args):
    tensors = [x for x in args[:_INPUTS] if x is not None]
    if not torch.compiler.is_compiling() and not wants_gradients(*tensors) and unheard(*tensors):
        return schemas.forward(*args)
    return _run(Attention, torch.ops.flashattn.attn_fwd, *args)


def attn_bwd(*args):
    return _run(AttentionBackward, torch.ops.flashattn.attn_bwd, *args)


def attn_jvp(*args):
    return _run(AttentionTangent, torch.ops.flashattn.attn_jvp, *args)


def attn_second(*args):
    return _run(AttentionSecond, torch.ops.flashattn.attn_second, *args)


def _refused(what):
    def refuse(*_):
        raise NotImplementedError(
            f"{what} of flashattn's attention is not implemented: derivatives go to the second, of which one may be forward-mode; "
            "detach() what needs no further one"
        )

    return staticmethod(refuse)


def _sum(*terms):
    """Of those that are there."""
    there = [x for x in terms if x is not None]
    return sum(there[1:], start=there[0]) if there else None


def _wanted(found, needs):
    """None for what was not asked for, in the place of an operator's empty tensors."""
    return [x if need else None for x, need in zip(found, needs, strict=True)]


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


def _unfold(gradients, sizes, needs):
    """Gradients of a folded batch, sample by sample, and their mapped dimensions."""
    apart = (x.unflatten(0, sizes) if need else x for x, need in zip(gradients, needs, strict=True))
    return tuple(apart), tuple(0 if need else None for need in needs)


def _primals(ctx):
    """What was saved for the forward mode, without tangents."""
    return [None if x is None else forward_ad.unpack_dual(x).primal for x in ctx.saved_tensors]


def _each(info, in_dims, args, call):
    """One call a sample: a mask of dropout depends on the place in a batch, which a sample folded into one would change."""
    found = []
    for sample in range(info.batch_size):
        own = [x if dim is None else x.select(dim, sample) for x, dim in zip(args, in_dims, strict=True)]
        found.append(call(*own))
    return tuple(torch.stack(results) for results in zip(*found, strict=True)), (0,) * len(found[0])


def _fold_extras(slopes, sinks, in_dims, sizes):
    """The slopes of a folded batch, which may be those of each sample; sinks are of all entries."""
    if sinks is not None and in_dims[1] is not None:
        raise NotImplementedError("vmap over sinks is not implemented: share them between the samples, or loop over the samples")
    if slopes is None or (slopes.dim() == 1 and in_dims[0] is None):
        return slopes
    mapped = slopes.expand(sizes[0], *slopes.shape) if in_dims[0] is None else slopes.movedim(in_dims[0], 0)
    mapped = mapped.unsqueeze(1) if mapped.dim() == 2 else mapped
    return mapped.expand(*sizes, -1).flatten(0, 1)


def _fold_lengths(lengths, dim, sizes):
    """Lengths of keys, [batch], of a folded batch."""
    if lengths is None:
        return None
    return (lengths.expand(sizes[0], -1) if dim is None else lengths.movedim(dim, 0)).flatten()


def _fold_bias(bias, dim, sizes, apart: bool):
    """The bias of a folded batch: as it is where all entries of all samples share it, unless its gradient is wanted of each sample.

    Otherwise of each entry: a view where nothing is mapped but shared, else a copy.
    """
    if bias is None or (dim is None and bias.shape[0] == 1 and not apart):
        return bias
    mapped = bias.expand(sizes[0], *bias.shape) if dim is None else bias.movedim(dim, 0)
    return mapped.expand(*sizes, *mapped.shape[2:]).flatten(0, 1)


class AttentionSecond(torch.autograd.Function):
    """The derivative of the gradients along tangents. Linear in the tangents, in dout and dlse; all the same nobody differentiates it."""

    jvp = _refused("a third derivative")
    backward = _refused("a third derivative")

    @staticmethod
    def forward(*args):
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.flashattn.attn_second(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def vmap(info, in_dims, *args, call=attn_second):
        tensors, head_dim_v, (slopes, sinks, *rest), needs = args[:9], args[9], args[10:], args[-4:]
        folded, sizes = _fold(info, in_dims, tensors, rest[1])
        rest[2] = _fold_lengths(rest[2], in_dims[14], sizes)
        return _unfold(call(*folded, head_dim_v, _fold_extras(slopes, sinks, in_dims[10:12], sizes), sinks, *rest), sizes, needs)


class AttentionTangent(torch.autograd.Function):
    """(out, lse, tout, tlse) of q, k, v, tq, tk, tv, tsinks, alibi_slopes, sinks and the options of the operator."""

    jvp = _refused("a forward-mode derivative of a forward-mode derivative")

    @staticmethod
    def forward(*args):
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.flashattn.attn_jvp(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, softcap, cu_seqlens_q, cu_seqlens_k = inputs[:12]
        if ctx.needs_input_grad[7]:
            raise NotImplementedError(NO_SLOPES_GRADIENT)
        ctx.save_for_backward(*tensors, cu_seqlens_q, cu_seqlens_k, *output[:2])
        ctx.softcap, ctx.options, ctx.head_dim_v = softcap, inputs[12:], output[0].shape[-1]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, dout, dlse, dtout, dtlse):
        q, k, v, *tangents, slopes, sinks, cu_seqlens_q, cu_seqlens_k, out, lse = ctx.saved_tensors
        extras, options = (ctx.head_dim_v, slopes, sinks), (ctx.softcap, cu_seqlens_q, cu_seqlens_k, *ctx.options)
        of_backward = None, ctx.softcap, 0.0, None, None, *options[1:]  # without a bias, dropout and a block mask
        asked = ctx.needs_input_grad
        needs, needs_of_tangents = (*asked[:3], asked[8]), asked[3:7]
        first = second = of_tangents = [None] * 4
        if any(needs) and (dout is not None or dlse is not None):
            first = _wanted(attn_bwd(dout, dlse, q, k, v, out, lse, *extras, *of_backward, *needs, False)[:4], needs)
        if dtout is not None or dtlse is not None:
            if any(needs):
                second = _wanted(attn_second(dtout, dtlse, q, k, v, *tangents, *extras, *options, *needs), needs)
            if any(needs_of_tangents):
                found = attn_bwd(dtout, dtlse, q, k, v, out, lse, *extras, *of_backward, *needs_of_tangents, False)
                of_tangents = _wanted(found[:4], needs_of_tangents)
        *gradients, dsinks = map(_sum, first, second)
        return (*gradients, *of_tangents, None, None if dsinks is None else dsinks.sum(0), *[None] * (_OPTIONS - 3))

    @staticmethod
    def vmap(info, in_dims, *args, call=attn_jvp):
        slopes, sinks, softcap, *rest = args[7:]
        folded, sizes = _fold(info, in_dims, args[:7], rest[0])
        rest[1] = _fold_lengths(rest[1], in_dims[11], sizes)
        slopes = _fold_extras(slopes, sinks, in_dims[7:9], sizes)
        return tuple(x.unflatten(0, sizes) for x in call(*folded, slopes, sinks, softcap, *rest)), (0,) * 4


class AttentionBackward(torch.autograd.Function):
    """The gradients, of which dsinks is that of each batch entry. out and lse are no inputs of their own: they follow from the others."""

    @staticmethod
    def forward(*args):
        with torch._C._AutoDispatchBelowAutograd():
            given = [x for x in (*args[:7], *args[8:11]) if x is not None]  # dout, dlse, q, k, v, out, lse; alibi_slopes, sinks, bias
            return schemas.backward(*args) if unheard(*given) else torch.ops.flashattn.attn_bwd(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        tensors, (head_dim_v, slopes, sinks, bias, softcap, dropout_p, _, blocks, *rest) = inputs[:7], inputs[7:]
        cu_seqlens_q, cu_seqlens_k, *options = rest
        others = slopes, sinks, bias, blocks, cu_seqlens_q, cu_seqlens_k
        ctx.save_for_backward(*tensors[:5], *others)
        if forward_ad._current_level >= 0:
            ctx.save_for_forward(*tensors, *others)
        *ctx.options, _, _, _, _, _ = options
        ctx.needs, ctx.softcap, ctx.dropout_p, ctx.head_dim_v = tuple(options[-5:]), softcap, dropout_p, head_dim_v
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *tangents):
        dout, dlse, q, k, v, slopes, sinks, bias, blocks, cu_seqlens_q, cu_seqlens_k = ctx.saved_tensors
        _refuse_others(bias, ctx.dropout_p, blocks)
        tangents = _wanted(tangents, ctx.needs)[:4]
        asked = ctx.needs_input_grad
        needs = *asked[2:5], asked[9]
        rest = slopes, sinks, ctx.softcap, cu_seqlens_q, cu_seqlens_k, *ctx.options
        tout = tlse = None
        hessian = [None] * 4
        if any(x is not None for x in tangents):
            if asked[0] or asked[1]:  # without v there is but dv, of which v is no part
                _, _, tout, tlse = attn_jvp(q, k, tangents[2] if v is None else v, *tangents, *rest)
            if any(needs):
                hessian = _wanted(attn_second(dout, dlse, q, k, v, *tangents, ctx.head_dim_v, *rest, *needs), needs)
        *gradients, dsinks = hessian
        tout, tlse = tout if asked[0] else None, tlse if asked[1] else None
        return (tout, tlse, *gradients, None, None, None, None, None if dsinks is None else dsinks.sum(0), *[None] * (_OPTIONS + 6))

    @staticmethod
    def jvp(ctx, tdout, tdlse, tq, tk, tv, tout, tlse, head_dim_v, tslopes, tsinks, *_):
        dout, dlse, q, k, v, out, lse, slopes, sinks, bias, blocks, cu_seqlens_q, cu_seqlens_k = _primals(ctx)
        _refuse_others(bias, ctx.dropout_p, blocks)
        if tslopes is not None:
            raise NotImplementedError(NO_SLOPES_GRADIENT)
        tangents = tq, tk, tv, _of_entries(tsinks, q)
        extras, options = (ctx.head_dim_v, slopes, sinks), (ctx.softcap, cu_seqlens_q, cu_seqlens_k, *ctx.options)
        terms = []
        if tdout is not None or tdlse is not None:
            terms.append(attn_bwd(tdout, tdlse, q, k, v, out, lse, *extras, None, ctx.softcap, 0.0, None, None, *options[1:], *ctx.needs))
        if any(x is not None for x in tangents):
            found = attn_second(dout, dlse, q, k, v, *tangents, *extras, *options, *ctx.needs[:4])
            terms.append((*found, q.new_empty(0)))
        return tuple(map(_sum, *terms))

    @staticmethod
    def vmap(info, in_dims, *args, call=attn_bwd):
        tensors, head_dim_v, (slopes, sinks, bias, *scalars), needs = args[:7], args[7], args[8:], args[-5:]
        _, dropout_p, _, _, *rest = scalars
        if dropout_p:
            return _each(info, in_dims, args, call)
        folded, sizes = _fold(info, in_dims, tensors, rest[0])
        scalars[5] = _fold_lengths(rest[1], in_dims[16], sizes)
        slopes = _fold_extras(slopes, sinks, in_dims[8:10], sizes)
        shared = bias is not None and (bias.shape[0] if in_dims[10] is None else bias.movedim(in_dims[10], 0).shape[1]) == 1
        bias = _fold_bias(bias, in_dims[10], sizes, apart=needs[-1])
        gradients, dims = _unfold(call(*folded, head_dim_v, slopes, sinks, bias, *scalars), sizes, needs)
        if needs[-1] and shared:  # by all entries of a sample, and a sample has more than one
            gradients = *gradients[:-1], gradients[-1].sum(1, keepdim=True, dtype=torch.float32).to(bias.dtype)
        return gradients, dims


def _save(ctx, inputs, output, aux=()):
    """What `_gradients` wants of the inputs of attn_fwd and of its output. aux: tensors to save besides."""
    q, k, v, slopes, sinks, bias, softcap, dropout_p, rng, blocks, cu_seqlens_q, cu_seqlens_k, *options = inputs
    out, lse = output
    *needs, needs_dslopes, needs_dsinks, needs_dbias = ctx.needs_input_grad[:_INPUTS]
    if needs_dslopes:
        raise NotImplementedError(NO_SLOPES_GRADIENT)
    ctx.needs = (*needs, needs_dsinks, needs_dbias)
    needs_dp = ctx.needs[0] or ctx.needs[1] or needs_dsinks or needs_dbias
    v, out = (v, out) if needs_dp else (None, None)
    ctx.save_for_backward(q, k, v, out, lse, slopes, sinks, bias, rng, blocks, cu_seqlens_q, cu_seqlens_k, *aux)
    ctx.softcap, ctx.dropout_p = softcap, dropout_p
    ctx.options = options
    ctx.head_dim_v = output[0].shape[-1]
    ctx.set_materialize_grads(False)


def _gradients(ctx, dout, dlse, call):
    """Of the inputs of attn_fwd. call: from the arguments of attn_bwd up to its needs, and what was saved besides, to its gradients."""
    q, k, v, out, lse, slopes, sinks, bias, rng, blocks, cu_seqlens_q, cu_seqlens_k, *aux = ctx.saved_tensors
    dq = dk = dv = dsinks = dbias = None
    if dout is not None or dlse is not None:
        extras = slopes, sinks, bias, ctx.softcap, ctx.dropout_p, rng, blocks
        args = (dout, dlse, q, k, v, out, lse, ctx.head_dim_v, *extras, cu_seqlens_q, cu_seqlens_k, *ctx.options)
        dq, dk, dv, dsinks, dbias = _wanted(call(args, aux), ctx.needs)
    return (dq, dk, dv, None, None if dsinks is None else dsinks.sum(0), dbias, *[None] * _OPTIONS)


class Attention(torch.autograd.Function):
    """(out, lse) of q, k, v, alibi_slopes, sinks, bias and the options of the operator. `setup_context` is apart from `forward`, as
    torch.func wants it."""

    @staticmethod
    def forward(*args):
        with torch._C._AutoDispatchBelowAutograd():
            given = [x for x in args[:_INPUTS] if x is not None]
            return schemas.forward(*args) if unheard(*given) else torch.ops.flashattn.attn_fwd(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _save(ctx, inputs, output)
        if forward_ad._current_level >= 0:
            *_, blocks, cu_seqlens_q, cu_seqlens_k = inputs[: _INPUTS + 6]
            ctx.save_for_forward(*inputs[:_INPUTS], blocks, cu_seqlens_q, cu_seqlens_k)

    @staticmethod
    def backward(ctx, dout, dlse):
        return _gradients(ctx, dout, dlse, lambda args, aux: attn_bwd(*args, *ctx.needs))

    @staticmethod
    def jvp(ctx, *tangents):
        *inputs, blocks, cu_seqlens_q, cu_seqlens_k = _primals(ctx)
        scalars = ctx.softcap, ctx.dropout_p, None, blocks, cu_seqlens_q, cu_seqlens_k, *ctx.options
        found = _with_tangents(*inputs, *scalars, tangents=tangents[:_INPUTS])
        return found[2:]

    @staticmethod
    def vmap(info, in_dims, q, k, v, slopes, sinks, bias, softcap, dropout_p, rng, blocks, *rest, call=attn_fwd):
        if dropout_p:
            return _each(info, in_dims, (q, k, v, slopes, sinks, bias, softcap, dropout_p, rng, blocks, *rest), call)
        folded, sizes = _fold(info, in_dims, (q, k, v), rest[0])
        rest = rest[0], _fold_lengths(rest[1], in_dims[11], sizes), *rest[2:]
        slopes = _fold_extras(slopes, sinks, in_dims[3:], sizes)
        bias = _fold_bias(bias, in_dims[5], sizes, apart=False)
        return tuple(x.unflatten(0, sizes) for x in call(*folded, slopes, sinks, bias, softcap, dropout_p, rng, blocks, *rest)), (0, 0)


for _function, _operator in (
    (Attention, torch.ops.flashattn.attn_fwd),
    (AttentionBackward, torch.ops.flashattn.attn_bwd),
    (AttentionTangent, torch.ops.flashattn.attn_jvp),
    (AttentionSecond, torch.ops.flashattn.attn_second),
):
    _function.forward.__signature__ = inspect.signature(_function.forward)  # torch asks at every call, and to find out takes 10 us
    LIBRARY.impl(_operator._qualified_op_name, partial(_differentiable, _function), "Autograd")
    torch.library.register_vmap(_operator._qualified_op_name, partial(_function.vmap, call=_operator), lib=LIBRARY)  # in a compiled graph
