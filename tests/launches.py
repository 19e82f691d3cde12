"""What the library's launcher would launch, from tensors without memory: for tests that compile kernels, or ask what would be compiled.

The surprising fact: a tensor on "meta" has the address 0, a multiple of everything, so only a head dim can make its rows unaligned.
"""

import torch

from flashattn.dispatch.table import hopper_backward_row, hopper_padded, hopper_rows, portable_rows
from flashattn.problem import Problem


def extras_of(problem: Problem):
    """(slopes, sinks, bias), None where the problem has none; the bias contiguous, with size 1 along what shares it, a mask as bytes."""
    found = [torch.empty(problem.heads_q, device="meta") if wanted else None for wanted in (problem.alibi, problem.sinks)]
    if not problem.bias:
        return [*found, None]
    sizes = zip("bhqk", (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k), strict=True)
    dtype = torch.uint8 if problem.bias == "bool" else getattr(torch, problem.bias)
    return [*found, torch.empty([size if dim in problem.bias_dims else 1 for dim, size in sizes], dtype=dtype, device="meta")]


def rng_of(problem: Problem):
    return torch.empty(2, dtype=torch.int64, device="meta") if problem.dropout else None


def aux_of(problem: Problem):
    """What the mods of a problem read, as kernels load it."""
    kinds = [torch.uint8 if dtype == "bool" else getattr(torch, dtype) for dtype, _ in problem.mod_aux]
    return [torch.empty(shape, dtype=kind, device="meta") for kind, (_, shape) in zip(kinds, problem.mod_aux, strict=True)]


def blocks_of(problem: Problem):
    return torch.empty(1 << 20, dtype=torch.int32, device="meta") if problem.blocks else None


def launch_of(problem: Problem, name: str, *, needs: str = "kv", dlse: bool = True, moving: str = "qkvs"):
    """(kernel, arguments, options) of one pass, with the row that the table has for it; "hopper" is the forward of that kernel.

    needs: which of dK and dV a pass "dkdv" computes. dlse: is there a gradient of lse? moving: which of q, k, v and
    sinks have tangents in the pass "tangent".
    """
    from flashattn.launch import bias as launch_bias
    from flashattn.launch import hopper
    from flashattn.launch import portable as launch

    row = hopper_rows(problem)["forward"] if name == "hopper" else portable_rows(problem)["forward" if name == "shifts" else name]
    dtype = getattr(torch, problem.dtype)

    def tensor(total, rows, heads, dim):
        return torch.empty((*((total,) if problem.varlen else (problem.batch, rows)), heads, dim), dtype=dtype, device="meta")

    q, out = (tensor(problem.total_q, problem.seqlen_q, problem.heads_q, dim) for dim in (problem.head_dim, problem.head_dim_v))
    k, v = (tensor(problem.total_k, problem.seqlen_k, problem.heads_kv, dim) for dim in (problem.head_dim, problem.head_dim_v))
    rows = (problem.heads_q, problem.total_q) if problem.varlen else (problem.batch, problem.heads_q, problem.seqlen_q)
    lse = delta = torch.empty(rows, dtype=torch.float32, device="meta")
    cu = (torch.empty(problem.batch + 1, dtype=torch.int32, device="meta"),) * 2 if problem.varlen else (None, None)
    cu = (None, torch.empty(problem.batch, dtype=torch.int32, device="meta")) if problem.used_k else cu
    slopes, sinks, bias = extras_of(problem)
    last = rng_of(problem), blocks_of(problem), *aux_of(problem)
    if name == "forward":
        kernel, _, args, options = launch.forward_launch(problem, row, q, k, v, out, lse, *cu, slopes, sinks, bias, *last)
    elif name == "tangent":
        tangents = [x if side in moving else None for side, x in (("q", q), ("k", k), ("v", v), ("s", sinks))]
        kernel, _, args, options = launch.tangent_launch(
            problem, row, q, k, v, *tangents[:3], out, out, lse, lse, *cu, slopes, sinks, tangents[3]
        )
    elif name == "hopper":
        counter = torch.empty(2, dtype=torch.int32, device="meta") if row.tickets else None
        kernel, _, args, options = hopper.forward_launch(
            problem, row, q, k, v, out, lse, *cu, counter, slopes, sinks, bias, rng_of(problem)
        )
    elif name == "delta":
        kernel, _, args, options = launch.delta_launch(problem, row, out, out, lse if dlse else None, delta)
    elif name == "dq":
        kernel, _, args, options = launch.dq_launch(problem, row, q, k, v, out, lse, delta, q, *cu, slopes, bias, *last)
    elif name == "shifts":
        kernel, _, args, options = launch_bias.shifts_launch(problem, row, q, k, lse, lse, *cu, slopes, sinks, bias, *last[1:])
    elif name == "dbias":
        shared = launch_bias.shared_by(bias)
        _, splits = launch_bias.splits_of(problem, row, shared)
        tensors = q, k, v, out, lse, delta, bias if splits == 1 else lse, slopes, bias, *last
        kernel, _, args, options = launch_bias.dbias_launch(problem, row, splits, shared, *tensors)
    else:
        wanted = (k if "k" in needs and name != "dv" else None, v if "v" in needs and name != "dk" else None)
        given = *cu, slopes, bias, *last
        kernel, _, args, options = launch.dkdv_launch(problem, row, q, k, v, out, lse, delta, *wanted, *given)
    return kernel, args, options


def hopper_backward_launch(problem: Problem, needs: str = "qkv", row=None, name: str = "backward"):
    """(kernel, arguments, options) of the Hopper backward: its kernel, or the pass "before" or "after" it."""
    from flashattn.launch import hopper_backward as launch

    row = row or hopper_backward_row(problem)
    d, _ = hopper_padded(problem, "backward")
    packed = problem.varlen

    def tensor(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    def tensors(total, rows, heads, *dims):
        shape = (total, heads) if packed else (problem.batch, rows, heads)
        return [tensor(*shape, dim, dtype=getattr(torch, problem.dtype)) for dim in dims]

    q, dout = tensors(problem.total_q, problem.seqlen_q, problem.heads_q, problem.head_dim, problem.head_dim_v)
    k, v = tensors(problem.total_k, problem.seqlen_k, problem.heads_kv, problem.head_dim, problem.head_dim_v)
    blocks, lanes = launch.blocks_of(problem, row.block_m)
    numbers = tensor(blocks * lanes, 2 * row.block_m)
    sums = tensor(blocks * lanes * row.block_m, d) if "q" in needs else None
    turns = tensor(blocks * lanes, 2, dtype=torch.int32) if problem.deterministic and "q" in needs else None
    cu = (tensor(problem.batch + 1, dtype=torch.int32),) * 2 if packed else (None, None)
    if name == "before":
        rows = (problem.heads_q, problem.total_q) if packed else (problem.batch, problem.heads_q, problem.seqlen_q)
        lse = tensor(*rows)
        pair = (None, None) if needs == "v" else (dout, dout)
        negative = row.init and needs == "qkv"
        kernel, _, args, options = launch.before_launch(problem, row, negative, lse, *pair, lse, numbers, sums, turns, cu[0])
    elif name == "after":
        kernel, _, args, options = launch.after_launch(problem, row, sums, q, cu[0])
    else:
        dk, dv = k if "k" in needs else None, v if "v" in needs else None
        v = None if needs == "v" else v
        kernel, _, args, options = launch.backward_launch(
            problem, row, q, k, v, dout, numbers, sums, dk, dv, turns, *cu, extras_of(problem)[0], rng_of(problem)
        )
    return kernel, args, options
