"""The benchmarks, without a GPU: what they count and what they write down. Who is timed, and how: test_benchmarks_gate.py.

The surprising fact: the arithmetic of a benchmark can be checked exactly, by counting pairs one by one.
"""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from benchmarks import host_overhead, memory, report, run
from benchmarks.workloads import MIXED, SUITES, WORKLOADS, Workload, packed, select, square

from flashattn.dispatch.table import padded_head_dim
from flashattn.reference import keep_mask
from flashattn.roofline.calls import Inputs
from flashattn.roofline.timing import Call

CPU = torch.device("cpu")
TINY = square("tiny", 1, 24, 2, 1, 16, True, "float32")


# -------------------- workloads

UGLY = [
    Workload("dense", 2, 5, 7, 6, 2, 8, 4),
    Workload("causal", 1, 7, 3, 2, 1, 16, 16, True),
    Workload("causal-long", 3, 3, 7, 2, 2, 8, 24, True),
    Workload("top-left", 1, 7, 3, 2, 1, 8, 8, "top-left"),
    Workload("window", 2, 13, 11, 4, 4, 8, 8, False, (2, 3)),
    Workload("window-left", 1, 9, 9, 1, 1, 8, 8, True, (4, None)),
    Workload("far", 1, 2, 40, 1, 1, 8, 8, False, (0, 0)),
    Workload("none", 1, 0, 5, 1, 1, 8, 8, True),
    Workload("tall", 1, 50, 2, 2, 2, 8, 8, True, (3, None)),
    packed("packed", (5, 1, 13), 4, 2, 8, causal=False),
    packed("packed-causal", (5, 1, 13), 4, 2, 8),
    replace(packed("packed-window", (7, 7, 2, 30), 2, 1, 8), window=(3, None), head_dim_v=24),
]


@pytest.mark.parametrize("workload", UGLY, ids=lambda w: w.name)
def test_flops_equal_brute_force_counting(workload):
    mask = partial(keep_mask, causal=workload.causal, window=workload.window)
    sequences = [(length, length) for length in workload.lengths] or [(workload.seqlen_q, workload.seqlen_k)] * workload.batch
    kept = workload.heads_q * sum(int(mask(*lengths).sum()) for lengths in sequences)
    score, value = 2 * workload.head_dim * kept, 2 * workload.head_dim_v * kept
    assert workload.pairs() == kept
    assert workload.flops("fwd") == score + value  # q k, p v
    assert workload.flops("bwd") == score + value + value + score + score  # q k, dout v, p dout, ds k, ds q
    if workload.head_dim == workload.head_dim_v:
        assert 2 * workload.flops("bwd") == 5 * workload.flops("fwd")


def test_dense_flops_are_the_usual_formula():
    w = WORKLOADS["fa3-d128-s4096"]
    assert w.flops("fwd") == 4 * w.batch * w.heads_q * w.seqlen_q * w.seqlen_k * w.head_dim


@pytest.mark.parametrize("workload", [*UGLY, WORKLOADS["smoke-gqa-s128-causal"]], ids=lambda w: w.name)
def test_minimal_bytes_are_the_sizes_of_the_tensors(workload):
    q, k, v, dout = Inputs(workload, CPU).ordered("bshd")
    lse = torch.empty(workload.rows[0], workload.heads_q, workload.rows[1])

    def size(*tensors):
        return sum(t.numel() * t.element_size() for t in tensors)

    assert workload.minimal_bytes("fwd") == size(q, k, v, dout, lse)
    assert workload.minimal_bytes("bwd") == size(q, k, v, dout, dout, lse) + size(q, k, v)


def test_a_wrong_direction_is_named():
    with pytest.raises(ValueError, match="'sideways'"):
        TINY.flops("sideways")
    with pytest.raises(ValueError, match="'sideways'"):
        TINY.minimal_bytes("sideways")


def test_suites_are_what_their_names_say():
    grid = SUITES["fa3"]
    assert len(grid) == 3 * 6 * 2
    assert all(w.batch * w.seqlen_q == 16384 and w.heads_q * w.head_dim == 2048 and w.dtype == "bfloat16" for w in grid)
    assert {w.head_dim for w in grid} == {64, 128, 256}
    assert {w.seqlen_q for w in grid} == {512, 1024, 2048, 4096, 8192, 16384}
    assert all((w.heads_q, w.heads_kv, w.head_dim, w.causal) == (32, 8, 128, True) for w in SUITES["llama3"])
    assert all(w.packed and sum(w.lengths) == 16384 and max(w.lengths) == w.seqlen_q == w.seqlen_k for w in SUITES["packed"])
    assert WORKLOADS["packed-16k"].flops("bwd") == WORKLOADS["fa3-d128-s4096-causal"].flops("bwd"), "what a dense batch of them would be"
    assert all(padded_head_dim(w.head_dim) != w.head_dim for w in SUITES["dims"])
    assert all(WORKLOADS[w.name] == w for suite in SUITES.values() for w in suite), "two workloads share a name"


def test_selection():
    assert [w.name for w in select("fa3", (4096,), (128,))] == ["fa3-d128-s4096", "fa3-d128-s4096-causal"]
    assert [w.name for w in select("fa3", (4096,), (128,), "causal")] == ["fa3-d128-s4096-causal"]
    with pytest.raises(ValueError, match="no workload of suite 'fa3'"):
        select("fa3", (4097,))
    with pytest.raises(ValueError, match="'fa4'"):
        select("fa4")


def test_a_reduced_workload_is_of_the_same_kind_and_judged_once():
    w = WORKLOADS["llama3-8b-s16384"]
    small = w.reduced()
    assert (small.seqlen_q, small.group, small.head_dim, small.causal, small.dtype) == (1024, w.group, 128, True, w.dtype)
    assert small == WORKLOADS["llama3-8b-s2048"].reduced()
    assert small != replace(w, causal=False).reduced()
    mixed = WORKLOADS["packed-16k-llama3-8b-mixed"].reduced()
    assert mixed.lengths == tuple(min(length, 1024) for length in MIXED) and mixed.batch == len(MIXED)
    assert (mixed.seqlen_q, mixed.group, mixed.packed) == (1024, 4, True)


# -------------------- report


def row(workload="w", direction="fwd", provider="flashattn-portable", ms=1.0, date="d1", failure=None) -> dict:
    numbers = {"ms": ms, "tflops": ms and 600 / ms, "spread": 0.02, "error": 1e-3}
    return {"workload": workload, "direction": direction, "provider": provider, "date": date, "failure": failure} | numbers


def test_measuring_again_replaces_the_whole_group_and_nothing_else(tmp_path):
    path = tmp_path / "deep" / "gpu-suite.json"
    record = report.Record(path, "suite", "GPU")
    record.begin({"date": "d1"})
    record.replace([row("w1"), row("w1", provider="fa3")])
    record.replace([row("w2")])
    record.write()
    again = report.Record(path, "suite", "GPU")
    again.begin({"date": "d2"})
    again.replace([row("w1", date="d2")])
    again.write()
    data = json.loads(path.read_text())
    assert [(r["workload"], r["provider"], r["date"]) for r in data["rows"]] == [
        ("w2", "flashattn-portable", "d1"), ("w1", "flashattn-portable", "d2")]  # fmt: skip
    assert [r["date"] for r in data["runs"]] == ["d1", "d2"]
    again.replace([row("w2", date="d2")])
    assert [r["date"] for r in again.data["runs"]] == ["d2"], "a run without rows is forgotten"
    with pytest.raises(ValueError, match="holds suite 'suite' of 'GPU'"):
        report.Record(path, "suite", "another GPU")
    assert list(path.parent.iterdir()) == [path]


def test_not_a_number_is_never_written(tmp_path):
    record = report.Record(tmp_path / "x.json", "suite", "GPU")
    record.replace([row(ms=float("nan"))])
    with pytest.raises(ValueError):
        record.write()
    assert not (tmp_path / "x.json").exists()


def test_table_and_failures():
    rows = [row(), row(provider="fa3", ms=0.9), row(provider="sdpa-flash", ms=1.8), row(provider="fa2", ms=None, failure="is not here")]
    rows += [row("w2"), row("w2", provider="fa2", ms=None, failure="is not here")]
    header, lines = report.pivot(rows)
    assert header == ["workload", "pass", "flashattn-portable", "fa3", "sdpa-flash", "ours/best peer", "spread", "error"]
    assert lines == [["w", "fwd", "600", "667", "333", "0.90", "2 %", "1.0e-03"], ["w2", "fwd", "600", "-", "-", "-", "2 %", "1.0e-03"]]
    assert report.failures(rows) == ["fa2: is not here (2 rows)"]
    text = report.plain_table(header, lines).splitlines()
    assert len(text) == 3 and text[0].index("pass") == text[1].index("fwd")


def test_gpu_names_become_file_names():
    names = {"NVIDIA H200": "h200", "NVIDIA GeForce RTX 4090": "rtx-4090", "CPU (x86_64)": "cpu", "NVIDIA A100-SXM4-80GB": "a100-sxm4-80gb"}
    assert {name: report.slug(name) for name in names} == names


# -------------------- commands, on a CPU


def test_smoke_suite_end_to_end(tmp_path, capsys):
    path = tmp_path / "cpu-smoke.json"
    command = ["--suite", "smoke", "--providers", "flashattn-eager,sdpa-math,fa3", "--rounds", "2", "--slice-ms", "0.1"]
    assert run.main([*command, "--device", "cpu", "--json", str(path)]) == 0
    data = json.loads(path.read_text())
    assert len(data["rows"]) == len(SUITES["smoke"]) * 2 * 3
    who = {"suite", "workload", "direction", "provider", "date", "versions", "gpu", "command"}
    what = {"ms", "tflops", "gbps", "speedup", "spread", "error", "failure"}
    for r in data["rows"]:
        assert who | what <= set(r)
        if r["provider"] == "fa3":
            assert r["ms"] is None and r["failure"] == "needs a CUDA device"
        elif r["provider"] == "sdpa-math" and "packed" in r["workload"]:
            assert r["ms"] is None and "no packed sequences" in r["failure"]
        else:
            assert r["failure"] is None and r["ms"] > 0 and 0 < r["error"] < 1e-2
            assert len(r["speedup"]) == ("packed" not in r["workload"])
    assert data["runs"][0]["versions"]["torch"] == torch.__version__ and "--suite smoke" in data["runs"][0]["command"]
    printed = capsys.readouterr().out
    assert "smoke-gqa-s128-causal" in printed and "fa3: needs a CUDA device (8 rows)" in printed


SMOKE_MATH = ["--suite", "smoke", "--providers", "sdpa-math", "--rounds", "1", "--slice-ms", "0.1", "--device", "cpu"]


def test_what_was_measured_survives_an_end_in_the_middle(tmp_path, monkeypatch):
    real, done = run.measure, []

    def measure(workload, *rest):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(workload)
        return real(workload, *rest)

    monkeypatch.setattr(run, "measure", measure)
    path = tmp_path / "cpu-smoke.json"
    with pytest.raises(KeyboardInterrupt):
        run.main([*SMOKE_MATH, "--json", str(path)])
    assert [(r["workload"], r["direction"]) for r in json.loads(path.read_text())["rows"]] == [
        ("smoke-d64-s128", "fwd"), ("smoke-d64-s128", "bwd")]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "fa3", "--device", "cpu"], "needs a GPU"),
        (["--suite", "smoke", "--providers", "fa9"], "unknown provider fa9"),
        (["--suite", "smoke", "--directions", "up"], "unknown direction up"),
        (["--suite", "smoke", "--seqlens", "3"], "no workload"),
    ],
)
def test_bad_arguments_exit_with_2_and_say_why(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        run.main(arguments)
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_lengths_are_read_with_or_without_k():
    assert run.numbers("512,4k,16k") == (512, 4096, 16384)


def test_warming_shares_out_every_shape_once():
    shards = [run.warm_tasks(SUITES["fa3"], index, 5) for index in range(5)]
    tasks = [task for shard in shards for task in shard]
    assert len(tasks) == len(set(tasks)) and set(SUITES["fa3"]) <= set(tasks)
    assert {w.reduced() for w in SUITES["fa3"]} <= set(tasks)
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_host_time_counts_every_call_and_drains_outside_the_clock():
    log = []
    calls = {name: Call(lambda name=name: log.append(name)) for name in ("a", "b")}
    times = host_overhead.host_us(calls, count=3, repeats=2, wait=lambda: log.append("wait"))
    assert {name: len(values) for name, values in times.items()} == {"a": 2, "b": 2}
    assert log == [event for name in "abbaba" for event in ("wait", name, name, name, "wait")]


def test_host_overhead_on_a_cpu(tmp_path):
    path = tmp_path / "host.json"
    arguments = ["--providers", "flashattn-eager,sdpa", "--calls", "2", "--repeats", "3", "--device", "cpu", "--json"]
    assert host_overhead.main([*arguments, str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [r["provider"] for r in rows] == ["flashattn-eager", "sdpa"]
    assert all(r["failure"] is None and 0 < r["us_min"] <= r["us"] <= r["us_max"] for r in rows)


def test_memory_ratios():
    rows = [
        {"provider": name, "seqlen": seqlen, "extra_bytes": extra, "peak_bytes": peak, "failure": None}
        for name, seqlen, extra, peak in (("ours", 8, 100, 150), ("ours", 16, 210, 310), ("peer", 8, 200, 250), ("peer", 16, 420, 520))
    ] + [{"provider": "gone", "seqlen": 8, "extra_bytes": None, "peak_bytes": None, "failure": "no"}]
    memory.add_ratios(rows, "peer")
    assert [r.get("growth") for r in rows] == [1.0, 2.1, 1.0, 2.1, None]
    assert [r.get("extra_over_baseline") for r in rows] == [0.5, 0.5, 1.0, 1.0, None]
    assert rows[0]["peak_over_baseline"] == 0.6


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs no GPU")
def test_memory_without_a_gpu_exits_with_2(capsys):
    with pytest.raises(SystemExit) as stopped:
        memory.main([])
    assert stopped.value.code == 2 and "needs a CUDA device" in capsys.readouterr().err


# -------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.no_poison
def test_smoke_suite_on_a_gpu(tmp_path):
    path = tmp_path / "gpu-smoke.json"
    providers = "flashattn-portable,sdpa-flash,sdpa-cudnn"
    assert run.main(["--suite", "smoke", "--providers", providers, "--rounds", "2", "--json", str(path)]) == 0
    data = json.loads(path.read_text())
    failed = {r["provider"] for r in data["rows"] if r["failure"] and not (r["provider"] == "sdpa-flash" and "packed" in r["workload"])}
    assert failed <= {"sdpa-cudnn"}
    assert data["runs"][0]["gpu_start"] is None or "MHz" not in data["runs"][0]["gpu_start"]["clocks.sm"]


@pytest.mark.gpu
@pytest.mark.no_poison
def test_memory_of_forward_and_backward_is_linear_in_length(tmp_path):
    path = tmp_path / "memory.json"
    assert memory.main(["--seqlen", "8192", "--json", str(path)]) == 0
    ours = [r for r in json.loads(path.read_text())["rows"] if r["provider"] == "flashattn-portable"]
    assert [r["failure"] for r in ours] == [None, None]
    assert 1.9 < ours[1]["growth"] < 2.1
    assert all(r["peak_over_baseline"] <= 1.15 for r in ours)
