"""Projections shared by a KVP group: exact for chunks that divide by nothing, and priced at the traffic they cause."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from helix.comm.stand_in import stand_in_mesh
from helix.comm.world import World
from helix.config import make_config
from helix.cost.choices import Placement, make_formats
from helix.cost.hardware import load_hardware
from helix.cost.prefill import Chunk, chunk_messages, shared_from
from helix.engine.batch import build_batch
from helix.engine.build import build_core, resolve_layout, resolve_spec
from helix.engine.request import Request
from helix.layers.projection import SharedProjection
from helix.layout import Layout
from helix.planner.auto import choices_of
from tests.parallel import jobs
from tests.parallel.test_parity import settings
from tests.ranks import RankPool
from tests.tiny import TinyModels, prompt

# Prefill chunks of 20 tokens; a prompt's last chunk has 1, 2, 3 or 7 tokens: fewer than ranks, and none that divides.
PROMPTS = [prompt(21), prompt(42), prompt(43), prompt(7)]
CASES = [
    ("llama", {"kvp": 2}, {}),
    ("qwen2", {"kvp": 3}, {"merge": "ag_rs"}),
    ("smollm", {"kvp": 2, "tpa": 3}, {}),
    ("deepseek_v3", {"kvp": 3}, {"query": "gather"}),
    # Here each rank projects queries of its own heads: nothing is shared, whatever is asked for.
    ("deepseek_v2", {"kvp": 2}, {"query": "gather"}),
    ("qwen2", {"kvp": 2}, {"query": "gather"}),
]


@pytest.mark.parametrize(("family", "layout", "comm"), CASES)
def test_equals_transformers(
    ranks: RankPool, tiny: TinyModels, family: str, layout: dict[str, int], comm: dict[str, str]
) -> None:
    config = settings(tiny.path(family), layout, comm={"shared_projections": 2, **comm})
    size = layout["kvp"] * layout.get("tpa", 1)
    logits, tokens = ranks.run(size, jobs.drive, config, jobs.logits_and_tokens, PROMPTS, 4)[0]
    for one, got, continued in zip(PROMPTS, logits, tokens, strict=True):
        np.testing.assert_allclose(got, tiny.logits(family, one).numpy(), atol=1e-4, rtol=0)
        assert continued == tiny.greedy(family, one, 4)


def test_few_tokens_are_not_shared() -> None:
    group = stand_in_mesh(Layout(kvp=3, tpf=3), 1, torch.device("cpu")).kvp
    linear = nn.Linear(4, 5)
    share = SharedProjection(group, 8)
    assert share(linear, torch.randn(7, 4)).shape == (7, 5)
    assert not group.traffic.calls
    assert share(linear, torch.randn(8, 4)).shape == (8, 5)
    assert group.traffic.calls == {"all_gather": 1}
    # Three rows of this rank, to two peers.
    assert group.traffic.sent_bytes == {"all_gather": 2 * 3 * 5 * 4}
    for off in ("off", "auto"):
        assert SharedProjection(group, off).from_tokens is None  # type: ignore[arg-type]


def count_traffic(world: World, config: dict[str, Any], tokens: int) -> dict[str, int]:
    """Bytes that one chunk's layers send, by collective, on this rank."""
    run = make_config(config)
    spec = resolve_spec(run)
    layout = resolve_layout(run, spec, world.size)
    core = build_core(run, spec, layout, world)
    core.scheduler.add(Request(request_id=0, prompt_ids=prompt(tokens), max_tokens=1))
    plan = core.scheduler.plan()
    assert plan is not None
    # Building agreed on the size of the cache.
    core.mesh.world.traffic.clear()
    batch = build_batch(plan, core.rule, core.mesh.coords.kvp_rank, world.device)
    with torch.inference_mode():
        core.model(batch, core.cache)
    sent: dict[str, int] = {}
    for group in (core.mesh.world, core.mesh.kvp):
        for name, num_bytes in group.traffic.sent_bytes.items():
            sent[name] = sent.get(name, 0) + num_bytes
    return sent


@pytest.mark.parametrize(
    ("family", "comm"),
    [
        ("llama", {}),
        ("deepseek_v2", {}),
        ("deepseek_v3", {"query": "gather", "exchange_space": "value"}),
        ("deepseek_v3", {"shared_projections": "off"}),
    ],
)
def test_priced_messages_are_those_that_are_sent(
    ranks: RankPool, tiny: TinyModels, family: str, comm: dict[str, Any]
) -> None:
    config = settings(tiny.path(family), {"kvp": 3}, comm={"shared_projections": 2, **comm})
    sent = ranks.run(3, count_traffic, config, 20)[0]
    run = make_config(config)
    spec = resolve_spec(run)
    placement = Placement(layout=resolve_layout(run, spec, None), choices=choices_of(run.comm))
    chunk = Chunk(start=0, tokens=20, shared=run.comm.shared_projections != "off")
    priced: dict[str, float] = {}
    for count, one in chunk_messages(spec, placement, make_formats("float32"), chunk):
        priced[one.op] = priced.get(one.op, 0.0) + count * one.sent_bytes
    assert {name: pytest.approx(num_bytes, abs=2 * spec.num_layers + 2) for name, num_bytes in priced.items()} == sent


def test_hardware_decides() -> None:
    """Where arithmetic is fast against the links, sharing waits for larger chunks, or for ever."""
    run = make_config(model={"card": "llama-3.1-405b", "load": "dummy"})
    spec = resolve_spec(run)
    layout, choices, formats = Layout(kvp=8, tpf=8), choices_of(run.comm), make_formats("bfloat16")
    hardware = load_hardware("h200-sxm")
    usual = shared_from(spec, layout, choices, formats, hardware)
    assert usual is not None
    assert 16 <= usual <= 1024
    quick = shared_from(spec, layout, choices, formats, hardware.scaled(products=3))
    assert quick is not None
    assert quick > usual
    assert shared_from(spec, layout, choices, formats, hardware.scaled(products=3, link=0.01)) is None
    assert shared_from(spec, Layout(tpa=8, tpf=8), choices, formats, hardware) is None
    assert shared_from(spec, layout, replace(choices, query="gather"), formats, hardware) is None
