"""Steps planned before the tokens of the last one are known: the scheduler against a fake model with real page rows."""

from __future__ import annotations

from random import Random

import pytest

from helix.engine.request import Request
from helix.engine.scheduler import NOT_FINITE, UNDECIDED, Scheduler, StepItem, StepPlan
from helix.layout import PageRule
from tests.unit.test_scheduler import VOCABULARY, make_request, make_scheduler, next_token, shape, undisturbed

GARBAGE = VOCABULARY - 1


def launch(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan()
    assert plan is not None
    scheduler.book(plan)
    return plan


def test_a_booked_step_counts_and_the_next_one_feeds_its_token() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(0, 6))
    prefill = launch(scheduler)
    decode = scheduler.plan()
    assert shape(decode) == [(0, 6, 1, True)]
    assert decode is not None
    item = decode.items[0]
    assert (item.feeds_pending, item.token_ids) == (True, [])
    assert not prefill.items[0].request.output_ids
    scheduler.commit(prefill, [7])
    assert (item.feeds_pending, item.token_ids) == (False, [7])


def test_rows_are_taken_for_tokens_that_are_not_known_yet() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(0, 4, max_tokens=6))
    launch(scheduler)
    assert [len(item.request.rows) for item in launch(scheduler).items] == [2], "row 1 begins at token 4"


def test_a_request_that_ends_with_the_token_under_way_is_left_out() -> None:
    scheduler = make_scheduler(max_context=12)
    requests = [make_request(0, 5, max_tokens=1), make_request(1, 11, max_tokens=9), make_request(2, 4, max_tokens=0)]
    for one in requests:
        scheduler.add(one)
    first = launch(scheduler)
    second = launch(scheduler)
    assert shape(second) == [(2, 0, 4, False)]
    assert scheduler.plan() is None
    assert scheduler.commit(first, [3, 4]) == requests[:2]
    assert scheduler.commit(second, []) == requests[2:]
    assert [one.finish_reason for one in requests] == ["length"] * 3
    assert scheduler.num_free_rows == scheduler.num_rows


def test_a_stop_token_is_found_one_step_late_and_the_extra_token_is_dropped() -> None:
    scheduler = make_scheduler()
    stopping = make_request(0, 3, max_tokens=9, stop_token_ids=frozenset({5}))
    going = make_request(1, 3, max_tokens=9)
    scheduler.add(stopping)
    scheduler.add(going)
    first = launch(scheduler)
    second = launch(scheduler)
    assert scheduler.commit(first, [5, 6]) == [stopping]
    assert [scheduler.is_live(second, item) for item in second.items] == [False, True]
    assert scheduler.commit(second, [1, 2]) == []
    assert (stopping.output_ids, going.output_ids) == ([5], [6, 2])


def test_an_undecided_token_is_asked_for_again_and_what_was_launched_since_is_void() -> None:
    scheduler = make_scheduler()
    request = make_request(0, 3, max_tokens=9, choice="ranked")
    scheduler.add(request)
    first, second = launch(scheduler), launch(scheduler)
    assert request.next_choice == "ranked"
    scheduler.commit(first, [UNDECIDED])
    assert (request.next_choice, request.num_pending, request.output_ids) == ("host", 0, [])
    again = launch(scheduler)
    assert shape(again) == [(0, 2, 1, True)]
    assert not scheduler.is_live(second, second.items[0])
    scheduler.commit(second, [8])
    assert request.output_ids == []
    scheduler.commit(again, [4])
    assert (request.next_choice, request.output_ids) == ("ranked", [4])
    assert shape(scheduler.plan()) == [(0, 3, 1, True)]


def test_min_tokens_need_the_host_until_they_are_there() -> None:
    scheduler = make_scheduler()
    request = make_request(0, 3, max_tokens=9, min_tokens=2, choice="best")
    scheduler.add(request)
    choices = []
    for _ in range(4):
        choices.append(request.next_choice)
        scheduler.commit(launch(scheduler), [1])
    assert choices == ["host", "host", "best", "best"]


def test_only_the_latest_plan_is_booked_and_the_oldest_committed() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(0, 3, max_tokens=9))
    old, plan = scheduler.plan(), scheduler.plan()
    assert old is not None
    assert plan is not None
    with pytest.raises(ValueError, match="latest plan"):
        scheduler.book(old)
    scheduler.book(plan)
    with pytest.raises(ValueError, match="latest plan"):
        scheduler.book(plan)
    second = launch(scheduler)
    with pytest.raises(ValueError, match="oldest booked"):
        scheduler.commit(second, [1])
    scheduler.commit(plan, [1])
    scheduler.commit(second, [1])


class Device:
    """Runs a step when it is launched; its tokens are told later. Feeds pending tokens from the step before."""

    def __init__(self, rule: PageRule, random: Random) -> None:
        self.rule = rule
        self.random = random
        self.cells: dict[tuple[int, int], int] = {}
        self.chosen: dict[int, int] = {}
        self.num_undecided = 0

    def run(self, plan: StepPlan) -> list[int]:
        fed = {item.request.request_id: self._tokens(item) for item in plan.items}
        tokens = []
        for item in plan.items:
            cells = [self._cell(item.request, position) for position in range(item.start + item.count)]
            self.cells.update(zip(cells[item.start :], fed[item.request.request_id], strict=True))
            if item.samples:
                tokens.append(self._sample(item, [self.cells[cell] for cell in cells]))
        sampling = [item.request.request_id for item in plan.items if item.samples]
        self.chosen = dict(zip(sampling, tokens, strict=True))
        return tokens

    def _tokens(self, item: StepItem) -> list[int]:
        pending = max(self.chosen[item.request.request_id], 0) if item.feeds_pending else GARBAGE
        return item.token_ids + [pending] * item.feeds_pending

    def _cell(self, request: Request, position: int) -> tuple[int, int]:
        return request.rows[position // self.rule.row_tokens], position % self.rule.row_tokens

    def _sample(self, item: StepItem, prefix: list[int]) -> int:
        if item.request.next_choice != "host" and self.random.random() < 0.06:
            self.num_undecided += 1
            return UNDECIDED
        return NOT_FINITE if next_token([*prefix, 1]) == next_token([*prefix, 2]) == 3 else next_token(prefix)


def soak(seed: int) -> tuple[int, int, int]:
    """Random traffic with one step under way; returns preemptions, undecided tokens and late stops."""
    random = Random(seed)
    rule = PageRule(random.randint(1, 2), random.randint(1, 3))
    sizes = (random.randint(5, 14), random.randint(2, 6), random.choice([1000, 30]), 8)
    scheduler = Scheduler(rule, *sizes, prefix_reuse=seed % 2 == 0)
    device = Device(rule, random)
    pool = scheduler.num_rows * rule.row_tokens
    requests, cancelled, late = list[Request](), set[int](), 0
    under_way: tuple[StepPlan, list[int]] | None = None
    for step in range(2000):
        if step < 80 and random.random() < 0.3:
            one = make_request(
                len(requests),
                random.randint(1, max(1, min(pool // 3, 29))),
                max_tokens=random.choice([0, 1, 7, 20, 40]),
                stop_token_ids=frozenset(random.sample(range(VOCABULARY), random.choice([0, 0, 1]))),
                choice="best",
            )
            requests.append(one)
            scheduler.add(one)
        live = [one for one in requests if not one.is_finished]
        if live and random.random() < 0.03:
            victim = random.choice(live).request_id
            scheduler.cancel(victim)
            cancelled.add(victim)
        plan = scheduler.plan()
        launched = None if plan is None else (plan, device.run(plan))
        if plan is not None:
            scheduler.book(plan)
        if under_way is not None:
            finished = scheduler.commit(*under_way)
            late += sum(item.request in finished for item in (plan.items if plan else ()))
        under_way = launched
        if step >= 80 and not scheduler.has_work:
            break
    assert not scheduler.has_work
    assert scheduler.num_free_rows == scheduler.num_rows
    max_len = min(scheduler.max_context, pool)
    for one in requests:
        if one.request_id not in cancelled and one.finish_reason != "error":
            assert (one.output_ids, one.finish_reason) == undisturbed(one, max_len), seed
    return scheduler.num_preemptions, device.num_undecided, late


def test_soak_with_a_step_under_way_gives_what_each_request_gets_alone() -> None:
    preemptions, undecided, late = (sum(one) for one in zip(*(soak(seed) for seed in range(60)), strict=True))
    assert min(preemptions, undecided, late) > 20
