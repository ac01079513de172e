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
from helix.layout import AttentionShard, Layout, Slice, attention_shard, padded_slice, scale_grid, uneven_slice
from helix.model_spec import MLASpec, ModelSpec, MoESpec

LayerKind: TypeAlias = Literal["dense", "sparse"]
Cut: TypeAlias = tuple[int, int, int]

FP8_BLOCK = (128, 128)
_SCALE_BYTES = 4
_ALIGNED_BYTES = 16  # rows of stacked experts are held in whole 16 bytes, see `helix.layers.moe.Experts`


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix on a rank, [outputs, inputs] and `bias` values beside it.

    `cuts` are the slices of checkpoint tensors that it is made of, as `scale_grid` reads them. FP8 weights hold those
    matrices in FP8 that pack, in blocks of `FP8_BLOCK`; the others, folded into queries and values, stay as activations
    are.
    """

    outputs: int
    inputs: int
    bias: int = 0
    cuts: tuple[Cut, ...] = ((0, 0, 0),)
    packs: bool = True

    @property
    def values(self) -> int:
        return self.outputs * self.inputs + self.bias

    def num_bytes(self, formats: Formats) -> float:
        """Bytes that are held, and read by a product: with the scales of FP8, repeated where slices cut blocks."""
        if formats.weights != "float8":
            return self.values * formats.weight_bytes
        if not self.packs:
            return float(self.values * formats.activation_bytes)
        rows, columns = scale_grid(FP8_BLOCK, self.cuts).shape(self.outputs, self.inputs)
        return float(self.outputs * self.inputs + _SCALE_BYTES * rows * columns + self.bias * formats.activation_bytes)

    def product_format(self, formats: Formats) -> str:
        """The format that its product runs in."""
        return formats.products if self.packs or formats.weights != "float8" else formats.activations


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


def attention_matrices(spec: ModelSpec, layout: Layout, choices: Choices, rank: int = 0) -> Mapping[str, Matrix]:
    """The attention matrices of `rank`, biases beside the products they belong to."""
    shard = attention_shard(spec, layout, rank)
    merged = shard.num_q if choices.merge == "gather" else shard.exchange_heads
    asked = merged if choices.query == "gather" else shard.num_q
    if spec.mla:
        valued = shard.num_q if choices.exchange_space == "value" else merged
        first = shard.out_start if choices.query == "gather" else shard.q_start
        return _latent_matrices(spec, spec.mla, shard, first, asked, valued, merged)
    return _grouped_matrices(spec, shard, asked, merged)


def _grouped_matrices(spec: ModelSpec, shard: AttentionShard, asked: int, merged: int) -> Mapping[str, Matrix]:
    width, hidden = spec.head_dim, spec.hidden_size
    outputs = (asked + 2 * shard.num_kv) * width
    cuts = [(shard.q_start * width, 0, 0)]
    cuts += [(shard.kv_start * width, (asked + part * shard.num_kv) * width, 0) for part in (0, 1)]
    return {
        "qkv": Matrix(outputs, hidden, spec.qkv_bias * outputs, tuple(cuts)),
        "out": _output(spec, shard, merged, width),
    }


def _latent_matrices(
    spec: ModelSpec, mla: MLASpec, shard: AttentionShard, first: int, asked: int, valued: int, merged: int
) -> Mapping[str, Matrix]:
    hidden, width, rank = spec.hidden_size, mla.nope_dim + mla.rope_dim, mla.q_lora_rank
    query = asked * width if rank is None else rank
    outputs = query + mla.kv_lora_rank + mla.rope_dim
    cuts = ((first * width if rank is None else 0, 0, 0), (0, query, 0))
    matrices = {"down": Matrix(outputs, hidden, spec.qkv_bias * outputs, cuts)}
    if rank is not None:
        matrices["query_up"] = Matrix(asked * width, rank, cuts=((first * width, 0, 0),))
    return matrices | {
        "key_up": Matrix(asked * mla.nope_dim, mla.kv_lora_rank, packs=False),
        "value_up": Matrix(valued * mla.v_dim, mla.kv_lora_rank, packs=False),
        "out": _output(spec, shard, merged, mla.v_dim),
    }


def _output(spec: ModelSpec, shard: AttentionShard, merged: int, width: int) -> Matrix:
    cuts = ((0, 0, shard.out_start * width),) if shard.out_stop > shard.out_start else ()
    return Matrix(spec.hidden_size, merged * width, spec.output_bias * spec.hidden_size, cuts)


def mlp_matrices(spec: ModelSpec, parts: int, width: int | None = None, index: int = 0) -> Mapping[str, Matrix]:
    """Part `index` of a gated MLP of `width` (default: the model's) that is cut over `parts` ranks."""
    hidden, bias = spec.hidden_size, int(spec.mlp_bias)
    cut = padded_slice(spec.intermediate_size if width is None else width, parts, index)
    rows, columns = _gated_cuts(cut, cut.padded)
    return {
        "gate_up": Matrix(2 * cut.padded, hidden, bias * 2 * cut.padded, rows),
        "down": Matrix(hidden, cut.padded, bias * hidden, columns),
    }


def expert_matrices(spec: ModelSpec, moe: MoESpec, tpf: int, activation_bytes: int, index: int) -> Mapping[str, Matrix]:
    """One expert's part `index` of `tpf` on a rank."""
    step = _ALIGNED_BYTES // activation_bytes
    cut = padded_slice(moe.expert_width, tpf, index)
    local = -(-cut.padded // step) * step
    rows, columns = _gated_cuts(cut, local)
    return {
        "gate_up": Matrix(2 * local, spec.hidden_size, cuts=rows),
        "down": Matrix(spec.hidden_size, local, cuts=columns),
    }


def _gated_cuts(cut: Slice, local: int) -> tuple[tuple[Cut, ...], tuple[Cut, ...]]:
    """Where the slices of gate and up, and that of down, begin; nothing where the slice is empty."""
    if not cut.size:
        return (), ()
    return ((cut.start, 0, 0), (cut.start, local, 0)), ((0, 0, cut.start),)


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
    dense = formats.activation_bytes
    counts = layer_counts(spec)
    share = 1.0 if num_layers is None else num_layers / spec.num_layers
    vocab = padded_slice(spec.vocab_size, vocab_parts or layout.num_ranks, 0).padded
    tables = 1 if spec.tie_embeddings else 2
    ffn_ranks = layout.tpf * layout.ep
    index = rank % ffn_ranks
    result = {
        "attention": spec.num_layers * _bytes(attention_matrices(spec, layout, choices, rank), formats),
        "mlp": counts["dense"] * _bytes(mlp_matrices(spec, ffn_ranks, index=index), formats),
        "norms": spec.num_layers * dense * norm_values(spec),
    }
    moe = spec.moe
    if moe is not None:
        at = layout.coords(rank)
        held = uneven_slice(moe.num_experts, layout.ep, at.ep_rank).size
        expert = expert_matrices(spec, moe, layout.tpf, dense, at.tpf_rank)
        result["experts"] = counts["sparse"] * held * _bytes(expert, formats)
        result["router"] = counts["sparse"] * moe.num_experts * (dense * spec.hidden_size + 4 * moe.correction_bias)
        if moe.shared_width:
            shared = mlp_matrices(spec, ffn_ranks, moe.shared_width, index)
            result["shared_experts"] = counts["sparse"] * _bytes(shared, formats)
    whole = {"embedding": float(dense * tables * vocab * spec.hidden_size)}
    scaled = {name: share * value for name, value in result.items()}
    scaled["norms"] += dense * spec.hidden_size
    return RankWeights(**scaled, **whole)


def _bytes(matrices: Mapping[str, Matrix], formats: Formats) -> float:
    return sum(one.num_bytes(formats) for one in matrices.values())
