"""A workload's tensors, and closures over them for the forward and the backward pass of whoever computes attention.

The backward of every provider is `torch.autograd.grad` over one retained graph, so each pays what a training step pays. Every provider
gets its inputs contiguous in its own native order (bshd or bhsd): no peer is timed on strides it wasn't written for.

Surprising fact: SDPA raises only "No available kernel" and puts its reasons into warnings, so a failed attempt keeps those.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

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


def cu_seqlens(workload: Workload, device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(workload.lengths)], dtype=torch.int32, device=device)
