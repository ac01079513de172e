"""One rank of a monitor test, as a process of its own: ``monitor_rank.py SCENARIO RANK STORE_DIRECTORY``.

Imports neither torch nor the packages' own exports (which may), so that dozens of ranks can start at once. Collectives
are played by sleeping, which blocks outside the interpreter as a real one does; in the `gloo` scenario they are real.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from helix.comm.monitor import Monitor

STALL_TIMEOUT_S = 1.5
WORLD_SIZE = 3


class FileStore:
    """Keys are files of a directory; `get` waits like a torch store does."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def set(self, key: str, value: str) -> None:
        path = self._directory / key.replace("/", "_")
        path.with_suffix(".new").write_text(value)
        path.with_suffix(".new").rename(path)

    def get(self, key: str) -> str:
        path = self._directory / key.replace("/", "_")
        while not path.exists():
            time.sleep(0.02)
        return path.read_text()


def block() -> None:
    time.sleep(600.0)


def fault(directory: Path) -> None:
    """The fault happens now: the test measures from here."""
    (directory / "fault_at").write_text(str(time.time()))


def play(scenario: str, rank: int, monitor: Monitor, directory: Path) -> None:
    """What the main thread of `rank` does once all ranks are connected."""
    monitor.beat("all_reduce over world")
    time.sleep(0.3)
    verb, _, victim = scenario.rpartition("_")
    if verb == "stop":
        monitor.idle()
    if victim.isdigit() and int(victim) == rank:
        fail_by(verb, monitor, directory)
    elif victim.isdigit():
        monitor.beat("all_to_all over kvp")
        if scenario == "effect_1" and rank == 2:
            monitor.fail("raised RuntimeError: Connection closed by peer")
        block()
    else:
        PEACEFUL[scenario](rank, monitor, FileStore(directory))


def fail_by(verb: str, monitor: Monitor, directory: Path) -> None:
    fault(directory)
    match verb:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "effect":
            # Another rank has felt this death, and said so, before the connection to rank 0 breaks.
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        case "raise":
            failure = monitor.fail("raised ValueError: no\nsuch head")
            sys.exit(f"decided: {failure}")
        case "exit":
            sys.exit(0)
        case "vanish":
            os._exit(0)
        case "load":
            monitor.work("loading model.layers.3")
            block()
        case "compile":
            with monitor.long_operation("compiling", 3.0):
                block()
        case "interpreter":
            # Called like this, C code keeps the interpreter's lock: the monitor's thread cannot run either.
            ctypes.PyDLL(None).sleep(600)
        case _:
            block()


def close_at_different_times(rank: int, monitor: Monitor, store: FileStore) -> None:
    time.sleep(0.5 * rank)
    monitor.close()


def close_rank_0_last(rank: int, monitor: Monitor, store: FileStore) -> None:
    monitor.idle()
    time.sleep(0.5 * (WORLD_SIZE - rank))
    monitor.close()


def idle_between_steps(rank: int, monitor: Monitor, store: FileStore) -> None:
    for _ in range(2):
        monitor.idle()
        time.sleep(STALL_TIMEOUT_S + 1.0)
        monitor.busy()
        monitor.beat("all_reduce over world")
    monitor.close()


def one_loads_longer(rank: int, monitor: Monitor, store: FileStore) -> None:
    """The others wait in a collective for longer than the timeout, for a rank that still gets on."""
    for index in range(12 if rank == 1 else 1):
        monitor.work(f"loading tensor {index}")
        time.sleep(0.25)
    barrier(rank, monitor, store)


def one_compiles(rank: int, monitor: Monitor, store: FileStore) -> None:
    if rank == 1:
        with monitor.long_operation("compiling graphs", 60.0):
            time.sleep(STALL_TIMEOUT_S + 1.5)
    barrier(rank, monitor, store)


def barrier(rank: int, monitor: Monitor, store: FileStore) -> None:
    """All wait for rank 1, and go on some ticks after it has come."""
    monitor.beat("barrier")
    if rank == 1:
        time.sleep(0.6)
        store.set("arrived", "yes")
    store.get("arrived")
    monitor.close()


def rank_2_never_closes(rank: int, monitor: Monitor, store: FileStore) -> None:
    if rank == 2:
        block()
    monitor.close()


def rank_2_is_left_alone(rank: int, monitor: Monitor, store: FileStore) -> None:
    """Rank 0 does not wait for the goodbye of rank 2, which then has to notice by itself."""
    if rank == 2:
        block()
    monitor.close(timeout_s=0.0)


def exit_after_rank_0_closed(rank: int, monitor: Monitor, store: FileStore) -> None:
    """Whoever leaves the script after rank 0 closed the engine is in order, even without a goodbye."""
    if rank == 0:
        monitor.close()
    time.sleep(0.5)


def wait_to_be_paused(rank: int, monitor: Monitor, store: FileStore) -> None:
    """The test stops all three processes for longer than silence is borne, and lets them go on."""
    monitor.idle()
    store.set(f"playing_{rank}", "yes")
    store.get("resumed")
    time.sleep(1.0)
    monitor.close()


PEACEFUL = {
    "close_in_order": close_at_different_times,
    "close_in_reverse": close_rank_0_last,
    "idle": idle_between_steps,
    "paused": wait_to_be_paused,
    "slow_load": one_loads_longer,
    "slow_compile": one_compiles,
    "strangers": close_at_different_times,
    "unclosed": rank_2_never_closes,
    "abandoned": rank_2_is_left_alone,
    "unsaid": exit_after_rank_0_closed,
}


def start_children(scenario: str, directory: Path) -> dict[int, subprocess.Popen[bytes]]:
    """Rank 0 of a "child" scenario starts the other ranks itself."""
    command = [sys.executable, "-I", "-S", __file__, scenario.removeprefix("child_")]
    return {rank: subprocess.Popen([*command, str(rank), str(directory)]) for rank in range(1, WORLD_SIZE)}


def gloo(rank: int, directory: Path) -> None:
    """Real collectives over a real store: rank 1 dies while the others are inside one."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    from helix.comm.monitor import Monitor, end_process

    if rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        FileStore(directory).set("port", str(store.port))
    else:
        store = TCPStore("127.0.0.1", int(FileStore(directory).get("port")), wait_for_workers=False)
    monitor = Monitor.start(
        rank=rank,
        world_size=WORLD_SIZE,
        store=store,
        master_addr="127.0.0.1",
        stall_timeout_s=20.0,
        on_failure=end_process,
    )
    dist.init_process_group("gloo", store=PrefixStore("gloo", store), rank=rank, world_size=WORLD_SIZE)
    x = torch.ones(4)
    for step in range(1000):
        monitor.beat("all_reduce over world")
        if rank == 1 and step == 20:
            fault(directory)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            dist.all_reduce(x)
        except RuntimeError as error:
            monitor.fail(f"raised RuntimeError: {error}")


def main() -> None:
    scenario, rank, directory = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    root = Path(__file__).resolve().parents[2]
    sys.path.insert(0, str(root))
    for name in ("helix", "helix.comm"):
        package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[name] = package
    if scenario == "gloo":
        gloo(rank, directory)
        return
    from helix.comm.monitor import Monitor, end_process
    from helix.comm.watch import MonitorTimes
    from helix.errors import RankFailure

    if scenario == "early" and rank == 1:
        fault(directory)
        sys.exit(3)
    children = start_children(scenario, directory) if scenario.startswith("child_") and rank == 0 else {}
    times = MonitorTimes(heartbeat_s=0.25, silence_s=2.0, long_silence_s=4.0, settle_s=0.5, goodbye_s=2.5, answer_s=4.0)
    try:
        monitor = Monitor.start(
            rank=rank,
            world_size=WORLD_SIZE,
            store=FileStore(directory),
            master_addr="127.0.0.1",
            stall_timeout_s=STALL_TIMEOUT_S,
            on_failure=end_process,
            start_timeout_s=4.0 if scenario == "missing" else 60.0,
            processes=children,
            times=times,
        )
    except RankFailure as failure:
        print(f"start: {failure}", file=sys.stderr)
        sys.exit(failure.exit_code)
    play(scenario.removeprefix("child_"), rank, monitor, directory)


if __name__ == "__main__":
    main()
