"""The exchange: partial outputs of all local heads over this rank's pages -> this rank's heads over the whole sequence.

Before it, each of the Z = kvp ranks of a group holds H heads over its part of the sequence; after it, rank z has heads
``[z * h, (z + 1) * h)`` (h = H padded to a multiple of Z, divided by Z), merged over all parts by log-sum-exp.

Two forms, same result: `a2a` sends one packed message (output and lse together) to each peer, or does without a message
where the group has a direct way through peers' memory; `ag_rs` gathers every rank's lse, rescales locally and
reduce-scatters the outputs, which is what vLLM does by default.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from helix.comm.group import Group
from helix.kernels import merge


class Exchange:
    """Exchange inside one KVP group. Called on ``out_THD`` [T, H, D] and fp32 ``lse_TH``; gives [T, h, D].

    Exchanges that may run at the same time, on streams of their own, have different numbers of `chunk`.
    """

    def __init__(self, group: Group, heads_per_rank: int, form: Literal["a2a", "ag_rs"] = "a2a") -> None:
        self.group = group
        self.heads_per_rank = heads_per_rank
        self.form = form

    def __call__(self, out_THD: Tensor, lse_TH: Tensor, *, chunk: int = 0) -> Tensor:
        if self.group.size == 1:
            # One part is its own merge: where it is empty, its output is 0 already.
            return out_THD
        with self.group.clock.exchange():
            return self._exchange(out_THD, lse_TH, chunk)

    def _exchange(self, out_THD: Tensor, lse_TH: Tensor, chunk: int) -> Tensor:
        if self.form == "a2a":
            merged = self.group.exchange(out_THD, lse_TH, self.heads_per_rank, chunk)
            if merged is not None:
                return merged
            return self._all_to_all(self._pack(out_THD, lse_TH), out_THD.shape[-1])
        return self._gather_and_reduce(*self._split_heads(out_THD, lse_TH))

    def _pack(self, out_THD: Tensor, lse_TH: Tensor) -> Tensor:
        """The message [Z, T, h, ...]; on a GPU in one kernel."""
        if not out_THD.is_cuda:
            return pack(*self._split_heads(out_THD, lse_TH))
        from helix.kernels import triton_merge

        return triton_merge.pack(out_THD, lse_TH, self.group.size, self.heads_per_rank)

    def _split_heads(self, out_THD: Tensor, lse_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Cut the heads by destination rank; padding heads are empty parts (0 and -inf), so they merge to 0."""
        parts, heads = self.group.size, self.heads_per_rank
        padding = parts * heads - out_THD.shape[1]
        if padding:
            out_THD = torch.nn.functional.pad(out_THD, (0, 0, 0, padding))
            lse_TH = torch.nn.functional.pad(lse_TH, (0, padding), value=-torch.inf)
        tokens, _, width = out_THD.shape
        out_TZhD = out_THD.reshape(tokens, parts, heads, width)
        return out_TZhD.movedim(1, 0), lse_TH.reshape(tokens, parts, heads).movedim(1, 0)

    def _all_to_all(self, sent: Tensor, width: int) -> Tensor:
        received = self.group.all_to_all(torch.empty_like(sent), sent)
        return merge(*unpack(received, width))[0]

    def _gather_and_reduce(self, out_ZThD: Tensor, lse_ZTh: Tensor) -> Tensor:
        lse_ZTh = lse_ZTh.contiguous()
        everyone_YZTh = self.group.all_gather(lse_ZTh.new_empty(self.group.size, *lse_ZTh.shape), lse_ZTh)
        _, total_ZTh = merge(lse_ZTh.new_zeros(*everyone_YZTh.shape, 1).flatten(1, 2), everyone_YZTh.flatten(1, 2))
        total_ZTh = total_ZTh.view_as(lse_ZTh)
        seen = torch.isfinite(lse_ZTh)
        share_ZTh = torch.where(seen, torch.exp(lse_ZTh - total_ZTh), 0.0)
        scaled_ZThD = out_ZThD.float().masked_fill(~seen.unsqueeze(-1), 0.0) * share_ZTh.unsqueeze(-1)
        scaled_ZThD = scaled_ZThD.to(out_ZThD.dtype)
        return self.group.reduce_scatter(torch.empty_like(scaled_ZThD[0]), scaled_ZThD)


def pack(out: Tensor, lse: Tensor) -> Tensor:
    """One message of output and lse: [..., D] and fp32 [...] -> [..., D + 4 / itemsize] in the output's dtype."""
    return torch.cat((out, lse.contiguous().unsqueeze(-1).view(out.dtype)), dim=-1)


def unpack(message: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The inverse of `pack`: outputs [..., width] and fp32 lse [...]."""
    size = message.element_size()
    if width * size % 4 == 0 and message.shape[-1] * size % 4 == 0:
        return message[..., :width], message.view(torch.float32)[..., width * size // 4]
    # A copy even of one row, which is contiguous as it lies: after an odd width it starts inside of a 4-byte word.
    lse = message[..., width:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return message[..., :width], lse.squeeze(-1)


def gather_heads(group: Group, x: Tensor, num_heads: int, dim: int) -> Tensor:
    """The `num_heads` heads of the group, in order, from each rank's equal share along `dim` (padding comes last)."""
    gathered = group.all_gather(x.new_empty(group.size, *x.shape), x.contiguous())
    return gathered.movedim(0, dim).flatten(dim, dim + 1).narrow(dim, 0, num_heads)
