"""The forward together with its derivative along tangents of q, k, v and sinks (a Jacobian-vector product), in one walk over the keys.

Legend: M query rows, N keys, D query/key dim, V value dim; t before a name is its tangent. With p the probabilities of a row and ts the
tangents of its scores, d p_j = p_j (ts_j - mu) where mu = sum_j p_j ts_j, so
    tlse = mu,   tout = sum_j p_j (ts_j v_j + tv_j) - mu out
and three sums are carried along with the two of the online softmax: of p ts (mu), of p (ts v + tv) (tacc) and of p v (acc), all rescaled
alike when a maximum is raised. No tangent of a probability is ever stored. A sink is a key of value 0 whose score has a tangent of its own.
What has no tangent is None, and its products aren't there.

The surprising fact: `out` is subtracted in float32, as it is summed here. Taken from a forward that has rounded it, it would leave
mu times that rounding in a difference that may be small.
Method: Lu & Song 2024 (sCM), appendix on a flash attention with tangents.
"""

import triton
import triton.language as tl

from ..common.bounds import key_range
from ..common.index import head_pointer, load_tile, locate, program_tile, rows_pointer, step, store_tile, tile_pointers
from ..common.mask import keep_mask
from ..common.score import biased, capped, score_tangent, score_weight, sink_of_head, slope_of_head
from ..common.softmax import finish, softmax_step
from ..structs import SIZES, Extras
from .profile import tangent_metadata


@triton.jit
def attend_tangent(
    acc_MV, tacc_MV, m_M, l_M, mu_M, q_MD, tq_MD, k, v, tk, tv, place, extras, q_pos_M, aligned_M, rows_k, visit, scale, scale_log2, left,
    right, SPEC: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Fold the keys that are visited into (acc, tacc, m, l, mu), all but m unnormalised. place: (batch entry, key/value head, first key).
    visit: (lo, full_lo, full_hi, hi). aligned_M: positions as ALiBi has them. scale: of tangents of products."""
    entry, head_kv, k_start = place
    lo, full_lo, full_hi, hi = visit
    BLOCK_M: tl.constexpr = TILE.m
    BLOCK_N: tl.constexpr = TILE.n
    BLOCK_D: tl.constexpr = TILE.block_d
    BLOCK_DV: tl.constexpr = TILE.block_dv
    HEAD_DIM: tl.constexpr = TILE.head_dim
    HEAD_DIM_V: tl.constexpr = TILE.head_dim_v
    PRECISION: tl.constexpr = "tf32" if SPEC.tf32 else "ieee"
    k_pointers = tile_pointers(k, rows_pointer(k, entry, head_kv, k_start, TILE.align), BLOCK_N, BLOCK_D, TILE.align)
    v_pointers = tile_pointers(v, rows_pointer(v, entry, head_kv, k_start, TILE.align), BLOCK_N, BLOCK_DV, TILE.align)
    if tk is not None:
        tk_pointers = tile_pointers(tk, rows_pointer(tk, entry, head_kv, k_start, TILE.align), BLOCK_N, BLOCK_D, TILE.align)
    if tv is not None:
        tv_pointers = tile_pointers(tv, rows_pointer(tv, entry, head_kv, k_start, TILE.align), BLOCK_N, BLOCK_DV, TILE.align)
    for n0 in tl.range(lo, hi, BLOCK_N):
        k_ND = load_tile(k_pointers + step(n0, k.stride_n, TILE.align), rows_k - n0, HEAD_DIM, BLOCK_N, BLOCK_D, SPEC.ragged)
        distance_MN = None
        if SPEC.alibi:
            distance_MN = (aligned_M - n0).to(tl.float32)[:, None] - tl.arange(0, BLOCK_N).to(tl.float32)[None, :]
        t_MN = capped(tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION), extras, SPEC)
        s_MN = biased(t_MN, extras, distance_MN, None, SPEC)
        if SPEC.scores_move:
            ts_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            if tq_MD is not None:
                ts_MN = tl.dot(tq_MD, tl.trans(k_ND), ts_MN, input_precision=PRECISION)
            if tk is not None:
                tk_pointers_n = tk_pointers + step(n0, tk.stride_n, TILE.align)
                tk_ND = load_tile(tk_pointers_n, rows_k - n0, HEAD_DIM, BLOCK_N, BLOCK_D, SPEC.ragged)
                ts_MN = tl.dot(q_MD, tl.trans(tk_ND), ts_MN, input_precision=PRECISION)
        if SPEC.ragged or SPEC.left or SPEC.right:
            if (n0 < full_lo) | (n0 >= full_hi):
                k_pos_N = n0 + tl.arange(0, BLOCK_N)
                keep = keep_mask(q_pos_M[:, None], k_pos_N[None, :], (k_pos_N < rows_k)[None, :], left, right, SPEC)
                s_MN = tl.where(keep, s_MN, float("-inf"))
                if SPEC.scores_move:
                    ts_MN = tl.where(keep, ts_MN, 0.0)  # it may be infinite there, and a probability of 0 would not end that
        p_MN, alpha_M, m_M, l_M = softmax_step(s_MN, m_M, l_M, scale_log2, SPEC)
        v_NV = load_tile(v_pointers + step(n0, v.stride_n, TILE.align), rows_k - n0, HEAD_DIM_V, BLOCK_N, BLOCK_DV, SPEC.ragged)
        mu_M = mu_M * alpha_M
        tacc_MV = tacc_MV * alpha_M[:, None]
        if SPEC.scores_move:
            pts_MN = score_tangent(score_weight(p_MN, t_MN, SPEC), ts_MN, scale)
            mu_M += tl.sum(pts_MN, 1)
            tacc_MV = tl.dot(pts_MN.to(v_NV.dtype), v_NV, tacc_MV, input_precision=PRECISION)
        acc_MV = tl.dot(p_MN.to(v_NV.dtype), v_NV, acc_MV * alpha_M[:, None], input_precision=PRECISION)
        if tv is not None:
            tv_pointers_n = tv_pointers + step(n0, tv.stride_n, TILE.align)
            tv_NV = load_tile(tv_pointers_n, rows_k - n0, HEAD_DIM_V, BLOCK_N, BLOCK_DV, SPEC.ragged)
            tacc_MV = tl.dot(p_MN.to(v_NV.dtype), tv_NV, tacc_MV, input_precision=PRECISION)
    return acc_MV, tacc_MV, m_M, l_M, mu_M


@triton.jit(do_not_specialize=SIZES, launch_metadata=tangent_metadata)
def attn_jvp(
    q, k, v, tq, tk, tv, out, tout, lse, tlse, seqlens, extras, tsinks, total_q, total_k, batch, heads_q, heads_kv, wave, left, right,
    scale, scale_log2, SPEC: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """out, lse and their tangents for one block of rows of one head. tq, tk, tv, tsinks: None where there is none; of sinks by batch
    entry, [entries, heads_q]."""
    BLOCK_M: tl.constexpr = TILE.m
    BLOCK_N: tl.constexpr = TILE.n
    BLOCK_D: tl.constexpr = TILE.block_d
    BLOCK_DV: tl.constexpr = TILE.block_dv
    HEAD_DIM: tl.constexpr = TILE.head_dim
    HEAD_DIM_V: tl.constexpr = TILE.head_dim_v
    slot, slots, lane = program_tile(total_q, batch, heads_q, wave, BLOCK_M, SPEC.varlen)
    slot = slots - 1 - slot  # as in the forward
    tile, entry, head, q_start, rows_q, k_start, rows_k, sequence = locate(
        slot, lane, heads_q, seqlens.cu_q, seqlens.cu_k, BLOCK_M, total_q, total_k, batch, SPEC.varlen
    )
    m0 = tile * BLOCK_M
    if m0 < rows_q:
        diagonal = 0 if SPEC.top_left else rows_k - rows_q
        row = q_start + m0
        q_base = rows_pointer(q, entry, head, row, TILE.align)
        q_MD = load_tile(tile_pointers(q, q_base, BLOCK_M, BLOCK_D, TILE.align), rows_q - m0, HEAD_DIM, BLOCK_M, BLOCK_D, True)
        tq_MD = None
        if tq is not None:
            tq_base = rows_pointer(tq, entry, head, row, TILE.align)
            tq_MD = load_tile(tile_pointers(tq, tq_base, BLOCK_M, BLOCK_D, TILE.align), rows_q - m0, HEAD_DIM, BLOCK_M, BLOCK_D, True)
        q_pos_M = m0 + diagonal + tl.arange(0, BLOCK_M)
        aligned_M = m0 + (rows_k - rows_q) + tl.arange(0, BLOCK_M)
        if SPEC.prescaled:  # tangents of products too: `scale` is what is left to do
            q_MD = q_MD * scale_log2
            if tq is not None:
                tq_MD = tq_MD * scale_log2
            scale_log2 = 1.0

        acc_MV = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        tacc_MV = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        of_head = Extras(extras.inner, slope_of_head(extras, sequence, batch, head, SPEC), None, None, extras.cap)
        m_M = tl.full([BLOCK_M], sink_of_head(extras, sequence, batch, head, SPEC), tl.float32)
        l_M = tl.where(m_M == float("-inf"), 0.0, 1.0)
        mu_M = tl.zeros([BLOCK_M], tl.float32)
        if tsinks is not None:
            mu_M = tl.where(l_M == 0.0, 0.0, tl.load(tsinks + (entry * heads_q + head)))
        visit = key_range(m0, rows_q, rows_k, diagonal, left, right, SPEC, BLOCK_M, BLOCK_N)
        acc_MV, tacc_MV, m_M, l_M, mu_M = attend_tangent(
            acc_MV, tacc_MV, m_M, l_M, mu_M, q_MD, tq_MD, k, v, tk, tv, (entry, head // (heads_q // heads_kv), k_start), of_head, q_pos_M,
            aligned_M, rows_k, visit, scale, scale_log2, left, right, SPEC, TILE,
        )  # fmt: skip
        out_MV, lse_M = finish(acc_MV, m_M, l_M, SPEC)
        inverse_M = tl.div_rn(1.0, tl.where(l_M == 0.0, 1.0, l_M))
        tlse_M = mu_M * inverse_M
        tout_MV = tacc_MV * inverse_M[:, None] - tlse_M[:, None] * out_MV
        out_base = rows_pointer(out, entry, head, row, TILE.align)
        tout_base = rows_pointer(tout, entry, head, row, TILE.align)
        store_tile(tile_pointers(out, out_base, BLOCK_M, BLOCK_DV, TILE.align), out_MV, rows_q - m0, HEAD_DIM_V, BLOCK_M, BLOCK_DV)
        store_tile(tile_pointers(tout, tout_base, BLOCK_M, BLOCK_DV, TILE.align), tout_MV, rows_q - m0, HEAD_DIM_V, BLOCK_M, BLOCK_DV)
        offs_m = tl.arange(0, BLOCK_M)
        tl.store(head_pointer(lse, entry, head, heads_q, total_q) + row + offs_m, lse_M, mask=offs_m < rows_q - m0)
        tl.store(head_pointer(tlse, entry, head, heads_q, total_q) + row + offs_m, tlse_M, mask=offs_m < rows_q - m0)
