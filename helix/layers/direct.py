"""The direct way of a mesh's groups: through peers' memory, in kernels of our own (`helix.kernels.triton_peers`).

`connect_peers` allocates all of its memory once and gives it to the groups. Messages of decode steps fit; larger ones,
a prefill's above all, go through `deepspeed.comm` all the same. Needs a compiler, so it is imported where it is used.
"""

from __future__ import annotations

import torch
from torch import Tensor

from helix.comm.group import Group
from helix.comm.mesh import Mesh
from helix.comm.symmetric import SymmetricMemory, open_symmetric_memory
from helix.comm.world import World
from helix.kernels import triton_peers as peers

# Of a channel's region, which every program of a call has: room for a message of 4 MiB to each peer.
_REGION_BYTES = (4 << 20) // peers.MAX_PROGRAMS
# Bytes that a second way over the link is worth: 1.5 us, at the 370 GB/s of one direction of an H200's NVLink.
_SECOND_WAY_BYTES = 512 << 10
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def connect_peers(mesh: Mesh, world: World, num_chunks: int = 1) -> None:
    """Give the groups of `mesh` their direct way. Collective, before the first step.

    Up to `num_chunks` exchanges may run at a time. Asks for `helix.comm.symmetric.symmetric_problem` to be None.
    """
    groups = [(group, count) for group, count in ((mesh.world, 1), (mesh.kvp, 1 + num_chunks)) if group.size > 1]
    sizes = [peers.inbox_bytes(group.size, _REGION_BYTES) for group, count in groups for _ in range(count)]
    memory = open_symmetric_memory(world, sum(sizes), peers.ABSENT_BYTE)
    offset = 0
    for group, count in groups:
        channels = []
        for number in range(count):
            what = (
                f"exchange {number - 1} over {group.axis}" if number else f"all-reduces and -gathers over {group.axis}"
            )
            channels.append(_channel(memory, group, offset, what))
            offset += peers.inbox_bytes(group.size, _REGION_BYTES)
        group.direct = PeerTransport(memory, channels[0], channels[1:])


def _channel(memory: SymmetricMemory, group: Group, offset: int, place: str) -> peers.Channel:
    """The channel of `group` whose inboxes lie `offset` bytes into each rank's memory; `place` is what errors say."""
    device = memory.buffer.device
    return peers.Channel(
        inbox_Z=torch.tensor([memory.addresses[rank] + offset for rank in group.ranks], device=device),
        turn_P=torch.zeros(peers.MAX_PROGRAMS, dtype=torch.int32, device=device),
        late=memory.waits.late,
        limit_s=memory.waits.limit_s,
        first_sender=memory.waits.number(group.ranks, place),
        index=group.index,
        region_bytes=_REGION_BYTES,
    )


class PeerTransport:
    """`helix.comm.group.Direct` of one group. Exchanges of each chunk, and all other calls, have their own channel."""

    def __init__(self, memory: SymmetricMemory, channel: peers.Channel, chunk_channels: list[peers.Channel]) -> None:
        self._memory = memory
        self._channel = channel
        self._chunk_channels = chunk_channels

    def all_reduce(self, x: Tensor, shots: int | None = None) -> bool:
        shots = shots or num_shots(self._channel.size, x.nbytes)
        parts = 1 if shots == 1 else self._channel.size
        if not _suits(x) or peers.values_region(x.numel(), x.element_size(), parts) > _REGION_BYTES:
            return False
        peers.all_reduce(self._channel, x, shots=shots)
        return True

    def all_gather(self, out: Tensor, x: Tensor) -> bool:
        if not (_suits(x) and _suits(out)) or peers.values_region(x.numel(), x.element_size()) > _REGION_BYTES:
            return False
        peers.all_gather(self._channel, out, x)
        return True

    def exchange(self, out_THD: Tensor, lse_TH: Tensor, part_heads: int, chunk: int) -> Tensor | None:
        tokens, _, width = out_THD.shape
        region = peers.exchange_region(tokens * part_heads, width, out_THD.element_size())
        if out_THD.dtype not in _DTYPES or region > _REGION_BYTES or chunk >= len(self._chunk_channels):
            return None
        return peers.exchange(self._chunk_channels[chunk], out_THD, lse_TH, part_heads)

    def check(self) -> None:
        self._memory.waits.check()


def num_shots(num_ranks: int, num_bytes: int) -> int:
    """How often an all-reduce of `num_bytes` goes over the link.

    In one shot a rank sends ``(N - 1) * bytes``, in two ``2 * (N - 1) / N * bytes``, which is less from three ranks on.
    """
    saved = (num_ranks - 1) * num_bytes * (num_ranks - 2) // num_ranks
    return 2 if saved > _SECOND_WAY_BYTES else 1


def _suits(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in _DTYPES and x.is_contiguous()
