"""Dispatch: how tokens meet their experts on the TPF x EP grid. Two ways behind one call, both exact.

    y_TC = dispatch(x_TC, route, experts, shared)         x and y replicated on all N ranks

* `local`: x is on every rank already, so each rank runs its own experts on the tokens that chose them, adds its slice
  of the shared expert, and ONE all-reduce over N finishes the layer. Nothing is sent before the products, and nothing
  asks the host, so a step can be captured in a graph.
* `alltoall`: the ranks of EP number e take the e-th slice of the tokens, route it, and send each token once to every EP
  rank that holds one of its experts; the weighted sums come back the same way, are reduced over TPF and gathered over
  EP. Routing is done once per token instead of once per token and rank, and what travels is proportional to the
  experts that are hit. Row counts are read on the host. The slices of the shared expert join by a reduce-scatter over
  EP, before the reduction over TPF, so that it counts once.

Every rank enters every collective of its way, with however few rows.

Letters: T tokens, C model width, k experts per token, Z EP ranks, t tokens of one EP slice, R rows received.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from helix.comm.group import Group
from helix.comm.mesh import Mesh
from helix.kernels.router import local_ids
from helix.layout import Slice, padded_slice, uneven_slice

Route: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]
"""x [T, C] -> (global expert ids [T, k] int64, fp32 weights [T, k])."""


class Experts(Protocol):
    """This rank's part of the weighted sums, plus `add_TC` where it is given: [T, C]."""

    def __call__(self, x_TC: Tensor, expert_Tk: Tensor, weight_Tk: Tensor, add_TC: Tensor | None = None) -> Tensor: ...


Shared: TypeAlias = Callable[[Tensor], Tensor]
"""x [T, C] -> this rank's part of the shared expert [T, C], to be summed over all N ranks."""


class Dispatch(Protocol):
    """One layer's experts over replicated tokens. Collective over all N ranks."""

    def __call__(self, x_TC: Tensor, route: Route, experts: Experts, shared: Shared | None) -> Tensor: ...


def make_dispatch(setting: Literal["auto", "local", "alltoall"], num_experts: int, mesh: Mesh) -> Dispatch:
    """The dispatch that ``comm.dispatch`` asks for, for `num_experts` experts split over the EP axis of `mesh`."""
    if resolve_dispatch(setting) == "local":
        return LocalDispatch(uneven_slice(num_experts, mesh.layout.ep, mesh.coords.ep_rank), mesh.world)
    return AllToAllDispatch(num_experts, mesh.tpf, mesh.ep)


def resolve_dispatch(setting: Literal["auto", "local", "alltoall"]) -> Literal["local", "alltoall"]:
    """`auto` is `local`: with tokens on every rank it is one collective instead of five, and it can be captured."""
    return "local" if setting == "auto" else setting


class LocalDispatch:
    """Each rank runs the experts that it holds, number `held.start` on, on all tokens; `world` joins the parts."""

    def __init__(self, held: Slice, world: Group) -> None:
        self.held = held
        self.world = world

    def __call__(self, x_TC: Tensor, route: Route, experts: Experts, shared: Shared | None) -> Tensor:
        expert_Tk, weight_Tk = route(x_TC)
        # The shared expert first: its weights are on their way while the router still chooses.
        add_TC = None if shared is None else shared(x_TC)
        # Others' experts lie outside of the places here, which the products see: so one launch does at most.
        place_Tk = expert_Tk - self.held.start if self.held.start else expert_Tk
        return self.world.all_reduce(experts(x_TC, place_Tk, weight_Tk, add_TC))


class AllToAllDispatch:
    """Tokens are cut over `ep`, travel to the ranks of their experts and back; `tpf` sums the parts of the width."""

    def __init__(self, num_experts: int, tpf: Group, ep: Group) -> None:
        self.slices = tuple(uneven_slice(num_experts, ep.size, index) for index in range(ep.size))
        self.tpf = tpf
        self.ep = ep

    def __call__(self, x_TC: Tensor, route: Route, experts: Experts, shared: Shared | None) -> Tensor:
        mine = padded_slice(x_TC.shape[0], self.ep.size, self.ep.index)
        y_tC = x_TC.new_zeros(mine.padded, x_TC.shape[1])
        y_tC[: mine.size] = self._routed(x_TC[mine.start : mine.stop], route, experts)
        if shared is not None:
            y_tC += self._shared(shared(x_TC), y_tC)
        self.tpf.all_reduce(y_tC)
        y_ZtC = self.ep.all_gather(y_tC.new_empty(self.ep.size, *y_tC.shape), y_tC)
        return y_ZtC.flatten(0, 1)[: mine.total]

    def _routed(self, x_tC: Tensor, route: Route, experts: Experts) -> Tensor:
        """The weighted sums of the routed experts for the tokens of this EP rank, this rank's part of the width."""
        expert_tk, weight_tk = route(x_tC)
        local_Ztk = torch.stack([local_ids(expert_tk - one.start, one.size) for one in self.slices])
        size_Z11 = torch.tensor([one.size for one in self.slices], device=x_tC.device).view(-1, 1, 1)
        hit_Zt = (local_Ztk < size_Z11).any(dim=-1)
        sent, received = self._row_counts(hit_Zt)
        rank_R, token_R = hit_Zt.nonzero(as_tuple=True)
        message = pack(x_tC[token_R], local_Ztk[rank_R, token_R], weight_tk[token_R])
        arrived = self.ep.all_to_all_uneven(message.new_empty(sum(received), message.shape[1]), message, received, sent)
        part_RC = experts(*unpack(arrived, x_tC.shape[1]))
        back_RC = self.ep.all_to_all_uneven(x_tC.new_empty(len(token_R), x_tC.shape[1]), part_RC, sent, received)
        # One EP rank at a time: its rows are of different tokens, so the sum has one order on every device.
        y_tC = x_tC.new_zeros(x_tC.shape, dtype=torch.float32)
        for token, part in zip(token_R.split(sent), back_RC.split(sent), strict=True):
            y_tC.index_add_(0, token, part.float())
        return y_tC.to(x_tC.dtype)

    def _row_counts(self, hit_Zt: Tensor) -> tuple[list[int], list[int]]:
        """Rows that go to each EP rank, and rows that come from each."""
        sent_Z = hit_Zt.sum(dim=1)
        received_Z = self.ep.all_to_all(torch.empty_like(sent_Z), sent_Z)
        sent, received = torch.stack((sent_Z, received_Z)).tolist()
        return sent, received

    def _shared(self, part_TC: Tensor, like_tC: Tensor) -> Tensor:
        """This EP rank's tokens of the shared expert, summed over EP; the sum over TPF is still to come."""
        padding = self.ep.size * like_tC.shape[0] - part_TC.shape[0]
        part_ZtC = torch.nn.functional.pad(part_TC, (0, 0, 0, padding)).unflatten(0, (self.ep.size, -1))
        return self.ep.reduce_scatter(torch.empty_like(like_tC), part_ZtC)


def pack(x_RC: Tensor, expert_Rk: Tensor, weight_Rk: Tensor) -> Tensor:
    """One message of rows, expert ids and weights: [R, C + 2 k * 4 / itemsize] in the dtype of x."""
    numbers = torch.cat((expert_Rk.to(torch.int32), weight_Rk.view(torch.int32)), dim=1)
    return torch.cat((x_RC, numbers.view(x_RC.dtype)), dim=1)


def unpack(message: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of `pack`: rows [R, width], int64 ids [R, k] and fp32 weights [R, k]."""
    numbers = message[:, width:].clone(memory_format=torch.contiguous_format).view(torch.int32)
    expert_Rk, weight_Rk = numbers.chunk(2, dim=1)
    return message[:, :width].contiguous(), expert_Rk.long(), weight_Rk.view(torch.float32)
