"""This engine's own measured decode steps beside what the model gives for them, nothing fitted to them.

Reads every report of `helix bench decode` under ``helix/bench/results`` for a device that a hardware card knows. The
inputs are that card's: kernels timed alone (`helix calibrate`), rates, collectives; and from a report the number of
distinct experts that its tokens really hit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from helix.cost.choices import Choices, Placement, Workload, make_formats
from helix.cost.hardware import Hardware, load_hardware, recognise_hardware
from helix.cost.step import StepCost, placement_cost
from helix.errors import ConfigError
from helix.layout import Layout
from helix.model_spec import ModelSpec
from helix.planner.explain import tokens_text
from model_zoo.cards import card_names, load_card

RESULTS: Final = Path(__file__).parent.parent / "bench" / "results"
_SIZES: Final = ("kvp", "tpa", "tpf", "ep")
_CHOICES: Final = ("query", "exchange_space", "merge", "dispatch")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """One timed cell and its price. `one_rank`: a rank of the layout ran without its peers, so without messages."""

    name: str
    measured_ms: float
    cost: StepCost
    one_rank: bool

    @property
    def predicted_ms(self) -> float:
        if not self.one_rank:
            return self.cost.ttl_ms
        parts = self.cost.parts
        return (parts.total - parts.communication + parts.overlap_gained) / 1e3


def measured_steps(card: str, folder: Path = RESULTS) -> list[MeasuredStep]:
    """Every cell under `folder` that was timed on the device of hardware card `card`. Raises: ConfigError if none."""
    hardware = load_hardware(card)
    found = []
    for path in sorted(folder.glob("*.json")):
        tree = json.loads(path.read_text(encoding="utf-8"))
        for report in _reports(tree):
            if recognise_hardware(str(report["device"])) == card and report["model"] in card_names():
                found += list(_steps(report, hardware))
    if not found:
        raise ConfigError(f"no measured decode steps for {card} in {folder}")
    return found


def _reports(tree: Any) -> Iterator[Mapping[str, Any]]:
    """The reports of `helix bench decode` anywhere in a result file."""
    if isinstance(tree, dict):
        if tree.get("bench") == "decode":
            yield tree
            return
        tree = list(tree.values())
    if isinstance(tree, list):
        for part in tree:
            yield from _reports(part)


def _steps(report: Mapping[str, Any], hardware: Hardware) -> Iterator[MeasuredStep]:
    spec = replace(load_card(report["model"]), num_layers=report["num_layers"])
    formats = make_formats(report["dtype"])
    for timing in report["timings"]:
        ways = timing.get("variant", "")
        place = _placement(timing.get("layout") or report["layout"], ways, spec)
        batch, context = timing["batch"], timing["context"]
        workload = Workload(batch=batch, context=context, routing=_routing(timing, place.layout.ep))
        name = [report["model"], _sizes_text(place.layout), *_ways_text(ways), f"{batch} x {tokens_text(context)}"]
        yield MeasuredStep(
            name=" ".join(name) + _how(report, timing),
            measured_ms=timing["ttl_ms"],
            cost=placement_cost(spec, place, formats, hardware, workload),
            one_rank=bool(timing.get("one_rank")),
        )


def _how(report: Mapping[str, Any], timing: Mapping[str, Any]) -> str:
    """What else tells a cell from others: fewer layers are not said, since rows of a report lie together."""
    return (", same token" if report.get("same_token") else "") + (", alone" if timing.get("one_rank") else "")


def _placement(layout_text: str, ways: str, spec: ModelSpec) -> Placement:
    """From the texts of a report: ``kvp=2 tpa=1 tpf=2 ep=1``, and how it ran, ``dcp=2,merge=ag_rs``."""
    sizes = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", layout_text) if name in _SIZES}
    given = dict(re.findall(r"(\w+)=(\w+)", ways))
    choices = {name: given[name] for name in _CHOICES if given.get(name, "auto") != "auto"}
    if "dcp" in given and spec.mla:
        choices.setdefault("query", "gather")
    layout = Layout(**sizes, duplicate_kv="duplicate_kv" in layout_text)
    return Placement(layout=layout, choices=Choices(**choices))


def _routing(timing: Mapping[str, Any], ep: int) -> Literal["random"] | float:
    """Distinct experts that were hit, as a count over the whole layer; of one rank's count, `ep` times that."""
    local = timing.get("local_experts_hit")
    if local is not None:
        return float(local) * ep
    hit = timing["experts_hit"]
    return "random" if hit is None else float(hit)


def _sizes_text(layout: Layout) -> str:
    """The sizes that are not 1."""
    sizes = {name: getattr(layout, name) for name in _SIZES}
    return " ".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "one rank"


def _ways_text(ways: str) -> list[str]:
    """What a variant's text says besides sizes."""
    return [part for part in ways.split(",") if "=" in part and part.split("=")[0] not in (*_SIZES, "tp", "dcp")]
