"""DeepSeek-V3 and R1 (V3.1 and Moonlight share the architecture): ``model_type`` "deepseek_v3".

Scores are sigmoids; a bias that training kept for balance is added to choose experts, not to weigh them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from helix.model_spec import ModelSpec
from model_zoo.deepseek_v2 import LatentDefaults, experts_spec, latent_spec, with_groups
from model_zoo.hf_config import ConfigReader

DEFAULTS = LatentDefaults(
    vocab_size=129280,
    hidden_size=7168,
    intermediate_size=18432,
    max_context=4096,
    num_layers=61,
    num_heads=128,
    bos_token_id=0,
    eos_token_id=1,
    num_experts=256,
    num_shared_experts=1,
    experts_per_token=8,
    expert_width=2048,
    num_dense_layers=3,
    num_groups=8,
    topk_groups=4,
)


def spec(hf: Mapping[str, Any]) -> ModelSpec:
    """`ModelSpec` of a raw ``config.json``. Raises: CheckpointError for a setting that is wrong or not supported."""
    return spec_as("deepseek_v3", ConfigReader(hf))


def spec_as(model_type: str, config: ConfigReader) -> ModelSpec:
    """`spec` of a model of this architecture that has a ``model_type`` of its own."""
    interleaved = config.flag("rope_interleave", True)
    latent = latent_spec(config, model_type, DEFAULTS, interleaved=interleaved)
    latent = replace(latent, num_mtp_layers=config.integer("num_nextn_predict_layers", 1, minimum=0))
    experts = experts_spec(config, latent, DEFAULTS)
    if experts is None:
        return latent
    config.choice("scoring_func", "sigmoid", ("sigmoid",))
    config.choice("topk_method", "noaux_tc", ("noaux_tc",))
    experts = replace(
        with_groups(config, experts, DEFAULTS, "top2_sum"),
        score="sigmoid",
        normalise=config.flag("norm_topk_prob", True),
        scaling=config.number("routed_scaling_factor", 2.5),
        correction_bias=True,
    )
    return replace(latent, moe=experts)


def skipped_tensors(spec: ModelSpec) -> tuple[str, ...]:
    """Patterns of checkpoint tensors that no layer reads: the multi-token prediction modules.

    They are stored as layers behind the last one. A checkpoint converted to another dtype may still hold the one of the
    original although its config says that there is none.
    """
    first = spec.num_layers
    return tuple(f"model.layers.{index}.*" for index in range(first, first + max(spec.num_mtp_layers, 1)))
