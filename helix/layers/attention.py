"""Grouped-query attention in the Helix layout: QKV by TPA, KV pages by KVP, exchange, output projection over all N.

The queries of all heads of the shard are computed on every KVP rank (``query: replicate``), or each computes those of
the heads it holds after the exchange and the KVP group gathers them (``gather``). Keys and values are never gathered:
every rank computes those of its shard's KV heads, and the owner of a position stores them.

Letters: T tokens, C model width, H local query heads, K local KV heads, D head width, h heads after the exchange.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from helix.cache.pools import LayerCache
from helix.comm.mesh import Mesh
from helix.config import CommConfig
from helix.kernels import attend, store_heads
from helix.layers.batch import Batch
from helix.layers.exchange import Exchange, gather_heads
from helix.layers.linear import Linear
from helix.layers.norm import RMSNorm
from helix.layers.overlap import Chunk, attend_and_exchange, cut
from helix.layers.projection import SharedProjection
from helix.layout import AttentionShard, Slice, attention_shard
from helix.model_spec import ModelSpec
from helix.weights import Piece, cols, rows, whole


class Attention(nn.Module):
    """One layer's attention on one rank.

    Where all ranks of a KVP group hold the same QKV weights, they share the projection of long chunks.
    """

    def __init__(
        self, name: str, spec: ModelSpec, mesh: Mesh, comm: CommConfig, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.spec = spec
        self.shard = shard = attention_shard(spec, mesh.layout, mesh.rank)
        width, hidden = spec.head_dim, spec.hidden_size
        self.gathers = comm.query == "gather"
        asked = Slice(shard.q_start, shard.q_stop, shard.num_q, spec.num_heads)
        if self.gathers:
            asked = Slice(shard.out_start, shard.out_stop, shard.exchange_heads, spec.num_heads)
        self.num_asked = asked.padded
        self.qkv = Linear(
            (asked.padded + 2 * shard.num_kv) * width,
            hidden,
            _qkv_pieces(name, "weight", spec, asked, shard),
            _qkv_pieces(name, "bias", spec, asked, shard) if spec.qkv_bias else (),
            dtype=dtype,
            device=device,
        )
        self.q_norm = self.k_norm = None
        if spec.qk_norm:
            self.q_norm = RMSNorm(f"{name}.q_norm", width, spec.norm_eps, dtype=dtype, device=device)
            self.k_norm = RMSNorm(f"{name}.k_norm", width, spec.norm_eps, dtype=dtype, device=device)
        self.out = Linear(
            hidden,
            shard.exchange_heads * width,
            (
                cols(
                    f"{name}.o_proj.weight",
                    (hidden, spec.num_heads * width),
                    shard.out_start * width,
                    shard.out_stop * width,
                ),
            ),
            dtype=dtype,
            device=device,
        )
        self.out_bias: nn.Parameter | None = None
        self.declared = {}
        if spec.output_bias:
            self.out_bias = nn.Parameter(torch.empty(hidden, dtype=dtype, device=device), requires_grad=False)
            self.declared["out_bias"] = (whole(f"{name}.o_proj.bias", (hidden,)),)
        self.exchange = Exchange(mesh.kvp, shard.exchange_heads, comm.merge)
        self.share = SharedProjection(mesh.kvp, "off" if self.gathers else comm.shared_projections)
        self.kvp, self.group = mesh.kvp, mesh.world

    def forward(self, x_TC: Tensor, batch: Batch, cache: LayerCache, rotary: tuple[Tensor, Tensor]) -> Tensor:
        q_THD = self._project(x_TC, batch, cache, rotary)
        if self.gathers:
            q_THD = gather_heads(self.kvp, q_THD, self.shard.num_q, 1)

        def attend_chunk(chunk: Chunk) -> tuple[Tensor, Tensor]:
            return attend(q_THD[chunk.tokens], cache.k, cache.v, *chunk.tables, self.spec.attention_scale)

        chunks = cut(batch.overlap.num_chunks, batch.page_table_SR, batch.query_start_S1, batch.visible_len_T)
        out_ThD = attend_and_exchange(chunks, batch.overlap.stream, attend_chunk, self.exchange)
        y_TC = self.group.all_reduce(self.out(out_ThD.flatten(1)))
        return y_TC if self.out_bias is None else y_TC + self.out_bias

    def _project(self, x_TC: Tensor, batch: Batch, cache: LayerCache, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Rotated queries of the heads that this rank asks for; the tokens' keys and values go to the cache."""
        heads_THD = self.share(self.qkv, x_TC).unflatten(-1, (-1, self.spec.head_dim))
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        return store_heads(
            heads_THD,
            self.num_asked,
            norms,
            rotary,
            cache.k,
            cache.v,
            batch.slot_T,
            interleaved=self.spec.rotary.interleaved,
        )


def _qkv_pieces(name: str, kind: str, spec: ModelSpec, asked: Slice, shard: AttentionShard) -> tuple[Piece, ...]:
    """Rows of q (of the heads `asked`), k and v one under another; `kind` is ``weight`` or ``bias``."""
    width = spec.head_dim
    tail = (spec.hidden_size,) if kind == "weight" else ()
    plan = (
        ("q_proj", spec.num_heads, asked.start, asked.stop, 0),
        ("k_proj", spec.num_kv_heads, shard.kv_start, shard.kv_stop, asked.padded),
        ("v_proj", spec.num_kv_heads, shard.kv_start, shard.kv_stop, asked.padded + shard.num_kv),
    )
    return tuple(
        rows(f"{name}.{part}.{kind}", (heads * width, *tail), start * width, stop * width, at=at * width)
        for part, heads, start, stop, at in plan
    )
