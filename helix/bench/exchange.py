"""`helix bench exchange`: the exchange and the all-reduces of a layer, by each transport and size, on real ranks.

Exchanges are timed from partial outputs and lse to merged heads, packing and merging included, as the layers run them;
`all-to-all alone` is the packed message and nothing else, which is how libraries are usually timed. Every result is
checked in the same run: merged heads against an fp64 merge of all ranks' partials, sums of integers exactly.

On GPUs with NCCL a graph of many calls is replayed; elsewhere calls are timed one by one.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Final

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from helix.bench.ranks import run_tasks
from helix.bench.variants import Variant
from helix.comm.group import Group
from helix.comm.mesh import Mesh, build_mesh
from helix.comm.symmetric import symmetric_problem
from helix.comm.world import World
from helix.config import launch_env, make_config
from helix.errors import ConfigError
from helix.kernels import merge
from helix.layers.exchange import Exchange
from helix.layout import Layout

# (tokens, heads) of width 512: 4 KB to 4.2 MB of partials on a rank.
EXCHANGES: Final = ((1, 4), (1, 16), (8, 16), (64, 16), (256, 16))
WIDTH: Final = 512
REDUCED_KB: Final = (4, 33, 262, 1049, 4194)
_ANY_MODEL: Final = {"card": "llama-3.1-8b", "load": "dummy"}
_CALLS, _REPLAYS, _SINGLE_CALLS = 20, 40, 12
# Norm of the error over that of the result.
_BOUNDS: Final = {torch.bfloat16: 5e-3, torch.float32: 1e-6}


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One call: median and quartiles in microseconds, those of the rank with the largest median.

    `rank_bytes` is what a rank puts in. `error` is relative; None where nothing was to be checked.
    """

    operation: str
    transport: str
    shape: str
    rank_bytes: int
    median_us: float
    low_us: float
    high_us: float
    error: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeReport:
    """What was timed, on what; `skipped` says why a transport is missing."""

    device: str
    num_ranks: int
    backend: str
    torch: str
    dtype: str
    captured: bool
    timings: tuple[Timing, ...]
    skipped: tuple[str, ...]


def bench_exchange(num_ranks: int | None, device: str) -> ExchangeReport | None:
    """Time everything on `num_ranks` ranks of this machine (2 if None), or on the launcher's.

    Returns None on ranks other than the first.

    Raises
    ------
    ConfigError
        Fewer than two ranks, or not as many as the launcher started.
    """
    env = launch_env()
    size = env.world_size if env is not None else num_ranks or 2
    if size < 2:
        raise ConfigError(f"--ranks {size}: an exchange needs 2 ranks or more")
    if num_ranks not in (None, size):
        raise ConfigError(f"--ranks {num_ranks}, but the launcher started {size}; leave --ranks out")
    config = make_config({"model": _ANY_MODEL}, layout={"kvp": size}, engine={"device": device})
    reports = run_tasks([_ExchangeTask(variant=Variant(label="exchange", config=config))])
    return None if reports is None else reports[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ExchangeTask:
    """`measure` on the ranks of `variant`, of which nothing but their number and device counts."""

    variant: Variant

    def run(self, world: World) -> ExchangeReport:
        return measure(world)


def measure(world: World) -> ExchangeReport:
    """Everything, on this rank. Collective over the ranks of `world`."""
    mesh = build_mesh(Layout(kvp=world.size, tpf=world.size), world)
    problem = symmetric_problem(world)
    if problem is None:
        from helix.layers.direct import connect_peers

        connect_peers(mesh, world)
    bench = _Bench(world, mesh)
    with torch.inference_mode():
        timings = (*bench.exchanges(), *bench.all_reduces())
    return ExchangeReport(
        device="cpu" if world.device.type == "cpu" else torch.cuda.get_device_name(world.device),
        num_ranks=world.size,
        backend=world.backend,
        torch=torch.__version__,
        dtype=str(bench.dtype).removeprefix("torch."),
        captured=bench.captured,
        timings=timings,
        skipped=() if problem is None else (f"symmetric memory: {problem}",),
    )


@dataclass(frozen=True, slots=True)
class _Way:
    """One way to do it: `call` gives its result, or None where there is nothing to check; `bound` widens the bound."""

    name: str
    call: Callable[[], object]
    bound: float = 1.0


class _Bench:
    """One rank's side. Every method is collective."""

    def __init__(self, world: World, mesh: Mesh) -> None:
        self.world = world
        self.captured = world.backend == "nccl"
        self.dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
        # The direct ways are kept aside, so that the groups use them only when they are meant.
        self.kvp, self.group = mesh.kvp, mesh.world
        self.exchange_direct, self.reduce_direct = mesh.kvp.direct, mesh.world.direct
        mesh.kvp.direct = mesh.world.direct = None

    def exchanges(self) -> Iterator[Timing]:
        for tokens, heads in EXCHANGES:
            partials = [self._partials(tokens, heads, rank) for rank in range(self.world.size)]
            out_THD, lse_TH = partials[self.world.rank]
            part_heads = -(-heads // self.world.size)
            want_ThD = self._merged(partials, part_heads)
            num_bytes, shape = out_THD.nbytes + lse_TH.nbytes, f"{tokens} x {heads} x {WIDTH}"
            for way in self._exchange_ways(out_THD, lse_TH, part_heads):
                result = way.call()
                error = _error(result, want_ThD) if isinstance(result, Tensor) else None
                if error is not None and not error < way.bound * _BOUNDS[self.dtype]:
                    raise AssertionError(f"exchange, {way.name}, {shape}: off by {error:.2e} of the norm")
                yield self._timing("exchange", way, shape, num_bytes, error)

    def all_reduces(self) -> Iterator[Timing]:
        for kilobytes in REDUCED_KB:
            count = kilobytes * 1000 // self.dtype.itemsize // 8 * 8
            parts = [self._integers(count, rank) for rank in range(self.world.size)]
            want, x = torch.stack(parts).sum(0), torch.empty_like(parts[0])
            for way in self._reduce_ways(x):
                x.copy_(parts[self.world.rank])
                if way.call() is False:
                    continue
                if not torch.equal(x, want):
                    raise AssertionError(f"all-reduce, {way.name}, {kilobytes} KB: the sum is wrong")
                # In place and again and again: only zeros stay what they are.
                x.zero_()
                yield self._timing("all-reduce", way, f"{kilobytes} KB", x.nbytes, 0.0)

    def _exchange_ways(self, out_THD: Tensor, lse_TH: Tensor, part_heads: int) -> Iterator[_Way]:
        group, direct = self.kvp, self.exchange_direct
        packed, gathered = Exchange(group, part_heads), Exchange(group, part_heads, "ag_rs")
        values = (out_THD.nbytes + lse_TH.nbytes) // out_THD.element_size() // group.size
        sent = out_THD.new_zeros(group.size, values)
        received = torch.empty_like(sent)

        def alone() -> None:
            group.all_to_all(received, sent)

        yield _Way("packed message", lambda: packed(out_THD, lse_TH))
        yield _Way("all-to-all alone", alone)
        yield _Way("two messages", lambda: _two_messages(group, out_THD, lse_TH, part_heads))
        yield _Way("all-gather + reduce-scatter", lambda: gathered(out_THD, lse_TH), 2.0)
        if direct is not None and direct.exchange(out_THD, lse_TH, part_heads, 0) is not None:
            yield _Way("symmetric memory", lambda: direct.exchange(out_THD, lse_TH, part_heads, 0))

    def _reduce_ways(self, x: Tensor) -> Iterator[_Way]:
        """Calls that give False have not done it: the message is not for them."""
        yield _Way("library", lambda: self.group.all_reduce(x))
        if self.reduce_direct is not None:
            yield _Way("symmetric, one shot", partial(self.reduce_direct.all_reduce, x, shots=1))
            yield _Way("symmetric, two shots", partial(self.reduce_direct.all_reduce, x, shots=2))

    def _partials(self, tokens: int, heads: int, rank: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator(self.world.device).manual_seed(1000 * rank + tokens)
        shape, device = (tokens, heads, WIDTH), self.world.device
        out_THD = torch.randn(shape, generator=generator, device=device).to(self.dtype)
        return out_THD, 2 * torch.randn(shape[:2], generator=generator, device=device)

    def _integers(self, count: int, rank: int) -> Tensor:
        generator = torch.Generator(self.world.device).manual_seed(rank)
        return torch.randint(-4, 5, (count,), generator=generator, device=self.world.device).to(self.dtype)

    def _merged(self, partials: list[tuple[Tensor, Tensor]], part_heads: int) -> Tensor:
        """fp64 merge of this rank's heads."""
        out_ZTHD = torch.stack([out for out, _ in partials]).double()
        share_ZTH = torch.stack([lse for _, lse in partials]).double().softmax(0)
        merged_THD = (out_ZTHD * share_ZTH.unsqueeze(-1)).sum(0)
        padding = part_heads * self.world.size - merged_THD.shape[1]
        merged_THD = torch.nn.functional.pad(merged_THD, (0, 0, 0, padding))
        return merged_THD[:, self.world.rank * part_heads :][:, :part_heads]

    def _timing(self, operation: str, way: _Way, shape: str, num_bytes: int, error: float | None) -> Timing:
        quartiles = torch.tensor(statistics.quantiles(self._times_us(way.call), n=4), dtype=torch.float64)
        everyone = self.world.group.all_gather(quartiles.new_empty(self.world.size, 3), quartiles)
        low, median, high = everyone[int(everyone[:, 1].argmax())].tolist()
        return Timing(
            operation=operation,
            transport=way.name,
            shape=shape,
            rank_bytes=num_bytes,
            median_us=median,
            low_us=low,
            high_us=high,
            error=error,
        )

    def _times_us(self, call: Callable[[], object]) -> list[float]:
        if not self.captured:
            return [self._wall_us(call) for _ in range(_SINGLE_CALLS)]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Threads of NCCL ask for events meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(_CALLS):
                call()
        times = []
        graph.replay()
        for _ in range(_REPLAYS):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times.append(1e3 * start.elapsed_time(stop) / _CALLS)
        return times

    def _wall_us(self, call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        return 1e6 * (time.perf_counter() - start)


def _two_messages(group: Group, out_THD: Tensor, lse_TH: Tensor, part_heads: int) -> Tensor:
    """The exchange as first published: outputs, and then lse, in an all-to-all each."""
    padding = part_heads * group.size - out_THD.shape[1]
    out_ZThD = torch.nn.functional.pad(out_THD, (0, 0, 0, padding)).unflatten(1, (group.size, -1)).movedim(1, 0)
    lse_ZTh = torch.nn.functional.pad(lse_TH, (0, padding), value=-torch.inf).unflatten(1, (group.size, -1))
    lse_ZTh = lse_ZTh.movedim(1, 0).contiguous()
    out_ZThD = out_ZThD.contiguous()
    outs = group.all_to_all(torch.empty_like(out_ZThD), out_ZThD)
    return merge(outs, group.all_to_all(torch.empty_like(lse_ZTh), lse_ZTh))[0]


def _error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-30))


def print_report(report: ExchangeReport, *, as_json: bool) -> None:
    """A table, unless `as_json`; the last line is one JSON object in any case."""
    if not as_json:
        how = "graph of calls" if report.captured else "single calls"
        title = f"{report.num_ranks} ranks, {report.device}, {report.backend}, {report.dtype}: us a call ({how})"
        table = Table(title=title, box=box.SIMPLE)
        for name in ("operation", "shape", "KB of a rank", "transport", "median", "quartiles", "error"):
            table.add_column(name, justify="left" if name in ("operation", "transport") else "right")
        for one in report.timings:
            table.add_row(
                one.operation,
                one.shape,
                f"{one.rank_bytes / 1000:.0f}",
                one.transport,
                f"{one.median_us:.1f}",
                f"{one.low_us:.1f}..{one.high_us:.1f}",
                "-" if one.error is None else f"{one.error:.1e}",
            )
        Console(width=140).print(table)
        for line in report.skipped:
            print(f"skipped {line}")
        print("shape of an exchange: tokens x heads of all ranks x width; an all-to-all alone packs and merges nothing")
    print(json.dumps({"bench": "exchange", **asdict(report)}))
