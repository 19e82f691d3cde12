"""Rows for A100 where the portable table's would spill."""

from . import Config

ROWS = {
    ("dkdv", 4, 256, "padded"): Config(16, 16, 4, 1),
}
