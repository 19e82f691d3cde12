"""Softcap, ALiBi and sinks on the Hopper kernels, asked for by name, forward and backward; tests/test_variants.py asks the rest.

Few shapes, since each kind of call is compiled for seconds.
"""

import pytest
import torch

from flashattn import explain
from support import check, dense, packed, run, same_bits, with_extras
from test_bias import sized as sized_with_bias
from test_hopper import BFLOAT16, FLOAT16, gpu, on_hopper
from test_hopper_backward import PACKED
from test_variants import VARIANTS

pytestmark = [gpu, on_hopper]
DIMS = [64, 128, 256]
MASKS = {"none": {}, "causal": {"causal": True}, "window": {"window": (100, 5)}}


def grads_of(dim: int, options) -> str:
    """A softcap has no backward of this kernel at large head dims."""
    return "" if dim > 128 and "softcap" in options else "qkvs"


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_masks(variant, dim):
    """One mask each, so that every variant and every head dim meets all three."""
    extras, options = VARIANTS[variant]
    mask = list(MASKS)[(list(VARIANTS).index(variant) + DIMS.index(dim)) % 3]
    lengths = {"none": (301, 703), "causal": (703, 301), "window": (512, 640)}[mask]
    data = with_extras(dense(*lengths, batch=2, heads=4, heads_kv=2, dim=dim, **BFLOAT16), **extras)
    check(data, "hopper", grads=grads_of(dim, options), **options, **MASKS[mask])


@pytest.mark.parametrize("variant, dim", [("all", 64), ("all", 128), ("softcap", 64), ("alibi", 256), ("sinks", 128)])
def test_packed(variant, dim):
    extras, options = VARIANTS[variant]
    queries, keys, tails = PACKED[0]
    data = with_extras(packed(queries, keys, heads=4, heads_kv=2, dim=dim, **tails, **BFLOAT16), **extras)
    check(data, "hopper", grads=grads_of(dim, options), causal=True, **options)


@pytest.mark.parametrize("variant", ["softcap", "all"])
def test_padded_head_dims_of_two_widths(variant):
    extras, options = VARIANTS[variant]
    check(with_extras(dense(301, 703, heads=4, dim=104, dim_v=72, **FLOAT16), **extras), "hopper", causal=True, **options)


@pytest.mark.parametrize("grads", ["s", "q", "kvs"])
def test_only_what_is_asked_for(grads):
    extras, options = VARIANTS["all"]
    check(with_extras(dense(301, heads=4, heads_kv=2, dim=64, **BFLOAT16), **extras), "hopper", grads=grads, causal=True, **options)


def test_deterministic():
    extras, options = VARIANTS["all"]
    data = with_extras(dense(1024, batch=2, heads=4, heads_kv=2, dim=128, **BFLOAT16), **extras)
    first = run(data, "hopper", deterministic=True, causal=True, **options)
    assert all(same_bits(run(data, "hopper", deterministic=True, causal=True, **options), first) for _ in range(10))


@pytest.mark.parametrize("variant, dim, backward", [("all", 128, "hopper"), ("alibi", 256, "hopper"), ("softcap", 256, "portable")])
def test_what_is_chosen(variant, dim, backward):
    extras, options = VARIANTS[variant]
    data = with_extras(dense(512, heads=4, dim=dim, **BFLOAT16), **extras)
    tensors = {"alibi_slopes": data.slopes, "sinks": data.sinks}
    chosen = explain(data.q, data.k, data.v, **options, **{name: x for name, x in tensors.items() if x is not None})
    assert (chosen.kernels["forward"], chosen.kernels["backward"]) == ("hopper", backward)


def test_no_keys_at_all():
    """Every row's lse is its sink, whose gradient is what comes into lse."""
    data = dense(70, 0, batch=2, heads=4, dim=64, **BFLOAT16)
    data = data.with_(sinks=torch.randn(4, device="cuda"))
    check(data, "hopper")


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("shape, bias_dtype", [
    ("1hqk", torch.bfloat16), ("bhqk", torch.float32), ("b11k", torch.bool), ("11qk", torch.float16),
])  # fmt: skip
def test_biases(shape, bias_dtype, dim):
    """Of every dtype, in lengths that end inside of a block and whose rows are aligned or not; the backward is portable."""
    lengths, mask = [((512, 640), {}), ((301, 703), {"causal": True}), ((640, 512), {"window": (100, 5)})][DIMS.index(dim)]
    size = {"seqlen_q": lengths[0], "seqlen_k": lengths[1], "heads": 4, "heads_kv": 2, "dim": dim}
    data = sized_with_bias("portable", "cuda", shape, torch.bfloat16, bias_dtype, **size)
    check(data, "hopper", grads="", **mask)
    assert explain(data.q, data.k, data.v, bias=data.bias, **mask).kernels["forward"] == "hopper"


def test_biases_that_empty_rows_or_are_large():
    size = {"seqlen_q": 512, "seqlen_k": 640, "heads": 4, "heads_kv": 2, "dim": 128}
    data = sized_with_bias("portable", "cuda", "1hqk", torch.bfloat16, torch.float32, **size)
    bias = data.bias.clone()
    bias[:, :, 3] = -torch.inf
    check(data.with_(bias=bias), "hopper", grads="", causal=True)
    hidden = torch.ones(512, 640, dtype=torch.bool, device="cuda").triu(129)
    noise = data.with_(bias=bias.masked_fill(hidden, torch.nan))
    assert same_bits(run(noise, "hopper", grads="", causal=True), run(data.with_(bias=bias), "hopper", grads="", causal=True))
    bias[:, :, 7] = torch.finfo(torch.float32).min
    out = run(data.with_(bias=bias), "hopper", grads="").out
    mean = data.v.float().mean(1).repeat_interleave(2, 1)
    torch.testing.assert_close(out[:, 7].float(), mean, rtol=1e-2, atol=1e-2)
