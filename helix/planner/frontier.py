"""Pareto frontiers: tokens/s/user against tokens/s/GPU over placements and batches."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from helix.cost.memory import memory
from helix.cost.step import placement_cost
from helix.planner.candidates import Candidate
from helix.planner.search import Progress, Question


@dataclass(frozen=True, slots=True)
class Point:
    """One placement at one batch."""

    candidate: Candidate
    batch: int
    tokens_per_s_user: float
    tokens_per_s_gpu: float


def sweep(
    question: Question,
    candidates: Sequence[Candidate],
    *,
    max_batch: int = 1 << 14,
    per_doubling: int = 1,
    progress: Progress | None = None,
) -> list[Point]:
    """All candidates at batches 1, 2, 4 ... (`per_doubling` steps between) and the largest that fits."""
    points = []
    for index, one in enumerate(candidates):
        if progress is not None:
            progress(index, len(candidates))
        held = memory(
            question.spec,
            one.placement,
            question.formats,
            question.hardware,
            question.workload(1),
            memory_fraction=question.memory_fraction,
        )
        top = min(held.largest_batch, max_batch)
        batches = [round(2 ** (step / per_doubling)) for step in range(top.bit_length() * per_doubling)]
        for batch in sorted({min(batch, top) for batch in [*batches, top]} if top else ()):
            cost = placement_cost(
                question.spec, one.placement, question.formats, question.hardware, question.workload(batch)
            )
            points.append(Point(one, batch, cost.tokens_per_s_user, cost.tokens_per_s_gpu))
    return points


def frontier(points: Iterable[Point]) -> list[Point]:
    """The points that no other beats in both measures, by rising tokens/s/user."""
    best: list[Point] = []
    for point in sorted(points, key=lambda one: (-one.tokens_per_s_user, -one.tokens_per_s_gpu)):
        if not best or point.tokens_per_s_gpu > best[-1].tokens_per_s_gpu:
            best.append(point)
    return best[::-1]


def gpu_rate_at(front: Sequence[Point], tokens_per_s_user: float) -> float:
    """Best tokens/s/GPU with at least `tokens_per_s_user`; 0 where there is none. `front` as `frontier` gives it."""
    at = bisect_left([one.tokens_per_s_user for one in front], tokens_per_s_user)
    return front[at].tokens_per_s_gpu if at < len(front) else 0.0


def user_rate_at(front: Sequence[Point], tokens_per_s_gpu: float) -> float:
    """Tokens/s/user at `tokens_per_s_gpu`, on straight lines between the points; 0 beyond the largest rate per GPU.

    Straight lines, since only some batches were priced: taking the next point would show their spacing as a loss.
    """
    rising = front[::-1]
    at = bisect_left([one.tokens_per_s_gpu for one in rising], tokens_per_s_gpu)
    if at == len(rising):
        return 0.0
    if at == 0:
        return rising[0].tokens_per_s_user
    left, right = rising[at - 1], rising[at]
    share = (tokens_per_s_gpu - left.tokens_per_s_gpu) / (right.tokens_per_s_gpu - left.tokens_per_s_gpu)
    return left.tokens_per_s_user + share * (right.tokens_per_s_user - left.tokens_per_s_user)


def without_overlap(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The candidates that run in lockstep."""
    return [one for one in candidates if one.placement.choices.overlap == 1]


def with_overlaps(candidates: Iterable[Candidate], chunks: Sequence[int]) -> list[Candidate]:
    """Lockstep candidates, each also with every number of `chunks`."""
    widened = []
    for one in without_overlap(candidates):
        place = one.placement
        widened.append(one)
        if place.layout.kvp > 1:
            for count in chunks:
                widened.append(replace(one, placement=replace(place, choices=replace(place.choices, overlap=count))))
    return widened
