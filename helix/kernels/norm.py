"""RMSNorm with the residual's addition: what stands between any two blocks of a model.

Letters: T tokens, C width of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x_TC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    """``x / rms(x) * weight`` over the last dim: fp32 inside, rounded to x's dtype before the weight's factor."""
    wide = x_TC.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight_C * wide.to(x_TC.dtype)


def add_rms_norm(x_TC: Tensor, residual_TC: Tensor, weight_C: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of ``x + residual``, and that sum rounded to x's dtype: the next residual, and what is normed."""
    total_TC = x_TC + residual_TC
    return rms_norm(total_TC, weight_C, eps), total_TC
