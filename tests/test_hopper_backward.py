"""The Hopper backward, asked for by name: against the oracle, each gradient alone, deterministic, twice.

Few shapes, because each kind of call is compiled for seconds; what only changes numbers shares a kernel. The surprising fact: what is wrong
in a pipeline shows at its ends, so lengths are chosen for tiles with none, one, two and many blocks of queries.
"""

import pytest
import torch

from flashattn import attention, explain
from support import check, dense, packed, run, same_bits
from test_hopper import BFLOAT16, FLOAT16, LENGTHS, MASKS, gpu, on_hopper

pytestmark = [gpu, on_hopper]
PACKED = [
    ([1000, 0, 7, 513, 1, 300], [900, 3, 0, 1300, 1, 64], {"tail_q": 1, "tail_k": 130}),
    ([127, 128, 129, 1, 63, 64, 65], [64, 1, 128, 65, 129, 63, 127], {}),
    ([137, 349], [137, 349], {"tail_q": 212, "tail_k": 212}),
    ([3, 0, 70], [0, 0, 0], {"tail_k": 5}),
    ([0, 0, 0], [0, 0, 0], {"tail_q": 3, "tail_k": 70}),
]


def test_it_is_the_backward_that_is_chosen():
    data = dense(64, dim=64, **BFLOAT16)
    assert explain(data.q, data.k, data.v).kernels["backward"] == "hopper"


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_lengths_and_masks(lengths, mask, dim):
    check(dense(*lengths, batch=2, heads=4, heads_kv=2, dim=dim, **BFLOAT16), "hopper", **MASKS[mask])


@pytest.mark.parametrize(
    "dims",
    [
        (8, 8),
        (40, 64),
        (72, 72),
        (96, 96),
        (104, 128),
        (128, 64),
        (64, 128),
        (128, 8),
        (136, 72),
        (192, 128),
        (160, 192),
        (256, 64),
        (40, 256),
    ],
    ids=str,
)
def test_head_dims(dims):
    head_dim, head_dim_v = dims
    check(dense(301, 703, batch=2, heads=4, heads_kv=2, dim=head_dim, dim_v=head_dim_v, **FLOAT16), "hopper", causal=True)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("grads", ["q", "k", "v", "qk", "qv", "kv"])
def test_only_what_is_asked_for(grads, dim):
    check(dense(301, 703, batch=2, heads=4, heads_kv=2, dim=dim, **BFLOAT16), "hopper", grads=grads, causal=True)
    check(dense(512, batch=2, heads=2, dim=dim, **BFLOAT16), "hopper", grads=grads, lse_grad=False)


@pytest.mark.parametrize("heads, heads_kv", [(40, 4), (7, 1), (9, 3), (64, 8), (6, 2)])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_grouped_heads(heads, heads_kv, dim):
    check(dense(301, 703, batch=2, heads=heads, heads_kv=heads_kv, dim=dim, **BFLOAT16), "hopper", causal=True)


@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_softmax_scales(scale, dim):
    check(dense(301, 703, heads=4, dim=dim, **BFLOAT16), "hopper", causal=True, softmax_scale=scale)


@pytest.mark.parametrize("scale", [-0.3, 0.0])
@pytest.mark.parametrize(
    "rows_q, rows_k, heads_kv, mask", [(512, 512, 4, {"causal": True}), (301, 703, 2, {"causal": True}), (256, 200, 4, {})]
)
def test_the_sign_of_the_scale_turns_no_mask_round(rows_q, rows_k, heads_kv, mask, scale):
    """Where scores are made ahead: with the diagonal at a corner, of grouped heads, and keys past the end. Masked before the sign, -inf
    became inf, and -inf times a scale of 0 NaN."""
    check(dense(rows_q, rows_k, heads=4, heads_kv=heads_kv, dim=64, **BFLOAT16), "hopper", softmax_scale=scale, **mask)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_keys_that_do_not_exist_overflow_nothing(dim):
    """Scores of -200 and lower: a missing key's score of 0 would have a probability of e^200. Not far lower, where roundoff grows, and of
    64 dimensions: terms of one sign, of which a wgmma adds 16 at a time and cuts off what is below the last place."""
    data = dense(200, 130, heads=2, dim=dim, **FLOAT16)
    q = (data.q.abs() + 1) * 4 * (dim / 64) ** 0.5
    q[..., 64:] = 0.0
    data = data.with_(q=q, k=-(data.k.abs() + 1) * 4)
    check(data, "hopper", peer_dtype=torch.float32)
    check(data, "hopper", peer_dtype=torch.float32, causal=True)


@pytest.mark.parametrize("name", ["heads_first", "fused", "every_second_row", "dim_not_last"])
def test_strides(name):
    check(dense(301, 703, batch=2, heads=4, heads_kv=2, dim=64, strides=name, **BFLOAT16), "hopper", causal=True)
    check(dense(301, 703, batch=1, heads=1, dim=64, strides=name, **BFLOAT16), "hopper", causal=True)


@pytest.mark.parametrize("name", ["heads_first", "odd_offset", "dim_not_last", "scalar"])
def test_a_gradient_that_comes_in_any_strides(name):
    check(dense(301, 303, batch=2, heads=4, dim=64, strides={"dout": name}, **BFLOAT16), "hopper")


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("mask", ["open", "causal", "window"])
def test_many_tiles(mask, dim):
    check(dense(2048, batch=2, heads=2048 // dim, dim=dim, **BFLOAT16), "hopper", **MASKS[mask])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dim, dim_v", [(64, 64), (128, 128), (128, 64), (256, 256), (192, 128)])
@pytest.mark.parametrize("mask", ["open", "causal", "window", "left"])
def test_packed_sequences(mask, dim, dim_v, deterministic):
    """Every sequence has neighbours, and the last is followed by NaN."""
    heads = {"heads": 4, "heads_kv": 2, "dim": dim, "dim_v": dim_v}
    for lens_q, lens_k, tails in PACKED:
        check(packed(lens_q, lens_k, **tails, **heads, **BFLOAT16), "hopper", deterministic=deterministic, **MASKS[mask])


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_neighbour_of_nan_changes_no_bit(dim):
    data = packed([130, 70, 200], [130, 70, 200], heads=4, heads_kv=2, dim=dim, **BFLOAT16)
    found = []
    for value in (0.0, float("nan")):
        other = data.with_(**{name: getattr(data, name).clone() for name in ("q", "k", "v", "dout")})
        for x in (other.q, other.k, other.v, other.dout):
            x[130:200] = value
        found.append(run(other, "hopper", causal=True, deterministic=True))
    for rows in (slice(0, 130), slice(200, 400)):
        assert all(torch.equal(getattr(found[0], name)[rows], getattr(found[1], name)[rows]) for name in ("dq", "dk", "dv"))


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0)], ids=str)
def test_no_rows(lengths):
    check(dense(*lengths, batch=2, heads=2, dim=64, **BFLOAT16), "hopper", causal=True)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("mask", ["open", "causal", "window"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_thirty_launches_give_the_same_bits(dim, mask, deterministic):
    """dQ is summed in the order in which tiles come, unless the call is deterministic."""
    data = dense(2048, batch=2, heads=2048 // dim, heads_kv=1024 // dim, dim=dim, **BFLOAT16)
    options = {"deterministic": deterministic, **MASKS[mask]}
    first, *again = (run(data, "hopper", **options) for _ in range(31))
    if not deterministic:
        first, again = first._replace(dq=None), [x._replace(dq=None) for x in again]
    assert all(same_bits(first, other) for other in again)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_deterministic(mask, dim):
    for lengths in ((1000, 1300), (703, 301), (64, 130), (1300, 1)):
        check(dense(*lengths, batch=2, heads=4, heads_kv=2, dim=dim, **BFLOAT16), "hopper", deterministic=True, **MASKS[mask])


def test_a_captured_graph_replays_on_new_data():
    data = dense(1024, batch=1, heads=16, dim=64, **BFLOAT16)
    q, k, v, dout = (x.clone() for x in (data.q, data.k, data.v, data.dout))

    def gradients(q, k, v, dout):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(attention(*leaves, causal=True, impl="hopper", deterministic=True), leaves, dout)

    gradients(q, k, v, dout)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients(q, k, v, dout)
    for seed in range(1, 4):
        other = dense(1024, batch=1, heads=16, dim=64, seed=seed, **BFLOAT16)
        for x, y in zip((q, k, v, dout), (other.q, other.k, other.v, other.dout), strict=True):
            x.copy_(y)
        graph.replay()
        for x, y in zip(found, gradients(other.q, other.k, other.v, other.dout), strict=True):
            assert torch.equal(x, y)
