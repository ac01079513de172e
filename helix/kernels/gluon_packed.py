"""Attention over MLA latents in FP8 for Hopper, in Triton's Gluon dialect: `gluon_latent` for packed rows.

The copy engine fetches a tile's e4m3 latents as they are, and so does shared memory hold them. Each role reads the
bytes into registers in the order in which the matrix instructions want their first operand, and turns them into float16
there, one instruction for two values: exact, not a number included. So memory and shared memory move half of the bytes
that 16 bits would take. The latents' scales multiply scores and weights, not latents.

Two latents side by side travel as one 16-bit word. For the scores, which add up along a row, the words' order is made
good by the queries' own; for the sums, which run along columns, a word is taken apart into an even and an odd column.

float16 is narrow, so what it holds is made to fit: a row of queries is divided by a power of two, and the weights of a
tile, times the scales, count from the largest of these products so far, apart from the largest weight.

Warps have the roles that they have in `gluon_latent`.

Letters: T tokens, S sequences, H query heads, M rows (query token x head), N slots of a tile, and of a latent's columns
512 that are keys and values, in 256 words, and 64 rotary ones, in 16 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from helix.kernels.fp8_cache import Fp8Rows
from helix.kernels.gluon_tiles import (
    clear_rows,
    control,
    descriptor,
    fetch,
    find_block,
    is_hopper,
    load_counts,
    row_of,
    run_of,
    step_on,
    wait_for_inputs,
)

LATENT = 512
ROTARY = 64
SLOTS = 64
# With more rows than so few the registers of the warps that make weights do not suffice.
MOST_ROWS = 16
_ALIGNED_BYTES = 16


@gluon.jit
def _halves(words):  # type: ignore[no-untyped-def]
    """Words of four columns side by side: the first two columns of each, and the others, in float16."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
        "=r,=r,r", [words], dtype=(gl.float16, gl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _columns(words):  # type: ignore[no-untyped-def]
    """Words of two columns, tokens side by side: the even column, and the odd one, in float16."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 a, b; .reg .b32 t; prmt.b32 t, $2, 0, 0x3120; mov.b32 {a, b}, t;"
        " cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
        "=r,=r,r", [words], dtype=(gl.float16, gl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _load_queries(  # type: ignore[no-untyped-def]
    q_ptr, first, num_rows, q_first, q_second, q_rotary, M: gl.constexpr, row_layout: gl.constexpr
):
    """M rows of queries into shared memory, in the order of the words' halves; returns what they were divided by."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    row_m = gl.arange(0, M, layout=gl.SliceLayout(1, layout))
    word_j = gl.arange(0, 256, layout=gl.SliceLayout(0, layout))
    at_mj = q_ptr + (first + row_m).to(gl.int64)[:, None] * 576 + (word_j // 2 * 4 + word_j % 2)[None, :]
    there_mj = (row_m < num_rows)[:, None] & (word_j >= 0)[None, :]
    first_mj = gl.load(at_mj, mask=there_mj, other=0.0).to(gl.float32)
    second_mj = gl.load(at_mj + 2, mask=there_mj, other=0.0).to(gl.float32)
    largest_m = gl.max(gl.maximum(gl.abs(first_mj), gl.abs(second_mj)), 1)
    exponent_m = gl.minimum(gl.maximum(largest_m.to(gl.int32, bitcast=True) >> 23, 1), 253)
    factor_m = ((254 - exponent_m) << 23).to(gl.float32, bitcast=True)[:, None]
    q_first.store((first_mj * factor_m).to(gl.float16))
    q_second.store((second_mj * factor_m).to(gl.float16))
    narrow: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row_m = gl.arange(0, M, layout=gl.SliceLayout(1, narrow))
    column_r = gl.arange(0, 64, layout=gl.SliceLayout(0, narrow))
    at_mr = q_ptr + (first + row_m).to(gl.int64)[:, None] * 576 + 512 + column_r[None, :]
    q_rotary.store(gl.load(at_mr, mask=(row_m < num_rows)[:, None] & (column_r >= 0)[None, :], other=0.0))
    fence_async_shared()
    return gl.convert_layout((exponent_m << 23).to(gl.float32, bitcast=True), row_layout)


@gluon.jit
def _score(  # type: ignore[no-untyped-def]
    q_first, q_second, q_rotary, latent, rotary, M: gl.constexpr, N: gl.constexpr, s_layout: gl.constexpr
):
    """Products of a tile with the queries: of the latents, and of the rotary columns."""
    operand: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    zero = gl.full([N, M], 0.0, gl.float32, layout=s_layout)
    turned = warpgroup_mma(rotary, q_rotary.permute((1, 0)), zero, use_acc=False, is_async=True)
    score = gl.full([N, M], 0.0, gl.float32, layout=s_layout)
    for part in gl.static_range(4):
        first, second = _halves(latent.slice(part * 64, 64, dim=1).load(operand))
        score = warpgroup_mma(first, q_first.slice(part * 64, 64, dim=1).permute((1, 0)), score, is_async=True)
        score = warpgroup_mma(second, q_second.slice(part * 64, 64, dim=1).permute((1, 0)), score, is_async=True)
    return warpgroup_mma_wait(0, deps=[score, turned])


@gluon.jit
def _make_weights(  # type: ignore[no-untyped-def]
    q_ptr, start_ptr, visible_ptr, length_ptr, plan_ptr, lse_ptr, part_lse_ptr, scale_log2, num_blocks, num_workers,
    lse_token_stride, lse_head_stride, q_first, q_second, q_rotary, latent, rotary, scales, weights, decays, totals,
    full, p_full, p_empty, total_full, total_empty, G: gl.constexpr, BLOCK_Q: gl.constexpr, HEAD_BLOCKS: gl.constexpr,
    M: gl.constexpr, N: gl.constexpr, BUFFERS: gl.constexpr, PLACES: gl.constexpr, MIN_TILES: gl.constexpr,
    PAD: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    row_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    slot_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    worker = gl.program_id(0) // HEAD_BLOCKS
    head_block = gl.program_id(0) % HEAD_BLOCKS
    length_b = load_counts(length_ptr, num_blocks, 0, PAD)
    at, stop = run_of(length_b, worker, num_workers, N, MIN_TILES)
    run_start = at
    row_m = head_block * M + gl.arange(0, M, layout=row_layout)
    offset_n = gl.arange(0, N, layout=slot_layout)
    count = 0
    turn = 0
    wait_for_inputs(DEPENDENT)
    while at < stop:
        block, num_tiles, length, tile, tile_stop = find_block(length_b, at, stop, N, PAD)
        if BLOCK_Q == 1:
            token = block
            num_rows = block * 0 + G
            seen_by_all = length
        else:
            token = gl.load(plan_ptr + 2 * num_blocks + block)
            last = gl.load(start_ptr + gl.load(plan_ptr + num_blocks + block) + 1).to(gl.int32)
            num_rows = gl.minimum(last - token, BLOCK_Q) * G
            visible_m = gl.load(visible_ptr + token + row_m // G, mask=row_m < num_rows, other=0).to(gl.int32)
            seen_by_all = gl.min(gl.where(row_m < num_rows, visible_m, length), 0)
        divisor_m = _load_queries(
            q_ptr, token * G + head_block * M, num_rows - head_block * M, q_first, q_second, q_rotary, M, row_layout
        )
        peak_m = gl.full([M], float("-inf"), gl.float32, layout=row_layout)
        lifted_peak_m = gl.full([M], float("-inf"), gl.float32, layout=row_layout)
        total_m = gl.full([M], 0.0, gl.float32, layout=row_layout)
        for t in range(tile, tile_stop):
            place = count % PLACES
            buffer = count % BUFFERS
            mbarrier.wait(full.index(buffer), count // BUFFERS & 1)
            if length - t * N < N:
                clear_rows(latent.index(buffer), length - t * N, N)
            score, turned = _score(
                q_first, q_second, q_rotary, latent.index(buffer), rotary.index(buffer), M, N, s_layout
            )
            scale_n = scales.index(buffer).load(slot_layout)
            score = score * gl.expand_dims(scale_n, 1) * gl.expand_dims(divisor_m, 0) + turned
            score = score * scale_log2
            lift_n = gl.log2(scale_n)
            if (t + 1) * N > seen_by_all:
                position_n = t * N + offset_n
                lift_n = gl.where(position_n < length, lift_n, 0.0)
                visible = length
                if BLOCK_Q > 1:
                    visible = gl.expand_dims(visible_m, 0)
                score = gl.where(gl.expand_dims(position_n, 1) < visible, score, float("-inf"))
            lifted = score + gl.expand_dims(lift_n, 1)
            new_m = gl.maximum(peak_m, gl.max(score, 0))
            base_m = gl.where(new_m == float("-inf"), 0.0, new_m)
            total_m = total_m * gl.exp2(peak_m - base_m) + gl.sum(gl.exp2(score - gl.expand_dims(base_m, 0)), 0)
            peak_m = new_m
            new_m = gl.maximum(lifted_peak_m, gl.max(lifted, 0))
            base_m = gl.where(new_m == float("-inf"), 0.0, new_m)
            weight = gl.exp2(lifted - gl.expand_dims(base_m, 0))
            decay_m = gl.exp2(lifted_peak_m - base_m)
            lifted_peak_m = new_m
            mbarrier.wait(p_empty.index(place), (count // PLACES & 1) ^ 1)
            weights.index(place).store(weight.to(gl.float16))
            decays.index(place).store(decay_m)
            fence_async_shared()
            mbarrier.arrive(p_full.index(place), count=1)
            count += 1
        mbarrier.wait(total_empty, (turn & 1) ^ 1)
        base_m = gl.where(peak_m == float("-inf"), 0.0, peak_m)
        lift_m = base_m - gl.where(lifted_peak_m == float("-inf"), base_m, lifted_peak_m)
        totals.store(total_m * gl.exp2(lift_m))
        mbarrier.arrive(total_full, count=1)
        lse_m = gl.where(total_m == 0.0, float("-inf"), peak_m * 0.6931471805599453 + gl.log(total_m))
        lse_m = gl.where(lse_m != lse_m, 0.0, lse_m)
        if tile_stop - tile == num_tiles:
            at_m = (token + row_m // G).to(gl.int64) * lse_token_stride + row_m % G * lse_head_stride
            gl.store(lse_ptr + at_m, lse_m, mask=row_m < num_rows)
        else:
            unfinished = (2 * worker + (at > run_start).to(gl.int32)) * HEAD_BLOCKS + head_block
            gl.store(part_lse_ptr + unfinished * M + row_m - head_block * M, lse_m)
        at += tile_stop - tile
        turn += 1


@gluon.jit
def _load_next(  # type: ignore[no-untyped-def]
    latent_desc, rotary_desc, scale_desc, table_ptr, start_ptr, length_ptr, plan_ptr, num_blocks, num_sequences,
    table_stride, latent, rotary, scales, full, count, at, stop, tile, tile_stop, row, page, BLOCK_Q: gl.constexpr,
    N: gl.constexpr, BUFFERS: gl.constexpr, PAGE_TOKENS: gl.constexpr, PAD: gl.constexpr,
):  # fmt: skip
    """Ask for the tile at the front of the run and step on."""
    there = at < stop
    buffer = count % BUFFERS
    slot = page * PAGE_TOKENS + tile * N % PAGE_TOKENS
    mbarrier.expect(full.index(buffer), N * (512 + 64 * 2 + 4), pred=there)
    fetch(scale_desc, [slot], full.index(buffer), scales.index(buffer), pred=there)
    fetch(rotary_desc, [slot, 0], full.index(buffer), rotary.index(buffer), pred=there)
    fetch(latent_desc, [slot, 0], full.index(buffer), latent.index(buffer), pred=there)
    return step_on(
        table_ptr, start_ptr, length_ptr, plan_ptr, num_blocks, num_sequences, table_stride, at, stop, tile, tile_stop,
        row, BLOCK_Q, N, PAGE_TOKENS, PAD,
    )  # fmt: skip


@gluon.jit
def _sum_values(  # type: ignore[no-untyped-def]
    latent_desc, rotary_desc, scale_desc, table_ptr, start_ptr, length_ptr, plan_ptr, out_ptr, part_ptr, num_blocks,
    num_sequences, num_workers, table_stride, out_token_stride, out_head_stride, latent, rotary, scales, weights,
    decays, totals, full, empty, p_full, p_empty, total_full, total_empty, HALF_AT: gl.constexpr, G: gl.constexpr,
    BLOCK_Q: gl.constexpr, HEAD_BLOCKS: gl.constexpr, M: gl.constexpr, N: gl.constexpr, BUFFERS: gl.constexpr,
    PLACES: gl.constexpr, PAGE_TOKENS: gl.constexpr, MIN_TILES: gl.constexpr, PAD: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    row_layout: gl.constexpr = gl.SliceLayout(0, o_layout)
    operand: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    worker = gl.program_id(0) // HEAD_BLOCKS
    head_block = gl.program_id(0) % HEAD_BLOCKS
    end_s = load_counts(start_ptr + 1, num_sequences, 2147483647, PAD)
    length_b = load_counts(length_ptr, num_blocks, 0, PAD)
    at, stop = run_of(length_b, worker, num_workers, N, MIN_TILES)
    run_start = at
    count = 0
    turn = 0
    if HALF_AT == 0:
        # This half also fetches: as soon as both are done with a tile, its buffer takes the next that is not asked for.
        front = at
        front_tile = at
        front_stop = at
        row = (at * 0).to(gl.int64)
        page = at * 0
        if at < stop:
            block, _, _, front_tile, front_stop = find_block(length_b, at, stop, N, PAD)
            row = row_of(end_s, plan_ptr, block, num_blocks, num_sequences, table_stride, BLOCK_Q)
            page = gl.load(table_ptr + row + front_tile * N // PAGE_TOKENS)
        wait_for_inputs(DEPENDENT)
        for early in range(BUFFERS):
            front, front_tile, front_stop, row, page = _load_next(
                latent_desc, rotary_desc, scale_desc, table_ptr, start_ptr, length_ptr, plan_ptr, num_blocks,
                num_sequences, table_stride, latent, rotary, scales, full, early, front, stop, front_tile, front_stop,
                row, page, BLOCK_Q, N, BUFFERS, PAGE_TOKENS, PAD,
            )  # fmt: skip
    while at < stop:
        length_b = load_counts(length_ptr, num_blocks, 0, PAD)
        block, num_tiles, _, tile, tile_stop = find_block(length_b, at, stop, N, PAD)
        even = gl.full([128, M], 0.0, gl.float32, layout=o_layout)
        odd = gl.full([128, M], 0.0, gl.float32, layout=o_layout)
        for _ in range(tile, tile_stop):
            buffer = count % BUFFERS
            place = count % PLACES
            mbarrier.wait(p_full.index(place), count // PLACES & 1)
            decay_m = gl.expand_dims(decays.index(place).load(row_layout), 0)
            even = even * decay_m
            odd = odd * decay_m
            value = latent.index(buffer).slice(HALF_AT, 128, dim=1)
            even_words, odd_words = _columns(value.permute((1, 0)).load(operand))
            even = warpgroup_mma(even_words, weights.index(place), even, is_async=True)
            odd = warpgroup_mma(odd_words, weights.index(place), odd, is_async=True)
            even, odd = warpgroup_mma_wait(0, deps=[even, odd])
            mbarrier.arrive(p_empty.index(place), count=1)
            if HALF_AT == 0:
                mbarrier.wait(empty.index(buffer), count // BUFFERS & 1)
                front, front_tile, front_stop, row, page = _load_next(
                    latent_desc, rotary_desc, scale_desc, table_ptr, start_ptr, length_ptr, plan_ptr, num_blocks,
                    num_sequences, table_stride, latent, rotary, scales, full, count + BUFFERS, front, stop,
                    front_tile, front_stop, row, page, BLOCK_Q, N, BUFFERS, PAGE_TOKENS, PAD,
                )  # fmt: skip
            else:
                mbarrier.arrive(empty.index(buffer), count=1)
            count += 1
        mbarrier.wait(total_full, turn & 1)
        total_m = totals.load(row_layout)
        mbarrier.arrive(total_empty, count=1)
        divisor_m = gl.expand_dims(gl.where(total_m == 0.0, 1.0, total_m), 0)
        row_m = head_block * M + gl.arange(0, M, layout=row_layout)
        column_v = 2 * (HALF_AT + gl.arange(0, 128, layout=gl.SliceLayout(1, o_layout)))
        column_v = gl.expand_dims(column_v, 1)
        if tile_stop - tile == num_tiles:
            if BLOCK_Q == 1:
                token = block
                valid_m = row_m < G
            else:
                token = gl.load(plan_ptr + 2 * num_blocks + block)
                last = gl.load(start_ptr + gl.load(plan_ptr + num_blocks + block) + 1).to(gl.int32)
                valid_m = (row_m < BLOCK_Q * G) & (token + row_m // G < last)
            at_m = (token + row_m // G).to(gl.int64) * out_token_stride + row_m % G * out_head_stride
            at_vm = out_ptr + gl.expand_dims(at_m, 0) + column_v
            used_vm = gl.expand_dims(valid_m, 0) & (column_v >= 0)
            gl.store(at_vm, (even / divisor_m).to(out_ptr.dtype.element_ty), mask=used_vm)
            gl.store(at_vm + 1, (odd / divisor_m).to(out_ptr.dtype.element_ty), mask=used_vm)
        else:
            unfinished = (2 * worker + (at > run_start).to(gl.int32)) * HEAD_BLOCKS + head_block
            part_m = gl.expand_dims(unfinished * M + row_m - head_block * M, 0)
            used_vm = gl.expand_dims(row_m < BLOCK_Q * G, 0) & (column_v >= 0)
            gl.store(part_ptr + part_m * 512 + column_v, even / divisor_m, mask=used_vm)
            gl.store(part_ptr + part_m * 512 + column_v + 1, odd / divisor_m, mask=used_vm)
        at += tile_stop - tile
        turn += 1


@gluon.jit(do_not_specialize=["num_blocks", "num_sequences", "num_workers", "table_stride"])
def _attend_packed(  # type: ignore[no-untyped-def]
    q_ptr, latent_desc, rotary_desc, scale_desc, table_ptr, start_ptr, visible_ptr, length_ptr, plan_ptr, out_ptr,
    lse_ptr, part_ptr, part_lse_ptr, scale_log2, num_blocks, num_sequences, num_workers, table_stride,
    out_token_stride, out_head_stride, lse_token_stride, lse_head_stride, G: gl.constexpr, BLOCK_Q: gl.constexpr,
    HEAD_BLOCKS: gl.constexpr, M: gl.constexpr, N: gl.constexpr, BUFFERS: gl.constexpr, PLACES: gl.constexpr,
    PAGE_TOKENS: gl.constexpr, DEPENDENT: gl.constexpr,
    MIN_TILES: gl.constexpr, PAD: gl.constexpr,
):  # fmt: skip
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([M, 256], gl.float16)
    q_first = gl.allocate_shared_memory(gl.float16, [M, 256], q_layout)
    q_second = gl.allocate_shared_memory(gl.float16, [M, 256], q_layout)
    kind: gl.constexpr = rotary_desc.dtype
    turned_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([M, 64], kind)
    q_rotary = gl.allocate_shared_memory(kind, [M, 64], turned_layout)
    latent = gl.allocate_shared_memory(gl.int16, [BUFFERS, N, 256], latent_desc.layout)
    rotary = gl.allocate_shared_memory(kind, [BUFFERS, N, 64], rotary_desc.layout)
    scales = gl.allocate_shared_memory(gl.float32, [BUFFERS, N], scale_desc.layout)
    weight_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, M], gl.float16)
    weights = gl.allocate_shared_memory(gl.float16, [PLACES, N, M], weight_layout)
    row_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    decays = gl.allocate_shared_memory(gl.float32, [PLACES, M], row_layout)
    totals = gl.allocate_shared_memory(gl.float32, [M], row_layout)
    full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    p_empty = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    total_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    total_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(BUFFERS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(PLACES):
        mbarrier.init(p_full.index(i), count=1)
        mbarrier.init(p_empty.index(i), count=2)
    mbarrier.init(total_full, count=1)
    mbarrier.init(total_empty, count=2)
    fence_async_shared()
    if DEPENDENT:
        control("griddepcontrol.launch_dependents; // dummy $0")
    if BLOCK_Q > 1:
        wait_for_inputs(DEPENDENT)
    # fmt: off
    gl.warp_specialize(
        [
            (_make_weights, (
                    q_ptr, start_ptr, visible_ptr, length_ptr, plan_ptr, lse_ptr, part_lse_ptr, scale_log2, num_blocks,
                    num_workers, lse_token_stride, lse_head_stride, q_first, q_second, q_rotary, latent,
                    rotary, scales, weights, decays, totals, full, p_full, p_empty, total_full, total_empty, G, BLOCK_Q,
                    HEAD_BLOCKS, M, N, BUFFERS, PLACES, MIN_TILES, PAD, DEPENDENT,
            )),
            (_sum_values, (
                    latent_desc, rotary_desc, scale_desc, table_ptr, start_ptr, length_ptr, plan_ptr, out_ptr,
                    part_ptr, num_blocks, num_sequences, num_workers, table_stride, out_token_stride, out_head_stride,
                    latent, rotary, scales, weights, decays, totals, full, empty, p_full, p_empty, total_full,
                    total_empty, gl.constexpr(0), G, BLOCK_Q, HEAD_BLOCKS, M, N, BUFFERS, PLACES, PAGE_TOKENS,
                    MIN_TILES, PAD, DEPENDENT,
            )),
            (_sum_values, (
                    latent_desc, rotary_desc, scale_desc, table_ptr, start_ptr, length_ptr, plan_ptr, out_ptr,
                    part_ptr, num_blocks, num_sequences, num_workers, table_stride, out_token_stride, out_head_stride,
                    latent, rotary, scales, weights, decays, totals, full, empty, p_full, p_empty, total_full,
                    total_empty, gl.constexpr(128), G, BLOCK_Q, HEAD_BLOCKS, M, N, BUFFERS, PLACES,
                    PAGE_TOKENS, MIN_TILES, PAD, DEPENDENT,
            )),
        ],
        [4, 4],
        [168, 168],
    )
    # fmt: on


def fits(q_THD: Tensor, pool: Fp8Rows, rows: int) -> bool:
    """Whether this kernel can do blocks of `rows` rows: a Hopper GPU, bfloat16 beside latents of DeepSeek's widths, and
    pages of whole tiles."""
    values, tail = pool.values_PBKD, pool.tail_PBKR
    return (
        rows <= MOST_ROWS
        and tail is not None
        and is_hopper(q_THD.device)
        and q_THD.dtype == tail.dtype == torch.bfloat16
        and (values.shape[2:], tail.shape[3]) == ((1, LATENT), ROTARY)
        and values.shape[1] % SLOTS == 0
        and all(one.is_contiguous() and one.data_ptr() % _ALIGNED_BYTES == 0 for one in pool.tensors)
    )


def attend_tiles(
    q_THD: Tensor,
    pool: Fp8Rows,
    tensors: tuple[Tensor, ...],
    numbers: tuple[float | int, ...],
    constants: dict[str, int],
    options: dict[str, bool],
    num_programs: int,
) -> None:
    """Launch the kernel: `tensors` and `numbers` are its arguments behind the descriptors, in order."""
    if pool.tail_PBKR is None:
        raise ValueError("a pool of latents without rotary values: its tail must hold them")
    slots = constants["N"]
    _attend_packed[(num_programs,)](
        q_THD.contiguous(),
        descriptor(pool.values_PBKD.view(torch.int16).flatten(0, 2), slots, LATENT // 2),
        descriptor(pool.tail_PBKR.flatten(0, 2), slots, ROTARY),
        descriptor(pool.scale_PBK.flatten(), slots),
        *tensors,
        *numbers,
        **{name: value for name, value in constants.items() if name != "K"},
        **options,
        BUFFERS=4,
        PLACES=2,
        num_warps=4,
    )
