"""What each kernel can run, as a table in Markdown: `python -m flashattn support`, and a part of docs/api.md.

A row is a call that has one feature more than a plain one, and a cell is the answer of the dispatch table to it. So nothing here says what
is supported: a rule that is added or dropped changes the table.
"""

from dataclasses import replace

from ..problem import Problem
from .table import KERNELS, Kernel

PASSES = ("forward", "backward")
PLAIN = Problem("bfloat16", 4, 4096, 4096, 16, 16, 128, 128, 128**-0.5, capability=(9, 0), aligned=True)
CAUSAL = {"window_right": 0}
WIDE = {"head_dim": 256, "head_dim_v": 256}

# What a user calls it: what it changes in PLAIN, which is bfloat16, head dims of 128, on an H100 or H200.
FEATURES: dict[str, dict] = {
    "bfloat16": {},
    "float16": {"dtype": "float16"},
    "float32": {"dtype": "float32"},
    "head_dim 256": WIDE,
    "head_dim 72": {"head_dim": 72, "head_dim_v": 72},
    "head_dim 20, rows padded to 24": {"head_dim": 20},
    "head_dim_v 64, another than head_dim": {"head_dim_v": 64},
    "head_dim_v 20, rows padded to 24": {"head_dim_v": 20},
    "rows not aligned to 16 bytes, expanded dimensions": {"aligned": False},
    "grouped heads": {"heads_kv": 2},
    "causal": CAUSAL,
    'causal="top-left", lengths that differ': {"seqlen_k": 8192, "top_left": True, **CAUSAL},
    "window": {"window_left": 128, "window_right": 128},
    "packed sequences (`attention_varlen`)": {"varlen": True, "total_q": 16384, "total_k": 16384},
    "seqlens_k": {"used_k": True},
    "softcap": {"softcap": 50.0},
    "softcap, head_dim 256": {"softcap": 50.0, **WIDE},
    "alibi_slopes": {"alibi": True},
    'alibi_slopes, causal="top-left", lengths that differ': {"alibi": True, "seqlen_k": 8192, "top_left": True, **CAUSAL},
    "sinks": {"sinks": True},
    "bias, with its gradient": {"bias": "bfloat16", "bias_dims": "hqk"},
    "bias, a boolean mask": {"bias": "bool", "bias_dims": "bqk"},
    "bias, seqlens_k": {"bias": "bfloat16", "bias_dims": "hqk", "used_k": True},
    "score_mod": {"score_mod": "softcap"},
    "mask_mod": {"mask_mod": "documents"},
    "block_mask": {"blocks": True},
    "dropout": {"dropout": 0.1},
    "dropout, head_dim 256": {"dropout": 0.1, **WIDE},
    "deterministic": {"deterministic": True},
}  # fmt: skip
DERIVATIVES = {"forward-mode derivatives (`torch.func.jvp`)": "tangent", "second derivatives (`create_graph=True`)": "second"}
MACHINES: dict[str, dict] = {
    "compute capability 9.0: H100, H200": {},
    "10.0 and 12.0: B200, RTX 50": {"capability": (10, 0)},
    "8.0 to 8.9: A100, RTX 30 and 40, L40": {"capability": (8, 0)},
    "before 8.0: V100, T4": {"capability": (7, 5)},
    "AMD GPUs": {"device": "hip", "capability": None},
    "other devices: CPU, MPS": {"device": "cpu", "capability": None},
    "CPU in Triton's interpreter, float32": {"device": "cpu", "capability": None, "interpret": True, "dtype": "float32"},
}


def against(kernel: Kernel, problem: Problem, direction: str) -> list[str]:
    """Why a kernel can't run that pass; nothing: it can."""
    return kernel.reasons(problem, direction) if direction in kernel.directions else ["it has no such pass, and another kernel's runs"]


def table() -> str:
    """Features by kernels in Markdown. A cell that says less than "yes" has the numbers of its reasons, which follow."""
    notes: dict[str, int] = {}

    def cell(kernel: Kernel, problem: Problem, directions: tuple[str, ...]) -> str:
        found = {direction: against(kernel, problem, direction) for direction in directions}
        can = [direction for direction, reasons in found.items() if not reasons]
        if len(can) == len(directions):
            return "yes"
        reasons = dict.fromkeys(f"`{kernel.name}`: {reason}" for reasons in found.values() for reason in reasons)
        numbers = ", ".join(str(notes.setdefault(reason, len(notes) + 1)) for reason in reasons)
        return f"{' and '.join(can) or 'no'} ({numbers})"

    def rows(head: str, calls: dict[str, tuple[dict, tuple[str, ...]]]) -> list[str]:
        lines = [f"| {head} | {' | '.join(f'`{kernel.name}`' for kernel in KERNELS)} |", f"|{'---|' * (len(KERNELS) + 1)}"]
        for name, (change, directions) in calls.items():
            problem = replace(PLAIN, **change)
            lines.append(f"| {name} | {' | '.join(cell(kernel, problem, directions) for kernel in KERNELS)} |")
        return lines

    features = {name: (change, PASSES) for name, change in FEATURES.items()}
    features |= {name: ({}, (direction,)) for name, direction in DERIVATIVES.items()}
    lines = [*rows("a call with", features), "", *rows("on", {name: (change, PASSES) for name, change in MACHINES.items()}), ""]
    return "\n".join(lines + [f"{number}. {reason}." for reason, number in notes.items()]) + "\n"
