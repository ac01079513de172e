"""The cost formulas against published and derived numbers, and the laws that they must keep on random models."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from helix.cost.choices import Choices, Formats, Placement, Workload
from helix.cost.hardware import Hardware, load_hardware
from helix.cost.memory import memory
from helix.cost.messages import exchange_messages
from helix.cost.step import Parts, placement_cost, step_cost
from helix.cost.weights import attention_matrices, mlp_matrices, rank_weights
from helix.cost.work import attention_read, busiest_hits, expected_ranks_hit
from helix.layout import Layout, PageRule, attention_shard, padded_slice, uneven_slice
from helix.model_spec import ModelSpec, MoESpec
from model_zoo.cards import load_card
from tests.unit.random_models import cases, choices_, dense_spec, specs, workloads

H200 = load_hardware("h200-sxm")
FP4 = Formats(weights="float4", cache="float4", products="float4", attention_products="float4")
BYTES_PER_US = 8e6  # 8000 GB/s


FIGURE_1 = dense_spec()
MILLION = Workload(batch=8, context=10**6, page_tokens=1)


def read_us(layout: Layout, choices: Choices | None = None) -> float:
    placement = Placement(layout=layout, choices=choices or Choices())
    return attention_read(FIGURE_1, placement, FP4, MILLION).num_bytes / BYTES_PER_US


def weights_us(layout: Layout, choices: Choices | None = None) -> float:
    """Weight read of a layer with W_O cut over TPA, as the paper's appendix has it; the text and we cut it over N."""
    choices = choices or Choices()
    matrices = attention_matrices(FIGURE_1, layout, choices)
    as_printed = FIGURE_1.hidden_size * FIGURE_1.num_heads * FIGURE_1.head_dim // layout.tpa
    mlp = mlp_matrices(FIGURE_1, layout.tpf * layout.ep)
    values = matrices["qkv"].values + as_printed + sum(one.values for one in mlp.values())
    return values * 0.5 / BYTES_PER_US


@pytest.mark.parametrize(("tp", "kv", "weights"), [
    (1, 1024, 237.0), (2, 512, 118.5), (4, 256, 59.2), (8, 128, 29.6), (16, 128, 14.9), (32, 128, 7.6), (64, 128, 3.9),
])  # fmt: skip
def test_figure_1_plain_tp(tp: int, kv: float, weights: float) -> None:
    layout = Layout(tpa=tp, tpf=tp, duplicate_kv=True)
    assert read_us(layout) == pytest.approx(kv, rel=1e-3)
    assert weights_us(layout) == pytest.approx(weights, abs=0.06)


@pytest.mark.parametrize(("kvp", "kv", "weights"), [(1, 128, 29.6), (2, 64, 17.0), (4, 32, 10.8), (8, 16, 7.6)])
def test_figure_1_helix(kvp: int, kv: float, weights: float) -> None:
    layout = Layout(kvp=kvp, tpa=8, tpf=8 * kvp)
    assert read_us(layout) == pytest.approx(kv, rel=1e-3)
    assert weights_us(layout) == pytest.approx(weights, abs=0.06)


def test_figure_1_totals() -> None:
    def total(layout: Layout, choices: Choices | None = None) -> float:
        return read_us(layout, choices) + weights_us(layout, choices)

    assert total(Layout(tpa=8, tpf=8)) == pytest.approx(157.6, abs=0.1)
    assert total(Layout(tpa=64, tpf=64, duplicate_kv=True)) == pytest.approx(131.9, abs=0.1)
    assert total(Layout(kvp=8, tpa=8, tpf=8), Choices(merge="gather")) == pytest.approx(45.6, abs=0.1)
    assert total(Layout(kvp=8, tpa=8, tpf=64)) == pytest.approx(23.6, abs=0.1)


def test_output_projection_is_cut_over_all_ranks() -> None:
    layout = Layout(kvp=8, tpa=8, tpf=64)
    assert attention_matrices(FIGURE_1, layout, Choices())["out"].values == 16384 * 16384 // 64


def test_exchange_sizes() -> None:
    """FACTS 1.2 and 1.3: 29 KB a GPU for the dense model, 1.04 MB for R1 in latent space."""
    small = Workload(batch=8, context=10**6)
    dense = Placement(layout=Layout(kvp=8, tpa=8, tpf=64))
    (message,) = exchange_messages(FIGURE_1, dense, Formats(), small)
    assert message.sent_bytes == 7 * 8 * (256 * 2 + 2 * 4)
    r1 = Placement(layout=Layout(kvp=64, tpf=64))
    (message,) = exchange_messages(load_card("deepseek-r1"), r1, Formats(), small)
    assert message.sent_bytes == 63 * 8 * 2 * (512 * 2 + 4)


@pytest.mark.parametrize(("card", "kvp", "gigabytes"), [("llama-3.1-405b", 1, 129), ("deepseek-r1", 1, 17.6)])
def test_kv_of_one_long_request(card: str, kvp: int, gigabytes: float) -> None:
    held = memory(
        load_card(card), Placement(layout=Layout(kvp=kvp)), FP4, H200, Workload(batch=1, context=10**6, page_tokens=1)
    )
    assert held.cache / 1e9 == pytest.approx(gigabytes, rel=0.01)


def test_replicated_mla_weights() -> None:
    """61M parameters a layer stay on every rank however large KVP is (FACTS 1.3)."""
    matrices = attention_matrices(load_card("deepseek-r1"), Layout(kvp=128, tpf=128), Choices())
    assert sum(matrices[name].values for name in ("down", "query_up", "key_up")) / 1e6 == pytest.approx(61.2, abs=0.3)


def test_overlap_of_figure_3() -> None:
    """8 requests of 2 units of attention and 1.2 of exchange: 25.6 in lockstep, 17.2 pipelined."""
    free = {kind: replace(kernel, fixed_us=0.0, bandwidth=1.0) for kind, kernel in H200.kernels.items()}
    hardware = replace(H200, kernels=free, chunks_share_latency=True, layer_us=0.0, step_us=0.0)
    layout, workload = Layout(kvp=2, tpf=2), Workload(batch=8, context=1 << 16)
    spec = dense_spec()

    def parts(overlap: int, machine: Hardware) -> Parts:
        return step_cost(spec, layout, Choices(overlap=overlap), Formats(), machine, workload).parts

    lockstep = parts(1, hardware)
    # Stretch the exchange to 9.6 units where attention takes 16.
    stretch = 0.6 * lockstep.attention_read / lockstep.exchange
    curve = hardware.collectives["all_to_all"]
    slower = replace(curve, us=tuple(us * stretch for us in curve.us))
    hardware = replace(hardware, collectives={**hardware.collectives, "all_to_all": slower})
    lockstep = parts(1, hardware)
    unit = lockstep.attention_read / 16
    assert lockstep.exchange / unit == pytest.approx(9.6, rel=1e-6)
    pipelined = (lockstep.attention_read + lockstep.exchange - parts(8, hardware).overlap_gained) / unit
    assert pipelined == pytest.approx(17.2, rel=1e-6)


# ---- laws on random models ----


@settings(max_examples=300, deadline=None)
@given(case=cases(), choices=choices_, workload=workloads, factor=st.floats(1.0, 10.0))
def test_faster_hardware_is_never_slower(
    case: tuple[ModelSpec, Layout], choices: Choices, workload: Workload, factor: float
) -> None:
    spec, layout = case
    base = step_cost(spec, layout, choices, Formats(), H200, workload).ttl_us
    for scale in ({"bandwidth": factor}, {"products": factor}, {"link": factor}):
        faster = step_cost(spec, layout, choices, Formats(), H200.scaled(**scale), workload).ttl_us
        assert faster <= base * (1 + 1e-9), scale


@settings(max_examples=200, deadline=None)
@given(case=cases(), choices=choices_, workload=workloads)
def test_parts_add_up_and_more_work_takes_longer(
    case: tuple[ModelSpec, Layout], choices: Choices, workload: Workload
) -> None:
    spec, layout = case
    cost = step_cost(spec, layout, choices, Formats(), H200, workload)
    values = [getattr(cost.parts, name) for name in cost.parts.__dataclass_fields__ if name != "overlap_gained"]
    assert cost.ttl_us == pytest.approx(sum(values) - cost.parts.overlap_gained)
    assert min(values) >= 0
    lockstep = replace(choices, overlap=1)
    now = step_cost(spec, layout, lockstep, Formats(), H200, workload).ttl_us
    for more in (replace(workload, batch=workload.batch + 3), replace(workload, context=workload.context + 777)):
        assert step_cost(spec, layout, lockstep, Formats(), H200, more).ttl_us >= now * (1 - 1e-9)


@settings(max_examples=200, deadline=None)
@given(spec=specs(), kvp=st.integers(1, 16), pages=st.integers(1, 40), batch=st.integers(1, 8))
def test_kv_read_falls_as_one_over_kvp(spec: ModelSpec, kvp: int, pages: int, batch: int) -> None:
    """Exactly so for whole page rows; the fullest rank never reads more than a page beyond its share."""
    workload = Workload(batch=batch, context=pages * kvp * 16, page_tokens=16)

    def read(size: int, at: Workload) -> float:
        return attention_read(spec, Placement(layout=Layout(kvp=size, tpf=size)), Formats(), at).num_bytes

    assert read(kvp, workload) * kvp == read(1, workload)
    odd = replace(workload, context=workload.context + 5)
    per_token = read(1, odd) / odd.context
    assert read(kvp, odd) <= per_token * (odd.context / kvp + 16)


@settings(max_examples=300, deadline=None)
@given(case=cases(), context=st.integers(1, 3000), page_tokens=st.sampled_from((1, 16, 64)))
def test_slices_cover_everything_once(case: tuple[ModelSpec, Layout], context: int, page_tokens: int) -> None:
    spec, layout = case
    shards = [attention_shard(spec, layout, rank) for rank in range(layout.num_ranks)]
    heads = sorted(head for shard in shards for head in range(shard.out_start, shard.out_stop))
    assert heads == list(range(spec.num_heads))
    queries = sorted(head for shard in shards[:: layout.kvp] for head in range(shard.q_start, shard.q_stop))
    assert queries == list(range(spec.num_heads))
    rule = PageRule(page_tokens, layout.kvp)
    assert sum(rule.local_len(context, rank) for rank in range(layout.kvp)) == context
    widths = (spec.intermediate_size, spec.vocab_size)
    for total in widths:
        parts = [padded_slice(total, layout.num_ranks, rank) for rank in range(layout.num_ranks)]
        assert [place for part in parts for place in range(part.start, part.stop)] == list(range(total))
    if spec.moe:
        held = [uneven_slice(spec.moe.num_experts, layout.ep, index) for index in range(layout.ep)]
        assert [expert for part in held for expert in range(part.start, part.stop)] == list(range(spec.moe.num_experts))


@settings(max_examples=200, deadline=None)
@given(case=cases(), choices=choices_)
def test_rank_0_holds_the_most(case: tuple[ModelSpec, Layout], choices: Choices) -> None:
    spec, layout = case
    totals = [rank_weights(spec, layout, choices, Formats(), rank=rank).total for rank in range(layout.num_ranks)]
    assert totals[0] == max(totals)
    # All ranks together hold at least one whole model.
    assert sum(totals) >= rank_weights(spec, Layout(), Choices(), Formats()).total


@settings(max_examples=100, deadline=None)
@given(experts=st.integers(2, 96), per_token=st.integers(1, 8), ep=st.integers(1, 16), tokens=st.integers(1, 200))
def test_expert_hits(experts: int, per_token: int, ep: int, tokens: int) -> None:
    assume(per_token <= experts and ep <= experts)
    moe = MoESpec(num_experts=experts, experts_per_token=per_token, expert_width=8)
    held = uneven_slice(experts, ep, 0).size
    busiest = busiest_hits(moe, ep, tokens, "random")
    mean = busiest_hits(moe, ep, tokens, "balanced")
    assert 0 < mean <= busiest + 1e-9 <= held + 1e-6
    assert busiest <= busiest_hits(moe, ep, tokens + 1, "random") + 1e-6
    assert 1.0 - 1e-9 <= expected_ranks_hit(moe, ep) <= min(ep, per_token) + 1e-9
    if ep == 1 and tokens == 1:
        assert busiest == pytest.approx(per_token)


@pytest.mark.parametrize("ep", [3, 8, 64])
def test_ranks_hit_against_a_draw(ep: int) -> None:
    """DeepSeek-R1's choice, drawn: 4 of 8 groups, then 8 experts among theirs."""
    moe = load_card("deepseek-r1").moe
    assert moe is not None
    held = [uneven_slice(256, ep, index) for index in range(ep)]
    source = random.Random(ep)
    hits = 0
    for _ in range(1000):
        allowed = [expert for group in source.sample(range(8), 4) for expert in range(32 * group, 32 * group + 32)]
        chosen = source.sample(allowed, 8)
        hits += sum(any(part.start <= expert < part.stop for expert in chosen) for part in held)
    assert expected_ranks_hit(moe, ep) == pytest.approx(hits / 1000, rel=0.02)


@settings(max_examples=100, deadline=None)
@given(case=cases(), choices=choices_, workload=workloads)
def test_nothing_is_predicted_beyond_the_ceiling(
    case: tuple[ModelSpec, Layout], choices: Choices, workload: Workload
) -> None:
    spec, layout = case
    placement = Placement(layout=layout, choices=replace(choices, overlap=1))
    ceiling = placement_cost(spec, placement, Formats(), H200.ideal(), workload).ttl_us
    assert 0 < ceiling <= placement_cost(spec, placement, Formats(), H200, workload).ttl_us


def test_ceiling_of_a_measured_step() -> None:
    """vLLM takes 20.7 ms for Llama-3.1-8B at 8 x 64K, whose bytes over 4.5 TB/s are 18.8 ms.

    Those bytes count the whole input embedding, of which a step reads 8 rows.
    """
    embedding_us = 128256 * 4096 * 2 / 4.5e6
    spec, placement = load_card("llama-3.1-8b"), Placement(layout=Layout())
    load = Workload(batch=8, context=1 << 16)
    ceiling = placement_cost(spec, placement, Formats(), H200.ideal(), load).ttl_us
    assert ceiling == pytest.approx((18_800 - embedding_us) * 4.5 / 4.54, rel=0.01)
    assert ceiling / 20_700.0 == pytest.approx(0.9, abs=0.02)


def test_pipeline_keeps_all_stages_busy() -> None:
    """Two stages of one GPU and two halves of the batch take as long as one GPU with half of it, and the hand-over."""
    spec = load_card("llama-3.1-8b")
    one = placement_cost(spec, Placement(layout=Layout()), Formats(), H200, Workload(batch=8, context=4096))
    two = placement_cost(spec, Placement(layout=Layout(), pp=2), Formats(), H200, Workload(batch=16, context=4096))
    assert two.ttl_us == pytest.approx(one.ttl_us + two.parts.pipeline)
    assert two.num_ranks == 2
    assert two.tokens_per_s_gpu == pytest.approx(one.tokens_per_s_gpu, rel=0.02)


def test_peers_memory_serves_groups_inside_a_node() -> None:
    """Its kernel packs and merges, which messages do in launches of their own; across nodes all are messages."""
    spec = load_card("llama-3.1-405b")

    def parts(kvp: int, transport: Literal["collective", "symmetric"]) -> Parts:
        layout, load = Layout(kvp=kvp, tpa=2, tpf=2 * kvp), Workload(batch=4, context=1 << 17)
        return step_cost(spec, layout, Choices(transport=transport), Formats(), H200, load).parts

    inside, message = parts(4, "symmetric"), parts(4, "collective")
    assert inside.exchange < message.exchange
    assert inside.all_reduce < message.all_reduce
    packing = 2 * spec.num_layers * H200.kernels["small"].fixed_us
    assert message.launches - inside.launches == pytest.approx(packing)
    assert parts(16, "symmetric") == parts(16, "collective")
