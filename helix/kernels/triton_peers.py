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

Every thread waits by itself, for what it reads itself. A loop of the whole program may not decide that: Triton lets
several threads load the same element where there are fewer elements than threads, two loads of a place that is being
written give two answers, and a program whose warps disagree about a loop with barriers in it never ends.

No wait is for ever: after `Channel.limit_s` it is given up, `Channel.late` says so to the host and to every wait that
follows, and the results are worth nothing.

Letters: Z ranks, T tokens, H heads, D width, p ranks at once, c columns, j chunks of 16 bytes.
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

# Two on each of the 132 multiprocessors of an H200, where there is room for them beside other kernels.
MAX_PROGRAMS = 256
# What every byte of an inbox is at first.
ABSENT_BYTE = 0xFF
# With these, registers and threads leave room for four programs on a multiprocessor.
_MAX_WARPS, _MAX_REGISTERS = 8, 64
# Values of one rank in a tile; and the most of all ranks in an exchange's, which a program of `_MAX_REGISTERS` holds.
_COLUMNS, _TILE = 512, 2048
_CHUNK_BYTES = 16
_BITS = {2: tl.int16, 4: tl.int32}
# What stands for a nanosecond where there is no clock: a poll takes the interpreter about this long.
_POLL_NS: tl.constexpr = tl.constexpr(200_000)
_INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)

# One thread reads 16 bytes until none of their values is absent. $4 is their address, $5 the sender's number from 1 or
# 0 where nothing is awaited, $6 the address of `late`, $7 the limit in nanoseconds. Time is looked at every 256 polls,
# and `late` from the first millisecond on. {absent} sets bits of w where a value is absent.
_WAIT = """{{
.reg .pred done, again;
.reg .b32 polls, w, x;
.reg .b64 start, now;
mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
mov.b32 polls, 0;
mov.b64 start, 0;
setp.eq.s32 done, $5, 0;
@done bra ENOUGH;
POLL:
ld.relaxed.sys.global.v4.b32 {{$0, $1, $2, $3}}, [$4];
{absent}
setp.eq.s32 done, w, 0;
@done bra ENOUGH;
add.u32 polls, polls, 1;
setp.eq.u32 again, polls, 1;
@again mov.u64 start, %globaltimer;
and.b32 x, polls, 255;
setp.ne.u32 again, x, 0;
@again bra POLL;
mov.u64 now, %globaltimer;
sub.u64 now, now, start;
setp.lt.u64 again, now, 1000000;
@again bra POLL;
ld.relaxed.sys.global.b32 x, [$6];
setp.ne.s32 done, x, 0;
@done bra ENOUGH;
setp.lt.u64 again, now, $7;
@again bra POLL;
st.relaxed.sys.global.b32 [$6], $5;
ENOUGH:
}}"""
_ABSENT_WORDS = "mov.b32 w, 0;\n" + "".join(
    f"setp.eq.s32 again, ${word}, -1;\n@again mov.b32 w, 1;\n" for word in range(4)
)
# The usual search for a zero, in the halves of the word's complement.
_ABSENT_HALVES = "mov.b32 w, 0;\n" + "".join(
    f"sub.u32 x, 0xFFFEFFFE, ${word};\nand.b32 x, x, ${word};\nand.b32 x, x, 0x80008000;\nor.b32 w, w, x;\n"
    for word in range(4)
)
_WAIT_WORDS: tl.constexpr = tl.constexpr(_WAIT.format(absent=_ABSENT_WORDS))
_WAIT_HALVES: tl.constexpr = tl.constexpr(_WAIT.format(absent=_ABSENT_HALVES))


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
def _whole(count, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """`count` values, and the rest of their last chunk: whole chunks are sent and awaited."""
    per_chunk: tl.constexpr = 4 if tl.int32 == BITS else 8
    return tl.maximum((count + per_chunk - 1) // per_chunk * per_chunk, 0)


@triton.jit
def _store(place_p, bits_pc, count_p, COLUMNS: tl.constexpr, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store the first `count_p` of `bits_pc` at `place_p`."""
    column_c = tl.arange(0, COLUMNS)
    target_p = tl.multiple_of(place_p.to(tl.pointer_type(BITS)), 16)
    tl.store(target_p[:, None] + column_c[None, :], bits_pc, mask=column_c[None, :] < count_p[:, None])


@triton.jit
def _arrived(place_p, count_p, sender_p, late_ptr, limit_ns, COLUMNS: tl.constexpr, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bits [p, COLUMNS] of the first `count_p` values (whole chunks) at `place_p`, once none of them is absent."""
    if _INTERPRETED:
        column_c = tl.arange(0, COLUMNS)
        pointer_pc = place_p.to(tl.pointer_type(BITS))[:, None] + column_c[None, :]
        awaited_pc = column_c[None, :] < count_p[:, None]
        bits_pc = tl.load(pointer_pc, mask=awaited_pc, other=0)
        missing_p = tl.max(((bits_pc == -1) & awaited_pc).to(tl.int32), 1)
        polls = tl.where(tl.load(late_ptr) != 0, limit_ns // _POLL_NS, 0)
        while (tl.max(missing_p, 0) != 0) & (polls < limit_ns // _POLL_NS):
            bits_pc = tl.load(pointer_pc, mask=awaited_pc, other=0)
            missing_p = tl.max(((bits_pc == -1) & awaited_pc).to(tl.int32), 1)
            polls += 1
        if tl.max(missing_p, 0) != 0:
            tl.store(late_ptr, tl.max(missing_p * (sender_p + 1), 0))
    else:
        per_chunk: tl.constexpr = 4 if tl.int32 == BITS else 8
        wait: tl.constexpr = _WAIT_WORDS if tl.int32 == BITS else _WAIT_HALVES
        chunk_j = tl.arange(0, COLUMNS // per_chunk)
        awaited_pj = chunk_j[None, :] * per_chunk < count_p[:, None]
        word0_pj, word1_pj, word2_pj, word3_pj = tl.inline_asm_elementwise(
            wait,
            "=&r,=&r,=&r,=&r,l,r,l,l",
            [
                place_p[:, None] + chunk_j[None, :] * 16,
                tl.where(awaited_pj, sender_p[:, None] + 1, 0),
                late_ptr.to(tl.int64),
                limit_ns.to(tl.int64),
            ],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
        even_pc = tl.interleave(word0_pj, word2_pj)
        odd_pc = tl.interleave(word1_pj, word3_pj)
        bits_pc = tl.interleave(even_pc, odd_pc)
        if tl.int32 != BITS:
            bits_pc = tl.interleave(bits_pc.to(tl.int16), (bits_pc >> 16).to(tl.int16))
    return bits_pc


@triton.jit
def _forget(place_p, count_p, COLUMNS: tl.constexpr, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Make the first `count_p` values at `place_p` absent; all threads have read them."""
    bits_c = tl.full((COLUMNS,), -1, BITS)
    _store(place_p, tl.broadcast_to(bits_c[None, :], (place_p.shape[0], COLUMNS)), count_p, COLUMNS, BITS)


@triton.jit
def _take(place_p, count_p, sender_p, late_ptr, limit_ns, COLUMNS: tl.constexpr, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """As `_arrived`; the places are absent again."""
    bits_pc = _arrived(place_p, count_p, sender_p, late_ptr, limit_ns, COLUMNS, BITS)
    tl.debug_barrier()
    _forget(place_p, count_p, COLUMNS, BITS)
    return bits_pc


@triton.jit(do_not_specialize=["num_rows", "num_heads", "index", "limit_ns", "first_sender"])
def _exchange(  # type: ignore[no-untyped-def]
    out_ptr,
    lse_ptr,
    result_ptr,
    inbox_ptr,
    turn_ptr,
    late_ptr,
    limit_ns,
    first_sender,
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
    ALIGNMENT: tl.constexpr,
    BITS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Rows (a token and one of the receiver's heads) of a program: all are sent, then each is merged as it arrives.

    A row is its values in whole chunks, and a last chunk whose first word is the lse.
    """
    program = tl.program_id(0)
    step = tl.num_programs(0)
    turn = tl.load(turn_ptr + program)
    zero = tl.zeros((), tl.int64)
    column_c = tl.arange(0, COLUMNS)
    inside_c = column_c < D
    first_c = tl.arange(0, 4) == 0
    for base in range(0, Z, PARTS):
        part_p = base + tl.arange(0, PARTS)
        real_p = part_p < Z
        inbox_p = tl.load(inbox_ptr + part_p, mask=real_p, other=0)
        region_p = _regions(inbox_p, turn, index, program, region_bytes, Z, PROGRAMS)
        for row in range(program, num_rows, step):
            token = zero + row // PART_HEADS
            head_p = part_p * PART_HEADS + row % PART_HEADS
            there_p = real_p & (head_p < num_heads)
            source_p = tl.multiple_of(out_ptr + token * token_stride + head_p * head_stride, ALIGNMENT)
            source_pc = source_p[:, None] + column_c[None, :]
            value_pc = tl.load(source_pc, mask=there_p[:, None] & inside_c[None, :], other=0.0)
            lse_p = tl.load(
                lse_ptr + token * lse_token_stride + head_p * lse_head_stride, mask=there_p, other=-float("inf")
            )
            place_p = region_p + row // step * ROW_BYTES
            _store(place_p, _sendable(value_pc, BITS), tl.where(real_p, _whole(D, BITS), 0), COLUMNS, BITS)
            lse_bits_pc = tl.where(first_c[None, :], _sendable(lse_p, tl.int32)[:, None], 0)
            _store(place_p + (ROW_BYTES - 16), lse_bits_pc, tl.where(real_p, 4, 0), 4, tl.int32)
    mine = tl.load(inbox_ptr + index)
    for row in range(program, num_rows, step):
        peak = tl.full((), float("-inf"), tl.float32)
        total = tl.zeros((), tl.float32)
        acc_c = tl.zeros((COLUMNS,), tl.float32)
        for base in range(0, Z, PARTS):
            part_p = base + tl.arange(0, PARTS)
            real_p = part_p < Z
            sender_p = first_sender + part_p
            place_p = _regions(mine, turn, part_p, program, region_bytes, Z, PROGRAMS) + row // step * ROW_BYTES
            count_p = tl.where(real_p, _whole(D, BITS), 0)
            lse_place_p = place_p + (ROW_BYTES - 16)
            lse_count_p = tl.where(real_p, 4, 0)
            bits_pc = _arrived(place_p, count_p, sender_p, late_ptr, limit_ns, COLUMNS, BITS)
            lse_bits_pc = _arrived(lse_place_p, lse_count_p, sender_p, late_ptr, limit_ns, 4, tl.int32)
            tl.debug_barrier()
            _forget(place_p, count_p, COLUMNS, BITS)
            _forget(lse_place_p, lse_count_p, 4, tl.int32)
            lse_bits_p = tl.sum(tl.where(first_c[None, :], lse_bits_pc, 0), 1)
            lse_p = tl.where(real_p, lse_bits_p.to(tl.float32, bitcast=True), float("-inf"))
            value_pc = bits_pc.to(out_ptr.dtype.element_ty, bitcast=True)
            peak, total, acc_c = fold(peak, total, acc_c, lse_p, value_pc)
        merged_c = acc_c / tl.where(total == 0.0, 1.0, total)
        tl.store(result_ptr + (zero + row) * D + column_c, merged_c, mask=inside_c)
    tl.store(turn_ptr + program, turn ^ 1)


@triton.jit(do_not_specialize=["index", "limit_ns", "first_sender"])
def _all_reduce_once(  # type: ignore[no-untyped-def]
    x_ptr,
    inbox_ptr,
    turn_ptr,
    late_ptr,
    limit_ns,
    first_sender,
    num_values,
    index,
    region_bytes,
    Z: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BITS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """One shot: every rank sends all its values to every rank, and sums all parts itself, in the order of ranks."""
    program = tl.program_id(0)
    step = tl.num_programs(0)
    turn = tl.load(turn_ptr + program)
    part_p = tl.arange(0, PARTS)
    column_c = tl.arange(0, COLUMNS)
    real_p = part_p < Z
    sender_p = first_sender + part_p
    tile_bytes: tl.constexpr = COLUMNS * (4 if tl.int32 == BITS else 2)
    num_tiles = tl.cdiv(num_values, COLUMNS)
    inbox_p = tl.load(inbox_ptr + part_p, mask=real_p, other=0)
    region_p = _regions(inbox_p, turn, index, program, region_bytes, Z, PROGRAMS)
    for tile in range(program, num_tiles, step):
        value_c = tile * COLUMNS + column_c
        bits_c = _sendable(tl.load(x_ptr + value_c, mask=value_c < num_values, other=0.0), BITS)
        bits_pc = tl.broadcast_to(bits_c[None, :], (PARTS, COLUMNS))
        count_p = tl.where(real_p, _whole(num_values - tile * COLUMNS, BITS), 0)
        _store(region_p + tile // step * tile_bytes, bits_pc, count_p, COLUMNS, BITS)
    region_p = _regions(tl.load(inbox_ptr + index), turn, part_p, program, region_bytes, Z, PROGRAMS)
    for tile in range(program, num_tiles, step):
        value_c = tile * COLUMNS + column_c
        count_p = tl.where(real_p, _whole(num_values - tile * COLUMNS, BITS), 0)
        bits_pc = _take(region_p + tile // step * tile_bytes, count_p, sender_p, late_ptr, limit_ns, COLUMNS, BITS)
        sum_c = tl.sum(bits_pc.to(x_ptr.dtype.element_ty, bitcast=True).to(tl.float32), 0)
        tl.store(x_ptr + value_c, sum_c, mask=value_c < num_values)
    tl.store(turn_ptr + program, turn ^ 1)


@triton.jit(do_not_specialize=["index", "limit_ns", "first_sender"])
def _all_reduce_twice(  # type: ignore[no-untyped-def]
    x_ptr,
    inbox_ptr,
    turn_ptr,
    late_ptr,
    limit_ns,
    first_sender,
    num_values,
    index,
    region_bytes,
    Z: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BITS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Two shots: of each tile of Z x COLUMNS values rank z sums the z-th run and sends the sums to every rank.

    The second half of a region is for the sums.
    """
    program = tl.program_id(0)
    step = tl.num_programs(0)
    turn = tl.load(turn_ptr + program)
    part_p = tl.arange(0, PARTS)
    column_c = tl.arange(0, COLUMNS)
    real_p = part_p < Z
    sender_p = first_sender + part_p
    run_bytes: tl.constexpr = COLUMNS * (4 if tl.int32 == BITS else 2)
    num_tiles = tl.cdiv(num_values, Z * COLUMNS)
    inbox_p = tl.load(inbox_ptr + part_p, mask=real_p, other=0)
    to_p = _regions(inbox_p, turn, index, program, region_bytes, Z, PROGRAMS)
    from_p = _regions(tl.load(inbox_ptr + index), turn, part_p, program, region_bytes, Z, PROGRAMS)
    for tile in range(program, num_tiles, step):
        first_p = (tile * Z + part_p) * COLUMNS
        value_pc = first_p[:, None] + column_c[None, :]
        mask_pc = real_p[:, None] & (value_pc < num_values)
        bits_pc = _sendable(tl.load(x_ptr + value_pc, mask=mask_pc, other=0.0), BITS)
        count_p = tl.where(real_p, _whole(num_values - first_p, BITS), 0)
        _store(to_p + tile // step * run_bytes, bits_pc, count_p, COLUMNS, BITS)
    for tile in range(program, num_tiles, step):
        count_p = tl.where(real_p, _whole(num_values - (tile * Z + index) * COLUMNS, BITS), 0)
        bits_pc = _take(from_p + tile // step * run_bytes, count_p, sender_p, late_ptr, limit_ns, COLUMNS, BITS)
        sum_c = tl.sum(bits_pc.to(x_ptr.dtype.element_ty, bitcast=True).to(tl.float32), 0).to(x_ptr.dtype.element_ty)
        sum_pc = tl.broadcast_to(_sendable(sum_c, BITS)[None, :], (PARTS, COLUMNS))
        _store(to_p + region_bytes // 2 + tile // step * run_bytes, sum_pc, count_p, COLUMNS, BITS)
    for tile in range(program, num_tiles, step):
        first_p = (tile * Z + part_p) * COLUMNS
        value_pc = first_p[:, None] + column_c[None, :]
        mask_pc = real_p[:, None] & (value_pc < num_values)
        count_p = tl.where(real_p, _whole(num_values - first_p, BITS), 0)
        place_p = from_p + region_bytes // 2 + tile // step * run_bytes
        bits_pc = _take(place_p, count_p, sender_p, late_ptr, limit_ns, COLUMNS, BITS)
        tl.store(x_ptr + value_pc, bits_pc.to(x_ptr.dtype.element_ty, bitcast=True), mask=mask_pc)
    tl.store(turn_ptr + program, turn ^ 1)


@triton.jit(do_not_specialize=["index", "limit_ns", "first_sender"])
def _all_gather(  # type: ignore[no-untyped-def]
    x_ptr,
    out_ptr,
    inbox_ptr,
    turn_ptr,
    late_ptr,
    limit_ns,
    first_sender,
    num_values,
    index,
    region_bytes,
    Z: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BITS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Every rank sends all its values to every rank; part z of the output is what came from rank z."""
    program = tl.program_id(0)
    step = tl.num_programs(0)
    turn = tl.load(turn_ptr + program)
    part_p = tl.arange(0, PARTS)
    column_c = tl.arange(0, COLUMNS)
    real_p = part_p < Z
    sender_p = first_sender + part_p
    tile_bytes: tl.constexpr = COLUMNS * (4 if tl.int32 == BITS else 2)
    num_tiles = tl.cdiv(num_values, COLUMNS)
    inbox_p = tl.load(inbox_ptr + part_p, mask=real_p, other=0)
    region_p = _regions(inbox_p, turn, index, program, region_bytes, Z, PROGRAMS)
    for tile in range(program, num_tiles, step):
        value_c = tile * COLUMNS + column_c
        bits_c = _sendable(tl.load(x_ptr + value_c, mask=value_c < num_values, other=0.0), BITS)
        bits_pc = tl.broadcast_to(bits_c[None, :], (PARTS, COLUMNS))
        count_p = tl.where(real_p, _whole(num_values - tile * COLUMNS, BITS), 0)
        _store(region_p + tile // step * tile_bytes, bits_pc, count_p, COLUMNS, BITS)
    region_p = _regions(tl.load(inbox_ptr + index), turn, part_p, program, region_bytes, Z, PROGRAMS)
    for tile in range(program, num_tiles, step):
        value_c = tile * COLUMNS + column_c
        count_p = tl.where(real_p, _whole(num_values - tile * COLUMNS, BITS), 0)
        bits_pc = _take(region_p + tile // step * tile_bytes, count_p, sender_p, late_ptr, limit_ns, COLUMNS, BITS)
        to_pc = out_ptr + part_p.to(tl.int64)[:, None] * num_values + value_c[None, :]
        mask_pc = real_p[:, None] & (value_c < num_values)[None, :]
        tl.store(to_pc, bits_pc.to(x_ptr.dtype.element_ty, bitcast=True), mask=mask_pc)
    tl.store(turn_ptr + program, turn ^ 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """What the calls of one stream share; see the module's text.

    `inbox_Z` int64 [Z]: address of each rank's inbox as this device sees it, `index` this rank's place among them;
    `turn_P` int32 [MAX_PROGRAMS], 0 at first; every byte of an inbox `ABSENT_BYTE` at first. `region_bytes` is a
    multiple of 16. `late` int32 [1], 0 at first, in memory that the host reads and writes too: once values did not come
    within `limit_s`, 1 + `first_sender` + the place of the rank that should have sent them. Where it is not 0, no wait
    takes longer than a millisecond. Channels may share it.
    """

    inbox_Z: Tensor
    turn_P: Tensor
    late: Tensor
    limit_s: float
    first_sender: int
    index: int
    region_bytes: int

    @property
    def size(self) -> int:
        """Ranks."""
        return self.inbox_Z.shape[0]

    @property
    def limit_ns(self) -> int:
        return int(1e9 * self.limit_s)


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
    columns = max(triton.next_power_of_2(width), _CHUNK_BYTES // itemsize)
    parts = min(triton.next_power_of_2(channel.size), max(_TILE // columns, 1))
    strides = [stride * itemsize for stride in out_THD.stride()[:2]]
    _exchange[(min(num_rows, MAX_PROGRAMS),)](
        out_THD,
        lse_TH,
        result,
        channel.inbox_Z,
        channel.turn_P,
        channel.late,
        channel.limit_ns,
        channel.first_sender,
        num_rows,
        heads,
        channel.index,
        *out_THD.stride()[:2],
        *lse_TH.stride(),
        channel.region_bytes,
        Z=channel.size,
        PARTS=parts,
        PART_HEADS=part_heads,
        D=width,
        COLUMNS=columns,
        ROW_BYTES=_row_bytes(width, itemsize),
        ALIGNMENT=_alignment(out_THD.data_ptr(), *strides, itemsize=itemsize),
        BITS=_BITS[itemsize],
        PROGRAMS=MAX_PROGRAMS,
        num_warps=_num_warps(parts * columns * itemsize),
        maxnreg=_MAX_REGISTERS,
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
        kernel[(min(tiles, MAX_PROGRAMS),)](x, *_call(channel, x), **_constants(channel, x))


def all_gather(channel: Channel, out_Z: Tensor, x: Tensor) -> None:
    """``out_Z[z]`` receives rank z's `x`; both contiguous, bf16, fp16 or fp32. Bits are kept, but for those of NaN."""
    tiles = _ceil(x.numel(), _COLUMNS)
    if tiles:
        _all_gather[(min(tiles, MAX_PROGRAMS),)](x, out_Z, *_call(channel, x), **_constants(channel, x))


def _call(channel: Channel, x: Tensor) -> tuple[Tensor | int, ...]:
    shared = (channel.inbox_Z, channel.turn_P, channel.late, channel.limit_ns, channel.first_sender)
    return *shared, x.numel(), channel.index, channel.region_bytes


def _constants(channel: Channel, x: Tensor) -> dict[str, Any]:
    parts = triton.next_power_of_2(channel.size)
    return {
        "Z": channel.size,
        "PARTS": parts,
        "COLUMNS": _COLUMNS,
        "BITS": _BITS[x.element_size()],
        "PROGRAMS": MAX_PROGRAMS,
        "num_warps": _num_warps(parts * _COLUMNS * x.element_size()),
        "maxnreg": _MAX_REGISTERS,
    }


def _num_warps(tile_bytes: int) -> int:
    """So many that a thread waits for one chunk of a tile, up to `_MAX_WARPS`."""
    return min(max(tile_bytes // _CHUNK_BYTES // 32, 1), _MAX_WARPS)


def _row_bytes(width: int, itemsize: int) -> int:
    """Bytes of a row: its values in whole chunks, and a chunk for its lse."""
    return (_ceil(width * itemsize, _CHUNK_BYTES) + 1) * _CHUNK_BYTES


def _ceil(value: int, step: int) -> int:
    return -(-value // step)


def _alignment(*byte_offsets: int, itemsize: int) -> int:
    """The largest power of two up to 16 that divides all of them."""
    common = math.gcd(16, *byte_offsets)
    return max(common, itemsize)
