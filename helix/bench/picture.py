"""Pictures of a benchmark: what was measured, beside its ceiling and its prediction.

Needs matplotlib (extra `plot`). Uses figures only, no global state of pyplot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from helix.bench.decode import DecodeReport
from helix.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers tell apart.
_COLOURS: Final = ("#0b3d91", "#d55e00", "#009e73", "#e69f00", "#56b4e9", "#cc79a7", "#999999", "#332288")
_SUFFIXES: Final = (".png", ".svg", ".pdf")
_BAR: Final = 0.8


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
            series=f"one rank of {one.variant}" if one.one_rank else one.layout,
            measured=one.ttl_ms,
            added=one.collectives_ms,
            ceiling=one.ceiling_ms,
            predicted=one.predicted_ms,
        )
        for one in report.timings
    ]
    title = f"{report.model}, {report.num_layers} layers, {report.dtype}, {report.device}"
    write_bars(bars, path, title=title, unit="ms a decode step", groups="batch x context")


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
    axes.set_ylabel(unit)
    axes.set_xlabel(groups)
    figure.savefig(path, dpi=130)


def draw_bars(axes: Axes, bars: Sequence[Bar], places: Sequence[str], series: Sequence[str]) -> None:
    """Solid: measured; hatched on top: added from the cost model; line across: ceiling; diamond: predicted."""
    width = _BAR / len(series)
    labelled: set[str] = set()

    def label(text: str) -> str:
        fresh = text not in labelled
        labelled.add(text)
        return text if fresh else "_nolegend_"

    for bar in bars:
        place = places.index(bar.group) + (series.index(bar.series) + 0.5) * width - _BAR / 2
        colour = _COLOURS[series.index(bar.series) % len(_COLOURS)]
        axes.bar(place, bar.measured, width * 0.9, color=colour, label=label(bar.series))
        total = bar.measured + bar.added
        if bar.added:
            axes.bar(
                place,
                bar.added,
                width * 0.9,
                bottom=bar.measured,
                facecolor="white",
                edgecolor=colour,
                hatch="////",
                linewidth=0.8,
                label=label("collectives, from the cost model"),
            )
        axes.annotate(f"{total:.3g}", (place, total), (0, 2), textcoords="offset points", ha="center", fontsize=7)
        if bar.ceiling is not None:
            ends = (place - width * 0.45, place + width * 0.45)
            axes.plot(ends, (bar.ceiling, bar.ceiling), color="white", linewidth=3.2, solid_capstyle="butt")
            axes.plot(ends, (bar.ceiling, bar.ceiling), color="black", linewidth=1.6, label=label("ceiling"))
        if bar.predicted is not None:
            axes.plot(
                place,
                bar.predicted,
                marker="D",
                markersize=5,
                markerfacecolor="#f0e442",
                markeredgecolor="black",
                linestyle="none",
                label=label("predicted"),
            )
    axes.set_xticks(range(len(places)), places)
    axes.set_ylim(bottom=0, top=axes.get_ylim()[1] * 1.06)
    axes.grid(axis="y", linewidth=0.4, alpha=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="upper left")


def tokens_text(count: int) -> str:
    """131072 -> 128K."""
    for size, unit in ((1 << 20, "M"), (1 << 10, "K")):
        if count >= size and count % size == 0:
            return f"{count // size}{unit}"
    return str(count)


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError("--plot needs matplotlib; install the extra: pip install 'helix-parallel[plot]'") from error
    return Figure(figsize=(width, height), layout="constrained")
