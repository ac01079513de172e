"""Attention over MLA latents for Hopper, in Triton's Gluon dialect: the same work as `triton_attention`, by roles.

A program holds up to 64 query rows and walks its run of tiles with three groups of four warps. One makes the scores and
weights of a tile; the other two each add up half of its latent columns, and one of them has the copy engine fetch the
tiles. So the products of one tile, the softmax and sums of another and the loads of those behind are under way at once.
With many heads the arithmetic binds, and that is what this kernel is for; with few it is the fetching that gains.

Letters: T tokens, S sequences, H query heads, M rows (query token x head), N slots of a tile, and of a latent's columns
512 that are keys and values, and 64 rotary ones.
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

from helix.kernels.gluon_tiles import (
    clear_rows,
    control,
    descriptor,
    fetch,
    find_block,
    is_hopper,
    load_counts,
    load_next,
    row_of,
    run_of,
    wait_for_inputs,
)

LATENT = 512
ROTARY = 64
ROWS = 64
# Every program looks at the lengths of all blocks.
MAX_BLOCKS = 4096
# So few rows that shared memory has room for a third tile.
_FEW_ROWS = 8


@gluon.jit
def _score(  # type: ignore[no-untyped-def]
    q, q_rotary, latent, rotary, full, count, num_live, SWAP: gl.constexpr, M: gl.constexpr, N: gl.constexpr,
    BUFFERS: gl.constexpr, s_layout: gl.constexpr,
):  # fmt: skip
    """Begin the products of the queries with the `count`-th tile, of which `num_live` slots are written."""
    buffer = count % BUFFERS
    mbarrier.wait(full.index(buffer), count // BUFFERS & 1)
    if num_live < N:
        clear_rows(latent.index(buffer), num_live, N)
    if SWAP:
        zero = gl.full([N, M], 0.0, gl.float32, layout=s_layout)
        score = warpgroup_mma(rotary.index(buffer), q_rotary.permute((1, 0)), zero, use_acc=False, is_async=True)
        return warpgroup_mma(latent.index(buffer), q.permute((1, 0)), score, is_async=True)
    else:  # noqa: RET505 the compiler drops the branch that is not taken only where both are there
        zero = gl.full([M, N], 0.0, gl.float32, layout=s_layout)
        score = warpgroup_mma(q_rotary, rotary.index(buffer).permute((1, 0)), zero, use_acc=False, is_async=True)
        return warpgroup_mma(q, latent.index(buffer).permute((1, 0)), score, is_async=True)


@gluon.jit
def _make_weights(  # type: ignore[no-untyped-def]
    q_desc, q_rotary_desc, start_ptr, visible_ptr, length_ptr, plan_ptr, lse_ptr, part_lse_ptr, scale_log2,
    num_blocks, num_workers, lse_token_stride, lse_head_stride, q, q_rotary, latent, rotary, weights, decays, totals,
    q_full, full, p_full, p_empty, total_full, total_empty, G: gl.constexpr, BLOCK_Q: gl.constexpr,
    HEAD_BLOCKS: gl.constexpr, SWAP: gl.constexpr, M: gl.constexpr, N: gl.constexpr, BUFFERS: gl.constexpr,
    PLACES: gl.constexpr, AHEAD: gl.constexpr, MIN_TILES: gl.constexpr, PAD: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    # With few rows the product is turned round: tokens take the 64 places that a matrix instruction has at least.
    TOKENS: gl.constexpr = 0 if SWAP else 1
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M if SWAP else N, 16])
    row_layout: gl.constexpr = gl.SliceLayout(TOKENS, s_layout)
    worker = gl.program_id(0) // HEAD_BLOCKS
    head_block = gl.program_id(0) % HEAD_BLOCKS
    length_b = load_counts(length_ptr, num_blocks, 0, PAD)
    at, stop = run_of(length_b, worker, num_workers, N, MIN_TILES)
    run_start = at
    row_m = head_block * M + gl.arange(0, M, layout=row_layout)
    offset_n = gl.arange(0, N, layout=gl.SliceLayout(1 - TOKENS, s_layout))
    count = 0
    turn = 0
    wait_for_inputs(DEPENDENT)
    while at < stop:
        block, num_tiles, length, tile, tile_stop = find_block(length_b, at, stop, N, PAD)
        if BLOCK_Q == 1:
            token = block
            valid_m = row_m < G
            seen_by_all = length
        else:
            token = gl.load(plan_ptr + 2 * num_blocks + block)
            last = gl.load(start_ptr + gl.load(plan_ptr + num_blocks + block) + 1).to(gl.int32)
            valid_m = (row_m < BLOCK_Q * G) & (token + row_m // G < last)
            visible_m = gl.load(visible_ptr + token + row_m // G, mask=valid_m, other=0).to(gl.int32)
            seen_by_all = gl.min(gl.where(valid_m, visible_m, length), 0)
        mbarrier.expect(q_full, M * (512 + 64) * 2)
        fetch(q_desc, [token * G + head_block * M, 0], q_full, q)
        fetch(q_rotary_desc, [token * G + head_block * M, 512], q_full, q_rotary)
        peak_m = gl.full([M], float("-inf"), gl.float32, layout=row_layout)
        total_m = gl.full([M], 0.0, gl.float32, layout=row_layout)
        mbarrier.wait(q_full, turn & 1)
        if AHEAD:
            score = _score(q, q_rotary, latent, rotary, full, count, length - tile * N, SWAP, M, N, BUFFERS, s_layout)
            score = warpgroup_mma_wait(0, deps=[score])
        for t in range(tile, tile_stop):
            place = count % PLACES
            if not AHEAD:
                score = _score(q, q_rotary, latent, rotary, full, count, length - t * N, SWAP, M, N, BUFFERS, s_layout)
                score = warpgroup_mma_wait(0, deps=[score])
            if (t + 1) * N > seen_by_all:
                position_n = t * N + offset_n
                visible = length
                if BLOCK_Q > 1:
                    visible = gl.expand_dims(visible_m, TOKENS)
                score = gl.where(gl.expand_dims(position_n, 1 - TOKENS) < visible, score, float("-inf"))
            if AHEAD:
                # The tensor cores do the next tile meanwhile; behind the last one, that one again, for nobody.
                step = (t + 1 < tile_stop).to(gl.int32)
                live = length - (t + step) * N
                ahead = _score(q, q_rotary, latent, rotary, full, count + step, live, SWAP, M, N, BUFFERS, s_layout)
            new_m = gl.maximum(peak_m, gl.max(score, TOKENS))
            base_m = gl.where(new_m == float("-inf"), 0.0, new_m) * scale_log2
            weight = gl.exp2(score * scale_log2 - gl.expand_dims(base_m, TOKENS))
            decay_m = gl.exp2(peak_m * scale_log2 - base_m)
            total_m = total_m * decay_m + gl.sum(weight, TOKENS)
            peak_m = new_m
            mbarrier.wait(p_empty.index(place), (count // PLACES & 1) ^ 1)
            weights.index(place).store(weight.to(weights.dtype))
            decays.index(place).store(decay_m)
            fence_async_shared()
            mbarrier.arrive(p_full.index(place), count=1)
            if AHEAD:
                score = warpgroup_mma_wait(0, deps=[ahead])
            count += 1
        mbarrier.wait(total_empty, (turn & 1) ^ 1)
        totals.store(total_m)
        mbarrier.arrive(total_full, count=1)
        lse_m = gl.where(total_m == 0.0, float("-inf"), peak_m * (scale_log2 * 0.6931471805599453) + gl.log(total_m))
        lse_m = gl.where(lse_m != lse_m, 0.0, lse_m)
        if tile_stop - tile == num_tiles:
            at_m = (token + row_m // G).to(gl.int64) * lse_token_stride + row_m % G * lse_head_stride
            gl.store(lse_ptr + at_m, lse_m, mask=valid_m)
        else:
            unfinished = (2 * worker + (at > run_start).to(gl.int32)) * HEAD_BLOCKS + head_block
            gl.store(part_lse_ptr + unfinished * M + row_m - head_block * M, lse_m)
        at += tile_stop - tile
        turn += 1


@gluon.jit
def _sum_values(  # type: ignore[no-untyped-def]
    latent_desc, rotary_desc, table_ptr, start_ptr, length_ptr, plan_ptr, out_ptr, part_ptr, num_blocks,
    num_sequences, num_workers, table_stride, out_token_stride, out_head_stride, latent, rotary, weights, decays,
    totals, full, empty, p_full, p_empty, total_full, total_empty, HALF_AT: gl.constexpr, G: gl.constexpr,
    BLOCK_Q: gl.constexpr, HEAD_BLOCKS: gl.constexpr, SWAP: gl.constexpr, M: gl.constexpr, N: gl.constexpr,
    BUFFERS: gl.constexpr, PLACES: gl.constexpr, PAGE_TOKENS: gl.constexpr, MIN_TILES: gl.constexpr,
    PAD: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    COLUMNS: gl.constexpr = 0 if SWAP else 1
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M if SWAP else 256, 16])
    row_layout: gl.constexpr = gl.SliceLayout(COLUMNS, o_layout)
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
            front, front_tile, front_stop, row, page = load_next(
                latent_desc, rotary_desc, table_ptr, start_ptr, length_ptr, plan_ptr, num_blocks, num_sequences,
                table_stride, latent, rotary, full, early, front, stop, front_tile, front_stop, row, page,
                BLOCK_Q, N, BUFFERS, PAGE_TOKENS, PAD,
            )  # fmt: skip
    while at < stop:
        length_b = load_counts(length_ptr, num_blocks, 0, PAD)
        block, num_tiles, _, tile, tile_stop = find_block(length_b, at, stop, N, PAD)
        if SWAP:
            acc = gl.full([256, M], 0.0, gl.float32, layout=o_layout)
        else:
            acc = gl.full([M, 256], 0.0, gl.float32, layout=o_layout)
        for _ in range(tile, tile_stop):
            buffer = count % BUFFERS
            place = count % PLACES
            mbarrier.wait(p_full.index(place), count // PLACES & 1)
            acc = acc * gl.expand_dims(decays.index(place).load(row_layout), COLUMNS)
            value = latent.index(buffer).slice(HALF_AT, 256, dim=1)
            if SWAP:
                acc = warpgroup_mma(value.permute((1, 0)), weights.index(place), acc, is_async=True)
            else:
                acc = warpgroup_mma(weights.index(place), value, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(p_empty.index(place), count=1)
            if HALF_AT == 0:
                mbarrier.wait(empty.index(buffer), count // BUFFERS & 1)
                front, front_tile, front_stop, row, page = load_next(
                    latent_desc, rotary_desc, table_ptr, start_ptr, length_ptr, plan_ptr, num_blocks, num_sequences,
                    table_stride, latent, rotary, full, count + BUFFERS, front, stop, front_tile, front_stop, row, page,
                    BLOCK_Q, N, BUFFERS, PAGE_TOKENS, PAD,
                )  # fmt: skip
            else:
                mbarrier.arrive(empty.index(buffer), count=1)
            count += 1
        mbarrier.wait(total_full, turn & 1)
        total_m = totals.load(row_layout)
        mbarrier.arrive(total_empty, count=1)
        acc = acc / gl.expand_dims(gl.where(total_m == 0.0, 1.0, total_m), COLUMNS)
        row_m = head_block * M + gl.arange(0, M, layout=row_layout)
        column_v = HALF_AT + gl.arange(0, 256, layout=gl.SliceLayout(1 - COLUMNS, o_layout))
        column_v = gl.expand_dims(column_v, 1 - COLUMNS)
        if tile_stop - tile == num_tiles:
            if BLOCK_Q == 1:
                token = block
                valid_m = row_m < G
            else:
                token = gl.load(plan_ptr + 2 * num_blocks + block)
                last = gl.load(start_ptr + gl.load(plan_ptr + num_blocks + block) + 1).to(gl.int32)
                valid_m = (row_m < BLOCK_Q * G) & (token + row_m // G < last)
            at_m = (token + row_m // G).to(gl.int64) * out_token_stride + row_m % G * out_head_stride
            at_m = gl.expand_dims(at_m, COLUMNS)
            used_m = gl.expand_dims(valid_m, COLUMNS)
            gl.store(out_ptr + at_m + column_v, acc.to(out_ptr.dtype.element_ty), mask=used_m)
        else:
            unfinished = (2 * worker + (at > run_start).to(gl.int32)) * HEAD_BLOCKS + head_block
            part_m = gl.expand_dims(unfinished * M + row_m - head_block * M, COLUMNS)
            used_m = gl.expand_dims(row_m < BLOCK_Q * G, COLUMNS)
            gl.store(part_ptr + part_m * 512 + column_v, acc, mask=used_m)
        at += tile_stop - tile
        turn += 1


@gluon.jit(do_not_specialize=["num_blocks", "num_sequences", "num_workers", "table_stride"])
def _attend_latent(  # type: ignore[no-untyped-def]
    q_desc, q_rotary_desc, latent_desc, rotary_desc, table_ptr, start_ptr, visible_ptr, length_ptr, plan_ptr, out_ptr,
    lse_ptr, part_ptr, part_lse_ptr, scale_log2, num_blocks, num_sequences, num_workers, table_stride,
    out_token_stride, out_head_stride, lse_token_stride, lse_head_stride, G: gl.constexpr, BLOCK_Q: gl.constexpr,
    HEAD_BLOCKS: gl.constexpr, SWAP: gl.constexpr, M: gl.constexpr, N: gl.constexpr, BUFFERS: gl.constexpr,
    PLACES: gl.constexpr, AHEAD: gl.constexpr, PAGE_TOKENS: gl.constexpr, DEPENDENT: gl.constexpr,
    MIN_TILES: gl.constexpr, PAD: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = latent_desc.dtype
    q = gl.allocate_shared_memory(dtype, [M, 512], q_desc.layout)
    q_rotary = gl.allocate_shared_memory(dtype, [M, 64], q_rotary_desc.layout)
    latent = gl.allocate_shared_memory(dtype, [BUFFERS, N, 512], latent_desc.layout)
    rotary = gl.allocate_shared_memory(dtype, [BUFFERS, N, 64], rotary_desc.layout)
    weight_shape: gl.constexpr = [N, M] if SWAP else [M, N]
    weight_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(weight_shape, dtype)
    weights = gl.allocate_shared_memory(dtype, [PLACES] + weight_shape, weight_layout)  # noqa: RUF005 no stars here
    row_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    decays = gl.allocate_shared_memory(gl.float32, [PLACES, M], row_layout)
    totals = gl.allocate_shared_memory(gl.float32, [M], row_layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    p_empty = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    total_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    total_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
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
                    q_desc, q_rotary_desc, start_ptr, visible_ptr, length_ptr, plan_ptr, lse_ptr, part_lse_ptr,
                    scale_log2, num_blocks, num_workers, lse_token_stride, lse_head_stride, q, q_rotary, latent,
                    rotary, weights, decays, totals, q_full, full, p_full, p_empty, total_full, total_empty, G,
                    BLOCK_Q, HEAD_BLOCKS, SWAP, M, N, BUFFERS, PLACES, AHEAD, MIN_TILES, PAD, DEPENDENT,
            )),
            (_sum_values, (
                    latent_desc, rotary_desc, table_ptr, start_ptr, length_ptr, plan_ptr, out_ptr, part_ptr,
                    num_blocks, num_sequences, num_workers, table_stride, out_token_stride, out_head_stride, latent,
                    rotary, weights, decays, totals, full, empty, p_full, p_empty, total_full, total_empty,
                    gl.constexpr(0), G, BLOCK_Q, HEAD_BLOCKS, SWAP, M, N, BUFFERS, PLACES, PAGE_TOKENS, MIN_TILES,
                    PAD, DEPENDENT,
            )),
            (_sum_values, (
                    latent_desc, rotary_desc, table_ptr, start_ptr, length_ptr, plan_ptr, out_ptr, part_ptr,
                    num_blocks, num_sequences, num_workers, table_stride, out_token_stride, out_head_stride, latent,
                    rotary, weights, decays, totals, full, empty, p_full, p_empty, total_full, total_empty,
                    gl.constexpr(256), G, BLOCK_Q, HEAD_BLOCKS, SWAP, M, N, BUFFERS, PLACES, PAGE_TOKENS, MIN_TILES,
                    PAD, DEPENDENT,
            )),
        ],
        [4, 4],
        # What 12 warps have each; the sums need nearly all of it.
        [168, 168],
    )
    # fmt: on


def fits(q_THD: Tensor, pool_PB1D: Tensor) -> bool:
    """Whether this kernel can do it: a Hopper GPU, 16-bit latents of DeepSeek's widths, pages of whole tiles."""
    return (
        is_hopper(q_THD.device)
        and q_THD.dtype in (torch.bfloat16, torch.float16)
        and q_THD.dtype == pool_PB1D.dtype
        and pool_PB1D.shape[2:] == (1, LATENT + ROTARY)
        and pool_PB1D.shape[1] % ROWS == 0
    )


def attend_tiles(
    q_THD: Tensor,
    pool_PB1D: Tensor,
    tensors: tuple[Tensor, ...],
    numbers: tuple[float | int, ...],
    constants: dict[str, int],
    options: dict[str, bool],
    num_programs: int,
) -> None:
    """Launch the kernel: `tensors` and `numbers` are its arguments behind the descriptors, in order."""
    rows, slots = constants["M"], constants["N"]
    buffers = 3 if rows == _FEW_ROWS else 2
    q_RD = q_THD.contiguous().flatten(0, 1)
    pool_SD = pool_PB1D[:, :, 0].flatten(0, 1)
    _attend_latent[(num_programs,)](
        descriptor(q_RD, rows, LATENT),
        descriptor(q_RD, rows, ROTARY),
        descriptor(pool_SD, slots, LATENT),
        descriptor(pool_SD, slots, ROTARY),
        *tensors,
        *numbers,
        **{name: value for name, value in constants.items() if name != "K"},
        **options,
        BUFFERS=buffers,
        # Shared memory holds the queries, the buffers, and weights of one tile or of two.
        PLACES=2 if _FEW_ROWS < rows < ROWS else 1,
        # Products of the next tile before this one's softmax need a tile more than those two in the buffers.
        AHEAD=buffers > 2,
        SWAP=rows < ROWS,
        num_warps=4,
    )
