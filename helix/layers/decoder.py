"""`Decoder`: the pre-norm decoder that every family of the zoo is an instance of, assembled from a `ModelSpec`.

    x = embed(tokens)
    for each layer:  x = x + attention(norm(x));  x = x + ffn(norm(x))
    logits = head(norm(x))

x_TC is replicated on all N ranks between the blocks; what is sharded, and how, is visible in the constructor calls.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from helix.cache.pools import KVCache, LayerCache
from helix.comm.mesh import Mesh
from helix.config import CommConfig
from helix.layers.attention import Attention
from helix.layers.batch import Batch
from helix.layers.embedding import Embedding, Head
from helix.layers.mla import MLA
from helix.layers.mlp import MLP
from helix.layers.moe import MoE
from helix.layers.norm import RMSNorm
from helix.layers.rotary import Rotary
from helix.layout import padded_slice
from helix.model_spec import ModelSpec
from helix.weights import Packing, pack

Tap = Callable[[int, Tensor], None]


class Block(nn.Module):
    """Layer number `index`: attention, then FFN, each behind a norm and added to the residual."""

    def __init__(
        self,
        index: int,
        spec: ModelSpec,
        mesh: Mesh,
        comm: CommConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        name = f"model.layers.{index}"
        hidden, eps = spec.hidden_size, spec.norm_eps
        self.attention_norm = RMSNorm(f"{name}.input_layernorm", hidden, eps, dtype=dtype, device=device)
        attention = f"{name}.self_attn"
        self.attention: MLA | Attention
        if spec.mla:
            self.attention = MLA(attention, spec, mesh, comm, dtype=dtype, device=device)
        else:
            self.attention = Attention(attention, spec, mesh, comm, dtype=dtype, device=device)
        self.ffn_norm = RMSNorm(f"{name}.post_attention_layernorm", hidden, eps, dtype=dtype, device=device)
        self.ffn: MLP | MoE
        if spec.moe is not None and not spec.moe.is_dense(index):
            self.ffn = MoE(f"{name}.mlp", spec, mesh, comm.dispatch, dtype=dtype, device=device)
        else:
            self.ffn = MLP(
                f"{name}.mlp",
                hidden,
                padded_slice(spec.intermediate_size, mesh.layout.num_ranks, mesh.rank),
                spec.activation,
                mesh.world,
                bias=spec.mlp_bias,
                dtype=dtype,
                device=device,
            )

    def forward(
        self, x_TC: Tensor, add_TC: Tensor | None, batch: Batch, cache: LayerCache, rotary: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The residual stream is ``x + add``, before and after: each addition is made by the norm that follows it."""
        if add_TC is None:
            normal_TC = self.attention_norm(x_TC)
        else:
            x_TC, normal_TC = self.attention_norm.after_adding(x_TC, add_TC)
        x_TC, normal_TC = self.ffn_norm.after_adding(x_TC, self.attention(normal_TC, batch, cache, rotary))
        return x_TC, self.ffn(normal_TC)


def make_block(
    index: int,
    spec: ModelSpec,
    mesh: Mesh,
    comm: CommConfig,
    packing: Packing | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Block:
    """A `Block` whose weights are held in FP8 where `packing` says so; others never take memory in between."""
    if packing is None:
        return Block(index, spec, mesh, comm, dtype=dtype, device=device)
    made = Block(index, spec, mesh, comm, dtype=dtype, device=torch.device("meta"))
    pack(made, packing)
    return made.to_empty(device=device)


class Decoder(nn.Module):
    """The whole model on one rank. ``forward`` gives hidden states, `logits` the head's output for chosen rows.

    `packing` holds the layers' linear and expert weights in FP8; embedding, head, norms, router and the up-projections
    of latent attention (folded into queries and values) stay in `dtype`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        mesh: Mesh,
        comm: CommConfig,
        packing: Packing | None = None,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        vocab = padded_slice(spec.vocab_size, mesh.layout.num_ranks, mesh.rank)
        hidden = spec.hidden_size
        self.embed = Embedding("model.embed_tokens", vocab, hidden, mesh.world, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            make_block(index, spec, mesh, comm, packing, dtype=dtype, device=device) for index in range(spec.num_layers)
        )
        self.norm = RMSNorm("model.norm", hidden, spec.norm_eps, dtype=dtype, device=device)
        tied = self.embed if spec.tie_embeddings else None
        self.head = Head("lm_head", vocab, hidden, mesh.world, tied, dtype=dtype, device=device)
        self.rotary = Rotary(spec.rotary, spec.max_context, device=device)

    def forward(self, batch: Batch, cache: KVCache, tap: Tap | None = None) -> Tensor:
        """Hidden states [T, C] after the last layer; `tap(i, x)` sees each layer's output (i = -1: the embedding)."""
        x_TC: Tensor = self.embed(batch.token_ids_T)
        rotary = self.rotary.tables(batch.position_T, batch.rotary_len_T)
        if tap is not None:
            tap(-1, x_TC)
        add_TC: Tensor | None = None
        for index, (layer, pools) in enumerate(zip(self.layers, cache.layers, strict=True)):
            x_TC, add_TC = layer(x_TC, add_TC, batch, pools, rotary)
            if tap is not None:
                tap(index, x_TC + add_TC)
        return x_TC if add_TC is None else x_TC + add_TC

    def logits(self, x_RC: Tensor) -> Tensor:
        """fp32 logits [R, V] of hidden states [R, C], on every rank."""
        logits_RV: Tensor = self.head(self.norm(x_RC))
        return logits_RV
