"""Decode steps cut into chunks: every layout still gives transformers' tokens, whatever the batch divides by."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest

from helix.comm.world import World
from helix.layers import attention, mla
from helix.layers.overlap import Chunk, attend_and_exchange
from tests.parallel import jobs
from tests.parallel.test_parity import border_prompts, settings
from tests.ranks import RankPool
from tests.tiny import TinyModels, prompt

NUM_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the covering list; `static` steps are padded, so that some chunks hold padding alone."""

    family: str
    kvp: int
    tpa: int = 1
    chunks: int
    comm: dict[str, str] = field(default_factory=dict)
    static: bool = False

    def __str__(self) -> str:
        ways = " ".join(self.comm.values())
        return f"{self.family} {self.kvp}x{self.tpa} chunks{self.chunks} {ways} {'static' if self.static else 'eager'}"


CASES = [
    Case(family="llama", kvp=1, chunks=2, static=True),
    Case(family="llama", kvp=3, chunks=2),
    Case(family="qwen3", kvp=2, tpa=2, chunks=3, static=True),
    Case(family="smollm", kvp=2, chunks=3, comm={"merge": "ag_rs"}),
    Case(family="deepseek_v3", kvp=2, chunks=3, comm={"exchange_space": "value"}, static=True),
    Case(family="deepseek_v2", kvp=3, chunks=2, comm={"query": "gather", "exchange_space": "latent"}),
    Case(family="deepseek_v2_moe", kvp=2, chunks=30),
]


def job(world: World, case: Case, config: dict[str, Any], prompts: list[list[int]]) -> Any:
    """Logits and greedy tokens, and (sequences, tokens of each chunk) of every attention that ran."""
    seen: set[tuple[int, ...]] = set()

    def spy(chunks: tuple[Chunk, ...], *rest: Any) -> Any:
        seen.add(tuple(chunk.tokens.stop - chunk.tokens.start for chunk in chunks))
        return attend_and_exchange(chunks, *rest)

    drive = jobs.drive_static if case.static else jobs.drive
    with mock.patch.object(attention, "attend_and_exchange", spy), mock.patch.object(mla, "attend_and_exchange", spy):
        return drive(world, config, jobs.logits_and_tokens, prompts, NUM_TOKENS), seen


@pytest.mark.parametrize("case", CASES, ids=str)
def test_chunks_equal_transformers(ranks: RankPool, tiny: TinyModels, case: Case) -> None:
    config = settings(
        tiny.path(case.family),
        {"kvp": case.kvp, "tpa": case.tpa},
        comm={"overlap": case.chunks, **case.comm},
        engine={"max_batch": 8},
    )
    prompts = [*border_prompts(case.kvp), prompt(33, 3)][-7:]
    results = ranks.run(case.kvp * case.tpa, job, case, config, prompts)
    (_, tokens), seen = results[0]
    for one, got in zip(prompts, tokens, strict=True):
        assert got == tiny.greedy(case.family, one, NUM_TOKENS), f"prompt of {len(one)} tokens"
    assert all(other == seen for _, other in results), "all ranks cut their steps alike"
    batch = 8 if case.static else len(prompts)
    count = min(case.chunks, batch)
    assert tuple(batch * (at + 1) // count - batch * at // count for at in range(count)) in seen
    cut_steps = [sizes for sizes in seen if len(sizes) > 1]
    assert all(max(sizes) - min(sizes) <= 1 for sizes in cut_steps)
