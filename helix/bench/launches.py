"""Timings of single launches, as the cost model has them: bytes, operations, microseconds; a line through each.

Weights and pages are rotated, so that each call reads what the calls before it did not touch (cold caches). On a GPU
all calls of a timing are replayed from one CUDA graph, which is how the engine runs its decode steps.

Letters: T tokens, C model width, E experts, W width of an expert's part, P pages, B tokens of a page.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from helix.kernels import attend, rms_norm
from helix.layers.linear import Linear
from helix.layers.moe import expert_products

_REPEATS = 9
_PAGE_TOKENS = 64
# Calls in one graph, and the bytes that they together read at least: several times the L2 of any device so far.
_MIN_CALLS, _MAX_CALLS = 10, 64
_COLD_BYTES = 400 << 20

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed launch: what it was, the bytes that it must read, its operations, and how long it took."""

    name: str
    num_bytes: float
    flops: float
    us: float


@dataclass(frozen=True, slots=True)
class Line:
    """Time against size: ``fixed_us + size / rate``; `error` is the median relative error of the samples it is for."""

    fixed_us: float
    rate: float
    error: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is timed, so large that it takes long enough and so small that it takes no longer.

    `linear` (outputs, inputs); `attention` and `latent` (batch, cached tokens, query heads, KV heads); `experts` and
    `few_experts` (tokens, width of an expert's part) of `num_experts`, `per_token` of which a token goes to.
    """

    read_bytes: int
    product: int
    hidden: int
    linear: tuple[tuple[int, int], ...]
    attention: tuple[tuple[int, int, int, int], ...]
    latent: tuple[tuple[int, int, int, int], ...]
    latent_products: tuple[int, int, int, int]
    experts: tuple[tuple[int, int], ...]
    few_experts: tuple[tuple[int, int], ...]
    num_experts: int
    per_token: int


CPU = Sizes(
    read_bytes=32 << 20,
    product=384,
    hidden=256,
    linear=((256, 256), (768, 768), (2048, 1024)),
    attention=((1, 512, 8, 1), (1, 4096, 8, 1)),
    latent=((1, 512, 16, 1), (1, 2048, 16, 1)),
    latent_products=(1, 512, 64, 1),
    experts=((2, 128), (8, 128)),
    few_experts=((1, 64), (1, 256)),
    num_experts=8,
    per_token=2,
)
_K = 1024
GPU = Sizes(
    read_bytes=4 << 30,
    product=8192,
    hidden=2048,
    linear=((2048, 2048), (4096, 4096), (10944, 2048), (8192, 8192), (16384, 16384)),
    attention=(
        (1, 16 * _K, 8, 1), (1, 128 * _K, 8, 1), (8, 64 * _K, 8, 1), (1, 16 * _K, 32, 8), (1, 128 * _K, 32, 8),
        (8, 32 * _K, 32, 8), (1, 512 * _K, 32, 8),
    ),
    latent=(
        (1, 16 * _K, 16, 1), (1, 64 * _K, 16, 1), (1, 512 * _K, 16, 1), (8, 64 * _K, 16, 1), (32, 32 * _K, 16, 1),
        (1, 32 * _K, 8, 1), (1, 512 * _K, 8, 1), (8, 128 * _K, 8, 1),
    ),
    latent_products=(8, 128 * _K, 128, 1),
    experts=((4, 1408), (8, 1408), (16, 1408), (32, 1408), (64, 1408), (8, 704), (8, 352), (8, 176), (8, 88)),
    few_experts=((1, 1408), (1, 704), (1, 352), (1, 176), (1, 88)),
    num_experts=64,
    per_token=6,
)  # fmt: skip


def time_us(calls: Sequence[Call], device: torch.device) -> float:
    """Median time of one of `calls`, microseconds, over repeats; on a GPU of a graph of all of them."""
    for call in calls[:2]:
        call()
    if device.type != "cuda":
        return statistics.median(_wall_us(call) for call in calls for _ in range(max(_REPEATS // len(calls), 3)))
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for call in calls:
            call()
    times: list[float] = []
    for _ in range(_REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def _wall_us(call: Call) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def fit_line(samples: Iterable[Sample]) -> Line:
    """The line ``fixed + bytes / rate`` with the least squares of relative errors; neither term is below zero."""
    points = [(one.num_bytes / one.us, 1.0 / one.us) for one in samples]
    # Each sample asks for slope * x + fixed * y = 1.
    xx, xy, yy = (sum(a * b for a, b in pairs) for pairs in _moments(points))
    x, y = sum(one for one, _ in points), sum(one for _, one in points)
    determinant = xx * yy - xy * xy
    slope, fixed = x / xx, 0.0
    if determinant > 1e-12 * xx * yy:
        free_slope, free_fixed = (x * yy - y * xy) / determinant, (y * xx - x * xy) / determinant
        if free_fixed > 0 and free_slope > 0:
            slope, fixed = free_slope, free_fixed
    errors = [abs(slope * a + fixed * b - 1.0) for a, b in points]
    return Line(fixed, 1.0 / slope, statistics.median(errors))


def _moments(points: Sequence[tuple[float, float]]) -> Iterator[list[tuple[float, float]]]:
    yield [(x, x) for x, _ in points]
    yield [(x, y) for x, y in points]
    yield [(y, y) for _, y in points]


def num_calls(call_bytes: float, device: torch.device) -> int:
    """Calls in one timing, so that together they read more than the caches hold."""
    if device.type != "cuda":
        return 3
    return min(max(round(_COLD_BYTES / max(call_bytes, 1.0)), _MIN_CALLS), _MAX_CALLS)


def read_rate(device: torch.device, sizes: Sizes) -> float:
    """Bytes per microsecond of a plain sum over integers."""
    values = torch.ones(sizes.read_bytes // 8, dtype=torch.int64, device=device)
    return sizes.read_bytes / time_us([values.sum] * 3, device)


def product_rate(device: torch.device, number_format: str, size: int) -> float | None:
    """Operations per microsecond of one large product of random numbers; None where the device has no such product."""
    left, right = (torch.randn(size, size, device=device) for _ in range(2))
    if number_format == "float8":
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
            return None
        one = torch.ones((), device=device)
        a, b = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t()
        call: Call = partial(torch._scaled_mm, a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    else:
        dtype = getattr(torch, number_format)
        call = partial(torch.matmul, left.to(dtype), right.to(dtype))
    return 2.0 * size**3 / time_us([call] * 3, device)


def linear_samples(device: torch.device, dtype: torch.dtype, sizes: Sizes, rows: int) -> Iterator[Sample]:
    """Products of `rows` rows, by the engine's own layer."""
    for outputs, inputs in sizes.linear:
        num_bytes = outputs * inputs * dtype.itemsize
        calls: list[Call] = []
        x = _normal((rows, inputs), dtype, device)
        for _ in range(num_calls(num_bytes, device)):
            layer = Linear(outputs, inputs, (), dtype=dtype, device=device)
            layer.weight.normal_()
            calls.append(partial(layer, x))
        yield Sample(
            f"{outputs} x {inputs}, {rows} rows",
            num_bytes,
            2.0 * rows * num_bytes / dtype.itemsize,
            time_us(calls, device),
        )


def attention_samples(
    device: torch.device, dtype: torch.dtype, shapes: Iterable[tuple[int, int, int, int]], width: int, v_width: int
) -> Iterator[Sample]:
    """Decode attention over shapes of (batch, cached tokens, query heads, KV heads); ``v_width < width`` is latent."""
    latent = v_width < width
    for batch, tokens, heads, kv_heads in shapes:
        rows = tokens // _PAGE_TOKENS
        row_values = kv_heads * (width if latent else width + v_width)
        num_bytes = batch * tokens * row_values * dtype.itemsize
        sets = min(num_calls(num_bytes, device), max(2, round(_COLD_BYTES / num_bytes)))
        pages = sets * batch * rows
        keys = _normal((pages, _PAGE_TOKENS, kv_heads, width), dtype, device)
        values = keys[..., :v_width] if latent else _normal((pages, _PAGE_TOKENS, kv_heads, v_width), dtype, device)
        tables = torch.randperm(pages, device=device).int().view(sets, batch, rows)
        query = _normal((batch, heads, width), dtype, device)
        starts = torch.arange(batch + 1, device=device)
        visible = torch.full((batch,), tokens, device=device)
        calls: list[Call] = [
            partial(attend, query, keys, values, tables[index % sets], starts, visible, width**-0.5)
            for index in range(num_calls(num_bytes, device))
        ]
        flops = 2.0 * batch * tokens * heads * (width + v_width)
        yield Sample(f"{batch} x {tokens}, {heads} on {kv_heads}", num_bytes, flops, time_us(calls, device))


def expert_samples(
    device: torch.device, dtype: torch.dtype, sizes: Sizes, shapes: Iterable[tuple[int, int]]
) -> Iterator[Sample]:
    """Expert products over shapes of (tokens, width), each token with its own random experts."""
    source = random.Random(0)
    for tokens, width in shapes:
        gate_up = _normal((sizes.num_experts, 2 * width, sizes.hidden), dtype, device)
        down = _normal((sizes.num_experts, sizes.hidden, width), dtype, device)
        x = _normal((tokens, sizes.hidden), dtype, device)
        weight = torch.ones(tokens, sizes.per_token, device=device)
        each = (gate_up.nbytes + down.nbytes) / sizes.num_experts
        calls: list[Call] = []
        hits = []
        for _ in range(num_calls(each * sizes.per_token, device)):
            chosen = [source.sample(range(sizes.num_experts), sizes.per_token) for _ in range(tokens)]
            hits.append(len({expert for row in chosen for expert in row}))
            ids = torch.tensor(chosen, device=device)
            calls.append(partial(expert_products, x, ids, weight, gate_up, down, "silu"))
        mean = statistics.fmean(hits)
        flops = 2.0 * tokens * sizes.per_token * each / dtype.itemsize
        yield Sample(f"{tokens} tokens, {width} wide, {mean:.1f} hit", mean * each, flops, time_us(calls, device))


def small_us(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> float:
    """One launch that moves next to nothing: the norm of a row."""
    x, weight = _normal((1, sizes.hidden), dtype, device), _normal((sizes.hidden,), dtype, device)
    return time_us([partial(rms_norm, x, weight, 1e-6)] * num_calls(x.nbytes, device), device)


def _normal(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=dtype, device=device).normal_()
