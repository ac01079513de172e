"""The step's tensors: the array form of `local_len`, and every token of a plan against the page rule, on all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helix.engine.batch import build_batch, local_len
from helix.engine.request import Request
from helix.engine.scheduler import StepItem, StepPlan
from helix.layers.batch import Batch
from helix.layout import PageRule

CPU = torch.device("cpu")


@given(
    page_tokens=st.integers(1, 70),
    kvp=st.integers(1, 12),
    lengths=st.lists(st.integers(0, 2_000_000), min_size=1, max_size=20),
)
def test_local_len_of_an_array(page_tokens: int, kvp: int, lengths: list[int]) -> None:
    rule = PageRule(page_tokens, kvp)
    total = np.zeros(len(lengths), dtype=np.int64)
    for rank in range(kvp):
        got = local_len(np.asarray(lengths, dtype=np.int64), rule, rank)
        assert got.dtype == np.int64
        assert got.tolist() == [rule.local_len(length, rank) for length in lengths]
        total += got
    assert total.tolist() == lengths


@dataclass(frozen=True, slots=True)
class Step:
    """A plan, and the rule it was made for."""

    plan: StepPlan
    rule: PageRule


@st.composite
def steps(draw: st.DrawFn) -> Step:
    rule = PageRule(draw(st.integers(1, 5)), draw(st.integers(1, 6)))
    items = []
    free = iter(draw(st.permutations(range(300))))
    for number in range(draw(st.integers(1, 5))):
        num_prompt, num_output = draw(st.integers(1, 40)), draw(st.integers(0, 10))
        request = Request(
            request_id=number,
            prompt_ids=[1000 * number + index for index in range(num_prompt)],
            max_tokens=20,
            output_ids=[1000 * number + 500 + index for index in range(num_output)],
        )
        start = draw(st.integers(0, request.num_tokens - 1))
        count = draw(st.integers(1, request.num_tokens - start))
        spare = draw(st.integers(0, 1))
        request.rows = [next(free) for _ in range(rule.rows_for(start + count) + spare)]
        items.append(StepItem(request=request, start=start, count=count, samples=draw(st.booleans())))
    return Step(StepPlan(tuple(items)), rule)


@settings(deadline=None)
@given(step=steps())
def test_batch_of_every_rank(step: Step) -> None:
    batches = [build_batch(step.plan, step.rule, rank, CPU) for rank in range(step.rule.kvp)]
    for batch in batches:
        check_common(step, batch)
    token = 0
    for row, item in enumerate(step.plan.items):
        table = batches[0].page_table_SR[row].tolist()
        for position in range(item.start, item.start + item.count):
            check_token(step.rule, batches, table, token, position)
            token += 1
    assert all(len(batch.slot_T) == token for batch in batches)


def check_common(step: Step, batch: Batch) -> None:
    """What is the same on all ranks."""
    items = step.plan.items
    known = [(item, item.request.prompt_ids + item.request.output_ids) for item in items]
    positions = [position for item in items for position in range(item.start, item.start + item.count)]
    assert batch.position_T.tolist() == positions
    assert batch.token_ids_T.tolist() == [
        tokens[position] for item, tokens in known for position in range(item.start, item.start + item.count)
    ]
    assert batch.rotary_len_T.tolist() == [
        len(item.request.prompt_ids) if position < len(item.request.prompt_ids) else position + 1
        for item in items
        for position in range(item.start, item.start + item.count)
    ]
    ends = [sum(one.count for one in items[: index + 1]) for index in range(len(items))]
    assert batch.query_start_S1.tolist() == [0, *ends]
    assert batch.sample_T.tolist() == [end - 1 for end, item in zip(ends, items, strict=True) if item.samples]
    for row, item in enumerate(items):
        assert batch.page_table_SR[row, : len(item.request.rows)].tolist() == item.request.rows
    assert batch.page_table_SR.dtype == torch.int32
    others = (batch.token_ids_T, batch.position_T, batch.rotary_len_T, batch.slot_T, batch.visible_len_T)
    assert {tensor.dtype for tensor in (*others, batch.query_start_S1, batch.sample_T)} == {torch.int64}


def check_token(rule: PageRule, batches: list[Batch], table: list[int], token: int, position: int) -> None:
    """One rank stores the token, where `attend` will look for it; together the ranks see all tokens up to it."""
    slots = [int(batch.slot_T[token]) for batch in batches]
    visible = [int(batch.visible_len_T[token]) for batch in batches]
    owner = rule.owner(position)
    assert [rank for rank, slot in enumerate(slots) if slot != -1] == [owner]
    row, offset = divmod(rule.local_slot(position), rule.page_tokens)
    assert slots[owner] == table[row] * rule.page_tokens + offset
    assert visible[owner] == rule.local_slot(position) + 1
    assert visible == [rule.local_len(position + 1, rank) for rank in range(rule.kvp)]
    assert sum(visible) == position + 1


def test_one_decode_beside_a_chunk() -> None:
    """Page rows of 2 x 3 tokens: the decode at position 7 lies in the second row, on rank 0."""
    rule = PageRule(page_tokens=3, kvp=2)
    decode = Request(request_id=0, prompt_ids=[5, 6, 7, 8, 9], max_tokens=9, output_ids=[20, 21, 22], rows=[4, 1])
    prefill = Request(request_id=1, prompt_ids=[30, 31, 32, 33, 34], max_tokens=9, rows=[2])
    plan = StepPlan(
        (
            StepItem(request=decode, start=7, count=1, samples=True),
            StepItem(request=prefill, start=1, count=3, samples=False),
        )
    )
    first, second = (build_batch(plan, rule, rank, CPU) for rank in range(2))
    assert first.token_ids_T.tolist() == second.token_ids_T.tolist() == [22, 31, 32, 33]
    assert first.rotary_len_T.tolist() == [8, 5, 5, 5]
    assert first.slot_T.tolist() == [1 * 3 + 1, 2 * 3 + 1, 2 * 3 + 2, -1]
    assert second.slot_T.tolist() == [-1, -1, -1, 2 * 3 + 0]
    assert first.visible_len_T.tolist() == [5, 2, 3, 3]
    assert second.visible_len_T.tolist() == [3, 0, 0, 1]
    assert first.page_table_SR.tolist()[0] == [4, 1]
    assert first.sample_T.tolist() == [0]


def test_large_pools_do_not_overflow() -> None:
    rule = PageRule(page_tokens=64, kvp=1)
    request = Request(request_id=0, prompt_ids=[1], max_tokens=1, rows=[2**30])
    plan = StepPlan((StepItem(request=request, start=0, count=1, samples=True),))
    assert build_batch(plan, rule, 0, CPU).slot_T.tolist() == [2**36]


@pytest.mark.parametrize("count", [1, 7])
def test_nothing_is_sampled_from_a_chunk(count: int) -> None:
    request = Request(request_id=0, prompt_ids=list(range(20)), max_tokens=1, rows=[0, 1, 2, 3, 4])
    plan = StepPlan((StepItem(request=request, start=3, count=count, samples=False),))
    assert build_batch(plan, PageRule(4, 1), 0, CPU).sample_T.shape == (0,)
