"""Kernels placed on the roofline, by a fake clock or on the CPU, told and drawn.

The surprising fact: a share of a ceiling above 1 is no error. A kernel that finds its tensors in L2 moves them faster than a copy can.
"""

import json

import pytest
import torch
from click.testing import CliRunner

from flashattn.roofline import cli, find, measure, plot, report
from flashattn.roofline.calls import Provider
from flashattn.roofline.gate import Gate
from flashattn.roofline.peers import PROVIDERS
from flashattn.roofline.timing import Call, Sample
from flashattn.roofline.work import Work
from flashattn.roofline.workload import square
from test_roofline_cli import data, run

CPU = torch.device("cpu")
TINY = square("tiny", 1, 24, 2, 1, 16, True, "float32")


class FakeClock:
    """Milliseconds by the name that a call returns; a name it doesn't know costs `other`."""

    def __init__(self, costs: dict[str, float], other: float = 1.0) -> None:
        self.costs, self.other = costs, other

    def elapsed_ms(self, call, count):
        name = call()
        return count * (self.costs.get(name, self.other) if isinstance(name, str) else self.other)


def test_a_sample_is_placed_on_the_roofline():
    gpu, work = find("H100"), Work(flops=989 * 10**9, bytes=335 * 10**6)  # 1 ms of arithmetic, 0.1 ms of memory
    found = measure.place("k", Sample((2.0, 4.0, 1.0)), work, gpu, "bfloat16", measure.Ceilings(bandwidth=1.675e12, peak=600e12))
    assert (found.ms, found.spread, found.tflops, found.gbps) == (2.0, 1.5, 494.5, 167.5)
    assert (found.peak_share, found.bandwidth_share) == (0.5, 0.05)
    assert found.matmul_share == pytest.approx(494.5 / 600) and found.copy_share == pytest.approx(0.1)
    assert (found.bound_us, found.binds, found.bound_share) == (1000, "compute", 0.5)
    alone = measure.place("k", Sample((2.0,)), work, None, "bfloat16")
    assert (alone.tflops, alone.bound_us, alone.peak_share, alone.copy_share) == (494.5, None, None, None)


def test_ceilings_are_the_fastest_round():
    calls = {
        "copy": (Call(lambda: "copy"), Work(0, 2 * 10**9)),
        "matmul": (Call(lambda: "matmul"), Work(3 * 10**12, 1)),
    }
    found = measure.ceilings_of(calls, {"copy": Sample((2.0, 1.0, 3.0)), "matmul": Sample((6.0, 5.0))})
    assert (found.bandwidth, found.peak) == (2e12, 600e12)
    assert measure.ceilings_of({}, {}) == measure.Ceilings(None, None)


def test_ceiling_calls_copy_and_multiply():
    calls = measure.ceiling_calls(CPU, torch.float32, size=16, copy_bytes=64)
    assert calls["copy"][1] == Work(0, 64) and calls["matmul"][1].flops == 2 * 16**3
    copied, product = (call.run() for call, _ in calls.values())
    assert copied.numel() == 32 and product.shape == (16, 16) and not (product == 1).all()


def test_measuring_with_a_fake_clock():
    """Ours and a peer take 1 ms by that clock, a wrong one gets no number; copy and matmul are in the same run."""
    wrong = Provider("wrong", "bshd", lambda workload, device: lambda q, k, v: 0 * q)
    done, ceilings = [], {"copy": (Call(lambda: "copy"), Work(0, 10**9)), "matmul": (Call(lambda: "matmul"), Work(10**12, 1))}
    found = measure.measure(
        TINY, ("fwd", "bwd"), (PROVIDERS["flashattn-eager"], PROVIDERS["sdpa-math"], wrong), find("H200"), Gate(CPU),
        FakeClock({"copy": 0.5, "matmul": 2.0}), rounds=2, ceilings=ceilings, advance=done.append,
    )  # fmt: skip
    assert list(found) == ["forward", "backward"]
    for direction, short in (("forward", "fwd"), ("backward", "bwd")):
        placed = found[direction]["placed"]
        assert [one["name"] for one in placed] == ["flashattn-eager", "sdpa-math"]
        assert all(one["ms"] == 1 and one["tflops"] == TINY.flops(short) / 1e9 for one in placed)
        assert list(found[direction]["failures"]) == ["wrong"]
        assert found[direction]["ceilings"] == {"bandwidth": 2e12, "peak": 0.5e15}
        assert placed[0]["copy_share"] == pytest.approx(TINY.minimal_bytes(short) / 1e-3 / 2e12)
        assert placed[0]["bound_share"] == pytest.approx(placed[0]["bound_us"] / 1000)
    assert done == ["forward: checked", "forward: timed", "backward: checked", "backward: timed"]


def test_measure_from_options_to_table_and_file(monkeypatch, tmp_path):
    """As on a GPU, but that the device is the CPU and the ceilings are small ones."""
    small = measure.ceiling_calls(CPU, torch.float32, size=16, copy_bytes=64)
    monkeypatch.setattr(cli, "cuda", lambda: CPU)
    monkeypatch.setattr(measure, "ceiling_calls", lambda device, dtype: small)
    options = "--gpu H200 --seqlen 32 --batch 1 --heads 4 --heads-kv 2 --head-dim 16 --dtype float32 --causal --rounds 2 --slice-ms 0.1"
    options = [*options.split(), "--kernels", "flashattn-eager,sdpa-math,fa3"]
    path = tmp_path / "deep" / "m.json"
    found = data("measure", *options, "--out", str(path))
    assert found == json.loads(path.read_text()) and found["workload"]["name"] == "b1-s32-h4-2-d16-causal-float32"
    assert found["workload"]["heads_kv"] == 2 and found["gpu"] == "H200" and found["gpu_state"] == {"before": None, "after": None}
    for direction in ("forward", "backward"):
        assert [one["name"] for one in found["passes"][direction]["placed"]] == ["flashattn-eager", "sdpa-math"]
        assert found["passes"][direction]["failures"] == {"fa3": "needs a CUDA device"}
        assert all(one["ms"] > 0 and one["matmul_share"] > 0 for one in found["passes"][direction]["placed"])
    text = run("measure", *options, "--passes", "fwd")
    assert "flashattn-eager" in text and "fa3, forward: needs a CUDA device" in text and "backward" not in text
    wrong = {
        "--heads-kv 3": "heads=4: expected a multiple of heads_kv=3", "--passes fwd,up": "not up", "--kernels nobody": "unknown",
        "--heads-kv 0": "heads_kv=0", "--rounds 0": "rounds=0", "--slice-ms inf": "slice_ms=inf: expected a positive number",
    }  # fmt: skip
    for words, message in wrong.items():
        assert message in str(CliRunner().invoke(cli.cli, ["measure", *options, *words.split()]).exception), words


def test_an_unknown_gpu_is_held_against_no_data_sheet(monkeypatch):
    """Without --gpu: what an unknown GPU reaches is no share of an H100."""
    small = measure.ceiling_calls(CPU, torch.float32, size=16, copy_bytes=64)
    monkeypatch.setattr(cli, "cuda", lambda: CPU)
    monkeypatch.setattr(cli, "current_gpu", lambda: None)
    monkeypatch.setattr(measure, "ceiling_calls", lambda device, dtype: small)
    options = "--seqlen 32 --batch 1 --heads 2 --head-dim 16 --dtype float32 --rounds 1 --slice-ms 0.1 --kernels sdpa-math --passes fwd"
    (one,) = (found := data("measure", *options.split()))["passes"]["forward"]["placed"]
    assert found["gpu"] is None and one["peak_share"] is None and one["bound_us"] is None and one["matmul_share"] > 0
    assert data("measure", *options.split(), "--peak", "1", "--bandwidth", "1")["passes"]["forward"]["placed"][0]["bound_us"] > 0


STATE = {"clocks.sm": "1980", "clocks.mem": "3201", "power.draw": "690", "power.limit": "700", "temperature.gpu": "60"}


def document() -> dict:
    gpu, work, top = find("H200"), Work(10**12, 10**8), measure.Ceilings(4e12, 700e12)
    one = measure.asdict(measure.place("flashattn", Sample((2.0,)), work, gpu, "bfloat16", top))
    passes = {"forward": {"placed": [one], "failures": {"fa9": "is not here"}, "ceilings": measure.asdict(top)}}
    states = {"before": None, "after": STATE}
    return {"workload": {"name": "w"}, "gpu": "H200", "device": "NVIDIA H200", "gpu_state": states, "passes": passes}


def test_a_measurement_is_told_with_clocks_and_power():
    found = report.measured(document())
    (row,) = found.tables[0].rows
    assert row == ("flashattn", "forward", "2", "500", "50", "50.6%", "71.4%", "1.0%", "1.2%", "1011.1, compute", "50.6%")
    assert found.notes == [
        "fa9, forward: is not here",
        "forward: a matmul reached 700 TFLOP/s, a copy 4000 GB/s",
        "after: SM 1980 MHz, memory 3201 MHz, 690 W of 700, 60 C",
    ]
    unknown = document()
    unknown["passes"]["forward"]["placed"][0] |= dict.fromkeys(("bound_us", "bound_share", "peak_share"))
    assert report.measured(unknown).tables[0].rows[0][-2:] == ("-", "-")


# --------------------------------------------------------------------------------------------------------------------------- plots


def test_the_roofline_is_drawn_with_what_was_measured(tmp_path):
    path, out = tmp_path / "m.json", tmp_path / "deep" / "r.svg"
    path.write_text(json.dumps(document()))
    assert str(out) in run("plot", "--gpu", "H200", "--measured", str(path), "--out", str(out))
    text = out.read_text()
    for words in ("flashattn forward", "RMSNorm", "measured: 700 TFLOP/s, 4 TB/s", "H200: 989 TFLOP/s, 4.8 TB/s", "ridge 206"):
        assert f"<!-- {words}" in text, words
    run("plot", "--gpu", "H200", "--out", str(tmp_path / "r.png"))
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_points_of_the_model_lie_on_the_roof():
    gpu = find("H100")
    for point in plot.attained(gpu):
        assert point.flops == pytest.approx(min(gpu.peak("bfloat16"), point.intensity * gpu.bandwidth))


def test_lines_against_the_length():
    figure = plot.against_length({"flashattn": {512: 1.0, 128: 2.0}, "peer": {128: 3.0}}, "TFLOP/s", "title", log=True)
    ours, peer = figure.axes[0].lines
    assert list(ours.get_xdata()) == [128, 512] and list(ours.get_ydata()) == [2.0, 1.0]
    assert ours.get_linewidth() > peer.get_linewidth()
    with pytest.raises(ValueError, match="nothing to draw for 'title'"):
        plot.against_length({"a": {}}, "y", "title")


# ------------------------------------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.big(8)  # alone: it is timed
@pytest.mark.no_poison
def test_measure_on_this_gpu(tmp_path):
    path = tmp_path / "m.json"
    options = ["--batch", "2", "--seqlen", "1024", "--heads", "8", "--causal", "--rounds", "2", "--slice-ms", "5", "--out", str(path)]
    found = data("measure", *options)
    assert json.loads(path.read_text()) == found
    for direction in found["passes"].values():
        assert [one["name"] for one in direction["placed"]] == ["flashattn", "sdpa-flash"] and not direction["failures"]
        assert all(0 < one["matmul_share"] < 1.1 and one["spread"] < 1 for one in direction["placed"])
