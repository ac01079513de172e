"""Around the cache of MLA latents: a new token's latent on its way in, and queries that read latents.

Letters: T tokens, G query heads, N width of a head's part without position, R rotated pairs, Q = N + 2 R, L latent
width, W = L + 2 R, P pages, B page_tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from helix import kernels
from helix.kernels.fp8_cache import Fp8Rows


def store_latents(
    latent_TW: Tensor,
    weight_L: Tensor,
    eps: float,
    rotary: tuple[Tensor, Tensor],
    pool_PB1W: Tensor | Fp8Rows,
    slot_T: Tensor,
    *,
    interleaved: bool,
) -> None:
    """Norm the first L values of each row, rotate the others, and write the row to its slot of the contiguous pool.

    Rows of `latent_TW` may lie apart; `rotary` are cos and sin, contiguous fp32 [T, R]; a negative slot is not ours.
    """
    latent = weight_L.shape[0]
    rope_T1R = kernels.apply_rotary(latent_TW[:, None, latent:], *rotary, interleaved=interleaved)
    row_T1W = torch.cat((kernels.rms_norm(latent_TW[:, :latent], weight_L, eps).unsqueeze(1), rope_T1R), -1)
    kernels.append(pool_PB1W, row_T1W, slot_T)


def absorb(query_TGQ: Tensor, w_uk_GNL: Tensor, rotary: tuple[Tensor, Tensor], *, interleaved: bool) -> Tensor:
    """Queries over latents, [T, G, W]: each head's first N values times its W_UK, and the others rotated.

    Tokens and heads of `query_TGQ` may lie apart; its last ``2 R`` values are not rotated yet.
    """
    nope = w_uk_GNL.shape[1]
    latent_TGL = torch.matmul(query_TGQ[..., :nope].transpose(0, 1), w_uk_GNL).transpose(0, 1)
    rope_TGR = kernels.apply_rotary(query_TGQ[..., nope:], *rotary, interleaved=interleaved)
    return torch.cat((latent_TGL, rope_TGR), -1)
