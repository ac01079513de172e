"""Every file of configs/ passes `helix check`, fast, on a machine that could not run it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import yaml
from typer.testing import CliRunner

from helix import cli
from helix.check import check, rank_weight_bytes
from helix.comm.mesh import planning_mesh
from helix.config import load_config, make_config
from helix.engine.build import resolve_spec
from helix.layers.decoder import Decoder
from helix.layout import Layout
from helix.weights import weight_bytes
from model_zoo.cards import card_names

CONFIGS = Path(__file__).parents[2] / "configs"
LAYOUTS = {
    "deepseek-r1-h200x8": Layout(kvp=8, tpf=2, ep=4),
    "deepseek-r1-x64": Layout(kvp=64, tpf=8, ep=8),
    "deepseek-v2-lite-h200x2": Layout(kvp=2, tpf=2),
    "kimi-k2-x16": Layout(kvp=16, tpf=2, ep=8),
    "llama-3.1-405b-h200x8": Layout(tpa=8, tpf=8),
    "llama-3.1-405b-x64": Layout(kvp=8, tpa=8, tpf=64),
    "qwen3-235b-h200x8": Layout(kvp=2, tpa=4, tpf=2, ep=4),
}
# GiB of a GPU that the file's comment names, or that its name does.
MEMORY = {
    "deepseek-r1-h200x8": 139,
    "deepseek-r1-x64": 37,
    "deepseek-v2-lite-h200x2": 22,
    "kimi-k2-x16": 74,
    "llama-3.1-405b-h200x8": 139,
    "llama-3.1-405b-x64": 29,
    "qwen3-235b-h200x8": 139,
}


def test_every_file_is_here() -> None:
    cards = {path.stem for path in CONFIGS.glob("*.yaml")} - {"smollm2"}
    assert cards == set(LAYOUTS) == set(MEMORY)


@pytest.mark.parametrize("name", LAYOUTS)
def test_config_passes_check(name: str) -> None:
    config = load_config(CONFIGS / f"{name}.yaml")
    start = time.process_time()
    found = check(config)
    assert time.process_time() - start < 5, "all ranks and all layers, from a few of them"
    assert found.layout == LAYOUTS[name]
    assert found.padded_heads == 0
    assert max(found.weights_bytes) < 0.93 * MEMORY[name] * 2**30, "the cache needs room too"
    if found.num_page_rows is None:
        assert found.capacity_tokens is None
        assert "the weights do not fit in this machine's" in found.page_rows_from


@pytest.mark.parametrize("name", LAYOUTS)
def test_config_says_why_and_how_to_point_to_a_checkpoint(name: str) -> None:
    text = (CONFIGS / f"{name}.yaml").read_text()
    assert yaml.safe_load(text)["model"]["card"] in card_names()
    assert f"--config configs/{name}.yaml" in text
    assert "#   path: /path/to/" in text
    kvp, tpf = (next(line for line in text.splitlines() if line.startswith(f"  {key}:")) for key in ("kvp", "tpf"))
    assert "#" in kvp
    assert "#" in tpf or name == "llama-3.1-405b-h200x8", "tpf = N is the only choice there"


def test_check_command_where_the_weights_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=64 * 2**30))
    arguments = ["check", "--config", str(CONFIGS / "llama-3.1-405b-x64.yaml"), "--set", "engine.device=cpu"]
    shown = CliRunner().invoke(cli.app, arguments)
    assert shown.exit_code == 0
    assert "capacity         unknown here: the weights do not fit in this machine's cpu" in shown.stdout
    assert "405.9B parameters, 126 layers, 128 query heads, 8 KV heads" in shown.stdout
    found = json.loads(CliRunner().invoke(cli.app, [*arguments, "--json"]).stdout.splitlines()[-1])
    assert (found["num_page_rows"], found["capacity_tokens"]) == (None, None)
    assert found["parameters"]["total"] == 405_853_388_800
    assert len(found["weights_bytes"]) == 64
    sized = [*arguments, "--set", "cache.num_page_rows=100", "--json"]
    found = json.loads(CliRunner().invoke(cli.app, sized).stdout.splitlines()[-1])
    assert found["capacity_tokens"] == 100 * 64 * 8
    assert found["page_rows_from"] == "cache.num_page_rows"


@pytest.mark.parametrize(
    ("card", "layout"),
    [
        ("deepseek-r1", Layout(kvp=8, tpf=2, ep=4)),
        ("deepseek-v2-lite", Layout(kvp=7, tpf=1, ep=7)),
        ("qwen3-30b-a3b", Layout(kvp=2, tpa=2, tpf=2, ep=2)),
        ("smollm2-135m", Layout(kvp=2, tpa=3, tpf=6)),
    ],
    ids=str,
)
def test_one_layer_of_each_kind_stands_for_all(card: str, layout: Layout) -> None:
    config = make_config(model={"card": card, "load": "dummy", "num_layers": 5})
    spec = resolve_spec(config)
    for rank in range(layout.num_ranks):
        mesh, meta = planning_mesh(layout, rank), torch.device("meta")
        whole = Decoder(spec, mesh, config.comm, dtype=torch.bfloat16, device=meta)
        assert rank_weight_bytes(spec, layout, rank, config.comm, torch.bfloat16) == weight_bytes(whole)
