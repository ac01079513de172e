"""Published results against the model: what is claimed for each is checked, misses included."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from helix.cli import app
from helix.errors import ConfigError
from helix.planner.measured import measured_steps
from helix.planner.reproduce import (
    PAPER_COLLECTIVE_US,
    PAPER_LAYER_US,
    fit_paper,
    helix_h200,
    helix_paper,
    paper_fronts,
    paper_hardware,
    paper_ratios,
    vllm_dcp,
    vllm_h200,
)


def test_vllm_on_h200_is_predicted() -> None:
    """Nothing fitted: median error under 15% (it is 2%), and no row beyond 20%."""
    found = vllm_h200()
    assert len(found.rows) == 56
    assert found.median_error < 0.04
    assert max(abs(row.error) for row in found.rows) < 0.2
    for scheme in ("one", "tp2", "dcp2-ag-rs", "dcp2-a2a"):
        errors = sorted(abs(row.error) for row in found.rows if f" {scheme} " in row.name)
        assert errors[len(errors) // 2] < 0.15, scheme


def test_this_engine_on_h200_is_predicted() -> None:
    """Whatever results are committed: nothing fitted to them, median error under 15%."""
    found = helix_h200()
    assert len(found.rows) >= 20
    assert found.median_error < 0.15
    assert len({row.name for row in found.rows}) == len(found.rows)


def test_a_rank_alone_is_priced_without_messages() -> None:
    timing = {"batch": 8, "context": 1 << 17, "ttl_ms": 5.0, "experts_hit": 30.0, "local_experts_hit": 15.0}
    ways = {"variant": "kvp=2,ep=2,exchange_space=value", "layout": "kvp=2 tpa=1 tpf=1 ep=2"}
    report = {"bench": "decode", "device": "NVIDIA H200", "model": "deepseek-v2-lite", "num_layers": 27}
    report |= {"dtype": "bfloat16", "timings": [timing | ways | {"one_rank": alone} for alone in (False, True)]}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "x.json").write_text(json.dumps({"command": "x", "report": report}))
        whole, alone = measured_steps("h200-sxm", Path(folder))
    assert whole.name == "deepseek-v2-lite kvp=2 ep=2 exchange_space=value 8 x 128K"
    parts = whole.cost.parts
    assert parts.exchange > 0
    assert whole.predicted_ms - alone.predicted_ms == pytest.approx(parts.communication / 1e3)
    with pytest.raises(ConfigError, match="no measured decode steps for b200"):
        measured_steps("b200")


def test_the_crossing_of_tp_and_dcp_is_predicted() -> None:
    """V2-Lite at batch 1: TP2 is faster up to 128K and DCP from 512K, measured and modelled."""
    rows = {row.name: row for row in vllm_h200().rows}
    for context, dcp_wins in (("32K", False), ("128K", False), ("512K", True), ("1024K", True)):
        tp, dcp = (rows[f"deepseek-v2-lite {scheme} 1 x {context}"] for scheme in ("tp2", "dcp2-a2a"))
        assert (dcp.published < tp.published) == dcp_wins
        # At 128K the model has the two within a hundredth, where 9% were measured.
        if context != "128K":
            assert (dcp.modelled < tp.modelled) == dcp_wins


def test_helix_paper() -> None:
    """Fitted on 405B; R1's two gains are predictions within 25%. HOP-B's 1% on R1 is a miss, and is said to be one."""
    rows = helix_paper().rows
    within = [abs(row.error) <= 0.25 for row in rows]
    assert within == [True, True, True, True, True, False]
    assert "not reproduced" in rows[-1].note
    assert rows[3].modelled == pytest.approx(1.34, abs=0.02)
    assert rows[4].modelled == pytest.approx(34.0, abs=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("layer_us", [35.0, 280.0])
@pytest.mark.parametrize("collective_us", [0.5, 8.0])
def test_no_constants_give_both_published_losses(layer_us: float, collective_us: float) -> None:
    """12% for 405B and 1% for R1: tried at the corners of what the two constants may be."""
    hardware = paper_hardware(layer_us, collective_us)
    dense, latent = (paper_ratios(paper_fronts(model, hardware)) for model in ("llama-3.1-405b", "deepseek-r1"))
    assert dense.overlap_loss < 0.1 or latent.overlap_loss > 0.03


@pytest.mark.slow
def test_the_constants_are_what_the_fit_gives() -> None:
    assert fit_paper() == (PAPER_LAYER_US, PAPER_COLLECTIVE_US)


def test_vllm_dcp_is_a_miss_with_its_reason() -> None:
    found = vllm_dcp()
    gain = next(row for row in found.rows if row.name == "gain of DCP")
    assert 1.0 < gain.published < gain.modelled < 2 * gain.published
    assert all(row.note for row in found.rows)


@pytest.mark.parametrize("name", ["helix-paper", "vllm-dcp", "vllm-h200", "helix-h200"])
def test_printed_beside_the_published_numbers(name: str) -> None:
    text = CliRunner().invoke(app, ["plan", "--reproduce", name], catch_exceptions=False).output
    assert ("measured" if name.endswith("h200") else "published") in text
    assert "median error" in text
    last = (
        CliRunner().invoke(app, ["plan", "--reproduce", name, "--json"], catch_exceptions=False).output.splitlines()[-1]
    )
    tree = json.loads(last)
    assert tree["assumptions"]
    assert all("error" in row for row in tree["rows"])
