"""The tanh of a softcap: how exact it is, everywhere. What is made of it is compared with the oracle in test_variants.py.

The surprising fact: it has to be exact relative to its size, since a large cap multiplies what is left of a small score.
"""

import pytest
import torch

from aot import Job

EPS = torch.finfo(torch.float32).eps
WHERE = [
    pytest.param("cpu", marks=pytest.mark.interpret, id="interpreter"),
    pytest.param("cuda", marks=pytest.mark.gpu, id="cuda"),
]
LANES = 1 << 16


def applied(x: torch.Tensor, fast: bool) -> torch.Tensor:
    from score_kernels import tanh_kernel

    out = torch.empty_like(x)
    tanh_kernel[(-(-len(x) // LANES),)](x, out, len(x), fast, LANES)
    return out


def numbers(device) -> torch.Tensor:
    """Of every size and sign, and the neighbours of where one formula takes over from the other."""
    sizes = torch.logspace(-37, 38, 60_000, dtype=torch.float64).float()
    near = torch.linspace(0.0, 12.0, 60_000)
    edge = torch.tensor(0.65) + torch.arange(-500, 500) * EPS / 2
    positive = torch.cat([sizes, near, edge])
    return torch.cat([positive, -positive]).to(device)


@pytest.mark.parametrize("device", WHERE)
def test_tanh_is_exact_relative_to_its_size(device):
    x = numbers(device)
    exact = torch.tanh(x.double())
    error = ((applied(x, fast=False).double() - exact).abs() / exact.abs().clamp_min(1e-38)).amax()
    assert error < 3.5 * EPS


@pytest.mark.parametrize("device", WHERE)
def test_tanh_at_the_ends(device):
    x = torch.tensor([0.0, torch.inf, -torch.inf, torch.nan], device=device)
    found = applied(x, fast=False)
    assert torch.equal(found[:3], torch.tensor([0.0, 1.0, -1.0], device=device)) and found[3].isnan()


@pytest.mark.gpu
def test_the_fast_tanh():
    x = numbers("cuda")
    assert (applied(x, fast=True) - torch.tanh(x)).abs().amax() < 2.0**-10


def build(fast: bool):
    from score_kernels import tanh_kernel

    return tanh_kernel, (torch.float32, torch.float32, 4096), {"FAST": fast, "LANES": 1024}


@pytest.mark.compile_only
@pytest.mark.parametrize("job", [Job("test_score.build", (fast,), cc) for cc in (80, 90, 100) for fast in (False, True)], ids=str)
def test_both_compile(compiled):
    assert compiled.problems() == []
