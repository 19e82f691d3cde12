"""Rows for Hopper (227 KB of shared memory a program)."""

from . import Config

ROWS = {
    ("forward", 2, 64): Config(128, 128, 4, 3),
    ("forward", 2, 128): Config(128, 64, 8, 3),
    ("forward", 2, 256): Config(128, 64, 8, 2),
    ("dkdv", 2, 64): Config(64, 128, 4, 3),
    ("dkdv", 2, 128): Config(64, 128, 8, 2),
    ("dkdv", 2, 256): Config(32, 64, 8, 2),
    ("dq", 2, 64): Config(128, 64, 4, 3),
    ("dq", 2, 128): Config(128, 64, 8, 2),
    ("dq", 2, 256): Config(64, 64, 8, 2),
}
