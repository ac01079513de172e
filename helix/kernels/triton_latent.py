"""Around the cache of MLA latents, on a GPU in Triton: the contracts of `helix.kernels.latent`, one launch each.

Letters: T tokens, G query heads, N width of a head's part without position, R rotated pairs, Q = N + 2 R, L latent
width, W = L + 2 R, P pages, B page_tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from helix.kernels import latent
from helix.kernels.triton_launch import begin_late, launch_options

# Tokens of one matrix instruction, and columns of a latent that a program of `absorb` makes.
_TILE_TOKENS, _COLUMNS = 16, 64
# From here on the products bind, and a library's are the better ones.
_MAX_TOKENS = 256


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
    DEPENDENT: tl.constexpr,
):
    """One token; nothing where the slot is another rank's. Rounds where the layers do."""
    token = tl.program_id(0).to(tl.int64)
    column_l = tl.arange(0, L_PAD)
    there_l = column_l < L
    weight_l = tl.load(weight_ptr + column_l, mask=there_l, other=0.0).to(tl.float32)
    begin_late(DEPENDENT)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if slot < 0:
        return
    row = latent_ptr + token * token_stride
    out = pool_ptr + slot * slot_stride
    x_l = tl.load(row + column_l, mask=there_l, other=0.0)
    wide_l = x_l.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide_l * wide_l, 0) / L + eps)
    normal_l = (wide_l * scale).to(x_l.dtype).to(tl.float32)
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
    """`helix.kernels.latent.store_latents` on the device."""
    if not latent_TW.shape[0]:
        return
    width, pairs = weight_L.shape[0], rotary[0].shape[1]
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
        L=width,
        L_PAD=triton.next_power_of_2(width),
        R=pairs,
        R_PAD=triton.next_power_of_2(pairs),
        INTERLEAVED=interleaved,
        num_warps=2,
        **launch_options(latent_TW.device),
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _absorb(  # type: ignore[no-untyped-def]
    query_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    num_tokens,
    token_stride,
    head_stride,
    G: tl.constexpr,
    N: tl.constexpr,
    N_PAD: tl.constexpr,
    L: tl.constexpr,
    COLUMNS: tl.constexpr,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    TOKENS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """COLUMNS of one head's latents for all tokens; the program behind the last columns rotates instead."""
    head = tl.program_id(1)
    token_t = tl.arange(0, TOKENS)
    column_c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row_n = tl.arange(0, N_PAD)
    weight_nc = tl.load(
        weight_ptr + (head * N + row_n)[:, None].to(tl.int64) * L + column_c[None, :],
        mask=(row_n < N)[:, None] & (column_c < L)[None, :],
        other=0.0,
    )
    begin_late(DEPENDENT)
    pair_r = tl.arange(0, R_PAD)
    for first in range(0, num_tokens, TOKENS):
        at_t = (first + token_t).to(tl.int64)
        live_t = at_t < num_tokens
        query_t = query_ptr + at_t * token_stride + head * head_stride
        out_t = out_ptr + (at_t * G + head) * (L + 2 * R)
        if tl.program_id(0) * COLUMNS < L:
            query_tn = tl.load(
                query_t[:, None] + row_n[None, :], mask=live_t[:, None] & (row_n < N)[None, :], other=0.0
            )
            latent_tc = tl.dot(query_tn, weight_nc, input_precision=PRECISION)
            tl.store(out_t[:, None] + column_c[None, :], latent_tc, mask=live_t[:, None] & (column_c < L)[None, :])
        else:
            there_tr = live_t[:, None] & (pair_r < R)[None, :]
            if INTERLEAVED:
                first_r = 2 * pair_r
                second_r = first_r + 1
            else:
                first_r = pair_r
                second_r = first_r + R
            turn_tr = at_t[:, None] * R + pair_r[None, :]
            cos_tr = tl.load(cos_ptr + turn_tr, mask=there_tr, other=0.0)
            sin_tr = tl.load(sin_ptr + turn_tr, mask=there_tr, other=0.0)
            a_tr = tl.load(query_t[:, None] + N + first_r[None, :], mask=there_tr, other=0.0).to(tl.float32)
            b_tr = tl.load(query_t[:, None] + N + second_r[None, :], mask=there_tr, other=0.0).to(tl.float32)
            tl.store(out_t[:, None] + L + first_r[None, :], a_tr * cos_tr - b_tr * sin_tr, mask=there_tr)
            tl.store(out_t[:, None] + L + second_r[None, :], b_tr * cos_tr + a_tr * sin_tr, mask=there_tr)


def absorb(query_TGQ: Tensor, w_uk_GNL: Tensor, rotary: tuple[Tensor, Tensor], *, interleaved: bool) -> Tensor:
    """`helix.kernels.latent.absorb` on the device, for contiguous W_UK and tables."""
    tokens, heads, _ = query_TGQ.shape
    _, nope, width = w_uk_GNL.shape
    if tokens > _MAX_TOKENS:
        return latent.absorb(query_TGQ, w_uk_GNL, rotary, interleaved=interleaved)
    pairs = rotary[0].shape[1]
    out_TGW = query_TGQ.new_empty(tokens, heads, width + 2 * pairs)
    if not out_TGW.numel():
        return out_TGW
    if query_TGQ.stride(2) != 1:
        query_TGQ = query_TGQ.contiguous()
    _absorb[(triton.cdiv(width, _COLUMNS) + 1, heads)](
        query_TGQ,
        w_uk_GNL,
        *rotary,
        out_TGW,
        tokens,
        *query_TGQ.stride()[:2],
        G=heads,
        N=nope,
        N_PAD=max(triton.next_power_of_2(nope), 16),
        L=width,
        COLUMNS=_COLUMNS,
        R=pairs,
        R_PAD=triton.next_power_of_2(pairs),
        TOKENS=_TILE_TOKENS,
        INTERLEAVED=interleaved,
        PRECISION="ieee" if query_TGQ.dtype == torch.float32 else None,
        num_warps=4,
        **launch_options(query_TGQ.device),
    )
    return out_TGW
