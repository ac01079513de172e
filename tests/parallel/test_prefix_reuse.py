"""Shared page rows change no token: on every KVP, in MLA, with rotary that depends on the prompt, under preemption."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel import jobs
from tests.parallel.test_parity import settings
from tests.ranks import RankPool
from tests.tiny import TinyModels, prompt

NUM_TOKENS = 14


def conversation(answer: list[int]) -> list[list[list[int]]]:
    """Batches: a question; then the next turn, twins and branches of it, and strangers; then all of that again."""
    start = prompt(40)
    turn = [*start, *answer, 7, 8]
    mixed = [turn, turn, start[:24], [*start[:25], *prompt(9, 1)], prompt(30, 2), start, start[:1]]
    return [[start], mixed, mixed[::-1]]


def run(ranks: RankPool, kvp: int, config: dict[str, Any], rounds: list[list[list[int]]]) -> Any:
    return ranks.run(kvp, jobs.drive_static, config, jobs.tokens_in_rounds, rounds, NUM_TOKENS)[0]


@pytest.mark.parametrize(
    ("family", "kvp", "page_tokens", "num_rows"),
    [("llama", 1, 4, 64), ("smollm", 3, 4, 64), ("deepseek_v3", 2, 4, 64), ("llama", 1, 2, 38), ("smollm", 3, 1, 26)],
)
def test_hits_equal_transformers(
    ranks: RankPool, tiny: TinyModels, family: str, kvp: int, page_tokens: int, num_rows: int
) -> None:
    """The last two have hardly more rows than the longest request needs: contents go, and requests are preempted."""
    rounds = conversation(tiny.greedy(family, prompt(40), NUM_TOKENS))
    config = settings(
        tiny.path(family),
        {"kvp": kvp},
        cache={"page_tokens": page_tokens, "num_page_rows": num_rows, "prefix_reuse": True},
        engine={"max_batch": 5, "check_schedule": True},
    )
    tokens, num_reused, num_preemptions = run(ranks, kvp, config, rounds)
    for batch, got in zip(rounds, tokens, strict=True):
        assert got == [tiny.greedy(family, one, NUM_TOKENS) for one in batch]
    assert num_reused > 100
    assert (num_preemptions > 0) == (num_rows < 64)


def test_rotary_that_depends_on_the_prompt(ranks: RankPool, tiny: TinyModels) -> None:
    """A longer prompt gives its first tokens other keys, so their rows must not be taken for the same."""
    rounds = conversation(prompt(NUM_TOKENS, 5))
    answers = []
    for reuse in (True, False):
        cache = {"num_page_rows": 64, "prefix_reuse": reuse}
        config = settings(tiny.path("llama_dynamic"), {"kvp": 2}, cache=cache)
        tokens, num_reused, _ = run(ranks, 2, config, rounds)
        assert (num_reused > 0) == reuse
        answers.append(tokens)
    assert answers[0] == answers[1]
