"""Two processes: data parallel, FSDP2, and DTensors through the operators' sharding rules; gloo on CPUs, NCCL where there are two GPUs.

What they check is in distributed_worker.py. The surprising fact: importing DTensors costs half of what importing torch does, so the rules
are told to torch late, and a test has to see to it that nothing is imported earlier.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

TESTS = Path(__file__).parent
pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch has no gloo here")


# the first comes before any call was made
NAMES = ("sharded_compiled", "sharded", "sharded_packed", "sharded_variants", "sharded_biases", "sharded_dropout", "ddp", "fsdp2")


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What each of two processes printed, all tests one after another: to start one takes longer than they do."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(TESTS.parent / "src")
    store = str(tmp_path_factory.mktemp("distributed") / "store")
    commands = [[sys.executable, str(TESTS / "distributed_worker.py"), str(rank), store, *NAMES] for rank in range(2)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    workers = [subprocess.Popen(command, env=environment, text=True, **pipes) for command in commands]
    try:
        return [worker.communicate(timeout=180)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()


@pytest.mark.parametrize("name", NAMES)
def test_two_processes(name, told):
    assert all(f"{name} ok" in text.splitlines() for text in told), "\n".join(told)


def test_nobody_waits_for_dtensors_who_has_none():
    code = """
import sys, torch, flashattn
q = torch.randn(1, 3, 2, 8, requires_grad=True)
flashattn.attention(q, q, q).sum().backward()
print('torch.distributed.tensor' in sys.modules, 'torch._dynamo' in sys.modules)
"""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | {"PYTHONPATH": str(TESTS.parent / "src")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_the_rules_know_slopes_and_sinks():
    """By names, whether or not this version of the operators has them."""
    from flashattn.torch_ops.sharding import BATCH, HEADS, _dimension

    one, two = torch.zeros(4), torch.zeros(2, 4)
    assert [_dimension("alibi_slopes", x, False, by) for x in (one, two) for by in (HEADS, BATCH)] == [0, None, 1, 0]
    four = torch.zeros(2, 1, 3, 3)
    assert [_dimension("bias", x, False, by) for x in (four, four.transpose(0, 1)) for by in (HEADS, BATCH)] == [None, 0, 1, None]
    assert [_dimension("sinks", one, False, by) for by in (HEADS, BATCH)] == [0, None]
    assert [_dimension("dsinks", two, packed, HEADS) for packed in (False, True)] == [1, 1]
    assert [_dimension("cu_seqlens_q", one, True, by) for by in (HEADS, BATCH)] == [None, None]
