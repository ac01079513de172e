"""Tokens drawn from logits on a GPU in Triton: the contract of `helix.kernels.draw.draw_tokens`, in two launches.

Letters: R rows, V vocabulary, P parts that it is searched in, c logits of a part.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from helix.kernels.draw import FACTOR1, FACTOR2, GOLDEN64

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
def _win_parts(  # type: ignore[no-untyped-def]
    logits_ptr,
    greedy_ptr,
    temperature_ptr,
    min_p_ptr,
    uniform_ptr,
    score_ptr,
    token_ptr,
    row_stride,
    number_stride,
    V,
    GOLDEN: tl.constexpr,
    FACTOR1: tl.constexpr,
    FACTOR2: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The winner of one part of a row and its score."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    weight_c = _weigh(
        logits_ptr, greedy_ptr, temperature_ptr, min_p_ptr, row, row_stride, number_stride, part, V, COLUMNS
    )
    column_c = part * COLUMNS + tl.arange(0, COLUMNS)
    key = (tl.load(uniform_ptr + row * number_stride) * 4503599627370496.0).to(tl.int64)
    value_c = key + (column_c.to(tl.int64) + 1) * GOLDEN
    value_c = (value_c ^ ((value_c >> 30) & 0x3FFFFFFFF)) * FACTOR1
    value_c = (value_c ^ ((value_c >> 27) & 0x1FFFFFFFFF)) * FACTOR2
    value_c = value_c ^ ((value_c >> 31) & 0x1FFFFFFFF)
    number_c = (((value_c >> 12) & 0xFFFFFFFFFFFFF).to(tl.float64) + 0.5) * 2.220446049250313e-16
    score_c = weight_c / -tl.log(number_c)
    score = tl.max(score_c, 0)
    at = row * tl.num_programs(1) + part
    tl.store(score_ptr + at, score)
    tl.store(token_ptr + at, tl.min(tl.where(score_c == score, column_c, V), 0))


@triton.jit
def _win(  # type: ignore[no-untyped-def]
    greedy_ptr, temperature_ptr, score_ptr, part_token_ptr, token_ptr, number_stride, num_parts, P_PAD: tl.constexpr
):
    """The winner of a row among those of its parts; the greedy token where nothing is drawn."""
    row = tl.program_id(0).to(tl.int64)
    part_p = tl.arange(0, P_PAD)
    there_p = part_p < num_parts
    score_p = tl.load(score_ptr + row * num_parts + part_p, mask=there_p, other=-1.0)
    token_p = tl.load(part_token_ptr + row * num_parts + part_p, mask=there_p, other=0)
    score = tl.max(score_p, 0)
    token = tl.min(tl.where(score_p == score, token_p, 2147483647), 0)
    greedy = tl.load(greedy_ptr + row)
    is_drawn = (tl.load(temperature_ptr + row * number_stride) > 0) & (greedy >= 0)
    tl.store(token_ptr + row, tl.where(is_drawn, token.to(tl.int64), greedy))


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
    score_RP = torch.empty(rows, parts, dtype=torch.float64, device=logits_RV.device)
    token_RP = torch.empty(rows, parts, dtype=torch.int32, device=logits_RV.device)
    _win_parts[(rows, parts)](
        logits_RV,
        greedy_R,
        temperature_R,
        min_p_R,
        uniform_R,
        score_RP,
        token_RP,
        logits_RV.stride(0),
        temperature_R.stride(0),
        vocab,
        GOLDEN=GOLDEN64,
        FACTOR1=FACTOR1,
        FACTOR2=FACTOR2,
        COLUMNS=_COLUMNS,
    )
    padded = triton.next_power_of_2(parts)
    _win[(rows,)](greedy_R, temperature_R, score_RP, token_RP, token_R, temperature_R.stride(0), parts, P_PAD=padded)
    return token_R
