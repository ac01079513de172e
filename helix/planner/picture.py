"""Pictures of a plan: the Pareto frontiers, where a step's time goes, and the groups of a layout; alone or in a page.

Needs matplotlib (extra `plot`). Uses figures only, no global state of pyplot.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from helix.errors import ConfigError
from helix.planner.candidates import SCHEME_TEXT, Candidate, Scheme
from helix.planner.explain import explain, tokens_text
from helix.planner.frontier import Point, frontier, sweep
from helix.planner.groups import GroupMap, map_groups, size_text
from helix.planner.search import Plan, Priced, all_candidates

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
_PARTS: Final = (
    ("attention_read", "KV read", "#0b3d91"),
    ("weight_read", "weight read", "#56b4e9"),
    ("arithmetic", "arithmetic beyond reads", "#009e73"),
    ("launches", "fixed costs", "#bbbbbb"),
    ("exchange", "exchange", "#d55e00"),
    ("query_gather", "query gather", "#e69f00"),
    ("all_reduce", "all-reduces", "#cc79a7"),
    ("dispatch", "dispatch", "#f0e442"),
    ("embedding_and_head", "embedding and head", "#666666"),
    ("pipeline", "stages", "#332288"),
)
_MAX_BARS = 10
_SUFFIXES: Final = (".png", ".svg", ".pdf")


def write_plot(plan: Plan, path: Path, *, groups: bool = False) -> None:
    """Write the frontiers and the bars (and with `groups` the groups of the best Helix layout) as one picture."""
    if path.suffix not in _SUFFIXES:
        raise ConfigError(f"--plot {path} must end in one of {', '.join(_SUFFIXES)}")
    best = plan.best_of("helix") if groups else None
    figure = _figure(11, 9.5 if best is None else 15)
    axes = figure.subplots(2 if best is None else 3, 1, height_ratios=(1.2, 1) if best is None else (1.2, 1, 1.3))
    draw_frontier(axes[0], plan)
    draw_parts(axes[1], plan)
    if best is not None:
        draw_groups(axes[2], _map(plan, best.candidate))
    figure.savefig(path, dpi=130)


def write_html(plan: Plan, path: Path, *, groups: bool = False) -> None:
    """Write one page without outside references: explanation, pictures, the ranked table and the refusals."""
    why = explain(plan)
    pictures = [_picture(draw_frontier, plan, 10, 5.2), _picture(draw_parts, plan, 10, 4.6)]
    best = plan.best_of("helix") if groups else None
    if best is not None:
        pictures.append(_picture(draw_groups, _map(plan, best.candidate), 10, 5))
    question = plan.question
    title = f"{question.model} on {question.hardware.name}, {tokens_text(question.context)} tokens"
    head = ("scheme", "layout", "choices", "GPUs", "batch", "TTL ms", "tokens/s user", "tokens/s GPU", "largest batch")
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
        str(one.memory.largest_batch),
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


def draw_frontier(axes: Axes, plan: Plan) -> None:
    """tokens/s/user against tokens/s/GPU: the frontier of each scheme over its placements and batches."""
    by_scheme: dict[Scheme, list[Point]] = {}
    for point in sweep(plan.question, all_candidates(plan.question), max_batch=4096, per_doubling=2):
        by_scheme.setdefault(point.candidate.scheme, []).append(point)
    for scheme, points in by_scheme.items():
        front = frontier(points)
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
    gpus = ", ".join(map(str, question.num_gpus))
    axes.set_title(f"{question.model}, {gpus} x {question.hardware.name}, {tokens_text(question.context)} tokens")
    axes.set(xlabel="tokens/s per user (1 / TTL)", ylabel="tokens/s per GPU", yscale="log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=9)


def draw_parts(axes: Axes, plan: Plan) -> None:
    """A stacked bar for the best Helix layouts and the best of each rival; what overlap hides is hatched at the end."""
    rows = [one for one in plan.ranked if one.candidate.scheme != "helix"]
    rows = [*plan.helix[: max(_MAX_BARS - len(rows), 2)], *rows]
    rows.sort(key=lambda one: one.cost.ttl_us)
    names = [f"{SCHEME_TEXT[one.candidate.scheme]}\n{one.candidate.label}" for one in rows]
    places = range(len(rows))
    left = [0.0] * len(rows)
    for name, text, colour in _PARTS:
        widths = [getattr(one.cost.parts, name) / 1e3 for one in rows]
        if max(widths) > 0:
            axes.barh(places, widths, left=left, color=colour, label=text, height=0.7)
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


def draw_groups(axes: Axes, groups: GroupMap) -> None:
    """Each rank as a cell of the attention grid and of the FFN grid, coloured by node, with what runs on each axis."""
    layout = groups.layout
    ffn_start = layout.kvp + 2.0
    _draw_grid(axes, groups, 0.0, layout.kvp, layout.tpa, "attention", ("kvp", "tpa"))
    _draw_grid(axes, groups, ffn_start, layout.tpf, layout.ep, "FFN", ("tpf", "ep"))
    height = max(layout.tpa, layout.ep)
    lines = [
        f"{one.op} ({one.purpose}) over {one.axis}, {one.size} ranks: {size_text(one.sent_bytes)} a step, {one.link}"
        for one in groups.traffic
        if one.size > 1
    ]
    axes.set_title(f"{layout}, {groups.node_size} ranks a node", fontsize=11)
    axes.text(0, height + 0.6, "\n".join(lines), fontsize=8, va="top", family="monospace")
    axes.set_xlim(-1.5, ffn_start + layout.tpf + 0.5)
    axes.set_ylim(height + 0.8 + 0.25 * max(len(lines), 1) * max(height, 4) / 4, -1.6)
    axes.set_axis_off()


def _draw_grid(
    axes: Axes, groups: GroupMap, left: float, width: int, height: int, title: str, names: tuple[str, str]
) -> None:
    from matplotlib.patches import Rectangle

    shades = ("#9ecae1", "#fdd0a2", "#c7e9c0", "#dadaeb", "#fcbba1", "#d9d9d9", "#c6dbef", "#fee6ce")
    for rank in range(width * height):
        x, y = left + rank % width, rank // width
        colour = shades[rank // groups.node_size % len(shades)]
        axes.add_patch(Rectangle((x, y), 0.94, 0.94, facecolor=colour, edgecolor="#444444", linewidth=0.5))
        if width * height <= 128:
            axes.text(x + 0.47, y + 0.5, str(rank), ha="center", va="center", fontsize=6)
    axes.text(
        left + width / 2, -1.0, f"{title}: {names[0]} {width} across, {names[1]} {height} down", ha="center", fontsize=9
    )
