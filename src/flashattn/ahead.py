"""Compiling before the first call needs it: `warmup`, and the workers that it starts.

A worker is a process of its own that makes the calls it reads, a line of JSON each, on tensors of zeros; what they compile lands in
Triton's cache on disk, where every later process finds it. So nothing about kernels, tiles or signatures is known here, and nothing can be
compiled that a call wouldn't use.

The surprising fact: how long a sequence is compiles nothing, but whether its last tile is full does. So does a mask, a head dim, a dtype,
and whether anybody wants gradients.
"""

import itertools
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Call:
    """One call of `attention` or, with varlen, `attention_varlen`. causal: False, True or "top-left"."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: str
    causal: bool | str = False
    window: tuple[int | None, int | None] | None = None
    varlen: bool = False
    backward: bool = True
    deterministic: bool = False
    device: str = "cuda"

    def __str__(self) -> str:
        heads = f"{self.heads}/{self.heads_kv}" if self.heads != self.heads_kv else f"{self.heads}"
        dim = f"{self.head_dim}/{self.head_dim_v}" if self.head_dim != self.head_dim_v else f"{self.head_dim}"
        rows = f"{self.seqlen_q}x{self.seqlen_k}" if self.seqlen_q != self.seqlen_k else f"{self.seqlen_q}"
        words = [f"{self.dtype} D {dim} H {heads} B {self.batch} S {rows}"]
        words += [{True: "causal", "top-left": "causal top-left"}[self.causal]] if self.causal else []
        words += [f"window {self.window[0]},{self.window[1]}"] if self.window else []
        words += ["packed"] if self.varlen else []
        words += [] if self.backward else ["forward only"]
        return ", ".join(words + (["deterministic"] if self.deterministic else []))


@dataclass(frozen=True)
class Warmed:
    """What became of a call: the seconds that it took in its worker, or what it raised."""

    call: Call
    seconds: float
    error: str | None = None


def _each(value: Any) -> tuple:
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)


def calls_of(
    *, head_dim, seqlen, heads, heads_kv, batch, dtype, causal, window, varlen, backward, deterministic, device="cuda"
) -> list[Call]:  # fmt: skip
    """Every combination, as `warmup` takes them; ValueError for a dtype or a number that can't be."""
    found = []
    for dims, rows, kind, mask, packed in itertools.product(*map(_each, (head_dim, seqlen, dtype, causal, varlen))):
        (dim, dim_v), (rows_q, rows_k) = (x if isinstance(x, tuple) else (x, x) for x in (dims, rows))
        name = str(kind).removeprefix("torch.")
        if name not in DTYPES:
            raise ValueError(f"dtype={kind!r}: expected some of {', '.join(DTYPES)}")
        sizes = {
            "batch": batch, "seqlen_q": rows_q, "seqlen_k": rows_k, "heads": heads, "heads_kv": heads if heads_kv is None else heads_kv,
            "head_dim": dim, "head_dim_v": dim_v,
        }  # fmt: skip
        for what, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{what}={size!r}: expected a whole number, at least 1")
        found.append(Call(**sizes, dtype=name, causal=mask, window=window, varlen=packed, backward=backward, deterministic=deterministic,
                          device=device))  # fmt: skip
    return list(dict.fromkeys(found))


def warmup(
    *,
    head_dim: int | Sequence[int] = 128,
    seqlen: int | Sequence[int] = 4096,
    heads: int = 16,
    heads_kv: int | None = None,
    batch: int = 1,
    dtype="bfloat16",
    causal: bool | str | Sequence[bool | str] = True,
    window: tuple[int | None, int | None] | None = None,
    varlen: bool | Sequence[bool] = False,
    backward: bool = True,
    deterministic: bool = False,
    processes: int | None = None,
    progress: Callable[[Warmed], None] | None = None,
) -> list[Warmed]:
    """Compile ahead, in parallel, what calls like these will need; every later process on this machine finds it in Triton's cache.

    head_dim, seqlen, dtype, causal and varlen may be sequences: every combination is made. A pair in them, as in head_dim=[64, (192, 128)],
    is that of queries and of values (or keys). Each call is run once, forward and backward, on tensors of zeros in another process.

    Args:
        head_dim: of queries and keys, and of values if not a pair; default 128.
        seqlen: rows; what matters is whether they are a multiple of 128, so 4096, the default, and 1000 stand for many.
        heads, heads_kv: of queries and of keys; by default 16 and as many. What matters is whether they are the same number.
        batch: sequences; default 1. More take more memory; a Hopper forward of few tiles is another kernel than one of many.
        dtype: names or torch dtypes, of "bfloat16" (the default), "float16" and "float32".
        causal, window, deterministic: as in `attention`; by default causal. What matters of a window is which sides it limits.
        varlen: also, or only, packed sequences; default False.
        backward: gradients too; default True.
        processes: workers at a time; default: as many as cores, at most 8, and no more than calls. Each holds a CUDA context.
        progress: called with each result as it comes, from one thread at a time.

    Returns:
        A `Warmed` for each call, in their order: the call, seconds, and error, the text of what it raised, or None.

    Raises:
        RuntimeError: torch finds no CUDA device here, so there is nothing to compile for. ValueError: sizes or dtypes that can't be.
    """
    calls = calls_of(
        head_dim=head_dim, seqlen=seqlen, heads=heads, heads_kv=heads_kv, batch=batch, dtype=dtype, causal=causal, window=window,
        varlen=varlen, backward=backward, deterministic=deterministic,
    )  # fmt: skip
    check_gpu()
    return run(calls, processes, progress)


def check_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("warmup needs a GPU: torch finds no CUDA device here, and kernels are compiled for the one that is there")


def run(calls: list[Call], processes: int | None = None, progress: Callable[[Warmed], None] | None = None) -> list[Warmed]:
    """`warmup` of calls that are known, on any device."""
    count = min(len(calls), processes or min(8, os.cpu_count() or 1))
    left: queue.SimpleQueue = queue.SimpleQueue()
    for place, call in enumerate(calls):
        left.put((place, call))
    results: dict[int, Warmed] = {}
    lock = threading.Lock()

    def finish(place: int, result: Warmed) -> None:
        with lock:
            results[place] = result
            if progress is not None:
                progress(result)

    threads = [threading.Thread(target=_serve, args=(left, finish), daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[place] for place in sorted(results)]


def _serve(left: queue.SimpleQueue, finish: Callable[[int, Warmed], None]) -> None:
    """Hand calls to a worker, one after another; to a new one if it dies, of which the call that it had is told."""
    worker = None
    while True:
        try:
            place, call = left.get_nowait()
        except queue.Empty:
            break
        if worker is None or worker.poll() is not None:
            worker = _worker()
        start = time.monotonic()
        try:
            worker.stdin.write(json.dumps(asdict(call)) + "\n")
            worker.stdin.flush()
            answer = json.loads(worker.stdout.readline())
        except (OSError, ValueError):  # it is gone: a broken pipe, or an end where a line should be
            answer = {"seconds": time.monotonic() - start, "error": f"the worker ended with exit code {worker.wait()}"}
        finish(place, Warmed(call, **answer))
    if worker is not None:
        worker.stdin.close()
        worker.wait()


def _worker() -> subprocess.Popen:
    source = str(Path(__file__).resolve().parent.parent)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))}
    command = [sys.executable, "-c", "from flashattn.ahead import work; work()"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True)


def work(lines: Iterable[str] | None = None, out=None) -> None:
    """A worker: calls in, a line of JSON each; seconds and error out."""
    out = sys.stdout if out is None else out
    sys.stdout = sys.stderr  # what a compiler prints is no answer
    for line in sys.stdin if lines is None else lines:
        start = time.monotonic()
        try:
            make(Call(**json.loads(line)))
            error = None
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        print(json.dumps({"seconds": time.monotonic() - start, "error": error}), file=out, flush=True)


def make(call: Call) -> None:
    """Run a call, and its backward if it has one, on zeros."""
    import torch

    from .api import attention, attention_varlen

    options = {"causal": call.causal, "window": None if call.window is None else tuple(call.window), "deterministic": call.deterministic}
    shapes = [(call.seqlen_q, call.heads, call.head_dim), (call.seqlen_k, call.heads_kv, call.head_dim),
              (call.seqlen_k, call.heads_kv, call.head_dim_v)]  # fmt: skip
    kind = {"dtype": getattr(torch, call.dtype), "device": call.device, "requires_grad": call.backward}
    if call.varlen:
        q, k, v = (torch.zeros(call.batch * rows, *rest, **kind) for rows, *rest in shapes)
        steps = torch.arange(call.batch + 1, dtype=torch.int32, device=call.device)
        out = attention_varlen(q, k, v, steps * call.seqlen_q, steps * call.seqlen_k, **options)
    else:
        q, k, v = (torch.zeros(call.batch, *shape, **kind) for shape in shapes)
        out = attention(q, k, v, **options)
    if call.backward:
        torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
    if call.device == "cuda":
        torch.cuda.synchronize()
