"""Checks the Hopper forward, then times variants of its rows against SDPA in one interleaved run.

    python -m benchmarks.hopper                                      # checks; the process ends itself if a kernel hangs
    python -m benchmarks.hopper --time --dims 64,128,256             # and times the rows of the table
    python -m benchmarks.hopper --time --dims 128 --try pinned=0 --try tickets=1,heads=4

`--try` changes fields of the row (see dispatch/configs/hopper.py); the kernel alone is launched, with its tensor maps made before. `--warm`
only compiles, to fill the cache from several processes.

The surprising fact: a wrong barrier shows as a hang, not as a wrong number, so each check has seconds to live and says its name first.
"""

import argparse
import faulthandler
import sys
from dataclasses import replace

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.workloads import Workload
from flashattn.dispatch.table import hopper_rows
from flashattn.roofline.timing import Call, CudaClock, interleave

TOKENS, WIDTH, SECONDS = 16384, 2048, 20
DIMS = [(64, 64), (128, 128), (256, 256), (192, 128), (96, 96), (72, 40), (128, 64), (64, 256)]
MASKS = {"open": {}, "causal": {"causal": True}, "window": {"window": (100, 5)}, "top-left": {"causal": "top-left"}}
LENGTHS = [(64, 128), (1, 1), (301, 703), (703, 301), (2048, 2048)]
PACKED = ([300, 0, 7, 513, 1, 129], [900, 3, 0, 600, 1, 64])


def expected(q, k, v, **mask):
    """(out, lse) in float32, one batch entry."""
    from flashattn.reference import attention_reference

    return attention_reference(q.float(), k.float(), v.float(), return_lse=True, **mask)


def draw(batch, rows, heads, dim, dtype):
    return torch.randn(batch, rows, heads, dim, device="cuda", dtype=torch.float32).to(dtype)


def difference(found, wanted) -> float:
    """Relative, over finite elements; infinite where one is infinite or NaN and the other not."""
    finite = wanted.isfinite()
    if not torch.equal(found.isfinite(), finite):
        return float("inf")
    found, wanted = found.float()[finite], wanted.float()[finite]
    return (torch.linalg.vector_norm(found - wanted) / torch.linalg.vector_norm(wanted).clamp_min(1e-9)).item()


def watched(name: str, run):
    """What run() returns, or None if it raises; its name is told first, and the process ends if it hangs."""
    print(f"{name:72}", end=" ", flush=True)
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    try:
        found = run()
        torch.cuda.synchronize()
        return found
    except Exception as error:
        print(f"FAILED {type(error).__name__}: {str(error)[:300]}", flush=True)
        if "CUDA" in str(error):
            raise
        return None
    finally:
        faulthandler.cancel_dump_traceback_later()


def check(name: str, run, wanted) -> bool:
    found = watched(name, run)
    if found is None:
        return False
    errors = [difference(x, y) for x, y in zip(found, wanted, strict=True)]
    good = errors[0] < 1e-2 and errors[1] < 1e-3
    print(f"out {errors[0]:.1e} lse {errors[1]:.1e} {'' if good else 'WRONG'}", flush=True)
    return good


def dense_checks(dims) -> list[bool]:
    from flashattn import attention

    found = []
    for rows_q, rows_k in LENGTHS:
        for head_dim, head_dim_v in dims:
            for mask_name, mask in MASKS.items():
                if mask_name != "causal" and (head_dim, head_dim_v) not in DIMS[:3]:
                    continue
                dtype = torch.float16 if mask_name == "window" else torch.bfloat16
                heads, heads_kv = (8, 2) if mask_name == "causal" else (4, 4)
                q = draw(3, rows_q, heads, head_dim, dtype)
                k, v = draw(3, rows_k, heads_kv, head_dim, dtype), draw(3, rows_k, heads_kv, head_dim_v, dtype)
                wanted = expected(q, k, v, **mask)
                name = f"{rows_q} x {rows_k} d {head_dim}/{head_dim_v} {mask_name}"
                run = lambda q=q, k=k, v=v, mask=mask: attention(q, k, v, impl="hopper", return_lse=True, **mask)  # noqa: E731
                found.append(check(name, run, wanted))
    return found


def packed_checks(dims) -> list[bool]:
    """Sequences with neighbours, and NaN rows after the last."""
    from flashattn import attention_varlen
    from flashattn.reference import attention_varlen_reference

    found = []
    for head_dim, head_dim_v in dims:
        for mask_name, mask in MASKS.items():
            cu = [torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32) for lengths in PACKED]
            tensors = [draw(1, sum(lengths) + 70, 4, dim, torch.bfloat16)[0] for lengths, dim in zip(
                (PACKED[0], PACKED[1], PACKED[1]), (head_dim, head_dim, head_dim_v), strict=True)]  # fmt: skip
            for x, lengths in zip(tensors, (PACKED[0], PACKED[1], PACKED[1]), strict=True):
                x[sum(lengths) :] = float("nan")
            wanted = attention_varlen_reference(*(x.float() for x in tensors), *cu, return_lse=True, **mask)
            run = lambda tensors=tensors, cu=cu, mask=mask: attention_varlen(*tensors, *cu, impl="hopper", return_lse=True, **mask)  # noqa: E731
            found.append(check(f"packed d {head_dim}/{head_dim_v} {mask_name}", run, wanted))
    return found


def repeated(runs: int = 40) -> bool:
    """Many tiles, drawn in another order each time: the bits must not care."""
    from flashattn import attention

    q, k, v = (draw(2, 2048, 16, 128, torch.bfloat16) for _ in range(3))
    first = attention(q, k, v, causal=True, impl="hopper")
    same = sum(torch.equal(first, attention(q, k, v, causal=True, impl="hopper")) for _ in range(runs))
    print(f"{same} of {runs} launches bitwise equal", flush=True)
    return same == runs


# ----------------------------------------------------------------------------------------------------------------------- timing


def inputs_of(workload: Workload):
    shapes = [(workload.batch, rows, heads, workload.head_dim) for rows, heads in (
        (workload.seqlen_q, workload.heads_q), (workload.seqlen_k, workload.heads_kv), (workload.seqlen_k, workload.heads_kv))]  # fmt: skip
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]


def launch_of(workload: Workload, changes: dict[str, int], q, k, v):
    """(a call without arguments that launches the kernel alone, where it writes)."""
    from flashattn.launch import hopper

    problem = replace(workload.problem(), capability=(9, 0), aligned=True)
    row = hopper_rows(problem)["forward"]
    row = row._replace(**{name: type(getattr(row, name))(value) for name, value in changes.items()})
    out = torch.full_like(q, float("nan"))
    lse = torch.empty(workload.batch, workload.heads_q, workload.seqlen_q, dtype=torch.float32, device="cuda")
    counter = torch.zeros(2, dtype=torch.int32, device="cuda")
    kernel, grid, args, options = hopper.forward_launch(problem, row, q, k, v, out, lse, None, None, counter)
    return lambda: kernel[grid](*args, **options), out


def sdpa_of(workload: Workload, *tensors) -> Call:
    q, k, v = (x.transpose(1, 2) for x in tensors)
    grouped = workload.heads_q != workload.heads_kv
    run = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=workload.causal, enable_gqa=grouped)  # noqa: E731
    return Call(lambda: run().transpose(1, 2), lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION))


def portable_of(workload: Workload, *tensors) -> Call:
    """This library's portable kernel, for what SDPA has no mask for."""
    from flashattn import attention

    return Call(lambda: attention(*tensors, causal=workload.causal, window=workload.window, impl="portable"))


def time_rows(dims, lengths, variants, rounds: int, warm: bool, masks: str, window: int) -> None:
    """Each variant's result is compared with the peer's, cuDNN's or with a window the portable kernel's, before it is timed."""
    for dim in dims:
        for causal in {"both": (False, True), "causal": (True,), "open": (False,)}[masks]:
            table = {}
            for length in lengths:
                workload = Workload("", TOKENS // length, length, length, WIDTH // dim, WIDTH // dim, dim, dim, causal)
                workload = replace(workload, window=(window - 1, 0) if window else None)
                tensors = inputs_of(workload)
                calls = {} if warm else {"peer": (portable_of if window else sdpa_of)(workload, *tensors)}
                if not warm:
                    with calls["peer"].entered():
                        wanted = calls["peer"].run()
                for name, changes in variants.items():
                    run, out = launch_of(workload, changes, *tensors)
                    faulthandler.dump_traceback_later(SECONDS, exit=True)
                    run()
                    torch.cuda.synchronize()
                    faulthandler.cancel_dump_traceback_later()
                    if warm:
                        continue
                    error = difference(out, wanted)
                    if error < 1e-2:
                        calls[name] = Call(run)
                    else:
                        print(f"d{dim} {length} causal={causal} {name}: WRONG {error:.1e}", flush=True)
                        table.setdefault(name, []).append(float("nan"))
                torch.cuda.synchronize()
                if not warm:
                    for name, sample in interleave(calls, CudaClock(), rounds).items():
                        table.setdefault(name, []).append(workload.flops("fwd") / sample.median / 1e9)
            for name, speeds in table.items():
                ratios = " / ".join(f"{speed / peer:.2f}" for speed, peer in zip(speeds, table["peer"], strict=True))
                figures = " / ".join(f"{speed:.0f}" for speed in speeds)
                print(f"d{dim} {'causal' if causal else 'open':6} {name:32} {figures:20} TFLOP/s, x peer {ratios}", flush=True)


def fields(text: str) -> dict[str, int]:
    return {name: int(value) for name, value in (pair.split("=") for pair in text.split(","))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--unchecked", action="store_true")
    parser.add_argument("--dims", default="64,128,256")
    parser.add_argument("--lengths", default="1024,4096,16384")
    parser.add_argument("--masks", default="both", choices=("both", "causal", "open"))
    parser.add_argument("--window", type=int, default=0, help="of so many keys, with --masks causal")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--try", dest="tries", action="append", default=[], metavar="field=number,...")
    args = parser.parse_args()
    dims, lengths = ([int(number) for number in text.split(",")] for text in (args.dims, args.lengths))
    torch.manual_seed(0)
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    if not (args.unchecked or args.warm):
        wanted = [pair for pair in DIMS if max(pair) in dims or not args.time]
        good = [*dense_checks(wanted), *packed_checks(wanted), repeated()]
        print(f"{sum(good)} of {len(good)} checks passed", flush=True)
        if not all(good):
            return 1
    if args.time or args.warm:
        time_rows(dims, lengths, {"row": {}} | {text: fields(text) for text in args.tries}, args.rounds, args.warm, args.masks, args.window)
    return 0


if __name__ == "__main__":
    sys.exit(main())
