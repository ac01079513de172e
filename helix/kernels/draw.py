"""Tokens drawn at random from logits, without ranks, and the drawing itself.

Each token gets a random number of its own, hashed from the row's number and its id, and the token with the largest
``weight / -log(number)`` is taken: an exponential race, which each wins in proportion to its weight. So the rounding of
the logits, which differs from batch to batch and from layout to layout, moves a token about as rarely as two tokens
are within it of each other. (Inverting the running sum of the weights does not have this: there the rounding of all
logits before a token adds up, and moves every token that is rarer than the sum.)

Letters: R rows, C candidates of a row, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

# SplitMix64's step and factors (Steele, Lea, Flood 2014), as signed integers.
GOLDEN64 = 0x9E3779B97F4A7C15 - (1 << 64)
FACTOR1 = 0xBF58476D1CE4E5B9 - (1 << 64)
FACTOR2 = 0x94D049BB133111EB - (1 << 64)


def draw_tokens(
    logits_RV: Tensor, greedy_R: Tensor, temperature_R: Tensor, min_p_R: Tensor, uniform_R: Tensor
) -> Tensor:
    """int64 [R]: a token of each row, drawn in proportion to ``exp(logit / temperature)``.

    `greedy_R` is the id of each row's largest logit. Tokens of less than `min_p_R` times its probability are left out.
    `uniform_R` in [0, 1) is the random number. These three are fp64, and may lie apart. A row whose greedy id is
    negative or whose temperature is not above 0 gets its greedy id.
    """
    best_R1 = logits_RV.gather(1, greedy_R.clamp(min=0)[:, None])
    weight_RV = weigh(logits_RV, best_R1, temperature_R[:, None])
    id_V = torch.arange(weight_RV.shape[1], device=weight_RV.device)
    token_R = pick(weight_RV.where(weight_RV >= min_p_R[:, None], 0.0), id_V, uniform_R[:, None])
    return torch.where((temperature_R > 0) & (greedy_R >= 0), token_R, greedy_R)


def weigh(logits_RV: Tensor, best_R1: Tensor, temperature_R1: Tensor) -> Tensor:
    """fp64 [R, V]: each token's share of the best one's probability, which weighs 1."""
    shifted_RV = logits_RV.float() - best_R1.float()
    return shifted_RV.double().div_(temperature_R1).exp_()


def pick(weight_RC: Tensor, id_RC: Tensor, uniform_R1: Tensor) -> Tensor:
    """Places [R] drawn in proportion to the fp64 weights; `id_RC` are the candidates' tokens. A weight of 0 never wins.

    The result depends on each token's weight and id, and not on the order of the candidates.
    """
    number_RC = token_numbers(uniform_R1, id_RC)
    return (weight_RC / number_RC.log_().neg_()).argmax(dim=-1)


def token_numbers(uniform_R1: Tensor, id_RC: Tensor) -> Tensor:
    """fp64 [R, C], evenly spread between 0 and 1, both left out: each token's own number in its row."""
    key_R1 = (uniform_R1 * 2.0**52).long()
    value_RC = key_R1 + (id_RC + 1) * GOLDEN64
    # Shifts of signed integers repeat the sign, which the masks take away.
    value_RC = (value_RC ^ (value_RC >> 30 & 0x3FFFFFFFF)) * FACTOR1
    value_RC = (value_RC ^ (value_RC >> 27 & 0x1FFFFFFFFF)) * FACTOR2
    value_RC = value_RC ^ (value_RC >> 31 & 0x1FFFFFFFF)
    return ((value_RC >> 12 & 0xFFFFFFFFFFFFF).double() + 0.5) * 2.0**-52
