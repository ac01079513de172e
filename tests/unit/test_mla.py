"""Latent attention without ranks: which form a chunk takes, what each rank holds, and that both forms agree."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helix.cache.pools import build_cache
from helix.comm.mesh import planning_mesh
from helix.config import CommConfig
from helix.cost.latent import attention_flops, expand_from
from helix.layers.batch import Batch
from helix.layers.mla import MLA, Part, resolve_ways, split_by_form
from helix.layers.rotary import Rotary
from helix.layout import Layout
from helix.model_spec import MLASpec, ModelSpec, RotarySpec
from helix.weights import Piece, dummy_weights

V3 = MLASpec(q_lora_rank=1536, kv_lora_rank=512, nope_dim=128, rope_dim=64, v_dim=128)
TINY = MLASpec(q_lora_rank=7, kv_lora_rank=10, nope_dim=5, rope_dim=4, v_dim=3)
META = torch.device("meta")


def model(mla: MLASpec, num_heads: int, hidden: int = 24) -> ModelSpec:
    return ModelSpec(
        model_type="deepseek_v3",
        num_layers=1,
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=mla.nope_dim + mla.rope_dim,
        intermediate_size=8,
        vocab_size=16,
        max_context=256,
        norm_eps=1e-6,
        rotary=RotarySpec(theta=10000.0, dim=mla.rope_dim, interleaved=True),
        mla=mla,
    )


def step(counts: list[int], contexts: list[int], page_tokens: int = 4) -> Batch:
    """A step on one rank: `counts` new tokens of sequences that are `contexts` long with them."""
    pages = [-(-length // page_tokens) for length in contexts]
    table = torch.zeros(len(counts), max(pages), dtype=torch.int32)
    first = 0
    for row, used in enumerate(pages):
        table[row, :used] = torch.arange(first, first + used)
        first += used
    position = [torch.arange(length - count, length) for count, length in zip(counts, contexts, strict=True)]
    slot = [table[row, at // page_tokens].long() * page_tokens + at % page_tokens for row, at in enumerate(position)]
    position_T = torch.cat(position)
    return Batch(
        token_ids_T=torch.zeros_like(position_T),
        position_T=position_T,
        rotary_len_T=position_T + 1,
        slot_T=torch.cat(slot),
        visible_len_T=position_T + 1,
        query_start_S1=torch.tensor([0, *counts]).cumsum(0),
        page_table_SR=table,
        sample_T=torch.zeros(0, dtype=torch.int64),
        counts_S=tuple(counts),
    )


def test_where_the_expanded_form_gets_cheaper() -> None:
    """By hand for V3: 2 * 1088 n against 2 * 320 n + 2 * 512 * 256, equal at n = 170.67."""
    assert attention_flops(V3, "absorbed", 1) == 2176
    assert attention_flops(V3, "expanded", 0) == 262144
    assert attention_flops(V3, "expanded", 1) == 262144 + 640
    assert expand_from(V3) == 171
    assert expand_from(replace(V3, v_dim=900)) is None


@given(latent=st.integers(1, 64), nope=st.integers(1, 64), rope=st.integers(1, 16), value=st.integers(1, 64))
def test_threshold_is_the_first_cheaper_count(latent: int, nope: int, rope: int, value: int) -> None:
    mla = MLASpec(q_lora_rank=None, kv_lora_rank=latent, nope_dim=nope, rope_dim=rope, v_dim=value)
    threshold = expand_from(mla)
    below = 10**6 if threshold is None else threshold - 1
    assert attention_flops(mla, "expanded", below) >= attention_flops(mla, "absorbed", below)
    if threshold is not None:
        assert attention_flops(mla, "expanded", threshold) < attention_flops(mla, "absorbed", threshold)


def test_auto_repeats_queries_and_exchanges_latents() -> None:
    assert resolve_ways(CommConfig()) == resolve_ways(CommConfig(query="replicate", exchange_space="latent"))
    ways = resolve_ways(CommConfig(query="gather", exchange_space="value"))
    assert (ways.query, ways.exchange_space) == ("gather", "value")


def test_decode_and_short_steps_are_absorbed_as_they_are() -> None:
    batch = step([1, 3, 1], [9, 5, 2])
    (part,) = split_by_form(batch, 4)
    assert not part.expanded
    assert part.token_index_T is None
    assert part.visible_len_T is batch.visible_len_T
    assert not split_by_form(batch, None)[0].expanded
    assert not split_by_form(step([2, 2], [2, 2]), 3)[0].expanded, "long enough together, but not alone"


def test_long_chunks_alone_are_expanded_as_they_are() -> None:
    (part,) = split_by_form(step([5, 4], [9, 4]), 4)
    assert part.expanded
    assert part.token_index_T is None


@settings(deadline=None)
@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    extra=st.lists(st.integers(0, 9), min_size=6, max_size=6),
    threshold=st.integers(1, 10),
)
def test_parts_are_the_step_taken_apart(counts: list[int], extra: list[int], threshold: int) -> None:
    batch = step(counts, [count + more for count, more in zip(counts, extra, strict=False)])
    starts = batch.query_start_S1.tolist()
    seen: list[tuple[int, bool]] = []
    for part in split_by_form(batch, threshold):
        index_T = torch.arange(sum(counts)) if part.token_index_T is None else part.token_index_T
        assert torch.equal(part.visible_len_T, batch.visible_len_T[index_T])
        mine = [row for row, count in enumerate(counts) if (count >= threshold) == part.expanded]
        assert torch.equal(part.page_table_SM, batch.page_table_SR[mine])
        assert part.query_start_S1.diff().tolist() == [counts[row] for row in mine]
        assert index_T.tolist() == [token for row in mine for token in range(starts[row], starts[row + 1])]
        seen += [(token, part.expanded) for token in index_T.tolist()]
    assert sorted(token for token, _ in seen) == list(range(sum(counts)))


LAYOUTS = [Layout(kvp=kvp) for kvp in (1, 2, 3, 4, 6, 8)] + [Layout(tpa=tpa, duplicate_kv=True) for tpa in (2, 3, 6)]


def build(spec: ModelSpec, layout: Layout, rank: int, query: str, space: str) -> MLA:
    comm = CommConfig.model_validate({"query": query, "exchange_space": space})
    layout = replace(layout, tpf=layout.num_ranks)
    return MLA("attn", spec, planning_mesh(layout, rank), comm, dtype=torch.float32, device=META)


def covered(pieces: list[Piece], dim: int) -> list[int]:
    """Places along `dim` that pieces of one tensor read, each as often as it is read."""
    return sorted(place for piece in pieces for place in range(*piece.source[dim]))


@pytest.mark.parametrize(
    ("num_heads", "layout"),
    [(heads, layout) for heads in (1, 5, 6, 12) for layout in LAYOUTS if heads % layout.tpa == 0],
    ids=str,
)
def test_ranks_hold_shares_of_what_is_not_repeated(num_heads: int, layout: Layout) -> None:
    """W_UK, W_UV, the query's up-projection and the output projection: each row or column on one rank, in order."""
    spec = model(TINY, num_heads)
    ranks = [build(spec, layout, rank, "gather", "latent") for rank in range(layout.num_ranks)]
    once: dict[str, list[Piece]] = {"uk": [], "uv": [], "q": [], "out": []}
    for rank in ranks:
        assert rank.inputs.q_up is not None
        once["uk"] += rank.w_uk.declared["weight"]
        once["uv"] += rank.w_uv.declared["weight"]
        once["q"] += rank.inputs.q_up.declared["weight"]
        once["out"] += rank.out.declared["weight"]
        assert rank.w_uk.weight.shape == (rank.exchange.heads_per_rank, 5, 10)
        assert rank.w_uv.weight.shape == (rank.exchange.heads_per_rank, 3, 10)
    rows = covered(once["uk"], 0) + covered(once["uv"], 0)
    assert sorted(rows) == list(range(num_heads * 8)), "keys and values together are kv_b_proj"
    assert all(place % 8 < 5 for place in covered(once["uk"], 0))
    assert covered(once["q"], 0) == list(range(num_heads * 9))
    assert covered(once["out"], 1) == list(range(num_heads * 3))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ranks_repeat_what_is_chosen_to_be(layout: Layout) -> None:
    spec = model(TINY, 6)
    for rank in range(layout.num_ranks):
        layer = build(spec, layout, rank, "replicate", "value")
        assert layer.inputs.q_up is not None
        heads = 6 // layout.tpa
        assert layer.w_uk.weight.shape == (heads, 5, 10)
        assert layer.w_uv.weight.shape == (heads, 3, 10)
        first = rank // layout.kvp * heads
        assert covered(list(layer.inputs.q_up.declared["weight"]), 0) == list(range(first * 9, (first + heads) * 9))


def test_weights_that_deepseek_v3_repeats_on_every_rank() -> None:
    """11.0M + 37.7M + 4.1M + 8.4M: the down-projections, the query's up-projection, and W_UK."""
    spec = model(V3, 128, hidden=7168)
    layer = build(spec, Layout(kvp=64), 0, "replicate", "latent")
    repeated = sum(p.numel() for part in (layer.inputs, layer.w_uk) for p in part.parameters())
    assert repeated == pytest.approx(61.3e6, rel=0.01)
    assert sum(p.numel() for p in layer.w_uv.parameters()) == 2 * 128 * 512
    gathered = build(spec, Layout(kvp=64), 0, "gather", "latent")
    assert sum(p.numel() for p in gathered.inputs.parameters()) == pytest.approx(11.0e6 + 4.1e6 + 37.7e6 / 64, rel=0.01)


def run(layer: MLA, batch: Batch, history: Tensor, x_TC: Tensor) -> Tensor:
    """The layer on `batch`, after every other position of its sequences was put in the cache with hidden states."""
    spec = model(layer.mla, layer.num_heads)
    pages = int(batch.page_table_SR.max()) + 1
    cache = build_cache(spec, Layout(), 0, pages, 4, x_TC.dtype, x_TC.device).layers[0]
    for tensor in cache.tensors:
        tensor.fill_(torch.nan)
    rotary = Rotary(spec.rotary, spec.max_context)
    before = int(batch.position_T[0])
    table = batch.page_table_SR[:1]
    past = step([before], [before]) if before else None
    if past is not None:
        past = replace(
            past, page_table_SR=table, slot_T=table[0, past.position_T // 4].long() * 4 + past.position_T % 4
        )
        layer(history[:before], past, cache, rotary.tables(past.position_T))
    out: Tensor = layer(x_TC, batch, cache, rotary.tables(batch.position_T))
    return out


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=["float32", "bfloat16"]
)
def test_both_forms_give_the_same(dtype: torch.dtype, tolerance: float) -> None:
    spec = model(TINY, 3)
    layer = MLA("attn", spec, planning_mesh(Layout(), 0), CommConfig(), dtype=dtype, device=torch.device("cpu"))
    dummy_weights(layer, 0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(20.0 if parameter.dim() > 1 else 1.0)
    batch = step([6, 1, 9], [17, 1, 9])
    x_TC = torch.randn(16, 24, generator=torch.Generator().manual_seed(0)).to(dtype)
    results = []
    for threshold in (None, 1, 7):
        layer.threshold = threshold
        results.append(run(layer, batch, x_TC, x_TC).float())
    absorbed, expanded, mixed = results
    size = absorbed.abs().max()
    assert size > 0.1
    assert (absorbed - expanded).abs().max() < tolerance * size
    assert (absorbed - mixed).abs().max() < tolerance * size
    # The third sequence is expanded in both; products of another shape may round otherwise on some processors.
    assert (mixed[7:] - expanded[7:]).abs().max() < 0.5 * tolerance * size
    assert not torch.equal(absorbed, expanded), "they are two ways of rounding"


def test_part_says_which_tokens() -> None:
    parts = split_by_form(step([6, 1, 9], [17, 1, 9]), 7)
    assert [(part.expanded, _tokens(part)) for part in parts] == [(False, [*range(7)]), (True, [*range(7, 16)])]


def _tokens(part: Part) -> list[int]:
    assert part.token_index_T is not None
    tokens: list[int] = part.token_index_T.tolist()
    return tokens


def test_a_model_without_latent_attention_is_refused() -> None:
    spec = replace(model(TINY, 2), mla=None)
    with pytest.raises(ValueError, match="deepseek_v3 has no latent attention"):
        build(spec, Layout(), 0, "auto", "auto")
