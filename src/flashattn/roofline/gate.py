"""No number without passing the oracle.

Two questions, both asked of the very closures that are timed. At a reduced size of the same kind: is the result within the derived
tolerance of the fp64 reference? At the real size, where fp64 scores do not fit: does it agree with another provider that passed?

The tolerance has no tuned number: with `low` the naive computation in the workload's own dtype and `ref` in fp64,
max|x - ref| <= 2 (max|low - ref| + eps max|ref|) and rms(x - ref) <= 1.5 (rms(low - ref) + eps rms(ref)).
At the real size two results with relative errors e1 and e2 may differ by e1 + e2 + eps; twice that is allowed, since the errors were
measured at another length.

Surprising fact: relative error hardly grows with length, because the softmax averages rounding errors as it averages values.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from ..reference import attention_reference, attention_varlen_reference
from .calls import Closures, Inputs, Provider, attempt
from .workload import Workload

Reference = Callable[..., Tensor]

# whose result the others must agree with at the real size: the first of these that passed the oracle, then anyone
ANCHORS = ("sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "sdpa-math", "torch-varlen", "fa3", "fa2")


@dataclass(frozen=True)
class Verdict:
    """error: the worst ||x - ref|| / ||ref|| over the tensors of a pass; failure: why it gets no number, or None."""

    error: float | None
    failure: str | None


def relative_error(x: Tensor, ref: Tensor) -> float:
    """||x - ref|| / ||ref||, in fp64; the absolute norm where ref is all zero."""
    x, ref = x.double(), ref.double()
    return ((x - ref).norm() / (ref.norm() if ref.norm() > 0 else 1.0)).item()


def excess(name: str, x: Tensor, low: Tensor, ref: Tensor, eps: float) -> str | None:
    """None when x is within the derived tolerance of ref, else one sentence with both sides of the broken inequality."""
    if x.shape != ref.shape:
        return f"{name} has shape {tuple(x.shape)}, expected {tuple(ref.shape)}"
    if not torch.isfinite(x).all():
        return f"{name} is not finite"
    difference, peer = x.double() - ref, low.double() - ref
    checks = (
        ("max", 2.0, difference.abs().max(), peer.abs().max(), ref.abs().max()),
        ("rms", 1.5, *(t.square().mean().sqrt() for t in (difference, peer, ref))),
    )
    for norm, factor, mine, theirs, size in checks:
        limit = factor * (theirs + eps * size)
        if not mine <= limit:
            return f"{name} is wrong: {norm} error {mine.item():.2e}, allowed {limit.item():.2e}"
    return None


def flashattn_reference(workload: Workload, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if workload.packed:
        cu = [0, *accumulate(workload.lengths)]
        packed = (x.squeeze(0) for x in (q, k, v))
        return attention_varlen_reference(*packed, cu, cu, causal=workload.causal, window=workload.window).unsqueeze(0)
    return attention_reference(q, k, v, causal=workload.causal, window=workload.window)


@dataclass
class Gate:
    """Judges providers; each kind of workload is judged once."""

    device: torch.device
    reference: Reference = flashattn_reference
    _expected: dict[tuple, dict[str, Tensor]] = field(default_factory=dict)
    _verdicts: dict[tuple, Verdict] = field(default_factory=dict)

    def judge(self, provider: Provider, workload: Workload, direction: str) -> Verdict:
        """The verdict of the fp64 oracle on the reduced workload."""
        kind = workload.reduced()
        key = (provider.name, kind, direction)
        if key not in self._verdicts:
            self._verdicts[key] = self._judge(provider, kind, direction)
        return self._verdicts[key]

    def _judge(self, provider: Provider, kind: Workload, direction: str) -> Verdict:
        closures = provider.closures(Inputs(kind, self.device))
        if isinstance(closures, str):
            return Verdict(None, closures)
        results, reason = attempt(lambda: closures.results(direction))
        if reason:
            return Verdict(None, reason)
        ref = self.expected(kind, direction, torch.float64)
        low = self.expected(kind, direction, kind.torch_dtype)
        eps = torch.finfo(kind.torch_dtype).eps
        failures = [excess(name, results[name], low[name], ref[name], eps) for name in ref]
        error = max(relative_error(results[name], ref[name]) for name in ref) if not any(failures) else None
        return Verdict(error, next((failure for failure in failures if failure), None))

    def expected(self, kind: Workload, direction: str, dtype: torch.dtype) -> dict[str, Tensor]:
        """What the reference gives in `dtype` for the workload's standard inputs; computed once."""
        key = (kind, direction, dtype)
        if key not in self._expected:
            tensors = tuple(t.to(dtype) for t in Inputs(kind, self.device).ordered("bshd"))
            naive = Closures(lambda q, k, v: self.reference(kind, q, k, v), tensors, "bshd")
            self._expected[key] = {name: t.detach() for name, t in naive.results(direction).items()}
        return self._expected[key]


def disagreement(mine: dict[str, Tensor], anchor: dict[str, Tensor], my_error: float, anchor_error: float) -> tuple[float, str | None]:
    """(relative difference to another provider at the real size, None or why it is too large)."""
    worst = 0.0
    for name, expected in anchor.items():
        if not torch.isfinite(mine[name]).all():
            return float("nan"), f"{name} is not finite at the real size"
        difference = relative_error(mine[name], expected)
        limit = 2.0 * (my_error + anchor_error + torch.finfo(expected.dtype).eps)
        if not difference <= limit:
            return difference, f"{name} disagrees at the real size: relative difference {difference:.2e}, allowed {limit:.2e}"
        worst = max(worst, difference)
    return worst, None


def admit(
    workload: Workload, direction: str, providers: tuple[Provider, ...], gate: Gate
) -> tuple[dict[str, Closures], dict[str, dict]]:
    """(closures of the providers that may be timed, for every provider what the gate found: error, against, difference, failure)."""
    rank = {name: index for index, name in enumerate(ANCHORS)}
    inputs = Inputs(workload, gate.device)
    admitted: dict[str, Closures] = {}
    found: dict[str, dict] = {}
    anchor, expected = None, {}
    for provider in sorted(providers, key=lambda p: rank.get(p.name, len(rank))):
        verdict = gate.judge(provider, workload, direction)
        entry = {"error": verdict.error, "against": None, "difference": None, "failure": verdict.failure}
        found[provider.name] = entry
        if verdict.failure:
            continue
        closures = provider.closures(inputs)
        if isinstance(closures, str):
            entry["failure"] = closures
            continue
        results, entry["failure"] = attempt(partial(closures.results, direction))
        if entry["failure"]:
            continue
        if anchor is None:
            anchor, expected = provider.name, results
        else:
            difference, entry["failure"] = disagreement(results, expected, verdict.error, found[anchor]["error"])
            entry["against"], entry["difference"] = anchor, difference if difference == difference else None
        if not entry["failure"]:
            admitted[provider.name] = closures
    return admitted, found
