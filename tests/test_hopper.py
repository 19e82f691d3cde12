"""The Hopper forward, asked for by name: against the oracle, beside the portable kernel, twice, on two streams, in a graph.

Few shapes, because each kind of call is compiled for seconds; what only changes numbers (lengths, groups, strides) shares a kernel. The
surprising fact: a race in a pipeline shows in the hundredth tile rather than in the first, so some calls have more tiles than a GPU can
run at once.
"""

from functools import partial

import pytest
import torch

from flashattn import attention, attention_varlen, explain
from flashattn.torch_ops import aligned
from support import STRIDES, check, compare, dense, expect, packed, run, same_bits

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
gpu = pytest.mark.gpu
on_hopper = pytest.mark.skipif(torch.cuda.is_available() and not HOPPER, reason="needs compute capability 9.0")

BFLOAT16 = {"dtype": torch.bfloat16, "device": "cuda"}
FLOAT16 = {"dtype": torch.float16, "device": "cuda"}
MASKS = {
    "open": {},
    "causal": {"causal": True},
    "top-left": {"causal": "top-left"},
    "window": {"window": (30, 5)},
    "left": {"window": (200, None)},
    "self": {"window": (0, 0)},
}
LENGTHS = [(1, 1), (3, 7), (7, 3), (64, 1), (1, 300), (129, 257), (500, 128), (128, 500), (1000, 1000)]
forward = partial(check, impl="hopper", grads="", lse_grad=False)


# ------------------------------------------------------------------------------------------------------------------- which tensors


@pytest.mark.parametrize("name", STRIDES)
def test_aligned_says_what_a_tensor_map_can_address(name):
    x = dense(5, batch=2, heads=3, dim=64, dtype=torch.bfloat16, strides=name)
    addressable = {"contiguous", "heads_first", "fused", "every_second_row", "dim_not_last", "scalar"}  # the launcher copies the last two
    assert aligned(x.q, x.k, x.v) == (name in addressable)


def test_aligned_looks_at_the_dimensions_that_have_steps():
    x = torch.zeros(4, 3, 2, 20, dtype=torch.bfloat16)
    good = x.new_zeros(4, 3, 2, 24)
    assert not aligned(x, x, x), "40 bytes a head"
    for fine in (x[:1, :1, :1], x[..., :16].contiguous(), good[..., :20]):  # the last has 48 bytes a head, of which 40 are used
        assert aligned(fine, fine, fine)
    for tensors in ((x, good, good), (good, x, good), (good, good, x), (good, good, good[..., 1:21])):
        assert not aligned(*tensors)


def test_the_reason_is_told():
    x = dense(5, batch=2, heads=3, dim=64, dtype=torch.bfloat16, strides="odd_offset")
    assert any("TMA" in reason for reason in explain(x.q, x.k, x.v).passed_over["forward"]["hopper"])


# ------------------------------------------------------------------------------------------------------------------------ the oracle


@gpu
@on_hopper
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_lengths_and_masks(lengths, mask, dim):
    forward(dense(*lengths, batch=2, heads=4, heads_kv=2, dim=dim, **BFLOAT16), **MASKS[mask])


@gpu
@on_hopper
@pytest.mark.parametrize("dims", [
    (8, 8), (40, 64), (72, 72), (96, 96), (104, 128), (192, 128), (192, 192), (128, 64), (64, 256), (256, 40),
], ids=str)  # fmt: skip
def test_head_dims(dims):
    head_dim, head_dim_v = dims
    forward(dense(301, 703, batch=2, heads=4, heads_kv=2, dim=head_dim, dim_v=head_dim_v, **FLOAT16), causal=True)


@gpu
@on_hopper
@pytest.mark.parametrize("lengths", [(4100, 4100), (4096, 4093), (4096, 4096)], ids=str)
@pytest.mark.parametrize("mask", [{"causal": True}, {"causal": "top-left"}, {"window": (None, 37)}, {"window": (None, 64)}], ids=str)
def test_long_sequences_have_tiles_of_their_own(lengths, mask):
    forward(dense(*lengths, batch=1, heads=2, heads_kv=1, dim=64, **BFLOAT16), **mask)


@gpu
@on_hopper
@pytest.mark.parametrize("limit", [37, 64])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_right_limit_alone(dim, limit):
    forward(dense(512, batch=2, heads=2, dim=dim, **BFLOAT16), window=(None, limit))


@gpu
@on_hopper
def test_more_than_one_wave_of_heads():
    forward(dense(2048, batch=3, heads=16, dim=128, **BFLOAT16), causal=True)


@gpu
@on_hopper
def test_a_head_dim_narrower_than_its_step():
    data = dense(301, 703, batch=2, heads=4, heads_kv=2, dim=24, **BFLOAT16)
    data = data.with_(q=data.q[..., :20], k=data.k[..., :20])
    assert explain(data.q, data.k, data.v).kernels["forward"] == "hopper"
    forward(data, causal=True)


@gpu
@on_hopper
@pytest.mark.parametrize("dim", [64, 128])
def test_float16(dim):
    forward(dense(300, 512, batch=2, heads=4, dim=dim, **FLOAT16))


@gpu
@on_hopper
@pytest.mark.parametrize("heads, heads_kv", [(40, 4), (7, 1), (9, 3), (64, 8), (6, 2)])
def test_grouped_heads(heads, heads_kv):
    forward(dense(301, 703, batch=2, heads=heads, heads_kv=heads_kv, dim=128, **BFLOAT16), causal=True)


@gpu
@on_hopper
@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0])
def test_softmax_scales(scale):
    forward(dense(301, 703, heads=4, dim=64, **BFLOAT16), causal=True, softmax_scale=scale)


@gpu
@on_hopper
def test_large_scores():
    forward(dense(301, 703, heads=4, dim=128, scale=30.0, **BFLOAT16), causal=True, peer_dtype=torch.float32)


@gpu
@on_hopper
@pytest.mark.parametrize("name", ["heads_first", "fused", "every_second_row", "dim_not_last"])
def test_strides(name):
    forward(dense(301, 703, batch=2, heads=4, heads_kv=2, dim=64, strides=name, **BFLOAT16), causal=True)
    forward(dense(301, 703, batch=1, heads=1, dim=64, strides=name, **BFLOAT16), causal=True)


@gpu
@on_hopper
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("mask", ["open", "causal", "window"])
def test_many_tiles(mask, dim):
    forward(dense(2048, batch=2, heads=2048 // dim, dim=dim, **BFLOAT16), **MASKS[mask])


@gpu
@on_hopper
@pytest.mark.parametrize("dim, dim_v", [(64, 64), (128, 128), (256, 256), (192, 128)])
@pytest.mark.parametrize("mask", ["open", "causal", "window"])
def test_packed_sequences(mask, dim, dim_v):
    """Every sequence has neighbours, and the last is followed by NaN."""
    heads = {"heads": 4, "heads_kv": 2, "dim": dim, "dim_v": dim_v}
    for lens_q, lens_k, tails in [
        ([1000, 0, 7, 513, 1, 300], [900, 3, 0, 1300, 1, 64], {"tail_q": 1, "tail_k": 130}),
        ([127, 128, 129, 1, 63, 64, 65], [64, 1, 128, 65, 129, 63, 127], {}),
        ([137, 349], [137, 349], {"tail_q": 212, "tail_k": 212}),
        ([3, 0, 70], [0, 0, 0], {"tail_k": 5}),
        ([0, 0, 0], [0, 0, 0], {"tail_q": 3, "tail_k": 70}),
    ]:
        forward(packed(lens_q, lens_k, **tails, **heads, **BFLOAT16), **MASKS[mask])


@gpu
@on_hopper
def test_a_neighbour_of_nan_and_infinity_changes_no_bit():
    heads = {"heads": 4, "heads_kv": 2, "dim": 128}
    data = packed([130, 70, 200], [130, 70, 200], **heads, **BFLOAT16)
    outs = []
    for value in (0.0, float("nan"), float("inf")):
        other = data.with_(q=data.q.clone(), k=data.k.clone(), v=data.v.clone())
        for x in (other.q, other.k, other.v):
            x[130:200] = value
        outs.append(attention_varlen(other.q, other.k, other.v, data.cu_q, data.cu_k, causal=True, impl="hopper", return_lse=True))
    for out, lse in outs[1:]:
        for rows in (slice(0, 130), slice(200, 400)):
            assert torch.equal(out[rows], outs[0][0][rows]) and torch.equal(lse[:, rows], outs[0][1][:, rows])


@gpu
@on_hopper
@pytest.mark.parametrize("lengths", [(0, 5), (5, 0)], ids=str)
def test_no_rows(lengths):
    forward(dense(*lengths, batch=2, heads=2, dim=64, **BFLOAT16), causal=True)


@gpu
@on_hopper
def test_no_sequences_at_all():
    results = run(packed([], [], tail_q=5, tail_k=3, **BFLOAT16), "hopper", grads="", causal=True)
    assert (results.lse == -torch.inf).all() and not results.out.any()


# ---------------------------------------------------------------------------------------------------------------- beside the portable


@gpu
@on_hopper
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_hopper_and_portable_feed_either_backward(dim):
    data = dense(515, 700, batch=2, heads=4, heads_kv=2, dim=dim, **BFLOAT16)
    expected = expect(data, causal=True)
    for impl in ("hopper", "portable"):
        compare(run(data, impl, causal=True), expected, torch.bfloat16)


# -------------------------------------------------------------------------------------------------------------------------- twice


@gpu
@on_hopper
@pytest.mark.parametrize("mask", ["open", "causal"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_forty_launches_give_the_same_bits(dim, mask):
    data = dense(2048, batch=2, heads=2048 // dim, dim=dim, **BFLOAT16)
    first = run(data, "hopper", grads="", **MASKS[mask])
    assert all(same_bits(first, run(data, "hopper", grads="", **MASKS[mask])) for _ in range(40))


@gpu
@on_hopper
def test_two_streams_at_once():
    """Each draws its tiles from a counter of its own."""
    sets = [dense(2048, batch=1, heads=16, dim=128, seed=seed, **BFLOAT16) for seed in range(2)]
    alone = [attention(x.q, x.k, x.v, causal=True, impl="hopper") for x in sets]
    streams = [torch.cuda.Stream() for _ in sets]
    torch.cuda.synchronize()
    outs = []
    for _ in range(20):
        for x, stream in zip(sets, streams, strict=True):
            with torch.cuda.stream(stream):
                outs.append(attention(x.q, x.k, x.v, causal=True, impl="hopper"))
    torch.cuda.synchronize()
    assert all(torch.equal(out, alone[i % 2]) for i, out in enumerate(outs))


@gpu
@on_hopper
@pytest.mark.parametrize("dim", [64, 128])
def test_a_captured_graph_replays_on_new_data(dim):
    data = dense(1024, batch=1, heads=16, dim=dim, **BFLOAT16)
    q, k, v = (x.clone() for x in (data.q, data.k, data.v))
    attention(q, k, v, causal=True, impl="hopper")  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, causal=True, impl="hopper")
    for seed in range(1, 4):
        other = dense(1024, batch=1, heads=16, dim=dim, seed=seed, **BFLOAT16)
        for x, y in zip((q, k, v), (other.q, other.k, other.v), strict=True):
            x.copy_(y)
        graph.replay()
        assert torch.equal(out, attention(other.q, other.k, other.v, causal=True, impl="hopper"))
