"""What ranks run for the cost tests: one decode step of a whole model, and the traffic that its groups counted."""

from __future__ import annotations

from typing import Any

import torch

from helix.cache.pools import build_cache
from helix.comm.mesh import build_mesh
from helix.comm.world import World
from helix.config import CommConfig
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
        pools.k.zero_()
        pools.v.zero_()
    groups = {"world": mesh.world, "kvp": mesh.kvp, "tpf": mesh.tpf, "ep": mesh.ep}
    for group in groups.values():
        group.traffic.clear()
    with torch.inference_mode():
        model.logits(model(_batch(rule, mesh.coords.kvp_rank, batch, context, rows), cache))
    counted = {
        axis: {name: (group.traffic.calls[name], group.traffic.sent_bytes[name]) for name in group.traffic.calls}
        for axis, group in groups.items()
    }
    return counted, weight_bytes(model)


def _batch(rule: PageRule, kvp_rank: int, batch: int, context: int, rows: int) -> Batch:
    position = context - 1
    mine = rule.owner(position) == kvp_rank
    table = torch.arange(batch * rows, dtype=torch.int32).view(batch, rows)
    row, slot = divmod(rule.local_slot(position), rule.page_tokens)
    slots = table[:, row].long() * rule.page_tokens + slot if mine else torch.full((batch,), -1)
    return Batch(
        token_ids_T=torch.arange(batch),
        position_T=torch.full((batch,), position),
        rotary_len_T=torch.full((batch,), context),
        slot_T=slots,
        visible_len_T=torch.full((batch,), rule.local_len(context, kvp_rank)),
        query_start_S1=torch.arange(batch + 1),
        page_table_SR=table,
        sample_T=torch.arange(batch),
    )
