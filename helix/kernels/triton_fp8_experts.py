"""Products with experts held in FP8 on a GPU in Triton: `helix.layers.moe.packed_products`, in two ways.

Few tokens: each (token, expert) pair reads the expert's weights for itself as they lie, two launches; nothing is
sorted. More: pairs are sorted by expert and each expert's weights are read once for all its tokens, in tiles of M.
Weights are dequantised in registers; each block's product is scaled in fp32.

Letters: T tokens, k experts per token, R = T k pairs, C model width, E local experts, W width of an expert, M pairs of
a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from helix.kernels.fp8 import Packed
from helix.kernels.router import local_ids
from helix.kernels.triton_grouped import MAX_PAIRS, add_experts, sort_pairs

# Up to here reading experts once for each token costs less than sorting the tokens by expert.
FEW_TOKENS = 4
# Pairs of one expert from which on a tile of many rows pays.
_MANY_PAIRS = 64


@triton.jit
def _gate_up_few(  # type: ignore[no-untyped-def]
    x_ptr,
    expert_ptr,
    weights_ptr,
    scale_ptr,
    hidden_ptr,
    C,
    W,
    scale_rows,
    scale_columns,
    E: tl.constexpr,
    TOP: tl.constexpr,
    cell,
    skip,
    BLOCK: tl.constexpr,
    CUT: tl.constexpr,
    ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """ROWS values of ``silu(gate) * up`` of one pair."""
    pair = tl.program_id(1).to(tl.int64)
    expert = tl.load(expert_ptr + pair)
    if (expert < 0) | (expert >= E):
        return
    row_w = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there_w = row_w < W
    x_row = x_ptr + pair // TOP * C
    weight_w = weights_ptr + (expert * 2 * W + row_w[:, None]) * C
    scale_e = scale_ptr + expert * scale_rows * scale_columns
    gate_scale_w = scale_e + row_w // cell * scale_columns
    up_scale_w = scale_e + (W + row_w) // cell * scale_columns
    num_blocks = tl.cdiv(skip + C, BLOCK)
    gate_wc = tl.zeros((ROWS, BLOCK), tl.float32)
    up_wc = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(0, num_blocks, UNROLL):
        for step in tl.static_range(UNROLL):
            column_c = (first + step) * BLOCK - skip + tl.arange(0, BLOCK)
            inside_c = column_c < C
            if CUT:
                inside_c &= column_c >= 0
            there_wc = there_w[:, None] & inside_c[None, :]
            known_w = row_w < tl.where(first + step < num_blocks, W, 0)
            x_c = tl.load(x_row + column_c, mask=inside_c, other=0.0).to(tl.float32)
            gate = tl.load(weight_w + column_c[None, :], mask=there_wc, other=0.0)
            up = tl.load(weight_w + W * C + column_c[None, :], mask=there_wc, other=0.0)
            gate_factor_w = tl.load(gate_scale_w + first + step, mask=known_w, other=0.0)
            up_factor_w = tl.load(up_scale_w + first + step, mask=known_w, other=0.0)
            gate_wc += gate.to(tl.float32) * x_c[None, :] * gate_factor_w[:, None]
            up_wc += up.to(tl.float32) * x_c[None, :] * up_factor_w[:, None]
    gate_w = tl.sum(gate_wc, 1)
    active_w = gate_w / (1.0 + tl.exp(-gate_w)) * tl.sum(up_wc, 1)
    tl.store(hidden_ptr + pair * W + row_w, active_w, mask=there_w)


@triton.jit
def _down_few(  # type: ignore[no-untyped-def]
    hidden_ptr,
    expert_ptr,
    share_ptr,
    weights_ptr,
    scale_ptr,
    out_ptr,
    C,
    W,
    scale_rows,
    scale_columns,
    E: tl.constexpr,
    TOP: tl.constexpr,
    cell,
    skip,
    BLOCK: tl.constexpr,
    CUT: tl.constexpr,
    ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """ROWS values of one token: the weighted sum over its experts, always in the same order."""
    token = tl.program_id(1).to(tl.int64)
    row_c = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there_c = row_c < C
    num_blocks = tl.cdiv(skip + W, BLOCK)
    sum_c = tl.zeros((ROWS,), tl.float32)
    for place in range(TOP):
        pair = token * TOP + place
        expert = tl.load(expert_ptr + pair)
        if (expert >= 0) & (expert < E):
            weight_c = weights_ptr + (expert * C + row_c[:, None]) * W
            scale_c = scale_ptr + (expert * scale_rows + row_c // cell) * scale_columns
            part_cw = tl.zeros((ROWS, BLOCK), tl.float32)
            for first in range(0, num_blocks, UNROLL):
                for step in tl.static_range(UNROLL):
                    column_w = (first + step) * BLOCK - skip + tl.arange(0, BLOCK)
                    inside_w = column_w < W
                    if CUT:
                        inside_w &= column_w >= 0
                    known_c = row_c < tl.where(first + step < num_blocks, C, 0)
                    hidden_w = tl.load(hidden_ptr + pair * W + column_w, mask=inside_w, other=0.0).to(tl.float32)
                    down = tl.load(weight_c + column_w[None, :], mask=there_c[:, None] & inside_w[None, :], other=0.0)
                    factor_c = tl.load(scale_c + first + step, mask=known_c, other=0.0)
                    part_cw += down.to(tl.float32) * hidden_w[None, :] * factor_c[:, None]
            sum_c += tl.sum(part_cw, 1) * tl.load(share_ptr + pair)
    tl.store(out_ptr + token * C + row_c, sum_c, mask=there_c)


@triton.jit
def _gate_up(  # type: ignore[no-untyped-def]
    x_ptr,
    order_ptr,
    start_ptr,
    weights_ptr,
    scale_ptr,
    hidden_ptr,
    C,
    W,
    scale_rows,
    scale_columns,
    TOP: tl.constexpr,
    cell,
    skip,
    BLOCK: tl.constexpr,
    CUT: tl.constexpr,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """ROWS values of ``silu(gate) * up`` of all pairs of one expert, stored at the pairs' places in the order."""
    expert = tl.program_id(1)
    start = tl.load(start_ptr + expert)
    stop = tl.load(start_ptr + expert + 1)
    row_w = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there_w = row_w < W
    weight_w = weights_ptr + (expert.to(tl.int64) * 2 * W + row_w[:, None]) * C
    scale_e = scale_ptr + expert.to(tl.int64) * scale_rows * scale_columns
    gate_scale_w = scale_e + row_w // cell * scale_columns
    up_scale_w = scale_e + (W + row_w) // cell * scale_columns
    num_blocks = tl.cdiv(skip + C, BLOCK)
    for first_pair in range(start, stop, M):
        place_m = first_pair + tl.arange(0, M)
        live_m = place_m < stop
        token_m = tl.load(order_ptr + place_m, mask=live_m, other=0).to(tl.int64) // TOP
        gate_mw = tl.zeros((M, ROWS), tl.float32)
        up_mw = tl.zeros((M, ROWS), tl.float32)
        for first in range(0, num_blocks, UNROLL):
            for step in tl.static_range(UNROLL):
                column_c = (first + step) * BLOCK - skip + tl.arange(0, BLOCK)
                inside_c = column_c < C
                if CUT:
                    inside_c &= column_c >= 0
                known_w = row_w < tl.where(first + step < num_blocks, W, 0)
                x_mc = tl.load(
                    x_ptr + token_m[:, None] * C + column_c[None, :],
                    mask=live_m[:, None] & inside_c[None, :],
                    other=0.0,
                )
                there_wc = there_w[:, None] & inside_c[None, :]
                gate = tl.load(weight_w + column_c[None, :], mask=there_wc, other=0.0).to(x_mc.dtype)
                up = tl.load(weight_w + W * C + column_c[None, :], mask=there_wc, other=0.0).to(x_mc.dtype)
                gate_factor_w = tl.load(gate_scale_w + first + step, mask=known_w, other=0.0)
                up_factor_w = tl.load(up_scale_w + first + step, mask=known_w, other=0.0)
                gate_mw += tl.dot(x_mc, gate.T, input_precision=PRECISION) * gate_factor_w[None, :]
                up_mw += tl.dot(x_mc, up.T, input_precision=PRECISION) * up_factor_w[None, :]
        active_mw = gate_mw / (1.0 + tl.exp(-gate_mw)) * up_mw
        out_mw = hidden_ptr + place_m[:, None].to(tl.int64) * W + row_w[None, :]
        tl.store(out_mw, active_mw, mask=live_m[:, None] & there_w[None, :])


@triton.jit
def _down(  # type: ignore[no-untyped-def]
    hidden_ptr,
    order_ptr,
    start_ptr,
    weights_ptr,
    scale_ptr,
    part_ptr,
    C,
    W,
    scale_rows,
    scale_columns,
    cell,
    skip,
    BLOCK: tl.constexpr,
    CUT: tl.constexpr,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """ROWS values of the second product of all pairs of one expert, stored where the pairs were before the order."""
    expert = tl.program_id(1)
    start = tl.load(start_ptr + expert)
    stop = tl.load(start_ptr + expert + 1)
    row_c = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there_c = row_c < C
    weight_c = weights_ptr + (expert.to(tl.int64) * C + row_c[:, None]) * W
    scale_c = scale_ptr + (expert.to(tl.int64) * scale_rows + row_c // cell) * scale_columns
    num_blocks = tl.cdiv(skip + W, BLOCK)
    for first_pair in range(start, stop, M):
        place_m = first_pair + tl.arange(0, M)
        live_m = place_m < stop
        part_mc = tl.zeros((M, ROWS), tl.float32)
        for first in range(0, num_blocks, UNROLL):
            for step in tl.static_range(UNROLL):
                column_w = (first + step) * BLOCK - skip + tl.arange(0, BLOCK)
                inside_w = column_w < W
                if CUT:
                    inside_w &= column_w >= 0
                known_c = row_c < tl.where(first + step < num_blocks, C, 0)
                hidden_mw = tl.load(
                    hidden_ptr + place_m[:, None].to(tl.int64) * W + column_w[None, :],
                    mask=live_m[:, None] & inside_w[None, :],
                    other=0.0,
                )
                down = tl.load(weight_c + column_w[None, :], mask=there_c[:, None] & inside_w[None, :], other=0.0)
                factor_c = tl.load(scale_c + first + step, mask=known_c, other=0.0)
                part_mc += tl.dot(hidden_mw, down.to(hidden_mw.dtype).T, input_precision=PRECISION) * factor_c[None, :]
        pair_m = tl.load(order_ptr + place_m, mask=live_m, other=0).to(tl.int64)
        out_mc = part_ptr + pair_m[:, None] * C + row_c[None, :]
        tl.store(out_mc, part_mc, mask=live_m[:, None] & there_c[None, :])


@dataclass(frozen=True, slots=True)
class Tile:
    """How the products are cut: weight rows and block columns that a program reads at once, pairs, warps, stages."""

    rows: int
    unroll: int
    pairs: int
    warps: int
    stages: int


def expert_products(
    x_TC: Tensor, expert_Tk: Tensor, weight_Tk: Tensor, gate_up_EWC: Packed, down_ECW: Packed
) -> Tensor:
    """For each token the sum over its experts of ``weight * down(silu(gate(x)) * up(x))``, [T, C] in the dtype of x.

    `expert_Tk` are places in the stacks ``gate_up [E, 2 W, C]`` and ``down [E, C, W]``; others add nothing. What
    lies between the two products is rounded once, to the dtype of x, and so are the results of the second one where
    pairs are sorted. Asks the host nothing.
    """
    if not x_TC.shape[0]:
        return torch.empty_like(x_TC)
    way = few if x_TC.shape[0] <= FEW_TOKENS else sorted_by_expert
    return way(x_TC.contiguous(), expert_Tk.contiguous(), weight_Tk.contiguous(), gate_up_EWC, down_ECW)


def few(
    x_TC: Tensor, expert_Tk: Tensor, weight_Tk: Tensor, gate_up: Packed, down: Packed, tile: Tile | None = None
) -> Tensor:
    """`expert_products` by pairs, without sorting; `tile` replaces what would be chosen."""
    (tokens, hidden), pairs = x_TC.shape, expert_Tk.numel()
    experts, _, width = down.shape
    tile = tile or Tile(rows=8 if tokens == 1 else 16, unroll=4, pairs=1, warps=4, stages=1)
    between, out = x_TC.new_empty(pairs, width), torch.empty_like(x_TC)
    common = {
        "E": experts,
        "TOP": expert_Tk.shape[1],
        "ROWS": tile.rows,
        "UNROLL": tile.unroll,
        "num_warps": tile.warps,
    }
    _gate_up_few[(triton.cdiv(width, tile.rows), pairs)](
        x_TC, expert_Tk, gate_up.values, gate_up.scale, between, hidden, width, **_places(gate_up), **common
    )
    _down_few[(triton.cdiv(hidden, tile.rows), tokens)](
        between, expert_Tk, weight_Tk, down.values, down.scale, out, hidden, width, **_places(down), **common
    )
    return out


def choose_tile(pairs: int, experts: int) -> Tile:
    """The best of those tried on an H200 for `pairs` pairs over `experts` experts."""
    if pairs >= _MANY_PAIRS * experts:
        return Tile(rows=64, unroll=1, pairs=64, warps=4, stages=3)
    return Tile(rows=32, unroll=1, pairs=16, warps=4, stages=3)


def sorted_by_expert(
    x_TC: Tensor, expert_Tk: Tensor, weight_Tk: Tensor, gate_up: Packed, down: Packed, tile: Tile | None = None
) -> Tensor:
    """`expert_products` with the pairs of an expert together; `tile` replaces what would be chosen."""
    hidden, pairs = x_TC.shape[1], expert_Tk.numel()
    experts, _, width = down.shape
    tile = tile or choose_tile(pairs, experts)
    order, start = sort_pairs(expert_Tk, experts) if pairs <= MAX_PAIRS else _sort_many(expert_Tk, experts)
    between, part = x_TC.new_empty(pairs, width), x_TC.new_empty(pairs, hidden)
    common = {
        "M": tile.pairs,
        "ROWS": tile.rows,
        "UNROLL": tile.unroll,
        "PRECISION": "ieee" if x_TC.dtype == torch.float32 else None,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    _gate_up[(triton.cdiv(width, tile.rows), experts)](
        x_TC,
        order,
        start,
        gate_up.values,
        gate_up.scale,
        between,
        hidden,
        width,
        TOP=expert_Tk.shape[1],
        **_places(gate_up),
        **common,
    )
    _down[(triton.cdiv(hidden, tile.rows), experts)](
        between, order, start, down.values, down.scale, part, hidden, width, **_places(down), **common
    )
    return add_experts(part, expert_Tk, weight_Tk, experts)


def _sort_many(expert_Tk: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """`sort_pairs` for any number of them."""
    ids_R, order_R = local_ids(expert_Tk, experts).flatten().sort(stable=True)
    bounds = torch.arange(experts + 1, dtype=ids_R.dtype, device=ids_R.device)
    return order_R.to(torch.int32), torch.searchsorted(ids_R, bounds, out_int32=True)


def _places(stack: Packed) -> dict[str, int]:
    """Where the kernels find a stack's scales."""
    grid = stack.grid
    return {
        "scale_rows": stack.scale.shape[1],
        "scale_columns": stack.scale.shape[2],
        "cell": grid.rows,
        "skip": grid.skip,
        "BLOCK": grid.cols,
        "CUT": grid.skip > 0,
    }
