"""How close to the hardware: GPUs, the work of operations, the bound of the two, and what attention moves. Plain Python, no GPU needed.

`python -m flashattn.roofline --help` is the same as commands. Timing is in `roofline.measure`, which needs torch, as plots need matplotlib;
nothing here imports them. docs/roofline.md teaches the model.
"""

from .bound import Bound, bound_of, ridge
from .gpus import GPU, GPUS, by_hand, detect, find
from .model import MFUMeter, Transformer, mfu, train_flops_per_token
from .work import Work, attention

__all__ = [
    "GPU", "GPUS", "Bound", "MFUMeter", "Transformer", "Work", "attention", "bound_of", "by_hand", "detect", "find", "mfu", "ridge",
    "train_flops_per_token",
]  # fmt: skip
