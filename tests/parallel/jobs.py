"""What the ranks of the pool run in the parallel tests (importable from their processes)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

from torch import Tensor

from helix.comm.world import World
from helix.config import make_config
from helix.engine import build
from helix.engine.core import StepOps, StepSinks
from helix.engine.engine import Engine
from helix.engine.join import follow
from helix.engine.request import Request
from helix.engine.sampling import SamplingParams
from helix.engine.scheduler import StepItem

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


def logits_of_random_steps(engine: Engine, num_steps: int) -> tuple[str, list[Any]]:
    """How steps run, and the logits of `num_steps` steps of requests of all lengths that come and go.

    Tokens are drawn at random, so that rounding cannot make two runs part.
    """
    core, source = engine._core, random.Random(0)
    vocab, logits, number = engine.spec.vocab_size, [], 0

    def sample(logits_RV: Tensor, items: Sequence[StepItem]) -> list[int]:
        logits.append(logits_RV.float().cpu().numpy())
        return [source.randrange(vocab) for _ in items]

    sinks = StepSinks(lambda _: (), sample, lambda *_: None)
    for step in range(num_steps):
        add: list[Request] = []
        while core.scheduler.num_running + core.scheduler.num_waiting + len(add) < source.randrange(8):
            ids = [source.randrange(vocab) for _ in range(source.randrange(1, 60))]
            add.append(Request(request_id=1000 + number, prompt_ids=ids, max_tokens=source.randrange(1, 30)))
            number += 1
        cancel = tuple(range(1000, 1000 + number)) if step == num_steps - 1 else ()
        core.lead(StepOps(add=() if cancel else tuple(add), cancel=cancel), sinks)
    return core.runner.mode, logits


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
