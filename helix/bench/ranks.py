"""Runs timing tasks on ranks: those of the launcher, this process alone, or processes started for each task.

A plain process (no launcher) can so time layouts of different sizes one after the other.
"""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from helix.bench.variants import Variant
from helix.comm.stand_in import stand_in_mesh
from helix.comm.world import World, open_store
from helix.config import LaunchEnv, RunConfig, config_to_dict, launch_env, make_config
from helix.engine.build import build_core, resolve_layout, resolve_spec
from helix.engine.core import EngineCore
from helix.engine.join import enter_world, leave, share_cores
from helix.errors import ConfigError
from helix.kernels.fp8_cache import Fp8Rows
from helix.layout import Layout
from helix.model_spec import ModelSpec

_END_S = 20.0
Result = TypeVar("Result", covariant=True)


class Task(Protocol, Generic[Result]):
    """Something to time in one variant. Picklable, since other processes run it too."""

    @property
    def variant(self) -> Variant: ...

    def run(self, world: World) -> Result:
        """Collective over the ranks of `world`; rank 0's result counts."""
        ...


def run_tasks(tasks: Sequence[Task[Result]]) -> list[Result] | None:
    """The results of `tasks`, in order; None on ranks other than 0. Raises: ConfigError before anything is started."""
    env = launch_env()
    sizes = [task.variant.num_processes(resolve_spec(task.variant.config), env) for task in tasks]
    if env is None:
        return [_run_here(task, size) for task, size in zip(tasks, sizes, strict=True)]
    share_cores(env.local_size)
    world = enter_world(tasks[0].variant.config, env)
    results = [_guarded(task, world) for task in tasks]
    world.close()
    return results if world.rank == 0 else None


def _run_here(task: Task[Result], size: int) -> Result:
    config = task.variant.config
    with _children(task, size) as (env, store):
        world = enter_world(config, env, store=store)
        result = _guarded(task, world)
        world.close()
        return result


@contextmanager
def _children(task: Task[object], size: int) -> Iterator[tuple[LaunchEnv | None, object]]:
    """Start ranks 1 .. `size` - 1, and end them; gives rank 0's place among them and the store where they meet."""
    if size == 1:
        yield None, None
        return
    threads = share_cores(size)
    store = open_store("127.0.0.1", 0, serve=True)
    context = multiprocessing.get_context("spawn")
    children: list[BaseProcess] = [
        context.Process(target=_follow, args=(task, _local_env(rank, size, store.port)), daemon=True)
        for rank in range(1, size)
    ]
    try:
        for child in children:
            child.start()
        yield _local_env(0, size, store.port), store
        for child in children:
            child.join(_END_S)
    finally:
        for child in children:
            if child.is_alive():
                child.kill()
        torch.set_num_threads(threads)


def _follow(task: Task[object], env: LaunchEnv) -> None:
    share_cores(env.local_size)
    world = enter_world(task.variant.config, env)
    _guarded(task, world)
    world.close()


def _local_env(rank: int, size: int, port: int) -> LaunchEnv:
    return LaunchEnv(
        rank=rank, world_size=size, local_rank=rank, local_size=size, master_addr="127.0.0.1", master_port=port
    )


def _guarded(task: Task[Result], world: World) -> Result:
    try:
        return task.run(world)
    except BaseException as error:
        leave(world, error)
        raise


def sized(config: RunConfig, max_batch: int) -> RunConfig:
    """`config` with room for `max_batch` sequences of any length, no prefix found again, whatever it says itself."""
    sections = config_to_dict(config)
    engine, cache = {"max_batch": max_batch, "max_context": "auto"}, {"prefix_reuse": False}
    return make_config(sections | {"engine": sections["engine"] | engine, "cache": sections["cache"] | cache})


def open_core(variant: Variant, world: World, *, max_batch: int, longest: int) -> tuple[EngineCore, ModelSpec, Layout]:
    """The engine of `variant` for `max_batch` sequences of at most `longest` tokens, its cache filled with numbers.

    `longest` may be more than the model was made for: only the time is looked at. Collective.
    """
    # What the variant before this one held of the device.
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    config = sized(variant.config, max_batch)
    spec = resolve_spec(config)
    spec = replace(spec, max_context=max(spec.max_context, longest))
    mesh, layout = None, resolve_layout(config, spec, None if variant.one_rank else world.size)
    if variant.one_rank:
        mesh = stand_in_mesh(layout, 0, world.device)
    core = build_core(config, spec, layout, world, mesh=mesh)
    fill_cache(core, config.engine.seed)
    if variant.one_rank:
        core.model.head.register_forward_hook(partial(_mask_others, token_range(core)))
    return core, spec, layout


def _mask_others(ids: range, _head: nn.Module, _inputs: object, logits_RV: Tensor) -> None:
    """So that no token outside of `ids` is drawn."""
    logits_RV[:, : ids.start] = -torch.inf
    logits_RV[:, ids.stop :] = -torch.inf


def fill_cache(core: EngineCore, seed: int) -> None:
    """Random numbers in every page, the same in every run on one kind of device."""
    device = core.world.device
    generator = torch.Generator(device).manual_seed(seed + core.world.rank)
    for layer in core.cache.layers:
        for pool in (layer.k, layer.v):
            if isinstance(pool, Fp8Rows):
                # The bytes of positive numbers, without a copy in another format.
                pool.values_PBKD.view(torch.uint8).random_(0, 0x70, generator=generator)
                pool.scale_PBK.fill_(1e-2)
            parts = (pool.tail_PBKR,) if isinstance(pool, Fp8Rows) else (pool,)
            for part in parts:
                if part is not None and part.is_contiguous():
                    part.normal_(generator=generator)


def token_range(core: EngineCore) -> range:
    """Ids that random tokens may take: all; for a rank without its peers those that its embedding has rows of.

    The others' rows would come from the peers, and be zero.
    """
    vocab = core.model.head.vocab
    alone = core.mesh.world.size > core.world.size
    return range(vocab.start, vocab.stop) if alone else range(vocab.total)


def check_variants(variants: Sequence[Variant]) -> None:
    """Raise `ConfigError` where nothing is left to time."""
    if not variants:
        raise ConfigError("--layouts and --one-rank-of are empty; write sizes such as kvp=2 or tp=8")
