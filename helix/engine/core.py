"""`EngineCore`: one rank's half of the engine. All ranks run the same steps on the same requests.

A step on every rank: receive the new and cancelled requests (rank 0 broadcasts them) -> `Scheduler.plan` -> `Batch` ->
model -> logits -> rank 0 samples and broadcasts the tokens -> `Scheduler.commit`. All else is computed, never sent.
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
from helix.engine.request import Request
from helix.engine.runner import BatchTap, Runner, StepRun
from helix.engine.scheduler import Scheduler, StepItem, StepPlan
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
        "priority": request.priority,
    }


def _request_from_wire(fields: dict[str, Any]) -> Request:
    prompt = np.frombuffer(fields.pop("prompt"), dtype=np.int32).tolist()
    stops = frozenset(fields.pop("stop_token_ids"))
    return Request(prompt_ids=prompt, stop_token_ids=stops, **fields)


@dataclass(slots=True)
class StepSinks:
    """What rank 0 does with a step's results; the other ranks have none.

    `sample(logits [R, V], items)` gives one token id a row (-1: the row cannot be sampled). `collect(item, first,
    logits)` receives logits of positions ``first ...`` of an item that wants all. `takes_best(items)` says that each
    item's token is the best of its logits and nothing else is asked for: then `sample` is not called, and the logits
    stay on the device. `tap` sees each layer's output.
    """

    sample: Callable[[Tensor, Sequence[StepItem]], list[int]]
    collect: Callable[[StepItem, int, Tensor], None]
    takes_best: Callable[[Sequence[StepItem]], bool]
    tap: BatchTap | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """Tokens of one step, (request, token id) in plan order, and the requests that ended in it."""

    tokens: tuple[tuple[Request, int], ...] = ()
    finished: tuple[Request, ...] = ()


@dataclass(slots=True)
class EngineCore:
    """Model, cache and scheduler of one rank; see `build_core` in `helix.engine.build`."""

    world: World
    mesh: Mesh
    model: Decoder
    rule: PageRule
    scheduler: Scheduler
    cache: KVCache
    runner: Runner
    check_schedule: bool = False
    num_steps: int = field(default=0)

    def lead(self, ops: StepOps, sinks: StepSinks) -> StepResult:
        """Rank 0: tell the others `ops`, then run the step with them."""
        self.world.monitor.busy()
        try:
            self.world.group.broadcast_bytes(ops.encode())
            if ops.close:
                return StepResult()
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
                return
            monitor.busy()
            self._step(ops, None)

    @torch.inference_mode()
    def _step(self, ops: StepOps, sinks: StepSinks | None) -> StepResult:
        for request_id in ops.cancel:
            self.scheduler.cancel(request_id)
        for request in ops.add:
            self.scheduler.add(request)
        plan = self.scheduler.plan()
        if plan is None:
            return StepResult()
        if self.check_schedule:
            self._compare_schedules()
        run = self.runner.run(plan, None if sinks is None else sinks.tap)
        if run.hidden_TC is not None:
            self._collect_logits(plan, run.hidden_TC, sinks)
        tokens = self._sample(plan, run, sinks)
        finished = self.scheduler.commit(plan, tokens)
        self.num_steps += 1
        sampled = [item.request for item in plan.items if item.samples]
        return StepResult(tuple(zip(sampled, tokens, strict=True)), tuple(finished))

    def _sample(self, plan: StepPlan, run: StepRun, sinks: StepSinks | None) -> list[int]:
        tokens = torch.empty(run.best_R.shape[0], dtype=torch.int64)
        if not len(tokens):
            return []
        if sinks is not None:
            items = [item for item in plan.items if item.samples]
            best = sinks.takes_best(items)
            tokens.copy_(run.best_R if best else torch.tensor(sinks.sample(run.logits_RV, items)))
        return [int(token) for token in self.world.group.broadcast(tokens).tolist()]

    def _collect_logits(self, plan: StepPlan, hidden_TC: Tensor, sinks: StepSinks | None) -> None:
        first_row = 0
        for item in plan.items:
            if item.request.collect == "all_logits":
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
