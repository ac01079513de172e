"""Specs and checkpoints of DeepSeek-V2, V3, Kimi-K2 and its wrapper: published configs, defaults, refusals, names."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV2Config, DeepseekV3Config

from helix.check import check
from helix.config import make_config
from helix.engine.build import skipped_line
from helix.engine.engine import Engine
from helix.errors import CheckpointError
from helix.model_spec import MLASpec, ModelSpec, MoESpec, RotarySpec
from model_zoo import load_spec, skipped_tensors, spec_from_config, text_names
from tests.tiny import DEEPSEEK_ROPE, TinyModels, prompt

YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}

V2_LITE = {
    "model_type": "deepseek_v2",
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 102400,
}
V2 = V2_LITE | {
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_group": 8,
    "n_routed_experts": 160,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 16.0,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
}
V3 = {
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": FP8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
KIMI_K2 = V3 | {
    "model_type": "kimi_k2",
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
KIMI_K25 = {
    "model_type": "kimi_k25",
    "bos_token_id": 163584,
    "dtype": "bfloat16",
    "eos_token_id": 163585,
    "text_config": {key: KIMI_K2[key] for key in KIMI_K2 if key not in ("torch_dtype", "quantization_config")},
    "tie_word_embeddings": False,
    "vision_config": {"model_type": "kimi_k25_vision"},
}


def test_deepseek_v2_lite() -> None:
    scaling = (
        ("beta_fast", 32),
        ("beta_slow", 1),
        ("factor", 40),
        ("mscale", 0.707),
        ("mscale_all_dim", 0.707),
        ("original_max_position_embeddings", 4096),
        ("truncate", True),
    )
    assert spec_from_config(V2_LITE) == ModelSpec(
        model_type="deepseek_v2",
        num_layers=27,
        hidden_size=2048,
        num_heads=16,
        num_kv_heads=16,
        head_dim=192,
        intermediate_size=10944,
        vocab_size=102400,
        max_context=163840,
        norm_eps=1e-6,
        rotary=RotarySpec(theta=10000.0, dim=64, kind="yarn", parameters=scaling, interleaved=True),
        softmax_scale=spec_from_config(V2_LITE).softmax_scale,
        bos_token_id=100000,
        eos_token_ids=(100001,),
        mla=MLASpec(q_lora_rank=None, kv_lora_rank=512, nope_dim=128, rope_dim=64, v_dim=128),
        moe=MoESpec(
            num_experts=64, experts_per_token=6, expert_width=1408, shared_width=2816, scaling=1.0, num_dense_layers=1
        ),
    )


def test_deepseek_v2() -> None:
    spec = spec_from_config(V2)
    assert spec.mla is not None
    assert spec.mla.q_lora_rank == 1536
    assert spec.moe == MoESpec(
        num_experts=160,
        experts_per_token=6,
        expert_width=1536,
        shared_width=3072,
        num_groups=8,
        topk_groups=3,
        scaling=16.0,
        num_dense_layers=1,
    )


def test_deepseek_v3() -> None:
    spec = spec_from_config(V3)
    assert (spec.num_layers, spec.num_heads, spec.hidden_size, spec.num_mtp_layers) == (61, 128, 7168, 1)
    assert spec.mla == MLASpec(q_lora_rank=1536, kv_lora_rank=512, nope_dim=128, rope_dim=64, v_dim=128)
    assert spec.moe == MoESpec(
        num_experts=256,
        experts_per_token=8,
        expert_width=2048,
        shared_width=2048,
        score="sigmoid",
        num_groups=8,
        topk_groups=4,
        group_score="top2_sum",
        normalise=True,
        scaling=2.5,
        correction_bias=True,
        num_dense_layers=3,
    )
    assert (spec.cache_heads, spec.cache_values_per_token, spec.exchange_width) == (1, 576, 512)
    assert (spec.qkv_bias, spec.output_bias, spec.mlp_bias, spec.tie_embeddings) == (False,) * 4
    assert spec.rotary.interleaved
    hash(spec)


def test_kimi_k2() -> None:
    spec = spec_from_config(KIMI_K2)
    assert (spec.model_type, spec.num_heads, spec.vocab_size, spec.max_context) == ("kimi_k2", 64, 163840, 131072)
    assert spec.rotary.theta == 50000.0
    assert (spec.rotary.get("beta_fast"), spec.rotary.get("factor")) == (1.0, 32.0)
    assert spec.moe == replace(
        _moe(V3), num_experts=384, num_groups=1, topk_groups=1, scaling=2.827, num_dense_layers=1
    )


def test_kimi_k25_is_kimi_k2_in_a_wrapper() -> None:
    spec = spec_from_config(KIMI_K25)
    assert spec == replace(spec_from_config(KIMI_K2), model_type="kimi_k25", fp8_block=None)
    tied = {key: value for key, value in KIMI_K25.items() if key != "tie_word_embeddings"}
    assert spec_from_config(tied).tie_embeddings, "as transformers has it where the key is absent"


@pytest.mark.parametrize(
    ("hf", "mscale"), [(V2_LITE, 0.707), (V2, 0.707), (V3, 1.0), (KIMI_K2 | {"rope_scaling": V3["rope_scaling"]}, 1.0)]
)
def test_softmax_scale_of_yarn(hf: dict[str, Any], mscale: float) -> None:
    """By hand: 192^-0.5 (0.1 mscale ln 40 + 1)^2, about 0.1147 for V2 and 0.1352 for V3."""
    scale = spec_from_config(hf).attention_scale
    assert scale == pytest.approx((0.1 * mscale * math.log(40) + 1) ** 2 / math.sqrt(192), rel=1e-12)
    assert scale == pytest.approx(0.1147 if mscale < 1 else 0.1352, abs=1e-4)


@pytest.mark.parametrize(
    "rope", [None, {"type": "linear", "factor": 4.0}, {"type": "yarn", "factor": 4.0, "mscale": 1.0}]
)
def test_softmax_scale_without_mscale_all_dim(rope: dict[str, Any] | None) -> None:
    assert spec_from_config(V3 | {"rope_scaling": rope}).attention_scale == 192**-0.5


CONFIGS = {"deepseek_v2": DeepseekV2Config, "deepseek_v3": DeepseekV3Config}


@pytest.mark.parametrize("model_type", CONFIGS)
def test_absent_keys_take_the_defaults_of_transformers(model_type: str) -> None:
    given = {"num_experts_per_tok": 2} if model_type == "deepseek_v2" else {}
    config = CONFIGS[model_type](**given)
    assert spec_from_config({"model_type": model_type} | given) == spec_from_config(config.to_dict())


@pytest.mark.parametrize("model_type", CONFIGS)
def test_configs_of_transformers(model_type: str, tmp_path: Path) -> None:
    changes = {
        "hidden_size": 96,
        "num_attention_heads": 6,
        "kv_lora_rank": 40,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "attention_bias": True,
        "first_k_dense_replace": 2,
        "num_experts_per_tok": 3,
        "max_position_embeddings": 512,
        "rope_parameters": dict(DEEPSEEK_ROPE),
        "dtype": "float32",
    }
    CONFIGS[model_type](**changes).save_pretrained(tmp_path)
    spec = load_spec(tmp_path)
    assert spec.mla == MLASpec(q_lora_rank=1536, kv_lora_rank=40, nope_dim=12, rope_dim=8, v_dim=10)
    assert (spec.head_dim, spec.rotary.dim, spec.max_context, spec.dtype) == (20, 8, 512, "float32")
    assert (spec.qkv_bias, spec.output_bias) == (True, True)
    assert spec.moe is not None
    assert (spec.moe.num_dense_layers, spec.moe.experts_per_token) == (2, 3)


def test_rotary_pairs_as_the_checkpoint_stores_them() -> None:
    assert not spec_from_config(V3 | {"rope_interleave": False}).rotary.interleaved
    assert spec_from_config(V2 | {"rope_interleave": False}).rotary.interleaved, "V2 does not read the key"


def test_normalised_weights_of_v2_are_not_scaled() -> None:
    scaled, normalised = _moe(V2), _moe(V2 | {"norm_topk_prob": True})
    assert (scaled.normalise, scaled.scaling) == (False, 16.0)
    assert (normalised.normalise, normalised.scaling) == (True, 1.0)
    one = _moe(V2 | {"norm_topk_prob": True, "num_experts_per_tok": 1})
    assert (one.normalise, one.scaling) == (False, 16.0)
    v3 = _moe(V3)
    assert (v3.normalise, v3.scaling) == (True, 2.5)


def test_layers_without_experts() -> None:
    assert spec_from_config(V3 | {"first_k_dense_replace": 61}).moe is None
    assert spec_from_config(V3 | {"n_routed_experts": None}).moe is None
    assert _moe(V3 | {"n_shared_experts": None}).shared_width == 0
    every_other = _moe(V3 | {"moe_layer_freq": 2, "num_hidden_layers": 8})
    assert (every_other.num_dense_layers, every_other.dense_layers) == (3, (3, 5, 7))


@pytest.mark.parametrize(
    ("hf", "changes", "message"),
    [
        (V2, {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'; it must be one of greedy, group_limited_greedy"),
        (V2, {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'; it must be one of softmax"),
        (V2, {"n_group": None}, "n_group is missing"),
        (V2, {"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
        (V3, {"scoring_func": "softmax"}, "scoring_func is 'softmax'; it must be one of sigmoid"),
        (V3, {"topk_method": "greedy"}, "topk_method is 'greedy'; it must be one of noaux_tc"),
        (V3, {"n_group": 7}, r"n_group is 7; it must be a divisor of n_routed_experts \(256\)"),
        (V3, {"n_group": 256}, "n_group is 256; it must be at most 128: a group is ranked by two experts"),
        (V3, {"topk_group": 9}, r"topk_group is 9; it must be at most n_group \(8\)"),
        (V3, {"topk_group": 1, "num_experts_per_tok": 33}, "num_experts_per_tok is 33; it must be at most 32"),
        (V3, {"num_experts_per_tok": 257}, r"num_experts_per_tok is 257; it must be at most n_routed_experts \(256\)"),
        (V3, {"kv_lora_rank": 0}, "kv_lora_rank is 0; it must be an integer of at least 1"),
        (V3, {"q_lora_rank": "1536"}, "q_lora_rank is '1536'; it must be an integer"),
        (V3, {"qk_rope_head_dim": 63}, "gives 63 rotary dims"),
        (
            V3,
            {"quantization_config": {"quant_method": "fp8"}},
            r"weight_block_size is None; it must be .* \[128, 128\]",
        ),
        (V3, {"quantization_config": {"quant_method": "awq"}}, "quant_method 'awq'"),
        (KIMI_K25, {"text_config": {"model_type": "llama"}}, "text_config.model_type is 'llama'"),
        (KIMI_K25, {"text_config": 3}, "text_config is 3; it must be an object"),
        (
            KIMI_K25,
            {"text_config": KIMI_K2 | {"quantization_config": {"quant_method": "compressed-tensors"}}},
            "quant_method 'compressed-tensors'",
        ),
        (KIMI_K25, {"quantization_config": {"quant_method": "compressed-tensors"}}, "'compressed-tensors'"),
    ],
)
def test_refusals_name_the_key(hf: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        spec_from_config(hf | changes)


def test_what_a_checkpoint_holds_besides_the_text_model() -> None:
    assert skipped_tensors(spec_from_config(V2)) == ()
    assert skipped_tensors(spec_from_config(V3)) == ("model.layers.61.*",)
    two = spec_from_config(V3 | {"num_nextn_predict_layers": 2})
    assert skipped_tensors(two) == ("model.layers.61.*", "model.layers.62.*")
    wrapped = spec_from_config(KIMI_K25)
    assert skipped_tensors(wrapped) == ("vision_tower.*", "mm_projector.*", "language_model.model.layers.61.*")
    rename = text_names(wrapped)
    assert rename is not None
    assert rename("language_model.model.norm.weight") == "model.norm.weight"
    assert rename("vision_tower.patch_embed.proj.weight") == "vision_tower.patch_embed.proj.weight"
    assert text_names(spec_from_config(V3)) is None


def test_one_line_for_all_that_is_skipped() -> None:
    names = ["a.1.x", "a.1.y", "vision.z"]
    line = skipped_line(names, ("a.1.*", "b.*", "vision.*"))
    assert line == "skipped 3 tensors of the checkpoint that the model does not use: a.1.* (2), vision.* (1)"


@pytest.mark.parametrize("wrapped", [False, True])
def test_checkpoint_with_vision_and_token_prediction(
    tiny: TinyModels, tmp_path: Path, caplog: pytest.LogCaptureFixture, wrapped: bool
) -> None:
    """Loads as the plain text model does, says what it skipped, and still refuses what it does not know."""
    plain = Path(tiny.path("deepseek_v3"))
    config, tensors = json.loads((plain / "config.json").read_text()), load_file(plain / "model.safetensors")
    extra = {"model.layers.2.eh_proj.weight": torch.zeros(3, 4), "model.layers.2.enorm.weight": torch.zeros(3)}
    whole = tensors | extra
    if wrapped:
        whole = {f"language_model.{name}": tensor for name, tensor in whole.items()}
        whole["vision_tower.encoder.blocks.0.wo.weight"] = torch.zeros(2)
        whole["mm_projector.proj.0.weight"] = torch.zeros(2)
        config = {"model_type": "kimi_k25", "text_config": config, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(whole, tmp_path / "model.safetensors")
    settings = {
        "model": {"path": str(tmp_path), "dtype": "float32"},
        "engine": {"device": "cpu"},
        "cache": {"page_tokens": 4, "num_page_rows": 20},
    }
    with caplog.at_level(logging.INFO), Engine(None, **settings) as engine:
        got = engine.logits(prompt(20)).numpy()
    np.testing.assert_allclose(got, tiny.logits("deepseek_v3", prompt(20)).numpy(), atol=1e-4, rtol=0)
    lines = [line for line in caplog.messages if "skipped" in line]
    assert len(lines) == 1
    assert f"skipped {4 if wrapped else 2} tensors" in lines[0]
    assert "model.layers.2.* (2)" in lines[0]
    assert ("vision_tower.* (1)" in lines[0]) == wrapped
    assert check(make_config(None, **settings), 3).layout.kvp == 3
    save_file(whole | {"model.layers.3.enorm.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\.enorm\.weight"):
        Engine(None, **settings)


def _moe(hf: dict[str, Any]) -> MoESpec:
    moe = spec_from_config(hf).moe
    assert moe is not None
    return moe
