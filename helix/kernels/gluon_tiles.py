"""Where the tiles of a latent attention call are, and fetching them: what the roles of `gluon_latent` share.

All tiles of the step lie in one row, block of queries after block; each worker has an equal, contiguous run of it.

Letters: b blocks of queries, S sequences, N slots of a tile.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# The copy engine fills a tile of shared memory and counts its bytes at a barrier; Triton has renamed this since 3.6.
fetch = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_HOPPER = 9
_KINDS = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.int16: gl.int16,
    torch.float32: gl.float32,
}


def is_hopper(device: torch.device) -> bool:
    """Whether `device` has what the kernels in Gluon are written for."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] == _HOPPER


def descriptor(rows: Tensor, *block: int) -> TensorDescriptor:
    """What the copy engine needs to know to fetch blocks, of so many rows by columns, of a matrix (or a vector)."""
    layout = gl.NVMMASharedLayout.get_default_for(list(block), _KINDS[rows.dtype])
    return TensorDescriptor.from_tensor(rows, list(block), layout)


@gluon.jit
def _add(a, b):  # type: ignore[no-untyped-def]
    return a + b


@gluon.jit
def control(INSTRUCTION: gl.constexpr):  # type: ignore[no-untyped-def]
    gl.inline_asm_elementwise(INSTRUCTION, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for_inputs(DEPENDENT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Queries, cache and a plan of blocks are there from here on; lengths and pages are before (`begin_late`)."""
    if DEPENDENT:
        control("griddepcontrol.wait; // dummy $0")


@gluon.jit
def load_counts(pointer, count, fill, PAD: gl.constexpr):  # type: ignore[no-untyped-def]
    """[PAD] integers, `fill` past the first `count`."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    pad_b = gl.arange(0, PAD, layout=layout)
    return gl.load(pointer + pad_b, mask=pad_b < count, other=fill).to(gl.int32)


@gluon.jit
def share_of(worker, total, taking):  # type: ignore[no-untyped-def]
    """``worker * total // taking`` without leaving 32 bits."""
    return worker * (total // taking) + worker * (total % taking) // taking


@gluon.jit
def run_of(length_b, worker, num_workers, N: gl.constexpr, MIN_TILES: gl.constexpr):  # type: ignore[no-untyped-def]
    """First and last tile (exclusive) of this worker's run over the tiles of all blocks."""
    total = gl.sum((length_b + N - 1) // N, 0)
    taking = gl.maximum(gl.minimum((total + MIN_TILES - 1) // MIN_TILES, num_workers), 1)
    start = gl.where(worker < taking, share_of(worker, total, taking), 0)
    return start, gl.where(worker < taking, share_of(worker + 1, total, taking), 0)


@gluon.jit
def find_block(length_b, at, stop, N: gl.constexpr, PAD: gl.constexpr):  # type: ignore[no-untyped-def]
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
def clear_rows(tile, num_live, N: gl.constexpr):  # type: ignore[no-untyped-def]
    """Zeros behind a sequence's last slot: memory never written may hold NaN, and 0 * NaN would reach the sum."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    live_n = gl.arange(0, N, layout=gl.SliceLayout(1, layout)) < num_live
    for part in gl.static_range(tile.shape[1] // 64):
        columns = tile.slice(part * 64, 64, dim=1)
        value = columns.load(layout)
        columns.store(gl.where(live_n[:, None], value, 0).to(value.dtype))
    fence_async_shared()


@gluon.jit
def row_of(end_s, plan_ptr, block, num_blocks, num_sequences, table_stride, BLOCK_Q: gl.constexpr):  # type: ignore[no-untyped-def]
    """Where the page table has the row of a block's sequence."""
    if BLOCK_Q == 1:
        sequence = gl.minimum(gl.sum((end_s <= block).to(gl.int32), 0), num_sequences - 1)
    else:
        sequence = gl.load(plan_ptr + num_blocks + block)
    return sequence.to(gl.int64) * table_stride


@gluon.jit
def step_on(  # type: ignore[no-untyped-def]
    table_ptr, start_ptr, length_ptr, plan_ptr, num_blocks, num_sequences, table_stride, at, stop, tile, tile_stop, row,
    BLOCK_Q: gl.constexpr, N: gl.constexpr, PAGE_TOKENS: gl.constexpr, PAD: gl.constexpr,
):  # fmt: skip
    """The tile behind the one at the front of the run, in the next block where this one ends, and its page."""
    at += 1
    tile += 1
    if (tile == tile_stop) & (at < stop):
        length_b = load_counts(length_ptr, num_blocks, 0, PAD)
        block, _, _, tile, tile_stop = find_block(length_b, at, stop, N, PAD)
        end_s = load_counts(start_ptr + 1, num_sequences, 2147483647, PAD)
        row = row_of(end_s, plan_ptr, block, num_blocks, num_sequences, table_stride, BLOCK_Q)
    page = gl.load(table_ptr + row + tile * N // PAGE_TOKENS, mask=at < stop, other=0)
    return at, tile, tile_stop, row, page


@gluon.jit
def load_next(  # type: ignore[no-untyped-def]
    latent_desc, rotary_desc, table_ptr, start_ptr, length_ptr, plan_ptr, num_blocks, num_sequences, table_stride,
    latent, rotary, full, count, at, stop, tile, tile_stop, row, page, BLOCK_Q: gl.constexpr, N: gl.constexpr,
    BUFFERS: gl.constexpr, PAGE_TOKENS: gl.constexpr, PAD: gl.constexpr,
):  # fmt: skip
    """Ask for the tile at the front of the run and step on, into the next block where this one ends."""
    there = at < stop
    buffer = count % BUFFERS
    slot = page * PAGE_TOKENS + tile * N % PAGE_TOKENS
    mbarrier.expect(full.index(buffer), N * (512 + 64) * 2, pred=there)
    fetch(rotary_desc, [slot, 512], full.index(buffer), rotary.index(buffer), pred=there)
    fetch(latent_desc, [slot, 0], full.index(buffer), latent.index(buffer), pred=there)
    return step_on(
        table_ptr, start_ptr, length_ptr, plan_ptr, num_blocks, num_sequences, table_stride, at, stop, tile, tile_stop,
        row, BLOCK_Q, N, PAGE_TOKENS, PAD,
    )  # fmt: skip
