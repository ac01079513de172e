"""Attention over MLA latents for Hopper, in Triton's Gluon dialect: the same work as `triton_attention`, by roles.

A program holds 64 query rows and walks its run of tiles with four groups of warps. One asks the copy engine for
tiles; one makes scores and weights; two add up one half of the latent columns each. So scores of a tile, the sum over
the tile before and the loads of the tiles behind are under way at once, and neither memory nor tensor cores wait for
the softmax. With many heads the arithmetic binds, and that is what this kernel is for.

Letters: T tokens, S sequences, H query heads, L = 512 latent and 64 rotary columns, M = 64 rows, N slots of a tile.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

LATENT = 512
ROTARY = 64
ROWS = 64
HALF = LATENT // 2


@gluon.jit
def _add(a, b):  # type: ignore[no-untyped-def]
    return a + b


@gluon.jit
def _control(INSTRUCTION: gl.constexpr):  # type: ignore[no-untyped-def]
    gl.inline_asm_elementwise(INSTRUCTION, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _load_counts(pointer, count, fill, PAD: gl.constexpr):  # type: ignore[no-untyped-def]
    """[PAD] integers, `fill` past the first `count`."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    pad_b = gl.arange(0, PAD, layout=layout)
    return gl.load(pointer + pad_b, mask=pad_b < count, other=fill).to(gl.int32)


@gluon.jit
def _run(length_b, worker, num_workers, N: gl.constexpr, MIN_TILES: gl.constexpr):  # type: ignore[no-untyped-def]
    """First and last tile (exclusive) of this worker's run over the tiles of all blocks."""
    total = gl.sum((length_b + N - 1) // N, 0)
    taking = gl.maximum(gl.minimum((total + MIN_TILES - 1) // MIN_TILES, num_workers), 1)
    start = gl.where(worker < taking, _share(worker, total, taking), 0)
    return start, gl.where(worker < taking, _share(worker + 1, total, taking), 0)


@gluon.jit
def _share(worker, total, taking):  # type: ignore[no-untyped-def]
    """``worker * total // taking`` without leaving 32 bits."""
    return worker * (total // taking) + worker * (total % taking) // taking


@gluon.jit
def _segment(length_b, at, stop, N: gl.constexpr, PAD: gl.constexpr):  # type: ignore[no-untyped-def]
    """The block that tile `at` lies in: its number, tiles and length, and which of its tiles are in the run."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    pad_b = gl.arange(0, PAD, layout=layout)
    tiles_b = (length_b + N - 1) // N
    stop_b = gl.associative_scan(tiles_b, 0, _add)
    block = gl.sum((stop_b <= at).to(gl.int32), 0)
    num_tiles = gl.sum(gl.where(pad_b == block, tiles_b, 0), 0)
    length = gl.sum(gl.where(pad_b == block, length_b, 0), 0)
    tile = at - gl.sum(gl.where(pad_b == block, stop_b, 0), 0) + num_tiles
    return block, num_tiles, length, tile, gl.minimum(num_tiles, tile + stop - at)


@gluon.jit
def _load_tile(  # type: ignore[no-untyped-def]
    latent_desc,
    rotary_desc,
    latent,
    rotary,
    full,
    empty,
    page,
    t,
    count,
    there,
    N: gl.constexpr,
    BUFFERS: gl.constexpr,
    PAGE_TOKENS: gl.constexpr,
):
    """Ask for the `count`-th tile of this program, tile `t` of its sequence, once its buffer was given back."""
    buffer = count % BUFFERS
    slot = page * PAGE_TOKENS + t * N % PAGE_TOKENS
    mbarrier.wait(empty.index(buffer), (count // BUFFERS & 1) ^ 1, pred=there)
    mbarrier.expect(full.index(buffer), N * (512 + 64) * 2, pred=there)
    tma.async_copy_global_to_shared(rotary_desc, [slot, 512], full.index(buffer), rotary.index(buffer), pred=there)
    tma.async_copy_global_to_shared(latent_desc, [slot, 0], full.index(buffer), latent.index(buffer), pred=there)


@gluon.jit
def _clear_rows(tile, num_live, N: gl.constexpr):  # type: ignore[no-untyped-def]
    """Zeros behind a sequence's last slot: memory never written may hold NaN, and 0 * NaN would reach the sum."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    live_n = gl.arange(0, N, layout=gl.SliceLayout(1, layout)) < num_live
    for part in gl.static_range(8):
        columns = tile.slice(part * 64, 64, dim=1)
        value = columns.load(layout)
        columns.store(gl.where(live_n[:, None], value, 0.0).to(value.dtype))
    fence_async_shared()


@gluon.jit
def _make_weights(  # type: ignore[no-untyped-def]
    q_desc,
    q_rotary_desc,
    latent_desc,
    rotary_desc,
    table_ptr,
    start_ptr,
    visible_ptr,
    length_ptr,
    plan_ptr,
    lse_ptr,
    part_lse_ptr,
    scale_log2,
    num_blocks,
    num_sequences,
    num_workers,
    table_stride,
    lse_token_stride,
    lse_head_stride,
    q,
    q_rotary,
    latent,
    rotary,
    weights,
    decays,
    totals,
    q_full,
    full,
    empty,
    p_full,
    p_empty,
    total_full,
    total_empty,
    G: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    HEAD_BLOCKS: gl.constexpr,
    N: gl.constexpr,
    BUFFERS: gl.constexpr,
    PLACES: gl.constexpr,
    ORDERED: gl.constexpr,
    PAGE_TOKENS: gl.constexpr,
    MIN_TILES: gl.constexpr,
    PAD: gl.constexpr,
):
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    worker = gl.program_id(0) // HEAD_BLOCKS
    head_block = gl.program_id(0) % HEAD_BLOCKS
    length_b = _load_counts(length_ptr, num_blocks, 0, PAD)
    end_s = _load_counts(start_ptr + 1, num_sequences, 2147483647, PAD)
    at, stop = _run(length_b, worker, num_workers, N, MIN_TILES)
    run_start = at
    row_m = head_block * 64 + gl.arange(0, 64, layout=row_layout)
    offset_n = gl.arange(0, N, layout=gl.SliceLayout(0, s_layout))
    count = 0
    turn = 0
    while at < stop:
        block, num_tiles, length, tile, tile_stop = _segment(length_b, at, stop, N, PAD)
        if BLOCK_Q == 1:
            token = block
            sequence = gl.minimum(gl.sum((end_s <= block).to(gl.int32), 0), num_sequences - 1)
            valid_m = row_m < G
            seen_by_all = length
        else:
            token = gl.load(plan_ptr + 2 * num_blocks + block)
            sequence = gl.load(plan_ptr + num_blocks + block)
            last = gl.load(start_ptr + sequence + 1).to(gl.int32)
            valid_m = (row_m < BLOCK_Q * G) & (token + row_m // G < last)
            visible_m = gl.load(visible_ptr + token + row_m // G, mask=valid_m, other=0).to(gl.int32)
            seen_by_all = gl.min(gl.where(valid_m, visible_m, length), 0)
        mbarrier.expect(q_full, 64 * (512 + 64) * 2)
        tma.async_copy_global_to_shared(q_desc, [token * G + head_block * 64, 0], q_full, q)
        tma.async_copy_global_to_shared(q_rotary_desc, [token * G + head_block * 64, 512], q_full, q_rotary)
        table_row = table_ptr + sequence.to(gl.int64) * table_stride
        for ahead in gl.static_range(BUFFERS - 1):
            there = tile + ahead < tile_stop
            page = gl.load(table_row + (tile + ahead) * N // PAGE_TOKENS, mask=there, other=0)
            _load_tile(
                latent_desc, rotary_desc, latent, rotary, full, empty,
                page, tile + ahead, count + ahead, there, N, BUFFERS, PAGE_TOKENS,
            )  # fmt: skip
        t_ahead = tile + BUFFERS - 1
        page = gl.load(table_row + t_ahead * N // PAGE_TOKENS, mask=t_ahead < tile_stop, other=0)
        peak_m = gl.full([64], float("-inf"), gl.float32, layout=row_layout)
        total_m = gl.full([64], 0.0, gl.float32, layout=row_layout)
        mbarrier.wait(q_full, turn & 1)
        for t in range(tile, tile_stop):
            buffer = count % BUFFERS
            place = count % PLACES
            mbarrier.wait(full.index(buffer), count // BUFFERS & 1)
            if (t + 1) * N > length:
                _clear_rows(latent.index(buffer), length - t * N, N)
            t_ahead = t + BUFFERS - 1
            if ORDERED:
                _load_tile(
                    latent_desc, rotary_desc, latent, rotary, full, empty,
                    page, t_ahead, count + BUFFERS - 1, t_ahead < tile_stop, N, BUFFERS, PAGE_TOKENS,
                )  # fmt: skip
            score = gl.full([64, N], 0.0, gl.float32, layout=s_layout)
            score = warpgroup_mma(
                q_rotary, rotary.index(buffer).permute((1, 0)), score, use_acc=False, is_async=True
            )
            score = warpgroup_mma(q, latent.index(buffer).permute((1, 0)), score, is_async=True)
            if not ORDERED:
                _load_tile(
                    latent_desc, rotary_desc, latent, rotary, full, empty,
                    page, t_ahead, count + BUFFERS - 1, t_ahead < tile_stop, N, BUFFERS, PAGE_TOKENS,
                )  # fmt: skip
            page = gl.load(table_row + (t_ahead + 1) * N // PAGE_TOKENS, mask=t_ahead + 1 < tile_stop, other=0)
            score = warpgroup_mma_wait(0, deps=[score])
            if (t + 1) * N > seen_by_all:
                position_n = t * N + offset_n
                if BLOCK_Q == 1:
                    seen = (position_n < length)[None, :]
                else:
                    seen = position_n[None, :] < visible_m[:, None]
                score = gl.where(seen, score, float("-inf"))
            new_m = gl.maximum(peak_m, gl.max(score, 1))
            base_m = gl.where(new_m == float("-inf"), 0.0, new_m) * scale_log2
            weight = gl.exp2(score * scale_log2 - base_m[:, None])
            decay_m = gl.exp2(peak_m * scale_log2 - base_m)
            total_m = total_m * decay_m + gl.sum(weight, 1)
            peak_m = new_m
            mbarrier.wait(p_empty.index(place), (count // PLACES & 1) ^ 1)
            weights.index(place).store(weight.to(weights.dtype))
            decays.index(place).store(decay_m)
            fence_async_shared()
            mbarrier.arrive(p_full.index(place), count=1)
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
            gl.store(part_lse_ptr + unfinished * 64 + row_m - head_block * 64, lse_m)
        at += tile_stop - tile
        turn += 1


@gluon.jit
def _sum_values(  # type: ignore[no-untyped-def]
    start_ptr,
    length_ptr,
    plan_ptr,
    out_ptr,
    part_ptr,
    num_blocks,
    num_workers,
    out_token_stride,
    out_head_stride,
    latent,
    weights,
    decays,
    totals,
    empty,
    p_full,
    p_empty,
    total_full,
    total_empty,
    HALF_AT: gl.constexpr,
    G: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    HEAD_BLOCKS: gl.constexpr,
    N: gl.constexpr,
    BUFFERS: gl.constexpr,
    PLACES: gl.constexpr,
    MIN_TILES: gl.constexpr,
    PAD: gl.constexpr,
):
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, o_layout)
    worker = gl.program_id(0) // HEAD_BLOCKS
    head_block = gl.program_id(0) % HEAD_BLOCKS
    at, stop = _run(_load_counts(length_ptr, num_blocks, 0, PAD), worker, num_workers, N, MIN_TILES)
    run_start = at
    count = 0
    turn = 0
    while at < stop:
        length_b = _load_counts(length_ptr, num_blocks, 0, PAD)
        block, num_tiles, _, tile, tile_stop = _segment(length_b, at, stop, N, PAD)
        acc = gl.full([64, 256], 0.0, gl.float32, layout=o_layout)
        for _ in range(tile, tile_stop):
            buffer = count % BUFFERS
            place = count % PLACES
            mbarrier.wait(p_full.index(place), count // PLACES & 1)
            acc = acc * decays.index(place).load(row_layout)[:, None]
            acc = warpgroup_mma(
                weights.index(place), latent.index(buffer).slice(HALF_AT, 256, dim=1), acc, is_async=True
            )
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index(buffer), count=1)
            mbarrier.arrive(p_empty.index(place), count=1)
            count += 1
        mbarrier.wait(total_full, turn & 1)
        total_m = totals.load(row_layout)
        mbarrier.arrive(total_empty, count=1)
        acc = acc / gl.where(total_m == 0.0, 1.0, total_m)[:, None]
        row_m = head_block * 64 + gl.arange(0, 64, layout=row_layout)
        column_v = HALF_AT + gl.arange(0, 256, layout=gl.SliceLayout(0, o_layout))
        if tile_stop - tile == num_tiles:
            if BLOCK_Q == 1:
                token = block
                valid_m = row_m < G
            else:
                token = gl.load(plan_ptr + 2 * num_blocks + block)
                last = gl.load(start_ptr + gl.load(plan_ptr + num_blocks + block) + 1).to(gl.int32)
                valid_m = (row_m < BLOCK_Q * G) & (token + row_m // G < last)
            at_m = (token + row_m // G).to(gl.int64) * out_token_stride + row_m % G * out_head_stride
            gl.store(
                out_ptr + at_m[:, None] + column_v[None, :], acc.to(out_ptr.dtype.element_ty), mask=valid_m[:, None]
            )
        else:
            unfinished = (2 * worker + (at > run_start).to(gl.int32)) * HEAD_BLOCKS + head_block
            part_m = unfinished * 64 + row_m - head_block * 64
            used_m = row_m < BLOCK_Q * G
            gl.store(part_ptr + part_m[:, None] * 512 + column_v[None, :], acc, mask=used_m[:, None])
        at += tile_stop - tile
        turn += 1


@gluon.jit(do_not_specialize=["num_blocks", "num_sequences", "num_workers", "table_stride"])
def _attend_latent(  # type: ignore[no-untyped-def]
    q_desc,
    q_rotary_desc,
    latent_desc,
    rotary_desc,
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
    out_token_stride,
    out_head_stride,
    lse_token_stride,
    lse_head_stride,
    G: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    HEAD_BLOCKS: gl.constexpr,
    N: gl.constexpr,
    BUFFERS: gl.constexpr,
    PLACES: gl.constexpr,
    ORDERED: gl.constexpr,
    PAGE_TOKENS: gl.constexpr,
    DEPENDENT: gl.constexpr,
    MIN_TILES: gl.constexpr,
    PAD: gl.constexpr,
):
    dtype: gl.constexpr = latent_desc.dtype
    q = gl.allocate_shared_memory(dtype, [64, 512], q_desc.layout)
    q_rotary = gl.allocate_shared_memory(dtype, [64, 64], q_rotary_desc.layout)
    latent = gl.allocate_shared_memory(dtype, [BUFFERS, N, 512], latent_desc.layout)
    rotary = gl.allocate_shared_memory(dtype, [BUFFERS, N, 64], rotary_desc.layout)
    weight_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, N], dtype)
    weights = gl.allocate_shared_memory(dtype, [PLACES, 64, N], weight_layout)
    row_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    decays = gl.allocate_shared_memory(gl.float32, [PLACES, 64], row_layout)
    totals = gl.allocate_shared_memory(gl.float32, [64], row_layout)
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
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(PLACES):
        mbarrier.init(p_full.index(i), count=1)
        mbarrier.init(p_empty.index(i), count=2)
    mbarrier.init(total_full, count=1)
    mbarrier.init(total_empty, count=2)
    fence_async_shared()
    if DEPENDENT:
        _control("griddepcontrol.launch_dependents; // dummy $0")
        _control("griddepcontrol.wait; // dummy $0")
    gl.warp_specialize(
        [
            (
                _make_weights,
                (
                    q_desc,
                    q_rotary_desc,
                    latent_desc,
                    rotary_desc,
                    table_ptr,
                    start_ptr,
                    visible_ptr,
                    length_ptr,
                    plan_ptr,
                    lse_ptr,
                    part_lse_ptr,
                    scale_log2,
                    num_blocks,
                    num_sequences,
                    num_workers,
                    table_stride,
                    lse_token_stride,
                    lse_head_stride,
                    q,
                    q_rotary,
                    latent,
                    rotary,
                    weights,
                    decays,
                    totals,
                    q_full,
                    full,
                    empty,
                    p_full,
                    p_empty,
                    total_full,
                    total_empty,
                    G,
                    BLOCK_Q,
                    HEAD_BLOCKS,
                    N,
                    BUFFERS,
                    PLACES,
                    ORDERED,
                    PAGE_TOKENS,
                    MIN_TILES,
                    PAD,
                ),
            ),
            (
                _sum_values,
                (
                    start_ptr,
                    length_ptr,
                    plan_ptr,
                    out_ptr,
                    part_ptr,
                    num_blocks,
                    num_workers,
                    out_token_stride,
                    out_head_stride,
                    latent,
                    weights,
                    decays,
                    totals,
                    empty,
                    p_full,
                    p_empty,
                    total_full,
                    total_empty,
                    gl.constexpr(0),
                    G,
                    BLOCK_Q,
                    HEAD_BLOCKS,
                    N,
                    BUFFERS,
                    PLACES,
                    MIN_TILES,
                    PAD,
                ),
            ),
            (
                _sum_values,
                (
                    start_ptr,
                    length_ptr,
                    plan_ptr,
                    out_ptr,
                    part_ptr,
                    num_blocks,
                    num_workers,
                    out_token_stride,
                    out_head_stride,
                    latent,
                    weights,
                    decays,
                    totals,
                    empty,
                    p_full,
                    p_empty,
                    total_full,
                    total_empty,
                    gl.constexpr(256),
                    G,
                    BLOCK_Q,
                    HEAD_BLOCKS,
                    N,
                    BUFFERS,
                    PLACES,
                    MIN_TILES,
                    PAD,
                ),
            ),
        ],
        [4, 4],
        [168, 168],
    )


def attend_tiles(
    q_THD: Tensor,
    pool_PB1D: Tensor,
    tensors: tuple[Tensor, ...],
    numbers: tuple[float | int, ...],
    constants: dict[str, int],
    *,
    programs: int,
    buffers: int,
    ordered: bool = True,
    options: dict[str, bool],
) -> None:
    """Launch the kernel: `tensors` and `numbers` are its arguments behind the descriptors, in order."""
    slots = constants["N"]
    q_RD = q_THD.contiguous().flatten(0, 1)
    pool_SD = pool_PB1D[:, :, 0].flatten(0, 1)
    _attend_latent[(programs,)](
        _descriptor(q_RD, ROWS, LATENT),
        _descriptor(q_RD, ROWS, ROTARY),
        _descriptor(pool_SD, slots, LATENT),
        _descriptor(pool_SD, slots, ROTARY),
        *tensors,
        *numbers,
        **constants,
        BUFFERS=buffers,
        PLACES=1 if slots == 64 else 2,
        ORDERED=ordered,
        **options,
        num_warps=4,
    )


def _descriptor(rows: Tensor, height: int, width: int) -> TensorDescriptor:
    """What the copy engine needs to know to fetch `height` rows by `width` columns of a matrix."""
    kind = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[rows.dtype]
    layout = gl.NVMMASharedLayout.get_default_for([height, width], kind)
    return TensorDescriptor.from_tensor(rows, [height, width], layout)
