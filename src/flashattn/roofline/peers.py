"""Who can compute attention here: this library kernel by kernel, and its peers.

A provider turns a workload into closures for the forward and the backward pass, or into a sentence saying why it can't. The backward
of every provider is `torch.autograd.grad` over one retained graph, so each pays what a training step pays. Every provider gets its
inputs contiguous in its own native order (bshd or bhsd): no peer is timed on strides it wasn't written for. Mask preparation
(FlexAttention's block mask) is done before the clock starts. Packed sequences share one batch entry; who takes them without one gets a
view, and who has no packed form says so.

Surprising fact: a compiled function refuses a second backward over one graph ("donated buffers") unless that optimisation is off.
"""

import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..dispatch.table import KERNELS
from .workload import Workload

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Unavailable(Exception):
    """This provider can't run this workload here; the message is the reason."""


def attempt(step: Callable[[], object]) -> tuple[object, str | None]:
    """(step(), None), or (None, why it failed). Any failure of a peer is a result of the benchmark, not an end of it.

    The warnings are kept because SDPA puts its reasons there and raises only "No available kernel".
    """
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            return step(), None
        except Unavailable as error:
            return None, str(error)
        except Exception as error:
            lines = [f"{type(error).__name__}: {error}"]
            if "No available kernel" in str(error):
                lines += [str(warning.message).split("(Triggered")[0] for warning in heard]
            return None, " ".join(" ".join(lines).split())[:600]


@dataclass
class Inputs:
    """q, k, v and dout of a workload, random normal, in bshd order; the bhsd copies are made once and shared."""

    workload: Workload
    device: torch.device
    seed: int = 0
    _orders: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        w = self.workload
        entries, rows_q, rows_k = w.rows
        generator = torch.Generator(device=self.device).manual_seed(self.seed)
        shapes = [
            (entries, rows_q, w.heads_q, w.head_dim),
            (entries, rows_k, w.heads_kv, w.head_dim),
            (entries, rows_k, w.heads_kv, w.head_dim_v),
            (entries, rows_q, w.heads_q, w.head_dim_v),
        ]
        self._orders["bshd"] = tuple(
            torch.randn(shape, generator=generator, device=self.device, dtype=torch.float32).to(w.torch_dtype) for shape in shapes
        )

    def ordered(self, layout: str) -> tuple[Tensor, ...]:
        if layout not in self._orders:
            self._orders[layout] = tuple(t.transpose(1, 2).contiguous() for t in self._orders["bshd"])
        return self._orders[layout]


@dataclass
class Closures:
    """One provider bound to one workload's tensors."""

    attend: Attend
    inputs: tuple[Tensor, Tensor, Tensor, Tensor]
    layout: str
    around: Callable[[], AbstractContextManager] = nullcontext

    @contextmanager
    def entered(self, direction: str) -> Iterator[None]:
        """The context the calls of `call(direction)` must run in (kernel choice; no autograd in the forward)."""
        with self.around(), torch.set_grad_enabled(direction == "bwd"):
            yield

    @cached_property
    def _graph(self) -> tuple[list[Tensor], Tensor]:
        leaves = [t.detach().requires_grad_(True) for t in self.inputs[:3]]
        with self.entered("bwd"):
            return leaves, self.attend(*leaves)

    def call(self, direction: str) -> Callable[[], object]:
        q, k, v, dout = self.inputs
        if direction == "fwd":
            return lambda: self.attend(q, k, v)
        leaves, out = self._graph
        return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)

    def training_step(self) -> object:
        """Forward and backward once, keeping nothing."""
        leaves = [t.detach().requires_grad_(True) for t in self.inputs[:3]]
        with self.entered("bwd"):
            return torch.autograd.grad(self.attend(*leaves), leaves, self.inputs[3])

    def results(self, direction: str) -> dict[str, Tensor]:
        """What the pass computes, by name, in bshd order."""
        call = self.call(direction)
        with self.entered(direction):
            values = call()
        named = {"out": values} if direction == "fwd" else dict(zip(("dq", "dk", "dv"), values, strict=True))
        return {name: t.transpose(1, 2) if self.layout == "bhsd" else t for name, t in named.items()}


@dataclass(frozen=True)
class Provider:
    """`bind(workload, device)` gives the function (q, k, v) -> out in order `layout`, or raises Unavailable."""

    name: str
    layout: str
    bind: Callable[[Workload, torch.device], Attend]
    around: Callable[[], AbstractContextManager] = nullcontext
    by_default: bool = True
    compiles: bool = False  # worth compiling in parallel before a run

    def closures(self, inputs: Inputs) -> Closures | str:
        """Closures over these inputs, or the reason why not."""
        attend, reason = attempt(lambda: self.bind(inputs.workload, inputs.device))
        return reason or Closures(attend, inputs.ordered(self.layout), self.layout, self.around)


def _needs_cuda(device: torch.device) -> None:
    if device.type != "cuda":
        raise Unavailable("needs a CUDA device")


def _no_bottom_right(workload: Workload) -> None:
    if workload.causal is True and workload.seqlen_q != workload.seqlen_k:
        raise Unavailable("aligns its causal mask at the top left")


def cu_seqlens(workload: Workload, device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(workload.lengths)], dtype=torch.int32, device=device)


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
