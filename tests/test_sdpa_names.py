"""torch's scaled_dot_product_attention by its arguments: the function, the context that routes calls to it, the registration in torch:
three ways to one function, which takes this file over 300 lines.

The surprising fact: torch's own function is the oracle here, in float64, and it has one meaning for each argument on every device. Four
ways in, each with its masks, dropout and refusals, take this file over 300 lines.
"""

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashattn import attention
from flashattn.integrations import aten, sdpa
from flashattn.integrations.sdpa import routed, scaled_dot_product_attention

torch_sdpa = functional.scaled_dot_product_attention
REGISTRY = hasattr(torch.nn.attention, "register_flash_attention_impl")
needs_registry = pytest.mark.skipif(not REGISTRY, reason=f"torch {torch.__version__} has no registry of flash implementations")


@pytest.fixture(autouse=True)
def _no_interpreter(monkeypatch):
    """What is tested here is above the kernels, and the names take no `impl`."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def tensors(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def assert_same_as_torch(q, k, v, **options):
    out, expected = scaled_dot_product_attention(q, k, v, **options), torch_sdpa(q.double(), k.double(), v.double(), **options)
    torch.testing.assert_close(out, expected.to(out.dtype))
    cotangent = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    gradients = torch.autograd.grad(out, (q, k, v), cotangent)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, (q, k, v), cotangent.double()))


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}, {"dropout_p": 0.0, "attn_mask": None}], ids=str)
@pytest.mark.parametrize("rows", [(5, 7), (7, 5), (4, 4)])
def test_it_is_what_torch_computes(options, rows):
    assert_same_as_torch(*tensors((2, 3, rows[0], 8), (2, 3, rows[1], 8), (2, 3, rows[1], 6)), **options)


SHAPES = {
    "two dimensions": ((5, 8), (7, 8), (7, 4)),
    "three": ((3, 5, 8), (3, 7, 8), (3, 7, 8)),
    "five": ((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), (2, 3, 4, 7, 8)),
    "one batch entry of queries": ((1, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
    "one head of keys": ((2, 3, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8)),
    "one head of keys, not of values": ((2, 3, 5, 8), (2, 1, 7, 8), (2, 3, 7, 8)),
    "one head of queries": ((2, 1, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
    "fewer dimensions": ((2, 3, 5, 8), (3, 7, 8), (3, 7, 8)),
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_leading_dimensions_broadcast(shapes):
    assert_same_as_torch(*tensors(*shapes))


MASKS = {  # (shapes of query, key, value), shape of the mask
    "rows and keys": (((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 4)), (5, 7)),
    "all": (((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 4)), (2, 3, 5, 7)),
    "heads": (((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 4)), (1, 3, 5, 7)),
    "keys": (((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 4)), (2, 1, 1, 7)),
    "two dimensions": (((5, 8), (7, 8), (7, 4)), (5, 7)),
    "three": (((3, 5, 8), (3, 7, 8), (3, 7, 8)), (3, 1, 7)),
    "five": (((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), (2, 3, 4, 7, 8)), (2, 1, 4, 5, 7)),
    "five, one of the batch": (((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), (2, 3, 4, 7, 8)), (1, 1, 4, 5, 7)),
    "five, of heads": (((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), (2, 3, 4, 7, 8)), (4, 1, 7)),
}


@pytest.mark.parametrize("kind", ["bool", "float", "transposed"])
@pytest.mark.parametrize("shapes, shape", MASKS.values(), ids=MASKS)
def test_masks_of_all_shapes(shapes, shape, kind):
    q, k, v, mask = tensors(*shapes, shape)
    if kind == "bool":
        return assert_same_as_torch(q, k, v, attn_mask=(mask > -0.7).detach().index_fill(-1, torch.tensor(0), True))
    mask = mask.detach().mT.contiguous().mT.requires_grad_() if kind == "transposed" else mask
    found, expected = scaled_dot_product_attention(q, k, v, mask), torch_sdpa(*(x.double() for x in (q, k, v, mask)))
    torch.testing.assert_close(found, expected.float())
    gradients = (torch.autograd.grad(out.square().sum(), (q, k, v, mask)) for out in (found, expected))
    torch.testing.assert_close(*map(list, gradients))


def test_a_row_that_a_mask_leaves_nothing_is_zero():
    q, k, v = tensors((1, 2, 5, 8), (1, 2, 7, 8), (1, 2, 7, 8))
    mask = torch.ones(5, 7, dtype=torch.bool).index_fill(0, torch.tensor(1), False)
    out = scaled_dot_product_attention(q, k, v, mask)
    assert not out[:, :, 1].any()
    torch.testing.assert_close(out[:, :, 0], scaled_dot_product_attention(q, k, v)[:, :, 0])


def test_grouped_heads():
    assert_same_as_torch(*tensors((2, 6, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8)), enable_gqa=True, is_causal=True)


def test_transposed_inputs_as_models_give_them():
    q, k, v = (x.transpose(1, 2) for x in tensors((2, 5, 3, 8), (2, 5, 3, 8), (2, 5, 3, 8)))
    assert_same_as_torch(q, k, v, is_causal=True)


def test_positions_of_arguments():
    q, k, v = tensors((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8))
    assert torch.equal(scaled_dot_product_attention(q, k, v, None, 0.0, True), scaled_dot_product_attention(q, k, v, is_causal=True))


@pytest.mark.parametrize("message, change", {
    "query of torch.float64 is not": {"dtype": torch.float64},
    "query with a last dimension of 300": {"dim": 300},
}.items())  # fmt: skip
def test_what_is_missing_is_named_or_left_to_torch(message, change):
    dtype, dim = change.pop("dtype", torch.float32), change.pop("dim", 8)
    q, k, v = tensors(*[(1, 2, 5, dim)] * 3, dtype=dtype)
    with pytest.raises(NotImplementedError, match=message):
        scaled_dot_product_attention(q, k, v, **change)
    with routed() as seen:
        torch.manual_seed(0)
        out = functional.scaled_dot_product_attention(q, k, v, **change)
    torch.manual_seed(0)
    assert torch.equal(out, torch_sdpa(q, k, v, **change))
    assert len(seen) == 1 and "flashattn" not in seen


def test_wrong_arguments_are_named():
    q, k, v = tensors((2, 4, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8))
    with pytest.raises(ValueError, match="have 4, 2, 2 heads: expected the same, or enable_gqa=True"):
        scaled_dot_product_attention(q, k, v)
    with pytest.raises(ValueError, match="batch dimensions that broadcast"):
        scaled_dot_product_attention(q, torch.cat([k, k[:1]]), v, enable_gqa=True)
    with pytest.raises(ValueError, match="attn_mask with is_causal=True"):
        scaled_dot_product_attention(q, q, q, torch.ones(5, 5, dtype=torch.bool), is_causal=True)
    with pytest.raises(ValueError, match=r"attn_mask has shape \(3, 5, 5\): expected what broadcasts to \(2, 4, 5, 5\)"):
        scaled_dot_product_attention(q, q, q, torch.ones(3, 5, 5, dtype=torch.bool))
    with pytest.raises(NotImplementedError, match=r"attn_mask of torch.int64"):
        scaled_dot_product_attention(q, q, q, torch.ones(5, 5, dtype=torch.int64))


# -------------------------------------------------------------------------------------------------------------------------- routed


def test_a_module_of_torch_goes_through_it():
    layer = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(2, 5, 16)
    expected = layer(x, x, x, need_weights=False)[0]
    with routed() as seen:
        with routed():
            found = layer(x, x, x, need_weights=False)[0]
        assert not seen, "the inner one took it"
        masked = layer(x, x, x, need_weights=False, attn_mask=torch.full((5, 5), -torch.inf).triu(1))[0]
        layer(x, x, x, need_weights=False)
    assert seen == {"flashattn": 2}
    torch.testing.assert_close(masked, layer(x, x, x, need_weights=False, attn_mask=torch.full((5, 5), -torch.inf).triu(1))[0])
    assert functional.scaled_dot_product_attention is torch_sdpa
    torch.testing.assert_close(found, expected)


def test_it_ends_with_an_error_too():
    with pytest.raises(LookupError), routed():
        raise LookupError
    assert functional.scaled_dot_product_attention is torch_sdpa


def test_torch_has_the_words_for_mixed_dtypes():
    q, k, v = tensors((1, 2, 5, 8), (1, 2, 5, 8), (1, 2, 5, 8))
    with routed() as seen, pytest.raises(RuntimeError, match="same dtype"):
        functional.scaled_dot_product_attention(q, k.bfloat16(), v)
    assert seen == {"dtypes that differ": 1}
    with routed() as seen, torch.autocast("cpu", torch.bfloat16):
        assert functional.scaled_dot_product_attention(q, k.bfloat16(), v).dtype == torch.bfloat16
    assert seen == {"flashattn": 1}


def test_a_compiled_call_is_one_graph():
    torch._dynamo.reset()
    q, k, v = tensors((1, 4, 5, 8), (1, 2, 5, 8), (1, 2, 5, 8))
    graphs = []

    def keep(graph, _):
        graphs.append(str(graph.code))
        return graph

    def call(q, k, v):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    with routed():
        out = torch.compile(call, backend=keep, fullgraph=True)(q, k, v)
    assert len(graphs) == 1 and "flashattn.attn_fwd" in graphs[0]
    torch.testing.assert_close(out, call(q, k, v))


# ------------------------------------------------------------------------------------------------------------------------ registry


@needs_registry
def test_torch_knows_it_by_name():
    assert sdpa.register() == "flashattn"
    assert "flashattn" in torch.nn.attention.list_flash_attention_impls()
    assert torch.nn.attention.current_flash_attention_impl() is None


@needs_registry
def test_torch_activates_and_restores_it(monkeypatch):
    monkeypatch.setattr(aten.activate, "__defaults__", ("CPU",))
    sdpa.register()
    q, k, v = (x.detach() for x in tensors((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8)))
    torch.nn.attention.activate_flash_attention_impl("flashattn")
    try:
        assert torch.nn.attention.current_flash_attention_impl() == "flashattn"
        out = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[0]
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    torch.testing.assert_close(out, torch_sdpa(q, k, v))
    with pytest.raises(NotImplementedError, match="_scaled_dot_product_flash_attention"):
        torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)


def test_an_older_torch_is_told(monkeypatch):
    monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl", raising=False)
    with pytest.raises(NotImplementedError, match="use `routed`, or a later torch"):
        sdpa.register()


@pytest.fixture
def on_cpu():
    """torch asks its flash operators on CUDA alone; the same functions as kernels of the CPU can be asked here."""
    handle = aten.activate("CPU")
    yield
    handle.remove()
    handle.remove()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows_first", [False, True])
def test_the_dense_operator_and_its_backward(on_cpu, causal, rows_first):
    q, k, v = tensors((2, 4, 5, 8), (2, 4, 5, 8), (2, 4, 5, 8))
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) if rows_first else x for x in (q, k, v))
    out, lse, *rest = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=0.3)
    expected = torch_sdpa(q, k, v, is_causal=causal, scale=0.3)
    assert rest[0] is None and rest[2:4] == [5, 5] and lse.shape == (2, 4, 5)
    torch.testing.assert_close(out, expected)
    assert out.stride() == q.stride()
    cotangent = torch.randn_like(out)
    found, wanted = (torch.autograd.grad(x, (q, k, v), cotangent) for x in (out, expected))
    torch.testing.assert_close(found, wanted)
    assert [x.stride() for x in found] == [x.stride() for x in (q, k, v)]


@pytest.mark.parametrize("packed", [False, True])
def test_the_general_operator_and_its_backward(on_cpu, packed):
    q, k, v = tensors((1, 5, 4, 8), (1, 7, 2, 8), (1, 7, 2, 8))
    i, j = torch.arange(5)[:, None] + 2, torch.arange(7)
    mask = (j <= i) & (j >= i - 3)
    expected = torch_sdpa(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask, enable_gqa=True).transpose(1, 2)
    lengths, tensors_ = (None, None), (q, k, v)
    if packed:
        lengths = tuple(torch.tensor([0, rows], dtype=torch.int32) for rows in (5, 7))
        tensors_ = tuple(x[0] for x in (q, k, v))
    options = {"window_size_left": 3, "window_size_right": -1}
    out, lse, *_ = torch.ops.aten._flash_attention_forward(*tensors_, *lengths, 5, 7, 0.0, True, False, **options)
    out = out.view(expected.shape)
    torch.testing.assert_close(out, expected)
    assert lse.shape == ((4, 5) if packed else (1, 4, 5))
    cotangent = torch.randn_like(out)
    torch.testing.assert_close(*(torch.autograd.grad(x, (q, k, v), cotangent) for x in (out, expected)))


def drawn(device="cpu"):
    """What the next call will draw, after which the generator is where it was."""
    state = torch.get_rng_state()
    seed = torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=device)
    torch.set_rng_state(state)
    return seed


def test_dropout_of_the_function_and_of_what_is_routed():
    q, k, v = tensors(*[(2, 3, 5, 8)] * 3)
    seed = drawn()
    expected = attention(q, k, v, layout="bhsd", dropout_p=0.5, dropout_seed=seed, causal="top-left")
    state = torch.get_rng_state()
    assert torch.equal(scaled_dot_product_attention(q, k, v, None, 0.5, True), expected)
    torch.set_rng_state(state)
    with routed() as seen:
        assert torch.equal(functional.scaled_dot_product_attention(q, k, v, dropout_p=0.5, is_causal=True), expected)
    assert seen == {"flashattn": 1}
    assert not torch.equal(scaled_dot_product_attention(q, k, v, None, 0.5, True), expected)


def test_dropout_of_the_backend(on_cpu):
    """The backward gets the seed that the forward drew, through torch's rng_state."""
    q, k, v = tensors(*[(1, 2, 5, 8)] * 3)
    cotangent = torch.randn(1, 2, 5, 8)
    seed = drawn()
    out = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.5)[0]
    expected = attention(q, k, v, layout="bhsd", dropout_p=0.5, dropout_seed=seed)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x, (q, k, v), cotangent) for x in (out, expected)))
    rows = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    seed = drawn()
    out = torch.ops.aten._flash_attention_forward(*rows, None, None, 5, 5, 0.5, True, False)[0]
    expected = attention(*rows, causal=True, dropout_p=0.5, dropout_seed=seed)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x, rows, cotangent.transpose(1, 2)) for x in (out, expected)))


def test_torchs_autograd_alone_saves_for_a_backward(on_cpu):
    q, k, v = tensors((1, 2, 5, 8), (1, 2, 5, 8), (1, 2, 5, 8))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.data_ptr()) or x, lambda x: x):
        torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)
    assert saved.count(q.data_ptr()) == 1


def test_what_the_backend_lacks_is_named(on_cpu):
    q, k, v = tensors((1, 2, 5, 8), (1, 2, 5, 8), (1, 2, 5, 8))
    with pytest.raises(RuntimeError, match="return_debug_mask is not implemented"):
        torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.5, return_debug_mask=True)
    with pytest.raises(RuntimeError, match="alibi_slopes is not implemented"):
        torch.ops.aten._flash_attention_forward(q, k, v, None, None, 5, 5, 0.0, False, False, alibi_slopes=q.detach())
    with pytest.raises(TypeError, match="takes no colour"):
        aten._backward(colour=1)


@pytest.mark.gpu
@needs_registry
def test_torchs_flash_backend_on_a_gpu():
    """Forward and backward through torch's own function, plain and compiled."""
    q, k, v = (x.detach().to("cuda", torch.bfloat16).requires_grad_() for x in tensors(*[(2, 4, 256, 64)] * 3))
    cotangent = torch.randn_like(q)

    def run(function):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = function(q, k, v, is_causal=True)
        return [out, *torch.autograd.grad(out, (q, k, v), cotangent)]

    expected = run(torch_sdpa)
    sdpa.register()
    torch.nn.attention.activate_flash_attention_impl("flashattn")
    try:
        with torch.profiler.profile() as profile:
            found = run(torch_sdpa)
        compiled = run(torch.compile(torch_sdpa, fullgraph=True))
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    assert any("flashattn" in event.key for event in profile.key_averages())
    for x, y, z in zip(found, compiled, expected, strict=True):
        torch.testing.assert_close(x, z, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(x, y)
