"""Sizes of whole models: published parameter counts, transformers' own counts, and bytes of KV cache."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from helix.cost.size import kv_bytes_per_token, parameter_count
from model_zoo import spec_from_config
from model_zoo.cards import card_names, load_card
from tests.tiny import FAMILIES

# Totals as the checkpoints' safetensors metadata gives them; DeepSeek-V3 and R1 without their layer for multi-token
# prediction. Active parameters in billions as the makers give them, and how exactly they do.
PUBLISHED = {
    "deepseek-r1": (671_026_419_200, 37, 1.0),
    "deepseek-v2": (235_741_434_880, 21, 1.0),
    "deepseek-v2-lite": (15_706_484_224, 2.66, 0.01),
    "deepseek-v3": (671_026_419_200, 37, 1.0),
    "kimi-k2": (1_026_408_232_448, 32, 1.0),
    "llama-3.1-405b": (405_853_388_800, 405.85, 0.01),
    "llama-3.1-70b": (70_553_706_496, 70.55, 0.01),
    "llama-3.1-8b": (8_030_261_248, 8.03, 0.01),
    "mixtral-8x7b": (46_702_792_704, 12.9, 0.05),
    "qwen3-235b-a22b": (235_093_634_560, 22.2, 0.05),
    "qwen3-30b-a3b": (30_532_122_624, 3.3, 0.06),
    "smollm2-135m": (134_515_008, 0.1345, 0.0001),
}


def test_every_card_is_compared() -> None:
    assert set(PUBLISHED) == set(card_names())


@pytest.mark.parametrize("card", PUBLISHED)
def test_published_counts(card: str) -> None:
    total, active, margin = PUBLISHED[card]
    count = parameter_count(load_card(card))
    assert count.total == total
    assert active - margin <= count.active / 1e9 <= active + margin


def transformers_count(config: Any) -> int:
    """Parameters of the model that transformers builds; a correction bias is a buffer there and a weight on disk."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    stored = {id(parameter): parameter.numel() for parameter in model.parameters()}
    biases = [buffer.numel() for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    return sum(stored.values()) + sum(biases)


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers(family: str) -> None:
    config = FAMILIES[family]()
    assert parameter_count(spec_from_config(json.loads(config.to_json_string()))).total == transformers_count(config)


@pytest.mark.parametrize("q_lora_rank", [None, 20])
@pytest.mark.parametrize("tied", [False, True])
def test_latent_attention_equals_transformers(q_lora_rank: int | None, tied: bool) -> None:
    config = transformers.DeepseekV3Config(
        hidden_size=48,
        intermediate_size=50,
        num_hidden_layers=3,
        vocab_size=97,
        num_attention_heads=6,
        num_key_value_heads=6,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=24,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=10,
        attention_bias=True,
        tie_word_embeddings=tied,
        n_routed_experts=8,
        n_shared_experts=2,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=3,
        moe_intermediate_size=11,
        first_k_dense_replace=1,
    )
    assert parameter_count(spec_from_config(json.loads(config.to_json_string()))).total == transformers_count(config)


def test_active_leaves_out_the_experts_that_are_not_chosen() -> None:
    spec = load_card("deepseek-v3")
    assert spec.moe is not None
    count = parameter_count(spec)
    assert count.total - count.active == 58 * (256 - 8) * 3 * 7168 * 2048
    every = parameter_count(replace(spec, moe=replace(spec.moe, experts_per_token=256)))
    assert every.active == every.total == count.total
    dense = parameter_count(replace(spec, num_layers=3))
    assert dense.active == dense.total, "the first three layers have no experts"


@pytest.mark.parametrize(
    ("card", "values"),
    [
        ("deepseek-r1", 61 * 576),
        ("kimi-k2", 61 * 576),
        ("llama-3.1-405b", 126 * 2 * 8 * 128),
        ("qwen3-235b-a22b", 94 * 2 * 4 * 128),
        ("smollm2-135m", 30 * 2 * 3 * 64),
    ],
)
def test_kv_bytes(card: str, values: int) -> None:
    spec = load_card(card)
    assert kv_bytes_per_token(spec) == 2 * values
    assert kv_bytes_per_token(spec, value_bytes=1) == values


def test_needs_no_torch() -> None:
    code = "import sys, helix.cost.size; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
