"""`EngineCore`: one rank's half of the engine. All ranks run the same steps on the same requests.

A step on every rank: receive the new and cancelled requests (rank 0 broadcasts them) -> `Scheduler.plan` -> `Batch` ->
model -> logits -> tokens -> `Scheduler.commit`. Tokens are chosen on the device, by rank 0 where chance takes part, or
by rank 0 on the host. All else is computed, never sent. `helix.engine.ahead` says how steps overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
import torch
from torch import Tensor

from helix.cache.pools import KVCache
from helix.comm.mesh import Mesh
from helix.comm.world import World
from helix.engine.ahead import Launched, Readback, choice_of
from helix.engine.request import Request
from helix.engine.runner import BatchTap, Runner
from helix.engine.scheduler import Scheduler, StepItem
from helix.layers.decoder import Decoder
from helix.layout import PageRule

# Rows of prompt logits computed at once where a request wants all of them: 256 rows of 128K values are 128 MiB.
_LOGIT_ROWS = 256


@dataclass(frozen=True, slots=True)
class StepOps:
    """What rank 0 tells the others before a step: requests that came, requests that end early, or that all is over."""

    add: tuple[Request, ...] = ()
    cancel: tuple[int, ...] = ()
    close: bool = False

    def encode(self) -> bytes:
        """msgpack; prompts travel as int32 bytes. An empty step is an empty message."""
        if not (self.add or self.cancel or self.close):
            return b""
        return bytes(
            msgpack.packb({"add": [_request_to_wire(r) for r in self.add], "cancel": self.cancel, "close": self.close})
        )

    @classmethod
    def decode(cls, payload: bytes) -> StepOps:
        if not payload:
            return cls()
        fields = msgpack.unpackb(payload)
        return cls(tuple(_request_from_wire(r) for r in fields["add"]), tuple(fields["cancel"]), fields["close"])


def _request_to_wire(request: Request) -> dict[str, Any]:
    return {
        "request_id": request.request_id,
        "prompt": np.asarray(request.prompt_ids, dtype=np.int32).tobytes(),
        "max_tokens": request.max_tokens,
        "stop_token_ids": sorted(request.stop_token_ids),
        "min_tokens": request.min_tokens,
        "collect": request.collect,
        "choice": request.choice,
        "priority": request.priority,
    }


def _request_from_wire(fields: dict[str, Any]) -> Request:
    prompt = np.frombuffer(fields.pop("prompt"), dtype=np.int32).tolist()
    stops = frozenset(fields.pop("stop_token_ids"))
    return Request(prompt_ids=prompt, stop_token_ids=stops, **fields)


@dataclass(slots=True)
class StepSinks:
    """Rank 0's part in a step; the other ranks have none.

    `numbers(item)` are the five numbers that the item's token is drawn by (see `helix.engine.draw`), asked for when its
    step is launched, where requests of choice "drawn" or "ranked" take part. `sample(logits [R, V], items)` gives one
    token id a row (-1: the row cannot be sampled), in steps whose tokens the host chooses. `collect(item, first,
    logits)` receives logits of positions ``first ...`` of an item that wants all. `tap` sees each layer's output.
    """

    numbers: Callable[[StepItem], Sequence[float]]
    sample: Callable[[Tensor, Sequence[StepItem]], list[int]]
    collect: Callable[[StepItem, int, Tensor], None]
    tap: BatchTap | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """Tokens of one step, (request, token id) in plan order, and the requests that ended in it.

    Tokens of requests that had ended before are left out.
    """

    tokens: tuple[tuple[Request, int], ...] = ()
    finished: tuple[Request, ...] = ()


@dataclass(slots=True)
class EngineCore:
    """Model, cache and scheduler of one rank; see `build_core` in `helix.engine.build`.

    With `plans_ahead` one step may be under way between two calls of `lead`.
    """

    world: World
    mesh: Mesh
    model: Decoder
    rule: PageRule
    scheduler: Scheduler
    cache: KVCache
    runner: Runner
    plans_ahead: bool = False
    check_schedule: bool = False
    num_steps: int = field(default=0)
    _under_way: Launched | None = field(default=None)

    def lead(self, ops: StepOps, sinks: StepSinks) -> StepResult:
        """Rank 0: tell the others `ops`, launch what can be launched, and return what the oldest step gave."""
        self.world.monitor.busy()
        try:
            self.world.group.broadcast_bytes(ops.encode())
            if ops.close:
                return self._settle(ops, sinks)
            return self._step(ops, sinks)
        finally:
            self.world.monitor.idle()

    def follow(self) -> None:
        """Every other rank: take part in rank 0's steps until it closes the engine."""
        monitor = self.world.monitor
        while True:
            monitor.idle()
            ops = StepOps.decode(self.world.group.broadcast_bytes(None))
            if ops.close:
                self._settle(ops, None)
                return
            monitor.busy()
            self._step(ops, None)

    @torch.inference_mode()
    def _step(self, ops: StepOps, sinks: StepSinks | None) -> StepResult:
        for request_id in ops.cancel:
            self.scheduler.cancel(request_id)
        for request in ops.add:
            self.scheduler.add(request)
        self._forget_if_over()
        step, self._under_way = self._under_way or self._launch(sinks), None
        if step is None:
            return StepResult()
        if self.plans_ahead and step.tokens is not None:
            self._under_way = self._launch(sinks)
        result = self._finish(step, sinks)
        self._forget_if_over()
        return result

    def _launch(self, sinks: StepSinks | None) -> Launched | None:
        """Plan a step and give it to the device; None where there is nothing to do."""
        plan = self.scheduler.plan()
        if plan is None:
            return None
        if self.check_schedule:
            self._compare_schedules()
        choice, numbers_R5, tap = choice_of(plan), None, None
        if sinks is not None:
            tap = sinks.tap
            if choice in ("drawn", "ranked"):
                numbers_R5 = np.array([sinks.numbers(item) for item in plan.items if item.samples], dtype=np.float64)
        run = self.runner.run(plan, tap, choice=choice, numbers_R5=numbers_R5)
        tokens = None if choice == "host" else Readback(run.token_R)
        self.scheduler.book(plan)
        return Launched(plan, run, tokens)

    def _finish(self, step: Launched, sinks: StepSinks | None) -> StepResult:
        """Wait for the tokens of a launched step and book them."""
        tokens = self._choose_on_host(step, sinks) if step.tokens is None else step.tokens.wait()
        self.mesh.world.check()
        sampling = [item for item in step.plan.items if item.samples]
        given = [
            (item.request, token)
            for item, token in zip(sampling, tokens, strict=True)
            if self.scheduler.is_live(step.plan, item)
        ]
        finished = self.scheduler.commit(step.plan, tokens)
        self.num_steps += 1
        return StepResult(tuple(given), tuple(finished))

    def _choose_on_host(self, step: Launched, sinks: StepSinks | None) -> list[int]:
        """Logits to those who collect them; tokens sampled by rank 0, for every rank. Rows of ended requests get 0."""
        if step.run.hidden_TC is not None:
            self._collect_logits(step, step.run.hidden_TC, sinks)
        sampling = [item for item in step.plan.items if item.samples]
        tokens = torch.zeros(len(sampling), dtype=torch.int64)
        live = [row for row, item in enumerate(sampling) if self.scheduler.is_live(step.plan, item)]
        if sinks is not None and live:
            logits_RV = step.run.logits_RV if len(live) == len(sampling) else step.run.logits_RV[live]
            tokens[live] = torch.tensor(sinks.sample(logits_RV, [sampling[row] for row in live]))
        if live:
            self.world.group.broadcast(tokens)
        return [int(token) for token in tokens.tolist()]

    def _forget_if_over(self) -> None:
        """Drop a step under way whose requests have all ended: nobody waits for it."""
        step = self._under_way
        if step is not None and not any(self.scheduler.is_live(step.plan, item) for item in step.plan.items):
            self.scheduler.commit(step.plan, [0] * sum(item.samples for item in step.plan.items))
            self._under_way = None

    @torch.inference_mode()
    def _settle(self, ops: StepOps, sinks: StepSinks | None) -> StepResult:
        """Finish what is under way, so that nothing is."""
        for request_id in ops.cancel:
            self.scheduler.cancel(request_id)
        step, self._under_way = self._under_way, None
        return StepResult() if step is None else self._finish(step, sinks)

    def _collect_logits(self, step: Launched, hidden_TC: Tensor, sinks: StepSinks | None) -> None:
        first_row = 0
        for item in step.plan.items:
            if item.request.collect == "all_logits" and self.scheduler.is_live(step.plan, item):
                wanted = min(item.count, len(item.request.prompt_ids) - item.start)
                for offset in range(0, max(wanted, 0), _LOGIT_ROWS):
                    rows = slice(first_row + offset, first_row + min(offset + _LOGIT_ROWS, wanted))
                    logits = self.model.logits(hidden_TC[rows])
                    if sinks is not None:
                        sinks.collect(item, item.start + offset, logits)
            first_row += item.count

    def _compare_schedules(self) -> None:
        """Debug check: every rank's schedule digest equals rank 0's."""
        digest = self.scheduler.digest() & (2**63 - 1)
        mine = torch.tensor([digest], dtype=torch.int64)
        everyone = self.world.group.all_gather(torch.empty(self.world.size, 1, dtype=torch.int64), mine)
        drifted = [rank for rank, value in enumerate(everyone.flatten().tolist()) if value != everyone[0].item()]
        if drifted:
            raise RuntimeError(f"step {self.num_steps}: the schedule of rank {drifted[0]} differs from rank 0's")
