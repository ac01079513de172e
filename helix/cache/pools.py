"""Page pools: the tensors that hold one rank's share of the KV cache, layer by layer.

A pool row of K is the `num_kv` local heads of one token. Page ids come from `PageAllocator`, the same on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from helix.kernels.fp8_cache import Fp8Rows
from helix.layout import Layout, attention_shard, cache_token_bytes
from helix.model_spec import ModelSpec

# A tensor of plain rows, or `Fp8Rows`; operations on pools take either.
Pool: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Pools of one layer: k_PBKD and v_PBKD for GQA; for MLA the one latent pool is both."""

    k: Pool
    v: Pool

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The distinct tensors behind both pools."""
        held: dict[int, Tensor] = {}
        for pool in (self.v, self.k):  # Where both are one pool, the keys are the whole of it.
            held |= {one.data_ptr(): one for one in (pool.tensors if isinstance(pool, Fp8Rows) else (pool,))}
        return tuple(held.values())


@dataclass(frozen=True, slots=True)
class KVCache:
    """This rank's pools, one `LayerCache` a layer."""

    layers: tuple[LayerCache, ...]
    num_rows: int
    page_tokens: int


def page_bytes(spec: ModelSpec, layout: Layout, page_tokens: int, itemsize: int, dense_itemsize: int = 2) -> int:
    """Bytes that one page row takes on one rank, over all layers; `dense_itemsize` is of what FP8 leaves as it is."""
    return spec.num_layers * page_tokens * int(cache_token_bytes(spec, layout, itemsize, dense_itemsize))


def build_cache(
    spec: ModelSpec,
    layout: Layout,
    rank: int,
    num_rows: int,
    page_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    dense_dtype: torch.dtype | None = None,
) -> KVCache:
    """Allocate the pools; memory is left as it comes, since no slot is read before it was written.

    With `dtype` float8_e4m3fn rows are `Fp8Rows`, whose values that stay as they are have `dense_dtype`.
    """
    num_kv = attention_shard(spec, layout, rank).num_kv

    def pool(heads: int, width: int, of: torch.dtype = dtype) -> Tensor:
        return torch.empty(num_rows, page_tokens, heads, width, dtype=of, device=device)

    def rows(heads: int, width: int, tail: int = 0) -> Fp8Rows:
        scale = pool(heads, 1, torch.float32)[..., 0]
        return Fp8Rows(pool(heads, width), scale, pool(heads, tail, dense_dtype or torch.bfloat16) if tail else None)

    def layer() -> LayerCache:
        fp8 = dtype is torch.float8_e4m3fn
        if spec.mla and fp8:
            both = rows(1, spec.mla.kv_lora_rank, spec.mla.rope_dim)
            return LayerCache(both, Fp8Rows(both.values_PBKD, both.scale_PBK))
        if spec.mla:
            latent = pool(1, spec.cache_values_per_token)
            return LayerCache(latent, latent[..., : spec.mla.kv_lora_rank])
        if fp8:
            return LayerCache(rows(num_kv, spec.head_dim), rows(num_kv, spec.head_dim))
        return LayerCache(pool(num_kv, spec.head_dim), pool(num_kv, spec.head_dim))

    return KVCache(tuple(layer() for _ in range(spec.num_layers)), num_rows, page_tokens)
