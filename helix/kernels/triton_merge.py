"""Merge of partial attention results on a GPU in Triton: the contract of `helix.kernels.merge.merge`.

The partials may lie in one tensor, in a packed message, or in the memory of peers that is reached by address; one
kernel reads them all. `fold` is also how the attention kernel's own splits are put together.

Letters: Z partials, T tokens, H heads, h heads of one part, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as tl_cuda

_MAX_COLUMNS = 512


@triton.jit
def fold(peak, total, acc_c, lse_p, value_pc):  # type: ignore[no-untyped-def]
    """Add the parts of ``value_pc`` to a running merge; one whose lse is not finite is empty and adds nothing."""
    filled_p = tl.abs(lse_p) < float("inf")
    lse_p = tl.where(filled_p, lse_p, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(lse_p, 0))
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weight_p = tl.exp(lse_p - base)
    decay = tl.exp(peak - base)
    read_pc = tl.where(filled_p[:, None], value_pc.to(tl.float32), 0.0)
    acc_c = acc_c * decay + tl.sum(read_pc * weight_p[:, None], 0)
    return new_peak, total * decay + tl.sum(weight_p, 0), acc_c


@triton.jit
def final_lse(peak, total):  # type: ignore[no-untyped-def]
    """``peak + log(total)``; -inf where nothing was summed, and 0 for NaN, which would read as an empty part later."""
    lse = tl.where(total == 0.0, float("-inf"), peak + tl.log(total))
    return tl.where(lse != lse, 0.0, lse)


@triton.jit(do_not_specialize=["num_parts"])
def _merge(  # type: ignore[no-untyped-def]
    source_ptr,
    source_lse_ptr,
    out_ptr,
    lse_ptr,
    num_parts,
    num_heads,
    part_stride,
    token_stride,
    head_stride,
    lse_part_stride,
    lse_token_stride,
    lse_head_stride,
    lse_offset,
    out_token_stride,
    out_head_stride,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    ADDRESSES: tl.constexpr,
    LSE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One token and head. ADDRESSES: `source_ptr` points to int64 addresses of the parts, not to the first part."""
    token = tl.program_id(0) // num_heads
    head = tl.program_id(0) % num_heads
    column_c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = token.to(tl.int64) * token_stride + head * head_stride
    lse_row = token.to(tl.int64) * lse_token_stride + head * lse_head_stride
    if DEPENDENT:
        tl_cuda.gdc_wait()
    peak = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    acc_c = tl.zeros((COLUMNS,), tl.float32)
    for base in range(0, num_parts, PARTS):
        part_p = (base + tl.arange(0, PARTS)).to(tl.int64)
        there_p = part_p < num_parts
        if ADDRESSES:
            address_p = tl.load(source_ptr + part_p, mask=there_p, other=0)
            value_p = address_p.to(tl.pointer_type(out_ptr.dtype.element_ty)) + row
            lse_p_ptr = address_p.to(tl.pointer_type(tl.float32)) + lse_offset + lse_row
        else:
            value_p = source_ptr + part_p * part_stride + row
            lse_p_ptr = source_lse_ptr + part_p * lse_part_stride + lse_row
        lse_p = tl.load(lse_p_ptr, mask=there_p, other=float("-inf"))
        value_pc = tl.load(
            value_p[:, None] + column_c[None, :], mask=there_p[:, None] & (column_c < D)[None, :], other=0.0
        )
        peak, total, acc_c = fold(peak, total, acc_c, lse_p, value_pc)
    out_row = out_ptr + token.to(tl.int64) * out_token_stride + head * out_head_stride
    tl.store(out_row + column_c, acc_c / tl.where(total == 0.0, 1.0, total), mask=column_c < D)
    if LSE:
        tl.store(lse_ptr + tl.program_id(0), final_lse(peak, total), mask=tl.program_id(1) == 0)


@triton.jit
def _pack(  # type: ignore[no-untyped-def]
    out_ptr,
    lse_ptr,
    message_ptr,
    num_tokens,
    num_heads,
    out_token_stride,
    out_head_stride,
    lse_token_stride,
    lse_head_stride,
    PART_HEADS: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    LSE_SIZE: tl.constexpr,
):
    """One row of the message: token and head of the part that it goes to; heads that are padding are empty parts."""
    row = tl.program_id(0).to(tl.int64)
    head = row // (num_tokens * PART_HEADS) * PART_HEADS + row % PART_HEADS
    token = row // PART_HEADS % num_tokens
    width = tl.where(head < num_heads, D, 0)
    column_c = tl.arange(0, COLUMNS)
    out_row = out_ptr + token * out_token_stride + head * out_head_stride
    value_c = tl.load(out_row + column_c, mask=column_c < width, other=0.0)
    lse = tl.load(lse_ptr + token * lse_token_stride + head * lse_head_stride, mask=width > 0, other=float("-inf"))
    tl.store(message_ptr + row * WIDTH + column_c, value_c, mask=column_c < D)
    # The lse goes out as bits, in as many elements of the message as it needs: a row need not be aligned to 4 bytes.
    bits = lse.to(tl.int32, bitcast=True)
    if LSE_SIZE == 2:
        half = tl.arange(0, 2)
        element = ((bits >> (16 * half)) & 65535).to(tl.int16).to(message_ptr.dtype.element_ty, bitcast=True)
        tl.store(message_ptr + row * WIDTH + D + half, element)
    else:
        tl.store(message_ptr + row * WIDTH + D, lse)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLayout:
    """How every peer's partials lie behind its address, for the heads that this rank merges.

    out [num_tokens, num_heads, width] of `dtype` with strides in elements, first element at the address; lse (fp32)
    `lse_offset` floats behind the address, with strides in floats.
    """

    num_tokens: int
    num_heads: int
    width: int
    dtype: torch.dtype
    token_stride: int
    head_stride: int
    lse_offset: int
    lse_token_stride: int
    lse_head_stride: int


def merge(out_ZTHD: Tensor, lse_ZTH: Tensor) -> tuple[Tensor, Tensor]:
    """`helix.kernels.merge.merge` on the device. Partials may be views; values of a row are contiguous."""
    num_parts, tokens, heads, width = out_ZTHD.shape
    if out_ZTHD.stride(3) != 1:
        out_ZTHD = out_ZTHD.contiguous()
    out = torch.empty(tokens, heads, width, dtype=out_ZTHD.dtype, device=out_ZTHD.device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=out_ZTHD.device)
    columns = min(triton.next_power_of_2(width), _MAX_COLUMNS)
    _merge[(tokens * heads, triton.cdiv(width, columns))](
        out_ZTHD,
        lse_ZTH,
        out,
        lse,
        num_parts,
        heads,
        *out_ZTHD.stride()[:3],
        *lse_ZTH.stride(),
        0,
        *out.stride()[:2],
        D=width,
        COLUMNS=columns,
        PARTS=_parts_at_once(num_parts, columns),
        ADDRESSES=False,
        LSE=True,
        DEPENDENT=False,
        num_warps=4,
    )
    return out, lse


def merge_peers(address_Z: Tensor, layout: PeerLayout, out_THD: Tensor | None = None) -> Tensor:
    """Merge partials that Z peers hold; reads their memory directly.

    Parameters
    ----------
    address_Z
        int64 [Z] on this device: where each peer's part for this rank begins, as this device addresses it (peers'
        memory over NVLink, rows of a received message, or local buffers).
    layout
        The same for all peers.
    out_THD
        Written to if given; its rows are contiguous.

    Returns
    -------
    [T, H, D] in the dtype of the partials; an lse that is not finite is an empty part, as for `merge`. The caller sees
    to it that the peers have written before this kernel reads, and that they do not write again before it has read.
    """
    if out_THD is None:
        out_THD = torch.empty(
            layout.num_tokens, layout.num_heads, layout.width, dtype=layout.dtype, device=address_Z.device
        )
    columns = min(triton.next_power_of_2(layout.width), _MAX_COLUMNS)
    _merge[(layout.num_tokens * layout.num_heads, triton.cdiv(layout.width, columns))](
        address_Z,
        address_Z,
        out_THD,
        address_Z,
        address_Z.shape[0],
        layout.num_heads,
        0,
        layout.token_stride,
        layout.head_stride,
        0,
        layout.lse_token_stride,
        layout.lse_head_stride,
        layout.lse_offset,
        *out_THD.stride()[:2],
        D=layout.width,
        COLUMNS=columns,
        PARTS=_parts_at_once(address_Z.shape[0], columns),
        ADDRESSES=True,
        LSE=False,
        DEPENDENT=False,
        num_warps=4,
    )
    return out_THD


def pack(out_THD: Tensor, lse_TH: Tensor, num_parts: int, part_heads: int) -> Tensor:
    """The message of the exchange in one kernel: [Z, T, h, D + 4 / itemsize], heads cut by destination.

    Row [z, t, j] is head ``z * h + j`` of token t and the bits of its lse behind it, as `helix.layers.exchange.pack`
    lays them out. Heads past ``H`` are padding: 0 and -inf.
    """
    tokens, heads, width = out_THD.shape
    if out_THD.stride(2) != 1:
        out_THD = out_THD.contiguous()
    row = width + 4 // out_THD.element_size()
    message = torch.empty(num_parts, tokens, part_heads, row, dtype=out_THD.dtype, device=out_THD.device)
    _pack[(num_parts * tokens * part_heads,)](
        out_THD,
        lse_TH,
        message,
        tokens,
        heads,
        *out_THD.stride()[:2],
        *lse_TH.stride(),
        PART_HEADS=part_heads,
        D=width,
        WIDTH=row,
        COLUMNS=triton.next_power_of_2(width),
        LSE_SIZE=4 // out_THD.element_size(),
        num_warps=2,
    )
    return message


def _parts_at_once(num_parts: int, columns: int) -> int:
    """How many parts a program reads together: enough to hide the way to a peer, few enough for its registers."""
    padded: int = triton.next_power_of_2(num_parts)
    return min(padded, max(4096 // columns, 1))
