"""What there is on this machine: versions, GPUs, which kernel can run what and why another can't, and settings.

The surprising fact: there is no list of what is supported. Each kernel is asked about a call in each dtype, with the same question that the
dispatcher asks it.
"""

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from .api import explain
from .dispatch.table import DIRECTIONS, KERNELS
from .problem import DTYPES

PACKAGES = ("flashattn", "torch", "triton", "numpy", "einops", "transformers", "flash-attn", "click", "rich")
SETTINGS = ("TRITON_INTERPRET", "FLASHATTN_CHECK", "TRITON_CACHE_DIR", "CUDA_VISIBLE_DEVICES")
ROWS = HEAD_DIM = 128


def versions() -> dict[str, str | None]:
    """By package, None for one that isn't installed; Python, and the CUDA or ROCm that torch was built for."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    found["flashattn"] = found["flashattn"] or "not installed: run from its sources"
    return found | {"torch's CUDA": torch.version.cuda, "torch's ROCm": torch.version.hip}


def gpus() -> list[dict]:
    """Each CUDA device: name, capability, memory in bytes, and its name in the roofline's table or None."""
    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        known = _explanation("float16", f"cuda:{index}").gpu
        capability = f"{properties.major}.{properties.minor}"
        found.append({"name": properties.name, "capability": capability, "memory": properties.total_memory, "roofline": known})
    return found


def _explanation(dtype: str, device: str):
    x = torch.zeros(1, ROWS, 1, HEAD_DIM, dtype=getattr(torch, dtype), device=device)
    return explain(x, x, x)


def kernels(device: str) -> dict[str, dict[str, dict[str, list[str]]]]:
    """{kernel: {dtype: {pass: reasons}}} of a dense call with head dim 128 on a device; no reasons: it can run it."""
    found: dict = {}
    for dtype in DTYPES:
        problem = _explanation(dtype, device).problem
        for kernel in KERNELS:
            of_dtype = found.setdefault(kernel.name, {}).setdefault(dtype, {})
            for direction in DIRECTIONS:
                missing = direction not in kernel.directions
                of_dtype[direction] = [f"it has no {direction}"] if missing else kernel.reasons(problem, direction)
    return found


def info() -> dict:
    """All of it, as `python -m flashattn info --json` prints it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = {name: os.environ.get(name) for name in SETTINGS}
    return {"versions": versions(), "gpus": gpus(), "device": device, "kernels": kernels(device), "settings": settings}
