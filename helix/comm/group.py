"""`Group`: the ranks along one axis of a layout, and the collectives among them. Wraps `deepspeed.comm`.

Outputs are owned by the caller, so that a captured graph never holds a buffer that can move. A group of size 1 takes
the same path through the same methods and copies. Every collective reports to the monitor before it starts, which is
how a rank that stays behind is found, and is counted in `traffic`. Where a group has a `direct` way, messages that it
takes go through peers' memory, all others through `deepspeed.comm`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec, Protocol

import torch
from torch import Tensor
from torch.profiler import record_function

from helix.comm.clock import Clock

_P = ParamSpec("_P")


@dataclass(slots=True)
class Traffic:
    """Calls and bytes that left this rank, per collective name, counted as a ring sends them."""

    calls: dict[str, int] = field(default_factory=dict)
    sent_bytes: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, num_bytes: int) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        self.sent_bytes[name] = self.sent_bytes.get(name, 0) + num_bytes

    def clear(self) -> None:
        self.calls.clear()
        self.sent_bytes.clear()


def _ranged(collective: Callable[_P, Tensor]) -> Callable[_P, Tensor]:
    """A method of `Group` under its name and axis in traces; groups of one rank do nothing to be seen."""

    @wraps(collective)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> Tensor:
        group: Any = args[0]
        if group.size == 1:
            return collective(*args, **kwargs)
        with record_function(f"{collective.__name__} over {group.axis}"):
            return collective(*args, **kwargs)

    return run


class Direct(Protocol):
    """A group's way through the memory of peers. What it takes follows from shapes and dtypes: the same on all ranks.

    Each method returns whether it did it, or what it gave, and None or False where the message is not for it. An
    all-reduce goes over the link in one shot or two, by its size where `shots` does not say. `check` raises
    `RankFailure` if the device gave up waiting for a peer.
    """

    def all_reduce(self, x: Tensor, shots: int | None = None) -> bool: ...

    def all_gather(self, out: Tensor, x: Tensor) -> bool: ...

    def exchange(self, out_THD: Tensor, lse_TH: Tensor, part_heads: int, chunk: int) -> Tensor | None: ...

    def check(self) -> None: ...


def _no_beat(_label: str) -> None:
    """Stands in for the monitor where there is one rank only."""


class Group:
    """Ranks `ranks` (global numbers, in axis order) as seen by one of them.

    `comm` is the `deepspeed.comm` module and `handle` its process group; both are None for a group of size 1.
    """

    def __init__(
        self,
        axis: str,
        ranks: tuple[int, ...],
        rank: int,
        comm: Any = None,
        handle: Any = None,
        beat: Callable[[str], None] = _no_beat,
    ) -> None:
        self.axis = axis
        self.ranks = ranks
        self.size = len(ranks)
        self.index = ranks.index(rank)
        self.traffic = Traffic()
        self.clock = Clock()
        self.direct: Direct | None = None
        self._comm = comm
        self._handle = handle
        self._beat = beat
        self._labels = {name: f"{name} over {axis}" for name in _COLLECTIVES}

    @_ranged
    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum `x` over the group, in place; returns `x`."""
        enters = self._enter("all_reduce", 2 * x.nbytes * (self.size - 1) // self.size)
        if enters and not (self.direct is not None and self.direct.all_reduce(x)):
            self._comm.all_reduce(x, group=self._handle)
        return x

    @_ranged
    def all_gather(self, out: Tensor, x: Tensor) -> Tensor:
        """`out` [size, *x.shape], contiguous, receives every rank's `x`, in axis order."""
        if not self._enter("all_gather", x.nbytes * (self.size - 1)):
            out.copy_(x.unsqueeze(0))
        elif self.direct is None or not self.direct.all_gather(out, x):
            # gloo takes the concatenated form only.
            self._comm.all_gather_into_tensor(out.flatten(0, 1), x.contiguous(), group=self._handle)
        return out

    @_ranged
    def reduce_scatter(self, out: Tensor, x: Tensor) -> Tensor:
        """`x` [size, *out.shape]: `out` receives the sum over ranks of their ``x[index]``."""
        if self._enter("reduce_scatter", x.nbytes * (self.size - 1) // self.size):
            self._comm.reduce_scatter_tensor(out, x.contiguous().flatten(0, 1), group=self._handle)
        else:
            out.copy_(x[0])
        return out

    @_ranged
    def all_to_all(self, out: Tensor, x: Tensor) -> Tensor:
        """``x[i]`` goes to rank i of the group; ``out[i]`` came from it. Both [size, ...], same shape."""
        if self._enter("all_to_all", x.nbytes * (self.size - 1) // self.size):
            self._comm.all_to_all_single(out, x.contiguous(), group=self._handle)
        else:
            out.copy_(x)
        return out

    @_ranged
    def all_to_all_uneven(self, out: Tensor, x: Tensor, out_splits: list[int], x_splits: list[int]) -> Tensor:
        """Rows of `x` in runs of `x_splits` go to the ranks in order; `out` receives runs of `out_splits` rows."""
        sent = x.nbytes * (sum(x_splits) - x_splits[self.index]) // max(sum(x_splits), 1)
        if self._enter("all_to_all", sent):
            self._comm.all_to_all_single(out, x.contiguous(), out_splits, x_splits, group=self._handle)
        else:
            out.copy_(x)
        return out

    def exchange(self, out_THD: Tensor, lse_TH: Tensor, part_heads: int, chunk: int) -> Tensor | None:
        """The exchange (see `helix.layers.exchange`) through peers' memory; None where it has to go as a message.

        Chunks have channels of their own, so that one's exchange may run beside another's, on another stream.
        """
        if self.direct is None:
            return None
        merged = self.direct.exchange(out_THD, lse_TH, part_heads, chunk)
        if merged is not None:
            rows = out_THD.shape[0] * part_heads * (self.size - 1)
            self._enter("all_to_all", rows * (out_THD.shape[2] * out_THD.element_size() + lse_TH.element_size()))
        return merged

    def check(self) -> None:
        """Raise `RankFailure` if the device gave up waiting for a peer: what it computed since is worth nothing."""
        if self.direct is not None:
            self.direct.check()

    @_ranged
    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Fill `x` with the values of the group's rank number `source`, in place."""
        if self._enter("broadcast", x.nbytes if self.index == source else 0):
            self._comm.broadcast(x, self.ranks[source], group=self._handle)
        return x

    def broadcast_bytes(self, payload: bytes | None, source: int = 0) -> bytes:
        """The bytes that rank number `source` passes (the others pass None), on the host."""
        if self.size == 1:
            return payload or b""
        data = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else None
        length = torch.tensor([0 if data is None else data.numel()], dtype=torch.int64)
        self.broadcast(length, source)
        if length.item() == 0:
            return b""
        if data is None:
            data = torch.empty(int(length.item()), dtype=torch.uint8)
        return self.broadcast(data, source).numpy().tobytes()

    def _enter(self, name: str, sent_bytes: int) -> bool:
        if self.size == 1:
            return False
        self.traffic.add(name, sent_bytes)
        self._beat(self._labels[name])
        return True


_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
