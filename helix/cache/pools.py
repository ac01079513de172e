"""Page pools: the tensors that hold one rank's share of the KV cache, layer by layer.

A pool row of K is the `num_kv` local heads of one token. Page ids come from `PageAllocator`, the same on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from helix.layout import Layout, attention_shard
from helix.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Pools of one layer: k_PBKD and v_PBKD for GQA; for MLA the one latent pool is both."""

    k: Tensor
    v: Tensor


@dataclass(frozen=True, slots=True)
class KVCache:
    """This rank's pools, one `LayerCache` a layer."""

    layers: tuple[LayerCache, ...]
    num_rows: int
    page_tokens: int


def page_bytes(spec: ModelSpec, layout: Layout, page_tokens: int, itemsize: int) -> int:
    """Bytes that one page row takes on one rank, over all layers."""
    shard = attention_shard(spec, layout, 0)
    values = spec.cache_values_per_token if spec.mla else 2 * shard.num_kv * spec.head_dim
    return spec.num_layers * page_tokens * values * itemsize


def build_cache(
    spec: ModelSpec,
    layout: Layout,
    rank: int,
    num_rows: int,
    page_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KVCache:
    """Allocate the pools; memory is left as it comes, since no slot is read before it was written."""
    num_kv = attention_shard(spec, layout, rank).num_kv

    def pool(heads: int, width: int) -> Tensor:
        return torch.empty(num_rows, page_tokens, heads, width, dtype=dtype, device=device)

    def layer() -> LayerCache:
        if spec.mla:
            latent = pool(1, spec.cache_values_per_token)
            return LayerCache(latent, latent[..., : spec.mla.kv_lora_rank])
        return LayerCache(pool(num_kv, spec.head_dim), pool(num_kv, spec.head_dim))

    return KVCache(tuple(layer() for _ in range(spec.num_layers)), num_rows, page_tokens)
