"""What the ranks of the pool run in the parallel tests (importable from their processes)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

from helix.comm.world import World
from helix.config import make_config
from helix.engine import build
from helix.engine.engine import Engine
from helix.engine.join import follow
from helix.engine.sampling import SamplingParams

Drive = Callable[[Engine], Any]


def drive(world: World, settings: dict[str, Any], driver: Drive, *args: Any) -> Any:
    """Rank 0 runs ``driver(engine, *args)`` on the engine that `settings` describe; the others follow."""
    if world.rank != 0:
        follow(make_config(None, **settings), world)
        return None
    with Engine(None, world=world, **settings) as engine:
        value = driver(engine, *args)
        total = engine.num_free_rows
        engine.generate([[1]], SamplingParams(max_tokens=1))
        assert engine.num_free_rows == total, "a finished request kept page rows"
        return value


def logits_and_tokens(
    engine: Engine, prompts: Sequence[list[int]], num_tokens: int
) -> tuple[list[Any], list[list[int]]]:
    """Logits of each prompt alone, then greedy tokens of all prompts in one batch."""
    logits = [engine.logits(prompt).numpy() for prompt in prompts]
    outputs = engine.generate(list(prompts), greedy(num_tokens))
    return logits, [output.token_ids for output in outputs]


def tokens_alone(engine: Engine, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
    """Greedy tokens of each prompt, one request at a time."""
    return [engine.generate([prompt], greedy(num_tokens))[0].token_ids for prompt in prompts]


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)


def tokens_under_pressure(engine: Engine, prompts: Sequence[list[int]], num_tokens: int) -> tuple[list[list[int]], int]:
    """Greedy tokens of a batch that does not fit the pool, and how often a request was preempted."""
    outputs = engine.generate(list(prompts), greedy(num_tokens))
    return [output.token_ids for output in outputs], engine.num_preemptions


def drive_static(world: World, settings: dict[str, Any], driver: Drive, *args: Any) -> Any:
    """`drive` with decode steps from static inputs, padded to their buckets as a graph's are."""
    with mock.patch.object(build, "choose_mode", return_value="static"):
        return drive(world, settings, driver, *args)


def tokens_in_rounds(
    engine: Engine, rounds: Sequence[Sequence[list[int]]], num_tokens: int
) -> tuple[list[list[list[int]]], int, int]:
    """Greedy tokens of one batch after another, the tokens that were reused on the way, and the preemptions."""
    tokens = [[one.token_ids for one in engine.generate(list(batch), greedy(num_tokens))] for batch in rounds]
    return tokens, engine.num_reused_tokens, engine.num_preemptions
