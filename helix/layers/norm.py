"""RMSNorm, computed in fp32 and returned in the input's dtype."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from helix.kernels import add_rms_norm, rms_norm
from helix.weights import whole


class RMSNorm(nn.Module):
    """``x / rms(x) * weight`` over the last dim."""

    def __init__(self, name: str, width: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype, device=device), requires_grad=False)
        self.declared = {"weight": (whole(f"{name}.weight", (width,)),)}
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def after_adding(self, x_TC: Tensor, add_TC: Tensor) -> tuple[Tensor, Tensor]:
        """``x + add``, and its norm."""
        normal_TC, total_TC = add_rms_norm(x_TC, add_TC, self.weight, self.eps)
        return total_TC, normal_TC
