"""Compiling ahead and `python -m flashattn`: the workers on a CPU, where they compile nothing, and on a GPU for good."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import flashattn
from flashattn import ahead, eager
from flashattn.ahead import Call, Warmed, calls_of, run

SOURCE = Path(__file__).parent.parent / "src"
SIZES = {"head_dim": 8, "seqlen": 5, "heads": 2, "heads_kv": None, "batch": 1, "dtype": "float32", "causal": True, "window": None,
         "varlen": False, "backward": True, "deterministic": False}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_interpreter(monkeypatch):
    """Workers on a CPU are to be quick."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def calls(**changes):
    return calls_of(**SIZES | {"device": "cpu"} | changes)


def test_every_combination_is_one_call():
    kinds = {"dtype": ["float16", torch.float32], "causal": [False, "top-left"], "varlen": (True, False)}
    found = calls(head_dim=[8, (12, 8)], seqlen=[5, (1, 5)], **kinds)
    assert len(found) == len(set(found)) == 2**5
    assert {(call.head_dim, call.head_dim_v) for call in found} == {(8, 8), (12, 8)}
    assert {(call.seqlen_q, call.seqlen_k) for call in found} == {(5, 5), (1, 5)}
    assert {call.dtype for call in found} == {"float16", "float32"} and {call.causal for call in found} == {False, "top-left"}
    assert {call.heads_kv for call in found} == {2} and len(calls(dtype=["float32", torch.float32])) == 1


def test_a_call_says_what_it_is():
    call = Call(2, 1, 5, 8, 2, 12, 8, "float16", True, (3, None), True, False, True)
    assert str(call) == "float16 D 12/8 H 8/2 B 2 S 1x5, causal, window 3,None, packed, forward only, deterministic"
    assert str(calls()[0]) == "float32 D 8 H 2 B 1 S 5, causal"


@pytest.mark.parametrize("message, change", [
    ("dtype='int8': expected some of bfloat16", {"dtype": "int8"}), ("head_dim=0: expected a whole number", {"head_dim": 0}),
    ("seqlen_k=2.5: expected", {"seqlen": [(4, 2.5)]}), ("batch=True: expected", {"batch": True}),
])  # fmt: skip
def test_sizes_that_cannot_be_are_named(message, change):
    with pytest.raises(ValueError, match=message):
        calls(**change)


def test_workers_make_the_calls_and_tell_what_went_wrong():
    wanted = [*calls(varlen=(False, True), seqlen=[5, (3, 7)], window=(2, 0)), *calls(head_dim=300), *calls(backward=False)]
    seen = []
    found = run(wanted, processes=2, progress=seen.append)
    assert [one.call for one in found] == wanted and sorted(map(str, seen)) == sorted(map(str, found))
    errors = [one.error for one in found]
    assert errors[:4] == [None] * 4 and errors[5] is None and all(one.seconds > 0 for one in found)
    assert errors[4].startswith("NotImplementedError: q has head_dim 300")


@pytest.mark.parametrize("varlen", [False, True])
def test_a_call_has_its_backward_compiled_too_if_it_has_one(monkeypatch, varlen):
    ran = []
    for name in ("forward", "backward"):
        function = getattr(eager, name)
        monkeypatch.setattr(eager, name, lambda *args, name=name, function=function: ran.append(name) or function(*args))
    ahead.make(*calls(varlen=varlen))
    ahead.make(*calls(varlen=varlen, backward=False))
    assert ran == ["forward", "backward", "forward"]


def test_a_worker_that_dies_takes_one_call_with_it(monkeypatch):
    start, dying = ahead._worker, [True]

    def worker():
        if dying and dying.pop():
            command = [sys.executable, "-c", "import os; os._exit(7)"]
            return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return start()

    monkeypatch.setattr(ahead, "_worker", worker)
    found = run(calls(seqlen=[3, 4]), processes=1)
    assert [one.error for one in found] == ["the worker ended with exit code 7", None]


def test_what_a_compiler_prints_is_no_answer(monkeypatch, capsys):
    monkeypatch.setattr(ahead, "make", lambda call: print("noise"))
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    ahead.work([json.dumps(ahead.asdict(calls()[0]))], out := open(os.devnull, "w"))  # noqa: SIM115
    out.close()
    assert capsys.readouterr().out == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_nothing_to_compile_for():
    with pytest.raises(RuntimeError, match="warmup needs a GPU: torch finds no CUDA device here"):
        flashattn.warmup(head_dim=64)
    with pytest.raises(ValueError, match="dtype='int8'"):
        flashattn.warmup(dtype="int8")


# ------------------------------------------------------------------------------------------------------------------------ commands


@pytest.fixture
def command(capsys):
    commands = pytest.importorskip("flashattn.commands")

    def call(*argv):
        code = commands.main(list(argv))
        return code, capsys.readouterr()

    return call


def test_info_tells_versions_and_why_not(command):
    code, (out, _) = command("info")
    assert code == 0 and torch.__version__ in out and "hopper" in out and "both passes" in out
    if not torch.cuda.is_available():
        assert "none that torch finds" in out
        assert "Not portable (float16, bfloat16, float32): CPU tensors run in Triton's interpreter only" in out
        assert "Not hopper (float32): dtype float32: multiplies float16 and bfloat16." in out


def test_info_as_json_is_what_the_dispatcher_says(command, monkeypatch):
    monkeypatch.setenv("FLASHATTN_CHECK", "1")
    code, (out, _) = command("info", "--json")
    found = json.loads(out)
    x = torch.zeros(1, 128, 1, 128, device=found["device"])
    chosen = flashattn.explain(x, x, x)
    for name, reasons in chosen.passed_over["forward"].items():
        assert found["kernels"][name]["float32"]["forward"] == reasons
    assert found["kernels"][chosen.kernels["forward"]]["float32"]["forward"] == []
    assert code == 0 and found["settings"]["FLASHATTN_CHECK"] == "1" and found["versions"]["python"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_warmup_says_that_there_is_no_gpu(command):
    code, (out, err) = command("warmup")
    assert code == 2 and out == "" and err == (
        "flashattn: warmup needs a GPU: torch finds no CUDA device here, and kernels are compiled for the one that is there\n"
    )


@pytest.mark.parametrize("message, argv", [
    ("no such option", ["warmup", "--colour"]), ("expected whole numbers", ["warmup", "--head-dim", "a"]),
    ("expected a number, or two as 192x128", ["warmup", "--head-dim", "1x2x3"]), ("not maybe", ["warmup", "--causal", "maybe,no"]),
    ("dtype='int8'", ["warmup", "--dtype", "int8"]),
])  # fmt: skip
def test_wrong_options_end_in_one_line(command, message, argv):
    code, (_, err) = command(*argv)
    assert code == 2 and err.count("\n") == 1 and message in err.lower()


def test_warmup_hands_on_its_options_and_tells_failures(command, monkeypatch):
    asked = {}

    def warmup(*, processes, progress, **options):
        asked.update(options, processes=processes)
        found = [Warmed(call, 1.25, "it broke" if call.causal else None) for call in calls_of(**options)]
        for one in found:
            progress(one)
        return found

    monkeypatch.setattr(ahead, "check_gpu", lambda: None)
    monkeypatch.setattr(ahead, "warmup", warmup)
    argv = ["warmup", "--head-dim", "64,192x128", "--seqlen", "4k,1x1000", "--dtype", "float16", "--causal", "no,yes", "--window", "128,-",
            "--varlen", "both", "--forward-only", "--processes", "3", "--heads", "4", "--heads-kv", "2"]  # fmt: skip
    code, (out, _) = command(*argv)
    assert asked == {"head_dim": [64, (192, 128)], "seqlen": [4096, (1, 1000)], "dtype": ["float16"], "causal": [False, True],
                     "window": (128, None), "varlen": (False, True), "backward": False, "deterministic": False, "processes": 3, "heads": 4,
                     "heads_kv": 2, "batch": 1}  # fmt: skip
    assert code == 1 and out.count("it broke") == out.count("ready") == 8
    code, (out, _) = command("warmup", "--causal", "no", "--json")
    assert code == 0 and json.loads(out)["calls"] == [{"call": "bfloat16 D 128 H 16 B 1 S 4096", "seconds": 1.25, "error": None}]


def test_the_module_runs_and_says_what_it_needs(tmp_path):
    (tmp_path / "click.py").write_text("raise ModuleNotFoundError('no click', name='click')\n")
    command = [sys.executable, "-m", "flashattn", "info"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{SOURCE}"})
    assert done.returncode == 2 and done.stderr == "flashattn: needs click: pip install 'flashattn[roofline]'\n"


# ----------------------------------------------------------------------------------------------------------------------- on a GPU

FIRST_CALL = """
import json, sys, time, torch
from flashattn import attention
q = torch.randn(1, 512, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
(q @ q.mT).sum().backward()
torch.cuda.synchronize()
start = time.monotonic()
attention(q, q, q, causal=True, impl=sys.argv[1] if len(sys.argv) > 1 else None).sum().backward()
torch.cuda.synchronize()
print(time.monotonic() - start)
"""


def first_call(cache, *argv) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "TRITON_CACHE_DIR": str(cache)}
    return subprocess.Popen([sys.executable, "-c", FIRST_CALL, *argv], stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.gpu
@pytest.mark.big(2)  # alone: it is timed
def test_after_a_warmup_a_new_process_compiles_nothing(tmp_path, monkeypatch):
    cold = float(first_call(tmp_path / "empty").communicate()[0])
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "warm"))
    (warmed,) = flashattn.warmup(head_dim=64, seqlen=512, heads=4)
    assert warmed.error is None
    made = sorted(path.name for path in (tmp_path / "warm").iterdir())
    warm = float(first_call(tmp_path / "warm").communicate()[0])
    assert made == sorted(path.name for path in (tmp_path / "warm").iterdir()), "something was compiled after all"
    print(f"first call: cold {cold:.2f} s, after a warmup {warm:.2f} s")
    assert warm < cold / 3 and warm < 1.5


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.big(20)
def test_sixteen_processes_share_an_empty_cache(tmp_path):
    start = time.monotonic()
    workers = [first_call(tmp_path) for _ in range(16)]
    times = [float(worker.communicate()[0]) for worker in workers]
    assert all(worker.returncode == 0 for worker in workers) and len(times) == 16
    print(f"16 processes: first calls {min(times):.2f} to {max(times):.2f} s, all of it {time.monotonic() - start:.1f} s")
