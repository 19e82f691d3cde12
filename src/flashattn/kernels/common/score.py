"""The score order, once, and its reverse: s = scale * q.k; the keep-mask and the softmax come after it.

The scale is not multiplied in here. Scores stay raw and the softmax takes exp2(s * scale_log2 - shift), one fused multiply-add an
element, with scale_log2 = |scale| * log2(e) > 0 so that a maximum of raw scores is a maximum of scaled ones. The sign of the scale is
that of the raw score; a scale of 0 makes it 0 here, since 0 * -inf, for a masked score, would be NaN.
"""

import triton
import triton.language as tl


@triton.jit
def score(qk, SPEC: tl.constexpr):
    s = qk
    if SPEC.sign != 1:
        s = s * SPEC.sign
    return s


@triton.jit
def score_gradient(p, dp, delta):
    """d loss / d (scaled score). The caller multiplies the finished dQ and dK by the signed scale."""
    return p * (dp - delta)
