"""Search: price every candidate, keep the best way to run each layout, and rank by what the user asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from helix.cost.choices import Choices, Formats, Workload
from helix.cost.hardware import Hardware, Transport
from helix.cost.memory import Memory, memory
from helix.cost.step import StepCost, placement_cost
from helix.errors import ConfigError
from helix.model_spec import ModelSpec
from helix.planner.candidates import SCHEME_TEXT, Candidate, Refused, Scheme, helix_candidates, refused_layouts
from helix.planner.rivals import rival_candidates

Objective: TypeAlias = Literal["ttl", "throughput", "concurrency"]
Progress: TypeAlias = Callable[[int, int], None]
_MAX_BATCH = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a plan is asked for. `batch` None: 1 for the objective ttl, else the largest that fits within `ttl_us`."""

    model: str
    spec: ModelSpec
    hardware: Hardware
    num_gpus: tuple[int, ...]
    context: int
    batch: int | None = None
    ttl_us: float | None = None
    objective: Objective = "ttl"
    formats: Formats = field(default_factory=Formats)
    page_tokens: int = 64
    memory_fraction: float = 0.9
    transport: Transport = "collective"
    routing: Literal["random", "balanced"] | float = "random"

    def workload(self, batch: int, context: int | None = None) -> Workload:
        return Workload(
            batch=batch, context=context or self.context, page_tokens=self.page_tokens, routing=self.routing
        )


@dataclass(frozen=True, slots=True)
class Priced:
    """A candidate with its price. `batch_in_ttl` is the largest batch within the TTL target (None: no target)."""

    candidate: Candidate
    cost: StepCost
    memory: Memory
    batch_in_ttl: int | None

    @property
    def concurrency(self) -> int:
        """Sequences that can decode at once: what fits, within the target where there is one."""
        fits = self.memory.largest_batch
        return fits if self.batch_in_ttl is None else min(fits, self.batch_in_ttl)


@dataclass(frozen=True, slots=True)
class Plan:
    """Answer to a `Question`: each Helix layout and the best of each rival, best first, and refusals."""

    question: Question
    ranked: tuple[Priced, ...]
    refused: tuple[Refused, ...]

    @property
    def winner(self) -> Priced:
        return self.ranked[0]

    @property
    def helix(self) -> tuple[Priced, ...]:
        return tuple(one for one in self.ranked if one.candidate.scheme == "helix")

    def best_of(self, scheme: Scheme) -> Priced | None:
        """The best placement of `scheme`, if it has one that fits."""
        return next((one for one in self.ranked if one.candidate.scheme == scheme), None)


def make_plan(question: Question, progress: Progress | None = None) -> Plan:
    """Price all candidates of `question`.

    Raises
    ------
    ConfigError
        Nothing fits: the message names the placement that comes nearest and what it lacks.
    """
    groups, refused = _candidate_groups(question)
    ranked: list[Priced] = []
    too_large: list[tuple[float, Refused]] = []
    for index, group in enumerate(groups):
        if progress is not None:
            progress(index, len(groups))
        best, misses = _best_of(question, group)
        if best is not None:
            ranked.append(best)
        elif misses:
            too_large.append(min(misses, key=lambda miss: miss[0]))
    ranked.sort(key=lambda one: sort_key(question, one))
    refused += [miss for _, miss in too_large]
    if not ranked:
        raise ConfigError(
            f"no placement of {question.model} on {_text(question.num_gpus)} GPUs works: {_nearest(too_large)}"
        )
    return Plan(question, tuple(_one_row_per_rival(ranked)), tuple(refused))


def _nearest(too_large: Sequence[tuple[float, Refused]]) -> str:
    if not too_large:
        return "none is legal"
    one = min(too_large, key=lambda miss: miss[0])[1]
    return (
        f"the nearest, {SCHEME_TEXT[one.scheme]} ({one.label}), {one.reason}; ask for more --gpus, fewer sequences, "
        "a shorter --context, or narrower --weights or --cache"
    )


def all_candidates(question: Question) -> list[Candidate]:
    """Every candidate of `question`, whether it fits or not."""
    groups, _ = _candidate_groups(question)
    return [one for group in groups for one in group]


def _text(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _candidate_groups(question: Question) -> tuple[list[tuple[Candidate, ...]], list[Refused]]:
    base = Choices(transport=question.transport)
    groups: list[tuple[Candidate, ...]] = []
    refused: list[Refused] = []
    for num_ranks in question.num_gpus:
        groups += helix_candidates(question.spec, num_ranks, base)
        refused += refused_layouts(question.spec, num_ranks)
        for one in rival_candidates(question.spec, num_ranks, base):
            if isinstance(one, Refused):
                refused.append(one)
            else:
                groups.append((one,))
    return groups, refused


def _best_of(question: Question, group: Iterable[Candidate]) -> tuple[Priced | None, list[tuple[float, Refused]]]:
    """The best way to run one layout, or by how many bytes each way does not fit."""
    priced, misses = [], []
    for candidate in group:
        one = price(question, candidate)
        if isinstance(one, Priced):
            priced.append(one)
        else:
            misses.append(one)
    if not priced:
        return None, misses
    best = min(priced, key=lambda one: sort_key(question, one))
    if question.ttl_us is not None:
        best = replace(best, batch_in_ttl=largest_batch_within(question, best.candidate, question.ttl_us))
    return best, misses


def price(question: Question, candidate: Candidate) -> Priced | tuple[float, Refused]:
    """Price of `candidate` at the question's batch, or (missing bytes, why it does not fit)."""
    batch = question.batch or 1
    held = _memory(question, candidate, batch)
    limit = None
    if question.batch is None and question.objective != "ttl" and held.largest_batch:
        if question.ttl_us is not None:
            limit = largest_batch_within(question, candidate, question.ttl_us)
        batch = max(min(held.largest_batch, _MAX_BATCH if limit is None else limit), 1)
        while batch > 1 and not _memory(question, candidate, batch).fits:
            batch -= max(batch // 64, 1)
        held = _memory(question, candidate, batch)
    if not held.fits:
        gib = 1 << 30
        left = f"leave {held.cache_limit / gib:.1f}" if held.cache_limit > 0 else "leave nothing"
        several = f"{batch} sequences" if batch > 1 else "1 sequence"
        reason = (
            f"does not fit: KV of {several} takes {held.cache / gib:.1f} GiB a rank; of the device's "
            f"{question.hardware.memory_bytes / gib:.1f}, weights {held.weights.total / gib:.1f}, buffers "
            f"{held.buffers / gib:.1f} and the reserve {left} for it"
        )
        return held.cache - held.cache_limit, Refused(candidate.scheme, candidate.label, reason)
    cost = _cost(question, candidate, batch)
    return Priced(candidate, cost, held, limit)


def largest_batch_within(question: Question, candidate: Candidate, ttl_us: float) -> int:
    """Largest batch that fits and whose step takes at most `ttl_us`; 0 where even one sequence takes longer."""
    low, high = 0, _memory(question, candidate, 1).largest_batch
    while low < high:
        middle = (low + high + 1) // 2
        if _cost(question, candidate, middle).ttl_us <= ttl_us:
            low = middle
        else:
            high = middle - 1
    return low


def _cost(question: Question, candidate: Candidate, batch: int) -> StepCost:
    return placement_cost(
        question.spec, candidate.placement, question.formats, question.hardware, question.workload(batch)
    )


def _memory(question: Question, candidate: Candidate, batch: int) -> Memory:
    return memory(
        question.spec,
        candidate.placement,
        question.formats,
        question.hardware,
        question.workload(batch),
        memory_fraction=question.memory_fraction,
    )


def sort_key(question: Question, one: Priced) -> tuple[float, ...]:
    """Smaller is better. Those that miss the TTL target come last; among equals fewer ranks that cross nodes."""
    late = question.ttl_us is not None and one.cost.ttl_us > question.ttl_us
    crosses = one.candidate.placement.layout.kvp > question.hardware.node_size
    by = {
        "ttl": one.cost.ttl_us,
        "throughput": -one.cost.tokens_per_s_gpu,
        "concurrency": -float(one.concurrency),
    }
    return (late, by[question.objective], one.cost.ttl_us, crosses, one.candidate.placement.layout.kvp)


def _one_row_per_rival(ranked: Iterable[Priced]) -> Iterable[Priced]:
    seen: set[Scheme] = set()
    for one in ranked:
        scheme = one.candidate.scheme
        if scheme == "helix" or scheme not in seen:
            yield one
        seen.add(scheme)
