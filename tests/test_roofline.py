"""The figures that explanations of attention and of rooflines print, each from the code; no GPU is needed.

The surprising fact: all of them follow from two numbers of a data sheet and from counting; nothing here was measured.
"""

import dataclasses
import inspect
import math
import re

import pytest
import torch

from flashattn import roofline
from flashattn.roofline import GPUS, MFUMeter, Transformer, bound_of, by_hand, detect, find, mfu, ridge, train_flops_per_token
from flashattn.roofline.bound import smallest_rows
from flashattn.roofline.model import MODELS, training_days, useful_flops
from flashattn.roofline.report import operations
from flashattn.roofline.work import Work, matmul

H100 = find("H100")


@pytest.mark.parametrize("name", [name for name in roofline.__all__ if callable(getattr(roofline, name))])
def test_public_docstrings_name_every_argument(name):
    """Or field, where it is data."""
    thing = getattr(roofline, name)
    doc = inspect.getdoc(thing)
    missing = [argument for argument in inspect.signature(thing).parameters if not re.search(rf"\b{argument}\b", doc)]
    assert not missing, f"the docstring of flashattn.roofline.{name} doesn't name {', '.join(missing)}"


# ----------------------------------------------------------------------------------------------------------------- the GPU table


def test_every_gpu_has_a_source_and_numbers_that_hang_together():
    for gpu in GPUS:
        assert len(gpu.source) > 20 and gpu.marks
        assert gpu.peaks["bfloat16"] == gpu.peaks["float16"] >= gpu.peaks["tf32"] * 1.97
        assert gpu.peaks["tf32"] >= gpu.peaks["float32"] > 0
        assert gpu.peaks.get("float8", 2 * gpu.peaks["bfloat16"]) == pytest.approx(2 * gpu.peaks["bfloat16"], rel=0.02)
        assert gpu.smem_per_block <= gpu.smem_per_sm and gpu.memory > 20e9 and 0.8e12 < gpu.bandwidth <= 8e12
    assert len({gpu.name for gpu in GPUS}) == len(GPUS)


def test_peaks_and_bandwidths_are_the_published_dense_ones():
    rows = {name: find(name) for name in ("A100", "H100", "H100 PCIe", "H200", "B200", "L40S", "RTX 4090", "MI300X")}
    tflops = {name: gpu.peak("bfloat16") / 1e12 for name, gpu in rows.items()}
    assert tflops == {
        "A100": 312, "H100": 989, "H100 PCIe": 756, "H200": 989, "B200": 2250, "L40S": 362, "RTX 4090": 165.2, "MI300X": 1307.4,
    }  # fmt: skip
    bandwidths = [round(rows[name].bandwidth / 1e12, 2) for name in ("A100", "H100", "H200", "B200")]
    assert bandwidths == [2.04, 3.35, 4.8, 8.0]
    assert (H100.smem_per_sm, H100.smem_per_block, H100.registers_per_sm) == (228 * 1024, 227 * 1024, 256 * 1024)


NAMES = {
    "NVIDIA A100-SXM4-40GB": "A100 40GB", "NVIDIA A100-SXM4-80GB": "A100 80GB", "NVIDIA A100 80GB PCIe": "A100 80GB PCIe",
    "NVIDIA H100 80GB HBM3": "H100 SXM", "NVIDIA H100 PCIe": "H100 PCIe", "NVIDIA H100 NVL": "H100 NVL", "NVIDIA H200": "H200",
    "NVIDIA H200 NVL": "H200 NVL", "NVIDIA B200": "B200", "NVIDIA GB200": "GB200", "NVIDIA L40S": "L40S",
    "NVIDIA GeForce RTX 4090": "RTX 4090", "AMD Instinct MI300X": "MI300X",
}  # fmt: skip
LESSER = (
    "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "GRID A100-10C",
    "NVIDIA L40S-48Q", "NVIDIA A100-SXM-64GB", "NVIDIA H100 64GB HBM2",
)  # fmt: skip
STRANGERS = (*LESSER, "Tesla T4", "NVIDIA L40", "NVIDIA GH200 480GB")


def test_devices_are_recognised_by_torchs_name():
    assert {name: detect(name).name for name in NAMES} == NAMES
    assert {name: find(name).name for name in NAMES} == NAMES, "what the device is called will do as a name too"
    assert [detect(name) for name in STRANGERS] == [None] * len(STRANGERS)
    assert {find(spelled).name for spelled in ("h100-sxm", "H100 SXM", "h100sxm", "H100")} == {"H100 SXM"}
    assert [find(spelled).name for spelled in ("A100", "A100 PCIe", "A100 SXM4 40 GB")] == ["A100 80GB", "A100 80GB PCIe", "A100 40GB"]


@pytest.mark.gpu
def test_the_row_of_this_gpu_is_what_its_driver_says():
    there = torch.cuda.get_device_properties(0)
    row = detect(there.name)
    if row is None or torch.version.hip:
        pytest.skip(f"{there.name} is not in the table, or its driver counts otherwise")
    assert (row.sms, row.l2, row.smem_per_sm) == (there.multi_processor_count, there.L2_cache_size, there.shared_memory_per_multiprocessor)
    assert row.registers_per_sm == 4 * there.regs_per_multiprocessor and row.capability == (there.major, there.minor)
    assert 0.9 < there.total_memory / row.memory < 1.08


def test_an_unknown_gpu_gets_the_closest_names():
    with pytest.raises(ValueError, match=r"no GPU 'H20O' in the table; closest: H200.*by hand"):
        find("H20O")
    with pytest.raises(TypeError, match="name is int"):
        find(100)
    with pytest.raises(ValueError, match="dtype='int4': the H200 has peaks for bfloat16, "):
        find("H200").peak("int4")


def test_a_gpu_by_hand():
    own = by_hand(100e12, 1e12, H100)
    assert (ridge(own), ridge(own, "float32"), own.sms) == (100, 100, H100.sms)
    for peak, bandwidth, name in ((0, 1e12, "peak"), (1e12, -1, "bandwidth"), (math.inf, 1, "peak"), ("1", 1, "peak")):
        with pytest.raises(ValueError, match=f"{name}="):
            by_hand(peak, bandwidth, H100)


# ----------------------------------------------------------------------------------------------------------------------- the bound


def test_the_ridge_of_the_h100():
    assert round(ridge(H100)) == 295
    assert ridge(H100) == 989e12 / 3.35e12


CLASSIC = {  # FLOP/byte, microseconds of arithmetic and of memory as printed with one decimal
    "matmul [16k, 8k] x [8k, 28k]": ("4587.5", "7782.2", "500.8", "compute"),
    "matmul [2, 8k] x [8k, 28k]": ("2.0", "0.9", "140.3", "memory"),
    "Q K^T, one head, T 8k, D 128": ("124.1", "17.4", "41.3", "memory"),
    "RMSNorm [16k, 8k]": ("1.0", "0.5", "160.3", "memory"),
    "softmax [8k, 8k]": ("1.2", "0.3", "80.1", "memory"),
}


@pytest.mark.parametrize("name", CLASSIC)
def test_the_classic_table_of_the_h100(name):
    limit = bound_of(operations()[name], H100)
    found = tuple(f"{value:.1f}" for value in (limit.work.intensity, limit.compute_s * 1e6, limit.memory_s * 1e6))
    assert (*found, limit.binds) == CLASSIC[name]
    assert limit.seconds == max(limit.compute_s, limit.memory_s)


def test_a_bound_is_what_can_be_attained():
    low, high = (bound_of(Work(flops, 1000), H100) for flops in (1000, 10**6))
    assert low.attainable == pytest.approx(low.work.intensity * H100.bandwidth)
    assert high.attainable == pytest.approx(H100.peak("bfloat16"))
    assert low.share(2 * low.seconds) == 0.5
    assert bound_of(Work(0, 0), H100).attainable == 0 == Work(5, 0).intensity
    at_the_ridge = by_hand(1, 1, H100)
    assert bound_of(matmul(smallest_rows(18, 18, 12, ridge(at_the_ridge)), 3, 3), at_the_ridge).binds == "compute"
    with pytest.raises(ValueError, match="seconds=0"):
        low.share(0)


# ---------------------------------------------------------------------------------------------------------------- a model of matmuls


def test_llama3_8b_at_three_sizes():
    """15 GFLOP a token; the weights are 15 GB, and the activations of 4096 tokens half as much again and more."""
    llama = MODELS["llama3-8b"]
    found = [llama.forward(tokens) for tokens in (1, 64, 4096)]
    assert llama.parameters() == 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 4096 * 128256 == 7_504_658_432
    assert [work.flops for work in found] == [2 * 7_504_658_432 * tokens for tokens in (1, 64, 4096)]
    assert [work.bytes for work in found] == [15_014_824_448, 15_361_802_240, 37_568_380_928]
    assert [round(work.intensity, 1) for work in found] == [1.0, 62.5, 1636.4]
    assert [bound_of(work, H100).binds for work in found] == ["memory", "memory", "compute"]


def test_llama3_8b_becomes_compute_bound_exactly_there():
    llama = MODELS["llama3-8b"]
    crossing = smallest_rows(*llama.row(), ridge(H100))
    assert crossing == 332
    assert llama.forward(crossing).intensity >= ridge(H100) > llama.forward(crossing - 1).intensity


SMALLEST = {
    "A100 40GB": 208, "A100 80GB PCIe": 166, "A100 80GB": 157, "H100 PCIe": 402, "H100 NVL": 222, "H100 SXM": 310, "H200 NVL": 179,
    "H200": 213, "GB200": 329, "B200": 295, "L40S": 449, "RTX 4090": 169, "MI300X": 257,
}  # fmt: skip


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_the_smallest_batch_that_is_compute_bound(gpu):
    k, n = 8192, 28672
    rows = smallest_rows(2 * k * n, 2 * k * n, 2 * (k + n), ridge(gpu))
    assert rows == SMALLEST[gpu.name]
    assert matmul(rows, k, n).intensity >= ridge(gpu) > matmul(rows - 1, k, n).intensity


def test_some_products_never_become_compute_bound():
    assert smallest_rows(2 * 128 * 128, 2 * 128 * 128, 2 * 256, ridge(H100)) is None, "their intensity stays below 64"


def test_a_transformer_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="width=10: expected a multiple of heads=3"):
        Transformer(10, 3, 1, 1)
    with pytest.raises(ValueError, match="heads=4: expected a multiple of heads_kv=3"):
        Transformer(8, 4, 1, 1, 3)
    with pytest.raises(ValueError, match="layers=0"):
        Transformer(8, 4, 0, 1)
    with pytest.raises(TypeError, match=r"width=8\.0"):
        Transformer(8.0, 4, 1, 1)
    for name in ("heads_kv", "hidden"):
        with pytest.raises(ValueError, match=f"{name}=0"):
            Transformer(8, 4, 1, 1, **{name: 0})
    assert Transformer(8, 4, 1, 100).matmuls()["mlp in"] == (8, 32, 1), "4 C by default"


# ------------------------------------------------------------------------------------------------------------------------------ MFU


def test_llama3_405b_takes_seventy_days():
    """16 000 H100s at 40 %, 15.6 trillion tokens."""
    useful = useful_flops(0.4, H100.peak("bfloat16"), 16000)
    flops = train_flops_per_token(405 * 10**9) * 15.6e12
    assert f"{useful:.1e}" == "6.3e+18" and f"{flops:.1e}" == "3.8e+25"
    assert 69 < training_days(flops, useful) < 70 and round(training_days(3.8e25, useful)) == 69
    assert mfu(train_flops_per_token(405 * 10**9), useful / (6 * 405e9), 989e12, 16000) == pytest.approx(0.4)
    assert MODELS["llama3-405b"].parameters() == pytest.approx(405e9, rel=0.005)


def test_attention_counts_beside_the_parameters():
    plain, full = train_flops_per_token(1000), train_flops_per_token(1000, 2, 8, 16)
    assert plain == 6000
    assert full - plain == 12 * 2 * 8 * 16
    assert train_flops_per_token(1000, 2, 8, 16, causal=True) - plain == (full - plain) / 2
    for wrong in ((1000, 2), (1000, 2, 8), (0,)):
        with pytest.raises(ValueError, match="expected at least 1"):
            train_flops_per_token(*wrong)
    with pytest.raises(ValueError, match=r"utilisation=1\.1"):
        useful_flops(1.1, 1e12)
    for wrong, message in (((1.0, 1.0, 1.0, 0), "gpus=0"), ((1.0, math.inf, 1.0), "tokens_per_second=inf")):
        with pytest.raises(ValueError, match=message):
            mfu(*wrong)


def test_the_meter_reads_intervals():
    now = iter([0.0, 10.0, 12.0, 20.0, 24.0])
    meter = MFUMeter(6e9, find("H200"), gpus=2, clock=lambda: next(now))
    with pytest.raises(RuntimeError, match="start"):
        meter.lap(1)
    meter.start()
    first = meter.lap(1000)
    assert (first.tokens_per_second, first.mfu) == (100, 100 * 6e9 / (2 * 989e12))
    assert meter.lap(1000).tokens_per_second == 500, "an interval begins where the last one ended"
    meter.start()
    assert meter.lap(1000).tokens_per_second == 250, "or where it is started"
    assert MFUMeter(1.0, None).peak is None
    unknown = MFUMeter(1.0, None, clock=iter([0.0, 1.0]).__next__)
    unknown.start()
    assert dataclasses.astuple(unknown.lap(7)) == (7, None)
