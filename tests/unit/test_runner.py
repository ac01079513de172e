"""The runner without a GPU: buckets, static inputs against `build_batch`, and which ways of running are allowed."""

from __future__ import annotations

from dataclasses import dataclass, fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helix.comm.world import single_world
from helix.config import make_config
from helix.engine.batch import build_batch
from helix.engine.inputs import StaticInputs
from helix.engine.request import Request
from helix.engine.runner import batch_buckets, choose_mode, is_decode
from helix.engine.scheduler import NOT_FINITE, StepItem, StepPlan
from helix.errors import ConfigError
from helix.kernels import best_tokens
from helix.layout import PageRule
from model_zoo.cards import load_card

CPU = torch.device("cpu")
MAX_BATCH = 7
MAX_ROWS = 30


@pytest.mark.parametrize(
    ("max_batch", "buckets"), [(1, (1,)), (2, (1, 2)), (5, (1, 2, 4, 5)), (8, (1, 2, 4, 8)), (9, (1, 2, 4, 8, 9))]
)
def test_buckets(max_batch: int, buckets: tuple[int, ...]) -> None:
    assert batch_buckets(max_batch) == buckets


def decode_item(number: int, position: int, rows: list[int], **request: object) -> StepItem:
    """The token at `position` of a request whose last token it is."""
    prompt = max(position // 2, 1)
    tokens = [100 * number + index for index in range(position + 1)]
    one = Request(request_id=number, prompt_ids=tokens[:prompt], max_tokens=99, output_ids=tokens[prompt:], rows=rows)
    for name, value in request.items():
        setattr(one, name, value)
    return StepItem(request=one, start=position, count=1, samples=True)


def test_what_counts_as_a_decode_step() -> None:
    items = [decode_item(number, 3, [number]) for number in range(3)]
    assert is_decode(StepPlan(tuple(items)), 3)
    assert not is_decode(StepPlan(tuple(items)), 2), "more rows than the largest bucket"
    assert not is_decode(StepPlan((*items, decode_item(9, 3, [9], collect="all_logits"))), 8)
    request = items[0].request
    for count, samples in ((2, True), (1, False)):
        other = StepItem(request=request, start=1, count=count, samples=samples)
        assert not is_decode(StepPlan((other, *items[1:])), 8)


@dataclass(frozen=True, slots=True)
class Steps:
    """Decode steps one after the other, and the rule they were made for."""

    rule: PageRule
    plans: tuple[StepPlan, ...]


@st.composite
def decode_steps(draw: st.DrawFn) -> Steps:
    """Requests come, grow, lose their rows and go, so that rows of the static tables change hands."""
    rule = PageRule(draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    longest = MAX_ROWS * rule.row_tokens
    requests: dict[int, tuple[int, list[int]]] = {}
    plans = []
    for step in range(draw(st.integers(1, 6))):
        for number in list(requests):
            fate = draw(st.sampled_from(["stay", "grow", "moved", "gone"]))
            position, rows = requests.pop(number)
            if fate != "gone":
                position = min(position + draw(st.integers(1, 9)), longest - 1) if fate == "grow" else position
                if fate == "moved":
                    rows = []
                rows += [draw(st.integers(0, 999)) for _ in range(rule.rows_for(position + 1) - len(rows))]
                requests[number] = (position, rows)
        while len(requests) < MAX_BATCH and (not requests or draw(st.booleans())):
            position = draw(st.integers(0, longest - 1))
            rows = [draw(st.integers(0, 999)) for _ in range(rule.rows_for(position + 1))]
            requests[100 * step + len(requests)] = (position, rows)
        plans.append(StepPlan(tuple(decode_item(number, *one) for number, one in requests.items())))
    return Steps(rule, tuple(plans))


@settings(deadline=None, max_examples=60)
@given(steps=decode_steps())
def test_static_inputs_are_the_batch_and_padding(steps: Steps) -> None:
    for rank in range(steps.rule.kvp):
        inputs = StaticInputs(MAX_BATCH, MAX_ROWS, steps.rule, rank, CPU)
        addresses = pointers(inputs)
        for plan in steps.plans:
            want = build_batch(plan, steps.rule, rank, CPU)
            inputs.write(plan.items)
            size, num_rows = MAX_BATCH, len(plan.items)
            inputs.take_tokens(size)
            got = inputs.batch(size)
            for name in ("token_ids_T", "position_T", "rotary_len_T", "slot_T", "visible_len_T"):
                assert torch.equal(getattr(got, name)[:num_rows], getattr(want, name)), name
            for row, item in enumerate(plan.items):
                held = got.page_table_SR[row, : len(item.request.rows)]
                assert held.tolist() == item.request.rows
            assert got.visible_len_T[num_rows:].eq(0).all()
            assert got.slot_T[num_rows:].eq(-1).all()
            assert got.query_start_S1.tolist() == list(range(size + 1))
            assert got.sample_T.tolist() == list(range(size))
            assert got.counts_S == (1,) * size
        assert pointers(inputs) == addresses


def pointers(inputs: StaticInputs) -> list[int]:
    batch = inputs.batch(MAX_BATCH)
    tensors = [getattr(batch, one.name) for one in fields(batch)]
    return [one.data_ptr() for one in tensors if isinstance(one, Tensor)]


def test_best_tokens() -> None:
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor([[0.0, 3.0, 3.0], [nan, 1.0, 2.0], [inf, 1.0, 2.0], [-inf, -inf, -inf], [-inf, -5.0, -7.0]])
    assert best_tokens(logits, NOT_FINITE).tolist() == [1, NOT_FINITE, NOT_FINITE, NOT_FINITE, 1]


@given(vocab=st.sampled_from([1, 2, 97, 96, 128, 320]), seed=st.integers(0, 99))
def test_best_tokens_are_the_first_of_the_best(vocab: int, seed: int) -> None:
    """Few distinct values, so that rows have many equals, in all parts of the vocabulary."""
    logits = torch.randint(0, 4, (5, vocab), generator=torch.Generator().manual_seed(seed)).float()
    assert best_tokens(logits, NOT_FINITE).tolist() == [row.index(max(row)) for row in logits.tolist()]


def test_a_cpu_rank_runs_eagerly() -> None:
    world = single_world(CPU)
    spec = load_card("llama-3.1-8b")
    for setting in ("auto", "off"):
        config = make_config(None, model={"card": "llama-3.1-8b"}, engine={"graphs": setting})
        assert choose_mode(config, spec, world, torch.bfloat16) == "eager"
    config = make_config(None, model={"card": "llama-3.1-8b"}, engine={"graphs": "on"})
    with pytest.raises(ConfigError, match=r"engine\.graphs=on: CUDA graphs need a GPU"):
        choose_mode(config, spec, world, torch.bfloat16)


@pytest.mark.parametrize(
    ("card", "comm", "dtype", "mode"),
    [
        ("llama-3.1-8b", {}, torch.float32, "graph"),
        ("deepseek-v2-lite", {}, torch.bfloat16, "graph"),
        ("deepseek-v2-lite", {}, torch.float32, "eager"),
        ("deepseek-v2-lite", {"dispatch": "alltoall"}, torch.bfloat16, "eager"),
    ],
)
def test_what_a_gpu_can_capture(card: str, comm: dict[str, str], dtype: torch.dtype, mode: str) -> None:
    world = single_world(CPU)
    world.device = torch.device("cuda", 0)
    config = make_config(None, model={"card": card}, comm=comm)
    assert choose_mode(config, load_card(card), world, dtype) == mode


def test_ranks_that_share_a_gpu_run_eagerly() -> None:
    world = single_world(CPU)
    world.device, world.size, world.local_size = torch.device("cuda", 0), 2, 10_000
    config = make_config(None, model={"card": "llama-3.1-8b"}, engine={"graphs": "on"})
    with pytest.raises(ConfigError, match="share a GPU"):
        choose_mode(config, load_card("llama-3.1-8b"), world, torch.bfloat16)
