"""`Monitor`: notices that a rank was killed, raised, exited early or stopped answering, and tells every rank.

It runs beside collectives that may block for ever inside C++, so all of it lives in one daemon thread a rank, which
takes no lock that the main thread can hold while it blocks. The main thread only stores counters (`beat`, `work`,
`idle`, `busy`); the threads talk over TCP, see `helix.comm.watch`. Rank 0 is the judge: the first failure decides, and
every rank is told the same one. Where rank 0 itself is gone, each rank sees that for itself.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Protocol

from helix.comm.heartbeat import listen
from helix.comm.progress import Pulse
from helix.comm.watch import MonitorTimes, Watch
from helix.comm.watch_follower import FollowerWatch, LeaderAddress
from helix.comm.watch_leader import ChildProcess, LeaderWatch
from helix.errors import RankFailure

__all__ = ["ChildProcess", "KeyValueStore", "Monitor", "MonitorTimes", "die_with_parent", "end_process"]

_KEY = "helix/monitor"
_MAX_LABEL = 200
_MAX_REASON = 2000
_PR_SET_PDEATHSIG = 1


class KeyValueStore(Protocol):
    """What the monitor needs of a torch store; `get` may wait for the key, or raise while it is missing."""

    def set(self, key: str, value: str, /) -> object: ...

    def get(self, key: str, /) -> bytes | str: ...


class Monitor:
    """One rank's part in watching all ranks; made by `Monitor.start`.

    `beat`, `work`, `idle`, `busy` and `long_operation` belong to one thread, the one that runs the collectives; each
    costs an increment and a store. Every rank must `beat` for the same collectives in the same order: of ranks that
    wait for each other, the one with the fewest is the one that is late. It has stalled when it did nothing for
    `stall_timeout_s` while rank 0 is busy. A monitor starts busy, so that loading is watched too: rank 0 calls `idle`
    when it has loaded and waits for its first request.
    """

    def __init__(self, rank: int, stall_timeout_s: float, on_failure: Callable[[RankFailure], None]) -> None:
        self.rank = rank
        self.stall_timeout_s = stall_timeout_s
        self._on_failure = on_failure
        self._num_collectives = 0
        self._num_moves = 0
        self._label = "starting"
        self._idle = False
        self._limit_s = 0.0
        self._watch: Watch | None = None
        self._failure: RankFailure | None = None
        self._failed_at_start = False
        self._started = threading.Event()
        self._told = threading.Event()
        self._pid = os.getpid()

    @classmethod
    def start(
        cls,
        *,
        rank: int,
        world_size: int,
        store: KeyValueStore | None,
        master_addr: str,
        stall_timeout_s: float,
        on_failure: Callable[[RankFailure], None],
        start_timeout_s: float = 120.0,
        processes: Mapping[int, ChildProcess] | None = None,
        times: MonitorTimes | None = None,
    ) -> Monitor:
        """Connect to the other ranks; returns once all `world_size` ranks are there.

        `on_failure` is called once, in the monitor's thread, when any rank failed; what it does not end, goes on.
        `processes` are the ranks that this process started itself (see `watch_process`). A `store` that outlives one
        monitor should be wrapped in a prefix of its own for each. One rank alone needs neither thread nor store.

        Raises
        ------
        RankFailure
            A rank did not come within `start_timeout_s`, or died before all had come (`on_failure` is not called).
        """
        monitor = cls(rank, stall_timeout_s, on_failure)
        if world_size == 1:
            return monitor
        if store is None:
            raise ValueError(f"store: None, but {world_size} ranks need one to find each other")
        times = times or MonitorTimes()
        if rank == 0:
            token = secrets.token_hex(16)
            listener = listen(master_addr)
            store.set(_KEY, json.dumps({"port": listener.getsockname()[1], "token": token}))
            leader = LeaderWatch(monitor, times, world_size, listener, token, start_timeout_s)
            leader.processes.update(processes or {})
            monitor._enter(leader, start_timeout_s)
        else:
            find_leader = _leader_finder(store, master_addr)
            monitor._enter(FollowerWatch(monitor, times, find_leader, start_timeout_s), start_timeout_s)
        return monitor

    @property
    def failure(self) -> RankFailure | None:
        """The failure that ended the engine, the same on every rank, or None."""
        return self._failure

    # ---- what the main thread is doing ----

    def beat(self, label: str) -> None:
        """The main thread is about to enter the collective `label`; counted, and compared across ranks."""
        self._num_collectives += 1
        self._label = label

    def work(self, label: str) -> None:
        """The main thread got on with work of its own (one tensor loaded, say) that other ranks need not match."""
        self._num_moves += 1
        self._label = label

    def idle(self) -> None:
        """The main thread waits for work on purpose, for as long as it takes."""
        self._num_moves += 1
        self._idle = True

    def busy(self) -> None:
        """Work has come; on rank 0 a step is under way from here to `idle`."""
        self._num_moves += 1
        self._idle = False

    @contextmanager
    def long_operation(self, label: str, limit_s: float) -> Iterator[None]:
        """Inside, this rank may take `limit_s` between two beats (to compile, say) before it counts as stalled."""
        before = self._limit_s
        self._limit_s = limit_s
        self.work(label)
        try:
            yield
        finally:
            self._limit_s = before
            self._num_moves += 1

    def pulse(self) -> Pulse:
        """A snapshot for the other ranks. Without a lock: the fields may be one event apart, which no rule minds."""
        label = self._label[:_MAX_LABEL]
        return Pulse(self._num_collectives, self._num_moves, label, self._idle, float(self._limit_s))

    # ---- the end ----

    def watch_process(self, rank: int, process: ChildProcess) -> None:
        """Rank 0: `process` runs `rank` on this machine, so that its exit code or signal becomes part of the reason."""
        if isinstance(self._watch, LeaderWatch):
            self._watch.processes[rank] = process

    def fail(self, reason: str) -> RankFailure:
        """This rank cannot go on; `reason` follows the words "rank 1", as in "raised ValueError: ...".

        Returns, within seconds, the failure that was decided on: where this rank only felt the death of another, that
        of the other. One rank alone has nobody to tell: `on_failure` is not called, the exception goes its own way.
        """
        if self._failure is not None:
            return self._failure
        own = RankFailure(self.rank, " ".join(reason.split())[:_MAX_REASON])
        if self._watch is None or not self._watch.is_alive():
            self._failure = own
        else:
            self._watch.report("raised", own.reason)
            self._told.wait(self._watch.times.answer_s)
        return self._failure or own

    def close(self, timeout_s: float | None = None) -> None:
        """Orderly goodbye; nothing fires once it returned. Safe to call twice.

        Rank 0 waits until every rank has said goodbye, at most `timeout_s` (default `MonitorTimes.goodbye_s`): a rank
        that does not is a failure. With 0 it waits for nobody. The others wait for nobody.
        """
        atexit.unregister(self._at_exit)
        if self._watch is not None and threading.current_thread() is not self._watch:
            self._watch.leave(self._watch.times.goodbye_s if timeout_s is None else timeout_s)
            self._watch.join()

    def connected(self) -> None:
        """The watch's thread: all ranks are there."""
        self._started.set()

    def decided(self, failure: RankFailure | None) -> None:
        """The watch's thread, at its end: a rank failed, or None after an orderly goodbye."""
        self._failed_at_start = not self._started.is_set()
        self._failure = failure
        self._told.set()
        self._started.set()
        if failure is not None and not self._failed_at_start:
            self._on_failure(failure)

    def _enter(self, watch: Watch, start_timeout_s: float) -> None:
        self._watch = watch
        watch.start()
        deadline = time.monotonic() + start_timeout_s
        while not self._started.wait(0.2):
            # The store may block its caller for longer than anyone should wait: leave that thread behind.
            if not watch.met_leader and time.monotonic() > deadline:
                watch.abandoned = True
                raise RankFailure(0, f"did not answer within {start_timeout_s:g} s ({watch.last_error})")
        if self._failed_at_start and self._failure is not None:
            raise self._failure
        atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        # A forked child inherits the hook but not the thread.
        if self._watch is not None and os.getpid() == self._pid:
            self._watch.report("exited", "exited before the engine was closed")
            self._watch.join(self._watch.times.answer_s)


def _leader_finder(store: KeyValueStore, master_addr: str) -> Callable[[], LeaderAddress]:
    def find() -> LeaderAddress:
        published = json.loads(store.get(_KEY))
        return LeaderAddress(master_addr, published["port"], published["token"])

    return find


def end_process(failure: RankFailure) -> None:
    """Say on stderr why, in one line, and end this process at once with the failure's exit code.

    Meant as `on_failure`. The main thread may hang in C++ or hold the streams' locks, so nothing is waited for: no exit
    hook runs, and where stderr itself is blocked it stays silent.
    """
    thread = threading.current_thread()
    ending = f"rank {thread.rank}" if isinstance(thread, Watch) else "this process"

    def tell() -> None:
        with suppress(Exception):
            sys.stderr.write(f"helix: {failure}; ending {ending}\n")
            sys.stderr.flush()
            sys.stdout.flush()

    try:
        teller = threading.Thread(target=tell, daemon=True)
        teller.start()
        teller.join(1.0)
    finally:
        os._exit(failure.exit_code)


def die_with_parent(parent_pid: int | None = None) -> None:
    """Linux: kill this process when the thread that started it ends; elsewhere nothing happens.

    For a rank that another process started: call it first thing, in the child, whose starter must be a thread that
    lives as long as the engine. A child that was told its `parent_pid` also ends if that parent is gone by now.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid() if parent_pid is None else parent_pid
    arguments = (ctypes.c_ulong(value) for value in (signal.SIGKILL, 0, 0, 0))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, *arguments)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
