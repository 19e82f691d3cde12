"""Inputs for the numerical tests: dense or packed, any strides, and NaN wherever nothing may be read.

The surprising fact: what a view leaves out of its storage is NaN too, so a kernel that reads past a row, or between two rows, shows it.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


def _view_of_nan(storage_shape, view, fill):
    """A tensor that is a view of a larger storage; what the view leaves out is NaN, so reading it shows."""
    storage = fill.new_full(storage_shape, float("nan"))
    tensor = view(storage)
    tensor.copy_(fill)
    return tensor


# Name -> how a [batch, rows, heads, dim] tensor of random numbers is laid out in memory.
STRIDES = {
    "contiguous": lambda x: x.contiguous(),
    "heads_first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "fused": lambda x: _view_of_nan((*x.shape[:2], x.shape[2] + 3, x.shape[3]), lambda s: s[:, :, 1:-2], x),
    "every_second_row": lambda x: _view_of_nan((x.shape[0], 2 * x.shape[1], *x.shape[2:]), lambda s: s[:, ::2], x),
    "padded_dim": lambda x: _view_of_nan((*x.shape[:3], x.shape[3] + 5), lambda s: s[..., :-5], x),
    "odd_offset": lambda x: _view_of_nan((x.numel() + 1,), lambda s: s[1:].view(x.shape), x),
    "dim_not_last": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "expanded_batch": lambda x: x[:1].expand(x.shape),
    "expanded_heads": lambda x: x[:, :, :1].expand(x.shape),
    "scalar": lambda x: x.flatten()[:1].view(1, 1, 1, 1).expand(x.shape) if x.numel() else x,
}


@dataclass(frozen=True)
class Data:
    """Inputs and incoming gradients of one call: dense [batch, rows, heads, dim], or packed [total, heads, dim] with cu_seqlens.

    slopes: of ALiBi, [heads] or [batch, heads]; sinks: [heads]; bias: of a dense call, what broadcasts to [batch, heads, rows, keys].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    cu_q: Tensor | None = None
    cu_k: Tensor | None = None
    slopes: Tensor | None = None
    sinks: Tensor | None = None
    bias: Tensor | None = None

    @property
    def packed(self) -> bool:
        return self.cu_q is not None

    def with_(self, **tensors) -> "Data":
        return replace(self, **tensors)


def dense(
    seqlen_q, seqlen_k=None, *, batch=1, heads=2, heads_kv=None, dim=64, dim_v=None, dtype, device="cpu", seed=0, strides="contiguous",
    scale=1.0, used_q=None, used_k=None,
) -> Data:  # fmt: skip
    """Standard normal inputs times `scale`, NaN from rows used_q and used_k on.

    strides: a name in STRIDES for q, k and v, or a dict with some of q, k, v, dout.
    """
    seqlen_k, heads_kv, dim_v = _default(seqlen_k, seqlen_q), _default(heads_kv, heads), _default(dim_v, dim)
    generator = torch.Generator(device).manual_seed(seed)
    named = strides if isinstance(strides, dict) else dict.fromkeys("qkv", strides)

    def draw(name, used, *shape):
        numbers = torch.randn(shape, generator=generator, device=device, dtype=torch.float32) * (scale if name in "qkv" else 1.0)
        numbers[:, _default(used, shape[1]) :] = float("nan")
        return STRIDES[named.get(name, "contiguous")](numbers.to(dtype))

    dlse = torch.randn(batch, heads, seqlen_q, generator=generator, device=device)
    dlse[:, :, _default(used_q, seqlen_q) :] = float("nan")
    return Data(
        q=draw("q", used_q, batch, seqlen_q, heads, dim),
        k=draw("k", used_k, batch, seqlen_k, heads_kv, dim),
        v=draw("v", used_k, batch, seqlen_k, heads_kv, dim_v),
        dout=draw("dout", used_q, batch, seqlen_q, heads, dim_v),
        dlse=dlse,
    )


def packed(lens_q, lens_k=None, *, tail_q=0, tail_k=0, **options) -> Data:
    """Sequences of these lengths, packed; then `tail` rows that belong to none and are NaN, in the inputs and the incoming gradients."""
    lens_k = _default(lens_k, lens_q)
    total_q, total_k = sum(lens_q), sum(lens_k)
    data = dense(total_q + tail_q, total_k + tail_k, batch=1, used_q=total_q, used_k=total_k, **options)
    alone = {name: getattr(data, name)[0] for name in ("q", "k", "v", "dout", "dlse")}
    return Data(**alone, cu_q=_cumulate(lens_q, data.q.device), cu_k=_cumulate(lens_k, data.q.device))


def with_extras(data: Data, *, slopes: str = "", sinks: float | None = None, seed: int = 0) -> Data:
    """With slopes of ALiBi for each "head" or each "entry" and head, that of the second head 0, and with normal sinks around `sinks`, that
    of the third head -inf."""
    heads = data.q.shape[-2]
    entries = len(data.cu_q) - 1 if data.packed else data.q.shape[0]
    generator = torch.Generator(data.q.device).manual_seed(seed + 1000)
    shape = (entries, heads) if slopes == "entry" else (heads,)
    numbers = torch.rand(shape, generator=generator, device=data.q.device)
    numbers[..., 1:2] = 0.0
    around = torch.randn(heads, generator=generator, device=data.q.device) + (sinks or 0.0)
    around[2:3] = -torch.inf
    return data.with_(slopes=numbers if slopes else None, sinks=None if sinks is None else around)


def _default(value, otherwise):
    return otherwise if value is None else value


def _cumulate(lengths, device) -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
