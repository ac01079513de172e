"""`helix bench decode` on the CPU with a cut-down model: what it prints, counts and refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helix.bench.decode import (
    Cell,
    DecodeReport,
    DecodeTask,
    Timing,
    WholeModel,
    clear,
    place_requests,
    with_whole,
)
from helix.bench.ranks import fill_cache
from helix.bench.variants import read_variants
from helix.cli import main
from helix.comm.world import World, single_world
from helix.config import make_config
from helix.engine.build import build_core, resolve_spec
from helix.engine.core import EngineCore
from helix.errors import ConfigError
from helix.layout import Layout
from tests.ranks import RankPool
from tests.tiny import TinyModels

STEPS = ["--steps", "3", "--warmup", "1", "--set", "engine.device=cpu", "--set", "cache.num_page_rows=40"]


def test_prints_a_table_and_one_json_line(tiny: TinyModels, capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--set", f"model={{path: {tiny.path('qwen3_moe')}}}", "--card", "smollm2-135m"]
    with pytest.raises(SystemExit) as ended:
        main(["bench", "decode", *model, "--cells", "1x100,4x100,1x9K,4x9K", *STEPS])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.strip().splitlines()
    report = json.loads(lines[-1])
    assert (report["bench"], report["num_layers"]) == ("decode", 2)
    assert {(one["mode"], one["one_rank"], one["collectives_ms"]) for one in report["timings"]} == {("eager", False, 0)}
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


def test_one_rank_of_several_layouts(tiny: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each rank alone: its own share of the experts and of the bytes, and collectives that only the model knows."""
    model = ["--set", f"model={{path: {tiny.path('deepseek_v3_moe')}}}", "--card", "smollm2-135m"]
    picture = tmp_path / "decode.png"
    chosen = ["--one-rank-of", "kvp=3,ep=3; tp=3,ep=3; tp=3,dcp=3,merge=ag_rs", "--cells", "2x400", *STEPS]
    with pytest.raises(SystemExit) as ended:
        main(["bench", "decode", *model, *chosen, "--plot", str(picture)])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.strip().splitlines()
    helix, plain, dcp = json.loads(lines[-1])["timings"]
    assert [one["layout"] for one in (helix, plain, dcp)] == [
        "kvp=3 tpa=1 tpf=1 ep=3",
        "kvp=1 tpa=3 tpf=1 ep=3 duplicate_kv",
        "kvp=3 tpa=1 tpf=3 ep=1",
    ]
    assert helix["read_bytes"] < plain["read_bytes"], "plain TP reads the whole sequence on every rank"
    for one in (helix, plain, dcp):
        assert one["collectives_ms"] > 0
        assert one["total_ms"] == one["ttl_ms"] + one["collectives_ms"]
        assert one["predicted_ms"] > one["collectives_ms"]
        assert one["prediction_error"] > -1
    for one in (helix, plain):
        assert one["local_experts_hit"] <= 4 <= one["experts_hit"] <= 6
    assert dcp["local_experts_hit"] == dcp["experts_hit"], "with ep=1 every expert is here"
    assert dcp["collectives_ms"] > helix["collectives_ms"], "it gathers queries, and merges in two collectives"
    assert picture.stat().st_size > 10_000
    assert any("cost model's" in line for line in lines[:-1])


def test_a_model_of_which_the_first_layers_were_run(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--card", "smollm2-135m", "--set", "model.num_layers=3", "--set", "model.dtype=float32"]
    chosen = ["--one-rank-of", "kvp=9", "--cells", "1x64", "--whole-from", "2", "--json"]
    with pytest.raises(SystemExit) as ended:
        main(["bench", "decode", *arguments, *chosen, *STEPS])
    assert ended.value.code == 0
    report = json.loads(capsys.readouterr().out)
    (one,) = report["timings"]
    whole = one["whole"]
    assert (report["num_layers"], whole["from_layers"], whole["num_layers"]) == (3, 2, 30)
    assert whole["collectives_ms"] > 5 * one["collectives_ms"]
    assert whole["predicted_ms"] > one["predicted_ms"]
    deep, shallow = (_report(3, 5.0, 27), _report(2, 4.0, 27))
    assert with_whole(deep, shallow).timings[0].whole == WholeModel(
        num_layers=27, from_layers=2, ttl_ms=5.0 + 24 * 1.0, collectives_ms=7.0, predicted_ms=9.0
    )
    assert with_whole(deep, replace(shallow, timings=())).timings[0].whole is None


def _report(num_layers: int, ttl_ms: float, whole: int) -> DecodeReport:
    timing = Timing(
        variant="kvp=2", layout="", one_rank=True, mode="eager", batch=1, context=64, ttl_ms=ttl_ms, low_ms=1.0,
        high_ms=9.0, first_ms=1.0, device_ms=None, collectives_ms=1.0, experts_hit=None, local_experts_hit=None,
        busiest_experts=None, read_bytes=1, ceiling_ms=None, predicted_ms=None,
        whole=WholeModel(num_layers=whole, from_layers=0, ttl_ms=0.0, collectives_ms=7.0, predicted_ms=9.0),
    )  # fmt: skip
    return DecodeReport(
        model="any", num_layers=num_layers, dtype="float32", device="cpu", torch="2", steps=2, same_token=False,
        hardware=None, timings=(timing,), skipped=(), start_up=None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["3"], "not None"),
        (["3", "--set", "model.num_layers=3"], "not 3"),
        (["1", "--set", "model.num_layers=4"], "kinds"),
    ],
)
def test_depths_that_are_refused(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "decode", "--card", "deepseek-r1", "--whole-from", *arguments])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def timed_on_ranks(world: World, task: DecodeTask) -> DecodeReport:
    return task.run(world)


def test_real_ranks(tiny: TinyModels, ranks: RankPool) -> None:
    config = make_config(model={"path": tiny.path("qwen3")}, cache={"num_page_rows": 20}, engine={"device": "cpu"})
    variants = read_variants(config, resolve_spec(config), "kvp=2,tpa=1;kvp=1,tpa=2", None)
    for variant in variants:
        task = DecodeTask(variant=variant, cells=(Cell(batch=2, context=300),), steps=2, warmup=1, same_token=False)
        (timing,) = ranks.run(2, timed_on_ranks, task)[0].timings
        assert timing.layout.startswith(variant.label.replace(",", " "))
        assert timing.collectives_ms == 0
        assert timing.ttl_ms > 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kvp", "is not key=value"),
        ("vkp=2", "kvp, tpa, tpf, ep, tp, dcp"),
        ("kvp=two", "whole numbers"),
        ("kvp=2,tp=4", "one pair or the other"),
        ("tp=4,dcp=3", "must divide"),
        ("kvp=2,merge=sum", "comm.merge"),
    ],
)
def test_variants_that_are_refused(tiny: TinyModels, text: str, words: str) -> None:
    config = make_config(model={"path": tiny.path("qwen3")})
    with pytest.raises(ConfigError, match=words):
        read_variants(config, resolve_spec(config), text, None)


def test_variants() -> None:
    config = make_config(model={"card": "deepseek-v2-lite", "load": "dummy"}, comm={"dispatch": "local"})
    spec = resolve_spec(config)
    found = read_variants(config, spec, "tp=8,ep=8; dcp=4", "kvp=8,exchange_space=value")
    assert [str(one.layout(spec)) for one in found] == [
        "kvp=1 tpa=8 tpf=1 ep=8 duplicate_kv",
        "kvp=4 tpa=1 tpf=4 ep=1",
        "kvp=8 tpa=1 tpf=8 ep=1",
    ]
    assert [one.one_rank for one in found] == [False, False, True]
    assert [one.config.comm.query for one in found] == ["auto", "gather", "auto"]
    assert [one.config.comm.exchange_space for one in found] == ["auto", "auto", "value"]
    assert {one.config.comm.dispatch for one in found} == {"local"}
    grouped = make_config(model={"card": "llama-3.1-405b", "load": "dummy"})
    (one,) = read_variants(grouped, resolve_spec(grouped), "tp=16,dcp=2", None)
    assert str(one.layout(resolve_spec(grouped))) == "kvp=2 tpa=8 tpf=16 ep=1"
    assert one.config.comm.query == "gather"


@pytest.fixture
def core(tiny: TinyModels) -> EngineCore:
    config = make_config(
        model={"path": tiny.path("deepseek_v2")},
        cache={"page_tokens": 4, "num_page_rows": 60, "prefix_reuse": False},
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
        for tensor in layer.tensors:
            tensor.fill_(torch.nan)
    fill_cache(core, 0)
    filled = [tensor for layer in core.cache.layers for tensor in layer.tensors]
    assert all(tensor.isfinite().all() and tensor.std() > 0.5 for tensor in filled)


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
