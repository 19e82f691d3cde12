"""The online softmax in base 2, and the probabilities rebuilt from the log-sum-exp.

m is the running maximum of scores in base-2 units, l the running sum of exp2(score - m), both per query row; with a bias or a score_mod
(score.py) scores and m are natural, and l the sum of exp2((score - m) log2 e). The surprising fact: m must
be kept as the rounded product that is subtracted. Kept in raw units, exp2(m * scale - shift) is a fused multiply-add that gives the
rounding error of the product instead of 0, and a row whose maximum does not change drifts by a constant factor with every tile.
Method: Milakov & Gimelshein 2018, section 3; Dao 2023 (FlashAttention-2), section 3.1.
"""

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def raise_maximum(s_MN, m_M, scale_log2, SPEC: tl.constexpr):
    """The running maximum after a tile of raw scores."""
    if SPEC.natural:
        m_new_M = tl.maximum(m_M, tl.max(s_MN, 1))
    else:
        m_new_M = tl.maximum(m_M, tl.max(s_MN, 1) * scale_log2)
    return m_new_M


@triton.jit
def finite_shift(m_M):
    """What to subtract from scores. A row that has met no key yet, or none with a finite score: any finite shift will do, and
    -inf - -inf would be NaN.
    """
    return tl.where(m_M == float("-inf"), 0.0, m_M)


@triton.jit
def power(s_MN, shift_M, scale_log2, SPEC: tl.constexpr):
    """e^(score - shift) of raw scores. shift: finite, in the units of the running maximum."""
    if SPEC.natural:
        p_MN = tl.math.exp2((s_MN - shift_M[:, None]) * scale_log2)
    else:
        p_MN = tl.math.exp2(s_MN * scale_log2 - shift_M[:, None])
    return p_MN


@triton.jit
def rescaling(m_M, shift_M, scale_log2, SPEC: tl.constexpr):
    """e^(m - shift) of the maximum before."""
    if SPEC.natural:
        alpha_M = tl.math.exp2((m_M - shift_M) * scale_log2)
    else:
        alpha_M = tl.math.exp2(m_M - shift_M)
    return alpha_M


@triton.jit
def softmax_step(s_MN, m_M, l_M, scale_log2, SPEC: tl.constexpr):
    """One tile of raw scores: (p, alpha, m, l), where alpha rescales what was accumulated before this tile."""
    m_new_M = raise_maximum(s_MN, m_M, scale_log2, SPEC)
    shift_M = finite_shift(m_new_M)
    p_MN = power(s_MN, shift_M, scale_log2, SPEC)
    alpha_M = rescaling(m_M, shift_M, scale_log2, SPEC)
    return p_MN, alpha_M, m_new_M, l_M * alpha_M + tl.sum(p_MN, 1)


@triton.jit
def natural_lse(m_M, l_M, SPEC: tl.constexpr):
    """The natural log-sum-exp of finished rows; a row without a key gives -inf, and one with a bias of +inf gives that."""
    if SPEC.natural:
        lse_M = tl.where(m_M == float("inf"), m_M, m_M + tl.math.log2(l_M) * LN2)
    else:
        lse_M = (m_M + tl.math.log2(l_M)) * LN2
    return tl.where(l_M == 0.0, float("-inf"), lse_M)


@triton.jit
def finish(acc_MV, m_M, l_M, SPEC: tl.constexpr):
    """(out, natural lse) of finished rows; a row without a key gives 0 and -inf."""
    empty_M = l_M == 0.0
    inverse_M = tl.div_rn(1.0, tl.where(empty_M, 1.0, l_M))  # plain division is off by 2 ulp, this and the product by 1
    out_MV = tl.where(empty_M[:, None], 0.0, acc_MV * inverse_M[:, None])
    return out_MV, natural_lse(m_M, l_M, SPEC)


@triton.jit
def probabilities(s, lse_log2, scale_log2):
    """exp(score - lse), with lse in base 2 and broadcast along the keys. Garbage where the mask says no: the caller masks."""
    return tl.math.exp2(s * scale_log2 - lse_log2)


@triton.jit
def probabilities_of_biased(s, shift, rest_log2, scale_log2):
    """The same of natural scores: e^(score - shift) 2^-rest. See `attn_bwd_shifts` in portable/bias.py for what is subtracted."""
    return tl.math.exp2((s - shift) * scale_log2 - rest_log2)
