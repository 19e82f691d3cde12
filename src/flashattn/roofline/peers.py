"""Who can compute attention here: this library kernel by kernel, and its peers.

A provider turns a workload into closures for the forward and the backward pass (`calls.py`), or into a sentence saying why it can't. Mask
preparation (FlexAttention's block mask) is done before the clock starts. Packed sequences share one batch entry; who takes them without
one gets a view, and who has no packed form says so.

Surprising fact: a compiled function refuses a second backward over one graph ("donated buffers") unless that optimisation is off.
"""

import importlib
import inspect
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..dispatch.table import KERNELS
from .calls import Attend, Provider, Unavailable, cu_seqlens
from .workload import Workload


def _needs_cuda(device: torch.device) -> None:
    if device.type != "cuda":
        raise Unavailable("needs a CUDA device")


def _no_bottom_right(workload: Workload) -> None:
    if workload.causal is True and workload.seqlen_q != workload.seqlen_k:
        raise Unavailable("aligns its causal mask at the top left")


def without_entry(attend: Attend) -> Attend:
    """attend takes and gives [rows, heads, dim]. Only views are made, whose derivatives are views: squeeze, and not x[0], which copies."""
    return lambda q, k, v: attend(q.squeeze(0), k.squeeze(0), v.squeeze(0)).unsqueeze(0)


def ours(impl: str | None, **options) -> Provider:
    """This library: the named implementation, or what it chooses by itself (None)."""

    def bind(workload: Workload, device: torch.device) -> Attend:
        from ..api import attention, attention_varlen

        if workload.packed:
            cu, longest = cu_seqlens(workload, device), max(workload.lengths)
            how = {"max_seqlen_q": longest, "max_seqlen_k": longest, "causal": workload.causal, "window": workload.window, "impl": impl}
            return without_entry(lambda q, k, v: attention_varlen(q, k, v, cu, cu, **how))
        return lambda q, k, v: attention(q, k, v, causal=workload.causal, window=workload.window, impl=impl)

    return Provider("flashattn" if impl is None else f"flashattn-{impl}", "bshd", bind, **options)


def sdpa(name: str, backend: SDPBackend | None, cuda_only: bool, **options) -> Provider:
    """PyTorch's scaled_dot_product_attention held to one backend, or free to choose (None)."""

    def bind(workload: Workload, device: torch.device) -> Attend:
        if cuda_only:
            _needs_cuda(device)
        if workload.window is not None:
            raise Unavailable("has no window without a mask tensor")
        if workload.packed:
            raise Unavailable("has no packed sequences: see torch-varlen")
        _no_bottom_right(workload)
        attend = torch.nn.functional.scaled_dot_product_attention
        return lambda q, k, v: attend(q, k, v, is_causal=bool(workload.causal), enable_gqa=workload.group > 1)

    around = nullcontext if backend is None else lambda: sdpa_kernel(backend)
    return Provider(name, "bhsd", bind, around, **options)


def _standard_bind(workload: Workload, device: torch.device) -> Attend:
    """The textbook: softmax(scale Q K^T) V as three operations, scores and probabilities in memory, in the dtype of the inputs."""
    if workload.packed or workload.window is not None or workload.group > 1:
        raise Unavailable("has neither packed sequences, windows nor grouped heads")
    _no_bottom_right(workload)
    scale, rows = workload.head_dim**-0.5, (workload.seqlen_q, workload.seqlen_k)
    hidden = torch.ones(rows, dtype=torch.bool, device=device).triu(1) if workload.causal else None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q * scale, k.transpose(-1, -2))
        if hidden is not None:
            scores = scores.masked_fill(hidden, float("-inf"))
        return torch.matmul(scores.softmax(dim=-1), v)

    return attend


def _torch_varlen_bind(workload: Workload, device: torch.device) -> Attend:
    """The flash attention inside PyTorch, of packed sequences: since 2.10 a function beside SDPA, whose arguments grew in 2.11."""
    _needs_cuda(device)
    if not workload.packed:
        raise Unavailable("takes packed sequences only")
    try:
        attend = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except ModuleNotFoundError as error:
        raise Unavailable(f"this PyTorch has no varlen_attn: {error}") from error
    known, problem = inspect.signature(attend).parameters, workload.problem()
    if workload.group > 1 and "enable_gqa" not in known:
        raise Unavailable("has no grouped heads in this PyTorch")
    if workload.window is not None and "window_size" not in known:
        raise Unavailable("has no window in this PyTorch")
    window = tuple(-1 if limit is None else limit for limit in (problem.window_left, problem.window_right))
    wanted = {"window_size": window, "is_causal": bool(workload.causal), "enable_gqa": workload.group > 1}
    options = {name: value for name, value in wanted.items() if name in known}
    cu, longest = cu_seqlens(workload, device), max(workload.lengths)
    return without_entry(lambda q, k, v: attend(q, k, v, cu, cu, longest, longest, **options))


def _flex_bind(workload: Workload, device: torch.device) -> Attend:
    _needs_cuda(device)  # on a CPU it would need a C++ compiler and has no backward
    import torch._dynamo
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._functorch.config.donated_buffer = False
    torch._dynamo.reset()  # else the shapes of a suite pile up in one cache: slow guards, then the recompile limit
    problem = workload.problem()
    left, right, diagonal = problem.window_left, problem.window_right, problem.diagonal()
    _, rows_q, rows_k = workload.rows
    lengths = torch.tensor(workload.lengths, dtype=torch.int64, device=device)
    sequence = torch.arange(len(lengths), device=device).repeat_interleave(lengths)  # which one each packed row belongs to

    def keep(batch, head, q_index, k_index):
        kept = sequence[q_index] == sequence[k_index] if workload.packed else k_index >= 0
        if right is not None:
            kept = kept & (k_index <= q_index + diagonal + right)
        if left is not None:
            kept = kept & (k_index >= q_index + diagonal - left)
        return kept

    mask = None
    if workload.packed or left is not None or right is not None:
        mask = create_block_mask(keep, None, None, rows_q, rows_k, device=device)
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=workload.group > 1)


def flash_attn(name: str, module: str, unbounded: int | None) -> Provider:
    """A package of the FlashAttention authors; `unbounded` is how its `window_size` spells "no limit"."""

    def bind(workload: Workload, device: torch.device) -> Attend:
        _needs_cuda(device)
        try:
            package = importlib.import_module(module)
            attend = package.flash_attn_varlen_func if workload.packed else package.flash_attn_func
        except ModuleNotFoundError as error:
            raise Unavailable(f"{module} does not import: {error}") from error
        if workload.causal == "top-left" and workload.seqlen_q != workload.seqlen_k:
            raise Unavailable("aligns its causal mask at the bottom right")
        options: dict = {"causal": bool(workload.causal)}
        if workload.window is not None:
            options["window_size"] = tuple(unbounded if limit is None else limit for limit in workload.window)
        if workload.packed:
            cu, longest = cu_seqlens(workload, device), max(workload.lengths)
            options |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
            wanted = {"max_seqlen_q": longest, "max_seqlen_k": longest}  # fa4 finds these out by itself in some versions
            options |= {name: value for name, value in wanted.items() if name in inspect.signature(attend).parameters}

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            result = attend(q, k, v, **options)
            return result[0] if isinstance(result, tuple) else result  # some versions return the lse too

        return without_entry(call) if workload.packed else call

    return Provider(name, "bshd", bind, compiles=name == "fa4")


PROVIDERS = {
    provider.name: provider
    for provider in (
        *(ours(kernel.name, by_default=kernel.name != "eager", compiles=kernel.name != "eager") for kernel in KERNELS),
        ours(None, by_default=False),
        sdpa("sdpa-flash", SDPBackend.FLASH_ATTENTION, cuda_only=False),
        sdpa("sdpa-cudnn", SDPBackend.CUDNN_ATTENTION, cuda_only=True),
        sdpa("sdpa-efficient", SDPBackend.EFFICIENT_ATTENTION, cuda_only=True),
        sdpa("sdpa-math", SDPBackend.MATH, cuda_only=False, by_default=False),
        sdpa("sdpa", None, cuda_only=False, by_default=False),
        Provider("standard", "bhsd", _standard_bind, by_default=False),
        Provider("torch-varlen", "bshd", _torch_varlen_bind),
        Provider("flex", "bhsd", _flex_bind, compiles=True),
        flash_attn("fa2", "flash_attn", -1),
        flash_attn("fa3", "flash_attn_interface", -1),
        flash_attn("fa4", "flash_attn.cute", None),
    )
}


def choose(names: tuple[str, ...] | None, everyone: bool = False) -> tuple[Provider, ...]:
    """The named providers; without names the default ones (or everyone). ValueError for an unknown name."""
    if not names:
        return tuple(provider for provider in PROVIDERS.values() if everyone or provider.by_default)
    unknown = [name for name in names if name not in PROVIDERS]
    if unknown:
        raise ValueError(f"unknown provider {', '.join(unknown)}; known are {', '.join(PROVIDERS)}")
    return tuple(PROVIDERS[name] for name in names)
