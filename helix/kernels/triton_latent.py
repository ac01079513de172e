"""A new token's latent on its way into the cache, on a GPU in Triton: norm, rotation and append in one launch.

Letters: T tokens, P pages, B page_tokens, L latent width, R rotated pairs, W = L + 2 R.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _store_latent(  # type: ignore[no-untyped-def]
    latent_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    pool_ptr,
    slot_ptr,
    token_stride,
    slot_stride,
    eps,
    L: tl.constexpr,
    L_PAD: tl.constexpr,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """One token; nothing where the slot is another rank's. Rounds where the layers do."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if slot < 0:
        return
    row = latent_ptr + token * token_stride
    out = pool_ptr + slot * slot_stride
    column_l = tl.arange(0, L_PAD)
    there_l = column_l < L
    x_l = tl.load(row + column_l, mask=there_l, other=0.0)
    wide_l = x_l.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide_l * wide_l, 0) / L + eps)
    normal_l = (wide_l * scale).to(x_l.dtype).to(tl.float32)
    weight_l = tl.load(weight_ptr + column_l, mask=there_l, other=0.0).to(tl.float32)
    tl.store(out + column_l, (normal_l * weight_l).to(x_l.dtype).to(pool_ptr.dtype.element_ty), mask=there_l)
    pair_r = tl.arange(0, R_PAD)
    there_r = pair_r < R
    if INTERLEAVED:
        first_r = L + 2 * pair_r
        second_r = first_r + 1
    else:
        first_r = L + pair_r
        second_r = first_r + R
    cos_r = tl.load(cos_ptr + token * R + pair_r, mask=there_r, other=0.0)
    sin_r = tl.load(sin_ptr + token * R + pair_r, mask=there_r, other=0.0)
    a_r = tl.load(row + first_r, mask=there_r, other=0.0).to(tl.float32)
    b_r = tl.load(row + second_r, mask=there_r, other=0.0).to(tl.float32)
    turned_r = (a_r * cos_r - b_r * sin_r).to(x_l.dtype)
    tl.store(out + first_r, turned_r.to(pool_ptr.dtype.element_ty), mask=there_r)
    turned_r = (b_r * cos_r + a_r * sin_r).to(x_l.dtype)
    tl.store(out + second_r, turned_r.to(pool_ptr.dtype.element_ty), mask=there_r)


def store_latents(
    latent_TW: Tensor,
    weight_L: Tensor,
    eps: float,
    rotary: tuple[Tensor, Tensor],
    pool_PB1W: Tensor,
    slot_T: Tensor,
    *,
    interleaved: bool,
) -> None:
    """Norm the first L values of each row, rotate the others, and write the row to its slot of the contiguous pool.

    Rows of `latent_TW` may lie apart; `rotary` are cos and sin, contiguous fp32 [T, R]; a negative slot is not ours.
    """
    if not latent_TW.shape[0]:
        return
    latent, pairs = weight_L.shape[0], rotary[0].shape[1]
    _store_latent[(latent_TW.shape[0],)](
        latent_TW,
        weight_L,
        rotary[0],
        rotary[1],
        pool_PB1W,
        slot_T,
        latent_TW.stride(0),
        pool_PB1W.stride(1),
        eps,
        L=latent,
        L_PAD=triton.next_power_of_2(latent),
        R=pairs,
        R_PAD=triton.next_power_of_2(pairs),
        INTERLEAVED=interleaved,
        num_warps=2,
    )
