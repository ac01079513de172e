"""One rank of a layout without its peers: groups of the true size whose collectives are local work of the same bytes.

The rank holds and computes exactly its share: its heads, its pages, its experts, the lengths that it would see. What
peers would send is replaced by this rank's own data, so that every buffer has its size and every kernel behind a
collective (above all the merge of `kvp` partials) does its full work. The numbers that come out mean nothing; only
their time does. What the links would take is not in it: whoever reports such a time adds that from the cost model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from helix.comm.group import Group
from helix.comm.mesh import Mesh
from helix.layout import Layout


class StandInComm:
    """What `Group` calls of `deepspeed.comm`, for a group of `size` ranks of which only this one exists."""

    def __init__(self, size: int) -> None:
        self.size = size

    def all_reduce(self, x: Tensor, **_group: object) -> None:
        """One pass over `x`, whose values stay: the sum of partial results that are not there."""
        x.mul_(1)

    def all_gather_into_tensor(self, out: Tensor, x: Tensor, **_group: object) -> None:
        out.unflatten(0, (self.size, -1)).copy_(x.unsqueeze(0))

    def reduce_scatter_tensor(self, out: Tensor, x: Tensor, **_group: object) -> None:
        torch.sum(x.unflatten(0, (self.size, -1)), dim=0, out=out)

    def all_to_all_single(self, out: Tensor, x: Tensor, *_splits: list[int], **_group: object) -> None:
        """Every peer sends what this rank sends it; so uneven runs agree on both sides, and `out` has `x`'s rows."""
        out.copy_(x)

    def broadcast(self, x: Tensor, source: int, **_group: object) -> None:
        """This rank's values are everybody's."""


def stand_in_mesh(layout: Layout, rank: int, device: torch.device) -> Mesh:
    """The mesh of `rank` in `layout` as if its peers were there. The rank is alone: nothing here waits for anybody."""

    def group(axis: str) -> Group:
        ranks = next(ranks for ranks in layout.groups(axis) if rank in ranks)
        return Group(axis, ranks, rank, StandInComm(len(ranks)))

    return Mesh(layout, rank, device, group("world"), group("kvp"), group("tpf"), group("ep"))
