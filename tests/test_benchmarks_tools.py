"""What needs a GPU, ncu or another commit: memory, DRAM bytes, comparison, pictures. No GPU is needed here.

The surprising fact: such a tool is mostly arithmetic on text, and that can be tested anywhere.
"""

import json
import shutil
import subprocess
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
from benchmarks import compare, dram, memory, plot, report
from benchmarks.workloads import WORKLOADS

from flashattn.dispatch.table import hopper_rows, portable_rows
from flashattn.roofline import memory as laboratory
from flashattn.roofline.workload import PASSES

# -------------------- memory


def test_the_papers_memory_table_stands_beside_what_was_measured():
    assert memory.PAPER_LENGTHS[0] == 128 and memory.PAPER_LENGTHS[-1] == 65536 and len(memory.PAPER_LENGTHS) == 10
    assert (memory.PAPER.batch, memory.PAPER.heads_q, memory.PAPER.head_dim) == (16, 8, 64)
    found = [
        {"provider": "standard", "seqlen": 4096, "peak_bytes": 2**34, "failure": None},
        {"provider": "flashattn", "seqlen": 4096, "peak_bytes": 2**29, "failure": None},
        {"provider": "flashattn", "seqlen": 65536, "peak_bytes": None, "failure": "out of memory"},
    ]
    assert memory.published(found) == [
        "standard at 4096: published 17,024 MB (A100, Dao et al. 2022); measured MiB: standard 16,384",
        "flash at 4096: published 836 MB (A100, Dao et al. 2022); measured MiB: flashattn 512",
        "flash at 65536: published 13,376 MB (A100, Dao et al. 2022); measured MiB: flashattn out of memory",
    ]


# -------------------- DRAM bytes

NCU = '''==PROF== Connected to process 4242 (/usr/bin/python3)
==PROF== Profiling "attn_fwd" - 0: 0%....50%....100% - 1 pass
==PROF== Disconnected from process 4242
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC","Section Name",\
"Metric Name","Metric Unit","Metric Value"
"0","4242","python3","127.0.0.1","attn_fwd(int, float)","1","7","(128, 1, 1)","(64, 1, 1)","0","9.0","Command line profiler metrics",\
"dram__bytes_read.sum","byte","1,234,567"
"0","4242","python3","127.0.0.1","attn_fwd(int, float)","1","7","(128, 1, 1)","(64, 1, 1)","0","9.0","Command line profiler metrics",\
"dram__bytes_write.sum","Kbyte","12.5"
"1","4242","python3","127.0.0.1","attn_fwd(int, float)","1","7","(128, 1, 1)","(64, 1, 1)","0","9.0","Command line profiler metrics",\
"dram__bytes_read.sum","Gbyte","2"
"1","4242","python3","127.0.0.1","attn_fwd(int, float)","1","7","(128, 1, 1)","(64, 1, 1)","0","9.0","Command line profiler metrics",\
"dram__bytes_write.sum","Mbyte","3"
'''


def test_what_ncu_prints_is_read():
    """A line a counter, one launch after the other, with thousands separators and units."""
    assert dram.parse(NCU) == [
        {"kernel": "attn_fwd(int, float)", "read": 1_234_567, "written": 12_500},
        {"kernel": "attn_fwd(int, float)", "read": 2e9, "written": 3e6},
    ]


def test_what_ncu_says_instead_is_told():
    with pytest.raises(ValueError, match="no table: ==ERROR== ERR_NVGPUCTRPERM"):
        dram.parse("==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM - no permission to read the counters\n")
    with pytest.raises(ValueError, match="no table: Traceback"):
        dram.parse("Traceback")
    with pytest.raises(ValueError, match="not both counters for attn_fwd"):
        dram.parse(NCU.rsplit("\n", 2)[0] + "\n")
    with pytest.raises(ValueError, match="not both counters for any kernel"):
        dram.parse(NCU.split('"0","4242"')[0])


def test_the_child_is_run_under_ncu():
    words = dram.command("standard", "bwd", "gpt2-medium-s1024")
    assert words[0] == "ncu" and words[words.index("--metrics") + 1] == "dram__bytes_read.sum,dram__bytes_write.sum"
    assert words[words.index("--child") + 1] == "standard:bwd" and words[words.index("--profile-from-start") + 1] == "off"


def test_the_laboratory_predicts_gpt2_medium():
    """64 x 16 heads of 1024 rows: standard attention moves 25 GB without mask or dropout; ours has the tiles of its kernel."""
    workload, heads = WORKLOADS["gpt2-medium-s1024"], 64 * 16
    nd, nn = 1024 * 64 * 2, 1024 * 1024 * 2
    standard = [dram.predicted(workload, "standard", direction, (9, 0))["no_l2"] for direction in ("fwd", "bwd")]
    assert standard == [heads * (4 * nd + 4 * nn), heads * (8 * nd + 7 * nn)] and round(sum(standard) / 1e9, 1) == 25.2
    row = hopper_rows(replace(workload.problem(), capability=(9, 0), aligned=True))["forward"]
    ours = dram.predicted(workload, "flashattn", "fwd", (9, 0))
    assert ours["no_l2"] == heads * (2 * nd + 2 * nd * -(-1024 // row.block_m) + 4 * 1024)
    assert ours["once"] == workload.minimal_bytes("fwd") < ours["no_l2"] < standard[0]
    portable = dram.predicted(workload, "flashattn-portable", "bwd", (8, 0))
    rows = portable_rows(replace(workload.problem(), capability=(8, 0)))
    tiles = rows["dq"].block_m, rows["dkdv"].block_n  # what stays on chip in either pass
    assert rows["dq"].block_m != rows["dkdv"].block_m
    apart, together = (laboratory.flash(1024, 64, *tiles, 2, "backward", fused) for fused in (False, True))
    assert portable["no_l2"] == heads * apart.total != heads * together.total, "the portable backward has two passes"
    assert dram.predicted(WORKLOADS["fa3-d256-s4096"], "flashattn-portable", "bwd", (9, 0)) is None, "nor a pass each for dK and dV"
    assert dram.predicted(WORKLOADS["gpt2-medium-s1024-causal"], "flashattn", "fwd", (9, 0)) is None, "it knows no masks"


def test_dram_is_told_beside_the_paper():
    rows = [
        {"provider": name, "direction": way, "read": 3e9, "written": 1e9, "ms": 2.0, "predicted": {"no_l2": 5e9, "once": 1e9}}
        for name in ("standard", "flashattn") for way in ("fwd", "bwd")
    ]  # fmt: skip
    assert dram.totals(rows)["standard"] == {"bytes": 8e9, "no_l2": 1e10, "once": 2e9, "ms": 4.0}
    first, _, last = dram.told(rows, "gpt2-medium-s1024")
    assert first.startswith("standard: 8.0 GB and 4.00 ms, forward and backward; predicted 10.0 GB without L2, 2.0 GB")
    assert "published (A100, with mask and dropout): 40.3 -> 4.4 GB, 41.7 -> 7.3 ms, 13% more FLOPs" in last
    assert len(dram.told(rows, "fa3-d64-s512")) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs no GPU")
def test_dram_without_a_gpu_exits_with_2(capsys):
    with pytest.raises(SystemExit) as stopped:
        dram.main([])
    assert stopped.value.code == 2 and "needs a CUDA device" in capsys.readouterr().err


@pytest.fixture
def as_if_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(report, "device_name", lambda device: "NVIDIA H200")


def test_dram_from_ncu_to_file(as_if_cuda, monkeypatch, tmp_path, capsys):
    """As on a GPU, but that ncu's answer and the times are planted."""
    both = {"placed": [{"name": "standard", "ms": 4.0}, {"name": "flashattn", "ms": 1.5}]}
    placed = dict.fromkeys(PASSES.values(), both)
    monkeypatch.setattr(dram, "measure", lambda *_, **__: placed)
    monkeypatch.setattr(dram.shutil, "which", lambda name: name)
    monkeypatch.setattr(dram.subprocess, "run", lambda command, **_: SimpleNamespace(stdout=NCU, stderr=""))
    path = tmp_path / "d.json"
    assert dram.main(["--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert [(row["provider"], row["direction"], row["ms"]) for row in found["rows"]] == [
        ("standard", "fwd", 4.0), ("standard", "bwd", 4.0), ("flashattn", "fwd", 1.5), ("flashattn", "bwd", 1.5)]  # fmt: skip
    assert all(row["read"] == 2_001_234_567 and row["written"] == 3_012_500 and row["predicted"]["no_l2"] > 0 for row in found["rows"])
    assert "flashattn: 4.0 GB and 3.00 ms, forward and backward" in capsys.readouterr().out
    monkeypatch.setattr(dram.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit) as stopped:
        dram.main([])
    assert stopped.value.code == 2 and "no ncu on the PATH" in capsys.readouterr().err


def test_the_papers_memory_from_options_to_file(as_if_cuda, monkeypatch, tmp_path, capsys):
    def measured(provider, workload, lengths, gate):
        assert (workload, lengths) == (memory.PAPER, memory.PAPER_LENGTHS)
        return [{"provider": provider.name, "seqlen": n, "extra_bytes": n, "peak_bytes": n * 2**20, "failure": None} for n in lengths]

    monkeypatch.setattr(memory, "measure", measured)
    path = tmp_path / "m.json"
    assert memory.main(["--paper", "--json", str(path), "--baseline", "standard"]) == 0
    found = json.loads(path.read_text())
    assert found["suite"] == "memory-paper" and found["workload"]["batch"] == 16 and len(found["rows"]) == 3 * 10
    assert "flash at 65536: published 13,376 MB (A100, Dao et al. 2022); measured MiB: flashattn 65,536, sdpa-flash 65,536" in (
        capsys.readouterr().out)  # fmt: skip


@pytest.mark.parametrize("tool", [dram, memory])
def test_an_unknown_provider_is_no_traceback(tool, as_if_cuda, monkeypatch, capsys):
    monkeypatch.setattr(dram.shutil, "which", lambda name: name)
    with pytest.raises(SystemExit) as stopped:
        tool.main(["--providers", "nobody"])
    assert stopped.value.code == 2 and "unknown provider nobody" in capsys.readouterr().err


# -------------------- another commit


def test_an_unknown_direction_is_not_compared(capsys):
    """Or it would be timed as a backward."""
    with pytest.raises(SystemExit) as stopped:
        compare.main(["HEAD", "--suite", "smoke", "--device", "cpu", "--directions", "up", "--rounds", "1", "--slice-ms", "0.1"])
    assert stopped.value.code == 2 and "unknown direction up" in capsys.readouterr().err


def test_ratios_are_taken_round_by_round():
    rounds = [{"here": 1.0, "old": 2.0}, {"here": 10.0, "old": 15.0}, {"here": 1.0, "old": 1.0}]
    assert compare.ratios(rounds, "here", "old") == {"ratio": 1.5, "ratio_min": 1.0, "ratio_max": 2.0}
    assert compare.difference([1.0, 2.0], [1.0, 1.0]) == 1.0 and compare.difference([], []) == 0


class FakeSide:
    """Answers as a worker does; notes its turns."""

    def __init__(self, name, ms, log, norms=(1.0, 2.0), failure=None):
        self.name, self.ms, self.log, self.norms, self.failure = name, ms, log, list(norms), failure

    def ask(self, do, count=None, **_):
        if self.failure:
            raise RuntimeError(f"{self.name}: {self.failure}")
        self.log.append((do, self.name, count))
        return {"norms": self.norms, "ms": self.ms}


def test_sides_take_turns():
    log = []
    row = compare.compare((FakeSide("here", 2.0, log), FakeSide("old", 3.0, log)), {}, "fwd", None, rounds=2, slice_ms=6.0)
    assert (row["failure"], row["ms"], row["ratio"]) == (None, {"here": 2.0, "old": 3.0}, 1.5)
    turns = [entry[1:] for entry in log if entry[0] == "turn"]
    assert turns == [("here", 3), ("old", 2), ("old", 2), ("here", 3)], "about as long each, and the order changes"


def test_different_results_and_failures_are_no_speed():
    log = []
    row = compare.compare((FakeSide("here", 1.0, log), FakeSide("old", 1.0, log, norms=(1.0, 2.1))), {}, "fwd", None, 1, 1.0)
    assert row["failure"] == "the results differ: norms by 4.8e-02"
    row = compare.compare((FakeSide("here", 1.0, log, (float("nan"),)), FakeSide("old", 1.0, log, (1.0,))), {}, "fwd", None, 1, 1.0)
    assert row["failure"] == "the results differ: norms by nan"
    row = compare.compare((FakeSide("here", 1.0, log), FakeSide("old", 1.0, log, failure="no such kernel")), {}, "fwd", None, 1, 1.0)
    assert row == {"failure": "old: no such kernel"}


@pytest.fixture
def repository(tmp_path):
    """A commit of a library whose attention is zero, to be compared with."""
    folder = tmp_path / "repository"
    package = folder / "src" / "flashattn"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("def attention(q, k, v, **_):\n    return 0 * q\n")
    for words in (["init", "-q"], ["add", "-A"], ["-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "first"]):
        subprocess.run(["git", *words], cwd=folder, check=True)
    return folder


def test_a_worker_runs_the_commit_it_was_given(repository, tmp_path):
    with pytest.raises(ValueError, match="REF='nosuch'"):
        compare.sources("nosuch", tmp_path, repository)
    side = compare.Side("old", compare.sources("HEAD", tmp_path / "old", repository), "cpu")
    task = asdict(WORKLOADS["smoke-d64-s128"])
    try:
        ready = side.ask(do="prepare", task=task, direction="fwd", impl=None)
        assert ready["norms"] == [0.0] and ready["ms"] > 0
        assert side.ask(do="turn", count=2)["ms"] > 0
        packed = asdict(WORKLOADS["smoke-packed-causal"])
        with pytest.raises(RuntimeError, match="old: AttributeError"):
            side.ask(do="prepare", task=packed, direction="fwd", impl=None)
    finally:
        side.close()
    assert side.process.returncode == 0


def test_a_worker_that_imports_something_else_is_found(tmp_path):
    package = tmp_path / "src" / "flashattn"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("__file__ = '/elsewhere/flashattn/__init__.py'\n")
    with pytest.raises(RuntimeError, match=r"old imported /elsewhere/flashattn/__init__\.py, which is not under"):
        compare.Side("old", tmp_path / "src", "cpu")


@pytest.mark.slow
def test_this_checkout_against_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "sources", lambda ref, into: shutil.copytree(compare.REPOSITORY / "src", into / "src"))
    path = tmp_path / "deep" / "c.json"
    options = ["--suite", "smoke", "--device", "cpu", "--impl", "eager", "--rounds", "1", "--slice-ms", "1", "--json", str(path)]
    assert compare.main(["HEAD", *options]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 8 and all(row["failure"] is None and row["ratio"] > 0 for row in rows)


# -------------------- pictures


def results(folder):
    rows = [
        {"workload": f"fa3-d{dim}-s{seqlen}", "direction": "fwd", "provider": name, "ms": 1.0, "tflops": tflops}
        for dim in (64, 128) for seqlen, base in ((512, 100.0), (1024, 200.0))
        for name, tflops in (("flashattn-a", base + dim), ("flashattn-b", base), ("sdpa", base / 2))
    ] + [{"workload": "packed-16k", "direction": "fwd", "provider": "flashattn-a", "ms": 1.0, "tflops": 1.0},
         {"workload": "fa3-d256-s512", "direction": "fwd", "provider": "sdpa", "ms": 1.0, "tflops": 1.0},
         {"workload": "fa3-d64-s512", "direction": "bwd", "provider": "sdpa", "ms": None, "tflops": None}]  # fmt: skip
    runs = [{"ceilings": {"peak": 7e14, "bandwidth": 4e12}}, {}]
    (folder / "h200-fa3.json").write_text(json.dumps({"gpu": "NVIDIA H200", "runs": runs, "rows": rows}))
    size = [{"provider": "flashattn", "seqlen": n, "peak_bytes": n * 1e6} for n in (128, 256)]
    size.append({"provider": "standard", "seqlen": 128, "peak_bytes": None})
    (folder / "h200-memory-paper.json").write_text(json.dumps({"gpu": "NVIDIA H200", "rows": size}))
    return rows


def test_pictures_show_what_was_measured(tmp_path, capsys):
    rows = results(tmp_path)
    assert plot.speeds(rows)[("D 64", "fwd")] == {
        "flashattn-a": {512: 164.0, 1024: 264.0}, "flashattn-b": {512: 100.0, 1024: 200.0}, "sdpa": {512: 50.0, 1024: 100.0},
    }  # fmt: skip
    assert len(plot.speeds(rows)) == 2, "one length is no line"
    assert [(point.label, point.flops) for point in plot.points(rows)] == [
        ("forward, D 64, S 1024", 264e12), ("forward, D 128, S 1024", 328e12)]  # fmt: skip
    assert plot.main(["--results", str(tmp_path), "--out", str(tmp_path / "out"), "--ending", "svg"]) == 0
    made = {path.name for path in (tmp_path / "out").iterdir()}
    assert made == {"h200-fa3-roofline.svg", "h200-fa3-d64-fwd.svg", "h200-fa3-d128-fwd.svg", "h200-memory-paper.svg"}
    assert "measured: 700 TFLOP/s, 4 TB/s" in (tmp_path / "out" / "h200-fa3-roofline.svg").read_text()
    with pytest.raises(SystemExit):
        plot.main(["--results", str(tmp_path), "--suite", "short"])
    assert "python -m benchmarks.run --suite short" in capsys.readouterr().err
