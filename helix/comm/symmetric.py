"""Memory of every rank of a node that all of them can address: torch's symmetric memory, over NVLink or PCIe.

NVLink multicast is neither needed nor asked for (`helix.comm.world` switches it off).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from helix.comm.world import World
from helix.errors import ConfigError

# Values of `_reason_code` -> what is wrong.
_REASONS = (
    "the ranks are not on GPUs",
    "the ranks are on several nodes",
    "several ranks share a GPU",
    "a GPU cannot address another one's memory",
)


@dataclass(frozen=True, slots=True)
class SymmetricMemory:
    """`buffer` uint8 is this rank's part, `addresses` where each rank's part begins as this device addresses it.

    `handle` keeps the peers' parts mapped.
    """

    buffer: Tensor
    addresses: tuple[int, ...]
    handle: Any


def choose_transport(
    setting: Literal["auto", "collective", "symmetric"], world: World
) -> Literal["collective", "symmetric"]:
    """What ``comm.transport`` means for these ranks. Collective; the same on every rank.

    `auto` is `collective`: graphs of many symmetric exchanges one right behind the other have been seen to stop on two
    H200s, and why is not known. Whoever asks for `symmetric` gets it.

    Raises
    ------
    ConfigError
        ``symmetric``, and the ranks cannot address each other's memory; the message says why.
    """
    if world.size == 1 or setting != "symmetric":
        return "collective"
    problem = symmetric_problem(world)
    if problem is not None:
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
    return SymmetricMemory(buffer, tuple(handle.buffer_ptrs), handle)


def _reason_code(world: World) -> int:
    if world.device.type != "cuda":
        return 1
    if world.local_size < world.size:
        return 2
    if world.local_size > torch.cuda.device_count():
        return 3
    others = (index for index in range(world.local_size) if index != world.device.index)
    return 0 if all(torch.cuda.can_device_access_peer(world.device, index) for index in others) else 4
