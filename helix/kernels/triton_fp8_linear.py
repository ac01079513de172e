"""Products with FP8 weights on a GPU in Triton: the contract of `helix.kernels.fp8.linear_fp8`, in two ways.

Few tokens: the weight is read once as it lies, one column of blocks after the other, and dequantised in registers;
values are exact in 16 bits, and each block's product is scaled in fp32. Many tokens: activations are quantised in
groups of 128 and both operands go through the tensor cores in FP8 (`torch.nn.functional.scaled_mm`), where the blocks
lie as that wants; where a slice cut them, the weight is dequantised first.

Letters: T tokens, N outputs, K inputs, M tokens of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from helix.kernels import fp8
from helix.kernels.fp8 import Packed

# Up to here the weight's way from memory takes longer than the arithmetic; and up to here weight-only products are
# better than dequantised weights, where both operands cannot be FP8.
WEIGHT_ONLY_TOKENS, FEW_TOKENS = 32, 256
_GROUP = 128
# So few outputs that their tiles alone leave processors idle.
_FEW_OUTPUTS = 6000


@triton.jit
def _product(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    N,
    K,
    scale_columns,
    cell,
    skip,
    BLOCK: tl.constexpr,
    CUT: tl.constexpr,
    BIAS: tl.constexpr,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """ROWS outputs of M tokens, or with SPLIT > 1 the part of them from every SPLIT-th run of UNROLL block columns."""
    row_n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    token_m = tl.program_id(2) * M + tl.arange(0, M)
    live_m, there_n = token_m < num_tokens, row_n < N
    x_m = x_ptr + token_m[:, None].to(tl.int64) * K
    weight_n = weight_ptr + row_n[:, None].to(tl.int64) * K
    scale_n = scale_ptr + row_n // cell * scale_columns
    num_blocks = tl.cdiv(skip + K, BLOCK)
    sum_mn = tl.zeros((M, ROWS), tl.float32)
    for first in range(split * UNROLL, num_blocks, UNROLL * SPLIT):
        for step in tl.static_range(UNROLL):
            column_k = (first + step) * BLOCK - skip + tl.arange(0, BLOCK)
            inside_k = column_k < K
            if CUT:
                inside_k &= column_k >= 0
            x_mk = tl.load(x_m + column_k[None, :], mask=live_m[:, None] & inside_k[None, :], other=0.0)
            weight_nk = tl.load(weight_n + column_k[None, :], mask=there_n[:, None] & inside_k[None, :], other=0.0)
            limit = tl.where(first + step < num_blocks, N, 0)
            factor_n = tl.load(scale_n + first + step, mask=row_n < limit, other=0.0)
            part_mn = tl.dot(x_mk, weight_nk.to(x_mk.dtype).T, input_precision=PRECISION)
            sum_mn += part_mn * factor_n[None, :]
    if BIAS:
        sum_mn += tl.load(bias_ptr + row_n, mask=there_n, other=0.0).to(tl.float32)[None, :]
    at_mn = (split.to(tl.int64) * num_tokens + token_m[:, None]) * N + row_n[None, :]
    tl.store(out_ptr + at_mn, sum_mn, mask=live_m[:, None] & there_n[None, :])


@triton.jit
def _add_parts(  # type: ignore[no-untyped-def]
    part_ptr, bias_ptr, out_ptr, size, N, PARTS: tl.constexpr, WIDTH: tl.constexpr, BIAS: tl.constexpr
):
    """The sum over PARTS arrays of `size` fp32 values in rows of N, always in the same order, and the bias."""
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(part_ptr + part * size + at, mask=at < size, other=0.0)
    if BIAS:
        total += tl.load(bias_ptr + at % N, mask=at < size, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total, mask=at < size)


@triton.jit
def _quantise(  # type: ignore[no-untyped-def]
    x_ptr, values_ptr, scale_ptr, num_tokens, padded_tokens, K, GROUP: tl.constexpr, RUN: tl.constexpr
):
    """RUN groups of one token in e4m3 with a scale each; tokens behind the last one are zero."""
    token = tl.program_id(0).to(tl.int64)
    group_g = tl.program_id(1) * RUN + tl.arange(0, RUN)
    column_gk = group_g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x_gk = tl.load(x_ptr + token * K + column_gk, mask=column_gk < tl.where(token < num_tokens, K, 0), other=0.0)
    wide_gk = x_gk.to(tl.float32)
    scale_g = tl.div_rn(tl.maximum(tl.max(tl.abs(wide_gk), 1), 1e-12), 448.0)
    value_gk = tl.minimum(tl.maximum(tl.div_rn(wide_gk, scale_g[:, None]), -448.0), 448.0)
    tl.store(values_ptr + token * K + column_gk, value_gk.to(values_ptr.dtype.element_ty), mask=column_gk < K)
    tl.store(scale_ptr + group_g * padded_tokens + token, scale_g, mask=group_g * GROUP < K)


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is cut: outputs and block columns that a program reads at once, parts of K, warps, stages."""

    rows: int
    unroll: int
    split: int
    warps: int
    stages: int


def choose_tile(tokens: int, outputs: int, num_blocks: int) -> Tile:
    """The best of those tried on an H200 with DeepSeek-R1's layers: few outputs are cut in K too, to fill it."""
    few = outputs < _FEW_OUTPUTS and num_blocks >= 16
    if tokens <= 16:
        return Tile(rows=32, unroll=2, split=4 if few else 1, warps=4, stages=3)
    return Tile(rows=64, unroll=1, split=8 if few and tokens <= 64 else 1, warps=4, stages=4)


def linear_fp8(x: Tensor, weight: Packed, bias: Tensor | None = None) -> Tensor:
    """`helix.kernels.fp8.linear_fp8` on the device; activations stay as they are up to `WEIGHT_ONLY_TOKENS` tokens."""
    x_TK = x.flatten(0, -2).contiguous()
    y_TN: Tensor
    tokens = x_TK.shape[0]
    if tokens > WEIGHT_ONLY_TOKENS and scales_fit(x_TK, weight):
        y_TN = both_fp8(x_TK, weight, bias)
    elif tokens <= FEW_TOKENS:
        y_TN = weight_only(x_TK, weight, bias)
    else:
        y_TN = fp8.linear_fp8(x_TK, weight, bias)
    return y_TN.view(*x.shape[:-1], weight.shape[0])


def weight_only(x_TK: Tensor, weight: Packed, bias: Tensor | None = None, tile: Tile | None = None) -> Tensor:
    """The product with the weight dequantised in registers, for contiguous x; `tile` replaces what would be chosen."""
    (tokens, inputs), outputs, grid = x_TK.shape, weight.shape[0], weight.grid
    y_TN = x_TK.new_empty(tokens, outputs)
    if not tokens:
        return y_TN
    tile = tile or choose_tile(tokens, outputs, triton.cdiv(inputs, grid.cols))
    rows_m = 16 if tokens <= 16 else 32 if tokens <= 32 else 64
    split = tile.split > 1
    target = torch.empty(tile.split, tokens, outputs, dtype=torch.float32, device=x_TK.device) if split else y_TN
    _product[(triton.cdiv(outputs, tile.rows), tile.split, triton.cdiv(tokens, rows_m))](
        x_TK,
        weight.values,
        weight.scale,
        bias,
        target,
        tokens,
        outputs,
        inputs,
        weight.scale.shape[1],
        grid.rows,
        grid.skip,
        BLOCK=grid.cols,
        CUT=grid.skip > 0,
        BIAS=bias is not None and not split,
        M=rows_m,
        ROWS=tile.rows,
        UNROLL=tile.unroll,
        SPLIT=tile.split,
        PRECISION="ieee" if x_TK.dtype == torch.float32 else None,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if split:
        size = tokens * outputs
        _add_parts[(triton.cdiv(size, 1024),)](
            target, bias, y_TN, size, outputs, PARTS=tile.split, WIDTH=1024, BIAS=bias is not None
        )
    return y_TN


def scales_fit(x_TK: Tensor, weight: Packed) -> bool:
    """Whether `both_fp8` takes these: bfloat16 activations, blocks of 128 x 128 that no slice has cut, whole in K."""
    grid, (outputs, inputs) = weight.grid, weight.shape
    whole = (grid.rows, grid.cols, grid.skip) == (_GROUP, _GROUP, 0) and inputs % _GROUP == 0 and outputs % 16 == 0
    return whole and x_TK.dtype is torch.bfloat16


def both_fp8(x_TK: Tensor, weight: Packed, bias: Tensor | None = None) -> Tensor:
    """The product of contiguous activations in groups of 128 and the weight, both FP8, in bfloat16."""
    from torch.nn.functional import ScalingType, scaled_mm

    values, scale = quantise_groups(x_TK)
    y_TN: Tensor = scaled_mm(
        values,
        weight.values.t(),
        scale,
        ScalingType.BlockWise1x128,
        weight.scale.t(),
        ScalingType.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )[: x_TK.shape[0]]
    return y_TN if bias is None else y_TN + bias


def quantise_groups(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    """`helix.kernels.fp8.quantise_groups` of contiguous x in groups of 128, filled up to whole sixteens of tokens.

    Scaled products ask for those; the tokens behind the last one are zero.
    """
    tokens, inputs = x_TK.shape
    padded, groups = triton.cdiv(tokens, 16) * 16, inputs // _GROUP
    values = torch.empty(padded, inputs, dtype=torch.float8_e4m3fn, device=x_TK.device)
    scale = torch.empty(groups, padded, dtype=torch.float32, device=x_TK.device)
    _quantise[(padded, triton.cdiv(groups, 8))](x_TK, values, scale, tokens, padded, inputs, GROUP=_GROUP, RUN=8)
    return values, scale.t()
