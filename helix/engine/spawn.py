"""Starts the other ranks from a plain process, and ends them with it.

Each rank is its own interpreter running ``helix.engine.worker`` (not a fork or a `multiprocessing` child, so that the
caller's script needs no main guard). The configuration goes in as JSON through standard input.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_GRACE_S = 10.0


@dataclass(slots=True)
class SpawnedRanks:
    """The processes of ranks 1 .. N-1."""

    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def wait(self) -> None:
        """Wait for the ranks to end by themselves after an orderly close; those that do not are killed."""
        for process in self.processes.values():
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def kill(self) -> None:
        """End every rank now (a stopped process dies too)."""
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
        for process in self.processes.values():
            process.wait()


def spawn_ranks(settings: dict[str, Any], world_size: int, port: int) -> SpawnedRanks:
    """Start ranks 1 .. `world_size` - 1 on this machine; they meet rank 0 at 127.0.0.1:`port`."""
    ranks = SpawnedRanks()
    source = str(Path(__file__).resolve().parents[2])
    python_path = os.pathsep.join(part for part in (source, os.environ.get("PYTHONPATH", "")) if part)
    payload = json.dumps(settings).encode()
    # The kernel ties a child to the thread that started it, so only the main thread, which lasts, may ask for that.
    parent = [str(os.getpid())] if threading.current_thread() is threading.main_thread() else []
    try:
        for rank in range(1, world_size):
            environment = os.environ | {
                "PYTHONPATH": python_path,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            process = subprocess.Popen(
                [sys.executable, "-m", "helix.engine.worker", *parent],
                stdin=subprocess.PIPE,
                stdout=sys.stderr.fileno() if _has_fileno(sys.stderr) else subprocess.DEVNULL,
                env=environment,
                # Ctrl-C is for the caller: it closes the engine, which ends the ranks in order.
                start_new_session=True,
            )
            ranks.processes[rank] = process
            if process.stdin is None:
                raise RuntimeError(f"rank {rank} has no standard input")
            process.stdin.write(payload)
            process.stdin.close()
    except BaseException:
        ranks.kill()
        raise
    return ranks


def _has_fileno(stream: Any) -> bool:
    """Whether `stream` is a real file (it is not in a notebook or under a test's capture)."""
    try:
        stream.fileno()
    except (OSError, ValueError, AttributeError):
        return False
    return True
