"""Rows for Hopper (227 KB of shared memory a program), nearly all bf16 and fp16; other rows come from the portable table.

Figures are TFLOP/s of the pass alone, without a mask / causal: H200, 2026-11-30, Triton 3.6.0, bf16, 16 384 tokens in sequences of 4096,
heads x dim 2048, against neighbours in one interleaved run, of an earlier form of these kernels (dK/dV had a second loop over the heads of
a group). They rank the rows and are no claim of speed. Rows without a figure were chosen from compiler reports. Rows spill nothing on
Triton 3.6 and 3.9; one with a faster but spilling neighbour names it.
"""

from . import Config

ROWS = {
    ("forward", 2, 64): Config(64, 64, 4, 3),  # 443 / 418; 128 x 64 with 8 warps 433 / 399, with 2 stages 330
    ("forward", 2, 128): Config(64, 64, 4, 3),  # 494 / 459; 128 x 64 with 8 warps 479 / 441
    ("forward", 2, 256): Config(128, 32, 8, 3),  # 468 / 445; 128 x 64 with 2 stages 464 / 502 spills with a ragged head dim
    ("tangent", 2, 64): Config(64, 64, 4, 3),  # 128 x 64 with 8 warps spills nothing either; at 128 dims it does, and so do 4 warps
    ("tangent", 2, 128): Config(128, 32, 8, 3),
    ("forward", 2, 64, "biased"): Config(64, 64, 4, 3),
    ("dkdv", 2, 64): Config(64, 64, 4, 3),  # 492 / 474; 32 x 64 401 / 381
    ("dkdv", 2, 128): Config(32, 64, 4, 3),  # 533 / 515; 64 x 128 with 8 warps 557 / 468 and 64 x 64 with 2 stages 552 / 543 spill
    ("dkdv", 2, 128, "open"): Config(64, 64, 4, 2),  # 552; spills where there is a mask or a group of heads
    ("dkdv", 2, 128, "padded"): Config(16, 128, 8, 3),  # 354 / 310
    ("dk", 2, 256): Config(32, 128, 8, 2),  # dK and dV apart: together they leave no registers (32 x 64: 196 / 241 and spills)
    ("dk", 2, 256, "padded"): Config(32, 64, 8, 2),
    ("dk", 2, 256, "unaligned"): Config(32, 32, 8, 1),
    ("dv", 2, 256): Config(32, 128, 8, 2),
    ("dv", 2, 256, "padded"): Config(32, 64, 8, 2),
    ("dv", 2, 256, "unaligned"): Config(32, 32, 8, 1),
    ("dq", 2, 64): Config(128, 64, 8, 3),  # 635 / 564; 4 warps 661 / 536
    ("dq", 2, 128): Config(128, 64, 8, 3),  # 637 / 549; 2 stages 429 / 409
    ("dq", 2, 256): Config(128, 32, 8, 2),  # 420 / 415; 64 x 64 247 / 232
    ("dq", 4, 256): Config(32, 32, 8, 1),  # the portable 16 x 16 spills 4 bytes under Triton 3.9
}
