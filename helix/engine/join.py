"""How a rank enters an engine: join the world, build its core, and (ranks other than 0) follow rank 0 to the end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from helix.comm.monitor import ChildProcess, end_process
from helix.comm.world import World, join_world, pick_device, single_world
from helix.config import LaunchEnv, RunConfig
from helix.engine.build import build_core, resolve_layout, resolve_spec
from helix.errors import HelixError, RankFailure


def enter_world(
    config: RunConfig,
    env: LaunchEnv | None,
    *,
    store: Any = None,
    on_failure: Callable[[RankFailure], None] = end_process,
    processes: Mapping[int, ChildProcess] | None = None,
) -> World:
    """Join the ranks of `env` (None: this process is the only one) on the device that `config` names."""
    device = pick_device(config.engine.device, env.local_rank if env else 0)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if env is None:
        return single_world(device)
    return join_world(
        env,
        device,
        stall_timeout_s=config.engine.stall_timeout_s,
        on_failure=on_failure,
        store=store,
        processes=processes,
    )


def follow(config: RunConfig, world: World) -> None:
    """The life of a rank other than 0: build, take part in every step, leave when rank 0 closes."""
    try:
        spec = resolve_spec(config)
        core = build_core(config, spec, resolve_layout(config, spec, world.size), world)
        core.follow()
    except Exception as error:
        # Not SystemExit: the monitor reports an early exit in its own words.
        leave(world, error)
        raise
    world.close()


def end_on_sigterm() -> None:
    """Under the launcher: SIGTERM ends this rank through its exit path instead of at once.

    The launcher sends it as soon as it sees one rank gone, which is a moment before the monitor has said which rank
    that was and why. Signals reach the main thread only, so elsewhere nothing is changed.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _raise_exit)


def _raise_exit(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def leave(world: World, error: BaseException) -> RankFailure:
    """Tell the other ranks that this one failed, and why; the monitor ends them.

    Returns the failure that was decided on: the one of another rank, where this one only felt its death.
    """
    if isinstance(error, SystemExit | KeyboardInterrupt):
        return world.monitor.fail("was told to end")
    reason = str(error) if isinstance(error, HelixError) else f"{type(error).__name__}: {error}"
    return world.monitor.fail(f"raised {reason}")


def share_cores(local_size: int) -> int:
    """Divide this machine's cores among its ranks, so that their threads do not fight; returns the former setting."""
    before = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ and local_size > 1:
        torch.set_num_threads(max((os.cpu_count() or 1) // local_size, 1))
    return before
