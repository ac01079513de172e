"""A plan as text, as JSON, and as a ready config."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from rich import box
from rich.console import Console
from rich.table import Table

from helix.cost.step import PART_NAMES
from helix.errors import ConfigError
from helix.layout import Layout, padded_heads
from helix.planner.candidates import SCHEME_TEXT, Refused
from helix.planner.explain import Explanation, name_of, tokens_text
from helix.planner.groups import GroupMap, ranks_text, size_text
from helix.planner.reproduce import Reproduction
from helix.planner.search import Plan, Priced, Question

_WIDTH = 250
_GIB = 1 << 30
_MAX_REFUSALS = 12
_LEGEND = """\
ms: TTL = attn (KV read) + wts (weight read) + math (arithmetic beyond the reads) + fixed (kernel launches)
+ exch (exchange) + q-ag (query gather) + ar (all-reduces) + disp (dispatch) + head (embedding and head)
+ pp (hand-over of stages) - hopb (hidden by overlap); /s: tokens per second
memory: weights + KV of this batch, GiB on the fullest rank; most: largest batch that fits"""
_COLUMNS = (
    ("attention_read", "attn"),
    ("weight_read", "wts"),
    ("arithmetic", "math"),
    ("launches", "fixed"),
    ("exchange", "exch"),
    ("query_gather", "q-ag"),
    ("all_reduce", "ar"),
    ("dispatch", "disp"),
    ("embedding_and_head", "head"),
    ("pipeline", "pp"),
    ("overlap_gained", "-hopb"),
)


def print_plan(
    plan: Plan, why: Explanation, *, own: str | None = None, rows: int = 12, all_refused: bool = False
) -> None:
    """The ranked table, the explanation and the refused layouts on standard output."""
    console = Console(width=_WIDTH, highlight=False)
    question = plan.question
    gpus = " or ".join(map(str, question.num_gpus))
    batches = {one.cost.batch for one in plan.ranked}
    console.print(
        f"{question.model} on {gpus} x {question.hardware.name}, context {tokens_text(question.context)}, "
        + (f"batch {batches.pop()}, " if len(batches) == 1 else "")
        + f"weights {question.formats.weights}, KV {question.formats.cache}, transport {question.transport}; "
        + f"objective {question.objective}"
        + (f", TTL within {question.ttl_us / 1e3:g} ms" if question.ttl_us else ""),
        soft_wrap=True,
    )
    console.print(_table(plan, rows))
    console.print(_LEGEND)
    console.print(f"\n{why.why}\n{why.span}", soft_wrap=True)
    for line in (own, waste_text(plan)):
        if line:
            console.print(line, soft_wrap=True)
    shown = dict.fromkeys((plan.winner, plan.best_of("helix") or plan.winner))
    for one in shown:
        console.print(memory_text(question, one), soft_wrap=True)
    _print_refused(console, plan.refused, None if all_refused else _MAX_REFUSALS)


def _table(plan: Plan, rows: int) -> Table:
    question = plan.question
    shown = [name for name, _ in _COLUMNS if any(getattr(one.cost.parts, name) > 0.5 for one in plan.ranked)]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False, collapse_padding=True)
    table.add_column("#", justify="right", no_wrap=True)
    for title in ("scheme", "layout", "choices"):
        table.add_column(title, no_wrap=True)
    parts = [text for name, text in _COLUMNS if name in shown]
    first = [name for name, constant in _constant_columns(plan).items() if not constant]
    last = ["in TTL"] if question.ttl_us else []
    for title in (*first, "TTL", *parts, "/s user", "/s GPU", "memory", "most", *last):
        table.add_column(title, justify="right", no_wrap=True)
    helix = 0
    for index, one in enumerate(plan.ranked, 1):
        helix += one.candidate.scheme == "helix"
        if one.candidate.scheme == "helix" and helix > rows:
            continue
        table.add_row(*_row(index, one, first, shown, question.ttl_us is not None), style="bold" if index == 1 else "")
    return table


def _constant_columns(plan: Plan) -> dict[str, bool]:
    """Columns that the heading replaces where all rows have the same."""
    return {
        "GPUs": len(plan.question.num_gpus) == 1,
        "batch": len({one.cost.batch for one in plan.ranked}) == 1,
    }


def _row(index: int, one: Priced, first: list[str], shown: list[str], has_target: bool) -> list[str]:
    cost, held = one.cost, one.memory
    cells = [
        str(index),
        SCHEME_TEXT[one.candidate.scheme],
        one.candidate.label,
        one.candidate.choice_text,
        *({"GPUs": str(cost.num_ranks), "batch": str(cost.batch)}[name] for name in first),
        f"{cost.ttl_ms:.2f}",
        *(_ms(getattr(cost.parts, name)) for name in shown),
        f"{cost.tokens_per_s_user:.1f}",
        f"{cost.tokens_per_s_gpu:.2f}",
        f"{held.weights.total / _GIB:.1f}+{held.cache / _GIB:.1f}",
        str(held.largest_batch),
    ]
    return [*cells, "" if one.batch_in_ttl is None else str(one.batch_in_ttl)] if has_target else cells


def _ms(us: float) -> str:
    return f"{us / 1e3:.2f}" if abs(us) >= 5 else "-"


def memory_text(question: Question, one: Priced) -> str:
    """Memory of the fullest rank by kind, GiB."""
    held = one.memory
    kinds = {name.replace("_", " "): value for name, value in asdict(held.weights).items()}
    kinds |= {f"KV of {one.cost.batch}": held.cache, "buffers": held.buffers, "reserve": held.reserved}
    parts = [f"{name} {value / _GIB:.1f}" for name, value in kinds.items() if value >= 0.05 * _GIB]
    total = f"{held.total / _GIB:.1f} of {question.hardware.memory_bytes / _GIB:.1f} GiB"
    return f"Memory of the fullest rank, {name_of(one.candidate)}: {', '.join(parts)}; {total}."


def waste_text(plan: Plan) -> str:
    """What the best Helix layout pads, if it does."""
    best = plan.best_of("helix")
    if best is None:
        return ""
    padded = padded_heads(plan.question.spec, best.candidate.placement.layout)
    if not padded:
        return ""
    return f"{best.candidate.label} pads {padded} query heads to {plan.question.spec.num_heads + padded}."


def _print_refused(console: Console, refused: Iterable[Refused], limit: int | None) -> None:
    groups: dict[tuple[str, str], list[Refused]] = {}
    for one in refused:
        kind = re.sub(r"[0-9.]+", "#", one.reason) if limit is not None else one.reason
        groups.setdefault((one.scheme, kind), []).append(one)
    if not groups:
        return
    console.print(f"\nrefused: {sum(map(len, groups.values()))} placements")
    for members in list(groups.values())[:limit]:
        first = members[0]
        more = f" and {len(members) - 1} more" if len(members) > 1 else ""
        console.print(f"  {SCHEME_TEXT[first.scheme]} {first.label}{more}: {first.reason}", soft_wrap=True)
    if limit is not None and len(groups) > limit:
        console.print(f"  ... and {len(groups) - limit} more reasons (--all-refused, --json)")


def plan_to_dict(plan: Plan, why: Explanation) -> dict[str, Any]:
    """Everything a plan holds, as plain values: times in microseconds, sizes in bytes."""
    question = plan.question
    return {
        "model": question.model,
        "hardware": question.hardware.name,
        "num_gpus": list(question.num_gpus),
        "context": question.context,
        "objective": question.objective,
        "ttl_target_us": question.ttl_us,
        "formats": asdict(question.formats),
        "why": why.why,
        "span": why.span,
        "wins_from": why.wins_from,
        "wins_to": why.wins_to,
        "ranked": [_priced_dict(one) for one in plan.ranked],
        "refused": [asdict(one) for one in plan.refused],
    }


def _priced_dict(one: Priced) -> dict[str, Any]:
    place, cost, held = one.candidate.placement, one.cost, one.memory
    weights = asdict(held.weights)
    return {
        "scheme": one.candidate.scheme,
        "layout": asdict(place.layout),
        "label": one.candidate.label,
        "choices": asdict(place.choices),
        "dp": place.dp,
        "pp": place.pp,
        "num_gpus": cost.num_ranks,
        "batch": cost.batch,
        "ttl_us": cost.ttl_us,
        "parts_us": {name: getattr(cost.parts, name) for name in PART_NAMES},
        "tokens_per_s_user": cost.tokens_per_s_user,
        "tokens_per_s_gpu": cost.tokens_per_s_gpu,
        "memory_bytes": {**weights, "kv_cache": held.cache, "buffers": held.buffers, "reserved": held.reserved},
        "largest_batch": held.largest_batch,
        "batch_in_ttl": one.batch_in_ttl,
    }


def plan_to_yaml(plan: Plan) -> str:
    """A config that runs the best placement this engine can run, as YAML.

    Raises
    ------
    ConfigError
        The weights' or the cache's format is one that the engine does not hold.
    """
    question = plan.question
    for what, name in (("weights", question.formats.weights), ("the cache", question.formats.cache)):
        if name not in ("bfloat16", "float16", "float32", "float8"):
            raise ConfigError(f"--yaml: this engine does not hold {what} as {name}")
    runs = next(one for one in plan.ranked if one.candidate.scheme in ("helix", "tp"))
    layout, choices = runs.candidate.placement.layout, runs.candidate.placement.choices
    directory = Path(question.model).is_dir()
    model: dict[str, Any] = {"path": question.model} if directory else {"card": question.model, "load": "dummy"}
    if question.formats.weights == "float8":
        model["quantize"] = "auto" if question.spec.fp8_block else "fp8"
    elif question.formats.weights != question.spec.dtype:
        model["dtype"] = question.formats.weights
    cache: dict[str, Any] = {"page_tokens": question.page_tokens, "memory_fraction": question.memory_fraction}
    if question.formats.cache != question.formats.activations:
        cache["dtype"] = question.formats.cache
    comm: dict[str, Any] = {"overlap": choices.overlap if choices.overlap > 1 else "off"}
    comm["query"] = choices.query
    if question.spec.mla:
        comm["exchange_space"] = choices.exchange_space
    if question.spec.moe:
        comm["dispatch"] = choices.dispatch
    tree = {
        "model": model,
        "layout": layout_dict(layout),
        "cache": cache,
        "comm": comm,
        "engine": {
            "max_batch": max(min(runs.concurrency, 256), runs.cost.batch),
            "max_context": min(question.context, question.spec.max_context),
        },
    }
    head = (
        f"# {question.model} on {runs.cost.num_ranks} x {question.hardware.name}, by `helix plan`\n"
        f"# predicted at {tokens_text(question.context)} tokens, batch {runs.cost.batch}: {runs.cost.ttl_ms:.2f} ms\n"
    )
    if question.context > question.spec.max_context:
        head += f"# the model was made for {question.spec.max_context} tokens: max_context is cut to that\n"
    return head + yaml.safe_dump(tree, sort_keys=False)


def layout_dict(layout: Layout) -> dict[str, int | bool]:
    """`layout` as the YAML section of the same name."""
    sizes: dict[str, int | bool] = {"kvp": layout.kvp, "tpa": layout.tpa, "tpf": layout.tpf, "ep": layout.ep}
    return sizes | ({"duplicate_kv": True} if layout.duplicate_kv else {})


def print_reproduction(found: Reproduction) -> None:
    """Published and modelled numbers side by side, with what was assumed and where it misses."""
    console = Console(width=_WIDTH, highlight=False)
    console.print(found.title)
    for assumption in found.assumptions:
        console.print(f"  - {assumption}", soft_wrap=True)
    table = Table("result", box=box.SIMPLE_HEAD)
    for title in (found.against, "model", "error"):
        table.add_column(title, justify="right")
    for row in found.rows:
        shown = [
            f"{value:.1%}" if not row.unit else f"{value:.4g}{row.unit}" for value in (row.published, row.modelled)
        ]
        table.add_row(row.name, *shown, f"{row.error:+.0%}")
    console.print(table)
    for row in found.rows:
        if row.note:
            console.print(f"{row.name}: {row.note}.", soft_wrap=True)
    limit = 0.25 if found.against == "published" else 0.15
    within = sum(abs(row.error) <= limit for row in found.rows)
    console.print(f"median error {found.median_error:.1%}; {within} of {len(found.rows)} within {limit:.0%}")


def print_groups(groups: GroupMap, *, max_ranks: int = 64) -> None:
    """Coordinates, groups and traffic of a layout on standard output."""
    console = Console(width=_WIDTH, highlight=False)
    console.print(f"\ngroups of {groups.layout}, {groups.node_size} ranks a node")
    table = Table("rank", "node", "kvp rank", "tpa rank", "tpf rank", "ep rank", box=box.SIMPLE_HEAD)
    for rank, at in enumerate(groups.coords[:max_ranks]):
        cells = (rank, rank // groups.node_size, at.kvp_rank, at.tpa_rank, at.tpf_rank, at.ep_rank)
        table.add_row(*map(str, cells))
    console.print(table)
    if len(groups.coords) > max_ranks:
        console.print(f"... and {len(groups.coords) - max_ranks} more ranks (--json)")
    for axis, all_groups in groups.groups.items():
        shown = "  ".join(f"[{ranks_text(ranks)}]" for ranks in all_groups[:16])
        more = f"  and {len(all_groups) - 16} more" if len(all_groups) > 16 else ""
        console.print(f"{axis:>4}: {len(all_groups)} x {len(all_groups[0])} ranks  {shown}{more}", markup=False)
    table = Table(
        "collective", "for", "axis", "ranks", "calls a step", "sent by a rank a step", "link", box=box.SIMPLE_HEAD
    )
    for one in groups.traffic:
        table.add_row(one.op, one.purpose, one.axis, str(one.size), str(one.calls), size_text(one.sent_bytes), one.link)
    console.print(table)
