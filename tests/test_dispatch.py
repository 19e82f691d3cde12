"""The table of kernels, the choice from it and `explain`, for GPUs that nobody here owns: all of it is a function of a `Problem`."""

import inspect
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from flashattn import attention, attention_varlen, explain
from flashattn.dispatch import configs
from flashattn.dispatch.configs import portable
from flashattn.dispatch.explain import _units
from flashattn.dispatch.explain import explain as explain_problem
from flashattn.dispatch.select import launcher, select
from flashattn.dispatch.table import KERNELS, TABLES, padded_head_dim
from flashattn.problem import DTYPES, Problem
from flashattn.reference import keep_mask
from flashattn.torch_ops import schemas
from support import dense, packed

CAPABILITIES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)]
PROBLEM = Problem("bfloat16", 2, 128, 256, 4, 2, 64, 64, 0.125, capability=(9, 0))
NAMES = [row.name for row in KERNELS]
ROWS = {row.name: row for row in KERNELS}
PASSES = ("forward", "delta", "dkdv", "dq"), ("forward", "delta", "dk", "dv", "dq")  # in the order of running

# Every kind of machine, and what runs there.
MACHINES = [
    *[(replace(PROBLEM, dtype=dtype, capability=capability), "portable") for dtype, capability in product(DTYPES, CAPABILITIES)],
    *[(replace(PROBLEM, dtype=dtype, capability=(7, 5)), "eager") for dtype in DTYPES],
    *[(replace(PROBLEM, dtype=dtype, device=where, capability=None), "eager") for dtype, where in product(DTYPES, ("cpu", "mps", "meta"))],
    (replace(PROBLEM, device="cpu", capability=None, interpret=True), "eager"),  # bfloat16
    (replace(PROBLEM, dtype="float16", device="cpu", capability=None, interpret=True), "portable"),
    (replace(PROBLEM, dtype="float32", device="cpu", capability=None, interpret=True), "portable"),
    (replace(PROBLEM, device="xpu", capability=(7, 5)), "eager"),  # two reasons against portable
    (replace(PROBLEM, dtype="float64", device="mps", capability=None), None),
]

# --------------------------------------------------------------------------------------------------------------------------- table


@pytest.mark.parametrize("dtype, capability", product(DTYPES, CAPABILITIES))
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
    for dtype, heads_q, head_dim, head_dim_v in product(DTYPES, (2, 4), *[(1, 40, 64, 72, 128, 192, 256)] * 2):
        sizes = {"heads_q": heads_q, "head_dim": head_dim, "head_dim_v": head_dim_v}
        problem = replace(PROBLEM, dtype=dtype, **sizes, capability=capability)
        taken |= {row.block_m for row in ROWS["portable"].rows(problem).values() if row.num_warps == 0}
    assert [key for number, key in enumerate(table) if number not in taken] == []


def test_head_dims_are_padded_to_the_next_power_of_two_from_16_on():
    assert [padded_head_dim(d) for d in (1, 15, 16, 17, 64, 65, 96, 128, 129, 256)] == [16, 16, 16, 32, 64, 128, 128, 128, 256, 256]


@pytest.mark.parametrize("name", NAMES)
def test_launchers_have_one_signature(name):
    if name == "portable" and find_spec("triton") is None:
        pytest.skip("needs Triton")
    module = launcher(ROWS[name].launch)
    forward, backward = (list(inspect.signature(function).parameters) for function in (module.forward, module.backward))
    assert forward == ["problem", "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"]
    assert backward == ["problem", "needs", "dout", "dlse", "q", "k", "v", "out", "lse", "cu_seqlens_q", "cu_seqlens_k"]


# -------------------------------------------------------------------------------------------------------------------------- choice


@pytest.mark.parametrize("problem, name", MACHINES, ids=lambda value: value if isinstance(value, str) else None)
def test_the_first_that_can_is_chosen(problem, name):
    if name is None:
        with pytest.raises(NotImplementedError, match="no kernel can run this call") as caught:
            select(problem)
        assert all(f"{row.name}: {', '.join(row.reasons(problem))}" in str(caught.value) for row in KERNELS)
    else:
        assert select(problem).name == name
        assert select(replace(problem)) is select(problem), "equal problems, one answer"
        assert all(row.reasons(problem) for row in KERNELS[: NAMES.index(name)])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("problem", [problem for problem, _ in MACHINES])
def test_a_named_kernel_runs_or_says_every_reason(problem, name):
    reasons = ROWS[name].reasons(problem)
    assert all(isinstance(reason, str) and reason for reason in reasons)
    if not reasons:
        assert select(problem, name).name == name
        return
    with pytest.raises(NotImplementedError) as caught:
        select(problem, name)
    assert all(reason in str(caught.value) for reason in reasons)
    assert not any(f"{other}:" in str(caught.value) for other in NAMES if other != name), "others weren't asked"


def test_two_reasons_are_both_told():
    with pytest.raises(NotImplementedError, match=r"not on 'xpu'.*compute capability 7\.5"):
        select(replace(PROBLEM, device="xpu", capability=(7, 5)), "portable")


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
    code = "import torch, flashattn; q = torch.randn(1, 3, 2, 8); print(flashattn.explain(q, q, q).kernel)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == (expected, 0), done.stderr


@pytest.mark.parametrize("interpret, dtype", product((False, True), (torch.float32, torch.bfloat16)))
def test_explain_names_what_runs(monkeypatch, interpret, dtype):
    monkeypatch.setenv("TRITON_INTERPRET", "1" if interpret else "0")
    ran = []
    monkeypatch.setattr(schemas, "launcher", lambda path: ran.append(path) or launcher("flashattn.eager"))
    q = torch.randn(1, 3, 2, 8, dtype=dtype, requires_grad=True)
    attention(q, q, q, causal=True).sum().backward()
    assert ran == [ROWS[explain(q, q, q, causal=True).kernel].launch] * 2


# ------------------------------------------------------------------------------------------------------------------------- explain


def test_explain_prints_the_choice_the_reasons_the_tiles_and_the_work():
    found = explain_problem(replace(PROBLEM, head_dim=72, window_left=5, window_right=0), None)
    assert found.kernel == "portable" and found.passed_over == {}
    text = str(found)
    assert "cuda sm_90" in text and "bfloat16" in text and "heads 4/2" in text and "128 queries x 256 keys" in text
    assert "window (5, 0) around the bottom-right diagonal" in text and "head_dim padded to 128/64" in text
    assert "kernel: portable" in text
    assert tuple(found.tiles) in PASSES
    for name, row in found.tiles.items():
        (line,) = (line for line in text.splitlines() if line.split()[0] == name)
        numbers = [row.block_m, *([row.block_n] if name != "delta" else []), row.num_warps, row.num_stages]
        assert [int(word) for word in line.split() if word.isdigit()] == numbers
    for direction in ("forward", "backward"):
        (line,) = (line for line in text.splitlines() if line.split()[0] == f"{direction}:")
        assert _units(found.flops[direction], "FLOP") in line and _units(found.bytes[direction], "B") in line and "at most" not in line
    assert max(map(len, text.splitlines())) <= 120


def test_explain_prints_why_kernels_were_passed_over():
    found = explain_problem(replace(PROBLEM, device="xpu", capability=(7, 5)), None)
    assert found.kernel == "eager" and not found.tiles
    assert f"not portable: {'; '.join(ROWS['portable'].reasons(found.problem))}" in str(found) and len(found.passed_over["portable"]) == 2
    assert "not portable: impl='eager' was asked for" in str(explain_problem(PROBLEM, "eager"))


def test_numbers_are_printed_with_a_prefix():
    numbers = (0, 999, 1000, 2880, 549_889_523_712, 1_374_723_809_280, 10**24)
    assert [_units(number, "B") for number in numbers] == ["0 B", "999 B", "1 kB", "2.88 kB", "549.9 GB", "1.375 TB", "1e+06 EB"]


LENGTHS = st.integers(0, 9)
WINDOWS = st.tuples(*[st.none() | st.integers(0, 9)] * 2)
CAUSAL = st.sampled_from([False, True, "top-left"])


@given(LENGTHS, LENGTHS, WINDOWS, CAUSAL, st.integers(0, 2), st.integers(1, 3), st.integers(1, 3))
def test_work_is_what_counting_gives(rows_q, rows_k, window, causal, batch, group, dim):
    """2 FLOPs a kept pair, head and multiply-add; the bytes of the tensors themselves."""
    data = dense(rows_q, rows_k, batch=batch, heads=2 * group, heads_kv=2, dim=dim, dim_v=2 * dim, dtype=torch.float16)
    found = explain(data.q, data.k, data.v, causal=causal, window=window, impl="eager")
    pairs = batch * 2 * group * int(keep_mask(rows_q, rows_k, causal=causal, window=window).sum())
    assert found.flops == {"forward": 2 * pairs * (dim + 2 * dim), "backward": 2 * pairs * (3 * dim + 2 * 2 * dim)}
    forward = [data.q, data.k, data.v, data.dout, data.dlse]  # out and lse are like their gradients
    backward = [*forward, data.dout, data.q, data.k, data.v]
    assert found.bytes == {name: sum(x.nbytes for x in tensors) for name, tensors in (("forward", forward), ("backward", backward))}


@given(st.lists(st.tuples(LENGTHS, LENGTHS), min_size=1, max_size=4), WINDOWS, CAUSAL, st.booleans())
def test_work_of_a_packed_call_is_an_upper_bound(lengths, window, causal, told):
    """As good as can be had without reading lengths that live on a GPU; exact for one sequence of known lengths."""
    lens_q, lens_k = map(list, zip(*lengths, strict=True))
    data = packed(lens_q, lens_k, heads=2, dim=3, dtype=torch.float16)
    most = {"max_seqlen_q": max(lens_q), "max_seqlen_k": max(lens_k)} if told else {}
    found = explain(data.q, data.k, data.v, data.cu_q, data.cu_k, causal=causal, window=window, impl="eager", **most)
    pairs = sum(int(keep_mask(*pair, causal=causal, window=window).sum()) for pair in lengths)
    assert found.flops["forward"] >= 2 * 2 * pairs * 6
    assert found.flops["forward"] <= 2 * 2 * 6 * min(sum(lens_q) * max(lens_k if told else [sum(lens_k)]), len(lengths) * 36 * 36)
    if len(lengths) == 1:
        assert found.flops["forward"] == 2 * 2 * pairs * 6
    assert "at most" in str(found) and f"packed in {sum(lens_q)} and {sum(lens_k)} rows" in str(found)


def test_explain_needs_shapes_only():
    data = dense(5, 7, batch=2, heads=4, heads_kv=2, dim=8, dtype=torch.float32)
    qkv, options = (data.q, data.k, data.v), {"causal": True, "impl": "eager"}
    real = explain(*qkv, **options)
    with FakeTensorMode() as mode:
        fake = explain(*map(mode.from_tensor, qkv), **options)
    transposed = explain(*(x.transpose(1, 2) for x in qkv), layout="bhsd", **options)
    assert fake == real == transposed
    meta = explain(*(x.to("meta") for x in qkv), causal=True)
    assert (meta.kernel, meta.flops, meta.bytes) == ("eager", real.flops, real.bytes)


def test_explain_of_packed_meta_tensors():
    data = packed([3, 5], [4, 2], heads=4, heads_kv=2, dim=8, dtype=torch.float32)
    tensors = (data.q, data.k, data.v, data.cu_q, data.cu_k)
    assert explain(*(x.to("meta") for x in tensors), impl="eager").flops == explain(*tensors, impl="eager").flops
    assert explain(*tensors, max_seqlen_q=torch.tensor(5)).problem == explain(*tensors).problem, "a tensor is not read"


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without CUDA")
def test_explain_of_fake_cuda_tensors_without_cuda():
    with FakeTensorMode():
        q = torch.empty(1, 128, 2, 64, device="cuda", dtype=torch.bfloat16)
        found = explain(q, q, q)
    assert found.kernel == "portable" and found.problem.capability is None and found.tiles


@pytest.mark.gpu
def test_explain_on_this_gpu():
    q = torch.empty(1, 128, 2, 64, device="cuda", dtype=torch.bfloat16)
    found = explain(q, q, q)
    assert found.kernel == "portable" and found.problem.capability == torch.cuda.get_device_capability()
    assert "cuda sm_{}{}".format(*torch.cuda.get_device_capability()) in str(found)
    assert not found.problem.tf32
    torch.backends.cuda.matmul.fp32_precision, before = "tf32", torch.backends.cuda.matmul.fp32_precision
    try:
        assert explain(q.float(), q.float(), q.float()).problem.tf32
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
