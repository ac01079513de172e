"""Mistral 7B, Nemo, Small, Large (dense text models): ``model_type`` "mistral"."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from helix.model_spec import ModelSpec
from model_zoo.hf_config import ConfigReader, DenseDefaults, dense_spec

logger = logging.getLogger(__name__)

DEFAULTS = DenseDefaults(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=14336,
    max_context=131072,
    num_kv_heads=8,
    bos_token_id=1,
    eos_token_id=2,
)
DEFAULT_WINDOW = 4096


def spec(hf: Mapping[str, Any]) -> ModelSpec:
    """`ModelSpec` of a raw ``config.json``.

    With a ``sliding_window`` (an absent key means 4096, null means none) the context is cut to the window: up to there
    the window hides nothing, so results are exact.

    Raises: CheckpointError for a setting that is wrong or not supported.
    """
    config = ConfigReader(hf)
    full = dense_spec(config, "mistral", DEFAULTS)
    if "sliding_window" in hf and hf["sliding_window"] is None:
        return full
    window = config.integer("sliding_window", DEFAULT_WINDOW)
    if window >= full.max_context:
        return full
    logger.warning(
        "sliding_window %d limits the context to as many tokens (instead of %d): windowed attention is not supported",
        window,
        full.max_context,
    )
    return replace(full, max_context=window)
