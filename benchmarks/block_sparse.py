"""What a kept block costs: attention with a block mask against attention without one, same kernels: `python -m benchmarks.block_sparse`.

Masks of whole blocks, as many in each row, at random places: `density` of all. The rate is that of kept pairs, 4 D FLOPs forward and 10 D
backward, and `per block` is its share of the rate without a mask, which has all blocks: 1 is a cost proportional to what is kept. Beside
them a causal mask as lists, with tiles of bits on the diagonal, against the same as an option. Interleaved, median of rounds.

Surprising fact: with 10 % of the blocks at 16k a row walks 13 of them, so starting and ending a program shows.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path

import torch

from benchmarks import report
from flashattn import BlockMask, attention
from flashattn.reference import attention_reference
from flashattn.roofline.timing import Call, clock_for, interleave

GATED = 1024  # rows that are compared with the reference, of a mask made the same way


def random_blocks(seqlen: int, density: float, device: torch.device, seed: int = 0) -> BlockMask:
    """max(1, density of all) blocks of each block of queries, at random places."""
    blocks = -(-seqlen // 128)
    places = torch.rand(blocks, blocks, generator=torch.Generator().manual_seed(seed)).argsort(1)
    return BlockMask.from_layout((places < max(1, round(density * blocks))).to(device), seqlen_q=seqlen, seqlen_k=seqlen)


def masks_of(seqlen: int, densities: list[float], device: torch.device) -> dict[str, dict]:
    """Options of attention by name, with None for a mask that is none."""
    found = {"dense": {}, "causal": {"causal": True}}
    found["causal, as blocks"] = {"block_mask": BlockMask.from_window(seqlen, seqlen, causal=True, device=device)}
    return found | {f"{density:.0%} of the blocks": {"block_mask": random_blocks(seqlen, density, device)} for density in densities}


def inputs(seqlen: int, heads: int, dim: int, device: torch.device) -> tuple[list[torch.Tensor], torch.Tensor]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v, dout = (torch.randn(1, seqlen, heads, dim, device=device, dtype=dtype) for _ in range(4))
    return [x.requires_grad_() for x in (q, k, v)], dout


def wrong(dim: int, densities: list[float], impl: str, device: torch.device) -> list[str]:
    """Names of masks with which out or a gradient is further off than twice what the reference is in the same dtype."""
    leaves, dout = inputs(GATED, 2, dim, device)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    found = []
    for name, options in masks_of(GATED, densities, device).items():
        runs = []
        for attend, tensors in ((attention_reference, exact), (attention_reference, leaves), (attention, leaves)):
            out = attend(*tensors, **options, **({"impl": impl} if attend is attention else {}))
            runs.append([out, *torch.autograd.grad(out, tensors, dout.to(out.dtype))])
        for truth, peer, ours in zip(*runs, strict=True):
            allowed = 2 * ((peer - truth).abs().max() + torch.finfo(ours.dtype).eps * truth.abs().max())
            if not (ours - truth).abs().max() <= allowed:
                found.append(name)
                break
    return found


def measure(seqlen: int, heads: int, dim: int, densities: list[float], impl: str, rounds: int, device: torch.device) -> list[dict]:
    leaves, dout = inputs(seqlen, heads, dim, device)
    forward, backward, pairs = {}, {}, {}
    for name, options in masks_of(seqlen, densities, device).items():
        mask = options.get("block_mask")
        window = seqlen * (seqlen + 1) // 2 if options.get("causal") else seqlen**2
        pairs[name] = heads * (window if mask is None else mask.kept_pairs())

        def attend(options=options):
            return attention(*leaves, **options, impl=impl)

        out = attend()
        forward[name] = Call(attend, torch.no_grad)
        backward[name] = Call(lambda out=out: torch.autograd.grad(out, leaves, dout, retain_graph=True))
    rows, clock = [], clock_for(device)
    for direction, calls, products in (("forward", forward, 4), ("backward", backward, 10)):
        samples = interleave(calls, clock, rounds)
        rates = {name: products * dim * pairs[name] / sample.median / 1e9 for name, sample in samples.items()}
        for name, sample in samples.items():
            against = "causal" if name.startswith("causal") else "dense"
            rows.append({
                "dim": dim, "direction": direction, "mask": name, "ms": sample.median, "spread": sample.spread, "tflops": rates[name],
                "per_block": rates[name] / rates[against],
            })  # fmt: skip
    return rows


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    p = argparse.ArgumentParser(prog="python -m benchmarks.block_sparse", description="The cost of a kept block.")
    p.add_argument("--seqlen", type=int, default=16384)
    p.add_argument("--heads", type=int, default=16)
    p.add_argument("--dims", default="64,128", help="head dims, separated by commas")
    p.add_argument("--densities", default="0.25,0.1", help="shares of blocks that are kept, separated by commas")
    p.add_argument("--impl", default="portable")
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--json", type=Path, default=None)
    args = p.parse_args(argv)
    device, densities = torch.device(args.device), [float(x) for x in args.densities.split(",")]
    rows = []
    for dim in map(int, args.dims.split(",")):
        if failed := wrong(dim, densities, args.impl, device):
            print(f"head_dim {dim}: wrong results with {', '.join(failed)}, so nothing is timed", file=sys.stderr)
            return 1
        rows += measure(args.seqlen, args.heads, dim, densities, args.impl, args.rounds, device)
    document = {
        "suite": "block_sparse", "gpu": report.device_name(device), "date": report.today(), "versions": report.versions(device),
        "command": "python -m benchmarks.block_sparse " + shlex.join(argv), "rows": rows,
    }  # fmt: skip
    path = args.json or report.result_path(device, "block_sparse")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    numbers = [[f"{row['ms']:.3f}", f"{row['tflops']:.1f}", f"{row['per_block']:.2f}"] for row in rows]
    lines = [[str(row["dim"]), row["direction"], row["mask"], *shown] for row, shown in zip(rows, numbers, strict=True)]
    report.print_table(["D", "pass", "mask", "ms", "TFLOP/s of kept pairs", "per block"], lines, f"{args.seqlen} tokens, {args.impl}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
