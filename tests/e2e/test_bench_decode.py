"""`helix bench decode` on the CPU with a cut-down model: what it prints, counts and refuses."""

from __future__ import annotations

import json

import pytest
import torch

from helix.bench.decode import Cell, clear, place_requests
from helix.bench.ranks import fill_cache
from helix.cli import main
from helix.comm.world import single_world
from helix.config import make_config
from helix.engine.build import build_core, resolve_spec
from helix.engine.core import EngineCore
from helix.layout import Layout
from tests.tiny import TinyModels

STEPS = ["--steps", "3", "--warmup", "1", "--set", "engine.device=cpu", "--set", "cache.num_page_rows=40"]


def test_prints_a_table_and_one_json_line(tiny: TinyModels, capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--set", f"model={{path: {tiny.path('qwen3_moe')}}}", "--card", "smollm2-135m"]
    with pytest.raises(SystemExit) as ended:
        main(["bench", "decode", *model, "--cells", "1x100,4x100,1x9K,4x9K", *STEPS])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.strip().splitlines()
    report = json.loads(lines[-1])
    assert (report["bench"], report["mode"], report["num_layers"]) == ("decode", "eager", 2)
    assert [(one["batch"], one["context"]) for one in report["timings"]] == [(1, 100), (4, 100)]
    assert len(report["skipped"]) == 2
    assert "9216" in report["skipped"][0]
    one, four = report["timings"]
    assert one["experts_hit"] == 3, "one token hits its experts"
    assert 3 < four["experts_hit"] <= 9
    for timing in report["timings"]:
        assert 0 < timing["low_ms"] <= timing["ttl_ms"] <= timing["high_ms"]
        assert timing["device_ms"] is None
        assert 0 < timing["ceiling_ms"] <= timing["predicted_ms"]
    assert any("1 x 100" in line for line in lines[:-1])


@pytest.fixture
def core(tiny: TinyModels) -> EngineCore:
    config = make_config(
        model={"path": tiny.path("deepseek_v2")},
        cache={"page_tokens": 4, "num_page_rows": 60},
        engine={"device": "cpu", "max_batch": 3},
    )
    return build_core(config, resolve_spec(config), Layout(), single_world(torch.device("cpu")))


def test_requests_decode_from_the_context_on(core: EngineCore) -> None:
    requests = place_requests(core, Cell(batch=3, context=70), 5)
    assert requests is not None
    plan = core.scheduler.plan()
    assert plan is not None
    assert [(item.start, item.count, item.samples) for item in plan.items] == [(70, 1, True)] * 3
    held = [row for request in requests for row in request.rows]
    assert len(set(held)) == len(held) == 3 * 18
    clear(core, requests)
    assert core.scheduler.num_free_rows == 60
    assert not core.scheduler.has_work


@pytest.mark.parametrize("cell", [Cell(batch=3, context=100), Cell(batch=1, context=300)])
def test_what_does_not_fit_leaves_nothing_behind(core: EngineCore, cell: Cell) -> None:
    assert place_requests(core, cell, 5) is None
    assert core.scheduler.num_free_rows == 60
    assert not core.scheduler.has_work


def test_the_whole_cache_is_filled(core: EngineCore) -> None:
    for layer in core.cache.layers:
        layer.k.fill_(torch.nan)
    fill_cache(core, 0)
    assert all(layer.k.isfinite().all() and layer.k.std() > 0.5 for layer in core.cache.layers)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--card", "smollm2-135m", "--cells", "1x1K,3"], "--context"),
        (["--card", "smollm2-135m", "--batch", "0"], "--batch"),
        (["--card", "no-such-card"], "no-such-card"),
        ([], "needs one of --config FILE and --card NAME"),
    ],
)
def test_what_is_refused(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "decode", *arguments])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
