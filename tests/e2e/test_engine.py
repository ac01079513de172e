"""`helix.Engine` on one rank: prompts, streams, log-probabilities, errors that leave the engine serving."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from helix import Engine, SamplingParams
from helix.engine import build
from helix.engine.runner import Runner
from helix.errors import CheckpointError, ConfigError, LayoutError, RequestError
from tests.tiny import TinyModels, prompt

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


def make_engine(path: str, **engine: object) -> Engine:
    return Engine(
        model={"path": path, "dtype": "float32"},
        cache={"page_tokens": 4, "num_page_rows": 64},
        engine={"device": "cpu", "prefill_chunk": 16, "max_context": 128} | engine,
    )


@pytest.fixture(scope="module")
def engine(tiny: TinyModels) -> Iterator[Engine]:
    with make_engine(tiny.path("smollm")) as one:
        yield one
        assert one.num_free_rows == 64, "a request kept page rows"


def test_logits_and_greedy(engine: Engine, tiny: TinyModels) -> None:
    ids = prompt(40)
    np.testing.assert_allclose(engine.logits(ids), tiny.logits("smollm", ids), atol=1e-4, rtol=0)
    output = engine.generate([ids], GREEDY)[0]
    assert output.token_ids == tiny.greedy("smollm", ids, 12)
    assert (output.finish_reason, output.prompt_token_ids, output.error) == ("length", ids, None)
    assert output.timing.num_tokens == 12
    assert 0 < output.timing.first_token_s <= output.timing.total_s


def test_one_prompt_or_several(engine: Engine) -> None:
    single = engine.generate(prompt(5), GREEDY)
    assert len(single) == 1
    both = engine.generate([prompt(5), prompt(9)], [GREEDY, SamplingParams(max_tokens=3, temperature=0.0)])
    assert both[0].token_ids == single[0].token_ids
    assert len(both[1].token_ids) == 3


def test_stream_equals_generate_and_can_be_left(engine: Engine) -> None:
    whole = engine.generate([prompt(9)], GREEDY)[0]
    stream = engine.stream(prompt(9), GREEDY)
    pieces = list(stream)
    assert [piece.token_id for piece in pieces if piece.token_id is not None] == whole.token_ids
    assert pieces[-1].finish_reason == "length"
    assert stream.output().token_ids == whole.token_ids
    free = engine.num_free_rows
    left = engine.stream(prompt(30), GREEDY)
    next(left)
    left.close()
    assert engine.num_free_rows == free


def test_streams_may_interleave(engine: Engine) -> None:
    alone = [engine.generate([prompt(n)], GREEDY)[0].token_ids for n in (4, 11)]
    first, second = engine.stream(prompt(4), GREEDY), engine.stream(prompt(11), GREEDY)
    got: list[list[int]] = [[], []]
    for left, right in zip(first, second, strict=True):
        for tokens, piece in zip(got, (left, right), strict=True):
            if piece.token_id is not None:
                tokens.append(piece.token_id)
    assert got == alone


def test_stop_ids_and_min_tokens(engine: Engine) -> None:
    free_run = engine.generate([prompt(7)], GREEDY)[0].token_ids
    stop_id = free_run[3]
    first = free_run.index(stop_id)
    stopped = engine.generate([prompt(7)], SamplingParams(max_tokens=12, temperature=0.0, stop_token_ids=[stop_id]))[0]
    assert (stopped.finish_reason, stopped.token_ids) == ("stop", free_run[: first + 1])
    params = SamplingParams(max_tokens=12, temperature=0.0, stop_token_ids=[stop_id], min_tokens=first + 2)
    later = engine.generate([prompt(7)], params)[0].token_ids
    assert len(later) >= first + 2
    assert stop_id not in later[: first + 1]


def test_seed_decides_the_tokens_whatever_the_batch(engine: Engine) -> None:
    params = SamplingParams(max_tokens=10, temperature=1.0, top_p=0.9, seed=7)
    alone = engine.generate([prompt(6)], params)[0].token_ids
    batch = engine.generate([prompt(3), prompt(6), prompt(20)], [GREEDY, params, SamplingParams(max_tokens=5)])
    assert batch[1].token_ids == alone
    other = engine.generate([prompt(6)], SamplingParams(max_tokens=10, temperature=1.0, top_p=0.9, seed=8))[0]
    assert other.token_ids != alone


def test_logprobs(engine: Engine, tiny: TinyModels) -> None:
    ids = prompt(10)
    params = SamplingParams(max_tokens=3, temperature=0.0, logprobs=2, prompt_logprobs=1)
    output = engine.generate([ids], params)[0]
    reference = torch.log_softmax(tiny.logits("smollm", ids + output.token_ids), -1)
    assert output.logprobs is not None
    assert output.prompt_logprobs is not None
    for step, entry in enumerate(output.logprobs):
        row = reference[len(ids) - 1 + step]
        assert entry.token_id == output.token_ids[step]
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        assert [i for i, _ in entry.top] == row.topk(2).indices.tolist()
    assert output.prompt_logprobs[0] is None
    for position, found in enumerate(output.prompt_logprobs[1:], 1):
        assert found is not None
        assert found.logprob == pytest.approx(float(reference[position - 1][ids[position]]), abs=1e-4)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ([], "empty"),
        ([1, 97], "97"),
        ([1, -1], "-1"),
        ("some text", "tokenizer"),
        (list(range(90)) + list(range(60)), "150"),
    ],
)
def test_bad_prompts_are_named_and_the_engine_goes_on(engine: Engine, bad: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        engine.generate([prompt(3), bad], GREEDY)
    assert len(engine.generate([prompt(3)], GREEDY)[0].token_ids) == 12


@pytest.mark.parametrize("bad", [{"temperature": -1.0}, {"temperature": float("nan")}, {"max_tokens": 0}])
def test_bad_sampling_parameters(bad: dict[str, float]) -> None:
    name = next(iter(bad))
    with pytest.raises(RequestError, match=name):
        SamplingParams(**bad)


def test_prompt_of_the_whole_context(engine: Engine) -> None:
    output = engine.generate([prompt(127)], GREEDY)[0]
    assert output.finish_reason == "length"
    assert len(output.token_ids) <= 2
    with pytest.raises(RequestError, match=r"129.*128"):
        engine.generate([prompt(129)], GREEDY)


def test_a_row_that_cannot_be_sampled_fails_alone(tiny: TinyModels) -> None:
    with make_engine(tiny.path("llama")) as one:
        embedding = one._core.model.embed.weight
        embedding[5] = float("nan")
        good, bad = one.generate([[1, 2, 3], [1, 5, 3]], GREEDY)
        assert good.token_ids == tiny.greedy("llama", [1, 2, 3], 12) or 5 in good.token_ids
        assert bad.finish_reason == "error"
        assert bad.error
        assert one.num_free_rows == 64


def test_closed_engine_and_two_in_a_row(tiny: TinyModels) -> None:
    first = make_engine(tiny.path("llama"))
    first.close()
    first.close()
    with pytest.raises(RequestError, match="closed"):
        first.generate([prompt(3)], GREEDY)
    with make_engine(tiny.path("llama")) as second:
        assert second.generate([prompt(3)], GREEDY)[0].token_ids == tiny.greedy("llama", prompt(3), 12)


def test_warming_up_runs_decode_steps_of_every_size(tiny: TinyModels) -> None:
    with (
        mock.patch.object(build, "choose_mode", return_value="static"),
        mock.patch.object(Runner, "_decode", autospec=True, side_effect=Runner._decode) as decode,
        mock.patch.object(Runner, "run", autospec=True, side_effect=Runner.run) as steps,
        make_engine(tiny.path("smollm"), max_batch=6, prefill_chunk=16) as engine,
    ):
        engine.warm_up()
        plans = [plan for (_, plan, *_), _ in steps.call_args_list]
        seen = {(len(batch.counts_S), choice) for (_, batch, choice), _ in decode.call_args_list}
        assert seen == {(size, choice) for size in (1, 2, 4, 6) for choice in ("best", "drawn")}
        prompts = {(len(plan.items), plan.num_tokens) for plan in plans if any(one.count > 1 for one in plan.items)}
        assert prompts >= {(1, count) for count in (2, 4, 8, 16)} | {(size, 16) for size in (2, 4, 6)}
        assert engine.num_free_rows == 64


def test_wrong_settings_fail_before_anything_is_read(tiny: TinyModels, tmp_path: object) -> None:
    path = tiny.path("smollm")
    with pytest.raises(LayoutError, match=r"layout.tpa=2.*9 query heads.*nearest legal: kvp=2 tpa=1"):
        Engine(model=path, layout={"kvp": 1, "tpa": 2})
    with pytest.raises(ConfigError, match=r"page_token\b.*page_tokens"):
        Engine(model=path, cache={"page_token": 4})
    with pytest.raises(CheckpointError, match="no_such_model"):
        Engine(model={"path": f"{tmp_path}/no_such_model"})
    with pytest.raises(ConfigError, match=r"1000000.*512"):
        make_engine(path, max_context=1000000)
