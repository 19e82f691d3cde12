"""Rows for any GPU: small enough for 99 KB of shared memory a program (sm_86, sm_89, sm_120), and free of spills from sm_80 to sm_100
under Triton 3.6, 3.8 and 3.9.

Key: (pass, bytes of an element, largest padded head dim), with a fourth member for a row that serves only some calls: "padded", head dims
that are no power of two (their masks take registers); "unaligned", padded ones whose rows load element by element; "open", neither a mask
nor grouped heads; "biased", a bias, a mod or a block mask. "delta" uses block_m alone. "tangent", which has two accumulators and twice
the operands, does spill at head dims over 128: up to 200 bytes when "unaligned" and 1300 in float32; and below that a few bytes in float32.
Chosen from compiler reports, never timed: a GPU that somebody measures gets a table of its own.
"""

from . import Config

ROWS = {
    ("forward", 2, 64): Config(128, 64, 4, 2),
    ("forward", 2, 128): Config(128, 64, 8, 2),
    ("forward", 2, 256): Config(64, 32, 8, 2),
    ("forward", 2, 64, "unaligned"): Config(64, 32, 8, 2),
    ("forward", 2, 128, "unaligned"): Config(64, 32, 8, 2),
    ("forward", 2, 256, "unaligned"): Config(32, 16, 8, 1),
    ("forward", 2, 64, "biased"): Config(64, 64, 4, 2),
    ("forward", 4, 64): Config(64, 32, 8, 2),
    ("forward", 4, 128): Config(32, 16, 8, 2),
    ("forward", 4, 128, "padded"): Config(16, 16, 4, 1),
    ("forward", 4, 256): Config(16, 16, 4, 1),
    ("tangent", 2, 64): Config(128, 32, 8, 2),
    ("tangent", 2, 128): Config(64, 32, 8, 2),
    ("tangent", 2, 256): Config(32, 16, 8, 2),
    ("tangent", 2, 64, "unaligned"): Config(32, 32, 8, 1),
    ("tangent", 2, 128, "unaligned"): Config(32, 16, 8, 1),
    ("tangent", 2, 256, "unaligned"): Config(16, 16, 8, 1),
    ("tangent", 4, 64): Config(32, 16, 8, 1),
    ("tangent", 4, 128): Config(16, 16, 8, 1),
    ("tangent", 4, 256): Config(16, 16, 8, 1),
    ("dkdv", 2, 64): Config(32, 64, 8, 2),
    ("dkdv", 2, 128): Config(32, 64, 8, 1),
    ("dkdv", 2, 256): Config(32, 32, 8, 1),
    ("dkdv", 2, 64, "unaligned"): Config(32, 32, 8, 1),
    ("dkdv", 2, 128, "unaligned"): Config(32, 32, 8, 1),
    ("dkdv", 2, 256, "unaligned"): Config(16, 32, 8, 1),
    ("dkdv", 4, 64): Config(32, 32, 8, 1),
    ("dkdv", 4, 128): Config(16, 32, 8, 1),
    ("dkdv", 4, 128, "padded"): Config(16, 16, 8, 1),
    ("dkdv", 4, 256): Config(16, 16, 8, 1),
    ("dq", 2, 64): Config(64, 32, 4, 2),
    ("dq", 2, 128): Config(64, 32, 4, 2),
    ("dq", 2, 256): Config(32, 32, 8, 1),
    ("dq", 2, 64, "unaligned"): Config(32, 32, 8, 1),
    ("dq", 2, 128, "unaligned"): Config(32, 32, 8, 1),
    ("dq", 2, 256, "unaligned"): Config(32, 16, 8, 1),
    ("dq", 4, 64): Config(32, 32, 8, 1),
    ("dq", 4, 128): Config(32, 16, 8, 1),
    ("dq", 4, 256): Config(16, 16, 8, 1),
    ("dbias", 2, 64): Config(64, 64, 4, 2),
    ("dbias", 2, 128): Config(64, 32, 8, 2),
    ("dbias", 2, 256): Config(32, 32, 8, 2),
    ("dbias", 2, 64, "unaligned"): Config(32, 32, 4, 1),
    ("dbias", 2, 128, "unaligned"): Config(32, 32, 8, 1),
    ("dbias", 2, 256, "unaligned"): Config(16, 32, 8, 1),
    ("dbias", 4, 64): Config(32, 32, 4, 1),
    ("dbias", 4, 128): Config(32, 16, 8, 1),
    ("dbias", 4, 256): Config(16, 16, 4, 1),
    ("delta", 2, 64): Config(64, 1, 4, 1),
    ("delta", 2, 128): Config(32, 1, 4, 1),
    ("delta", 2, 256): Config(16, 1, 4, 1),
    ("delta", 4, 64): Config(32, 1, 4, 1),
    ("delta", 4, 128): Config(16, 1, 4, 1),
    ("delta", 4, 256): Config(16, 1, 4, 1),
}
