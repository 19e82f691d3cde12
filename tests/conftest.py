"""One pytest command runs everything that this machine can run; this file decides what that is.

Without CUDA, TRITON_INTERPRET=1 is set before anything can import Triton, so `interpret` tests run the portable kernels on CPU tensors, and
`compile_only` tests compile in worker processes that don't see it. With CUDA the kernels are compiled: `gpu` tests run and `interpret`
tests are skipped (TRITON_INTERPRET=1 from outside turns that round). A `big` test, `@pytest.mark.big(GiB)`, is a `gpu` test that also waits
for that much free GPU memory (default 40).

Every test sees the allocations of the library filled with garbage (poison.py) unless it is marked `no_poison`.
"""

import gc
import importlib.metadata
import importlib.util
import os
import sys

import hypothesis
import pytest
import torch

from aot import CompilePool, Job
from interpreter import replace_once
from poison import poison
from shards import pytest_addoption, pytest_collection_modifyitems, pytest_runtest_setup  # noqa: F401  (hooks)

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")
INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
TRITON = importlib.util.find_spec("triton") is not None
if INTERPRET and "triton" in sys.modules:
    raise pytest.UsageError("Triton was imported before TRITON_INTERPRET was set")

# The same examples in every run, so that a recorded result can be had again; --hypothesis-profile=explore draws new ones.
_hypothesis = {"deadline": None, "print_blob": True, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("flashattn", derandomize=True, **_hypothesis)
hypothesis.settings.register_profile("explore", **_hypothesis)
hypothesis.settings.load_profile("flashattn")


def pytest_configure(config):
    config.addinivalue_line("markers", "no_poison: leaves the library's allocations as they are")
    if INTERPRET and TRITON:
        replace_once()


def pytest_report_header(config):
    found = [f"{name} {importlib.import_module(name).__version__}" for name in ("torch", "numpy")]
    if TRITON:
        found.append(f"triton {importlib.metadata.version('triton')}{' (interpreter)' if INTERPRET else ''}")
    return f"flashattn: {', '.join(found)}, {torch.cuda.get_device_name() if CUDA else 'no GPU'}"


def pytest_itemcollected(item):
    """Here and not in a fixture, so that a test which can't run here costs nothing and `-m gpu` finds the big ones too."""
    if item.get_closest_marker("big"):
        item.add_marker("gpu")
    if item.get_closest_marker("gpu") and (not CUDA or INTERPRET):
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device" if not CUDA else "TRITON_INTERPRET is set"))
    if item.get_closest_marker("interpret") and not (INTERPRET and TRITON):
        item.add_marker(pytest.mark.skip(reason="the kernels are compiled here, not interpreted" if TRITON else "needs Triton"))
    if item.get_closest_marker("compile_only") and not TRITON:
        item.add_marker(pytest.mark.skip(reason="needs Triton"))


@pytest.fixture(autouse=True)
def _free_memory(request):
    """A big test starts with what earlier tests in this process hold given back, and only if the rest is enough."""
    big = request.node.get_closest_marker("big")
    if big:
        gc.collect()
        torch.cuda.empty_cache()
        need, free = big.args[0] if big.args else 40, torch.cuda.mem_get_info()[0] / 2**30
        if free < need:
            pytest.skip(f"needs {need} GiB of free GPU memory, there are {free:.1f}")
    yield
    if big:
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def _poisoned_allocations(request):
    with pytest.MonkeyPatch.context() as monkeypatch:
        if not request.node.get_closest_marker("no_poison"):
            poison(monkeypatch)
        yield


def _job(item) -> Job | None:
    job = item.callspec.params.get("job") if hasattr(item, "callspec") else None
    return job if isinstance(job, Job) else None


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Tensors this small are computed sooner than a second thread wakes up, and the compile pool has work for the other cores."""
    if not CUDA:
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def compile_pool(request):
    """One worker per core, at work on every `job` parameter of the session from the start."""
    pool = CompilePool()
    for job in filter(None, map(_job, request.session.items)):
        pool.submit(job)
    yield pool
    pool.close()


@pytest.fixture(scope="session", autouse=True)
def _compile_ahead(request):
    """Compilation starts before the first test, beside whatever runs until its result is asked for."""
    if TRITON and any(map(_job, request.session.items)):
        request.getfixturevalue("compile_pool")


@pytest.fixture
def compiled(job, compile_pool):
    """What the compiler made of the test's parameter `job`."""
    return compile_pool.result(job)
