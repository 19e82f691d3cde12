"""Checks the Hopper backward, then times variants of its rows against cuDNN's (through SDPA) in one interleaved run.

    python -m benchmarks.hopper_backward                                  # checks; the process ends itself if a kernel hangs
    python -m benchmarks.hopper_backward --dims 64 --only open            # those with this in their name
    python -m benchmarks.hopper_backward --time --dims 64,128             # and times the rows of the table
    python -m benchmarks.hopper_backward --time --dims 128 --try init=1 --try writers=1,mask=1

What is timed is the whole backward, with the passes before and after, its tensor maps made before. `--parts` times its kernel alone, too.
Gradients are compared with the oracle's in float32; for timing, with cuDNN's.

The surprising fact: a wrong barrier shows as a hang, not as a wrong number, so each check has seconds to live and says its name first.
"""

import argparse
import faulthandler
import sys
from dataclasses import replace
from itertools import product

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.hopper import SECONDS, TOKENS, WIDTH, draw, fields, inputs_of, watched
from benchmarks.workloads import Workload
from flashattn.dispatch.table import hopper_backward_row, hopper_padded
from flashattn.roofline.timing import Call, CudaClock, interleave

DIMS = [(64, 64), (128, 128), (96, 96), (72, 40), (128, 64), (64, 128), (256, 256), (192, 128), (136, 72), (64, 256)]
EXACT = [(64, 64), (128, 128), (256, 256)]
MASKS = {
    "open": {}, "causal": {"causal": True}, "window": {"window": (100, 5)}, "left": {"window": (70, None)},
    "top-left": {"causal": "top-left"},
}  # fmt: skip
LENGTHS = [(128, 128), (64, 128), (1, 1), (512, 512), (301, 703), (703, 301), (1024, 2048)]
PACKED = ([300, 0, 7, 513, 1, 129], [900, 3, 0, 600, 1, 64])
NEEDS = ["qkv", "q", "k", "v", "qk", "qv", "kv"]
WORST = 1.5e-2  # of the norm, bf16; fp16 is better


def error_of(found, wanted) -> float:
    """Relative, but what should be next to nothing is compared with what it is made of; infinite where only one is finite."""
    if not torch.equal(found.isfinite(), wanted.isfinite()):
        return float("inf")
    least = 1e-3 * wanted.numel() ** 0.5
    return (torch.linalg.vector_norm(found.float() - wanted.float()) / torch.linalg.vector_norm(wanted.float()).clamp_min(least)).item()


def check(name: str, run, wanted) -> bool:
    """run() and wanted are (dq, dk, dv), None where it isn't wanted."""
    found = watched(name, run)
    if found is None:
        return False
    errors = {name: error_of(x, y) for name, x, y in zip("qkv", found, wanted, strict=True) if x is not None}
    good = all(error < WORST for error in errors.values())
    print(" ".join(f"d{name} {error:.1e}" for name, error in errors.items()), "" if good else "WRONG", flush=True)
    return good


def gradients(needs, attend, q, k, v, dout, dlse):
    """(dq, dk, dv) of `attend`, a function of q, k and v that gives out and lse."""
    leaves = [x.detach().requires_grad_(name in needs) for name, x in zip("qkv", (q, k, v), strict=True)]
    out, lse = attend(*leaves)
    outputs, grads = ([out, lse], [dout, dlse]) if dlse is not None else ([out], [dout])
    found = torch.autograd.grad(outputs, [x for x in leaves if x.requires_grad], grads)
    found = iter(found)
    return tuple(next(found) if name in needs else None for name in "qkv")


def compared(name, q, k, v, dout, dlse, needs, ours, theirs) -> bool:
    wanted = gradients("qkv", theirs, *(x.float() for x in (q, k, v, dout)), dlse)
    return check(name, lambda: gradients(needs, ours, q, k, v, dout, dlse), wanted)


def dense_check(rows_q, rows_k, head_dim, head_dim_v, mask_name, needs="qkv", deterministic=False, dlse=False, scale=None) -> bool:
    from flashattn import attention
    from flashattn.reference import attention_reference

    dtype = torch.float16 if mask_name == "window" else torch.bfloat16
    heads, heads_kv = (8, 2) if mask_name in ("causal", "left") else (4, 4)
    q, dout = (draw(3, rows_q, heads, dim, dtype) for dim in (head_dim, head_dim_v))
    k, v = (draw(3, rows_k, heads_kv, dim, dtype) for dim in (head_dim, head_dim_v))
    options = {"return_lse": True, "softmax_scale": scale, **MASKS[mask_name]}
    name = f"{rows_q} x {rows_k} d {head_dim}/{head_dim_v} {mask_name} {needs}"
    name += " deterministic" * deterministic + " dlse" * dlse + (f" scale {scale}" if scale is not None else "")
    return compared(
        name, q, k, v, dout, torch.randn(3, heads, rows_q, device="cuda") if dlse else None, needs,
        lambda *x: attention(*x, impl="hopper", deterministic=deterministic, **options),
        lambda *x: attention_reference(*x, **options),
    )  # fmt: skip


def packed_check(head_dim, head_dim_v, mask_name, needs="qkv", deterministic=False) -> bool:
    """Sequences with neighbours, and NaN rows after the last."""
    from flashattn import attention_varlen
    from flashattn.reference import attention_varlen_reference

    cu = [torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32) for lengths in PACKED]
    heads, heads_kv = (8, 2) if mask_name == "causal" else (4, 4)
    rows_q, rows_k = (sum(lengths) for lengths in PACKED)
    q, dout = (draw(1, rows_q + 70, heads, dim, torch.bfloat16)[0] for dim in (head_dim, head_dim_v))
    k, v = (draw(1, rows_k + 70, heads_kv, dim, torch.bfloat16)[0] for dim in (head_dim, head_dim_v))
    for x, rows in ((q, rows_q), (k, rows_k), (v, rows_k)):
        x[rows:] = float("nan")
    options = {"return_lse": True, **MASKS[mask_name]}
    return compared(
        f"packed d {head_dim}/{head_dim_v} {mask_name} {needs}{' deterministic' * deterministic}", q, k, v, dout, None, needs,
        lambda *x: attention_varlen(*x, *cu, impl="hopper", deterministic=deterministic, **options),
        lambda *x: attention_varlen_reference(*x, *cu, **options),
    )  # fmt: skip


def repeated(head_dim: int, mask_name: str, deterministic: bool, runs: int = 30) -> bool:
    """dK and dV are the same bits in every launch; dQ in a deterministic call."""
    from flashattn import attention

    tensors = [draw(2, 2048, 2048 // head_dim, head_dim, torch.bfloat16) for _ in range(4)]
    run = lambda: gradients(  # noqa: E731
        "qkv", lambda *x: attention(*x, impl="hopper", return_lse=True, deterministic=deterministic, **MASKS[mask_name]), *tensors, None
    )
    name = f"{runs} launches d {head_dim} {mask_name}{' deterministic' * deterministic}"
    print(f"{name:72}", end=" ", flush=True)
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    first = run()
    same = [0, 0, 0]
    for _ in range(runs):
        same = [count + torch.equal(x, y) for count, x, y in zip(same, first, run(), strict=True)]
    torch.cuda.synchronize()
    faulthandler.cancel_dump_traceback_later()
    good = same[1:] == [runs] * 2 and (same[0] == runs or not deterministic)
    print(f"bitwise equal: dq {same[0]} dk {same[1]} dv {same[2]}", "" if good else "WRONG", flush=True)
    return good


def checks(dims, only: str) -> list:
    """(name, function) of each, the simplest first."""
    found = []

    def add(name, function, *args, **options):
        if only in name:
            found.append((function, args, options))

    for pair in [pair for pair in DIMS if (64 if max(pair) <= 64 else 128 if max(pair) <= 128 else 256) in dims]:
        for lengths, mask in product(LENGTHS, MASKS):
            if mask in ("open", "causal") or (pair in EXACT and lengths in LENGTHS[3:6]):
                add(f"dense {mask}", dense_check, *lengths, *pair, mask)
        for mask in MASKS:
            add(f"packed {mask}", packed_check, *pair, mask)
    for pair in [pair for pair in EXACT if max(pair) in dims]:
        for needs in NEEDS[1:]:
            add(f"needs {needs}", dense_check, 301, 703, *pair, "causal", needs)
        for mask in MASKS:
            for lengths in ((1024, 1024), (703, 301), (301, 703), (64, 128)):
                add(f"deterministic {mask}", dense_check, *lengths, *pair, mask, deterministic=True)
            add(f"deterministic packed {mask}", packed_check, *pair, mask, deterministic=True)
        for scale in (-0.1, 0.0):
            add("scale", dense_check, 301, 301, *pair, "causal", scale=scale)
        add("dlse", dense_check, 301, 703, *pair, "causal", dlse=True)
        for mask, deterministic in product(("open", "causal"), (False, True)):
            add(f"repeated {mask}{' deterministic' * deterministic}", repeated, max(pair), mask, deterministic)
    return found


# ----------------------------------------------------------------------------------------------------------------------- timing


def backward_of(workload: Workload, changes: dict[str, int], q, k, v, out, lse, dout, deterministic=False):
    """({"whole": run, "kernel": run}, (dq, dk, dv)): launches with what they write to allocated."""
    from flashattn.launch import hopper_backward as launch

    problem = replace(workload.problem(), capability=(9, 0), aligned=True, deterministic=deterministic)
    row = hopper_backward_row(problem)
    row = row._replace(**{name: type(getattr(row, name))(value) for name, value in changes.items()})
    blocks, lanes = launch.blocks_of(problem, row.block_m)
    numbers = torch.empty(blocks * lanes, 2 * row.block_m, device="cuda")
    sums = torch.empty(blocks * lanes * row.block_m, hopper_padded(problem, "backward")[0], device="cuda")
    turns = torch.empty(blocks * lanes, 2, dtype=torch.int32, device="cuda") if deterministic else None
    dq, dk, dv = (torch.full_like(x, float("nan")) for x in (q, k, v))
    passes = [
        launch.before_launch(problem, row, row.init, lse, out, dout, None, numbers, sums, turns, None),
        launch.backward_launch(problem, row, q, k, v, dout, numbers, sums, dk, dv, turns, None, None),
        launch.after_launch(problem, row, sums, dq, None),
    ]

    def run(some):
        for kernel, grid, args, options in some:
            kernel[grid](*args, **options)

    return {"whole": lambda: run(passes), "kernel": lambda: run(passes[1:2])}, (dq, dk, dv)


def cudnn_of(workload: Workload, q, k, v, dout):
    """(out, lse, (dq, dk, dv), call) of SDPA."""
    leaves = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
    entered = lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION)  # noqa: E731
    with entered():
        out = torch.nn.functional.scaled_dot_product_attention(
            *leaves, is_causal=workload.causal, enable_gqa=workload.heads_q != workload.heads_kv
        )
    run = lambda: torch.autograd.grad(out, leaves, dout.transpose(1, 2), retain_graph=True)  # noqa: E731
    return tuple(x.transpose(1, 2) for x in run()), Call(run, entered)


def portable_of(workload: Workload, q, k, v, dout):
    """As cudnn_of, of this library's portable kernels: for head dims that SDPA's cuDNN doesn't take, and windows."""
    from flashattn import attention

    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, causal=workload.causal, window=workload.window, impl="portable")
    run = lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)  # noqa: E731
    return run(), Call(run)


def timed(workload: Workload, variants, rounds: int, parts: bool, deterministic: bool) -> dict[str, float]:
    """TFLOP/s of each variant that gives the peer's gradients."""
    from flashattn import attention

    q, k, v = inputs_of(workload)
    v = v[..., : workload.head_dim_v].contiguous()
    dout = torch.randn_like(q[..., : workload.head_dim_v])
    known = workload.head_dim == workload.head_dim_v and workload.window is None
    wanted, peer = (cudnn_of if known else portable_of)(workload, q, k, v, dout)
    out, lse = attention(q, k, v, causal=workload.causal, window=workload.window, return_lse=True)
    calls = {"peer": peer}
    for name, changes in variants.items():
        runs, found = backward_of(workload, changes, q, k, v, out, lse, dout, deterministic)
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        runs["whole"]()
        torch.cuda.synchronize()
        faulthandler.cancel_dump_traceback_later()
        errors = [error_of(x, y) for x, y in zip(found, wanted, strict=True)]
        if max(errors) < WORST:
            calls[name] = Call(runs["whole"])
            if parts:
                calls[f"{name} (kernel)"] = Call(runs["kernel"])
        else:
            print(f"d{workload.head_dim} {workload.seqlen_q} causal={workload.causal} {name}: WRONG {errors}", flush=True)
    samples = interleave(calls, CudaClock(), rounds)
    return {name: workload.flops("bwd") / sample.median / 1e9 for name, sample in samples.items()}


def time_rows(dims, lengths, variants, args) -> None:
    for dim in dims:
        for causal in {"both": (False, True), "causal": (True,), "open": (False,)}[args.masks]:
            found = []
            for length in lengths:
                heads = WIDTH // dim
                workload = Workload("", TOKENS // length, length, length, heads, heads // args.group, dim, args.dim_v or dim, causal)
                workload = replace(workload, window=(args.window - 1, 0) if args.window else None)
                found.append(timed(workload, variants, args.rounds, args.parts, args.deterministic))
            names = dict.fromkeys(name for speeds in found for name in speeds)
            table = {name: [speeds.get(name, float("nan")) for speeds in found] for name in names}
            for name, speeds in table.items():
                ratios = " / ".join(f"{speed / peer:.2f}" for speed, peer in zip(speeds, table["peer"], strict=True))
                figures = " / ".join(f"{speed:.0f}" for speed in speeds)
                print(f"d{dim} {'causal' if causal else 'open':6} {name:36} {figures:20} TFLOP/s, x peer {ratios}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--unchecked", action="store_true")
    parser.add_argument("--deterministic", action="store_true", help="time deterministic calls")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--dims", default="64,128")
    parser.add_argument("--lengths", default="1024,4096,16384")
    parser.add_argument("--dim-v", type=int, default=0, help="where it is another; the peer is then the portable backward")
    parser.add_argument("--group", type=int, default=1, help="query heads a key/value head")
    parser.add_argument("--masks", default="both", choices=("both", "causal", "open"))
    parser.add_argument("--window", type=int, default=0, help="of so many keys, with --masks causal; the peer is then portable too")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--try", dest="tries", action="append", default=[], metavar="field=number,...")
    args = parser.parse_args()
    dims, lengths = ([int(number) for number in text.split(",")] for text in (args.dims, args.lengths))
    torch.manual_seed(0)
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    if not args.unchecked:
        good = [function(*found, **options) for function, found, options in checks(dims, args.only)]
        print(f"{sum(good)} of {len(good)} checks passed", flush=True)
        if not all(good):
            return 1
    if args.time:
        time_rows(dims, lengths, {"row": {}} | {text: fields(text) for text in args.tries}, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
