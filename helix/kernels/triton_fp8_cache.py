"""Append to an FP8 cache on a GPU in Triton: the contract of `helix.kernels.fp8_cache.append_fp8`, in one launch.

Letters: T tokens, P pages, B page_tokens, K rows of a token (KV heads, or 1 for latents), D and R widths of the values
that are in FP8 and of those behind them that are not.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from helix.kernels.fp8_cache import Fp8Rows


@triton.jit(do_not_specialize=["slot_stride_T"])
def _append(  # type: ignore[no-untyped-def]
    values_ptr,
    scale_ptr,
    tail_ptr,
    x_ptr,
    slot_ptr,
    token_stride,
    row_stride,
    slot_stride_T,
    K: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
):
    """One row of one token; nothing where the slot is another rank's."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1)
    slot = tl.load(slot_ptr + token * slot_stride_T).to(tl.int64)
    if slot < 0:
        return
    x_row = x_ptr + token * token_stride + row * row_stride
    place = slot * K + row
    d = tl.arange(0, D_PAD)
    x_d = tl.load(x_row + d, mask=d < D, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(x_d), 0), 448.0)
    scale = tl.where(scale == 0.0, 1.0, tl.maximum(scale, 1.1754943508222875e-38))
    # The largest of numbers with NaN among them may be a number.
    scale = tl.where(tl.sum((x_d != x_d).to(tl.int32), 0) > 0, float("nan"), scale)
    value_d = tl.minimum(tl.maximum(tl.div_rn(x_d, scale), -448.0), 448.0)
    tl.store(values_ptr + place * D + d, value_d.to(values_ptr.dtype.element_ty), mask=d < D)
    tl.store(scale_ptr + place, scale)
    if R:
        r = tl.arange(0, R_PAD)
        tail_r = tl.load(x_row + D + r, mask=r < R)
        tl.store(tail_ptr + place * R + r, tail_r.to(tail_ptr.dtype.element_ty), mask=r < R)


def append_fp8(pool: Fp8Rows, values_TKX: Tensor, slot_T: Tensor) -> None:
    """`helix.kernels.fp8_cache.append_fp8` on the device; can be captured, never waits for the device.

    The innermost dim of `values_TKX` is contiguous, and so is the pool.
    """
    tokens, rows, _ = values_TKX.shape
    if not tokens:
        return
    width = pool.values_PBKD.shape[3]
    tail = 0 if pool.tail_PBKR is None else pool.tail_PBKR.shape[3]
    _append[(tokens, rows)](
        pool.values_PBKD,
        pool.scale_PBK,
        pool.tail_PBKR,
        values_TKX,
        slot_T,
        *values_TKX.stride()[:2],
        slot_T.stride(0),
        K=rows,
        D=width,
        D_PAD=triton.next_power_of_2(width),
        R=tail,
        R_PAD=triton.next_power_of_2(max(tail, 1)),
        num_warps=1 if width <= 256 else 4,
    )
