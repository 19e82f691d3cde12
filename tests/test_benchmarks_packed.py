"""Packed sequences in the benchmarks, without a GPU: every peer is asked with its own names of things, and the gate sees the sequences.

The surprising fact: a peer that is not installed can be tested all the same, as far as what it is called with, by a stand-in that computes
with the oracle.
"""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from benchmarks.workloads import DIRECTIONS, packed, square

from flashattn.reference import attention_varlen_reference
from flashattn.roofline import peers as providers
from flashattn.roofline.calls import Inputs, Provider
from flashattn.roofline.gate import Gate
from flashattn.roofline.peers import PROVIDERS

CPU = torch.device("cpu")
PACKED = packed("tiny-packed", (13, 1, 10), 4, 2, 16, dtype="float32")


def varlen(q, k, v, cu_q, cu_k, causal):
    return attention_varlen_reference(q, k, v, cu_q, cu_k, causal=causal)


def fa_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False, window_size=(-1, -1)):
    assert max_seqlen_q == max_seqlen_k == 13
    return varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, causal), "lse"


def fa_without_lengths(q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, causal=False):
    return varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, causal)


def torch_211(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1), enable_gqa=False):
    assert enable_gqa and max_q == max_k == 13 and window_size in ((-1, -1), (-1, 0))
    return varlen(query, key, value, cu_seq_q, cu_seq_k, window_size == (-1, 0))


def torch_210(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
    return varlen(query, key, value, cu_seq_q, cu_seq_k, is_causal)


@pytest.fixture
def anywhere(monkeypatch):
    """Providers bind on a CPU as they do on a GPU."""
    monkeypatch.setattr(providers, "_needs_cuda", lambda device: None)


def judged(provider, workload, direction="bwd"):
    return Gate(CPU).judge(PROVIDERS[provider], workload, direction)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("name", "module", "function"),
    [("fa2", "flash_attn", fa_varlen), ("fa3", "flash_attn_interface", fa_varlen), ("fa4", "flash_attn.cute", fa_without_lengths)],
)
def test_packed_peers_are_called_by_their_names_of_things(anywhere, monkeypatch, name, module, function, causal):
    for part in {module, module.partition(".")[0]}:
        monkeypatch.setitem(sys.modules, part, SimpleNamespace(flash_attn_varlen_func=function))
    verdict = judged(name, replace(PACKED, causal=causal))
    assert verdict.failure is None and verdict.error < 1e-5


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("function", "group"), [(torch_211, 2), (torch_210, 1)])
def test_the_varlen_attention_of_pytorch_in_two_versions(anywhere, monkeypatch, function, group, causal):
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", SimpleNamespace(varlen_attn=function))
    workload = replace(PACKED, heads_kv=4 // group, causal=causal)
    assert judged("torch-varlen", workload).failure is None
    if function is torch_210:
        assert "no grouped heads" in judged("torch-varlen", PACKED).failure
        assert "no window" in judged("torch-varlen", replace(workload, window=(3, None))).failure
    assert "packed sequences only" in judged("torch-varlen", square("dense", 1, 24, 2, 1, 16, True, "float32")).failure


@pytest.mark.parametrize("window", [None, (4, 2)])
@pytest.mark.parametrize("causal", [False, True])
def test_flex_sees_the_sequences(anywhere, monkeypatch, causal, window):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    workload = replace(PACKED, causal=causal, window=window)
    assert judged("flex", workload, "fwd").failure is None
    dense = replace(workload, lengths=())
    assert judged("flex", dense, "fwd").failure is None
    mistaken = Provider("flex", "bhsd", lambda w, device: PROVIDERS["flex"].bind(replace(w, lengths=(24,)), device))
    assert "out is wrong" in Gate(CPU).judge(mistaken, workload, "fwd").failure


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_ours_and_the_oracle_take_packed_sequences(direction):
    assert judged("flashattn-eager", PACKED, direction).failure is None
    one = Provider("one", "bshd", lambda w, device: PROVIDERS["flashattn-eager"].bind(replace(w, lengths=(24,)), device))
    assert "is wrong" in Gate(CPU).judge(one, PACKED, direction).failure, "sequences must not see each other"


def test_peers_without_packed_sequences_say_so():
    assert "no packed sequences" in PROVIDERS["sdpa-math"].closures(Inputs(PACKED, CPU))
