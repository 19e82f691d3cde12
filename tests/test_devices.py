"""Which device, which stream, when: several GPUs, side streams, CUDA graphs, no synchronisation, and first calls all at once.

The surprising fact about CUDA graphs: a packed call can be captured once and replayed with other cumulative lengths, since nothing on
the host ever looks at them.
"""

import os
import subprocess
import sys

import pytest
import torch

from flashattn import attention, attention_varlen
from support import Data, dense, packed, run, same_bits

pytestmark = pytest.mark.gpu
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
SHAPE = {"heads": 4, "heads_kv": 2, "dim": 64, "dtype": torch.bfloat16}


def inputs(kind: str, device="cuda", seed=0) -> Data:
    if kind == "packed":
        return packed([64, 32, 0, 48], tail_q=16, tail_k=16, device=device, seed=seed, **SHAPE)
    return dense(128, batch=2, device=device, seed=seed, **SHAPE)


def moved(data: Data, device) -> Data:
    return data.with_(**{name: x.to(device) for name, x in vars(data).items() if x is not None})


def call(data: Data, q, k, v):
    if data.packed:
        return attention_varlen(q, k, v, data.cu_q, data.cu_k, causal=True, return_lse=True)
    return attention(q, k, v, causal=True, return_lse=True)


# ------------------------------------------------------------------------------------------------------------------------- devices


@TWO_GPUS
@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_tensors_on_a_gpu_that_is_not_the_current_one(kind):
    data = inputs(kind, "cuda:0")
    expected = run(data, None, causal=True)
    with torch.cuda.device(0):
        found = run(moved(data, "cuda:1"), None, causal=True)
        assert torch.cuda.current_device() == 0
    assert all(x.device == torch.device("cuda:1") for x in found)
    assert same_bits(found._replace(**{name: x.to("cuda:0") for name, x in found._asdict().items()}), expected)


@TWO_GPUS
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_tensors_on_two_gpus_are_refused(name):
    data = inputs("dense", "cuda:0")
    data = data.with_(**{name: getattr(data, name).to("cuda:1")})
    with pytest.raises(ValueError, match=rf"{name} has device cuda:1.*expected one device for q, k and v"):
        call(data, data.q, data.k, data.v)


@TWO_GPUS
def test_cumulative_lengths_on_another_gpu_are_refused():
    data = inputs("packed", "cuda:0")
    with pytest.raises(ValueError, match=r"cu_seqlens_k is on cuda:1 and q on cuda:0: expected one device"):
        attention_varlen(data.q, data.k, data.v, data.cu_q, data.cu_k.to("cuda:1"))


def test_cumulative_lengths_on_the_cpu_are_refused():
    data = inputs("packed")
    with pytest.raises(ValueError, match=r"cu_seqlens_q is on cpu and q on cuda:0: expected one device"):
        attention_varlen(data.q, data.k, data.v, data.cu_q.cpu(), data.cu_k)


# ------------------------------------------------------------------------------------------------------------------------- streams


@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_kernels_run_on_the_current_stream(kind):
    """The side stream sleeps before it fills the inputs: a kernel on any other stream would run on the zeros that were there."""
    data = inputs(kind)
    expected = run(data, None, causal=True)
    later = data.with_(**{name: torch.zeros_like(getattr(data, name)) for name in ("q", "k", "v")})
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # cycles: a tenth of a second
        for name in ("q", "k", "v"):
            getattr(later, name).copy_(getattr(data, name))
        found = run(later, None, causal=True)
    side.synchronize()
    assert same_bits(found, expected)


@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_nothing_waits_for_the_gpu(kind):
    data = inputs(kind)
    run(data, None)  # compiles, which may synchronise
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(data, None)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_forward_and_backward_in_a_cuda_graph(kind):
    """Captured once, replayed with other numbers and other lengths: what a plain call gives, to the bit."""
    static, other = inputs(kind, seed=1), inputs(kind, seed=2)
    if kind == "packed":
        other = other.with_(cu_q=torch.tensor([0, 0, 100, 110, 144], dtype=torch.int32, device="cuda"))
        other = other.with_(**{name: torch.nan_to_num(getattr(other, name)) for name in ("q", "k", "v", "dout", "dlse")})
    run(static, None, causal=True)  # compiles; a capture must not
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(static, None, causal=True)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(static, None, causal=True)
    for data in (other, inputs(kind, seed=1), other):
        for name, x in vars(data).items():
            if x is not None:
                getattr(static, name).copy_(x)
        graph.replay()
        assert same_bits(captured, run(data, None, causal=True))


# ---------------------------------------------------------------------------------------------------------------------- first calls

FIRST_CALL = """
import torch
from flashattn import attention
torch.manual_seed(0)
q = torch.randn(1, 64, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
out = attention(q, q, q, causal=True, impl="portable")
out.float().square().sum().backward()
print(out.float().sum().item(), q.grad.float().abs().sum().item())
"""


@pytest.mark.slow
def test_sixteen_processes_with_one_empty_cache(tmp_path):
    """All compile the same kernels at the same time and write them to the same place; all must come out right, and alike."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([sys.executable, "-c", FIRST_CALL], env=environment, **pipes) for _ in range(16)]
    try:
        said = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * 16, next(stderr for _, stderr in said if stderr)
    assert len({stdout for stdout, _ in said}) == 1 and said[0][0].strip()
    assert any(tmp_path.rglob("*.cubin")), "the cache was not the one that was meant"
