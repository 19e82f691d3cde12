"""Benchmarks of attention: named workloads, providers, a correctness gate, interleaved timing and a record of what was measured.

Run from the repository root: `python -m benchmarks.run --suite fa3`. Surprising fact: a GPU under its power limit slows down as it
heats, so two numbers from two runs can differ by ten percent for one kernel; only ratios inside one interleaved run mean anything.
"""
