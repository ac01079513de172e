"""Token embedding and output head, both cut along the vocabulary over all N ranks (padded where it does not divide)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from helix.comm.group import Group
from helix.kernels import embed, linear
from helix.layers.linear import Linear
from helix.layout import Slice
from helix.weights import rows


class Embedding(nn.Module):
    """Rows ``[vocab.start, vocab.stop)`` of the embedding; the others contribute zero and one all-reduce joins them."""

    def __init__(
        self, name: str, vocab: Slice, hidden: int, group: Group, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab.padded, hidden, dtype=dtype, device=device), requires_grad=False)
        self.declared = {"weight": (rows(f"{name}.weight", (vocab.total, hidden), vocab.start, vocab.stop),)}
        self.vocab = vocab
        self.group = group

    def forward(self, token_ids_T: Tensor) -> Tensor:
        return self.group.all_reduce(embed(token_ids_T, self.weight, self.vocab.start, self.vocab.size))


class Head(nn.Module):
    """Logits of the whole vocabulary on every rank, fp32 [R, V]. Padded ids are cut away before anyone sees them."""

    def __init__(
        self,
        name: str,
        vocab: Slice,
        hidden: int,
        group: Group,
        tied: Embedding | None = None,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.vocab = vocab
        self.group = group
        # A tied head reads the embedding's rows; kept out of the module tree, so that they are loaded once.
        self._tied = (tied,)
        self.linear: Linear | None = None
        if tied is None:
            weight = (rows(f"{name}.weight", (vocab.total, hidden), vocab.start, vocab.stop),)
            self.linear = Linear(vocab.padded, hidden, weight, dtype=dtype, device=device)

    def forward(self, x_RC: Tensor) -> Tensor:
        tied = self._tied[0]
        if tied is not None:
            local_RV = linear(x_RC, tied.weight)
        elif self.linear is not None:
            local_RV = self.linear(x_RC)
        else:
            raise ValueError("a head needs a weight of its own or a tied embedding")
        if self.group.size == 1:
            return local_RV.float()[:, : self.vocab.total]
        local_RV = local_RV.float().contiguous()
        parts_NRV = self.group.all_gather(local_RV.new_empty(self.group.size, *local_RV.shape), local_RV)
        return parts_NRV.movedim(0, 1).flatten(1)[:, : self.vocab.total]
