"""The choice of experts from gate outputs.

Letters: T tokens, E experts, G groups of experts, k experts per token.

The steps, in the order in which DeepSeek-V2, DeepSeek-V3, Mixtral and Qwen3-MoE agree:

    scores  = softmax or sigmoid of x @ gate.T
    choice  = scores + correction bias                  (the bias changes who is chosen, never the weight)
    choice  = -inf outside of the best groups           (not 0: a corrected score may be negative)
    experts = the k largest of `choice`; equal values go to the lower expert id
    weights = scores of these experts, normalised to 1 where the model says so, then times `scaling`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Final, Literal

import torch
from torch import Tensor

from helix.model_spec import MoESpec

SCORES: Final[Mapping[str, Callable[[Tensor], Tensor]]] = MappingProxyType(
    {"softmax": partial(torch.softmax, dim=-1), "sigmoid": torch.sigmoid}
)

# As DeepSeek-V3 has it; beside a sum of softmax scores, which is at least 1/E, it vanishes.
NORMALISE_EPS = 1e-20


def route(logits_TE: Tensor, bias_E: Tensor | None, moe: MoESpec) -> tuple[Tensor, Tensor]:
    """Experts [T, k] (int64, best first) and their weights [T, k] (fp32) from fp32 gate outputs."""
    scores_TE = SCORES[moe.score](logits_TE)
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if moe.topk_groups < moe.num_groups:
        choice_TE = _mask_groups(choice_TE, moe.num_groups, moe.topk_groups, moe.group_score)
    expert_Tk = _largest(choice_TE, moe.experts_per_token)
    weight_Tk = scores_TE.gather(1, expert_Tk)
    if moe.normalise:
        weight_Tk = weight_Tk / (weight_Tk.sum(dim=-1, keepdim=True) + NORMALISE_EPS)
    return expert_Tk, weight_Tk * moe.scaling


def local_ids(place_Tk: Tensor, count: int) -> Tensor:
    """`place_Tk` with `count`, which is no place, for all that are not in 0 .. `count` - 1."""
    return place_Tk.masked_fill((place_Tk < 0) | (place_Tk >= count), count)


def _mask_groups(choice_TE: Tensor, groups: int, kept: int, score: Literal["max", "top2_sum"]) -> Tensor:
    """-inf for the experts outside of the `kept` best of `groups` equal, consecutive groups."""
    choice_TGe = choice_TE.unflatten(-1, (groups, -1))
    score_TG = choice_TGe.amax(dim=-1) if score == "max" else choice_TGe.topk(2, dim=-1).values.sum(dim=-1)
    masked_TG = torch.ones_like(score_TG, dtype=torch.bool).scatter(1, _largest(score_TG, kept), False)
    masked_TGe: Tensor = choice_TGe.masked_fill(masked_TG.unsqueeze(-1), -torch.inf)
    return masked_TGe.flatten(-2)


def _largest(x: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest entries of the last dim, largest first, the lower index first among equals."""
    return torch.sort(x, dim=-1, descending=True, stable=True).indices[..., :count]
