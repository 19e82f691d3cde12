"""The keep-mask (True = attend) of a tile of scores, asked of each score or of each row."""

import triton
import triton.language as tl


@triton.jit
def keep_mask(q_pos, k_pos, inside, left, right, SPEC: tl.constexpr):
    """q_pos is the row plus the diagonal's offset, so the diagonal is k_pos == q_pos; `inside`: the walked row or key exists.

    All three broadcast against each other, which is how the transposed tile of dK/dV asks the same question.
    """
    keep = inside
    if SPEC.left:
        keep = keep & (k_pos >= q_pos - left)
    if SPEC.right:
        keep = keep & (k_pos <= q_pos + right)
    return keep


@triton.jit
def mod_keeps(x, other, extras, q_idx, kv_idx, MASK_MOD: tl.constexpr):
    """x of a tile where a mask_mod keeps the pair, else `other`. q_idx, kv_idx: of `index.existing`."""
    if MASK_MOD is not None:
        x = tl.where(MASK_MOD(extras.sequence, extras.head, q_idx, kv_idx, extras.mask_aux), x, other)
    return x


@triton.jit
def first_kept(position, before):
    """The first key that a row at this position keeps, if there is a limit; with the limits exchanged, the first row that keeps a key."""
    return position - before


@triton.jit
def last_kept(position, after):
    return position + after


@triton.jit
def last_key(q_pos, rows_k, right, SPEC: tl.constexpr):
    """The last key that a row may keep; negative where there is none. Where all keys exist that are asked about, rows_k may not matter."""
    if SPEC.right:
        last = last_kept(q_pos, right)
        if SPEC.ragged or SPEC.left:  # a tile without keys may visit a block past the last one if there is a left limit
            last = tl.minimum(last, rows_k - 1)
    else:
        last = q_pos * 0 + (rows_k - 1)
    return last
