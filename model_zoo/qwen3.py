"""Qwen3 (dense text models): ``model_type`` "qwen3"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from helix.model_spec import ModelSpec
from model_zoo.hf_config import ConfigReader, DenseDefaults, dense_spec, refuse_sliding_layers

DEFAULTS = DenseDefaults(
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=22016,
    max_context=32768,
    num_kv_heads=32,
    head_dim=128,
)


def spec(hf: Mapping[str, Any]) -> ModelSpec:
    """`ModelSpec` of a raw ``config.json``. RMSNorm on every head of q and k; ``head_dim`` is 128 unless given.

    Raises: CheckpointError for a setting that is wrong or not supported, a layer with a sliding window among them.
    """
    config = ConfigReader(hf)
    dense = dense_spec(config, "qwen3", DEFAULTS)
    refuse_sliding_layers(config, dense.num_layers)
    attention_bias = config.flag("attention_bias", False)
    return replace(dense, qkv_bias=attention_bias, output_bias=attention_bias, qk_norm=True)
