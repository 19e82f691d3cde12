"""Suites, what a row says beside milliseconds, and the textbook among the peers. No GPU is needed.

The surprising fact: the textbook's attention passes the gate easily; rounding the scores costs it little, moving them costs it everything.
"""

from dataclasses import replace

import pytest
import torch
from benchmarks import plot, report, run
from benchmarks.workloads import SUITES, WORKLOADS, square

from flashattn.reference import keep_mask
from flashattn.roofline import find
from flashattn.roofline.gate import Gate
from flashattn.roofline.measure import Ceilings
from flashattn.roofline.peers import PROVIDERS
from flashattn.roofline.timing import Sample

CPU = torch.device("cpu")
TINY = square("tiny", 1, 24, 2, 2, 16, True, "float32")


# -------------------- suites


def test_suites_of_models_and_papers():
    models = {w.name: w for w in SUITES["models"]}
    assert all(w.batch * w.seqlen_q == 16384 and w.causal is True for w in models.values())
    heads = {name.rpartition("-s")[0]: (w.heads_q, w.heads_kv, w.head_dim, w.head_dim_v) for name, w in models.items()}
    assert heads == {
        "llama3-8b": (32, 8, 128, 128), "llama3-70b": (64, 8, 128, 128), "qwen3-32b-64-8": (64, 8, 128, 128),
        "qwen3-235b-64-4": (64, 4, 128, 128), "gpt-oss-full": (64, 8, 64, 64), "gpt-oss-window-128": (64, 8, 64, 64),
        "deepseek-v3": (128, 128, 192, 128),
    }  # fmt: skip
    window = models["gpt-oss-window-128-s2048"]
    assert int(keep_mask(2048, 2048, causal=window.causal, window=window.window)[-1].sum()) == 128
    gpt2 = WORKLOADS["gpt2-medium-s1024"]
    assert (gpt2.batch, gpt2.seqlen_q, gpt2.heads_q, gpt2.head_dim, gpt2.dtype) == (64, 1024, 16, 64, "float16")
    assert {w.seqlen_q for w in SUITES["short"]} == {64, 128, 197, 256}


def test_lengths_of_documents_are_what_they_are_said_to_be():
    for workload in SUITES["varlen"]:
        lengths = sorted(workload.lengths)
        assert sum(lengths) == 32768 and min(lengths) >= 1 and max(lengths) <= 8192
    documents = sorted(WORKLOADS["varlen-documents-d128"].lengths)
    longest = documents[-len(documents) // 5 :]
    assert 300 < documents[len(documents) // 2] < 800 and sum(longest) > 32768 / 2, "a fifth of the documents hold most of the tokens"
    assert WORKLOADS["varlen-documents-d128"].lengths == WORKLOADS["varlen-documents-gqa-32-8"].lengths


# -------------------- the roofline in a row


def test_a_row_has_its_place_on_the_roofline():
    workload, sample = WORKLOADS["fa3-d128-s16384"], Sample((2.0, 1.0, 4.0))
    found = report.measured_row(workload, "fwd", "ours", sample, {"ours": sample}, find("H200"), Ceilings(4e12, 700e12))
    seconds = workload.flops("fwd") / 989e12
    assert (found["binds"], found["bound_us"]) == ("compute", pytest.approx(seconds * 1e6))
    assert found["bound_share"] == pytest.approx(seconds / 2e-3) and found["matmul_share"] == pytest.approx(found["tflops"] / 700)
    assert found["copy_share"] == pytest.approx(found["gbps"] / 4000)
    bare = report.measured_row(workload, "fwd", "ours", sample, {"ours": sample})
    assert bare.keys() == found.keys() == (report.empty_row() | {"speedup": {}}).keys()
    assert (bare["tflops"], bare["bound_share"]) == (found["tflops"], None)


def row(provider: str, share: float | None, workload="w") -> dict:
    return {"workload": workload, "direction": "fwd", "provider": provider, "ms": 1.0, "tflops": 1.0, "spread": 0, "error": 0,
            "failure": None, "bound_share": share}  # fmt: skip


def test_the_table_has_how_near_the_fastest_of_ours_is():
    rows = [row("flashattn-a", 0.5), row("flashattn-b", 0.61), row("sdpa", 0.9), row("sdpa", 0.9, "v")]
    header, lines = report.pivot(rows)
    assert header.index("of bound") == header.index("spread") - 1
    assert [line[header.index("of bound")] for line in lines] == ["61%", "-"]
    assert "of bound" not in report.pivot([row("flashattn-a", None)])[0]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_long_run_has_a_bar_where_somebody_looks(terminal, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR" if terminal else "NO_COLOR", "1")
    with report.progress(4) as say:
        say("first [1/4]")
        say("second", 3)
    printed = capsys.readouterr().out
    assert "first [1/4]\n" in printed and "second\n" in printed
    assert ("75%" in printed) == terminal


def test_kinds_of_workloads_are_not_mixed():
    """A window, grouped heads: they have a point and a line of their own, though head dim and length are the same."""
    names = ("causal-d64-s16384", "window-1024-d64-s16384", "llama3-8b-s2048", "llama3-8b-s8192", "llama3-70b-s2048", "llama3-70b-s8192")
    rows = [{"workload": name, "direction": "fwd", "provider": "flashattn", "ms": 1.0, "tflops": 1.0 + i} for i, name in enumerate(names)]
    assert {point.label for point in plot.points(rows)} == {
        "forward, D 64, causal, S 16384", "forward, D 64, causal, window 1024, S 16384",
        "forward, D 128, heads 32/8, causal, S 8192", "forward, D 128, heads 64/8, causal, S 8192",
    }  # fmt: skip
    assert plot.speeds(rows) == {
        ("D 128, heads 32/8, causal", "fwd"): {"flashattn": {2048: 3.0, 8192: 4.0}},
        ("D 128, heads 64/8, causal", "fwd"): {"flashattn": {2048: 5.0, 8192: 6.0}},
    }


# -------------------- the textbook


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("causal", [False, True, "top-left"])
def test_standard_attention_passes_the_gate(direction, causal):
    assert Gate(CPU).judge(PROVIDERS["standard"], replace(TINY, causal=causal), direction).failure is None


def test_standard_attention_says_what_it_has_not():
    for workload in (replace(TINY, heads_q=4), replace(TINY, window=(3, 0)), WORKLOADS["packed-16k"]):
        assert Gate(CPU).judge(PROVIDERS["standard"], workload, "fwd").failure.startswith("has neither packed")
    assert "top left" in Gate(CPU).judge(PROVIDERS["standard"], replace(TINY, seqlen_q=8), "fwd").failure


# -------------------- suites of their own


@pytest.mark.parametrize("suite", run.ELSEWHERE)
def test_other_suites_are_run_by_their_modules(suite, monkeypatch):
    monkeypatch.setitem(run.ELSEWHERE, suite, lambda argv: argv)
    assert run.main(["--suite", suite, "--json", "x"]) == ["--json", "x"] == run.main(["--json", "x", f"--suite={suite}"])
