"""Rows of an embedding that is cut along the vocabulary.

Letters: T tokens, V rows of the vocabulary that are held here, C model width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def embed(token_ids_T: Tensor, weight_VC: Tensor, start: int, size: int) -> Tensor:
    """[T, C]: row ``id - start`` of the weight for ids in ``[start, start + size)``, zeros for all others."""
    local_T = token_ids_T - start
    foreign_T = (local_T < 0) | (local_T >= size)
    x_TC = torch.nn.functional.embedding(local_T.masked_fill(foreign_T, 0), weight_VC)
    return x_TC.masked_fill(foreign_T.unsqueeze(1), 0)
