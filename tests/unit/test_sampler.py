"""The sampler: rules against hand-worked cases and transformers' processors, draws against their distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from helix.engine import sampler
from helix.engine.draw import rank
from helix.engine.sampler import Sampled, SampleRow, sample, token_logprobs, uniform
from helix.engine.sampling import SamplingParams

INF = math.inf
NUM_DRAWS = 1024


def row(
    *, prompt: Sequence[int] = (), output: Sequence[int] = (), seed: int = 0, eos: Sequence[int] = (), **values: Any
) -> SampleRow:
    return SampleRow(SamplingParams(**values), prompt, output, seed, frozenset(eos))


def greedy(logits: Sequence[float], **values: Any) -> int:
    return sample(torch.tensor([logits]), [row(temperature=0, **values)])[0].token_id


def distribution(logits_V: Tensor, **values: Any) -> Tensor:
    """How often each token is drawn, over the first `NUM_DRAWS` seeds."""
    rows = [row(seed=seed, **values) for seed in range(NUM_DRAWS)]
    drawn = [one.token_id for one in sample(logits_V.expand(NUM_DRAWS, -1), rows)]
    return torch.bincount(torch.tensor(drawn), minlength=len(logits_V)).double() / NUM_DRAWS


def check_distribution(found_V: Tensor, expected_V: Tensor) -> None:
    """Nothing that is illegal, and every token as often as it should be, within 4.5 standard deviations."""
    assert float(found_V[expected_V == 0].sum()) == 0
    deviation_V = (expected_V * (1 - expected_V) / NUM_DRAWS).sqrt()
    assert bool(((found_V - expected_V).abs() <= 4.5 * deviation_V + 2 / NUM_DRAWS).all())


def test_no_rows() -> None:
    assert sample(torch.zeros(0, 7), []) == []


def test_shape_is_checked() -> None:
    with pytest.raises(ValueError, match=r"\(2, 7\) do not fit 1 rows"):
        sample(torch.zeros(2, 7), [row()])


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    assert greedy([1.0, 3.0, 2.0, 3.0, 3.0]) == 1


@pytest.mark.parametrize("values", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-300}])
def test_every_limit_is_greedy(values: dict[str, Any]) -> None:
    logits = torch.tensor([0.0, 2.0, -1.0, 1.999])
    drawn = sample(logits.expand(200, -1), [row(seed=seed, **values) for seed in range(200)])
    assert {one.token_id for one in drawn} == {1}


def test_all_greedy_batch_is_one_reduction(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("not needed for a greedy batch")

    for name in ("_draw", "rank", "_penalty", "uniform"):
        monkeypatch.setattr(sampler, name, refuse)
    logits = torch.randn(5, 37)
    rows = [row(temperature=0, top_k=3, top_p=0.5) for _ in range(5)]
    assert [one.token_id for one in sample(logits, rows)] == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, [0.5, 0.125, 0.25, 0.125]),
        ({"temperature": 0.5}, [16 / 22, 1 / 22, 4 / 22, 1 / 22]),
        ({"temperature": 1e308}, [0.25, 0.25, 0.25, 0.25]),
        ({"top_k": 2}, [2 / 3, 0, 1 / 3, 0]),
        ({"top_k": 3}, [4 / 7, 1 / 7, 2 / 7, 0]),
        ({"top_k": 99}, [0.5, 0.125, 0.25, 0.125]),
        ({"top_k": -1}, [0.5, 0.125, 0.25, 0.125]),
        ({"top_p": 0.49}, [1, 0, 0, 0]),
        ({"top_p": 0.51}, [2 / 3, 0, 1 / 3, 0]),
        ({"top_p": 0.76}, [4 / 7, 1 / 7, 2 / 7, 0]),
        ({"min_p": 0.3}, [2 / 3, 0, 1 / 3, 0]),
        ({"min_p": 0.2}, [0.5, 0.125, 0.25, 0.125]),
        ({"top_k": 2, "top_p": 0.6}, [1, 0, 0, 0]),
        ({"top_k": 2, "top_p": 0.7}, [2 / 3, 0, 1 / 3, 0]),
        ({"top_p": 0.8, "min_p": 0.4}, [2 / 3, 0, 1 / 3, 0]),
        ({"temperature": 2.0, "min_p": 0.6}, [2**0.5 / (2**0.5 + 1), 0, 1 / (2**0.5 + 1), 0]),
        ({"logit_bias": {1: 100.0}}, [0, 1, 0, 0]),
        ({"logit_bias": {0: -100.0, 9: 5.0}}, [0, 0.25, 0.5, 0.25]),
    ],
)
def test_hand_worked_filters(values: dict[str, Any], expected: list[float]) -> None:
    logits = torch.tensor([0.5, 0.125, 0.25, 0.125]).log()
    found = distribution(logits, **values)
    check_distribution(found, torch.tensor(expected, dtype=torch.float64))


def hf_distribution(logits_V: Tensor, values: dict[str, Any], context: Sequence[int]) -> Tensor:
    scores = logits_V[None].double().clone()
    ids = torch.tensor([list(context)])
    if values.get("repetition_penalty", 1.0) != 1.0:
        scores = RepetitionPenaltyLogitsProcessor(values["repetition_penalty"])(ids, scores)
    scores = TemperatureLogitsWarper(values.get("temperature", 1.0))(ids, scores)
    if values.get("top_k", 0):
        scores = TopKLogitsWarper(values["top_k"])(ids, scores)
    scores = TopPLogitsWarper(values.get("top_p", 1.0))(ids, scores)
    if values.get("min_p", 0.0):
        scores = MinPLogitsWarper(values["min_p"])(ids, scores)
    probs: Tensor = scores.softmax(-1)[0]
    return probs


@pytest.mark.parametrize("values", [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7, "temperature": 0.6},
    {"repetition_penalty": 1.5, "top_k": 7},
    {"temperature": 1.7, "top_k": 11, "top_p": 0.8},
    {"temperature": 0.8, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 1.2, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.1},
])  # fmt: skip
@pytest.mark.parametrize("vocab_size", [37, 1500])
def test_as_transformers(values: dict[str, Any], vocab_size: int) -> None:
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 2
    prompt, output = [1, 5, 5, 30], [5, 2, 36]
    expected = hf_distribution(logits, values, prompt + output)
    found = distribution(logits, prompt=prompt, output=output, **values)
    check_distribution(found, expected)


def test_presence_and_frequency_count_the_output_only() -> None:
    logits = torch.tensor([1.0, 2.0, 0.5, -1.0, 1.5])
    output = [1, 1, 3, 1]
    changed = logits.clone()
    for token_id in range(5):
        count = output.count(token_id)
        changed[token_id] -= 0.4 * (count > 0) + 0.3 * count
    found = distribution(logits, prompt=[0, 0, 2], output=output, presence_penalty=0.4, frequency_penalty=0.3)
    check_distribution(found, changed.softmax(-1))


def test_penalties_by_hand() -> None:
    assert greedy([4.0, 3.0, -5.0], output=[0], repetition_penalty=1.5) == 1
    assert greedy([4.0, 3.0, -5.0], prompt=[0], repetition_penalty=1.5) == 1
    assert greedy([4.0, 3.0, -5.0], output=[0], repetition_penalty=1.3) == 0
    # Negative logits are multiplied: -1 becomes -2, below -1.5.
    assert greedy([-1.0, -1.5, -9.0], output=[0], repetition_penalty=2.0) == 1
    assert greedy([4.0, 3.0], prompt=[0], presence_penalty=2.0) == 0
    assert greedy([4.0, 3.0], output=[0], presence_penalty=1.5) == 1
    assert greedy([4.0, 3.0], output=[0, 0], frequency_penalty=0.4) == 0
    assert greedy([4.0, 3.0], output=[0, 0, 0], frequency_penalty=0.4) == 1
    # Bias comes first and is then penalised: (0 + 4) / 2 < 3.
    assert greedy([0.0, 3.0], output=[0], logit_bias={0: 4.0}, repetition_penalty=2.0) == 1


@pytest.mark.parametrize("penalty", [1e-300, 1e300])
def test_extreme_penalty_stays_finite(penalty: float) -> None:
    results = sample(
        torch.tensor([[4.0, 3.0, 0.0, -INF, -2.0]]), [row(output=[0, 1, 2, 3, 4], repetition_penalty=penalty, seed=1)]
    )
    assert results[0].error is None
    assert results[0].token_id in {0, 1, 2}


def test_prompt_of_a_kept_row_is_reduced_once() -> None:
    class Counting(list[int]):
        reads = 0

        def __iter__(self) -> Any:
            Counting.reads += 1
            return super().__iter__()

    output: list[int] = []
    one = row(prompt=Counting([0, 0, 1]), output=output, temperature=0, repetition_penalty=2.0)
    tokens = []
    for _ in range(3):
        output.append(sample(torch.tensor([[4.0, 3.0, 1.9, 1.8]]), [one])[0].token_id)
        tokens.append(output[-1])
    assert tokens == [0, 0, 0]
    assert Counting.reads == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_masks_every_end(temperature: float) -> None:
    logits = torch.tensor([5.0, 4.0, 3.0, -9.0]).expand(50, -1)
    values: dict[str, Any] = {"eos": [0, 99], "stop_token_ids": [1], "min_tokens": 2, "temperature": temperature}
    early = sample(logits, [row(seed=seed, output=[3], **values) for seed in range(50)])
    assert {one.token_id for one in early} <= {2, 3}
    late = sample(logits, [row(seed=seed, output=[3, 3], **values) for seed in range(50)])
    assert 0 in {one.token_id for one in late}
    # A bias cannot lift the mask.
    assert greedy([5.0, 4.0], eos=[0], min_tokens=1, logit_bias={0: 100.0}) == 1


def test_draws_follow_the_distribution() -> None:
    probs = torch.tensor([0.4, 0.05, 0.2, 0.0, 0.25, 0.1])
    num = 8000
    for rows in ([row(seed=seed) for seed in range(num)], [row(seed=7, output=range(step)) for step in range(num)]):
        drawn = torch.tensor([one.token_id for one in sample(probs.log().expand(num, -1), rows)])
        count = torch.bincount(drawn, minlength=6).double()
        assert count[3] == 0
        legal = probs > 0
        chi2 = ((count - num * probs)[legal] ** 2 / (num * probs)[legal]).sum()
        assert chi2 < 18.5  # 99.9% quantile for 4 degrees of freedom


def test_rounding_of_the_logits_moves_next_to_no_token() -> None:
    """A request has other batch mates, or another layout: its logits differ in the last bits, its tokens do not."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(64, 20_000, generator=generator) * 2
    noise = torch.randn(64, 20_000, generator=generator) * 1e-5
    for values in ({}, {"top_k": 1000}, {"temperature": 2.0, "min_p": 1e-4}):
        rows = [row(seed=seed, **values) for seed in range(64)]
        one, other = (sample(those, rows) for those in (logits, logits + noise))
        assert sum(a.token_id != b.token_id for a, b in zip(one, other, strict=True)) <= 1


def test_a_filter_moves_no_token_that_it_keeps() -> None:
    """The number of a token is its own, so that what is legal beside it does not matter."""
    logits = torch.randn(64, 300, generator=torch.Generator().manual_seed(2))
    plain = sample(logits, [row(seed=seed) for seed in range(64)])
    cut = sample(logits, [row(seed=seed, top_k=290) for seed in range(64)])
    assert sum(a.token_id == b.token_id for a, b in zip(plain, cut, strict=True)) >= 62


def test_uniform_is_spread_and_uses_all_of_seed_and_step() -> None:
    values = torch.tensor([[uniform(seed, step) for step in range(64)] for seed in range(-32, 32)], dtype=torch.float64)
    assert values.min() >= 0
    assert values.max() < 1
    assert len(set(values.flatten().tolist())) == 64 * 64
    assert abs(values.mean() - 0.5) < 0.01
    # Neighbouring seeds and steps do not go together.
    for first, second in (
        (values[:-1], values[1:]),
        (values[:, :-1], values[:, 1:]),
        (values[:-1, 1:], values[1:, :-1]),
    ):
        assert abs(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1]) < 0.05
    assert uniform(5, 0) != uniform(5 + 2**32, 0)
    assert uniform(-1, 3) == uniform(2**64 - 1, 3)


def test_uniform_does_not_change_between_releases() -> None:
    # SplitMix64 seeded with hash(0) = 0xE220A8397B1DCDAF; its own first output for seed 0 is that same number.
    assert sampler._mix64(0) == 0xE220A8397B1DCDAF
    assert uniform(0, 0) == (sampler._mix64(0xE220A8397B1DCDAF) >> 12) / 2**52


MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.9, "repetition_penalty": 1.2},
    {"min_p": 0.1, "presence_penalty": 0.5},
    {"top_k": 2000, "logprobs": 3},
    {"temperature": 0.0, "logprobs": 5, "logit_bias": {3: 2.0}},
    {"top_p": 0.999, "temperature": 5.0},
    {},
]


@settings(max_examples=25, deadline=None)
@given(order=st.permutations(range(len(MIXED))), count=st.integers(1, len(MIXED)), seed=st.integers(0, 99))
def test_batch_mates_and_their_order_do_not_matter(order: list[int], count: int, seed: int) -> None:
    logits = torch.randn(len(MIXED), 2100, generator=torch.Generator().manual_seed(seed))
    rows = [row(seed=seed + i, prompt=[1, 2], output=[4, i], **values) for i, values in enumerate(MIXED)]
    alone = [sample(logits[i : i + 1], [rows[i]])[0] for i in range(len(rows))]
    chosen = order[:count]
    together = sample(logits[chosen], [rows[i] for i in chosen])
    for i, found in zip(chosen, together, strict=True):
        assert (found.token_id, found.error) == (alone[i].token_id, None)
        assert [token_id for token_id, _ in found.top_logprobs] == [token_id for token_id, _ in alone[i].top_logprobs]
        assert found.logprob == pytest.approx(alone[i].logprob, abs=1e-5)


def test_logits_are_not_written_to() -> None:
    logits = torch.randn(len(MIXED), 2100)
    before = logits.clone()
    sample(logits, [row(output=[4], min_tokens=3, stop_token_ids=[0], **values) for values in MIXED])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("values", [{"top_p": 0.97}, {"top_k": 1700}, {"top_k": 1700, "top_p": 0.97}])
def test_nucleus_beyond_the_first_window(values: dict[str, Any]) -> None:
    logits = torch.randn(2000, generator=torch.Generator().manual_seed(3)) * 0.1
    expected = hf_distribution(logits, values, [0])
    assert int((expected > 0).sum()) > 1024
    found = distribution(logits, **values)
    assert float(found[expected == 0].sum()) == 0
    order = logits.argsort(descending=True)
    # Single tokens are too rare, so the running sums are compared (Kolmogorov's bound for 99.9%).
    assert (found[order].cumsum(0) - expected[order].cumsum(0)).abs().max() <= 1.95 / NUM_DRAWS**0.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_sampled_as_its_fp32_value(dtype: torch.dtype) -> None:
    logits = (torch.randn(len(MIXED), 2100) * 3).to(dtype)
    rows = [row(seed=i, output=[1], **{**values, "logprobs": 2}) for i, values in enumerate(MIXED)]
    assert sample(logits, rows) == sample(logits.float(), rows)


@pytest.mark.parametrize(
    ("bad", "values", "words"),
    [
        ([1.0, math.nan, 2.0], {}, "hold NaN"),
        ([1.0, INF, 2.0], {}, "hold +inf"),
        ([-INF, -INF, -INF], {}, "all -inf"),
        ([-INF, math.nan, -INF], {"logit_bias": {1: 5.0}}, "hold NaN"),
        ([1.0, math.nan, 2.0], {"min_tokens": 1, "eos": [1]}, "hold NaN"),
        ([1.0, -INF, -INF], {"min_tokens": 1, "eos": [0]}, "min_tokens"),
    ],
)
@pytest.mark.parametrize(
    "mode", [{"temperature": 0.0}, {}, {"top_k": 2}, {"top_p": 0.9, "logprobs": 2}, {"min_p": 0.1}]
)
def test_a_bad_row_fails_alone(bad: list[float], values: dict[str, Any], words: str, mode: dict[str, Any]) -> None:
    good = [0.0, 50.0, -INF]
    rows = [row(logprobs=1), row(**values, **mode), row(temperature=0), row(top_p=0.5, output=[1], frequency_penalty=1)]
    first, failed, third, fourth = sample(torch.tensor([good, bad, good, good]), rows)
    assert failed.token_id == -1
    assert failed.error is not None
    assert words in failed.error
    assert (failed.logprob, failed.top_logprobs) == (None, ())
    assert first == Sampled(1, 0.0, ((1, 0.0),))
    assert third == fourth == Sampled(1)


@given(st.lists(st.sampled_from([0.0, -0.0, 1.5, -2.0, -INF, 3e38, 1e-45]), min_size=2, max_size=9), st.integers(1, 9))
def test_rank_is_a_stable_sort(values: list[float], num: int) -> None:
    expected = sorted(range(len(values)), key=lambda i: (-values[i], i))[:num]
    assert rank(torch.tensor([values]), min(num, len(values)))[0].tolist() == expected


def test_equal_logits_are_cut_at_exactly_k() -> None:
    drawn = sample(torch.zeros(300, 10), [row(seed=seed, top_k=3) for seed in range(300)])
    assert {one.token_id for one in drawn} == {0, 1, 2}


def test_logprobs_are_the_models_own() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -INF, 3.0]])
    expected = logits.log_softmax(-1)[0].tolist()
    one = sample(logits, [row(temperature=9.0, top_k=1, logit_bias={0: 100.0}, logprobs=4)])[0]
    assert one.token_id == 0
    assert one.logprob == pytest.approx(expected[0])
    assert [token_id for token_id, _ in one.top_logprobs] == [1, 4, 2, 0]
    assert [value for _, value in one.top_logprobs] == pytest.approx([expected[i] for i in (1, 4, 2, 0)])
    # Padded vocabulary is never listed, and 0 alternatives still give the token's own value.
    assert len(sample(logits, [row(logprobs=20)])[0].top_logprobs) == 4
    none = sample(logits, [row(temperature=0, logprobs=0)])[0]
    assert (none.token_id, none.top_logprobs) == (1, ())
    assert none.logprob == pytest.approx(expected[1])


def test_token_logprobs_against_log_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "_BLOCK_ENTRIES", 100)
    logits = torch.randn(17, 37, generator=torch.Generator().manual_seed(0)).bfloat16()
    ids = torch.arange(17) * 2
    expected = logits.float().log_softmax(-1)
    found = token_logprobs(logits, ids, 3)
    assert [value for value, _ in found] == pytest.approx(expected[torch.arange(17), ids].tolist(), abs=1e-5)
    for (_, top), row_V in zip(found, expected, strict=True):
        assert [token_id for token_id, _ in top] == sorted(range(37), key=lambda i: (-row_V[i].item(), i))[:3]
        assert [value for _, value in top] == pytest.approx(row_V.topk(3).values.tolist(), abs=1e-5)
    assert token_logprobs(logits[:0], [], 3) == []
    assert [top for _, top in token_logprobs(logits, ids.tolist(), 0)] == [()] * 17
