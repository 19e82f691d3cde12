"""The example that trains a GPT, and the comparison of two of its runs: one tiny configuration, a few seconds.

The surprising fact: with one seed every attention sees the same weights and the same batches, so their curves agree to rounding; a wrong
mask or a wrong gradient in one of them shows up here as another loss.
"""

import functools
import json
import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from benchmarks import train_gpt_compare

import gpt
import train_gpt

ATTENTIONS = ("flashattn", "sdpa", "eager")
TINY = "--preset small --layers 2 --width 32 --heads 2 --kv-heads 1 --hidden 48 --seq 48 --batch 4 --steps 40 --lr 5e-3 --log-every 5"
TINY = [*TINY.split(), "--val-batches", "2", "--sample", "8", "--device", "cpu"]
DEVICES = (pytest.param((), id="cpu"), pytest.param(("--device", "cuda"), id="cuda", marks=pytest.mark.gpu))


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tensors this small gain nothing from a second thread, and on a busy machine wait minutes for it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def as_a_user_runs_it(monkeypatch):
    """Without a GPU that is the eager fallback; other tests run the kernels in Triton's interpreter, which would take minutes here."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(directory, record) of a tiny training; each is run once."""

    @functools.cache
    def run(*options):
        out = tmp_path_factory.mktemp("run")
        return out, train_gpt.main([*TINY, "--out", str(out), *options])

    return run


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_learns_and_records(run, attention, device):
    out, record = run("--attention", attention, *device)
    assert record["loss"][0] == pytest.approx(math.log(256), rel=0.05)  # untrained: every byte is as likely
    assert record["final_loss"] < 0.75 * record["loss"][0]
    assert record["validation_loss"] < 0.75 * record["loss"][0]
    assert record["tokens_per_second"] > 0
    assert (record["mfu"] is None) == (record["peak_tflops"] is None)
    assert json.loads((out / "run.json").read_text()) == json.loads(json.dumps(record))
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert len((out / "sample.txt").read_bytes()) == 64 + 8


@pytest.mark.parametrize("attention", ("flashattn", "eager"))
def test_a_seed_is_the_same_run_whichever_attention(run, attention):
    (_, ours), (_, theirs) = (run("--attention", name) for name in (attention, "sdpa"))
    assert ours["loss"][0] == pytest.approx(theirs["loss"][0], rel=1e-6)
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    assert ours["data"] == theirs["data"]


def test_another_seed_is_another_run(run):
    assert run("--attention", "sdpa", "--seed", "1")[1]["loss"][0] != run("--attention", "sdpa")[1]["loss"][0]


def test_trains_on_a_file(run, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("It was a bright cold day in April.\n" * 200)
    _, record = run("--attention", "sdpa", "--data", str(text), "--mlp", "gelu", "--lr", "1e-2")
    assert record["data"]["description"].startswith("text.txt")
    letters = torch.bincount(torch.frombuffer(bytearray(text.read_bytes()), dtype=torch.uint8)) / len(text.read_bytes())
    assert record["validation_loss"] < torch.special.entr(letters).sum() / 2  # more was learnt than the frequencies of letters
    assert record["parameters"] == run("--attention", "sdpa")[1]["parameters"]  # GELU's hidden width is chosen so


def test_a_text_that_is_too_short_is_named(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("short")
    with pytest.raises(ValueError, match="the training text has 5 bytes; --seq 48 needs at least 50"):
        train_gpt.main([*TINY, "--attention", "sdpa", "--data", str(text), "--out", str(tmp_path)])


BAD_OPTIONS = ("--heads 3", "--kv-heads 0", "--heads 4 --kv-heads 3", "--steps 0", "--data nowhere", "--sdpa-backend math")


@pytest.mark.parametrize("options", BAD_OPTIONS)
def test_bad_options_are_refused(options, capsys):
    with pytest.raises(SystemExit):
        train_gpt.main([*TINY, *options.split()])
    assert options.split()[0] in capsys.readouterr().err


def test_a_diverging_run_stops(tmp_path):
    with pytest.raises(FloatingPointError, match="lower --lr"):
        train_gpt.main([*TINY, "--attention", "sdpa", "--lr", "inf", "--out", str(tmp_path)])


def test_without_matplotlib_only_the_plot_is_missing(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "rich", None)
    record = train_gpt.main([*TINY, "--attention", "sdpa", "--steps", "2", "--out", str(tmp_path)])
    assert "matplotlib is not installed" in capsys.readouterr().out
    assert not (tmp_path / "loss.png").exists()
    assert (tmp_path / "run.json").exists()
    assert record["tokens_per_second"] is None  # two steps are all warm-up


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_byte_changes_nothing_before_it(attention):
    cfg = train_gpt.arguments(TINY)
    model = gpt.GPT(cfg, gpt.make_attention(attention), torch.float32)
    tokens = torch.randint(256, (2, 48), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 30] ^= 1
    with torch.no_grad():
        same = (model(tokens) - model(changed)).abs().amax((0, 2)) < 1e-6
    assert same[:30].all()
    assert not same[30:].any()


def test_rope_keeps_only_the_distance():
    rope = gpt.rope_table(64, 16)
    q, k = torch.randn(2, 1, 1, 16, generator=torch.Generator().manual_seed(0)).expand(2, 64, 1, 16)
    q, k = gpt.rotate(q, rope)[:, 0], gpt.rotate(k, rope)[:, 0]
    scores = q @ k.T
    torch.testing.assert_close(scores[1:, 1:], scores[:-1, :-1], rtol=1e-4, atol=1e-4)
    assert (scores[0, 1:] - scores[0, 0]).abs().min() > 1e-3


def test_the_text_goes_on_beyond_the_context():
    model = gpt.GPT(train_gpt.arguments(TINY), gpt.sdpa_attention, torch.float32)
    text = gpt.generate(model, b"x" * 100, 5, seed=0)
    assert text[:100] == b"x" * 100
    assert len(text) == 105


def test_flops_of_a_token():
    cfg = train_gpt.arguments(["--preset", "124m"])
    with torch.device("meta"):
        parameters = sum(p.numel() for p in gpt.GPT(cfg, gpt.sdpa_attention, torch.bfloat16).parameters())
    assert round(parameters / 1e6) == 124
    found = train_gpt.train_flops_per_token(parameters, cfg.layers, cfg.width, cfg.seq, causal=True)
    assert found == 6 * parameters + 6 * 12 * 768 * 4096


def test_learning_rate_warms_up_and_falls():
    cfg = train_gpt.arguments([*TINY, "--steps", "100", "--lr", "1"])
    rates = [train_gpt.learning_rate(step, cfg) for step in range(100)]
    assert rates[0] == pytest.approx(1 / 33)
    assert rates.index(max(rates)) in (32, 33)
    assert max(rates) == 1
    assert 0 < rates[-1] < 0.001


def test_validation_windows_span_the_text():
    windows = train_gpt.Windows(bytes(range(100)), 9, "cpu", "any")
    inputs, targets = windows(windows.starts(4))
    assert inputs[:, 0].tolist() == [0, 30, 60, 90]
    assert torch.equal(targets, inputs + 1)
    assert windows.random_starts(1000, 8, 0).max() == 90  # the last byte is a target too


def test_comparison_of_runs_that_agree(run, tmp_path, capsys):
    a, b = (str(run("--attention", name)[0] / "run.json") for name in ("eager", "sdpa"))
    png = tmp_path / "both.png"
    assert train_gpt_compare.main([a, b, "--out", str(png)]) == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    output = capsys.readouterr().out
    assert "not the same run" not in output
    assert "within 0.50%" in output and "NOT" not in output


@pytest.mark.parametrize(("factor", "code"), ((1.004, 0), (1.006, 1), (0.994, 1), (math.nan, 1)))
def test_comparison_of_final_losses(run, tmp_path, factor, code):
    path, record = run("--attention", "sdpa")
    other = tmp_path / "run.json"
    other.write_text(json.dumps(record | {"loss": [loss * factor for loss in record["loss"]], "tokens_per_second": None}))
    assert train_gpt_compare.main([str(path / "run.json"), str(other), "--out", str(tmp_path / "both.png")]) == code


def test_comparison_names_what_else_differs(run, tmp_path, capsys):
    a, b = (str(run("--attention", "sdpa", *seed)[0] / "run.json") for seed in ((), ("--seed", "1")))
    train_gpt_compare.main([a, b, "--out", str(tmp_path / "both.png")])
    assert "not the same run: seed: 0 | 1" in capsys.readouterr().out
