"""Every row of the Hopper table compiles for sm_90, as it would be launched, spills nothing and leaves wgmma asynchronous.

The surprising fact: a C75xx warning of ptxas is a defect here. It means that products which should be in flight together were made to wait
for each other, a loss of a third, and nothing else shows it.
"""

from dataclasses import replace

import pytest

from aot import Job
from flashattn.dispatch.configs import hopper
from flashattn.dispatch.table import hopper_rows
from flashattn.problem import Problem
from test_compile import CHOSEN_UNDER, TRITON, shared_out

pytestmark = pytest.mark.compile_only
OURS = set(range(5, 16))  # hardware barriers of kernels/hopper/channel.py

PROBLEM = Problem("bfloat16", 2, 2048, 2048, 8, 8, 64, 64, 0.1, capability=(9, 0))
VARIANTS = {
    "plain": {},
    "half": {"dtype": "float16"},
    "causal": {"window_right": 0},
    "few": {"window_right": 0, "batch": 1, "seqlen_q": 128},
    "causal-ragged": {"window_right": 0, "seqlen_k": 2045, "seqlen_q": 2045, "heads_kv": 2, "dtype": "float16"},
    "long": {"window_right": 0, "seqlen_q": 4096, "seqlen_k": 4093, "top_left": True},
    "window": {"window_left": 300, "window_right": 5, "top_left": True},
    "ragged": {"seqlen_k": 2045},
    "ragged-negative": {"seqlen_k": 2045, "softmax_scale": -0.1},
    "packed": {"varlen": True, "total_q": 2048, "total_k": 2048, "dtype": "float16"},
    "packed-causal": {"varlen": True, "total_q": 8192, "total_k": 8192, "window_right": 0},
    "packed-window": {"varlen": True, "total_q": 8192, "total_k": 8192, "window_left": 300, "window_right": 0, "heads_kv": 2},
}
EXTRAS = {
    "softcap": {"window_right": 0, "softcap": 50.0},
    "alibi": {"window_right": 0, "alibi": True},
    "sinks": {"window_left": 127, "window_right": 0, "sinks": True},
    "bias": {"window_right": 0, "bias": "bfloat16", "bias_dims": "hqk"},
    "bias-open": {"seqlen_q": 4096, "seqlen_k": 4096, "bias": "float32", "bias_dims": "hqk"},
    "mask": {"seqlen_k": 2045, "bias": "bool", "bias_dims": "bk"},
    "all-packed": {**VARIANTS["packed-window"], "softcap": 50.0, "alibi": True, "sinks": True},
    "dropout": {"window_right": 0, "dropout": 0.1},
    "dropout-packed": {**VARIANTS["packed-window"], "dropout": 0.1},
}
OF_BACKWARD = {  # where it has rows of its own
    "masked": {"window_right": 0, "seqlen_k": 2045, "seqlen_q": 2045},
    "large-group": {"window_right": 0, "heads_q": 16, "heads_kv": 2},
}
VARIANTS |= {"short": {"seqlen_q": 256}, **EXTRAS, **OF_BACKWARD}
DIMS = [(64, 64), (128, 128), (256, 256), (192, 128)]  # each takes all variants; these take the hardest
EXTRA_DIMS = {
    "short": [(64, 64)], "masked": [], "large-group": [],
    "softcap": [(128, 128)], "alibi": [(128, 128), (256, 256)], "sinks": [(64, 64)], "all-packed": DIMS,
    "dropout": DIMS, "dropout-packed": [(64, 64), (128, 128)],
    "bias": [(64, 64), (128, 128), (256, 256)], "bias-open": [(64, 64), (128, 128)], "mask": [(128, 128)],
}  # fmt: skip
OTHERS = [(40, 40), (96, 96), (72, 128), (128, 64), (192, 192), (256, 64), (64, 256)]


def problem_of(head_dim: int, head_dim_v: int, variant: str) -> Problem:
    return replace(PROBLEM, head_dim=head_dim, head_dim_v=head_dim_v, **VARIANTS[variant])


def build(head_dim: int, head_dim_v: int, variant: str):
    from launches import launch_of

    return launch_of(problem_of(head_dim, head_dim_v, variant), "hopper")


def jobs() -> list[Job]:
    wanted = [(*dims, variant) for dims in DIMS for variant in VARIANTS if dims in EXTRA_DIMS.get(variant, DIMS)]
    wanted += [(*dims, variant) for dims in OTHERS for variant in ("causal-ragged", "packed-window")]
    return shared_out([Job("test_compile_hopper.build", args, 90) for args in wanted], row_of)


def row_of(job: Job):
    return hopper_rows(problem_of(*job.args))["forward"]


# Bytes that may be spilled, of what a warpgroup needs at the ends of a tile, not in its loop. Three warpgroups have 160 registers each, and
# with these 12 % more speed than two.
SPILLED = {
    (64, 64, "packed-causal"): 288, (192, 128, "window"): 128, (256, 256, "all-packed"): 160,
    (256, 256, "dropout"): 144,  # under Triton 3.9; 32 under 3.6
    # numbers of a bias come one at a time where the last block is ragged
    (128, 128, "mask"): 976, (256, 256, "bias"): 136, (128, 128, "bias-open"): 976,
}  # fmt: skip


@pytest.mark.parametrize("job", jobs(), ids=str)
def test_a_shipped_row_compiles_fits_and_spills_nothing(job, compiled):
    if max(compiled.spill_stores, compiled.spill_loads) <= SPILLED.get(job.args, 0):
        compiled = replace(compiled, spill_stores=0, spill_loads=0)
    problems = compiled.problems()
    if problems and TRITON not in CHOSEN_UNDER and replace(compiled, spill_stores=0, spill_loads=0).problems() == []:
        pytest.xfail(f"rows were chosen under Triton {', '.join(CHOSEN_UNDER)}, and with this one: {problems[0]}")
    assert problems == []
    assert compiled.warnings == ()
    assert not compiled.barriers & OURS, "Triton took a hardware barrier that these kernels use"
    assert compiled.barriers, "not recognised in PTX: then the line above says nothing"


def test_every_row_is_compiled():
    taken = {row_of(job) for job in jobs()}
    assert {row for key, row in hopper.ROWS.items() if key[0] == "forward"} <= taken
