"""`SharedProjection`: long chunks of prompts are projected in shares by the ranks of a KVP group.

The weights of QKV (and of MLA's down-projections) are the same on all ranks of the group. For a decode step each rank
projects all tokens, which spares a message. For a chunk of a prompt the arithmetic counts: rank z projects the z-th
share of the tokens, and one all-gather joins the outputs. From how many tokens on is decided once, by the cost model
(`helix.cost.prefill.shared_from`) or the YAML; a step's number of tokens is the same on all ranks.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from helix.comm.group import Group
from helix.layout import padded_slice


class SharedProjection:
    """Applies a projection to x [T, C], in shares over `group` from `from_tokens` tokens on; gives [T, W] everywhere.

    "off", and "auto" that nobody who knows the hardware has resolved: never in shares.
    """

    def __init__(self, group: Group, from_tokens: Literal["auto", "off"] | int) -> None:
        self.group = group
        self.from_tokens = from_tokens if isinstance(from_tokens, int) and group.size > 1 else None

    def __call__(self, projection: nn.Module, x_TC: Tensor) -> Tensor:
        num_tokens = x_TC.shape[0]
        if self.from_tokens is None or num_tokens < self.from_tokens:
            whole_TW: Tensor = projection(x_TC)
            return whole_TW
        mine = padded_slice(num_tokens, self.group.size, self.group.index)
        x_tC = nn.functional.pad(x_TC[mine.start : mine.stop], (0, 0, 0, mine.padding))
        y_tW: Tensor = projection(x_tC)
        y_ZtW = self.group.all_gather(y_tW.new_empty(self.group.size, *y_tW.shape), y_tW)
        return y_ZtW.flatten(0, 1)[:num_tokens]
