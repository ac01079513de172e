"""Mixture of experts on the TPF x EP grid: router, this rank's experts, the shared expert, and how tokens meet them.

A rank holds a run of experts (uneven over EP) and a slice of their width (padded over TPF), stacked:

    gate_up [E, 2 W, C]    gate rows, then up rows
    down    [E, C, W]

The shared expert is a plain MLP cut over all N ranks; its partial sums leave with the routed ones (see `dispatch`).

Letters: T tokens, C model width, k experts per token, E local experts, W local width, R = T k rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from helix.comm.mesh import Mesh
from helix.kernels.fp8 import Packed, linear_fp8
from helix.kernels.router import local_ids
from helix.layers.dispatch import make_dispatch
from helix.layers.mlp import ACTIVATIONS, MLP
from helix.layers.router import Router
from helix.layout import Slice, padded_slice, uneven_slice
from helix.model_spec import ModelSpec
from helix.weights import Packable, Packing, Piece, block

# Up to here reading experts once for each token costs less than sorting the tokens by expert.
FEW_TOKENS = 2
# Up to here the weights' way from memory takes longer than the arithmetic.
SMALL_BATCH = 128
_ALIGNED_BYTES = 16


class MoE(nn.Module):
    """The FFN of one MoE layer, x [T, C] -> [T, C], both replicated. Collective over all N ranks."""

    def __init__(
        self,
        name: str,
        spec: ModelSpec,
        mesh: Mesh,
        dispatch: Literal["auto", "local", "alltoall"],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        moe = spec.moe
        if moe is None:
            raise ValueError(f"{name}: {spec.model_type} has no experts")
        self.router = Router(f"{name}.gate", spec.hidden_size, moe, dtype=dtype, device=device)
        self.experts = Experts(
            f"{name}.experts",
            spec.hidden_size,
            uneven_slice(moe.num_experts, mesh.layout.ep, mesh.coords.ep_rank),
            padded_slice(moe.expert_width, mesh.layout.tpf, mesh.coords.tpf_rank),
            spec.activation,
            dtype=dtype,
            device=device,
        )
        self.shared: MLP | None = None
        if moe.shared_width:
            self.shared = MLP(
                f"{name}.shared_experts",
                spec.hidden_size,
                padded_slice(moe.shared_width, mesh.layout.num_ranks, mesh.rank),
                spec.activation,
                mesh.world,
                bias=spec.mlp_bias,
                dtype=dtype,
                device=device,
            )
        self.dispatch = make_dispatch(dispatch, moe.num_experts, mesh)

    def forward(self, x_TC: Tensor) -> Tensor:
        if self.shared is None:
            return self.dispatch(x_TC, self.router, self.experts, None)
        y_TC = self.dispatch(x_TC, self.router, self.experts, self.shared.part)
        return y_TC if self.shared.down_bias is None else y_TC + self.shared.down_bias


class Experts(Packable):
    """Experts `experts` of a layer, slice `width` of their width. ``forward`` is `expert_products` on them.

    The width is held in whole 16 bytes, which grouped products need of every stride; the places beyond are zero.
    The stacks may be held in FP8, both or none.
    """

    packable = ("gate_up", "down")

    def __init__(
        self,
        name: str,
        hidden: int,
        experts: Slice,
        width: Slice,
        activation: str,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        step = _ALIGNED_BYTES // dtype.itemsize
        width = replace(width, padded=-(-width.padded // step) * step)
        gate_up = torch.empty(experts.size, 2 * width.padded, hidden, dtype=dtype, device=device)
        down = torch.empty(experts.size, hidden, width.padded, dtype=dtype, device=device)
        self.gate_up = nn.Parameter(gate_up, requires_grad=False)
        self.down = nn.Parameter(down, requires_grad=False)
        self.declared = {
            "gate_up": (
                *_stack(name, "gate_proj", experts, (width, None), hidden),
                *_stack(name, "up_proj", experts, (width, None), hidden, at=width.padded),
            ),
            "down": tuple(_stack(name, "down_proj", experts, (None, width), hidden)),
        }
        self.activation = activation

    def pack(self, packing: Packing) -> None:
        if all(packing.takes(self.declared[name]) for name in self.packable):
            super().pack(packing)

    def forward(self, x_TC: Tensor, expert_Tk: Tensor, weight_Tk: Tensor, add_TC: Tensor | None = None) -> Tensor:
        gate_up, down = self.packed("gate_up"), self.packed("down")
        if gate_up is not None and down is not None:
            return packed_products(x_TC, expert_Tk, weight_Tk, gate_up, down, self.activation, add_TC)
        return expert_products(x_TC, expert_Tk, weight_Tk, self.gate_up, self.down, self.activation, add_TC)


def _stack(
    name: str, part: str, experts: Slice, cut: tuple[Slice | None, Slice | None], hidden: int, at: int = 0
) -> Iterator[Piece]:
    """Pieces that put one matrix of each local expert at its place of the stack; `cut` is the dim of the width.

    The experts of other ranks are declared too, as pieces that read nothing: so each rank checks that all of them are
    there with the right shape, and knows that they are not foreign to the model.
    """
    shape = tuple(hidden if one is None else one.total for one in cut)
    full = tuple((0, hidden) if one is None else (one.start, one.stop) for one in cut)
    none = ((0, 0), (0, 0))
    for expert in range(experts.total):
        here = experts.start <= expert < experts.stop
        place = expert - experts.start if here else 0
        yield block(f"{name}.{expert}.{part}.weight", shape, full if here else none, (at, 0), select=(place,))


def expert_products(
    x_TC: Tensor,
    expert_Tk: Tensor,
    weight_Tk: Tensor,
    gate_up_EWC: Tensor,
    down_ECW: Tensor,
    activation: str,
    add_TC: Tensor | None = None,
) -> Tensor:
    """For each token the sum over its experts of ``weight * down(act(gate(x)) * up(x))``, [T, C] in the dtype of x.

    `expert_Tk` are places in the stack; negative ones, and E and above, mean "not here" and add nothing. Weights are
    fp32, and so is the sum; `add_TC` is added to it once it is rounded.

    On a GPU one token or two go to `helix.kernels.triton_experts`, which reads their experts as they lie, and up to
    `SMALL_BATCH` to `helix.kernels.triton_grouped`, which reads each expert once. More of them, in bf16
    and with strides of whole 16 bytes, go to `products_grouped`: grouped products between parts of DeepSpeed, which for
    large T are bound by arithmetic. None asks the host, so a step can be captured in a graph. Everywhere else, on a CPU
    above all, `products_by_loop` is the plain form of the same: it touches the experts that are hit and no others.
    """
    if x_TC.is_cuda and x_TC.shape[0] <= SMALL_BATCH and activation == "silu":
        from helix.kernels import triton_experts, triton_grouped

        kernel = triton_experts if x_TC.shape[0] <= FEW_TOKENS else triton_grouped
        y_TC: Tensor = kernel.expert_products(x_TC, expert_Tk, weight_Tk, gate_up_EWC, down_ECW, add_TC)
        return y_TC
    if x_TC.is_cuda and x_TC.dtype is torch.bfloat16 and _aligned(gate_up_EWC, down_ECW):
        y_TC = products_grouped(x_TC, expert_Tk, weight_Tk, gate_up_EWC, down_ECW, activation)
    else:
        y_TC = products_by_loop(x_TC, expert_Tk, weight_Tk, gate_up_EWC, down_ECW, activation)
    return y_TC if add_TC is None else y_TC + add_TC


def packed_products(
    x_TC: Tensor,
    expert_Tk: Tensor,
    weight_Tk: Tensor,
    gate_up_EWC: Packed,
    down_ECW: Packed,
    activation: str,
    add_TC: Tensor | None = None,
) -> Tensor:
    """`expert_products` with stacks held in FP8, which are dequantised as they are used, never as a whole.

    On a GPU `helix.kernels.triton_fp8_experts` reads each byte once for few tokens; elsewhere `products_by_loop`.
    """
    if x_TC.is_cuda and activation == "silu":
        from helix.kernels import triton_fp8_experts

        y_TC: Tensor = triton_fp8_experts.expert_products(x_TC, expert_Tk, weight_Tk, gate_up_EWC, down_ECW)
    else:
        y_TC = products_by_loop(x_TC, expert_Tk, weight_Tk, gate_up_EWC, down_ECW, activation)
    return y_TC if add_TC is None else y_TC + add_TC


def products_by_loop(
    x_TC: Tensor,
    expert_Tk: Tensor,
    weight_Tk: Tensor,
    gate_up_EWC: Tensor | Packed,
    down_ECW: Tensor | Packed,
    activation: str,
) -> Tensor:
    """`expert_products` in plain PyTorch: rows sorted by expert, one expert after the other."""
    num_experts, per_token = gate_up_EWC.shape[0], expert_Tk.shape[1]
    ids_R, order_R = local_ids(expert_Tk, num_experts).flatten().sort(stable=True)
    token_R, weight_R = order_R // per_token, weight_Tk.flatten()[order_R]
    counts = ids_R.bincount(minlength=num_experts + 1).tolist()
    y_TC = torch.zeros(x_TC.shape, dtype=torch.float32, device=x_TC.device)
    start = 0
    for expert, count in enumerate(counts[:num_experts]):
        if count:
            rows = slice(start, start + count)
            gate, up = _product(x_TC[token_R[rows]], gate_up_EWC[expert]).chunk(2, dim=-1)
            part = _product(ACTIVATIONS[activation](gate) * up, down_ECW[expert])
            y_TC.index_add_(0, token_R[rows], part.float() * weight_R[rows].unsqueeze(1))
        start += count
    return y_TC.to(x_TC.dtype)


def _product(x_RC: Tensor, weight_WC: Tensor | Packed) -> Tensor:
    if isinstance(weight_WC, Packed):
        return linear_fp8(x_RC, weight_WC)
    return nn.functional.linear(x_RC, weight_WC)


def products_grouped(
    x_TC: Tensor, expert_Tk: Tensor, weight_Tk: Tensor, gate_up_EWC: Tensor, down_ECW: Tensor, activation: str
) -> Tensor:
    """`expert_products` on a GPU: one grouped product each for gate and up together, and for down.

    From DeepSpeed come the count of rows, the fused activation, and the weighted sum of a token's rows, in fp32 and in
    one order. Two of its parts are not used. `GroupedExperts` keeps gate and up apart, which takes three products (or,
    with ``gate_up_impl="fused"``, a copy of all weights in every call); on the stack held here two do, never slower by
    more than noise and with half of the launches. The permutation of `ep_kernels` starts from rows that each source
    rank has sorted and pads every expert to 8 rows; grouped products need no such padding, so one sort of the ids is
    the whole permutation.
    """
    from deepspeed.moe.ep_count import count_tokens_per_expert
    from deepspeed.moe.ep_experts import apply_packed_expert_activation
    from deepspeed.ops.triton_ops.autoep_fused_token_ops import fused_weighted_restore

    (num_tokens, hidden), num_experts, per_token = x_TC.shape, gate_up_EWC.shape[0], expert_Tk.shape[1]
    if num_tokens == 0:
        return torch.empty_like(x_TC)
    ids_R, order_R = local_ids(expert_Tk, num_experts).flatten().sort(stable=True)
    counts_E = count_tokens_per_expert(ids_R, num_experts + 1)[:num_experts]
    end_E = counts_E.cumsum(0, dtype=torch.int32)
    both_RW = nn.functional.grouped_mm(x_TC[order_R // per_token], gate_up_EWC.transpose(1, 2), offs=end_E)
    if activation == "silu":
        active_RW = apply_packed_expert_activation(both_RW, "swiglu")
    else:
        gate, up = both_RW.chunk(2, dim=-1)
        active_RW = ACTIVATIONS[activation](gate) * up
    part_RC = nn.functional.grouped_mm(active_RW, down_ECW.transpose(1, 2), offs=end_E)
    # Rows of other ranks' experts lie behind the last group, where nothing is computed and anything may stand.
    part_RC.masked_fill_((ids_R == num_experts).unsqueeze(1), 0)
    y_TC: Tensor = fused_weighted_restore(part_RC, weight_Tk, order_R, per_token, (1, num_tokens, hidden))[0]
    return y_TC


def _aligned(*weights: Tensor) -> bool:
    """Whether all rows of `weights` start at multiples of 16 bytes."""
    return all(weight.shape[-1] * weight.element_size() % _ALIGNED_BYTES == 0 for weight in weights)
