"""FP8 as data: layouts x models with FP8 weights and an FP8 cache give what one rank with the same FP8 gives.

Weights are exact: a slice has the values of the whole. A cached row depends on its token alone, but a key that another
order of summation moves by a rounding of fp32 may fall to e4m3's other neighbour, a sixteenth away; hence `BOUND` on
the logits (of magnitude 1) with an FP8 cache, far above what such single values do.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.parallel import jobs
from tests.parallel.test_parity import PAGE_TOKENS, border_prompts, settings
from tests.ranks import RankPool
from tests.tiny import TinyModels, prompt

BOUND = 2e-2
NUM_TOKENS = 12

# family, layout, comm
CASES = [
    ("llama", {"kvp": 3, "tpa": 2}, {}),
    ("qwen3_moe", {"kvp": 2, "tpa": 2, "tpf": 1, "ep": 4}, {}),
    ("deepseek_v3_moe", {"kvp": 4, "tpf": 2, "ep": 2}, {"exchange_space": "value", "query": "gather"}),
    ("deepseek_v2_moe", {"kvp": 3, "tpf": 3, "ep": 1}, {"merge": "ag_rs"}),
]


def fp8_settings(path: str, layout: dict[str, Any], **sections: Any) -> dict[str, Any]:
    base = settings(path, layout, cache={"dtype": "fp8"}, **sections)
    return base | {"model": base["model"] | {"quantize": "fp8"}}


@pytest.mark.parametrize(("family", "layout", "comm"), CASES)
def test_layouts_agree(
    ranks: RankPool, tiny: TinyModels, family: str, layout: dict[str, Any], comm: dict[str, Any]
) -> None:
    prompts = [*border_prompts(layout["kvp"])[1::2], prompt(43, 7)]
    found = []
    for sizes, given in ((layout, comm), ({"kvp": 1}, {})):
        config = fp8_settings(tiny.path(family), sizes, comm=given)
        count = sizes["kvp"] * sizes.get("tpa", 1)
        found.append(ranks.run(count, jobs.drive, config, jobs.logits_and_tokens, prompts, NUM_TOKENS)[0])
    for ours, wanted in zip(found[0][0], found[1][0], strict=True):
        np.testing.assert_allclose(ours, wanted, atol=BOUND, rtol=0)


@pytest.mark.parametrize(("family", "kvp"), [("llama", 2), ("deepseek_v3", 2)])
def test_batch_and_preemption_equal_each_alone(ranks: RankPool, tiny: TinyModels, family: str, kvp: int) -> None:
    prompts = [prompt(20 + 3 * seed, seed) for seed in range(4)]
    rows = -(-60 // (PAGE_TOKENS * kvp)) + 1
    few = fp8_settings(tiny.path(family), {"kvp": kvp})
    few["cache"] = few["cache"] | {"num_page_rows": rows}
    tokens, preemptions = ranks.run(kvp, jobs.drive, few, jobs.tokens_under_pressure, prompts, 24)[0]
    assert preemptions > 0
    roomy = fp8_settings(tiny.path(family), {"kvp": kvp})
    assert tokens == ranks.run(kvp, jobs.drive, roomy, jobs.tokens_alone, prompts, 24)[0]
