"""Published results against the model: what is claimed for each is checked, misses included."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from helix.cli import app
from helix.planner.reproduce import (
    PAPER_COLLECTIVE_US,
    PAPER_LAYER_US,
    fit_paper,
    helix_paper,
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
def test_the_constants_are_what_the_fit_gives() -> None:
    assert fit_paper() == (PAPER_LAYER_US, PAPER_COLLECTIVE_US)


def test_vllm_dcp_is_a_miss_with_its_reason() -> None:
    found = vllm_dcp()
    gain = next(row for row in found.rows if row.name == "gain of DCP")
    assert 1.0 < gain.published < gain.modelled < 2 * gain.published
    assert all(row.note for row in found.rows)


@pytest.mark.parametrize("name", ["helix-paper", "vllm-dcp", "vllm-h200"])
def test_printed_beside_the_published_numbers(name: str) -> None:
    text = CliRunner().invoke(app, ["plan", "--reproduce", name], catch_exceptions=False).output
    assert "published" in text
    assert "median error" in text
    last = (
        CliRunner().invoke(app, ["plan", "--reproduce", name, "--json"], catch_exceptions=False).output.splitlines()[-1]
    )
    tree = json.loads(last)
    assert tree["assumptions"]
    assert all("error" in row for row in tree["rows"])
