"""The record of the GPU tests: its digest, its check, and its runner, tried on planted sources and planted tests.

Over 300 lines, since a third of them are sources and tests that are planted.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

import gpu_record
from gpu_record import TESTS, check, digest, rotated, run_tier, write

SOURCE = '''
"""What the module is for."""
import math  # for pi

class A(B, metaclass=C):
    """A class."""
    x: int = 1

    @property
    def y(self, /, a, *args, b=None, **kwargs):
        """A method."""
        return f"{self.x!r:>{a}} {b}" f" and {a + 1:,}" "é\\x00" + u"u"

async def f(*, a, b=2):
    async with a as b, c:
        d = [*a, -1, 1e100, 1j, ..., b"b", not a, {**a, "k": b}, {a}, a[1:2, ::3]]
        lambda q, *w: (yield)
    match a:
        case {"k": [1, *rest], **others} | Point(x=0) | None:
            pass
        case _ if (n := len(a)) > 10:
            return await n
    try:
        del a
    except (E, F) as e:
        raise e from None
    else:
        global g
    finally:
        while True: break
'''
SAME = {
    "comment": ("import math  # for pi", "import math"),
    "docstring of the module": ('"""What the module is for."""', ""),
    "docstring of a class": ('    """A class."""', ""),
    "docstring of a method": ("A method.", "Some method."),
    "layout": ("def y(self, /, a, *args,", "def y(self, /,\n          a, *args,"),
}
OTHER = {
    "number": ("b=2", "b=3"),
    "name": ("del a", "del b"),
    "string": ('{"k": [1', '{"l": [1'),
    "literal of an f-string": (" and ", " or "),
    "operator": ("> 10", ">= 10"),
    "default": ("b=None", "b=0"),
    "statement": ("        del a", "        del a\n        pass"),
}


def planted(folder: Path, text: str = SOURCE, name: str = "room/module.py") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return folder


# ------------------------------------------------------------------------------------------------------------------------ digest


@pytest.mark.parametrize("name", [*SAME, *OTHER])
def test_the_digest_changes_with_the_code_and_with_nothing_else(tmp_path, name):
    old, new = (SAME | OTHER)[name]
    assert SOURCE.count(old) == 1
    same = digest(planted(tmp_path / "a")) == digest(planted(tmp_path / "b", SOURCE.replace(old, new)))
    assert same == (name in SAME)


def test_the_digest_knows_where_code_is(tmp_path):
    first = digest(planted(tmp_path / "a"))
    assert digest(planted(tmp_path / "b", name="room/other.py")) != first
    assert digest(planted(tmp_path / "a", "", name="empty.py")) != first


def interpreters() -> dict[str, str]:
    """Version -> another Python that this machine has and that we support."""
    names = [f"python3.{minor}" for minor in range(10, 16)]
    candidates = [*filter(None, map(shutil.which, names)), *map(str, Path.home().glob(".pyenv/versions/3.1?.*/bin/python"))]
    found = {}
    for candidate in candidates:
        asked = subprocess.run([candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True, text=True)
        if asked.returncode == 0 and sys.version_info[:2] != tuple(map(int, asked.stdout.split("."))):
            found.setdefault(asked.stdout.strip(), candidate)
    return found


def test_the_digest_is_the_same_in_every_python(tmp_path):
    others = interpreters()
    if not others:
        pytest.skip("no other Python here")
    planted(tmp_path)
    code = "import pathlib, sys, gpu_record; print(*(gpu_record.digest(pathlib.Path(p)) for p in sys.argv[1:]))"
    folders = [tmp_path, gpu_record.SOURCE, TESTS]
    for version, python in others.items():
        command = [python, "-c", code, *map(str, folders)]
        done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"})
        assert done.stdout.split() == [digest(folder) for folder in folders], f"Python {version}: {done.stderr}"


# ------------------------------------------------------------------------------------------------------------------------- check

MACHINE = {"device": "A GPU", "gpus": 2, "driver": "1.2", "versions": {"torch": "2"}}


def test_check(tmp_path):
    source, record = planted(tmp_path / "source"), tmp_path / "record.json"
    assert check(record, source) == (False, "gpu record: missing; run python tests/gpu_record.py on a machine with a GPU")
    record.write_text("{")
    assert check(record, source)[1].startswith("gpu record: unreadable")
    write(record, Counter(passed=7, skipped=1), 12.3, MACHINE, digest(source))
    content = json.loads(record.read_text())
    assert [content[key] for key in ("passed", "failed", "skipped", "xfailed", "seconds", "device")] == [7, 0, 1, 0, 12, "A GPU"]
    good, line = check(record, source)
    assert good and line.startswith("gpu record: up to date (7 passed, 0 failed, 1 skipped, 0 xfailed, 0 unfinished on A GPU, 20")
    planted(tmp_path / "source", SOURCE.replace("b=2", "b=3"))
    good, line = check(record, source)
    assert not good and line.startswith("gpu record: stale, src/flashattn has changed since (7 passed")


@pytest.mark.parametrize("counts", [Counter(passed=7, failed=1), Counter(skipped=7), Counter()])
def test_a_run_that_failed_or_ran_nothing_is_not_green(tmp_path, counts):
    source, record = planted(tmp_path / "source"), tmp_path / "record.json"
    write(record, counts, 1, MACHINE, digest(source))
    good, line = check(record, source)
    assert not good and line.startswith("gpu record: not green (")


def test_check_is_one_line_and_an_exit_code_and_needs_only_the_standard_library(tmp_path):
    command = [sys.executable, "-S", TESTS / "gpu_record.py", "--check", "--record", tmp_path / "none"]  # -S: without site-packages
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "gpu record: missing; run python tests/gpu_record.py on a machine with a GPU\n"
    assert done.returncode == 1 and not done.stderr


# --------------------------------------------------------------------------------------------------------------------------- run

PLANTED_TESTS = """
import os, time, pytest

@pytest.mark.slow
@pytest.mark.parametrize("i", range(5))
def test_ran(i):
    with open("{done}", "a") as file:
        print(os.getpid(), i, os.environ.get("TRITON_INTERPRET"), file=file)

@pytest.mark.slow
def test_skipped(): pytest.skip("not today")

@pytest.mark.slow
@pytest.mark.xfail
def test_xfailed(): raise ValueError

def test_not_selected(): raise ValueError
"""


def run_planted(tmp_path, more="", shards=2, seconds=120.0):
    """The runner on planted tests; `slow` stands for `gpu`, which would be skipped here, and a bare conftest for ours."""
    tests = planted(tmp_path / "tests", PLANTED_TESTS.format(done=tmp_path / "done") + more, name="test_planted.py")
    (tests / "conftest.py").write_text("from shards import pytest_addoption, pytest_collection_modifyitems, pytest_runtest_setup\n")
    extra = ["-c", str(TESTS.parent / "pyproject.toml")]
    return run_tier(tests, tmp_path / "logs", shards, seconds, "slow", extra)


def test_shards_together_run_each_test_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert run_planted(tmp_path) == Counter(passed=5, skipped=1, xfailed=1)
    ran = [line.split() for line in (tmp_path / "done").read_text().splitlines()]
    assert sorted(i for _, i, _ in ran) == list("01234")
    assert len({process for process, _, _ in ran}) == 2
    assert {interpreter for _, _, interpreter in ran} == {"None"}
    printed = capsys.readouterr().out
    assert "shard-1-of-2: " in printed and "big: no tests" in printed
    assert {path.name for path in (tmp_path / "logs").glob("*.log")} == {"shard-1-of-2.log", "shard-2-of-2.log", "big.log"}


def test_failures_errors_and_crashes_are_counted_and_named(tmp_path, capsys):
    more = """
@pytest.mark.slow
def test_wrong(): assert 1 + 1 == 3

@pytest.fixture
def broken(): raise LookupError("no fixture")

@pytest.mark.slow
def test_error(broken): pass

@pytest.mark.slow
@pytest.mark.big
def test_that_kills_the_process(): os._exit(3)
"""
    counts = run_planted(tmp_path, more, shards=1)
    assert counts == Counter(passed=5, failed=3, skipped=1, xfailed=1)
    printed = capsys.readouterr().out
    assert "test_wrong: assert (1 + 1) == 3" in printed and "test_error: " in printed
    assert "big ended with code 3 and no report; see" in printed


def test_what_hangs_is_ended_after_the_limit_and_has_failed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu_record, "GRACE", 0)
    more = "\n@pytest.mark.slow\ndef test_that_hangs(): time.sleep(600)\n"
    started = time.monotonic()
    assert run_planted(tmp_path, more, shards=1, seconds=12.0)["failed"] >= 1
    assert time.monotonic() - started < 60
    assert "still running at the time limit" in capsys.readouterr().out
    assert (tmp_path / "logs" / "shard-1-of-1.log").read_text().rstrip().endswith("test_that_hangs")


def test_tests_that_the_limit_leaves_out_are_counted(tmp_path):
    more = "\n@pytest.mark.slow\ndef test_that_takes_until_then(): time.sleep(14)\n"
    more += "".join(f"\n@pytest.mark.slow\ndef test_after_it_{i}(): pass\n" for i in range(3))
    counts = run_planted(tmp_path, more, shards=1, seconds=12.0)
    assert counts == Counter(passed=6, skipped=1, xfailed=1, unfinished=3)
    record = tmp_path / "record.json"
    write(record, counts, 12.0, MACHINE, digest(gpu_record.SOURCE))
    assert not check(record)[0] and "3 unfinished" in check(record)[1]


def test_a_test_file_that_does_not_load_fails_the_run(tmp_path):
    planted(tmp_path / "tests", "import no_such_module", name="test_broken.py")
    assert run_planted(tmp_path, shards=1)["failed"] >= 1


def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_record, "machine", lambda: {"device": None})
    assert gpu_record.main(["--record", str(tmp_path / "record.json")]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "record.json").exists()


@pytest.mark.parametrize(
    "counts, code",
    [(Counter(passed=3), 0), (Counter(passed=3, failed=1), 1), (Counter(skipped=3), 1), (Counter(passed=3, unfinished=1), 1)],
)
def test_the_record_and_the_exit_code(tmp_path, monkeypatch, capsys, counts, code):
    monkeypatch.setattr(gpu_record, "machine", lambda: MACHINE)
    monkeypatch.setattr(gpu_record, "run_tier", lambda *_: counts)
    record = tmp_path / "new" / "record.json"
    assert gpu_record.main(["-k", "some", "--record", str(record)]) == code
    assert not record.exists(), "a part of the tests is no record"
    assert gpu_record.main(["--record", str(record)]) == code
    assert check(record)[0] == (code == 0)


# ------------------------------------------------------------------------------------------------------------------------ shards


FILE = """
import pytest

@pytest.mark.parametrize("i", range(10))
def test_a(i): pass

@pytest.mark.big
def test_b(): pass
"""


def collected(tmp_path, *options, plugin="shards"):
    """Names of the tests that are left of a planted file."""
    planted(tmp_path, FILE, "test_x.py")
    command = [sys.executable, "-m", "pytest", "-p", plugin, "-c", TESTS.parent / "pyproject.toml", "--collect-only", *options, tmp_path]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent / "src")])}
    done = subprocess.run([*map(str, command), "-p", "no:cacheprovider"], capture_output=True, text=True, env=environment)
    return [line.rpartition("::")[2] for line in done.stdout.splitlines() if "::" in line], done


def test_shards_are_a_partition_and_always_the_same(tmp_path):
    shards = [collected(tmp_path, "--shard", f"{i}/3")[0] for i in (1, 2, 3)]
    assert sorted(map(len, shards)) == [3, 4, 4]
    together = [name for shard in shards for name in shard]
    assert sorted(together) == sorted(collected(tmp_path)[0]) and len(set(together)) == 11
    assert collected(tmp_path, "--shard", "2/3")[0] == shards[1]


def test_big_tests_are_left_out_or_chosen(tmp_path):
    assert "test_b" not in collected(tmp_path, "--no-big")[0]
    assert collected(tmp_path, "-m", "big")[0] == ["test_b"]
    assert [len(collected(tmp_path, "--no-big", f"--shard={i}/2")[0]) for i in (1, 2)] == [5, 5]


def test_most_cases_of_what_takes_long_without_a_gpu_are_left_out(tmp_path, monkeypatch):
    planted(tmp_path, """
import pytest

pytestmark = pytest.mark.thinned(2)

@pytest.mark.parametrize("i", range(40))
@pytest.mark.parametrize("where", ["cpu", pytest.param("interpreter", marks=pytest.mark.interpret),
                                   pytest.param("cuda", marks=pytest.mark.gpu)])
def test_many(where, i): pass

@pytest.mark.interpret
def test_one(): pass
""", "test_y.py")  # fmt: skip
    left = collected(tmp_path)[0]
    assert "test_one" in left and sum("cuda" in name for name in left) == 40
    for where in ("cpu", "interpreter"):
        assert 10 <= sum(where in name for name in left) <= 30 and f"test_many[{where}-0]" in left
    monkeypatch.setenv("FLASHATTN_ALL_CASES", "1")
    assert sum("test_many" in name for name in collected(tmp_path)[0]) == 120


def test_the_conftest_shards_and_takes_a_big_test_for_a_gpu_test(tmp_path):
    assert collected(tmp_path, "-m", "gpu", "--shard=1/1", plugin="conftest")[0] == ["test_b"]


@pytest.mark.parametrize("shard", ["0/2", "3/2", "two"])
def test_an_impossible_shard_is_refused(tmp_path, shard):
    _, done = collected(tmp_path, "--shard", shard)
    assert done.returncode == 4 and "--shard takes I/N" in done.stderr


def test_shards_start_on_different_gpus():
    assert [rotated(["0", "1", "2"], i) for i in range(4)] == ["0,1,2", "1,2,0", "2,0,1", "0,1,2"]
    assert rotated(["3"], 1) is None and rotated([], 2) is None
