"""What ranks run for the cost tests: one decode step of a whole model, and the traffic that its groups counted."""

from __future__ import annotations

from typing import Any

import torch
import yaml

from helix.cache.pools import build_cache
from helix.calibrate import measure, to_card
from helix.comm.mesh import build_mesh
from helix.comm.world import World
from helix.config import CommConfig
from helix.engine.batch import build_batch
from helix.engine.request import Request
from helix.engine.scheduler import StepItem, StepPlan
from helix.layers.batch import Batch
from helix.layers.decoder import Decoder
from helix.layout import Layout, PageRule
from helix.model_spec import ModelSpec
from helix.weights import dummy_weights, weight_bytes

Traffic = dict[str, dict[str, tuple[int, int]]]


def decode_step(
    world: World, spec: ModelSpec, layout: Layout, comm: dict[str, Any], batch: int, context: int, page_tokens: int
) -> tuple[Traffic, int]:
    """(axis -> collective -> (calls, bytes sent)) of one step with logits, and the bytes of weights this rank holds.

    Sequences are at position ``context - 1`` of a cache that was never filled: traffic does not depend on values.
    """
    mesh = build_mesh(layout, world)
    model = Decoder(spec, mesh, CommConfig(**comm), dtype=torch.float32, device=world.device)
    dummy_weights(model, 0)
    rule = PageRule(page_tokens, layout.kvp)
    rows = rule.rows_for(context)
    cache = build_cache(spec, layout, world.rank, rows * batch, page_tokens, torch.float32, world.device)
    for pools in cache.layers:
        for tensor in pools.tensors:
            tensor.zero_()
    groups = {"world": mesh.world, "kvp": mesh.kvp, "tpf": mesh.tpf, "ep": mesh.ep}
    for group in groups.values():
        group.traffic.clear()
    with torch.inference_mode():
        model.logits(model(decode_batch(rule, mesh.coords.kvp_rank, batch, context, rows), cache))
    counted = {
        axis: {name: (group.traffic.calls[name], group.traffic.sent_bytes[name]) for name in group.traffic.calls}
        for axis, group in groups.items()
    }
    return counted, weight_bytes(model)


def decode_batch(rule: PageRule, kvp_rank: int, batch: int, context: int, rows: int) -> Batch:
    """One token each of `batch` sequences of `context` tokens."""
    items = []
    for index in range(batch):
        ids = [(index + position) % 40 for position in range(context)]
        request = Request(request_id=index, prompt_ids=ids, max_tokens=1)
        request.rows = list(range(index * rows, (index + 1) * rows))
        items.append(StepItem(request=request, start=context - 1, count=1, samples=True))
    return build_batch(StepPlan(tuple(items)), rule, kvp_rank, torch.device("cpu"))


def calibrate_card(world: World) -> str:
    """The hardware card that `helix calibrate` makes of these ranks, as YAML."""
    return yaml.safe_dump(to_card(measure(world, None)))
