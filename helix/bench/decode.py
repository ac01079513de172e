"""`helix bench decode`: the time of decode steps over batch x context x layout, on a synthetically filled cache.

The engine's own steps are timed (scheduler, inputs, model, choice of tokens), from the tokens of one on the host to
those of the next, as a user gets them. No prompt is computed: pages are filled with random numbers, and the requests
are booked as computed. The tokens that are fed back are drawn on the device at a temperature at which all are equally
likely, since the likely ones of random weights soon repeat themselves and would send all sequences to the same experts.
`same_token` draws the same one for all sequences, which comes close to that: so figures of engines that were timed on
repeated tokens have their like. How many distinct experts a layer hits is counted and printed.

Beside each time: the ceiling of the device and the cost model's prediction. Several layouts are timed in one run, on
real ranks or, with ``--one-rank-of``, as one rank's true share without its peers (see `helix.comm.stand_in`): then what
the collectives take is added from the cost model.
"""

from __future__ import annotations

import json
import random
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from helix.bench.pricing import Pricing, device_name
from helix.bench.ranks import check_variants, open_core, run_tasks, token_range
from helix.bench.trace import trace_decode
from helix.bench.variants import Variant, read_variants, series_name
from helix.comm.mesh import Mesh
from helix.comm.world import World
from helix.config import RunConfig, config_to_dict, make_config
from helix.engine.build import resolve_spec
from helix.engine.core import EngineCore, StepOps, StepSinks
from helix.engine.request import Request
from helix.engine.sampler import uniform
from helix.engine.scheduler import StepItem
from helix.errors import ConfigError
from helix.layers.batch import Batch
from helix.layers.router import Router
from helix.layout import uneven_slice

_DEVICE_STEPS = 16
# Every token weighs the same: exp(difference of logits / this) is 1.
_HOT = 1e300
# Steps in which the experts that are hit are counted.
_COUNTED_STEPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Sequences that decode together, and tokens of each that are in the cache."""

    batch: int
    context: int

    def __str__(self) -> str:
        return f"{self.batch} x {self.context}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeModel:
    """The step of all `num_layers` layers where only the first of them were run, at two depths.

    Each layer beyond counts as the mean of those between the depths. Collectives and prediction are for all layers.
    """

    num_layers: int
    from_layers: int
    ttl_ms: float
    collectives_ms: float
    predicted_ms: float | None

    @property
    def total_ms(self) -> float:
        """The step with its collectives."""
        return self.ttl_ms + self.collectives_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One cell in one variant. Milliseconds a step: median and quartiles as a user sees them.

    `first_ms` is the cell's first step, in which kernels may be compiled and the step is captured. `device_ms` comes
    from steps that do not wait for their tokens; None on a CPU. `collectives_ms` is what the cost
    model says for the collectives of a rank that was timed without its peers; 0 where they really ran. Experts are
    means over layers that have them: distinct ones that the step's tokens chose, those of them on this rank, and what
    the busiest rank reads where the choice is random. `read_bytes`, ceiling and prediction are those of this rank.
    """

    variant: str
    layout: str
    one_rank: bool
    mode: str
    batch: int
    context: int
    first_ms: float
    ttl_ms: float
    low_ms: float
    high_ms: float
    device_ms: float | None
    collectives_ms: float
    experts_hit: float | None
    local_experts_hit: float | None
    busiest_experts: float | None
    read_bytes: int
    ceiling_ms: float | None
    predicted_ms: float | None
    whole: WholeModel | None = None

    @property
    def host_share(self) -> float | None:
        """Share of a step in which the device waits for the host."""
        return None if self.device_ms is None else max(1.0 - self.device_ms / self.ttl_ms, 0.0)

    @property
    def total_ms(self) -> float:
        """The step with its collectives."""
        return self.ttl_ms + self.collectives_ms

    @property
    def prediction_error(self) -> float | None:
        """Of what was measured: collectives that come from the cost model are left out on both sides."""
        return None if self.predicted_ms is None else (self.predicted_ms - self.collectives_ms) / self.ttl_ms - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StartUp:
    """Seconds of rank 0 to its first token: imports and ranks, weights and cache, and the first step (compilation)."""

    process_s: float
    build_s: float
    first_step_s: float

    @property
    def total_s(self) -> float:
        return self.process_s + self.build_s + self.first_step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeReport:
    """What was timed, on what. `skipped` says why a cell has no time; `start_up` is None where none has."""

    model: str
    num_layers: int
    dtype: str
    device: str
    torch: str
    steps: int
    same_token: bool
    hardware: str | None
    start_up: StartUp | None
    timings: tuple[Timing, ...]
    skipped: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTask:
    """The cells of one variant: `steps` timed steps of each after `warmup` others."""

    variant: Variant
    cells: tuple[Cell, ...]
    steps: int
    warmup: int
    same_token: bool
    whole_layers: int | None = None
    trace: Path | None = None

    def run(self, world: World) -> DecodeReport:
        """Collective over `world`. Contexts may be longer than the model was made for: only the time is looked at."""
        longest = max(cell.context for cell in self.cells) + self.warmup + self.steps + _COUNTED_STEPS + 4
        max_batch = max(cell.batch for cell in self.cells)
        process_s, start = time.time() - psutil.Process().create_time(), time.perf_counter()
        core, spec, layout = open_core(self.variant, world, max_batch=max_batch, longest=longest)
        build_s = time.perf_counter() - start
        pricing = Pricing.of(self.variant.config, spec, layout, core)
        timings, skipped = [], []
        for cell in self.cells:
            timing = self._time(core, cell, pricing)
            if timing is None:
                skipped.append(f"{self.variant.label}, {cell}: the cache has {core.cache.num_rows} page rows, too few")
            else:
                timings.append(timing)
        model = self.variant.config.model
        return DecodeReport(
            model=str(model.card or model.path),
            num_layers=spec.num_layers,
            dtype=pricing.formats.weights,
            device=device_name(world.device),
            torch=torch.__version__,
            steps=self.steps,
            same_token=self.same_token,
            hardware=None if pricing.hardware is None else pricing.hardware.name,
            start_up=StartUp(process_s=process_s, build_s=build_s, first_step_s=timings[0].first_ms / 1e3)
            if timings
            else None,
            timings=tuple(timings),
            skipped=tuple(skipped),
        )

    def _time(self, core: EngineCore, cell: Cell, pricing: Pricing) -> Timing | None:
        """Time one cell; None where the cache is too small."""
        count = self.warmup + self.steps
        # One step may be under way when the last one is timed, and one is planned for the device's time.
        requests = place_requests(core, cell, count + _COUNTED_STEPS + 2, self.same_token)
        if requests is None:
            return None
        if core.world.rank == 0:
            times = _lead_steps(core, cell, count, self.same_token)
        else:
            core.follow()
            times = [0.0] * count
        with torch.inference_mode():
            device_ms = _device_ms(core, self.same_token)
            hits = _experts_hit(core, self.same_token)
        if self.trace is not None:
            trace_decode(core, _named(self.trace, str(cell) if len(self.cells) > 1 else ""))
        clear(core, requests)
        low, median, high = statistics.quantiles(times[self.warmup :], n=4)
        here = None if hits is None else hits[1]
        price = pricing.decode(cell.batch, cell.context, here)
        one_rank = self.variant.one_rank
        whole = None
        if self.whole_layers is not None:
            all_layers = pricing.of_layers(self.whole_layers).decode(cell.batch, cell.context, here)
            whole = WholeModel(
                num_layers=self.whole_layers,
                from_layers=pricing.spec.num_layers,
                ttl_ms=median,
                collectives_ms=(all_layers.collectives_ms or 0.0) if one_rank else 0.0,
                predicted_ms=all_layers.predicted_ms,
            )
        return Timing(
            variant=self.variant.label,
            layout=str(core.mesh.layout),
            one_rank=one_rank,
            mode=core.runner.mode,
            batch=cell.batch,
            context=cell.context,
            first_ms=times[0],
            ttl_ms=median,
            low_ms=low,
            high_ms=high,
            device_ms=device_ms,
            collectives_ms=(price.collectives_ms or 0.0) if one_rank else 0.0,
            experts_hit=None if hits is None else hits[0],
            local_experts_hit=here,
            busiest_experts=pricing.busiest_hits(cell.batch),
            read_bytes=price.read_bytes,
            ceiling_ms=price.ceiling_ms,
            predicted_ms=price.predicted_ms,
            whole=whole,
        )


def bench_decode(
    config: RunConfig,
    cells: Sequence[Cell],
    *,
    steps: int,
    warmup: int,
    same_token: bool = False,
    layouts: str | None = None,
    one_rank_of: str | None = None,
    whole_from: int | None = None,
    trace: Path | None = None,
) -> DecodeReport | None:
    """Time decode steps of each cell in each variant (see `read_variants`); None on ranks other than 0.

    With `whole_from` each is timed with so many layers too, and `WholeModel` is drawn through both depths.
    `trace`: also write Chrome traces of the deeper ones, one a rank; with several variants or cells their names are put
    into the file's.
    """
    variants = read_variants(config, resolve_spec(config), layouts, one_rank_of)
    check_variants(variants)
    whole = None if whole_from is None else check_depths(config, whole_from)
    shallow = [] if whole_from is None else [with_layers(one, whole_from) for one in variants]
    files = [None if trace is None else _named(trace, one.label if len(variants) > 1 else "") for one in variants]
    reports = run_tasks(
        [
            DecodeTask(
                variant=one,
                cells=tuple(cells),
                steps=steps,
                warmup=warmup,
                same_token=same_token,
                whole_layers=whole,
                trace=file,
            )
            for one, file in zip((*variants, *shallow), (*files, *[None] * len(shallow)), strict=True)
        ]
    )
    if reports is None:
        return None
    deep = reports[: len(variants)]
    if shallow:
        deep = [with_whole(*pair) for pair in zip(deep, reports[len(variants) :], strict=True)]
    return join_reports(deep)


def check_depths(config: RunConfig, whole_from: int) -> int:
    """Layers of the whole model, whose layers beyond `whole_from` must all be alike. Raises: ConfigError."""
    spec, cut = resolve_spec(cut_layers(config, None)), config.model.num_layers
    if cut is None or not whole_from < cut < spec.num_layers:
        raise ConfigError(
            f"--whole-from {whole_from} needs model.num_layers above it and below the model's {spec.num_layers}, "
            f"not {cut}: layers are timed at both depths"
        )
    if spec.moe is not None and len({spec.moe.is_dense(layer) for layer in range(whole_from, spec.num_layers)}) > 1:
        raise ConfigError(f"--whole-from {whole_from}: layers behind it are of two kinds; take more")
    return spec.num_layers


def with_layers(variant: Variant, num_layers: int) -> Variant:
    """`variant` with the first `num_layers` layers only."""
    return replace(variant, config=cut_layers(variant.config, num_layers))


def cut_layers(config: RunConfig, num_layers: int | None) -> RunConfig:
    """`config` with another ``model.num_layers``."""
    sections = config_to_dict(config)
    return make_config(sections | {"model": sections["model"] | {"num_layers": num_layers}})


def with_whole(deep: DecodeReport, shallow: DecodeReport) -> DecodeReport:
    """`deep` with the step of the whole model in each timing whose cell was timed at both depths."""
    before = {(one.batch, one.context): one.ttl_ms for one in shallow.timings}
    timings = []
    for one in deep.timings:
        less = before.get((one.batch, one.context))
        if less is None or one.whole is None:
            timings.append(replace(one, whole=None))
            continue
        each = (one.ttl_ms - less) / (deep.num_layers - shallow.num_layers)
        ttl_ms = one.ttl_ms + (one.whole.num_layers - deep.num_layers) * each
        whole = replace(one.whole, from_layers=shallow.num_layers, ttl_ms=ttl_ms)
        timings.append(replace(one, whole=whole))
    return replace(deep, timings=tuple(timings))


def _named(path: Path, what: str) -> Path:
    """`path` with `what` before its suffix, in characters that any file system takes."""
    word = re.sub(r"[^A-Za-z0-9]+", "-", what)
    return path.with_name(f"{path.stem}.{word}{path.suffix}") if word else path


def join_reports(reports: Sequence[DecodeReport]) -> DecodeReport:
    """One report of several variants of the same run."""
    return replace(
        reports[0],
        timings=tuple(timing for one in reports for timing in one.timings),
        skipped=tuple(line for one in reports for line in one.skipped),
    )


def report_to_dict(report: DecodeReport) -> dict[str, Any]:
    """What the JSON line holds: the report, and beside each timing what follows from it."""
    timings = [
        {**asdict(one), "total_ms": one.total_ms, "prediction_error": one.prediction_error} for one in report.timings
    ]
    return {"bench": "decode", **asdict(report), "timings": timings}


def place_requests(core: EngineCore, cell: Cell, num_tokens: int, same_token: bool = False) -> list[Request] | None:
    """Requests of one cell as if their prompts had just been computed; None where the cache has no room for them."""
    scheduler = core.scheduler
    prompt = [0] * cell.context
    requests = [
        Request(request_id=number, prompt_ids=prompt, max_tokens=num_tokens + 1, choice="drawn")
        for number in range(cell.batch)
    ]
    chunk, scheduler.prefill_chunk = scheduler.prefill_chunk, cell.batch * cell.context
    try:
        if core.rule.rows_for(cell.context + 1) > core.cache.num_rows:
            return None
        for request in requests:
            scheduler.add(request)
        plan = scheduler.plan()
    finally:
        scheduler.prefill_chunk = chunk
    if plan is None or [item.count for item in plan.items] != [cell.context] * cell.batch:
        clear(core, requests)
        return None
    scheduler.commit(plan, _random_tokens(core, random.Random(cell.batch), cell.batch, same_token))
    return requests


def clear(core: EngineCore, requests: Sequence[Request]) -> None:
    """End requests, on this rank."""
    for request in requests:
        core.scheduler.cancel(request.request_id)


def _random_tokens(core: EngineCore, source: random.Random, count: int, same_token: bool) -> list[int]:
    ids = token_range(core)
    return [source.choice(ids)] * count if same_token else [source.choice(ids) for _ in range(count)]


def _numbers(item: StepItem, same_token: bool) -> tuple[float, ...]:
    """What draws a token, each as likely: see `helix.engine.draw`."""
    seed = 0 if same_token else item.request.request_id
    return (_HOT, 0.0, 1.0, 0.0, uniform(seed, item.request.num_outputs))


def _lead_steps(core: EngineCore, cell: Cell, count: int, same_token: bool) -> list[float]:
    """Milliseconds of each of `count` steps; rank 0's side. The other ranks stop following at the end."""

    def refuse(*_: object) -> list[int]:
        raise ValueError("tokens of timed steps are drawn on the device")

    sinks = StepSinks(lambda item: _numbers(item, same_token), refuse, lambda *_: None)
    times = []
    for _ in range(count):
        start = time.perf_counter()
        result = core.lead(StepOps(), sinks)
        times.append(1e3 * (time.perf_counter() - start))
        if len(result.tokens) != cell.batch or result.finished:
            raise ValueError(f"a step of {cell} gave {len(result.tokens)} tokens: its logits are not finite")
    core.lead(StepOps(close=True), sinks)
    return times


def _device_ms(core: EngineCore, same_token: bool) -> float | None:
    """Milliseconds of a step on the device alone: the same step again and again, its tokens not waited for."""
    plan = core.scheduler.plan()
    if plan is None or core.world.device.type != "cuda":
        return None
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    numbers_R5 = np.array([_numbers(item, same_token) for item in plan.items])
    core.runner.run(plan, choice="drawn", numbers_R5=numbers_R5)
    start.record()
    for _ in range(_DEVICE_STEPS):
        core.runner.run(plan, choice="drawn", numbers_R5=numbers_R5)
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / _DEVICE_STEPS


def _experts_hit(core: EngineCore, same_token: bool) -> tuple[float, float] | None:
    """Distinct experts that a step's tokens choose, and those of them on this rank.

    Means over the layers with experts and over a few steps, each on other tokens: one step of one sequence says little.
    """
    source = random.Random(1)
    with _count_experts(core.model, core.mesh) as hits:
        for _ in range(_COUNTED_STEPS):
            plan = core.scheduler.plan()
            if plan is None:
                break
            # With a tap the step runs eagerly, and so past the hooks.
            core.runner.run(plan, _ignore)
            core.scheduler.commit(plan, _random_tokens(core, source, len(plan.items), same_token))
    if not hits:
        return None
    return statistics.fmean(one for one, _ in hits), statistics.fmean(here for _, here in hits)


def _ignore(_batch: Batch, _layer: int, _x_TC: Tensor) -> None:
    """A tap that looks at nothing."""


@contextmanager
def _count_experts(model: nn.Module, mesh: Mesh) -> Iterator[list[tuple[int, int]]]:
    """Collects (distinct experts chosen, those of them on this rank) of each layer that runs."""
    hits: list[tuple[int, int]] = []

    def count(router: Router, _inputs: object, chosen: tuple[Tensor, Tensor]) -> None:
        distinct = chosen[0].unique()
        held = uneven_slice(router.moe.num_experts, mesh.layout.ep, mesh.coords.ep_rank)
        hits.append((len(distinct), int(((distinct >= held.start) & (distinct < held.stop)).sum())))

    handles = [part.register_forward_hook(count) for part in model.modules() if isinstance(part, Router)]
    try:
        yield hits
    finally:
        for handle in handles:
            handle.remove()


def print_report(report: DecodeReport, *, as_json: bool) -> None:
    """A table, unless `as_json`; the last line is one JSON object in any case."""
    if not as_json:
        title = f"{report.model}, {report.num_layers} layers, {report.dtype}, {report.device}"
        modes = ", ".join(dict.fromkeys(one.mode for one in report.timings))
        table = Table(title=f"{title}: ms a decode step ({modes})", box=box.SIMPLE)
        table.add_column("layout", no_wrap=True)
        for name in _COLUMNS:
            table.add_column(name, justify="right")
        whole = any(one.whole is not None for one in report.timings)
        if whole:
            table.add_column("all layers", justify="right")
        for one in report.timings:
            table.add_row(*_row(one), *([_whole_text(one)] if whole else []))
        Console(width=200).print(table)
        for line in report.skipped:
            print(f"skipped {line}")
        if report.start_up is not None:
            start = report.start_up
            print(
                f"first token after {start.total_s:.1f} s: imports and ranks {start.process_s:.1f}, "
                f"weights and cache {start.build_s:.1f}, first step {start.first_step_s:.1f}"
            )
        for line in _legend(report):
            print(line)
    print(json.dumps(report_to_dict(report)))


_COLUMNS = (
    "batch x context",
    "TTL",
    "quartiles",
    "device",
    "host",
    "collectives",
    "experts hit",
    "GB read",
    "ceiling",
    "of ceiling",
    "predicted",
    "error",
)


def _legend(report: DecodeReport) -> Iterator[str]:
    yield "TTL: median from tokens to the next tokens on the host; host: share in which the device waits for the host"
    if any(one.one_rank for one in report.timings):
        yield (
            "collectives: not run (one rank without its peers: local work of the same bytes, which TTL holds); their "
            "time is the cost model's, and is added to TTL for the whole step"
        )
    whole = next((one.whole for one in report.timings if one.whole is not None), None)
    if whole is not None:
        yield (
            f"all layers: TTL+collectives (predicted) of {whole.num_layers} layers: not run, a straight line through "
            f"TTL at {whole.from_layers} and {report.num_layers} layers"
        )
    yield "ceiling: every byte read once and every product at the card's best rates, without messages and fixed costs"
    yield "predicted: `helix plan`'s cost model, same experts hit; error: of it against TTL, added collectives left out"


def _whole_text(one: Timing) -> str:
    if one.whole is None:
        return "-"
    predicted = "-" if one.whole.predicted_ms is None else f"{one.whole.predicted_ms:.2f}"
    return f"{one.whole.ttl_ms:.2f}+{one.whole.collectives_ms:.2f} ({predicted})"


def _row(one: Timing) -> tuple[str, ...]:
    def number(value: float | None, form: str = ".3f") -> str:
        return "-" if value is None else format(value, form)

    share = None if one.ceiling_ms is None else one.ceiling_ms / one.ttl_ms
    hits = number(one.experts_hit, ".1f")
    if one.one_rank and one.local_experts_hit is not None:
        hits += f", here {one.local_experts_hit:.1f}"
    return (
        series_name(one.variant, one.layout, one_rank=one.one_rank),
        f"{one.batch} x {one.context}",
        number(one.ttl_ms),
        f"{one.low_ms:.3f}..{one.high_ms:.3f}",
        number(one.device_ms),
        number(one.host_share, ".1%"),
        f"+{one.collectives_ms:.3f}" if one.one_rank else "in TTL",
        hits,
        f"{one.read_bytes / 1e9:.3f}",
        number(one.ceiling_ms),
        number(share, ".0%"),
        number(one.predicted_ms),
        number(one.prediction_error, "+.0%"),
    )
