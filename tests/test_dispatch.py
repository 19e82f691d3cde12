"""The table of kernels and the choice from it, for GPUs that nobody here owns: all of it is a function of a `Problem`. Its rules are read
in test_rules.py.

Over 300 lines: the machines, their table and their faults are one subject.
"""

import inspect
import os
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from itertools import product
from unittest.mock import ANY

import numpy
import pytest
import torch
from torch._subclasses import FakeTensorMode

from flashattn import attention, attention_varlen, explain
from flashattn.dispatch import configs, table
from flashattn.dispatch.configs import hopper, portable
from flashattn.dispatch.explain import explain as explain_problem
from flashattn.dispatch.select import launcher, select
from flashattn.dispatch.table import DIRECTIONS, FEW, KERNELS, TABLES, Kernel, padded_head_dim
from flashattn.problem import DTYPES, Problem
from flashattn.torch_ops import schemas
from flashattn.torch_ops.describe import _machine

CAPABILITIES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)]
PROBLEM = Problem("bfloat16", 2, 128, 256, 4, 2, 64, 64, 0.125, capability=(9, 0))
NAMES = [row.name for row in KERNELS]
ROWS = {row.name: row for row in KERNELS}
PASSES = [("forward", "tangent", "delta", *names, "dq") for names in (("dkdv",), ("dk", "dv"))]  # in the order of running

# Every kind of machine, and what runs there; the forward, where the backward is another's.
MACHINES = [
    *[(replace(PROBLEM, dtype=dtype, aligned=True), "hopper") for dtype in ("float16", "bfloat16")],
    *[(replace(PROBLEM, aligned=True, capability=capability), "portable") for capability in CAPABILITIES if capability != (9, 0)],
    (replace(PROBLEM, aligned=True, dtype="float32"), "portable"),
    *[(replace(PROBLEM, aligned=True, **extra), "hopper") for extra in ({"softcap": 9.0}, {"alibi": True}, {"sinks": True})],
    (replace(PROBLEM, aligned=True, alibi=True, top_left=True, window_right=0), "portable"),
    (replace(PROBLEM, aligned=True, head_dim_v=20), "portable"),
    (replace(PROBLEM, aligned=True, batch=1 << 23), "portable"),  # 2^32 rows of all heads
    *[(replace(PROBLEM, aligned=True, seqlen_k=(1 << 30) - less), name) for less, name in ((0, "portable"), (384, "hopper"))],
    (replace(PROBLEM, aligned=True, interpret=True, dtype="float16"), "portable"),
    *[(replace(PROBLEM, dtype=dtype, capability=capability), "portable") for dtype, capability in product(DTYPES, CAPABILITIES)],
    *[(replace(PROBLEM, dtype=dtype, capability=(7, 5)), "eager") for dtype in DTYPES],
    *[
        (replace(PROBLEM, dtype=dtype, device=where, capability=None), "eager")
        for dtype, where in product(DTYPES, ("cpu", "mps", "meta", "hip"))
    ],
    *[
        (replace(PROBLEM, dtype=dtype, device=where, capability=None, interpret=True), "eager" if dtype == "bfloat16" else "portable")
        for dtype, where in product(DTYPES, ("cpu", "cuda"))
    ],
    (replace(PROBLEM, seqlen_k=1 << 31, window_right=0), "portable"),
    (replace(PROBLEM, seqlen_k=1 << 31, window_left=5, window_right=0), "eager"),
    (replace(PROBLEM, device="xpu", capability=(7, 5)), "eager"),  # two reasons against portable
    (replace(PROBLEM, dtype="float64", device="mps", capability=None), None),
]

# --------------------------------------------------------------------------------------------------------------------------- table


@pytest.mark.parametrize("dtype, capability", list(product(DTYPES, CAPABILITIES)))
def test_every_head_dim_has_a_tile_for_every_pass(dtype, capability):
    for head_dim in range(1, 257):
        for head_dim_v in {1, head_dim, 257 - head_dim, 256}:
            problem = replace(PROBLEM, dtype=dtype, capability=capability, head_dim=head_dim, head_dim_v=head_dim_v)
            rows = ROWS["portable"].rows(problem)
            assert tuple(rows) in PASSES
            for name, row in rows.items():
                assert isinstance(row, configs.Config)
                # tl.dot takes no side below 16; "delta" has no keys
                assert row.block_m >= 16 and row.block_n >= (1 if name == "delta" else 16), (problem, name, row)
                assert all(number & (number - 1) == 0 for number in (row.block_m, row.block_n, row.num_warps)), (problem, name, row)
                assert 1 <= row.num_warps <= 16 and 1 <= row.num_stages <= 8, (problem, name, row)
            assert ROWS["eager"].rows(problem) == {}


@pytest.mark.parametrize("capability", [None, *TABLES], ids=str)
def test_every_row_of_a_table_is_taken_by_some_call(capability, monkeypatch):
    """A key with a typo, or in the shadow of another, would be ignored and a slower row taken."""
    table = portable.ROWS if capability is None else TABLES[capability]
    for number, key in enumerate(list(table)):
        monkeypatch.setitem(table, key, configs.Config(number, 0, 0, 0))
    taken = set()
    for dtype, heads_q, bias, head_dim, head_dim_v in product(DTYPES, (2, 4), (None, "float32"), *[(1, 40, 64, 72, 128, 192, 256)] * 2):
        sizes = {"heads_q": heads_q, "head_dim": head_dim, "head_dim_v": head_dim_v, "bias": bias}
        problem = replace(PROBLEM, dtype=dtype, **sizes, capability=capability)
        taken |= {row.block_m for row in ROWS["portable"].rows(problem).values() if row.num_warps == 0}
    assert [key for number, key in enumerate(table) if number not in taken] == []


def test_every_head_dim_has_a_tile_for_hopper():
    taken = set()
    for head_dim, head_dim_v in product(range(1, 257), range(8, 257, 8)):
        lengths = {"seqlen_q": 4096, "seqlen_k": 4096}
        packed = {"varlen": True, "total_q": 1 << 20, "total_k": 256}
        window = {"window_left": 100, "window_right": 0}
        causal, alone = {"window_right": 0}, {"heads_kv": 4}
        masked = lengths | causal | alone | {"seqlen_k": 4090}
        for change in (lengths, causal, causal | alone, masked, lengths | window, packed, packed | {"total_q": 256}):
            problem = replace(PROBLEM, batch=64, head_dim=head_dim, head_dim_v=head_dim_v, aligned=True, **change)
            assert ROWS["hopper"].reasons(problem, "forward") == []
            row = ROWS["hopper"].rows(problem)["forward"]
            assert row.block_m == 64 * row.consumers and row.num_warps % 4 == 0
            taken.add(row)
            assert ROWS["hopper"].reasons(problem, "backward") == ([] if head_dim % 8 == 0 else [ANY])
            taken.add(ROWS["hopper"].rows(problem)["backward"])
    assert taken == set(hopper.ROWS.values())


def test_short_calls_take_tiles_without_empty_thirds():
    plain = replace(PROBLEM, aligned=True, batch=64)
    for rows, consumers in {64: 2, 128: 2, 192: 3, 197: 2, 256: 2, 257: 3, 512: 3, 640: 3, 4096: 3}.items():
        assert ROWS["hopper"].rows(replace(plain, seqlen_q=rows))["forward"].consumers == consumers


def test_rows_of_the_backward_by_mask_and_group():
    def row(**change):
        return ROWS["hopper"].rows(replace(PROBLEM, **{"aligned": True, "window_right": 0, **change}))["backward"]

    alone = {"heads_kv": 4}
    assert row(**alone) is hopper.ROWS["backward", 64, "diagonal"]  # 256 keys, 128 queries: a corner
    for change in ({"seqlen_k": 250}, {"seqlen_q": 120}, {"window_right": 5}):
        assert row(**alone | change) is hopper.ROWS["backward", 64, "masked"]
    assert row(**alone, top_left=True, seqlen_q=120) is hopper.ROWS["backward", 64, "diagonal"]
    assert row() is hopper.ROWS["backward", 64, "grouped"]
    assert row(head_dim=128) is hopper.ROWS["backward", 128, "grouped"]
    assert row(window_left=50) is hopper.ROWS["backward", 64, "window"]
    assert not any(row(**change, softcap=9.0).ahead for change in (alone, {}))


def test_tiles_that_all_start_at_once_are_not_drawn():
    for heads, tickets in ((FEW, False), (FEW + 1, True)):
        problem = replace(PROBLEM, batch=1, heads_q=heads, heads_kv=1, seqlen_q=100, window_right=0)
        assert ROWS["hopper"].rows(problem)["forward"].tickets is tickets
        packed = replace(problem, varlen=True, total_q=100, total_k=100)  # of a few slots more than rows tell
        assert ROWS["hopper"].rows(packed)["forward"].tickets


def test_head_dims_are_padded_to_the_next_power_of_two_from_16_on():
    assert [padded_head_dim(d) for d in (1, 15, 16, 17, 64, 65, 96, 128, 129, 256)] == [16, 16, 16, 32, 64, 128, 128, 128, 256, 256]
    assert ROWS["portable"].padded(replace(PROBLEM, head_dim=72, head_dim_v=24), "forward") == (128, 32)


def test_hopper_pads_head_dims_to_its_tiles():
    dims = (1, 64, 65, 96, 97, 128, 129, 192, 193, 256)
    padded = [ROWS["hopper"].padded(replace(PROBLEM, head_dim=d, head_dim_v=d), "forward") for d in dims]
    assert [d for d, _ in padded] == [64, 64, 96, 96, 128, 128, 192, 192, 256, 256]
    assert [dv for _, dv in padded] == [64, 64, 128, 128, 128, 128, 256, 256, 256, 256]
    backward = [
        ROWS["hopper"].padded(replace(PROBLEM, head_dim=d, head_dim_v=dv), "backward") for d in (64, 96, 136, 200) for dv in (8, 72)
    ]
    assert backward == [(64, 64), (128, 128), (128, 64), (128, 128), *[(192, 128)] * 2, *[(256, 256)] * 2]
    assert ROWS["hopper"].padded(replace(PROBLEM, head_dim=64, head_dim_v=136), "backward") == (256, 256)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "bool"])
def test_a_bias_is_for_the_forward_of_hopper_alone(dtype):
    problem = replace(PROBLEM, aligned=True, bias=dtype, bias_dims="hqk")
    assert [select(problem, direction).name for direction in ("forward", "backward")] == ["hopper", "portable"]
    assert all(ROWS["hopper"].rows(replace(problem, head_dim=dim, head_dim_v=dim))["forward"].consumers == 2 for dim in (64, 128, 256))


@pytest.mark.parametrize("name", NAMES)
def test_launchers_have_one_signature(name):
    if name != "eager" and find_spec("triton") is None:
        pytest.skip("needs Triton")
    module = launcher(ROWS[name].launch)
    at_the_end = ["cu_seqlens_q", "cu_seqlens_k", "slopes", "sinks", "bias", "rng", "aux"]
    blocks = ["blocks"] if name != "hopper" else []  # it has no block masks
    expected = {
        "forward": ["problem", "q", "k", "v", *at_the_end, *blocks, "token"],
        "backward": ["problem", "needs", "dout", "dlse", "q", "k", "v", "out", "lse", *at_the_end, *blocks],
        "tangent": ["problem", "q", "k", "v", "tq", "tk", "tv", "tsinks", *at_the_end[:-3]],
        "second": ["problem", "needs", "dout", "dlse", "q", "k", "v", "tq", "tk", "tv", "tsinks", *at_the_end[:-3]],
    }
    for direction in ROWS[name].directions:
        assert list(inspect.signature(getattr(module, direction)).parameters) == expected[direction]


# -------------------------------------------------------------------------------------------------------------------------- choice


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("problem, name", MACHINES, ids=lambda value: value if isinstance(value, str) else None)
def test_the_first_that_can_is_chosen(problem, name, direction):
    having = [row for row in KERNELS if direction in row.directions]
    if name is None:
        with pytest.raises(NotImplementedError, match=f"no kernel can run the {direction} of this call") as caught:
            select(problem, direction)
        assert all(f"{row.name}: {', '.join(row.reasons(problem, direction))}" in str(caught.value) for row in having)
    else:
        name = name if direction in ROWS[name].directions else "portable"
        assert select(problem, direction).name == name
        assert select(replace(problem), direction) is select(problem, direction), "equal problems, one answer"
        assert all(row.reasons(problem, direction) for row in having[: having.index(ROWS[name])])


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("problem", [problem for problem, _ in MACHINES])
def test_a_named_kernel_runs_or_says_every_reason(problem, name, direction):
    if direction not in ROWS[name].directions:
        return
    reasons = ROWS[name].reasons(problem, direction)
    assert all(isinstance(reason, str) and reason for reason in reasons)
    if not reasons:
        assert select(problem, direction, name).name == name
        return
    with pytest.raises(NotImplementedError) as caught:
        select(problem, direction, name)
    assert all(reason in str(caught.value) for reason in reasons)
    assert not any(f"{other}:" in str(caught.value) for other in NAMES if other != name), "others weren't asked"


def test_two_reasons_are_both_told():
    with pytest.raises(NotImplementedError, match=r"not on 'xpu'.*compute capability 7\.5"):
        select(replace(PROBLEM, device="xpu", capability=(7, 5)), "forward", "portable")


@pytest.fixture
def front(monkeypatch):
    """A table that begins with a kernel for forwards alone, of head_dim 64; its launcher is eager's."""
    reasons = lambda problem, direction: [] if problem.head_dim == 64 else ["only 64"]  # noqa: E731
    rows = lambda problem: {"forward": configs.Config(1, 2, 3, 4)}  # noqa: E731
    kernel = Kernel("front", reasons, rows, lambda problem, direction: (96, 512), "flashattn.eager", directions=("forward",))
    for module, name in product(("select", "explain"), ("KERNELS", "NAMES")):
        module = import_module(f"flashattn.dispatch.{module}")
        if hasattr(module, name):
            monkeypatch.setattr(module, name, ((kernel if name == "KERNELS" else "front"), *getattr(module, name)))
    select.cache_clear()
    yield kernel
    select.cache_clear()


def test_the_passes_are_chosen_apart(front):
    assert [select(PROBLEM, direction).name for direction in DIRECTIONS] == ["front", "portable", "portable"]
    assert [select(replace(PROBLEM, head_dim=32), direction).name for direction in DIRECTIONS] == ["portable"] * 3
    assert [select(PROBLEM, direction, "eager").name for direction in DIRECTIONS] == ["eager"] * 3


def test_a_named_kernel_leaves_a_pass_that_it_has_not_to_the_table(front):
    assert [select(PROBLEM, direction, "front").name for direction in DIRECTIONS] == ["front", "portable", "portable"]
    with pytest.raises(NotImplementedError, match=r"no kernel can run the forward of this call \(front: only 64\)"):
        select(replace(PROBLEM, head_dim=32), "forward", "front")


def test_explain_shows_the_kernels_of_both_passes(front):
    found = explain_problem(PROBLEM, "front")
    assert found.kernels == {"forward": "front", "backward": "portable", "tangent": "portable"}
    unaligned = ROWS["hopper"].reasons(PROBLEM, "backward")
    without = {"front": ["it has no tangent"], "hopper": ["it has no tangent"]}
    assert found.passed_over == {
        "forward": {}, "backward": {"front": ["it has no backward"], "hopper": unaligned}, "tangent": without
    } and unaligned  # fmt: skip
    assert found.tiles == {**ROWS["portable"].rows(PROBLEM), "forward": configs.Config(1, 2, 3, 4)} and next(iter(found.tiles)) == "forward"
    text = str(found)
    assert "  kernel of the forward: front\n  kernel of the backward: portable\n    not front: it has no backward\n" in text
    assert [text.count(f"padded to {dims}") for dims in ("96/512", "64/64")] == [1, len(found.tiles) - 1]
    alike = str(explain_problem(replace(PROBLEM, head_dim=32), "portable"))
    assert "  kernel: portable\n    not front: only 64; it has no backward\n" in alike, "front was passed over for two reasons"
    front_only = explain_problem(PROBLEM, "eager")
    assert front_only.passed_over["forward"]["front"] == ["impl='eager' was asked for"]


def test_second_derivatives_are_eager_whatever_runs_the_rest():
    for impl in (None, *NAMES):
        assert select(PROBLEM, "second", impl).name == "eager"
    assert [name for name in NAMES if "tangent" not in ROWS[name].directions] == ["hopper"]


def test_the_operators_ask_for_their_pass(front, monkeypatch):
    ran = []
    spied = lambda problem, direction, impl: ran.append((direction, impl)) or select(problem, direction, impl)  # noqa: E731
    monkeypatch.setattr(schemas, "select", spied)
    q = torch.randn(1, 3, 2, 64, requires_grad=True)
    attention(q, q, q, impl="front").sum().backward()
    assert ran == [("forward", "front"), ("backward", "front")]


# ------------------------------------------------------------------------------------------------------------------------ machines


@pytest.mark.parametrize(
    "triton, numpy, broken",
    [
        ("3.6.0", "2.4.0", True),
        ("3.6.0+git1b0418a9", "2.10.1", True),
        ("3.6.0", "2.3.5", False),
        ("3.7.0", "2.4.6", False),
        ("3.10.0", "2.4.0rc1", False),
        (None, "2.4.0", False),
    ],
)
def test_a_numpy_that_breaks_the_interpreter_is_a_reason(monkeypatch, triton, numpy, broken):
    def version(name):
        if triton is None and name == "triton":
            raise PackageNotFoundError(name)
        return {"triton": triton, "numpy": numpy}[name]

    monkeypatch.setattr(table, "version", version)
    table.interpreter_reasons.cache_clear()
    problem = replace(PROBLEM, dtype="float32", device="cpu", capability=None)
    try:
        assert [bool(table.interpreter_reasons()), len(table.portable_reasons(replace(problem, interpret=True), "forward"))] == [broken] * 2
        if broken:
            with pytest.raises(NotImplementedError, match=f"Triton {triton[:5]}.* fails with numpy {numpy}: install numpy<2.4"):
                select.__wrapped__(replace(problem, interpret=True), "forward", "portable")
        assert table.portable_reasons(PROBLEM, "forward") == [], "compiled kernels are not concerned"
    finally:
        table.interpreter_reasons.cache_clear()


def test_an_amd_gpu_is_not_the_nvidia_one_that_torch_says_it_is(monkeypatch):
    """gfx90a: device type "cuda", capability (9, 0), which are Hopper's."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "AMD Instinct MI300X")
    _machine.cache_clear()
    try:
        with FakeTensorMode():
            q = torch.empty(1, 128, 2, 64, device="cuda", dtype=torch.bfloat16)
        found = explain(q, q, q)
        assert (found.problem.device, found.problem.capability) == ("hip", None)
        assert found.kernels == dict.fromkeys(DIRECTIONS, "eager") and found.gpu == "MI300X"
        assert "ROCm" in found.passed_over["forward"]["portable"][0]
        with pytest.raises(NotImplementedError, match=r"AMD GPUs \(ROCm\) are untested"):
            explain(q, q, q, impl="portable")
    finally:
        _machine.cache_clear()


def test_two_spellings_of_a_mask_are_one_problem():
    """So they compile one kernel."""
    q, k = torch.empty(1, 5, 2, 8, device="meta"), torch.empty(1, 7, 2, 8, device="meta")
    cu = torch.empty(3, dtype=torch.int32, device="meta")
    spellings = ({"causal": "top-left"}, {"causal": True}, {"window": (None, 0)}, {"window": (4, numpy.int64(0))})
    assert len({explain(q, q, q, **spelling).problem for spelling in spellings}) == 1
    assert len({explain(q, k, k, **spelling).problem for spelling in ({"causal": "top-left", "window": (9, 9)}, {"causal": True})}) == 2
    assert len({explain(q[0], q[0], q[0], cu, cu, **spelling).problem for spelling in spellings[:2]}) == 2
    assert len({explain(q, q, q, softmax_scale=scale).problem for scale in (1, 1.0, numpy.float32(1))}) == 1
    assert type(explain(q, q, q, softmax_scale=1).problem.softmax_scale) is float


@pytest.mark.parametrize("impl", ["triton", "", "EAGER", 3, ["eager"]], ids=repr)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_unknown_impl_lists_the_known(impl, device):
    """On meta tensors too, where no kernel is chosen: a dry run finds the typo."""
    q = torch.randn(1, 3, 2, 8, device=device)
    cu = torch.tensor([0, 3], dtype=torch.int32).to(device)
    for call, arguments in ((attention, (q, q, q)), (attention_varlen, (q[0], q[0], q[0], cu, cu)), (explain, (q, q, q))):
        with pytest.raises(ValueError) as caught:
            call(*arguments, impl=impl)
        assert f"impl={impl!r}" in str(caught.value) and all(repr(name) in str(caught.value) for name in NAMES)


def test_a_named_kernel_that_cannot_run_is_an_error_of_the_call(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    q = torch.randn(1, 3, 2, 8)
    for call in (attention, explain):
        with pytest.raises(NotImplementedError, match="portable: CPU tensors run in Triton's interpreter only: set TRITON_INTERPRET=1"):
            call(q, q, q, impl="portable")


@pytest.mark.parametrize("value, expected", [(None, "eager"), ("0", "eager"), ("1", "portable")])
def test_cpu_tensors_get_triton_only_in_its_interpreter(value, expected):
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path)} | ({} if value is None else {"TRITON_INTERPRET": value})
    code = "import torch, flashattn; q = torch.randn(1, 3, 2, 8); print(flashattn.explain(q, q, q).kernels['forward'])"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == (expected, 0), done.stderr


@pytest.mark.parametrize("interpret, dtype", list(product((False, True), (torch.float32, torch.bfloat16))))
def test_explain_names_what_runs(monkeypatch, interpret, dtype):
    monkeypatch.setenv("TRITON_INTERPRET", "1" if interpret else "0")
    ran = []
    monkeypatch.setattr(schemas, "launcher", lambda path: ran.append(path) or launcher("flashattn.eager"))
    q = torch.randn(1, 3, 2, 8, dtype=dtype, requires_grad=True)
    attention(q, q, q, causal=True).sum().backward()
    torch.func.jvp(lambda q: attention(q, q, q, causal=True), (q.detach(),), (q.detach(),))
    assert ran == [ROWS[name].launch for name in explain(q, q, q, causal=True).kernels.values()]
