"""Choosing tokens on the device: the host's sampler gives the same ones, or the device says that it cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helix.engine import draw
from helix.engine.draw import choose_tokens
from helix.engine.sampler import SampleRow, sample
from helix.engine.sampling import SamplingParams
from helix.engine.scheduler import NOT_FINITE, UNDECIDED

DRAWN: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"temperature": 3.0}, {"min_p": 0.2}, {"temperature": 1e-300}]
RANKED: list[dict[str, Any]] = [
    *DRAWN,
    {"top_k": 1},
    {"top_k": 7, "temperature": 2.0},
    {"top_k": 40, "top_p": 0.8},
    {"top_p": 0.3},
    {"top_p": 0.97, "min_p": 0.01},
    {"top_p": 1e-9},
]


def rows_of(ways: list[dict[str, Any]], seed: int) -> list[SampleRow]:
    return [SampleRow(SamplingParams(**way), [1], [2, 3], seed + index, frozenset()) for index, way in enumerate(ways)]


def numbers_of(rows: list[SampleRow]) -> torch.Tensor:
    return torch.tensor([row.numbers(len(row.output_ids)) for row in rows], dtype=torch.float64)


@settings(max_examples=60, deadline=None)
@given(
    vocab=st.sampled_from([3, 97, 256, 1500]),
    seed=st.integers(0, 1 << 20),
    window=st.sampled_from([1, 8, 50, 1024]),
    spread=st.sampled_from([0.0, 0.3, 4.0]),
    order=st.permutations(range(len(RANKED))),
)
def test_a_token_is_the_host_samplers_or_undecided(
    vocab: int, seed: int, window: int, spread: float, order: list[int]
) -> None:
    """Logits in bfloat16 steps, so that equal ones lie at every border; some tokens are banned."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(len(RANKED), vocab, generator=generator) * spread).bfloat16().float()
    logits[:, torch.rand(vocab, generator=generator) < 0.1] = -torch.inf
    logits[:, 0] = 0.0
    rows = rows_of(RANKED, seed)
    want = torch.tensor([one.token_id for one in sample(logits, rows)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draw, "WINDOW", window)
        got = choose_tokens(logits, numbers_of(rows), "ranked")
        assert torch.equal(got[order], choose_tokens(logits[order], numbers_of(rows)[order], "ranked"))
    decided = got != UNDECIDED
    assert torch.equal(got[decided], want[decided])
    assert decided[: len(DRAWN)].all(), "rows without top-k and top-p need no ranks"
    if window >= vocab:
        assert decided.all()
    plain = choose_tokens(logits[: len(DRAWN)], numbers_of(rows)[: len(DRAWN)], "drawn")
    assert torch.equal(plain, want[: len(DRAWN)])


def test_most_nuclei_are_inside_the_window() -> None:
    logits = torch.randn(64, 5000, generator=torch.Generator().manual_seed(1)) * 4
    rows = rows_of([{"top_p": 0.95}] * 32 + [{"top_k": 50}] * 32, 0)
    assert (choose_tokens(logits, numbers_of(rows), "ranked") >= 0).all()


@pytest.mark.parametrize("choice", ["best", "drawn", "ranked"])
def test_a_row_that_is_not_finite_fails_alone(choice: Any) -> None:
    logits = torch.tensor([[0.0, 90.0, 1.0], [1.0, torch.nan, 2.0], [1.0, torch.inf, 0.0], [-torch.inf] * 3])
    numbers = torch.tensor([[1.0, 2.0, 0.9, 0.1, 0.4]] * 4, dtype=torch.float64)
    assert choose_tokens(logits, numbers, choice).tolist() == [1, NOT_FINITE, NOT_FINITE, NOT_FINITE]


def test_a_greedy_choice_draws_nothing() -> None:
    numbers = torch.tensor([[1e300, 0.0, 1.0, 0.0, place / 64] for place in range(64)], dtype=torch.float64)
    logits = torch.tensor([[1.0, 2.0, 0.0]]).repeat(64, 1)
    assert choose_tokens(logits, numbers, "best").tolist() == [1] * 64
    assert set(choose_tokens(logits, numbers, "drawn").tolist()) == {0, 1, 2}
