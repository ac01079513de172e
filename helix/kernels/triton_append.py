"""Append on a GPU in Triton: the contract of `helix.kernels.append.append`, and no wait to learn which rows are ours.

Letters: T tokens, P pages, B page_tokens, K rows of a token (KV heads, or 1 for latents), D width of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from helix.kernels.triton_launch import begin, launch_options

# Bits of one element; data is moved as integers, so that every NaN arrives as it was.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit(do_not_specialize=["slot_stride_T"])
def _append(  # type: ignore[no-untyped-def]
    pool_ptr,
    values_ptr,
    slot_ptr,
    pool_slot_stride,
    pool_row_stride,
    values_token_stride,
    values_row_stride,
    slot_stride_T,
    K: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    begin(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token * slot_stride_T).to(tl.int64)
    if slot < 0:
        return
    d = tl.arange(0, D_PAD)
    for row in range(K):
        value_d = tl.load(values_ptr + token * values_token_stride + row * values_row_stride + d, mask=d < D)
        out = pool_ptr + slot * pool_slot_stride + row * pool_row_stride + d
        tl.store(out, value_d.to(pool_ptr.dtype.element_ty), mask=d < D)


def append(pool_PB: Tensor, values_T: Tensor, slot_T: Tensor) -> None:
    """`helix.kernels.append.append` on the device; can be captured, never waits for the device.

    The innermost dim of both tensors is contiguous, and the pool's pages lie one behind the other.
    """
    if values_T.shape[0] == 0:
        return
    pool_SKD, values_TKD = _as_rows(pool_PB.flatten(0, 1)), _as_rows(values_T)
    if pool_SKD.dtype == values_TKD.dtype:
        bits = _BITS[pool_SKD.element_size()]
        pool_SKD, values_TKD = pool_SKD.view(bits), values_TKD.view(bits)
    num_tokens, rows, width = values_TKD.shape
    _append[(num_tokens,)](
        pool_SKD,
        values_TKD,
        slot_T,
        *pool_SKD.stride()[:2],
        *values_TKD.stride()[:2],
        slot_T.stride(0),
        K=rows,
        D=width,
        D_PAD=triton.next_power_of_2(width),
        num_warps=1 if width <= 256 else 4,
        **launch_options(slot_T.device),
    )


def _as_rows(x: Tensor) -> Tensor:
    """[N, ...] as [N, K, D] without a copy: the dims between the first and the last as one."""
    return x.unsqueeze(1) if x.dim() == 2 else x.flatten(1, -2)
