"""Training steps of the GPT of `examples/train_gpt.py`, by attention, in turns in one process: `python -m benchmarks.gpt_step --compile`.

A step is what the example does: forward, backward, clipped norm, AdamW. Every attention starts from the same weights and sees the same
bytes; MFU is counted as the example counts it (6 FLOPs a parameter and token and the causal half of attention's, dense bf16 peak).

Surprising fact: peers are held to one backend of `scaled_dot_product_attention` each, since what torch chooses by itself changes between
its versions, and compiled graphs remember what was chosen when they were traced.
"""

import argparse
import contextlib
import json
import shlex
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.nn.attention import sdpa_kernel

from benchmarks import report
from flashattn.roofline import detect, mfu, train_flops_per_token
from flashattn.roofline.timing import gpu_state, turn_order

EXAMPLES = str(Path(__file__).resolve().parent.parent / "examples")
ATTENTIONS = ("flashattn", "sdpa-cudnn", "sdpa-flash", "flex")


@dataclass
class Runner:
    """One model with its optimizer. `failure` is why it stopped, and then it takes no more turns."""

    name: str
    net: torch.nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[float]
    times: list[float]
    failure: str | None = None

    def step(self, batch) -> None:
        from train_gpt import SDPA_BACKENDS

        backend = self.name.partition("-")[2]
        with sdpa_kernel(SDPA_BACKENDS[backend]) if backend else contextlib.nullcontext():
            start = time.perf_counter()
            loss = self.net(*batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())  # waits for the device
            self.times.append(time.perf_counter() - start)


def runner(name: str, config, device: torch.device, compiled: bool) -> Runner:
    from gpt import GPT, make_attention

    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    net = GPT(config, make_attention(name.partition("-")[0]), dtype).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-4, betas=(0.9, 0.99), fused=True)
    return Runner(name, torch.compile(net) if compiled else net, optimizer, [], [])


def measure(names, config, steps: int, device: torch.device, compiled: bool) -> list[Runner]:
    """The runners after two steps to compile and warm up, whose times don't count, and `steps` more in turns."""
    text = torch.randint(256, (config.batch, config.seq + 1), generator=torch.Generator().manual_seed(1)).to(device)
    batch = text[:, :-1], text[:, 1:]
    runners = [runner(name, config, device, compiled) for name in names]
    for index in range(steps + 2):
        for which in turn_order(list(range(len(runners))), index):
            one = runners[which]
            if one.failure is None:
                try:
                    one.step(batch)
                except (RuntimeError, ValueError, NotImplementedError) as error:
                    one.failure = f"{type(error).__name__}: {error}"
    return runners


def row_of(one: Runner, tokens: int, flops: float, peak: float | None) -> dict:
    times = one.times[2:]
    if one.failure or not times:
        return {"attention": one.name, "failure": one.failure or "no step", "losses": one.losses}
    rate = tokens / statistics.median(times)
    return {
        "attention": one.name, "failure": None, "losses": one.losses, "ms": statistics.median(times) * 1e3, "ms_min": min(times) * 1e3,
        "ms_max": max(times) * 1e3, "tokens_per_second": rate, "mfu": mfu(flops, rate, peak) if peak else None,
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    p = argparse.ArgumentParser(prog="python -m benchmarks.gpt_step", description="Training steps of the example's GPT, by attention.")
    p.add_argument("--preset", default="124m", help="a preset of examples/train_gpt.py")
    p.add_argument("--attentions", default=",".join(ATTENTIONS), help="separated by commas")
    p.add_argument("--compile", action="store_true", help="torch.compile the models")
    p.add_argument("--steps", type=int, default=15)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--json", type=Path, default=None)
    args = p.parse_args(argv)
    if EXAMPLES not in sys.path:
        sys.path.insert(0, EXAMPLES)
    from train_gpt import PRESETS

    names = tuple(args.attentions.split(","))
    if args.preset not in PRESETS:
        p.error(f"--preset {args.preset}: expected one of {', '.join(PRESETS)}")
    if unknown := set(names) - set(ATTENTIONS):
        p.error(f"--attentions {','.join(sorted(unknown))}: expected some of {', '.join(ATTENTIONS)}")
    preset, device = PRESETS[args.preset], torch.device(args.device)
    config = SimpleNamespace(**preset, kv_heads=preset["heads"], mlp="swiglu")
    before = gpu_state(device)
    runners = measure(names, config, args.steps, device, args.compile)
    parameters = sum(p.numel() for p in runners[0].net.parameters())
    flops = train_flops_per_token(parameters, config.layers, config.width, config.seq, causal=True)
    gpu = detect(report.device_name(device))
    rows = [row_of(one, config.batch * config.seq, flops, gpu.peak("bfloat16") if gpu else None) for one in runners]
    document = {
        "suite": "gpt_step", "gpu": report.device_name(device), "date": report.today(), "versions": report.versions(device),
        "command": "python -m benchmarks.gpt_step " + shlex.join(argv), "compiled": args.compile, "parameters": parameters,
        "batch": config.batch, "seqlen": config.seq, "flops_per_token": flops, "gpu_start": before, "gpu_end": gpu_state(device),
        "rows": rows,
    }  # fmt: skip
    path = args.json or report.result_path(device, "gpt_step-compiled" if args.compile else "gpt_step")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    lines = [
        [r["attention"], r["failure"][:60], "", "", ""] if r["failure"] else
        [r["attention"], f"{r['losses'][0]:.4f} .. {r['losses'][-1]:.4f}", f"{r['ms']:.1f} ({r['ms_min']:.1f} .. {r['ms_max']:.1f})",
         f"{r['tokens_per_second']:,.0f}", "-" if r["mfu"] is None else f"{r['mfu']:.1%}"]
        for r in rows
    ]  # fmt: skip
    report.print_table(["attention", "losses", "ms a step (min .. max)", "tokens/s", "MFU"], lines, "Training steps of the example's GPT")
    return int(any(row["failure"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
