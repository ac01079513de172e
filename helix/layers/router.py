"""`Router`: which experts a token goes to, and with what weight. All of it in fp32, whatever the model's dtype.

Letters: T tokens, C model width, E experts, G groups of experts, k experts per token.

The steps, in the order in which DeepSeek-V2, DeepSeek-V3, Mixtral and Qwen3-MoE agree:

    scores  = softmax or sigmoid of x @ gate.T
    choice  = scores + correction bias                  (the bias changes who is chosen, never the weight)
    choice  = -inf outside of the best groups           (not 0: a corrected score may be negative)
    experts = the k largest of `choice`; equal values go to the lower expert id
    weights = scores of these experts, normalised to 1 where the model says so, then times `scaling`

Why not `deepspeed.moe.ep_router.TokenChoiceTopKRouter`, which has the same steps:

* its gate is an `nn.Linear` in the dtype of x, so that bf16 outputs lose what separates close experts before they
  become fp32 (with random gates of DeepSeek-V3's and Kimi-K2's sizes, 2 tokens in 100 then go to other experts);
  DeepSeek-V2 and V3 take the product of bf16 values in fp32, which it can only do on an fp32 copy of x in every layer;
* it chooses with ``torch.topk(sorted=False)``, which leaves ties and order to the device: a sigmoid is exactly 1.0 from
  logit 17 on, so ties are real, and one checkpoint would answer differently on a CPU and on a GPU;
* it counts tokens per expert in every call, two kernels that neither way of dispatch reads.

On fp32 input without ties the two agree, which the tests check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Final, Literal

import torch
from torch import Tensor, nn

from helix.model_spec import MoESpec
from helix.weights import whole

SCORES: Final[Mapping[str, Callable[[Tensor], Tensor]]] = MappingProxyType(
    {"softmax": partial(torch.softmax, dim=-1), "sigmoid": torch.sigmoid}
)

# As DeepSeek-V3 has it; beside a sum of softmax scores, which is at least 1/E, it vanishes.
_NORMALISE_EPS = 1e-20


class Router(nn.Module):
    """The gate of one MoE layer, whole on every rank. ``forward`` gives (experts [T, k] int64, weights [T, k] fp32)."""

    def __init__(self, name: str, hidden: int, moe: MoESpec, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(
            torch.empty(moe.num_experts, hidden, dtype=dtype, device=device), requires_grad=False
        )
        self.declared = {"weight": (whole(f"{name}.weight", (moe.num_experts, hidden)),)}
        self.correction_bias: nn.Parameter | None = None
        if moe.correction_bias:
            bias = torch.empty(moe.num_experts, dtype=torch.float32, device=device)
            self.correction_bias = nn.Parameter(bias, requires_grad=False)
            self.declared["correction_bias"] = (whole(f"{name}.e_score_correction_bias", (moe.num_experts,)),)

    def forward(self, x_TC: Tensor) -> tuple[Tensor, Tensor]:
        return route(fp32_product(x_TC, self.weight), self.correction_bias, self.moe)


def fp32_product(x_TC: Tensor, weight_EC: Tensor) -> Tensor:
    """``x @ weight.T`` of values in the model's dtype, summed and returned in fp32."""
    if x_TC.is_cuda and x_TC.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(x_TC, weight_EC.t(), out_dtype=torch.float32)
    return nn.functional.linear(x_TC.float(), weight_EC.float())


def route(logits_TE: Tensor, bias_E: Tensor | None, moe: MoESpec) -> tuple[Tensor, Tensor]:
    """Experts [T, k] (int64, best first) and their weights [T, k] (fp32) from fp32 gate outputs."""
    if logits_TE.is_cuda and moe.topk_groups >= moe.num_groups:
        from helix.kernels import triton_router

        return triton_router.route(
            logits_TE,
            bias_E,
            experts_per_token=moe.experts_per_token,
            softmax=moe.score == "softmax",
            normalise=moe.normalise,
            scaling=moe.scaling,
            eps=_NORMALISE_EPS,
        )
    scores_TE = SCORES[moe.score](logits_TE)
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if moe.topk_groups < moe.num_groups:
        choice_TE = _mask_groups(choice_TE, moe.num_groups, moe.topk_groups, moe.group_score)
    expert_Tk = _largest(choice_TE, moe.experts_per_token)
    weight_Tk = scores_TE.gather(1, expert_Tk)
    if moe.normalise:
        weight_Tk = weight_Tk / (weight_Tk.sum(dim=-1, keepdim=True) + _NORMALISE_EPS)
    return expert_Tk, weight_Tk * moe.scaling


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
