"""Paged attention over this rank's part of the sequences, with the log-sum-exp that the exchange needs.

One call serves decode, chunked prefill and multi-token verification: local slots are ordered by global position, so
causality is one integer per query token, the number of local slots it sees.

Letters: T tokens, S sequences, H query heads, K KV heads, G = H / K, D and V widths of keys and values, P pages,
B page_tokens, R rows of the page table, L local slots of one sequence.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from helix.kernels.fp8_cache import Fp8Rows

# Upper bound on the fp32 scores held at once; long prefill chunks are cut into blocks of query tokens.
_SCORE_BYTES = 64 << 20


def attend(
    q_THD: Tensor,
    k_PBKD: Tensor | Fp8Rows,
    v_PBKV: Tensor | Fp8Rows,
    page_table_SR: Tensor,
    query_start_S1: Tensor,
    visible_len_T: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of each query token over the first `visible_len` local slots of its sequence.

    Parameters
    ----------
    q_THD
        [T, H, D] queries; H is a multiple of K, head h reads KV head ``h // (H // K)``.
    k_PBKD, v_PBKV
        [P, B, K, D] and [P, B, K, V] page pools, both plain or both FP8. Slots that no query sees may hold anything,
        NaN included.
    page_table_SR
        int [S, R] pages of each sequence in order; entries past the visible length are not read.
    query_start_S1
        int [S + 1], tokens ``query_start[s]:query_start[s + 1]`` belong to sequence s.
    visible_len_T
        int [T], not decreasing inside a sequence. 0 gives out = 0 and lse = -inf.
    scale
        Factor on q.k before the softmax.

    Returns
    -------
    out [T, H, V] in q's dtype, and lse [T, H] in fp32, natural log. A NaN among what a query sees comes out as NaN in
    `out` beside a finite lse: a NaN lse would read as an empty part in the merge and hide it.
    """
    num_tokens, num_heads, _ = q_THD.shape
    page_tokens = k_PBKD.shape[1]
    out = q_THD.new_zeros(num_tokens, num_heads, v_PBKV.shape[3])
    lse = torch.full((num_tokens, num_heads), -torch.inf, dtype=torch.float32, device=q_THD.device)
    starts = query_start_S1.tolist()
    for sequence, (first, last) in enumerate(pairwise(starts)):
        longest = int(visible_len_T[first:last].max()) if last > first else 0
        if longest == 0:
            continue
        pages = page_table_SR[sequence, : -(-longest // page_tokens)].long()
        k_LKD = k_PBKD[pages].float().flatten(0, 1)[:longest]
        v_LKV = v_PBKV[pages].float().flatten(0, 1)[:longest]
        block = max(_SCORE_BYTES // (4 * num_heads * longest), 1)
        for start in range(first, last, block):
            part = slice(start, min(start + block, last))
            out[part], lse[part] = _attend_block(q_THD[part], k_LKD, v_LKV, visible_len_T[part], scale)
    return out, lse


def _attend_block(
    q_THD: Tensor, k_LKD: Tensor, v_LKV: Tensor, visible_T: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    tokens, heads, width = q_THD.shape
    local, kv_heads, v_width = v_LKV.shape
    group = heads // kv_heads
    q_TKGD = q_THD.float().view(tokens, kv_heads, group, width)
    q_KMD = q_TKGD.permute(1, 0, 2, 3).reshape(kv_heads, tokens * group, width)
    score_KMGL = torch.matmul(q_KMD, k_LKD.permute(1, 2, 0)).mul_(scale).view(kv_heads, tokens, group, local)
    hidden_TL = torch.arange(local, device=q_THD.device) >= visible_T.unsqueeze(1)
    score_KMGL.masked_fill_(hidden_TL.view(1, tokens, 1, local), -torch.inf)
    lse_KMG = torch.logsumexp(score_KMGL, -1)
    empty_KMG = lse_KMG == -torch.inf
    weight_KMGL = torch.exp(score_KMGL - lse_KMG.masked_fill(empty_KMG, 0.0).unsqueeze(-1))
    out_KMV = torch.matmul(weight_KMGL.view(kv_heads, tokens * group, local), v_LKV.permute(1, 0, 2))
    out_THV = out_KMV.view(kv_heads, tokens, group, v_width).permute(1, 0, 2, 3).reshape(tokens, heads, v_width)
    lse_TH = lse_KMG.nan_to_num(nan=0.0, neginf=-torch.inf).permute(1, 0, 2).reshape(tokens, heads)
    return out_THV.to(q_THD.dtype), lse_TH
