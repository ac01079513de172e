"""Which tokens of which requests are computed in the next step, and which page rows hold them.

Pure Python and deterministic: every rank owns a `Scheduler`, makes the same calls on it and so gets the same plan and
the same page rows, without a message. One step is ``plan() -> model -> sample -> commit(tokens)``; where the next step
is planned before this one's tokens are known, ``plan() -> book() -> ... -> commit(tokens)`` (see `Scheduler.book`).

Requests are served in the order of `Request.order`: by arrival, where each step of `priority` counts as a number of
places, so that none waits for ever. "Ahead" and "behind" below mean this order.

* Every running decode gets its token; what is left of the budget goes to prefill chunks, in order.
* A request takes a page row when a step reaches into it. Where rows run out, the last running request is preempted: its
  rows go back and it waits at its old place, to be computed anew together with the tokens that it already has. Rows
  are only ever taken from requests behind; the last one itself keeps what it has and pauses. So the first running
  request moves in every step, and nothing can stand still.
* Waiting requests start in order, never one past another, and never by preemption: only while the pool has room for
  what every running request is promised (`Scheduler._promise`). This keeps prompts from evicting each other halfway.
* A request starts behind the full page rows that hold the tokens it begins with (`helix.cache.prefix`), whoever
  computed them. Its last token is always computed, for its logits, and so is the row of that token: shared rows are
  never written.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from helix.cache.prefix import RowCache
from helix.engine.request import FinishReason, Request, RequestState
from helix.errors import ConfigError, RequestError
from helix.layout import PageRule

NOT_FINITE = -1
"""What the sampler returns in place of a token for a row of logits that holds NaN or inf."""
UNDECIDED = -2
"""What the device returns in place of a token where choosing it takes more than the device's own sampler can do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepItem:
    """Tokens ``[start, start + count)`` of the prompt + output of `request` are fed; earlier ones are in the cache.

    With `samples`, the logits of the last of them give the request's next token.
    """

    request: Request
    start: int
    count: int
    samples: bool

    @property
    def token_ids(self) -> list[int]:
        """The tokens that are fed, without a pending one."""
        return self.request.token_slice(self.start, self.start + self.count)

    @property
    def feeds_pending(self) -> bool:
        """Whether the last token that is fed is still on the device."""
        request = self.request
        return self.start + self.count > len(request.prompt_ids) + len(request.output_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The items of one step, decodes first. Page rows for all of them are already in ``item.request.rows``."""

    items: tuple[StepItem, ...]

    @property
    def num_tokens(self) -> int:
        return sum(item.count for item in self.items)


@dataclass(frozen=True, slots=True)
class _Booked:
    """A launched step, and the requests in it that went back behind it since."""

    plan: StepPlan
    rolled_back: set[Request] = field(default_factory=set)


class Scheduler:
    """Continuous batching over `num_rows` page rows.

    At most `max_batch` requests run at once. `prefill_chunk` is the token budget of a step, decodes included; decodes
    beyond it are run all the same, and the first prefill gets at least one token, so a step has at most
    `max_step_tokens` tokens. A sequence ends with "length" at `max_context` tokens, or where the whole pool is too
    small for more.

    `prefix_reuse` shares page rows between requests that begin with the same tokens. `fixed_up_to` is for models whose
    keys depend on the length of the prompt beyond so many tokens (dynamic rotary): only prompts of one length share
    there.
    """

    def __init__(
        self,
        rule: PageRule,
        num_rows: int,
        max_batch: int,
        max_context: int,
        prefill_chunk: int,
        *,
        prefix_reuse: bool = False,
        fixed_up_to: int | None = None,
    ) -> None:
        _check_sizes(num_rows=num_rows, max_batch=max_batch, max_context=max_context, prefill_chunk=prefill_chunk)
        self.rule = rule
        self.max_batch = max_batch
        self.max_context = max_context
        self.prefill_chunk = prefill_chunk
        self.num_preemptions = 0
        self.num_reused_tokens = 0
        """Tokens that were found in page rows instead of being computed, after preemptions too."""
        self._fixed_up_to = fixed_up_to
        self._rows = RowCache(num_rows, reuse=prefix_reuse)
        self._max_len = min(max_context, num_rows * rule.row_tokens)
        self._requests: dict[int, Request] = {}
        self._running: list[Request] = []  # first to last
        self._waiting: list[Request] = []  # last to first, so that starting one is a pop() from the end
        self._num_added = 0
        self._planned: StepPlan | None = None
        self._booked: deque[_Booked] = deque()  # oldest first

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_rows(self) -> int:
        return self._rows.num_rows

    @property
    def num_free_rows(self) -> int:
        """Rows that no request holds, those with content that may be found again among them."""
        return self._rows.num_free

    @property
    def num_idle_rows(self) -> int:
        """Rows that no request holds and whose content may be found again."""
        return self._rows.num_idle

    @property
    def max_step_tokens(self) -> int:
        """Most tokens that one step can have."""
        return max(self.prefill_chunk, self.max_batch)

    def check_fits(self, request: Request) -> None:
        """Raise `RequestError` where `request` could never be served, naming both numbers; changes nothing.

        Needs no other rank: the one that takes requests asks here before it tells the others.
        """
        name, num_prompt = f"request {request.request_id}", len(request.prompt_ids)
        if not num_prompt:
            raise RequestError(f"{name}: the prompt is empty; it needs at least one token")
        if request.max_tokens < 0:
            raise RequestError(f"{name}: max_tokens={request.max_tokens} must not be negative")
        if num_prompt > self.max_context:
            raise RequestError(
                f"{name}: the prompt has {num_prompt} tokens, more than max_context={self.max_context}; "
                "shorten the prompt or raise engine.max_context"
            )
        num_needed = num_prompt + min(request.max_tokens, 1)
        num_rows = self._rows.num_rows
        if self.rule.rows_for(num_needed) > num_rows:
            raise RequestError(
                f"{name}: the prompt has {num_prompt} tokens ({num_needed} with the first new one), but the cache "
                f"holds {num_rows * self.rule.row_tokens} ({num_rows} page rows); shorten the prompt or raise "
                "cache.num_page_rows"
            )

    def add(self, request: Request) -> None:
        """Queue a new request; raises `RequestError` and changes nothing where it can never be served."""
        if request.request_id in self._requests:
            raise RequestError(f"request_id={request.request_id} is in use by an unfinished request; give another id")
        if request.state is not RequestState.WAITING or request.num_computed or request.rows:
            raise RequestError(f"request {request.request_id} was served before; make a new Request")
        self.check_fits(request)
        request.arrival = self._num_added
        self._num_added += 1
        self._requests[request.request_id] = request
        insort(self._waiting, request, key=_from_last)

    def cancel(self, request_id: int) -> bool:
        """End a request at any moment and free its rows; False where no such request is unfinished."""
        return self._end(request_id, "cancelled", None)

    def fail(self, request_id: int, error: str) -> bool:
        """End a request alone with reason "error" and free its rows; False where no such request is unfinished."""
        return self._end(request_id, "error", error)

    def plan(self) -> StepPlan | None:
        """The next step, None where there is nothing to do. Costs O(running + newly started), however many wait.

        A plan that was neither booked nor committed is forgotten: nothing of it counts as computed.
        """
        num_decodes = sum(not (request.is_prefilling or self._will_end(request)) for request in self._running)
        budget = max(self.prefill_chunk - num_decodes, 1)
        decodes: list[StepItem] = []
        prefills: list[StepItem] = []
        index = 0
        while index < len(self._running):  # preemption shortens the list behind `index`
            request = self._running[index]
            index += 1
            if self._will_end(request):
                continue
            is_prefilling = request.is_prefilling
            count = self._reserve(request, min(request.num_remaining, budget) if is_prefilling else 1)
            if not count:
                continue
            if is_prefilling:
                budget -= count
                prefills.append(_step_item(request, count))
            else:
                decodes.append(_step_item(request, count))
        for item in self._start_waiting(budget):  # one whose rows were all found again goes on decoding
            (prefills if item.request.is_prefilling else decodes).append(item)
        items = (*decodes, *prefills)
        self._planned = StepPlan(items) if items else None
        return self._planned

    def book(self, plan: StepPlan) -> None:
        """The step `plan` is launched: what it feeds counts as computed, and each token that it samples as pending.

        The next step can then be planned before this one is committed. It feeds the pending tokens, whatever they are,
        and leaves out requests that end with them. Raises ValueError where `plan` is not the latest one.
        """
        if plan is not self._planned:
            raise ValueError("only the latest plan is booked, and only once")
        self._planned = None
        self._booked.append(_Booked(plan))
        for item in plan.items:
            item.request.num_computed = item.start + item.count
            item.request.num_pending += item.samples

    def is_live(self, plan: StepPlan, item: StepItem) -> bool:
        """Whether `item` of the booked `plan` still counts: its request is unfinished and was not set back since."""
        booked = next(one for one in self._booked if one.plan is plan)
        return not item.request.is_finished and item.request not in booked.rolled_back

    def commit(self, plan: StepPlan, tokens: Sequence[int]) -> list[Request]:
        """Take the tokens of the step `plan` (booked now, if it was not) and return the requests that it finished.

        `tokens` has one entry for each item that samples, in plan order; `NOT_FINITE` ends that request alone with
        reason "error", and `UNDECIDED` sets it back by one token, which it then feeds again. Items of requests that
        were cancelled, failed or set back since `plan()` are skipped. Raises ValueError where `plan` is neither the
        oldest booked one nor the latest, was committed before, or `tokens` has another length.
        """
        num_samples = sum(item.samples for item in plan.items)
        if len(tokens) != num_samples:
            raise ValueError(f"commit got {len(tokens)} tokens, but the plan samples {num_samples}")
        if not self._booked and plan is self._planned:
            self.book(plan)
        if not self._booked or plan is not self._booked[0].plan:
            raise ValueError("commit takes the latest plan, or the oldest booked one, and takes it once")
        sampled = iter(tokens)
        finished: list[Request] = []
        for item in plan.items:
            token = next(sampled) if item.samples else None
            if self.is_live(plan, item):
                self._take_token(item, token)
                if item.request.is_finished:
                    finished.append(item.request)
        self._booked.popleft()
        return finished

    def _take_token(self, item: StepItem, token: int | None) -> None:
        """Book what a step gave for one of its items; None where it sampled nothing."""
        request = item.request
        if token is not None:
            request.num_pending -= 1
            request.is_undecided = token == UNDECIDED
        if token == UNDECIDED:
            self._set_back(item)
            return
        # Less where the request was preempted since; what is launched is written before anyone who finds the row reads.
        self._publish(request, min(request.num_computed, item.start + item.count))
        if token == NOT_FINITE:
            self.fail(request.request_id, f"the logits at position {item.start + item.count - 1} are not finite")
        else:
            if token is not None:
                request.output_ids.append(token)
            reason = _finish_reason(item, token, self._max_len)
            if reason is not None:
                self._end(request.request_id, reason, None)

    def _set_back(self, item: StepItem) -> None:
        """Feed the last token of `item` again; steps that were launched since do not count for its request."""
        request = item.request
        request.num_pending = 0
        # A request that was preempted since may be further back, or share the row of this token, which others read.
        request.num_computed = min(request.num_computed, item.start + item.count - 1)
        num_own = request.num_computed // self.rule.row_tokens
        if request.num_published > num_own:
            self._rows.release(request.rows[num_own:], keep=True)
            request.rows = request.rows[:num_own]
            request.num_published = num_own
            request.num_computed = num_own * self.rule.row_tokens
        for later in list(self._booked)[1:]:
            later.rolled_back.add(request)

    def _will_end(self, request: Request) -> bool:
        """Whether `request` ends with the step that is under way, whatever its token is: there is nothing to plan."""
        if not request.num_remaining:
            return True
        is_full = request.num_outputs >= request.max_tokens or request.num_tokens >= self._max_len
        return request.num_pending > 0 and is_full

    def digest(self) -> int:
        """Signed 64-bit digest of the schedule (fits an int64 tensor), equal on all ranks that agree.

        It covers each unfinished request's id, place, lengths, newest token and rows. Costs O(all requests): for the
        debug check only.
        """
        state = blake2b(digest_size=8)
        counts = (self._num_added, self.num_preemptions, self.num_running, self.num_free_rows, self.num_idle_rows)
        state.update(repr((*counts, self.num_reused_tokens)).encode())
        for request in (*self._running, *reversed(self._waiting)):
            sizes = (*request.order, len(request.prompt_ids), len(request.output_ids), request.num_computed)
            state.update(repr((request.request_id, sizes, request.output_ids[-1:], request.rows)).encode())
        return int.from_bytes(state.digest(), "big", signed=True)

    def _promise(self, request: Request) -> int:
        """Page rows that a request is sure of when others start: its tokens so far and one row of growth.

        Never more than it can use before its own end, so many short requests still fill the pool. Never less than it
        holds, so where the promises fit in the pool, the rows behind them are free.
        """
        max_fed = min(len(request.prompt_ids) + max(request.max_tokens - 1, 0), self._max_len)
        return self.rule.rows_for(min(request.num_tokens + self.rule.row_tokens, max_fed))

    def _start_waiting(self, budget: int) -> list[StepItem]:
        """Start waiting requests in order, as far as batch, budget (tokens) and promised rows go."""
        items: list[StepItem] = []
        if not self._waiting or budget < 1 or len(self._running) >= self.max_batch:
            return items
        # A row with several holders counts once.
        num_held = self._rows.num_rows - self._rows.num_free
        promised = num_held + sum(self._promise(request) - len(request.rows) for request in self._running)
        while self._waiting and budget > 0 and len(self._running) < self.max_batch:
            request = self._waiting[-1]
            if self._will_end(request):  # preempted, with its last token on the way
                break
            found = self._find_rows(request)
            promised += self._promise(request) - len(found) + self._rows.count_idle(found)
            if promised > self._rows.num_rows:
                break
            self._waiting.pop()
            insort(self._running, request, key=_from_first)
            request.state = RequestState.RUNNING
            self._start_behind(request, found)
            count = self._reserve(request, min(request.num_remaining, budget))
            budget -= count
            items.append(_step_item(request, count))
        return items

    def _root(self, request: Request) -> int:
        return 0 if self._fixed_up_to is None else -max(len(request.prompt_ids), self._fixed_up_to)

    def _find_rows(self, request: Request) -> list[int]:
        """Rows that hold the tokens `request` begins with, all before the row of its last token."""
        if not self._rows.reuse or request.collect == "all_logits":
            return []
        row_tokens = self.rule.row_tokens
        num_useful = (request.num_tokens - 1) // row_tokens
        return self._rows.find(self._root(request), (request.row_key(i, row_tokens) for i in range(num_useful)))

    def _start_behind(self, request: Request, found: list[int]) -> None:
        """Share the rows `found` with their other holders; their tokens count as computed."""
        self._rows.hold(found)
        request.rows = found
        request.num_published = len(found)
        request.num_computed = len(found) * self.rule.row_tokens
        if not request.num_preemptions:
            request.num_reused = request.num_computed
        self.num_reused_tokens += request.num_computed

    def _publish(self, request: Request, num_computed: int) -> None:
        """Let others find the rows that are full with the first `num_computed` tokens, all of which are known.

        A row whose content is there already is given up for that one.
        """
        num_full = num_computed // self.rule.row_tokens
        if not self._rows.reuse or num_full <= request.num_published:
            return
        root = self._root(request)
        rows = list(request.rows)  # page tables on a device are kept up to date by the identity of this list
        for index in range(request.num_published, num_full):
            before = rows[index - 1] if index else None
            rows[index] = self._rows.publish(root, before, rows[index], request.row_key(index, self.rule.row_tokens))
        if rows != request.rows:
            request.rows = rows
        request.num_published = num_full

    def _reserve(self, request: Request, count: int) -> int:
        """Take the rows for the next `count` tokens of a running request, from requests behind it where need be.

        Returns how many of the tokens have room: fewer than `count`, down to none, only for the last running request.
        """
        num_missing = self.rule.rows_for(request.num_computed + count) - len(request.rows)
        while num_missing > self._rows.num_free and self._running[-1] is not request:
            self._preempt_last()
        if num_missing > 0:
            request.rows += self._rows.take(min(num_missing, self._rows.num_free))
        return min(count, len(request.rows) * self.rule.row_tokens - request.num_computed)

    def _preempt_last(self) -> None:
        request = self._running.pop()
        self._free_rows(request)
        request.num_computed = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        request.state = RequestState.WAITING
        insort(self._waiting, request, key=_from_last)

    def _end(self, request_id: int, reason: FinishReason, error: str | None) -> bool:
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        if request.state is RequestState.RUNNING:
            _remove(self._running, request, _from_first)
        else:
            _remove(self._waiting, request, _from_last)
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        request.error = error
        self._free_rows(request)
        return True

    def _free_rows(self, request: Request) -> None:
        """Give the rows back; what a failed request computed may be the fault, so nobody finds it."""
        self._rows.release(request.rows, keep=request.error is None)
        request.rows = []
        request.num_published = 0


def _from_first(request: Request) -> tuple[int, int]:
    return request.order


def _from_last(request: Request) -> tuple[int, int]:
    place, arrival = request.order
    return -place, -arrival


def _remove(queue: list[Request], request: Request, key: Callable[[Request], tuple[int, int]]) -> None:
    del queue[bisect_left(queue, key(request), key=key)]


def _step_item(request: Request, count: int) -> StepItem:
    samples = count == request.num_remaining and request.max_tokens > 0
    return StepItem(request=request, start=request.num_computed, count=count, samples=samples)


def _finish_reason(item: StepItem, token: int | None, max_len: int) -> FinishReason | None:
    """Why the request of `item` ends with `token`, its newest one, None where it goes on. Later steps may be booked."""
    request = item.request
    num_prompt, num_output = len(request.prompt_ids), len(request.output_ids)
    if token is None:
        return "length" if not request.max_tokens and item.start + item.count == num_prompt else None
    if token in request.stop_token_ids and num_output >= request.min_tokens:
        return "stop"
    return "length" if num_output >= request.max_tokens or num_prompt + num_output >= max_len else None


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"{name}={value} must be at least 1")
