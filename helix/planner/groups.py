"""Groups of a layout: each rank in both grids, which collective runs on which group, its bytes and its links."""

from __future__ import annotations

from dataclasses import dataclass, replace

from helix.cost.choices import Placement
from helix.cost.hardware import Hardware
from helix.cost.messages import Message
from helix.cost.step import layer_messages
from helix.layout import Coords, Layout
from helix.planner.search import Question

AXES = ("kvp", "tpa", "tpf", "ep")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTraffic:
    """One collective of a step. `sent_bytes` leave each rank in a step, all layers together."""

    purpose: str
    op: str
    axis: str
    size: int
    calls: int
    sent_bytes: float
    nodes: int

    @property
    def link(self) -> str:
        return "inside a node" if self.nodes == 1 else f"between {self.nodes} nodes"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMap:
    """Ranks, groups and traffic of one layout on nodes of `node_size` ranks."""

    layout: Layout
    node_size: int
    coords: tuple[Coords, ...]
    groups: dict[str, tuple[tuple[int, ...], ...]]
    traffic: tuple[GroupTraffic, ...]


def map_groups(question: Question, placement: Placement, batch: int) -> GroupMap:
    """The groups of a Helix placement and the traffic of one step of `batch` sequences."""
    layout = placement.layout
    workload = question.workload(batch)
    traffic: dict[tuple[str, str, str, int], GroupTraffic] = {}
    for count, message in layer_messages(question.spec, placement, question.formats, workload):
        one = _traffic(count, message, layout.num_ranks, question.hardware)
        key = (one.purpose, one.op, one.axis, one.size)
        known = traffic.get(key)
        if known is not None:
            one = replace(one, calls=one.calls + known.calls, sent_bytes=one.sent_bytes + known.sent_bytes)
        traffic[key] = one
    return GroupMap(
        layout=layout,
        node_size=question.hardware.node_size,
        coords=tuple(layout.coords(rank) for rank in range(layout.num_ranks)),
        groups={axis: layout.groups(axis) for axis in AXES},
        traffic=tuple(traffic.values()),
    )


def _traffic(count: int, message: Message, num_ranks: int, hardware: Hardware) -> GroupTraffic:
    return GroupTraffic(
        purpose=message.purpose,
        op=message.op,
        axis=message.axis,
        size=message.size,
        calls=count * message.calls,
        sent_bytes=count * message.sent_bytes,
        nodes=message.span(num_ranks, hardware).nodes,
    )


def ranks_text(ranks: tuple[int, ...]) -> str:
    """``0-7`` for a run, ``0,8,..,56`` for equal steps."""
    if len(ranks) == 1:
        return str(ranks[0])
    step = ranks[1] - ranks[0]
    if step == 1:
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks)) if len(ranks) <= 3 else f"{ranks[0]},{ranks[1]},..,{ranks[-1]}"


def size_text(num_bytes: float) -> str:
    """Bytes with a decimal unit and three digits."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes:.0f} B"
