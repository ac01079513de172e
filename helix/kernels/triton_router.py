"""Choice of experts from gate outputs on a GPU in Triton: what `helix.layers.router.route` computes, in one launch.

For models that choose among all experts (no groups). Letters: T tokens, E experts, k experts per token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _route(  # type: ignore[no-untyped-def]
    logits_ptr,
    bias_ptr,
    expert_ptr,
    weight_ptr,
    scaling,
    eps,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    TOP: tl.constexpr,
    TOP_PAD: tl.constexpr,
    SOFTMAX: tl.constexpr,
    BIAS: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    """One token: its best experts one after the other, the lower id first among equals."""
    token = tl.program_id(0).to(tl.int64)
    expert_e = tl.arange(0, E_PAD)
    there_e = expert_e < E
    logit_e = tl.load(logits_ptr + token * E + expert_e, mask=there_e, other=float("-inf"))
    if SOFTMAX:
        power_e = tl.exp(logit_e - tl.max(logit_e, 0))
        score_e = power_e / tl.sum(power_e, 0)
    else:
        score_e = 1.0 / (1.0 + tl.exp(-logit_e))
    choice_e = score_e
    if BIAS:
        choice_e += tl.load(bias_ptr + expert_e, mask=there_e, other=0.0)
    # Comparisons with NaN would let the lanes of a reduction disagree; chosen first, it stays loud in the weight.
    choice_e = tl.where(choice_e == choice_e, choice_e, float("inf"))
    choice_e = tl.where(there_e, choice_e, float("-inf"))
    place_k = tl.arange(0, TOP_PAD)
    best_k = tl.zeros((TOP_PAD,), tl.int32)
    weight_k = tl.zeros((TOP_PAD,), tl.float32)
    for place in range(TOP):
        best = tl.argmax(choice_e, 0)
        weight = tl.sum(tl.where(expert_e == best, score_e, 0.0), 0)
        best_k = tl.where(place_k == place, best, best_k)
        weight_k = tl.where(place_k == place, weight, weight_k)
        choice_e = tl.where(expert_e == best, float("-inf"), choice_e)
    if NORMALISE:
        weight_k = weight_k / (tl.sum(weight_k, 0) + eps)
    tl.store(expert_ptr + token * TOP + place_k, best_k.to(tl.int64), mask=place_k < TOP)
    tl.store(weight_ptr + token * TOP + place_k, weight_k * scaling, mask=place_k < TOP)


def route(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    *,
    experts_per_token: int,
    softmax: bool,
    normalise: bool,
    scaling: float,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Experts [T, k] (int64, best first) and weights [T, k] (fp32) from contiguous fp32 `logits_TE`."""
    tokens, experts = logits_TE.shape
    expert_Tk = torch.empty(tokens, experts_per_token, dtype=torch.int64, device=logits_TE.device)
    weight_Tk = torch.empty(tokens, experts_per_token, dtype=torch.float32, device=logits_TE.device)
    if tokens:
        _route[(tokens,)](
            logits_TE.contiguous(),
            logits_TE if bias_E is None else bias_E,
            expert_Tk,
            weight_Tk,
            scaling,
            eps,
            E=experts,
            E_PAD=triton.next_power_of_2(experts),
            TOP=experts_per_token,
            TOP_PAD=triton.next_power_of_2(experts_per_token),
            SOFTMAX=softmax,
            BIAS=bias_E is not None,
            NORMALISE=normalise,
            num_warps=1,
        )
    return expert_Tk, weight_Tk
