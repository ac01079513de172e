"""Collectives through peers' memory, in Triton: each rank stores its values at its peers, who wait for them to appear.

One kernel is a whole collective, without barrier or flag. A place that waits for a value is absent: all its bits are
set. No sender sends that (it is one of many NaNs, and goes out as another), so a receiver reads its own memory until
nothing that it waits for is absent: one way over the link, and nothing else. Small all-reduces of TensorRT-LLM and
FlashInfer work like this ("Lamport").

What the calls of one stream share is a `Channel`. Its inbox at each rank is ``[2 turns, Z senders, MAX_PROGRAMS,
region_bytes]``. Program b of a call touches region b alone, at every rank, and takes the other turn in its next call.
Two turns are enough: who stores for call n + 2 has seen its peers' values of call n + 1, which they sent after their
call n had ended, and with it the reading of the same places, which made them absent again.

So all ranks make the same calls on a channel in the same order, each behind the one before it on one stream; and the
programs of a call should run side by side, which `MAX_PROGRAMS` small ones do.

Letters: Z ranks, T tokens, H heads, D width, p ranks at once, c columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from helix.kernels.triton_merge import fold

MAX_PROGRAMS = 512
# What every byte of an inbox is at first.
ABSENT_BYTE = 0xFF
_NUM_WARPS = 2
# Values of one rank in a tile, and the most of all ranks that a program holds at once.
_COLUMNS, _TILE = 512, 4096
_BITS = {2: tl.int16, 4: tl.int32}


@triton.jit
def _sendable(value, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bits of `value`; those that mean absent become the bits of another NaN."""
    bits = value.to(BITS, bitcast=True)
    other_nan: tl.constexpr = 0x7FFFFFFF if tl.int32 == BITS else 0x7FFF
    return tl.where(bits == -1, other_nan, bits).to(BITS)


@triton.jit
def _regions(inbox, turn, sender, program, region_bytes, Z: tl.constexpr, PROGRAMS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Addresses of the regions in which `program` finds what `sender` stored in this turn."""
    return inbox + ((turn * Z + sender) * PROGRAMS + program).to(tl.int64) * region_bytes


@triton.jit
def _any_absent(bits, awaited):  # type: ignore[no-untyped-def]
    """1 where one of the `awaited` bits [p, c] is absent, else 0."""
    return tl.max(tl.max(((bits == -1) & awaited).to(tl.int32), 1), 0)


@triton.jit
def _arrived(pointer, there, awaited):  # type: ignore[no-untyped-def]
    """Bits [p, c] that are `there`, once none that is `awaited` is absent."""
    bits = tl.load(pointer, mask=there, other=0, volatile=True)
    while _any_absent(bits, awaited) != 0:
        bits = tl.load(pointer, mask=there, other=0, volatile=True)
    return bits


@triton.jit(do_not_specialize=["num_rows", "num_heads", "index"])
def _exchange(  # type: ignore[no-untyped-def]
    out_ptr,
    lse_ptr,
    result_ptr,
    inbox_ptr,
    turn_ptr,
    num_rows,
    num_heads,
    index,
    token_stride,
    head_stride,
    lse_token_stride,
    lse_head_stride,
    region_bytes,
    Z: tl.constexpr,
    PARTS: tl.constexpr,
    PART_HEADS: tl.constexpr,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    LSE_AT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BITS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Rows (a token and one of the receiver's heads) of a program: all are sent, then each is merged as it arrives."""
    program = tl.program_id(0)
    step = tl.num_programs(0)
    turn = tl.load(turn_ptr + program)
    zero = tl.zeros((), tl.int64)
    column_c = tl.arange(0, COLUMNS)
    inside_c = column_c < D
    for base in range(0, Z, PARTS):
        part_p = base + tl.arange(0, PARTS)
        other_p = (part_p < Z) & (part_p != index)
        inbox_p = tl.load(inbox_ptr + part_p, mask=other_p, other=0)
        region_p = _regions(inbox_p, turn, index, program, region_bytes, Z, PROGRAMS)
        for row in range(program, num_rows, step):
            token = zero + row // PART_HEADS
            head_p = part_p * PART_HEADS + row % PART_HEADS
            real_p = other_p & (head_p < num_heads)
            source_p = tl.multiple_of(out_ptr + token * token_stride + head_p * head_stride, ALIGNMENT)
            source_pc = source_p[:, None] + column_c[None, :]
            value_pc = tl.load(source_pc, mask=real_p[:, None] & inside_c[None, :], other=0.0)
            lse_p = tl.load(
                lse_ptr + token * lse_token_stride + head_p * lse_head_stride, mask=real_p, other=-float("inf")
            )
            place_p = region_p + row // step * ROW_BYTES
            target_p = tl.multiple_of(place_p.to(tl.pointer_type(BITS)), 16)
            mask_pc = other_p[:, None] & inside_c[None, :]
            tl.store(target_p[:, None] + column_c[None, :], _sendable(value_pc, BITS), mask=mask_pc)
            tl.store((place_p + LSE_AT).to(tl.pointer_type(tl.int32)), _sendable(lse_p, tl.int32), mask=other_p)
    mine = tl.load(inbox_ptr + index)
    for row in range(program, num_rows, step):
        token = zero + row // PART_HEADS
        own_head = index * PART_HEADS + row % PART_HEADS
        own = (out_ptr + token * token_stride + own_head * head_stride).to(tl.int64)
        own_lse = (lse_ptr + token * lse_token_stride + own_head * lse_head_stride).to(tl.int64)
        peak = tl.full((), float("-inf"), tl.float32)
        total = tl.zeros((), tl.float32)
        acc_c = tl.zeros((COLUMNS,), tl.float32)
        for base in range(0, Z, PARTS):
            part_p = base + tl.arange(0, PARTS)
            other_p = (part_p < Z) & (part_p != index)
            there_p = other_p | (part_p == tl.where(own_head < num_heads, index, -1))
            place_p = _regions(mine, turn, part_p, program, region_bytes, Z, PROGRAMS) + row // step * ROW_BYTES
            from_p = tl.multiple_of(tl.where(other_p, place_p, own).to(tl.pointer_type(BITS)), ALIGNMENT)
            from_pc = from_p[:, None] + column_c[None, :]
            lse_from_p = tl.where(other_p, place_p + LSE_AT, own_lse).to(tl.pointer_type(tl.int32))
            there_pc = there_p[:, None] & inside_c[None, :]
            awaited_pc = other_p[:, None] & inside_c[None, :]
            bits_pc = tl.load(from_pc, mask=there_pc, other=0, volatile=True)
            lse_bits_p = tl.load(lse_from_p, mask=there_p, other=0, volatile=True)
            while (_any_absent(bits_pc, awaited_pc) | tl.max(((lse_bits_p == -1) & other_p).to(tl.int32), 0)) != 0:
                bits_pc = tl.load(from_pc, mask=there_pc, other=0, volatile=True)
                lse_bits_p = tl.load(lse_from_p, mask=there_p, other=0, volatile=True)
            tl.store(from_pc, tl.full((PARTS, COLUMNS), -1, BITS), mask=awaited_pc)
            tl.store(lse_from_p, tl.full((PARTS,), -1, tl.int32), mask=other_p)
            lse_p = tl.where(there_p, lse_bits_p.to(tl.float32, bitcast=True), float("-inf"))
            value_pc = bits_pc.to(out_ptr.dtype.element_ty, bitcast=True)
            peak, total, acc_c = fold(peak, total, acc_c, lse_p, value_pc)
        merged_c = acc_c / tl.where(total == 0.0, 1.0, total)
        tl.store(result_ptr + (zero + row) * D + column_c, merged_c, mask=inside_c)
    tl.store(turn_ptr + program, turn ^ 1)


@triton.jit(do_not_specialize=["index"])
def _all_reduce_once(  # type: ignore[no-untyped-def]
    x_ptr,
    inbox_ptr,
    turn_ptr,
    num_values,
    index,
    region_bytes,
    Z: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BITS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """One shot: every rank sends all its values to every other, and sums all parts itself, in the order of ranks."""
    program = tl.program_id(0)
    step = tl.num_programs(0)
    turn = tl.load(turn_ptr + program)
    part_p = tl.arange(0, PARTS)
    column_c = tl.arange(0, COLUMNS)
    other_p = (part_p < Z) & (part_p != index)
    tile_bytes: tl.constexpr = COLUMNS * (4 if tl.int32 == BITS else 2)
    num_tiles = tl.cdiv(num_values, COLUMNS)
    inbox_p = tl.load(inbox_ptr + part_p, mask=other_p, other=0)
    region_p = _regions(inbox_p, turn, index, program, region_bytes, Z, PROGRAMS)
    for tile in range(program, num_tiles, step):
        value_c = tile * COLUMNS + column_c
        bits_c = _sendable(tl.load(x_ptr + value_c, mask=value_c < num_values, other=0.0), BITS)
        target_p = tl.multiple_of((region_p + tile // step * tile_bytes).to(tl.pointer_type(BITS)), 16)
        bits_pc = tl.broadcast_to(bits_c[None, :], (PARTS, COLUMNS))
        mask_pc = other_p[:, None] & (value_c < num_values)[None, :]
        tl.store(target_p[:, None] + column_c[None, :], bits_pc, mask=mask_pc)
    region_p = _regions(tl.load(inbox_ptr + index), turn, part_p, program, region_bytes, Z, PROGRAMS)
    for tile in range(program, num_tiles, step):
        value_c = tile * COLUMNS + column_c
        own = (x_ptr + tile * COLUMNS).to(tl.int64)
        from_p = tl.where(other_p, region_p + tile // step * tile_bytes, own).to(tl.pointer_type(BITS))
        from_pc = tl.multiple_of(from_p, ALIGNMENT)[:, None] + column_c[None, :]
        inside_pc = (part_p < Z)[:, None] & (value_c < num_values)[None, :]
        awaited_pc = inside_pc & other_p[:, None]
        bits_pc = _arrived(from_pc, inside_pc, awaited_pc)
        tl.store(from_pc, tl.full((PARTS, COLUMNS), -1, BITS), mask=awaited_pc)
        sum_c = tl.sum(bits_pc.to(x_ptr.dtype.element_ty, bitcast=True).to(tl.float32), 0)
        tl.store(x_ptr + value_c, sum_c, mask=value_c < num_values)
    tl.store(turn_ptr + program, turn ^ 1)


@triton.jit(do_not_specialize=["index"])
def _all_reduce_twice(  # type: ignore[no-untyped-def]
    x_ptr,
    inbox_ptr,
    turn_ptr,
    num_values,
    index,
    region_bytes,
    Z: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BITS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Two shots: of each tile of Z x COLUMNS values rank z sums the z-th run and sends the sums to every other rank.

    The second half of a region is for the sums.
    """
    program = tl.program_id(0)
    step = tl.num_programs(0)
    turn = tl.load(turn_ptr + program)
    part_p = tl.arange(0, PARTS)
    column_c = tl.arange(0, COLUMNS)
    other_p = (part_p < Z) & (part_p != index)
    run_bytes: tl.constexpr = COLUMNS * (4 if tl.int32 == BITS else 2)
    num_tiles = tl.cdiv(num_values, Z * COLUMNS)
    inbox_p = tl.load(inbox_ptr + part_p, mask=other_p, other=0)
    to_p = _regions(inbox_p, turn, index, program, region_bytes, Z, PROGRAMS)
    from_p = _regions(tl.load(inbox_ptr + index), turn, part_p, program, region_bytes, Z, PROGRAMS)
    absent_pc = tl.full((PARTS, COLUMNS), -1, BITS)
    for tile in range(program, num_tiles, step):
        value_pc = (tile * Z + part_p)[:, None] * COLUMNS + column_c[None, :]
        mask_pc = other_p[:, None] & (value_pc < num_values)
        bits_pc = _sendable(tl.load(x_ptr + value_pc, mask=mask_pc, other=0.0), BITS)
        target_p = tl.multiple_of((to_p + tile // step * run_bytes).to(tl.pointer_type(BITS)), 16)
        tl.store(target_p[:, None] + column_c[None, :], bits_pc, mask=mask_pc)
    for tile in range(program, num_tiles, step):
        first = (tile * Z + index) * COLUMNS
        inside_c = first + column_c < num_values
        own = (x_ptr + first).to(tl.int64)
        source_p = tl.where(other_p, from_p + tile // step * run_bytes, own).to(tl.pointer_type(BITS))
        source_pc = tl.multiple_of(source_p, ALIGNMENT)[:, None] + column_c[None, :]
        inside_pc = (part_p < Z)[:, None] & inside_c[None, :]
        awaited_pc = other_p[:, None] & inside_c[None, :]
        bits_pc = _arrived(source_pc, inside_pc, awaited_pc)
        tl.store(source_pc, absent_pc, mask=awaited_pc)
        sum_c = tl.sum(bits_pc.to(x_ptr.dtype.element_ty, bitcast=True).to(tl.float32), 0).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + first + column_c, sum_c, mask=inside_c)
        sum_pc = tl.broadcast_to(_sendable(sum_c, BITS)[None, :], (PARTS, COLUMNS))
        target_p = (to_p + region_bytes // 2 + tile // step * run_bytes).to(tl.pointer_type(BITS))
        tl.store(tl.multiple_of(target_p, 16)[:, None] + column_c[None, :], sum_pc, mask=awaited_pc)
    for tile in range(program, num_tiles, step):
        value_pc = (tile * Z + part_p)[:, None] * COLUMNS + column_c[None, :]
        mask_pc = other_p[:, None] & (value_pc < num_values)
        source_p = (from_p + region_bytes // 2 + tile // step * run_bytes).to(tl.pointer_type(BITS))
        source_pc = tl.multiple_of(source_p, 16)[:, None] + column_c[None, :]
        bits_pc = _arrived(source_pc, mask_pc, mask_pc)
        tl.store(source_pc, absent_pc, mask=mask_pc)
        tl.store(x_ptr + value_pc, bits_pc.to(x_ptr.dtype.element_ty, bitcast=True), mask=mask_pc)
    tl.store(turn_ptr + program, turn ^ 1)


@triton.jit(do_not_specialize=["index"])
def _all_gather(  # type: ignore[no-untyped-def]
    x_ptr,
    out_ptr,
    inbox_ptr,
    turn_ptr,
    num_values,
    index,
    region_bytes,
    Z: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BITS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Every rank sends all its values to every other; part z of the output is what came from rank z."""
    program = tl.program_id(0)
    step = tl.num_programs(0)
    turn = tl.load(turn_ptr + program)
    part_p = tl.arange(0, PARTS)
    column_c = tl.arange(0, COLUMNS)
    other_p = (part_p < Z) & (part_p != index)
    tile_bytes: tl.constexpr = COLUMNS * (4 if tl.int32 == BITS else 2)
    num_tiles = tl.cdiv(num_values, COLUMNS)
    inbox_p = tl.load(inbox_ptr + part_p, mask=other_p, other=0)
    region_p = _regions(inbox_p, turn, index, program, region_bytes, Z, PROGRAMS)
    for tile in range(program, num_tiles, step):
        value_c = tile * COLUMNS + column_c
        value = tl.load(x_ptr + value_c, mask=value_c < num_values, other=0.0)
        tl.store(out_ptr + index.to(tl.int64) * num_values + value_c, value, mask=value_c < num_values)
        target_p = tl.multiple_of((region_p + tile // step * tile_bytes).to(tl.pointer_type(BITS)), 16)
        bits_pc = tl.broadcast_to(_sendable(value, BITS)[None, :], (PARTS, COLUMNS))
        mask_pc = other_p[:, None] & (value_c < num_values)[None, :]
        tl.store(target_p[:, None] + column_c[None, :], bits_pc, mask=mask_pc)
    region_p = _regions(tl.load(inbox_ptr + index), turn, part_p, program, region_bytes, Z, PROGRAMS)
    for tile in range(program, num_tiles, step):
        value_c = tile * COLUMNS + column_c
        from_p = (region_p + tile // step * tile_bytes).to(tl.pointer_type(BITS))
        from_pc = tl.multiple_of(from_p, 16)[:, None] + column_c[None, :]
        mask_pc = other_p[:, None] & (value_c < num_values)[None, :]
        bits_pc = _arrived(from_pc, mask_pc, mask_pc)
        tl.store(from_pc, tl.full((PARTS, COLUMNS), -1, BITS), mask=mask_pc)
        to_pc = out_ptr + part_p.to(tl.int64)[:, None] * num_values + value_c[None, :]
        tl.store(to_pc, bits_pc.to(x_ptr.dtype.element_ty, bitcast=True), mask=mask_pc)
    tl.store(turn_ptr + program, turn ^ 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """What the calls of one stream share; see the module's text.

    `inbox_Z` int64 [Z]: address of each rank's inbox as this device sees it, `index` this rank's place among them;
    `turn_P` int32 [MAX_PROGRAMS], 0 at first; every byte of an inbox `ABSENT_BYTE` at first. `region_bytes` is a
    multiple of 16.
    """

    inbox_Z: Tensor
    turn_P: Tensor
    index: int
    region_bytes: int

    @property
    def size(self) -> int:
        """Ranks."""
        return self.inbox_Z.shape[0]


def inbox_bytes(num_ranks: int, region_bytes: int) -> int:
    """Bytes of one rank's inbox."""
    return 2 * num_ranks * MAX_PROGRAMS * region_bytes


def exchange_region(num_rows: int, width: int, itemsize: int) -> int:
    """Bytes of a region that an exchange of `num_rows` rows (tokens x heads of one rank) needs."""
    return _ceil(num_rows, MAX_PROGRAMS) * _row_bytes(width, itemsize)


def values_region(num_values: int, itemsize: int, parts: int = 1) -> int:
    """Bytes of a region that `num_values` values of an all-reduce or all-gather need.

    `parts` is the number of ranks for an all-reduce in two shots.
    """
    tiles = _ceil(num_values, parts * _COLUMNS)
    return _ceil(tiles, MAX_PROGRAMS) * _COLUMNS * itemsize * (1 if parts == 1 else 2)


def exchange(channel: Channel, out_THD: Tensor, lse_TH: Tensor, part_heads: int) -> Tensor:
    """The exchange: partials of all heads over this rank's part of a sequence -> this rank's heads over all of it.

    Parameters
    ----------
    out_THD
        bf16, fp16 or fp32.
    lse_TH
        fp32. As for `helix.kernels.merge.merge`, what is not finite marks an empty part.
    part_heads
        Heads of one rank: rank z gets heads ``[z * part_heads, (z + 1) * part_heads)``; those past H are padding.

    Returns
    -------
    [T, part_heads, D] in the dtype of the partials, merged over the ranks in fp32; 0 for padding.
    """
    tokens, heads, width = out_THD.shape
    if out_THD.stride(2) != 1:
        out_THD = out_THD.contiguous()
    result = torch.empty(tokens, part_heads, width, dtype=out_THD.dtype, device=out_THD.device)
    num_rows, itemsize = tokens * part_heads, out_THD.element_size()
    if not num_rows:
        return result
    columns = triton.next_power_of_2(width)
    row_bytes = _row_bytes(width, itemsize)
    strides = [stride * itemsize for stride in out_THD.stride()[:2]]
    _exchange[(min(num_rows, MAX_PROGRAMS),)](
        out_THD,
        lse_TH,
        result,
        channel.inbox_Z,
        channel.turn_P,
        num_rows,
        heads,
        channel.index,
        *out_THD.stride()[:2],
        *lse_TH.stride(),
        channel.region_bytes,
        Z=channel.size,
        PARTS=min(triton.next_power_of_2(channel.size), max(_TILE // columns, 1)),
        PART_HEADS=part_heads,
        D=width,
        COLUMNS=columns,
        ROW_BYTES=row_bytes,
        LSE_AT=_ceil(width * itemsize, 4) * 4,
        ALIGNMENT=_alignment(out_THD.data_ptr(), *strides, itemsize=itemsize),
        BITS=_BITS[itemsize],
        PROGRAMS=MAX_PROGRAMS,
        num_warps=_NUM_WARPS,
    )
    return result


def all_reduce(channel: Channel, x: Tensor, *, shots: int) -> None:
    """Sum contiguous `x` (bf16, fp16 or fp32) over the ranks, in place: in fp32, in the order of ranks, rounded once.

    Every rank gets the same bits. With ``shots=1`` each rank sends all of `x` to every other one; with 2 it sends each
    its part, and then the sums of its own: twice the way, but fewer bytes from three ranks on.
    """
    kernel = _all_reduce_once if shots == 1 else _all_reduce_twice
    tiles = _ceil(x.numel(), _COLUMNS * (1 if shots == 1 else channel.size))
    if tiles:
        alignment = _alignment(x.data_ptr(), itemsize=x.element_size())
        kernel[(min(tiles, MAX_PROGRAMS),)](x, *_call(channel, x), ALIGNMENT=alignment, **_constants(channel, x))


def all_gather(channel: Channel, out_Z: Tensor, x: Tensor) -> None:
    """``out_Z[z]`` receives rank z's `x`; both contiguous, bf16, fp16 or fp32. Bits are kept, but for those of NaN."""
    tiles = _ceil(x.numel(), _COLUMNS)
    if tiles:
        _all_gather[(min(tiles, MAX_PROGRAMS),)](x, out_Z, *_call(channel, x), **_constants(channel, x))


def _call(channel: Channel, x: Tensor) -> tuple[Tensor, Tensor, int, int, int]:
    return channel.inbox_Z, channel.turn_P, x.numel(), channel.index, channel.region_bytes


def _constants(channel: Channel, x: Tensor) -> dict[str, Any]:
    return {
        "Z": channel.size,
        "PARTS": triton.next_power_of_2(channel.size),
        "COLUMNS": _COLUMNS,
        "BITS": _BITS[x.element_size()],
        "PROGRAMS": MAX_PROGRAMS,
        "num_warps": _NUM_WARPS,
    }


def _row_bytes(width: int, itemsize: int) -> int:
    """Bytes of a row with its lse, which stands at the next multiple of 4 behind the values."""
    return _ceil(_ceil(width * itemsize, 4) * 4 + 4, 16) * 16


def _ceil(value: int, step: int) -> int:
    return -(-value // step)


def _alignment(*byte_offsets: int, itemsize: int) -> int:
    """The largest power of two up to 16 that divides all of them."""
    common = math.gcd(16, *byte_offsets)
    return max(common, itemsize)
