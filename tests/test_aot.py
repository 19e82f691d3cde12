"""The ahead-of-time compiler, tried on small kernels whose registers, shared memory and spills are known by construction.

The kernels live here and in no room of the library. They are defined by the builders, not at import, so that the worker processes
compile them while this process may be one that can only interpret.
"""

import pytest
import torch

from aot import SHARED_MEMORY, CompilePool, Job

pytestmark = pytest.mark.compile_only
TARGETS = sorted(SHARED_MEMORY)


def product(block: int, stages: int):
    """C = A B with tiles of block x block, `stages` of them in flight."""
    from aot_kernels import product_kernel

    pointers = [torch.empty(1, dtype=torch.bfloat16, device="meta")] * 2 + [torch.float32]
    return product_kernel, (*pointers, 4096), {"BLOCK": block, "num_warps": 4, "num_stages": stages}


def hoarder(maxnreg: int):
    """Keeps a tile of 128 values a thread alive, with at most `maxnreg` registers."""
    from aot_kernels import hoarder_kernel

    return hoarder_kernel, (torch.float32, torch.float32), {"BLOCK": 128 * 32, "num_warps": 1, "maxnreg": maxnreg}


CRASH, FAIL = Job("os._exit", (1,), 90), Job("builtins.int", ("no number",), 90)  # builders need no kernel to go wrong


@pytest.mark.parametrize("job", [Job("test_aot.product", (64, 3), cc) for cc in TARGETS], ids=str)
def test_a_kernel_that_fits(compiled):
    assert compiled.name == "product_kernel"
    assert compiled.num_warps == 4
    assert 16 <= compiled.registers <= 255
    assert 2 * 64 * 64 * 2 <= compiled.shared <= compiled.shared_limit
    assert compiled.problems() == []


@pytest.mark.parametrize("job", [Job("test_aot.product", (128, 8), 80)], ids=str)
def test_too_much_shared_memory_is_seen(compiled):
    assert compiled.shared > SHARED_MEMORY[80]
    assert "shared memory" in compiled.problems()[0]


@pytest.mark.parametrize("job", [Job("test_aot.hoarder", (32,), cc) for cc in TARGETS], ids=str)
def test_spills_are_seen(compiled):
    assert compiled.registers <= 32
    assert compiled.stack > 0
    assert compiled.spill_stores > 0 and compiled.spill_loads > 0
    assert "spill" in compiled.problems()[0]


def test_an_error_in_a_worker_reaches_the_caller(compile_pool):
    with pytest.raises(ValueError, match="no number"):
        compile_pool.result(FAIL)


def test_a_crashing_compiler_is_named_and_hurts_no_other_job():
    pool = CompilePool(1)
    try:
        pool.submit(CRASH)
        with pytest.raises(RuntimeError, match="crashed on sm_90-_exit"):
            pool.result(CRASH)
        with pytest.raises(ValueError, match="no number"):
            pool.result(FAIL)
    finally:
        pool.close()
