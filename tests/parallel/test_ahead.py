"""Steps launched before the tokens of the last one are known: the same answers as one step at a time, whatever happens.

Random traffic (stop tokens, lengths, cancellations, a pool that is too small, every way of choosing tokens) goes
through an engine that plans ahead, on one and on two ranks, with the schedules compared in every step. Each answer
must be the one that the request gets from an engine that has room for all of them and does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any
from unittest import mock

import pytest

from helix.comm.world import World
from helix.engine import build, draw
from helix.engine.engine import Engine
from helix.engine.generation import Generation
from helix.engine.sampling import SamplingParams
from tests.parallel import jobs
from tests.parallel.test_parity import settings
from tests.ranks import RankPool
from tests.tiny import TinyModels, prompt

NUM_REQUESTS = 30


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request got; `is_cut` where it was cancelled on the way."""

    token_ids: list[int]
    finish_reason: str | None
    error: str | None
    is_cut: bool


def random_params(random: Random) -> SamplingParams:
    """Greedy, drawn, ranked, or, now and then, what only the host can choose."""
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"min_p": 0.05},
        {"top_k": 4},
        {"top_k": 30, "top_p": 0.9},
        {"top_p": 0.95, "temperature": 1.5},
    ]
    if random.random() < 0.08:
        ways = [{"temperature": 0.0, "logprobs": 1}, {"presence_penalty": 1.0}]
    max_tokens = random.choice([1, 2, 5, 12, 45])
    return SamplingParams(
        **random.choice(ways),
        seed=random.randrange(1 << 30),
        max_tokens=max_tokens,
        min_tokens=random.choice([0, 0, 0, 3]) if max_tokens > 3 else 0,
        stop_token_ids=random.sample(range(97), random.choice([0, 0, 6])),
        ignore_eos=True,
    )


def workload(seed: int) -> list[tuple[list[int], SamplingParams]]:
    random = Random(seed)
    return [(prompt(random.randint(1, 25), number), random_params(random)) for number in range(NUM_REQUESTS)]


def answers_at_ease(engine: Engine, work: list[tuple[list[int], SamplingParams]]) -> list[Answer]:
    outputs = engine.generate([ids for ids, _ in work], [params for _, params in work])
    return [Answer(one.token_ids, one.finish_reason, one.error, False) for one in outputs]


def answers_in_traffic(
    engine: Engine, work: list[tuple[list[int], SamplingParams]], seed: int
) -> tuple[list[Answer], int, int]:
    """Requests arrive and are cancelled between steps. Also counts preemptions, and steps under way between calls."""
    random = Random(seed)
    waiting = [engine.prepare(ids, params, priority=random.choice([0, 0, 1])) for ids, params in work]
    everyone, cut, num_under_way = list(waiting), set[int](), 0
    running: list[Generation] = []
    while waiting or engine.has_work:
        if waiting and (not running or random.random() < 0.4):
            arrived, waiting = waiting[:3], waiting[3:]
            engine.submit(arrived)
            running += arrived
        running = [one for one in running if not one.finished]
        if running and random.random() < 0.03:
            victim = random.choice(running)
            engine.cancel([victim])
            running.remove(victim)
            cut.add(victim.request.request_id)
        engine.step()
        num_under_way += engine._core._under_way is not None
    assert engine._core._under_way is None
    assert engine.num_free_rows == engine.num_page_rows
    answers = [Answer(one.token_ids, one.finish_reason, one.error, one.request.request_id in cut) for one in everyone]
    return answers, engine.num_preemptions, num_under_way


def check_answers(at_ease: list[Answer], found: list[Answer]) -> None:
    for number, (want, got) in enumerate(zip(at_ease, found, strict=True)):
        if got.is_cut:
            assert got.token_ids == want.token_ids[: len(got.token_ids)], number
        else:
            assert got == want, number


def drive_undecided(world: World, settings: dict[str, Any], static: bool, window: int, seed: int, work: Any) -> Any:
    """Traffic through an engine whose device ranks `window` candidates only, so that some rows need the host."""
    mode = "static" if static else "eager"
    with mock.patch.object(build, "choose_mode", return_value=mode), mock.patch.object(draw, "WINDOW", window):
        return jobs.drive(world, settings, answers_in_traffic, work, seed)


@pytest.mark.parametrize(
    ("family", "kvp", "static", "window", "seed"),
    [("smollm", 1, True, 1024, 1), ("smollm", 1, False, 12, 2), ("llama", 2, True, 12, 3)],
)
def test_traffic_ahead_equals_one_step_at_a_time(
    ranks: RankPool, tiny: TinyModels, family: str, kvp: int, static: bool, window: int, seed: int
) -> None:
    work = workload(seed)
    # Room for little more than the longest sequence.
    small = {"page_tokens": 4, "num_page_rows": -(-84 // (4 * kvp))}
    base = settings(tiny.path(family), {"kvp": kvp}, engine={"max_batch": 6, "prefill_chunk": 24, "ahead": "off"})
    at_ease = ranks.run(1, jobs.drive, base | {"layout": {"kvp": 1}}, answers_at_ease, work)[0]
    ahead = base | {"engine": base["engine"] | {"ahead": "on"}, "cache": small}
    found, num_preemptions, num_under_way = ranks.run(kvp, drive_undecided, ahead, static, window, seed, work)[0]
    check_answers(at_ease, found)
    assert num_preemptions > 0
    assert num_under_way > 20
    assert sum(one.is_cut for one in found) > 1
    assert {one.finish_reason for one in found} >= {"stop", "length"}
