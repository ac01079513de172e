"""A new token's heads behind the QKV product: queries and keys normed and rotated, keys and values appended.

Letters: T tokens, H query heads, K KV heads, D head width, P pages, B page_tokens, R rotated pairs.
"""

from __future__ import annotations

from torch import Tensor

from helix import kernels
from helix.kernels.fp8_cache import Fp8Rows


def store_heads(
    heads_THD: Tensor,
    num_heads: int,
    norms: tuple[Tensor, Tensor, float] | None,
    rotary: tuple[Tensor, Tensor],
    k_PBKD: Tensor | Fp8Rows,
    v_PBKD: Tensor | Fp8Rows,
    slot_T: Tensor,
    *,
    interleaved: bool,
) -> Tensor:
    """Rotated queries [T, H, D]; rotated keys and values go to their slots of the contiguous pools.

    `heads_THD` [T, H + 2 K, D] are queries, keys and values, with contiguous rows; `rotary` are cos and sin, contiguous
    fp32 [T, R], for the first ``2 R`` values of a head; a negative slot is not ours. With `norms`, which are weights
    [D] of queries' and of keys' RMSNorm and their epsilon, each head is normed first.
    """
    num_kv = (heads_THD.shape[1] - num_heads) // 2
    q_THD, k_TKD, v_TKD = heads_THD.split((num_heads, num_kv, num_kv), dim=1)
    if norms is not None:
        query_weight, key_weight, eps = norms
        q_THD, k_TKD = kernels.rms_norm(q_THD, query_weight, eps), kernels.rms_norm(k_TKD, key_weight, eps)
    kernels.append(k_PBKD, kernels.apply_rotary(k_TKD, *rotary, interleaved=interleaved), slot_T)
    kernels.append(v_PBKD, v_TKD, slot_T)
    return kernels.apply_rotary(q_THD, *rotary, interleaved=interleaved)
