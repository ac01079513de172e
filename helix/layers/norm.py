"""RMSNorm, computed in fp32 and returned in the input's dtype."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from helix.weights import whole


class RMSNorm(nn.Module):
    """``x / rms(x) * weight`` over the last dim."""

    def __init__(self, name: str, width: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype, device=device), requires_grad=False)
        self.declared = {"weight": (whole(f"{name}.weight", (width,)),)}
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)
