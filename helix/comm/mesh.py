"""`Mesh`: the live groups of one layout, built once and passed to the layers as an argument."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from helix.comm.group import Group
from helix.comm.world import World
from helix.errors import LayoutError
from helix.layout import Coords, Layout


@dataclass(frozen=True, slots=True)
class Mesh:
    """One rank's view of a layout: its coordinates and one `Group` an axis.

    `world` carries the two all-reduces of a layer, `kvp` the exchange, `tpf` and `ep` the experts' collectives.
    """

    layout: Layout
    rank: int
    device: torch.device
    world: Group
    kvp: Group
    tpf: Group
    ep: Group

    @property
    def coords(self) -> Coords:
        return self.layout.coords(self.rank)

    @property
    def transport(self) -> Literal["collective", "symmetric"]:
        """What carries the exchange and the all-reduces of decode steps."""
        return "collective" if self.world.direct is None else "symmetric"


def build_mesh(layout: Layout, world: World) -> Mesh:
    """Groups of `layout` over the ranks of `world`. Collective: all ranks build the same groups in the same order."""
    if layout.num_ranks != world.size:
        raise LayoutError(
            f"layout {layout} needs {layout.num_ranks} ranks, but {world.size} were started; "
            "start as many as kvp x tpa, or change the layout"
        )
    return Mesh(
        layout=layout,
        rank=world.rank,
        device=world.device,
        world=world.group,
        kvp=world.subgroup("kvp", layout.groups("kvp")),
        tpf=world.subgroup("tpf", layout.groups("tpf")),
        ep=world.subgroup("ep", layout.groups("ep")),
    )


def planning_mesh(layout: Layout, rank: int) -> Mesh:
    """A mesh of lone groups on the meta device: what rank `rank` would hold, without any other rank (no traffic)."""

    def lone(axis: str) -> Group:
        return Group(axis, (rank,), rank)

    return Mesh(layout, rank, torch.device("meta"), lone("world"), lone("kvp"), lone("tpf"), lone("ep"))
