"""Memory of every rank of a node that all of them can address: torch's symmetric memory, over NVLink or PCIe.

NVLink multicast is neither needed nor asked for (`helix.comm.world` switches it off).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from helix.comm.world import World
from helix.config import AUTO_TRANSPORT
from helix.errors import ConfigError, RankFailure

# Values of `_reason_code` -> what is wrong.
_REASONS = (
    "the ranks are not on GPUs",
    "the ranks are on several nodes",
    "several ranks share a GPU",
    "a GPU cannot address another one's memory",
)


# A wait for a peer that is alive may last as long as that one compiles; one that is gone is the monitor's to notice.
_WAIT_LIMIT_S = 60.0


class Waits:
    """Waits of this rank's kernels for values of their peers: none lasts longer than `limit_s`.

    `late` int32 [1] in memory of the host that the device reads and writes. A kernel that gives up stores 1 + the
    sender's number (see `number`); while it is not 0, every wait is given up within a millisecond.
    """

    def __init__(self, limit_s: float = _WAIT_LIMIT_S) -> None:
        self.limit_s = limit_s
        self.late = torch.zeros(1, dtype=torch.int32, pin_memory=torch.cuda.is_available())
        self._senders: list[tuple[int, str]] = []

    def number(self, ranks: Sequence[int], place: str) -> int:
        """The number of ``ranks[0]`` as a sender to `place`; the others' follow."""
        first = len(self._senders)
        self._senders += [(rank, place) for rank in ranks]
        return first

    def give_up(self) -> None:
        """End all waits, those of kernels that run now too. What they give is worth nothing."""
        self.late.fill_(-1)

    def check(self) -> None:
        """Raise `RankFailure` if a kernel gave up, with the rank that it waited for and where. Waits for nothing."""
        number = int(self.late)
        if number > 0:
            rank, place = self._senders[number - 1]
            raise RankFailure(rank, f"sent nothing to {place} within {self.limit_s:g} s")


@dataclass(frozen=True, slots=True)
class SymmetricMemory:
    """`buffer` uint8 is this rank's part, `addresses` where each rank's part begins as this device addresses it.

    `handle` keeps the peers' parts mapped. `waits` are those of all kernels that read this part.
    """

    buffer: Tensor
    addresses: tuple[int, ...]
    handle: Any
    waits: Waits


def choose_transport(
    setting: Literal["auto", "collective", "symmetric"], world: World
) -> Literal["collective", "symmetric"]:
    """What ``comm.transport`` means for these ranks. Collective; the same on every rank.

    `auto` is `AUTO_TRANSPORT` where that works. With `symmetric`, larger messages are collectives all the same.

    Raises
    ------
    ConfigError
        ``symmetric``, and the ranks cannot address each other's memory; the message says why.
    """
    wanted = AUTO_TRANSPORT if setting == "auto" else setting
    if world.size == 1 or wanted == "collective":
        return "collective"
    problem = symmetric_problem(world)
    if problem is not None:
        if setting == "auto":
            return "collective"
        raise ConfigError(f"comm.transport=symmetric: {problem}; use auto or collective")
    return "symmetric"


def symmetric_problem(world: World) -> str | None:
    """Why the ranks of `world` cannot address each other's memory, or None. Collective; the same on every rank."""
    mine = torch.tensor([_reason_code(world)], dtype=torch.int64)
    worst = int(world.group.all_gather(mine.new_empty(world.size, 1), mine).max())
    return _REASONS[worst - 1] if worst else None


def open_symmetric_memory(world: World, num_bytes: int, fill: int) -> SymmetricMemory:
    """`num_bytes` on each rank, every byte `fill`. Collective; asks for `symmetric_problem` to be None."""
    import torch.distributed._symmetric_memory as symmetric_memory

    buffer = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=world.device)
    handle = symmetric_memory.rendezvous(buffer, world.comm.get_world_group())
    buffer.fill_(fill)
    torch.cuda.synchronize(world.device)
    # Nobody stores at a peer before that has filled its part.
    world.group.all_reduce(torch.zeros(1))
    waits = Waits()
    world.waits.append(waits)
    return SymmetricMemory(buffer, tuple(handle.buffer_ptrs), handle, waits)


def _reason_code(world: World) -> int:
    if world.device.type != "cuda":
        return 1
    if world.local_size < world.size:
        return 2
    if world.local_size > torch.cuda.device_count():
        return 3
    others = (index for index in range(world.local_size) if index != world.device.index)
    return 0 if all(torch.cuda.can_device_access_peer(world.device, index) for index in others) else 4
