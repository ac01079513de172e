"""Rotary position embedding on a GPU in Triton: the contract of `helix.kernels.rotary.apply_rotary`.

Letters: T tokens, H heads, D head width, R rotated pairs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from helix.kernels.triton_launch import begin, launch_options


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    num_heads,
    token_stride,
    head_stride,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    START: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One head of one token."""
    begin(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    token = row // num_heads
    x_row = x_ptr + token * token_stride + row % num_heads * head_stride
    out_row = out_ptr + row * D
    pair_r = tl.arange(0, R_PAD)
    there_r = pair_r < R
    if INTERLEAVED:
        first_r = START + 2 * pair_r
        second_r = first_r + 1
    else:
        first_r = START + pair_r
        second_r = first_r + R
    cos_r = tl.load(cos_ptr + token * R + pair_r, mask=there_r, other=0.0)
    sin_r = tl.load(sin_ptr + token * R + pair_r, mask=there_r, other=0.0)
    a_r = tl.load(x_row + first_r, mask=there_r, other=0.0).to(tl.float32)
    b_r = tl.load(x_row + second_r, mask=there_r, other=0.0).to(tl.float32)
    tl.store(out_row + first_r, a_r * cos_r - b_r * sin_r, mask=there_r)
    tl.store(out_row + second_r, b_r * cos_r + a_r * sin_r, mask=there_r)
    if D > 2 * R:
        column_d = tl.arange(0, D_PAD)
        still_d = (column_d < D) & ((column_d < START) | (column_d >= START + 2 * R))
        tl.store(out_row + column_d, tl.load(x_row + column_d, mask=still_d), mask=still_d)


def apply_rotary(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor, *, interleaved: bool, start: int = 0) -> Tensor:
    """`helix.kernels.rotary.apply_rotary` on the device; tokens and heads of x may lie apart."""
    tokens, heads, width = x_THD.shape
    out = x_THD.new_empty(x_THD.shape)
    if not x_THD.numel():
        return out
    if x_THD.stride(2) != 1:
        x_THD = x_THD.contiguous()
    pairs = cos_TR.shape[1]
    _rotate[(tokens * heads,)](
        x_THD,
        cos_TR.contiguous(),
        sin_TR.contiguous(),
        out,
        heads,
        *x_THD.stride()[:2],
        D=width,
        D_PAD=triton.next_power_of_2(width),
        R=pairs,
        R_PAD=triton.next_power_of_2(pairs),
        START=start,
        INTERLEAVED=interleaved,
        num_warps=1,
        **launch_options(x_THD.device),
    )
    return out
