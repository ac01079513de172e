"""Operations on paged KV and partial attention results: one file per operation, each with a plain PyTorch twin.

Shape letters: T tokens of the step, S sequences, H query heads, K KV heads, D head width, P pages of the pool,
B page_tokens, R page rows of one sequence, Z partials to merge (the KVP ranks).
"""

from __future__ import annotations

from torch import Tensor

from helix.kernels import append as append_twin
from helix.kernels import attention as attention_twin
from helix.kernels import merge as merge_twin

__all__ = ["append", "attend", "merge"]


def append(pool_PB: Tensor, values_T: Tensor, slot_T: Tensor) -> None:
    """`helix.kernels.append.append`, on a GPU by the Triton kernel."""
    if pool_PB.is_cuda:
        from helix.kernels import triton_append

        triton_append.append(pool_PB, values_T, slot_T)
    else:
        append_twin.append(pool_PB, values_T, slot_T)


def attend(
    q_THD: Tensor,
    k_PBKD: Tensor,
    v_PBKV: Tensor,
    page_table_SR: Tensor,
    query_start_S1: Tensor,
    visible_len_T: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """`helix.kernels.attention.attend`, on a GPU by the Triton kernel."""
    arguments = (q_THD, k_PBKD, v_PBKV, page_table_SR, query_start_S1, visible_len_T, scale)
    if q_THD.is_cuda:
        from helix.kernels import triton_attention

        return triton_attention.attend(*arguments)
    return attention_twin.attend(*arguments)


def merge(out_ZTHD: Tensor, lse_ZTH: Tensor) -> tuple[Tensor, Tensor]:
    """`helix.kernels.merge.merge`, on a GPU by the Triton kernel."""
    if out_ZTHD.is_cuda:
        from helix.kernels import triton_merge

        return triton_merge.merge(out_ZTHD, lse_ZTH)
    return merge_twin.merge(out_ZTHD, lse_ZTH)
