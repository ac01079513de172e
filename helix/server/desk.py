"""`Desk`: where the HTTP side and the engine meet, and nothing else of one is known to the other.

Two threads. The event loop admits requests, hands generations over and reads their pieces. The engine's thread takes
them in between two steps, runs the steps, and hands pieces back: one wake-up of the event loop a step, however many
requests run. Neither ever waits for the other with a lock held.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from typing import Literal

from helix.engine.engine import Engine
from helix.engine.generation import Generation
from helix.engine.outputs import Piece
from helix.server.errors import ApiError
from helix.server.metrics import Metrics, Outcome

State = Literal["loading", "ready", "draining", "failed"]

_IDLE_S = 0.25
"""How long the engine's thread sleeps without work before it looks for a failed rank or a signal."""
_MAX_RETRY_S = 60

_REFUSALS: dict[State, str] = {
    "loading": "the model is still being loaded",
    "draining": "the server is shutting down",
    "failed": "the engine has failed",
}


class Ticket:
    """One generation between submission and its last piece."""

    __slots__ = ("call", "generation", "index", "is_open", "num_timed")

    def __init__(self, call: Call, index: int, generation: Generation) -> None:
        self.call = call
        self.index = index
        self.generation = generation
        self.is_open = True
        self.num_timed = 0


class Call:
    """The generations of one HTTP request, on the event loop. Must be closed, on every way out."""

    def __init__(self, desk: Desk, generations: Sequence[Generation], arrived: float, deadline: float) -> None:
        self._desk = desk
        self.arrived = arrived
        self.deadline = deadline
        self.events: asyncio.Queue[tuple[int, list[Piece]] | ApiError] = asyncio.Queue()
        self.tickets = [Ticket(self, index, one) for index, one in enumerate(generations)]

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """(index of the generation, its next piece) as they come, until all are finished.

        Raises
        ------
        ApiError
            A generation or the engine failed, or the time of the request is over.
        """
        num_left = len(self.tickets)
        while num_left:
            try:
                event = await asyncio.wait_for(self.events.get(), self.deadline - time.perf_counter())
            except TimeoutError:
                self.close("timeout")
                raise ApiError(504, "the request took longer than the server allows", code="timeout") from None
            if isinstance(event, ApiError):
                raise event
            index, pieces = event
            for piece in pieces:
                if piece.finish_reason == "error":
                    reason = self.tickets[index].generation.error or "no reason is known"
                    raise ApiError(500, f"the generation failed: {reason}", code="generation_failed")
                yield index, piece
                num_left -= piece.finish_reason is not None

    def close(self, outcome: Outcome = "cancelled") -> None:
        """Cancel what still runs; it counts as `outcome`. Safe to call twice."""
        self._desk.close([ticket for ticket in self.tickets if ticket.is_open], outcome)


class Desk:
    """Admission, hand-over and the engine's loop.

    At most `max_open` generations are admitted at a time; `max_batch` of them can run, the others wait.
    """

    def __init__(self, max_batch: int, max_queue: int, timeout_s: float, metrics: Metrics) -> None:
        self.max_open = max_batch + max_queue
        self._max_batch = max_batch
        self._timeout_s = timeout_s
        self._metrics = metrics
        self._lock = threading.Lock()  # guards _state and _num_open together; held for a few instructions only
        self._state: State = "loading"
        self._num_open = 0
        self._mean_s = 1.0
        self._inbox: queue.SimpleQueue[tuple[Literal["submit", "cancel"], list[Ticket]] | None] = queue.SimpleQueue()
        self._open: dict[int, Ticket] = {}  # the engine's thread only
        self._asked_to_drain = False
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def state(self) -> State:
        """What /health says; "draining" from the moment of the signal on."""
        return "draining" if self._asked_to_drain and self._state == "ready" else self._state

    # ---- the event loop's side ----

    def admit(self, count: int) -> None:
        """Take room for `count` generations, which `submit` uses or `release` gives back; raises `ApiError`."""
        if count > self.max_open:
            raise ApiError(
                400,
                f"prompts x n = {count} generations in one request, more than the {self.max_open} that this server "
                "takes at a time (engine.max_batch + server.max_queue)",
                param="n",
                code="invalid_value",
            )
        with self._lock:
            state, num_open = self.state, self._num_open
            is_full = num_open + count > self.max_open
            if state == "ready" and not is_full:
                self._num_open += count
                return
        self._metrics.count("rejected", count)
        if state != "ready":
            raise _unavailable(state)
        wait_s = self._mean_s * max(num_open - self._max_batch, 1) / self._max_batch
        raise ApiError(
            429,
            f"the queue is full ({num_open} requests run or wait); try again later",
            code="queue_full",
            retry_after_s=min(max(round(wait_s), 1), _MAX_RETRY_S),
        )

    def release(self, count: int) -> None:
        """Give back room that `admit` took."""
        with self._lock:
            self._num_open -= count

    def submit(self, generations: Sequence[Generation], arrived: float) -> Call:
        """Hand admitted generations to the engine; raises `ApiError` where it has failed in the meantime."""
        self._loop = asyncio.get_running_loop()
        call = Call(self, generations, arrived, arrived + self._timeout_s)
        with self._lock:
            if self._state == "failed":
                raise _unavailable("failed")
            self._inbox.put(("submit", call.tickets))
        self._metrics.prompt_tokens.inc(sum(len(one.request.prompt_ids) for one in generations))
        return call

    def close(self, tickets: list[Ticket], outcome: Outcome) -> None:
        """End open tickets: their room is free at once, their pages with the engine's next step."""
        for ticket in tickets:
            self._end(ticket, outcome)
        if tickets:
            self._inbox.put(("cancel", tickets))

    def _hand_out(self, deliveries: list[tuple[Ticket, list[Piece]]]) -> None:
        for ticket, pieces in deliveries:
            if not ticket.is_open:
                continue
            self._time(ticket)
            reason = pieces[-1].finish_reason
            if reason is not None:
                self._end(ticket, reason)
            ticket.call.events.put_nowait((ticket.index, pieces))

    def _end(self, ticket: Ticket, outcome: Outcome) -> None:
        ticket.is_open = False
        self.release(1)
        self._metrics.count(outcome)
        took_s = time.perf_counter() - ticket.call.arrived
        self._mean_s += 0.1 * (took_s - self._mean_s)

    def _time(self, ticket: Ticket) -> None:
        """Observe the tokens that came since the last call."""
        times = ticket.generation.token_times
        first = ticket.num_timed
        ticket.num_timed = len(times)
        self._metrics.output_tokens.inc(ticket.num_timed - first)
        if first == 0 and times:
            self._metrics.first_token.observe(times[0] - ticket.call.arrived)
        for before, after in pairwise(times[max(first - 1, 0) : ticket.num_timed]):
            self._metrics.token_to_token.observe(after - before)

    # ---- the engine's side ----

    def run(self, engine: Engine) -> None:
        """Serve until `drain` was called and the last request has ended. The thread that calls this owns the engine.

        Raises
        ------
        RankFailure
            The engine has ended; every open request got an error.
        """
        with self._lock:
            self._state = "ready"
        try:
            while not self._is_drained():
                if engine.failure is not None:
                    raise engine.failure
                self._take(engine)
                if engine.has_work:
                    engine.step()
                self._deliver(engine)
            while engine.has_work:  # the last cancellations
                self._take(engine)
                engine.step()
        except BaseException:
            self._fail()
            raise

    def drain(self) -> None:
        """Let admitted requests finish, refuse new ones. Only sets a flag: meant for a signal handler."""
        self._asked_to_drain = True
        self._inbox.put(None)

    def _is_drained(self) -> bool:
        with self._lock:
            return self._asked_to_drain and self._num_open == 0

    def _take(self, engine: Engine) -> None:
        """Take in all that lies in the inbox; without other work, wait a moment for something."""
        try:
            message = self._inbox.get(timeout=0 if engine.has_work else _IDLE_S)
            while True:
                if message is not None:
                    self._apply(engine, *message)
                message = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _apply(self, engine: Engine, what: Literal["submit", "cancel"], tickets: list[Ticket]) -> None:
        if what == "submit":
            self._open.update((ticket.generation.request.request_id, ticket) for ticket in tickets)
            engine.submit(ticket.generation for ticket in tickets)
            return
        for ticket in tickets:
            self._open.pop(ticket.generation.request.request_id, None)
        engine.cancel(ticket.generation for ticket in tickets)

    def _deliver(self, engine: Engine) -> None:
        deliveries = []
        finished = []
        for request_id, ticket in list(self._open.items()):
            pieces = ticket.generation.take_pieces()
            if pieces:
                deliveries.append((ticket, pieces))
            if ticket.generation.finished:
                del self._open[request_id]
                finished.append(ticket.generation)
        engine.cancel(finished)  # nobody asks the engine for them again
        if deliveries and self._loop is not None:
            self._loop.call_soon_threadsafe(self._hand_out, deliveries)

    def _fail(self) -> None:
        """The engine is over: every request that is here, or comes, gets an error."""
        with self._lock:
            self._state = "failed"
        tickets = list(self._open.values())
        try:
            while True:
                message = self._inbox.get_nowait()
                if message is not None and message[0] == "submit":
                    tickets += message[1]
        except queue.Empty:
            pass
        self._open.clear()
        if self._loop is not None and tickets:
            self._loop.call_soon_threadsafe(self._tell_failure, tickets)

    def _tell_failure(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            if ticket.is_open:
                self._end(ticket, "error")
                ticket.call.events.put_nowait(_unavailable("failed"))


def _unavailable(state: State) -> ApiError:
    return ApiError(503, f"{_REFUSALS[state]}; try again later", code=state, retry_after_s=5)
