"""The rivals' layouts under their own published rules, as placements that the same cost functions price.

* plain TP: heads over all ranks; beyond K ranks each KV head is copied (for MLA the whole latent cache).
* TP x PP: pipeline stages of TP ranks.
* DP attention: each replica holds whole sequences, experts are spread over all ranks (production DeepSeek style); for
  dense models tokens are gathered for a TP FFN and scattered back.
* KVP tied to TP (Medha, arXiv 2409.17264): sequence shards of a fixed TP group; partial results are gathered back onto
  it, and FFN weights are repeated on every KVP shard.
* DCP (vLLM, SGLang): TP ranks share a sequence where plain TP would copy it; the queries are gathered, the merge is
  all-gather + reduce-scatter or an all-to-all. vLLM asks ``tp % dcp == 0`` for MLA, else
  ``(tp // kv_heads) % dcp == 0``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from helix.cost.choices import Choices, Placement
from helix.layout import Layout
from helix.model_spec import ModelSpec
from helix.planner.candidates import Candidate, Refused, Scheme


def rival_candidates(spec: ModelSpec, num_ranks: int, base: Choices) -> Iterator[Candidate | Refused]:
    """All placements of the rivals on `num_ranks` ranks; one `Refused` for each size that their rules forbid."""
    base = replace(base, query="replicate", exchange_space="latent", dispatch="local", overlap=1)
    yield from _tensor_parallel(spec, num_ranks, base)
    yield from _pipelined(spec, num_ranks, base)
    yield from _data_parallel(spec, num_ranks, base)
    yield from _tied(spec, num_ranks, base)
    yield from _decode_context_parallel(spec, num_ranks, base)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _tp_problem(spec: ModelSpec, tp: int) -> str | None:
    """Why TP of this size is refused: whole query heads and whole or copied KV heads a rank."""
    heads, kv = spec.num_heads, spec.cache_heads
    if heads % tp:
        return f"tp={tp} does not divide the {heads} query heads"
    if kv % tp and tp % kv:
        return f"tp={tp} neither divides the {kv} KV heads nor is a multiple of them"
    return None


def _ffn_grids(spec: ModelSpec, ranks: int) -> Iterator[tuple[int, int]]:
    """(tpf, ep) that a single flag expresses: all width, or all experts."""
    width = spec.moe.expert_width if spec.moe else spec.intermediate_size
    if ranks <= width:
        yield ranks, 1
    if spec.moe and 1 < ranks <= spec.moe.num_experts:
        yield 1, ranks


def _tensor_parallel(spec: ModelSpec, num_ranks: int, base: Choices) -> Iterator[Candidate | Refused]:
    problem = _tp_problem(spec, num_ranks)
    if problem:
        yield Refused("tp", f"tp={num_ranks}", problem)
        return
    for tpf, ep in _ffn_grids(spec, num_ranks):
        layout = Layout(kvp=1, tpa=num_ranks, tpf=tpf, ep=ep, duplicate_kv=num_ranks > spec.cache_heads)
        yield Candidate("tp", Placement(layout=layout, choices=base))


def _pipelined(spec: ModelSpec, num_ranks: int, base: Choices) -> Iterator[Candidate | Refused]:
    for pp in _divisors(num_ranks)[1:]:
        tp = num_ranks // pp
        problem = _tp_problem(spec, tp)
        if pp > spec.num_layers:
            problem = f"pp={pp} is more than the {spec.num_layers} layers"
        if problem:
            yield Refused("tp-pp", f"tp={tp} pp={pp}", problem)
            continue
        for tpf, ep in _ffn_grids(spec, tp):
            layout = Layout(kvp=1, tpa=tp, tpf=tpf, ep=ep, duplicate_kv=tp > spec.cache_heads)
            yield Candidate("tp-pp", Placement(layout=layout, choices=base, pp=pp))


def _data_parallel(spec: ModelSpec, num_ranks: int, base: Choices) -> Iterator[Candidate | Refused]:
    for tp in _divisors(num_ranks)[:-1]:
        if tp > spec.cache_heads or _tp_problem(spec, tp):
            continue
        for tpf, ep in _ffn_grids(spec, num_ranks):
            if spec.moe is not None and ep == 1:
                continue
            yield Candidate(
                "dp-ep", Placement(layout=Layout(kvp=1, tpa=tp, tpf=tpf, ep=ep), choices=base, dp=num_ranks // tp)
            )
    if spec.moe is not None and num_ranks > spec.moe.num_experts:
        yield Refused("dp-ep", f"ep={num_ranks}", f"ep={num_ranks} is more than the {spec.moe.num_experts} experts")


def _tied(spec: ModelSpec, num_ranks: int, base: Choices) -> Iterator[Candidate | Refused]:
    choices = replace(base, merge="gather")
    for tp in _divisors(num_ranks)[:-1]:
        problem = _tp_problem(spec, tp)
        if problem:
            yield Refused("medha", f"kvp={num_ranks // tp} tp={tp}", problem)
            continue
        for tpf, ep in _ffn_grids(spec, tp):
            yield Candidate(
                "medha", Placement(layout=Layout(kvp=num_ranks // tp, tpa=tp, tpf=tpf, ep=ep), choices=choices)
            )


def _decode_context_parallel(spec: ModelSpec, num_ranks: int, base: Choices) -> Iterator[Candidate | Refused]:
    schemes: tuple[tuple[Scheme, Literal["ag_rs", "a2a"]], ...] = (("dcp-ag-rs", "ag_rs"), ("dcp-a2a", "a2a"))
    for dcp in _divisors(num_ranks)[1:]:
        problem = _tp_problem(spec, num_ranks) or _dcp_problem(spec, num_ranks, dcp)
        for scheme, merge in schemes:
            if problem:
                yield Refused(scheme, f"tp={num_ranks} dcp={dcp}", problem)
                continue
            choices = replace(base, query="gather", merge=merge)
            for tpf, ep in _ffn_grids(spec, num_ranks):
                layout = Layout(kvp=dcp, tpa=num_ranks // dcp, tpf=tpf, ep=ep)
                yield Candidate(scheme, Placement(layout=layout, choices=choices))


def _dcp_problem(spec: ModelSpec, tp: int, dcp: int) -> str | None:
    if spec.mla:
        return None  # tp % dcp == 0 holds by construction
    if tp < spec.num_kv_heads or (tp // spec.num_kv_heads) % dcp:
        return (
            f"vLLM needs (tp // kv_heads) % dcp == 0, but ({tp} // {spec.num_kv_heads}) % {dcp} is not: it only shards "
            "a sequence where TP would copy its KV heads"
        )
    return None
