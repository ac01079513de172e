"""Rank 0's side of the monitor: hears every rank, decides which one failed, and tells all."""

from __future__ import annotations

import hmac
import os
import selectors
import signal
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Protocol

from helix.comm.heartbeat import Link, host_identity, pulse_of
from helix.comm.progress import Progress, find_stalled, rank_list
from helix.comm.watch import LOST, MonitorTimes, Watch, Watched, kill_processes
from helix.errors import RankFailure

_MAX_STRANGERS = 256
_STRANGER_S = 10.0
_MISSED_HEARTBEATS = 3

# Of several ranks that fail within `settle_s`, the first with the lowest number is the cause; the others raised because
# of it (a broken connection, a collective that timed out).
_CAUSES = {"died": 0, "exited": 0, "stopped": 1, "raised": 2}


class ChildProcess(Protocol):
    """What `subprocess.Popen` has: the exit code (negative for a signal), None while it runs."""

    def poll(self) -> int | None: ...


@dataclass(slots=True, kw_only=True)
class _Peer(Progress):
    """Another rank, as rank 0 knows it."""

    link: Link
    pid: int
    host: str
    ticks_silent: int = 0


@dataclass(frozen=True, slots=True)
class _Suspect:
    rank: int
    cause: str
    reason: str


class LeaderWatch(Watch):
    """Rank 0: hears every rank, decides which one failed, and tells all."""

    def __init__(
        self,
        monitor: Watched,
        times: MonitorTimes,
        world_size: int,
        listener: socket.socket,
        token: str,
        start_timeout_s: float,
    ) -> None:
        super().__init__(monitor, times)
        self.met_leader = True
        self.processes: dict[int, ChildProcess] = {}
        self._missing = set(range(1, world_size))
        self._listener = listener
        self._token = token.encode()
        self._start_timeout_s = start_timeout_s
        self._strangers: dict[Link, float] = {}
        self._own = Progress(rank=0)
        self._host = host_identity()
        self._peers: dict[int, _Peer] = {}
        self._places: dict[int, str] = {}
        self._suspects: list[_Suspect] = []
        self._ticks = 0
        self._said_bye = False
        self._ticks_closing = 0

    # ---- until all ranks are there ----

    def _connect(self) -> None:
        self._listener.setblocking(False)
        self._listen_to(self._listener, self._accept)

    def _accept(self) -> None:
        with suppress(OSError):
            sock, _address = self._listener.accept()
            if len(self._strangers) >= _MAX_STRANGERS:
                sock.close()
                return
            link = Link(sock)
            self._strangers[link] = time.monotonic()
            self._listen_to(sock, lambda: self._greet(link))

    def _greet(self, link: Link) -> None:
        if link not in self._strangers:
            return
        messages = link.receive()
        if messages and messages[0]["kind"] == "hello":
            hello = messages[0]
            known = hmac.compare_digest(hello["token"].encode("utf-8", "replace"), self._token)
            if known and hello["rank"] in self._missing:
                del self._strangers[link]
                self._admit(_Peer(rank=hello["rank"], link=link, pid=hello["pid"], host=hello["host"]))
                return
        if messages or not link.alive:
            self._dismiss(link)

    def _dismiss(self, link: Link) -> None:
        del self._strangers[link]
        self._forget(link.sock)

    def _admit(self, peer: _Peer) -> None:
        self._missing.remove(peer.rank)
        self._peers[peer.rank] = peer
        self._places[peer.rank] = peer.link.place(peer.host, self._host)
        self._selector.modify(peer.link.sock, selectors.EVENT_READ, lambda: self._hear(peer))
        peer.link.send("pulse", **asdict(self._monitor.pulse()))
        if self._missing:
            return
        self._forget(self._listener)
        for link in list(self._strangers):
            self._dismiss(link)
        for other in self._peers.values():
            other.link.send("ready", pid=os.getpid(), host=self._host)
        self._monitor.connected()

    def _wait_for_missing(self) -> None:
        for link, since in list(self._strangers.items()):
            if time.monotonic() - since > _STRANGER_S:
                self._dismiss(link)
        for rank in sorted(self._missing):
            process = self.processes.get(rank)
            if process is not None and process.poll() is not None:
                self._suspect(rank, "died", LOST)
        if self._ticks * self.times.heartbeat_s > self._start_timeout_s:
            first, *others = sorted(self._missing)
            also = f", and neither did {rank_list(others)}" if others else ""
            self._suspect(first, "stopped", f"did not connect within {self._start_timeout_s:g} s{also}")

    # ---- while they run ----

    def _hear(self, peer: _Peer) -> None:
        if peer.rank not in self._peers:
            return
        for message in peer.link.receive():
            peer.ticks_silent = 0
            match message["kind"]:
                case "pulse":
                    peer.update(pulse_of(message))
                case "report" if message["cause"] == "exited" and self._said_bye:
                    self._part(peer)
                    return
                case "report":
                    cause = message["cause"] if message["cause"] in _CAUSES else "raised"
                    self._suspect(peer.rank, cause, message["reason"])
                case "verdict":
                    # That rank waited for us in vain while we were stopped, and the others did too.
                    self._judge(_Suspect(message["rank"], "raised", message["reason"]))
                    return
                case "bye":
                    self._part(peer)
                    return
        if not peer.link.alive:
            self._part(peer)
            if not self._said_bye:
                self._suspect(peer.rank, "died", LOST)

    def _part(self, peer: _Peer) -> None:
        del self._peers[peer.rank]
        self._forget(peer.link.sock)

    def _tick(self) -> None:
        pulse = self._monitor.pulse()
        self._own.update(pulse)
        self._ticks += 1
        for peer in self._peers.values():
            peer.link.send("pulse", **asdict(pulse))
            peer.ticks_silent += 1
            reason = self.times.silence_reason(peer.ticks_silent, peer.pulse)
            if reason is not None:
                self._suspect(peer.rank, "stopped", reason)
        if self._missing:
            self._wait_for_missing()
        elif self._leave_after_s is None:
            ranks = [self._own, *self._peers.values()]
            stalled = find_stalled(ranks, self._monitor.stall_timeout_s, self.times.heartbeat_s)
            if stalled is not None:
                self._suspect(stalled[0], "stopped", stalled[1])
        else:
            self._wait_for_goodbyes(self._leave_after_s)

    def _wait_for_goodbyes(self, timeout_s: float) -> None:
        self._ticks_closing += 1
        if self._peers and self._ticks_closing * self.times.heartbeat_s > timeout_s:
            self._suspect(min(self._peers), "stopped", self.times.absence_reason(timeout_s))

    def _attend(self) -> None:
        while self._reports:
            self._suspect(0, *self._reports.popleft())
        if self._suspects and time.monotonic() >= self._due:
            self._judge(min(self._suspects, key=lambda suspect: _CAUSES[suspect.cause]))
        elif self._leave_after_s is not None and not self._suspects:
            self._say_goodbye()
            if not self._peers or self._leave_after_s == 0:
                self._end(None)

    def _say_goodbye(self) -> None:
        if not self._said_bye:
            for peer in self._peers.values():
                peer.link.send("bye")
        self._said_bye = True

    # ---- judgement ----

    def _suspect(self, rank: int, cause: str, reason: str) -> None:
        if all(suspect.rank != rank for suspect in self._suspects):
            self._suspects.append(_Suspect(rank, cause, reason))
            self._due = min(self._due, time.monotonic() + (0.0 if cause == "stopped" else self.times.settle_s))

    def _judge(self, suspect: _Suspect) -> None:
        """`suspect` is the one: tell every rank, and have those past telling killed by others on their host."""
        reason = self._exit_reason(suspect.rank) if suspect.cause == "died" else suspect.reason
        reason = self._places.get(suspect.rank, "") + reason
        silent = [peer for peer in self._peers.values() if peer.ticks_silent > _MISSED_HEARTBEATS]
        for peer in self._peers.values():
            pids = [one.pid for one in silent if one.host == peer.host]
            peer.link.send("verdict", rank=suspect.rank, reason=reason, kill=pids)
        kill_processes(one.pid for one in silent if one.host == self._host)
        self._await_hangups()
        self._end(RankFailure(suspect.rank, reason))

    def _exit_reason(self, rank: int) -> str:
        process = self.processes.get(rank)
        code = None if process is None else process.poll()
        if code is None:
            return LOST
        if code >= 0:
            event = "all ranks were there" if self._missing else "the engine was closed"
            return f"exited with code {code} before {event}"
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"

    def _await_hangups(self) -> None:
        """Stay until all have read: a process that ends with unread bytes in a socket may take the verdict with it."""
        deadline = time.monotonic() + self.times.settle_s
        with selectors.DefaultSelector() as selector:
            for peer in self._peers.values():
                selector.register(peer.link.sock, selectors.EVENT_READ, peer.link)
            while selector.get_map() and time.monotonic() < deadline:
                for key, _events in selector.select(max(deadline - time.monotonic(), 0.0)):
                    key.data.receive()
                    if not key.data.alive:
                        selector.unregister(key.fileobj)
