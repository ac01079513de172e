"""`helix calibrate`: measures the constants of a hardware card on the ranks it runs on, and writes the card.

What it times is what the cost model is made of: reads, products, one launch of each kind of kernel at two sizes (their
line gives the fixed time and the rate), and each collective at several sizes. Under the launcher it uses the ranks that
exist; in a plain process it starts the others itself. On a GPU work is captured in CUDA graphs where it can be.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

import torch
import yaml

from helix.comm.group import Group
from helix.comm.world import World, join_world, open_store, pick_device, single_world
from helix.config import LaunchEnv, launch_env
from helix.cost.hardware import OPS, Hardware, Op, load_hardware, parse_hardware, recognise_hardware
from helix.errors import ConfigError
from helix.kernels import attend
from helix.layers.moe import expert_products

_REPEATS: Final = 9
_STALL_S: Final = 28.0
_COLLECTIVE_KB: Final = (4, 32, 256, 1024)
_DTYPES: Final = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large the timed pieces are: some milliseconds each on the kind of device."""

    read_bytes: int
    product: int
    linear: tuple[tuple[int, int], tuple[int, int]]
    cached_tokens: tuple[int, int]
    expert_counts: tuple[int, int]
    expert_width: int


_CPU: Final = Sizes(
    read_bytes=64 << 20,
    product=512,
    linear=((256, 256), (2048, 2048)),
    cached_tokens=(512, 8192),
    expert_counts=(1, 8),
    expert_width=256,
)
_GPU: Final = Sizes(
    read_bytes=4 << 30,
    product=8192,
    linear=((2048, 2048), (16384, 16384)),
    cached_tokens=(32768, 524288),
    expert_counts=(6, 48),
    expert_width=1408,
)


@dataclass(frozen=True, slots=True)
class Line:
    """Time against size: ``fixed_us + size / rate``."""

    fixed_us: float
    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What was measured on rank 0, beside the card whose datasheet values it is held against.

    Rates are per microsecond. `collectives` maps each to [(KB of a rank's buffer, us)]; empty with one rank.
    """

    device: str
    num_ranks: int
    base_name: str
    base: Hardware
    read_rate: float
    product_rates: dict[str, float]
    kernels: dict[str, Line]
    small_us: float
    collectives: dict[Op, list[tuple[float, float]]]


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
    with ExitStack() as stack:
        world = stack.enter_context(_world(num_ranks, device, env))
        measured = measure(world, hardware)
        return measured if world.rank == 0 else None


@contextmanager
def _world(num_ranks: int, device: str, env: LaunchEnv | None) -> Any:
    """The ranks to measure on: the launcher's, this process alone, or this process and children that it starts."""
    children: list[BaseProcess] = []
    if env is not None:
        world = _join(env, device)
    elif num_ranks == 1:
        world = single_world(pick_device(device, 0))
    else:
        store = open_store("127.0.0.1", 0, serve=True)
        context = multiprocessing.get_context("spawn")
        for rank in range(1, num_ranks):
            arguments = (rank, num_ranks, store.port, device)
            child: BaseProcess = context.Process(target=_follow, args=arguments, daemon=True)
            child.start()
            children.append(child)
        world = _join(_local_env(0, num_ranks, store.port), device, store)
    try:
        yield world
    finally:
        world.close()
        for child in children:
            child.join(_STALL_S)
            if child.is_alive():
                child.kill()


def _local_env(rank: int, size: int, port: int) -> LaunchEnv:
    return LaunchEnv(
        rank=rank, world_size=size, local_rank=rank, local_size=size, master_addr="127.0.0.1", master_port=port
    )


def _join(env: LaunchEnv, device: str, store: Any = None) -> World:
    chosen = pick_device(device, env.local_rank)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    else:
        torch.set_num_threads(1)
    return join_world(env, chosen, stall_timeout_s=_STALL_S, store=store)


def _follow(rank: int, size: int, port: int, device: str) -> None:
    """Life of a child: it measures the same things at the same time, since ranks share the machine's memory."""
    world = _join(_local_env(rank, size, port), device)
    measure(world, None)
    world.close()


def measure(world: World, hardware: str | None) -> Calibration:
    """All measurements on this rank. Collective over the ranks of `world`."""
    device = world.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    base_name = hardware or recognise_hardware(name) or ("h200-sxm" if device.type == "cuda" else "cpu")
    sizes = _GPU if device.type == "cuda" else _CPU
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.inference_mode():
        world.monitor.work("calibrating")
        return Calibration(
            device=name,
            num_ranks=world.size,
            base_name=base_name,
            base=load_hardware(base_name),
            read_rate=_read_rate(device, sizes),
            product_rates={key: _product_rate(device, value, sizes.product) for key, value in _DTYPES.items()},
            kernels={
                "linear": _linear(device, dtype, sizes),
                "attention": _attention(device, dtype, sizes, 8, 128, 128),
                "latent_attention": _attention(device, dtype, sizes, 16, 576, 512),
                "experts": _experts(device, dtype, sizes),
            },
            small_us=_small(device, dtype),
            collectives={op: _collective(world.group, op, device) for op in OPS} if world.size > 1 else {},
        )


def time_us(call: Callable[[], object], device: torch.device, *, capture: bool = True) -> float:
    """Median time of `call`, microseconds; on a GPU from a graph of it where `capture` says that it can be captured."""
    call()
    if device.type != "cuda":
        return statistics.median([_wall_us(call) for _ in range(_REPEATS)])
    run, calls = call, 1
    if capture:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(device)
        calls = 10
        with torch.cuda.graph(graph):
            for _ in range(calls):
                call()
        run = graph.replay
    times: list[float] = []
    for _ in range(_REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def _wall_us(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def fit_line(points: Iterable[tuple[float, float]]) -> Line:
    """The line through the first and the last of (size, us), with a fixed time that is not below zero."""
    (small, fast), *_, (large, slow) = points
    rate = (large - small) / max(slow - fast, 1e-3)
    return Line(max(fast - small / rate, 0.0), rate)


def _read_rate(device: torch.device, sizes: Sizes) -> float:
    values = torch.ones(sizes.read_bytes // 8, dtype=torch.int64, device=device)
    return sizes.read_bytes / time_us(values.sum, device)


def _product_rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2.0 * size**3 / time_us(lambda: left @ right, device)


def _linear(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> Line:
    points = []
    for outputs, inputs in sizes.linear:
        weight = torch.randn(outputs, inputs, device=device).to(dtype)
        x = torch.randn(1, inputs, device=device).to(dtype)
        points.append((weight.nbytes, time_us(partial(torch.nn.functional.linear, x, weight), device)))
    return fit_line(points)


def _attention(device: torch.device, dtype: torch.dtype, sizes: Sizes, heads: int, width: int, values: int) -> Line:
    """One query of `heads` heads over one KV head; for the latent form keys and values share the pool."""
    points = []
    for tokens in sizes.cached_tokens:
        pages = tokens // 64
        keys = torch.randn(pages, 64, 1, width, device=device).to(dtype)
        pool = keys[..., :values] if values < width else torch.randn_like(keys)
        query = torch.randn(1, heads, width, device=device).to(dtype)
        table = torch.arange(pages, dtype=torch.int32, device=device).view(1, -1)
        starts = torch.tensor([0, 1], device=device)
        visible = torch.tensor([tokens], device=device)

        read = keys.nbytes + (0 if values < width else pool.nbytes)
        call = partial(attend, query, keys, pool, table, starts, visible, 0.1)
        points.append((read, time_us(call, device, capture=False)))
    return fit_line(points)


def _experts(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> Line:
    """One token for each of so many experts."""
    hidden, width = (2048, sizes.expert_width) if device.type == "cuda" else (256, sizes.expert_width)
    most = sizes.expert_counts[-1]
    gate_up = torch.randn(most, 2 * width, hidden, device=device).to(dtype)
    down = torch.randn(most, hidden, width, device=device).to(dtype)
    points = []
    for count in sizes.expert_counts:
        x = torch.randn(1, hidden, device=device).to(dtype)
        chosen = torch.arange(count, device=device).view(1, -1)
        weight = torch.ones(1, count, device=device)

        read = count * (gate_up[0].nbytes + down[0].nbytes)
        call = partial(expert_products, x, chosen, weight, gate_up, down, "silu")
        points.append((read, time_us(call, device, capture=False)))
    return fit_line(points)


def _small(device: torch.device, dtype: torch.dtype) -> float:
    x = torch.randn(1, 2048, device=device).to(dtype)
    return time_us(lambda: x.add_(0.0), device)


def _collective(group: Group, op: Op, device: torch.device) -> list[tuple[float, float]]:
    """Median of each size, over the ranks the slowest one's. Rising, as a card asks for."""
    points: list[tuple[float, float]] = []
    for kilobytes in _COLLECTIVE_KB:
        values = kilobytes * 1000 // 4 // group.size * group.size
        x = torch.zeros(values, device=device)
        call = _prepared(group, op, x)
        group.all_reduce(torch.zeros(1, device=device))
        us = torch.tensor([time_us(call, device, capture=device.type == "cuda")])
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


def to_card(found: Calibration) -> dict[str, Any]:
    """A hardware card of the measurements. What was not measured keeps the base card's value and source."""
    base = found.base
    measured = f"measured on {found.device}, {found.num_ranks} ranks"
    kept = f"not measured; as on {found.base_name}"
    rates = {
        "memory_tb_s": _rate(found.read_rate, base.memory.datasheet, 1e6, measured),
        "link_gb_s": _rate(base.link.value, base.link.datasheet, 1e3, kept),
        "internode_gb_s": _rate(base.internode.value, base.internode.datasheet, 1e3, kept),
    }
    for name, rate in base.products.items():
        value = found.product_rates.get(name)
        rates[f"{name}_tflops"] = _rate(value or rate.value, rate.datasheet, 1e6, measured if value else kept)
    kernels: dict[str, Any] = {
        kind: {
            "fixed_us": round(line.fixed_us, 2),
            "bandwidth": round(min(line.rate / found.read_rate, 1.0), 4),
            "source": measured,
        }
        for kind, line in found.kernels.items()
    }
    kernels["small"] = {"fixed_us": round(found.small_us, 2), "source": measured}
    return {
        "name": f"{found.device}, calibrated",
        "source": f"helix calibrate on {found.num_ranks} ranks; datasheet values of {found.base_name}",
        "memory_gb": base.memory_bytes / 1e9,
        "reserved_gb": base.reserved_bytes / 1e9,
        "node_size": base.node_size,
        "rates": rates,
        "internode_us": base.internode_us,
        "collectives": {op: _curve(found, op, measured, kept) for op in OPS},
        "kernels": kernels,
        "step_us": base.step_us,
    }


def _rate(value: float, datasheet: float, unit: float, source: str) -> dict[str, Any]:
    """A rate of a card. A device that beats its datasheet value (a guess, for a CPU) moves that value up."""
    sheet = max(datasheet, value)
    return {"datasheet": round(sheet / unit, 6), "achieved": round(value / sheet, 6), "source": source}


def _curve(found: Calibration, op: Op, measured: str, kept: str) -> dict[str, Any]:
    if op in found.collectives:
        points = [[kb, round(us, 2)] for kb, us in found.collectives[op]]
        return {"ranks": found.num_ranks, "points": points, "us_per_doubling": 1.0, "source": measured}
    curve = found.base.collectives[op]
    passes = {"all_reduce": 2.0 * (curve.ranks - 1) / curve.ranks, "all_gather": curve.ranks - 1.0}
    share = passes.get(op, (curve.ranks - 1) / curve.ranks)
    points = [[sent / share / 1e3, us] for sent, us in zip(curve.sent_bytes, curve.us, strict=True)]
    return {"ranks": curve.ranks, "points": points, "us_per_doubling": curve.us_per_doubling, "source": kept}


def write_card(found: Calibration, path: Path) -> None:
    """Write the card to `path` after reading it back as `helix plan` would. Raises: ConfigError."""
    text = yaml.safe_dump(to_card(found), sort_keys=False)
    parse_hardware(text, str(path))
    path.write_text(text, encoding="utf-8")


def report_rows(found: Calibration) -> list[tuple[str, str, str, str]]:
    """(what, achieved, datasheet, share) as text, for a table."""
    base = found.base
    rows = [_share("memory read", found.read_rate / 1e6, base.memory.datasheet / 1e6, "TB/s")]
    for name, rate in found.product_rates.items():
        sheet = base.products.get(name)
        rows.append(_share(f"{name} product", rate / 1e6, sheet.datasheet / 1e6 if sheet else 0.0, "TFLOP/s"))
    for kind, line in found.kernels.items():
        text = f"{line.fixed_us:.1f} us + bytes at {line.rate / 1e6:.3g} TB/s"
        rows.append((kind.replace("_", " "), text, "", f"{line.rate / base.memory.datasheet:.0%}"))
    rows.append(("small kernel", f"{found.small_us:.1f} us", "", ""))
    for op, points in found.collectives.items():
        rows.append((op, ", ".join(f"{kb:g} KB {us:.0f} us" for kb, us in points), "", ""))
    return rows


def _share(name: str, value: float, sheet: float, unit: str) -> tuple[str, str, str, str]:
    known = sheet > 0
    return name, f"{value:.3g} {unit}", f"{sheet:.3g} {unit}" if known else "", f"{value / sheet:.0%}" if known else ""
