"""Training steps of a Transformers Llama with random weights, by attention: `python -m benchmarks.llama_step`.

Every implementation starts from the same weights and sees the same tokens, so losses are comparable step by step; then steps are timed, the
implementations taking turns. The first loss is that of the forward alone, before any update: what differs there is rounding.

Surprising fact: Transformers chooses nothing here. "sdpa" is what torch makes of it, usually cuDNN or flash on Hopper.
"""

import argparse
import json
import shlex
import statistics
import sys
import time
from pathlib import Path

import torch

from benchmarks import report
from flashattn.roofline.timing import gpu_state, turn_order

SIZES = {  # about 1.1 billion parameters, and one for a CPU
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
           "vocab_size": 32000},
    "small": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
              "vocab_size": 256},
}  # fmt: skip


def model(size: str, implementation: str, device: torch.device, dtype: torch.dtype):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SIZES[size], max_position_embeddings=1 << 17)
    with torch.device(device):  # a billion numbers take a minute to draw on a CPU
        return LlamaForCausalLM._from_config(config, attn_implementation=implementation, dtype=dtype).train()


def step(net, optimizer, tokens) -> float:
    loss = net(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()  # waits for the device


def measure(size: str, names: tuple[str, ...], batch: int, rows: int, steps: int, device: torch.device) -> list[dict]:
    from flashattn.integrations.transformers import register

    register()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tokens = torch.randint(SIZES[size]["vocab_size"], (batch, rows), generator=torch.Generator().manual_seed(1)).to(device)
    nets = {name: model(size, name, device, dtype) for name in names}
    optimizers = {name: torch.optim.SGD(net.parameters(), lr=0.1) for name, net in nets.items()}
    losses = {name: [step(nets[name], optimizers[name], tokens)] for name in names}  # compiles and warms up too
    times: dict[str, list[float]] = {name: [] for name in names}
    for index in range(steps):
        for name in turn_order(list(names), index):
            start = time.perf_counter()
            losses[name].append(step(nets[name], optimizers[name], tokens))
            times[name].append((time.perf_counter() - start) * 1e3)
    return [
        {"implementation": name, "parameters": sum(p.numel() for p in nets[name].parameters()), "losses": losses[name],
         "ms": statistics.median(times[name]), "ms_min": min(times[name]), "ms_max": max(times[name])}
        for name in names
    ]  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    p = argparse.ArgumentParser(prog="python -m benchmarks.llama_step", description="Training steps of a Llama, by attention.")
    p.add_argument("--size", choices=list(SIZES), default="1b")
    p.add_argument("--implementations", default="flashattn,sdpa", help="attn_implementation, separated by commas")
    p.add_argument("--batch", type=int, default=1)
    p.add_argument("--rows", type=int, default=4096)
    p.add_argument("--steps", type=int, default=8)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--json", type=Path, default=None)
    args = p.parse_args(argv)
    device = torch.device(args.device)
    start = gpu_state(device)
    rows = measure(args.size, tuple(args.implementations.split(",")), args.batch, args.rows, args.steps, device)
    document = {
        "suite": "llama_step", "gpu": report.device_name(device), "date": report.today(), "versions": report.versions(device),
        "command": "python -m benchmarks.llama_step " + shlex.join(argv), "size": args.size, "batch": args.batch, "seqlen": args.rows,
        "gpu_start": start, "gpu_end": gpu_state(device), "rows": rows,
    }  # fmt: skip
    path = args.json or report.result_path(device, "llama_step")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    lines = [[r["implementation"], f"{r['losses'][0]:.5f}", f"{r['losses'][-1]:.5f}", f"{r['ms']:.1f}",
              f"{r['ms_min']:.1f} .. {r['ms_max']:.1f}"] for r in rows]  # fmt: skip
    report.print_table(["implementation", "first loss", "last loss", "ms per step", "min .. max"], lines, "Training steps of a Llama")
    return 0


if __name__ == "__main__":
    sys.exit(main())
