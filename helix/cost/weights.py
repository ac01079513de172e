"""Weights of one rank, matrix by matrix, exactly as the layers allocate them (padding and repeated parts included).

Integers only. The names are those by which `helix.cost.work` prices the products, so that what is held and what is read
come from one place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

from helix.cost.choices import Choices, Formats
from helix.layout import AttentionShard, Layout, attention_shard, padded_slice, uneven_slice
from helix.model_spec import MLASpec, ModelSpec, MoESpec

LayerKind: TypeAlias = Literal["dense", "sparse"]
Matrices: TypeAlias = Mapping[str, int]

_ALIGNED_BYTES = 16  # rows of stacked experts are held in whole 16 bytes, see `helix.layers.moe.Experts`


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWeights:
    """Bytes of weights on one rank by kind."""

    attention: float = 0.0
    experts: float = 0.0
    shared_experts: float = 0.0
    mlp: float = 0.0
    router: float = 0.0
    embedding: float = 0.0
    norms: float = 0.0

    @property
    def total(self) -> float:
        ffn = self.experts + self.shared_experts + self.mlp + self.router
        return self.attention + ffn + self.embedding + self.norms


def layer_counts(spec: ModelSpec) -> dict[LayerKind, int]:
    """How many layers there are of each kind."""
    dense = spec.num_layers if spec.moe is None else _dense_layers(spec.moe, spec.num_layers)
    return {"dense": dense, "sparse": spec.num_layers - dense}


@lru_cache(maxsize=256)
def _dense_layers(moe: MoESpec, num_layers: int) -> int:
    return sum(moe.is_dense(layer) for layer in range(num_layers))


def attention_matrices(spec: ModelSpec, layout: Layout, choices: Choices) -> Matrices:
    """Values of each attention matrix on a rank, biases beside the products they belong to."""
    shard = attention_shard(spec, layout, 0)
    merged = shard.num_q if choices.merge == "gather" else shard.exchange_heads
    asked = merged if choices.query == "gather" else shard.num_q
    if spec.mla:
        return _latent_matrices(
            spec, spec.mla, asked, shard.num_q if choices.exchange_space == "value" else merged, merged
        )
    return _grouped_matrices(spec, shard, asked, merged)


def _grouped_matrices(spec: ModelSpec, shard: AttentionShard, asked: int, merged: int) -> Matrices:
    width, hidden = spec.head_dim, spec.hidden_size
    outputs = (asked + 2 * shard.num_kv) * width
    return {
        "qkv": outputs * (hidden + spec.qkv_bias),
        "out": hidden * merged * width + spec.output_bias * hidden,
    }


def _latent_matrices(spec: ModelSpec, mla: MLASpec, asked: int, valued: int, merged: int) -> Matrices:
    hidden, width, rank = spec.hidden_size, mla.nope_dim + mla.rope_dim, mla.q_lora_rank
    outputs = (asked * width if rank is None else rank) + mla.kv_lora_rank + mla.rope_dim
    matrices = {"down": outputs * (hidden + spec.qkv_bias)}
    if rank is not None:
        matrices["query_up"] = asked * width * rank
    return matrices | {
        "key_up": asked * mla.nope_dim * mla.kv_lora_rank,
        "value_up": valued * mla.v_dim * mla.kv_lora_rank,
        "out": hidden * merged * mla.v_dim + spec.output_bias * hidden,
    }


def mlp_matrices(spec: ModelSpec, parts: int, width: int | None = None) -> Matrices:
    """Values of a gated MLP of `width` (default: the model's) that is cut over `parts` ranks."""
    hidden = spec.hidden_size
    local = padded_slice(spec.intermediate_size if width is None else width, parts, 0).padded
    bias = int(spec.mlp_bias)
    return {"gate_up": 2 * local * (hidden + bias), "down": hidden * (local + bias)}


def expert_values(spec: ModelSpec, moe: MoESpec, tpf: int, activation_bytes: int = 2) -> int:
    """Values of one expert's part on a rank."""
    step = _ALIGNED_BYTES // activation_bytes
    local = padded_slice(moe.expert_width, tpf, 0).padded
    return 3 * spec.hidden_size * (-(-local // step) * step)


def norm_values(spec: ModelSpec) -> int:
    """Values of one layer's norms."""
    values = 2 * spec.hidden_size
    if spec.mla:
        return values + spec.mla.kv_lora_rank + (spec.mla.q_lora_rank or 0)
    return values + spec.qk_norm * 2 * spec.head_dim


def rank_weights(
    spec: ModelSpec,
    layout: Layout,
    choices: Choices,
    formats: Formats,
    *,
    rank: int = 0,
    num_layers: int | None = None,
    vocab_parts: int | None = None,
) -> RankWeights:
    """Bytes of the weights of `rank`. Rank 0 holds the most: experts split unevenly, all else is padded.

    `num_layers` cuts a pipeline stage (the mean of the kinds of layers); `vocab_parts` is over how many ranks embedding
    and head are cut (default: all ranks of the layout).
    """
    weight, dense = formats.weight_bytes, formats.activation_bytes
    counts = layer_counts(spec)
    share = 1.0 if num_layers is None else num_layers / spec.num_layers
    vocab = padded_slice(spec.vocab_size, vocab_parts or layout.num_ranks, 0).padded
    tables = 1 if spec.tie_embeddings else 2
    ffn_ranks = layout.tpf * layout.ep
    result = {
        "attention": spec.num_layers * weight * sum(attention_matrices(spec, layout, choices).values()),
        "mlp": counts["dense"] * weight * sum(mlp_matrices(spec, ffn_ranks).values()),
        "norms": spec.num_layers * dense * norm_values(spec),
    }
    moe = spec.moe
    if moe is not None:
        ep_rank = layout.coords(rank).ep_rank
        held = uneven_slice(moe.num_experts, layout.ep, ep_rank).size
        result["experts"] = counts["sparse"] * held * weight * expert_values(spec, moe, layout.tpf, dense)
        result["router"] = counts["sparse"] * moe.num_experts * (dense * spec.hidden_size + 4 * moe.correction_bias)
        if moe.shared_width:
            shared = mlp_matrices(spec, ffn_ranks, moe.shared_width)
            result["shared_experts"] = counts["sparse"] * weight * sum(shared.values())
    whole = {"embedding": float(dense * tables * vocab * spec.hidden_size)}
    scaled = {name: share * value for name, value in result.items()}
    scaled["norms"] += dense * spec.hidden_size
    return RankWeights(**scaled, **whole)
