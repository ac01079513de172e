"""Traces of decode steps for chrome://tracing and Perfetto, in which one sees whether exchanges hide behind attention.

A graph's kernels keep their names and streams but lose the ranges of the code that launched them. So a trace holds
steps as the engine runs them, under ``as run``, and behind them one eager step, under ``eager``, whose parts are named:
attention and exchange of each chunk, collectives, experts and the other modules.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from helix.engine.core import EngineCore
from helix.engine.runner import Runner
from helix.engine.scheduler import StepPlan
from helix.layers.attention import Attention
from helix.layers.embedding import Embedding, Head
from helix.layers.mla import MLA
from helix.layers.mlp import MLP
from helix.layers.moe import MoE

_STEPS = 3
_NAMED: dict[type[nn.Module], str] = {
    Embedding: "embedding",
    Attention: "attention layer",
    MLA: "attention layer",
    MLP: "mlp",
    MoE: "experts",
    Head: "head",
}


def trace_decode(core: EngineCore, path: Path, num_steps: int = _STEPS) -> Path | None:
    """Write a trace of `num_steps` runs of the step that `core` would take next; None where there is none.

    Collective over all ranks; each writes a file of its own (see `rank_path`). A step that runs twice stores the same.
    """
    plan = core.scheduler.plan()
    if plan is None:
        return None
    return trace_plan(core.runner, plan, rank_path(path, core.world.rank, core.world.size), num_steps)


def trace_plan(runner: Runner, plan: StepPlan, path: Path, num_steps: int = _STEPS) -> Path:
    """Write a trace of `num_steps` runs of any `plan`, and of one eager run, to `path`. Collective."""
    with torch.inference_mode():
        # Compiles and captures what is missing; the profiler's own start is slow too.
        runner.run(plan)
        with tracing(runner.model, runner.mesh.device, path):
            for _ in range(num_steps):
                with record_function("as run"):
                    runner.run(plan)
            with record_function("eager"):
                runner.run(plan, tap=_ignore)
    return path


@contextmanager
def tracing(model: nn.Module, device: torch.device, path: Path) -> Iterator[None]:
    """Profile what runs inside, with a range for each run of an attention, FFN, embedding or head of `model`."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize(device)
    with profile(activities=activities) as profiler:
        with _named_modules(model):
            yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))


@contextmanager
def _named_modules(model: nn.Module) -> Iterator[None]:
    ranges: list[record_function] = []

    def enter(module: nn.Module, _inputs: object) -> None:
        ranges.append(record_function(_NAMED[type(module)]))
        ranges[-1].__enter__()

    def leave(_module: nn.Module, _inputs: object, _outputs: object) -> None:
        ranges.pop().__exit__(None, None, None)

    handles = []
    for module in model.modules():
        if type(module) in _NAMED:
            handles += [
                module.register_forward_pre_hook(enter),
                module.register_forward_hook(leave, always_call=True),
            ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def rank_path(path: Path, rank: int, num_ranks: int) -> Path:
    """`path` with the rank before its suffix: trace.json of rank 1 is trace.rank1.json; as it is for a single rank."""
    return path if num_ranks == 1 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def hidden_us(events: Sequence[dict[str, Any]]) -> float:
    """Microseconds in which kernels of more than one stream ran at once, from the events of a trace."""
    edges = []
    for event in events:
        if event.get("cat") == "kernel":
            stream = event["args"]["stream"]
            edges += [(event["ts"], 1, stream), (event["ts"] + event["dur"], -1, stream)]
    running: dict[int, int] = {}
    hidden, before = 0.0, 0.0
    for at, change, stream in sorted(edges):
        if sum(count > 0 for count in running.values()) > 1:
            hidden += at - before
        running[stream] = running.get(stream, 0) + change
        before = at
    return hidden


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events of a trace that was written here."""
    events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events


def _ignore(*_: object) -> None:
    """A tap that looks at nothing: with one, a step runs eagerly."""
