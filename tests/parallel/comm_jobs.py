"""What the ranks of the pool run in the tests of the collectives and of the exchange.

Every job knows what all ranks hold, because contents follow from rank numbers and seeds; so it checks on the spot and
returns what only the caller can judge.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal
from unittest import mock

import torch
from torch import Tensor

from helix.bench import exchange as exchange_bench
from helix.comm.group import Group
from helix.comm.mesh import build_mesh
from helix.comm.world import World
from helix.config import CommConfig
from helix.engine.build import connect
from helix.errors import ConfigError, LayoutError
from helix.kernels import attend
from helix.layers.exchange import Exchange
from helix.layout import Layout
from tests.kernels.cases import (
    TOLERANCES,
    Shape,
    assert_close,
    assert_same_bits,
    build_case,
    dense_merge,
    random_partials,
)

DTYPES = (torch.float32, torch.bfloat16, torch.int64)
PAYLOADS = (b"", b"\x00", b"\xff", bytes(range(256)) * 4096)
MARK = 99
"""Fills outputs beforehand, so that what a collective does not write is seen."""

Form = Literal["a2a", "ag_rs"]
Transport = Literal["collective", "symmetric"]


# Collectives


def content(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Integers from -4 to 4, other ones on each rank: their sums over six ranks are exact in every dtype."""
    generator = torch.Generator().manual_seed(31 * rank + sum(shape))
    values = torch.randint(-4, 5, shape, generator=generator, device="cpu")
    return values.to(torch.get_default_device(), dtype)


def check_collectives(
    world: World, layouts: list[Layout], transport: Transport = "collective"
) -> dict[str, list[dict[str, int]]]:
    """Every method of every group of each layout; per axis, the bytes that each checked group sent."""
    sent: dict[str, list[dict[str, int]]] = {}
    for layout in layouts:
        mesh = build_mesh(layout, world)
        connect(mesh, world, CommConfig(transport=transport))
        assert mesh.coords == layout.coords(world.rank)
        for group in (mesh.world, mesh.kvp, mesh.tpf, mesh.ep):
            with world.device:
                check_group(group, layout, world.rank)
            # On the host, whatever the ranks compute on.
            _broadcast_bytes(group)
            sent.setdefault(group.axis, []).append(dict(group.traffic.sent_bytes))
    return sent


def check_group(group: Group, layout: Layout, rank: int) -> None:
    assert group.ranks in layout.groups(group.axis)
    assert group.ranks[group.index] == rank
    assert group.size == len(group.ranks)
    for dtype in DTYPES:
        for check in (_all_reduce, _all_gather, _reduce_scatter, _all_to_all, _all_to_all_uneven, _broadcast):
            name, expected = check(group, dtype)
            group.traffic.clear()
            check(group, dtype)
            lone = group.size == 1
            assert group.traffic.sent_bytes == ({} if lone else {name: expected}), (name, group.ranks, dtype)
            assert lone or group.traffic.calls[name] == (group.size if check is _broadcast else 1)


def _all_reduce(group: Group, dtype: torch.dtype) -> tuple[str, int]:
    x = content(group.ranks[group.index], (6, 10), dtype)
    assert group.all_reduce(x) is x
    assert_same_bits(x, sum_of([content(rank, (6, 10), dtype) for rank in group.ranks]))
    return "all_reduce", 2 * 60 * dtype.itemsize * (group.size - 1) // group.size


def _all_gather(group: Group, dtype: torch.dtype) -> tuple[str, int]:
    x = content(group.ranks[group.index], (5, 3), dtype).t()
    out = x.new_full((group.size, 3, 5), MARK)
    assert group.all_gather(out, x) is out
    assert_same_bits(out, torch.stack([content(rank, (5, 3), dtype).t() for rank in group.ranks]))
    return "all_gather", 15 * dtype.itemsize * (group.size - 1)


def _reduce_scatter(group: Group, dtype: torch.dtype) -> tuple[str, int]:
    shape = (group.size, 7, 2)
    x = content(group.ranks[group.index], shape, dtype)
    out = x.new_full((7, 2), MARK)
    assert group.reduce_scatter(out, x.transpose(1, 2).contiguous().transpose(1, 2)) is out
    assert_same_bits(out, sum_of([content(rank, shape, dtype)[group.index] for rank in group.ranks]))
    return "reduce_scatter", 14 * dtype.itemsize * (group.size - 1)


def _all_to_all(group: Group, dtype: torch.dtype) -> tuple[str, int]:
    shape = (group.size, 4, 3)
    x = content(group.ranks[group.index], shape, dtype)
    out = torch.full_like(x, MARK)
    assert group.all_to_all(out, x.transpose(1, 2).contiguous().transpose(1, 2)) is out
    assert_same_bits(out, torch.stack([content(rank, shape, dtype)[group.index] for rank in group.ranks]))
    return "all_to_all", 12 * dtype.itemsize * (group.size - 1)


def _all_to_all_uneven(group: Group, dtype: torch.dtype) -> tuple[str, int]:
    """Rank i of the group sends (2 i + j + 1) % 3 rows to rank j: 0, 1 or 2, and not as many as it gets from there."""

    def splits(sender: int) -> list[int]:
        return [(2 * sender + receiver + 1) % 3 for receiver in range(group.size)]

    mine, everyone = splits(group.index), [splits(sender) for sender in range(group.size)]
    sources = [content(rank, (sum(rows), 5), dtype) for rank, rows in zip(group.ranks, everyone, strict=True)]
    x, out_splits = sources[group.index], [rows[group.index] for rows in everyone]
    out = x.new_full((sum(out_splits), 5), MARK)
    assert group.all_to_all_uneven(out, x, out_splits, mine) is out
    runs = [torch.split(source, rows)[group.index] for source, rows in zip(sources, everyone, strict=True)]
    assert_same_bits(out, torch.cat(runs))
    return "all_to_all", 5 * dtype.itemsize * (sum(mine) - mine[group.index])


def _broadcast(group: Group, dtype: torch.dtype) -> tuple[str, int]:
    for source in range(group.size):
        x = content(group.ranks[group.index], (4, 6), dtype)
        assert group.broadcast(x, source) is x
        assert_same_bits(x, content(group.ranks[source], (4, 6), dtype))
    return "broadcast", 24 * dtype.itemsize


def _broadcast_bytes(group: Group) -> None:
    for source in range(group.size):
        for payload in PAYLOADS:
            assert group.broadcast_bytes(payload if group.index == source else None, source) == payload
    if group.size > 1:
        group.traffic.clear()
        group.broadcast_bytes(PAYLOADS[-1] if group.index == 0 else None)
        assert group.traffic.sent_bytes == {"broadcast": 8 + len(PAYLOADS[-1]) if group.index == 0 else 0}


def sum_of(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).double().sum(0).to(tensors[0].dtype)


def labels_of_beats(world: World) -> list[str]:
    """What the monitor is told, one label before each collective."""
    labels: list[str] = []
    group = Group(
        "ring",
        world.group.ranks,
        world.rank,
        world.comm,
        world.comm.get_world_group() if world.comm else None,
        labels.append,
    )
    x, rows = torch.ones(group.size, 2), [1] * group.size
    group.all_reduce(x.clone())
    group.all_gather(x.new_empty(group.size, *x.shape), x)
    group.reduce_scatter(x.new_empty(2), x)
    group.all_to_all(torch.empty_like(x), x)
    group.all_to_all_uneven(torch.empty_like(x), x, rows, rows)
    group.broadcast(x)
    return labels


def rank_sum_and_pid(world: World, twice: bool) -> tuple[float, int]:
    """The sum of all rank numbers + 1; with `twice` the world is closed here too, before the pool closes it."""
    total = world.group.all_reduce(torch.tensor([world.rank + 1.0])).item()
    if twice:
        world.close()
    return total, os.getpid()


def refusal_of(world: World, layout: Layout) -> tuple[str, float]:
    """The message of `build_mesh`, and a sum over the ranks to show that the world works on."""
    message = ""
    try:
        build_mesh(layout, world)
    except LayoutError as error:
        message = str(error)
    return message, world.group.all_reduce(torch.ones(1)).item()


# The exchange


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeCase:
    """Partials of every rank of the caller's KVP group; `keep_Z` marks the ranks that hold anything at all."""

    num_heads: int
    num_tokens: int
    width: int
    dtype: torch.dtype
    keep_Z: tuple[bool, ...]
    form: Form

    def partials(self, seed: int) -> tuple[Tensor, Tensor]:
        parts = len(self.keep_Z)
        out_ZTHD, lse_ZTH = random_partials(parts + 1, self.num_tokens, self.num_heads, self.width, self.dtype, seed)
        empty_Z = ~torch.tensor(self.keep_Z)
        return (
            out_ZTHD[:parts].masked_fill(empty_Z.view(-1, 1, 1, 1), 0.0),
            lse_ZTH[:parts].masked_fill(empty_Z.view(-1, 1, 1), -torch.inf),
        )


def exchange_cases(kvp: int) -> Iterator[ExchangeCase]:
    some = tuple(rank % 2 == 0 for rank in range(kvp))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for form in ("a2a", "ag_rs"):
            case = ExchangeCase(num_heads=9, num_tokens=5, width=8, dtype=dtype, keep_Z=(True,) * kvp, form=form)
            yield case
            yield replace(case, num_heads=kvp, width=80, num_tokens=1, keep_Z=some)
            yield replace(case, num_heads=2 * kvp, keep_Z=(False,) * (kvp - 1) + (True,))
            yield replace(case, num_heads=3, width=64, keep_Z=(False,) * kvp)
            yield replace(case, num_heads=12, num_tokens=17, keep_Z=some)


def check_exchange(world: World, layouts: list[Layout], transport: Transport = "collective") -> int:
    """Both forms against a dense merge of all ranks' partials, sliced to this rank's heads; the number of cases."""
    num_cases = 0
    for layout in layouts:
        mesh = build_mesh(layout, world)
        connect(mesh, world, CommConfig(transport=transport))
        for number, case in enumerate(exchange_cases(layout.kvp)):
            _check_exchange_case(mesh.kvp, case, 100 * mesh.coords.tpa_rank + number, world.device)
            num_cases += 1
        check_attention_and_exchange(mesh.kvp, world.device)
    return num_cases


def _check_exchange_case(group: Group, case: ExchangeCase, seed: int, device: torch.device) -> None:
    out_ZTHD, lse_ZTH = case.partials(seed)
    heads = -(-case.num_heads // group.size)
    mine = slice(group.index * heads, (group.index + 1) * heads)
    want_THD, _ = dense_merge(out_ZTHD, lse_ZTH)
    want_THD = torch.nn.functional.pad(want_THD, (0, 0, 0, heads * group.size - case.num_heads))[:, mine]
    group.traffic.clear()
    exchange = Exchange(group, heads, case.form)
    out_ThD = exchange(out_ZTHD[group.index].to(device), lse_ZTH[group.index].to(device)).cpu()
    assert out_ThD.dtype == case.dtype
    rescaled = case.form == "ag_rs" and case.dtype != torch.float32  # rounded before the sum, and in every partial sum
    assert_close(out_ThD, want_THD, TOLERANCES[case.dtype].times(2.0 if rescaled else 1.0))
    nothing = (want_THD == 0).all(-1)
    assert nothing[0].all(), "token 0 has no keys"
    assert not out_ThD[nothing].count_nonzero(), "padding heads and empty tokens are exactly 0"
    if case.form == "a2a" and group.size > 1:
        volume = (group.size - 1) * case.num_tokens * heads * (case.width * case.dtype.itemsize + 4)
        assert group.traffic.sent_bytes == {"all_to_all": volume}
        assert group.traffic.calls == {"all_to_all": 1}


def check_attention_and_exchange(group: Group, device: torch.device) -> None:
    """Each rank attends over its own pages; after the exchange its heads are exact over the whole sequences."""
    shape = Shape(
        lengths=(41, 3, 18, 1),
        queries=(20, 1, 4, 1),
        num_heads=9,
        num_kv_heads=3,
        kvp=group.size,
        kvp_rank=group.index,
    )
    case, heads = build_case(shape), -(-9 // group.size)
    want_THV, _ = case.reference(all_ranks=True)
    want_THV = torch.nn.functional.pad(want_THV, (0, 0, 0, heads * group.size - 9))
    forms: tuple[Form, ...] = ("a2a", "ag_rs")
    for form in forms:
        out_THV, lse_TH = attend(*case.arguments)
        out_ThV = Exchange(group, heads, form)(out_THV.to(device), lse_TH.to(device)).cpu()
        assert_close(out_ThV, want_THV[:, group.index * heads : (group.index + 1) * heads])


def check_peers(world: World, layout: Layout) -> None:
    """Every kernel on a channel between these ranks, with hostile values, sizes that grow and shrink, and views."""
    from helix.comm.symmetric import open_symmetric_memory
    from helix.kernels import triton_peers as peers
    from tests.kernels import peers_cases as cases

    memory = open_symmetric_memory(world, peers.inbox_bytes(world.size, cases.REGION_BYTES), peers.ABSENT_BYTE)
    one = cases.channel(list(memory.addresses), world.rank, world.device)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        cases.check_all(one, dtype, world.device, long=True)
    torch.cuda.synchronize()
    world.group.all_reduce(torch.zeros(1))
    assert bool((memory.buffer == peers.ABSENT_BYTE).all()), "what was read is absent again"


def check_chunks_side_by_side(world: World) -> None:
    """Exchanges of several chunks on streams of their own, many times over, in a graph: each gets its own peers'."""
    mesh = build_mesh(Layout(kvp=world.size, tpf=world.size), world)
    connect(mesh, world, CommConfig(transport="symmetric", overlap=3))
    exchange = Exchange(mesh.kvp, 4)
    inputs, wants = [], []
    for chunk in range(3):
        out_ZTHD, lse_ZTH = random_partials(world.size, 30 + chunk, 4 * world.size, 64, torch.bfloat16, chunk)
        inputs.append((out_ZTHD[world.rank].to(world.device), lse_ZTH[world.rank].to(world.device)))
        mine = slice(4 * world.rank, 4 * world.rank + 4)
        wants.append(dense_merge(out_ZTHD, lse_ZTH)[0][:, mine])
    streams = [torch.cuda.Stream() for _ in inputs]

    def step() -> list[Tensor]:
        results = []
        for chunk, (stream, (out_THD, lse_TH)) in enumerate(zip(streams, inputs, strict=True)):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                results.append(exchange(out_THD, lse_TH, chunk=chunk))
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        return results

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        got = [step() for _ in range(5)]
    for _ in range(20):
        graph.replay()
    for results in got:
        for result, want in zip(results, wants, strict=True):
            assert_close(result.cpu(), want, TOLERANCES[torch.bfloat16])


def check_many_exchanges(world: World, replays: int) -> None:
    """Collectives right behind each other in a replayed graph, 50 in each, while either rank falls behind at random.

    Most of all exchanges, some with tiles smaller than a program, which threads of several warps read together.
    """
    mesh = build_mesh(Layout(kvp=world.size, tpf=world.size), world)
    connect(mesh, world, CommConfig(transport="symmetric", overlap=1))
    cases = []
    for tokens, heads, width in ((1, 16, 512), (8, 16, 512), (64, 16, 512), (3, 5, 16), (2, 4, 80)):
        out_ZTHD, lse_ZTH = random_partials(world.size, tokens, heads, width, torch.bfloat16, tokens)
        part = -(-heads // world.size)
        want = torch.nn.functional.pad(dense_merge(out_ZTHD, lse_ZTH)[0], (0, 0, 0, part * world.size - heads))
        mine = out_ZTHD[world.rank].to(world.device), lse_ZTH[world.rank].to(world.device)
        cases.append((Exchange(mesh.kvp, part), *mine, want[:, part * world.rank :][:, :part]))
    ones = torch.ones(4096, dtype=torch.bfloat16, device=world.device)

    def step() -> tuple[list[Tensor], Tensor]:
        x = ones.clone()
        results = [exchange(out_THD, lse_TH) for exchange, out_THD, lse_TH, _ in cases]
        return results, mesh.world.all_reduce(x)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        got = [step() for _ in range(8)]
    chance = random.Random(world.rank)
    for _ in range(replays):
        if chance.random() < 0.3:
            torch.cuda._sleep(chance.randrange(1_000_000))
        if chance.random() < 0.1:
            time.sleep(0.002 * chance.random())
        graph.replay()
    torch.cuda.synchronize()
    mesh.world.check()
    for results, total in got:
        for result, (_, _, _, want) in zip(results, cases, strict=True):
            assert_close(result.cpu(), want, TOLERANCES[torch.bfloat16])
        assert bool((total == world.size).all())


def refusal_of_symmetric(world: World) -> str:
    """What is said where ``comm.transport: symmetric`` cannot be; `auto` and `collective` give no direct way."""
    mesh = build_mesh(Layout(kvp=world.size, tpf=world.size), world)
    for setting in ("auto", "collective"):
        connect(mesh, world, CommConfig(transport=setting))
        assert mesh.world.direct is mesh.kvp.direct is None
    try:
        connect(mesh, world, CommConfig(transport="symmetric"))
    except ConfigError as error:
        return str(error)
    return ""


def bench_small(world: World) -> exchange_bench.ExchangeReport:
    """`helix bench exchange` with two sizes of each kind."""
    with (
        mock.patch.object(exchange_bench, "EXCHANGES", ((1, 4), (3, 5))),
        mock.patch.object(exchange_bench, "REDUCED_KB", (1, 4)),
    ):
        return exchange_bench.measure(world)
