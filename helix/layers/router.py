"""`Router`: which experts a token goes to, and with what weight. All of it in fp32, whatever the model's dtype.

Letters: T tokens, C model width, E experts, k experts per token.

The choice itself is `helix.kernels.route`.

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

import torch
from torch import Tensor, nn

from helix.kernels import linear_fp32, route
from helix.model_spec import MoESpec
from helix.weights import whole


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
        return route(linear_fp32(x_TC, self.weight), self.correction_bias, self.moe)
