"""DeepSeek-V2 and V2-Lite: ``model_type`` "deepseek_v2". Also what all families with latent attention (MLA) share.

The shared part is `latent_spec` (everything but the experts) and `experts_spec` (counts and widths of the experts); how
tokens choose experts is the family's own. Formulas are those of the modeling code that the checkpoints ship with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from helix.model_spec import MLASpec, ModelSpec, MoESpec, RotarySpec, yarn_mscale
from model_zoo.hf_config import ACTIVATIONS, ConfigReader, context_limit, fp8_block, rotary_spec, weight_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentDefaults:
    """What transformers' config class of a family with latent attention assumes for absent keys (None: nothing)."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    max_context: int
    num_layers: int
    num_heads: int
    bos_token_id: int
    eos_token_id: int
    num_experts: int
    num_shared_experts: int
    experts_per_token: int | None
    expert_width: int
    num_dense_layers: int
    num_groups: int | None
    topk_groups: int | None


DEFAULTS = LatentDefaults(
    vocab_size=102400,
    hidden_size=4096,
    intermediate_size=11008,
    max_context=2048,
    num_layers=32,
    num_heads=32,
    bos_token_id=1,
    eos_token_id=2,
    num_experts=64,
    num_shared_experts=2,
    experts_per_token=None,
    expert_width=1407,
    num_dense_layers=0,
    num_groups=None,
    topk_groups=None,
)


def spec(hf: Mapping[str, Any]) -> ModelSpec:
    """`ModelSpec` of a raw ``config.json``. Rotary pairs are always interleaved, scores are a softmax over all experts.

    ``norm_topk_prob`` follows the checkpoint's own code: weights that are normalised are not scaled by
    ``routed_scaling_factor``, and one expert a token is never normalised. transformers (5.24) does not read the key;
    it is false in every published V2 checkpoint, where both agree.

    Raises: CheckpointError for a setting that is wrong or not supported.
    """
    config = ConfigReader(hf)
    latent = latent_spec(config, "deepseek_v2", DEFAULTS, interleaved=True)
    latent = replace(latent, mlp_bias=config.flag("mlp_bias", False))
    experts = experts_spec(config, latent, DEFAULTS)
    if experts is None:
        return latent
    config.choice("scoring_func", "softmax", ("softmax",))
    method = config.choice("topk_method", "greedy", ("greedy", "group_limited_greedy"))
    if method == "group_limited_greedy":
        experts = with_groups(config, experts, DEFAULTS, "max")
    if config.flag("norm_topk_prob", False) and experts.experts_per_token > 1:
        experts = replace(experts, normalise=True)
    else:
        experts = replace(experts, scaling=config.number("routed_scaling_factor", 1.0))
    return replace(latent, moe=experts)


def latent_spec(config: ConfigReader, model_type: str, defaults: LatentDefaults, *, interleaved: bool) -> ModelSpec:
    """Everything of a latent-attention model but its experts.

    ``attention_bias`` is on the two down-projections and on the output projection, never on the up-projections.
    """
    mla = MLASpec(
        q_lora_rank=_or_none(config, "q_lora_rank", 1536),
        kv_lora_rank=config.integer("kv_lora_rank", 512),
        nope_dim=config.integer("qk_nope_head_dim", 128),
        rope_dim=config.integer("qk_rope_head_dim", 64, minimum=2),
        v_dim=config.integer("v_head_dim", 128),
    )
    max_positions = config.integer("max_position_embeddings", defaults.max_context)
    rotary = rotary_spec(config, mla.rope_dim, max_positions, interleaved=interleaved)
    num_heads = config.integer("num_attention_heads", defaults.num_heads)
    vocab_size = config.integer("vocab_size", defaults.vocab_size)
    bos = config.token_ids("bos_token_id", defaults.bos_token_id, vocab_size)
    attention_bias = config.flag("attention_bias", False)
    return ModelSpec(
        model_type=model_type,
        num_layers=config.integer("num_hidden_layers", defaults.num_layers),
        hidden_size=config.integer("hidden_size", defaults.hidden_size),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=mla.nope_dim + mla.rope_dim,
        intermediate_size=config.integer("intermediate_size", defaults.intermediate_size),
        vocab_size=vocab_size,
        max_context=context_limit(rotary, max_positions),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        rotary=rotary,
        activation=config.choice("hidden_act", "silu", ACTIVATIONS),
        tie_embeddings=config.flag("tie_word_embeddings", False),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        softmax_scale=softmax_scale(mla, rotary),
        dtype=weight_dtype(config),
        fp8_block=fp8_block(config),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=config.token_ids("eos_token_id", defaults.eos_token_id, vocab_size),
        mla=mla,
    )


def softmax_scale(mla: MLASpec, rotary: RotarySpec) -> float:
    """Factor on q.k: ``(nope + rope)^-0.5``, times ``m * m`` for YaRN with ``mscale_all_dim``, m its `yarn_mscale`.

    That is the part of YaRN's temperature that holds for the whole head; cos and sin carry the ratio of the mscale of
    ``mscale`` to this one.
    """
    scale: float = (mla.nope_dim + mla.rope_dim) ** -0.5
    all_dim = rotary.get("mscale_all_dim")
    if not all_dim:
        return scale
    correction = yarn_mscale(rotary.get("factor") or 1.0, all_dim)
    return scale * correction * correction


def experts_spec(config: ConfigReader, latent: ModelSpec, defaults: LatentDefaults) -> MoESpec | None:
    """Counts and widths of the experts; None where no layer has any.

    Layer i has experts from ``first_k_dense_replace`` on where ``moe_layer_freq`` divides i. Null for
    ``n_routed_experts`` or ``n_shared_experts`` means none, as in the checkpoints' own code.
    """
    num_experts = _or_none(config, "n_routed_experts", defaults.num_experts)
    first = config.integer("first_k_dense_replace", defaults.num_dense_layers, minimum=0)
    every = config.integer("moe_layer_freq", 1)
    sparse = [index for index in range(first, latent.num_layers) if index % every == 0]
    if num_experts is None or not sparse:
        return None
    width = config.integer("moe_intermediate_size", defaults.expert_width)
    shared = _or_none(config, "n_shared_experts", defaults.num_shared_experts, minimum=0) or 0
    per_token = config.integer("num_experts_per_tok", defaults.experts_per_token)
    if per_token > num_experts:
        raise config.error("num_experts_per_tok", per_token, f"at most n_routed_experts ({num_experts})")
    return MoESpec(
        num_experts=num_experts,
        experts_per_token=per_token,
        expert_width=width,
        shared_width=shared * width,
        num_dense_layers=first,
        dense_layers=tuple(index for index in range(first, latent.num_layers) if index % every),
    )


def with_groups(
    config: ConfigReader, experts: MoESpec, defaults: LatentDefaults, group_score: Literal["max", "top2_sum"]
) -> MoESpec:
    """`experts` chosen from the best ``topk_group`` of ``n_group`` equal groups, which `group_score` ranks."""
    groups = config.integer("n_group", defaults.num_groups)
    chosen = config.integer("topk_group", defaults.topk_groups)
    if experts.num_experts % groups:
        raise config.error("n_group", groups, f"a divisor of n_routed_experts ({experts.num_experts})")
    size = experts.num_experts // groups
    if group_score == "top2_sum" and size < 2:
        raise config.error("n_group", groups, f"at most {experts.num_experts // 2}: a group is ranked by two experts")
    if chosen > groups:
        raise config.error("topk_group", chosen, f"at most n_group ({groups})")
    if experts.experts_per_token > chosen * size:
        right = f"at most {chosen * size}, the experts of topk_group={chosen} groups of {size}"
        raise config.error("num_experts_per_tok", experts.experts_per_token, right)
    return replace(experts, num_groups=groups, topk_groups=chosen, group_score=group_score)


def _or_none(config: ConfigReader, key: str, default: int, *, minimum: int = 1) -> int | None:
    """An integer that a checkpoint turns off with null; an absent key takes the default."""
    if key in config.values and config.values[key] is None:
        return None
    return config.integer(key, default, minimum=minimum)
