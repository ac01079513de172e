"""Qwen2 and Qwen2.5 (dense text models): ``model_type`` "qwen2"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from helix.model_spec import ModelSpec
from model_zoo.hf_config import ConfigReader, DenseDefaults, dense_spec, refuse_sliding_layers

DEFAULTS = DenseDefaults(
    vocab_size=151936, hidden_size=4096, intermediate_size=22016, max_context=32768, num_kv_heads=32
)


def spec(hf: Mapping[str, Any]) -> ModelSpec:
    """`ModelSpec` of a raw ``config.json``. Q, K and V always have a bias, the output projection never.

    Raises: CheckpointError for a setting that is wrong or not supported, a layer with a sliding window among them.
    """
    config = ConfigReader(hf)
    dense = dense_spec(config, "qwen2", DEFAULTS)
    refuse_sliding_layers(config, dense.num_layers)
    return replace(dense, qkv_bias=True)
