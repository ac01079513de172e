"""``layout: auto``: the Helix layout with the shortest step for a config on the devices there are, and why.

A pure function of its arguments, so that all ranks find the same layout without asking each other. Only layouts that
this engine runs are considered, run the way that the config's `comm` section says.
"""

from __future__ import annotations

from typing import Literal

from helix.config import AUTO_TRANSPORT, CommConfig, RunConfig
from helix.cost.choices import Choices, Formats, Placement, Workload, make_formats
from helix.cost.hardware import Hardware, Transport, load_hardware, recognise_hardware
from helix.cost.memory import memory
from helix.cost.overlap import with_overlap
from helix.cost.prefill import can_share, shared_from
from helix.cost.step import StepCost, placement_cost
from helix.errors import LayoutError
from helix.layout import Layout, default_layout, legal_layouts, padded_heads
from helix.model_spec import ModelSpec
from helix.planner.overlap import OverlapRule

# Sequences that the step is priced for, where `engine.max_batch` allows as many.
_BATCH = 8


def choose_layout(
    config: RunConfig, spec: ModelSpec, num_ranks: int, device_name: str, dtype: str, weights: str | None = None
) -> tuple[Layout, str]:
    """The layout for `num_ranks` devices that call themselves `device_name` ("cpu" for CPU ranks), and the reason.

    `dtype` is that of activations, `weights` the format of the layers' weights where it is another.
    Priced at the longest context of the config. Layouts that do not fit the device come last; on a CPU, whose memory no
    card knows, all count as fitting. A device without a card: `default_layout`'s rule.

    Raises: LayoutError where no layout is legal.
    """
    card = "cpu" if device_name == "cpu" else recognise_hardware(device_name)
    if card is None:
        layout, reason = default_layout(spec, num_ranks)
        return layout, f"no hardware card for {device_name!r}; {reason}"
    hardware = load_hardware(card)
    layouts = list(legal_layouts(spec, num_ranks))
    if not layouts:
        raise LayoutError(f"no legal layout on {num_ranks} ranks for {spec.model_type}")
    context = spec.max_context if config.engine.max_context == "auto" else config.engine.max_context
    workload = Workload(
        batch=min(config.engine.max_batch, _BATCH), context=context, page_tokens=config.cache.page_tokens
    )
    priced = []
    for layout in layouts:
        rule = overlap_rule(config, spec, layout, device_name, dtype, weights)
        placement = with_overlap(rule.placement, rule.num_chunks(workload.batch, workload.context))
        formats = rule.formats
        cost = placement_cost(spec, placement, formats, hardware, workload)
        missing = 0.0 if card == "cpu" else _missing(spec, placement, formats, hardware, workload, config)
        priced.append((missing, cost.ttl_us, padded_heads(spec, layout), layout.kvp, layout.tpf, cost, layout))
    best = min(priced, key=lambda one: one[:5])
    return best[-1], _reason(best[-1], best[-2], [one[-2] for one in priced], card, workload, fits=best[0] == 0)


def resolve_sharing(comm: CommConfig, spec: ModelSpec, layout: Layout, device_name: str, dtype: str) -> CommConfig:
    """`comm` with a number of tokens, or off, as its `shared_projections`; "auto" is off where no card is known.

    Off in any case where the ranks of a KVP group do not project the same.
    """
    if layout.kvp == 1 or not can_share(spec, choices_of(comm)):
        return comm.model_copy(update={"shared_projections": "off"})
    if comm.shared_projections != "auto":
        return comm
    card = "cpu" if device_name == "cpu" else recognise_hardware(device_name)
    smallest = None
    if card is not None:
        smallest = shared_from(spec, layout, choices_of(comm), make_formats(dtype), load_hardware(card))
    return comm.model_copy(update={"shared_projections": smallest or "off"})


def overlap_rule(
    config: RunConfig, spec: ModelSpec, layout: Layout, device_name: str, dtype: str, weights: str | None = None
) -> OverlapRule:
    """How `config`'s decode steps are cut; devices and formats as in `choose_layout`."""
    card = "cpu" if device_name == "cpu" else recognise_hardware(device_name)
    cache = dtype if config.cache.dtype == "auto" else config.cache.dtype
    return OverlapRule(
        setting=config.comm.overlap,
        spec=spec,
        placement=Placement(layout=layout, choices=choices_of(config.comm)),
        formats=make_formats(weights or dtype, cache, dtype),
        hardware=None if card is None else load_hardware(card),
        page_tokens=config.cache.page_tokens,
    )


def choices_of(comm: CommConfig) -> Choices:
    """The choices that the engine makes of a config's `comm` section, in lockstep: `OverlapRule` says the chunks."""
    query: Literal["replicate", "gather"] = "replicate" if comm.query == "auto" else comm.query
    space: Literal["latent", "value"] = "latent" if comm.exchange_space == "auto" else comm.exchange_space
    dispatch: Literal["local", "alltoall"] = "local" if comm.dispatch == "auto" else comm.dispatch
    transport: Transport = AUTO_TRANSPORT if comm.transport == "auto" else comm.transport
    return Choices(query=query, exchange_space=space, merge=comm.merge, dispatch=dispatch, transport=transport)


def _missing(
    spec: ModelSpec, placement: Placement, formats: Formats, hardware: Hardware, workload: Workload, config: RunConfig
) -> float:
    """Bytes that one sequence of the longest context lacks on a rank; 0 where it fits."""
    one = Workload(batch=1, context=workload.context, page_tokens=workload.page_tokens)
    held = memory(spec, placement, formats, hardware, one, memory_fraction=config.cache.memory_fraction)
    return max(held.total - hardware.memory_bytes, 0.0) if not held.fits else 0.0


def _reason(
    layout: Layout, cost: StepCost, all_costs: list[StepCost], card: str, workload: Workload, *, fits: bool
) -> str:
    worst = max(one.ttl_ms for one in all_costs)
    text = (
        f"predicted {cost.ttl_ms:.2f} ms a step on {card} at batch {workload.batch} and {workload.context} tokens, "
        f"the shortest of {len(all_costs)} legal layouts (the longest {worst:.2f} ms)"
    )
    if layout.num_ranks == 1:
        text = "one rank"
    return text if fits else f"{text}; one sequence of that length does not fit the device"
