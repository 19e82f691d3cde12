"""What the library's launcher would launch, from tensors without memory: for tests that compile kernels, or ask what would be compiled.

The surprising fact: a tensor on "meta" has the address 0, a multiple of everything, so only a head dim can make its rows unaligned.
"""

import torch

from flashattn.dispatch.table import hopper_rows, portable_rows
from flashattn.problem import Problem


def launch_of(problem: Problem, name: str, *, needs: str = "kv", dlse: bool = True):
    """(kernel, arguments, options) of one pass, with the row that the table has for it; "hopper" is the forward of that kernel.

    needs: which of dK and dV a pass "dkdv" computes. dlse: is there a gradient of lse?
    """
    from flashattn.launch import hopper
    from flashattn.launch import portable as launch

    row = hopper_rows(problem)["forward"] if name == "hopper" else portable_rows(problem)[name]
    dtype = getattr(torch, problem.dtype)

    def tensor(total, rows, heads, dim):
        return torch.empty((*((total,) if problem.varlen else (problem.batch, rows)), heads, dim), dtype=dtype, device="meta")

    q, out = (tensor(problem.total_q, problem.seqlen_q, problem.heads_q, dim) for dim in (problem.head_dim, problem.head_dim_v))
    k, v = (tensor(problem.total_k, problem.seqlen_k, problem.heads_kv, dim) for dim in (problem.head_dim, problem.head_dim_v))
    rows = (problem.heads_q, problem.total_q) if problem.varlen else (problem.batch, problem.heads_q, problem.seqlen_q)
    lse = delta = torch.empty(rows, dtype=torch.float32, device="meta")
    cu = (torch.empty(problem.batch + 1, dtype=torch.int32, device="meta"),) * 2 if problem.varlen else (None, None)
    if name == "forward":
        kernel, _, args, options = launch.forward_launch(problem, row, q, k, v, out, lse, *cu)
    elif name == "hopper":
        counter = torch.empty(2, dtype=torch.int32, device="meta") if row.tickets else None
        kernel, _, args, options = hopper.forward_launch(problem, row, q, k, v, out, lse, *cu, counter)
    elif name == "delta":
        kernel, _, args, options = launch.delta_launch(problem, row, out, out, lse if dlse else None, delta)
    elif name == "dq":
        kernel, _, args, options = launch.dq_launch(problem, row, q, k, v, out, lse, delta, q, *cu)
    else:
        wanted = (k if "k" in needs and name != "dv" else None, v if "v" in needs and name != "dk" else None)
        kernel, _, args, options = launch.dkdv_launch(problem, row, q, k, v, out, lse, delta, *wanted, *cu)
    return kernel, args, options
