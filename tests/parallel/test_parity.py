"""Exactness as data: every layout x every family gives transformers' logits and greedy tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helix.layout import Layout, layout_problem
from model_zoo import spec_from_config
from tests.parallel import jobs
from tests.ranks import RankPool
from tests.tiny import FAMILIES, TinyModels, prompt

PAGE_TOKENS = 4
NUM_TOKENS = 48
LAYOUTS = [(1, 1), (2, 1), (3, 1), (4, 1), (6, 1), (1, 2), (2, 2), (3, 2)]

# Latent attention and experts have their own lists (test_mla_parity, test_moe_parity); here they meet TPF = N.
SHORT = ("deepseek_v2", "deepseek_v3", "mixtral", "qwen3_moe", "deepseek_v2_moe", "deepseek_v3_moe")
SHORT_LAYOUTS = [(1, 1), (3, 1), (2, 2)]


def legal_cases() -> list[tuple[str, int, int]]:
    """(family, kvp, tpa) of every layout that the family's heads allow."""
    cases = []
    for family, config in FAMILIES.items():
        spec = spec_from_config(config().to_dict())
        for kvp, tpa in SHORT_LAYOUTS if family in SHORT else LAYOUTS:
            if layout_problem(spec, Layout(kvp=kvp, tpa=tpa, tpf=kvp * tpa)) is None:
                cases.append((family, kvp, tpa))
    return cases


def settings(path: str, layout: dict[str, Any], **sections: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "model": {"path": path, "dtype": "float32"},
        "layout": layout,
        "cache": {"page_tokens": PAGE_TOKENS, "num_page_rows": 200},
        "engine": {"device": "cpu", "max_batch": 16, "prefill_chunk": 20, "check_schedule": True},
    }
    return base | {name: base.get(name, {}) | values for name, values in sections.items()}


def border_prompts(kvp: int) -> list[list[int]]:
    """Lengths 1, page - 1, page, page + 1, row - 1, row, row + 1."""
    row = PAGE_TOKENS * kvp
    lengths = dict.fromkeys([1, PAGE_TOKENS - 1, PAGE_TOKENS, PAGE_TOKENS + 1, row - 1, row, row + 1])
    return [prompt(length) for length in lengths]


def check_against_transformers(
    ranks: RankPool, tiny: TinyModels, family: str, config: dict[str, Any], num_ranks: int, prompts: list[list[int]]
) -> None:
    logits, tokens = ranks.run(num_ranks, jobs.drive, config, jobs.logits_and_tokens, prompts, NUM_TOKENS)[0]
    for one, got in zip(prompts, logits, strict=True):
        np.testing.assert_allclose(got, tiny.logits(family, one).numpy(), atol=1e-4, rtol=0)
    for one, got in zip(prompts, tokens, strict=True):
        assert got == tiny.greedy(family, one, NUM_TOKENS), f"prompt of {len(one)} tokens"


@pytest.mark.parametrize(("family", "kvp", "tpa"), legal_cases())
def test_layout_equals_transformers(ranks: RankPool, tiny: TinyModels, family: str, kvp: int, tpa: int) -> None:
    config = settings(tiny.path(family), {"kvp": kvp, "tpa": tpa})
    check_against_transformers(ranks, tiny, family, config, kvp * tpa, border_prompts(kvp))


@pytest.mark.parametrize(("kvp", "tpa"), [(2, 1), (3, 1), (3, 2)])
def test_gather_and_reduce_form(ranks: RankPool, tiny: TinyModels, kvp: int, tpa: int) -> None:
    config = settings(tiny.path("llama"), {"kvp": kvp, "tpa": tpa}, comm={"merge": "ag_rs"})
    check_against_transformers(ranks, tiny, "llama", config, kvp * tpa, border_prompts(kvp))


# 9 heads leave the last of 4 ranks without one; qwen2 has biases on q, k and v, qwen3 norms of the heads.
@pytest.mark.parametrize(
    ("family", "kvp", "tpa", "merge"), [("smollm", 4, 1, "a2a"), ("qwen2", 3, 1, "ag_rs"), ("qwen3", 2, 2, "a2a")]
)
def test_gathered_queries(ranks: RankPool, tiny: TinyModels, family: str, kvp: int, tpa: int, merge: str) -> None:
    config = settings(tiny.path(family), {"kvp": kvp, "tpa": tpa}, comm={"query": "gather", "merge": merge})
    check_against_transformers(ranks, tiny, family, config, kvp * tpa, border_prompts(kvp))


@pytest.mark.parametrize(("family", "tpa"), [("llama", 6), ("smollm", 9), ("qwen2", 5), ("llama", 2)])
def test_plain_tensor_parallel_with_copied_kv(ranks: RankPool, tiny: TinyModels, family: str, tpa: int) -> None:
    config = settings(tiny.path(family), {"tpa": tpa, "duplicate_kv": True})
    check_against_transformers(ranks, tiny, family, config, tpa, border_prompts(1))


@pytest.mark.parametrize(("kvp", "tpa"), [(1, 1), (3, 1), (2, 2)])
def test_batch_equals_each_alone(ranks: RankPool, tiny: TinyModels, kvp: int, tpa: int) -> None:
    config = settings(tiny.path("llama"), {"kvp": kvp, "tpa": tpa})
    prompts = [*border_prompts(kvp)[1::2], prompt(70, 5)]
    together = ranks.run(kvp * tpa, jobs.drive, config, jobs.logits_and_tokens, prompts, NUM_TOKENS)[0][1]
    alone = ranks.run(kvp * tpa, jobs.drive, config, jobs.tokens_alone, prompts, NUM_TOKENS)[0]
    assert together == alone


@pytest.mark.parametrize("kvp", [1, 2, 3])
def test_preempted_equals_undisturbed(ranks: RankPool, tiny: TinyModels, kvp: int) -> None:
    prompts = [prompt(20 + 3 * seed, seed) for seed in range(6)]
    rows = -(-90 // (PAGE_TOKENS * kvp)) + 1
    config = settings(tiny.path("smollm"), {"kvp": kvp}, cache={"num_page_rows": rows})
    tokens, preemptions = ranks.run(kvp, jobs.drive, config, jobs.tokens_under_pressure, prompts, NUM_TOKENS)[0]
    assert preemptions > 0
    assert tokens == [tiny.greedy("smollm", one, NUM_TOKENS) for one in prompts]
