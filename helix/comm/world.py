"""`World`: the ranks of one engine, from rendezvous to goodbye. With `mesh`, the only user of `deepspeed.comm`.

Every rank meets at one TCP store, then starts the monitor (so that a rank that never comes, or dies while the others
still connect, is noticed), then the process group. Nothing here outlives `World.close`: a second world can follow in
the same process.
"""

from __future__ import annotations

import os
import socket
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from ipaddress import ip_address
from typing import Any, Protocol

import psutil
import torch
import torch.distributed as torch_dist

from helix.comm.group import Group
from helix.comm.monitor import ChildProcess, Monitor, end_process
from helix.config import LaunchEnv
from helix.errors import ConfigError, RankFailure

# The monitor ends a stalled engine within seconds; a collective itself may wait for the next request for days.
_COLLECTIVE_TIMEOUT = timedelta(days=7)
_RENDEZVOUS_TIMEOUT = timedelta(seconds=120)


class GraphHolder(Protocol):
    """Something that captures collectives in CUDA graphs."""

    def drop_graphs(self) -> None: ...


class DeviceWaits(Protocol):
    """Waits of kernels for peers."""

    def give_up(self) -> None: ...


@dataclass(slots=True)
class World:
    """All ranks of one engine: `group` spans them, `monitor` watches them, `local_size` of them share this machine.

    `waits` end when the world is closed because a rank failed.
    """

    rank: int
    size: int
    local_size: int
    device: torch.device
    group: Group
    monitor: Monitor
    comm: Any = None
    store: Any = None
    waits: list[DeviceWaits] = field(default_factory=list)
    _holders: weakref.WeakSet[GraphHolder] = field(default_factory=weakref.WeakSet)

    def holds_graphs(self, holder: GraphHolder) -> None:
        """`holder` captures collectives. NCCL ends a communicator only when no graph has it any more."""
        self._holders.add(holder)

    @property
    def backend(self) -> str:
        """What carries the collectives of tensors on `device`: "gloo" or "nccl"."""
        if self.device.type == "cpu" or self.local_size > torch.cuda.device_count():
            return "gloo"
        return "nccl"

    def subgroup(self, axis: str, partitions: tuple[tuple[int, ...], ...]) -> Group:
        """The group along `axis` that holds this rank. Collective: every rank calls with the same partitions."""
        mine: Group | None = None
        for ranks in partitions:
            handle = None
            if len(ranks) == self.size:
                handle = self.comm.get_world_group() if self.comm else None
            elif len(ranks) > 1:
                handle = self.comm.new_group(list(ranks))
            if self.rank in ranks:
                mine = Group(axis, ranks, self.rank, self.comm, handle, self.monitor.beat)
        if mine is None:
            raise ValueError(f"rank {self.rank} stands in no {axis} group of {partitions}")
        return mine

    def close(self) -> None:
        """Say goodbye and leave the process group; safe to call twice."""
        self.monitor.close()
        if self.monitor.failure is not None:
            for waits in self.waits:
                waits.give_up()
        for holder in list(self._holders):
            holder.drop_graphs()
        if self.comm is not None and torch_dist.is_initialized():
            if self.backend == "nccl" and self.monitor.failure is not None:
                # Kernels that wait for a rank which is gone would be waited for.
                torch_dist.distributed_c10d._abort_process_group()
            else:
                self.comm.destroy_process_group()
        self.comm = None
        self.store = None


def single_world(device: torch.device) -> World:
    """A world of one rank: no store, no process group, no deepspeed."""
    monitor = Monitor.start(
        rank=0, world_size=1, store=None, master_addr="", stall_timeout_s=1.0, on_failure=end_process
    )
    return World(rank=0, size=1, local_size=1, device=device, group=Group("world", (0,), 0), monitor=monitor)


def join_world(
    env: LaunchEnv,
    device: torch.device,
    *,
    stall_timeout_s: float,
    on_failure: Callable[[RankFailure], None] = end_process,
    store: Any = None,
    processes: Mapping[int, ChildProcess] | None = None,
) -> World:
    """Meet the other ranks that `env` names and connect. Collective over all ranks.

    `store` is an already open store, for a caller that had to choose a free port first; `processes` are the ranks that
    this process started, so that the monitor can tell how one of them ended.

    Raises
    ------
    ConfigError
        Rank 0 cannot listen on the rendezvous port; the message names the port.
    """
    if env.world_size == 1:
        return single_world(device)
    if store is None:
        store = open_store(env.master_addr, env.master_port, serve=env.rank == 0)
    comm = _import_comm(env, device)
    monitor = Monitor.start(
        rank=env.rank,
        world_size=env.world_size,
        store=store,
        master_addr=env.master_addr,
        stall_timeout_s=stall_timeout_s,
        on_failure=on_failure,
        processes=processes,
    )
    try:
        with monitor.long_operation("joining the process group", _RENDEZVOUS_TIMEOUT.total_seconds()):
            _start_process_group(comm, env, device, store)
    except Exception as error:
        monitor.fail(f"could not join the process group: {error}")
        raise
    ranks = tuple(range(env.world_size))
    group = Group("world", ranks, env.rank, comm, comm.get_world_group(), monitor.beat)
    return World(
        rank=env.rank,
        size=env.world_size,
        local_size=env.local_size,
        device=device,
        group=group,
        monitor=monitor,
        comm=comm,
        store=store,
    )


def open_store(address: str, port: int, *, serve: bool) -> Any:
    """The rendezvous store at `address`:`port`; port 0 with `serve` takes a free one (see ``store.port``)."""
    try:
        make: Any = torch_dist.TCPStore  # type: ignore[attr-defined]
        return make(address, port, is_master=serve, timeout=_RENDEZVOUS_TIMEOUT, wait_for_workers=False)
    except (RuntimeError, torch_dist.DistError) as error:
        if serve:
            raise ConfigError(
                f"rendezvous port {port} cannot be opened ({_first_line(error)}); another run may hold it: "
                "pass a free one to the launcher with --master_port"
            ) from error
        raise ConfigError(f"no rank 0 answered at {address}:{port} ({_first_line(error)})") from error


def pick_device(kind: str, local_rank: int) -> torch.device:
    """The device that `engine.device` = auto | cpu | cuda means for the rank with this node-local number.

    With fewer GPUs than local ranks, ranks share GPUs round robin (exact, for tests; gloo carries the collectives).
    """
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cuda" and not available:
        raise ConfigError("engine.device: cuda, but torch sees no GPU here; use engine.device: cpu or auto")
    if kind == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", local_rank % available)


def interface_towards(address: str, *, is_local: bool) -> str | None:
    """The network interface by which this machine reaches `address`, None where that cannot be told.

    Unless `is_local`, other machines must reach it too: then the loopback interface does not count, which a hosts file
    may give for the machine's own name.
    """
    interfaces = {
        one.address.partition("%")[0]: name for name, addresses in psutil.net_if_addrs().items() for one in addresses
    }
    with suppress(OSError):
        for family, kind, _protocol, _name, target in socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(target)  # sends nothing
                mine = probe.getsockname()[0]
                if mine in interfaces and (is_local or not ip_address(mine).is_loopback):
                    return interfaces[mine]
    return None


def _import_comm(env: LaunchEnv, device: torch.device) -> Any:
    """The `deepspeed.comm` module; imported only where there is more than one rank, and before the monitor counts."""
    # deepspeed asks the environment which accelerator to use, and guesses (with a warning) where nothing is said.
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    # gloo alone would take the address that the machine's own name stands for, which other nodes may not reach.
    interface = interface_towards(env.master_addr, is_local=env.local_size == env.world_size)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    # Its multicast objects are limited in number, and nothing here uses them.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    # deepspeed.comm calls the collectives by names that torch 2.13 renamed; the user cannot change that.
    warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)
    import deepspeed.comm as comm
    import deepspeed.ops

    # The shared-memory op serves inference_all_reduce alone, which is never called here (it crashes on subgroups);
    # building it would need a C++ compiler and most of a minute at the first start.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return comm


def _start_process_group(comm: Any, env: LaunchEnv, device: torch.device, store: Any) -> None:
    torch_dist.init_process_group(
        _backend(env, device), store=store, rank=env.rank, world_size=env.world_size, timeout=_COLLECTIVE_TIMEOUT
    )
    comm.init_distributed(auto_mpi_discovery=False, verbose=False)


def _backend(env: LaunchEnv, device: torch.device) -> str:
    if device.type == "cpu":
        return "gloo"
    shared = env.local_size > torch.cuda.device_count()
    return "cpu:gloo,cuda:gloo" if shared else "cpu:gloo,cuda:nccl"


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
