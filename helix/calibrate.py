"""`helix calibrate`: measures the constants of a hardware card on the ranks it runs on, and writes the card.

What it times is what the cost model is made of (`helix.bench.launches`): reads, products, launches of each kind of
kernel over several sizes (a line through them gives the fixed time and the rate), the host's part of a step, and each
collective at several sizes. Under the launcher it uses the ranks that exist; in a plain process it starts the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import yaml

from helix.bench.decode import Cell, bench_decode
from helix.bench.launches import (
    CPU,
    GPU,
    Line,
    Sample,
    Sizes,
    attention_samples,
    expert_samples,
    fit_line,
    linear_samples,
    product_rate,
    read_rate,
    small_us,
    time_us,
)
from helix.bench.ranks import run_tasks
from helix.bench.variants import Variant
from helix.comm.group import Group
from helix.comm.mesh import build_mesh
from helix.comm.symmetric import symmetric_problem
from helix.comm.world import World
from helix.config import launch_env, make_config
from helix.cost.hardware import (
    OPS,
    CollectiveCurve,
    Hardware,
    KernelKind,
    Op,
    load_hardware,
    parse_hardware,
    recognise_hardware,
    sent_bytes,
)
from helix.errors import ConfigError
from helix.layout import Layout

_MEASURE_LIMIT_S: Final = 300.0
_COLLECTIVE_KB: Final = (4, 32, 128, 1024, 4096)
# Rows of a product that is not of very few (`helix.cost.work.FEW_ROWS`): a usual decode batch.
_SOME_ROWS: Final = 8
# Of the partials of an exchange: a latent's.
_WIDTH: Final = 512
_FORMATS: Final = ("bfloat16", "float32", "float8")
# The model whose steps show the host's part: long enough on a device that a host which plans ahead is not in the way.
_STEP_MODEL: Final = {"card": "llama-3.1-8b", "load": "dummy", "num_layers": 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What was measured on rank 0, beside the card whose datasheet values it is held against.

    Rates are per microsecond. `samples` are the timed launches by kind; `latent_products` is one where arithmetic
    binds. `step_us` is the host's part of a step (None: not measured). `collectives` maps each to [(KB of a rank's
    buffer, us)]; empty with one rank. So does `symmetric`, through peers' memory: an all-to-all is an exchange there,
    from partials to merged heads. Empty where ranks cannot address each other's memory.
    """

    device: str
    num_ranks: int
    base_name: str
    base: Hardware
    read_rate: float
    product_rates: dict[str, float]
    samples: dict[KernelKind, tuple[Sample, ...]]
    latent_products: Sample
    small_us: float
    step_us: float | None
    collectives: dict[Op, list[tuple[float, float]]]
    symmetric: dict[Op, list[tuple[float, float]]]

    @property
    def best_read_rate(self) -> float:
        """The fastest read seen: of the plain sum, or of a launch of any kind."""
        return max(self.read_rate, *(one.num_bytes / one.us for some in self.samples.values() for one in some))

    @property
    def lines(self) -> dict[KernelKind, Line]:
        return {kind: fit_line(samples) for kind, samples in self.samples.items()}


def calibrate(num_ranks: int = 1, device: str = "auto", hardware: str | None = None) -> Calibration | None:
    """Measure on `num_ranks` ranks of this machine (or on the launcher's); None on ranks other than the first.

    Raises
    ------
    ConfigError
        No such card, no such device, or a number of ranks that is not the launcher's.
    """
    if num_ranks < 1:
        raise ConfigError(f"--ranks {num_ranks} must be at least 1")
    if hardware is not None:
        load_hardware(hardware)
    env = launch_env()
    if env is not None and num_ranks not in (1, env.world_size):
        raise ConfigError(f"--ranks {num_ranks}, but the launcher started {env.world_size}; leave --ranks out")
    ranks = num_ranks if env is None else env.world_size
    config = make_config({"model": _STEP_MODEL}, layout={"kvp": ranks}, engine={"device": device})
    task = CalibrateTask(variant=Variant(label="calibrate", config=config), hardware=hardware)
    results = run_tasks([task])
    if results is None:
        return None
    measured = results[0]
    return replace(measured, step_us=_host_us()) if ranks == 1 and measured.device != "cpu" else measured


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateTask:
    """`measure` on the ranks of `variant`, of which nothing but their number and device counts."""

    variant: Variant
    hardware: str | None

    def run(self, world: World) -> Calibration:
        return measure(world, self.hardware)


def measure(world: World, hardware: str | None) -> Calibration:
    """All measurements on this rank. Collective over the ranks of `world`."""
    device = world.device
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else "cpu"
    base_name = hardware or recognise_hardware(name) or ("h200-sxm" if cuda else "cpu")
    sizes, dtype = (GPU, torch.bfloat16) if cuda else (CPU, torch.float32)
    with torch.inference_mode(), world.monitor.long_operation("calibrating", _MEASURE_LIMIT_S):
        products = {one: product_rate(device, one, sizes.product) for one in _FORMATS}
        samples = _samples(device, dtype, sizes)
        (latent_products,) = attention_samples(device, dtype, [sizes.latent_products], 576, 512)
        return Calibration(
            device=name,
            num_ranks=world.size,
            base_name=base_name,
            base=load_hardware(base_name),
            read_rate=read_rate(device, sizes),
            product_rates={one: rate for one, rate in products.items() if rate is not None},
            samples=samples,
            latent_products=latent_products,
            small_us=small_us(device, dtype, sizes),
            step_us=None,
            collectives={op: _collective(world.group, op, device) for op in OPS} if world.size > 1 else {},
            symmetric=_through_peers(world),
        )


def _samples(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> dict[KernelKind, tuple[Sample, ...]]:
    return {
        "linear": tuple(linear_samples(device, dtype, sizes, _SOME_ROWS)),
        "few_linear": tuple(linear_samples(device, dtype, sizes, 1)),
        "attention": tuple(attention_samples(device, dtype, sizes.attention, 128, 128)),
        "latent_attention": tuple(attention_samples(device, dtype, sizes.latent, 576, 512)),
        "experts": tuple(expert_samples(device, dtype, sizes, sizes.experts)),
        "few_experts": tuple(expert_samples(device, dtype, sizes, sizes.few_experts)),
    }


def _host_us() -> float | None:
    """What a step takes a user beyond what it takes the device: scheduling, inputs, and waiting for the tokens."""
    config = make_config({"model": _STEP_MODEL}, cache={"num_page_rows": 64})
    report = bench_decode(config, [Cell(batch=1, context=1024)], steps=32, warmup=8)
    device_ms = None if report is None else report.timings[0].device_ms
    if report is None or device_ms is None:
        return None
    return max(report.timings[0].ttl_ms - device_ms, 0.0) * 1e3


def _through_peers(world: World) -> dict[Op, list[tuple[float, float]]]:
    """The collectives that go through peers' memory, where they can."""
    if world.size == 1 or symmetric_problem(world) is not None:
        return {}
    from helix.layers.direct import connect_peers

    mesh = build_mesh(Layout(kvp=world.size, tpf=world.size), world)
    connect_peers(mesh, world)
    try:
        return {op: _collective(mesh.kvp, op, world.device) for op in ("all_reduce", "all_gather", "all_to_all")}
    finally:
        mesh.world.direct = None


def _collective(group: Group, op: Op, device: torch.device) -> list[tuple[float, float]]:
    """Median of each size, over the ranks the slowest one's. Rising, as a card asks for."""
    points: list[tuple[float, float]] = []
    for kilobytes in _COLLECTIVE_KB:
        values = kilobytes * 1000 // 4 // group.size * group.size
        x = torch.zeros(values, device=device)
        call = _prepared(group, op, x) if group.direct is None or op != "all_to_all" else _exchange(group, x)
        group.all_reduce(torch.zeros(1, device=device))
        us = torch.tensor([time_us([call] * 10, device)])
        slowest = float(group.all_gather(us.new_empty(group.size, 1).to(device), us.to(device)).max())
        points.append((float(kilobytes), max(slowest, points[-1][1] if points else 0.0)))
    return points


def _prepared(group: Group, op: Op, x: torch.Tensor) -> Callable[[], object]:
    """A call of `op` on `x`, whose length is a multiple of the group's size, with its output allocated before."""
    match op:
        case "all_reduce":
            return partial(group.all_reduce, x)
        case "all_gather":
            return partial(group.all_gather, x.new_empty(group.size, x.numel()), x)
    parts = x.view(group.size, -1)
    if op == "reduce_scatter":
        return partial(group.reduce_scatter, torch.empty_like(parts[0]), parts)
    return partial(group.all_to_all, torch.empty_like(parts), parts)


def _exchange(group: Group, x: torch.Tensor) -> Callable[[], object]:
    """An exchange through peers' memory of as many bf16 partials, `_WIDTH` wide, as make the bytes of `x`."""
    rows = max(x.nbytes // (2 * _WIDTH * group.size), 1)
    out_THD = x.new_zeros(rows, group.size, _WIDTH, dtype=torch.bfloat16)
    lse_TH = x.new_zeros(rows, group.size)
    return partial(group.exchange, out_THD, lse_TH, 1, 0)


def to_card(found: Calibration) -> dict[str, Any]:
    """A hardware card of the measurements. What was not measured keeps the base card's value and source."""
    base = found.base
    measured = f"measured on {found.device}, {found.num_ranks} ranks"
    kept = f"not measured; as on {found.base_name}"
    rates = {
        "memory_tb_s": _rate(found.best_read_rate, base.memory.datasheet, 1e6, measured),
        "link_gb_s": _rate(base.link.value, base.link.datasheet, 1e3, kept),
        "internode_gb_s": _rate(base.internode.value, base.internode.datasheet, 1e3, kept),
    }
    for name, rate in base.products.items():
        value = found.product_rates.get(name)
        rates[f"{name}_tflops"] = _rate(value or rate.value, rate.datasheet, 1e6, measured if value else kept)
    kernels: dict[str, Any] = {
        kind: {
            "fixed_us": round(line.fixed_us, 2),
            "bandwidth": round(min(line.rate / found.best_read_rate, 1.0), 4),
            "source": f"{measured}; line through {len(found.samples[kind])} sizes, median error {line.error:.0%}",
        }
        for kind, line in found.lines.items()
    }
    kernels["latent_attention"]["products"] = round(latent_share(found), 4)
    kernels["small"] = {"fixed_us": round(found.small_us, 2), "source": measured}
    return {
        "name": f"{found.device}, calibrated",
        "source": f"helix calibrate on {found.num_ranks} ranks; datasheet values of {found.base_name}",
        "memory_gb": base.memory_bytes / 1e9,
        "reserved_gb": base.reserved_bytes / 1e9,
        "node_size": base.node_size,
        "rates": rates,
        "internode_us": base.internode_us,
        "collectives": {op: _curve(found, op, found.collectives, base.collectives[op], measured, kept) for op in OPS},
        "symmetric": {
            op: _curve(found, op, found.symmetric, base.symmetric.get(op, base.collectives[op]), measured, kept)
            for op in OPS
            if op in found.symmetric or op in base.symmetric
        },
        "kernels": kernels,
        "step_us": base.step_us if found.step_us is None else round(found.step_us, 1),
        "overlaps": base.overlaps,
    }


def latent_share(found: Calibration) -> float:
    """Share of the product rate that latent attention reaches where arithmetic binds it."""
    sample = found.latent_products
    name = "bfloat16" if found.device != "cpu" else "float32"
    return min(sample.flops / sample.us / found.product_rates[name], 1.0)


def _rate(value: float, datasheet: float, unit: float, source: str) -> dict[str, Any]:
    """A rate of a card. A device that beats its datasheet value (a guess, for a CPU) moves that value up."""
    sheet = max(datasheet, value)
    return {"datasheet": round(sheet / unit, 6), "achieved": round(value / sheet, 6), "source": source}


def _curve(
    found: Calibration,
    op: Op,
    timed: dict[Op, list[tuple[float, float]]],
    known: CollectiveCurve,
    measured: str,
    kept: str,
) -> dict[str, Any]:
    if op in timed:
        points = [[kb, round(us, 2)] for kb, us in timed[op]]
        return {
            "ranks": found.num_ranks,
            "points": points,
            "us_per_doubling": known.us_per_doubling,
            "source": measured,
        }
    share = sent_bytes(op, known.ranks, 1.0)
    points = [[sent / share / 1e3, us] for sent, us in zip(known.sent_bytes, known.us, strict=True)]
    return {"ranks": known.ranks, "points": points, "us_per_doubling": known.us_per_doubling, "source": kept}


def write_card(found: Calibration, path: Path) -> None:
    """Write the card to `path` after reading it back as `helix plan` would. Raises: ConfigError."""
    text = yaml.safe_dump(to_card(found), sort_keys=False)
    parse_hardware(text, str(path))
    path.write_text(text, encoding="utf-8")


def report_rows(found: Calibration) -> list[tuple[str, str, str, str]]:
    """(what, achieved, datasheet, share) as text, for a table."""
    base = found.base
    sheet = base.memory.datasheet
    rows = [
        _share("memory, best read", found.best_read_rate / 1e6, sheet / 1e6, "TB/s"),
        _share("memory, plain sum", found.read_rate / 1e6, sheet / 1e6, "TB/s"),
    ]
    for name, rate in found.product_rates.items():
        product = base.products.get(name)
        rows.append(_share(f"{name} product", rate / 1e6, product.datasheet / 1e6 if product else 0.0, "TFLOP/s"))
    for kind, line in found.lines.items():
        text = f"{line.fixed_us:.1f} us + bytes at {line.rate / 1e6:.3g} TB/s (median error {line.error:.0%})"
        rows.append((kind.replace("_", " "), text, "", f"{line.rate / sheet:.0%}"))
        rows += [_sample_row(one, sheet) for one in found.samples[kind]]
    many = found.latent_products
    rows.append((f"  {many.name}", f"{many.us:.1f} us, {many.flops / many.us / 1e6:.4g} TFLOP/s", "", ""))
    rows.append(("small kernel", f"{found.small_us:.1f} us", "", ""))
    if found.step_us is not None:
        rows.append(("host's part of a step", f"{found.step_us:.0f} us", "", ""))
    for prefix, timed in (("", found.collectives), ("through peers' memory, ", found.symmetric)):
        for op, points in timed.items():
            rows.append((prefix + op, ", ".join(f"{kb:g} KB {us:.1f} us" for kb, us in points), "", ""))
    return rows


def _sample_row(one: Sample, sheet: float) -> tuple[str, str, str, str]:
    rate = one.num_bytes / one.us
    return f"  {one.name}", f"{one.us:.1f} us, {rate / 1e6:.3g} TB/s", "", f"{rate / sheet:.0%}"


def _share(name: str, value: float, sheet: float, unit: str) -> tuple[str, str, str, str]:
    known = sheet > 0
    return name, f"{value:.3g} {unit}", f"{sheet:.3g} {unit}" if known else "", f"{value / sheet:.0%}" if known else ""
