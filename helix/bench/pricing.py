"""What a measured step is held against: the bytes it reads, the device's ceiling, and the cost model's prediction."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from helix.config import RunConfig
from helix.cost.choices import Formats, Placement, Workload, make_formats
from helix.cost.hardware import Hardware, load_hardware, recognise_hardware
from helix.cost.overlap import with_overlap
from helix.cost.prefill import chunk_cost, chunks_of
from helix.cost.step import placement_cost
from helix.cost.weights import layer_counts
from helix.cost.work import attention_work, busiest_hits, ffn_work, head_work
from helix.engine.build import with_transport
from helix.engine.core import EngineCore
from helix.layout import Layout
from helix.model_spec import ModelSpec
from helix.planner.auto import choices_of, overlap_rule, resolve_sharing
from helix.planner.overlap import OverlapRule
from helix.weights import held_in_fp8


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """One step, milliseconds; None where no hardware card knows the device.

    `ceiling_ms`: every byte read once and every product at the card's best rates, no fixed cost, no message.
    `predicted_ms` is the whole step, and `collectives_ms` what its messages take of that (what overlap hides left out).
    """

    read_bytes: int
    ceiling_ms: float | None = None
    predicted_ms: float | None = None
    collectives_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricing:
    """What prices steps: the model and how it lies, and the card of the hardware, if there is one for it.

    `shared_from`: tokens of a chunk from which the ranks of a KVP group share its first projection.
    """

    spec: ModelSpec
    placement: Placement
    formats: Formats
    hardware: Hardware | None
    page_tokens: int
    shared_from: int | None
    overlap: OverlapRule

    @classmethod
    def of(cls, config: RunConfig, spec: ModelSpec, layout: Layout, core: EngineCore) -> Pricing:
        dtype, cache = core.model.embed.weight.dtype, core.cache.layers[0].k.dtype
        dense = str(dtype).removeprefix("torch.")
        weights = dense if next(held_in_fp8(core.model), None) is None else "float8"
        device = core.world.device
        name = device_name(device)
        card = "cpu" if device.type == "cpu" else recognise_hardware(name)
        if core.world.size > 1:
            config = with_transport(config, core.mesh)
        shared = resolve_sharing(config.comm, spec, layout, name, dense).shared_projections
        return cls(
            spec=spec,
            placement=Placement(layout=layout, choices=choices_of(config.comm)),
            formats=make_formats(
                weights, "float8" if cache is torch.float8_e4m3fn else str(cache).removeprefix("torch."), dense
            ),
            hardware=None if card is None else load_hardware(card),
            page_tokens=config.cache.page_tokens,
            shared_from=shared if isinstance(shared, int) else None,
            overlap=overlap_rule(config, spec, layout, name, dense, weights),
        )

    def of_layers(self, num_layers: int) -> Pricing:
        """The same for a model of `num_layers` such layers."""
        return replace(self, spec=replace(self.spec, num_layers=num_layers))

    def decode(self, batch: int, context: int, local_hits: float | None) -> Price:
        """A decode step in which the rank reads `local_hits` experts a layer (None: what is expected)."""
        load = Workload(
            batch=batch, context=context, page_tokens=self.page_tokens, routing=self._whole_layer_hits(local_hits)
        )
        given = (self.placement, self.formats, load)
        each_layer = sum(one.num_bytes for one in attention_work(self.spec, *given))
        total = self.spec.num_layers * each_layer + sum(one.num_bytes for one in head_work(self.spec, *given))
        for kind, count in layer_counts(self.spec).items():
            if count:
                total += count * sum(one.num_bytes for one in ffn_work(self.spec, kind, *given))
        if self.hardware is None:
            return Price(read_bytes=int(total))
        run = with_overlap(self.placement, self.overlap.num_chunks(batch, context))
        cost = placement_cost(self.spec, run, self.formats, self.hardware, load)
        ceiling = placement_cost(self.spec, self.placement, self.formats, self.hardware.ideal(), load)
        return Price(
            read_bytes=int(total),
            ceiling_ms=ceiling.ttl_ms,
            predicted_ms=cost.ttl_ms,
            collectives_ms=(cost.parts.communication - cost.parts.overlap_gained) / 1e3,
        )

    def prefill(self, prompt: int, chunk: int) -> Price:
        """All chunks of a prompt, one after the other."""
        if self.hardware is None:
            return Price(read_bytes=0)
        ideal = self.hardware.ideal()
        ceiling = predicted = collectives = 0.0
        for one in chunks_of(prompt, chunk, self.shared_from):
            given = (self.spec, self.placement, self.formats)
            cost = chunk_cost(*given, self.hardware, one, self.page_tokens)
            predicted += cost.ttl_ms
            collectives += cost.parts.communication / 1e3
            ceiling += chunk_cost(*given, ideal, one, self.page_tokens).ttl_ms
        return Price(read_bytes=0, ceiling_ms=ceiling, predicted_ms=predicted, collectives_ms=collectives)

    def busiest_hits(self, batch: int) -> float | None:
        """Experts a layer that the EP rank which is waited for reads, expected for random routing."""
        moe = self.spec.moe
        return None if moe is None else busiest_hits(moe, self.placement.layout.ep, batch, "random")

    def _whole_layer_hits(self, local_hits: float | None) -> Literal["random"] | float:
        """As `Workload.routing` takes it: a count over all EP ranks, of which this rank has its even share."""
        return "random" if local_hits is None else local_hits * self.placement.layout.ep


def device_name(device: torch.device) -> str:
    """What the device calls itself; "cpu" for a CPU."""
    return "cpu" if device.type == "cpu" else str(torch.cuda.get_device_name(device))
