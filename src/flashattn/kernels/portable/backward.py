"""The backward in three passes without atomics, so that it is deterministic: delta, then dK and dV, then dQ.

Legend: M query rows, N keys, D query/key dim, V value dim. Nothing but out and lse was kept: the probabilities of a tile are rebuilt
as exp(score - lse). With dp = dO v^T and delta = rowsum(dO * out) - dlse, the gradient of a score is ds = p * (dp - delta) and
    dV = p^T dO,   dK = scale * ds^T q,   dQ = scale * ds k    (with a softcap ds takes its derivative first, see common/score.py).
The gradient of lse enters through delta alone, because d lse / d score is p as well. A sink is in lse, so none is asked for here.
With dropout, out is made of z p, where z is 0 or 1 / (1 - dropout): so dV takes z p for p, and ds takes z dp for dp. delta is as ever.
A score_mod sends ds through its own derivative, before the softcap's.
Method: Dao et al. 2022 (FlashAttention), appendix B.4; Dao 2023 (FlashAttention-2), algorithm 2. The dK/dV pass works on transposed
tiles [N, M], so that p^T and ds^T are left operands straight from registers.

Over 300 lines, since its two large passes say the same of a tile and of its transpose, which one reads side by side.
"""

import triton
import triton.language as tl

from ..common.blocks import block_list, kept_bits, listed_head, listed_place
from ..common.bounds import key_range, query_range
from ..common.dropout import column_keys, head_keys, kept, last_dropped, row_keys, sequence_words
from ..common.index import existing, head_pointer, load_row, load_tile, locate, program_tile, rows_pointer, step, store_tile, tile_pointers
from ..common.mask import keep_mask, mod_keeps
from ..common.score import bias_of_head, biased, capped, load_bias, modified, modified_gradient, score_gradient, score_weight, slope_of_head
from ..common.softmax import LOG2E, probabilities, probabilities_of_biased
from ..structs import SIZES, Extras
from .profile import delta_metadata, dkdv_metadata, dq_metadata


@triton.jit(do_not_specialize=SIZES, launch_metadata=delta_metadata)
def attn_bwd_delta(out, dout, dlse, delta, total_q, batch, heads_q, TILE: tl.constexpr):
    """delta = rowsum(dO * out) - dlse, fp32. `dlse` is None when no gradient came into lse."""
    BLOCK_M: tl.constexpr = TILE.m
    BLOCK_DV: tl.constexpr = TILE.block_dv
    HEAD_DIM_V: tl.constexpr = TILE.head_dim_v
    lanes = heads_q * batch
    lane = tl.program_id(0) % lanes
    head = lane % heads_q
    entry = lane // heads_q
    m0 = tl.program_id(0) // lanes * BLOCK_M
    rows = total_q - m0
    out_base = rows_pointer(out, entry, head, m0, TILE.align)
    dout_base = rows_pointer(dout, entry, head, m0, TILE.align)
    o_MV = load_tile(tile_pointers(out, out_base, BLOCK_M, BLOCK_DV, TILE.align), rows, HEAD_DIM_V, BLOCK_M, BLOCK_DV, True)
    do_MV = load_tile(tile_pointers(dout, dout_base, BLOCK_M, BLOCK_DV, TILE.align), rows, HEAD_DIM_V, BLOCK_M, BLOCK_DV, True)
    delta_M = tl.sum(o_MV.to(tl.float32) * do_MV.to(tl.float32), 1)
    offs_m = tl.arange(0, BLOCK_M)
    if dlse is not None:
        delta_M -= load_row(head_pointer(dlse, entry, head, heads_q, total_q) + m0, rows, BLOCK_M, True)
    tl.store(head_pointer(delta, entry, head, heads_q, total_q) + m0 + offs_m, delta_M, mask=offs_m < rows)


@triton.jit
def gather_dkdv(
    dk_ND, dv_NV, k_ND, v_NV, q, dout, lse, delta, extras, words, place, first_head, group, sides, n0, diagonal,
    aligned, visit, scale_log2, left, right, SPEC: tl.constexpr, TILE: tl.constexpr, SCORE_MOD: tl.constexpr, SCORE_GRAD: tl.constexpr,
    MASK_MOD: tl.constexpr,
):  # fmt: skip
    """Add what the query rows [lo, hi) of the heads of a group give to dK and dV of a block of keys: one flat loop over both.

    words: `sequence_words` of dropout. place: (batch entry, sequence, batch). sides: (first row, rows, keys, rows of all). visit: (lo,
    full_lo, full_hi, hi, the list of a block mask). aligned: the diagonal's offset as ALiBi has it. group: how often [lo, hi) is walked.
    """
    entry, sequence, batch = place
    q_start, rows_q, rows_k, total_q = sides
    lo, full_lo, full_hi, hi, listed = visit
    BLOCK_M: tl.constexpr = TILE.m
    BLOCK_N: tl.constexpr = TILE.n
    BLOCK_D: tl.constexpr = TILE.block_d
    BLOCK_DV: tl.constexpr = TILE.block_dv
    HEAD_DIM: tl.constexpr = TILE.head_dim
    HEAD_DIM_V: tl.constexpr = TILE.head_dim_v
    PRECISION: tl.constexpr = "tf32" if SPEC.tf32 else "ieee"
    # with dP behind the scores the compiler keeps an operand of it in registers, 300 bytes more than there are
    DP_FIRST: tl.constexpr = not SPEC.need_dv and k_ND.dtype == tl.float32
    LSE_ROWS: tl.constexpr = 2 if SPEC.natural else 1
    tl.assume(q.stride_n >= 0)  # as torch's all are; untold, the compiler keeps their signs in registers, of which it has none to spare
    tl.assume(dout.stride_n >= 0)
    length = hi - lo
    stop = lo + group * length if SPEC.grouped else hi
    q_first = tile_pointers(q, rows_pointer(q, entry, first_head, q_start, TILE.align), BLOCK_M, BLOCK_D, TILE.align)
    do_first = tile_pointers(dout, rows_pointer(dout, entry, first_head, q_start, TILE.align), BLOCK_M, BLOCK_DV, TILE.align)
    for m in tl.range(lo, stop, BLOCK_M):
        member = (m - lo) // length if SPEC.grouped else 0
        m0 = m - member * length
        if SPEC.blocks:
            if SPEC.grouped:
                member += listed_head(listed, m0)
            m0, bits = listed_place(listed, m0)
        rows = rows_q - m0
        q_pointers = q_first + (step(member, q.stride_h, TILE.align) + step(m0, q.stride_n, TILE.align))
        q_MD = load_tile(q_pointers, rows, HEAD_DIM, BLOCK_M, BLOCK_D, SPEC.ragged)
        lse_first = lse + step(member, LSE_ROWS * total_q, 1) + m0
        lse_M = load_row(lse_first, rows, BLOCK_M, SPEC.ragged)
        do_pointers = do_first + (step(member, dout.stride_h, TILE.align) + step(m0, dout.stride_n, TILE.align))
        if DP_FIRST:
            do_MV = load_tile(do_pointers, rows, HEAD_DIM_V, BLOCK_M, BLOCK_DV, SPEC.ragged)
            dp_NM = tl.dot(v_NV, tl.trans(do_MV), input_precision=PRECISION)
        slope = slope_of_head(extras, sequence, batch, first_head + member, SPEC)
        of_head = Extras(
            extras.inner, slope, None, None, extras.cap,
            bias_of_head(extras, entry, first_head + member, SPEC), None, None, extras.bias_stride_m, extras.bias_stride_n,
            None, None, None, None, extras.score_aux, extras.mask_aux, sequence, first_head + member,
        )  # fmt: skip
        t_NM = capped(tl.dot(k_ND, tl.trans(q_MD), input_precision=PRECISION), of_head, SPEC)
        distance_NM = None
        if SPEC.alibi:
            row_M = m0 + aligned - n0 + tl.arange(0, BLOCK_M)
            distance_NM = row_M.to(tl.float32)[None, :] - tl.arange(0, BLOCK_N).to(tl.float32)[:, None]
        bias_NM = None
        if SPEC.bias:
            row_M = m0 + tl.arange(0, BLOCK_M)
            bias_NM = load_bias(of_head, row_M[None, :], (n0 + tl.arange(0, BLOCK_N))[:, None], rows_q, rows_k, True)
        if SPEC.natural:
            rest_M = load_row(lse_first + total_q, rows, BLOCK_M, SPEC.ragged)
        s_NM = biased(t_NM, of_head, distance_NM, bias_NM, SPEC)
        q_idx, kv_idx = None, None
        if SCORE_MOD is not None or MASK_MOD is not None:
            q_idx, kv_idx = existing(m0, rows_q, BLOCK_M)[None, :], existing(n0, rows_k, BLOCK_N)[:, None]
        final_NM = modified(s_NM, of_head, q_idx, kv_idx, SCORE_MOD)
        if SPEC.natural:
            p_NM = probabilities_of_biased(final_NM, lse_M[None, :], rest_M[None, :], scale_log2)
        else:
            p_NM = probabilities(final_NM, (lse_M * LOG2E)[None, :], scale_log2)
        p_NM = mod_keeps(p_NM, 0.0, of_head, q_idx, kv_idx, MASK_MOD)
        if SPEC.ragged or SPEC.left or SPEC.right:
            if (m0 < full_lo) | (m0 >= full_hi):
                row_M = m0 + tl.arange(0, BLOCK_M)
                k_pos_N = n0 + tl.arange(0, BLOCK_N)
                keep = keep_mask((row_M + diagonal)[None, :], k_pos_N[:, None], (row_M < rows_q)[None, :], left, right, SPEC)
                p_NM = tl.where(keep, p_NM, 0.0)
        if SPEC.blocks:
            if bits >= 0:
                row_M, key_N = m0 + tl.arange(0, BLOCK_M), n0 + tl.arange(0, BLOCK_N)
                keep = kept_bits(listed, bits, row_M[None, :], key_N[:, None], n0, BLOCK_N)
                p_NM = tl.where(keep, p_NM, 0.0)
        weight_NM = score_weight(p_NM, t_NM, SPEC)
        if SPEC.dropout:
            row_key, column_key = head_keys(words, first_head + member)
            rows_M = row_keys(row_key, m0 + tl.arange(0, BLOCK_M))
            columns_N = column_keys(column_key, n0 + tl.arange(0, BLOCK_N))
            kept_NM = kept(rows_M[None, :], columns_N[:, None], last_dropped(extras.dropout))
            p_NM = tl.where(kept_NM, p_NM, 0.0)
        if not DP_FIRST:
            do_MV = load_tile(do_pointers, rows, HEAD_DIM_V, BLOCK_M, BLOCK_DV, SPEC.ragged)
        if SPEC.need_dv:
            dv_NV = tl.dot(p_NM.to(do_MV.dtype), do_MV, dv_NV, input_precision=PRECISION)
        if SPEC.need_dk:
            delta_M = load_row(delta + step(member, total_q, 1) + m0, rows, BLOCK_M, SPEC.ragged)
            if not DP_FIRST:
                dp_NM = tl.dot(v_NV, tl.trans(do_MV), input_precision=PRECISION)
            if SPEC.dropout:
                dp_NM = tl.where(kept_NM, dp_NM, 0.0) * extras.rescale
            ds_NM = score_gradient(weight_NM, dp_NM, delta_M[None, :])
            ds_NM = modified_gradient(ds_NM, s_NM, of_head, q_idx, kv_idx, SCORE_GRAD)
            dk_ND = tl.dot(ds_NM.to(q_MD.dtype), q_MD, dk_ND, input_precision=PRECISION)
    return dk_ND, dv_NV


@triton.jit(do_not_specialize=SIZES, launch_metadata=dkdv_metadata)
def attn_bwd_dkdv(
    q, k, v, dout, lse, delta, dk, dv, seqlens, extras, total_q, total_k, batch, heads_q, heads_kv, wave, left, right, scale, scale_log2,
    SPEC: tl.constexpr, TILE: tl.constexpr, SCORE_MOD: tl.constexpr = None, SCORE_GRAD: tl.constexpr = None, MASK_MOD: tl.constexpr = None,
):  # fmt: skip
    """dK and dV of one block of keys of one key/value head, summed over the query heads that read it. Not needed: None."""
    BLOCK_M: tl.constexpr = TILE.m
    BLOCK_N: tl.constexpr = TILE.n
    BLOCK_D: tl.constexpr = TILE.block_d
    BLOCK_DV: tl.constexpr = TILE.block_dv
    HEAD_DIM: tl.constexpr = TILE.head_dim
    HEAD_DIM_V: tl.constexpr = TILE.head_dim_v
    slot, _, lane = program_tile(total_k, batch, heads_kv, wave, BLOCK_N, SPEC.varlen)
    tile, entry, head_kv, k_start, rows_k, q_start, rows_q, sequence = locate(
        slot, lane, heads_kv, seqlens.cu_k, seqlens.cu_q, BLOCK_N, total_k, total_q, batch, SPEC.varlen
    )
    n0 = tile * BLOCK_N
    if n0 < rows_k:
        diagonal = 0 if SPEC.top_left else rows_k - rows_q
        group = heads_q // heads_kv
        if SPEC.natural:
            lse_first = head_pointer(lse, entry, head_kv * group, heads_q, 2 * total_q) + q_start
        else:
            lse_first = head_pointer(lse, entry, head_kv * group, heads_q, total_q) + q_start
        delta_first = lse_first
        k_base = rows_pointer(k, entry, head_kv, k_start + n0, TILE.align)
        k_ND = load_tile(tile_pointers(k, k_base, BLOCK_N, BLOCK_D, TILE.align), rows_k - n0, HEAD_DIM, BLOCK_N, BLOCK_D, True)
        v_NV = None
        if SPEC.need_dk:
            delta_first = head_pointer(delta, entry, head_kv * group, heads_q, total_q) + q_start
            v_base = rows_pointer(v, entry, head_kv, k_start + n0, TILE.align)
            v_NV = load_tile(tile_pointers(v, v_base, BLOCK_N, BLOCK_DV, TILE.align), rows_k - n0, HEAD_DIM_V, BLOCK_N, BLOCK_DV, True)
        if SPEC.prescaled:
            k_ND = k_ND * scale_log2
            scale_log2 = 1.0
        dk_ND = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        dv_NV = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
        words = None
        if SPEC.dropout:
            words = sequence_words(extras.rng, sequence)
        turns, listed = group, 0
        lo, full_lo, full_hi, hi = query_range(n0, rows_q, rows_k, diagonal, left, right, SPEC, BLOCK_M, BLOCK_N)
        if SPEC.blocks:
            listed, hi, turns = block_list(extras.blocks, entry, head_kv * group, group, n0, True)
        dk_ND, dv_NV = gather_dkdv(
            dk_ND, dv_NV, k_ND, v_NV, q, dout, lse_first, delta_first, extras, words, (entry, sequence, batch), head_kv * group, turns,
            (q_start, rows_q, rows_k, total_q), n0, diagonal, rows_k - rows_q, (lo, full_lo, full_hi, hi, listed), scale_log2, left, right,
            SPEC, TILE, SCORE_MOD, SCORE_GRAD, MASK_MOD,
        )  # fmt: skip
        if SPEC.need_dk:
            dk_base = rows_pointer(dk, entry, head_kv, k_start + n0, TILE.align)
            store_tile(tile_pointers(dk, dk_base, BLOCK_N, BLOCK_D, TILE.align), dk_ND * scale, rows_k - n0, HEAD_DIM, BLOCK_N, BLOCK_D)
        if SPEC.need_dv:
            if SPEC.dropout:
                dv_NV = dv_NV * extras.rescale
            dv_base = rows_pointer(dv, entry, head_kv, k_start + n0, TILE.align)
            store_tile(tile_pointers(dv, dv_base, BLOCK_N, BLOCK_DV, TILE.align), dv_NV, rows_k - n0, HEAD_DIM_V, BLOCK_N, BLOCK_DV)


@triton.jit
def gather_dq(
    dq_MD, q_MD, do_MV, lse_M, rest_M, delta_M, k_base, v_base, k, v, extras, draw, q_pos_M, aligned_M, m0, rows_q, rows_k, visit,
    scale_log2, left, right, SPEC: tl.constexpr, TILE: tl.constexpr, SCORE_MOD: tl.constexpr, SCORE_GRAD: tl.constexpr,
    MASK_MOD: tl.constexpr,
):  # fmt: skip
    """Add what the keys [lo, hi) give to dQ of a block of query rows. aligned_M: positions as ALiBi has them. lse_M: in base 2; of natural
    scores this and rest_M are what `attn_bwd_shifts` gave. draw: as in the forward, and what is kept is multiplied with. visit: (lo,
    full_lo, full_hi, hi, the list of a block mask)."""
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
        v_NV = load_tile(v_pointers + step(n0, v.stride_n, TILE.align), rows_k - n0, HEAD_DIM_V, BLOCK_N, BLOCK_DV, SPEC.ragged)
        t_MN = capped(tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION), extras, SPEC)
        distance_MN = None
        if SPEC.alibi:
            distance_MN = (aligned_M - n0).to(tl.float32)[:, None] - tl.arange(0, BLOCK_N).to(tl.float32)[None, :]
        bias_MN = None
        if SPEC.bias:
            row_M, key_N = m0 + tl.arange(0, BLOCK_M), n0 + tl.arange(0, BLOCK_N)
            bias_MN = load_bias(extras, row_M[:, None], key_N[None, :], rows_q, rows_k, SPEC.ragged)
        s_MN = biased(t_MN, extras, distance_MN, bias_MN, SPEC)
        q_idx, kv_idx = None, None
        if SCORE_MOD is not None or MASK_MOD is not None:
            q_idx, kv_idx = existing(m0, rows_q, BLOCK_M)[:, None], existing(n0, rows_k, BLOCK_N, SPEC.ragged)[None, :]
        final_MN = modified(s_MN, extras, q_idx, kv_idx, SCORE_MOD)
        if SPEC.natural:
            p_MN = probabilities_of_biased(final_MN, lse_M[:, None], rest_M[:, None], scale_log2)
        else:
            p_MN = probabilities(final_MN, lse_M[:, None], scale_log2)
        p_MN = mod_keeps(p_MN, 0.0, extras, q_idx, kv_idx, MASK_MOD)
        if SPEC.ragged or SPEC.left or SPEC.right:
            if (n0 < full_lo) | (n0 >= full_hi):
                k_pos_N = n0 + tl.arange(0, BLOCK_N)
                keep = keep_mask(q_pos_M[:, None], k_pos_N[None, :], (k_pos_N < rows_k)[None, :], left, right, SPEC)
                p_MN = tl.where(keep, p_MN, 0.0)
        if SPEC.blocks:
            if bits >= 0:
                row_M, key_N = m0 + tl.arange(0, BLOCK_M), n0 + tl.arange(0, BLOCK_N)
                keep = kept_bits(listed, bits, row_M[:, None], key_N[None, :], n0, BLOCK_N)
                p_MN = tl.where(keep, p_MN, 0.0)
        weight_MN = score_weight(p_MN, t_MN, SPEC)
        dp_MN = tl.dot(do_MV, tl.trans(v_NV), input_precision=PRECISION)
        if SPEC.dropout:
            columns_N = column_keys(draw[1], n0 + tl.arange(0, BLOCK_N))
            dp_MN = tl.where(kept(draw[0][:, None], columns_N[None, :], draw[2]), dp_MN, 0.0) * draw[3]
        ds_MN = score_gradient(weight_MN, dp_MN, delta_M[:, None])
        ds_MN = modified_gradient(ds_MN, s_MN, extras, q_idx, kv_idx, SCORE_GRAD)
        dq_MD = tl.dot(ds_MN.to(k_ND.dtype), k_ND, dq_MD, input_precision=PRECISION)
    return dq_MD


@triton.jit(do_not_specialize=SIZES, launch_metadata=dq_metadata)
def attn_bwd_dq(
    q, k, v, dout, lse, delta, dq, seqlens, extras, total_q, total_k, batch, heads_q, heads_kv, wave, left, right, scale, scale_log2,
    SPEC: tl.constexpr, TILE: tl.constexpr, SCORE_MOD: tl.constexpr = None, SCORE_GRAD: tl.constexpr = None, MASK_MOD: tl.constexpr = None,
):  # fmt: skip
    """dQ of one block of query rows of one head."""
    BLOCK_M: tl.constexpr = TILE.m
    BLOCK_N: tl.constexpr = TILE.n
    BLOCK_D: tl.constexpr = TILE.block_d
    BLOCK_DV: tl.constexpr = TILE.block_dv
    HEAD_DIM: tl.constexpr = TILE.head_dim
    HEAD_DIM_V: tl.constexpr = TILE.head_dim_v
    slot, slots, lane = program_tile(total_q, batch, heads_q, wave, BLOCK_M, SPEC.varlen)
    slot = slots - 1 - slot
    tile, entry, head, q_start, rows_q, k_start, rows_k, sequence = locate(
        slot, lane, heads_q, seqlens.cu_q, seqlens.cu_k, BLOCK_M, total_q, total_k, batch, SPEC.varlen
    )
    m0 = tile * BLOCK_M
    if m0 < rows_q:
        diagonal = 0 if SPEC.top_left else rows_k - rows_q
        head_kv = head // (heads_q // heads_kv)
        row = q_start + m0
        q_base = rows_pointer(q, entry, head, row, TILE.align)
        do_base = rows_pointer(dout, entry, head, row, TILE.align)
        k_base = rows_pointer(k, entry, head_kv, k_start, TILE.align)
        v_base = rows_pointer(v, entry, head_kv, k_start, TILE.align)
        q_MD = load_tile(tile_pointers(q, q_base, BLOCK_M, BLOCK_D, TILE.align), rows_q - m0, HEAD_DIM, BLOCK_M, BLOCK_D, True)
        do_MV = load_tile(tile_pointers(dout, do_base, BLOCK_M, BLOCK_DV, TILE.align), rows_q - m0, HEAD_DIM_V, BLOCK_M, BLOCK_DV, True)
        rest_M = None
        if SPEC.natural:
            lse_first = head_pointer(lse, entry, head, heads_q, 2 * total_q) + row
            lse_M = load_row(lse_first, rows_q - m0, BLOCK_M, True)
            rest_M = load_row(lse_first + total_q, rows_q - m0, BLOCK_M, True)
        else:
            lse_M = load_row(head_pointer(lse, entry, head, heads_q, total_q) + row, rows_q - m0, BLOCK_M, True) * LOG2E
        delta_M = load_row(head_pointer(delta, entry, head, heads_q, total_q) + row, rows_q - m0, BLOCK_M, True)
        q_pos_M = m0 + diagonal + tl.arange(0, BLOCK_M)
        aligned_M = m0 + (rows_k - rows_q) + tl.arange(0, BLOCK_M)
        dq_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        if SPEC.prescaled:
            q_MD = q_MD * scale_log2
            scale_log2 = 1.0
        of_head = Extras(
            extras.inner, slope_of_head(extras, sequence, batch, head, SPEC), None, None, extras.cap,
            bias_of_head(extras, entry, head, SPEC), None, None, extras.bias_stride_m, extras.bias_stride_n,
            None, None, None, None, extras.score_aux, extras.mask_aux, sequence, head,
        )  # fmt: skip
        draw = None
        if SPEC.dropout:
            row_key, column_key = head_keys(sequence_words(extras.rng, sequence), head)
            draw = (row_keys(row_key, m0 + tl.arange(0, BLOCK_M)), column_key, last_dropped(extras.dropout), extras.rescale)
        listed = 0
        lo, full_lo, full_hi, hi = key_range(m0, rows_q, rows_k, diagonal, left, right, SPEC, BLOCK_M, BLOCK_N)
        if SPEC.blocks:
            listed, hi, _ = block_list(extras.blocks, entry, head, 1, m0, False)
        dq_MD = gather_dq(
            dq_MD, q_MD, do_MV, lse_M, rest_M, delta_M, k_base, v_base, k, v, of_head, draw, q_pos_M, aligned_M, m0, rows_q, rows_k,
            (lo, full_lo, full_hi, hi, listed), scale_log2, left, right, SPEC, TILE, SCORE_MOD, SCORE_GRAD, MASK_MOD,
        )  # fmt: skip
        dq_base = rows_pointer(dq, entry, head, row, TILE.align)
        store_tile(tile_pointers(dq, dq_base, BLOCK_M, BLOCK_D, TILE.align), dq_MD * scale, rows_q - m0, HEAD_DIM, BLOCK_M, BLOCK_D)
