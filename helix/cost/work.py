"""Work of one rank in one decode step: which kernels run, what they read and how much they multiply.

Pure functions of (model, placement, formats, workload). The rank is the busiest one: rank 0, which has the most pages
and the most experts; with random routing the EP rank that happens to be hit most is the one that is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import comb
from typing import Literal

from helix.cost.choices import Formats, Placement, Workload
from helix.cost.hardware import KernelKind
from helix.cost.weights import (
    LayerKind,
    Matrix,
    attention_matrices,
    expert_matrices,
    mlp_matrices,
)
from helix.layout import PageRule, Slice, attention_shard, cache_token_bytes, padded_slice, uneven_slice
from helix.model_spec import ModelSpec, MoESpec

# Launches besides products, attention and experts, in a step of a few tokens. GQA: the norm; rotary, the heads' norms
# and the append together. MLA: the norm; the latents' norm, rotary and append together; the norm of a query latent.
# MLP: the norm; the activation. Experts: the norm; the choice; a shared expert's activation. Exchange: pack; merge.
_ATTENTION_LAUNCHES = 2
_MLP_LAUNCHES = 2
_MOE_LAUNCHES = 2
_EXCHANGE_LAUNCHES = 2
# Rows up to which a product, and tokens up to which the experts, have a kernel of their own (`helix.kernels`).
FEW_ROWS = 2
FEW_EXPERT_TOKENS = 1


@dataclass(frozen=True, slots=True)
class Work:
    """One kind of kernel: bytes it must read from memory, operations, and how many launches it takes."""

    name: str
    kind: KernelKind
    reads: Literal["weights", "cache"]
    num_bytes: float
    flops: float
    product_format: str
    launches: int = 1


def local_sequences(placement: Placement, workload: Workload) -> int:
    """Sequences that one attention grid has in a step: the fullest replica, in one pipeline stage."""
    return -(-workload.batch // (placement.dp * placement.pp))


def step_tokens(placement: Placement, workload: Workload) -> int:
    """Tokens that one FFN grid has in a step."""
    return -(-workload.batch // placement.pp)


def local_context(placement: Placement, workload: Workload) -> int:
    """Tokens of one sequence on the fullest KVP rank."""
    return PageRule(workload.page_tokens, placement.layout.kvp).local_len(workload.context, 0)


def attention_work(spec: ModelSpec, placement: Placement, formats: Formats, workload: Workload) -> list[Work]:
    """Kernels of one layer's attention phase."""
    tokens = local_sequences(placement, workload)
    matrices = attention_matrices(spec, placement.layout, placement.choices)
    products = [_product(name, matrix, tokens, formats) for name, matrix in matrices.items()]
    small = _small("attention", _ATTENTION_LAUNCHES)
    if spec.mla:
        small = _small("latent attention", _ATTENTION_LAUNCHES + (spec.mla.q_lora_rank is not None))
    return [*products, attention_read(spec, placement, formats, workload), small]


def attention_read(spec: ModelSpec, placement: Placement, formats: Formats, workload: Workload) -> Work:
    """Attention proper: every cached value is read once, for all heads of the rank.

    FACTS: ``B * 2 * ceil(K/TPA) * D * (S/KVP)`` values for GQA; ``B * (L + R) * (S/KVP)`` for MLA, whose latent is key
    and value at once.
    """
    shard = attention_shard(spec, placement.layout, 0)
    cached = local_sequences(placement, workload) * local_context(placement, workload)
    if spec.mla:
        width = spec.mla.kv_lora_rank + spec.mla.rope_dim
        flops = 2.0 * cached * shard.num_q * (width + spec.mla.kv_lora_rank)
        kind: KernelKind = "latent_attention"
    else:
        flops = 4.0 * cached * shard.num_q * spec.head_dim
        kind = "attention"
    each = cache_token_bytes(spec, placement.layout, formats.cache_bytes, formats.activation_bytes)
    return Work("attention", kind, "cache", cached * each, flops, formats.attention_products)


def exchange_work(placement: Placement) -> list[Work]:
    """Packing before the exchange and merging after it; nothing where one rank has the whole sequence."""
    return [_small("exchange", _EXCHANGE_LAUNCHES)] if placement.layout.kvp > 1 else []


def chunk_work(spec: ModelSpec, placement: Placement, formats: Formats, workload: Workload) -> list[Work]:
    """Products between attention and exchange: W_UV of all heads, where values are exchanged."""
    if spec.mla is None or placement.choices.exchange_space != "value":
        return []
    values = attention_matrices(spec, placement.layout, placement.choices)["value_up"]
    return [_product("value_up", values, local_sequences(placement, workload), formats)]


def ffn_work(
    spec: ModelSpec, kind: LayerKind, placement: Placement, formats: Formats, workload: Workload
) -> list[Work]:
    """Kernels of one layer's FFN phase."""
    tokens = step_tokens(placement, workload)
    moe = spec.moe
    if kind == "dense" or moe is None:
        products = mlp_matrices(spec, placement.ffn_ranks)
        return [
            *(_product(name, matrix, tokens, formats) for name, matrix in products.items()),
            _small("mlp", _MLP_LAUNCHES),
        ]
    layout = placement.layout
    hit = busiest_hits(moe, layout.ep, tokens, workload.routing)
    expert = tuple(expert_matrices(spec, moe, layout.tpf, formats.activation_bytes, 0).values())
    values = sum(one.values for one in expert)
    rows = tokens * moe.experts_per_token / layout.ep
    routed = Work(
        "experts",
        "few_experts" if tokens <= FEW_EXPERT_TOKENS else "experts",
        "weights",
        hit * sum(one.num_bytes(formats) for one in expert),
        2.0 * max(rows, hit) * values,
        formats.products,
    )
    gate = moe.num_experts * spec.hidden_size
    gate_tokens = tokens if placement.choices.dispatch == "local" else -(-tokens // layout.ep)
    router = Work(
        "router",
        _linear_kind(gate_tokens),
        "weights",
        gate * formats.activation_bytes,
        2.0 * gate_tokens * gate,
        formats.activations,
    )
    work = [router, routed, _small("experts", _MOE_LAUNCHES)]
    if moe.shared_width:
        products = mlp_matrices(spec, placement.ffn_ranks, moe.shared_width)
        work += [_product(f"shared_{name}", matrix, tokens, formats) for name, matrix in products.items()]
        work.append(_small("shared", 1))
    return work


def head_work(spec: ModelSpec, placement: Placement, formats: Formats, workload: Workload) -> list[Work]:
    """Embedding look-up and output head, both cut along the vocabulary over the ranks of a stage."""
    tokens = step_tokens(placement, workload)
    values = padded_slice(spec.vocab_size, placement.stage_ranks, 0).padded * spec.hidden_size
    bytes_ = values * formats.activation_bytes
    head = Work("head", _linear_kind(tokens), "weights", bytes_, 2.0 * tokens * values, formats.activations)
    return [head, _small("embedding and head", 4)]


def _product(name: str, matrix: Matrix, tokens: int, formats: Formats) -> Work:
    flops, used = 2.0 * tokens * matrix.values, matrix.product_format(formats)
    return Work(name, _linear_kind(tokens), "weights", matrix.num_bytes(formats), flops, used)


def _linear_kind(rows: int) -> KernelKind:
    return "few_linear" if rows <= FEW_ROWS else "linear"


def _small(name: str, launches: int) -> Work:
    return Work(name, "small", "weights", 0.0, 0.0, "bfloat16", launches)


def busiest_hits(moe: MoESpec, ep: int, tokens: int, routing: Literal["random", "balanced"] | float) -> float:
    """Distinct experts that are read on the EP rank that is waited for.

    Random routing hits each expert with ``p = 1 - (1 - k/E)**T``; a rank's count is binomial, and the layer waits for
    the largest of `ep` such counts (taken as independent). `balanced` is the mean; a number is spread like the mean.
    """
    held = uneven_slice(moe.num_experts, ep, 0).size
    if isinstance(routing, (int, float)):
        return min(routing * held / moe.num_experts, held)
    chance = 1.0 - (1.0 - moe.experts_per_token / moe.num_experts) ** tokens
    mean = held * chance
    if routing == "balanced" or ep == 1:
        return mean
    most = min(held, tokens * moe.experts_per_token)
    return min(_expected_maximum(held, round(chance, 9), ep), float(most))


@lru_cache(maxsize=8192)
def _expected_maximum(trials: int, chance: float, samples: int) -> float:
    """Expected largest of `samples` binomial counts: the sum over m of ``1 - P(count <= m) ** samples``."""
    if chance >= 1.0:
        return float(trials)
    below, expected = 0.0, 0.0
    for count in range(trials):
        below += comb(trials, count) * chance**count * (1.0 - chance) ** (trials - count)
        expected += 1.0 - min(below, 1.0) ** samples
    return expected


@lru_cache(maxsize=1024)
def expected_ranks_hit(moe: MoESpec, ep: int) -> float:
    """EP ranks that hold at least one of a token's experts, in the mean over random choices.

    A token chooses `topk_groups` of the groups of experts, then its k experts among theirs.
    """
    return sum(1.0 - _chance_of_no_hit(moe, uneven_slice(moe.num_experts, ep, index)) for index in range(ep))


def _chance_of_no_hit(moe: MoESpec, held: Slice) -> float:
    """Chance that none of a token's experts is among `held`."""
    size = moe.num_experts // moe.num_groups
    # ways[g, n]: choices of g groups that have n experts in `held`.
    ways = {(0, 0): 1}
    for group in range(moe.num_groups):
        shared = max(min(held.stop, (group + 1) * size) - max(held.start, group * size), 0)
        for (groups, number), count in list(ways.items()):
            key = (groups + 1, number + shared)
            ways[key] = ways.get(key, 0) + count
    chosen = moe.topk_groups * size
    missed = sum(
        count * comb(chosen - number, moe.experts_per_token)
        for (groups, number), count in ways.items()
        if groups == moe.topk_groups
    )
    return missed / (comb(moe.num_groups, moe.topk_groups) * comb(chosen, moe.experts_per_token))
