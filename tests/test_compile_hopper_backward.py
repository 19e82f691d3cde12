"""Every row of the Hopper backward, and the passes before and after it, compile for sm_90 as they would be launched.

The surprising facts: spills are allowed here, few of them, for a warpgroup keeps what it needs after its loop in local memory while the
loop runs; a spill inside the loop costs a few percent. And ptxas makes products wait (C75xx) in one place where that costs nothing: the
first step of a delayed walk starts one product from registers while the product before it runs (C7517).
"""

import re
from dataclasses import replace

import pytest

from aot import Job
from flashattn.dispatch.configs import hopper
from flashattn.dispatch.table import hopper_backward_row
from test_compile import CHOSEN_UNDER, TRITON, shared_out
from test_compile_hopper import EXTRA_DIMS, EXTRAS, OF_BACKWARD, VARIANTS, problem_of

pytestmark = pytest.mark.compile_only
OURS = set(range(6, 16))  # hardware barriers of kernels/hopper/gradient.py
MOST_SPILLS, NEWER_SPILLS = 288, 544  # bytes of a thread, under the Triton that the rows were timed with and under newer ones
DIMS = [(64, 64), (128, 128), (256, 256), (192, 128)]  # each takes all variants; these take the hardest
OTHERS = [(40, 40), (96, 96), (72, 128), (128, 64), (64, 128), (136, 72), (192, 192), (256, 64), (64, 256)]
NEEDS = {64: ("q", "k", "v", "qk", "qv", "kv"), 128: ("q", "kv"), 256: ("q", "v", "qk", "kv"), 192: ("kv",)}
SAME = ("few", "long", "short", "half", "ragged-negative", "sinks")  # variants that differ in the forward, or by an instruction
EXTRA_SPILLS = 1280  # with a tanh and distances of 64 x 128, which a row has no registers for; one of the two takes 128 to 444


def build(head_dim: int, head_dim_v: int, variant: str, needs: str, ordered: bool, name: str = "backward"):
    from launches import hopper_backward_launch

    problem = replace(problem_of(head_dim, head_dim_v, variant), deterministic=ordered)
    return hopper_backward_launch(problem, needs, name=name)


def runs(head_dim: int, head_dim_v: int, variant: str) -> bool:
    if (head_dim, head_dim_v) not in EXTRA_DIMS.get(variant, DIMS):
        return False
    problem = problem_of(head_dim, head_dim_v, variant)
    return not problem.bias and (not (problem.softcap or problem.dropout) or max(head_dim, head_dim_v) <= 128)


def jobs() -> list[Job]:
    wanted = [(*dims, variant, "qkv", False) for dims in DIMS for variant in VARIANTS if variant not in SAME and runs(*dims, variant)]
    wanted += [(*dims, "causal-ragged", needs, False) for dims in DIMS for needs in NEEDS[dims[0]]]
    wanted += [(*dims, variant, "qkv", True) for dims in DIMS for variant in ("plain", "causal", "packed-window")]
    wanted += [(*dims, variant, "qkv", False) for dims in DIMS[:2] for variant in OF_BACKWARD]
    wanted += [(64, 64, "ragged-negative", "qkv", False)]  # masked behind the sign, where scores are made ahead
    wanted += [(*dims, variant, "qkv", False) for dims in OTHERS for variant in ("causal-ragged", "packed-window")]
    return shared_out([Job("test_compile_hopper_backward.build", args, 90) for args in wanted], row_of)


def row_of(job: Job) -> int:
    return id(hopper_backward_row(problem_of(*job.args[:3])))


def passes() -> list[Job]:
    wanted = [(*dims, variant, "qkv", True, name) for dims in DIMS for variant in ("plain", "packed") for name in ("before", "after")]
    wanted += [(96, 72, "packed", "qkv", False, name) for name in ("before", "after")] + [(64, 64, "plain", "v", False, "before")]
    return [Job("test_compile_hopper_backward.build", args, 90) for args in wanted]


@pytest.mark.parametrize("job", jobs(), ids=str)
def test_a_shipped_row_compiles_fits_and_keeps_its_loop_in_registers(job, compiled):
    most = EXTRA_SPILLS if job.args[2] in EXTRAS else MOST_SPILLS if CHOSEN_UNDER[0] == TRITON else NEWER_SPILLS
    assert replace(compiled, spill_stores=0, spill_loads=0).problems() == []
    assert max(compiled.spill_stores, compiled.spill_loads) <= most
    needs = job.args[3]
    init = hopper_backward_row(problem_of(*job.args[:3])).init and needs == "qkv"
    codes = set(re.findall(r"C75\d\d", " ".join(compiled.warnings)))
    assert codes <= ({"C7517"} if init else set())
    assert not compiled.barriers & OURS, "Triton took a hardware barrier that these kernels use"
    assert compiled.barriers, "not recognised in PTX: then the line above says nothing"


@pytest.mark.parametrize("job", passes(), ids=str)
def test_a_pass_compiles(job, compiled):
    assert compiled.problems() == []


def test_every_row_is_compiled():
    taken = {row_of(job) for job in jobs()}
    assert {id(row) for key, row in hopper.ROWS.items() if key[0] == "backward"} <= taken
