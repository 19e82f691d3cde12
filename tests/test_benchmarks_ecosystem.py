"""The benchmarks of what surrounds the kernels, run whole and small: training steps of a Llama and of the example's GPT, first calls."""

import json

import pytest
from benchmarks import first_call, gpt_step, llama_step


def test_a_small_llama_takes_the_same_steps(tmp_path, capsys, monkeypatch):
    pytest.importorskip("transformers", minversion="5")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    path = tmp_path / "steps.json"
    argv = ["--size", "small", "--rows", "16", "--steps", "3", "--device", "cpu", "--implementations", "flashattn,eager"]
    assert llama_step.main([*argv, "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    ours, eager = document["rows"]
    assert [row["implementation"] for row in (ours, eager)] == ["flashattn", "eager"] and ours["ms"] > 0
    assert len(ours["losses"]) == 4 and ours["losses"] == pytest.approx(eager["losses"], abs=1e-4)
    assert ours["losses"][-1] < ours["losses"][0] and "ms per step" in capsys.readouterr().out
    assert document["command"].startswith("python -m benchmarks.llama_step --size small")


def test_the_gpt_of_the_example_takes_the_same_steps(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    path = tmp_path / "steps.json"
    argv = ["--preset", "small", "--steps", "2", "--device", "cpu", "--attentions", "flashattn,sdpa-flash"]
    assert gpt_step.main([*argv, "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    ours, sdpa = document["rows"]
    assert [row["attention"] for row in (ours, sdpa)] == ["flashattn", "sdpa-flash"] and ours["ms"] > 0 and ours["mfu"] is None
    assert len(ours["losses"]) == 4 and ours["losses"] == pytest.approx(sdpa["losses"], abs=1e-3)
    assert ours["losses"][-1] < ours["losses"][0] and "tokens/s" in capsys.readouterr().out


def test_an_attention_that_cannot_run_is_named(tmp_path):
    path = tmp_path / "steps.json"
    argv = ["--preset", "small", "--steps", "1", "--device", "cpu", "--attentions", "sdpa-cudnn"]  # which no CPU has
    assert gpt_step.main([*argv, "--json", str(path)]) == 1
    (row,) = json.loads(path.read_text())["rows"]
    assert "RuntimeError" in row["failure"]
    with pytest.raises(SystemExit):
        gpt_step.main(["--attentions", "fastest"])


def test_about_a_billion_parameters():
    sizes = llama_step.SIZES["1b"]
    width, hidden = sizes["hidden_size"], sizes["intermediate_size"]
    heads_kv = width * sizes["num_key_value_heads"] // sizes["num_attention_heads"]
    layer = 2 * width * width + 2 * width * heads_kv + 3 * width * hidden
    assert 1.0e9 < sizes["num_hidden_layers"] * layer + 2 * sizes["vocab_size"] * width < 1.2e9


def test_first_calls_of_processes_that_share_a_cache(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    path = tmp_path / "first.json"
    assert first_call.main(["--impls", "any", "--together", "2", "--device", "cpu", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(row["state"], row["processes"], row["failed"]) for row in rows] == [("cold", 1, 0), ("warm", 1, 0), ("2 together", 2, 0)]
    assert all(row["forward"] > 0 and row["backward"] > 0 for row in rows) and "forward s" in capsys.readouterr().out


def test_a_process_that_fails_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(first_call, "FIRST_CALL", "raise SystemExit(3)")
    assert first_call.main(["--impls", "any", "--together", "2", "--device", "cpu", "--json", str(tmp_path / "x.json")]) == 1
    assert [row["failed"] for row in json.loads((tmp_path / "x.json").read_text())["rows"]] == [1, 1, 2]
