"""Attention with a score_mod or a mask_mod: operators of their own, so that a call without any carries nothing of them.

`flashattn::attn_mod_fwd` and `attn_mod_bwd` take what `attn_fwd` and `attn_bwd` take and then the keys of the mods (mods.py) and the
tensors that they read, those of the score_mod first. There is the first derivative, in reverse; others say that they are missing.

The surprising fact: a mod is told batch entries, so samples of a vmap can't be folded into a batch. Each is a call of its own.
"""

import inspect
from functools import partial

import torch

from ..mods import ScoreMod
from . import schemas
from .autograd import _INPUTS, _OPTIONS, _differentiable, _each, _gradients, _save
from .schemas import LIBRARY

_ARGUMENTS = _INPUTS + _OPTIONS  # of attn_fwd
_MODS = "str? score_mod, str? mask_mod, Tensor[] mod_aux"
_NEEDS = "bool need_dq, bool need_dk, bool need_dv, bool need_dsinks, bool need_dbias"
LIBRARY.define(
    f"attn_mod_fwd(Tensor q, Tensor k, Tensor v, {schemas.ALL}, {_MODS}) -> (Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,)
)
LIBRARY.define(
    f"attn_mod_bwd(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor? v, Tensor? out, Tensor lse, int head_dim_v, {schemas.ALL}, "
    f"{_MODS}, {_NEEDS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def forward(*args):
    *given, score_mod, mask_mod, aux = args
    return schemas.forward(*given, mods=(score_mod, mask_mod, aux))


def backward(*args):
    *given, score_mod, mask_mod, aux = args[:-5]
    need_dq, need_dk, _, _, need_dbias = needs = args[-5:]
    if score_mod is not None and (need_dq or need_dk or need_dbias) and ScoreMod.records[score_mod].backward is None:
        raise NotImplementedError(
            f"score_mod {ScoreMod.records[score_mod].name!r} has no derivative: give its ScoreMod a backward, or ask for no gradient of q, "
            "k and bias (torch.no_grad(), detach())"
        )
    return schemas.backward(*given, *needs, mods=(score_mod, mask_mod, aux))


def _fake_fwd(*args):
    return schemas._fake_fwd(*args[:_ARGUMENTS])


def _fake_bwd(*args):
    return schemas._fake_bwd(*args[:-8], *args[-5:])


def _run(function, operator, *args):
    """args: tensors that mods read one by one, as a Function takes them: torch.func's transforms act on one before there is an operator."""
    if torch._C._are_functorch_transforms_active() and not torch.compiler.is_compiling():
        return function.apply(*args)
    return operator(*function.listed(*args))


def attn_mod_fwd(*args):
    return _run(ModAttention, torch.ops.flashattn.attn_mod_fwd, *args)


def attn_mod_bwd(*args):
    return _run(ModAttentionBackward, torch.ops.flashattn.attn_mod_bwd, *args)


def _refuse(*_):
    raise NotImplementedError(
        "a forward-mode or second derivative of flashattn's attention with a score_mod or a mask_mod is not implemented: differentiate "
        "once, in reverse, or say with causal, window, alibi_slopes or softcap what the mod says"
    )


class ModAttentionBackward(torch.autograd.Function):
    """The gradients. The tensors that mods read come last, each an argument."""

    jvp = staticmethod(_refuse)
    backward = staticmethod(_refuse)

    @staticmethod
    def listed(*args):
        place = 8 + _ARGUMENTS - 3 + 2  # what comes before the needs: instead of q, k and v there are 8, and behind all two keys of mods
        return *args[:place], list(args[place + 5 :]), *args[place : place + 5]

    @staticmethod
    def flat(*args):
        *given, aux, need_dq, need_dk, need_dv, need_dsinks, need_dbias = args
        return *given, need_dq, need_dk, need_dv, need_dsinks, need_dbias, *aux

    @staticmethod
    def forward(*args):
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.flashattn.attn_mod_bwd(*ModAttentionBackward.listed(*args))

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def vmap(info, in_dims, *args):
        return _each(info, in_dims, args, attn_mod_bwd)


class ModAttention(torch.autograd.Function):
    """(out, lse) of the arguments of attn_fwd, score_mod, mask_mod and the tensors that they read."""

    jvp = staticmethod(_refuse)

    @staticmethod
    def listed(*args):
        return *args[: _ARGUMENTS + 2], list(args[_ARGUMENTS + 2 :])

    @staticmethod
    def flat(*args):
        return *args[:-1], *args[-1]

    @staticmethod
    def forward(*args):
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.flashattn.attn_mod_fwd(*ModAttention.listed(*args))

    @staticmethod
    def setup_context(ctx, inputs, output):
        given, mods, aux = inputs[:_ARGUMENTS], inputs[_ARGUMENTS : _ARGUMENTS + 2], inputs[_ARGUMENTS + 2 :]
        _save(ctx, given, output, aux)
        ctx.mods, ctx.others = mods, len(mods) + len(aux)

    @staticmethod
    def backward(ctx, dout, dlse):
        found = _gradients(ctx, dout, dlse, lambda args, aux: attn_mod_bwd(*args, *ctx.mods, *ctx.needs, *aux))
        return *found, *[None] * ctx.others

    @staticmethod
    def vmap(info, in_dims, *args):
        return _each(info, in_dims, args, attn_mod_fwd)


def _autograd(function, *args):
    return _differentiable(function, *function.flat(*args))


for _function, _name, _real, _fake in (
    (ModAttention, "attn_mod_fwd", forward, _fake_fwd),
    (ModAttentionBackward, "attn_mod_bwd", backward, _fake_bwd),
):
    _function.forward.__signature__ = inspect.signature(_function.forward)
    LIBRARY.impl(_name, _real, "CompositeExplicitAutograd")
    LIBRARY.impl(_name, partial(_autograd, _function), "Autograd")
    torch.library.register_fake(f"flashattn::{_name}", _fake, lib=LIBRARY)
