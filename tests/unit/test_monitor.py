"""`Monitor` against real faults of real processes, three ranks a scenario (see monitor_rank.py)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import pytest

from helix.comm.heartbeat import encode
from helix.comm.monitor import Monitor, MonitorTimes, end_process
from helix.comm.progress import Pulse
from helix.errors import RankFailure

RANKS = (0, 1, 2)
SCRIPT = Path(__file__).with_name("monitor_rank.py")
LOST = "was killed or lost its connection"
STALLED = "made no progress for {} s, last seen at {} (collective 1), while ranks {} waited further on"
EARLY = "exited before the engine was closed"

# Scenario -> the rank that must be named, how the reason begins, and the exit codes of ranks 0, 1, 2.
FAULTS: dict[str, tuple[int, str, tuple[int, int, int]]] = {
    "kill_0": (0, LOST, (-9, 70, 70)),
    "kill_1": (1, LOST, (70, -9, 70)),
    "stop_0": (0, "stopped answering for 2 s, last seen at '", (-9, 70, 70)),
    "stop_2": (2, "stopped answering for 2 s, last seen at '", (70, 70, -9)),
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
PEACEFUL = ("close_in_order", "close_in_reverse", "idle", "paused", "slow_load", "slow_compile", "strangers", "unsaid")
CHILDREN: dict[str, str] = {
    "child_kill_1": "rank 1 was killed by SIGKILL",
    "child_vanish_1": "rank 1 exited with code 0 before the engine was closed",
    "child_early": "rank 1 exited with code 3 before all ranks were there",
}
RANKS_OF = {"missing": (0, 1), "strangers": (0, 1)} | dict.fromkeys(CHILDREN, (0,))


@dataclass(slots=True)
class Run:
    """The processes of one scenario, and when each ended."""

    scenario: str
    directory: Path
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    waiters: dict[int, threading.Thread] = field(default_factory=dict)
    ended_at: dict[int, float] = field(default_factory=dict)

    def launch(self, rank: int, *options: str) -> None:
        with self._errors(rank, "wb") as errors:
            command = [sys.executable, *options, str(SCRIPT), self.scenario, str(rank), str(self.directory)]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            self.processes[rank] = subprocess.Popen(command, stderr=errors, env=environment)

            self.waiters[rank] = threading.Thread(target=self._await, args=[rank], daemon=True)
            self.waiters[rank].start()

    def _await(self, rank: int) -> None:
        self.processes[rank].wait()
        self.ended_at[rank] = time.time()

    def finish(self, deadline: float) -> None:
        """Wait for the ends until `deadline`, then kill what is left."""
        for waiter in self.waiters.values():
            waiter.join(max(deadline - time.monotonic(), 0.0))
        for rank, process in self.processes.items():
            process.kill()
            self.waiters[rank].join()

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
        with suppress(OSError):
            sock.sendall(line)
        kept.append(sock)
    return kept


def pause(run: Run) -> None:
    """Stop all ranks for 3 s, as a shell's Ctrl-Z does."""
    while not all((run.directory / f"playing_{rank}").exists() for rank in RANKS):
        time.sleep(0.02)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for process in run.processes.values():
            process.send_signal(number)
        time.sleep(3.0 if number == signal.SIGSTOP else 0.0)
    (run.directory / "resumed").write_text("yes")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Every scenario, played at the same time."""
    scenarios = ("strangers", *FAULTS, *PEACEFUL, *CHILDREN, "missing", "unclosed", "abandoned")
    runs = {name: Run(name, tmp_path_factory.mktemp(name)) for name in scenarios}
    strangers: list[socket.socket] = []
    try:
        for name, run in runs.items():
            for rank in RANKS_OF.get(name, RANKS):
                run.launch(rank, "-I", "-S")
        strangers = insult(runs["strangers"])
        runs["strangers"].launch(2, "-I", "-S")
        pause(runs["paused"])
    finally:
        deadline = time.monotonic() + 60.0
        for run in runs.values():
            run.finish(deadline)
        for sock in strangers:
            sock.close()
    return runs


@pytest.mark.parametrize("scenario", FAULTS)
def test_fault_ends_every_rank_and_is_named(runs: dict[str, Run], scenario: str) -> None:
    named, reason, codes = FAULTS[scenario]
    run = runs[scenario]
    assert run.codes() == codes
    reasons = set()
    for rank in RANKS:
        lines = [line for line in run.errors(rank).splitlines() if line.startswith("helix: ")]
        assert len(lines) == (codes[rank] == 70), run.errors(rank)
        for line in lines:
            assert line.endswith(f"; ending rank {rank}")
            reasons.add(line.removesuffix(f"; ending rank {rank}"))
    (told,) = reasons
    assert told.startswith(f"helix: rank {named} {reason}")
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


def test_rank_that_rank_0_leaves_behind(runs: dict[str, Run]) -> None:
    run = runs["abandoned"]
    assert run.codes() == (0, 0, 70)
    assert run.errors(2) == "helix: rank 2 did not close within 6.5 s of rank 0; ending rank 2\n"


@pytest.mark.slow
def test_gloo_ranks_blame_the_one_that_died(tmp_path: Path) -> None:
    """The collectives of the others break before their monitor hears of the death; still the dead rank is named."""
    run = Run("gloo", tmp_path)
    for rank in RANKS:
        run.launch(rank)
    run.finish(time.monotonic() + 120.0)
    assert run.codes() == (70, -9, 70)
    for rank in (0, 2):
        assert f"helix: rank 1 {LOST}; ending rank {rank}\n" in run.errors(rank)
    assert run.seconds() < 15.0


# ---- one process ----


def lone_monitor() -> Monitor:
    return Monitor.start(rank=0, world_size=1, store=None, master_addr="", stall_timeout_s=1.0, on_failure=end_process)


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


def start_two(store: DictStore, heard: list[RankFailure], follower_first_s: float = 0.0) -> tuple[Monitor, Monitor]:
    """Ranks 0 and 1, both in this process."""
    started: dict[int, Monitor] = {}

    def start(rank: int) -> None:
        started[rank] = Monitor.start(
            rank=rank,
            world_size=2,
            store=store,
            master_addr="127.0.0.1",
            stall_timeout_s=30.0,
            on_failure=heard.append,
            start_timeout_s=30.0,
            times=MonitorTimes(heartbeat_s=0.1, settle_s=0.3),
        )

    follower = threading.Thread(target=start, args=[1])
    follower.start()
    time.sleep(follower_first_s)
    start(0)
    follower.join()
    return started[0], started[1]


class DictStore:
    """Keys of one process; `get` raises where there is none."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self._values[key] = value

    def get(self, key: str) -> str:
        return self._values[key]


def test_engines_one_after_another_in_one_process() -> None:
    """The second follower first finds the address of the first engine, where nobody listens any more."""
    store, heard = DictStore(), list[RankFailure]()
    for _ in range(2):
        leader, follower = start_two(store, heard, follower_first_s=0.3)
        follower.close()
        leader.close()
        assert (leader.failure, follower.failure) == (None, None)
    assert heard == []


def test_failure_is_heard_once_and_is_the_same_everywhere() -> None:
    heard: list[RankFailure] = []
    leader, follower = start_two(DictStore(), heard)
    told = follower.fail("raised ValueError: no")
    also_told = leader.fail("raised RuntimeError: connection closed")
    assert (told.rank, told.reason) == (also_told.rank, also_told.reason) == (1, "raised ValueError: no")
    leader.close()
    follower.close()
    assert [str(failure) for failure in heard] == ["rank 1 raised ValueError: no"] * 2
    assert (leader.failure in heard, follower.failure in heard) == (True, True)


def test_nothing_fires_after_close() -> None:
    heard: list[RankFailure] = []
    leader, follower = start_two(DictStore(), heard)
    follower.close()
    assert follower.fail("raised too late").rank == 1
    leader.close()
    leader.close()
    assert leader.fail("raised too late").rank == 0
    assert heard == []


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
    with pytest.raises(RankFailure, match=r"rank 0 did not answer within 0\.3 s \(KeyError: 'helix/monitor'\)"):
        Monitor.start(
            rank=1,
            world_size=2,
            store=DictStore(),
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


def start_parent(argument: str) -> subprocess.Popen[bytes]:
    """A process whose child calls ``die_with_parent(argument)``, prints a line and waits; both hold stdout."""
    child = f"from helix.comm.monitor import die_with_parent as d; d({argument}); print('on', flush=True); input()"
    parent = (
        "import subprocess, sys\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}], stdin=subprocess.PIPE).wait()\n"
        "print('survived', flush=True)\n"
    )
    return subprocess.Popen([sys.executable, "-c", parent], cwd=SCRIPT.parents[2], stdout=subprocess.PIPE)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl is Linux's")
def test_child_dies_with_its_parent() -> None:
    with start_parent("") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"on\n"
        process.kill()
        # The pipe ends when its last holder, the child, is gone too.
        assert process.stdout.read() == b""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl is Linux's")
def test_child_dies_when_its_parent_was_gone() -> None:
    """It is told the process id of a parent that is not its parent now."""
    with start_parent("1") as process:
        assert process.stdout is not None
        assert process.stdout.read() == b"survived\n"
