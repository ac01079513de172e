"""Llama 2, 3, 3.1 and what shares their architecture (SmolLM2, Yi, TinyLlama ...): ``model_type`` "llama"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from helix.model_spec import ModelSpec
from model_zoo.hf_config import ConfigReader, DenseDefaults, dense_spec

DEFAULTS = DenseDefaults(
    vocab_size=32000, hidden_size=4096, intermediate_size=11008, max_context=2048, bos_token_id=1, eos_token_id=2
)


def spec(hf: Mapping[str, Any]) -> ModelSpec:
    """`ModelSpec` of a raw ``config.json``. ``attention_bias`` is on all four projections of the attention.

    ``pretraining_tp`` needs nothing: it only split the products of the training run.

    Raises: CheckpointError for a setting that is wrong or not supported.
    """
    config = ConfigReader(hf)
    attention_bias = config.flag("attention_bias", False)
    return replace(
        dense_spec(config, "llama", DEFAULTS),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=config.flag("mlp_bias", False),
    )
