"""Host state of one request: its tokens, how far they are computed, and the page rows that hold their KV.

The engine makes a `Request`; from `Scheduler.add` until it is finished only the scheduler writes to it.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled", "error"]
Collect = Literal["tokens", "all_logits"]
Choice = Literal["best", "drawn", "ranked", "host"]
"""How tokens are chosen: the best one, drawn from all, or drawn after ranking, on the device; or on the host."""

PLACES = 256
"""Places in the order of arrival that one step of `priority` is worth. So at most so many later requests pass another
for each step between them, and a request of low priority is served in the end, however many others come."""


class RequestState(Enum):
    """Where a request stands; a preempted one is WAITING again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One sequence: a prompt and what was generated from it.

    ``max_tokens=0`` generates nothing: the request is finished once its prompt is computed. `collect` "all_logits" asks
    for the logits of every prompt position; after a preemption positions are fed again, and in other chunks, so
    collectors store by position. `stop_token_ids` end the request once it has `min_tokens` tokens, the stop token
    counted and kept in `output_ids`. Smaller `priority` is served first (see `PLACES`).
    """

    request_id: int
    prompt_ids: list[int]
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    collect: Collect = "tokens"
    choice: Choice = "host"
    priority: int = 0

    output_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    """How many of the tokens have their KV in the cache."""
    num_pending: int = 0
    """Output tokens that a launched step gives and the host has not read yet."""
    is_undecided: bool = False
    """Whether the device could not choose the next token, so that the host has to."""
    rows: list[int] = field(default_factory=list)
    """Page rows in the order of the sequence."""
    num_published: int = 0
    """How many of the rows, from the first on, other requests can find."""
    num_reused: int = 0
    """Tokens of the prompt that were found in page rows when the request first started."""
    state: RequestState = RequestState.WAITING
    finish_reason: FinishReason | None = None
    error: str | None = None
    num_preemptions: int = 0
    arrival: int = -1
    """Running number given by the scheduler; a preempted request keeps its own."""
    _row_keys: list[bytes] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output, a pending one included."""
        return len(self.prompt_ids) + self.num_outputs

    @property
    def num_outputs(self) -> int:
        """Output tokens, a pending one included."""
        return len(self.output_ids) + self.num_pending

    @property
    def next_choice(self) -> Choice:
        """How the token after all these is chosen. Fewer than `min_tokens`: stop tokens are masked, on the host."""
        return "host" if self.is_undecided or self.num_outputs < self.min_tokens else self.choice

    @property
    def num_remaining(self) -> int:
        """Tokens that are not computed yet."""
        return self.num_tokens - self.num_computed

    @property
    def is_prefilling(self) -> bool:
        """Whether more is to compute than the one token that was sampled last."""
        return self.num_computed < max(len(self.prompt_ids), self.num_tokens - 1)

    @property
    def is_finished(self) -> bool:
        return self.state is RequestState.FINISHED

    @property
    def order(self) -> tuple[int, int]:
        """Place among all requests, smallest first; unique and constant while the request is with the scheduler."""
        return self.arrival + PLACES * self.priority, self.arrival

    def row_key(self, index: int, row_tokens: int) -> bytes:
        """The tokens of the full page row number `index`; kept, since a waiting request is looked up in each step."""
        while len(self._row_keys) <= index:
            start = len(self._row_keys) * row_tokens
            self._row_keys.append(array("i", self.token_slice(start, start + row_tokens)).tobytes())
        return self._row_keys[index]

    def token_slice(self, start: int, stop: int) -> list[int]:
        """Tokens ``[start, stop)`` of prompt + output, without a pending one; copies only these."""
        num_prompt = len(self.prompt_ids)
        if stop <= num_prompt:
            return self.prompt_ids[start:stop]
        outputs = self.output_ids[max(start - num_prompt, 0) : stop - num_prompt]
        return self.prompt_ids[start:] + outputs if start < num_prompt else outputs
