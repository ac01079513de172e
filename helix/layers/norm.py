"""RMSNorm, computed in fp32 and returned in the input's dtype; on a GPU by `helix.kernels.triton_norm`."""

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
        if x.is_cuda:
            from helix.kernels.triton_norm import rms_norm

            return rms_norm(x, self.weight, self.eps)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)

    def after_adding(self, x_TC: Tensor, add_TC: Tensor) -> tuple[Tensor, Tensor]:
        """``x + add``, and its norm."""
        if x_TC.is_cuda:
            from helix.kernels.triton_norm import add_rms_norm

            return add_rms_norm(x_TC, add_TC, self.weight, self.eps)
        x_TC = x_TC + add_TC
        return x_TC, self(x_TC)
