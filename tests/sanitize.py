"""Runs one small case of each template of the Hopper kernels, forward and backward, under NVIDIA's compute-sanitizer.

    python tests/sanitize.py                      memcheck and racecheck; their findings decide the exit code
    python tests/sanitize.py memcheck             one of its tools

Nothing but these kernels is instrumented, since PyTorch's own take minutes. Two surprising facts. Memory must not come from PyTorch's
cache, where the neighbour of a tensor is another tensor and an access past the end is none. And racecheck takes Triton's own hand-over to
its partitions for a race: what it passes to a waiting warp through shared memory, by a barrier that racecheck doesn't follow. Such hazards
have both accesses on lines of the kernel's entry, which itself touches no shared memory after the partitions start, and are only counted.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

TOOLS = ("memcheck", "racecheck")
LIMIT = 240  # seconds for a tool
SHAPES = ((64, 64), (128, 128), (256, 256), (192, 128))  # head dims of the templates
KERNEL = "_hopper"  # in their names
ENTRIES = {"forward.py": ("attn_fwd_hopper",), "backward.py": ("attn_bwd_hopper",), "backward_wide.py": ("gradients_wide",)}


def launch_all() -> None:
    """What is run under the sanitizer: ragged lengths, more tiles than fit one wave of a small grid, grouped heads."""
    import torch

    from flashattn import attention, attention_varlen

    def draw(rows, heads, dim):
        return torch.randn(1, rows, heads, dim, device="cuda", dtype=torch.bfloat16).requires_grad_()

    def both(call, *tensors, **options):
        out = call(*tensors, impl="hopper", **options)
        torch.autograd.grad(out, tensors[:3], torch.randn_like(out))

    for dim, dim_v in SHAPES:
        q, k, v = draw(200, 4, dim), draw(300, 2, dim), draw(300, 2, dim_v)
        for mask in ({}, {"causal": True}, {"window": (70, 5)}):
            both(attention, q, k, v, **mask)
        both(attention, q, k, v, causal=True, deterministic=True)
        cu = (torch.tensor(ends, dtype=torch.int32, device="cuda") for ends in ([0, 30, 30, 190], [0, 100, 101, 280]))
        both(attention_varlen, *(x[0].detach().requires_grad_() for x in (q, k, v)), *cu, causal=True)
    q, k, v = (draw(4096, 1, 64) for _ in range(3))
    attention(q, k, v, causal=True, impl="hopper")
    torch.cuda.synchronize()
    print("launched all")


def entry_lines() -> set[tuple[str, int]]:
    """(file, line) of the functions that start the partitions, in the files that hold roles too."""
    found = set()
    for file, names in ENTRIES.items():
        source = (Path(__file__).resolve().parent.parent / "src/flashattn/kernels/hopper" / file).read_text()
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and node.name in names:
                found |= {(file, line) for line in range(node.lineno, node.end_lineno + 1)}
    return found


def races(text: str) -> tuple[list[str], int]:
    """(hazards in the roles, number of hazards of Triton's hand-over) of racecheck's report."""
    found, handed = [], 0
    for report in re.split(r"\n=+ *\n", text):
        if "Race reported" in report:
            places = re.findall(r" in (\S+\.py):(\d+)", report)
            ours = [place for place in places if (place[0], int(place[1])) not in entry_lines()]
            found += [report] if ours or not places else []
            handed += not ours and bool(places)
    return found, handed


def sanitize(tool: str) -> bool:
    """Whether `tool` finds nothing."""
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    only = f"--kernel-name=kernel_substring={KERNEL}"
    command = [program, f"--tool={tool}", only, "--print-limit=10000", sys.executable, __file__, "--here"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=environment)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"{tool}: {error}")
        return False
    text = done.stdout + done.stderr
    summary = re.findall(r"=+ ((?:ERROR|RACECHECK) SUMMARY: .*)", text)
    found, handed = races(text)
    clean = bool(summary) and (tool == "racecheck" or all(" 0 errors" in line for line in summary)) and not found
    if handed:
        summary.append(f"{handed} of Triton's hand-over to its partitions")
    good = clean and done.returncode == 0 and "launched all" in text
    print(f"{tool}: {'; '.join(summary) or 'no summary'}" + ("" if good else f"\n{(chr(10).join(found) or text)[-4000:]}"))
    return good


def main(arguments: list[str]) -> int:
    if arguments == ["--here"]:
        launch_all()
        return 0
    found = [sanitize(tool) for tool in arguments or TOOLS]
    return 0 if all(found) else 1


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))
    sys.exit(main(sys.argv[1:]))
