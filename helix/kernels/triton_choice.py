"""The best token of each row of logits on a GPU in Triton: the contract of `helix.kernels.choice`, in two launches.

Letters: R rows, V vocabulary, P parts that it is searched in.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from helix.kernels.triton_launch import begin, launch_options

_COLUMNS = 2048


@triton.jit
def _best_of_part(  # type: ignore[no-untyped-def]
    logits_ptr, best_ptr, place_ptr, row_stride, V, COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr
):
    """The largest of COLUMNS logits of a row, and where it is. NaN counts as inf: both are reported alike."""
    begin(DEPENDENT)
    column_c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(0).to(tl.int64)
    logit_c = tl.load(logits_ptr + row * row_stride + column_c, mask=column_c < V, other=float("-inf"))
    logit_c = tl.where(logit_c == logit_c, logit_c, float("inf"))
    best, place = tl.max(logit_c, 0, return_indices=True)
    at = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(best_ptr + at, best)
    tl.store(place_ptr + at, tl.program_id(1) * COLUMNS + place)


@triton.jit
def _best_of_row(  # type: ignore[no-untyped-def]
    best_ptr, place_ptr, token_ptr, num_parts, not_finite, P_PAD: tl.constexpr, DEPENDENT: tl.constexpr
):
    begin(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    part_p = tl.arange(0, P_PAD)
    best_p = tl.load(best_ptr + row * num_parts + part_p, mask=part_p < num_parts, other=float("-inf"))
    best, part = tl.max(best_p, 0, return_indices=True)
    token = tl.load(place_ptr + row * num_parts + part)
    is_finite = (best > float("-inf")) & (best < float("inf"))
    tl.store(token_ptr + row, tl.where(is_finite, token.to(tl.int64), not_finite))


def best_tokens(logits_RV: Tensor, not_finite: int) -> Tensor:
    """`helix.kernels.choice.best_tokens` on the device, for contiguous rows."""
    rows, vocab = logits_RV.shape
    token_R = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    if not rows:
        return token_R
    parts = triton.cdiv(vocab, _COLUMNS)
    best_RP = torch.empty(rows, parts, dtype=torch.float32, device=logits_RV.device)
    place_RP = torch.empty(rows, parts, dtype=torch.int32, device=logits_RV.device)
    options = launch_options(logits_RV.device)
    _best_of_part[(rows, parts)](
        logits_RV, best_RP, place_RP, logits_RV.stride(0), vocab, COLUMNS=_COLUMNS, num_warps=4, **options
    )
    _best_of_row[(rows,)](
        best_RP, place_RP, token_R, parts, not_finite, P_PAD=triton.next_power_of_2(parts), num_warps=1, **options
    )
    return token_R
