"""Model cards: each is read by its family's parser, names are checked, and the engine runs one on random weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from helix import cli
from helix.check import check
from helix.config import make_config
from helix.engine.build import resolve_spec
from helix.engine.engine import Engine
from helix.engine.sampling import SamplingParams
from helix.errors import ConfigError, RequestError
from helix.layout import Layout, legal_layouts
from helix.models import NUM_RANKS, describe, survey
from model_zoo import cards, load_spec
from model_zoo.cards import card_names, load_card, read_card

NAMES = (
    "deepseek-r1",
    "deepseek-v2",
    "deepseek-v2-lite",
    "deepseek-v3",
    "kimi-k2",
    "llama-3.1-405b",
    "llama-3.1-70b",
    "llama-3.1-8b",
    "mixtral-8x7b",
    "qwen3-235b-a22b",
    "qwen3-30b-a3b",
    "smollm2-135m",
)
SMALL: dict[str, Any] = {
    "model": {"card": "smollm2-135m", "load": "dummy", "num_layers": 2, "dtype": "float32"},
    "cache": {"page_tokens": 16, "num_page_rows": 20},
    "engine": {"device": "cpu"},
}


def test_names() -> None:
    assert card_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_card_is_complete(name: str) -> None:
    card = read_card(name)
    organisation, repository = card.source.removeprefix("config.json of ").split(" ")[0].split("/")
    assert organisation
    assert repository.lower().startswith(name.split("-")[0])
    assert card.checkpoint_dtype in ("bfloat16", "float8_e4m3fn")
    quantised = card.config.get("quantization_config", {}).get("quant_method") == "fp8"
    assert quantised == (card.checkpoint_dtype == "float8_e4m3fn")
    spec = load_card(name)
    assert spec == card.spec
    assert spec.model_type == card.config["model_type"]
    assert spec.dtype == "bfloat16"
    assert spec.eos_token_ids


def test_what_the_cards_say() -> None:
    r1, lite, kimi = load_card("deepseek-r1"), load_card("deepseek-v2-lite"), load_card("kimi-k2")
    assert replace(r1, model_type="") == replace(load_card("deepseek-v3"), model_type="")
    assert r1.moe is not None
    assert (r1.moe.num_groups, r1.moe.topk_groups, r1.moe.score, r1.moe.correction_bias) == (8, 4, "sigmoid", True)
    assert (r1.num_mtp_layers, kimi.num_mtp_layers) == (1, 0)
    assert lite.mla is not None
    assert lite.mla.q_lora_rank is None
    assert [load_card(name).num_kv_heads for name in ("llama-3.1-405b", "qwen3-235b-a22b", "smollm2-135m")] == [8, 4, 3]
    assert {load_card(name).cache_heads for name in NAMES if load_card(name).mla} == {1}


def test_card_equals_the_real_checkpoint(smollm2: Path) -> None:
    """The demo's checkpoint comes through another format, which rounds the epsilon to fp32 and stores fp32 weights."""
    real, card = load_spec(smollm2), load_card("smollm2-135m")
    assert real.norm_eps == pytest.approx(card.norm_eps)
    assert replace(real, norm_eps=card.norm_eps, dtype=card.dtype) == card


@pytest.mark.parametrize(
    ("name", "near"), [("deepseek_r1", "did you mean deepseek-r1"), ("Llama-3.1-8B", "did you mean llama-3.1-8b")]
)
def test_unknown_card_names_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=near):
        load_card(name)


def test_unknown_card_that_is_like_no_other() -> None:
    with pytest.raises(ConfigError, match=r"model\.card='zzz' is neither .* cards are deepseek-r1, .*model\.path"):
        load_card("zzz")
    with pytest.raises(ConfigError, match="neither a model card nor a checkpoint directory"):
        read_card("../cards/deepseek-r1")


def test_package_data_holds_every_card() -> None:
    folder = Path(cards.__file__).parent / "cards"
    assert {path.name for path in folder.iterdir()} == {f"{name}.yaml" for name in NAMES}
    assert all(isinstance(yaml.safe_load(path.read_text()), dict) for path in folder.iterdir())


# In a run's config


def test_a_card_needs_dummy_weights() -> None:
    with pytest.raises(
        ConfigError, match=r"model\.card=deepseek-r1 has no weights; set model\.load: dummy .*model\.path"
    ):
        resolve_spec(make_config(model={"card": "deepseek-r1"}))
    with pytest.raises(ConfigError, match="did you mean deepseek-r1"):
        resolve_spec(make_config(model="deepsek-r1"))


def test_num_layers_cuts_the_model() -> None:
    config = make_config(model={"card": "deepseek-r1", "load": "dummy", "num_layers": 8})
    assert resolve_spec(config) == replace(load_card("deepseek-r1"), num_layers=8)
    whole = make_config(model={"card": "deepseek-r1", "load": "dummy"})
    assert resolve_spec(whole).num_layers == 61


def test_engine_runs_a_card_on_token_ids() -> None:
    greedy = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    with Engine(SMALL) as engine:
        assert engine.tokenizer is None
        assert not engine.has_chat_template
        assert engine.eos_token_ids == {2}
        assert engine.spec.num_layers == 2
        first, again = engine.generate([[1, 2, 3], [1, 2, 3]], greedy)
        assert len(first.token_ids) == 6
        assert first.token_ids == again.token_ids
        assert first.text == ""
        assert engine.logits([5, 6]).shape == (2, 49152)
        with pytest.raises(RequestError, match="no tokenizer: pass token ids"):
            engine.generate("text")


# helix models


def test_survey() -> None:
    found = survey()
    assert [one.card for one in found] == list(NAMES)
    for one in found:
        assert [layouts.num_ranks for layouts in one.layouts] == list(NUM_RANKS)
        for layouts in one.layouts:
            legal = list(legal_layouts(load_card(one.card), layouts.num_ranks))
            assert layouts.count == len(legal) > 0
            assert layouts.example in legal
    r1, llama = describe("deepseek-r1"), describe("llama-3.1-405b")
    assert (r1.num_query_heads, r1.num_kv_heads, r1.latent, r1.kv_bytes_per_token) == (128, 1, True, 70272)
    assert (llama.num_query_heads, llama.num_kv_heads, llama.latent) == (128, 8, False)
    assert llama.layouts[2].example == Layout(kvp=8, tpa=8, tpf=64)
    assert [layouts.count for layouts in r1.layouts] == [4, 5, 7]


def test_models_command() -> None:
    result = CliRunner().invoke(cli.app, ["models", "--json"])
    assert result.exit_code == 0
    listed = json.loads(result.stdout.splitlines()[-1])["models"]
    assert [one["card"] for one in listed] == list(NAMES)
    kimi = next(one for one in listed if one["card"] == "kimi-k2")
    assert kimi["parameters"] == 1_026_408_232_448
    assert kimi["layouts"][1]["example"] == {"kvp": 16, "tpa": 1, "tpf": 1, "ep": 16, "duplicate_kv": False}
    table = CliRunner().invoke(cli.app, ["models"]).stdout
    assert all(any(line.split()[:1] == [name] for line in table.splitlines()) for name in NAMES)
    assert "671B" in table
    assert "1 latent" in table


def test_check_command_says_what_a_card_takes() -> None:
    found = check(make_config(SMALL, layout={"kvp": 3}))
    assert found.parameters.total == describe("smollm2-135m").parameters - 28 * (
        (describe("smollm2-135m").parameters - 49152 * 576 - 576) // 30
    )
    assert found.capacity_tokens == 20 * 16 * 3
