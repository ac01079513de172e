"""Tokens drawn at random from logits, without ranks, and the drawing itself.

Weights are summed in fp64: a sum may be taken in any order, and its rounding then moves no token.

Letters: R rows, C candidates of a row, V vocabulary, P parts that it is searched in, W width of a part.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_MAX_PARTS = 256


def draw_tokens(
    logits_RV: Tensor, greedy_R: Tensor, temperature_R: Tensor, min_p_R: Tensor, uniform_R: Tensor
) -> Tensor:
    """int64 [R]: a token of each row, drawn in proportion to ``exp(logit / temperature)``, in the order of the ids.

    `greedy_R` is the id of each row's largest logit. Tokens of less than `min_p_R` times its probability are left out.
    `uniform_R` in [0, 1) is the random number. These three are fp64, and may lie apart. A row whose greedy id is
    negative or whose temperature is not above 0 gets its greedy id.
    """
    best_R1 = logits_RV.gather(1, greedy_R.clamp(min=0)[:, None])
    weight_RV = weigh(logits_RV, best_R1, temperature_R[:, None])
    token_R = pick(weight_RV.where(weight_RV >= min_p_R[:, None], 0.0), uniform_R[:, None], greedy_R)
    return torch.where((temperature_R > 0) & (greedy_R >= 0), token_R, greedy_R)


def weigh(logits_RV: Tensor, best_R1: Tensor, temperature_R1: Tensor) -> Tensor:
    """fp64 [R, V]: each token's share of the best one's probability, which weighs 1."""
    shifted_RV = logits_RV.float() - best_R1.float()
    return shifted_RV.double().div_(temperature_R1).exp_()


def pick(weight_RC: Tensor, uniform_R1: Tensor, fallback_R: Tensor) -> Tensor:
    """Places [R] drawn in proportion to the weights, by inversion of their running sum: its part first, then within."""
    parts = math.gcd(weight_RC.shape[1], _MAX_PARTS)
    weight_RPW = weight_RC.unflatten(1, (parts, -1))
    width = weight_RPW.shape[2]
    sum_RP = weight_RPW.sum(dim=-1).cumsum(dim=-1)
    target_R1 = uniform_R1 * sum_RP[:, -1:]
    part_R1 = torch.searchsorted(sum_RP, target_R1, right=True).clamp(max=parts - 1)
    before_R1 = torch.nn.functional.pad(sum_RP, (1, 0)).gather(-1, part_R1)
    within_RW = weight_RPW.gather(1, part_R1[:, :, None].expand(-1, 1, width))[:, 0]
    place_R1 = torch.searchsorted(within_RW.cumsum(dim=-1) + before_R1, target_R1, right=True).clamp(max=width - 1)
    # Rounding may land on a weight of 0, about once in 2**50 draws; that token is never legal.
    weight_R = within_RW.gather(-1, place_R1)[:, 0]
    return torch.where(weight_R > 0, (part_R1 * width + place_R1)[:, 0], fallback_R)
