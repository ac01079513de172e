"""`Monitor` against real faults of real processes, three ranks a scenario (see monitor_rank.py), and its parts alone."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helix.comm.heartbeat import Link, decode, encode, listen
from helix.comm.monitor import Monitor, end_process
from helix.comm.progress import Progress, Pulse, find_stalled
from helix.errors import RankFailure

RANKS = (0, 1, 2)
SCRIPT = Path(__file__).with_name("monitor_rank.py")
LOST = "was killed or lost its connection"
STALLED = "made no progress for {} s, last seen at {} (collective 1), while ranks {} waited further on"
EARLY = "exited before the engine was closed"

# Scenario -> the rank that must be named, the reason, and the exit codes of ranks 0, 1, 2.
FAULTS: dict[str, tuple[int, str, tuple[int, int, int]]] = {
    "kill_0": (0, LOST, (-9, 70, 70)),
    "kill_1": (1, LOST, (70, -9, 70)),
    "stop_0": (0, "stopped answering for 2 s, last seen at 'all_reduce over world' (collective 1)", (-9, 70, 70)),
    "stop_2": (2, "stopped answering for 2 s, last seen at 'all_reduce over world' (collective 1)", (70, 70, -9)),
    "raise_0": (0, "raised ValueError: no such head", (70, 70, 70)),
    "raise_1": (1, "raised ValueError: no such head", (70, 70, 70)),
    "exit_0": (0, EARLY, (70, 70, 70)),
    "exit_1": (1, EARLY, (70, 70, 70)),
    "vanish_1": (1, LOST, (70, 0, 70)),
    "effect_1": (1, LOST, (70, -9, 70)),
    "stall_0": (0, STALLED.format("1.5", "'all_reduce over world'", "1, 2"), (70, 70, 70)),
    "stall_1": (1, STALLED.format("1.5", "'all_reduce over world'", "0, 2"), (70, 70, 70)),
    "load_2": (2, STALLED.format("1.5", "'loading model.layers.3'", "0, 1"), (70, 70, 70)),
    "compile_1": (1, STALLED.format("3", "'compiling'", "0, 2"), (70, 70, 70)),
    "interpreter_2": (2, STALLED.format("1.5", "'all_reduce over world'", "0, 1"), (70, 70, -9)),
}
# The longest of them: silence of 2 s, two ticks until the kill, judgement and last words of up to a second each.
BOUND_S = 9.0
PEACEFUL = ("close_in_order", "close_in_reverse", "idle", "slow_load", "slow_compile", "strangers", "unsaid")
CHILDREN: dict[str, str] = {
    "child_kill_1": "rank 1 was killed by SIGKILL",
    "child_vanish_1": "rank 1 exited with code 0 before the engine was closed",
    "child_early": "rank 1 exited with code 3 before all ranks were there",
}
RANKS_OF = {"missing": (0, 1), "strangers": (0, 1)} | dict.fromkeys(CHILDREN, (0,))


@dataclass(slots=True)
class Run:
    """The processes of one scenario, and when each was seen to have ended."""

    scenario: str
    directory: Path
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    ended_at: dict[int, float] = field(default_factory=dict)

    def launch(self, rank: int, *options: str) -> None:
        with self._errors(rank, "wb") as errors:
            command = [sys.executable, *options, str(SCRIPT), self.scenario, str(rank), str(self.directory)]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            self.processes[rank] = subprocess.Popen(command, stderr=errors, env=environment)

    def note_ends(self) -> bool:
        """Whether all have ended by now."""
        for rank, process in self.processes.items():
            if rank not in self.ended_at and process.poll() is not None:
                self.ended_at[rank] = time.time()
        return len(self.ended_at) == len(self.processes)

    def codes(self) -> tuple[int | None, ...]:
        return tuple(self.processes[rank].poll() for rank in sorted(self.processes))

    def errors(self, rank: int) -> str:
        with self._errors(rank, "rb") as errors:
            return errors.read().decode()

    def seconds(self) -> float:
        """From the fault to the end of the last rank."""
        return max(self.ended_at.values()) - float((self.directory / "fault_at").read_text())

    def _errors(self, rank: int, mode: str) -> IO[bytes]:
        return (self.directory / f"stderr_{rank}").open(mode)


def insult(run: Run) -> list[socket.socket]:
    """Connect to the monitor of a starting engine as strangers would; returns the connections that stay open."""
    path = run.directory / "helix_monitor"
    while not path.exists():
        time.sleep(0.02)
    address = json.loads(path.read_text())
    token = address["token"]
    hello = {"token": token, "rank": 2, "pid": 1, "host": ""}
    lines = [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        os.urandom(5000),
        b"x" * 1_000_000,
        b"[" * 10_000 + b"\n",
        b"1" * 10_000 + b"\n",
        encode("hello", **(hello | {"token": "wrong"})),
        encode("hello", **(hello | {"token": "\ud800"})),
        encode("hello", **(hello | {"rank": 9})),
        encode("hello", **(hello | {"rank": 0})),
        encode("hello", **(hello | {"rank": True})),
        encode("hello", token=token),
        encode("verdict", rank=1, reason="is evil", kill=[]),
        encode("hello", **hello)[:-1],  # right but for its end: never completed
        b"",
    ]
    kept = []
    for line in lines:
        sock = socket.create_connection(("127.0.0.1", address["port"]), timeout=5.0)
        sock.settimeout(0.5)
        try:
            sock.sendall(line)
        except OSError:
            pass
        kept.append(sock)
    return kept


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Run]]:
    """Every scenario, played at the same time."""
    scenarios = (*FAULTS, *PEACEFUL, *CHILDREN, "missing", "unclosed")
    runs = {name: Run(name, tmp_path_factory.mktemp(name)) for name in scenarios}
    strangers: list[socket.socket] = []
    try:
        for name, run in runs.items():
            for rank in RANKS_OF.get(name, RANKS):
                run.launch(rank, "-I", "-S")
        strangers = insult(runs["strangers"])
        runs["strangers"].launch(2, "-I", "-S")
        deadline = time.monotonic() + 60.0
        while not all([run.note_ends() for run in runs.values()]) and time.monotonic() < deadline:
            time.sleep(0.02)
        yield runs
    finally:
        for sock in strangers:
            sock.close()
        for run in runs.values():
            for process in run.processes.values():
                process.kill()
                process.wait()


@pytest.mark.parametrize("scenario", FAULTS)
def test_fault_ends_every_rank_and_is_named(runs: dict[str, Run], scenario: str) -> None:
    named, reason, codes = FAULTS[scenario]
    run = runs[scenario]
    assert run.codes() == codes
    for rank in RANKS:
        line = f"helix: rank {named} {reason}; ending rank {rank}\n"
        assert (line in run.errors(rank)) == (codes[rank] == 70), run.errors(rank)
        assert run.errors(rank).count("ending rank") <= 1
    assert run.seconds() < BOUND_S


@pytest.mark.parametrize("scenario", PEACEFUL)
def test_what_is_no_fault_ends_nothing(runs: dict[str, Run], scenario: str) -> None:
    run = runs[scenario]
    assert [run.errors(rank) for rank in RANKS] == ["", "", ""]
    assert run.codes() == (0, 0, 0)


@pytest.mark.parametrize("scenario", CHILDREN)
def test_exit_of_an_own_child_is_told(runs: dict[str, Run], scenario: str) -> None:
    run = runs[scenario]
    assert run.codes() == (70,)
    assert CHILDREN[scenario] in run.errors(0)


def test_rank_that_never_comes(runs: dict[str, Run]) -> None:
    run = runs["missing"]
    assert run.codes() == (70, 70)
    for rank in (0, 1):
        assert run.errors(rank) == "start: rank 2 did not connect within 4 s\n"


def test_rank_that_never_closes(runs: dict[str, Run]) -> None:
    run = runs["unclosed"]
    assert run.codes() == (70, 0, 70)
    for rank in (0, 2):
        assert "helix: rank 2 did not close within 2.5 s of rank 0" in run.errors(rank)


@pytest.mark.slow
def test_gloo_ranks_blame_the_one_that_died(tmp_path: Path) -> None:
    """The collectives of the others break before their monitor hears of the death; still the dead rank is named."""
    run = Run("gloo", tmp_path)
    try:
        for rank in RANKS:
            run.launch(rank)
        deadline = time.monotonic() + 120.0
        while not run.note_ends() and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        for process in run.processes.values():
            process.kill()
            process.wait()
    assert run.codes() == (70, -9, 70)
    for rank in (0, 2):
        assert f"helix: rank 1 {LOST}; ending rank {rank}\n" in run.errors(rank)
    assert run.seconds() < 15.0


# ---- one process ----


def lone_monitor() -> Monitor:
    return Monitor.start(
        rank=0, world_size=1, store=None, master_addr="", stall_timeout_s=1.0, on_failure=lambda failure: None
    )


def test_one_rank_alone_has_the_same_interface() -> None:
    monitor = lone_monitor()
    monitor.beat("all_reduce")
    monitor.work("loading")
    monitor.idle()
    monitor.busy()
    with monitor.long_operation("compiling", 5.0):
        assert monitor.pulse().limit_s == 5.0
    assert monitor.pulse() == Pulse(1, 5, "compiling", False, 0.0)
    assert monitor.failure is None
    assert str(monitor.fail("raised ValueError:\n  no")) == "rank 0 raised ValueError: no"
    assert str(monitor.fail("raised again")) == "rank 0 raised ValueError: no"
    monitor.close()
    monitor.close()


def test_long_operation_ends_with_its_exception() -> None:
    monitor = lone_monitor()
    with pytest.raises(KeyError), monitor.long_operation("compiling", 5.0):
        raise KeyError
    assert monitor.pulse().limit_s == 0.0


def test_beat_is_cheap() -> None:
    beat = lone_monitor().beat
    best_s = 1.0
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(10_000):
            beat("all_reduce over world")
        best_s = min(best_s, time.perf_counter() - begin)
    assert best_s / 10_000 < 2e-6


def test_follower_gives_up_when_rank_0_never_publishes() -> None:
    class EmptyStore:
        def set(self, key: str, value: str) -> None:
            raise AssertionError("only rank 0 publishes")

        def get(self, key: str) -> str:
            raise KeyError(key)

    with pytest.raises(RankFailure, match=r"rank 0 did not answer within 0\.3 s \(KeyError: 'helix/monitor'\)"):
        Monitor.start(
            rank=1,
            world_size=2,
            store=EmptyStore(),
            master_addr="127.0.0.1",
            stall_timeout_s=1.0,
            on_failure=end_process,
            start_timeout_s=0.3,
        )


def test_process_ends_though_its_stderr_is_blocked() -> None:
    """The main thread holds the lock of stderr while nobody reads the pipe."""
    code = (
        "import sys, threading, time\n"
        "from helix.comm.monitor import end_process\n"
        "from helix.errors import RankFailure\n"
        "threading.Timer(0.3, end_process, [RankFailure(2, 'raised')]).start()\n"
        "sys.stderr.write('x' * 10_000_000)\n"
    )
    root = str(SCRIPT.parents[2])
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, cwd=root) as process:
        try:
            assert process.wait(timeout=20.0) == 70
        finally:
            process.kill()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl is Linux's")
@pytest.mark.parametrize("argument", ["", "1"])
def test_child_dies_with_its_parent(argument: str) -> None:
    """The parent is killed after the call; or (told as a process id that is not the parent's) it was gone before."""
    child = f"from helix.comm.monitor import die_with_parent as d; d({argument}); print('on', flush=True); input()"
    parent = (
        "import subprocess, sys\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}], stdin=subprocess.PIPE)\n"
        "sys.stdin.read()\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    root = str(SCRIPT.parents[2])
    with subprocess.Popen([sys.executable, "-c", parent], cwd=root, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == (b"" if argument else b"on\n") if not argument else True
        process.kill()
        # The pipe ends when its last holder, the child, is gone too.
        assert process.stdout.read() == b""


# ---- parts ----


def ranks_at(*pulses: tuple[int, bool]) -> list[Progress]:
    """Ranks with these counts of collectives, idle or not."""
    return [Progress(rank=rank, pulse=Pulse(n, 0, "x", idle, 0.0)) for rank, (n, idle) in enumerate(pulses)]


def first_stalled(ranks: list[Progress], ticks: int = 5) -> int | None:
    """Who is named within `ticks` seconds, with a timeout of three."""
    for _ in range(ticks):
        found = find_stalled(ranks, 3.0, 1.0)
        if found is not None:
            return found[0]
    return None


@pytest.mark.parametrize(
    ("pulses", "named"),
    [
        (((5, False), (4, False), (5, False)), 1),  # one is behind
        (((5, False), (5, False), (4, True)), 2),  # it has not woken up
        (((4, False), (4, True), (4, True)), 0),  # rank 0 does not send the step that the others wait for
        (((4, False), (5, True), (5, True)), 0),  # the same where the wait is counted
        (((5, True), (4, False), (5, False)), None),  # no step is under way
        (((5, True), (5, True), (5, True)), None),
        (((5, False), (5, False), (5, False)), 0),  # all in one place: the first is named, and the reason says so
    ],
)
def test_the_rank_behind_is_named(pulses: tuple[tuple[int, bool], ...], named: int | None) -> None:
    assert first_stalled(ranks_at(*pulses)) == named


def test_all_in_one_place_is_told_apart() -> None:
    ranks = ranks_at((5, False), (5, False))
    reasons = [find_stalled(ranks, 3.0, 1.0) for _ in range(3)]
    assert reasons[:2] == [None, None]
    assert reasons[2] is not None
    assert "nor did any other rank" in reasons[2][1]


def test_waiting_for_another_does_not_count() -> None:
    """Rank 0 waits two ticks for rank 1; when that has caught up, both have the whole timeout."""
    ranks = ranks_at((5, False), (4, False))
    assert first_stalled(ranks, ticks=2) is None
    ranks[1].update(Pulse(5, 0, "x", False, 0.0))
    assert first_stalled(ranks, ticks=2) is None
    assert first_stalled(ranks, ticks=1) == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=6))
def test_named_rank_is_never_ahead(pulses: list[tuple[int, bool]]) -> None:
    named = first_stalled(ranks_at(*pulses))
    assert (named is None) == pulses[0][1]
    if named is not None:
        assert pulses[named][0] == min(count for count, _ in pulses)


@given(st.binary(max_size=400), st.integers(1, 50))
def test_any_bytes_are_survived(data: bytes, piece: int) -> None:
    """A good message behind any bytes is either read or the link is given up; nothing raises."""
    near, far = socket.socketpair()
    with near, far:
        link = Link(near)
        for start in range(0, len(data), piece):
            far.sendall(data[start : start + piece])
            if link.alive:
                link.receive()
        far.close()
        for _ in range(100):
            if not link.alive:
                break
            link.receive()
        assert not link.alive


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=8))
def test_messages_are_whole_or_refused(value: object) -> None:
    line = json.dumps({"kind": "report", "cause": "raised", "reason": value}).encode()
    assert (decode(line) is not None) == isinstance(value, str)
    assert decode(json.dumps(value).encode()) is None
    assert decode(json.dumps({"kind": value}).encode()) is None


def test_messages_come_whole_in_pieces() -> None:
    near, far = socket.socketpair()
    with near, far:
        link = Link(near)
        for byte in encode("report", cause="raised", reason="a\nb"):
            assert link.receive() == []
            far.sendall(bytes([byte]))
        assert link.receive() == [{"kind": "report", "cause": "raised", "reason": "a\nb"}]
        assert link.alive


@pytest.mark.parametrize(
    ("master_addr", "bound"),
    [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("192.0.2.1", "0.0.0.0"), ("no.such.invalid", "0.0.0.0")],
)
def test_listens_where_the_others_look(master_addr: str, bound: str) -> None:
    with listen(master_addr) as listener:
        assert listener.getsockname()[0] in (bound, "::1" if master_addr == "localhost" else bound)
