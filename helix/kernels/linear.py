"""Products with weight matrices, as layers use them.

Letters: T tokens, H heads with a matrix each, N outputs, C inputs, W width of an FFN.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from helix.kernels.swiglu import swiglu


def linear(x_TC: Tensor, weight_NC: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``, [T, N] in the dtype of x."""
    return functional.linear(x_TC, weight_NC, bias_N)


def linear_fp32(x_TC: Tensor, weight_NC: Tensor) -> Tensor:
    """``x @ weight.T`` of values in the model's dtype, summed and returned in fp32, [T, N]."""
    return functional.linear(x_TC.float(), weight_NC.float())


def gated_linear(x_TC: Tensor, weight_NC: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """``silu(gate) * up``, [T, W], of the product with N = 2 W rows, gate first."""
    return swiglu(functional.linear(x_TC, weight_NC, bias_N))


def head_linear(x_THC: Tensor, weight_HNC: Tensor) -> Tensor:
    """Each head's ``x @ weight.T``, [T, H, N]."""
    return torch.matmul(x_THC.transpose(0, 1), weight_HNC.transpose(1, 2)).transpose(0, 1)
