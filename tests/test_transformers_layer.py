"""What a layer of Transformers may ask of attn_implementation="flashattn", and what it is told; registering it."""

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5")
ours = pytest.importorskip("flashattn.integrations.transformers")

from flashattn import attention  # noqa: E402
from flashattn.integrations import packing  # noqa: E402

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}


@pytest.fixture(autouse=True)
def _no_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


CU = ("cu_seq_lens_q", "cu_seq_lens_k")


class Layer:
    is_causal = True


def layer_inputs(rows_q=3, rows_k=5):
    return Layer(), *(torch.randn(1, 2, rows, 8) for rows in (rows_q, rows_k, rows_k))


@pytest.mark.parametrize("message, change", [
    ("head_mask is not implemented", {"head_mask": torch.ones(1)}),
    (r"a mask of shape \(1, 3, 5\) is not", {"attention_mask": torch.ones(1, 3, 5)}),
    ("position_bias of packed sequences is not", {"position_bias": torch.ones(1, 1, 3, 5), **dict.fromkeys(CU, torch.tensor([0, 3]))}),
    ("a window between 3 queries and 5 padded keys", {"attention_mask": torch.ones(1, 5) > 0, "is_causal": False, "sliding_window": 2}),
])  # fmt: skip
def test_what_is_missing_is_named(message, change):
    with pytest.raises(NotImplementedError, match=message):
        ours.forward(*layer_inputs(), **{"attention_mask": None} | change)


def test_dropout():
    layer, *inputs = layer_inputs(5)
    torch.manual_seed(0)
    seed = torch.randint(2**63 - 1, (2,), dtype=torch.int64)
    expected = attention(*inputs, layout="bhsd", causal=True, dropout_p=0.5, dropout_seed=seed).transpose(1, 2)
    torch.manual_seed(0)
    assert torch.equal(ours.forward(layer, *inputs, None, dropout=0.5)[0], expected)


def test_positions_pack_nothing_where_attention_is_not_causal():
    """As for "eager", whose bidirectional masks are made without them."""
    inputs, positions = layer_inputs(5), torch.tensor([[0, 1, 0, 1, 2]])
    plain, told = (ours.forward(*inputs, None, is_causal=False, position_ids=told)[0] for told in (None, positions))
    assert torch.equal(plain, told)


def test_a_mask_longer_than_the_keys_is_refused():
    with pytest.raises(ValueError, match=r"attention_mask has shape \(1, 6\) and the layer 5 keys"):
        ours.forward(*layer_inputs(), torch.ones(1, 6) > 0)


def test_masks_of_another_kind_become_booleans():
    from transformers import masking_utils as masks

    sizes = {"batch_size": 1, "q_length": 3, "kv_length": 3}
    assert ours.mask(**sizes, mask_function=masks.sliding_window_causal_mask_function(2)) is None
    blocks = masks.or_masks(masks.causal_mask_function, masks.blockwise_overlay(torch.zeros(1, 3)))
    assert torch.equal(ours.mask(**sizes, mask_function=blocks), torch.ones(1, 1, 3, 3, dtype=torch.bool))
    own = masks.and_masks(masks.causal_mask_function, lambda batch, head, q, kv: kv != 1)
    expected = torch.tensor([[1, 0, 0], [1, 0, 0], [1, 0, 1]]).bool()[None, None]
    for use_vmap in (False, True):
        assert torch.equal(ours.mask(**sizes, mask_function=own, use_vmap=use_vmap), expected)
    padded = ours.mask(**sizes, mask_function=own, attention_mask=torch.tensor([[0, 1, 1]]).bool())
    assert torch.equal(padded, expected & torch.tensor([0, 1, 1]).bool())


@pytest.mark.parametrize("position_bias", [None, torch.randn(1, 2, 3, 6)], ids=["", "position_bias"])
@pytest.mark.parametrize("kind", ["bool", "float", "padding", None])
def test_masks_and_position_biases(kind, position_bias):
    """Of 4 dimensions they say all, causality too; they may be longer than the keys."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    layer, *qkv = layer_inputs()
    layer.training = False
    padding = torch.tensor([[0, 1, 1, 1, 1]]) > 0
    mask = {"bool": torch.rand(1, 2, 3, 6) > 0.4, "float": torch.randn(1, 1, 3, 6), "padding": padding}.get(kind)
    if kind == "bool":
        mask[..., 0] = True
    found, _ = ours.forward(layer, *qkv, mask, position_bias=position_bias)
    whole = mask if kind != "padding" else (mask[:, None, None] & torch.ones(3, 5, dtype=torch.bool).tril(2))
    whole = torch.ones(1, 1, 3, 5, dtype=torch.bool).tril(2) if whole is None else whole[..., :5]
    if position_bias is not None:
        bias = position_bias[..., :5]
        whole = bias.masked_fill(~whole, -torch.inf) if whole.dtype == torch.bool else bias + whole
    expected, _ = sdpa_attention_forward(layer, *qkv, whole)
    torch.testing.assert_close(found, expected)


def test_an_unknown_transformers_is_told(monkeypatch):
    monkeypatch.setattr(transformers.masking_utils, "flash_attention_mask", lambda attention_mask: attention_mask)
    with pytest.raises(NotImplementedError, match="install transformers>=5"):
        ours.register()


def test_other_implementations_are_chosen_as_before():
    ours.register()
    config = transformers.LlamaConfig(**SIZES)
    assert transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa").config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match="nonsense"):
        transformers.LlamaForCausalLM._from_config(config, attn_implementation="nonsense")
    assert ours.register() == ours.register() == "flashattn"
    choose = transformers.PreTrainedModel._check_and_adjust_attn_implementation
    assert not hasattr(choose.__wrapped__, "__wrapped__"), "registered once"


def test_a_layer_does_not_ask_again_what_another_asked(monkeypatch):
    asked, kept = [], packing._kept
    monkeypatch.setattr(packing, "_kept", lambda mask: asked.append(mask) or kept(mask))
    mask = torch.arange(9) >= torch.tensor([[4], [0]])
    first = packing.rows_of_mask(mask, 9, True)
    assert packing.rows_of_mask(mask, 9, True) is first and len(asked) == 1
    packing.rows_of_mask(mask, 1, True)
    mask[0, 0] = True
    assert packing.rows_of_mask(mask, 9, True)[1].cu_seqlens.tolist() == [0, 6, 15]
