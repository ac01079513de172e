"""Products with few tokens' experts on a GPU in Triton: what `helix.layers.moe.expert_products` computes, two launches.

Each (token, expert) pair reads the expert's weights for itself, as vector products; nothing is sorted or gathered. That
is the least that can be read while tokens share few experts, so for a handful of tokens; pairs of the same expert
that run together meet in the L2 cache.

Letters: T tokens, k experts per token, C model width, E local experts, W width of an expert.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from helix.kernels.triton_launch import begin, begin_late, launch_options

_GATE_ROWS, _GATE_COLUMNS = 4, 2048
_DOWN_ROWS, _MAX_DOWN_COLUMNS = 4, 2048
_WARPS = 4


@triton.jit
def _gate_up(  # type: ignore[no-untyped-def]
    x_ptr,
    expert_ptr,
    weights_ptr,
    hidden_ptr,
    E: tl.constexpr,
    TOP: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """ROWS values of ``silu(gate) * up`` of one pair."""
    begin_late(DEPENDENT)
    pair = tl.program_id(1).to(tl.int64)
    expert = tl.load(expert_ptr + pair)
    if (expert < 0) | (expert >= E):
        return
    row_w = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    x_row = x_ptr + pair // TOP * C
    weight_w = weights_ptr + (expert * 2 * W + row_w[:, None]) * C
    gate_wc = tl.zeros((ROWS, COLUMNS), tl.float32)
    up_wc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, C, COLUMNS):
        column_c = start + tl.arange(0, COLUMNS)
        there_wc = (row_w < W)[:, None] & (column_c < C)[None, :]
        x_c = tl.load(x_row + column_c, mask=column_c < C, other=0.0).to(tl.float32)
        gate_wc += tl.load(weight_w + column_c[None, :], mask=there_wc, other=0.0).to(tl.float32) * x_c[None, :]
        up_wc += tl.load(weight_w + W * C + column_c[None, :], mask=there_wc, other=0.0).to(tl.float32) * x_c[None, :]
    gate_w = tl.sum(gate_wc, 1)
    up_w = tl.sum(up_wc, 1)
    active_w = gate_w / (1.0 + tl.exp(-gate_w)) * up_w
    tl.store(hidden_ptr + pair * W + row_w, active_w, mask=row_w < W)


@triton.jit
def _load_rows(weights_ptr, expert, row_c, column_w, E, C, W):  # type: ignore[no-untyped-def]
    """Rows of an expert's second weight; zeros for one that is not here."""
    here = (expert >= 0) & (expert < E)
    limit = tl.where(here, W, 0)
    at_cw = weights_ptr + (tl.where(here, expert, 0) * C + row_c[:, None]) * W + column_w[None, :]
    return tl.load(at_cw, mask=(row_c < C)[:, None] & (column_w < limit)[None, :], other=0.0)


@triton.jit
def _down(  # type: ignore[no-untyped-def]
    hidden_ptr,
    expert_ptr,
    share_ptr,
    weights_ptr,
    add_ptr,
    out_ptr,
    E: tl.constexpr,
    TOP: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ADD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """ROWS values of one token: the weighted sum over its experts, always in the same order."""
    token = tl.program_id(1).to(tl.int64)
    row_c = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column_w = tl.arange(0, COLUMNS)
    # `_gate_up` let this kernel start only once the experts were chosen, so the first one's weights may be fetched.
    expert = tl.load(expert_ptr + token * TOP)
    down_cw = _load_rows(weights_ptr, expert, row_c, column_w, E, C, W)
    begin(DEPENDENT)
    sum_c = tl.zeros((ROWS,), tl.float32)
    for place in tl.static_range(TOP):
        pair = token * TOP + place
        here = (expert >= 0) & (expert < E)
        part_cw = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, W, COLUMNS):
            limit = tl.where(here, W - start, 0)
            hidden_w = tl.load(hidden_ptr + pair * W + start + column_w, mask=column_w < limit, other=0.0)
            wide_cw = down_cw.to(tl.float32)
            if start + COLUMNS < W:
                down_cw = _load_rows(weights_ptr, expert, row_c, start + COLUMNS + column_w, E, C, W)
            elif place + 1 < TOP:
                expert = tl.load(expert_ptr + pair + 1)
                down_cw = _load_rows(weights_ptr, expert, row_c, column_w, E, C, W)
            part_cw += wide_cw * hidden_w.to(tl.float32)[None, :]
        sum_c += tl.where(here, tl.sum(part_cw, 1) * tl.load(share_ptr + pair), 0.0)
    if ADD:
        kind = out_ptr.dtype.element_ty
        add_c = tl.load(add_ptr + token * C + row_c, mask=row_c < C, other=0.0)
        sum_c = sum_c.to(kind).to(tl.float32) + add_c.to(tl.float32)
    tl.store(out_ptr + token * C + row_c, sum_c, mask=row_c < C)


def expert_products(
    x_TC: Tensor,
    expert_Tk: Tensor,
    weight_Tk: Tensor,
    gate_up_EWC: Tensor,
    down_ECW: Tensor,
    add_TC: Tensor | None = None,
) -> Tensor:
    """For each token the sum over its experts of ``weight * down(silu(gate(x)) * up(x))``, [T, C] in the dtype of x.

    `expert_Tk` are places in the contiguous stacks ``gate_up [E, 2 W, C]`` and ``down [E, C, W]``; others add
    nothing. Sums are fp32; what lies between the two products is rounded once, to the dtype of x. `add_TC` is added to
    the rounded result.
    """
    (tokens, hidden), per_token = x_TC.shape, expert_Tk.shape[1]
    experts, width = down_ECW.shape[0], down_ECW.shape[2]
    out = torch.empty_like(x_TC, memory_format=torch.contiguous_format)
    between = x_TC.new_empty(tokens * per_token, width)
    if not tokens:
        return out
    expert_Tk = expert_Tk.contiguous()
    _gate_up[(triton.cdiv(width, _GATE_ROWS), tokens * per_token)](
        x_TC.contiguous(),
        expert_Tk,
        gate_up_EWC,
        between,
        E=experts,
        TOP=per_token,
        C=hidden,
        W=width,
        ROWS=_GATE_ROWS,
        COLUMNS=min(triton.next_power_of_2(hidden), _GATE_COLUMNS),
        num_warps=_WARPS,
        **launch_options(x_TC.device),
    )
    _down[(triton.cdiv(hidden, _DOWN_ROWS), tokens)](
        between,
        expert_Tk,
        weight_Tk.contiguous(),
        down_ECW,
        out if add_TC is None else add_TC.contiguous(),
        out,
        E=experts,
        TOP=per_token,
        C=hidden,
        W=width,
        ROWS=_DOWN_ROWS,
        COLUMNS=min(triton.next_power_of_2(width), _MAX_DOWN_COLUMNS),
        ADD=add_TC is not None,
        num_warps=_WARPS,
        **launch_options(x_TC.device),
    )
    return out
