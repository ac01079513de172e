"""Pictures of a benchmark: what was measured, beside its ceiling and its prediction.

Needs matplotlib (extra `plot`). Uses figures only, no global state of pyplot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from helix.bench.decode import DecodeReport
from helix.bench.prefill import PrefillReport
from helix.bench.variants import series_name
from helix.errors import ConfigError
from helix.planner.explain import tokens_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers tell apart.
_COLOURS: Final = ("#0b3d91", "#d55e00", "#009e73", "#e69f00", "#56b4e9", "#cc79a7", "#999999", "#332288")
_SUFFIXES: Final = (".png", ".svg", ".pdf")
_BAR: Final = 0.8
_CEILING: Final[dict[str, Any]] = {"color": "black", "linewidth": 1.6, "solid_capstyle": "butt"}
_PREDICTED: Final[dict[str, Any]] = {
    "marker": "D", "markersize": 5, "markerfacecolor": "#f0e442", "markeredgecolor": "black", "linestyle": "none",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One measured time: in `group` (a place on the axis), of `series` (a colour). `added` came from the cost model."""

    group: str
    series: str
    measured: float
    added: float = 0.0
    ceiling: float | None = None
    predicted: float | None = None


def write_decode(report: DecodeReport, path: Path) -> None:
    """Milliseconds a decode step, one group of bars a cell and one colour a layout. Raises: ConfigError."""
    bars = [
        Bar(
            group=f"{one.batch} x {tokens_text(one.context)}",
            series=series_name(one.variant, one.layout, one_rank=one.one_rank),
            measured=one.ttl_ms,
            added=one.collectives_ms,
            ceiling=one.ceiling_ms,
            predicted=one.predicted_ms,
        )
        for one in report.timings
    ]
    title = f"{report.model}, {report.num_layers} layers, {report.dtype}, {report.device}"
    write_bars(bars, path, title=title, unit="ms a decode step", groups="batch x context")


def write_prefill(report: PrefillReport, path: Path) -> None:
    """Seconds to the first token, one group of bars a prompt and one colour a layout. Raises: ConfigError."""
    bars = [
        Bar(
            group=f"{tokens_text(one.prompt)} in {tokens_text(one.chunk)}",
            series=series_name(one.variant, one.layout, one_rank=one.one_rank),
            measured=one.compute_ms / 1e3,
            added=one.collectives_ms / 1e3,
            ceiling=None if one.ceiling_ms is None else one.ceiling_ms / 1e3,
            predicted=None if one.predicted_ms is None else one.predicted_ms / 1e3,
        )
        for one in report.timings
    ]
    title = f"{report.model}, {report.num_layers} layers, {report.dtype}, {report.device}"
    write_bars(bars, path, title=title, unit="s to the first token", groups="prompt in chunks, tokens")


def write_bars(bars: Sequence[Bar], path: Path, *, title: str, unit: str, groups: str) -> None:
    """The picture in the form that the name of `path` asks for. Raises: ConfigError."""
    if path.suffix not in _SUFFIXES:
        raise ConfigError(f"--plot {path} must end in one of {', '.join(_SUFFIXES)}")
    series = list(dict.fromkeys(bar.series for bar in bars))
    places = list(dict.fromkeys(bar.group for bar in bars))
    figure = _figure(max(6.4, 1.6 + 0.36 * len(series) * len(places) + 0.3 * len(places)), 4.6)
    axes = figure.subplots()
    draw_bars(axes, bars, places, series)
    axes.set_title(title, fontsize=10, loc="left")
    add_legend(figure, bars, series)
    axes.set_ylabel(unit)
    axes.set_xlabel(groups)
    figure.savefig(path, dpi=130)


def draw_bars(axes: Axes, bars: Sequence[Bar], places: Sequence[str], series: Sequence[str]) -> None:
    """Solid: measured; hatched on top: added from the cost model; line across: ceiling; diamond: predicted."""
    width = _BAR / len(series)
    for bar in bars:
        place = places.index(bar.group) + (series.index(bar.series) + 0.5) * width - _BAR / 2
        colour = _colour(series.index(bar.series))
        axes.bar(place, bar.measured, width * 0.9, color=colour)
        total = bar.measured + bar.added
        if bar.added:
            hatched: dict[str, Any] = {"facecolor": "white", "edgecolor": colour, "hatch": "////", "linewidth": 0.8}
            axes.bar(place, bar.added, width * 0.9, bottom=bar.measured, **hatched)
        axes.annotate(f"{total:.3g}", (place, total), (0, 2), textcoords="offset points", ha="center", fontsize=7)
        if bar.ceiling is not None:
            ends = (place - width * 0.45, place + width * 0.45)
            axes.plot(ends, (bar.ceiling, bar.ceiling), color="white", linewidth=3.2, solid_capstyle="butt")
            axes.plot(ends, (bar.ceiling, bar.ceiling), **_CEILING)
        if bar.predicted is not None:
            axes.plot(place, bar.predicted, **_PREDICTED)
    axes.set_xticks(range(len(places)), places)
    axes.set_xlim(-0.5, len(places) - 0.5)
    axes.set_ylim(bottom=0, top=axes.get_ylim()[1] * 1.04)
    axes.grid(axis="y", linewidth=0.4, alpha=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def add_legend(figure: Figure, bars: Sequence[Bar], series: Sequence[str]) -> None:
    """Layouts first, then the marks; above the axes, where it hides no bar."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    entries: list[Patch | Line2D] = [Patch(color=_colour(at), label=name) for at, name in enumerate(series)]
    if any(bar.added for bar in bars):
        entries.append(
            Patch(facecolor="white", edgecolor="#555555", hatch="////", label="collectives, by the cost model")
        )
    if any(bar.ceiling is not None for bar in bars):
        entries.append(Line2D([], [], label="ceiling of the device", **_CEILING))
    if any(bar.predicted is not None for bar in bars):
        entries.append(Line2D([], [], label="predicted", **_PREDICTED))
    columns = max(int(figure.get_figwidth() // 2.3), 1)
    figure.legend(handles=entries, loc="outside upper left", ncols=columns, fontsize=8, frameon=False)


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError("--plot needs matplotlib; install the extra: pip install 'helix-parallel[plot]'") from error
    return Figure(figsize=(width, height), layout="constrained")
