"""What calls with natural scores need beside the backward: what to subtract from scores with a bias or a score_mod, and the gradient of a
bias.

Legend: M query rows, N keys, D query/key dim, V value dim. Dense calls alone have a bias.

The surprising fact: lse is not enough to rebuild probabilities from. Masks are often made of large numbers, and in a row of nothing but
-1e9 lse is one of them: its float32 knows nothing of ln N, so e^(score - lse) would be 1, not 1 / N, or off by e^32. `attn_bwd_shifts`
therefore makes a maximum and a sum again for the rows whose lse is far from 0, of which there are few or none.
"""

import triton
import triton.language as tl

from ..common.blocks import BLOCK, FULL, block_list, kept_bits, listed_place, listed_tile
from ..common.bounds import key_range, query_range
from ..common.dropout import column_keys, head_keys, kept, last_dropped, row_keys, sequence_words
from ..common.index import existing, head_pointer, load_row, load_tile, locate, program_tile, rows_pointer, step, tile_pointers, wide
from ..common.mask import keep_mask, mod_keeps
from ..common.score import (
    bias_of_head,
    biased,
    capped,
    load_bias,
    modified,
    modified_gradient,
    score,
    score_gradient,
    sink_of_head,
    slope_of_head,
)
from ..common.softmax import probabilities_of_biased, softmax_step
from ..structs import SIZES, Extras
from .profile import dbias_metadata, shifts_metadata

FAR: tl.constexpr = tl.constexpr(4096.0)  # where lse is rounded to 2^-12, and so a probability


@triton.jit
def maximum_and_sum(
    q_MD, k, k_base, extras, sink, m0, rows_q, rows_k, walk, scale_log2, left, right,
    SPEC: tl.constexpr, TILE: tl.constexpr, SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr,
):  # fmt: skip
    """(m, l) of a block of rows, as the forward makes them. walk: of a block mask, (list, length)."""
    BLOCK_M: tl.constexpr = TILE.m
    BLOCK_N: tl.constexpr = TILE.n
    PRECISION: tl.constexpr = "tf32" if SPEC.tf32 else "ieee"
    diagonal = 0 if SPEC.top_left else rows_k - rows_q
    row_M = m0 + tl.arange(0, BLOCK_M)
    m_M = tl.full([BLOCK_M], sink, tl.float32)
    l_M = tl.where(m_M == float("-inf"), 0.0, 1.0)
    k_pointers = tile_pointers(k, k_base, BLOCK_N, TILE.block_d, TILE.align)
    lo, _full_lo, _full_hi, hi = key_range(m0, rows_q, rows_k, diagonal, left, right, SPEC, BLOCK_M, BLOCK_N)
    if SPEC.blocks:
        hi = walk[1]
    for at in tl.range(lo, hi, BLOCK_N):
        n0 = at
        if SPEC.blocks:
            n0, bits = listed_place(walk[0], at)
        k_ND = load_tile(k_pointers + step(n0, k.stride_n, TILE.align), rows_k - n0, TILE.head_dim, BLOCK_N, TILE.block_d, True)
        k_pos_N = n0 + tl.arange(0, BLOCK_N)
        distance_MN = ((row_M + (rows_k - rows_q))[:, None] - k_pos_N[None, :]).to(tl.float32) if SPEC.alibi else None
        bias_MN = load_bias(extras, row_M[:, None], k_pos_N[None, :], rows_q, rows_k, True) if SPEC.bias else None
        s_MN = score(tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION), extras, distance_MN, bias_MN, SPEC)
        if SCORE_MOD is not None or MASK_MOD is not None:
            q_idx, kv_idx = existing(m0, rows_q, BLOCK_M)[:, None], existing(n0, rows_k, BLOCK_N)[None, :]
            s_MN = mod_keeps(modified(s_MN, extras, q_idx, kv_idx, SCORE_MOD), float("-inf"), extras, q_idx, kv_idx, MASK_MOD)
        keep = keep_mask((row_M + diagonal)[:, None], k_pos_N[None, :], (k_pos_N < rows_k)[None, :], left, right, SPEC)
        s_MN = tl.where(keep, s_MN, float("-inf"))
        if SPEC.blocks:
            if bits >= 0:
                s_MN = tl.where(kept_bits(walk[0], bits, row_M[:, None], k_pos_N[None, :], n0, BLOCK_N), s_MN, float("-inf"))
        _p_MN, _alpha_M, m_M, l_M = softmax_step(s_MN, m_M, l_M, scale_log2, SPEC)
    return m_M, l_M


@triton.jit(do_not_specialize=SIZES, launch_metadata=shifts_metadata)
def attn_bwd_shifts(
    q, k, lse, shifts, seqlens, extras, total_q, total_k, batch, heads_q, heads_kv, wave, left, right, scale_log2,
    SPEC: tl.constexpr, TILE: tl.constexpr, SCORE_MOD: tl.constexpr = None, MASK_MOD: tl.constexpr = None,
):  # fmt: skip
    """shifts [batch, heads_q, 2, rows], float32 (packed: [heads_q, 2, total_q]): a shift and a rest with p = e^(score - shift) 2^-rest.

    lse and 0; the maximum and log2 of the sum where |lse| >= FAR; +inf, with which each p is 0, for a row without keys.
    """
    BLOCK_M: tl.constexpr = TILE.m
    slot, _, lane = program_tile(total_q, batch, heads_q, wave, BLOCK_M, SPEC.varlen)
    tile, entry, head, q_start, rows_q, k_start, rows_k, sequence = locate(
        slot, lane, heads_q, seqlens.cu_q, seqlens.cu_k, BLOCK_M, total_q, total_k, batch, SPEC.varlen
    )
    m0 = tile * BLOCK_M
    offs_m = tl.arange(0, BLOCK_M)
    inside = offs_m < rows_q - m0
    lse_M = load_row(head_pointer(lse, entry, head, heads_q, total_q) + q_start + m0, rows_q - m0, BLOCK_M, True)
    far_M = (tl.abs(lse_M) >= FAR) & (tl.abs(lse_M) < float("inf"))
    shift_M = tl.where(lse_M == float("-inf"), float("inf"), lse_M)
    rest_M = tl.zeros([BLOCK_M], tl.float32)
    if tl.max(far_M.to(tl.int32), 0) > 0:
        of_head = Extras(
            extras.inner, slope_of_head(extras, sequence, batch, head, SPEC), None, None, extras.cap,
            bias_of_head(extras, entry, head, SPEC), None, None, extras.bias_stride_m, extras.bias_stride_n,
            None, None, None, None, extras.score_aux, extras.mask_aux, sequence, head,
        )  # fmt: skip
        q_base = rows_pointer(q, entry, head, q_start + m0, TILE.align)
        k_base = rows_pointer(k, entry, head // (heads_q // heads_kv), k_start, TILE.align)
        q_pointers = tile_pointers(q, q_base, BLOCK_M, TILE.block_d, TILE.align)
        q_MD = load_tile(q_pointers, rows_q - m0, TILE.head_dim, BLOCK_M, TILE.block_d, True)
        sink = sink_of_head(extras, sequence, batch, head, SPEC)
        walk = None
        if SPEC.blocks:
            listed, length, _ = block_list(extras.blocks, entry, head, 1, m0, False)
            walk = (listed, length)
        m_M, l_M = maximum_and_sum(
            q_MD, k, k_base, of_head, sink, m0, rows_q, rows_k, walk, scale_log2, left, right, SPEC, TILE, SCORE_MOD, MASK_MOD
        )
        shift_M = tl.where(far_M, m_M, shift_M)
        rest_M = tl.where(far_M, tl.math.log2(l_M), rest_M)
    pointers = head_pointer(shifts, entry, head, heads_q, 2 * total_q) + q_start + m0 + offs_m
    tl.store(pointers, shift_M, mask=inside)
    tl.store(pointers + total_q, rest_M, mask=inside)


@triton.jit
def walked(m0, n0, total_q, total_k, left, right, SPEC: tl.constexpr, SHARED: tl.constexpr, TILE: tl.constexpr):
    """(first row, blocks of rows, first key, blocks of keys) that give something to the tile of a gradient at (m0, n0)."""
    BLOCK_M: tl.constexpr = TILE.m
    BLOCK_N: tl.constexpr = TILE.n
    diagonal = 0 if SPEC.top_left else total_k - total_q
    m_lo, m_hi, n_lo, n_hi = m0, m0 + BLOCK_M, n0, n0 + BLOCK_N
    if SHARED[2]:
        if SHARED[3]:
            m_lo, m_hi, n_lo, n_hi = m0 * 0, m0 * 0 + total_q, n0 * 0, n0 * 0 + total_k
        else:
            m_lo, _, _, m_hi = query_range(n0, total_q, total_k, diagonal, left, right, SPEC, BLOCK_M, BLOCK_N)
    else:
        lo, _, _, hi = key_range(m0, total_q, total_k, diagonal, left, right, SPEC, BLOCK_M, BLOCK_N)
        if SHARED[3]:
            n_lo, n_hi = lo, hi
        else:
            n_hi = tl.where((n0 >= lo) & (n0 < hi), n_hi, n_lo)
    return m_lo, tl.cdiv(m_hi - m_lo, BLOCK_M), n_lo, tl.cdiv(n_hi - n_lo, BLOCK_N)


@triton.jit
def write_bias_gradient(acc_MN, dbias, lane, m0, n0, total_q, total_k, SHARED: tl.constexpr, TILE: tl.constexpr):
    """A tile of sums, those along shared rows or keys still to be made, into the contiguous [lanes, rows, keys] at dbias."""
    row_M = m0 + tl.arange(0, TILE.m)
    key_N = n0 + tl.arange(0, TILE.n)
    base = dbias + wide(lane) * (1 if SHARED[2] else total_q) * (1 if SHARED[3] else total_k)
    DTYPE: tl.constexpr = dbias.dtype.element_ty
    if SHARED[2]:
        if SHARED[3]:
            tl.store(base, tl.sum(tl.sum(acc_MN, 1), 0).to(DTYPE))
        else:
            tl.store(base + key_N, tl.sum(acc_MN, 0).to(DTYPE), mask=key_N < total_k)
    elif SHARED[3]:
        tl.store(base + row_M, tl.sum(acc_MN, 1).to(DTYPE), mask=row_M < total_q)
    else:
        pointers = base + wide(row_M)[:, None] * total_k + key_N[None, :]
        tl.store(pointers, acc_MN.to(DTYPE), mask=(row_M < total_q)[:, None] & (key_N < total_k)[None, :])


@triton.jit
def tile_gradient(
    q, k, v, dout, shifts, delta, extras, bias_MN, place, sizes, listed, bits, scale_log2, left, right,
    SPEC: tl.constexpr, TILE: tl.constexpr, SCORE_MOD: tl.constexpr, SCORE_GRAD: tl.constexpr, MASK_MOD: tl.constexpr,
):  # fmt: skip
    """p (dp - delta) of a tile of scores. place: (batch entry, head, first row, first key). sizes: (total_q, total_k, batch, heads_q,
    heads_kv). listed, bits: of a block mask, the list and the tile."""
    entry, head, m0, n0 = place
    total_q, total_k, batch, heads_q, heads_kv = sizes
    BLOCK_M: tl.constexpr = TILE.m
    BLOCK_N: tl.constexpr = TILE.n
    PRECISION: tl.constexpr = "tf32" if SPEC.tf32 else "ieee"
    diagonal = 0 if SPEC.top_left else total_k - total_q
    head_kv = head // (heads_q // heads_kv)
    rows, keys = total_q - m0, total_k - n0
    q_pointers = tile_pointers(q, rows_pointer(q, entry, head, m0, TILE.align), BLOCK_M, TILE.block_d, TILE.align)
    k_pointers = tile_pointers(k, rows_pointer(k, entry, head_kv, n0, TILE.align), BLOCK_N, TILE.block_d, TILE.align)
    do_pointers = tile_pointers(dout, rows_pointer(dout, entry, head, m0, TILE.align), BLOCK_M, TILE.block_dv, TILE.align)
    v_pointers = tile_pointers(v, rows_pointer(v, entry, head_kv, n0, TILE.align), BLOCK_N, TILE.block_dv, TILE.align)
    q_MD = load_tile(q_pointers, rows, TILE.head_dim, BLOCK_M, TILE.block_d, SPEC.ragged)
    k_ND = load_tile(k_pointers, keys, TILE.head_dim, BLOCK_N, TILE.block_d, SPEC.ragged)
    do_MV = load_tile(do_pointers, rows, TILE.head_dim_v, BLOCK_M, TILE.block_dv, SPEC.ragged)
    v_NV = load_tile(v_pointers, keys, TILE.head_dim_v, BLOCK_N, TILE.block_dv, SPEC.ragged)
    shift_first = head_pointer(shifts, entry, head, heads_q, 2 * total_q) + m0
    shift_M = load_row(shift_first, rows, BLOCK_M, SPEC.ragged)
    rest_M = load_row(shift_first + total_q, rows, BLOCK_M, SPEC.ragged)
    delta_M = load_row(head_pointer(delta, entry, head, heads_q, total_q) + m0, rows, BLOCK_M, SPEC.ragged)
    row_M = m0 + tl.arange(0, BLOCK_M)
    key_N = n0 + tl.arange(0, BLOCK_N)
    of_head = Extras(
        extras.inner, slope_of_head(extras, entry, batch, head, SPEC), None, None, extras.cap,
        None, None, None, None, None, None, None, None, None, extras.score_aux, extras.mask_aux, entry, head,
    )  # fmt: skip
    distance_MN = ((row_M + (total_k - total_q))[:, None] - key_N[None, :]).to(tl.float32) if SPEC.alibi else None
    t_MN = capped(tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION), of_head, SPEC)
    s_MN = biased(t_MN, of_head, distance_MN, bias_MN, SPEC)
    q_idx, kv_idx = None, None
    if SCORE_MOD is not None or MASK_MOD is not None:
        q_idx, kv_idx = existing(m0, total_q, BLOCK_M)[:, None], existing(n0, total_k, BLOCK_N)[None, :]
    final_MN = modified(s_MN, of_head, q_idx, kv_idx, SCORE_MOD)
    p_MN = probabilities_of_biased(final_MN, shift_M[:, None], rest_M[:, None], scale_log2)
    p_MN = mod_keeps(p_MN, 0.0, of_head, q_idx, kv_idx, MASK_MOD)
    if SPEC.ragged or SPEC.left or SPEC.right:
        inside = (row_M < total_q)[:, None] & (key_N < total_k)[None, :]
        p_MN = tl.where(keep_mask((row_M + diagonal)[:, None], key_N[None, :], inside, left, right, SPEC), p_MN, 0.0)
    if SPEC.blocks:
        if bits >= 0:
            p_MN = tl.where(kept_bits(listed, bits, row_M[:, None], key_N[None, :], n0, BLOCK_N), p_MN, 0.0)
    dp_MN = tl.dot(do_MV, tl.trans(v_NV), input_precision=PRECISION)
    if SPEC.dropout:
        row_key, column_key = head_keys(sequence_words(extras.rng, entry), head)
        kept_MN = kept(row_keys(row_key, row_M)[:, None], column_keys(column_key, key_N)[None, :], last_dropped(extras.dropout))
        dp_MN = tl.where(kept_MN, dp_MN, 0.0) * extras.rescale
    ds_MN = score_gradient(p_MN, dp_MN, delta_M[:, None])
    return modified_gradient(ds_MN, s_MN, of_head, q_idx, kv_idx, SCORE_GRAD)


@triton.jit(do_not_specialize=(*SIZES, "splits"), launch_metadata=dbias_metadata)
def attn_bwd_dbias(
    q, k, v, dout, shifts, delta, dbias, extras, total_q, total_k, batch, heads_q, heads_kv, left, right, scale_log2, splits,
    SPEC: tl.constexpr, SHARED: tl.constexpr, TILE: tl.constexpr,
    SCORE_MOD: tl.constexpr = None, SCORE_GRAD: tl.constexpr = None, MASK_MOD: tl.constexpr = None,
):  # fmt: skip
    """A tile of the gradient of a bias, p (dp - delta) summed over what shares it, or the split-th part of that sum.

    SHARED: whether batch entries, heads, rows and keys share the bias. A program owns rows by keys of the gradient, keeps their sum in
    registers and walks, in a fixed order, the entries and heads (and blocks of rows or keys) that share them, making their scores and dp
    again: two products a step, where to store ds in the passes of dQ or dK would need a copy for each entry and head that is summed over,
    or atomic additions. The bias of a tile is the same in all steps and read once. Few tiles are split; their parts are float32.
    """
    BLOCK_M: tl.constexpr = TILE.m
    BLOCK_N: tl.constexpr = TILE.n
    tiles_m = 1 if SHARED[2] else tl.cdiv(total_q, BLOCK_M)
    tiles_n = 1 if SHARED[3] else tl.cdiv(total_k, BLOCK_N)
    heads = 1 if SHARED[1] else heads_q
    split = tl.program_id(0) % splits
    tile = tl.program_id(0) // splits
    lane = tile // tiles_n // tiles_m
    own_m0 = tile // tiles_n % tiles_m * BLOCK_M
    own_n0 = tile % tiles_n * BLOCK_N
    m_lo, steps_m, n_lo, steps_n = walked(own_m0, own_n0, total_q, total_k, left, right, SPEC, SHARED, TILE)
    count = wide(steps_m) * steps_n * (heads_q if SHARED[1] else 1) * (batch if SHARED[0] else 1)
    of_tile = Extras(None, None, None, None, None, bias_of_head(extras, lane // heads, lane % heads, SPEC), None, None,
                     extras.bias_stride_m, extras.bias_stride_n)  # fmt: skip
    own_M, own_N = own_m0 + tl.arange(0, BLOCK_M), own_n0 + tl.arange(0, BLOCK_N)
    bias_MN = load_bias(of_tile, own_M[:, None], own_N[None, :], total_q, total_k, SPEC.ragged)
    acc_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for index in tl.range(count * split // splits, count * (split + 1) // splits):
        rest = index + own_m0 * 0  # the interpreter's is a Python int
        m0, n0, head, entry = m_lo, n_lo, lane % heads, lane // heads
        if SHARED[3]:
            n0 = n_lo + (rest % steps_n * BLOCK_N).to(tl.int32)
            rest = rest // steps_n
        if SHARED[2]:
            m0 = m_lo + (rest % steps_m * BLOCK_M).to(tl.int32)
            rest = rest // steps_m
        if SHARED[1]:
            head = (rest % heads_q).to(tl.int32)
            rest = rest // heads_q
        if SHARED[0]:
            entry = rest.to(tl.int32)
        place, sizes = (entry, head, m0, n0), (total_q, total_k, batch, heads_q, heads_kv)
        if SPEC.blocks:
            listed, length, _ = block_list(extras.blocks, entry, head, 1, m0, False)
            bits = listed_tile(listed, length, n0 // BLOCK)
            if bits >= FULL:
                acc_MN += tile_gradient(
                    q, k, v, dout, shifts, delta, extras, bias_MN, place, sizes, listed, bits, scale_log2, left, right, SPEC, TILE,
                    SCORE_MOD, SCORE_GRAD, MASK_MOD,
                )  # fmt: skip
        else:
            acc_MN += tile_gradient(
                q, k, v, dout, shifts, delta, extras, bias_MN, place, sizes, None, None, scale_log2, left, right, SPEC, TILE,
                SCORE_MOD, SCORE_GRAD, MASK_MOD,
            )  # fmt: skip
    part = dbias + wide(split) * (tl.num_programs(0) // splits // tiles_m // tiles_n) * (1 if SHARED[2] else total_q) * (
        1 if SHARED[3] else total_k
    )  # fmt: skip
    write_bias_gradient(acc_MN, part, lane, own_m0, own_n0, total_q, total_k, SHARED, TILE)
