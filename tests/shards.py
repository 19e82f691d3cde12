"""Which of the collected tests run in this process: `--shard i/n` takes every n-th, `--no-big` leaves the big ones out.

n processes with the shards 1/n ... n/n run each test exactly once. They share one GPU and its memory: what they share out is the
compilation of the kernels, which takes a CPU core each and most of the time. No test begins after `--until`, the time of day in seconds
since 1970: those left are skipped, and gpu_record.py counts them. Of a test in a file marked `thinned(n)` one in n of the cases runs
without a GPU, where one takes a second, and all of them with FLASHATTN_ALL_CASES=1. conftest.py takes the hooks over.
"""

import os
import re
import time
from zlib import crc32

import pytest


def pytest_addoption(parser):
    group = parser.getgroup("flashattn")
    group.addoption("--shard", type=_shard, metavar="I/N", help="run only the I-th of N equal parts of the selected tests")
    group.addoption("--no-big", action="store_true", help="leave out the tests that need tens of gigabytes of GPU memory")
    group.addoption("--until", type=float, metavar="TIME", help="begin no test after this time (seconds since 1970)")


def _shard(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise pytest.UsageError(f"--shard takes I/N with 1 <= I <= N, not {text!r}")
    return int(match[1]), int(match[2])


def thinned(items) -> list:
    """Without most of the cases of files that are marked so, but for those of a GPU; of each test the first stays, and the first that is
    interpreted.

    By a checksum of their names, for every n-th would be all of one value of the axis that varies fastest.
    """
    seen, kept = set(), []
    for item in items:
        mark = item.get_closest_marker("thinned")
        if mark and not item.get_closest_marker("gpu"):
            test = item.nodeid.partition("[")[0], bool(item.get_closest_marker("interpret"))
            if test in seen and crc32(item.nodeid.rpartition("::")[2].encode()) % (mark.args or (2,))[0]:
                continue
            seen.add(test)
        kept.append(item)
    return kept


@pytest.hookimpl(trylast=True)  # after -m and -k, so that the parts of what they leave are equal
def pytest_collection_modifyitems(config, items):
    kept = list(items) if os.environ.get("FLASHATTN_ALL_CASES") == "1" else thinned(items)
    if config.getoption("--no-big"):
        kept = [item for item in kept if not item.get_closest_marker("big")]
    if config.getoption("--shard"):
        index, count = config.getoption("--shard")
        order = sorted(range(len(kept)), key=lambda i: (kept[i].nodeid, i))
        kept = [kept[i] for i in sorted(order[index - 1 :: count])]
    if len(kept) < len(items):
        chosen = set(map(id, kept))
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
        items[:] = kept


def pytest_runtest_setup(item):
    until = item.config.getoption("--until")
    if until and time.time() > until:
        pytest.skip("unfinished: not begun before the time limit")
