"""Pictures of a plan: the Pareto frontiers, where a step's time goes, and the groups of a layout; alone or in a page.

Needs matplotlib (extra `plot`). Uses figures only, no global state of pyplot.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from helix.errors import ConfigError
from helix.planner.candidates import SCHEME_TEXT, Candidate, Scheme
from helix.planner.explain import PART_TEXT, explain, tokens_text
from helix.planner.frontier import Point, frontier, sweep
from helix.planner.groups import GroupMap, map_groups, size_text
from helix.planner.search import Plan, Priced, Progress, all_candidates

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers tell apart; Helix is the dark one.
_COLOURS: Final[dict[Scheme, str]] = {
    "helix": "#0b3d91",
    "tp": "#d55e00",
    "tp-pp": "#e69f00",
    "dp-ep": "#009e73",
    "medha": "#cc79a7",
    "dcp-ag-rs": "#999999",
    "dcp-a2a": "#56b4e9",
}
_MARKERS: Final[dict[Scheme, str]] = {
    "helix": "o", "tp": "s", "tp-pp": "D", "dp-ep": "^", "medha": "v", "dcp-ag-rs": "P", "dcp-a2a": "X",
}  # fmt: skip
_PART_COLOURS: Final = {
    "attention_read": "#0b3d91",
    "weight_read": "#56b4e9",
    "arithmetic": "#009e73",
    "launches": "#bbbbbb",
    "exchange": "#d55e00",
    "query_gather": "#e69f00",
    "all_reduce": "#cc79a7",
    "dispatch": "#f0e442",
    "embedding_and_head": "#666666",
    "pipeline": "#332288",
}
# Groups in turn: neighbours are told apart by hue and by lightness.
_SHADES: Final = ("#9ecae1", "#fdae6b", "#a1d99b", "#bcbddc", "#fc9272", "#d9d9d9", "#fee391", "#6baed6")
_MAX_COLUMNS = 12
_MAX_BARS = 10


@dataclass(frozen=True, slots=True)
class Fronts:
    """A plan, and the frontier of each scheme over its placements and batches."""

    plan: Plan
    by_scheme: dict[Scheme, list[Point]]


def find_fronts(plan: Plan, progress: Progress | None = None) -> Fronts:
    """Price every placement of `plan` at many batches."""
    found: dict[Scheme, list[Point]] = {}
    candidates = all_candidates(plan.question)
    for point in sweep(plan.question, candidates, max_batch=4096, per_doubling=2, progress=progress):
        found.setdefault(point.candidate.scheme, []).append(point)
    return Fronts(plan, {scheme: frontier(points) for scheme, points in found.items()})


def write_plot(fronts: Fronts, path: Path, *, groups: bool = False) -> None:
    """Write the frontiers and the bars (and with `groups` the groups of the best Helix layout) as one picture."""
    plan = fronts.plan
    best = plan.best_of("helix") if groups else None
    figure = _figure(11, 9.5 if best is None else 15)
    axes = figure.subplots(2 if best is None else 3, 1, height_ratios=(1.2, 1) if best is None else (1.2, 1, 1.3))
    draw_frontier(axes[0], fronts)
    draw_parts(axes[1], plan)
    if best is not None:
        draw_groups(axes[2], _map(plan, best.candidate))
    figure.savefig(path, dpi=130)


def write_html(fronts: Fronts, path: Path, *, groups: bool = False) -> None:
    """Write one page without outside references: explanation, pictures, the ranked table and the refusals."""
    plan = fronts.plan
    why = explain(plan)
    pictures = [_picture(draw_frontier, fronts, 10, 5.2), _picture(draw_parts, plan, 10, 4.6)]
    best = plan.best_of("helix") if groups else None
    if best is not None:
        pictures.append(_picture(draw_groups, _map(plan, best.candidate), 10, 5))
    question = plan.question
    title = f"{question.model} on {question.hardware.name}, {tokens_text(question.context)} tokens"
    head: tuple[str, ...] = ("scheme", "layout", "choices", "GPUs", "batch", "TTL ms", "tokens/s user", "tokens/s GPU")
    head += ("weights GiB", "KV GiB", "largest batch", "largest in TTL")
    body = "".join(
        f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in _cells(one))}</tr>" for one in plan.ranked
    )
    refused = "".join(
        f"<li>{html.escape(f'{SCHEME_TEXT[one.scheme]} {one.label}: {one.reason}')}</li>" for one in plan.refused
    )
    path.write_text(
        "<!doctype html><html lang=en><meta charset=utf-8>"
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style><h1>{html.escape(title)}</h1>"
        f"<p>{html.escape(why.why)}</p><p>{html.escape(why.span)}</p>{''.join(pictures)}"
        f"<table><tr>{''.join(f'<th>{name}</th>' for name in head)}</tr>{body}</table>"
        f"<details><summary>{len(plan.refused)} placements refused</summary><ul>{refused}</ul></details></html>",
        encoding="utf-8",
    )


_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}"
    "img{max-width:100%}table{border-collapse:collapse;font-size:13px}"
    "td,th{padding:.2rem .6rem;border-bottom:1px solid #ddd;text-align:left;white-space:nowrap}"
)


def _cells(one: Priced) -> tuple[str, ...]:
    cost = one.cost
    return (
        SCHEME_TEXT[one.candidate.scheme],
        one.candidate.label,
        one.candidate.choice_text,
        str(cost.num_ranks),
        str(cost.batch),
        f"{cost.ttl_ms:.2f}",
        f"{cost.tokens_per_s_user:.1f}",
        f"{cost.tokens_per_s_gpu:.2f}",
        f"{one.memory.weights.total / (1 << 30):.1f}",
        f"{one.memory.cache / (1 << 30):.1f}",
        str(one.memory.largest_batch),
        "" if one.batch_in_ttl is None else str(one.batch_in_ttl),
    )


def _picture(draw: Callable[[Axes, Any], None], what: Any, width: float, height: float) -> str:
    figure = _figure(width, height)
    draw(figure.subplots(), what)
    data = BytesIO()
    figure.savefig(data, format="png", dpi=130)
    return f'<p><img alt="" src="data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"></p>'


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError(
            "--plot and --html need matplotlib; install the extra: pip install 'helix-parallel[plot]'"
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def _map(plan: Plan, candidate: Candidate) -> GroupMap:
    return map_groups(plan.question, candidate.placement, plan.winner.cost.batch)


def draw_frontier(axes: Axes, fronts: Fronts) -> None:
    """tokens/s/user against tokens/s/GPU: the frontier of each scheme."""
    from matplotlib.ticker import LogLocator, NullFormatter

    plan = fronts.plan
    for scheme, front in fronts.by_scheme.items():
        axes.plot(
            [one.tokens_per_s_user for one in front],
            [one.tokens_per_s_gpu for one in front],
            color=_COLOURS[scheme],
            marker=_MARKERS[scheme],
            markersize=4,
            linewidth=2.2 if scheme == "helix" else 1.2,
            zorder=3 if scheme == "helix" else 2,
            label=SCHEME_TEXT[scheme],
        )
    if plan.question.ttl_us:
        axes.axvline(1e6 / plan.question.ttl_us, color="black", linestyle=":", label="TTL target")
    question = plan.question
    gpus = " or ".join(map(str, question.num_gpus))
    axes.set_title(f"{question.model}, {gpus} x {question.hardware.name}, {tokens_text(question.context)} tokens")
    axes.set(xlabel="tokens/s per user (1 / TTL)", ylabel="tokens/s per GPU", yscale="log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=9)


def draw_parts(axes: Axes, plan: Plan) -> None:
    """A stacked bar for the best Helix layouts and the best of each rival; what overlap hides is hatched at the end."""
    rows = [one for one in plan.ranked if one.candidate.scheme != "helix"]
    rows = [*plan.helix[: max(_MAX_BARS - len(rows), 2)], *rows]
    rows.sort(key=lambda one: one.cost.ttl_us)
    several = len(plan.question.num_gpus) > 1
    names = [_bar_name(one, several=several) for one in rows]
    places = range(len(rows))
    left = [0.0] * len(rows)
    for name, colour in _PART_COLOURS.items():
        widths = [getattr(one.cost.parts, name) / 1e3 for one in rows]
        if max(widths) > 0:
            axes.barh(places, widths, left=left, color=colour, label=PART_TEXT[name], height=0.7)
            left = [start + width for start, width in zip(left, widths, strict=True)]
    hidden = [one.cost.parts.overlap_gained / 1e3 for one in rows]
    if max(hidden) > 0:
        starts = [end - part for end, part in zip(left, hidden, strict=True)]
        axes.barh(places, hidden, left=starts, color="none", edgecolor="black", hatch="///", label="hidden by overlap")
    for place, end, one in zip(places, left, rows, strict=True):
        axes.text(end, place, f" {one.cost.ttl_ms:.2f} ms", va="center", fontsize=8)
    axes.set_yticks(places, names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(right=max(left) * 1.12)
    axes.set(xlabel="ms per decode step", title="Where a step's time goes")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _bar_name(one: Priced, *, several: bool) -> str:
    first = SCHEME_TEXT[one.candidate.scheme] + (f", {one.cost.num_ranks} GPUs" if several else "")
    ways = f", {one.candidate.choice_text}" if one.candidate.choice_text else ""
    return f"{first}{ways}\n{one.candidate.label}"


def draw_groups(axes: Axes, groups: GroupMap) -> None:
    """The ranks as they lie on nodes, twice: coloured by KVP group, and by TPF group; below, what runs between them."""
    layout = groups.layout
    columns = min(groups.node_size, _MAX_COLUMNS)
    gap = columns + 1.5
    kvp = f"attention: {_groups_text(layout.tpa, 'KVP', layout.kvp)}"
    tpf = f"FFN: {_groups_text(layout.ep, 'TPF', layout.tpf)}"
    height = max(
        _draw_ranks(axes, groups, 0.0, columns, kvp, lambda rank: groups.coords[rank].tpa_rank),
        _draw_ranks(axes, groups, gap, columns, tpf, lambda rank: groups.coords[rank].ep_rank),
    )
    lines = [
        f"{one.op} over {one.axis}, {one.size} ranks ({one.purpose}): {size_text(one.sent_bytes)} a rank and step, "
        f"{one.link}"
        for one in groups.traffic
        if one.size > 1
    ]
    axes.set_title(f"{layout}, {groups.node_size} ranks a node: what a rank sends in a step", fontsize=11)
    unit = max(height, 4.0) / 8
    axes.text(0, height + unit, "\n".join(lines), fontsize=8, va="top", family="monospace")
    axes.set_xlim(-0.2, gap + columns + 0.2)
    axes.set_ylim(height + unit * (1.5 + len(lines)), -1.6 * unit)
    axes.set_axis_off()


def _groups_text(count: int, axis: str, size: int) -> str:
    return f"one {axis} group of {size}" if count == 1 else f"{count} {axis} groups of {size}, one colour each"


def _draw_ranks(
    axes: Axes, groups: GroupMap, left: float, columns: int, title: str, colour_of: Callable[[int], int]
) -> float:
    """Ranks in rows of `columns`, a frame around each node; returns the height that was used."""
    from matplotlib.patches import Rectangle

    num_ranks, top = groups.layout.num_ranks, 0.0
    for first in range(0, num_ranks, groups.node_size):
        last = min(first + groups.node_size, num_ranks)
        for rank in range(first, last):
            row, column = divmod(rank - first, columns)
            x, y = left + column, top + row
            shade = _SHADES[colour_of(rank) % len(_SHADES)]
            axes.add_patch(Rectangle((x + 0.05, y + 0.05), 0.9, 0.9, facecolor=shade))
            if num_ranks <= 144:
                axes.text(x + 0.5, y + 0.5, str(rank), ha="center", va="center", fontsize=7)
        rows = -(-(last - first) // columns)
        width = min(last - first, columns)
        axes.add_patch(Rectangle((left, top), width, rows, fill=False, edgecolor="#444444", linewidth=1.0))
        top += rows + 0.3
    axes.text(left, -0.35, title, fontsize=9)
    return top
