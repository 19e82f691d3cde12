"""Tiles as data: one row a line, with what was measured. A missing row falls back to the portable table, never to a search."""

from typing import NamedTuple


class Config(NamedTuple):
    """block_m query rows by block_n keys, warps a program, stages of the software pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
