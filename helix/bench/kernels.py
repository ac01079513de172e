"""Timings of the kernels alone on a GPU: share of the memory's or the arithmetic's ceiling over a grid of shapes.

Every timing is the median of replays of a CUDA graph that holds several calls, each on pages that the calls before it
did not touch (cold caches), and every timed case is first compared with the fp32 PyTorch twin on the same inputs.

Letters: T tokens, S sequences, H query heads, K KV heads, D and V widths of keys and values, P pages, B page_tokens,
R page rows, Z partials, h heads of one part.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from helix.bench.pricing import device_name
from helix.cost.hardware import load_hardware, recognise_hardware
from helix.errors import ConfigError
from helix.kernels.attention import attend as attend_twin
from helix.kernels.merge import merge as merge_twin
from helix.kernels.triton_attention import Tiling, attend_into
from helix.kernels.triton_merge import PeerLayout, merge_peers, pack

# Bytes between two uses of the same memory: several times the L2 of any device so far.
_COLD_BYTES, _CPU_COLD_BYTES = 400 << 20, 1 << 20
_REPLAYS = 25
_ROWS_CHECKED, _TOKENS_CHECKED = 32, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """What the device can do at most: bytes read a second, and bf16 operations a second."""

    read_bytes_per_s: float
    flops_per_s: float


# Best figures ever measured on an H200: a read-bound kernel, and a large bf16 product of random numbers.
H200 = Ceiling(read_bytes_per_s=4.54e12, flops_per_s=790e12)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelReport:
    """What was timed, on what: one record a shape."""

    device: str
    torch: str
    ceiling: Ceiling | None
    records: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """One decode step: `batch` sequences of `context` local tokens, `queries` tokens each; `latent` as in MLA."""

    batch: int
    context: int
    num_heads: int
    num_kv_heads: int = 1
    width: int = 128
    v_width: int = 128
    latent: bool = False
    queries: int = 1
    page_tokens: int = 64
    dtype: torch.dtype = torch.bfloat16

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's cache row over all KV heads."""
        width = self.width if self.latent else self.width + self.v_width
        return width * self.num_kv_heads * self.dtype.itemsize

    @property
    def kv_bytes(self) -> int:
        return self.batch * self.context * self.row_bytes

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.queries * self.context * self.num_heads * (self.width + self.v_width)

    def floor_us(self, ceiling: Ceiling) -> float:
        """The larger of the time to read the cache and the time to compute."""
        return 1e6 * max(self.kv_bytes / ceiling.read_bytes_per_s, self.flops / ceiling.flops_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Microseconds a call: median and quartiles over replays; errors against the fp32 twin as shares of its norm."""

    median_us: float
    low_us: float
    high_us: float
    out_error: float
    lse_error: float


def time_calls(
    calls: Sequence[Callable[[], object]],
    *,
    warm_s: float = 0.0,
    replays: int = _REPLAYS,
    device: torch.device | None = None,
) -> tuple[float, float, float]:
    """Median and quartiles, in microseconds a call, of replays of one graph of all `calls`; on a CPU of plain calls.

    `warm_s`: replay it that long before. The clocks of a device under its power limit fall within tens of
    milliseconds, so a kernel that draws much power is slower in the long run than in a short one.
    """
    for call in calls[:2]:
        call()
    if device is not None and device.type == "cpu":
        return _wall_us(calls)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    start_s = time.monotonic()
    while True:
        graph.replay()
        torch.cuda.synchronize()
        if time.monotonic() - start_s >= warm_s:
            break
    times = []
    for _ in range(replays):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(1e3 * start.elapsed_time(stop) / len(calls))
    low, median, high = statistics.quantiles(times, n=4)
    return median, low, high


def _wall_us(calls: Sequence[Callable[[], object]]) -> tuple[float, float, float]:
    times = []
    for call in calls:
        start = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - start))
    low, median, high = statistics.quantiles(times, n=4)
    return median, low, high


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionInputs:
    """Arguments of one `attend` call."""

    q_THD: Tensor
    k_PBKD: Tensor
    v_PBKV: Tensor
    page_table_SR: Tensor
    query_start_S1: Tensor
    visible_len_T: Tensor
    scale: float

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float]:
        return (
            self.q_THD,
            self.k_PBKD,
            self.v_PBKV,
            self.page_table_SR,
            self.query_start_S1,
            self.visible_len_T,
            self.scale,
        )


def attention_inputs(
    shape: AttentionShape, *, device: torch.device, lengths: Sequence[int] | None = None, seed: int = 0
) -> Iterator[AttentionInputs]:
    """Without end: calls of one shape on ever other pages of one shuffled pool, which is larger than the caches.

    `lengths` makes the sequences uneven; each is at most the context.
    """
    generator = torch.Generator(device).manual_seed(seed)
    rows = -(-shape.context // shape.page_tokens)
    cold = _COLD_BYTES if device.type == "cuda" else _CPU_COLD_BYTES
    sets = max(-(-cold // shape.kv_bytes), 2 if shape.kv_bytes < 8 << 30 else 1)
    num_pages = sets * shape.batch * rows
    size = (num_pages, shape.page_tokens, shape.num_kv_heads)

    def normal(*size: int) -> Tensor:
        return torch.empty(size, dtype=shape.dtype, device=device).normal_(generator=generator)

    k_PBKD = normal(*size, shape.width)
    v_PBKV = k_PBKD[..., : shape.v_width] if shape.latent else normal(*size, shape.v_width)
    pages = torch.randperm(num_pages, generator=generator, device=device).int().view(sets, shape.batch, rows)
    longest = torch.tensor(lengths or [shape.context] * shape.batch, device=device)
    back = torch.arange(shape.queries - 1, -1, -1, device=device)
    visible_len_T = (longest[:, None] - back).flatten()
    starts = torch.arange(0, shape.batch * shape.queries + 1, shape.queries, device=device)
    turn = 0
    while True:
        yield AttentionInputs(
            q_THD=normal(shape.batch * shape.queries, shape.num_heads, shape.width),
            k_PBKD=k_PBKD,
            v_PBKV=v_PBKV,
            page_table_SR=pages[turn % sets],
            query_start_S1=starts,
            visible_len_T=visible_len_T,
            scale=shape.width**-0.5,
        )
        turn += 1


def check_attention(inputs: AttentionInputs, out_THV: Tensor, lse_TH: Tensor) -> tuple[float, float]:
    """Errors of out and lse against the fp32 twin, on some of the sequences; raises where they are too large."""
    starts = inputs.query_start_S1
    last = min(int(starts[min(_ROWS_CHECKED, len(starts) - 1)]), _TOKENS_CHECKED)
    want_out, want_lse = attend_twin(
        inputs.q_THD[:last].float(),
        *inputs.arguments[1:3],
        inputs.page_table_SR,
        torch.cat((starts[starts < last], starts.new_tensor([last]))),
        inputs.visible_len_T[:last],
        inputs.scale,
    )
    out_error = relative_error(out_THV[:last], want_out)
    lse_error = float((lse_TH[:last] - want_lse).abs().max())
    if not (out_error < 5e-3 and lse_error < 1e-3):
        raise AssertionError(f"attend is off: out by {out_error:.2e} of its norm, lse by {lse_error:.2e}")
    return out_error, lse_error


def measure_attention(
    shape: AttentionShape,
    *,
    device: torch.device,
    tiling: Tiling | None = None,
    lengths: Sequence[int] | None = None,
    call: Callable[..., None] = attend_into,
    check: bool = True,
    warm_s: float = 0.0,
) -> Measurement:
    """Time one shape; `tiling` instead of the one that would be chosen."""
    num_tokens = shape.batch * shape.queries
    out = torch.full((num_tokens, shape.num_heads, shape.v_width), torch.nan, dtype=shape.dtype, device=device)
    lse = torch.full((num_tokens, shape.num_heads), torch.nan, device=device)
    source = attention_inputs(shape, device=device, lengths=lengths)
    options = {} if tiling is None else {"tiling": tiling}
    num_calls = min(max(-(-_COLD_BYTES // shape.kv_bytes), 2), 40 if device.type == "cuda" else 8)
    several = [next(source) for _ in range(num_calls)]
    call(out, lse, *several[0].arguments, **options)
    errors = check_attention(several[0], out, lse) if check else (-1.0, -1.0)
    calls = [partial(call, out, lse, *one.arguments, **options) for one in several]
    median, low, high = time_calls(calls, warm_s=warm_s, device=device)
    return Measurement(median_us=median, low_us=low, high_us=high, out_error=errors[0], lse_error=errors[1])


def measure_exchange_local(
    *, tokens: int, heads: int, width: int, parts: int, device: torch.device, packed: bool, warm_s: float = 0.0
) -> Measurement:
    """What one rank does itself in an exchange: merge `parts` peers' partials for its ``heads / parts`` heads.

    `packed`: by message, so one kernel packs what this rank sends and another merges what it would have received;
    otherwise the peers' memory (here local buffers) is read by address and nothing is packed.
    """
    generator = torch.Generator(device).manual_seed(0)
    part_heads = -(-heads // parts)
    turns = 24
    size = (turns, parts, tokens, heads, width)
    out_YZTHD = torch.empty(size, dtype=torch.bfloat16, device=device).normal_(generator=generator)
    lse_YZTH = torch.empty(size[:-1], device=device).normal_(generator=generator)
    row = width + 2
    layout = PeerLayout(
        num_tokens=tokens,
        num_heads=part_heads,
        width=width,
        dtype=torch.bfloat16,
        token_stride=part_heads * row,
        head_stride=row,
        lse_offset=width // 2,
        lse_token_stride=part_heads * row // 2,
        lse_head_stride=row // 2,
    )
    messages = [
        [pack(out, lse, parts, part_heads) for out, lse in zip(*turn, strict=True)]
        for turn in zip(out_YZTHD, lse_YZTH, strict=True)
    ]
    addresses = [
        torch.tensor([message[0].data_ptr() for message in turn], dtype=torch.int64, device=device) for turn in messages
    ]
    merged = torch.full((tokens, part_heads, width), torch.nan, dtype=torch.bfloat16, device=device)
    merge_peers(addresses[0], layout, merged)
    want, _ = merge_twin(out_YZTHD[0, :, :, :part_heads].float(), lse_YZTH[0, :, :, :part_heads])
    error = relative_error(merged, want)
    if not error < 5e-3:
        raise AssertionError(f"the merge is off by {error:.2e} of its norm")

    def one(turn: int) -> None:
        if packed:
            pack(out_YZTHD[turn, 0], lse_YZTH[turn, 0], parts, part_heads)
        merge_peers(addresses[turn], layout, merged)

    median, low, high = time_calls([partial(one, turn) for turn in range(turns)], warm_s=warm_s)
    return Measurement(median_us=median, low_us=low, high_us=high, out_error=error, lse_error=0.0)


def attention_record(shape: AttentionShape, measured: Measurement, ceiling: Ceiling | None = H200) -> dict[str, Any]:
    """One line for scripts: shape, figures, and the shares of the ceilings."""
    seconds = measured.median_us * 1e-6
    return {
        **asdict(shape),
        "dtype": str(shape.dtype).removeprefix("torch."),
        **{name: round(value, 6) for name, value in asdict(measured).items()},
        "tb_per_s": round(shape.kv_bytes / seconds / 1e12, 3),
        "tflop_per_s": round(shape.flops / seconds / 1e12, 1),
        "share_of_ceiling": None if ceiling is None else round(shape.floor_us(ceiling) / measured.median_us, 3),
    }


def latent_shape(batch: int, context: int, num_heads: int, queries: int = 1) -> AttentionShape:
    """MLA latents of DeepSeek's widths."""
    return AttentionShape(
        batch=batch,
        context=context,
        num_heads=num_heads,
        width=576,
        v_width=512,
        latent=True,
        queries=queries,
    )


def grouped_shape(batch: int, context: int, num_heads: int, num_kv_heads: int) -> AttentionShape:
    """Grouped-query attention with heads 128 wide."""
    return AttentionShape(batch=batch, context=context, num_heads=num_heads, num_kv_heads=num_kv_heads)


_K = 1024
_LATENT_CELLS = ((1, 32), (1, 128), (1, 512), (1, 1024), (8, 128), (8, 1024), (32, 32))
_MANY_HEAD_CELLS = ((1, 128), (8, 32), (8, 128))
_GROUPED_CELLS = ((1, 128), (1, 1024), (8, 128), (32, 32), (8, 1024))
GRID: dict[str, tuple[AttentionShape, ...]] = {
    "mla, 8 heads": tuple(latent_shape(batch, context * _K, 8) for batch, context in _LATENT_CELLS),
    "mla, 16 heads, half the context": tuple(
        latent_shape(batch, context * _K // 2, 16) for batch, context in _LATENT_CELLS
    ),
    "mla, 64 heads": tuple(latent_shape(batch, context * _K, 64) for batch, context in _MANY_HEAD_CELLS),
    "mla, 128 heads": tuple(latent_shape(batch, context * _K, 128) for batch, context in _MANY_HEAD_CELLS),
    "gqa, 8 heads, 1 KV head": tuple(grouped_shape(batch, context * _K, 8, 1) for batch, context in _GROUPED_CELLS),
    "gqa, 64 heads, 8 KV heads": tuple(
        grouped_shape(batch, context * _K, 64, 8) for batch, context in _GROUPED_CELLS[:4]
    ),
}
_EXCHANGE = "exchange"
EXCHANGES = ((1, 16), (64, 16), (64, 128))


# Small enough for the PyTorch twins on a CPU, which is where a machine without a GPU times them.
CPU_GRID: dict[str, tuple[AttentionShape, ...]] = {
    "mla, 8 heads": tuple(replace(latent_shape(batch, 512, 8), dtype=torch.float32) for batch in (1, 4)),
    "gqa, 8 heads, 1 KV head": tuple(replace(grouped_shape(batch, 512, 8, 1), dtype=torch.float32) for batch in (1, 4)),
}


def bench_attention(device: torch.device, families: Sequence[str], ceiling: Ceiling | None) -> Iterator[dict[str, Any]]:
    """Records over the grid: a short run, and on a GPU (`sustained_us`) one at the clocks that the device can keep."""
    if device.type == "cpu":
        for family in families:
            for shape in CPU_GRID[family]:
                measured = measure_attention(shape, device=device, call=_twin_into)
                yield {"family": family, **attention_record(shape, measured, ceiling)}
        return
    for family in families:
        for shape in GRID[family]:
            record = attention_record(shape, measure_attention(shape, device=device), ceiling)
            sustained = measure_attention(shape, device=device, check=False, warm_s=0.2)
            torch.cuda.empty_cache()
            yield {"family": family, **record, "sustained_us": round(sustained.median_us, 3)}


def _twin_into(out_THV: Tensor, lse_TH: Tensor, *arguments: Any) -> None:
    out, lse = attend_twin(*arguments)
    out_THV.copy_(out)
    lse_TH.copy_(lse)


def bench_exchange(device: torch.device, parts: int = 8, width: int = 512) -> Iterator[dict[str, Any]]:
    """Records of the local part of an exchange, by peers' memory and by message."""
    for packed in (False, True):
        for tokens, heads in EXCHANGES:
            measured = measure_exchange_local(
                tokens=tokens, heads=heads, width=width, parts=parts, device=device, packed=packed
            )
            name = "exchange, packed message" if packed else "exchange, peers' memory"
            yield {"family": name, "tokens": tokens, "heads": heads, "width": width, "parts": parts, **asdict(measured)}


def bench_kernels(wanted: str | None = None) -> KernelReport:
    """The grid on the current GPU (without one, a small grid of the twins), or families whose names hold `wanted`.

    Raises: ConfigError where there is no such family.
    """
    # Beside this module, whose clock they use.
    from helix.bench import fp8, products

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    grid = GRID if on_gpu else CPU_GRID
    others: dict[str, Callable[[torch.device], Iterator[dict[str, Any]]]] = {
        _EXCHANGE: bench_exchange,
        "linear": products.bench_linear,
        "experts": products.bench_experts,
        "router": products.bench_router,
        "linear_fp8": fp8.bench_linear,
        "experts_fp8": fp8.bench_experts,
    }
    if not on_gpu:
        others = {}
    families = [name for name in (*grid, *others) if wanted is None or wanted in name]
    if not families:
        raise ConfigError(f"--families {wanted!r} is in none of: {'; '.join((*grid, *others))}")
    ceiling = find_ceiling(device)
    records = list(bench_attention(device, [name for name in families if name in grid], ceiling))
    for name in families:
        if name in others:
            records += others[name](device)
    return KernelReport(device=device_name(device), torch=torch.__version__, ceiling=ceiling, records=tuple(records))


def find_ceiling(device: torch.device) -> Ceiling | None:
    """The best that was ever measured on such a device; by its hardware card where that is not known."""
    name = device_name(device)
    if "H200" in name:
        return H200
    card = "cpu" if device.type == "cpu" else recognise_hardware(name)
    if card is None:
        return None
    hardware = load_hardware(card)
    rate = hardware.product_rate("float32" if device.type == "cpu" else "bfloat16")
    return Ceiling(read_bytes_per_s=1e6 * hardware.memory.value, flops_per_s=1e6 * rate)


def print_report(report: KernelReport, *, as_json: bool) -> None:
    """A table, unless `as_json`; the last line is one JSON object in any case."""
    if not as_json:
        table = Table(title=f"kernels on {report.device}: us a call", box=box.SIMPLE)
        for name in ("kernel", "shape", "median", "quartiles", "sustained", "TB/s", "TFLOP/s", "of ceiling"):
            table.add_column(name, justify="left" if name in ("kernel", "shape") else "right")
        for record in report.records:
            table.add_row(*_row(record))
        Console(width=140).print(table)
        if report.ceiling is not None:
            read, flops = report.ceiling.read_bytes_per_s / 1e12, report.ceiling.flops_per_s / 1e12
            print(f"of ceiling: the larger of bytes / {read:.3g} TB/s and operations / {flops:.3g} TFLOP/s")
    print(json.dumps({"bench": "kernel", **asdict(report)}))


def _row(record: dict[str, Any]) -> tuple[str, ...]:
    if "shape" in record:
        shape = record["shape"]
    elif "context" in record:
        shape = f"{record['batch']} x {record['context']}"
    else:
        shape = f"{record['tokens']} tokens, {record['heads']} heads, {record['parts']} peers"
    share = record.get("share_of_ceiling")
    return (
        record["family"],
        shape,
        f"{record['median_us']:.1f}",
        f"{record['low_us']:.1f}..{record['high_us']:.1f}",
        *(str(record.get(name, "-")) for name in ("sustained_us", "tb_per_s", "tflop_per_s")),
        "-" if share is None else f"{share:.0%}",
    )


def relative_error(got: Tensor, want: Tensor) -> float:
    """How far `got` is from `want`, as a share of its norm."""
    return float((got.double() - want.double()).norm() / want.double().norm())
