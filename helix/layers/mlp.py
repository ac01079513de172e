"""Gated MLP of the FFN phase: gate and up are column-parallel, down is row-parallel, one all-reduce closes it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from helix.comm.group import Group
from helix.layers.linear import Linear
from helix.layout import Slice
from helix.weights import cols, rows, whole

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_pytorch_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "relu": nn.functional.relu,
}


class MLP(nn.Module):
    """``down(act(gate(x)) * up(x))`` on slice `width` of the FFN width; partial sums are reduced over `group`.

    A caller that has more to reduce takes `part` and adds `down_bias` behind its own sum (the shared expert does).
    """

    def __init__(
        self,
        name: str,
        hidden: int,
        width: Slice,
        activation: str,
        group: Group,
        *,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        local, total = width.padded, width.total
        gate, up, down = f"{name}.gate_proj", f"{name}.up_proj", f"{name}.down_proj"
        in_shape = (total, hidden)
        self.gate_up = Linear(
            2 * local,
            hidden,
            (
                rows(f"{gate}.weight", in_shape, width.start, width.stop),
                rows(f"{up}.weight", in_shape, width.start, width.stop, at=local),
            ),
            (
                rows(f"{gate}.bias", (total,), width.start, width.stop),
                rows(f"{up}.bias", (total,), width.start, width.stop, at=local),
            )
            if bias
            else (),
            dtype=dtype,
            device=device,
        )
        self.down = Linear(
            hidden,
            local,
            (cols(f"{down}.weight", (hidden, total), width.start, width.stop),),
            dtype=dtype,
            device=device,
        )
        self.down_bias: nn.Parameter | None = None
        self.declared = {}
        if bias:
            self.down_bias = nn.Parameter(torch.empty(hidden, dtype=dtype, device=device), requires_grad=False)
            self.declared["down_bias"] = (whole(f"{down}.bias", (hidden,)),)
        self.activation = activation
        self.group = group

    def part(self, x_TC: Tensor) -> Tensor:
        """This rank's part of the sum over `group`, without the last bias."""
        if self.activation == "silu":
            active_TW = self.gate_up.gated(x_TC)
        else:
            gate_TW, up_TW = self.gate_up(x_TC).chunk(2, dim=-1)
            active_TW = ACTIVATIONS[self.activation](gate_TW) * up_TW
        y_TC: Tensor = self.down(active_TW)
        return y_TC

    def forward(self, x_TC: Tensor) -> Tensor:
        y_TC = self.group.all_reduce(self.part(x_TC))
        return y_TC if self.down_bias is None else y_TC + self.down_bias
