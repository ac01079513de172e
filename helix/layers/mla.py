"""Multi-head latent attention (MLA) in the Helix layout: the cache is one latent per token, cut over all KVP ranks.

Absorbed form, for decode. W_UK is folded into the queries, so that all heads attend over one "KV head" of L + R values,
whose first L are its value too; the result is a latent per head, which W_UV turns into a value after the exchange
(``exchange_space: latent``, L wide) or before it (``value``, V wide, with W_UV of all heads on every rank).

Expanded form, for long chunks. The rank's latents become keys and values of every head; the exchange is V wide.

Queries of all heads are computed on every rank (``query: replicate``), or each rank computes those of its own share of
heads and the KVP group gathers them (``gather``). The expanded form needs both up-projections of all heads: what a rank
does not hold is gathered too, a fixed cost that long chunks bear.

Letters: T tokens, C model width, H heads of the KVP group, h this rank's share of them (padded), G heads that a rank
computes queries of (H or h), N width of a head's part without position, R of its rotary part, Q = N + R, L latent
width, V value width, W = L + R.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from helix.cache.pools import LayerCache
from helix.comm.group import Group
from helix.comm.mesh import Mesh
from helix.config import CommConfig
from helix.cost.latent import expand_from
from helix.kernels import absorb, apply_rotary, attend, head_linear, store_latents
from helix.kernels.expanded import attend_expanded
from helix.kernels.fp8_cache import Fp8Rows
from helix.layers.batch import Batch
from helix.layers.exchange import Exchange, gather_heads
from helix.layers.linear import Linear
from helix.layers.norm import RMSNorm
from helix.layers.overlap import Chunk, Overlap, attend_and_exchange, cut
from helix.layers.projection import SharedProjection
from helix.layout import Slice, attention_shard
from helix.model_spec import MLASpec, ModelSpec
from helix.weights import Piece, cols, rows, whole

# The norms of the two latents keep this epsilon whatever rms_norm_eps is, in DeepSeek's code and in transformers.
LATENT_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class MLAWays:
    """How queries are made and in which space partial results are exchanged; see the module's text."""

    query: Literal["replicate", "gather"]
    exchange_space: Literal["latent", "value"]


def resolve_ways(comm: CommConfig) -> MLAWays:
    """The ways that `comm` asks for. "auto" takes no gather of queries, and the exchange that repeats no weights."""
    return MLAWays(
        query="replicate" if comm.query == "auto" else comm.query,
        exchange_space="latent" if comm.exchange_space == "auto" else comm.exchange_space,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The sequences of a step that take one form, as `attend` reads them; `token_index_T` None means all tokens."""

    expanded: bool
    token_index_T: Tensor | None
    page_table_SM: Tensor
    query_start_S1: Tensor
    visible_len_T: Tensor


def split_by_form(batch: Batch, threshold: int | None) -> tuple[Part, ...]:
    """The step as one part or two: sequences with at least `threshold` tokens are expanded, the others absorbed.

    Depends on nothing that differs between ranks, and asks the device nothing.
    """
    long = [threshold is not None and count >= threshold for count in batch.counts_S]
    if all(long) or not any(long):
        return (_whole(batch, expanded=any(long)),)
    return tuple(_select(batch, [one == expanded for one in long], expanded) for expanded in (False, True))


def _whole(batch: Batch, *, expanded: bool) -> Part:
    return Part(
        expanded=expanded,
        token_index_T=None,
        page_table_SM=batch.page_table_SR,
        query_start_S1=batch.query_start_S1,
        visible_len_T=batch.visible_len_T,
    )


def _select(batch: Batch, chosen: list[bool], expanded: bool) -> Part:
    """The sequences that `chosen` marks, as a step of their own."""
    device = batch.position_T.device
    starts = accumulate(batch.counts_S, initial=0)
    runs = [run for run, take in zip(pairwise(starts), chosen, strict=True) if take]
    index_T = torch.cat([torch.arange(first, last, device=device) for first, last in runs])
    counts = torch.tensor([0, *(last - first for first, last in runs)], device=device)
    return Part(
        expanded=expanded,
        token_index_T=index_T,
        page_table_SM=batch.page_table_SR[torch.tensor(chosen, device=device)],
        query_start_S1=counts.cumsum(0),
        visible_len_T=batch.visible_len_T[index_T],
    )


class LatentInputs(nn.Module):
    """From hidden states to the queries of `heads`, and to every token's latent in the cache.

    Both down-projections are one product, which `share` may cut over the KVP group. Without a query latent
    (``q_lora_rank`` null) ``q_proj`` takes the place of the query's down-projection.
    """

    def __init__(
        self,
        name: str,
        spec: ModelSpec,
        mla: MLASpec,
        heads: Slice,
        share: SharedProjection,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.mla = mla
        self.interleaved = spec.rotary.interleaved
        hidden, width, rank = spec.hidden_size, mla.nope_dim + mla.rope_dim, mla.q_lora_rank
        self.latent_width = mla.kv_lora_rank + mla.rope_dim
        self.query_width = heads.padded * width if rank is None else rank
        span = (spec.num_heads * width, heads.start * width, heads.stop * width)
        kv_name = f"{name}.kv_a_proj_with_mqa"
        bias = [whole(f"{kv_name}.bias", (self.latent_width,), self.query_width)] if spec.qkv_bias else []
        self.q_norm: RMSNorm | None = None
        self.q_up: Linear | None = None
        if rank is None:
            query = rows(f"{name}.q_proj.weight", (span[0], hidden), *span[1:])
        else:
            query = whole(f"{name}.q_a_proj.weight", (rank, hidden))
            bias += [whole(f"{name}.q_a_proj.bias", (rank,))] if spec.qkv_bias else []
            self.q_norm = RMSNorm(f"{name}.q_a_layernorm", rank, LATENT_NORM_EPS, dtype=dtype, device=device)
            up = rows(f"{name}.q_b_proj.weight", (span[0], rank), *span[1:])
            self.q_up = Linear(heads.padded * width, rank, (up,), dtype=dtype, device=device)
        self.down = Linear(
            self.query_width + self.latent_width,
            hidden,
            (query, whole(f"{kv_name}.weight", (self.latent_width, hidden), self.query_width)),
            tuple(bias),
            dtype=dtype,
            device=device,
        )
        norm_name = f"{name}.kv_a_layernorm"
        self.kv_norm = RMSNorm(norm_name, mla.kv_lora_rank, LATENT_NORM_EPS, dtype=dtype, device=device)
        self.share = share

    def forward(self, x_TC: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [T, G, Q], not rotated yet, and raw latents [T, W] for `store`."""
        query, latent_TW = self.share(self.down, x_TC).split((self.query_width, self.latent_width), dim=-1)
        if self.q_norm is not None and self.q_up is not None:
            query = self.q_up(self.q_norm(query))
        return query.unflatten(-1, (-1, self.mla.nope_dim + self.mla.rope_dim)), latent_TW

    def store(
        self, latent_TW: Tensor, rotary: tuple[Tensor, Tensor], pool_PB1W: Tensor | Fp8Rows, slot_T: Tensor
    ) -> None:
        """Norm the latents, rotate the part that all heads share, and append both to this rank's pages."""
        weight, eps = self.kv_norm.weight, self.kv_norm.eps
        store_latents(latent_TW, weight, eps, rotary, pool_PB1W, slot_T, interleaved=self.interleaved)


class UpProjection(nn.Module):
    """W_UK [G, N, L] or W_UV [G, V, L]: for each of `heads`, its rows of ``kv_b_proj`` [H (N + V), L].

    `group` is given where each of its ranks holds its own share of the heads, and None where this one holds them all.
    """

    def __init__(
        self,
        name: str,
        spec: ModelSpec,
        mla: MLASpec,
        part: Literal["key", "value"],
        heads: Slice,
        group: Group | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        head_rows = mla.nope_dim + mla.v_dim
        first, width = (0, mla.nope_dim) if part == "key" else (mla.nope_dim, mla.v_dim)
        size = (heads.padded, width, mla.kv_lora_rank)
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)
        shape = (spec.num_heads * head_rows, mla.kv_lora_rank)
        starts = [head * head_rows + first for head in range(heads.start, heads.stop)]
        pieces = [
            rows(f"{name}.kv_b_proj.weight", shape, start, start + width, select=(place,))
            for place, start in enumerate(starts)
        ]
        # A rank without a head reads nothing, but knows the tensor.
        self.declared = {"weight": tuple(pieces or [rows(f"{name}.kv_b_proj.weight", shape, 0, 0, select=(0,))])}
        self.group = group

    def of_all_heads(self, num_heads: int) -> Tensor:
        """The weight of all `num_heads` heads of the group, gathered where ranks hold shares."""
        return self.weight if self.group is None else gather_heads(self.group, self.weight, num_heads, 0)


class MLA(nn.Module):
    """One layer's latent attention on one rank.

    Every rank makes every token's latent (the down-projections are repeated across KVP, which spares a gather, but for
    long chunks: see `SharedProjection`); the output projection holds the columns of the rank's own heads after the
    exchange.
    """

    def __init__(
        self, name: str, spec: ModelSpec, mesh: Mesh, comm: CommConfig, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        if spec.mla is None:
            raise ValueError(f"{spec.model_type} has no latent attention")
        self.mla = mla = spec.mla
        self.scale = spec.attention_scale
        self.ways = resolve_ways(comm)
        self.threshold = expand_from(mla)
        shard = attention_shard(spec, mesh.layout, mesh.rank)
        self.num_heads = shard.num_q
        every = Slice(shard.q_start, shard.q_stop, shard.num_q, spec.num_heads)
        share = Slice(shard.out_start, shard.out_stop, shard.exchange_heads, spec.num_heads)
        gathers, values = self.ways.query == "gather", self.ways.exchange_space == "value"
        asked, valued = share if gathers else every, every if values else share
        # Without a query latent the first product makes the queries too: of other heads on each rank, if gathered.
        differs = gathers and mla.q_lora_rank is None
        share_rows = SharedProjection(mesh.kvp, "off" if differs else comm.shared_projections)
        self.inputs = LatentInputs(name, spec, mla, asked, share_rows, dtype=dtype, device=device)
        key_group, value_group = mesh.kvp if gathers else None, None if values else mesh.kvp
        self.w_uk = UpProjection(name, spec, mla, "key", asked, key_group, dtype=dtype, device=device)
        self.w_uv = UpProjection(name, spec, mla, "value", valued, value_group, dtype=dtype, device=device)
        hidden, v_width = spec.hidden_size, mla.v_dim
        out_shape = (hidden, spec.num_heads * v_width)
        columns = cols(f"{name}.o_proj.weight", out_shape, share.start * v_width, share.stop * v_width)
        self.out = Linear(hidden, share.padded * v_width, (columns,), dtype=dtype, device=device)
        self.out_bias: nn.Parameter | None = None
        self.declared: dict[str, tuple[Piece, ...]] = {}
        if spec.output_bias:
            self.out_bias = nn.Parameter(torch.empty(hidden, dtype=dtype, device=device), requires_grad=False)
            self.declared["out_bias"] = (whole(f"{name}.o_proj.bias", (hidden,)),)
        self.exchange = Exchange(mesh.kvp, shard.exchange_heads, comm.merge)
        self.kvp, self.group = mesh.kvp, mesh.world

    def forward(self, x_TC: Tensor, batch: Batch, cache: LayerCache, rotary: tuple[Tensor, Tensor]) -> Tensor:
        q_TGQ, latent_TW = self.inputs(x_TC)
        self.inputs.store(latent_TW, rotary, cache.k, batch.slot_T)
        parts = split_by_form(batch, self.threshold)
        outs = [self._attend(part, q_TGQ, cache, rotary, batch.overlap) for part in parts]
        out_ThV = outs[0]
        if len(parts) > 1:
            out_ThV = out_ThV.new_empty(x_TC.shape[0], *out_ThV.shape[1:])
            for part, one in zip(parts, outs, strict=True):
                out_ThV[part.token_index_T] = one
        y_TC = self.group.all_reduce(self.out(out_ThV.flatten(1)))
        return y_TC if self.out_bias is None else y_TC + self.out_bias

    def _attend(
        self, part: Part, q_TGQ: Tensor, cache: LayerCache, rotary: tuple[Tensor, Tensor], overlap: Overlap
    ) -> Tensor:
        """Values of this rank's heads [T, h, V] for the tokens of `part`."""
        if part.token_index_T is not None:
            q_TGQ = q_TGQ[part.token_index_T]
            rotary = (rotary[0][part.token_index_T], rotary[1][part.token_index_T])
        interleaved = self.inputs.interleaved
        if not part.expanded:
            q_TGW = absorb(q_TGQ, self.w_uk.weight, rotary, interleaved=interleaved)
            return self._absorbed(part, q_TGW, cache, overlap)
        q_TGQ = apply_rotary(q_TGQ, *rotary, interleaved=interleaved, start=self.mla.nope_dim)
        return self._expanded(part, q_TGQ, cache)

    def _absorbed(self, part: Part, q_TGW: Tensor, cache: LayerCache, overlap: Overlap) -> Tensor:
        q_THW = self._queries_of_all_heads(q_TGW)
        values_first = self.ways.exchange_space == "value"

        def attend_chunk(chunk: Chunk) -> tuple[Tensor, Tensor]:
            out_THL, lse_TH = attend(q_THW[chunk.tokens], cache.k, cache.v, *chunk.tables, self.scale)
            return self._values(out_THL) if values_first else out_THL, lse_TH

        chunks = cut(overlap.num_chunks, part.page_table_SM, part.query_start_S1, part.visible_len_T)
        out_ThX = attend_and_exchange(chunks, overlap.stream, attend_chunk, self.exchange)
        return out_ThX if values_first else self._values(out_ThX)

    def _expanded(self, part: Part, q_TGQ: Tensor, cache: LayerCache) -> Tensor:
        out_THV, lse_TH = attend_expanded(
            self._queries_of_all_heads(q_TGQ),
            cache.k,
            self.w_uk.of_all_heads(self.num_heads),
            self.w_uv.of_all_heads(self.num_heads),
            part.page_table_SM,
            part.query_start_S1,
            part.visible_len_T,
            self.scale,
        )
        return self.exchange(out_THV, lse_TH)

    def _queries_of_all_heads(self, q_TGX: Tensor) -> Tensor:
        return gather_heads(self.kvp, q_TGX, self.num_heads, 1) if self.ways.query == "gather" else q_TGX

    def _values(self, out_TXL: Tensor) -> Tensor:
        """W_UV of the heads that this rank holds it for: [T, X, L] -> [T, X, V]."""
        return head_linear(out_TXL, self.w_uv.weight)
