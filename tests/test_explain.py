"""`explain`: the choice in words, the work in numbers. How kernels are chosen is asked in test_dispatch.py."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from flashattn import explain
from flashattn.dispatch.explain import _units
from flashattn.dispatch.explain import explain as explain_problem
from flashattn.dispatch.table import DIRECTIONS, hopper_reasons, hopper_rows, portable_reasons, portable_rows
from flashattn.problem import Problem
from flashattn.reference import keep_mask
from flashattn.roofline import detect
from support import dense, packed

PROBLEM = Problem("bfloat16", 2, 128, 256, 4, 2, 64, 64, 0.125, capability=(9, 0))


@pytest.mark.parametrize("aligned", [True, False])
def test_explain_prints_the_choice_the_reasons_the_tiles_and_the_work(aligned):
    """Rows that a tensor map can address go to Hopper's kernels, which pad 72 to 96 in the forward."""
    found = explain_problem(replace(PROBLEM, head_dim=72, window_left=5, window_right=0, aligned=aligned), None)
    text = str(found)
    name, reasons = "hopper" if aligned else "portable", hopper_reasons(found.problem, "forward")
    assert found.kernels == {"forward": name, "backward": name, "tangent": "portable"}
    assert found.passed_over.pop("tangent") == {"hopper": ["it has no tangent"]}
    assert found.passed_over == dict.fromkeys(("forward", "backward"), {} if aligned else {"hopper": reasons})
    assert f"  kernel: {name}\n" in text
    assert ("  kernel of the tangent: portable\n    not hopper: it has no tangent\n" in text) == aligned
    if not aligned:
        assert f"    not hopper: {reasons[0]}\n" in text and len(reasons) == 1
    assert "cuda sm_90" in text and "bfloat16" in text and "heads 4/2" in text and "128 queries x 256 keys" in text
    assert "window (5, 0) around the bottom-right diagonal" in text
    portable = portable_rows(found.problem)
    assert found.tiles == (hopper_rows(found.problem) | {"tangent": portable["tangent"]} if aligned else portable)
    for name, row in found.tiles.items():
        (line,) = (line for line in text.splitlines() if line.split()[0] == name)
        assert f"head_dim padded to {'96/64' if aligned and name == 'forward' else '128/64'}, " in line
        numbers = [row.block_m, *([row.block_n] if name != "delta" else []), row.num_warps, row.num_stages]
        assert [int(word) for word in line.split() if word.isdigit()] == numbers
    for direction in DIRECTIONS:
        (line,) = (line for line in text.splitlines() if line.split()[0] == f"{direction}:")
        assert _units(found.flops[direction], "FLOP") in line and _units(found.bytes[direction], "B") in line and "at most" not in line
    assert max(map(len, text.splitlines())) <= 120


def test_explain_names_what_scores_have_and_whom_that_rules_out():
    problem = replace(PROBLEM, aligned=True, softcap=50.0, alibi=True, sinks=True, head_dim=256, head_dim_v=256)
    text = str(explain_problem(problem, None))
    assert "  scores with softcap 50, ALiBi, sinks\n" in text
    assert text.count("not hopper: a softcap at head dims above 128") == 1, "in the backward"
    assert "  scores with ALiBi, sinks\n" in str(explain_problem(replace(problem, softcap=0.0), None))
    assert "  scores with softcap 50\n" in str(explain_problem(replace(problem, alibi=False, sinks=False), None))
    assert "scores with" not in str(explain_problem(PROBLEM, None))
    x, per_head = torch.empty(2, 128, 4, 64, dtype=torch.float16, device="meta"), torch.empty(4, device="meta")
    found = explain(x, x, x, softcap=30, alibi_slopes=per_head, sinks=per_head).problem
    assert (found.softcap, found.alibi, found.sinks) == (30.0, True, True)
    assert explain(x, x, x, softcap=0).problem == explain(x, x, x).problem


def test_explain_prints_why_kernels_were_passed_over():
    found = explain_problem(replace(PROBLEM, device="xpu", capability=(7, 5)), None)
    assert set(found.kernels.values()) == {"eager"} and not found.tiles
    reasons = found.passed_over["forward"]["portable"]
    assert reasons == portable_reasons(found.problem, "forward") and len(reasons) == 2
    assert str(found).count(f"not portable: {'; '.join(reasons)}\n") == 1, "for both passes"
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
    once = 2 * pairs * (dim + 2 * dim)
    assert found.flops == {"forward": once, "backward": 2 * pairs * (3 * dim + 2 * 2 * dim), "tangent": 3 * once}
    forward = [data.q, data.k, data.v, data.dout, data.dlse]  # out and lse are like their gradients
    backward = [*forward, data.dout, data.q, data.k, data.v]
    moved = {"forward": forward, "backward": backward, "tangent": forward + forward}
    assert found.bytes == {name: sum(x.nbytes for x in tensors) for name, tensors in moved.items()}


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
    assert (meta.kernels, meta.flops, meta.bytes) == (real.kernels, real.flops, real.bytes)


def test_explain_of_packed_meta_tensors():
    data = packed([3, 5], [4, 2], heads=4, heads_kv=2, dim=8, dtype=torch.float32)
    tensors = (data.q, data.k, data.v, data.cu_q, data.cu_k)
    assert explain(*(x.to("meta") for x in tensors), impl="eager").flops == explain(*tensors, impl="eager").flops
    assert explain(*tensors, max_seqlen_q=torch.tensor(5)).problem == explain(*tensors).problem, "a tensor is not read"


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without CUDA")
def test_explain_of_fake_cuda_tensors_without_cuda():
    with FakeTensorMode():
        q = torch.empty(1, 128, 2, 64, device="cuda", dtype=torch.float16)
        found = explain(q, q, q)
    assert set(found.kernels.values()) == {"portable"} and found.problem.capability is None and found.tiles


@pytest.mark.gpu
def test_explain_on_this_gpu():
    q = torch.empty(1, 128, 2, 64, device="cuda", dtype=torch.bfloat16)
    found = explain(q, q, q)
    assert found.problem.capability == torch.cuda.get_device_capability() and found.problem.aligned
    assert set(found.kernels.values()) == {"hopper" if found.problem.capability == (9, 0) else "portable"}
    assert "cuda sm_{}{}".format(*torch.cuda.get_device_capability()) in str(found)
    assert not found.problem.tf32
    torch.backends.cuda.matmul.fp32_precision, before = "tf32", torch.backends.cuda.matmul.fp32_precision
    try:
        assert explain(q.float(), q.float(), q.float()).problem.tf32
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


# ----------------------------------------------------------------------------------------------------------------------- the roofline


def test_explain_tells_the_roofline_of_a_known_gpu():
    """2 x 4 heads x 128 x 256 pairs: the bytes take longer than the products on an H200, the other way round on a GPU given by hand."""
    found = explain_problem(PROBLEM, None, "H200")
    for direction in DIRECTIONS:
        bound = found.bounds[direction]
        assert bound.memory_s == found.bytes[direction] / 4.8e12 and bound.compute_s == found.flops[direction] / 989e12
        assert bound.binds == "memory"
        assert f"    roofline of the H200: {bound.seconds * 1e6:.4g} us, bound by memory\n" in f"{found}\n"
    long = explain_problem(replace(PROBLEM, seqlen_q=8192, seqlen_k=8192), None, "H200")
    assert str(long).count("bound by arithmetic") == 3
    assert explain_problem(PROBLEM, None).bounds == {} and "roofline" not in str(explain_problem(PROBLEM, None))
    with pytest.raises(ValueError, match="no GPU 'H20O' in the table"):
        explain_problem(PROBLEM, None, "H20O")


def test_products_of_float32_have_a_peak_of_their_own():
    single = replace(PROBLEM, dtype="float32", seqlen_q=8192, seqlen_k=8192)
    found = {tf32: explain_problem(replace(single, tf32=tf32), None, "H200") for tf32 in (False, True)}
    peaks = {tf32: one.flops["forward"] / one.bounds["forward"].compute_s for tf32, one in found.items()}
    assert {tf32: round(peak / 1e12) for tf32, peak in peaks.items()} == {False: 67, True: 494}


def test_a_measured_time_gets_its_share_of_the_bound():
    known = explain_problem(PROBLEM, None, "H200")
    bound_ms = known.bounds["forward"].seconds * 1e3
    found = known.measured(forward=4 * bound_ms)
    assert found.measured_ms == {"forward": 4 * bound_ms} and known.measured_ms == {}
    assert str(found).count("measured:") == 1
    (line,) = (line for line in str(found).splitlines() if "measured:" in line)
    tflops = known.flops["forward"] / (4 * bound_ms) / 1e9
    assert line == f"    measured: {4 * bound_ms * 1e3:.4g} us, {tflops:.4g} TFLOP/s, 25.0% of that roofline"
    both = found.measured(backward=1.0)
    assert set(both.measured_ms) == {"forward", "backward"}
    stranger = str(explain_problem(PROBLEM, None).measured(forward=1.0))
    assert "measured: 1000 us" in stranger and "roofline" not in stranger
    with pytest.raises(ValueError, match="backward=0: expected positive milliseconds"):
        known.measured(backward=0)


def test_explain_takes_the_name_of_a_gpu():
    q = torch.empty(1, 128, 2, 64, device="meta", dtype=torch.float16)
    assert explain(q, q, q, gpu="h100-sxm").gpu == "H100 SXM"
    assert explain(q, q, q).gpu is None
    cu = torch.zeros(3, dtype=torch.int32, device="meta")
    assert "roofline of the H200: at most" in str(explain(q[0], q[0], q[0], cu, cu, gpu="H200"))


@pytest.mark.gpu
def test_explain_knows_this_gpu():
    q = torch.empty(1, 128, 2, 64, device="cuda", dtype=torch.bfloat16)
    known = detect(torch.cuda.get_device_name())
    assert explain(q, q, q).gpu == (known and known.name)
