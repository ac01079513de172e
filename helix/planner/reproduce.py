"""Published results beside what the model gives for them.

Nothing here is tuned to match but two constants of the Helix paper's simulator that the paper does not print: a fixed
cost per layer and the latency of a collective. They are fitted on its Llama-405B results only (`fit`); its DeepSeek-R1
results are then predictions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import yaml

from helix.cost.choices import Choices, Formats, Placement, Workload
from helix.cost.hardware import OPS, CollectiveCurve, Hardware, Kernel, load_hardware
from helix.cost.memory import memory
from helix.cost.step import placement_cost
from helix.layout import Layout, legal_layouts
from helix.model_spec import ModelSpec
from helix.planner.candidates import Candidate
from helix.planner.frontier import Point, frontier, gpu_rate_at, sweep, user_rate_at, with_overlaps
from helix.planner.rivals import rival_candidates
from helix.planner.search import Question
from model_zoo.cards import load_card

_PUBLISHED: Final = Path(__file__).parent / "published"
_PAPER_GPUS: Final = (1, 2, 4, 8, 16, 32, 64)
_PAPER_CONTEXT: Final = 1 << 20
_CHUNKS: Final = (2, 4, 8, 16)
# Fitted by `fit` on the three Llama-405B results of the paper, microseconds.
PAPER_LAYER_US: Final = 20.0
PAPER_COLLECTIVE_US: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One published number, what the model gives, and what explains a difference."""

    name: str
    unit: str
    published: float
    modelled: float
    note: str = ""

    @property
    def error(self) -> float:
        """Relative to the published number."""
        return self.modelled / self.published - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduction:
    """A set of comparisons with what they assume."""

    title: str
    assumptions: tuple[str, ...]
    rows: tuple[Comparison, ...]


def paper_hardware(layer_us: float = PAPER_LAYER_US, collective_us: float = PAPER_COLLECTIVE_US) -> Hardware:
    """GB200 as the paper models it, with the two constants that it does not print."""
    card = load_hardware(str(_PUBLISHED / "gb200-helix-paper.yaml"))
    curve = CollectiveCurve(2, (0.0,), (collective_us,), 0.0, "fitted")
    return replace(card, layer_us=layer_us, collectives=dict.fromkeys(OPS, curve))


@dataclass(frozen=True, slots=True)
class PaperRatios:
    """The paper's three results for one model."""

    interactivity: float
    throughput: float
    overlap_loss: float


@lru_cache(maxsize=8)
def _paper_candidates(model: str) -> tuple[tuple[Candidate, ...], tuple[Candidate, ...]]:
    """(Helix in lockstep, baselines) on 1 to 64 GPUs. Medha is not compared on R1, as in the paper."""
    spec = load_card(model)
    helix: list[Candidate] = []
    rivals: list[Candidate] = []
    base = Choices()
    for num_ranks in _PAPER_GPUS:
        helix += [Candidate("helix", Placement(layout=one)) for one in legal_layouts(spec, num_ranks)]
        for one in rival_candidates(spec, num_ranks, base):
            wanted = ("tp", "tp-pp", "dp-ep") if spec.mla else ("tp", "tp-pp", "dp-ep", "medha")
            if isinstance(one, Candidate) and one.scheme in wanted:
                rivals.append(one)
    return tuple(helix), tuple(rivals)


def paper_ratios(model: str, hardware: Hardware) -> PaperRatios:
    """The paper's search for `model`: FP4, 1M tokens, 1 to 64 GPUs, all batches that fit.

    Interactivity: largest tokens/s/user against the baselines'. Throughput: the largest ratio of tokens/s/GPU at equal
    tokens/s/user (for a dense model against TP and its pipelines only, as the paper states it). Overlap: the mean loss
    of tokens/s/user at equal tokens/s/GPU when HOP-B is off, over the upper half of the frontier.
    """
    spec = load_card(model)
    formats = Formats(
        weights="float4", cache="float4", activations="bfloat16", products="float4", attention_products="float4"
    )
    question = Question(
        model=model,
        spec=spec,
        hardware=hardware,
        num_gpus=_PAPER_GPUS,
        context=_PAPER_CONTEXT,
        formats=formats,
        memory_fraction=1.0,
        routing="balanced",
    )
    lockstep, rivals = _paper_candidates(model)
    helix = frontier(sweep(question, with_overlaps(lockstep, _CHUNKS)))
    plain = frontier(sweep(question, lockstep))
    points = sweep(question, rivals)
    base = frontier(points)
    against = base if spec.mla else frontier(one for one in points if one.candidate.scheme in ("tp", "tp-pp"))
    return PaperRatios(
        interactivity=helix[-1].tokens_per_s_user / base[-1].tokens_per_s_user,
        throughput=_largest_gain(helix, against),
        overlap_loss=_overlap_loss(helix, plain),
    )


def _largest_gain(front: list[Point], base: list[Point]) -> float:
    """Largest ratio of tokens/s/GPU at the interactivities that the baseline reaches."""
    return max(gpu_rate_at(front, one.tokens_per_s_user) / one.tokens_per_s_gpu for one in base)


def _overlap_loss(front: list[Point], plain: list[Point]) -> float:
    """Mean share of tokens/s/user lost without overlap at equal tokens/s/GPU, where batches are larger than one."""
    losses = []
    for one in front:
        if one.batch > 1:
            rate = user_rate_at(plain, one.tokens_per_s_gpu)
            if rate:
                losses.append(1.0 - rate / one.tokens_per_s_user)
    return sum(losses) / len(losses) if losses else 0.0
