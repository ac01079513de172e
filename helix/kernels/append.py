"""Append: store the new tokens' K or V rows (or latents) in this rank's pages. Data movement only, bit-exact.

Letters: T tokens, P pages, B page_tokens; the trailing dims are the row that one token stores.
"""

from __future__ import annotations

import torch
from torch import Tensor


def append(pool_PB: Tensor, values_T: Tensor, slot_T: Tensor) -> None:
    """Write ``values_T[t]`` to slot ``slot_T[t]`` of the pool, in place; a negative slot belongs to another rank.

    Parameters
    ----------
    pool_PB
        [P, B, ...] this layer's pages.
    values_T
        [T, ...] one row a token, same trailing dims as the pool.
    slot_T
        int64 [T], ``page * B + offset``; -1 where this rank does not own the position.
    """
    owned = torch.nonzero(slot_T >= 0).squeeze(1)
    pool_PB.flatten(0, 1).index_copy_(0, slot_T[owned], values_T[owned].to(pool_PB.dtype))
