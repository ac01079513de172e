"""A new token's heads behind the QKV product, on a GPU in Triton: the contract of `helix.kernels.heads`, one launch.

Letters: T tokens, H query heads, K KV heads, D head width, P pages, B page_tokens, R rotated pairs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from helix.kernels.triton_launch import begin, launch_options


@triton.jit
def _store_heads(  # type: ignore[no-untyped-def]
    heads_ptr,
    cos_ptr,
    sin_ptr,
    query_weight_ptr,
    key_weight_ptr,
    query_ptr,
    k_ptr,
    v_ptr,
    slot_ptr,
    token_stride,
    head_stride,
    eps,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    NORM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One head of one token: a query head, a key head, or a value head. Rounds where the layers do."""
    begin(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = heads_ptr + token * token_stride + head * head_stride
    slot = tl.load(slot_ptr + token).to(tl.int64)
    column_d = tl.arange(0, D_PAD)
    if head >= H + K:
        if slot >= 0:
            v_d = tl.load(row + column_d, mask=column_d < D)
            out = v_ptr + (slot * K + head - H - K) * D
            tl.store(out + column_d, v_d.to(v_ptr.dtype.element_ty), mask=column_d < D)
        return
    if (head >= H) & (slot < 0):
        return
    pair_r = tl.arange(0, R_PAD)
    there_r = pair_r < R
    if INTERLEAVED:
        first_r = 2 * pair_r
        second_r = first_r + 1
    else:
        first_r = pair_r
        second_r = first_r + R
    cos_r = tl.load(cos_ptr + token * R + pair_r, mask=there_r, other=0.0)
    sin_r = tl.load(sin_ptr + token * R + pair_r, mask=there_r, other=0.0)
    x_r = tl.load(row + first_r, mask=there_r, other=0.0)
    y_r = tl.load(row + second_r, mask=there_r, other=0.0)
    rest_d = (column_d >= 2 * R) & (column_d < D)
    still_d = tl.load(row + column_d, mask=rest_d, other=0.0)
    if NORM:
        x_d = tl.load(row + column_d, mask=column_d < D, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x_d * x_d, 0) / D + eps)
        weight_ptr = query_weight_ptr if head < H else key_weight_ptr
        x_r = _scaled(x_r, scale, tl.load(weight_ptr + first_r, mask=there_r, other=0.0))
        y_r = _scaled(y_r, scale, tl.load(weight_ptr + second_r, mask=there_r, other=0.0))
        still_d = _scaled(still_d, scale, tl.load(weight_ptr + column_d, mask=rest_d, other=0.0))
    a_r = x_r.to(tl.float32)
    b_r = y_r.to(tl.float32)
    first = (a_r * cos_r - b_r * sin_r).to(x_r.dtype)
    second = (b_r * cos_r + a_r * sin_r).to(x_r.dtype)
    if head < H:
        out = query_ptr + (token * H + head) * D
        tl.store(out + first_r, first, mask=there_r)
        tl.store(out + second_r, second, mask=there_r)
        tl.store(out + column_d, still_d, mask=rest_d)
    else:
        key = k_ptr + (slot * K + head - H) * D
        tl.store(key + first_r, first.to(k_ptr.dtype.element_ty), mask=there_r)
        tl.store(key + second_r, second.to(k_ptr.dtype.element_ty), mask=there_r)
        tl.store(key + column_d, still_d.to(k_ptr.dtype.element_ty), mask=rest_d)


@triton.jit
def _scaled(x, scale, weight):  # type: ignore[no-untyped-def]
    normal = (x.to(tl.float32) * scale).to(x.dtype)
    return (normal.to(tl.float32) * weight.to(tl.float32)).to(x.dtype)


def store_heads(
    heads_THD: Tensor,
    num_heads: int,
    norms: tuple[Tensor, Tensor, float] | None,
    rotary: tuple[Tensor, Tensor],
    k_PBKD: Tensor,
    v_PBKD: Tensor,
    slot_T: Tensor,
    *,
    interleaved: bool,
) -> Tensor:
    """`helix.kernels.heads.store_heads` on the device."""
    tokens, heads, width = heads_THD.shape
    query_THD = heads_THD.new_empty(tokens, num_heads, width)
    if not tokens:
        return query_THD
    pairs = rotary[0].shape[1]
    query_weight, key_weight, eps = norms or (heads_THD, heads_THD, 0.0)
    _store_heads[(tokens, heads)](
        heads_THD,
        *rotary,
        query_weight,
        key_weight,
        query_THD,
        k_PBKD,
        v_PBKD,
        slot_T,
        *heads_THD.stride()[:2],
        eps,
        H=num_heads,
        K=(heads - num_heads) // 2,
        D=width,
        D_PAD=triton.next_power_of_2(width),
        R=pairs,
        R_PAD=triton.next_power_of_2(pairs),
        NORM=norms is not None,
        INTERLEAVED=interleaved,
        num_warps=1,
        **launch_options(heads_THD.device),
    )
    return query_THD
