"""The Triton kernels of paged attention: runs of tiles, the blocks of queries, and the merge of unfinished ones.

`triton_attention` says how work is cut and launches them.

Letters: T tokens, S sequences, H query heads, K KV heads, G = H / K, D and V widths of keys and values, P pages,
B page_tokens, b blocks of queries, M rows (query token x head of the group) and N slots of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from helix.kernels.triton_merge import final_lse, fold


@triton.jit
def _taking(total, num_workers, MIN_TILES: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many workers take part."""
    return tl.maximum(tl.minimum((total + MIN_TILES - 1) // MIN_TILES, num_workers), 1)


@triton.jit
def _share(worker, total, taking):  # type: ignore[no-untyped-def]
    """``worker * total // taking``, where the run of a worker starts, without leaving 32 bits."""
    return worker * (total // taking) + worker * (total % taking) // taking


@triton.jit
def _slots(table_row, tile, length, N: tl.constexpr, PAGE_TOKENS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where a tile lies in the pool: its first slot if a page holds it whole, else one slot for each of its tokens."""
    if PAGE_TOKENS % N == 0:
        first = tile * N
        page = tl.load(table_row + first // PAGE_TOKENS, mask=first < length, other=0)
        return page.to(tl.int64) * PAGE_TOKENS + first % PAGE_TOKENS
    else:  # noqa: RET505 the compiler drops the branch that is not taken only where both are there
        position_n = tile * N + tl.arange(0, N)
        page_n = tl.load(table_row + position_n // PAGE_TOKENS, mask=position_n < length, other=0)
        return page_n.to(tl.int64) * PAGE_TOKENS + position_n % PAGE_TOKENS


@triton.jit
def _load_rows(pool, slot_n, stride, live_n, d_d, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """[N, D_PAD] rows of the pool; zeros past the length, so that memory never written reaches no sum."""
    pointers = pool + slot_n[:, None] * stride + d_d[None, :]
    if d_d.shape[0] == D:
        return tl.load(pointers, mask=live_n[:, None], other=0.0)
    else:  # noqa: RET505
        return tl.load(pointers, mask=live_n[:, None] & (d_d < D)[None, :], other=0.0)


@triton.jit(do_not_specialize=["num_blocks", "num_sequences", "num_workers", "table_stride"])
def attend_runs(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, k2_ptr, k_scale_ptr, v_scale_ptr, table_ptr, start_ptr, visible_ptr, length_ptr, plan_ptr,
    out_ptr, lse_ptr, part_ptr, part_lse_ptr, scale_log2, num_blocks, num_sequences, num_workers, table_stride,
    q_token_stride, q_head_stride, k_slot_stride, k_head_stride, v_slot_stride, v_head_stride, k2_slot_stride,
    k2_head_stride, out_token_stride, out_head_stride, lse_token_stride, lse_head_stride, G: tl.constexpr,
    K: tl.constexpr, D1: tl.constexpr, D1_PAD: tl.constexpr, D2: tl.constexpr, D2_PAD: tl.constexpr, V: tl.constexpr,
    V_PAD: tl.constexpr, SHARED: tl.constexpr, PAGE_TOKENS: tl.constexpr, BLOCK_Q: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, MIN_TILES: tl.constexpr, PAD: tl.constexpr,
    SPLIT: tl.constexpr, SWAP: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Workers' runs of tiles. SCALED: the pools are FP8, and a slot's scale multiplies its scores, or its weights."""
    worker = tl.program_id(0) // HEAD_BLOCKS
    head_block = tl.program_id(0) % HEAD_BLOCKS
    pad_b = tl.arange(0, PAD)
    # Lengths and pages of tokens are read early: they are there before a step's first kernel.
    if DEPENDENT:
        tl_cuda.gdc_launch_dependents()
        if BLOCK_Q > 1:
            tl_cuda.gdc_wait()
    end_s = tl.load(start_ptr + 1 + pad_b, mask=pad_b < num_sequences, other=2147483647).to(tl.int32)
    if SPLIT:
        length_b = tl.load(length_ptr + pad_b, mask=pad_b < num_blocks, other=0).to(tl.int32)
        tiles_b = (length_b + N - 1) // N
        stop_b = tl.cumsum(tiles_b, 0) * K
        total = tl.sum(tiles_b, 0) * K
        taking = _taking(total, num_workers, MIN_TILES)
        at = tl.where(worker < taking, _share(worker, total, taking), 0)
        stop = tl.where(worker < taking, _share(worker + 1, total, taking), 0)
    else:
        at = tl.zeros((), tl.int32)
        stop = tl.maximum((tl.load(length_ptr + worker // K).to(tl.int32) + N - 1) // N, 1)
    if DEPENDENT:
        tl_cuda.gdc_wait()
    run_start = at
    row_m = head_block * M + tl.arange(0, M)
    offset_n = tl.arange(0, N)
    d1_d = tl.arange(0, D1_PAD)
    v_v = tl.arange(0, V_PAD)
    while at < stop:
        if SPLIT:
            block = tl.sum((stop_b <= at).to(tl.int32), 0)
            num_tiles = tl.sum(tl.where(pad_b == block, tiles_b, 0), 0)
            length = tl.sum(tl.where(pad_b == block, length_b, 0), 0)
            inside = at - tl.sum(tl.where(pad_b == block, stop_b, 0), 0) + num_tiles * K
            kv_head = inside // num_tiles
            tile = inside % num_tiles
            tile_stop = tl.minimum(num_tiles, tile + stop - at)
        else:
            block = worker // K
            kv_head = worker % K
            length = tl.load(length_ptr + block).to(tl.int32)
            num_tiles = (length + N - 1) // N
            tile = tl.zeros((), tl.int32)
            tile_stop = num_tiles
        if BLOCK_Q == 1:
            sequence = tl.minimum(tl.sum((end_s <= block).to(tl.int32), 0), num_sequences - 1)
            token_m = block + row_m.to(tl.int64) * 0
            head_m = row_m
            valid_m = row_m < G
        else:
            sequence = tl.load(plan_ptr + num_blocks + block)
            token_m = tl.load(plan_ptr + 2 * num_blocks + block).to(tl.int64) + row_m // G
            head_m = row_m % G
            valid_m = (row_m < BLOCK_Q * G) & (token_m < tl.load(start_ptr + sequence + 1))
        head_m += kv_head * G
        table_row = table_ptr + sequence.to(tl.int64) * table_stride
        slot = _slots(table_row, tile, length, N, PAGE_TOKENS)
        q_m = q_ptr + token_m * q_token_stride + head_m * q_head_stride
        q1_md = tl.load(q_m[:, None] + d1_d[None, :], mask=valid_m[:, None] & (d1_d < D1)[None, :], other=0.0)
        if D2 > 0:
            d2_d = tl.arange(0, D2_PAD)
            q2_md = tl.load(q_m[:, None] + D1 + d2_d[None, :], mask=valid_m[:, None] & (d2_d < D2)[None, :], other=0.0)
        if BLOCK_Q > 1:
            visible_m = tl.load(visible_ptr + token_m, mask=valid_m, other=0).to(tl.int32)
        k_pool = k_ptr + kv_head.to(tl.int64) * k_head_stride
        v_pool = v_ptr + kv_head.to(tl.int64) * v_head_stride
        k2_pool = k2_ptr + kv_head.to(tl.int64) * k2_head_stride
        peak_m = tl.full((M,), float("-inf"), tl.float32)
        sum_m = tl.zeros((M,), tl.float32)
        if SWAP:
            acc_vm = tl.zeros((V_PAD, M), tl.float32)
        else:
            acc_mv = tl.zeros((M, V_PAD), tl.float32)
        for t in range(tile, tile_stop):
            position_n = t * N + offset_n
            live_n = position_n < length
            slot_n = slot + offset_n if PAGE_TOKENS % N == 0 else slot
            # The next tile's pages are asked for here, a tile ahead of the rows that they lead to.
            slot = _slots(table_row, t + 1, length, N, PAGE_TOKENS)
            k1_nd = _load_rows(k_pool, slot_n, k_slot_stride, live_n, d1_d, D1)
            if SCALED:
                k1_nd = k1_nd.to(q1_md.dtype)
                k_scale_n = tl.load(k_scale_ptr + (slot_n * K + kv_head), mask=live_n, other=0.0)
                v_scale_n = tl.load(v_scale_ptr + (slot_n * K + kv_head), mask=live_n, other=0.0)
            if SWAP:
                score_nm = tl.dot(k1_nd, q1_md.T, input_precision=PRECISION)
            else:
                score_mn = tl.dot(q1_md, k1_nd.T, input_precision=PRECISION)
            if SCALED and SWAP:
                score_nm *= k_scale_n[:, None]
            elif SCALED:
                score_mn *= k_scale_n[None, :]
            if D2 > 0:
                k2_nd = _load_rows(k2_pool, slot_n, k2_slot_stride, live_n, d2_d, D2)
                if SWAP:
                    score_nm = tl.dot(k2_nd, q2_md.T, score_nm, input_precision=PRECISION)
                else:
                    score_mn = tl.dot(q2_md, k2_nd.T, score_mn, input_precision=PRECISION)
            v_nv = k1_nd if SHARED else _load_rows(v_pool, slot_n, v_slot_stride, live_n, v_v, V).to(q1_md.dtype)
            if SWAP:
                seen_nm = position_n[:, None] < visible_m[None, :] if BLOCK_Q > 1 else live_n[:, None]
                score_nm = tl.where(seen_nm, score_nm, float("-inf"))
                new_m = tl.maximum(peak_m, tl.max(score_nm, 0))
                base_m = tl.where(new_m == float("-inf"), 0.0, new_m) * scale_log2
                weight_nm = tl.exp2(score_nm * scale_log2 - base_m[None, :])
                decay_m = tl.exp2(peak_m * scale_log2 - base_m)
                sum_m = sum_m * decay_m + tl.sum(weight_nm, 0)
                if SCALED:
                    weight_nm *= v_scale_n[:, None]
                acc_vm = tl.dot(v_nv.T, weight_nm.to(v_nv.dtype), acc_vm * decay_m[None, :], input_precision=PRECISION)
            else:
                seen_mn = position_n[None, :] < visible_m[:, None] if BLOCK_Q > 1 else live_n[None, :]
                score_mn = tl.where(seen_mn, score_mn, float("-inf"))
                new_m = tl.maximum(peak_m, tl.max(score_mn, 1))
                base_m = tl.where(new_m == float("-inf"), 0.0, new_m) * scale_log2
                weight_mn = tl.exp2(score_mn * scale_log2 - base_m[:, None])
                decay_m = tl.exp2(peak_m * scale_log2 - base_m)
                sum_m = sum_m * decay_m + tl.sum(weight_mn, 1)
                if SCALED:
                    weight_mn *= v_scale_n[None, :]
                acc_mv = tl.dot(weight_mn.to(v_nv.dtype), v_nv, acc_mv * decay_m[:, None], input_precision=PRECISION)
            peak_m = new_m
        if SWAP:
            acc_mv = acc_vm.T
        result_mv = acc_mv / tl.where(sum_m == 0.0, 1.0, sum_m)[:, None]
        lse_m = final_lse(peak_m * (scale_log2 * 0.6931471805599453), sum_m)
        if tile_stop - tile == num_tiles:
            out_m = out_ptr + token_m * out_token_stride + head_m * out_head_stride
            lse_at_m = lse_ptr + token_m * lse_token_stride + head_m * lse_head_stride
            tl.store(out_m[:, None] + v_v[None, :], result_mv, mask=valid_m[:, None] & (v_v < V)[None, :])
            tl.store(lse_at_m, lse_m, mask=valid_m)
        else:
            # A worker has two unfinished blocks at most: the one its run starts in and the one that it ends in.
            place = (2 * worker + (at > run_start).to(tl.int32)) * HEAD_BLOCKS + head_block
            part_m = place.to(tl.int64) * M + tl.arange(0, M)
            tl.store(part_ptr + part_m[:, None] * V_PAD + v_v[None, :], result_mv)
            tl.store(part_lse_ptr + part_m, lse_m)
        at += tl.maximum(tile_stop - tile, 1)


@triton.jit(do_not_specialize=["num_blocks", "num_sequences"])
def plan_blocks(start_ptr, visible_ptr, plan_ptr, num_blocks, num_sequences, BLOCK_Q: tl.constexpr):  # type: ignore[no-untyped-def]
    """Length, sequence and first token of each query block.

    Sequence s has the blocks from ``start[s] // BLOCK_Q + s`` on: at least as many as it needs, the others are empty.
    """
    block = tl.program_id(0)
    sequence = -1
    for base in range(0, num_sequences, 256):
        s = base + tl.arange(0, 256)
        first_s = tl.load(start_ptr + s, mask=s < num_sequences, other=0).to(tl.int32) // BLOCK_Q + s
        sequence += tl.sum(((s < num_sequences) & (first_s <= block)).to(tl.int32), 0)
    start = tl.load(start_ptr + sequence).to(tl.int32)
    stop = tl.load(start_ptr + sequence + 1).to(tl.int32)
    token = start + (block - start // BLOCK_Q - sequence) * BLOCK_Q
    last = tl.minimum(token + BLOCK_Q, stop) - 1
    length = tl.load(visible_ptr + last, mask=token < stop, other=0).to(tl.int32)
    tl.store(plan_ptr + block, length)
    tl.store(plan_ptr + num_blocks + block, sequence)
    tl.store(plan_ptr + 2 * num_blocks + block, token)


@triton.jit(do_not_specialize=["num_blocks", "num_workers"])
def merge_runs(  # type: ignore[no-untyped-def]
    part_ptr, part_lse_ptr, start_ptr, length_ptr, plan_ptr, out_ptr, lse_ptr, num_blocks, num_workers,
    out_token_stride, out_head_stride, lse_token_stride, lse_head_stride, G: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, V_PAD: tl.constexpr, BLOCK_Q: tl.constexpr, HEAD_BLOCKS: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, MIN_TILES: tl.constexpr, PAD: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One query row's partial results over all workers that had a part of it; nothing to do where one had it all."""
    block = tl.program_id(0) // (BLOCK_Q * K * G)
    head = tl.program_id(0) % (K * G)
    kv_head = head // G
    row = tl.program_id(0) // (K * G) % BLOCK_Q * G + head % G
    column_c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    pad_b = tl.arange(0, PAD)
    length_b = tl.load(length_ptr + pad_b, mask=pad_b < num_blocks, other=0).to(tl.int32)
    tiles_b = (length_b + N - 1) // N
    num_tiles = tl.sum(tl.where(pad_b == block, tiles_b, 0), 0)
    start = tl.sum(tl.where(pad_b < block, tiles_b, 0), 0) * K + kv_head * num_tiles
    total = tl.maximum(tl.sum(tiles_b, 0) * K, 1)
    taking = _taking(total, num_workers, MIN_TILES)
    # The worker whose run holds tile x is the last one that starts at x or before.
    first = (((start + 1).to(tl.int64) * taking - 1) // total).to(tl.int32)
    last = (((start + num_tiles).to(tl.int64) * taking - 1) // total).to(tl.int32)
    if (num_tiles > 0) & (first == last):
        return
    if BLOCK_Q == 1:
        token = block.to(tl.int64)
        limit = V
    else:
        token = tl.load(plan_ptr + 2 * num_blocks + block).to(tl.int64) + row // G
        stop = tl.load(start_ptr + tl.load(plan_ptr + num_blocks + block) + 1)
        limit = tl.where(token < stop, V, 0)
    if DEPENDENT:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    peak = tl.full((), float("-inf"), tl.float32)
    weights = tl.zeros((), tl.float32)
    acc_c = tl.zeros((COLUMNS,), tl.float32)
    if num_tiles > 0:
        for base in range(first, last + 1, PARTS):
            worker_p = base + tl.arange(0, PARTS)
            late_p = (worker_p == first) & (start > _share(first, total, taking))
            place_p = (2 * worker_p + late_p.to(tl.int32)) * HEAD_BLOCKS + row // M
            place_p = place_p.to(tl.int64) * M + row % M
            lse_p = tl.load(part_lse_ptr + place_p, mask=worker_p <= last, other=float("-inf"))
            value_pc = tl.load(
                part_ptr + place_p[:, None] * V_PAD + column_c[None, :],
                mask=(worker_p <= last)[:, None] & (column_c < V)[None, :],
                other=0.0,
            )
            peak, weights, acc_c = fold(peak, weights, acc_c, lse_p, value_pc)
    out_c = out_ptr + token * out_token_stride + head * out_head_stride + column_c
    tl.store(out_c, acc_c / tl.where(weights == 0.0, 1.0, weights), mask=column_c < limit)
    if tl.program_id(1) == 0:
        lse_at = lse_ptr + token * lse_token_stride + head * lse_head_stride
        tl.store(lse_at, final_lse(peak, weights), mask=limit > 0)
