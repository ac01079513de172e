"""A new token's heads behind the QKV product, on a GPU in Triton: queries and keys rotated, keys and values appended.

Letters: T tokens, H query heads, K KV heads, D head width, P pages, B page_tokens, R rotated pairs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _store_heads(  # type: ignore[no-untyped-def]
    heads_ptr,
    cos_ptr,
    sin_ptr,
    query_ptr,
    k_ptr,
    v_ptr,
    slot_ptr,
    token_stride,
    head_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """One head of one token: a query head, a key head, or a value head."""
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
    a_r = x_r.to(tl.float32)
    b_r = tl.load(row + second_r, mask=there_r, other=0.0).to(tl.float32)
    first = (a_r * cos_r - b_r * sin_r).to(x_r.dtype)
    second = (b_r * cos_r + a_r * sin_r).to(x_r.dtype)
    rest_d = (column_d >= 2 * R) & (column_d < D)
    still_d = tl.load(row + column_d, mask=rest_d)
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


def store_heads(
    heads_THD: Tensor,
    num_heads: int,
    rotary: tuple[Tensor, Tensor],
    k_PBKD: Tensor,
    v_PBKD: Tensor,
    slot_T: Tensor,
    *,
    interleaved: bool,
) -> Tensor:
    """Rotated queries [T, H, D]; rotated keys and values go to their slots of the contiguous pools.

    `heads_THD` [T, H + 2 K, D] are queries, keys and values, with contiguous rows; `rotary` are cos and sin, contiguous
    fp32 [T, R], for the first ``2 R`` values of a head; a negative slot is not ours.
    """
    tokens, heads, width = heads_THD.shape
    query_THD = heads_THD.new_empty(tokens, num_heads, width)
    if not tokens:
        return query_THD
    pairs = rotary[0].shape[1]
    _store_heads[(tokens, heads)](
        heads_THD,
        rotary[0],
        rotary[1],
        query_THD,
        k_PBKD,
        v_PBKD,
        slot_T,
        *heads_THD.stride()[:2],
        H=num_heads,
        K=(heads - num_heads) // 2,
        D=width,
        D_PAD=triton.next_power_of_2(width),
        R=pairs,
        R_PAD=triton.next_power_of_2(pairs),
        INTERLEAVED=interleaved,
        num_warps=1,
    )
    return query_THD
