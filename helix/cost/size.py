"""Sizes of a whole model, unsharded: parameters, and bytes of KV cache per token. Integers only."""

from __future__ import annotations

from dataclasses import dataclass

from helix.model_spec import MLASpec, ModelSpec, MoESpec


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Parameters of a model: in all, and those that one token uses (all but the experts that are not chosen for it)."""

    total: int
    active: int


def parameter_count(spec: ModelSpec) -> ParameterCount:
    """Parameters of the `num_layers` layers, embedding, final norm and head; layers for multi-token prediction not.

    `active` counts the whole embedding and head, as model makers do when they publish it.
    """
    embeddings = spec.vocab_size * spec.hidden_size * (1 if spec.tie_embeddings else 2)
    attention = _latent_attention(spec, spec.mla) if spec.mla else _grouped_attention(spec)
    total = embeddings + spec.hidden_size + spec.num_layers * (attention + 2 * spec.hidden_size)
    moe = spec.moe
    if moe is None:
        total += spec.num_layers * _mlp(spec)
        return ParameterCount(total, total)
    num_dense = sum(moe.is_dense(layer) for layer in range(spec.num_layers))
    num_sparse = spec.num_layers - num_dense
    total += num_dense * _mlp(spec) + num_sparse * _experts(spec.hidden_size, moe)
    idle = (moe.num_experts - moe.experts_per_token) * 3 * spec.hidden_size * moe.expert_width
    return ParameterCount(total, total - num_sparse * idle)


def kv_bytes_per_token(spec: ModelSpec, value_bytes: int = 2) -> int:
    """Bytes that one token takes in the KV cache, over all layers and KV heads, with `value_bytes` for each value."""
    return spec.num_layers * spec.cache_values_per_token * value_bytes


def _grouped_attention(spec: ModelSpec) -> int:
    """Q, K, V and output projection, with biases and the norms of q and k."""
    q_width, kv_width = spec.num_heads * spec.head_dim, 2 * spec.num_kv_heads * spec.head_dim
    weights = spec.hidden_size * (2 * q_width + kv_width)
    biases = spec.qkv_bias * (q_width + kv_width) + spec.output_bias * spec.hidden_size
    return weights + biases + spec.qk_norm * 2 * spec.head_dim


def _latent_attention(spec: ModelSpec, mla: MLASpec) -> int:
    """Projections down to the latents and up from them, norms of the latents, output projection.

    With `qkv_bias` the projections down have a bias (a query projection without a latent has none).
    """
    q_width = spec.num_heads * (mla.nope_dim + mla.rope_dim)
    down_width = mla.kv_lora_rank + mla.rope_dim
    if mla.q_lora_rank is None:
        query, biased = spec.hidden_size * q_width, down_width
    else:
        query, biased = mla.q_lora_rank * (spec.hidden_size + 1 + q_width), down_width + mla.q_lora_rank
    up_width = spec.num_heads * (mla.nope_dim + mla.v_dim)
    latent = spec.hidden_size * down_width + mla.kv_lora_rank * (1 + up_width)
    output = spec.num_heads * mla.v_dim * spec.hidden_size + spec.output_bias * spec.hidden_size
    return query + latent + spec.qkv_bias * biased + output


def _mlp(spec: ModelSpec) -> int:
    """Gate, up and down projection of a layer without experts."""
    width, hidden = spec.intermediate_size, spec.hidden_size
    return 3 * hidden * width + spec.mlp_bias * (2 * width + hidden)


def _experts(hidden: int, moe: MoESpec) -> int:
    """Router, its correction bias, all routed experts and the shared one."""
    router = moe.num_experts * (hidden + moe.correction_bias)
    return router + 3 * hidden * (moe.num_experts * moe.expert_width + moe.shared_width)
