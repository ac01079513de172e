"""Decode steps from static inputs: padding changes nothing, in every layout and whatever batch mates do."""

from __future__ import annotations

import pytest

from tests.parallel import jobs
from tests.parallel.test_parity import border_prompts, settings
from tests.ranks import RankPool
from tests.tiny import TinyModels, prompt

NUM_TOKENS = 40
# One bucket has its exact size, the others pad.
MAX_BATCH = 6


@pytest.mark.parametrize(
    ("family", "kvp", "tpa"),
    [("llama", 1, 1), ("smollm", 3, 1), ("qwen3", 2, 2), ("deepseek_v3", 2, 1), ("deepseek_v2_moe", 3, 1)],
)
def test_static_steps_equal_transformers(ranks: RankPool, tiny: TinyModels, family: str, kvp: int, tpa: int) -> None:
    config = settings(tiny.path(family), {"kvp": kvp, "tpa": tpa}, engine={"max_batch": MAX_BATCH})
    prompts = [*border_prompts(kvp), prompt(33, 3), prompt(50, 4)]
    tokens = ranks.run(kvp * tpa, jobs.drive_static, config, jobs.logits_and_tokens, prompts, NUM_TOKENS)[0][1]
    for one, got in zip(prompts, tokens, strict=True):
        assert got == tiny.greedy(family, one, NUM_TOKENS), f"prompt of {len(one)} tokens"


@pytest.mark.parametrize("kvp", [1, 2])
def test_static_steps_survive_preemption(ranks: RankPool, tiny: TinyModels, kvp: int) -> None:
    """Rows of requests that were preempted come back with other pages, at other places of the batch."""
    prompts = [prompt(20 + 3 * seed, seed) for seed in range(6)]
    rows = -(-90 // (4 * kvp)) + 1
    config = settings(tiny.path("smollm"), {"kvp": kvp}, cache={"num_page_rows": rows}, engine={"max_batch": MAX_BATCH})
    tokens, preemptions = ranks.run(kvp, jobs.drive_static, config, jobs.tokens_under_pressure, prompts, NUM_TOKENS)[0]
    assert preemptions > 0
    assert tokens == [tiny.greedy("smollm", one, NUM_TOKENS) for one in prompts]
