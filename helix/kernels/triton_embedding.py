"""Rows of an embedding on a GPU in Triton: the contract of `helix.kernels.embedding`, in one launch.

Letters: T tokens, V rows of the vocabulary that are held here, C model width.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from helix.kernels.triton_launch import begin, launch_options

_COLUMNS = 1024


@triton.jit
def _embed(  # type: ignore[no-untyped-def]
    token_ptr, weight_ptr, out_ptr, token_stride, start, size, C, COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr
):
    begin(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    column_c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.load(token_ptr + token * token_stride).to(tl.int64) - start
    limit = tl.where((row >= 0) & (row < size), C, 0)
    value_c = tl.load(weight_ptr + row * C + column_c, mask=column_c < limit, other=0.0)
    tl.store(out_ptr + token * C + column_c, value_c, mask=column_c < C)


def embed(token_ids_T: Tensor, weight_VC: Tensor, start: int, size: int) -> Tensor:
    """`helix.kernels.embedding.embed` on the device, for a contiguous weight."""
    tokens, width = token_ids_T.shape[0], weight_VC.shape[1]
    out_TC = weight_VC.new_empty(tokens, width)
    if out_TC.numel():
        columns = min(triton.next_power_of_2(width), _COLUMNS)
        _embed[(tokens, triton.cdiv(width, columns))](
            token_ids_T,
            weight_VC,
            out_TC,
            token_ids_T.stride(0),
            start,
            size,
            width,
            COLUMNS=columns,
            **launch_options(weight_VC.device),
        )
    return out_TC
