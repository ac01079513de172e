"""Hardware cards: complete, sourced, in plausible ranges; time of collectives; refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import yaml

from helix.cost.choices import VALUE_BYTES, Formats, make_formats
from helix.cost.hardware import (
    OPS,
    Kernel,
    Span,
    group_span,
    hardware_names,
    load_hardware,
    parse_hardware,
    recognise_hardware,
    sent_bytes,
)
from helix.errors import ConfigError
from helix.layout import Layout

# Golden values: memory GB, achieved TB/s, bf16 TFLOP/s achieved, one-way link GB/s achieved, ranks of a node.
GOLDEN = {
    "a100-80g": (80, 1.835, 248, 247, 8),
    "b200": (180, 7.568, 1786, 740, 8),
    "cpu": (16, 0.01, 0.025, 2, 64),
    "gb200-nvl72": (186, 7.568, 1985, 740, 72),
    "gb300-nvl72": (279, 7.568, 1985, 740, 72),
    "h100-sxm": (80, 3.169, 786, 370, 8),
    "h200-sxm": (141, 4.541, 786, 370, 8),
    "mi300x": (192, 4.24, 654, 314, 8),
}


def test_golden_cards() -> None:
    assert set(hardware_names()) == set(GOLDEN)
    for name, (memory, bandwidth, products, link, node) in GOLDEN.items():
        card = load_hardware(name)
        assert card.memory_bytes == memory * 10**9, name
        assert card.memory.value / 1e6 == pytest.approx(bandwidth, rel=1e-3), name
        assert card.products["bfloat16"].value / 1e6 == pytest.approx(products, rel=2e-3), name
        assert card.link.value / 1e3 == pytest.approx(link, rel=2e-3), name
        assert card.node_size == node, name


@pytest.mark.parametrize("name", GOLDEN)
def test_cards_are_complete_and_sourced(name: str) -> None:
    card = load_hardware(name)
    rates = [card.memory, card.link, card.internode, *card.products.values()]
    assert all(rate.source and 0 < rate.achieved <= 1 for rate in rates)
    assert card.source
    assert set(card.collectives) == set(OPS)
    assert all(curve.source for curve in card.collectives.values())
    assert all(kernel.source for kernel in card.kernels.values())
    for number_format in VALUE_BYTES:
        assert card.product_rate(number_format) > 0
    if "assumed as on" in card.source:
        assert any("assumed" in rate.source for rate in rates)


def test_measured_collectives_of_h200() -> None:
    """BASELINE: NCCL in a CUDA graph on two ranks."""
    card, span = load_hardware("h200-sxm"), Span(2, 1, 2)
    for kilobytes, us in ((4, 11.6), (33, 12.3), (262, 13.5), (1049, 18.9)):
        assert card.collective_us("all_reduce", sent_bytes("all_reduce", 2, kilobytes * 1e3), span) == pytest.approx(us)
    half = card.collective_us("all_reduce", 655_500, span)
    assert half == pytest.approx((13.5 + 18.9) / 2, rel=1e-3)
    assert card.collective_us("all_to_all", 8e3, span, "symmetric") == pytest.approx(4.7)
    assert card.collective_us("all_to_all", 1.0, span) == 12.1
    # 100 MB beyond the last point go at the link's bandwidth.
    far = card.collective_us("all_reduce", 1049e3 + 1e8, span)
    assert far == pytest.approx(18.9 + 1e8 / card.link.value)


def test_kernels_of_a_format_or_of_few_rows_are_the_nearest_there_is() -> None:
    card = load_hardware("h200-sxm")
    own = replace(card, kernels={**card.kernels, "linear_float8": Kernel(9.0, bandwidth=0.5)})
    assert own.kernel("linear", "float8").fixed_us == own.kernel("few_linear", "float8").fixed_us == 9.0
    assert own.kernel("linear", "bfloat16") == own.kernel("linear", "nvfp4") == card.kernels["linear"]
    without = replace(card, kernels={name: one for name, one in card.kernels.items() if not name.startswith("few")})
    assert without.kernel("few_experts") == card.kernels["experts"]
    assert card.kernel("few_experts") == card.kernels["few_experts"]


def test_node_borders_cost() -> None:
    card = load_hardware("h200-sxm")
    inside, between = group_span(8, 1, 16, 8), group_span(16, 1, 16, 8)
    assert (inside, between) == (Span(8, 1, 8), Span(16, 2, 8))
    assert group_span(2, 8, 16, 8) == Span(2, 2, 1)
    assert group_span(3, 1, 12, 8) == Span(3, 2, 2)  # ranks 6, 7 and 8
    for op in OPS:
        assert card.collective_us(op, 1e6, between) > card.collective_us(op, 1e6, inside) > 0
    assert card.collective_us("all_reduce", 1e6, Span(1, 1, 1)) == 0


@pytest.mark.parametrize("axis", ["kvp", "tpa", "tpf", "ep"])
def test_spans_are_those_of_the_groups(axis: str) -> None:
    layout = Layout(kvp=6, tpa=4, tpf=3, ep=8)
    size, stride = {"kvp": (6, 1), "tpa": (4, 6), "tpf": (3, 1), "ep": (8, 3)}[axis]
    most = max(len({rank // 8 for rank in ranks}) for ranks in layout.groups(axis))
    assert group_span(size, stride, 24, 8).nodes == most


def test_recognised_devices() -> None:
    assert recognise_hardware("NVIDIA H200") == "h200-sxm"
    assert recognise_hardware("NVIDIA H100 80GB HBM3") == "h100-sxm"
    assert recognise_hardware("NVIDIA A100-SXM4-80GB") == "a100-80g"
    assert recognise_hardware("NVIDIA GB200") == "gb200-nvl72"
    assert recognise_hardware("NVIDIA B200") == "b200"
    assert recognise_hardware("NVIDIA GeForce RTX 4090") is None


def test_refusals_name_the_field() -> None:
    with pytest.raises(ConfigError, match=r"h300.*did you mean h"):
        load_hardware("h300-sxm")
    with pytest.raises(ConfigError, match="no such file"):
        load_hardware("nowhere/mine.yaml")
    with pytest.raises(ConfigError, match="key 'rates' is missing"):
        parse_hardware("name: x\nsource: y", "x.yaml")
    with pytest.raises(ConfigError, match="not valid YAML"):
        parse_hardware("{", "x.yaml")
    with pytest.raises(ConfigError, match="number format 'int7'"):
        Formats(weights="int7")


def test_points_must_rise() -> None:
    card = load_hardware("h200-sxm")
    assert card.collectives["all_reduce"].us == tuple(sorted(card.collectives["all_reduce"].us))
    text = yaml.safe_dump(
        {**_minimal(), "collectives": {**_minimal()["collectives"], "all_reduce": _curve([[4, 9], [8, 5]])}}
    )
    with pytest.raises(ConfigError, match="all_reduce: points must rise"):
        parse_hardware(text, "x.yaml")


def _curve(points: list[list[float]]) -> dict[str, object]:
    return {"ranks": 2, "points": points, "us_per_doubling": 0, "source": "test"}


def _minimal() -> dict[str, Any]:
    rate = {"datasheet": 1.0, "achieved": 1.0, "source": "test"}
    return {
        "name": "test",
        "source": "test",
        "memory_gb": 1,
        "reserved_gb": 0,
        "node_size": 8,
        "rates": dict.fromkeys(("memory_tb_s", "bfloat16_tflops", "link_gb_s", "internode_gb_s"), rate),
        "internode_us": 0,
        "collectives": {op: _curve([[0, 1]]) for op in OPS},
        "kernels": {
            kind: {"fixed_us": 0.0} for kind in ("linear", "attention", "latent_attention", "experts", "small")
        },
        "step_us": 0,
    }


def test_formats_follow_from_the_weights() -> None:
    assert make_formats("bfloat16") == Formats()
    fp8 = make_formats("float8", "float8")
    assert (fp8.weight_bytes, fp8.cache_bytes, fp8.activation_bytes) == (1, 1, 2)
    assert fp8.attention_products == "bfloat16"
    assert make_formats("float32").activation_bytes == 4
