"""`ModelSpec`: the architecture numbers of a model, as the checkpoint's config (or a model card) says them.

Pure data: layout, cost and planner compute from it without torch; the model zoo builds it from a Hugging Face
``config.json``. Names follow the field's usual ones; counts start with ``num_``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RotarySpec:
    """Rotary embedding settings: `kind` and the numbers that kind reads.

    `parameters` holds the checkpoint's own keys (``factor``, ``beta_fast``, ``mscale`` ...) as sorted pairs, so that
    the spec stays hashable. `dim` is the number of rotated values per head.
    """

    theta: float
    dim: int
    kind: Literal["default", "linear", "dynamic", "llama3", "yarn"] = "default"
    parameters: tuple[tuple[str, float | bool], ...] = ()
    interleaved: bool = False

    def get(self, key: str, default: float | None = None) -> float | None:
        """The value of one scaling key, or `default` where the checkpoint does not give it."""
        return dict(self.parameters).get(key, default)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Magnitude correction for a context stretched by `factor`: 0.1 * mscale * ln(factor) + 1 (YaRN, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MLASpec:
    """Multi-head latent attention: one latent KV head of `kv_lora_rank` + `rope_dim` values per token."""

    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESpec:
    """Mixture of experts; the first `num_dense_layers` layers and those of `dense_layers` have a plain MLP instead."""

    num_experts: int
    experts_per_token: int
    expert_width: int
    shared_width: int = 0
    score: Literal["softmax", "sigmoid"] = "softmax"
    num_groups: int = 1
    topk_groups: int = 1
    group_score: Literal["max", "top2_sum"] = "max"
    normalise: bool = False
    scaling: float = 1.0
    correction_bias: bool = False
    num_dense_layers: int = 0
    dense_layers: tuple[int, ...] = ()

    def is_dense(self, layer: int) -> bool:
        """Whether layer number `layer` has a plain MLP."""
        return layer < self.num_dense_layers or layer in self.dense_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Everything that decides the shape of a model's weights, its KV cache and its arithmetic.

    `fp8_block` is the size of the blocks that share a scale, where the checkpoint stores FP8 weights.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_context: int
    norm_eps: float
    rotary: RotarySpec
    activation: str = "silu"
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    softmax_scale: float | None = None
    dtype: str = "bfloat16"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = field(default=())
    mla: MLASpec | None = None
    moe: MoESpec | None = None
    num_mtp_layers: int = 0
    fp8_block: tuple[int, int] | None = None

    @property
    def attention_scale(self) -> float:
        """Factor on q.k before the softmax."""
        if self.softmax_scale is not None:
            return self.softmax_scale
        return float(self.head_dim**-0.5)

    @property
    def cache_heads(self) -> int:
        """Heads that the KV cache holds: 1 for MLA (every query head reads the one latent), K otherwise."""
        return 1 if self.mla else self.num_kv_heads

    @property
    def cache_values_per_token(self) -> int:
        """Values one layer's cache holds per token, over all KV heads (unsharded)."""
        if self.mla:
            return self.mla.kv_lora_rank + self.mla.rope_dim
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def exchange_width(self) -> int:
        """Width of one head's partial output where the attention itself leaves it."""
        return self.mla.kv_lora_rank if self.mla else self.head_dim
