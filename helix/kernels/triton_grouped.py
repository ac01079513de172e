"""Products with the experts of a small batch on a GPU in Triton: `helix.layers.moe.expert_products`, four launches.

`order` sorts the (token, expert) pairs by expert, without the host: pair p goes to place ``#{q: id_q < id_p, or equal
and q < p}``. Then each program of the two products takes some rows of one expert's weights, reads them once and
multiplies them with all tokens of that expert (in tiles of a few); `combine` adds up each token's experts, always in
the same order.

Letters: T tokens, k experts per token, R = T k pairs, C model width, E local experts, W width of an expert, M pairs of
a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from helix.kernels.triton_launch import begin, launch_options

# Pairs that one program compares with a block of its own at once.
MAX_PAIRS = 1024
_BLOCK = 32
# Pairs of a tile, and of an average expert up to which one tile is nearly always enough.
_TILE_PAIRS, _FEW_PAIRS = 16, 8


@triton.jit
def _order(  # type: ignore[no-untyped-def]
    expert_ptr,
    order_ptr,
    start_ptr,
    num_pairs,
    E: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Places of BLOCK pairs, and where the pairs of BLOCK experts start; experts that are not here count as E."""
    begin(DEPENDENT)
    mine_b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    id_b = tl.load(expert_ptr + mine_b, mask=mine_b < num_pairs, other=E + 1).to(tl.int32)
    id_b = tl.where(id_b < 0, E, tl.minimum(id_b, E))
    place_b = tl.zeros((BLOCK,), tl.int32)
    start_b = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, num_pairs, PAIRS):
        pair_r = first + tl.arange(0, PAIRS)
        id_r = tl.load(expert_ptr + pair_r, mask=pair_r < num_pairs, other=E + 1).to(tl.int32)
        id_r = tl.where(pair_r < num_pairs, tl.where(id_r < 0, E, tl.minimum(id_r, E)), E + 1)
        before_br = (id_r[None, :] < id_b[:, None]) | (
            (id_r[None, :] == id_b[:, None]) & (pair_r[None, :] < mine_b[:, None])
        )
        place_b += tl.sum(before_br.to(tl.int32), 1)
        start_b += tl.sum((id_r[None, :] < mine_b[:, None]).to(tl.int32), 1)
    tl.store(order_ptr + place_b, mine_b, mask=mine_b < num_pairs)
    tl.store(start_ptr + mine_b, start_b, mask=mine_b <= E)


@triton.jit
def _gate_up(  # type: ignore[no-untyped-def]
    x_ptr,
    order_ptr,
    start_ptr,
    weights_ptr,
    hidden_ptr,
    TOP: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """ROWS values of ``silu(gate) * up`` of all pairs of one expert, stored at the pairs' places in the order."""
    begin(DEPENDENT)
    expert = tl.program_id(1)
    start = tl.load(start_ptr + expert)
    stop = tl.load(start_ptr + expert + 1)
    row_w = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there_w = row_w < W
    weight_w = weights_ptr + (expert.to(tl.int64) * 2 * W + row_w) * C
    offset_c = tl.arange(0, COLUMNS)
    for first in range(start, stop, M):
        place_m = first + tl.arange(0, M)
        live_m = place_m < stop
        token_m = tl.load(order_ptr + place_m, mask=live_m, other=0).to(tl.int64) // TOP
        gate_mw = tl.zeros((M, ROWS), tl.float32)
        up_mw = tl.zeros((M, ROWS), tl.float32)
        for base in range(0, C, COLUMNS):
            column_c = base + offset_c
            inside_c = column_c < C
            x_mc = tl.load(
                x_ptr + token_m[:, None] * C + column_c[None, :], mask=live_m[:, None] & inside_c[None, :], other=0.0
            )
            at_wc = weight_w[:, None] + column_c[None, :]
            mask_wc = there_w[:, None] & inside_c[None, :]
            gate_wc = tl.load(at_wc, mask=mask_wc, other=0.0)
            up_wc = tl.load(at_wc + W * C, mask=mask_wc, other=0.0)
            gate_mw = tl.dot(x_mc, gate_wc.T, gate_mw, input_precision=PRECISION)
            up_mw = tl.dot(x_mc, up_wc.T, up_mw, input_precision=PRECISION)
        active_mw = gate_mw / (1.0 + tl.exp(-gate_mw)) * up_mw
        out_mw = hidden_ptr + place_m[:, None].to(tl.int64) * W + row_w[None, :]
        tl.store(out_mw, active_mw, mask=live_m[:, None] & there_w[None, :])


@triton.jit
def _down(  # type: ignore[no-untyped-def]
    hidden_ptr,
    order_ptr,
    start_ptr,
    weights_ptr,
    part_ptr,
    C: tl.constexpr,
    W: tl.constexpr,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """ROWS values of the second product of all pairs of one expert, stored where the pairs were before the order."""
    begin(DEPENDENT)
    expert = tl.program_id(1)
    start = tl.load(start_ptr + expert)
    stop = tl.load(start_ptr + expert + 1)
    row_c = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there_c = row_c < C
    weight_c = weights_ptr + (expert.to(tl.int64) * C + row_c) * W
    offset_w = tl.arange(0, COLUMNS)
    for first in range(start, stop, M):
        place_m = first + tl.arange(0, M)
        live_m = place_m < stop
        part_mc = tl.zeros((M, ROWS), tl.float32)
        for base in range(0, W, COLUMNS):
            column_w = base + offset_w
            inside_w = column_w < W
            hidden_mw = tl.load(
                hidden_ptr + place_m[:, None].to(tl.int64) * W + column_w[None, :],
                mask=live_m[:, None] & inside_w[None, :],
                other=0.0,
            )
            down_cw = tl.load(
                weight_c[:, None] + column_w[None, :], mask=there_c[:, None] & inside_w[None, :], other=0.0
            )
            part_mc = tl.dot(hidden_mw, down_cw.T, part_mc, input_precision=PRECISION)
        pair_m = tl.load(order_ptr + place_m, mask=live_m, other=0).to(tl.int64)
        out_mc = part_ptr + pair_m[:, None] * C + row_c[None, :]
        tl.store(out_mc, part_mc, mask=live_m[:, None] & there_c[None, :])


@triton.jit
def _combine(  # type: ignore[no-untyped-def]
    part_ptr,
    expert_ptr,
    share_ptr,
    add_ptr,
    out_ptr,
    E: tl.constexpr,
    TOP: tl.constexpr,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
    ADD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The weighted sum over one token's experts that are here, in fp32."""
    begin(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    column_c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    sum_c = tl.zeros((COLUMNS,), tl.float32)
    for place in tl.static_range(TOP):
        pair = token * TOP + place
        expert = tl.load(expert_ptr + pair)
        limit = tl.where((expert >= 0) & (expert < E), C, 0)
        part_c = tl.load(part_ptr + pair * C + column_c, mask=column_c < limit, other=0.0).to(tl.float32)
        sum_c += tl.where(limit > 0, part_c * tl.load(share_ptr + pair), 0.0)
    if ADD:
        add_c = tl.load(add_ptr + token * C + column_c, mask=column_c < C, other=0.0)
        sum_c = sum_c.to(out_ptr.dtype.element_ty).to(tl.float32) + add_c.to(tl.float32)
    tl.store(out_ptr + token * C + column_c, sum_c, mask=column_c < C)


def sort_pairs(expert_Tk: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Pairs sorted by expert, int32 [R], and where each expert's begin, int32 [experts + 1]; for contiguous ids."""
    num_pairs = expert_Tk.numel()
    order = torch.empty(num_pairs + experts + 1, dtype=torch.int32, device=expert_Tk.device)
    start = order[num_pairs:]
    _order[(triton.cdiv(max(num_pairs, experts + 1), _BLOCK),)](
        expert_Tk,
        order,
        start,
        num_pairs,
        E=experts,
        PAIRS=min(max(triton.next_power_of_2(num_pairs), 64), MAX_PAIRS),
        BLOCK=_BLOCK,
        **launch_options(expert_Tk.device),
    )
    return order[:num_pairs], start


def add_experts(
    part_RC: Tensor, expert_Tk: Tensor, weight_Tk: Tensor, experts: int, add_TC: Tensor | None = None
) -> Tensor:
    """The weighted sum of each token's parts, [T, C], of the experts below `experts`, and `add_TC`."""
    (tokens, per_token), hidden = expert_Tk.shape, part_RC.shape[1]
    out = part_RC.new_empty(tokens, hidden)
    block = min(triton.next_power_of_2(hidden), 512)
    _combine[(tokens, triton.cdiv(hidden, block))](
        part_RC,
        expert_Tk,
        weight_Tk.contiguous(),
        out if add_TC is None else add_TC.contiguous(),
        out,
        E=experts,
        TOP=per_token,
        C=hidden,
        COLUMNS=block,
        ADD=add_TC is not None,
        **launch_options(part_RC.device),
    )
    return out


def expert_products(
    x_TC: Tensor,
    expert_Tk: Tensor,
    weight_Tk: Tensor,
    gate_up_EWC: Tensor,
    down_ECW: Tensor,
    add_TC: Tensor | None = None,
    *,
    rows: int = 32,
    columns: int = 256,
    stages: int = 3,
    warps: int = 4,
    tile_pairs: int | None = None,
) -> Tensor:
    """As `helix.kernels.triton_experts.expert_products`, for a batch in which tokens share experts.

    The time to order the pairs grows with their number squared. The results of the second product are rounded to the
    dtype of x too. The rest is how the products are cut: rows and columns of the weights that a program reads at once,
    its stages and warps, and the pairs that it multiplies with them at once.
    """
    (tokens, hidden), per_token = x_TC.shape, expert_Tk.shape[1]
    experts, width, num_pairs = down_ECW.shape[0], down_ECW.shape[2], tokens * per_token
    if not tokens:
        return torch.empty_like(x_TC, memory_format=torch.contiguous_format)
    expert_Tk = expert_Tk.contiguous()
    if tile_pairs is None:
        # Experts with more pairs than a tile are read again, so tiles are larger where experts have many.
        tile_pairs = _TILE_PAIRS if num_pairs <= _FEW_PAIRS * experts else 2 * _TILE_PAIRS
    order, start = sort_pairs(expert_Tk, experts)
    between, part = x_TC.new_empty(num_pairs, width), x_TC.new_empty(num_pairs, hidden)
    sizes = {
        "C": hidden,
        "W": width,
        "M": tile_pairs,
        "ROWS": rows,
        "COLUMNS": columns,
        "PRECISION": "ieee" if x_TC.dtype == torch.float32 else None,
        "num_warps": warps,
        "num_stages": stages,
        **launch_options(x_TC.device),
    }
    _gate_up[(triton.cdiv(width, rows), experts)](
        x_TC.contiguous(), order, start, gate_up_EWC, between, TOP=per_token, **sizes
    )
    _down[(triton.cdiv(hidden, rows), experts)](between, order, start, down_ECW, part, **sizes)
    return add_experts(part, expert_Tk, weight_Tk, experts, add_TC)
