"""One rank without its peers against the same rank with them: the same shapes, and the same calls and bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helix.bench.decode import Cell, clear, place_requests
from helix.comm.stand_in import stand_in_mesh
from helix.comm.world import World, single_world
from helix.config import make_config
from helix.engine.build import build_core, resolve_layout, resolve_spec
from helix.engine.core import EngineCore
from tests.ranks import RankPool
from tests.tiny import TinyModels

CASES = [
    ("smollm", {"kvp": 2}, {}),
    ("llama", {"kvp": 3, "tpa": 1}, {"merge": "ag_rs"}),
    ("llama_bias", {"tpa": 3, "duplicate_kv": True}, {}),
    ("qwen3_moe", {"kvp": 2, "tpa": 2, "ep": 4}, {}),
    ("deepseek_v3_moe", {"kvp": 4, "ep": 2}, {"query": "gather", "exchange_space": "value"}),
    ("deepseek_v2_moe", {"kvp": 3, "ep": 3}, {"query": "gather", "merge": "ag_rs"}),
]


def _settings(tiny: TinyModels, family: str, layout: dict[str, Any], comm: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": {"path": tiny.path(family), "dtype": "float32"},
        "layout": layout,
        "comm": comm,
        "cache": {"page_tokens": 4, "num_page_rows": 40, "prefix_reuse": False},
        "engine": {"device": "cpu", "max_batch": 3},
    }


def observe(core: EngineCore) -> dict[str, Any]:
    """Traffic and shapes of one decode step on this rank."""
    requests = place_requests(core, Cell(batch=3, context=37), 2)
    assert requests is not None
    plan = core.scheduler.plan()
    assert plan is not None
    mesh = core.mesh
    groups = {axis: getattr(mesh, axis) for axis in ("world", "kvp", "tpf", "ep")}
    for group in groups.values():
        group.traffic.clear()
    shapes: list[tuple[int, ...]] = []
    with torch.inference_mode():
        run = core.runner.run(
            plan, lambda batch, _layer, x_TC: shapes.append((*x_TC.shape, *batch.page_table_SR.shape))
        )
        batch = _batch(core, plan)
    clear(core, requests)
    return {
        "traffic": {axis: (dict(one.traffic.calls), dict(one.traffic.sent_bytes)) for axis, one in groups.items()},
        "weights": {name: tuple(value.shape) for name, value in core.model.named_parameters()},
        "cache": [tuple(layer.k.shape) for layer in core.cache.layers],
        "visible": batch.visible_len_T.tolist(),
        "slots": batch.slot_T.tolist(),
        "layers": shapes,
        "logits": tuple(run.logits_RV.shape),
    }


def _batch(core: EngineCore, plan: Any) -> Any:
    from helix.engine.batch import build_batch

    return build_batch(plan, core.rule, core.mesh.coords.kvp_rank, core.mesh.device)


def real_rank(world: World, settings: dict[str, Any]) -> dict[str, Any]:
    config = make_config(settings)
    spec = resolve_spec(config)
    return observe(build_core(config, spec, resolve_layout(config, spec, world.size), world))


@pytest.mark.parametrize(("family", "layout", "comm"), CASES)
def test_alone_as_among_peers(
    family: str, layout: dict[str, Any], comm: dict[str, Any], tiny: TinyModels, ranks: RankPool
) -> None:
    settings = _settings(tiny, family, layout, comm)
    config = make_config(settings)
    spec = resolve_spec(config)
    found = resolve_layout(config, spec, None)
    among = ranks.run(found.num_ranks, real_rank, settings)
    for rank, want in enumerate(among):
        world = single_world(torch.device("cpu"))
        mesh = stand_in_mesh(found, rank, world.device)
        got = observe(build_core(config, spec, found, world, mesh=mesh))
        assert got == want, f"rank {rank}"
        assert sum(sum(calls.values()) for calls, _ in got["traffic"].values()) > 0


def test_numbers_stay_finite(tiny: TinyModels) -> None:
    """A step of a rank alone means nothing, but NaN would change the work (of the router, and of the merge)."""
    settings = _settings(tiny, "deepseek_v3_moe", {"kvp": 4, "ep": 4}, {})
    config = make_config(settings)
    spec = resolve_spec(config)
    layout = resolve_layout(config, spec, None)
    world = single_world(torch.device("cpu"))
    core = build_core(config, spec, layout, world, mesh=stand_in_mesh(layout, 1, world.device))
    for layer in core.cache.layers:
        for tensor in layer.tensors:
            tensor.normal_()
    assert place_requests(core, Cell(batch=2, context=30), 2) is not None
    plan = core.scheduler.plan()
    assert plan is not None
    with torch.inference_mode():
        assert core.runner.run(plan).logits_RV.isfinite().all()
