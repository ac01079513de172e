"""`Linear`: a plain product whose weight is a set of rectangles of checkpoint tensors.

What a rank holds is decided where a layer is built, by the pieces it passes; column- and row-parallel are only names
for which dim the pieces cut (DeepSpeed's convention: column-parallel cuts the outputs, row-parallel the inputs).
The weight may be held in FP8 (`helix.weights.packing`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from helix.kernels import gated_linear, linear, linear_fp8, swiglu
from helix.weights import Packable, Piece


class Linear(Packable):
    """``x @ weight.T + bias`` with weight [outputs, inputs]; places that no piece covers are zero."""

    packable = ("weight",)

    def __init__(
        self,
        outputs: int,
        inputs: int,
        weight: tuple[Piece, ...],
        bias: tuple[Piece, ...] = (),
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype, device=device), requires_grad=False)
        self.declared = {"weight": weight}
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype, device=device), requires_grad=False)
            self.declared["bias"] = bias

    def forward(self, x: Tensor) -> Tensor:
        packed = self.packed("weight")
        if packed is not None:
            return linear_fp8(x, packed, self.bias)
        return linear(x, self.weight, self.bias)

    def gated(self, x: Tensor) -> Tensor:
        """``silu(gate) * up`` of the product, whose first half of outputs is the gate."""
        if "weight" in self.grids:
            return swiglu(self(x))
        return gated_linear(x, self.weight, self.bias)
