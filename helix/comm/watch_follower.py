"""The side of the monitor that every rank but 0 has."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass

from helix.comm.heartbeat import Link, encode, host_identity, pulse_of
from helix.comm.progress import Progress
from helix.comm.watch import LOST, MonitorTimes, Watch, Watched, kill_processes
from helix.errors import RankFailure


@dataclass(frozen=True, slots=True)
class LeaderAddress:
    """Where rank 0's monitor listens, and the token that it wants to see."""

    host: str
    port: int
    token: str


class FollowerWatch(Watch):
    """Every other rank: tells rank 0 how it goes, obeys its verdict, and sees for itself when rank 0 is gone."""

    def __init__(
        self, monitor: Watched, times: MonitorTimes, find_leader: Callable[[], LeaderAddress], start_timeout_s: float
    ) -> None:
        super().__init__(monitor, times)
        self._find_leader = find_leader
        self._start_timeout_s = start_timeout_s
        self._leader = Progress(rank=0)
        self._leader_pids: tuple[int, ...] = ()
        self._leader_place = ""
        self._host = host_identity()
        self._ticks_silent = 0
        self._leader_left = False
        self._ticks_alone = 0
        self._exiting = False

    def _connect(self) -> None:
        while not self.met_leader and not self.abandoned:
            try:
                self._link = self._greet(self._find_leader())
                self._listen_to(self._link.sock, self._hear)
                self.met_leader = True
            except Exception as error:
                # Rank 0 may not have started yet, and the store raises what it likes.
                self.last_error = f"{type(error).__name__}: {error}"
                time.sleep(0.1)
        self._over = self.abandoned

    def _greet(self, leader: LeaderAddress) -> Link:
        sock = socket.create_connection((leader.host, leader.port), timeout=self._start_timeout_s)
        try:
            sock.sendall(encode("hello", token=leader.token, rank=self.rank, pid=os.getpid(), host=self._host))
            if not sock.recv(1, socket.MSG_PEEK):
                raise ConnectionError("the monitor of rank 0 hung up")
        except OSError:
            sock.close()
            raise
        return Link(sock)

    def _hear(self) -> None:
        for message in self._link.receive():
            self._ticks_silent = 0
            match message["kind"]:
                case "pulse":
                    self._leader.update(pulse_of(message))
                case "ready":
                    self._leader_pids = (message["pid"],) if message["host"] == self._host else ()
                    self._leader_place = self._link.place(message["host"], self._host)
                    self._monitor.connected()
                case "verdict":
                    kill_processes(pid for pid in message["kill"] if isinstance(pid, int))
                    self._end(RankFailure(message["rank"], message["reason"]))
                    return
                case "bye":
                    self._leader_left = True
        if self._leader_left and self._exiting:
            self._end(None)
        elif not self._link.alive:
            self._forget(self._link.sock)
            if not self._leader_left:
                self._end(RankFailure(0, self._leader_place + LOST))

    def _tick(self) -> None:
        self._link.send("pulse", **asdict(self._monitor.pulse()))
        if self._leader_left:
            # If rank 0 still waits for our goodbye, its judgement comes first.
            self._ticks_alone += 1
            patience_s = self.times.goodbye_s + self.times.answer_s
            if self._ticks_alone * self.times.heartbeat_s > patience_s:
                self._end(RankFailure(self.rank, self.times.absence_reason(patience_s)))
            return
        self._ticks_silent += 1
        reason = self.times.silence_reason(self._ticks_silent, self._leader.pulse)
        if reason is not None:
            # Rank 0 reads this only if it was stopped and goes on later.
            self._link.send("verdict", rank=0, reason=reason, kill=[])
            # The other ranks should see for themselves that it stopped, before they see that it died.
            time.sleep(2 * self.times.heartbeat_s)
            kill_processes(self._leader_pids)
            self._end(RankFailure(0, self._leader_place + reason))

    def _attend(self) -> None:
        while self._reports and not self._over:
            cause, reason = self._reports.popleft()
            self._exiting = cause == "exited"
            if self._leader_left:
                self._end(None if self._exiting else RankFailure(self.rank, reason))
            else:
                self._link.send("report", cause=cause, reason=reason)
        if self._leave_after_s is not None and not self._over:
            self._say_goodbye()

    def _say_goodbye(self) -> None:
        """Wait until rank 0 hung up, so that no reset overtakes the goodbye."""
        deadline = time.monotonic() + self.times.settle_s
        self._link.send("bye")
        with suppress(OSError):
            self._link.sock.settimeout(self.times.settle_s)
            while time.monotonic() < deadline and self._link.sock.recv(65536):
                pass
        self._end(None)
