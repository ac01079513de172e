"""Memory of one rank by kind, and how many sequences fit. The rules are the engine's own (`helix.engine.build`)."""

from __future__ import annotations

from dataclasses import dataclass

from helix.cost.choices import Formats, Placement, Workload
from helix.cost.hardware import Hardware
from helix.cost.weights import RankWeights, rank_weights
from helix.layout import PageRule, attention_shard, cache_token_bytes, padded_slice
from helix.model_spec import ModelSpec

# Rows of the largest step: a prefill chunk. What is alive at once in a layer: residual, normed, projected, summed.
PREFILL_CHUNK = 2048
_LIVE_COPIES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on the fullest rank. `cache` is what the workload needs, `cache_limit` what the cache may take."""

    weights: RankWeights
    buffers: float
    reserved: float
    cache: float
    cache_limit: float
    largest_batch: int

    @property
    def fits(self) -> bool:
        return self.cache <= self.cache_limit

    @property
    def total(self) -> float:
        return self.weights.total + self.buffers + self.reserved + self.cache


def page_row_bytes(spec: ModelSpec, placement: Placement, formats: Formats, page_tokens: int) -> float:
    """Bytes that one page row takes on one rank over the layers of its stage (`helix.cache.pools.page_bytes`)."""
    each = cache_token_bytes(spec, placement.layout, formats.cache_bytes, formats.activation_bytes)
    return -(-spec.num_layers // placement.pp) * page_tokens * each


def memory(
    spec: ModelSpec,
    placement: Placement,
    formats: Formats,
    hardware: Hardware,
    workload: Workload,
    *,
    memory_fraction: float = 0.9,
) -> Memory:
    """Memory of the fullest rank for `workload`, and the largest batch of its context that fits.

    As in the engine, the cache may take `memory_fraction` of what weights and the device's own reserve leave; here the
    step's buffers are taken off too.
    """
    held = rank_weights(
        spec,
        placement.layout,
        placement.choices,
        formats,
        num_layers=None if placement.pp == 1 else -(-spec.num_layers // placement.pp),
        vocab_parts=placement.stage_ranks,
    )
    buffers = _buffers(spec, placement, formats, workload)
    left = hardware.memory_bytes - hardware.reserved_bytes - held.total - buffers
    limit = max(left, 0.0) * memory_fraction
    rows_each = PageRule(workload.page_tokens, placement.layout.kvp).rows_for(workload.context)
    each = rows_each * page_row_bytes(spec, placement, formats, workload.page_tokens)
    # A replica's ranks hold its own sequences; a pipeline stage holds those of all stages in flight.
    here = -(-workload.batch // placement.dp)
    return Memory(
        weights=held,
        buffers=buffers,
        reserved=float(hardware.reserved_bytes),
        cache=here * each,
        cache_limit=limit if left > 0 else -1.0,
        largest_batch=int(limit // each) * placement.dp if left > 0 else 0,
    )


def _buffers(spec: ModelSpec, placement: Placement, formats: Formats, workload: Workload) -> float:
    """Activations of a prefill chunk or of the batch, whichever is larger, and the fp32 logits of the batch."""
    rows = max(PREFILL_CHUNK, workload.batch)
    shard = attention_shard(spec, placement.layout, 0)
    query = shard.num_q * (spec.cache_values_per_token if spec.mla else spec.head_dim)
    ffn = 3 * padded_slice(spec.intermediate_size, placement.ffn_ranks, 0).padded
    widest = _LIVE_COPIES * spec.hidden_size + 2 * query + ffn
    return rows * widest * formats.activation_bytes + 2.0 * workload.batch * spec.vocab_size * 4
