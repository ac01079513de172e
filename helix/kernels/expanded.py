"""Latent attention in expanded form: this rank's latents become keys and values per head, a block of pages at a time.

The absorbed form attends over the latents themselves, 2L + R products a head for each query and latent. Here a latent
costs its expansion once, and then only N + R + V products a query: cheaper for a long chunk of one sequence.

Letters: T tokens, S sequences, H query heads, N width of a head's part without position, R width of its rotary part,
Q = N + R, L latent width, V width of values, W = L + R, P pages, B page_tokens, M page rows of the page table.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from helix.kernels import attend, merge
from helix.kernels.fp8_cache import Fp8Rows

# Bound on the keys and values that are expanded at once.
BLOCK_BYTES = 512 << 20


def attend_expanded(
    q_THQ: Tensor,
    pool_PB1W: Tensor | Fp8Rows,
    w_uk_HNL: Tensor,
    w_uv_HVL: Tensor,
    page_table_SM: Tensor,
    query_start_S1: Tensor,
    visible_len_T: Tensor,
    scale: float,
    *,
    block_bytes: int = BLOCK_BYTES,
) -> tuple[Tensor, Tensor]:
    """What `attend` gives on keys ``[w_uk @ latent | rope]`` and values ``w_uv @ latent``, head by head.

    Parameters
    ----------
    q_THQ
        [T, H, N + R] queries, the rotated part last.
    pool_PB1W
        [P, B, 1, L + R] latents, and behind each the rotary key that all heads share.
    w_uk_HNL, w_uv_HVL
        [H, N, L] and [H, V, L] up-projections of keys and values.
    page_table_SM, query_start_S1, visible_len_T, scale
        As for `attend`.
    block_bytes
        Keys and values expanded at once; at least one page is.

    Returns
    -------
    out [T, H, V] in q's dtype, and lse [T, H] in fp32, natural log: that of `attend`.
    """
    num_tokens, num_heads, width = q_THQ.shape
    v_width, page_tokens = w_uv_HVL.shape[1], pool_PB1W.shape[1]
    page_bytes = page_tokens * num_heads * (width + v_width) * q_THQ.element_size()
    block = max(block_bytes // page_bytes, 1)
    # Partial results add up in fp32, so that a long sequence is not rounded once a block.
    out = q_THQ.new_zeros(num_tokens, num_heads, v_width, dtype=torch.float32)
    lse = torch.full((num_tokens, num_heads), -torch.inf, dtype=torch.float32, device=q_THQ.device)
    for sequence, (first, last) in enumerate(pairwise(query_start_S1.tolist())):
        longest = int(visible_len_T[first:last].max()) if last > first else 0
        rows = slice(first, last)
        pages = page_table_SM[sequence, : -(-longest // page_tokens)].long()
        for start in range(0, len(pages), block):
            k_PBHQ, v_PBHV = expand(pool_PB1W[pages[start : start + block]], w_uk_HNL, w_uv_HVL)
            num_pages = len(k_PBHQ)
            part_out, part_lse = attend(
                q_THQ[rows],
                k_PBHQ,
                v_PBHV,
                torch.arange(num_pages, dtype=page_table_SM.dtype, device=pages.device).unsqueeze(0),
                query_start_S1.new_tensor([0, last - first]),
                (visible_len_T[rows] - start * page_tokens).clamp(0, num_pages * page_tokens),
                scale,
            )
            if start == 0:
                out[rows], lse[rows] = part_out, part_lse
                continue
            out[rows], lse[rows] = merge(torch.stack((out[rows], part_out.float())), torch.stack((lse[rows], part_lse)))
    return out.to(q_THQ.dtype), lse


def expand(latent_PB1W: Tensor | Fp8Rows, w_uk_HNL: Tensor, w_uv_HVL: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [P, B, H, N + R] and values [P, B, H, V] of latents [P, B, 1, L + R], in the dtype of the weights.

    Slots are independent: one that holds NaN gives NaN in its own key and value only.
    """
    num_heads, nope, latent_width = w_uk_HNL.shape
    if isinstance(latent_PB1W, Fp8Rows):
        latent_PB1W = latent_PB1W.float()
    latent_PB1W = latent_PB1W.to(w_uk_HNL.dtype)
    latent_PBL = latent_PB1W[:, :, 0, :latent_width]
    rope_PBHR = latent_PB1W[..., latent_width:].expand(-1, -1, num_heads, -1)
    nope_PBHN = (latent_PBL @ w_uk_HNL.flatten(0, 1).T).unflatten(-1, (num_heads, nope))
    v_PBHV = (latent_PBL @ w_uv_HVL.flatten(0, 1).T).unflatten(-1, (num_heads, -1))
    return torch.cat((nope_PBHN, rope_PBHR), -1), v_PBHV
