"""The scheduler: unit cases, and random traffic through small pools with a fake model that reads its own page rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from helix.engine.request import PLACES, Request, RequestState
from helix.engine.scheduler import NOT_FINITE, Scheduler, StepItem, StepPlan
from helix.errors import ConfigError, RequestError
from helix.layout import PageRule

VOCABULARY = 11
FIXED_DIGEST = -8944762938461689382


def next_token(prefix: Iterable[int]) -> int:
    """The fake model: a token that depends on every token before it, and on their order."""
    return crc32(bytes(prefix)) % VOCABULARY


def make_request(request_id: int, num_prompt: int, max_tokens: int = 4, **fields: Any) -> Request:
    prompt = [(request_id * 7 + position * 3) % VOCABULARY for position in range(num_prompt)]
    return Request(request_id=request_id, prompt_ids=prompt, max_tokens=max_tokens, **fields)


def make_scheduler(
    num_rows: int = 8, max_batch: int = 4, max_context: int = 100, prefill_chunk: int = 16, **options: Any
) -> Scheduler:
    """Page rows of 4 tokens."""
    return Scheduler(PageRule(page_tokens=2, kvp=2), num_rows, max_batch, max_context, prefill_chunk, **options)


@dataclass
class FakeModel:
    """Stores each fed token in its page row and samples from what the rows then hold, as attention would."""

    rule: PageRule
    cells: dict[tuple[int, int], int] = field(default_factory=dict)
    num_fed: dict[Request, int] = field(default_factory=dict)
    num_preemptions: dict[Request, int] = field(default_factory=dict)
    reuse: bool = False
    num_reused: int = 0
    written: set[int] = field(default_factory=set)
    """Rows written in this step."""
    bad_output: dict[int, int] = field(default_factory=dict)
    """Request id -> number of the output whose logits are not finite."""

    def cell(self, request: Request, position: int) -> tuple[int, int]:
        return request.rows[position // self.rule.row_tokens], position % self.rule.row_tokens

    def step(self, plan: StepPlan) -> list[int]:
        self.written = set()
        for item in plan.items:
            self.feed(item)
        return [self.sample(item) for item in plan.items if item.samples]

    def feed(self, item: StepItem) -> None:
        request = item.request
        if self.num_preemptions.get(request) != request.num_preemptions:
            self.num_preemptions[request] = request.num_preemptions
            self.num_fed[request] = item.start
            self.num_reused += item.start
            assert item.start % self.rule.row_tokens == 0
            assert not item.start or (self.reuse and request.collect == "tokens")
        assert item.count > 0
        assert item.start == self.num_fed[request], "fed tokens are not contiguous"
        self.num_fed[request] += item.count
        tokens = (request.prompt_ids + request.output_ids)[item.start : item.start + item.count]
        assert item.token_ids == tokens
        assert len(tokens) == item.count
        for position, token in enumerate(tokens, item.start):
            self.written.add(request.rows[position // self.rule.row_tokens])
            self.cells[self.cell(request, position)] = token

    def sample(self, item: StepItem) -> int:
        request = item.request
        if self.bad_output.get(request.request_id) == len(request.output_ids):
            return NOT_FINITE
        return next_token(self.cells[self.cell(request, position)] for position in range(item.start + item.count))


def undisturbed(request: Request, max_len: int, bad_output: int | None = None) -> tuple[list[int], str]:
    """Output and finish reason of `request` alone in a pool that never runs out."""
    tokens: list[int] = []
    while len(tokens) < request.max_tokens:
        if len(tokens) == bad_output:
            return tokens, "error"
        tokens.append(next_token(request.prompt_ids + tokens))
        if tokens[-1] in request.stop_token_ids and len(tokens) >= request.min_tokens:
            return tokens, "stop"
        if len(request.prompt_ids) + len(tokens) >= max_len:
            break
    return tokens, "length"


def shape(plan: StepPlan | None) -> list[tuple[int, int, int, bool]]:
    """A plan as comparable values."""
    items = plan.items if plan else ()
    return [(item.request.request_id, item.start, item.count, item.samples) for item in items]


def step(scheduler: Scheduler, token: int = 1) -> list[tuple[int, int, int, bool]]:
    """One step in which every sampled token is `token`."""
    plan = scheduler.plan()
    if plan is not None:
        scheduler.commit(plan, [token] * sum(item.samples for item in plan.items))
    return shape(plan)


def run_until(scheduler: Scheduler, is_done: Callable[[], bool]) -> list[list[tuple[int, int, int, bool]]]:
    """The steps up to `is_done`; a scheduler that does not get there fails the test."""
    fed: list[list[tuple[int, int, int, bool]]] = []
    for _ in range(200):
        if is_done():
            return fed
        fed.append(step(scheduler))
    raise AssertionError("not done after 200 steps")


# --- one step after another ---


def test_chunked_prefill_then_decode() -> None:
    scheduler = make_scheduler(prefill_chunk=4)
    request = make_request(5, 10, max_tokens=3)
    scheduler.add(request)
    assert step(scheduler) == [(5, 0, 4, False)]
    assert len(request.rows) == 1
    assert request.is_prefilling
    assert step(scheduler) == [(5, 4, 4, False)]
    assert step(scheduler) == [(5, 8, 2, True)]
    assert not request.is_prefilling
    assert request.num_computed == 10
    assert request.output_ids == [1]
    assert step(scheduler) == [(5, 10, 1, True)]
    assert step(scheduler) == [(5, 11, 1, True)]
    assert (request.state, request.finish_reason) == (RequestState.FINISHED, "length")
    assert scheduler.plan() is None
    assert not scheduler.has_work
    assert scheduler.num_free_rows == 8


def test_decodes_come_first_and_count_against_the_budget() -> None:
    scheduler = make_scheduler(num_rows=32, prefill_chunk=6)
    for request_id, num_prompt in ((0, 3), (1, 3), (2, 20)):
        scheduler.add(make_request(request_id, num_prompt, max_tokens=9))
    assert step(scheduler) == [(0, 0, 3, True), (1, 0, 3, True)]
    assert step(scheduler) == [(0, 3, 1, True), (1, 3, 1, True), (2, 0, 4, False)]
    assert step(scheduler) == [(0, 4, 1, True), (1, 4, 1, True), (2, 4, 4, False)]


def test_decodes_beyond_the_budget_all_run_and_a_prefill_still_moves() -> None:
    scheduler = make_scheduler(num_rows=32, prefill_chunk=2, max_batch=4)
    for request_id in range(4):
        scheduler.add(make_request(request_id, 2, max_tokens=20))
    fed = run_until(scheduler, lambda: scheduler.num_running == 4)
    assert all([item[0] for item in items] == list(range(len(items))) for items in fed), "no decode is left out"
    assert fed[-1][-1] == (3, 0, 1, False)
    assert len(step(scheduler)) == len(step(scheduler)) == 4 == scheduler.max_step_tokens


def test_running_is_limited_and_order_is_priority_then_arrival() -> None:
    scheduler = make_scheduler(max_batch=2)
    for request_id, priority in ((0, 1), (1, 0), (2, -1), (3, 0)):
        scheduler.add(make_request(request_id, 2, max_tokens=1, priority=priority))
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 4)
    assert [item[0] for item in step(scheduler)] == [2, 1]
    assert [item[0] for item in step(scheduler)] == [3, 0]


def test_prompt_only_request_finishes_without_a_token() -> None:
    scheduler = make_scheduler(num_rows=3, prefill_chunk=8)
    request = make_request(0, 12, max_tokens=0, collect="all_logits")
    scheduler.add(request)  # exactly the pool: nothing is generated, so no room for it is needed
    assert step(scheduler) == [(0, 0, 8, False)]
    plan = scheduler.plan()
    assert plan is not None
    assert shape(plan) == [(0, 8, 4, False)]
    assert scheduler.commit(plan, []) == [request]
    assert (request.finish_reason, request.output_ids, scheduler.num_free_rows) == ("length", [], 3)


def test_items_and_requests_compare_by_identity_not_by_tokens() -> None:
    assert make_request(0, 3) != make_request(0, 3)


def test_token_slice_spans_prompt_and_output() -> None:
    request = Request(request_id=0, prompt_ids=[0, 1, 2], max_tokens=9, output_ids=[3, 4, 5])
    for start in range(6):
        for stop in range(start, 7):
            assert request.token_slice(start, stop) == list(range(start, min(stop, 6)))


# --- how a request ends ---


def test_stop_token_is_kept_and_waits_for_min_tokens() -> None:
    scheduler = make_scheduler()
    request = make_request(0, 2, max_tokens=9, min_tokens=3, stop_token_ids=frozenset({7, 8}))
    scheduler.add(request)
    for token in (7, 8):
        step(scheduler, token)
        assert request.finish_reason is None
    step(scheduler, 7)
    assert (request.finish_reason, request.output_ids) == ("stop", [7, 8, 7])


def test_stop_on_the_last_token_is_a_stop() -> None:
    scheduler = make_scheduler()
    request = make_request(0, 2, max_tokens=2, stop_token_ids=frozenset({7}))
    scheduler.add(request)
    step(scheduler, 1)
    step(scheduler, 7)
    assert request.finish_reason == "stop"


@pytest.mark.parametrize(("num_prompt", "num_output"), [(7, 3), (9, 1), (10, 1)])
def test_generation_ends_at_max_context(num_prompt: int, num_output: int) -> None:
    scheduler = make_scheduler(max_context=10)
    request = make_request(0, num_prompt, max_tokens=50)
    scheduler.add(request)
    run_until(scheduler, lambda: not scheduler.has_work)
    assert (request.finish_reason, len(request.output_ids)) == ("length", num_output)


def test_generation_ends_where_the_whole_pool_is_full() -> None:
    scheduler = make_scheduler(num_rows=2)
    request = make_request(0, 5, max_tokens=50)
    scheduler.add(request)
    run_until(scheduler, lambda: not scheduler.has_work)
    assert (request.finish_reason, len(request.output_ids), request.num_preemptions) == ("length", 3, 0)


def test_logits_that_are_not_finite_end_one_request_alone() -> None:
    scheduler = make_scheduler()
    bad, good = make_request(0, 3), make_request(1, 3)
    scheduler.add(bad)
    scheduler.add(good)
    plan = scheduler.plan()
    assert plan is not None
    assert scheduler.commit(plan, [NOT_FINITE, 6]) == [bad]
    assert (bad.finish_reason, bad.output_ids) == ("error", [])
    assert bad.error is not None
    assert "position 2" in bad.error
    assert (good.finish_reason, good.output_ids, scheduler.num_free_rows) == (None, [6], 7)


def test_fail_ends_a_request_with_its_error() -> None:
    scheduler = make_scheduler()
    request = make_request(0, 3)
    scheduler.add(request)
    step(scheduler)
    assert scheduler.fail(0, "disk on fire")
    assert not scheduler.fail(0, "again")
    assert (request.finish_reason, request.error, scheduler.num_free_rows) == ("error", "disk on fire", 8)


def test_cancel_frees_rows_at_once_waiting_or_running() -> None:
    scheduler = make_scheduler(max_batch=1)
    running, waiting = make_request(0, 9), make_request(1, 3)
    scheduler.add(running)
    scheduler.add(waiting)
    step(scheduler)
    assert scheduler.num_free_rows == 5
    assert scheduler.cancel(1)
    assert waiting.finish_reason == "cancelled"
    assert scheduler.num_waiting == 0
    assert scheduler.cancel(0)
    assert running.finish_reason == "cancelled"
    assert running.rows == []
    assert scheduler.num_free_rows == 8
    assert not scheduler.has_work
    assert not scheduler.cancel(0)
    assert not scheduler.cancel(99)


def test_cancel_between_plan_and_commit_skips_that_item() -> None:
    scheduler = make_scheduler()
    requests = [make_request(request_id, 3) for request_id in range(3)]
    for request in requests:
        scheduler.add(request)
    plan = scheduler.plan()
    assert plan is not None
    scheduler.cancel(1)
    scheduler.add(make_request(1, 4))  # the id is free again, and the new request must not get the old one's token
    assert scheduler.commit(plan, [4, 5, 6]) == []
    assert [request.output_ids for request in requests] == [[4], [], [6]]
    assert step(scheduler) == [(0, 3, 1, True), (2, 3, 1, True), (1, 0, 4, True)]


def test_commit_refuses_a_stale_plan_and_a_wrong_number_of_tokens() -> None:
    scheduler = make_scheduler()
    request = make_request(0, 3)
    scheduler.add(request)
    old, plan = scheduler.plan(), scheduler.plan()
    assert old is not None
    assert plan is not None
    assert shape(old) == shape(plan)
    with pytest.raises(ValueError, match="latest plan"):
        scheduler.commit(old, [1])
    with pytest.raises(ValueError, match="2 tokens, but the plan samples 1"):
        scheduler.commit(plan, [1, 1])
    scheduler.commit(plan, [1])
    with pytest.raises(ValueError, match="once"):
        scheduler.commit(plan, [1])
    assert request.output_ids == [1]


# --- what is refused ---


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "words"),
    [
        (0, 4, ["request 3", "prompt is empty"]),
        (21, 4, ["21 tokens", "max_context=20"]),
        (16, 1, ["16 tokens", "17 with", "holds 16 (4 page rows)"]),
        (17, 0, ["17 tokens", "holds 16"]),
        (2, -1, ["max_tokens=-1"]),
    ],
)
def test_requests_that_can_never_run_are_refused(num_prompt: int, max_tokens: int, words: list[str]) -> None:
    scheduler = make_scheduler(num_rows=4, max_context=20)
    before = scheduler.digest()
    with pytest.raises(RequestError) as caught:
        scheduler.add(make_request(3, num_prompt, max_tokens))
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert not scheduler.has_work
    assert scheduler.digest() == before


def test_an_id_in_use_is_refused_and_a_finished_one_is_free_again() -> None:
    scheduler = make_scheduler()
    first = make_request(3, 2, max_tokens=1)
    scheduler.add(first)
    with pytest.raises(RequestError, match="request_id=3 is in use"):
        scheduler.add(make_request(3, 5))
    step(scheduler)
    with pytest.raises(RequestError, match="served before"):
        scheduler.add(first)
    scheduler.add(make_request(3, 5))
    assert scheduler.num_waiting == 1


@pytest.mark.parametrize("name", ["num_rows", "max_batch", "max_context", "prefill_chunk"])
def test_sizes_must_be_positive(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=0"):
        make_scheduler(**{name: 0})


# --- when rows run out ---


def run_until_preempted(scheduler: Scheduler) -> None:
    before = scheduler.num_preemptions
    run_until(scheduler, lambda: scheduler.num_preemptions > before)


def test_the_last_is_preempted_and_computed_again_with_its_output() -> None:
    scheduler = make_scheduler(num_rows=6)
    first, last = make_request(0, 7, max_tokens=12), make_request(1, 6, max_tokens=10)
    scheduler.add(first)
    scheduler.add(last)
    run_until_preempted(scheduler)
    assert (first.num_preemptions, last.num_preemptions) == (0, 1)
    assert (last.state, last.rows, last.num_computed) == (RequestState.WAITING, [], 0)
    kept = list(last.output_ids)
    assert len(kept) > 1
    fed = run_until(scheduler, lambda: first.is_finished)
    assert {item[0] for items in fed for item in items} == {0}, "there is no room yet for the preempted request"
    assert step(scheduler, 9) == [(1, 0, 6 + len(kept), True)]
    assert last.output_ids == [*kept, 9]


def test_the_last_pauses_with_its_rows_instead_of_preempting_others_or_itself() -> None:
    scheduler = make_scheduler(num_rows=5)
    first, last = make_request(0, 1, max_tokens=20), make_request(1, 7, max_tokens=12)
    scheduler.add(first)
    scheduler.add(last)
    while len(step(scheduler)) == 2:
        assert last.num_computed <= 12
    assert (scheduler.num_free_rows, scheduler.num_running, scheduler.num_preemptions) == (0, 2, 0)
    assert (last.num_computed, last.num_tokens, len(last.rows)) == (12, 13, 3)
    run_until_preempted(scheduler)
    assert (first.num_tokens, last.num_preemptions) == (10, 1), "its rows go when the first one needs them"


def test_a_prefill_takes_the_rows_that_there_are() -> None:
    """A long prompt that lost its promised rows to a decode ahead of it goes on in smaller chunks."""
    scheduler = make_scheduler(num_rows=8, prefill_chunk=3)
    first, last = make_request(0, 2, max_tokens=40), make_request(1, 24, max_tokens=0)
    scheduler.add(first)
    scheduler.add(last)
    fed = [[count for request_id, _, count, _ in step(scheduler) if request_id == 1] for _ in range(11)]
    assert fed == [[1], *[[2]] * 9, [1]], "the last chunk is cut at the end of its rows"
    assert (len(first.rows), len(last.rows), last.num_computed) == (3, 5, 20)
    step(scheduler)
    assert (len(first.rows), last.num_preemptions) == (4, 1)


def test_low_priority_is_preempted_before_a_later_arrival_of_high_priority() -> None:
    scheduler = make_scheduler(num_rows=6)
    low, high = make_request(0, 6, max_tokens=12, priority=1), make_request(1, 6, max_tokens=12, priority=0)
    scheduler.add(low)
    step(scheduler)
    scheduler.add(high)
    run_until_preempted(scheduler)
    assert (low.num_preemptions, high.num_preemptions) == (1, 0)


def test_waiting_requests_are_not_passed_and_do_not_preempt() -> None:
    scheduler = make_scheduler(num_rows=6)
    scheduler.add(make_request(0, 12, max_tokens=8))
    step(scheduler)
    scheduler.add(make_request(1, 16, max_tokens=2))
    scheduler.add(make_request(2, 1, max_tokens=1))
    for _ in range(7):
        assert [item[0] for item in step(scheduler)] == [0]
    assert [item[0] for item in step(scheduler)] == [1]
    assert scheduler.num_preemptions == 0


def test_two_long_prompts_do_not_evict_each_other_halfway() -> None:
    scheduler = make_scheduler(num_rows=10, prefill_chunk=4)
    requests = [make_request(request_id, 24, max_tokens=3) for request_id in range(2)]
    for request in requests:
        scheduler.add(request)
    fed = run_until(scheduler, lambda: not scheduler.has_work)
    assert scheduler.num_preemptions == 0
    assert len(fed) == 2 * (24 // 4 + 2)


def test_a_request_does_not_start_on_the_row_that_a_running_one_needs_next() -> None:
    scheduler = make_scheduler(num_rows=5)
    first, second = make_request(0, 5, max_tokens=6), make_request(1, 8, max_tokens=4)
    scheduler.add(first)
    step(scheduler)
    scheduler.add(second)
    assert scheduler.num_free_rows == 3
    fed = run_until(scheduler, lambda: first.is_finished)
    assert {item[0] for items in fed for item in items} == {0}
    assert [item[0] for item in step(scheduler)] == [1]


def test_short_requests_fill_the_pool() -> None:
    scheduler = make_scheduler(num_rows=4, max_batch=8)
    for request_id in range(4):
        scheduler.add(make_request(request_id, 2, max_tokens=3))  # 4 computed tokens at the end: one row each
    assert len(step(scheduler)) == 4


# --- rows that are shared ---


def run_alone(scheduler: Scheduler, request: Request) -> list[list[tuple[int, int, int, bool]]]:
    scheduler.add(request)
    return run_until(scheduler, lambda: request.is_finished)


def numbered(request_id: int, num_prompt: int, max_tokens: int = 1, **fields: Any) -> Request:
    """All prompts are beginnings of one sequence."""
    return Request(request_id=request_id, prompt_ids=list(range(num_prompt)), max_tokens=max_tokens, **fields)


@pytest.mark.parametrize(("num_prompt", "num_reused"), [(12, 8), (13, 12), (4, 0), (5, 4), (40, 20)])
def test_a_finished_request_leaves_its_rows_and_the_last_token_is_computed(num_prompt: int, num_reused: int) -> None:
    scheduler = make_scheduler(num_rows=32, prefill_chunk=100, prefix_reuse=True)
    run_alone(scheduler, numbered(0, 20, max_tokens=2))
    assert (scheduler.num_free_rows, scheduler.num_idle_rows) == (32, 5)
    second = numbered(1, num_prompt)
    assert run_alone(scheduler, second) == [[(1, num_reused, num_prompt - num_reused, True)]]
    assert second.num_reused == scheduler.num_reused_tokens == num_reused


def test_output_can_be_reused_too() -> None:
    """The next turn of a chat begins with the answer of the last one."""
    scheduler = make_scheduler(num_rows=32, prefill_chunk=100, prefix_reuse=True)
    first = numbered(0, 6, max_tokens=7)
    run_alone(scheduler, first)
    turn = Request(request_id=1, prompt_ids=[*first.prompt_ids, *first.output_ids, 9, 9], max_tokens=1)
    assert run_alone(scheduler, turn) == [[(1, 12, 3, True)]]


def test_a_request_that_wants_all_logits_computes_all() -> None:
    scheduler = make_scheduler(num_rows=32, prefill_chunk=100, prefix_reuse=True)
    run_alone(scheduler, numbered(0, 20))
    assert run_alone(scheduler, numbered(1, 20, max_tokens=0, collect="all_logits")) == [[(1, 0, 20, False)]]


def test_running_requests_share_and_twins_that_start_together_merge() -> None:
    scheduler = make_scheduler(num_rows=32, prefill_chunk=100, prefix_reuse=True)
    for request_id in range(3):
        scheduler.add(numbered(request_id, 17, max_tokens=9))
    assert [count for _, _, count, _ in step(scheduler)] == [17, 17, 17]
    assert 32 - scheduler.num_free_rows == 4 + 3
    scheduler.add(numbered(3, 17, max_tokens=9))
    assert step(scheduler)[-1] == (3, 16, 1, True)
    assert 32 - scheduler.num_free_rows == 4 + 4
    run_until(scheduler, lambda: not scheduler.has_work)
    assert scheduler.num_free_rows == 32


def test_many_fit_where_they_share_a_long_beginning() -> None:
    """100 tokens each, in a pool of 160: only together can they run at once."""
    scheduler = make_scheduler(num_rows=40, max_batch=6, max_context=160, prefill_chunk=200, prefix_reuse=True)
    run_alone(scheduler, numbered(0, 100))
    for request_id in range(1, 7):
        scheduler.add(Request(request_id=request_id, prompt_ids=[*range(100), request_id], max_tokens=4))
    assert [item[1:] for item in step(scheduler)] == [(100, 1, True)] * 6
    run_until(scheduler, lambda: not scheduler.has_work)
    assert scheduler.num_preemptions == 0


def test_a_preempted_request_goes_on_with_the_rows_that_are_left() -> None:
    scheduler = make_scheduler(num_rows=6, prefix_reuse=True)
    first, last = make_request(0, 7, max_tokens=12), make_request(1, 6, max_tokens=10)
    scheduler.add(first)
    scheduler.add(last)
    run_until_preempted(scheduler)
    num_tokens = last.num_tokens
    assert scheduler.num_idle_rows > 0
    run_until(scheduler, lambda: first.is_finished)
    ((_, start, count, samples),) = step(scheduler)
    assert (start, start + count, samples) == (4, num_tokens, True)
    assert last.num_reused == 0, "counts what the first start found"


def test_content_of_a_failed_request_is_not_found() -> None:
    scheduler = make_scheduler(num_rows=32, prefill_chunk=100, prefix_reuse=True)
    scheduler.add(numbered(0, 20, max_tokens=2))
    step(scheduler, NOT_FINITE)
    assert (scheduler.num_free_rows, scheduler.num_idle_rows) == (32, 0)


def test_prompts_of_other_lengths_share_only_where_their_keys_are_equal() -> None:
    """With dynamic rotary, keys depend on the length of the prompt beyond the length it was trained for."""
    scheduler = make_scheduler(num_rows=64, prefill_chunk=100, prefix_reuse=True, fixed_up_to=16)
    starts = [run_alone(scheduler, numbered(index, size))[0][0][1] for index, size in enumerate((9, 16, 20, 20, 21))]
    assert starts == [0, 8, 0, 16, 0]


def test_no_stream_of_high_priority_keeps_a_low_one_waiting_for_ever() -> None:
    scheduler = make_scheduler(max_batch=1)
    low = make_request(0, 2, max_tokens=1, priority=1)
    scheduler.add(low)
    for request_id in range(1, 2 * PLACES):
        scheduler.add(make_request(request_id, 2, max_tokens=1))
        step(scheduler)
        if low.is_finished:
            break
    assert request_id == PLACES
    assert low.finish_reason == "length"


def test_a_long_prefill_never_delays_a_running_decode() -> None:
    """Each step feeds every decode and at most `prefill_chunk` tokens in all."""
    scheduler = make_scheduler(num_rows=4000, max_batch=4, max_context=9000, prefill_chunk=32)
    for request_id in range(3):
        scheduler.add(make_request(request_id, 2, max_tokens=400))
    step(scheduler)
    long = make_request(3, 8000, max_tokens=1)
    scheduler.add(long)
    for fed in run_until(scheduler, lambda: long.num_computed > 5000):
        assert [item[0] for item in fed] == [0, 1, 2, 3]
        assert sum(count for _, _, count, _ in fed) == 32


# --- cost and agreement ---


class WatchedList(list[int]):
    """A prompt that may only be read by short slices."""

    def __iter__(self) -> Any:
        raise AssertionError("the whole prompt is walked")

    def __getitem__(self, key: Any) -> Any:
        taken = super().__getitem__(key)
        assert not isinstance(key, slice) or len(taken) <= 64, "too much of the prompt is copied"
        return taken


class WatchedRequest(Request):
    """Counts how often the scheduler looks at its length."""

    num_looks = 0

    @property
    def num_tokens(self) -> int:
        WatchedRequest.num_looks += 1
        return len(self.prompt_ids) + len(self.output_ids)


def looks_of_five_steps(num_waiting: int) -> int:
    scheduler = make_scheduler(num_rows=64, max_batch=4)
    for request_id in range(4 + num_waiting):
        scheduler.add(WatchedRequest(request_id=request_id, prompt_ids=[1, 2, 3], max_tokens=50))
    WatchedRequest.num_looks = 0
    for _ in range(5):
        step(scheduler)
    return WatchedRequest.num_looks


def test_a_step_does_not_look_at_those_who_wait() -> None:
    assert looks_of_five_steps(1) == looks_of_five_steps(3000) > 0


def test_a_step_never_walks_a_long_prompt() -> None:
    scheduler = make_scheduler(num_rows=30_000, max_context=200_000, prefill_chunk=64)
    request = Request(request_id=0, prompt_ids=WatchedList(range(100_000)), max_tokens=2)
    scheduler.add(request)
    for number in range(10):
        plan = scheduler.plan()
        assert plan is not None
        assert plan.items[0].token_ids == list(range(number * 64, number * 64 + 64))
        scheduler.commit(plan, [])


def test_digest_is_a_fixed_function_of_the_state() -> None:
    """Not Python's hash(): the number below is the same in every process and on every machine."""
    scheduler = make_scheduler()
    scheduler.add(make_request(0, 6))
    step(scheduler)
    assert scheduler.digest() == FIXED_DIGEST
    assert -(2**63) <= scheduler.digest() < 2**63


def test_digest_sees_each_kind_of_drift() -> None:
    def state(num_prompt: int = 6, token: int = 1, steps: int = 2, second: bool = True, priority: int = 0) -> int:
        scheduler = make_scheduler()
        scheduler.add(make_request(0, num_prompt, priority=priority))
        if second:
            scheduler.add(make_request(1, 3))
        for _ in range(steps):
            step(scheduler, token)
        return scheduler.digest()

    drifted = [
        state(num_prompt=5),
        state(token=2),
        state(steps=1),
        state(steps=0),
        state(second=False),
        state(priority=1),
    ]
    assert state() == state()
    assert len({state(), *drifted}) == 7


# --- random traffic ---


class Pair:
    """Two schedulers that get the same calls; a fake model with real page rows runs on the first one's plans."""

    def __init__(
        self,
        page_tokens: int,
        kvp: int,
        num_rows: int,
        max_batch: int,
        max_context: int,
        prefill_chunk: int,
        reuse: bool = False,
    ) -> None:
        page_rule = PageRule(page_tokens=page_tokens, kvp=kvp)
        self.num_rows, self.max_context, self.chunk, self.max_batch = num_rows, max_context, prefill_chunk, max_batch
        self.pool_tokens = num_rows * page_rule.row_tokens
        self.one, self.two = (
            Scheduler(page_rule, num_rows, max_batch, max_context, prefill_chunk, prefix_reuse=reuse) for _ in range(2)
        )
        self.model = FakeModel(page_rule, reuse=reuse)
        self.requests: dict[int, Request] = {}
        self.twins: dict[int, Request] = {}
        self.ended_by_us: set[int] = set()
        self.num_pauses = 0

    def live(self) -> list[Request]:
        return [request for request in self.requests.values() if not request.is_finished]

    def running(self) -> list[Request]:
        return sorted((r for r in self.live() if r.state is RequestState.RUNNING), key=lambda r: r.order)

    def add(
        self, num_prompt: int, max_tokens: int, bad_output: int | None = None, own_from: int = 0, **fields: Any
    ) -> None:
        """Prompts are the same up to the token number `own_from`."""
        request_id = len(self.requests)
        request, twin = (make_request(request_id, num_prompt, max_tokens, **fields) for _ in range(2))
        for one in (request, twin):
            one.prompt_ids[:own_from] = [position * 3 % VOCABULARY for position in range(num_prompt)][:own_from]
        fits = 0 < num_prompt <= min(self.max_context, self.pool_tokens - min(max_tokens, 1))
        for scheduler, mine in ((self.one, request), (self.two, twin)):
            if fits:
                scheduler.add(mine)
            else:
                with pytest.raises(RequestError):
                    scheduler.add(mine)
        if fits:
            self.requests[request_id], self.twins[request_id] = request, twin
            if bad_output is not None:
                self.model.bad_output[request_id] = bad_output

    def add_random(self, random: Random) -> None:
        self.add(
            num_prompt=random.randint(1, max(1, self.pool_tokens // random.choice([2, 4, 8]))),
            max_tokens=random.choice([0, 1, 12, 25, 25, 40]),
            min_tokens=random.choice([0, 0, 4]),
            stop_token_ids=frozenset(random.sample(range(VOCABULARY), random.choice([0, 0, 0, 1]))),
            priority=random.choice([0, 0, 0, 1, -1]),
            bad_output=random.choice([None, None, None, None, None, 2]),
            own_from=random.choice([0, 5, 9, 100]),
            collect=random.choice(["tokens", "tokens", "tokens", "all_logits"]),
        )

    def end(self, request_id: int, is_cancel: bool) -> None:
        for scheduler in (self.one, self.two):
            assert scheduler.cancel(request_id) if is_cancel else scheduler.fail(request_id, "on purpose")
        self.ended_by_us.add(request_id)
        request = self.requests[request_id]
        assert request.finish_reason == ("cancelled" if is_cancel else "error")
        assert not request.rows

    def step(self, end_inside: tuple[int, bool] | None = None) -> None:
        """One step with every check; `end_inside` (id, is_cancel) ends a request between plan and commit."""
        before = {request: (request.state, request.num_preemptions) for request in self.live()}
        plan, twin_plan = self.one.plan(), self.two.plan()
        assert shape(plan) == shape(twin_plan)
        assert self.one.digest() == self.two.digest()
        assert (plan is None) == (not before), "a step with work to do must do some"
        if plan is None or twin_plan is None:
            return
        self.check_plan(plan)
        self.check_order(before)
        self.check_rows()
        tokens = self.model.step(plan)
        holders = Counter(row for request in self.live() for row in request.rows)
        assert all(holders[row] == 1 for row in self.model.written), "a shared row is written"
        if end_inside is not None:
            self.end(*end_inside)
        finished, twin_finished = self.one.commit(plan, tokens), self.two.commit(twin_plan, tokens)
        assert [r.request_id for r in finished] == [r.request_id for r in twin_finished]
        expected = {r for r in before if r.is_finished and not (end_inside and r.request_id == end_inside[0])}
        assert set(finished) == expected
        for request in finished:
            self.check_result(request)

    def check_plan(self, plan: StepPlan) -> None:
        prefilling = [item.request.is_prefilling for item in plan.items]
        assert prefilling == sorted(prefilling), "decodes come first"
        num_decodes = prefilling.count(False)
        assert all(item.count == 1 and item.samples for item in plan.items[:num_decodes])
        assert plan.num_tokens - num_decodes <= max(self.chunk - num_decodes, 1)
        assert plan.num_tokens <= self.one.max_step_tokens
        planned = {item.request for item in plan.items}
        assert len(planned) == len(plan.items) <= self.max_batch
        running = self.running()
        assert running[0] in planned, "the first running request moves in every step"
        paused = [r for r in running if not r.is_prefilling and r not in planned]
        self.num_pauses += len(paused)
        if paused:
            assert paused == [running[-1]]
            assert self.one.num_free_rows == 0
        for item in plan.items:
            stop = item.start + item.count
            assert item.start == item.request.num_computed
            assert item.samples == (stop == item.request.num_tokens and item.request.max_tokens > 0)
            assert len(item.request.rows) * self.model.rule.row_tokens >= stop

    def check_order(self, before: dict[Request, tuple[RequestState, int]]) -> None:
        running = self.running()
        waiting = [r for r in self.live() if r.state is RequestState.WAITING]
        preempted = [r for r, (_, count) in before.items() if r.num_preemptions > count]
        started = [r for r, (state, _) in before.items() if state is RequestState.WAITING and r in running]
        assert all(r.state is RequestState.WAITING for r in preempted)
        assert all(r.order < p.order for r in running for p in preempted), "preempted for one behind it"
        assert all(r.order < w.order for r in started for w in waiting), "one that waits was passed"

    def check_result(self, request: Request) -> None:
        max_len = min(self.max_context, self.pool_tokens)
        output, reason = undisturbed(request, max_len, self.model.bad_output.get(request.request_id))
        assert (request.output_ids, request.finish_reason) == (output, reason)
        assert self.model.num_fed[request] == len(request.prompt_ids) + max(len(output) - (reason != "error"), 0)
        assert (request.error is not None) == (reason == "error")

    def check_rows(self) -> None:
        held = Counter(row for request in self.live() for row in request.rows)
        assert self.model.reuse or max(held.values(), default=1) == 1, "a row has two owners"
        assert len(held) + self.one.num_free_rows == self.num_rows
        assert [held[row] for row in range(self.num_rows)] == self.one._rows._num_holders
        assert all(not r.rows for r in self.requests.values() if r.state is not RequestState.RUNNING)
        for request in self.running():
            assert len(request.rows) * self.model.rule.row_tokens >= request.num_computed
            assert len(request.rows) <= self.model.rule.rows_for(request.num_tokens)
        for request_id, request in self.requests.items():
            assert self.twins[request_id].rows == request.rows
        self.check_shared_rows()

    def check_shared_rows(self) -> None:
        """Every full row of a request can be found, and holds what the request would have computed itself."""
        row_tokens = self.model.rule.row_tokens
        for request in self.running() if self.model.reuse else ():
            num_full = request.num_computed // row_tokens
            assert request.num_published == num_full
            tokens = (request.prompt_ids + request.output_ids)[: num_full * row_tokens]
            assert [self.model.cells[self.model.cell(request, at)] for at in range(len(tokens))] == tokens
            assert len(set(request.rows)) == len(request.rows)

    def check_counts(self) -> None:
        assert self.one.digest() == self.two.digest()
        assert self.one.num_running == len(self.running()) <= self.max_batch
        assert self.one.num_running + self.one.num_waiting == len(self.live())
        assert self.one.has_work == bool(self.live())
        assert self.one.num_preemptions == sum(r.num_preemptions for r in self.requests.values())

    def drain(self) -> None:
        """Run to the end within a bounded number of steps, then look at every result and every row."""
        live = self.live()
        longest = max((len(r.prompt_ids) + r.max_tokens for r in live), default=0)
        for _ in range(longest * len(live) ** 2):
            if not self.one.has_work:
                break
            self.step()
            self.check_rows()
            self.check_counts()
        assert not self.live(), "not done after a bounded number of steps"
        assert self.one.num_free_rows == self.two.num_free_rows == self.num_rows
        assert self.one.plan() is None
        for request_id in self.requests.keys() - self.ended_by_us:
            self.check_result(self.requests[request_id])


class Traffic(RuleBasedStateMachine):
    """Any order of calls; hypothesis looks for the shortest one that breaks a check of `Pair`."""

    @initialize(
        page_tokens=st.sampled_from([1, 2]),
        kvp=st.sampled_from([2, 1, 3]),
        num_rows=st.sampled_from([9, 12, 7, 4, 2]),
        max_batch=st.sampled_from([4, 6, 2, 1]),
        max_context=st.sampled_from([60, 20, 7]),
        prefill_chunk=st.sampled_from([12, 5, 2, 1]),
        reuse=st.booleans(),
    )
    def start(self, **sizes: Any) -> None:
        self.pair = Pair(**sizes)

    @rule(
        num_prompt=st.integers(0, 30),
        max_tokens=st.integers(0, 20),
        min_tokens=st.integers(0, 4),
        stop_token_ids=st.frozensets(st.integers(0, VOCABULARY - 1), max_size=2),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        bad_output=st.sampled_from([None, None, None, 0, 2]),
        own_from=st.sampled_from([0, 30, 7]),
        collect=st.sampled_from(["tokens", "tokens", "all_logits"]),
    )
    def add(self, **fields: Any) -> None:
        self.pair.add(**fields)

    @rule(seed=st.integers(0, 2**16), count=st.integers(2, 5))
    def add_several(self, seed: int, count: int) -> None:
        random = Random(seed)
        for _ in range(count):
            self.pair.add_random(random)

    @rule(count=st.sampled_from([12, 5, 1]))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.pair.step()

    @rule()
    def plan_and_forget(self) -> None:
        assert shape(self.pair.one.plan()) == shape(self.pair.two.plan())

    @precondition(lambda self: self.pair.live())
    @rule(data=st.data(), is_cancel=st.booleans(), is_inside=st.booleans())
    def end(self, data: st.DataObject, is_cancel: bool, is_inside: bool) -> None:
        request_id = data.draw(st.sampled_from([request.request_id for request in self.pair.live()]))
        if is_inside:
            self.pair.step((request_id, is_cancel))
        else:
            self.pair.end(request_id, is_cancel)

    @invariant()
    def check(self) -> None:
        self.pair.check_rows()
        self.pair.check_counts()

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.pair.drain()


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(
    max_examples=60, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def soak(seed: int) -> Pair:
    """Random arrivals and cancels on a pool that is too small for them."""
    random = Random(seed)
    pair = Pair(
        page_tokens=random.randint(1, 2),
        kvp=random.randint(1, 3),
        num_rows=random.randint(5, 16),
        max_batch=random.randint(2, 6),
        max_context=random.choice([1000, 1000, 30]),
        prefill_chunk=random.randint(1, 16),
        reuse=seed % 2 == 1,
    )
    for _ in range(60):
        if random.random() < 0.25:
            pair.add_random(random)
        live = [request.request_id for request in pair.live()]
        if live and random.random() < 0.04:
            pair.end(random.choice(live), is_cancel=random.random() < 0.5)
        elif live and random.random() < 0.04:
            pair.step((random.choice(live), random.random() < 0.5))
        else:
            pair.step()
        pair.check_rows()
        pair.check_counts()
    pair.drain()
    return pair


def test_soak_of_small_pools_reaches_preemption_and_pauses() -> None:
    pairs = [soak(seed) for seed in range(40)]
    assert sum(pair.one.num_preemptions > 0 for pair in pairs) > 12
    assert sum(pair.num_pauses > 0 for pair in pairs) > 8
    again = [request for pair in pairs for request in pair.requests.values() if request.num_preemptions > 1]
    assert len(again) > 2
    assert sum(pair.model.num_reused > 0 for pair in pairs) > 12
    assert all(pair.model.num_reused == pair.one.num_reused_tokens for pair in pairs)


def test_drain_of_equal_priorities_takes_no_more_steps_than_one_after_the_other() -> None:
    """The first of all requests is never preempted, so the bound is the sum of the sequences, whatever the pool."""
    for num_rows in range(6, 14):
        scheduler = make_scheduler(num_rows=num_rows, max_batch=5, prefill_chunk=5)
        model = FakeModel(scheduler.rule)
        requests = [make_request(request_id, 3 + 4 * request_id % 17, max_tokens=14) for request_id in range(9)]
        for request in requests:
            scheduler.add(request)
        bound = sum(len(request.prompt_ids) + request.max_tokens for request in requests)
        for _ in range(bound):
            plan = scheduler.plan()
            if plan is None:
                break
            scheduler.commit(plan, model.step(plan))
        assert all(request.is_finished for request in requests)
        max_len = num_rows * scheduler.rule.row_tokens
        assert [(r.output_ids, r.finish_reason) for r in requests] == [undisturbed(r, max_len) for r in requests]
        assert scheduler.num_preemptions > 0 or num_rows > 8
