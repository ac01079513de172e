"""The best token of each row of logits.

Letters: R rows, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Parts that the vocabulary is searched in, where it divides.
_MAX_PARTS = 64


def best_tokens(logits_RV: Tensor, not_finite: int) -> Tensor:
    """int64 [R]: id of each row's largest logit, the lowest id among equals; `not_finite` where that is NaN or inf.

    Rows may lie apart.
    """
    vocab = logits_RV.shape[1]
    parts = math.gcd(vocab, _MAX_PARTS)
    best_RP, place_RP = logits_RV.unflatten(1, (parts, -1)).max(dim=-1)
    best_R, part_R = best_RP.max(dim=-1)
    token_R = part_R * (vocab // parts) + place_RP.gather(1, part_R.unsqueeze(1)).squeeze(1)
    return torch.where(best_R.isfinite(), token_R, not_finite)
