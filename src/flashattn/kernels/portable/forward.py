"""The forward: one program owns a block of query rows and walks the keys it can see with the online softmax.

Legend: M query rows, N keys, D query/key dim, V value dim. q_MD stays on chip; k_ND and v_NV stream through; acc_MV is unnormalised.
Method: Dao 2023 (FlashAttention-2), algorithm 1. The scores of a tile are the only thing of size M x N, and live in registers.
"""

import triton
import triton.language as tl

from ..common.blocks import block_list, kept_bits, listed_place
from ..common.bounds import key_range
from ..common.dropout import column_keys, head_keys, kept, last_dropped, row_keys, sequence_words
from ..common.index import existing, head_pointer, load_tile, locate, program_tile, rows_pointer, step, store_tile, tile_pointers
from ..common.mask import keep_mask, mod_keeps
from ..common.score import bias_of_head, load_bias, modified, score, sink_of_head, slope_of_head
from ..common.softmax import finish, softmax_step
from ..structs import SIZES, Extras
from .profile import forward_metadata


@triton.jit
def attend(
    acc_MV, m_M, l_M, q_MD, k_base, v_base, k, v, extras, draw, q_pos_M, aligned_M, m0, rows_q, rows_k, visit,
    scale_log2, left, right, SPEC: tl.constexpr, TILE: tl.constexpr, SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr,
):  # fmt: skip
    """Fold the keys [lo, hi) into (acc, m, l); tiles inside [full_lo, full_hi) need no mask. aligned_M: positions as ALiBi has
    them. m0: the first row, of rows_q. draw: of dropout, (keys of the rows, key of the columns, the last word that is dropped); the sum l
    is of all, kept or not. visit: (lo, full_lo, full_hi, hi, the list of a block mask)."""
    lo, full_lo, full_hi, hi, listed = visit
    BLOCK_M: tl.constexpr = TILE.m
    BLOCK_N: tl.constexpr = TILE.n
    BLOCK_D: tl.constexpr = TILE.block_d
    BLOCK_DV: tl.constexpr = TILE.block_dv
    HEAD_DIM: tl.constexpr = TILE.head_dim
    HEAD_DIM_V: tl.constexpr = TILE.head_dim_v
    PRECISION: tl.constexpr = "tf32" if SPEC.tf32 else "ieee"
    k_pointers = tile_pointers(k, k_base, BLOCK_N, BLOCK_D, TILE.align)
    v_pointers = tile_pointers(v, v_base, BLOCK_N, BLOCK_DV, TILE.align)
    for at in tl.range(lo, hi, BLOCK_N):
        n0 = at
        if SPEC.blocks:
            n0, bits = listed_place(listed, at)
        k_ND = load_tile(k_pointers + step(n0, k.stride_n, TILE.align), rows_k - n0, HEAD_DIM, BLOCK_N, BLOCK_D, SPEC.ragged)
        distance_MN = None
        if SPEC.alibi:
            distance_MN = (aligned_M - n0).to(tl.float32)[:, None] - tl.arange(0, BLOCK_N).to(tl.float32)[None, :]
        bias_MN = None
        if SPEC.bias:
            row_M, key_N = m0 + tl.arange(0, BLOCK_M), n0 + tl.arange(0, BLOCK_N)
            bias_MN = load_bias(extras, row_M[:, None], key_N[None, :], rows_q, rows_k, SPEC.ragged)
        s_MN = score(tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION), extras, distance_MN, bias_MN, SPEC)
        if SCORE_MOD is not None or MASK_MOD is not None:
            q_idx, kv_idx = existing(m0, rows_q, BLOCK_M)[:, None], existing(n0, rows_k, BLOCK_N, SPEC.ragged)[None, :]
            s_MN = mod_keeps(modified(s_MN, extras, q_idx, kv_idx, SCORE_MOD), float("-inf"), extras, q_idx, kv_idx, MASK_MOD)
        if SPEC.ragged or SPEC.left or SPEC.right:
            if (n0 < full_lo) | (n0 >= full_hi):
                k_pos_N = n0 + tl.arange(0, BLOCK_N)
                keep = keep_mask(q_pos_M[:, None], k_pos_N[None, :], (k_pos_N < rows_k)[None, :], left, right, SPEC)
                s_MN = tl.where(keep, s_MN, float("-inf"))
        if SPEC.blocks:
            if bits >= 0:
                row_M, key_N = m0 + tl.arange(0, BLOCK_M), n0 + tl.arange(0, BLOCK_N)
                keep = kept_bits(listed, bits, row_M[:, None], key_N[None, :], n0, BLOCK_N)
                s_MN = tl.where(keep, s_MN, float("-inf"))
        p_MN, alpha_M, m_M, l_M = softmax_step(s_MN, m_M, l_M, scale_log2, SPEC)
        if SPEC.dropout:
            columns_N = column_keys(draw[1], n0 + tl.arange(0, BLOCK_N))
            p_MN = tl.where(kept(draw[0][:, None], columns_N[None, :], draw[2]), p_MN, 0.0)
        v_NV = load_tile(v_pointers + step(n0, v.stride_n, TILE.align), rows_k - n0, HEAD_DIM_V, BLOCK_N, BLOCK_DV, SPEC.ragged)
        acc_MV = tl.dot(p_MN.to(v_NV.dtype), v_NV, acc_MV * alpha_M[:, None], input_precision=PRECISION)
    return acc_MV, m_M, l_M


@triton.jit(do_not_specialize=SIZES, launch_metadata=forward_metadata)
def attn_fwd(
    q, k, v, out, lse, seqlens, extras, total_q, total_k, batch, heads_q, heads_kv, wave, left, right, scale_log2,
    SPEC: tl.constexpr, TILE: tl.constexpr, SCORE_MOD: tl.constexpr = None, MASK_MOD: tl.constexpr = None,
):  # fmt: skip
    """out = softmax(score of q k^T, masked) v and lse, for one block of rows of one head."""
    BLOCK_M: tl.constexpr = TILE.m
    BLOCK_N: tl.constexpr = TILE.n
    BLOCK_D: tl.constexpr = TILE.block_d
    BLOCK_DV: tl.constexpr = TILE.block_dv
    HEAD_DIM: tl.constexpr = TILE.head_dim
    HEAD_DIM_V: tl.constexpr = TILE.head_dim_v
    slot, slots, lane = program_tile(total_q, batch, heads_q, wave, BLOCK_M, SPEC.varlen)
    slot = slots - 1 - slot  # under a causal mask the last rows have the most keys: start them first
    tile, entry, head, q_start, rows_q, k_start, rows_k, sequence = locate(
        slot, lane, heads_q, seqlens.cu_q, seqlens.cu_k, BLOCK_M, total_q, total_k, batch, SPEC.varlen
    )
    m0 = tile * BLOCK_M
    if m0 < rows_q:
        diagonal = 0 if SPEC.top_left else rows_k - rows_q
        head_kv = head // (heads_q // heads_kv)
        q_base = rows_pointer(q, entry, head, q_start + m0, TILE.align)
        k_base = rows_pointer(k, entry, head_kv, k_start, TILE.align)
        v_base = rows_pointer(v, entry, head_kv, k_start, TILE.align)
        q_MD = load_tile(tile_pointers(q, q_base, BLOCK_M, BLOCK_D, TILE.align), rows_q - m0, HEAD_DIM, BLOCK_M, BLOCK_D, True)
        q_pos_M = m0 + diagonal + tl.arange(0, BLOCK_M)
        aligned_M = m0 + (rows_k - rows_q) + tl.arange(0, BLOCK_M)
        if SPEC.prescaled:
            q_MD = q_MD * scale_log2
            scale_log2 = 1.0

        acc_MV = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        # as if a key of value 0, whose score is the sink, had been folded in
        of_head = Extras(
            extras.inner, slope_of_head(extras, sequence, batch, head, SPEC), None, None, extras.cap,
            bias_of_head(extras, entry, head, SPEC), None, None, extras.bias_stride_m, extras.bias_stride_n,
            None, None, None, None, extras.score_aux, extras.mask_aux, sequence, head,
        )  # fmt: skip
        sink = sink_of_head(extras, sequence, batch, head, SPEC)
        m_M = tl.full([BLOCK_M], sink, tl.float32)
        l_M = tl.where(m_M == float("-inf"), 0.0, 1.0)
        draw = None
        if SPEC.dropout:
            row_key, column_key = head_keys(sequence_words(extras.rng, sequence), head)
            draw = (row_keys(row_key, m0 + tl.arange(0, BLOCK_M)), column_key, last_dropped(extras.dropout))
        lo, full_lo, full_hi, hi = key_range(m0, rows_q, rows_k, diagonal, left, right, SPEC, BLOCK_M, BLOCK_N)
        listed = 0
        if SPEC.blocks:
            listed, hi, _ = block_list(extras.blocks, entry, head, 1, m0, False)
        acc_MV, m_M, l_M = attend(
            acc_MV, m_M, l_M, q_MD, k_base, v_base, k, v, of_head, draw, q_pos_M, aligned_M, m0, rows_q, rows_k,
            (lo, full_lo, full_hi, hi, listed), scale_log2, left, right, SPEC, TILE, SCORE_MOD, MASK_MOD,
        )  # fmt: skip
        if SPEC.dropout:
            acc_MV = acc_MV * extras.rescale
        out_MV, lse_M = finish(acc_MV, m_M, l_M, SPEC)
        out_base = rows_pointer(out, entry, head, q_start + m0, TILE.align)
        store_tile(tile_pointers(out, out_base, BLOCK_M, BLOCK_DV, TILE.align), out_MV, rows_q - m0, HEAD_DIM_V, BLOCK_M, BLOCK_DV)
        offs_m = tl.arange(0, BLOCK_M)
        tl.store(head_pointer(lse, entry, head, heads_q, total_q) + q_start + m0 + offs_m, lse_M, mask=offs_m < rows_q - m0)
