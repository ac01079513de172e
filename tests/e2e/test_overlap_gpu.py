"""HOP-B on GPUs: chunks on two streams, captured and replayed, give what the lockstep order gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helix import Engine, SamplingParams
from helix.bench.decode import Cell, clear, place_requests
from helix.bench.trace import read_events, trace_decode
from helix.kernels import attend, merge
from helix.layers.overlap import Chunk, attend_and_exchange, cut
from tests.tiny import TinyModels, prompt

pytestmark = pytest.mark.gpu
CYCLES = 200_000  # about a tenth of a millisecond, far longer than the kernels of these tests


@pytest.mark.parametrize("slow", ["attention", "exchange"])
@pytest.mark.parametrize("num_chunks", [2, 3, 7])
def test_replayed_chunks_equal_lockstep(slow: str, num_chunks: int) -> None:
    """One side is slow, so that a wait that is missing, or memory given out too early, shows."""
    batch, heads, width, page_tokens, pages = 7, 4, 64, 16, 12
    torch.manual_seed(0)
    pool = torch.randn(batch * pages, page_tokens, 1, width, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(batch * pages, device="cuda").int().view(batch, pages)
    start, seen = torch.arange(batch + 1, device="cuda"), torch.zeros(batch, dtype=torch.int64, device="cuda")
    q_THD = torch.randn(batch, heads, width, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream(priority=-1)

    def delay(what: str) -> None:
        if what == slow:
            torch.cuda._sleep(CYCLES)

    def attend_chunk(chunk: Chunk) -> tuple[Tensor, Tensor]:
        delay("attention")
        return attend(q_THD[chunk.tokens], pool, pool, *chunk.tables, 0.125)

    def exchange(out_THD: Tensor, lse_TH: Tensor, *, chunk: int) -> Tensor:
        """As long a way as with peers: a message is made, waited for and merged."""
        message = torch.stack((out_THD, out_THD))
        delay("exchange")
        return merge(message, lse_TH.expand(2, -1, -1))[0]

    def layers(count: int, side: torch.cuda.Stream | None) -> list[Tensor]:
        return [
            attend_and_exchange(cut(count, table, start, seen), side, attend_chunk, exchange) * 1.0 for _ in range(4)
        ]

    graph = captured(lambda: layers(num_chunks, stream))
    for length in (5, 190, 0, 64):
        seen.copy_(torch.arange(batch, device="cuda") * 3 % 7 + max(length - 7, 0))
        want = layers(1, None)[0]
        for got in graph():
            torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)
        for got in layers(num_chunks, stream):
            torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)


def captured(run: Callable[[], list[Tensor]]) -> Callable[[], list[Tensor]]:
    """`run` as a graph."""
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = run()

    def replay() -> list[Tensor]:
        graph.replay()
        return outs

    return replay


def sections(path: str, overlap: int, **changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "model": {"path": path, "dtype": "float32"},
        "cache": {"page_tokens": 16, "num_page_rows": 64},
        "comm": {"overlap": overlap},
        "engine": {"device": "cuda", "max_batch": 7, "max_context": 128, "graphs": "on"},
    }
    return base | changes


def check_tokens(tiny: TinyModels, family: str, mode: str, **changes: Any) -> None:
    prompts = [prompt(length, length) for length in (1, 15, 16, 17, 40, 3, 33)]
    with Engine(**sections(tiny.path(family), 3, **changes)) as engine:
        assert engine._core.runner.mode == mode
        outputs = engine.generate(prompts, SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True))
    for one, output in zip(prompts, outputs, strict=True):
        assert output.token_ids == tiny.greedy(family, one, 30)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_one_rank_in_chunks_equals_transformers(tiny: TinyModels, family: str) -> None:
    check_tokens(tiny, family, "graph")


@pytest.mark.slow
@pytest.mark.parametrize(("family", "space"), [("llama", "auto"), ("deepseek_v3", "latent"), ("deepseek_v3", "value")])
def test_two_ranks_in_chunks_equal_transformers(tiny: TinyModels, family: str, space: str) -> None:
    """On two GPUs through NCCL and in graphs, on one through gloo and eagerly."""
    mode = "graph" if torch.cuda.device_count() > 1 else "eager"
    changes = {"layout": {"kvp": 2}, "comm": {"overlap": 3, "exchange_space": space}}
    engine = {"device": "cuda", "max_batch": 7, "max_context": 128, "graphs": "auto"}
    check_tokens(tiny, family, mode, engine=engine, **changes)


def test_trace_of_a_graph(tiny: TinyModels, tmp_path: Path) -> None:
    """Replayed steps show their kernels, and the eager one its ranges on the device too."""
    with Engine(**sections(tiny.path("llama"), 2)) as engine:
        requests = place_requests(engine._core, Cell(batch=4, context=40), 9)
        assert requests is not None
        written = trace_decode(engine._core, tmp_path / "trace.json")
        assert written is not None
        events = read_events(written)
        clear(engine._core, requests)
    kernels = [event for event in events if event.get("cat") == "kernel"]
    assert sum("attend_runs" in event["name"] for event in kernels) >= 4 * 2 * 2
    names = {event["name"] for event in events if event.get("cat") == "gpu_user_annotation"}
    assert {"attention chunk 0", "attention chunk 1"} <= names
