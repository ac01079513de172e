"""Qwen3-30B-A3B, Qwen3-235B-A22B and their kin: ``model_type`` "qwen3_moe". Qwen3's attention, experts by softmax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from helix.model_spec import ModelSpec, MoESpec
from model_zoo.hf_config import ConfigReader, DenseDefaults, dense_spec

DEFAULTS = DenseDefaults(
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    max_context=32768,
    num_layers=24,
    num_kv_heads=4,
)


def spec(hf: Mapping[str, Any]) -> ModelSpec:
    """`ModelSpec` of a raw ``config.json``. RMSNorm on every head of q and k; no shared expert.

    Layer i has experts unless ``mlp_only_layers`` names it or ``decoder_sparse_step`` does not divide i + 1.

    Raises: CheckpointError for a setting that is wrong or not supported, a sliding window among them.
    """
    config = ConfigReader(hf)
    dense = dense_spec(config, "qwen3_moe", DEFAULTS)
    if config.flag("use_sliding_window", False) and config.given("sliding_window"):
        raise config.error("use_sliding_window", True, "false: attention over a window is not supported")
    attention_bias = config.flag("attention_bias", False)
    dense_layers = _dense_layers(config, dense.num_layers)
    return replace(
        dense,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=True,
        moe=None if len(dense_layers) == dense.num_layers else _experts(config, dense_layers),
    )


def _experts(config: ConfigReader, dense_layers: tuple[int, ...]) -> MoESpec:
    num_experts = _num_experts(config)
    per_token = config.integer("num_experts_per_tok", 8)
    if per_token > num_experts:
        raise config.error("num_experts_per_tok", per_token, f"at most num_experts ({num_experts})")
    return MoESpec(
        num_experts=num_experts,
        experts_per_token=per_token,
        expert_width=config.integer("moe_intermediate_size", 768),
        normalise=config.flag("norm_topk_prob", False),
        dense_layers=dense_layers,
    )


def _num_experts(config: ConfigReader) -> int:
    """``num_experts``, which newer transformers write as ``num_local_experts``; if both are given they must agree."""
    older, newer = config.integer("num_experts", 128), config.integer("num_local_experts", 128)
    if config.given("num_experts") and config.given("num_local_experts") and older != newer:
        raise config.error("num_experts", older, f"{newer} as in num_local_experts, or left out")
    return older if config.given("num_experts") else newer


def _dense_layers(config: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """Layers with a plain MLP. Entries of ``mlp_only_layers`` beyond the last layer name none, as in transformers."""
    step = config.integer("decoder_sparse_step", 1)
    listed = config.values.get("mlp_only_layers") or []
    if not isinstance(listed, list) or any(isinstance(one, bool) or not isinstance(one, int) for one in listed):
        raise config.error("mlp_only_layers", listed, "a list of layer numbers or null")
    return tuple(layer for layer in range(num_layers) if layer in listed or (layer + 1) % step)
