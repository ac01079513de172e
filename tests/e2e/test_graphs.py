"""Decode steps as CUDA graphs: replayed they give what eager steps give, while lengths and batches shrink and grow."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from helix import Engine, SamplingParams
from helix.engine import draw
from helix.engine.core import StepOps, StepSinks
from helix.engine.request import Request
from helix.engine.scheduler import StepItem
from tests.parallel.test_ahead import answers_at_ease, answers_in_traffic, check_answers, workload
from tests.tiny import TinyModels, prompt

pytestmark = pytest.mark.gpu
FAMILIES = ["llama", "qwen3", "llama_dynamic", "deepseek_v3", "deepseek_v2_moe", "deepseek_v3_moe", "mixtral"]


@contextmanager
def gpu_engine(
    path: str, graphs: str, dtype: str = "bfloat16", max_batch: int = 11, num_page_rows: int = 64, ahead: str = "auto"
) -> Iterator[Engine]:
    sections: dict[str, Any] = {
        "model": {"path": path, "dtype": dtype},
        "cache": {"page_tokens": 16, "num_page_rows": num_page_rows},
        "engine": {
            "device": "cuda",
            "max_batch": max_batch,
            "prefill_chunk": 64,
            "max_context": 128,
            "graphs": graphs,
            "ahead": ahead,
        },
    }
    with Engine(**sections) as engine:
        yield engine


def mixed_steps(engine: Engine, num_steps: int, check: bool) -> tuple[list[list[int]], list[float]]:
    """Requests of all lengths come and go for `num_steps` steps; with `check` each replay is compared to an eager run.

    The tokens fed back are random, so that rounding cannot make two runs part. Returns them, and the largest error of
    each checked step relative to the largest logit.
    """
    core, source = engine._core, random.Random(0)
    vocab, tokens, errors = engine.spec.vocab_size, [], []
    logits: list[Tensor] = []

    def sample(logits_RV: Tensor, items: Sequence[StepItem]) -> list[int]:
        logits.append(logits_RV.clone())
        return [source.randrange(vocab) for _ in items]

    sinks = StepSinks(lambda _: (), sample, lambda *_: None)
    number = 0
    for _step in range(num_steps):
        add: list[Request] = []
        while core.scheduler.num_running + core.scheduler.num_waiting + len(add) < source.randrange(14):
            ids = [source.randrange(vocab) for _ in range(source.randrange(1, 90))]
            add.append(Request(request_id=number, prompt_ids=ids, max_tokens=source.randrange(1, 40)))
            number += 1
        result = core.lead(StepOps(add=tuple(add)), sinks)
        tokens.append([token for _request, token in result.tokens])
        plan = core.scheduler.plan() if check else None
        if plan is not None and core.runner.mode == "graph":
            with torch.inference_mode():
                run = core.runner.run(plan)
                if run.hidden_TC is None:
                    got, best = run.logits_RV.clone(), run.token_R.clone()
                    want = core.runner.run(plan, lambda *_: None).logits_RV
                    errors.append(float((got - want).abs().max() / want.abs().max()))
                    assert torch.equal(best, got.argmax(-1))
    return tokens, errors


@pytest.mark.parametrize("family", FAMILIES)
def test_replay_equals_eager(tiny: TinyModels, family: str) -> None:
    with gpu_engine(tiny.path(family), "on") as engine:
        _, errors = mixed_steps(engine, 150, check=True)
        assert engine._core.runner.mode == "graph"
    assert len(errors) > 60
    assert max(errors) < 0.03, "bf16 products of another size may round otherwise, and no more"


def test_a_thousand_steps(tiny: TinyModels) -> None:
    with gpu_engine(tiny.path("llama"), "on", "float32") as engine:
        _, errors = mixed_steps(engine, 1000, check=True)
    assert len(errors) > 500
    assert max(errors) < 1e-4


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_greedy_tokens_equal_transformers(tiny: TinyModels, family: str) -> None:
    """fp32 on the GPU, with graphs: the same tokens as transformers on the CPU."""
    prompts = [prompt(length, length) for length in (1, 15, 16, 17, 40)]
    with gpu_engine(tiny.path(family), "on", "float32") as engine:
        outputs = engine.generate(prompts, SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True))
    for one, output in zip(prompts, outputs, strict=True):
        assert output.token_ids == tiny.greedy(family, one, 30)


def test_sampling_and_logprobs_beside_greedy(tiny: TinyModels) -> None:
    """Rows that ask for more than the best token get it from the graph's logits."""
    params = [
        SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=20, temperature=0.9, seed=3, ignore_eos=True),
        SamplingParams(max_tokens=20, temperature=0.0, logprobs=2, ignore_eos=True),
    ]
    prompts = [prompt(12, 1), prompt(30, 2), prompt(5, 3)]
    answers = []
    for graphs in ("on", "off"):
        with gpu_engine(tiny.path("llama"), graphs, "float32") as engine:
            answers.append([output.token_ids for output in engine.generate(prompts, params)])
            assert engine.num_free_rows == 64
    assert answers[0] == answers[1]


@pytest.mark.parametrize("window", [draw.WINDOW, 12])
def test_steps_ahead_equal_one_at_a_time(tiny: TinyModels, window: int) -> None:
    """Every way of choosing tokens, stops, cancellations and preemptions, with a step under way all the time."""
    work = workload(1)
    path = tiny.path("llama")
    with gpu_engine(path, "off", "float32", ahead="off") as engine:
        at_ease = answers_at_ease(engine, work)
    with mock.patch.object(draw, "WINDOW", window), gpu_engine(path, "on", "float32", num_page_rows=5) as engine:
        found, num_preemptions, num_under_way = answers_in_traffic(engine, work, 5)
        assert engine._core.runner.mode == "graph"
    check_answers(at_ease, found)
    assert num_preemptions > 0
    assert num_under_way > 20
