"""Times tiles of one pass of the portable kernels and prints rows to paste into `flashattn/dispatch/configs`.

    python -m benchmarks.tune --kernel dkdv --workloads fa3-d128-s4096,fa3-d128-s4096-causal --warm 16
    python -m benchmarks.tune --kernel dkdv --kind open --workloads fa3-d128-s4096

A table has rows for every call, and rows of a kind that serve some calls before those ("padded" head dims, "open" calls without a mask;
see `flashattn/dispatch/table.py`). Rows are printed with the key that --kind asks for, and with what the table has in their way: a row of a
kind that some of these workloads take instead, or dK and dV apart where both in one pass were timed.

Every candidate is compiled, checked against the fp64 oracle at the reduced size, checked against the others at the real size, and the
kernel alone (no delta pass, no autograd) is timed in one interleaved run over all workloads. Candidates are ranked by the geometric
mean of (fastest time / its time), so that no workload outweighs another.

Surprising fact: the best row for a causal mask is often not the best without, and a table has one row for both; so give both.
"""

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from unittest import mock

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.run import names, numbers, warm_in_parallel
from benchmarks.workloads import WORKLOADS, Workload
from flashattn.dispatch.configs import Config
from flashattn.dispatch.configs.portable import ROWS
from flashattn.dispatch.table import TABLES, padded_head_dim, portable_rows
from flashattn.roofline.calls import Inputs, attempt, cu_seqlens
from flashattn.roofline.gate import Gate, excess, flashattn_reference, relative_error
from flashattn.roofline.timing import Call, clock_for, interleave

# kernel -> (what it writes, products of length head_dim, products of length head_dim_v); delta has no products, so its bytes are counted
FAMILIES = {
    "forward": (("out",), 1, 1),
    "tangent": (("out", "tout"), 3, 3),
    "delta": (("delta",), 0, 0),
    "dkdv": (("dk", "dv"), 2, 2),
    "dk": (("dk",), 2, 1),
    "dv": (("dv",), 1, 1),
    "dq": (("dq",), 2, 1),
}
KINDS = ("padded", "unaligned", "open")
Key = tuple[str | int, ...]  # of a row: (pass, bytes of an element, largest padded head dim), and its kind if it has one


def kernel_flops(kernel: str, workload: Workload) -> int:
    """2 x kept pairs x the lengths of the products that this kernel alone computes (all backward kernels rebuild the scores)."""
    _, along_d, along_dv = FAMILIES[kernel]
    return 2 * workload.pairs() * (along_d * workload.head_dim + along_dv * workload.head_dim_v)


def speed(kernel: str, workload: Workload, ms: float) -> float:
    """TFLOP/s, or GB/s of delta, which reads out and dout and writes one float a row."""
    if kernel == "delta":
        entries, rows, _ = workload.rows
        return entries * rows * workload.heads_q * (2 * workload.head_dim_v * workload.torch_dtype.itemsize + 4) / ms / 1e6
    return kernel_flops(kernel, workload) / ms / 1e9


@dataclass
class Bench:
    """The buffers of one workload for one kernel; `launch(config)` enqueues it, `outputs` is what it writes.

    expected(dtype): what the outputs should be, of a kernel whose result is no result of attention and that the gate doesn't know.
    """

    launch: Callable[[Config], object]
    outputs: dict[str, Tensor]
    expected: Callable[[torch.dtype], dict[str, Tensor]] | None = None


def bench(kernel: str, workload: Workload, device: torch.device) -> Bench:
    from flashattn.launch import portable

    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    problem = replace(workload.problem(), device=device.type, capability=capability, interpret=device.type == "cpu")
    tensors = Inputs(workload, device).ordered("bshd")
    q, k, v, dout = (x.squeeze(0) for x in tensors) if workload.packed else tensors
    cu = (cu_seqlens(workload, device),) * 2 if workload.packed else (None, None)
    out = torch.empty_like(dout)
    rows = (workload.heads_q, q.shape[0]) if workload.packed else (workload.batch, workload.heads_q, workload.seqlen_q)
    lse, delta = (torch.empty(rows, dtype=torch.float32, device=device) for _ in range(2))

    def run(jitted, grid, args, options):
        return jitted[grid](*args, **options)

    if kernel == "forward":
        return Bench(lambda config: run(*portable.forward_launch(problem, config, q, k, v, out, lse, *cu)), {"out": out})
    if kernel == "tangent":  # along the inputs themselves
        tout, tlse = torch.empty_like(out), torch.empty_like(lse)

        def moved(dtype):
            inputs = tuple(x.to(dtype) for x in tensors[:3])
            return dict(zip(("out", "tout"), torch.func.jvp(partial(flashattn_reference, workload), inputs, inputs), strict=True))

        args = q, k, v, q, k, v, out, tout, lse, tlse, *cu
        return Bench(lambda config: run(*portable.tangent_launch(problem, config, *args)), {"out": out, "tout": tout}, moved)
    found = portable_rows(problem)
    run(*portable.forward_launch(problem, found["forward"], q, k, v, out, lse, *cu))
    if kernel == "delta":
        rowsum = lambda dtype: {"delta": (dout.to(dtype) * out.to(dtype)).sum(-1).transpose(-1, -2)}  # noqa: E731
        return Bench(lambda config: run(*portable.delta_launch(problem, config, out, dout, None, delta)), {"delta": delta}, rowsum)
    run(*portable.delta_launch(problem, found["delta"], out, dout, None, delta))
    if kernel == "dq":
        dq = torch.empty_like(q)
        return Bench(lambda config: run(*portable.dq_launch(problem, config, q, k, v, dout, lse, delta, dq, *cu)), {"dq": dq})
    made = {name: torch.empty_like(like) for name, like in (("dk", k), ("dv", v)) if name in FAMILIES[kernel][0]}
    dk, dv = made.get("dk"), made.get("dv")
    return Bench(lambda config: run(*portable.dkdv_launch(problem, config, q, k, v, dout, lse, delta, dk, dv, *cu)), made)


def poisoned_run(made: Bench, config: Config) -> object:
    """One launch into NaN-filled outputs, so that an element it does not write is found."""
    for tensor in made.outputs.values():
        tensor.fill_(math.nan)
    return made.launch(config)


def check(kernel: str, config: Config, kind: Workload, made: Bench, gate: Gate) -> str | None:
    """None, or why this tile is no candidate: it does not compile, does not fit, or is wrong."""
    _, reason = attempt(partial(poisoned_run, made, config))
    if reason:
        return reason
    lowprec = torch.float32 if kernel == "delta" else kind.torch_dtype  # of the result
    expected = made.expected or partial(gate.expected, kind, "fwd" if kernel == "forward" else "bwd")
    ref, low = expected(torch.float64), expected(lowprec)
    found = {name: x.view(ref[name].shape) for name, x in made.outputs.items()}  # packed ones without their batch entry
    failures, crashed = attempt(lambda: [excess(name, x, low[name], ref[name], torch.finfo(lowprec).eps) for name, x in found.items()])
    return crashed or next((failure for failure in failures if failure), None)


def resources(compiled: object) -> str:
    """Registers, spilled bytes and shared memory of what a launch returned; nothing in the interpreter, which compiles nothing."""
    if compiled is None:
        return ""
    registers, spilled = (getattr(compiled, name, "?") for name in ("n_regs", "n_spills"))
    return f"; {registers} registers, {spilled} spilled, {compiled.metadata.shared / 1024:.0f} KB shared"


def agreeing(made: Bench, configs: list[Config], failed: dict[Config, str], notes: dict[Config, str]) -> list[Config]:
    """The configs whose real-size result is close to the first one's. Only the summation order differs, so rounding is all there is."""
    first: dict[str, Tensor] = {}
    kept = []
    for config in configs:
        compiled, reason = attempt(partial(poisoned_run, made, config))
        if not reason:
            notes[config] = resources(compiled)
            first = first or {name: tensor.clone() for name, tensor in made.outputs.items()}
            for name, tensor in made.outputs.items():
                difference = relative_error(tensor, first[name])
                if not difference <= 2 * torch.finfo(tensor.dtype).eps:
                    reason = f"{name} differs from {tuple(configs[0])} by {difference:.1e} at the real size"
        if reason:
            failed[config] = reason
        else:
            kept.append(config)
    return kept


def candidates(args: argparse.Namespace) -> list[Config]:
    """`--rows 128,64,8,3;64,64,4,2`, or every combination of the four lists."""
    if args.rows:
        return [Config(*numbers(row)) for row in args.rows.split(";")]
    rows = itertools.product(args.block_m, args.block_n, args.num_warps, args.num_stages)
    if args.kernel == "delta":  # has no keys and no loop
        rows = dict.fromkeys((block_m, 1, num_warps, 1) for block_m, _, num_warps, _ in rows)
    return [Config(*row) for row in rows]


def rank(times: dict[str, dict[Config, float]]) -> list[tuple[float, Config]]:
    """(geometric mean over workloads of fastest / its time, config), best first; only configs timed on every workload."""
    everywhere = set.intersection(*(set(by_config) for by_config in times.values()))
    scores = []
    for config in everywhere:
        ratios = [min(by_config.values()) / by_config[config] for by_config in times.values()]
        scores.append((math.prod(ratios) ** (1 / len(ratios)), config))
    return sorted(scores, reverse=True)


def tune(
    kernel: str, configs: list[Config], workloads: list[Workload], device: torch.device, rounds: int, slice_ms: float
) -> tuple[dict[str, dict[Config, float]], dict[Config, str], dict[Config, str]]:
    """(milliseconds by workload and config, failures, resources)."""
    gate, clock = Gate(device), clock_for(device)
    failed: dict[Config, str] = {}
    notes: dict[Config, str] = {}
    for kind in dict.fromkeys(w.reduced() for w in workloads):
        made = bench(kernel, kind, device)
        failed |= {c: reason for c in configs if c not in failed and (reason := check(kernel, c, kind, made, gate))}
    times = {}
    for workload in workloads:
        made = bench(kernel, workload, device)
        kept = agreeing(made, [c for c in configs if c not in failed], failed, notes)
        calls = {str(tuple(c)): Call(partial(made.launch, c)) for c in kept}
        samples = interleave(calls, clock, rounds, slice_ms)
        times[workload.name] = {c: samples[str(tuple(c))].median for c in kept}
        print(f"{workload.name}: timed {len(kept)} of {len(configs)}", flush=True)
    return times, failed, notes


def row_key(kernel: str, workload: Workload, kind: str = "") -> Key:
    largest = max(64, padded_head_dim(max(workload.head_dim, workload.head_dim_v)))
    return (kernel, workload.torch_dtype.itemsize, largest, *([kind] if kind else []))


def pasted(key: Key) -> str:
    """The key as the tables spell it."""
    return f"({', '.join(json.dumps(part) for part in key)})"


def in_the_way(key: Key, workload: Workload, capability: tuple[int, int] | None) -> str | None:
    """None if the workload would take a row with this key, once the table has it; else what it would take instead."""
    kernel, *_ = key
    row = Config(0, 0, 0, 0)  # none that a table has
    with mock.patch.dict(TABLES, {capability: {**TABLES.get(capability, {}), key: row}}):
        try:
            taken = portable_rows(replace(workload.problem(), capability=capability))
        except KeyError as missing:
            return f"{workload.name} would run passes of which {missing} has no row"
    if taken.get(kernel) == row:
        return None
    if kernel not in taken:
        return f"{workload.name} runs {', '.join(taken)}"
    table = {**ROWS, **TABLES.get(capability, {})}
    others = [other for other, config in table.items() if (other[0], config) == (kernel, taken[kernel]) and other[1:3] == key[1:3]]
    return f"{workload.name} takes {others[-1]}"


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    p = argparse.ArgumentParser(prog="python -m benchmarks.tune", description="Times tiles of one portable kernel; prints config rows.")
    p.add_argument("--kernel", required=True, choices=FAMILIES)
    p.add_argument("--kind", default="", choices=("", *KINDS), help="of calls that the row is for (default: all)")
    p.add_argument("--workloads", type=names, required=True, help="names from benchmarks/workloads.py, of one dtype and head dim")
    p.add_argument("--rows", default="", help="candidates block_m,block_n,num_warps,num_stages separated by ;")
    p.add_argument("--block-m", type=numbers, default=(64, 128))
    p.add_argument("--block-n", type=numbers, default=(32, 64, 128))
    p.add_argument("--num-warps", type=numbers, default=(4, 8))
    p.add_argument("--num-stages", type=numbers, default=(2, 3))
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--slice-ms", type=float, default=20.0)
    p.add_argument("--top", type=int, default=8, help="rows to print (default 8)")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--warm", type=int, default=0, metavar="N", help="compile in N processes first")
    p.add_argument("--warm-shard", default=None, help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    if unknown := [name for name in args.workloads if name not in WORKLOADS]:
        p.error(f"unknown workload {', '.join(unknown)}; known are {', '.join(WORKLOADS)}")
    workloads, device, configs = [WORKLOADS[name] for name in args.workloads], torch.device(args.device), candidates(args)
    keys = {row_key(args.kernel, w, args.kind) for w in workloads}
    if len(keys) > 1:
        p.error(f"these workloads belong to different rows: {sorted(keys)}")
    key = keys.pop()
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if strangers := [w.name for w in workloads if in_the_way(("delta", *key[1:]), w, capability)] if args.kind else []:
        p.error(f"these workloads take no {args.kind!r} rows: {', '.join(strangers)}")  # delta always runs, so only the kind can be why
    if args.warm_shard:
        shard, shards = (int(part) for part in args.warm_shard.split("/"))
        for workload in dict.fromkeys([*(w.reduced() for w in workloads), *workloads]):
            made = bench(args.kernel, workload, device)
            for config in configs[shard::shards]:
                attempt(partial(made.launch, config))
        return 0
    if args.warm:
        warm_in_parallel("benchmarks.tune", argv, args.warm)
    times, failed, notes = tune(args.kernel, configs, workloads, device, args.rounds, args.slice_ms)
    for config, reason in failed.items():
        print(f"not {tuple(config)}: {reason[:160]}")
    ranked = rank(times)
    print(f"{'GB/s' if args.kernel == 'delta' else 'TFLOP/s'} on {', '.join(times)}; {report.device_name(device)}, {report.today()[:10]}")
    for reason in filter(None, (in_the_way(key, w, capability) for w in workloads)):
        print(f"    # not served by these rows as the table is: {reason}")
    for score, config in ranked[: args.top]:
        speeds = " / ".join(f"{speed(args.kernel, w, times[w.name][config]):.4g}" for w in workloads)
        print(f"    {pasted(key)}: Config{tuple(config)},  # {speeds}; {score:.3f} of the best{notes[config]}")
    return 0 if ranked else 1


if __name__ == "__main__":
    sys.exit(main())
