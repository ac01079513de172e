"""Time of a prompt's chunks, priced as decode steps are: the same products and messages with many tokens each.

What differs: a chunk's queries see what lies before each of them, long chunks of latent attention take the expanded
form, and the ranks of a KVP group may share the first projection of a chunk (see `shared_from`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from helix.cost.choices import Choices, Formats, Placement, Workload
from helix.cost.hardware import Hardware, group_span, sent_bytes
from helix.cost.latent import expand_from
from helix.cost.messages import Message, attention_messages, exchange_messages, ffn_messages, head_messages
from helix.cost.step import Price, StepCost
from helix.cost.weights import Matrix, attention_matrices, layer_counts
from helix.cost.work import Work, attention_work, exchange_work, ffn_work, head_work
from helix.layout import Layout, PageRule, attention_shard, padded_slice
from helix.model_spec import MLASpec, ModelSpec

# The product that a chunk's tokens enter first; its outputs are small enough to be gathered.
_FIRST_PRODUCTS = ("qkv", "down")
# Largest chunk that is looked at.
_MOST_TOKENS = 1 << 20
# Passes over [T, C] in a layer besides products: two norms that also add the residual read two and write two each.
_HIDDEN_PASSES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens ``[start, start + tokens)`` of one prompt; behind the `last` chunk comes the head.

    `shared`: the KVP group shares its first projection.
    """

    start: int
    tokens: int
    last: bool = False
    shared: bool = False


def chunks_of(prompt: int, tokens: int, shared_from: int | None = None) -> Iterator[Chunk]:
    """A prompt in chunks of at most `tokens`; those of `shared_from` tokens or more share their first projection."""
    for start in range(0, prompt, tokens):
        count = min(tokens, prompt - start)
        shared = shared_from is not None and count >= shared_from
        yield Chunk(start=start, tokens=count, last=start + count == prompt, shared=shared)


def shared_from(spec: ModelSpec, layout: Layout, choices: Choices, formats: Formats, hardware: Hardware) -> int | None:
    """The smallest chunk for which sharing the first projection in a KVP group takes less time; None: there is none.

    The projection (QKV, or MLA's down-projections) has the same weights on all ranks of the group. Shared, each rank
    projects its part of the chunk's tokens and an all-gather joins the outputs, which saves ``(kvp-1)/kvp`` of the
    arithmetic. Powers of two from 16 on; a pure function, so that all ranks find the same.
    """
    if layout.kvp == 1 or not can_share(spec, choices):
        return None
    first = _first_product(spec, layout, choices)
    kernel = hardware.kernels["linear"]
    rate = hardware.product_rate(formats.products) * kernel.products
    span = group_span(layout.kvp, 1, layout.num_ranks, hardware.node_size)
    tokens = 16
    while tokens <= _MOST_TOKENS:
        share = -(-tokens // layout.kvp)
        saved = 2.0 * (tokens - share) * first.values / rate
        gathered = sent_bytes("all_gather", layout.kvp, share * first.outputs * formats.activation_bytes)
        if saved > hardware.collective_us("all_gather", gathered, span):
            return tokens
        tokens *= 2
    return None


def can_share(spec: ModelSpec, choices: Choices) -> bool:
    """Whether all ranks of a KVP group hold the same first projection: not if it makes queries that are gathered."""
    return choices.query == "replicate" or (spec.mla is not None and spec.mla.q_lora_rank is not None)


def _first_product(spec: ModelSpec, layout: Layout, choices: Choices) -> Matrix:
    """The product that is shared."""
    return next(one for name, one in attention_matrices(spec, layout, choices).items() if name in _FIRST_PRODUCTS)


def chunk_cost(
    spec: ModelSpec, placement: Placement, formats: Formats, hardware: Hardware, chunk: Chunk, page_tokens: int
) -> StepCost:
    """Price of one step that feeds `chunk` and nothing else."""
    price = Price(hardware, placement)
    load = Workload(batch=chunk.tokens, context=1, page_tokens=page_tokens)
    price.work(chunk_attention_work(spec, placement, formats, chunk, page_tokens), spec.num_layers)
    price.work(exchange_work(placement), spec.num_layers)
    for kind, count in layer_counts(spec).items():
        if count:
            price.work(ffn_work(spec, kind, placement, formats, load), count)
    if chunk.last:
        price.work(head_work(spec, placement, formats, replace(load, batch=1)), 1)
    for count, message in chunk_messages(spec, placement, formats, chunk):
        price.messages([message], count)
    price.fixed(spec.num_layers * hardware.layer_us + hardware.step_us)
    return StepCost(price.parts(0.0), chunk.tokens, placement.num_ranks)


def chunk_messages(spec: ModelSpec, placement: Placement, formats: Formats, chunk: Chunk) -> list[tuple[int, Message]]:
    """All collectives of the step: (layers that have it, message)."""
    load = Workload(batch=chunk.tokens, context=1)
    messages = [(spec.num_layers, one) for one in _attention_messages(spec, placement, formats, load, chunk)]
    for kind, count in layer_counts(spec).items():
        if count:
            messages += [(count, one) for one in ffn_messages(spec, kind, placement, formats, load)]
    # The embedding's all-reduce is for all tokens, the gathering of logits for the one that samples.
    messages += [(1, one) for one in head_messages(spec, placement, formats, load) if one.op == "all_reduce"]
    if chunk.last:
        one_row = head_messages(spec, placement, formats, replace(load, batch=1))
        messages += [(1, one) for one in one_row if one.op == "all_gather"]
    return messages


def _is_expanded(spec: ModelSpec, chunk: Chunk) -> bool:
    threshold = None if spec.mla is None else expand_from(spec.mla)
    return threshold is not None and chunk.tokens >= threshold


def chunk_attention_work(
    spec: ModelSpec, placement: Placement, formats: Formats, chunk: Chunk, page_tokens: int
) -> list[Work]:
    """Kernels of one layer's attention phase for `chunk`, on the rank with the most pages."""
    load = Workload(batch=chunk.tokens, context=1, page_tokens=page_tokens)
    expanded = _is_expanded(spec, chunk)
    skipped = ("key_up", "value_up") if expanded else ()
    works = [
        replace(one, flops=one.flops * _first_share(placement, chunk)) if one.name in _FIRST_PRODUCTS else one
        for one in attention_work(spec, placement, formats, load)
        if one.reads == "weights" and one.name not in skipped
    ]
    passes = _HIDDEN_PASSES * chunk.tokens * spec.hidden_size * formats.activation_bytes
    works.append(Work("norms", "small", "weights", float(passes), 0.0, formats.activations, 0))
    return [*works, _attention(spec, placement, formats, chunk, page_tokens, expanded=expanded)]


def _first_share(placement: Placement, chunk: Chunk) -> float:
    """Part of the chunk's tokens that a rank projects first."""
    if not chunk.shared:
        return 1.0
    return padded_slice(chunk.tokens, placement.layout.kvp, 0).padded / chunk.tokens


def _attention(
    spec: ModelSpec, placement: Placement, formats: Formats, chunk: Chunk, page_tokens: int, *, expanded: bool
) -> Work:
    """Attention proper: each query over what lies before it here, the cache read once."""
    rule = PageRule(page_tokens, placement.layout.kvp)
    cached = rule.local_len(chunk.start + chunk.tokens, 0)
    pairs = chunk.tokens * (rule.local_len(chunk.start + 1, 0) + cached) / 2
    shard = attention_shard(spec, placement.layout, 0)
    mla = spec.mla
    if mla is None:
        values = 2 * cached * shard.num_kv * spec.head_dim
        flops = 4.0 * pairs * shard.num_q * spec.head_dim
        return Work("attention", "attention", "cache", values * formats.cache_bytes, flops, formats.attention_products)
    read = cached * (mla.kv_lora_rank + mla.rope_dim) * formats.cache_bytes
    if not expanded:
        flops = 2.0 * pairs * shard.num_q * (2 * mla.kv_lora_rank + mla.rope_dim)
        return Work("attention", "latent_attention", "cache", read, flops, formats.attention_products)
    flops = _expanded_flops(mla, shard.num_q, pairs, cached)
    # Keys and values are written once and read once.
    read += 2 * cached * shard.num_q * (mla.nope_dim + mla.rope_dim + mla.v_dim) * formats.activation_bytes
    return Work("attention", "attention", "cache", read, flops, formats.attention_products)


def _expanded_flops(mla: MLASpec, heads: int, pairs: float, cached: int) -> float:
    """`helix.cost.latent.attention_flops` of the expanded form, for queries that see different numbers of latents."""
    once = 2 * mla.kv_lora_rank * (mla.nope_dim + mla.v_dim)
    return heads * (once * cached + 2.0 * (mla.nope_dim + mla.rope_dim + mla.v_dim) * pairs)


def _attention_messages(
    spec: ModelSpec, placement: Placement, formats: Formats, load: Workload, chunk: Chunk
) -> list[Message]:
    """Collectives of one layer's attention phase: exchange, all-reduce, and what is gathered."""
    expanded = _is_expanded(spec, chunk)
    layout, mla, width = placement.layout, spec.mla, formats.activation_bytes
    if expanded and mla is not None:
        values = replace(placement, choices=replace(placement.choices, exchange_space="value"))
        messages = exchange_messages(spec, values, formats, load)
    else:
        messages = exchange_messages(spec, placement, formats, load)
    heads = attention_shard(spec, layout, 0).exchange_heads
    for one in attention_messages(spec, placement, formats, load):
        gathers = expanded and mla is not None and one.purpose == "query gather"
        size = load.batch * heads * (mla.nope_dim + mla.rope_dim) * width if gathers and mla else one.buffer_bytes
        messages.append(replace(one, buffer_bytes=size))
    if layout.kvp == 1:
        return messages
    if chunk.shared:
        outputs = _first_product(spec, layout, placement.choices).outputs
        share = padded_slice(chunk.tokens, layout.kvp, 0).padded
        messages.append(_gather(layout, share * outputs * width))
    if expanded and mla is not None:
        # What a rank does not hold of the up-projections.
        if placement.choices.query == "gather":
            messages.append(_gather(layout, heads * mla.nope_dim * mla.kv_lora_rank * width))
        if placement.choices.exchange_space == "latent":
            messages.append(_gather(layout, heads * mla.v_dim * mla.kv_lora_rank * width))
    return messages


def _gather(layout: Layout, buffer_bytes: float) -> Message:
    return Message("query gather", "all_gather", "kvp", layout.kvp, 1, buffer_bytes)
