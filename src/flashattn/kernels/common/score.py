"""The score order, once, and its reverse: s = scale * q.k -> cap * tanh(s / cap) -> - slope * |distance| -> + bias -> score_mod; keep-mask
and softmax come after.

What the plain call multiplies with afterwards is not multiplied in here: the softmax takes exp2(s * scale_log2 - shift), one fused
multiply-add an element, where scale_log2 > 0 so that a maximum of raw scores is a maximum of scaled ones. Raw scores and their factor are

    plain     sign(scale) * q.k                                      |scale| log2 e    (a scale of 0 makes s 0: 0 * -inf would be NaN)
    softcap   tanh(inner * q.k)                                      cap log2 e
    ALiBi     inner * q.k  or  cap_log2 * tanh(inner * q.k),
              - slope log2 e * |distance|                            1
    bias      the same without log2 e, + bias                        log2 e   of what is left when the maximum has been subtracted
    score_mod what it makes of the same without log2 e               log2 e   as with a bias

A bias is in natural units because log2 e times the lowest number is no number: a row of nothing else is an average, and one of -inf is
empty. So what is added stays as it came, and the softmax subtracts before it multiplies, as many instructions as to convert every number.

The surprising fact: the reverse needs the tanh t and not the score, since d s / d (scale * q.k) is 1 - t^2. It goes into the probability
(`score_weight`) before the probability is rounded for its product with dO, so that p and t need no registers beside dP.
Sources: the cap, Gemma Team, Gemma 2 (2024), section 2; the distances, Press et al., Train Short, Test Long (2021), section 3.
"""

import triton
import triton.language as tl

from .softmax import LOG2E

ADDED: tl.constexpr = tl.constexpr(1)  # kinds of a bias (Spec.bias): numbers, or bytes of which 0 takes the key away
KEPT: tl.constexpr = tl.constexpr(2)

# tanh(x) = x + x z (C0 + C1 z + ...) with z = x^2, a Chebyshev fit for |x| < TANH_EDGE; beyond it 1 - 2 / (1 + e^(2 x)) cancels little
TANH_EDGE: tl.constexpr = tl.constexpr(0.65)
C0: tl.constexpr = tl.constexpr(-0.333333273)
C1: tl.constexpr = tl.constexpr(0.133326015)
C2: tl.constexpr = tl.constexpr(-0.0538258484)
C3: tl.constexpr = tl.constexpr(0.0208813188)
C4: tl.constexpr = tl.constexpr(-0.00593298014)


@triton.jit
def tanh(x, FAST: tl.constexpr):
    """Within 3e-7 of its size, which makes a huge cap none; FAST: one instruction, within 2^-11 (PTX ISA, tanh.approx)."""
    if FAST:
        t = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        z = x * x
        near = x + x * z * (C0 + z * (C1 + z * (C2 + z * (C3 + z * C4))))
        far = 1.0 - 2.0 / (1.0 + tl.math.exp2(x * (2.0 * LOG2E)))
        t = tl.where(tl.abs(x) < TANH_EDGE, near, far)
    return t


@triton.jit
def slope_of_head(extras, sequence, batch, head, SPEC: tl.constexpr):
    """The slope of a head in the units of scores; 0 without ALiBi and for rows past the end of a packed batch, where sequence == batch."""
    if SPEC.alibi:
        slope = tl.load(extras.slopes + (sequence * extras.slopes_stride_b + head), mask=sequence < batch, other=0.0)
        if not SPEC.natural:
            slope = slope * LOG2E
    else:
        slope = 0.0
    return slope


@triton.jit
def sink_of_head(extras, sequence, batch, head, SPEC: tl.constexpr):
    """The sink of a head in the units of scores; -inf, which is none, without sinks and for rows past the end of a packed batch."""
    if SPEC.sinks:
        sink = tl.load(extras.sinks + head, mask=sequence < batch, other=float("-inf"))
        if not SPEC.natural:
            sink = sink * LOG2E
    else:
        sink = float("-inf")
    return sink


@triton.jit
def bias_of_head(extras, entry, head, SPEC: tl.constexpr):
    """Pointer to the bias of row 0 and key 0 of a head; 0 without."""
    if SPEC.bias:
        base = extras.bias + (entry.to(tl.int64) * extras.bias_stride_b + head.to(tl.int64) * extras.bias_stride_h)
    else:
        base = 0
    return base


@triton.jit
def load_bias(extras, row, key, rows, keys, RAGGED: tl.constexpr):
    """The bias of a tile, as it is in memory. row, key: positions that broadcast to the tile; what is past rows and, if RAGGED, past keys
    is not read. A thread whose neighbours may be missing reads one number at a time."""
    inside = row < rows
    if RAGGED:
        inside = inside & (key < keys)
    offsets = row.to(tl.int64) * extras.bias_stride_m + key.to(tl.int64) * extras.bias_stride_n
    return tl.load(extras.bias + offsets, mask=inside, other=0)


@triton.jit
def capped(qk, extras, SPEC: tl.constexpr, FAST: tl.constexpr = False):
    """The first half of `score`: tanh where there is a cap, which `score_weight` wants."""
    s = qk
    if SPEC.softcap:
        s = tanh(qk * extras.inner, FAST)
    elif SPEC.alibi or SPEC.natural:
        s = qk * extras.inner
    elif SPEC.sign != 1:
        s = s * SPEC.sign
    return s


@triton.jit
def biased(t, extras, distance, bias, SPEC: tl.constexpr):
    """The second half of `score`."""
    s = t
    if SPEC.softcap and (SPEC.alibi or SPEC.natural):
        s = s * extras.cap
    if SPEC.alibi:
        s = s - extras.slopes * tl.abs(distance)
    if SPEC.bias == KEPT:
        s = tl.where(bias != 0, s, float("-inf"))
    elif SPEC.bias:
        s = s + bias.to(tl.float32)
    return s


@triton.jit
def score(qk, extras, distance, bias, SPEC: tl.constexpr, FAST: tl.constexpr = False):
    """Raw scores of products. extras: its `slopes` is `slope_of_head`. distance: float32 q_pos - k_pos of a tile; None without ALiBi. bias:
    of a tile, as it is in memory; None without."""
    return biased(capped(qk, extras, SPEC, FAST), extras, distance, bias, SPEC)


@triton.jit
def modified(s, extras, q_idx, kv_idx, SCORE_MOD: tl.constexpr):
    """What a score_mod makes of natural scores. q_idx, kv_idx: of `index.existing`, broadcast to the tile either way round."""
    if SCORE_MOD is not None:
        s = SCORE_MOD(s, extras.sequence, extras.head, q_idx, kv_idx, extras.score_aux).to(tl.float32)
    return s


@triton.jit
def modified_gradient(ds, s, extras, q_idx, kv_idx, SCORE_GRAD: tl.constexpr):
    """The reverse of `modified`; s: what it was given. Where nothing came back nothing goes on, whatever the derivative is there (0 * inf
    of a key that is masked)."""
    if SCORE_GRAD is not None:
        ds_before = SCORE_GRAD(ds, s, extras.sequence, extras.head, q_idx, kv_idx, extras.score_aux).to(tl.float32)
        ds = tl.where(ds == 0.0, 0.0, ds_before)
    return ds


@triton.jit
def score_weight(p, t, SPEC: tl.constexpr):
    """What dP - delta is multiplied with: p, already masked, times d (score) / d (scaled product). t: what `capped` gave."""
    weight = p
    if SPEC.softcap:
        weight = p * (1.0 - t * t)
    return weight


@triton.jit
def score_tangent(weight, tqk, scale):
    """p times the tangent of a score, from that of its product, tqk: the same derivative, forwards."""
    return weight * (tqk * scale)


@triton.jit
def score_gradient(weight, dp, delta):
    """d loss / d (scaled product); with p for its weight, d loss / d (bias). The caller multiplies the finished dQ and dK by the signed
    scale."""
    return weight * (dp - delta)
