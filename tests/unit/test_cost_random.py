"""On random models and layouts: all ranks' slices make the whole model once, and prices count what the engine does.

The engine's own model runs a decode step on each rank in turn, with collectives that count but go nowhere.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helix.cache.pools import build_cache
from helix.check import rank_weight_bytes
from helix.comm.group import Group
from helix.comm.mesh import Mesh, planning_mesh
from helix.config import CommConfig
from helix.cost.choices import Choices, Placement, Workload, make_formats
from helix.cost.memory import page_row_bytes
from helix.cost.weights import rank_weights
from helix.layers.decoder import Decoder
from helix.layout import Layout, PageRule
from helix.model_spec import ModelSpec
from helix.weights import declare, weight_bytes
from tests.unit.cost_jobs import decode_batch
from tests.unit.random_models import cases, engine_choices, specs
from tests.unit.test_cost_engine import comm_of, predicted

FP32 = make_formats("float32")
SMALL = cases(specs(scale=8, max_experts=16, max_layers=2), max_ranks=12)


def comm_config(spec: ModelSpec, choices: Choices) -> CommConfig:
    return CommConfig(**(comm_of(choices) | ({} if spec.moe else {"dispatch": "auto"})))


@settings(max_examples=60, deadline=None)
@given(case=SMALL, choices=engine_choices)
def test_every_weight_is_held(case: tuple[ModelSpec, Layout], choices: Choices) -> None:
    """Each value of each checkpoint tensor lies on as many ranks as the design says: 1, the KVP group, or all."""
    spec, layout = case
    held: dict[str, Any] = {}
    for rank in range(layout.num_ranks):
        mesh, meta = planning_mesh(layout, rank), torch.device("meta")
        model = Decoder(spec, mesh, comm_config(spec, choices), dtype=torch.float32, device=meta)
        for _, _, pieces in declare(model):
            for piece in pieces:
                count = held.setdefault(piece.name, np.zeros(piece.shape, dtype=np.uint8))
                count[tuple(slice(*one) for one in piece.source)] += 1
    for name, count in held.items():
        copies = copies_of(name, spec, layout, choices)
        assert (count == copies).all(), (name, np.unique(count), copies)


def copies_of(name: str, spec: ModelSpec, layout: Layout, choices: Choices) -> Any:
    """Ranks that hold each value of tensor `name`: a number, or one for each row."""
    asked = 1 if choices.query == "gather" else layout.kvp
    part = name.split(".")[-2]
    if part == "kv_b_proj" and spec.mla:
        valued = layout.kvp if choices.exchange_space == "value" else 1
        rows = [asked] * spec.mla.nope_dim + [valued] * spec.mla.v_dim
        return np.array(rows * spec.num_heads)[:, None]
    if part in ("q_proj", "q_b_proj"):
        return asked
    if part in ("k_proj", "v_proj"):
        return layout.kvp
    if name.endswith("o_proj.weight") or part in ("embed_tokens", "lm_head"):
        return 1
    if part in ("gate_proj", "up_proj", "down_proj"):
        return layout.num_ranks if name.endswith("down_proj.bias") else 1
    return layout.num_ranks  # norms, router, projections to the latents, bias of the output


@settings(max_examples=150, deadline=None)
@given(case=cases(), choices=engine_choices, rank=st.integers(0, 23))
def test_weight_bytes_are_the_engines(case: tuple[ModelSpec, Layout], choices: Choices, rank: int) -> None:
    spec, layout = case
    rank %= layout.num_ranks
    held = rank_weight_bytes(spec, layout, rank, comm_config(spec, choices), torch.float32)
    assert rank_weights(spec, layout, choices, FP32, rank=rank).total == held


@settings(max_examples=400, deadline=None)
@given(context=st.integers(1, 3000), page_tokens=st.sampled_from((1, 3, 16, 64)), kvp=st.integers(1, 70))
def test_every_token_is_stored_once(context: int, page_tokens: int, kvp: int) -> None:
    rule = PageRule(page_tokens, kvp)
    slots: set[tuple[int, int]] = set()
    lengths: Counter[int] = Counter()
    for position in range(0, context, max(context // 50, 1)):
        slots.add((rule.owner(position), rule.local_slot(position)))
        assert rule.local_slot(position) < rule.local_len(position + 1, rule.owner(position))
        lengths[rule.owner(position)] += 1
    assert len(slots) == sum(lengths.values())
    assert sum(rule.local_len(context, rank) for rank in range(kvp)) == context
    assert max(rule.local_len(context, rank) for rank in range(kvp)) == rule.local_len(context, 0)
    assert rule.local_len(context, 0) <= rule.rows_for(context) * page_tokens


class SilentComm:
    """Stands for `deepspeed.comm`: outputs have the right shape and no meaning."""

    def all_reduce(self, x: Tensor, group: object) -> None:
        pass

    def all_gather_into_tensor(self, out: Tensor, x: Tensor, group: object) -> None:
        assert out.numel() % x.numel() == 0
        out.zero_()

    def reduce_scatter_tensor(self, out: Tensor, x: Tensor, group: object) -> None:
        assert x.numel() % out.numel() == 0
        out.zero_()

    def all_to_all_single(self, out: Tensor, x: Tensor, group: object) -> None:
        assert out.shape == x.shape
        out.zero_()


def silent_mesh(layout: Layout, rank: int) -> Mesh:
    def group(axis: str) -> Group:
        ranks = next(one for one in layout.groups(axis) if rank in one)  # type: ignore[arg-type]
        return Group(axis, ranks, rank, comm=SilentComm())

    return Mesh(layout, rank, torch.device("cpu"), *(group(axis) for axis in ("world", "kvp", "tpf", "ep")))


@settings(max_examples=50, deadline=None)
@given(case=SMALL, choices=engine_choices, batch=st.integers(1, 5), context=st.integers(1, 60), rank=st.integers(0, 11))
def test_messages_and_memory_are_the_engines(
    case: tuple[ModelSpec, Layout], choices: Choices, batch: int, context: int, rank: int
) -> None:
    """Calls and bytes of every collective of a decode step on every axis, and bytes of weights and pages."""
    spec, layout = case
    rank %= layout.num_ranks
    mesh, rule = silent_mesh(layout, rank), PageRule(4, layout.kvp)
    model = Decoder(spec, mesh, comm_config(spec, choices), dtype=torch.float32, device=mesh.device)
    for tensor in model.parameters():
        tensor.zero_()
    assert weight_bytes(model) == rank_weights(spec, layout, choices, FP32, rank=rank).total
    rows = rule.rows_for(context)
    cache = build_cache(spec, layout, rank, rows * batch, rule.page_tokens, torch.float32, mesh.device)
    placement = Placement(layout=layout, choices=choices)
    held = sum(tensor.untyped_storage().nbytes() for layer in cache.layers for tensor in layer.tensors)
    assert held == rows * batch * page_row_bytes(spec, placement, FP32, rule.page_tokens)
    with torch.inference_mode():
        model.logits(model(decode_batch(rule, mesh.coords.kvp_rank, batch, context, rows), cache))
    expected = predicted(spec, placement, Workload(batch=batch, context=context, page_tokens=4))
    for group in (mesh.world, mesh.kvp, mesh.tpf, mesh.ep):
        calls = {name: one[0] for name, one in expected.get(group.axis, {}).items()}
        assert group.traffic.calls == calls, group.axis
        for name, (count, sent) in expected.get(group.axis, {}).items():
            assert sent - count <= group.traffic.sent_bytes[name] <= sent, (group.axis, name)
