"""Traces of decode steps: valid files that name what ran, one for each rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from helix.bench.decode import Cell, place_requests
from helix.bench.trace import hidden_us, rank_path, read_events, trace_decode
from helix.cli import main
from helix.comm.world import World, single_world
from helix.config import make_config
from helix.engine.build import build_core, resolve_layout, resolve_spec
from tests.ranks import RankPool
from tests.tiny import TinyModels


def job(world: World, settings: dict[str, Any], path: Path) -> str:
    config = make_config(None, **settings)
    spec = resolve_spec(config)
    core = build_core(config, spec, resolve_layout(config, spec, world.size), world)
    assert place_requests(core, Cell(batch=5, context=40), 9) is not None
    written = trace_decode(core, path)
    assert written is not None
    core.world.group.all_gather(torch.zeros(world.size, 1), torch.zeros(1))
    return written.name


def settings(path: str, **sections: Any) -> dict[str, Any]:
    base = {
        "model": {"path": path},
        "cache": {"page_tokens": 4, "num_page_rows": 80},
        "engine": {"device": "cpu", "max_batch": 5},
    }
    return base | sections


def test_every_rank_writes_what_it_did(ranks: RankPool, tiny: TinyModels, tmp_path: Path) -> None:
    config = settings(tiny.path("deepseek_v2_moe"), layout={"kvp": 2}, comm={"overlap": 2})
    names = ranks.run(2, job, config, tmp_path / "out" / "trace.json")
    assert names == ["trace.rank0.json", "trace.rank1.json"]
    for name in names:
        events = read_events(tmp_path / "out" / name)
        spans = [event for event in events if event.get("cat") == "user_annotation"]
        count = {kind: sum(span["name"] == kind for span in spans) for kind in {span["name"] for span in spans}}
        # 3 steps and an eager one of 2 layers, the first of which is dense.
        assert (count["as run"], count["eager"]) == (3, 1)
        assert count["attention layer"] == 8
        assert count["mlp"] >= 4
        assert count["experts"] == 4
        for part in ("attention", "exchange"):
            assert [count[f"{part} chunk {chunk}"] for chunk in (0, 1)] == [8, 8]
        # The embedding's, and one behind attention and one behind the FFN of each layer.
        assert count["all_reduce over world"] == 4 * 5
        assert all(span["dur"] >= 0 and span["ph"] == "X" for span in spans)


def test_nothing_to_trace(tiny: TinyModels, tmp_path: Path) -> None:
    config = make_config(None, **settings(tiny.path("llama")))
    spec = resolve_spec(config)
    core = build_core(config, spec, resolve_layout(config, spec, 1), single_world(torch.device("cpu")))
    assert trace_decode(core, tmp_path / "trace.json") is None
    assert not list(tmp_path.iterdir())


def test_command_names_files_by_cell(tiny: TinyModels, tmp_path: Path) -> None:
    model = ["--set", f"model={{path: {tiny.path('llama')}}}", "--card", "smollm2-135m", "--cells", "1x50,2x60"]
    rest = ["--set", "engine.device=cpu", "--set", "cache.num_page_rows=40", "--steps", "2", "--warmup", "1"]
    with pytest.raises(SystemExit) as ended:
        main(["bench", "decode", *model, *rest, "--trace", str(tmp_path / "t.json")])
    assert ended.value.code == 0
    assert sorted(one.name for one in tmp_path.glob("t.*")) == ["t.1-x-50.json", "t.2-x-60.json"]
    assert any(event["name"] == "attention chunk 0" for event in read_events(tmp_path / "t.2-x-60.json"))


def test_names_of_files() -> None:
    assert rank_path(Path("a/t.json"), 0, 1) == Path("a/t.json")
    assert rank_path(Path("a/t.json"), 3, 8) == Path("a/t.rank3.json")


def kernel(start: float, stop: float, stream: int) -> dict[str, Any]:
    return {"cat": "kernel", "ts": start, "dur": stop - start, "args": {"stream": stream}}


@pytest.mark.parametrize(
    ("events", "want"),
    [
        ([], 0.0),
        ([kernel(0, 10, 1), kernel(10, 20, 2)], 0.0),
        ([kernel(0, 10, 1), kernel(4, 6, 2), kernel(5, 7, 2), kernel(9, 30, 3)], 4.0),
        ([kernel(0, 10, 1), kernel(5, 15, 1), {"cat": "cpu_op", "ts": 0, "dur": 50}], 0.0),
    ],
)
def test_time_that_streams_share(events: list[dict[str, Any]], want: float) -> None:
    assert hidden_us(json.loads(json.dumps(events))) == want
