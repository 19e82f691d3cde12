"""Tensors -> typed errors, before anything runs. Every message names the argument, what came and what was expected.

Nothing here reads a value on the GPU, so nothing synchronises; with FLASHATTN_CHECK=1 lengths are read and validated (on the CPU they
always are). Over 300 lines, since every argument has its words here.
"""

import math
import numbers
import os

import torch

from .problem import DTYPES, LEAST_DROPOUT, MAX_HEAD_DIM, check_lengths, check_used

DIMENSIONS = {  # by layout; None: packed
    "bshd": ("batch", "seqlen", "heads", "head_dim"),
    "bhsd": ("batch", "heads", "seqlen", "head_dim"),
    None: ("total", "heads", "head_dim"),
}
LAYOUTS = ("bshd", "bhsd")
TORCH_DTYPES = tuple(getattr(torch, name) for name in DTYPES)
MOST = 2**63 - 1  # integers travel in 64 bits
MOST_CAP = torch.finfo(torch.float64).max
BIAS_DTYPES = (torch.bool, torch.float16, torch.bfloat16, torch.float32)
NO_SLOPES_GRADIENT = "the gradient of alibi_slopes is not implemented: pass alibi_slopes.detach(); q, k, v and sinks have gradients"
MOST_SCALE = torch.finfo(torch.float32).max / 2  # scores are float32, in base 2: the scale times log2 e must be finite too


def _integer(number):
    """None if it isn't a whole number. A torch.SymInt stays one; numpy's become an int."""
    if isinstance(number, bool):
        return None
    if isinstance(number, (int, torch.SymInt)):
        return number
    return int(number) if isinstance(number, numbers.Integral) else None


def _real(number):
    if isinstance(number, bool):
        return None
    if isinstance(number, (float, int, torch.SymFloat)):
        return number
    if not isinstance(number, numbers.Real):
        return None
    try:
        return float(number)
    except OverflowError:  # a fraction can be past every float
        return math.inf if number > 0 else -math.inf


def _count(name, limit, what):
    """A limit in Python's own type: a number of `what`. None is no limit."""
    if limit is None:
        return None
    count = _integer(limit)
    if count is None:
        raise TypeError(f"{name}={limit!r}: expected a number of {what}")
    if count < 0:
        least = ">= 0 (0 keeps the diagonal itself)" if name.startswith("window") else ">= 0"
        raise ValueError(f"{name}={count}: expected {least}, or None for no limit")
    if count > MOST:
        raise ValueError(f"{name}={count}: expected at most 2**63 - 1, or None for no limit")
    return count


def check_options(causal, window, softmax_scale, deterministic):
    """(window, softmax_scale) in Python's own types, or None as they came."""
    if not isinstance(deterministic, bool):
        raise TypeError(f"deterministic={deterministic!r}: expected a bool")
    if not (causal is True or causal is False or (isinstance(causal, str) and causal == "top-left")):
        raise ValueError(f"causal={causal!r}: expected False, True (bottom-right) or 'top-left'")
    if window is not None:
        if not isinstance(window, (tuple, list)) or len(window) != 2:
            raise ValueError(f"window={window!r}: expected None or (left, right)")
        window = tuple(_count(f"window {side}", limit, "keys (int) or None") for side, limit in zip(("left", "right"), window, strict=True))
    if softmax_scale is not None:
        scale = _real(softmax_scale)
        if scale is None:
            raise TypeError(f"softmax_scale is a {type(softmax_scale).__name__}: expected a float or None (1 / sqrt(head_dim))")
        if not abs(scale) <= MOST_SCALE:  # nor is NaN
            raise ValueError(f"softmax_scale={scale}: expected a finite number, at most {MOST_SCALE:.2g} in magnitude")
        softmax_scale = scale
    return window, softmax_scale


def check_softcap(softcap) -> float:
    """0 is none, as None is."""
    if softcap is None:
        return 0.0
    cap = _real(softcap)
    if cap is None:
        raise TypeError(f"softcap is a {type(softcap).__name__}: expected a float or None (no cap)")
    if not 0 <= cap <= MOST_CAP:  # nor is NaN
        raise ValueError(f"softcap={cap}: expected a finite number > 0, or 0 or None for no cap")
    return float(cap) if isinstance(cap, int) else cap


def check_dropout(dropout_p) -> float:
    """0 is none, and so is less than one pair in 2^32."""
    p = _real(dropout_p)
    if p is None:
        raise TypeError(f"dropout_p is a {type(dropout_p).__name__}: expected a float from 0 (no dropout) to 1")
    if not 0 <= p <= 1:  # nor is NaN
        raise ValueError(f"dropout_p={p}: expected a probability, from 0 (no dropout) to 1 (everything is dropped)")
    return float(p) if p >= LEAST_DROPOUT else 0.0


def check_seed(dropout_seed, generator, device):
    """An int in the 64 bits of a signed one, a tensor as it came, or None."""
    if generator is not None:
        if not isinstance(generator, torch.Generator):
            raise TypeError(f"generator is a {type(generator).__name__}: expected a torch.Generator or None")
        if dropout_seed is not None:
            raise ValueError("dropout_seed and generator are both given: expected one of them, or neither")
        if generator.device.type != device.type or generator.device.index not in (None, device.index):
            raise ValueError(f"generator is of {generator.device} and q on {device}: expected one device")
    if isinstance(dropout_seed, torch.Tensor):
        if dropout_seed.dtype != torch.int64:
            raise TypeError(f"dropout_seed has dtype {dropout_seed.dtype}: expected torch.int64 (seed, offset), or an int")
        if tuple(dropout_seed.shape) != (2,):
            raise ValueError(f"dropout_seed has shape {tuple(dropout_seed.shape)}: expected (2,), a seed and an offset")
        if dropout_seed.device != device:
            raise ValueError(f"dropout_seed is on {dropout_seed.device} and q on {device}: expected one device")
        return dropout_seed
    if dropout_seed is None:
        return None
    seed = _integer(dropout_seed)
    if seed is None:
        raise TypeError(f"dropout_seed is a {type(dropout_seed).__name__}: expected an int, an int64 tensor (seed, offset) or None")
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"dropout_seed={seed}: expected 64 bits, -2**63 to 2**64 - 1")
    return seed if seed <= MOST else seed - 2**64


def check_slopes(alibi_slopes, q, heads, batch) -> None:
    """heads, batch: of q; the batch of a packed call is its number of sequences."""
    if alibi_slopes is None:
        return
    _check_beside("alibi_slopes", alibi_slopes, q, (torch.float32,))
    if tuple(alibi_slopes.shape) not in ((heads,), (batch, heads)):
        expected = f"[heads_q] ({heads},) or [batch, heads_q] ({batch}, {heads})"
        raise ValueError(f"alibi_slopes has shape {tuple(alibi_slopes.shape)}: expected {expected}")
    if alibi_slopes.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(NO_SLOPES_GRADIENT)


def check_bias(bias, q, shape):
    """bias as [batch, heads_q, seqlen_q, seqlen_k], each of its own size or 1: a view. shape: these four sizes of the call."""
    if bias is None:
        return None
    _check_beside("bias", bias, q, BIAS_DTYPES)
    given = (1,) * (4 - bias.dim()) + tuple(bias.shape)
    if len(given) != 4 or any(size not in (1, full) for size, full in zip(given, shape, strict=True)):
        batch, heads, rows, keys = shape
        expected = f"what broadcasts to [batch, heads_q, seqlen_q, seqlen_k] ({batch}, {heads}, {rows}, {keys})"
        such = f"as ({heads}, {rows}, {keys}) or ({batch}, 1, 1, {keys})"
        raise ValueError(f"bias has shape {tuple(bias.shape)}: expected {expected}, {such}")
    return bias[(None,) * (4 - bias.dim())] if bias.dim() < 4 else bias


def check_mod(name, kind, mod, aux, q, packed=False):
    """(key of a record or None, the tensors that it reads). kind: ScoreMod or MaskMod."""
    if mod is None:
        if aux is None or (isinstance(aux, (tuple, list)) and not aux):
            return None, ()
        raise ValueError(f"{name}_aux without {name}: expected both, or neither")
    if isinstance(mod, str):
        if mod not in kind.newest:
            raise ValueError(f"{name}={mod!r}: expected a {kind.__name__} or the name of one, of {', '.join(sorted(kind.newest))}")
        mod = kind.newest[mod]
    if not isinstance(mod, kind):
        raise TypeError(f"{name} is a {type(mod).__name__}: expected a flashattn.{kind.__name__}, the name of one, or None")
    aux = () if aux is None else aux
    if not isinstance(aux, (tuple, list)):
        raise TypeError(f"{name}_aux is a {type(aux).__name__}: expected a tuple of tensors")
    if len(aux) != len(mod.aux):
        expected = f"{len(mod.aux)} ({', '.join(mod.aux)})" if mod.aux else "none"
        raise ValueError(f"{name}_aux has {len(aux)} tensors: {name} {mod.name!r} reads {expected}")
    for place, (tensor, which) in enumerate(zip(aux, mod.aux, strict=True)):
        called = f"{name}_aux[{place}] ({which} of {mod.name!r})"
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{called} is a {type(tensor).__name__}: expected a torch.Tensor")
        _check_strided(called, tensor)
        if tensor.is_complex():
            raise TypeError(f"{called} has dtype {tensor.dtype}: expected real or whole numbers or booleans")
        if tensor.device != q.device:
            raise ValueError(f"{called} is on {tensor.device} and q on {q.device}: expected one device")
        if tensor.requires_grad and torch.is_grad_enabled() and (packed or not getattr(mod, "adds", False)):
            only = "of a packed call " if packed else ""
            instead = "" if packed else ", or as bias= what it adds to the scores (or say adds=True of a ScoreMod that only adds)"
            raise NotImplementedError(f"the gradient of {called} {only}is not implemented: pass it detached{instead}")
    if hasattr(q, "placements"):  # heads and entries of a shard are counted from its own first
        raise NotImplementedError(f"{name} of a DTensor is not implemented: call attention with q.to_local() and so on")
    return mod.key, tuple(aux)


def check_mod_shapes(name, mod, aux, q, k, sequences=None) -> None:
    """ValueError unless the tensors that a record reads have the shapes that it says. q, k: [batch, rows, heads, dim], or packed with
    `sequences`, whose lengths are on the GPU and fit any."""
    if mod.shapes is None:
        return
    sizes = {"heads_q": q.shape[-2], "batch": sequences, "seqlen_q": None, "seqlen_k": None}
    if sequences is None:
        sizes |= {"batch": q.shape[0], "seqlen_q": q.shape[1], "seqlen_k": k.shape[1]}
    for place, (tensor, which, shape) in enumerate(zip(aux, mod.aux, mod.shapes, strict=True)):
        wanted = [sizes[size] if isinstance(size, str) else size for size in shape]
        fits = tensor.dim() == len(shape) and all(want in (None, size) for want, size in zip(wanted, tensor.shape, strict=True))
        if not fits:
            named = ", ".join("any" if size is None else str(size) for size in shape)
            here = ", ".join("any" if want is None else str(want) for want in wanted)
            called = f"{name}_aux[{place}] ({which} of {mod.name!r})"
            raise ValueError(f"{called} has shape {tuple(tensor.shape)}: expected [{named}], here [{here}]")


def refuse_packed_bias(bias) -> None:
    if bias is not None:
        raise NotImplementedError(
            "bias of a packed call is not implemented: its sequences share no [seqlen_q, seqlen_k]. What works: attention() of the padded "
            "batch with a bias, whose mask may be a boolean one of [batch, 1, 1, seqlen_k]; alibi_slopes, causal, window and sinks here"
        )


def check_sinks(sinks, q, heads) -> None:
    if sinks is None:
        return
    _check_beside("sinks", sinks, q, (torch.float32, torch.float16, torch.bfloat16))  # q may have been cast by autocast
    if tuple(sinks.shape) != (heads,):
        raise ValueError(f"sinks has shape {tuple(sinks.shape)}: expected [heads_q] ({heads},)")


def _check_beside(name, tensor, q, dtypes) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}: expected a torch.Tensor or None")
    _check_strided(name, tensor)
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {tensor.dtype}: expected {' or '.join(str(dtype) for dtype in dict.fromkeys(dtypes))}")
    if tensor.device != q.device:
        raise ValueError(f"{name} is on {tensor.device} and q on {q.device}: expected one device")


def check_layout(layout) -> None:
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}: expected one of {LAYOUTS}")


def check_tensors(q, k, v, layout) -> None:
    """What q, k and v must have in common; their dimensions are those of `layout`."""
    names = DIMENSIONS[layout]
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}: expected a torch.Tensor")
        _check_strided(name, tensor)
        if tensor.dim() != len(names):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}: expected {len(names)} dimensions [{', '.join(names)}]")
        if tensor.dtype not in TORCH_DTYPES:
            raise TypeError(f"{name} has dtype {tensor.dtype}: expected one of {', '.join(DTYPES)}")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q has dtype {q.dtype}, k has dtype {k.dtype}, v has dtype {v.dtype}: expected one dtype for q, k and v")
    if not q.device == k.device == v.device:
        raise ValueError(f"q has device {q.device}, k has device {k.device}, v has device {v.device}: expected one device for q, k and v")
    _check_shapes(q.shape, k.shape, v.shape, names)


def _check_strided(name, tensor) -> None:
    if tensor.is_nested:
        raise TypeError(f"{name} is a nested tensor: expected a dense one; attention_varlen takes sequences of different lengths packed")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} has layout {tensor.layout}: expected torch.strided (dense)")


def _check_shapes(q, k, v, names) -> None:
    for i, name in enumerate(names[:-1]):
        if k[i] != v[i]:
            raise ValueError(f"k has shape {tuple(k)} and v {tuple(v)}: expected the same {name}")
        if name == "batch" and q[i] != k[i]:
            raise ValueError(f"q has batch {q[i]} and k has batch {k[i]}: expected the same")
    if q[-1] != k[-1]:
        raise ValueError(f"q has head_dim {q[-1]} and k has head_dim {k[-1]}: expected the same (only v's may differ)")
    for name, head_dim in (("q", q[-1]), ("v", v[-1])):
        if head_dim < 1:
            raise ValueError(f"{name} has head_dim 0: expected 1 to {MAX_HEAD_DIM}")
        if head_dim > MAX_HEAD_DIM:
            raise NotImplementedError(f"{name} has head_dim {head_dim}: implemented are 1 to {MAX_HEAD_DIM}")
    heads = names.index("heads")
    if k[heads] < 1 or q[heads] < 1 or q[heads] % k[heads] != 0:
        raise ValueError(f"q has {q[heads]} heads and k has {k[heads]}: expected a multiple of k's (heads_q % heads_kv == 0)")


def check_cu_seqlens(q, cu_seqlens: dict[str, torch.Tensor], max_seqlens: dict[str, object]) -> list:
    """The values of `max_seqlens` in Python's own types; None for a tensor, since to read it would synchronise."""
    for name, tensor in cu_seqlens.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}: expected an int32 tensor [batch + 1]")
        _check_strided(name, tensor)
        if tensor.dtype != torch.int32:
            raise TypeError(f"{name} has dtype {tensor.dtype}: expected torch.int32")
        if tensor.dim() != 1 or tensor.shape[0] < 1:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}: expected [batch + 1], starting with 0")
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device} and q on {q.device}: expected one device")
    (name_q, cu_q), (name_k, cu_k) = cu_seqlens.items()
    if cu_q.shape[0] != cu_k.shape[0]:
        raise ValueError(f"{name_q} has {cu_q.shape[0]} entries and {name_k} has {cu_k.shape[0]}: expected batch + 1 in both")
    return [
        None if isinstance(limit, torch.Tensor) else _count(name, limit, "rows (int), a tensor or None")
        for name, limit in max_seqlens.items()
    ]


def check_seqlens_k(seqlens_k, q, batch) -> None:
    if seqlens_k is None:
        return
    _check_beside("seqlens_k", seqlens_k, q, (torch.int32,))
    if tuple(seqlens_k.shape) != (batch,):
        raise ValueError(f"seqlens_k has shape {tuple(seqlens_k.shape)}: expected [batch] ({batch},)")


def check_seqlens_k_values(k, seqlens_k) -> None:
    if not k.is_cuda or os.environ.get("FLASHATTN_CHECK") == "1":
        check_used(seqlens_k.tolist(), k.shape[1])


def check_cu_seqlens_values(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k) -> None:
    if q.is_cuda and os.environ.get("FLASHATTN_CHECK") != "1":
        return
    check_lengths("q", cu_seqlens_q.tolist(), q.shape[0], max_seqlen_q)
    check_lengths("k", cu_seqlens_k.tolist(), k.shape[0], max_seqlen_k)
