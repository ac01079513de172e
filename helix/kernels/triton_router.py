"""Choice of experts from gate outputs on a GPU in Triton: the contract of `helix.kernels.router.route`, in one launch.

Letters: T tokens, E experts, G groups of experts, M experts of a group, k experts per token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from helix.kernels.router import NORMALISE_EPS
from helix.kernels.triton_launch import begin, launch_options
from helix.model_spec import MoESpec


@triton.jit
def _route(  # type: ignore[no-untyped-def]
    logits_ptr,
    bias_ptr,
    expert_ptr,
    weight_ptr,
    scaling,
    eps,
    G: tl.constexpr,
    G_PAD: tl.constexpr,
    M: tl.constexpr,
    M_PAD: tl.constexpr,
    KEPT: tl.constexpr,
    TOP: tl.constexpr,
    TOP_PAD: tl.constexpr,
    SOFTMAX: tl.constexpr,
    BIAS: tl.constexpr,
    PAIRS: tl.constexpr,
    NORMALISE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One token: its best experts one after the other, the lower id first among equals."""
    group_g = tl.arange(0, G_PAD)
    member_m = tl.arange(0, M_PAD)
    expert_gm = group_g[:, None] * M + member_m[None, :]
    there_gm = (group_g < G)[:, None] & (member_m < M)[None, :]
    if BIAS:
        bias_gm = tl.load(bias_ptr + expert_gm, mask=there_gm, other=0.0)
    begin(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    logit_gm = tl.load(logits_ptr + token * (G * M) + expert_gm, mask=there_gm, other=float("-inf"))
    if SOFTMAX:
        power_gm = tl.exp(logit_gm - tl.max(logit_gm))
        score_gm = power_gm / tl.sum(power_gm)
    else:
        score_gm = 1.0 / (1.0 + tl.exp(-logit_gm))
    choice_gm = score_gm
    if BIAS:
        choice_gm += bias_gm
    # Comparisons with NaN would let the lanes of a reduction disagree; chosen first, it stays loud in the weight.
    choice_gm = tl.where(choice_gm == choice_gm, choice_gm, float("inf"))
    choice_gm = tl.where(there_gm, choice_gm, float("-inf"))
    if KEPT < G:
        best_g = tl.max(choice_gm, 1)
        if PAIRS:
            first_g = tl.argmax(choice_gm, 1)
            best_g += tl.max(tl.where(member_m[None, :] == first_g[:, None], float("-inf"), choice_gm), 1)
        best_g = tl.where(group_g < G, best_g, float("-inf"))
        kept_g = tl.zeros((G_PAD,), tl.int32)
        for _ in range(KEPT):
            # What was kept already must not come again, though all others may be -inf.
            best = tl.argmax(tl.where(kept_g > 0, float("-inf"), best_g), 0)
            kept_g = tl.where(group_g == best, 1, kept_g)
        choice_gm = tl.where((kept_g > 0)[:, None], choice_gm, float("-inf"))
    expert_e = tl.reshape(expert_gm, (G_PAD * M_PAD,))
    choice_e = tl.reshape(choice_gm, (G_PAD * M_PAD,))
    score_e = tl.reshape(score_gm, (G_PAD * M_PAD,))
    place_e = tl.arange(0, G_PAD * M_PAD)
    place_k = tl.arange(0, TOP_PAD)
    best_k = tl.zeros((TOP_PAD,), tl.int32)
    weight_k = tl.zeros((TOP_PAD,), tl.float32)
    for place in range(TOP):
        best = tl.argmax(choice_e, 0)
        chosen_e = place_e == best
        best_k = tl.where(place_k == place, tl.sum(tl.where(chosen_e, expert_e, 0), 0), best_k)
        weight_k = tl.where(place_k == place, tl.sum(tl.where(chosen_e, score_e, 0.0), 0), weight_k)
        choice_e = tl.where(chosen_e, float("-inf"), choice_e)
    if NORMALISE:
        weight_k = weight_k / (tl.sum(weight_k, 0) + eps)
    tl.store(expert_ptr + token * TOP + place_k, best_k.to(tl.int64), mask=place_k < TOP)
    tl.store(weight_ptr + token * TOP + place_k, weight_k * scaling, mask=place_k < TOP)


def route(logits_TE: Tensor, bias_E: Tensor | None, moe: MoESpec) -> tuple[Tensor, Tensor]:
    """`helix.kernels.router.route` on the device."""
    tokens, experts = logits_TE.shape
    expert_Tk = torch.empty(tokens, moe.experts_per_token, dtype=torch.int64, device=logits_TE.device)
    weight_Tk = torch.empty(tokens, moe.experts_per_token, dtype=torch.float32, device=logits_TE.device)
    groups = moe.num_groups if moe.topk_groups < moe.num_groups else 1
    if tokens:
        _route[(tokens,)](
            logits_TE.contiguous(),
            logits_TE if bias_E is None else bias_E,
            expert_Tk,
            weight_Tk,
            moe.scaling,
            NORMALISE_EPS,
            G=groups,
            G_PAD=triton.next_power_of_2(groups),
            M=experts // groups,
            M_PAD=triton.next_power_of_2(experts // groups),
            KEPT=moe.topk_groups if groups > 1 else 1,
            TOP=moe.experts_per_token,
            TOP_PAD=triton.next_power_of_2(moe.experts_per_token),
            SOFTMAX=moe.score == "softmax",
            BIAS=bias_E is not None,
            PAIRS=moe.group_score == "top2_sum",
            NORMALISE=moe.normalise,
            num_warps=1,
            **launch_options(logits_TE.device),
        )
    return expert_Tk, weight_Tk
