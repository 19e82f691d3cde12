"""The model that `train_gpt.py` trains: the usual decoder with RoPE, RMSNorm, SwiGLU or GELU, optional GQA and tied embeddings, on bytes.

It takes the attention as a function, which is all that differs between `flashattn`, torch's own and the formula written out.

The surprising fact: there is no autocast. Weights live in float32 and every layer casts its own weight to the dtype of the activations,
residual stream included. That is what autocast does to a matrix product, without its list of operations that go back to float32, which
RMSNorm is on.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

VOCAB = 256


# Four attentions, all causal: functions of q [B, T, H, Q], k and v [B, T, H_kv, Q].


def sdpa_attention(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)


def eager_attention(q, k, v):
    """The formula as written; it keeps every T x T matrix for the backward, so long sequences need a small batch."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    p = scores.masked_fill(future, -math.inf).softmax(-1, dtype=torch.float32).to(v.dtype)
    return torch.einsum("bhqk,bkhd->bqhd", p, v)


def flex_attention():
    """torch's FlexAttention, compiled; the blocks of its mask are found once a length."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    masks, compiled = {}, torch.compile(flex_attention, dynamic=False)

    def attend(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        rows = q.shape[2]
        if rows not in masks:
            masks[rows] = create_block_mask(lambda b, h, i, j: j <= i, None, None, rows, rows, device=q.device)
        return compiled(q, k, v, block_mask=masks[rows], enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)

    return attend


def make_attention(name):
    if name == "flashattn":
        from flashattn import attention

        return lambda q, k, v: attention(q, k, v, causal=True)
    if name == "flex":
        return flex_attention()
    return {"sdpa": sdpa_attention, "eager": eager_attention}[name]


class Linear(nn.Module):
    def __init__(self, n_in, n_out, std=0.02):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in).normal_(std=std))

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), eps=1e-6)


def rope_table(length, dim):
    """cos and sin [2, length, 1, dim]; sin carries the sign of the rotation, so that `rotate` needs no negation and no concatenation."""
    angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, dim, 2) / dim)
    sin = angles.sin()
    return torch.stack([torch.cat([angles.cos()] * 2, 1), torch.cat([-sin, sin], 1)])[:, :, None]


def rotate(x, rope):
    return torch.addcmul(x * rope[0], x.roll(x.shape[-1] // 2, -1), rope[1])


class Block(nn.Module):
    def __init__(self, cfg, attention):
        super().__init__()
        self.heads, self.kv_heads, self.swiglu, self.attention = cfg.heads, cfg.kv_heads, cfg.mlp == "swiglu", attention
        dim, hidden = cfg.width // cfg.heads, cfg.hidden if self.swiglu else cfg.hidden * 3 // 2
        residual_std = 0.02 / math.sqrt(2 * cfg.layers)  # 2 * layers branches are added up: keep the variance of the sum
        self.norm_attention, self.norm_mlp = RMSNorm(cfg.width), RMSNorm(cfg.width)
        self.qkv = Linear(cfg.width, (cfg.heads + 2 * cfg.kv_heads) * dim)
        self.out = Linear(cfg.width, cfg.width, residual_std)
        self.up = Linear(cfg.width, hidden * (1 + self.swiglu))
        self.down = Linear(hidden, cfg.width, residual_std)

    def forward(self, x, rope):
        qkv = self.qkv(self.norm_attention(x)).unflatten(-1, (self.heads + 2 * self.kv_heads, -1))
        qk, v = qkv.split([self.heads + self.kv_heads, self.kv_heads], dim=2)
        q, k = rotate(qk, rope).split([self.heads, self.kv_heads], dim=2)
        x = x + self.out(self.attention(q, k, v).flatten(2))
        h = self.up(self.norm_mlp(x))
        if self.swiglu:
            gate, h = h.chunk(2, -1)
            return x + self.down(F.silu(gate) * h)
        return x + self.down(F.gelu(h))


class GPT(nn.Module):
    """bytes [B, T] -> logits [B, T, 256], or with the bytes that follow, the mean cross-entropy in nats per byte."""

    def __init__(self, cfg, attention, dtype):
        super().__init__()
        self.dtype = dtype
        self.head = Linear(cfg.width, VOCAB)  # its weight is the embedding too
        self.blocks = nn.ModuleList(Block(cfg, attention) for _ in range(cfg.layers))
        self.norm = RMSNorm(cfg.width)
        self.register_buffer("rope", rope_table(cfg.seq, cfg.width // cfg.heads), persistent=False)

    def forward(self, tokens, targets=None):
        x = F.embedding(tokens, self.head.weight).to(self.dtype)
        rope = self.rope[:, : tokens.shape[1]].to(self.dtype)
        for block in self.blocks:
            x = block(x, rope)
        logits = self.head(self.norm(x)).float()
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def generate(model, prompt, count, seed, temperature=0.8):
    """The prompt and `count` sampled bytes. The whole context is computed again for every byte: there is no cache to be wrong."""
    device, context = model.rope.device, model.rope.shape[1]
    rng = torch.Generator(device).manual_seed(seed)
    tokens = torch.tensor(list(prompt), device=device)[None]
    for _ in range(count):
        p = (model(tokens[:, -context:])[:, -1] / temperature).softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(p, 1, generator=rng)], 1)
    return bytes(tokens[0].tolist())
