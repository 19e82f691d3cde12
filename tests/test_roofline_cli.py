"""`python -m flashattn.roofline`: tables and JSON of the same numbers, one line and exit code 2 for what is wrong. The command `measure` is
tested in test_roofline_measure.py.

The surprising fact: every command but one is a pure function of its options, so the document that shows them can be checked by a test.
"""

import json
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

from flashattn.roofline import cli, report
from flashattn.roofline.workload import square

CPU = torch.device("cpu")
TINY = square("tiny", 1, 24, 2, 1, 16, True, "float32")
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")


def run(*arguments: str, code: int = 0) -> str:
    """What a command prints."""
    result = CliRunner().invoke(cli.cli, list(arguments))
    assert result.exit_code == code, result.output
    return result.stdout


def data(*arguments: str) -> dict:
    return json.loads(run(*arguments, "--json"))


# ------------------------------------------------------------------------------------------------------------------------ commands


def test_ops_prints_the_classic_table():
    text = run("ops", "--gpu", "H100")
    rows = {line.split("  ")[0].strip(): line.split()[-4:] for line in text.splitlines()}
    assert rows["matmul [16k, 8k] x [8k, 28k]"] == ["4587.5", "7782.2", "500.8", "compute"]
    assert rows["softmax [8k, 8k]"] == ["1.2", "0.3", "80.1", "memory"]
    assert "ridge 295" in text
    found = data("ops", "--gpu", "H100")
    assert found["ridge"] == pytest.approx(295.22, abs=0.01)
    first = found["operations"][0]
    assert (first["flops"], first["bytes"], first["binds"]) == (2 * 16384 * 8192 * 28672, 1677721600, "compute")


def test_gpus_prints_every_row_and_its_source():
    text, found = run("gpus"), data("gpus", "--dtype", "float8")
    assert len(data("gpus")["gpus"]) == 13 and "A100 80GB" in text and "data sheet" in text
    assert {gpu["name"] for gpu in found["gpus"]}.isdisjoint({"A100 40GB", "A100 80GB", "A100 80GB PCIe"}), "which have no fp8"


def test_model_prints_llama_and_the_crossing():
    found = data("model", "--gpu", "H100")
    assert found["compute_bound_from_tokens"] == 332
    assert found["smallest_batch_8192_28672"]["H100 SXM"] == 310
    assert [one["tokens"] for one in found["passes"]] == [1, 64, 4096]
    assert "compute from M = 332 on" in run("model", "--gpu", "H100")
    own = data("model", "--width", "8", "--heads", "2", "--layers", "3", "--vocab", "10", "--tokens", "2k", "--gpu", "H100")
    assert own["parameters"] == 3 * (4 * 64 + 2 * 8 * 32) + 80 and own["passes"][0]["tokens"] == 2048
    assert own["compute_bound_from_tokens"] is None, "products this small never are"


def test_mfu_of_llama3_405b():
    text = run("mfu", "--parameters", "405e9", "--gpus", "16000", "--at", "0.4", "--tokens", "15.6e12", "--gpu", "H100")
    line = next(line for line in text.splitlines() if line.strip().startswith("6 N")).split()
    assert line[-5:] == ["40.0%", "6.33e+18", "2,604,774", "3.79e+25", "69.3"]
    options = ["--parameters", "405e9", "--gpus", "16000", "--gpu", "H100", "--tokens-per-second", "2604774"]
    found = data("mfu", *options, "--layers", "126", "--width", "16384", "--seqlen", "8192", "--causal")
    assert found["6 N"]["mfu"] == pytest.approx(0.4, rel=1e-5)
    assert found["6 N + attention"]["flops_per_token"] == 6 * 405e9 + 6 * 126 * 16384 * 8192
    assert found["6 N + attention"]["mfu"] == pytest.approx(0.4 * (1 + 126 * 16384 * 8192 / 405e9), rel=1e-5)


def test_lab_prints_both_examples():
    long, short = data("lab", "--seqlen", "128000", "--heads", "128", "--gpu", "H100"), data("lab", "--gpu", "H100")
    assert (long["score_bytes"], long["working_set"], long["reduction"]) == (32_768_000_000, 131_072, 250_000)
    assert long["flops"]["forward"] == 4 * 128_000**2 * 128
    assert "4.19 TB" in run("lab", "--seqlen", "128000", "--heads", "128", "--gpu", "H100")
    assert short["traffic"]["S and P out and back"] == 4 * 2 * 4096**2
    assert short["seconds"]["S and P out and back"] == pytest.approx(40e-6, rel=0.01)
    order = [short["traffic"][name] for name in ("each tensor once, forward", "flash forward", "standard forward")]
    assert order == sorted(order)
    big, usual = (run("lab", "--block-q", rows, "--gpu", "H100") for rows in ("512", "128"))
    assert "doesn't fit" in big and "doesn't fit" not in usual
    tally = data("lab", "--tally")
    assert [state["seen"] for state in tally["states"]] == [2, 4, 6, 8] and tally["states"][-1]["out"] == pytest.approx(4.8046, abs=1e-4)


def test_peak_and_bandwidth_by_hand():
    assert data("ops", "--gpu", "no such GPU", "--peak", "100", "--bandwidth", "2")["ridge"] == 50
    assert data("ops", "--gpu", "H200", "--bandwidth", "1")["ridge"] == 989
    assert data("ops", "--gpu", "H200", "--peak", "480")["ridge"] == pytest.approx(100)


WRONG = [
    (["ops", "--gpu", "H20O"], "no GPU 'H20O' in the table; closest: H200"),
    (["ops", "--gpu", "H20O", "--peak", "1"], "no GPU 'H20O'"),
    (["ops", "--peak", "-1", "--bandwidth", "1"], "peak=-1000000000000.0: expected a positive number, in FLOP/s"),
    (["ops", "--bandwidth", "0"], "bandwidth=0.0: expected a positive number"),
    (["lab", "--seqlen", "0"], "seqlen=0: expected at least 1"),
    (["lab", "--head-dim", "x"], "'x' is not a valid integer"),
    (["lab", "--dtype", "int4"], "'int4' is not one of"),
    (["model", "--width", "8"], "a model needs --heads, --layers, --vocab too"),
    (["model", "--name", "llama3-8b", "--width", "8"], "expected a known model or its sizes"),
    (["model", "--tokens", "1,x"], "'1,x': expected whole numbers"),
    (["model", "--tokens", "0"], "tokens=0"),
    (["model", "--tokens", ","], "',': expected whole numbers"),
    (["model", "--name", "llama3-8b", "--gates", "1"], "expected a known model or its sizes"),
    (["model", "--width", "8", "--heads", "2", "--layers", "1", "--vocab", "1", "--heads-kv", "0"], "heads_kv=0"),
    (["mfu", "--parameters", "1e9"], "expected one of them, a speed or a utilisation"),
    (["mfu", "--parameters", "1e9", "--at", "40"], "utilisation=40.0"),
    (["mfu", "--parameters", "1e9", "--at", "0.4", "--gpus", "0"], "gpus=0"),
    (["mfu", "--parameters", "inf", "--at", "0.4"], "parameters=inf: expected a positive number"),
    (["mfu", "--parameters", "nan", "--at", "0.4"], "parameters=nan: expected a positive number"),
    (["mfu", "--parameters", "1e9", "--at", "0.4", "--tokens", "-5"], "tokens=-5.0: expected a positive number"),
    (["mfu", "--parameters", "1e9", "--tokens-per-second", "inf"], "tokens_per_second=inf: expected a positive number"),
    (["lab", "--seqlen", "9" * 200], "too large"),
    (["mfu", "--parameters", "1e9", "--at", "0.4", "--layers", "3"], "width=0"),
    (["plot", "--out", "x.gif"], "expected a name that ends in .png or .svg"),
    (["plot", "--out", "/dev/null/x.png", "--gpu", "H100"], "/dev/null"),
    (["plot", "--measured", __file__], "expected a file of `measure --out`"),
    (["plot", "--measured", "/"], "is a directory"),
    (["nonsense"], "No such command 'nonsense'"),
    pytest.param(["measure"], "measure needs a GPU: torch finds no CUDA device here", marks=NO_GPU),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_what_is_wrong_is_one_line_and_exit_code_2(arguments, message, capsys):
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.out == "" and printed.err.count("\n") == 1


def test_without_arguments_it_helps(capsys):
    assert cli.main([]) == 0
    assert capsys.readouterr().out.startswith("Usage: python -m flashattn.roofline")


@pytest.mark.parametrize("columns", ["20", "80"])
def test_a_narrow_terminal_loses_no_digit(columns, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", columns)
    assert cli.main(["ops", "--gpu", "H100"]) == 0
    printed = capsys.readouterr().out
    assert all(number in printed for number in ("4587.5", "7782.2", "500.8", "compute")) and "\u2026" not in printed


@NO_GPU
def test_the_module_runs_and_gives_its_exit_code():
    done = subprocess.run([sys.executable, "-m", "flashattn.roofline", "measure"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("flashattn.roofline: measure needs a GPU") and done.stderr.count("\n") == 1


def test_without_click_it_says_what_to_install(monkeypatch, capsys):
    from flashattn.roofline import __main__ as module

    monkeypatch.setitem(sys.modules, "click", None)
    monkeypatch.delitem(sys.modules, "flashattn.roofline.cli")
    assert module.main() == 2
    assert "pip install 'flashattn[roofline]'" in capsys.readouterr().err


def test_units_round_up_to_the_next_prefix():
    values = (0, 999, 999.6, 33.554e6, 4.19e12, 1e18)
    assert [report.units(value) for value in values] == ["0 B", "999 B", "1 kB", "33.6 MB", "4.19 TB", "1 EB"]
