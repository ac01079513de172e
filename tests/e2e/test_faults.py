"""A rank that is killed, stops, raises or exits early ends every rank in time, with its number and the reason."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.planted_fault import ROOT, plant
from tests.tiny import TinyModels

SCRIPT = Path(__file__).with_name("fault_script.py")
LIMIT_S = 30.0


class Script:
    """fault_script.py as a process, with the pids of its ranks once it is ready."""

    def __init__(self, settings: dict[str, Any], *arguments: str, environment: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), json.dumps(settings), *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ
            | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
            | (environment or {}),
        )
        self.pids: list[int] = []

    def wait_ready(self) -> Script:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.startswith("ready"):
            _out, err = self.process.communicate(timeout=60)
            raise AssertionError(f"the engine did not start: {err}")
        self.pids = [int(part) for part in line.split()[1:]]
        return self

    def finish(self, limit_s: float = LIMIT_S) -> tuple[int, str]:
        """Exit code and stderr; the process must end within `limit_s`."""
        _out, err = self.process.communicate(timeout=limit_s)
        return self.process.returncode, err

    def ranks_alive(self) -> list[int]:
        return [pid for pid in self.pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]

    def assert_no_rank_left(self) -> None:
        deadline = time.monotonic() + LIMIT_S
        while self.ranks_alive() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not self.ranks_alive()

    def destroy(self) -> None:
        for pid in (*self.ranks_alive(), self.process.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()


@pytest.fixture
def settings(tiny: TinyModels) -> dict[str, Any]:
    return {
        "model": {"path": tiny.path("llama"), "dtype": "float32"},
        "layout": {"kvp": 2},
        "cache": {"page_tokens": 4, "num_page_rows": 32},
        "engine": {"device": "cpu", "stall_timeout_s": 12.0},
    }


@pytest.fixture
def scripts() -> Iterator[list[Script]]:
    started: list[Script] = []
    yield started
    for script in started:
        script.destroy()


def test_plain_process_starts_ranks_and_ends_them(settings: dict[str, Any], scripts: list[Script]) -> None:
    script = Script(settings)
    scripts.append(script)
    script.wait_ready()
    assert len(script.pids) == 2
    code, err = script.finish(60.0)
    assert code == 0, err
    script.assert_no_rank_left()


@pytest.mark.parametrize(
    ("number", "rank", "words"),
    [(signal.SIGKILL, 1, "SIGKILL"), (signal.SIGSTOP, 1, "stopped answering")],
)
def test_a_rank_that_dies_or_stops_is_named(
    settings: dict[str, Any], scripts: list[Script], number: signal.Signals, rank: int, words: str
) -> None:
    script = Script(settings, "long")
    scripts.append(script)
    script.wait_ready()
    time.sleep(0.3)
    os.kill(script.pids[rank], number)
    code, err = script.finish()
    assert code != 0
    assert f"rank {rank} " in err
    assert words in err
    script.assert_no_rank_left()


@pytest.fixture
def in_the_background() -> Iterator[None]:
    """Ctrl-C is ignored here and in what is started from here, as in a shell's background jobs."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("in_the_background")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_ranks_end_with_the_process_that_started_them(
    settings: dict[str, Any], scripts: list[Script], number: signal.Signals
) -> None:
    script = Script(settings, "long")
    scripts.append(script)
    script.wait_ready()
    time.sleep(0.3)
    os.kill(script.pids[0], number)
    code, _err = script.finish()
    assert code != 0
    script.assert_no_rank_left()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("load:raise", "rank 1 raised RuntimeError: injected"),
        ("load:exit0", "rank 1 exited"),
        ("load:hang", "rank 1 "),
        ("step:raise", "rank 1 raised RuntimeError: injected"),
        ("step:hang", "rank 1 "),
        ("step:exit0", "rank 1 exited"),
    ],
)
def test_faults_inside_a_rank(
    settings: dict[str, Any], scripts: list[Script], tmp_path: Path, fault: str, words: str
) -> None:
    """A rank misbehaves by itself, while loading or in a step."""
    script = Script(settings, "long", environment=plant(tmp_path, 1, fault))
    scripts.append(script)
    started = time.monotonic()
    code, err = script.finish(90.0)
    assert code != 0
    assert words in err, err
    planted = float((tmp_path / "when").read_text())
    assert time.time() - planted < LIMIT_S + 2, f"took {time.monotonic() - started:.0f} s in all"
    script.assert_no_rank_left()


def test_a_busy_rendezvous_port_is_named(settings: dict[str, Any]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        launched = {
            "RANK": "0",
            "WORLD_SIZE": "3",
            "LOCAL_RANK": "0",
            "LOCAL_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        script = Script(settings, environment=launched)
        code, err = script.finish(90.0)
    assert code != 0
    assert str(port) in err
    assert "--master_port" in err
