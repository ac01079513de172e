"""The cost formulas against what the engine really allocates and sends."""

from __future__ import annotations

from collections import defaultdict
from itertools import product
from typing import Any

import pytest
import torch

from helix.cache.pools import page_bytes
from helix.check import rank_weight_bytes
from helix.config import CommConfig
from helix.cost.choices import Choices, Placement, Workload, make_formats
from helix.cost.hardware import load_hardware
from helix.cost.memory import memory, page_row_bytes
from helix.cost.step import layer_messages
from helix.cost.weights import rank_weights
from helix.layout import Layout, layout_problem, legal_layouts
from helix.model_spec import ModelSpec
from helix.weights import Packing
from model_zoo import spec_from_config
from model_zoo.cards import load_card
from tests.ranks import RankPool
from tests.tiny import FAMILIES
from tests.unit.cost_jobs import decode_step

FP32 = make_formats("float32")
BF16 = make_formats("bfloat16")


def tiny_spec(family: str) -> ModelSpec:
    return spec_from_config(FAMILIES[family]().to_dict())


def comm_of(choices: Choices) -> dict[str, Any]:
    return {
        "query": choices.query,
        "exchange_space": choices.exchange_space,
        "merge": choices.merge,
        "dispatch": choices.dispatch,
    }


def ways(spec: ModelSpec) -> list[Choices]:
    pairs = product(("replicate", "gather"), ("latent", "value") if spec.mla else ("latent",))
    return [Choices(query=query, exchange_space=space) for query, space in pairs]  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_equal_the_models(family: str) -> None:
    spec = tiny_spec(family)
    for num_ranks in (1, 2, 3, 4, 6):
        for layout, choices in product(legal_layouts(spec, num_ranks), ways(spec)):
            for rank in {0, num_ranks - 1}:
                held = rank_weight_bytes(spec, layout, rank, CommConfig(**comm_of(choices)), torch.float32)
                assert rank_weights(spec, layout, choices, FP32, rank=rank).total == held, (layout, choices, rank)


@pytest.mark.parametrize("card", ["deepseek-r1", "kimi-k2", "llama-3.1-405b", "qwen3-235b-a22b", "smollm2-135m"])
@pytest.mark.parametrize("num_ranks", [8, 64])
def test_weights_of_real_models(card: str, num_ranks: int) -> None:
    spec = load_card(card)
    layouts = list(legal_layouts(spec, num_ranks))
    for layout in (layouts[0], layouts[-1]):
        for choices in ways(spec):
            held = rank_weight_bytes(spec, layout, 0, CommConfig(**comm_of(choices)), torch.bfloat16)
            assert rank_weights(spec, layout, choices, BF16).total == held, (layout, choices)


@pytest.mark.parametrize(
    "card", ["deepseek-r1", "deepseek-v2-lite", "llama-3.1-405b", "qwen3-235b-a22b", "smollm2-135m"]
)
def test_fp8_weights_of_real_models(card: str) -> None:
    """With scales, repeated where slices cut a block; the last rank of 48 holds other cuts than the first."""
    spec, formats = load_card(card), make_formats("float8", activations="bfloat16")
    for num_ranks in (1, 6, 8, 48):
        layouts = list(legal_layouts(spec, num_ranks))
        for layout in {*layouts[:1], *layouts[-2:]}:
            for choices, rank in product(ways(spec)[::3], {0, num_ranks - 1}):
                comm = CommConfig(**comm_of(choices))
                held = rank_weight_bytes(spec, layout, rank, comm, torch.bfloat16, Packing())
                assert rank_weights(spec, layout, choices, formats, rank=rank).total == held, (layout, choices, rank)


def test_r1_fits_eight_h200() -> None:
    """FP8 weights of all 61 layers beside a cache of more than a million tokens; in bfloat16 they do not fit."""
    spec, hardware = load_card("deepseek-r1"), load_hardware("h200-sxm")
    placement = Placement(layout=Layout(kvp=8, tpf=1, ep=8))
    workload = Workload(batch=1, context=1 << 20)
    fits = {
        name: memory(spec, placement, make_formats(name, "bfloat16"), hardware, workload).fits
        for name in ("float8", "bfloat16")
    }
    assert fits == {"float8": True, "bfloat16": False}


def test_weights_of_the_duplicating_baseline() -> None:
    for card in ("deepseek-v2-lite", "llama-3.1-8b"):
        spec = load_card(card)
        layout = Layout(tpa=16, tpf=16, duplicate_kv=True)
        held = rank_weight_bytes(spec, layout, 0, CommConfig(), torch.bfloat16)
        assert rank_weights(spec, layout, Choices(), BF16).total == held


@pytest.mark.parametrize("card", ["deepseek-r1", "llama-3.1-405b", "smollm2-135m"])
def test_page_rows_equal_the_pools(card: str) -> None:
    spec = load_card(card)
    for layout in legal_layouts(spec, 8):
        assert page_row_bytes(spec, Placement(layout=layout), BF16, 64) == page_bytes(spec, layout, 64, 2)


# family, layout, choices
STEPS = [
    ("llama", Layout(kvp=2, tpf=2), Choices()),
    ("llama", Layout(kvp=2, tpf=2), Choices(merge="ag_rs")),
    ("llama", Layout(kvp=2, tpa=2, tpf=4), Choices(query="gather")),
    ("smollm", Layout(tpa=3, tpf=3), Choices()),
    ("smollm", Layout(kvp=4, tpf=4), Choices(query="gather", merge="ag_rs")),
    ("deepseek_v3", Layout(kvp=3, tpf=3), Choices()),
    ("deepseek_v3", Layout(kvp=3, tpf=3), Choices(query="gather", exchange_space="value")),
    ("deepseek_v2", Layout(kvp=2, tpf=2), Choices(query="gather")),
    ("deepseek_v2", Layout(tpa=2, tpf=2, duplicate_kv=True), Choices()),
    ("deepseek_v3_moe", Layout(kvp=2, ep=2), Choices()),
    ("deepseek_v3_moe", Layout(kvp=4, tpf=2, ep=2), Choices(exchange_space="value")),
    ("qwen3_moe", Layout(kvp=2, tpa=2, ep=4), Choices()),
]


def predicted(spec: ModelSpec, placement: Placement, workload: Workload) -> dict[str, dict[str, tuple[int, float]]]:
    """(axis -> collective -> (calls, bytes)), in the form that ranks count."""
    sums: dict[str, dict[str, tuple[int, float]]] = defaultdict(dict)
    for count, message in layer_messages(spec, placement, FP32, workload):
        calls, sent = sums[message.axis].get(message.op, (0, 0.0))
        sums[message.axis][message.op] = (calls + count * message.calls, sent + count * message.sent_bytes)
    return sums


@pytest.mark.parametrize(("family", "layout", "choices"), STEPS)
def test_traffic_equals_what_ranks_count(ranks: RankPool, family: str, layout: Layout, choices: Choices) -> None:
    spec = tiny_spec(family)
    assert layout_problem(spec, layout) is None
    workload = Workload(batch=3, context=21, page_tokens=4)
    results = ranks.run(
        layout.num_ranks, decode_step, spec, layout, comm_of(choices), workload.batch, workload.context, 4
    )
    counted, held = results[0]
    assert held == rank_weights(spec, layout, choices, FP32).total
    expected = predicted(spec, Placement(layout=layout, choices=choices), workload)
    for axis, by_name in counted.items():
        assert set(by_name) == set(expected.get(axis, {})), axis
        for name, (calls, sent) in by_name.items():
            expected_calls, expected_sent = expected[axis][name]
            assert calls == expected_calls, (axis, name)
            # Each call rounds its bytes down.
            assert expected_sent - calls <= sent <= expected_sent, (axis, name)


def test_traffic_of_the_alltoall_dispatch(ranks: RankPool) -> None:
    """Rows depend on the routing, so their bytes are compared as a mean over the ranks; all else is exact."""
    spec, layout, choices = tiny_spec("deepseek_v3_moe"), Layout(kvp=4, tpf=2, ep=2), Choices(dispatch="alltoall")
    workload = Workload(batch=64, context=9, page_tokens=4)
    results = ranks.run(4, decode_step, spec, layout, comm_of(choices), workload.batch, workload.context, 4)
    expected = predicted(spec, Placement(layout=layout, choices=choices), workload)
    for axis in ("ep", "tpf"):
        assert set(results[0][0][axis]) == set(expected[axis])
        for name, (calls, sent) in expected[axis].items():
            assert {counted[axis][name][0] for counted, _ in results} == {calls}
            mean = sum(counted[axis][name][1] for counted, _ in results) / len(results)
            assert mean == pytest.approx(sent, rel=0.25 if name == "all_to_all" else 1e-3), (axis, name)
