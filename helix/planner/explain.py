"""Why the winner wins, against whom, and between which context lengths it does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from helix.cost.memory import memory
from helix.cost.step import PART_NAMES, placement_cost
from helix.planner.candidates import SCHEME_TEXT, Candidate
from helix.planner.search import Plan, Priced, Question

PART_TEXT: Final = MappingProxyType(
    {
        "attention_read": "KV read",
        "weight_read": "weight read",
        "arithmetic": "arithmetic beyond reads",
        "launches": "fixed costs",
        "exchange": "exchange",
        "query_gather": "query gather",
        "all_reduce": "all-reduces",
        "dispatch": "dispatch",
        "embedding_and_head": "embedding and head",
        "pipeline": "hand-over of stages",
        "overlap_gained": "not hidden by overlap",
    }
)
_LOWEST, _HIGHEST = 1 << 10, 1 << 24
_MAX_NEIGHBOURS = 6
# About the model's median error on measured steps (`--reproduce`): what differs by less, it cannot decide.
_MODEL_ERROR = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """`why` is one sentence; `span` says where the winner stops winning. `wins_from`/`wins_to` None: no end was found.

    `below` and `above` are the candidates that win beyond these ends.
    """

    why: str
    span: str
    wins_from: int | None
    wins_to: int | None
    below: Candidate | None
    above: Candidate | None


def explain(plan: Plan) -> Explanation:
    """Compare the winner with the best placement of another scheme (or the next layout), and search over contexts."""
    winner = plan.winner
    others = [one for one in plan.ranked[1:] if one.candidate.scheme != winner.candidate.scheme]
    same = [one for one in others if is_same(winner, one)]
    other = next((one for one in others if one not in same), None) or next(
        (one for one in plan.ranked[1:] if one not in same), None
    )
    field_ = _field(plan)
    batch = winner.cost.batch
    low, below = _edge(plan.question, winner.candidate, field_, batch, downwards=True)
    high, above = _edge(plan.question, winner.candidate, field_, batch, downwards=False)
    return Explanation(
        why=_why(plan.question, winner, other, same),
        span=_span(plan.question, winner, low, below, high, above),
        wins_from=low,
        wins_to=high,
        below=below,
        above=above,
    )


def name_of(candidate: Candidate) -> str:
    """Scheme and sizes, as sentences call it."""
    return f"{SCHEME_TEXT[candidate.scheme]} ({candidate.label})"


def is_same(one: Priced, other: Priced) -> bool:
    """Whether two schemes' placements are one and the same step: then their prices are, part by part."""
    return (
        one.cost.num_ranks == other.cost.num_ranks
        and one.cost.batch == other.cost.batch
        and all(
            math.isclose(getattr(one.cost.parts, name), getattr(other.cost.parts, name), rel_tol=1e-9)
            for name in PART_NAMES
        )
    )


def _why(question: Question, winner: Priced, other: Priced | None, same: Sequence[Priced]) -> str:
    name = name_of(winner.candidate)
    if same:
        name += f", here the same as {' and '.join(name_of(one.candidate) for one in same)},"
    if other is None:
        return f"{name} is the only placement that fits."
    rival = name_of(other.candidate)
    less, more = part_changes(winner, other)
    at = f"{winner.cost.ttl_ms:.2f} ms" + (f" at batch {winner.cost.batch}" if winner.cost.batch > 1 else "")
    against = f"{other.cost.ttl_ms:.2f} ms" + (
        f" at batch {other.cost.batch}" if other.cost.batch != winner.cost.batch else ""
    )
    text = f"{name} wins: a step takes {at} against {against} of {rival}"
    if question.objective == "concurrency":
        text += f", and {winner.concurrency} sequences can decode at once against {other.concurrency}"
    elif question.objective == "throughput":
        text += (
            f", and a GPU gives {winner.cost.tokens_per_s_gpu:.1f} tokens/s against {other.cost.tokens_per_s_gpu:.1f}"
        )
    if winner.cost.batch == other.cost.batch and (less or more):
        text += ": " + ", ".join(less) + (" for " if less and more else "") + ", ".join(more)
    return f"{text}.{_margin(question, winner, other)}"


def _margin(question: Question, winner: Priced, other: Priced) -> str:
    """A warning where the model's own error is larger than the difference."""
    gain = {
        "ttl": other.cost.ttl_us / winner.cost.ttl_us,
        "throughput": winner.cost.tokens_per_s_gpu / other.cost.tokens_per_s_gpu,
        "concurrency": winner.concurrency / max(other.concurrency, 1),
    }[question.objective]
    if gain - 1.0 > _MODEL_ERROR:
        return ""
    return f" They are {gain - 1.0:.1%} apart, within the model's error of about {_MODEL_ERROR:.0%}: measure both."


def part_changes(winner: Priced, other: Priced) -> tuple[list[str], list[str]]:
    """The parts of a step that are smaller than `other`'s, and those that are larger; the two largest of each."""
    changes = []
    for name in PART_NAMES:
        change = (getattr(winner.cost.parts, name) - getattr(other.cost.parts, name)) / 1e3
        changes.append((change if name != "overlap_gained" else -change, PART_TEXT[name]))
    threshold = 0.01 * winner.cost.ttl_ms
    less = [f"{-change:.2f} ms less {name}" for change, name in sorted(changes) if change < -threshold]
    more = [f"{change:.2f} ms more {name}" for change, name in sorted(changes, reverse=True) if change > threshold]
    return less[:2], more[:2]


def _field(plan: Plan) -> list[Candidate]:
    """The winner, its nearest followers, and the best of every rival."""
    rows = [*plan.ranked[:_MAX_NEIGHBOURS], *(one for one in plan.ranked if one.candidate.scheme != "helix")]
    return list(dict.fromkeys(one.candidate for one in rows))


def leader(question: Question, candidates: Sequence[Candidate], batch: int, context: int) -> Candidate | None:
    """The candidate with the shortest step among those that fit; the first of equals."""
    workload = question.workload(batch, context)
    best: tuple[float, Candidate] | None = None
    for one in candidates:
        if not _fits(question, one, batch, context):
            continue
        ttl = placement_cost(question.spec, one.placement, question.formats, question.hardware, workload).ttl_us
        if best is None or ttl < best[0]:
            best = (ttl, one)
    return None if best is None else best[1]


def _edge(
    question: Question, winner: Candidate, candidates: Sequence[Candidate], batch: int, *, downwards: bool
) -> tuple[int | None, Candidate | None]:
    """The context at which another candidate takes over, going away from the asked one; (None, None): nowhere."""
    holds = question.context
    if leader(question, candidates, batch, holds) != winner:
        return holds, None  # ranked by something else than the step's time
    while True:
        beyond = holds // 2 if downwards else holds * 2
        if not _LOWEST <= beyond <= _HIGHEST:
            return None, None
        taker = leader(question, candidates, batch, beyond)
        if taker != winner:
            break
        holds = beyond
    while abs(beyond - holds) > max(holds // 50, question.page_tokens):
        middle = (beyond + holds) // 2
        found = leader(question, candidates, batch, middle)
        if found == winner:
            holds = middle
        else:
            beyond, taker = middle, found
    return holds, taker


def _span(
    question: Question,
    winner: Priced,
    low: int | None,
    below: Candidate | None,
    high: int | None,
    above: Candidate | None,
) -> str:
    at = f"At batch {winner.cost.batch}"
    if low == question.context and below is None and high == question.context:
        return f"{at} another placement has a shorter step: it wins by the objective {question.objective}, not by TTL."
    start = f"from {_about(low)}" if low else f"from {tokens_text(_LOWEST)} or less"
    end = f"to {_about(high)}" if high else f"to {tokens_text(_HIGHEST)} and beyond"
    text = f"{at} it wins {start} {end} tokens of context"
    if below:
        text += f"; below, {name_of(below)} does"
    if high:
        full = not _fits(
            question, winner.candidate, winner.cost.batch, high + max(high // 20, 2 * question.page_tokens)
        )
        text += "; above, nothing here fits" if above is None else f"; above, {name_of(above)} does"
        text += ", since this one no longer fits" if above and full else ""
    return text + "."


def _about(tokens: int) -> str:
    """Edges are known to 2%, so no more is said."""
    return tokens_text(tokens if tokens < 10 << 10 else (tokens + 512) >> 10 << 10)


def _fits(question: Question, candidate: Candidate, batch: int, context: int) -> bool:
    workload = question.workload(batch, context)
    return memory(
        question.spec,
        candidate.placement,
        question.formats,
        question.hardware,
        workload,
        memory_fraction=question.memory_fraction,
    ).fits


def tokens_text(tokens: int) -> str:
    """131072 -> 128K, 1048576 -> 1M, 40960 -> 40K."""
    for unit, name in ((1 << 20, "M"), (1 << 10, "K")):
        if tokens >= unit:
            return f"{tokens / unit:.4g}{name}"
    return str(tokens)
