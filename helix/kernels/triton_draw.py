"""Tokens drawn from logits on a GPU in Triton: the contract of `helix.kernels.draw.draw_tokens`, in two launches.

Letters: R rows, V vocabulary, P parts that it is searched in, c logits of a part.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 1024


@triton.jit
def _weigh(  # type: ignore[no-untyped-def]
    logits_ptr, greedy_ptr, temperature_ptr, min_p_ptr, row, row_stride, number_stride, part, V, COLUMNS: tl.constexpr
):
    """fp64 weights of one part of a row, 0 beyond the vocabulary."""
    logits_ptr += row * row_stride
    best = tl.load(logits_ptr + tl.maximum(tl.load(greedy_ptr + row), 0)).to(tl.float32)
    temperature = tl.load(temperature_ptr + row * number_stride)
    min_p = tl.load(min_p_ptr + row * number_stride)
    column_c = part * COLUMNS + tl.arange(0, COLUMNS)
    logit_c = tl.load(logits_ptr + column_c, mask=column_c < V, other=float("-inf")).to(tl.float32)
    weight_c = tl.exp((logit_c - best).to(tl.float64) / tl.where(temperature > 0, temperature, 1.0))
    return tl.where((weight_c >= min_p) & (column_c < V), weight_c, 0.0)


@triton.jit
def _sum_parts(  # type: ignore[no-untyped-def]
    logits_ptr, greedy_ptr, temperature_ptr, min_p_ptr, sum_ptr, row_stride, number_stride, V, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    weight_c = _weigh(
        logits_ptr, greedy_ptr, temperature_ptr, min_p_ptr, row, row_stride, number_stride, part, V, COLUMNS
    )
    tl.store(sum_ptr + row * tl.num_programs(1) + part, tl.sum(weight_c, 0))


@triton.jit
def _pick(  # type: ignore[no-untyped-def]
    logits_ptr,
    greedy_ptr,
    temperature_ptr,
    min_p_ptr,
    uniform_ptr,
    sum_ptr,
    token_ptr,
    row_stride,
    number_stride,
    num_parts,
    V,
    COLUMNS: tl.constexpr,
    P_PAD: tl.constexpr,
):
    """The part in which the running sum passes the drawn share of the whole, and the place in it."""
    row = tl.program_id(0).to(tl.int64)
    part_p = tl.arange(0, P_PAD)
    sum_p = tl.cumsum(tl.load(sum_ptr + row * num_parts + part_p, mask=part_p < num_parts, other=0.0), 0)
    target = tl.load(uniform_ptr + row * number_stride) * tl.max(sum_p, 0)
    part = tl.minimum(tl.sum((sum_p <= target).to(tl.int32), 0), num_parts - 1)
    before = tl.sum(tl.where(part_p == part - 1, sum_p, 0.0), 0)
    weight_c = _weigh(
        logits_ptr, greedy_ptr, temperature_ptr, min_p_ptr, row, row_stride, number_stride, part, V, COLUMNS
    )
    sum_c = tl.cumsum(weight_c, 0) + before
    place = tl.minimum(tl.sum((sum_c <= target).to(tl.int32), 0), COLUMNS - 1)
    place_c = tl.arange(0, COLUMNS)
    weight = tl.sum(tl.where(place_c == place, weight_c, 0.0), 0)
    greedy = tl.load(greedy_ptr + row)
    is_drawn = (tl.load(temperature_ptr + row * number_stride) > 0) & (greedy >= 0) & (weight > 0)
    tl.store(token_ptr + row, tl.where(is_drawn, (part * COLUMNS + place).to(tl.int64), greedy))


def draw_tokens(
    logits_RV: Tensor, greedy_R: Tensor, temperature_R: Tensor, min_p_R: Tensor, uniform_R: Tensor
) -> Tensor:
    """`helix.kernels.draw.draw_tokens` on the device. The three rows of numbers lie equally far apart."""
    rows, vocab = logits_RV.shape
    strides = {numbers.stride(0) for numbers in (temperature_R, min_p_R, uniform_R)}
    if len(strides) != 1 or logits_RV.stride(1) != 1:
        raise ValueError(f"logits of stride {logits_RV.stride()} and numbers of strides {sorted(strides)} do not fit")
    token_R = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    if not rows:
        return token_R
    parts = triton.cdiv(vocab, _COLUMNS)
    sum_RP = torch.empty(rows, parts, dtype=torch.float64, device=logits_RV.device)
    given = (logits_RV, greedy_R, temperature_R, min_p_R)
    strides_ = (logits_RV.stride(0), temperature_R.stride(0))
    _sum_parts[(rows, parts)](*given, sum_RP, *strides_, vocab, COLUMNS=_COLUMNS)
    _pick[(rows,)](
        *given,
        uniform_R,
        sum_RP,
        token_R,
        *strides_,
        parts,
        vocab,
        COLUMNS=_COLUMNS,
        P_PAD=triton.next_power_of_2(parts),
    )
    return token_R
