"""Nothing is compiled anew because lengths changed: a training run with packed batches never has two batches of the same size.

No GPU is needed and nothing is compiled: a worker asks Triton under which key it would look for each kernel. The surprising fact: what
`do_not_specialize` says holds for an argument and for no member of a tuple, so a size that moves into a struct brings back a compilation
whenever it is 1 or goes from a multiple of 16 to another number.
"""

import random

import pytest

from aot import CompilePool, Job, specializations_here
from flashattn.dispatch.table import hopper_rows, portable_rows
from flashattn.problem import Problem

pytestmark = pytest.mark.compile_only
CAPABILITIES = {80: (8, 0), 90: (9, 0)}
HEADS = 8, 2
CALLS = 60


def problem_of(kind: str, cc: int, dim: int, causal: bool, lengths: tuple[int, ...], dropout: float = 0.0) -> Problem:
    """lengths: seqlen_q, seqlen_k, batch; and, packed, total_q and total_k."""
    seqlen_q, seqlen_k, batch, *totals = lengths
    total_q, total_k = totals or (0, 0)
    heads_q, heads_kv = HEADS if causal else (HEADS[0], HEADS[0])
    return Problem(
        dtype="bfloat16", batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=heads_q, heads_kv=heads_kv, head_dim=dim,
        head_dim_v=dim, softmax_scale=0.1, window_right=0 if causal else None, varlen=kind == "packed", total_q=total_q, total_k=total_k,
        capability=CAPABILITIES[cc], dropout=dropout,
    )  # fmt: skip


def build(kind: str, cc: int, dim: int, causal: bool, lengths: tuple[int, ...], name: str, dropout: float = 0.0):
    from launches import launch_of

    return launch_of(problem_of(kind, cc, dim, causal, lengths, dropout), name)


def planted(name: str, total: int, batch: int):
    import torch

    import aot_kernels

    sizes = (aot_kernels.Sizes(total, batch),) if "tuple" in name else (total, batch)
    return getattr(aot_kernels, name), (torch.float32, *sizes), {}


@pytest.fixture(scope="module")
def worker():
    pool = CompilePool(1)  # not the session's, which has minutes of compilation to do first
    yield pool
    pool.close()


def lengths_of(kind: str, seed: int) -> list[tuple[int, ...]]:
    """As different as they come: 1, powers of two, multiples of 16, neighbours of these, any number."""
    draw = random.Random(seed)

    def length():
        near = 16 * draw.randint(1, 4000) if draw.random() < 0.5 else 2 ** draw.randint(0, 16)
        return max(1, near + draw.choice((-1, 0, 0, 0, 1))) if draw.random() < 0.8 else draw.randint(1, 1 << 20)

    first = [(1, 1, 1), (16, 16, 16), (1024, 1024, 1), (1024, 1024, 16)]  # sequences, batch
    drawn = [(length(), length(), draw.choice((1, 2, 3, 15, 16, 17, 64, 1000))) for _ in range(CALLS)]
    dense = first + drawn
    return dense if kind == "dense" else [(*longest, max(2, length()), max(2, length())) for longest in dense]


@pytest.mark.parametrize("causal", [True, False], ids=["causal-grouped", "plain"])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("cc", CAPABILITIES)
@pytest.mark.parametrize("kind", ["packed", "dense"])
def test_lengths_compile_nothing_anew(worker, kind, cc, dim, causal):
    """One kernel for packed calls. Two for dense ones: the walked side ends inside a tile or not, and a third where a table has a row for
    calls whose lengths are multiples of 128."""
    calls = lengths_of(kind, seed=dim)
    rows = portable_rows(problem_of(kind, cc, dim, causal, calls[0]))
    jobs = [Job("test_recompilation.build", (kind, cc, dim, causal, lengths, name), cc) for name in rows for lengths in calls]
    found = worker.run(specializations_here, jobs)
    assert len(found) == len(jobs)
    for index, name in enumerate(rows):
        keys = {key for _, key in found[index * len(calls) : (index + 1) * len(calls)]}
        tiles = {portable_rows(problem_of(kind, cc, dim, causal, lengths))[name] for lengths in calls}
        allowed = 1 if kind == "packed" or name == "delta" else 1 + len(tiles)
        assert len(keys) <= allowed, f"{name}: {len(keys)} kernels for {len(calls)} calls: {differences(keys)}"


def test_probabilities_of_dropout_compile_nothing_anew(worker):
    """From the least to 1.0, where the factor of what is left is 0."""
    lengths, odds = (1024, 1024, 1), (2.0**-32, 0.1, 0.5, 0.9375, 1.0)
    for name in portable_rows(problem_of("dense", 90, 64, True, lengths)):
        jobs = [Job("test_recompilation.build", ("dense", 90, 64, True, lengths, name, p), 90) for p in odds]
        assert len({key for _, key in worker.run(specializations_here, jobs)}) == 1, name


@pytest.mark.parametrize("causal", [True, False], ids=["causal-grouped", "plain"])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("kind", ["packed", "dense"])
def test_lengths_compile_nothing_anew_for_hopper(worker, kind, dim, causal):
    """One kernel for packed calls. Two for dense ones: the keys end inside a block or not; and two of either with a diagonal, which may
    leave masking to the first block alone; all that for each row of the table."""
    calls = lengths_of(kind, seed=dim)
    rows = {hopper_rows(problem_of(kind, 90, dim, causal, lengths))["forward"] for lengths in calls}
    jobs = [Job("test_recompilation.build", (kind, 90, dim, causal, lengths, "hopper"), 90) for lengths in calls]
    keys = {key for _, key in worker.run(specializations_here, jobs)}
    allowed = len(rows) * (1 if kind == "packed" else 4 if causal else 2)
    assert 1 <= len(keys) <= allowed, f"{len(keys)} kernels for {len(calls)} calls: {differences(keys)}"


def differences(keys: set[str]) -> list[str]:
    """Two keys, from where they part."""
    one, two = sorted(keys)[:2]
    first = next(i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b)
    return [key[max(0, first - 60) : first + 40] for key in (one, two)]


def test_sizes_in_a_tuple_are_found(worker):
    """The mistake that this file is for, made on purpose."""
    sizes = [(1, 1), (16, 1), (17, 1), (160, 32), (161, 33)]
    counts = {}
    for name in ("sizes_in_a_tuple_kernel", "sizes_as_arguments_kernel"):
        found = worker.run(specializations_here, [Job("test_recompilation.planted", (name, *each), 90) for each in sizes])
        assert [kernel.rpartition(".")[2] for kernel, _ in found] == [name] * len(sizes)
        counts[name] = len({key for _, key in found})
    assert counts == {"sizes_in_a_tuple_kernel": 5, "sizes_as_arguments_kernel": 1}
