"""A pool of rank processes that outlives single tests: starting ranks costs seconds, a job on them milliseconds."""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Literal

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from helix.comm.world import World, join_world, pick_device, single_world
from helix.config import LaunchEnv

Job = Callable[..., Any]
Where = Literal["cpu", "gpus", "one gpu"]


class RankPool:
    """Runs ``job(world, *args)`` on ranks 0 .. n-1 and returns what each gave. Jobs live in importable test modules.

    The ranks compute on the CPU, on a GPU each (as far as there are), or all on the first GPU.
    """

    def __init__(self, where: Where = "cpu") -> None:
        self.where = where
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "deepspeed.comm", "helix.engine.engine", "transformers"])
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._num_jobs = 0

    def run(self, size: int, job: Job, *args: Any, timeout_s: float = 240.0) -> list[Any]:
        while len(self._workers) < size:
            self._start(len(self._workers))
        self._num_jobs += 1
        chosen = self._workers[:size]
        for rank, (_process, pipe) in enumerate(chosen):
            pipe.send((rank, size, f"job{self._num_jobs}", job, args, timeout_s))
        pending = {pipe: rank for rank, (_process, pipe) in enumerate(chosen)}
        results: list[Any] = [None] * size
        errors: list[str] = []
        while pending:
            ready = wait(list(pending), timeout_s)
            if not ready:
                errors.append(f"ranks {sorted(pending.values())} gave no answer within {timeout_s} s")
                break
            for pipe in [one for one in pending if one in ready]:
                rank = pending.pop(pipe)
                try:
                    ok, value = pipe.recv()
                except EOFError:
                    ok, value = False, "the process ended"
                results[rank] = value
                if not ok:
                    errors.append(f"rank {rank}: {value}")
        if errors:
            self.close_workers()
            raise AssertionError("\n".join(errors))
        return results

    def _start(self, rank: int) -> None:
        ours, theirs = self._context.Pipe()
        arguments = (theirs, self._store.port, self.where)
        process = self._context.Process(target=_serve, args=arguments, daemon=True, name=f"rank{rank}")
        process.start()
        theirs.close()
        self._workers.append((process, ours))

    def close_workers(self) -> None:
        for process, pipe in self._workers:
            process.kill()
            pipe.close()
        for process, _pipe in self._workers:
            process.join()
        self._workers = []


def _serve(pipe: Connection, port: int, where: Where) -> None:
    torch.set_num_threads(1)
    if where == "one gpu":
        # Said before this process first asks for a GPU.
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    client = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    while True:
        try:
            rank, size, name, job, args, timeout_s = pipe.recv()
        except EOFError:
            return
        # Where a job hangs, its stacks tell more than the pool's complaint that follows.
        faulthandler.dump_traceback_later(0.9 * timeout_s)
        try:
            world = _join(rank, size, PrefixStore(name, client), where)
            value = job(world, *args)
            world.close()
            pipe.send((True, value))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()


def _join(rank: int, size: int, store: Any, where: Where) -> World:
    device = pick_device("cpu" if where == "cpu" else "cuda", rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if size == 1:
        return single_world(device)
    env = LaunchEnv(
        rank=rank, world_size=size, local_rank=rank, local_size=size, master_addr="127.0.0.1", master_port=0
    )
    return join_world(env, device, stall_timeout_s=28.0, store=store)
