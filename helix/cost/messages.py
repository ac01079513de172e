"""Messages of one decode step: each collective, the group it runs on and the bytes that a rank puts into it.

The sizes are those of the buffers that the layers pass to `helix.comm.group.Group`, so that `sent_bytes` can be
compared with the traffic that ranks count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from helix.cost.choices import Formats, Placement, Workload
from helix.cost.hardware import Hardware, Op, Span, group_span, sent_bytes
from helix.cost.weights import LayerKind
from helix.cost.work import expected_ranks_hit, local_sequences, step_tokens
from helix.layout import attention_shard, padded_slice
from helix.model_spec import ModelSpec, MoESpec

Axis: TypeAlias = Literal["world", "kvp", "tpa", "tpf", "ep", "pp"]
Purpose: TypeAlias = Literal["exchange", "query gather", "all-reduce", "dispatch", "embedding and head", "pipeline"]
_LSE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Message:
    """One collective: `buffer_bytes` is the rank's input; `stride` the distance between neighbours of the group."""

    purpose: Purpose
    op: Op
    axis: Axis
    size: int
    stride: int
    buffer_bytes: float
    calls: int = 1

    @property
    def sent_bytes(self) -> float:
        """Bytes that leave the rank, all calls together."""
        return self.calls * sent_bytes(self.op, self.size, self.buffer_bytes)

    def span(self, num_ranks: int, hardware: Hardware) -> Span:
        """How the group lies on nodes."""
        return group_span(self.size, self.stride, num_ranks, hardware.node_size)


def attention_messages(spec: ModelSpec, placement: Placement, formats: Formats, workload: Workload) -> list[Message]:
    """Collectives of one layer's attention phase except the exchange."""
    layout, choices = placement.layout, placement.choices
    tokens = local_sequences(placement, workload)
    messages = []
    if choices.query == "gather" and layout.kvp > 1:
        heads = attention_shard(spec, layout, 0).exchange_heads
        width = spec.mla.kv_lora_rank + spec.mla.rope_dim if spec.mla else spec.head_dim
        size = tokens * heads * width * formats.activation_bytes
        messages.append(Message("query gather", "all_gather", "kvp", layout.kvp, 1, size))
    if choices.merge == "gather":
        axis: Axis = "tpa"
        size, stride = layout.tpa, layout.kvp
    else:
        axis, size, stride = "world", layout.num_ranks, 1
    if size > 1:
        reduced = tokens * spec.hidden_size * formats.activation_bytes
        messages.append(Message("all-reduce", "all_reduce", axis, size, stride, reduced))
    return messages


def exchange_messages(spec: ModelSpec, placement: Placement, formats: Formats, workload: Workload) -> list[Message]:
    """Collectives of one layer's exchange, in lockstep.

    One all-to-all carries ``T * kvp * h * (D * bytes + 4)`` bytes a rank.
    """
    layout, choices = placement.layout, placement.choices
    if layout.kvp == 1:
        return []
    shard = attention_shard(spec, layout, 0)
    rows = local_sequences(placement, workload) * layout.kvp * shard.exchange_heads
    outputs = rows * exchange_width(spec, placement) * formats.activation_bytes
    if choices.merge == "a2a":
        return [Message("exchange", "all_to_all", "kvp", layout.kvp, 1, outputs + rows * _LSE_BYTES)]
    if choices.merge == "gather":
        return [Message("exchange", "all_gather", "kvp", layout.kvp, 1, outputs + rows * _LSE_BYTES)]
    return [
        Message("exchange", "all_gather", "kvp", layout.kvp, 1, rows * _LSE_BYTES),
        Message("exchange", "reduce_scatter", "kvp", layout.kvp, 1, outputs),
    ]


def exchange_width(spec: ModelSpec, placement: Placement) -> int:
    """Values of one head's partial output as it is sent."""
    if spec.mla and placement.choices.exchange_space == "value":
        return spec.mla.v_dim
    return spec.exchange_width


def ffn_messages(
    spec: ModelSpec, kind: LayerKind, placement: Placement, formats: Formats, workload: Workload
) -> list[Message]:
    """Collectives of one layer's FFN phase."""
    moe, ranks = spec.moe, placement.ffn_ranks
    tokens = step_tokens(placement, workload)
    row_bytes = spec.hidden_size * formats.activation_bytes
    if placement.dp > 1:
        return _replica_messages(spec, kind, placement, formats, workload)
    if kind == "sparse" and moe is not None and placement.choices.dispatch == "alltoall":
        return _dispatch_messages(spec, moe, placement, formats, tokens)
    if ranks == 1:
        return []
    if ranks == placement.attention_ranks:
        return [Message("all-reduce", "all_reduce", "world", ranks, 1, tokens * row_bytes)]
    return [Message("all-reduce", "all_reduce", "tpa", ranks, placement.layout.kvp, tokens * row_bytes)]


def _dispatch_messages(
    spec: ModelSpec, moe: MoESpec, placement: Placement, formats: Formats, tokens: int
) -> list[Message]:
    """Row counts, rows with expert ids and weights, their sums back, shared expert, width and tokens joined."""
    layout, width = placement.layout, formats.activation_bytes
    share = padded_slice(tokens, layout.ep, 0).padded
    part = share * spec.hidden_size * width
    rows = share * expected_ranks_hit(moe, layout.ep)
    sent_row = spec.hidden_size * width + 2 * 4 * moe.experts_per_token
    ep = [
        Message("dispatch", "all_to_all", "ep", layout.ep, layout.tpf, 8 * layout.ep),
        Message("dispatch", "all_to_all", "ep", layout.ep, layout.tpf, rows * sent_row),
        Message("dispatch", "all_to_all", "ep", layout.ep, layout.tpf, rows * spec.hidden_size * width),
        Message("dispatch", "all_gather", "ep", layout.ep, layout.tpf, part),
    ]
    if moe.shared_width:
        ep.append(Message("dispatch", "reduce_scatter", "ep", layout.ep, layout.tpf, layout.ep * part))
    tpf = Message("dispatch", "all_reduce", "tpf", layout.tpf, 1, part)
    return [*(ep if layout.ep > 1 else ()), *((tpf,) if layout.tpf > 1 else ())]


def _replica_messages(
    spec: ModelSpec, kind: LayerKind, placement: Placement, formats: Formats, workload: Workload
) -> list[Message]:
    """DP attention: tokens of a replica go to their experts and back, or are gathered for a dense FFN and scattered."""
    tokens, ranks = -(-local_sequences(placement, workload) // placement.attention_ranks), placement.ffn_ranks
    row_bytes = spec.hidden_size * formats.activation_bytes
    if kind == "sparse" and spec.moe is not None:
        rows = tokens * min(expected_ranks_hit(spec.moe, placement.layout.ep), float(ranks))
        return [Message("dispatch", "all_to_all", "world", ranks, 1, rows * row_bytes) for _ in range(2)]
    return [
        Message("dispatch", "all_gather", "world", ranks, 1, tokens * row_bytes),
        Message("dispatch", "reduce_scatter", "world", ranks, 1, tokens * ranks * row_bytes),
    ]


def head_messages(spec: ModelSpec, placement: Placement, formats: Formats, workload: Workload) -> list[Message]:
    """The embedding's all-reduce and the gathering of fp32 logits, over the ranks of a stage."""
    ranks, tokens = placement.stage_ranks, step_tokens(placement, workload)
    if ranks == 1:
        return []
    embedded = tokens * spec.hidden_size * formats.activation_bytes
    logits = tokens * padded_slice(spec.vocab_size, ranks, 0).padded * 4
    return [
        Message("embedding and head", "all_reduce", "world", ranks, 1, embedded),
        Message("embedding and head", "all_gather", "world", ranks, 1, logits),
    ]
