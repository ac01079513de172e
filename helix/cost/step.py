"""Time of one decode step: the work and the messages of all layers priced on one kind of hardware.

`step_cost` prices a Helix layout, `placement_cost` any placement. Both are sums of parts that can be printed; nothing
is fitted here: every constant comes from the hardware card.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from helix.cost.choices import Choices, Formats, Placement, Workload
from helix.cost.hardware import Hardware, Span, group_span
from helix.cost.messages import (
    Message,
    attention_messages,
    exchange_messages,
    ffn_messages,
    head_messages,
)
from helix.cost.weights import layer_counts
from helix.cost.work import (
    Work,
    attention_read,
    attention_work,
    chunk_work,
    exchange_work,
    ffn_work,
    head_work,
    local_sequences,
    step_tokens,
)
from helix.layout import Layout
from helix.model_spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Where a step's time goes, microseconds. The sum of all less `overlap_gained` is the step.

    `attention_read` and `weight_read` are bytes over bandwidth; `arithmetic` is what products take beyond the reads
    they go with; `launches` are fixed costs of kernels, layers and the step.
    """

    attention_read: float = 0.0
    weight_read: float = 0.0
    arithmetic: float = 0.0
    launches: float = 0.0
    exchange: float = 0.0
    query_gather: float = 0.0
    all_reduce: float = 0.0
    dispatch: float = 0.0
    embedding_and_head: float = 0.0
    pipeline: float = 0.0
    overlap_gained: float = 0.0

    @property
    def total(self) -> float:
        work = self.attention_read + self.weight_read + self.arithmetic + self.launches
        return work + self.communication - self.overlap_gained

    @property
    def communication(self) -> float:
        """All collectives, before what overlap hides of them."""
        return (
            self.exchange
            + self.query_gather
            + self.all_reduce
            + self.dispatch
            + self.embedding_and_head
            + self.pipeline
        )


PART_NAMES: tuple[str, ...] = tuple(one.name for one in fields(Parts))


@dataclass(frozen=True, slots=True)
class StepCost:
    """One decode step of `batch` sequences on `num_ranks` devices."""

    parts: Parts
    batch: int
    num_ranks: int

    @property
    def ttl_us(self) -> float:
        return self.parts.total

    @property
    def ttl_ms(self) -> float:
        return self.parts.total / 1e3

    @property
    def tokens_per_s_user(self) -> float:
        return 1e6 / self.parts.total

    @property
    def tokens_per_s_gpu(self) -> float:
        return self.batch * 1e6 / self.parts.total / self.num_ranks


def step_cost(
    spec: ModelSpec, layout: Layout, choices: Choices, formats: Formats, hardware: Hardware, workload: Workload
) -> StepCost:
    """Price of one decode step in a Helix layout. The layout must be legal (`helix.layout.check_layout`)."""
    return placement_cost(spec, Placement(layout=layout, choices=choices), formats, hardware, workload)


def placement_cost(
    spec: ModelSpec, placement: Placement, formats: Formats, hardware: Hardware, workload: Workload
) -> StepCost:
    """Price of one decode step of any placement.

    With `pp` stages a token passes all of them, each with its share of the batch, so that its latency is the sum over
    the stages while all stages are busy with other sequences.
    """
    price = Price(hardware, placement)
    layers = spec.num_layers
    price.work(attention_work(spec, placement, formats, workload), layers)
    price.work(exchange_work(placement), layers)
    price.messages(attention_messages(spec, placement, formats, workload), layers)
    exchange = exchange_messages(spec, placement, formats, workload)
    price.messages(exchange, layers)
    read = attention_read(spec, placement, formats, workload)
    chunks = min(placement.choices.overlap, local_sequences(placement, workload))
    again = [read, *chunk_work(spec, placement, formats, workload)]
    gained = price.overlap_gained(again, exchange_work(placement), exchange, chunks)
    for kind, count in layer_counts(spec).items():
        if count:
            price.work(ffn_work(spec, kind, placement, formats, workload), count)
            price.messages(ffn_messages(spec, kind, placement, formats, workload), count)
    price.work(head_work(spec, placement, formats, workload), 1)
    price.messages(head_messages(spec, placement, formats, workload), 1)
    price.fixed(layers * hardware.layer_us + hardware.step_us)
    if placement.pp > 1:
        row_bytes = spec.hidden_size * formats.activation_bytes
        price.pipeline(step_tokens(placement, workload) * row_bytes, placement.pp)
    return StepCost(price.parts(layers * gained), workload.batch, placement.num_ranks)


def layer_messages(
    spec: ModelSpec, placement: Placement, formats: Formats, workload: Workload
) -> Sequence[tuple[int, Message]]:
    """All collectives of a step: (layers that have it, message)."""
    both = [
        *attention_messages(spec, placement, formats, workload),
        *exchange_messages(spec, placement, formats, workload),
    ]
    messages = [(spec.num_layers, one) for one in both]
    for kind, count in layer_counts(spec).items():
        if count:
            messages += [(count, one) for one in ffn_messages(spec, kind, placement, formats, workload)]
    return messages + [(1, one) for one in head_messages(spec, placement, formats, workload)]


class Price:
    """Sums the parts of a step of `placement` on `hardware`, in microseconds."""

    def __init__(self, hardware: Hardware, placement: Placement) -> None:
        self.hardware = hardware
        self.num_ranks = placement.stage_ranks
        self.transport = placement.choices.transport
        self.merges_in_exchange = self._merges_in_exchange(placement)
        self.sums = dict.fromkeys(PART_NAMES, 0.0)

    def work(self, items: Iterable[Work], count: int) -> None:
        for item in items:
            fixed, read, excess = self.split(item)
            self.sums["launches"] += count * fixed
            self.sums["attention_read" if item.reads == "cache" else "weight_read"] += count * read
            self.sums["arithmetic"] += count * excess

    def split(self, item: Work) -> tuple[float, float, float]:
        """Fixed time of a kernel, time of its reads, and what its arithmetic takes beyond them."""
        kernel = self.hardware.kernel(item.kind, item.product_format)
        read = item.num_bytes / (self.hardware.memory.value * kernel.bandwidth)
        multiply = 0.0
        if item.flops:
            multiply = item.flops / (self.hardware.product_rate(item.product_format) * kernel.products)
        launches = item.launches
        if item.kind == "small":
            launches = self.hardware.small_launches.get(item.name, launches)
            if item.name == "exchange" and self.merges_in_exchange:
                launches = 0
        return launches * kernel.fixed_us, read, max(multiply - read, 0.0)

    def _merges_in_exchange(self, placement: Placement) -> bool:
        """Whether the kernel that reads the peers' memory packs and merges too, so that its curve has both."""
        span = group_span(placement.layout.kvp, 1, self.num_ranks, self.hardware.node_size)
        symmetric = self.transport == "symmetric" and "all_to_all" in self.hardware.symmetric
        return symmetric and placement.choices.merge == "a2a" and span.nodes == 1

    def messages(self, items: Iterable[Message], count: int) -> None:
        for item in items:
            self.sums[item.purpose.replace(" ", "_").replace("-", "_")] += count * self.message(item)

    def message(self, item: Message, parts: int = 1) -> float:
        """Time of one of `parts` equal parts of a collective."""
        if parts > 1 and self.hardware.chunks_share_latency:
            return self.message(item) / parts
        # Peers' memory serves the exchange, the all-reduces and the gather of queries; all else are collectives.
        direct = item.purpose == "exchange" or item.op in ("all_reduce", "all_gather")
        transport = self.transport if direct else "collective"
        span = item.span(self.num_ranks, self.hardware)
        return item.calls * self.hardware.collective_us(item.op, item.sent_bytes / item.calls / parts, span, transport)

    def overlap_gained(
        self, chunked: Sequence[Work], packing: Sequence[Work], exchange: Sequence[Message], chunks: int
    ) -> float:
        """Time per layer that HOP-B hides (FACTS 1.6: ``n * max(c, m) + min(c, m)`` for n chunks); 0 in lockstep.

        `chunked` is what a chunk computes before its exchange: attention, and products whose weights every chunk reads
        again. Packing and merging go beside it, with the messages. Each chunk pays all fixed costs again, and the
        chunks' results are joined, so this can be negative.
        """
        if chunks < 2 or not exchange:
            return 0.0
        lockstep = compute = sent = 0.0
        for one in chunked:
            fixed, read, excess = self.split(one)
            lockstep += fixed + read + excess
            compute += fixed + excess / chunks + (read / chunks if one.reads == "cache" else read)
        for one in packing:
            lockstep += self.split(one)[0]
            sent += self.split(one)[0]
        lockstep += sum(self.message(one) for one in exchange)
        sent += sum(self.message(one, chunks) for one in exchange)
        joined = self.hardware.kernels["small"].fixed_us
        if not self.hardware.overlaps:
            return lockstep - chunks * (compute + sent) - joined
        return lockstep - (chunks * max(compute, sent) + min(compute, sent)) - joined

    def fixed(self, us: float) -> None:
        self.sums["launches"] += us

    def pipeline(self, num_bytes: float, stages: int) -> None:
        """Hand-over of activations between `stages` stages, rank to rank."""
        total = self.num_ranks * stages
        span = Span(2, 1, 2) if total <= self.hardware.node_size else Span(2, 2, 1)
        self.sums["pipeline"] += (stages - 1) * self.hardware.collective_us("all_gather", num_bytes, span)

    def parts(self, gained: float) -> Parts:
        return Parts(**(self.sums | {"overlap_gained": gained}))
