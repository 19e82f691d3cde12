"""One of the two processes of `benchmarks.compare`: times the `flashattn` that it finds on its path, one turn at a time.

It reads a JSON line and answers with one, and imports nothing of the benchmarks, because the other commit's library may not have what
this commit's benchmarks need. The clock is this commit's for both; it is loaded from its file.

Surprising fact: two processes may hold one GPU, but only the one that has work uses it, so alternating turns are as good as one process.
"""

import importlib.util
import json
import sys
from contextlib import nullcontext

import torch


def load_clock(path: str):
    spec = importlib.util.spec_from_file_location("compare_timing", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def tensors(task: dict, device: torch.device) -> list[torch.Tensor]:
    """q, k, v and dout; packed ones without a batch."""
    generator = torch.Generator(device=device).manual_seed(0)
    rows = [[sum(task["lengths"])]] * 2 if task["lengths"] else [[task["batch"], task[f"seqlen_{side}"]] for side in "qk"]
    sizes = [
        (*rows[0], task["heads_q"], task["head_dim"]), (*rows[1], task["heads_kv"], task["head_dim"]),
        (*rows[1], task["heads_kv"], task["head_dim_v"]), (*rows[0], task["heads_q"], task["head_dim_v"]),
    ]  # fmt: skip
    return [torch.randn(size, generator=generator, device=device).to(getattr(torch, task["dtype"])) for size in sizes]


def prepare(task: dict, direction: str, impl: str | None, device: torch.device):
    """(the call, what it computes as norms)."""
    import flashattn

    q, k, v, dout = tensors(task, device)
    options = {"causal": task["causal"], "window": tuple(task["window"]) if task["window"] else None, "impl": impl}
    attend = lambda q, k, v: flashattn.attention(q, k, v, **options)  # noqa: E731
    if task["lengths"]:
        cu = torch.tensor([0, *task["lengths"]], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
        longest = max(task["lengths"])
        attend = lambda q, k, v: flashattn.attention_varlen(  # noqa: E731
            q, k, v, cu, cu, max_seqlen_q=longest, max_seqlen_k=longest, **options
        )
    if direction == "fwd":
        call = lambda: (attend(q, k, v),)  # noqa: E731
    else:
        leaves = [x.requires_grad_(True) for x in (q, k, v)]
        out = attend(*leaves)
        call = lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)  # noqa: E731
    with torch.no_grad():
        norms = [x.double().norm().item() for x in call()]
    return call, norms


def main() -> None:
    answers = sys.stdout
    sys.stdout = sys.stderr  # whatever a library prints is no answer
    call = clock = None
    inference = nullcontext
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if asked["do"] == "start":
                device, timing = torch.device(asked["device"]), load_clock(asked["timing"])
                clock = timing.clock_for(device)
                import flashattn

                answer = {"file": flashattn.__file__}
            elif asked["do"] == "prepare":
                call, norms = prepare(asked["task"], asked["direction"], asked["impl"], device)
                inference = torch.no_grad if asked["direction"] == "fwd" else nullcontext
                with inference():
                    clock.elapsed_ms(call, 1)
                    answer = {"norms": norms, "ms": clock.elapsed_ms(call, 2) / 2}
            else:
                with inference():
                    answer = {"ms": clock.elapsed_ms(call, asked["count"]) / asked["count"]}
        except Exception as error:  # an old commit may not have what is asked of it, which is an answer too
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
