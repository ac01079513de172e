"""Published results beside what the model gives for them.

* `helix_paper`: the search of the Helix paper. Two constants that the paper does not print, a fixed cost per layer and
  the latency of a collective, are fitted on its Llama-405B results only (`fit_paper`); R1 is then a prediction.
* `vllm_dcp`: vLLM's published gain of DCP over TP on 8 x B200. Nothing is fitted.
* `vllm_h200`: measured decode steps of vLLM on one and two H200. Nothing is fitted: kernels and collectives of that
  engine were timed alone and are inputs.
* `helix_h200`: this engine's own measured decode steps, the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, Final, Literal

import yaml

from helix.cost.choices import Choices, Formats, Placement, Workload, make_formats
from helix.cost.hardware import OPS, CollectiveCurve, Hardware, load_hardware
from helix.cost.memory import memory
from helix.cost.step import placement_cost
from helix.errors import ConfigError
from helix.layout import Layout, legal_layouts
from helix.model_spec import ModelSpec
from helix.planner.candidates import Candidate
from helix.planner.frontier import Point, frontier, gpu_rate_at, sweep, user_rate_at, with_overlaps
from helix.planner.measured import measured_steps
from helix.planner.rivals import rival_candidates
from helix.planner.search import Question
from model_zoo.cards import load_card

_PUBLISHED: Final = Path(__file__).parent / "published"
_PAPER_GPUS: Final = (1, 2, 4, 8, 16, 32, 64)
_PAPER_CONTEXT: Final = 1 << 20
_CHUNKS: Final = (2, 4, 8, 16)
# What `fit_paper` gives on the three Llama-405B results of the paper, microseconds.
PAPER_LAYER_US: Final = 70.0
PAPER_COLLECTIVE_US: Final = 4.0
_LAYER_GRID: Final = tuple(float(us) for us in range(20, 101, 10))
_COLLECTIVE_GRID: Final = tuple(float(us) for us in range(1, 9))
# tokens/s/user ratio, tokens/s/GPU ratio, loss without HOP-B (paper, abstract and section 3).
_PAPER: Final = {"llama-3.1-405b": (1.13, 4.0, 0.12), "deepseek-r1": (1.5, 32.0, 0.01)}
# Values that R1's exchange carries per token in latent space, and in the paper's own formula B x H.
_LATENT_VALUES, _PAPER_VALUES = 128 * 512, 7168
# Batches at the fast end of R1's frontier.
_FAST_BATCH: Final = 4
# vLLM's dummy weights send nearly all tokens to the experts of one token.
_DUMMY_EXPERTS_HIT: Final = 6


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
    """A set of comparisons with what they assume; `against` heads the column of what the model is held against."""

    title: str
    assumptions: tuple[str, ...]
    rows: tuple[Comparison, ...]
    against: Literal["published", "measured"] = "published"

    @property
    def median_error(self) -> float:
        """Median of the rows' errors, without their signs."""
        return median(abs(row.error) for row in self.rows)


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
        for layout in legal_layouts(spec, num_ranks):
            spaces: tuple[Literal["latent", "value"], ...] = ("latent", "value")
            spaces = spaces if spec.mla and layout.kvp > 1 else spaces[:1]
            helix += [Candidate("helix", Placement(layout=layout, choices=Choices(exchange_space=x))) for x in spaces]
        for one in rival_candidates(spec, num_ranks, base):
            wanted = ("tp", "tp-pp", "dp-ep") if spec.mla else ("tp", "tp-pp", "dp-ep", "medha")
            if isinstance(one, Candidate) and one.scheme in wanted:
                rivals.append(one)
    return tuple(helix), tuple(rivals)


@dataclass(frozen=True, slots=True)
class PaperFronts:
    """Frontiers of the paper's search: Helix, Helix in lockstep, the baselines, and those for the throughput."""

    helix: list[Point]
    lockstep: list[Point]
    base: list[Point]
    against: list[Point]


def paper_fronts(model: str, hardware: Hardware, per_doubling: int = 1) -> PaperFronts:
    """The paper's search for `model`: FP4, 1M tokens, 1 to 64 GPUs, batches of powers of two that fit.

    Throughput of the dense model is held against TP and its pipelines only, as the paper states it.
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
    helix = frontier(sweep(question, with_overlaps(lockstep, _CHUNKS), per_doubling=per_doubling))
    plain = frontier(sweep(question, lockstep, per_doubling=per_doubling))
    points = sweep(question, rivals, per_doubling=per_doubling)
    base = frontier(points)
    against = base if spec.mla else frontier(one for one in points if one.candidate.scheme in ("tp", "tp-pp"))
    return PaperFronts(helix, plain, base, against)


def paper_ratios(fronts: PaperFronts) -> PaperRatios:
    """Interactivity: largest tokens/s/user against the baselines'. Throughput: the largest ratio of tokens/s/GPU at
    equal tokens/s/user. Overlap: the largest loss of tokens/s/user at equal tokens/s/GPU when HOP-B is off.
    """
    return PaperRatios(
        interactivity=fronts.helix[-1].tokens_per_s_user / fronts.base[-1].tokens_per_s_user,
        throughput=_largest_gain(fronts.helix, fronts.against),
        overlap_loss=max((loss for _, loss in overlap_losses(fronts)), default=0.0),
    )


def _largest_gain(front: list[Point], base: list[Point]) -> float:
    """Largest ratio of tokens/s/GPU at the interactivities that the baseline reaches."""
    return max(gpu_rate_at(front, one.tokens_per_s_user) / one.tokens_per_s_gpu for one in base)


def overlap_losses(fronts: PaperFronts) -> list[tuple[int, float]]:
    """(batch, share of tokens/s/user lost without overlap at equal tokens/s/GPU) where both frontiers go."""
    pairs = [(one, user_rate_at(fronts.lockstep, one.tokens_per_s_gpu)) for one in fronts.helix]
    return [(one.batch, 1.0 - rate / one.tokens_per_s_user) for one, rate in pairs if rate]


def fit_paper() -> tuple[float, float]:
    """(per-layer cost, collective latency) with the least squares of the log errors of the three 405B results."""

    def misfit(constants: tuple[float, float]) -> float:
        found = paper_ratios(paper_fronts("llama-3.1-405b", paper_hardware(*constants)))
        pairs = zip(astuple(found), _PAPER["llama-3.1-405b"], strict=True)
        return sum(math.log(max(model, 1e-9) / published) ** 2 for model, published in pairs)

    return min(product(_LAYER_GRID, _COLLECTIVE_GRID), key=misfit)


def helix_paper() -> Reproduction:
    """The six published ratios of arXiv 2507.07120."""
    hardware = paper_hardware()
    names = ("tokens/s/user, best against best", "tokens/s/GPU at equal TTL", "tokens/s/user lost without HOP-B")
    rows = []
    fronts = {model: paper_fronts(model, hardware) for model in _PAPER}
    for model, published in _PAPER.items():
        found = astuple(paper_ratios(fronts[model]))
        for name, unit, value, modelled in zip(names, ("x", "x", ""), published, found, strict=True):
            rows.append(Comparison(name=f"{model}: {name}", unit=unit, published=value, modelled=modelled))
    rows[2] = replace(rows[2], note=_note_on_405b(hardware))
    rows[-1] = replace(rows[-1], note=_note_on_r1(fronts["deepseek-r1"], hardware))
    return Reproduction(
        title="Helix paper (arXiv 2507.07120), itself simulated: GB200 NVL72, FP4, 1M tokens, 1 to 64 GPUs",
        assumptions=(
            f"fitted on Llama-405B only: {PAPER_LAYER_US:g} us a layer, {PAPER_COLLECTIVE_US:g} us a collective",
            "DeepSeek-R1's rows are predictions",
            "8000 GB/s, kernels at their rooflines, 900 GB/s links (not printed in the paper), experts hit evenly",
            "batches are powers of two (both published concurrency ratios are); finer ones give up to 6x for 405B",
            "HOP-B's chunks pay a collective's latency once, as the units of the paper's figure 3 do",
            "baselines: TP, TP x PP, DP attention with EP, and for 405B KVP tied to TP; their collectives are exposed",
        ),
        rows=tuple(rows),
    )


def _note_on_405b(hardware: Hardware) -> str:
    finer = paper_ratios(paper_fronts("llama-3.1-405b", hardware, 4)).overlap_loss
    return f"rests on batches of powers of two; with four steps a doubling the model's largest loss is {finer:.1%}"


def _note_on_r1(fronts: PaperFronts, hardware: Hardware) -> str:
    """What the miss is made of: where on the frontier, how much is volume, and that no constants would mend it."""
    losses = overlap_losses(fronts)
    fast = max(loss for batch, loss in losses if batch <= _FAST_BATCH)
    worst = max(losses, key=lambda one: one[1])[0]
    link = hardware.scaled(link=_LATENT_VALUES / _PAPER_VALUES)
    narrow = paper_ratios(paper_fronts("deepseek-r1", link)).overlap_loss
    return (
        f"not reproduced. The largest loss is at batch {worst}, where the exchange carries volume; up to batch "
        f"{_FAST_BATCH}, where a user is served fastest, it is at most {fast:.1%}. The paper counts B x H = "
        f"{_PAPER_VALUES} values a token in the exchange, an MLA merge in latent space carries {_LATENT_VALUES}: "
        f"at the paper's count the largest loss is {narrow:.1%}. That R1's A2A is about 1% of a step, as it says, "
        "fits the fast end only: no constants from 0.5 to 8 us a collective and 35 to 280 us a layer give 405B 10% and "
        "R1 less than 3% at once"
    )


def vllm_dcp() -> Reproduction:
    """Kimi-K2.6 in NVFP4 on 8 x B200: TP stops at 64 requests with a full cache, DCP goes on to 512."""
    spec, engine = load_card("kimi-k2"), load_hardware(str(_PUBLISHED / "h200-sxm-vllm-0.24.yaml"))
    hardware = replace(load_hardware("b200"), kernels=engine.kernels, small_launches=engine.small_launches)
    formats = make_formats("nvfp4", "float8")
    plain = Placement(layout=Layout(tpa=8, tpf=8, duplicate_kv=True))
    sharded = Placement(layout=Layout(kvp=8, tpf=8), choices=Choices(query="gather", merge="a2a"))
    unit = 1024
    context = memory(spec, plain, formats, hardware, Workload(batch=64, context=unit)).largest_batch * unit // 64
    slow = placement_cost(spec, plain, formats, hardware, Workload(batch=64, context=context))
    fast = placement_cost(spec, sharded, formats, hardware, Workload(batch=512, context=context))
    held = memory(spec, sharded, formats, hardware, Workload(batch=512, context=context))
    implied_ms = 64 / (1863 * 8) * 1e3
    counts = (
        f"not comparable: {1863 * 8} tokens/s for 64 requests is one token each {implied_ms:.1f} ms, less than the "
        f"{slow.parts.weight_read / 1e3:.1f} ms of reading the weights once, so prompt tokens are counted; the model "
        "gives decode steps"
    )
    return Reproduction(
        title="vLLM DCP on 8 x B200, Kimi-K2.6 NVFP4, agentic trace (vLLM blog, July 2026)",
        assumptions=(
            "nothing fitted; Kimi-K2 shapes, NVFP4 weights, FP8 cache (its format is not stated)",
            f"the trace's context is not stated: {context} tokens make TP's cache full at 64 requests",
            "B200's collectives, and the shares that vLLM's kernels reach, assumed as on H200; decode only, no prefill",
        ),
        rows=(
            Comparison(
                name="TP at 64 requests", unit=" tok/s/GPU", published=1863, modelled=slow.tokens_per_s_gpu, note=counts
            ),
            Comparison(
                name="DCP at 512 requests",
                unit=" tok/s/GPU",
                published=6091,
                modelled=fast.tokens_per_s_gpu,
                note=counts,
            ),
            Comparison(
                name="gain of DCP",
                unit="x",
                published=6091 / 1863,
                modelled=fast.tokens_per_s_gpu / slow.tokens_per_s_gpu,
                note="too high: prefill takes the same time under both, which shrinks the published gain",
            ),
            Comparison(
                name="KV cache used at 512",
                unit="",
                published=0.82,
                modelled=held.cache / held.cache_limit,
                note="the trace's requests are not all equally long",
            ),
        ),
    )


_SCHEMES: Final = {
    "one": Placement(layout=Layout()),
    "tp2": Placement(layout=Layout(tpa=2, tpf=2, duplicate_kv=True)),
    "dcp2-ag-rs": Placement(layout=Layout(kvp=2, tpf=2), choices=Choices(query="gather", merge="ag_rs")),
    "dcp2-a2a": Placement(layout=Layout(kvp=2, tpf=2), choices=Choices(query="gather", merge="a2a")),
}


def vllm_h200() -> Reproduction:
    """Every measured decode step of vLLM on one and two H200 against the model with that engine's kernels."""
    hardware = load_hardware(str(_PUBLISHED / "h200-sxm-vllm-0.24.yaml"))
    tables: list[dict[str, Any]] = yaml.safe_load((_PUBLISHED / "vllm-h200.yaml").read_text(encoding="utf-8"))
    rows = [row for table in tables for row in _measured_rows(table, hardware)]
    return Reproduction(
        title="vLLM 0.24.0 on one and two H200, ms per decode step",
        assumptions=(
            "nothing fitted to these rows; inputs: its kernels timed alone, its collectives inside a step",
            "dummy weights: all tokens of a step go to the 6 experts of one token",
            "not in the model: DCP's own merge kernel (12 us a layer) and the 10% of a DCP step in which the GPU idles",
        ),
        rows=tuple(rows),
        against="measured",
    )


def _measured_rows(table: dict[str, Any], hardware: Hardware) -> Iterable[Comparison]:
    spec: ModelSpec = load_card(table["model"])
    if table["kv_heads"]:
        spec = replace(spec, num_kv_heads=table["kv_heads"])
    for batch, context, *measured in table["rows"]:
        workload = Workload(batch=batch, context=context << 10, routing=_DUMMY_EXPERTS_HIT)
        for scheme, ms in zip(table["schemes"], measured, strict=True):
            if ms is None:
                continue
            cost = placement_cost(spec, _SCHEMES[scheme], Formats(), hardware, workload)
            name = f"{table['model']} {scheme} {batch} x {context}K"
            yield Comparison(name=name, unit=" ms", published=ms, modelled=cost.ttl_ms)


def helix_h200() -> Reproduction:
    """Every decode step of this engine that was measured on H200, against the hardware card that a plan uses."""
    rows = tuple(
        Comparison(name=one.name, unit=" ms", published=one.measured_ms, modelled=one.predicted_ms)
        for one in measured_steps("h200-sxm")
    )
    return Reproduction(
        title="This engine on H200, ms per decode step as a user sees it (helix/bench/results)",
        assumptions=(
            "nothing fitted to these rows; inputs: the card h200-sxm, its kernels and collectives timed alone",
            "experts: as many distinct ones as the step's tokens really hit, printed beside each measurement",
            "a rank that was timed without its peers is compared without messages",
        ),
        rows=rows,
        against="measured",
    )


REPRODUCTIONS: Final[Mapping[str, Callable[[], Reproduction]]] = MappingProxyType(
    {"helix-paper": helix_paper, "vllm-dcp": vllm_dcp, "vllm-h200": vllm_h200, "helix-h200": helix_h200}
)


def reproduce(name: str) -> Reproduction:
    """The reproduction called `name`. Raises: ConfigError with the names there are."""
    if name not in REPRODUCTIONS:
        raise ConfigError(f"--reproduce {name!r} must be one of {', '.join(REPRODUCTIONS)}")
    return REPRODUCTIONS[name]()
