"""The thread behind `Monitor`: what rank 0 (`LeaderWatch`) and the other ranks (`FollowerWatch`) have in common.

Each rank other than 0 holds one connection to rank 0, and both ends send a pulse every `MonitorTimes.heartbeat_s`. Time
is counted in ticks of one's own loop: a process that was stopped itself for a minute and goes on blames nobody for it.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from helix.comm.progress import Pulse
from helix.errors import RankFailure

LOST = "was killed or lost its connection"


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorTimes:
    """How fast failures are noticed, in seconds; the defaults end every rank within 30.

    A rank has stopped when its heartbeats are missing for `silence_s` (for `long_silence_s` inside a long operation,
    which may hold the interpreter). Judgement on a death waits for `settle_s`, and as long again for all ranks to take
    note. `goodbye_s` is how late a rank may close, `answer_s` how long a rank that raised waits to hear the verdict.
    """

    heartbeat_s: float = 1.0
    silence_s: float = 8.0
    long_silence_s: float = 20.0
    settle_s: float = 1.0
    goodbye_s: float = 20.0
    answer_s: float = 5.0

    def silence_reason(self, ticks: int, pulse: Pulse) -> str | None:
        """Why a rank has stopped that was not heard for `ticks` ticks, or None where it has not."""
        limit_s = self.long_silence_s if pulse.limit_s else self.silence_s
        if ticks * self.heartbeat_s <= limit_s:
            return None
        return f"stopped answering for {limit_s:g} s, last seen at {pulse.place}"

    def absence_reason(self, waited_s: float) -> str:
        return f"did not close within {waited_s:g} s of rank 0"


class Watched(Protocol):
    """What the thread needs of its `Monitor`."""

    rank: int
    stall_timeout_s: float

    def pulse(self) -> Pulse: ...

    def connected(self) -> None: ...

    def decided(self, failure: RankFailure | None) -> None: ...


class Watch(threading.Thread, ABC):
    """The loop both sides share: wake-ups by the main thread, messages, and a tick each heartbeat."""

    def __init__(self, monitor: Watched, times: MonitorTimes) -> None:
        super().__init__(name=f"helix-monitor-{monitor.rank}", daemon=True)
        self.rank = monitor.rank
        self.times = times
        self.met_leader = False
        self.abandoned = False
        self.last_error = "no answer"
        self._monitor = monitor
        self._over = False
        self._failure: RankFailure | None = None
        self._due = float("inf")
        self._reports: deque[tuple[str, str]] = deque()
        self._leave_after_s: float | None = None
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._listen_to(self._woken, self._drain_wakeups)

    def report(self, cause: str, reason: str) -> None:
        """Main thread: this rank failed; `cause` is "raised" or "exited"."""
        self._reports.append((cause, reason))
        self._wake()

    def leave(self, timeout_s: float) -> None:
        """Main thread: say goodbye and end; rank 0 waits up to `timeout_s` for the goodbyes of the others."""
        self._leave_after_s = timeout_s
        self._wake()

    def run(self) -> None:
        try:
            self._connect()
            self._loop()
        except Exception as error:
            # A monitor that died unseen would protect nobody: its rank counts as failed.
            self._failure = RankFailure(self.rank, f"lost its monitor: {type(error).__name__}: {error}")
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        self._waker.close()
        self._monitor.decided(self._failure)

    def _loop(self) -> None:
        next_tick = time.monotonic()
        while not self._over:
            if time.monotonic() >= next_tick:
                self._tick()
                next_tick = time.monotonic() + self.times.heartbeat_s
                continue
            wait_s = max(min(next_tick, self._due) - time.monotonic(), 0.0)
            steps: list[Callable[[], None]] = [key.data for key, _events in self._selector.select(wait_s)]
            for step in (*steps, self._attend):
                if not self._over:
                    step()

    def _listen_to(self, sock: socket.socket, callback: Callable[[], None]) -> None:
        self._selector.register(sock, selectors.EVENT_READ, callback)

    def _forget(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        sock.close()

    def _wake(self) -> None:
        with suppress(OSError):
            self._waker.send(b".")

    def _drain_wakeups(self) -> None:
        with suppress(OSError):
            self._woken.recv(4096)

    def _end(self, failure: RankFailure | None) -> None:
        self._failure = failure
        self._over = True

    @abstractmethod
    def _connect(self) -> None:
        """Before the loop: reach the other side."""

    @abstractmethod
    def _tick(self) -> None:
        """Once each heartbeat."""

    @abstractmethod
    def _attend(self) -> None:
        """After every wake-up: what the main thread asked for, and what has come due."""


def kill_processes(pids: Iterable[int]) -> None:
    """End processes that no longer answer: a stopped one would outlive all others, and keep its device memory."""
    for pid in pids:
        with suppress(OSError):
            if pid > 1:
                os.kill(pid, signal.SIGKILL)
