"""Exactness of mixture of experts as data: TPF x EP grids, both ways of dispatch, against transformers.

TPF = N with `local` dispatch is in test_parity; here is what only models with experts have.
"""

from __future__ import annotations

import pytest

from tests.parallel.test_parity import border_prompts, check_against_transformers, settings
from tests.ranks import RankPool
from tests.tiny import TinyModels

# family, (kvp, tpa, tpf, ep), dispatch. Experts: mixtral 7, qwen3_moe 9, deepseek_v2_moe 8, deepseek_v3_moe 10.
CASES = [
    ("mixtral", (1, 1, 1, 1), "alltoall"),
    ("mixtral", (2, 1, 1, 2), "local"),
    ("mixtral", (1, 2, 2, 1), "alltoall"),
    ("mixtral", (2, 2, 2, 2), "local"),
    ("mixtral", (6, 1, 1, 6), "alltoall"),
    ("qwen3_moe", (2, 1, 1, 2), "alltoall"),
    ("qwen3_moe", (3, 1, 1, 3), "local"),
    ("qwen3_moe", (2, 2, 1, 4), "local"),
    ("qwen3_moe", (3, 2, 2, 3), "alltoall"),
    ("deepseek_v2_moe", (2, 1, 1, 2), "local"),
    ("deepseek_v2_moe", (3, 1, 1, 3), "alltoall"),
    ("deepseek_v2_moe", (4, 1, 2, 2), "alltoall"),
    ("deepseek_v2_moe", (6, 1, 3, 2), "local"),
    ("deepseek_v3_moe", (1, 1, 1, 1), "alltoall"),
    ("deepseek_v3_moe", (3, 1, 1, 3), "local"),
    ("deepseek_v3_moe", (4, 1, 1, 4), "local"),
    ("deepseek_v3_moe", (6, 1, 2, 3), "alltoall"),
]


@pytest.mark.parametrize(("family", "grid", "dispatch"), CASES)
def test_grid_equals_transformers(
    ranks: RankPool, tiny: TinyModels, family: str, grid: tuple[int, int, int, int], dispatch: str
) -> None:
    kvp, tpa, tpf, ep = grid
    config = settings(tiny.path(family), {"kvp": kvp, "tpa": tpa, "tpf": tpf, "ep": ep}, comm={"dispatch": dispatch})
    check_against_transformers(ranks, tiny, family, config, kvp * tpa, border_prompts(kvp))
