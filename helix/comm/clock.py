"""`Clock`: how long the exchanges of a step take, sampled from the traffic that is there.

Only steps that run eagerly are seen (those with prompt tokens, and on a CPU all): nothing of a replayed graph passes
through Python. Every `EVERY`-th of them is timed, on a GPU by events on the stream that the work runs on, which nobody
waits for: they are read when a later step is timed. The time of an exchange includes waiting for the slowest rank of
the group, and, where work overlaps, time in which other work ran too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

EVERY = 8

Mark = float | torch.cuda.Event


@dataclass(slots=True)
class _Sample:
    """Marks of one step: its beginning and end, and those of each exchange."""

    start: Mark
    stop: Mark
    parts: list[tuple[Mark, Mark]] = field(default_factory=list)


class Clock:
    """Totals over the sampled steps of this rank, in seconds; another thread may read them at any moment."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.exchange_s = 0.0
        self.step_s = 0.0
        self._num_seen = 0
        self._on_gpu = False
        self._running: _Sample | None = None
        self._ended: list[_Sample] = []

    @contextmanager
    def step(self, device: torch.device) -> Iterator[None]:
        """Around a step that runs eagerly on `device`."""
        self._num_seen += 1
        if self._num_seen % EVERY:
            yield
            return
        self._on_gpu = device.type == "cuda"
        self._fold()
        start = self._mark()
        sample = self._running = _Sample(start, start)
        try:
            yield
        finally:
            self._running = None
        sample.stop = self._mark()
        self._ended.append(sample)
        self._fold()

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Around an exchange, in whatever step it is."""
        sample = self._running
        if sample is None:
            yield
            return
        start = self._mark()
        yield
        sample.parts.append((start, self._mark()))

    def _mark(self) -> Mark:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _fold(self) -> None:
        """Add the samples that the device is done with to the totals."""
        while self._ended and _is_over(self._ended[0].stop):
            sample = self._ended.pop(0)
            self.num_steps += 1
            self.exchange_s += sum(_between(*part) for part in sample.parts)
            self.step_s += _between(sample.start, sample.stop)


def _is_over(mark: Mark) -> bool:
    return isinstance(mark, float) or mark.query()


def _between(start: Mark, stop: Mark) -> float:
    if isinstance(start, float) or isinstance(stop, float):
        return float(stop) - float(start)  # type: ignore[arg-type]  # both are of one kind
    return float(start.elapsed_time(stop)) / 1e3
