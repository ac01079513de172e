"""Mixtral 8x7B and 8x22B: ``model_type`` "mixtral". Mistral's attention; experts, chosen by softmax, in every layer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from helix.model_spec import ModelSpec, MoESpec
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
NORM_EPS = 1e-5
ROPE_THETA = 1e6
EXPERT_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def spec(hf: Mapping[str, Any]) -> ModelSpec:
    """`ModelSpec` of a raw ``config.json``. ``intermediate_size`` is the width of one expert.

    With a ``sliding_window`` (null or absent: none) the context is cut to the window, up to which it hides nothing.

    Raises: CheckpointError for a setting that is wrong or not supported.
    """
    theta = {} if hf.get("rope_theta") is not None else {"rope_theta": ROPE_THETA}
    config = ConfigReader({**hf, **theta})
    dense = dense_spec(config, "mixtral", DEFAULTS)
    return replace(
        dense,
        max_context=_max_context(config, dense.max_context),
        norm_eps=config.number("rms_norm_eps", NORM_EPS),
        moe=_experts(config, dense.intermediate_size),
    )


def text_name(name: str) -> str:
    """The name that layers use for the tensor that the files call `name`: Mixtral has its own for the experts."""
    layer, found, part = name.partition(".block_sparse_moe.")
    if not found:
        return name
    for own, common in EXPERT_NAMES.items():
        part = part.replace(f".{own}.", f".{common}.")
    return f"{layer}.mlp.{part}"


def _experts(config: ConfigReader, width: int) -> MoESpec:
    num_experts = config.integer("num_local_experts", 8)
    per_token = config.integer("num_experts_per_tok", 2)
    if per_token > num_experts:
        raise config.error("num_experts_per_tok", per_token, f"at most num_local_experts ({num_experts})")
    return MoESpec(
        num_experts=num_experts,
        experts_per_token=per_token,
        expert_width=width,
        normalise=True,
    )


def _max_context(config: ConfigReader, full: int) -> int:
    if not config.given("sliding_window"):
        return full
    window = config.integer("sliding_window")
    if window < full:
        logger.warning(
            "sliding_window %d limits the context to as many tokens (not %d): windowed attention is not supported",
            window,
            full,
        )
    return min(window, full)
