"""Who is timed and how, without a GPU: turns by a fake clock, and a gate that stops what is wrong. Tiles: test_benchmarks_tune.py.

The surprising fact: most of these tests plant something that is wrong in one particular way, because a benchmark is believed exactly as
far as its gate has been seen to close.
"""

import importlib.util
import subprocess
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from benchmarks import run
from benchmarks.workloads import DIRECTIONS, square

from flashattn.dispatch.table import KERNELS
from flashattn.roofline import timing
from flashattn.roofline.calls import Inputs, Provider, attempt
from flashattn.roofline.gate import Gate, disagreement, excess
from flashattn.roofline.peers import PROVIDERS, choose
from flashattn.roofline.timing import Call, Sample, WallClock, gpu_state, interleave, turn_order

CPU = torch.device("cpu")
TINY = square("tiny", 1, 24, 2, 1, 16, True, "float32")

class FakeClock:
    """Each call costs what the table says; notes (name, count) of every turn."""

    def __init__(self, costs: dict[str, float]) -> None:
        self.costs, self.turns = costs, []

    def elapsed_ms(self, call, count):
        name = call()
        self.turns.append((name, count))
        return self.costs[name] * count


# -------------------- timing


def test_every_round_gives_every_provider_one_turn_and_new_neighbours():
    names = ["a", "b", "c", "d"]
    rounds = [turn_order(names, index) for index in range(8)]
    assert all(sorted(order) == names for order in rounds)
    assert {order[0] for order in rounds} == set(names)
    followers = {(x, y) for order in rounds for x, y in pairwise(order)}
    assert {("a", "b"), ("b", "a")} <= followers
    assert turn_order([], 3) == []


def test_interleaving_with_a_fake_clock():
    clock = FakeClock({"fast": 0.5, "slow": 40.0})
    entered = []

    def context(name):
        @contextmanager
        def inside():
            entered.append(name)
            yield

        return inside

    calls = {name: Call(lambda name=name: name, context(name)) for name in clock.costs}
    samples = interleave(calls, clock, rounds=3, slice_ms=25.0)
    assert clock.turns[:4] == [("fast", 1), ("fast", 2), ("slow", 1), ("slow", 2)]  # warm up, then size the slices
    turns = clock.turns[4:]
    assert turns == [("fast", 50), ("slow", 1), ("slow", 1), ("fast", 50), ("slow", 1), ("fast", 50)]
    assert [samples[name].rounds for name in calls] == [(0.5,) * 3, (40.0,) * 3]
    assert entered == ["fast", "slow"] + [name for name, _ in turns], "one context a turn"


def test_median_and_spread():
    sample = Sample((3.0, 1.0, 2.0))
    assert (sample.median, sample.spread) == (2.0, 1.0)


def test_no_rounds_is_an_error():
    with pytest.raises(ValueError, match="rounds is 0"):
        interleave({}, WallClock(), rounds=0)


def test_no_gpu_has_no_state():
    assert gpu_state(CPU) is None


def test_an_nvidia_smi_that_hangs_is_no_end_of_a_run(monkeypatch):
    def hang(command, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(timing.shutil, "which", lambda name: name)
    monkeypatch.setattr(timing.subprocess, "run", hang)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-1"))
    assert gpu_state(torch.device("cuda")) is None


# -------------------- providers and gate


def planted(name: str, attend) -> Provider:
    """A provider whose `attend(workload, q, k, v)` is given."""
    return Provider(name, "bshd", lambda workload, device: lambda q, k, v: attend(workload, q, k, v))


def right(workload, q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), is_causal=bool(workload.causal), enable_gqa=True
    ).transpose(1, 2)


def one_nan(workload, q, k, v):
    out = right(workload, q, k, v).clone()
    out[0, 3, 1, 2] = float("nan")
    return out


def one_row_off(workload, q, k, v):
    out = right(workload, q, k, v).clone()
    out[0, -1] += 0.01
    return out


def no_dq(workload, q, k, v):
    return right(workload, q.detach(), k, v) + 0 * q


WRONG_OUT = {
    "no mask": lambda w, q, k, v: right(replace(w, causal=False), q, k, v),
    "one NaN": one_nan,
    "one row": one_row_off,
    "wrong scale": lambda w, q, k, v: right(w, 1.01 * q, k, v),
    "wrong shape": lambda w, q, k, v: right(w, q, k, v)[:, :-1],
    "zeros": lambda w, q, k, v: 0 * q,
}


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_gate_lets_a_right_provider_pass(direction):
    verdict = Gate(CPU).judge(planted("right", right), TINY, direction)
    assert verdict.failure is None
    assert 0 <= verdict.error < 1e-5


@pytest.mark.parametrize("fault", WRONG_OUT)
def test_the_gate_rejects_a_wrong_forward(fault):
    verdict = Gate(CPU).judge(planted("wrong", WRONG_OUT[fault]), TINY, "fwd")
    assert verdict.error is None
    assert verdict.failure.startswith("out ")


def test_the_gate_rejects_a_wrong_backward_behind_a_right_forward():
    gate, provider = Gate(CPU), planted("wrong", no_dq)
    assert gate.judge(provider, TINY, "fwd").failure is None
    assert gate.judge(provider, TINY, "bwd").failure.startswith("dq is wrong")


def test_tolerance_is_the_derived_one():
    ref = torch.tensor([1.0, -2.0, 4.0], dtype=torch.float64)
    low = ref + torch.tensor([0.0, 0.0, 0.5], dtype=torch.float64)
    eps = 0.25  # max: 2 (0.5 + 0.25 * 4) = 3; rms: 1.5 (0.5 / sqrt 3 + 0.25 sqrt 7) = 1.425
    assert excess("x", ref + torch.tensor([0.0, 0.0, 2.4]), low, ref, eps) is None
    assert "rms" in excess("x", ref + torch.tensor([0.0, 0.0, 2.5]), low, ref, eps)
    assert "max" in excess("x", ref + torch.tensor([0.0, 0.0, 3.1]), low, ref, eps)


def test_a_provider_wrong_only_at_the_real_size_gets_no_number():
    def wrong_when_large(workload, q, k, v):
        return right(workload if workload.batch <= 2 else replace(workload, causal=False), q, k, v)

    large = replace(TINY, batch=3)
    rows = run.measure(
        large, "fwd", (planted("sly", wrong_when_large), PROVIDERS["sdpa-math"]), Gate(CPU), FakeClockOfAll(), rounds=1, slice_ms=1.0
    )
    sly, honest = rows
    assert sly["ms"] is None and sly["speedup"] == {}
    assert "disagrees at the real size" in sly["failure"] and sly["against"] == "sdpa-math"
    assert honest["ms"] == 1.0 and honest["failure"] is None and honest["speedup"] == {}


class FakeClockOfAll:
    """Every call costs one millisecond."""

    def elapsed_ms(self, call, count):
        call()
        return float(count)


def test_a_failing_provider_has_a_row_with_the_reason_and_no_number():
    def explode(workload, q, k, v):
        raise RuntimeError("the kernel\nmelted")

    providers = (planted("bad", explode), planted("wrong", one_row_off), planted("right", right))
    bad, wrong, good = run.measure(TINY, "fwd", providers, Gate(CPU), FakeClockOfAll(), rounds=2, slice_ms=1.0)
    assert bad["failure"] == "RuntimeError: the kernel melted"
    assert wrong["failure"].startswith("out is wrong")
    for row in (bad, wrong):
        assert {row[key] for key in ("ms", "tflops", "gbps", "error", "spread")} == {None}
    assert good["ms"] == 1.0 and good["tflops"] == TINY.flops("fwd") / 1e9 and good["gbps"] == TINY.minimal_bytes("fwd") / 1e6


def test_disagreement_scales_with_the_errors_that_were_measured():
    a = torch.ones(8)
    close, far = {"out": a * (1 + 3e-6)}, {"out": a * (1 + 3e-4)}
    assert disagreement(close, {"out": a}, 1e-6, 1e-6)[1] is None
    assert "disagrees" in disagreement(far, {"out": a}, 1e-6, 1e-6)[1]
    assert disagreement(far, {"out": a}, 1e-4, 1e-4)[1] is None
    assert "not finite" in disagreement({"out": a * float("nan")}, {"out": a}, 1.0, 1.0)[1]


@pytest.mark.parametrize("name", ["sdpa-cudnn", "sdpa-efficient", "torch-varlen", "flex", "fa2", "fa3", "fa4"])
def test_what_needs_cuda_says_so(name):
    assert PROVIDERS[name].closures(Inputs(TINY, CPU)) == "needs a CUDA device"


@pytest.mark.parametrize(("name", "module"), [("fa2", "flash_attn"), ("fa3", "flash_attn_interface"), ("fa4", "flash_attn")])
def test_a_missing_package_is_named(name, module):
    if importlib.util.find_spec(module):
        pytest.skip(f"{module} is installed")
    _, reason = attempt(lambda: PROVIDERS[name].bind(TINY, torch.device("cuda")))
    assert reason.startswith(module) and "does not import" in reason


def test_masks_that_a_peer_does_not_have():
    windowed = replace(TINY, window=(3, None))
    uneven = replace(TINY, seqlen_q=12)
    assert "no window" in PROVIDERS["sdpa-math"].closures(Inputs(windowed, CPU))
    assert "top left" in PROVIDERS["sdpa-math"].closures(Inputs(uneven, CPU))
    _, reason = attempt(lambda: PROVIDERS["flashattn-eager"].closures(Inputs(uneven, CPU)).results("bwd"))
    assert reason is None


def test_every_kernel_of_the_table_is_a_provider():
    assert {f"flashattn-{kernel.name}" for kernel in KERNELS} <= set(PROVIDERS)


def test_choosing_providers():
    assert [p.name for p in choose(("fa3", "sdpa-flash"))] == ["fa3", "sdpa-flash"]
    assert "flashattn-eager" not in [p.name for p in choose(None)] and len(choose(None, everyone=True)) == len(PROVIDERS)
    with pytest.raises(ValueError, match="unknown provider fa9"):
        choose(("fa9",))


def test_both_layouts_hold_the_same_numbers():
    inputs = Inputs(TINY, CPU)
    for bshd, bhsd in zip(inputs.ordered("bshd"), inputs.ordered("bhsd"), strict=True):
        assert bhsd.is_contiguous() and torch.equal(bshd, bhsd.transpose(1, 2))
