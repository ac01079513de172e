"""Rows of the KV cache in FP8: one token's row of one head is e4m3 values with one fp32 scale.

The first D values of a row share the scale ``largest magnitude / 448``; values behind them (the rotary part of a
latent) stay in their own dtype. A row depends on its token alone, so it is the same in every layout, batch and chunk.

Letters: T tokens, P pages, B page_tokens, K rows of a token (KV heads, or 1 for latents), D and R widths of the values
that are in FP8 and of those that are not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from helix.kernels.append import append
from helix.kernels.fp8 import FP8_MAX


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """A pool of such rows: `values_PBKD` in e4m3, `scale_PBK` in fp32, and `tail_PBKR` or None."""

    values_PBKD: Tensor
    scale_PBK: Tensor
    tail_PBKR: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[P, B, K, D + R], as a pool of plain rows has it."""
        pages, page_tokens, rows, width = self.values_PBKD.shape
        return pages, page_tokens, rows, width + (0 if self.tail_PBKR is None else self.tail_PBKR.shape[3])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        rest = () if self.tail_PBKR is None else (self.tail_PBKR,)
        return (self.values_PBKD, self.scale_PBK, *rest)

    @property
    def dtype(self) -> torch.dtype:
        return self.values_PBKD.dtype

    @property
    def device(self) -> torch.device:
        return self.values_PBKD.device

    def __getitem__(self, pages: Tensor) -> Fp8Rows:
        """The rows of `pages`."""
        tail = None if self.tail_PBKR is None else self.tail_PBKR[pages]
        return Fp8Rows(self.values_PBKD[pages], self.scale_PBK[pages], tail)

    def float(self) -> Tensor:
        """fp32 [P, B, K, D + R]: what the rows stand for."""
        first = self.values_PBKD.float() * self.scale_PBK.unsqueeze(3)
        return first if self.tail_PBKR is None else torch.cat((first, self.tail_PBKR.float()), 3)


def quantise_rows(values_TKD: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 values [T, K, D] and scales [T, K] of new rows; a row of zeros has scale 1. NaN stays NaN."""
    wide = values_TKD.float()
    scale = wide.abs().amax(2) / FP8_MAX
    scale = torch.where(scale == 0, 1.0, scale.clamp(min=torch.finfo(torch.float32).tiny))
    return (wide / scale.unsqueeze(2)).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


def append_fp8(pool: Fp8Rows, values_TKX: Tensor, slot_T: Tensor) -> None:
    """`append` of rows [T, K, D + R] to an FP8 pool."""
    width = pool.values_PBKD.shape[3]
    values_TKD, scale_TK = quantise_rows(values_TKX[..., :width])
    append(pool.values_PBKD.view(torch.uint8), values_TKD.view(torch.uint8), slot_T)
    append(pool.scale_PBK, scale_TK, slot_T)
    if pool.tail_PBKR is not None:
        append(pool.tail_PBKR, values_TKX[..., width:], slot_T)
