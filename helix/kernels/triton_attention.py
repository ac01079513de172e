"""Paged attention on a GPU in Triton: the contract of `helix.kernels.attention.attend`, no host synchronisation.

Work is counted in tiles of `tokens` slots. All tiles of the step, over query blocks and KV heads, lie in one row, and
each worker (a fixed number a multiprocessor) takes an equal, contiguous run of it: one sequence of a million tokens and
a batch of mixed lengths fill the device alike, from lengths that only the device knows. Where a run covers a query
block's row of tiles from end to end the result is final; otherwise the worker leaves a partial result, and a second
kernel merges those that belong together. Steps with very many query blocks (prefill) give one block to each program.

Letters: T tokens, S sequences, H query heads, K KV heads, G = H / K, D and V widths of keys and values, P pages,
B page_tokens, R rows of the page table, M rows (query token x head of the group) and N slots of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as tl_cuda

from helix.kernels import gluon_latent
from helix.kernels.triton_merge import final_lse, fold

# Below this many query blocks every program can afford to look at the lengths of all of them.
_MAX_SPLIT_BLOCKS = 1024
# Query blocks x KV heads per worker from which splitting has nothing left to balance.
_WHOLE_BLOCKS_FROM = 16
_LOG2_E = 1.4426950408889634
_MERGE_CONSTANTS = ("G", "K", "BLOCK_Q", "HEAD_BLOCKS", "M", "N", "MIN_TILES", "PAD")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How one call is cut: M rows by N slots a tile, and how the programs that read them are built and counted.

    `stages` tiles are in flight or in use at once. `min_tiles` is the least run of tiles worth a worker: a shorter one
    costs more to merge than it saves. `swap`: keys take the side of a matrix product that has 64 places at least, so
    that few rows waste none of it. `roles`: the kernel of `gluon_latent`, whose warps divide the work by kind.
    """

    rows: int
    slots: int
    warps: int
    stages: int
    workers_per_sm: int
    min_tiles: int = 2
    swap: bool = False
    roles: bool = False


def choose_tiling(rows: int, width: int, v_width: int, itemsize: int, *, shared: bool, roles: bool) -> Tiling:
    """The tiling that was best on an H200 for `rows` query rows over cache rows of `width` (and `v_width`) values.

    `shared`: values are the first columns of the keys, as for MLA latents. `roles`: `gluon_latent` can be used.
    """
    rows = min(triton.next_power_of_2(rows), 128)
    row_bytes = (_pad(width) if shared else _pad(width) + _pad(v_width)) * itemsize
    if roles:
        rows = 8 if rows <= 8 else 16 if rows <= 16 else 64
        return Tiling(rows=rows, slots=64, warps=4, stages=3 if rows == 8 else 2, workers_per_sm=1, roles=True)
    rows = max(rows, 16)
    if itemsize > 2:
        return Tiling(rows=min(rows, 32), slots=32 if row_bytes <= 2048 else 16, warps=4, stages=2, workers_per_sm=1)
    if row_bytes > 1024:
        return Tiling(rows=min(rows, 64), slots=64, warps=8, stages=3 if rows <= 16 else 2, workers_per_sm=1)
    if rows <= 32:
        workers = 2 if row_bytes <= 512 else 1
        return Tiling(rows=rows, slots=64, warps=4, stages=3, workers_per_sm=workers, swap=True)
    rows = rows if row_bytes <= 512 else 64
    return Tiling(rows=rows, slots=64, warps=8 if rows > 64 else 4, stages=3, workers_per_sm=1)


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
def _attend(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    start_ptr,
    visible_ptr,
    length_ptr,
    plan_ptr,
    out_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    scale_log2,
    num_blocks,
    num_sequences,
    num_workers,
    table_stride,
    q_token_stride,
    q_head_stride,
    k_slot_stride,
    k_head_stride,
    v_slot_stride,
    v_head_stride,
    out_token_stride,
    out_head_stride,
    lse_token_stride,
    lse_head_stride,
    G: tl.constexpr,
    K: tl.constexpr,
    D1: tl.constexpr,
    D1_PAD: tl.constexpr,
    D2: tl.constexpr,
    D2_PAD: tl.constexpr,
    V: tl.constexpr,
    V_PAD: tl.constexpr,
    SHARED: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    MIN_TILES: tl.constexpr,
    PAD: tl.constexpr,
    SPLIT: tl.constexpr,
    SWAP: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    worker = tl.program_id(0) // HEAD_BLOCKS
    head_block = tl.program_id(0) % HEAD_BLOCKS
    pad_b = tl.arange(0, PAD)
    if DEPENDENT:
        tl_cuda.gdc_launch_dependents()
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
            if SWAP:
                score_nm = tl.dot(k1_nd, q1_md.T, input_precision=PRECISION)
            else:
                score_mn = tl.dot(q1_md, k1_nd.T, input_precision=PRECISION)
            if D2 > 0:
                k2_nd = _load_rows(k_pool + D1, slot_n, k_slot_stride, live_n, d2_d, D2)
                if SWAP:
                    score_nm = tl.dot(k2_nd, q2_md.T, score_nm, input_precision=PRECISION)
                else:
                    score_mn = tl.dot(q2_md, k2_nd.T, score_mn, input_precision=PRECISION)
            v_nv = k1_nd if SHARED else _load_rows(v_pool, slot_n, v_slot_stride, live_n, v_v, V)
            if SWAP:
                seen_nm = position_n[:, None] < visible_m[None, :] if BLOCK_Q > 1 else live_n[:, None]
                score_nm = tl.where(seen_nm, score_nm, float("-inf"))
                new_m = tl.maximum(peak_m, tl.max(score_nm, 0))
                base_m = tl.where(new_m == float("-inf"), 0.0, new_m) * scale_log2
                weight_nm = tl.exp2(score_nm * scale_log2 - base_m[None, :])
                decay_m = tl.exp2(peak_m * scale_log2 - base_m)
                sum_m = sum_m * decay_m + tl.sum(weight_nm, 0)
                acc_vm = tl.dot(v_nv.T, weight_nm.to(v_nv.dtype), acc_vm * decay_m[None, :], input_precision=PRECISION)
            else:
                seen_mn = position_n[None, :] < visible_m[:, None] if BLOCK_Q > 1 else live_n[None, :]
                score_mn = tl.where(seen_mn, score_mn, float("-inf"))
                new_m = tl.maximum(peak_m, tl.max(score_mn, 1))
                base_m = tl.where(new_m == float("-inf"), 0.0, new_m) * scale_log2
                weight_mn = tl.exp2(score_mn * scale_log2 - base_m[:, None])
                decay_m = tl.exp2(peak_m * scale_log2 - base_m)
                sum_m = sum_m * decay_m + tl.sum(weight_mn, 1)
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
def _plan(start_ptr, visible_ptr, plan_ptr, num_blocks, num_sequences, BLOCK_Q: tl.constexpr):  # type: ignore[no-untyped-def]
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
def _merge_runs(  # type: ignore[no-untyped-def]
    part_ptr,
    part_lse_ptr,
    start_ptr,
    length_ptr,
    plan_ptr,
    out_ptr,
    lse_ptr,
    num_blocks,
    num_workers,
    out_token_stride,
    out_head_stride,
    lse_token_stride,
    lse_head_stride,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    V_PAD: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    MIN_TILES: tl.constexpr,
    PAD: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
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


def attend(
    q_THD: Tensor,
    k_PBKD: Tensor,
    v_PBKV: Tensor,
    page_table_SR: Tensor,
    query_start_S1: Tensor,
    visible_len_T: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """`helix.kernels.attention.attend` on the device; can be captured, never waits for the device.

    Every token must belong to a sequence (``query_start[-1] == T``), and rows of pages must be contiguous.
    """
    num_tokens, num_heads, _ = q_THD.shape
    out_THV = q_THD.new_empty(num_tokens, num_heads, v_PBKV.shape[3])
    lse_TH = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=q_THD.device)
    attend_into(out_THV, lse_TH, q_THD, k_PBKD, v_PBKV, page_table_SR, query_start_S1, visible_len_T, scale)
    return out_THV, lse_TH


def attend_into(
    out_THV: Tensor,
    lse_TH: Tensor,
    q_THD: Tensor,
    k_PBKD: Tensor,
    v_PBKV: Tensor,
    page_table_SR: Tensor,
    query_start_S1: Tensor,
    visible_len_T: Tensor,
    scale: float,
    *,
    tiling: Tiling | None = None,
    num_workers: int | None = None,
) -> None:
    """`attend` that writes where it is told, so that an exchange can read the result where it lies.

    `out_THV` and `lse_TH` may be views with any strides, but for contiguous rows of `out_THV`. `tiling` and
    `num_workers` replace what would be chosen from the shapes and the device.
    """
    if q_THD.shape[0] == 0:
        return
    q_THD = q_THD if q_THD.stride(2) == 1 else q_THD.contiguous()
    call = _Call.of(q_THD, k_PBKD, v_PBKV, query_start_S1, tiling, num_workers)
    part, part_lse = call.partials(lse_TH)
    plan = length = visible_len_T
    if call.block_q > 1:
        plan = length = torch.empty(3, call.num_blocks, dtype=torch.int32, device=q_THD.device)
        _plan[(call.num_blocks,)](
            query_start_S1, visible_len_T, plan, call.num_blocks, call.num_sequences, BLOCK_Q=call.block_q, num_warps=1
        )
    tensors = (
        page_table_SR,
        query_start_S1,
        visible_len_T,
        length,
        plan,
        out_THV,
        lse_TH,
        part,
        part_lse,
    )
    numbers = (scale * _LOG2_E, call.num_blocks, call.num_sequences, call.num_workers, page_table_SR.stride(0))
    out_strides = (*out_THV.stride()[:2], *lse_TH.stride())
    if call.tiling.roles:
        gluon_latent.attend_tiles(
            q_THD, k_PBKD, tensors, (*numbers, *out_strides), call.constants(), call.options(), call.num_programs
        )
    else:
        _attend[(call.num_programs,)](
            q_THD,
            k_PBKD,
            v_PBKV,
            *tensors,
            *numbers,
            *q_THD.stride()[:2],
            *k_PBKD.stride()[1:3],
            *v_PBKV.stride()[1:3],
            *out_strides,
            **call.constants(),
            **call.options(),
            **call.widths(),
            PRECISION="ieee" if q_THD.dtype == torch.float32 else None,
            num_warps=call.tiling.warps,
            num_stages=call.tiling.stages,
        )
    if call.split:
        _launch_merge(call, tensors, out_strides)


def _launch_merge(call: _Call, tensors: tuple[Tensor, ...], out_strides: tuple[int, ...]) -> None:
    """Put the unfinished blocks together; one that a worker did alone costs a look at the lengths."""
    _, start, _, length, plan, out_THV, lse_TH, part, part_lse = tensors
    # As many partial results at a time as are to be expected, since each round waits for memory once.
    expected = 2 * call.num_workers // (call.num_blocks * call.num_kv_heads)
    parts = min(max(triton.next_power_of_2(expected), 8), 256)
    columns = min(call.v_pad, max(8192 // parts, 32), 256)
    constants = {name: call.constants()[name] for name in _MERGE_CONSTANTS}
    _merge_runs[(call.num_blocks * call.block_q * call.num_heads, triton.cdiv(call.v_width, columns))](
        part,
        part_lse,
        start,
        length,
        plan,
        out_THV,
        lse_TH,
        call.num_blocks,
        call.num_workers,
        *out_strides,
        **constants,
        **call.options(),
        V=call.v_width,
        V_PAD=call.v_pad,
        COLUMNS=columns,
        PARTS=parts,
        num_warps=8 if parts * columns >= 8192 else 4,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """What of one call is known on the host."""

    tiling: Tiling
    device: torch.device
    page_tokens: int
    num_blocks: int
    num_sequences: int
    num_workers: int
    num_heads: int
    num_kv_heads: int
    block_q: int
    width: int
    v_width: int
    shared: bool

    @classmethod
    def of(
        cls,
        q_THD: Tensor,
        k_PBKD: Tensor,
        v_PBKV: Tensor,
        query_start_S1: Tensor,
        tiling: Tiling | None,
        num_workers: int | None,
    ) -> _Call:
        num_tokens, num_heads, width = q_THD.shape
        _, page_tokens, kv_heads, v_width = v_PBKV.shape
        sequences, group = query_start_S1.shape[0] - 1, num_heads // kv_heads
        for pool in (k_PBKD, v_PBKV):
            if pool.stride(3) != 1 or pool.stride(0) != page_tokens * pool.stride(1):
                raise ValueError(f"pages with strides {pool.stride()}: rows must be contiguous, and pages without gaps")
        shared = v_width <= width and k_PBKD.data_ptr() == v_PBKV.data_ptr() and k_PBKD.stride() == v_PBKV.stride()
        # Tokens of a sequence that are read together: as many as it has on average, so one each in a decode step.
        tokens = triton.next_power_of_2(triton.cdiv(num_tokens, sequences))
        if tiling is None:
            few = min(tokens, 128) * group
            roles = shared and num_tokens + sequences <= gluon_latent.MAX_BLOCKS and gluon_latent.fits(q_THD, k_PBKD)
            tiling = choose_tiling(few, width, v_width, k_PBKD.element_size(), shared=shared, roles=roles)
        block_q = max(min(tokens, tiling.rows // group), 1)
        if num_workers is None:
            processors = torch.cuda.get_device_properties(q_THD.device).multi_processor_count
            num_workers = max(processors * tiling.workers_per_sm // triton.cdiv(group, tiling.rows), 1)
        return cls(
            tiling=tiling,
            device=q_THD.device,
            page_tokens=page_tokens,
            num_blocks=num_tokens if block_q == 1 else num_tokens // block_q + sequences,
            num_sequences=sequences,
            num_workers=num_workers,
            num_heads=num_heads,
            num_kv_heads=kv_heads,
            block_q=block_q,
            width=width,
            v_width=v_width,
            shared=shared,
        )

    @property
    def head_blocks(self) -> int:
        """Blocks of rows that the heads of one group take; they read the same keys side by side."""
        return triton.cdiv(self.num_heads // self.num_kv_heads, self.tiling.rows)

    @property
    def split(self) -> bool:
        """Whether workers take runs of tiles; otherwise each program takes a block."""
        if self.tiling.roles:
            return True
        few = self.num_blocks * self.num_kv_heads < _WHOLE_BLOCKS_FROM * self.num_workers
        return few and max(self.num_blocks, self.num_sequences) <= _MAX_SPLIT_BLOCKS

    @property
    def num_programs(self) -> int:
        return (self.num_workers if self.split else self.num_blocks * self.num_kv_heads) * self.head_blocks

    @property
    def v_pad(self) -> int:
        return _pad(self.v_width)

    def partials(self, lse_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Room for the unfinished blocks of every worker, or a stand-in where there are none."""
        if not self.split:
            return lse_TH, lse_TH
        rows = 2 * self.num_workers * self.head_blocks * self.tiling.rows
        part = torch.empty(rows, self.v_pad, dtype=torch.float32, device=self.device)
        return part, torch.empty(rows, dtype=torch.float32, device=self.device)

    def constants(self) -> dict[str, int]:
        """What all kernels are compiled for."""
        return {
            "G": self.num_heads // self.num_kv_heads,
            "K": self.num_kv_heads,
            "BLOCK_Q": self.block_q,
            "HEAD_BLOCKS": self.head_blocks,
            "M": self.tiling.rows,
            "N": self.tiling.slots,
            "PAGE_TOKENS": self.page_tokens,
            "MIN_TILES": self.tiling.min_tiles,
            "PAD": _padded_count(max(self.num_blocks if self.split else 1, self.num_sequences)),
        }

    def widths(self) -> dict[str, int | bool]:
        """What only `_attend` is compiled for. Keys are one part, or the one that is the values too and another."""
        first = self.v_width if self.shared else self.width
        second = self.width - first
        return {
            "D1": first,
            "D1_PAD": _pad(first),
            "D2": second,
            "D2_PAD": _pad(second),
            "V": self.v_width,
            "V_PAD": self.v_pad,
            "SHARED": self.shared,
            "SPLIT": self.split,
            "SWAP": self.tiling.swap,
        }

    def options(self) -> dict[str, bool]:
        """On Hopper and later a kernel may be made ready while the one before it still runs (dependent launch)."""
        if self.device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(self.device) < (9, 0):
            return {"DEPENDENT": False}
        return {"DEPENDENT": True, "launch_pdl": True}


def _pad(width: int) -> int:
    """The block width for `width` values: a power of two, and at least what a matrix instruction takes."""
    padded: int = triton.next_power_of_2(width)
    return max(padded, 16) if width else 0


def _padded_count(count: int) -> int:
    """Few sizes, since each is compiled anew; one block needs no search."""
    if count == 1:
        return 1
    padded: int = triton.next_power_of_2(count)
    return 64 if count <= 64 else max(padded, _MAX_SPLIT_BLOCKS)
