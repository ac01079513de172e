"""The rotation of rotary position embedding.

Letters: T tokens, H heads, D head width, R rotated pairs (half the rotary width).
"""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rotary(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor, *, interleaved: bool, start: int = 0) -> Tensor:
    """Rotate ``2 * R`` values of every head of `x_THD`, from `start` on; the others pass. Shape and dtype are x's.

    Pair j is (x[j], x[j + R]), or with `interleaved` (x[2j], x[2j + 1]), as DeepSeek checkpoints store it; both members
    stay in their places, so q and k agree (transformers' deepseek_v3 moves them into halves: other order, same q.k).

    The rotation runs in fp32 and rounds once. transformers rounds cos and sin to x's dtype and works in it: equal bits
    for fp32; for bf16 and fp16 this result is the more exact one, and the two differ by a few units in the last place.
    """
    stop = start + 2 * cos_TR.shape[-1]
    wide_THD = x_THD[..., start:stop].float()
    cos_T1R, sin_T1R = cos_TR[:, None, :], sin_TR[:, None, :]
    if interleaved:
        first, second = wide_THD[..., 0::2], wide_THD[..., 1::2]
    else:
        first, second = wide_THD.chunk(2, dim=-1)
    turned = (first * cos_T1R - second * sin_T1R, second * cos_T1R + first * sin_T1R)
    out_THD = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    out_THD = out_THD.to(x_THD.dtype)
    if (start, stop) == (0, x_THD.shape[-1]):
        return out_THD
    return torch.cat((x_THD[..., :start], out_THD, x_THD[..., stop:]), dim=-1)
