"""FP8 matrices with block scales: what they stand for, how they are made, and products with them in plain PyTorch.

`Packed` is e4m3 values beside fp32 scales on a grid: ``values[i, j] * scale[i // rows, (j + skip) // cols]``.
A scale of zero is legal (the block is zero), and so is any finite one.

Letters: T tokens, N outputs, K inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from helix.layout import ScaleGrid

# Largest finite value of e4m3.
FP8_MAX = 448.0


@dataclass(frozen=True, slots=True)
class Packed:
    """An FP8 matrix, or a stack of them: `values` [..., N, K] in e4m3 and fp32 `scale` [..., rows, columns]."""

    values: Tensor
    scale: Tensor
    grid: ScaleGrid

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def __getitem__(self, index: int) -> Packed:
        """One matrix of a stack."""
        return Packed(self.values[index], self.scale[index], self.grid)

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """``values * scale`` in fp32, rounded once, to `dtype`."""
        outputs, inputs = self.values.shape[-2:]
        rows = torch.arange(outputs, device=self.values.device) // self.grid.rows
        columns = (torch.arange(inputs, device=self.values.device) + self.grid.skip) // self.grid.cols
        spread = self.scale.index_select(-2, rows).index_select(-1, columns)
        return spread.mul_(self.values.float()).to(dtype)


def quantise(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """e4m3 values of the fp32 matrix `weight`, which begins at a block's corner, and its scales, one for each block.

    A block's scale is its largest magnitude over 448 (DeepSeek-V3 report, section 3.3); a block of zeros has scale 1.
    """
    (rows, cols), (bm, bn) = weight.shape, block
    grown = nn.functional.pad(weight, (0, -cols % bn, 0, -rows % bm))
    blocks = grown.unflatten(1, (-1, bn)).unflatten(0, (-1, bm))
    scale = blocks.abs().amax((1, 3)).div_(FP8_MAX)
    # Not below the smallest normal number, so that the division cannot overflow.
    scale = torch.where(blocks.abs().amax((1, 3)) > 0, scale.clamp(min=torch.finfo(torch.float32).tiny), 1.0)
    values = (blocks / scale[:, None, :, None]).clamp_(-FP8_MAX, FP8_MAX)
    return values.flatten(2, 3).flatten(0, 1)[:rows, :cols].to(torch.float8_e4m3fn), scale


def quantise_groups(x_TK: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """e4m3 values and fp32 scales [T, K / group] of activations, each run of `group` values of a token by itself.

    The scales lie with tokens fastest, as scaled products on a GPU read them. K is a multiple of `group`.
    """
    runs = x_TK.float().unflatten(1, (-1, group))
    scale = runs.abs().amax(2).clamp_(min=1e-12).div_(FP8_MAX)
    values = (runs / scale.unsqueeze(2)).clamp_(-FP8_MAX, FP8_MAX).flatten(1).to(torch.float8_e4m3fn)
    return values, scale.t().contiguous().t()


def linear_fp8(x: Tensor, weight: Packed, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` for x [..., K] in its own dtype; the weight is dequantised to it for each use."""
    return nn.functional.linear(x, weight.dequantise(x.dtype), bias)
