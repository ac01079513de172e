"""Candidates: the ways to place a model on N devices, legal Helix layouts first, and the layouts that are refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Final, Literal, TypeAlias

from helix.cost.choices import Choices, Placement
from helix.cost.overlap import CHUNK_COUNTS
from helix.layout import Layout, layout_problem, legal_layouts
from helix.model_spec import ModelSpec

Scheme: TypeAlias = Literal["helix", "tp", "tp-pp", "dp-ep", "medha", "dcp-ag-rs", "dcp-a2a"]

SCHEME_TEXT: Final[dict[Scheme, str]] = {
    "helix": "Helix",
    "tp": "plain TP",
    "tp-pp": "TP x PP",
    "dp-ep": "DP attention",
    "medha": "KVP tied to TP",
    "dcp-ag-rs": "DCP, AG+RS",
    "dcp-a2a": "DCP, A2A",
}


@dataclass(frozen=True, slots=True)
class Candidate:
    """One placement under the name of the scheme that can express it."""

    scheme: Scheme
    placement: Placement

    @property
    def label(self) -> str:
        """The sizes, in the words of the scheme's own users."""
        layout, place = self.placement.layout, self.placement
        experts = f" ep={layout.ep}" if layout.ep > 1 else ""
        match self.scheme:
            case "helix":
                return str(layout)
            case "tp":
                return f"tp={layout.tpa}{experts}"
            case "tp-pp":
                return f"tp={layout.tpa} pp={place.pp}{experts}"
            case "dp-ep":
                tp = f" tp={layout.tpa}" if layout.tpa > 1 else ""
                return f"dp={place.dp}{tp}{experts}" + (f" ffn_tp={layout.tpf}" if layout.tpf > 1 else "")
            case "medha":
                return f"kvp={layout.kvp} tp={layout.tpa}{experts}"
        return f"tp={layout.num_ranks} dcp={layout.kvp}{experts}"

    @property
    def choice_text(self) -> str:
        """The choices that differ from the plain ones."""
        choices, plain = self.placement.choices, Choices()
        if self.scheme != "helix":
            return ""
        words = []
        if choices.query != plain.query:
            words.append("queries gathered")
        if choices.exchange_space != plain.exchange_space:
            words.append("values exchanged")
        if choices.dispatch != plain.dispatch:
            words.append(f"dispatch {choices.dispatch}")
        if choices.overlap > 1:
            words.append(f"overlap {choices.overlap}")
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class Refused:
    """A layout that cannot be used, and why."""

    scheme: Scheme
    label: str
    reason: str


def helix_choices(spec: ModelSpec, layout: Layout, base: Choices) -> Iterator[Choices]:
    """The ways to run `layout`: query, exchange space for MLA, dispatch for experts, chunks of overlap."""
    sharded = layout.kvp > 1
    queries = ("replicate", "gather") if sharded else ("replicate",)
    spaces = ("latent", "value") if spec.mla and sharded else ("latent",)
    dispatches = ("local", "alltoall") if spec.moe and layout.ep > 1 else ("local",)
    overlaps = CHUNK_COUNTS if sharded else (1,)
    for query, space, dispatch, overlap in product(queries, spaces, dispatches, overlaps):
        yield replace(base, query=query, exchange_space=space, dispatch=dispatch, overlap=overlap)  # type: ignore[arg-type]


def helix_candidates(spec: ModelSpec, num_ranks: int, base: Choices) -> Iterator[tuple[Candidate, ...]]:
    """For each legal layout on `num_ranks` ranks all ways to run it."""
    for layout in legal_layouts(spec, num_ranks):
        yield tuple(
            Candidate("helix", Placement(layout=layout, choices=choices))
            for choices in helix_choices(spec, layout, base)
        )


def refused_layouts(spec: ModelSpec, num_ranks: int) -> Iterator[Refused]:
    """Every (kvp, tpa, tpf, ep) of `num_ranks` ranks that is not legal for the model, with the rule that it breaks."""
    sizes = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
    for tpa, ep in product(sizes, sizes):
        layout = Layout(kvp=num_ranks // tpa, tpa=tpa, tpf=num_ranks // ep, ep=ep)
        problem = layout_problem(spec, layout)
        if problem is not None:
            yield Refused("helix", str(layout), problem)
