"""Several ranks on one GPU, joined by gloo: every layout with the kernels of the device, on a single one."""

from __future__ import annotations

from typing import Any

import pytest

from helix.layout import Layout
from tests.parallel import comm_jobs
from tests.parallel.test_comm import LAYOUTS
from tests.parallel.test_parity import border_prompts, check_against_transformers, settings
from tests.ranks import RankPool
from tests.tiny import TinyModels

pytestmark = pytest.mark.gpu

CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"kvp": 2}),
    ("llama", {"kvp": 3, "tpa": 2}),
    ("llama", {"tpa": 2}),
    ("smollm", {"kvp": 3}),
    ("qwen3", {"kvp": 2, "tpa": 2}),
    ("qwen2", {"kvp": 8}),
    ("deepseek_v3", {"kvp": 4}),
    ("mixtral", {"kvp": 2, "tpa": 2, "tpf": 2, "ep": 2}),
    ("deepseek_v2_moe", {"kvp": 4, "tpf": 1, "ep": 4}),
]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_collective_in_every_group(crowded_ranks: RankPool, num_ranks: int) -> None:
    crowded_ranks.run(num_ranks, comm_jobs.check_collectives, LAYOUTS[num_ranks])


def test_exchange_equals_dense_merge(crowded_ranks: RankPool) -> None:
    assert crowded_ranks.run(3, comm_jobs.check_exchange, [Layout(kvp=3, tpf=3)]) == [30] * 3


@pytest.mark.parametrize(("family", "layout"), CASES, ids=str)
def test_layout_equals_transformers(
    crowded_ranks: RankPool, tiny: TinyModels, family: str, layout: dict[str, Any]
) -> None:
    config = settings(tiny.path(family), layout, engine={"device": "cuda"})
    size = layout.get("kvp", 1) * layout.get("tpa", 1)
    check_against_transformers(crowded_ranks, tiny, family, config, size, border_prompts(layout.get("kvp", 1)))


def test_symmetric_memory_is_refused_with_the_reason(crowded_ranks: RankPool) -> None:
    for message in crowded_ranks.run(2, comm_jobs.refusal_of_symmetric):
        assert message == "comm.transport=symmetric: several ranks share a GPU; use auto or collective"
