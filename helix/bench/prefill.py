"""`helix bench prefill`: the time from a prompt to its first token, over layouts and sizes of chunks.

One prompt of random tokens is computed in chunks, each a step of the engine. A chunk's time grows evenly with what lies
before it, so that of a long prompt only some chunks need to be run: ``--sample N`` times N of them, spread from the
first to the last over a cache that is filled with random numbers, and draws straight lines between them. Without it
every chunk is timed. Their sum is the time to the first token; there is no queue and no other request.

Beside each time: the ceiling of the device and the cost model's prediction. Layouts are timed on real ranks or, with
``--one-rank-of``, as one rank's true share without its peers; what the collectives take is then added from the model.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from helix.bench.pricing import Pricing, device_name
from helix.bench.ranks import check_variants, open_core, run_tasks, token_range
from helix.bench.variants import Variant, read_variants, series_name
from helix.comm.world import World
from helix.config import RunConfig
from helix.engine.build import resolve_spec
from helix.engine.core import EngineCore
from helix.engine.request import Request
from helix.engine.scheduler import StepPlan
from helix.planner.explain import tokens_text

# Time that one chunk may take before its rank counts as stalled.
_CHUNK_LIMIT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Tokens of the prompt, and of its chunks."""

    prompt: int
    chunk: int

    def __str__(self) -> str:
        return f"{tokens_text(self.prompt)} in {tokens_text(self.chunk)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One cell in one variant, milliseconds for the whole prompt.

    `starts` and `chunk_ms` are the chunks that were timed, each the median of `repeats`. `collectives_ms` is the cost
    model's, for a rank without its peers; 0 where they really ran. `shared_from` is the number of tokens from which the
    ranks of a KVP group share the first projection of a chunk.
    """

    variant: str
    layout: str
    one_rank: bool
    prompt: int
    chunk: int
    shared_from: int | None
    starts: tuple[int, ...]
    chunk_ms: tuple[float, ...]
    compute_ms: float
    collectives_ms: float
    ceiling_ms: float | None
    predicted_ms: float | None

    @property
    def first_token_ms(self) -> float:
        """Time to the first token."""
        return self.compute_ms + self.collectives_ms

    @property
    def tokens_per_s(self) -> float:
        return 1e3 * self.prompt / self.first_token_ms

    @property
    def prediction_error(self) -> float | None:
        """Of what was measured: collectives that come from the cost model are left out on both sides."""
        return None if self.predicted_ms is None else (self.predicted_ms - self.collectives_ms) / self.compute_ms - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillReport:
    """What was timed, on what. `skipped` says why a cell has no time."""

    model: str
    num_layers: int
    dtype: str
    device: str
    torch: str
    sample: int | None
    repeats: int
    hardware: str | None
    timings: tuple[Timing, ...]
    skipped: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTask:
    """The cells of one variant."""

    variant: Variant
    cells: tuple[Cell, ...]
    sample: int | None
    repeats: int

    def run(self, world: World) -> PrefillReport:
        """Collective over `world`."""
        longest = max(cell.prompt for cell in self.cells) + 1
        core, spec, layout = open_core(self.variant, world, max_batch=1, longest=longest)
        pricing = Pricing.of(self.variant.config, spec, layout, core)
        timings, skipped = [], []
        for cell in self.cells:
            if core.rule.rows_for(cell.prompt + 1) > core.cache.num_rows:
                skipped.append(f"{self.variant.label}, {cell}: the cache has {core.cache.num_rows} page rows, too few")
            else:
                timings.append(self._time(core, cell, pricing))
        model = self.variant.config.model
        return PrefillReport(
            model=str(model.card or model.path),
            num_layers=spec.num_layers,
            dtype=pricing.formats.weights,
            device=device_name(world.device),
            torch=torch.__version__,
            sample=self.sample,
            repeats=self.repeats,
            hardware=None if pricing.hardware is None else pricing.hardware.name,
            timings=tuple(timings),
            skipped=tuple(skipped),
        )

    def _time(self, core: EngineCore, cell: Cell, pricing: Pricing) -> Timing:
        source = random.Random(cell.prompt)
        tokens = source.choices(token_range(core), k=cell.prompt)
        starts = range(0, cell.prompt, cell.chunk)
        timed = sampled(starts, self.sample)
        # The first chunk compiles kernels, on every rank at its own pace.
        with core.world.monitor.long_operation(f"timing a prompt of {cell}", _CHUNK_LIMIT_S):
            times = [time_chunk(core, tokens, start, cell.chunk, self.repeats) for start in timed]
        price = pricing.prefill(cell.prompt, cell.chunk)
        return Timing(
            variant=self.variant.label,
            layout=str(core.mesh.layout),
            one_rank=self.variant.one_rank,
            prompt=cell.prompt,
            chunk=cell.chunk,
            shared_from=pricing.shared_from,
            starts=tuple(timed),
            chunk_ms=tuple(times),
            compute_ms=float(np.interp(starts, timed, times).sum()),
            collectives_ms=(price.collectives_ms or 0.0) if self.variant.one_rank else 0.0,
            ceiling_ms=price.ceiling_ms,
            predicted_ms=price.predicted_ms,
        )


def sampled(starts: Sequence[int], count: int | None) -> list[int]:
    """`count` of `starts`, evenly spread from the first to the last; all of them for None."""
    if count is None or count >= len(starts):
        return list(starts)
    return [starts[round(index * (len(starts) - 1) / (count - 1))] for index in range(count)]


def time_chunk(core: EngineCore, tokens: list[int], start: int, chunk: int, repeats: int) -> float:
    """Milliseconds of the step that feeds a prompt's tokens from `start` on; a step that runs again stores the same.

    Collective. The tokens before `start` are booked as computed.
    """
    request = Request(request_id=0, prompt_ids=tokens, max_tokens=1)
    scheduler = core.scheduler
    before = scheduler.prefill_chunk
    try:
        scheduler.add(request)
        if start:
            scheduler.prefill_chunk = start
            scheduler.commit(_plan(core), [])
        scheduler.prefill_chunk = chunk
        plan = _plan(core)
        with torch.inference_mode():
            # Compiles kernels, and brings every rank to the same place.
            _run(core, plan)
            times = [_run(core, plan) for _ in range(repeats)]
    finally:
        scheduler.prefill_chunk = before
        scheduler.cancel(request.request_id)
    return statistics.median(times)


def _plan(core: EngineCore) -> StepPlan:
    plan = core.scheduler.plan()
    if plan is None or len(plan.items) != 1:
        raise RuntimeError("the scheduler has no step for the prompt, though the cache has room for it")
    return plan


def _run(core: EngineCore, plan: StepPlan) -> float:
    _wait(core)
    start = time.perf_counter()
    core.runner.run(plan)
    _wait(core)
    return 1e3 * (time.perf_counter() - start)


def _wait(core: EngineCore) -> None:
    if core.world.device.type == "cuda":
        torch.cuda.synchronize()


def bench_prefill(
    config: RunConfig,
    cells: Sequence[Cell],
    *,
    sample: int | None,
    repeats: int,
    layouts: str | None = None,
    one_rank_of: str | None = None,
) -> PrefillReport | None:
    """Time prompts in each variant (see `read_variants`); None on ranks other than 0."""
    variants = read_variants(config, resolve_spec(config), layouts, one_rank_of)
    check_variants(variants)
    reports = run_tasks(
        [PrefillTask(variant=one, cells=tuple(cells), sample=sample, repeats=repeats) for one in variants]
    )
    if reports is None:
        return None
    return replace(
        reports[0],
        timings=tuple(timing for one in reports for timing in one.timings),
        skipped=tuple(line for one in reports for line in one.skipped),
    )


def report_to_dict(report: PrefillReport) -> dict[str, Any]:
    """What the JSON line holds: the report, and beside each timing what follows from it."""
    timings = [
        {
            **asdict(one),
            "first_token_ms": one.first_token_ms,
            "tokens_per_s": one.tokens_per_s,
            "prediction_error": one.prediction_error,
        }
        for one in report.timings
    ]
    return {"bench": "prefill", **asdict(report), "timings": timings}


_COLUMNS = (
    "prompt in chunks",
    "timed",
    "first chunk",
    "last chunk",
    "compute",
    "collectives",
    "first token",
    "tokens/s",
    "ceiling",
    "of ceiling",
    "predicted",
    "error",
)


def print_report(report: PrefillReport, *, as_json: bool) -> None:
    """A table, unless `as_json`; the last line is one JSON object in any case."""
    if not as_json:
        title = f"{report.model}, {report.num_layers} layers, {report.dtype}, {report.device}"
        table = Table(title=f"{title}: ms to the first token of a prompt", box=box.SIMPLE)
        table.add_column("layout", no_wrap=True)
        for name in _COLUMNS:
            table.add_column(name, justify="right")
        for one in report.timings:
            table.add_row(*_row(one))
        Console(width=180).print(table)
        for line in (*(f"skipped {one}" for one in report.skipped), *_legend(report)):
            print(line)
    print(json.dumps(report_to_dict(report)))


def _legend(report: PrefillReport) -> Iterator[str]:
    yield f"timed: chunks that ran (each the median of {report.repeats}); the others lie on straight lines between them"
    if any(one.one_rank for one in report.timings):
        yield (
            "collectives: not run (one rank without its peers: local work of the same bytes, which compute holds); "
            "their time is the cost model's"
        )
    yield "ceiling: every byte read once and every product at the card's best rates, without messages and fixed costs"
    yield "predicted: the cost model; error: of it against compute, added collectives left out"


def _row(one: Timing) -> tuple[str, ...]:
    def number(value: float | None, form: str = ".1f") -> str:
        return "-" if value is None else format(value, form)

    share = None if one.ceiling_ms is None else one.ceiling_ms / one.compute_ms
    return (
        series_name(one.variant, one.layout, one_rank=one.one_rank),
        f"{tokens_text(one.prompt)} in {tokens_text(one.chunk)}",
        f"{len(one.starts)} of {-(-one.prompt // one.chunk)}",
        number(one.chunk_ms[0]),
        number(one.chunk_ms[-1]),
        number(one.compute_ms),
        f"+{one.collectives_ms:.1f}" if one.one_rank else "in compute",
        number(one.first_token_ms),
        number(one.tokens_per_s, ".0f"),
        number(one.ceiling_ms),
        number(share, ".0%"),
        number(one.predicted_ms),
        number(one.prediction_error, "+.0%"),
    )
