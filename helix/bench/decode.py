"""`helix bench decode`: the time of decode steps over batch x context, on a cache that is filled synthetically.

The engine's own steps are timed (scheduler, inputs, model, choice of tokens), each from its plan to its tokens on the
host. No prompt is computed: pages are filled with random numbers, and the requests are booked as computed. The tokens
that are fed back are drawn at random, not from the logits, which with random weights soon repeat themselves and would
send all sequences to the same experts. `same_token` feeds all sequences the same one, which comes close to that: so
figures of engines that were timed on repeated tokens have their like. How many distinct experts a layer hits is counted
and printed.

Beside each time: the bytes that a step must read over the memory's bandwidth (nothing runs faster), and the cost
model's prediction. Every rank of a launcher runs this module; rank 0 reports.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Literal

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from helix.config import RunConfig, config_to_dict, launch_env, make_config
from helix.cost.choices import Formats, Placement, Workload, make_formats
from helix.cost.hardware import Hardware, load_hardware, recognise_hardware
from helix.cost.step import placement_cost
from helix.cost.weights import layer_counts
from helix.cost.work import attention_work, ffn_work, head_work
from helix.engine.build import build_core, resolve_layout, resolve_spec
from helix.engine.core import EngineCore, StepOps, StepSinks
from helix.engine.join import enter_world, leave, share_cores
from helix.engine.request import Request
from helix.engine.scheduler import StepItem
from helix.layers.batch import Batch
from helix.layers.router import Router
from helix.layout import Layout
from helix.model_spec import ModelSpec
from helix.planner.auto import choices_of

_DEVICE_STEPS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Sequences that decode together, and tokens of each that are in the cache."""

    batch: int
    context: int

    def __str__(self) -> str:
        return f"{self.batch} x {self.context}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One cell. Milliseconds a step: median and quartiles as a user sees them, and the device's share of the median.

    `device_ms` comes from steps that do not wait for their tokens; None on a CPU. `experts_hit` is the mean over layers
    with experts. `read_bytes` are those of the busiest rank; `ceiling_ms` is their time at the card's bandwidth.
    """

    batch: int
    context: int
    ttl_ms: float
    low_ms: float
    high_ms: float
    device_ms: float | None
    experts_hit: float | None
    read_bytes: int
    ceiling_ms: float | None
    predicted_ms: float | None

    @property
    def host_share(self) -> float | None:
        """Share of a step in which the device waits for the host."""
        return None if self.device_ms is None else max(1.0 - self.device_ms / self.ttl_ms, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeReport:
    """What was timed, on what. `skipped` says why a cell has no time."""

    model: str
    num_layers: int
    layout: str
    dtype: str
    device: str
    torch: str
    mode: str
    steps: int
    same_token: bool
    hardware: str | None
    timings: tuple[Timing, ...]
    skipped: tuple[str, ...]


def bench_decode(
    config: RunConfig, cells: Sequence[Cell], *, steps: int, warmup: int, same_token: bool = False
) -> DecodeReport | None:
    """Time `steps` decode steps of each cell after `warmup` others. Collective; None on ranks other than 0.

    Contexts may be longer than the model was made for: only the time is looked at.
    """
    env = launch_env()
    if env is not None:
        share_cores(env.local_size)
    run = _sized(config, cells)
    spec = resolve_spec(run)
    longest = max(cell.context for cell in cells) + warmup + steps + 2
    spec = replace(spec, max_context=max(spec.max_context, longest))
    world = enter_world(run, env)
    try:
        layout = resolve_layout(run, spec, world.size)
        core = build_core(run, spec, layout, world)
        fill_cache(core, run.engine.seed)
        pricing = _Pricing.of(run, spec, layout, core)
        timings, skipped = [], []
        for cell in cells:
            timing = _time_cell(core, cell, pricing, (warmup, steps), same_token)
            if timing is None:
                skipped.append(f"{cell}: the cache has {core.cache.num_rows} page rows, too few")
            else:
                timings.append(timing)
        mode = core.runner.mode
    except BaseException as error:
        leave(world, error)
        raise
    device = _device_name(world.device)
    world.close()
    if world.rank != 0:
        return None
    return DecodeReport(
        model=str(run.model.card or run.model.path),
        num_layers=spec.num_layers,
        layout=str(layout),
        dtype=pricing.formats.weights,
        device=device,
        torch=torch.__version__,
        mode=mode,
        steps=steps,
        same_token=same_token,
        hardware=None if pricing.hardware is None else pricing.hardware.name,
        timings=tuple(timings),
        skipped=tuple(skipped),
    )


def _sized(config: RunConfig, cells: Sequence[Cell]) -> RunConfig:
    """`config` with room for the largest batch, whatever it says itself."""
    sections = config_to_dict(config)
    engine = {"max_batch": max(cell.batch for cell in cells), "max_context": "auto"}
    return make_config(sections | {"engine": sections["engine"] | engine})


def fill_cache(core: EngineCore, seed: int) -> None:
    """Random numbers in every page, the same in every run on one kind of device."""
    device = core.world.device
    generator = torch.Generator(device).manual_seed(seed + core.world.rank)
    for layer in core.cache.layers:
        layer.k.normal_(generator=generator)
        if layer.v.data_ptr() != layer.k.data_ptr():
            layer.v.normal_(generator=generator)


def place_requests(core: EngineCore, cell: Cell, num_tokens: int, same_token: bool = False) -> list[Request] | None:
    """Requests of one cell as if their prompts had just been computed; None where the cache has no room for them."""
    scheduler = core.scheduler
    prompt = [0] * cell.context
    requests = [
        Request(request_id=number, prompt_ids=prompt, max_tokens=num_tokens + 1) for number in range(cell.batch)
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
    vocab = core.model.head.vocab.total
    return [source.randrange(vocab)] * count if same_token else [source.randrange(vocab) for _ in range(count)]


def _time_cell(
    core: EngineCore, cell: Cell, pricing: _Pricing, counts: tuple[int, int], same_token: bool
) -> Timing | None:
    """Time one cell: `counts` are the steps before the timed ones, and those. None where the cache is too small."""
    warmup, steps = counts
    requests = place_requests(core, cell, warmup + steps + 1, same_token)
    if requests is None:
        return None
    if core.world.rank == 0:
        times = _lead_steps(core, warmup + steps, same_token)[warmup:]
    else:
        core.follow()
        times = [0.0, 0.0]
    with torch.inference_mode():
        device_ms = _device_ms(core)
        hit = _experts_hit(core)
    clear(core, requests)
    low, median, high = statistics.quantiles(times, n=4)
    read_bytes, ceiling, predicted = pricing.price(cell, hit)
    return Timing(
        batch=cell.batch,
        context=cell.context,
        ttl_ms=median,
        low_ms=low,
        high_ms=high,
        device_ms=device_ms,
        experts_hit=hit,
        read_bytes=read_bytes,
        ceiling_ms=ceiling,
        predicted_ms=predicted,
    )


def _lead_steps(core: EngineCore, count: int, same_token: bool) -> list[float]:
    """Milliseconds of each of `count` steps; rank 0's side. The other ranks stop following at the end."""
    source = random.Random(0)

    def draw(logits_RV: Tensor, items: Sequence[StepItem]) -> list[int]:
        # As long as reading the tokens would take: one small copy from the device that waits for the step.
        logits_RV[0, :1].tolist()
        return _random_tokens(core, source, len(items), same_token)

    sinks = StepSinks(draw, lambda *_: None, lambda _: False)
    times = []
    for _ in range(count):
        start = time.perf_counter()
        core.lead(StepOps(), sinks)
        times.append(1e3 * (time.perf_counter() - start))
    core.lead(StepOps(close=True), sinks)
    return times


def _device_ms(core: EngineCore) -> float | None:
    """Milliseconds of a step on the device alone: the same step again and again, its tokens not waited for."""
    plan = core.scheduler.plan()
    if plan is None or core.world.device.type != "cuda":
        return None
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    core.runner.run(plan)
    start.record()
    for _ in range(_DEVICE_STEPS):
        core.runner.run(plan)
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / _DEVICE_STEPS


def _experts_hit(core: EngineCore) -> float | None:
    """Distinct experts that a step's tokens are sent to, mean over the layers that have experts."""
    plan = core.scheduler.plan()
    if plan is None:
        return None
    with _count_experts(core.model) as hits:
        # With a tap the step runs eagerly, and so past the hooks.
        core.runner.run(plan, _ignore)
    return statistics.fmean(hits) if hits else None


def _ignore(_batch: Batch, _layer: int, _x_TC: Tensor) -> None:
    """A tap that looks at nothing."""


@contextmanager
def _count_experts(model: nn.Module) -> Iterator[list[int]]:
    hits: list[int] = []

    def count(_module: nn.Module, _inputs: object, chosen: tuple[Tensor, Tensor]) -> None:
        hits.append(len(chosen[0].unique()))

    handles = [part.register_forward_hook(count) for part in model.modules() if isinstance(part, Router)]
    try:
        yield hits
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pricing:
    """What prices a cell: the model and how it lies, and the card of the hardware, if there is one for it."""

    spec: ModelSpec
    placement: Placement
    formats: Formats
    hardware: Hardware | None
    page_tokens: int

    @classmethod
    def of(cls, config: RunConfig, spec: ModelSpec, layout: Layout, core: EngineCore) -> _Pricing:
        weights, cache = core.model.embed.weight.dtype, core.cache.layers[0].k.dtype
        device = core.world.device
        card = "cpu" if device.type == "cpu" else recognise_hardware(_device_name(device))
        return cls(
            spec=spec,
            placement=Placement(layout=layout, choices=choices_of(config.comm)),
            formats=make_formats(str(weights).removeprefix("torch."), str(cache).removeprefix("torch.")),
            hardware=None if card is None else load_hardware(card),
            page_tokens=config.cache.page_tokens,
        )

    def price(self, cell: Cell, hit: float | None) -> tuple[int, float | None, float | None]:
        """Bytes read in a step, their time at the card's bandwidth and the predicted time, milliseconds."""
        routing: Literal["random"] | int = "random" if hit is None else round(hit)
        load = Workload(batch=cell.batch, context=cell.context, page_tokens=self.page_tokens, routing=routing)
        given = (self.placement, self.formats, load)
        each_layer = sum(one.num_bytes for one in attention_work(self.spec, *given))
        total = self.spec.num_layers * each_layer + sum(one.num_bytes for one in head_work(self.spec, *given))
        for kind, count in layer_counts(self.spec).items():
            if count:
                total += count * sum(one.num_bytes for one in ffn_work(self.spec, kind, *given))
        if self.hardware is None:
            return int(total), None, None
        predicted = placement_cost(self.spec, self.placement, self.formats, self.hardware, load).ttl_ms
        return int(total), total / self.hardware.memory.value / 1e3, predicted


def _device_name(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else str(torch.cuda.get_device_name(device))


def print_report(report: DecodeReport, *, as_json: bool) -> None:
    """A table, unless `as_json`; the last line is one JSON object in any case."""
    if not as_json:
        title = f"{report.model}, {report.num_layers} layers, {report.dtype}, {report.layout}, {report.device}"
        table = Table(title=f"{title}: ms a decode step ({report.mode})", box=box.SIMPLE)
        for name in ("batch x context", "TTL", "quartiles", "device", "host", "experts hit", "GB read", "ceiling"):
            table.add_column(name, justify="right")
        table.add_column("of ceiling", justify="right")
        table.add_column("predicted", justify="right")
        for one in report.timings:
            table.add_row(*_row(one))
        Console(width=140).print(table)
        for line in report.skipped:
            print(f"skipped {line}")
        print("TTL: median from plan to tokens on the host; host: share in which the device waits for the host")
        print("ceiling: bytes read over the card's bandwidth; predicted: `helix plan`'s cost model, same experts hit")
    print(json.dumps({"bench": "decode", **asdict(report)}))


def _row(one: Timing) -> tuple[str, ...]:
    def number(value: float | None, form: str = ".3f") -> str:
        return "-" if value is None else format(value, form)

    share = None if one.ceiling_ms is None else one.ceiling_ms / one.ttl_ms
    return (
        f"{one.batch} x {one.context}",
        number(one.ttl_ms),
        f"{one.low_ms:.3f}..{one.high_ms:.3f}",
        number(one.device_ms),
        number(one.host_share, ".1%"),
        number(one.experts_hit, ".1f"),
        f"{one.read_bytes / 1e9:.3f}",
        number(one.ceiling_ms),
        number(share, ".0%"),
        number(one.predicted_ms),
    )
