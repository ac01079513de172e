"""Layouts: slices that cover everything once, page ownership against counting, legality against the rules as stated."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from helix.errors import LayoutError
from helix.layout import (
    Layout,
    PageRule,
    Slice,
    attention_shard,
    check_layout,
    default_layout,
    layout_problem,
    legal_layouts,
    nearest_layouts,
    padded_heads,
    padded_slice,
    uneven_slice,
    with_defaults,
)
from helix.model_spec import MLASpec, ModelSpec, MoESpec, RotarySpec

AXES = ("world", "kvp", "tpa", "tpf", "ep")
FIELDS = ("kvp", "tpa", "tpf", "ep")


def make_spec(
    num_heads: int, num_kv_heads: int, *, width: int = 50, num_experts: int = 0, mla: bool = False, vocab: int = 97
) -> ModelSpec:
    return ModelSpec(
        model_type="tiny",
        num_layers=2,
        hidden_size=40,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=8,
        intermediate_size=width,
        vocab_size=vocab,
        max_context=512,
        norm_eps=1e-5,
        rotary=RotarySpec(theta=10000.0, dim=8),
        mla=MLASpec(q_lora_rank=None, kv_lora_rank=16, nope_dim=8, rope_dim=8, v_dim=8) if mla else None,
        moe=MoESpec(num_experts=num_experts, experts_per_token=1, expert_width=width) if num_experts else None,
    )


SMOLLM = make_spec(9, 3)
LLAMA_405B = make_spec(128, 8, width=53248, vocab=128256)
DEEPSEEK = make_spec(128, 128, width=2048, num_experts=256, mla=True)


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    num_kv = draw(st.integers(1, 8))
    return make_spec(
        num_kv * draw(st.integers(1, 9)),
        num_kv,
        width=draw(st.integers(1, 300)),
        num_experts=draw(st.sampled_from((0, 0, 1, 7, 32))),
        mla=draw(st.booleans()),
        vocab=draw(st.integers(1, 400)),
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[ModelSpec, Layout]:
    """A model and a legal layout, one in four the baseline that copies KV."""
    spec = draw(specs())
    if draw(st.integers(0, 3)) == 0:
        sizes = [size for size in range(1, spec.num_heads + 1) if spec.num_heads % size == 0]
        options = [Layout(tpa=size, tpf=size, duplicate_kv=True) for size in sizes]
        options = [one for one in options if layout_problem(spec, one) is None]
    else:
        options = list(legal_layouts(spec, draw(st.integers(1, 24))))
    assume(options)
    return spec, draw(st.sampled_from(options))


@st.composite
def grids(draw: st.DrawFn) -> Layout:
    """Any two grids of the same number of ranks."""
    num_ranks = draw(st.integers(1, 60))
    divisors = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
    tpa, ep = draw(st.sampled_from(divisors)), draw(st.sampled_from(divisors))
    return Layout(kvp=num_ranks // tpa, tpa=tpa, tpf=num_ranks // ep, ep=ep)


def any_layouts() -> st.SearchStrategy[Layout]:
    """Sizes without any relation, grids that fit each other, and the same as baselines that copy KV."""
    size = st.integers(-1, 12)
    loose = st.builds(Layout, kvp=size, tpa=size, tpf=size, ep=size, duplicate_kv=st.booleans())
    copying = grids().map(lambda one: replace(one, kvp=1, tpa=one.num_ranks, duplicate_kv=True))
    return st.one_of(loose, grids(), copying)


# Ranks and groups


@given(layout=grids())
def test_coordinates_follow_the_rank_order(layout: Layout) -> None:
    seen = set()
    for rank in range(layout.num_ranks):
        at = layout.coords(rank)
        assert rank == at.tpa_rank * layout.kvp + at.kvp_rank
        assert rank == at.ep_rank * layout.tpf + at.tpf_rank
        assert all(0 <= getattr(at, f"{axis}_rank") < getattr(layout, axis) for axis in FIELDS)
        seen.add(at)
    assert len(seen) == layout.num_ranks


@given(layout=grids())
def test_groups_partition_the_ranks(layout: Layout) -> None:
    partner = {"kvp": "tpa", "tpa": "kvp", "tpf": "ep", "ep": "tpf"}
    for axis in AXES:
        groups = layout.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(layout.num_ranks))
        if axis == "world":
            assert len(groups) == 1
            continue
        assert len(groups) == getattr(layout, partner[axis])
        for number, group in enumerate(groups):
            at = [layout.coords(rank) for rank in group]
            assert [getattr(one, f"{axis}_rank") for one in at] == list(range(getattr(layout, axis)))
            assert {getattr(one, f"{partner[axis]}_rank") for one in at} == {number}


def test_unknown_axis() -> None:
    with pytest.raises(ValueError, match="unknown axis 'dp'"):
        Layout().groups("dp")


def test_text_of_a_layout() -> None:
    assert str(Layout(kvp=4, tpa=2, tpf=8, ep=1)) == "kvp=4 tpa=2 tpf=8 ep=1"
    assert str(Layout(tpa=2, tpf=2, duplicate_kv=True)) == "kvp=1 tpa=2 tpf=2 ep=1 duplicate_kv"


# Slices


@given(total=st.integers(0, 500), parts=st.integers(1, 64))
def test_padded_slices_cover_once_in_equal_widths(total: int, parts: int) -> None:
    slices = [padded_slice(total, parts, index) for index in range(parts)]
    check_cover(slices, total)
    assert len({one.padded for one in slices}) == 1
    assert sum(one.padded for one in slices) - total < parts, "a narrower slice would do"
    assert all(one.padding == one.padded - one.size >= 0 for one in slices)
    assert all(left.padding == 0 or right.size == 0 for left, right in pairwise(slices)), "only the end is padded"


@given(total=st.integers(0, 500), parts=st.integers(1, 64))
def test_uneven_slices_cover_once_without_padding(total: int, parts: int) -> None:
    slices = [uneven_slice(total, parts, index) for index in range(parts)]
    check_cover(slices, total)
    sizes = [one.size for one in slices]
    assert max(sizes) - min(sizes) <= 1
    assert all(one.padding == 0 for one in slices)


def check_cover(slices: list[Slice], total: int) -> None:
    assert [entry for one in slices for entry in range(one.start, one.stop)] == list(range(total))
    assert {one.total for one in slices} == {total}


@settings(deadline=None)
@given(case=cases())
def test_every_head_is_attended_once_per_kvp_rank(case: tuple[ModelSpec, Layout]) -> None:
    spec, layout = case
    shards = [attention_shard(spec, layout, rank) for rank in range(layout.num_ranks)]
    query = Counter(head for shard in shards for head in range(shard.q_start, shard.q_stop))
    assert query == dict.fromkeys(range(spec.num_heads), layout.kvp)
    for group in layout.groups("kvp"):
        assert len({(shards[rank].q_start, shards[rank].kv_start) for rank in group}) == 1
    kv = Counter(head for shard in shards for head in range(shard.kv_start, shard.kv_stop))
    copies = max(layout.tpa // spec.cache_heads, 1)
    assert copies == 1 or layout.duplicate_kv
    assert kv == dict.fromkeys(range(spec.cache_heads), layout.kvp * copies)
    group_size = spec.num_heads // spec.cache_heads
    for shard in shards:
        assert (shard.num_q, shard.num_kv) == (shard.q_stop - shard.q_start, shard.kv_stop - shard.kv_start)
        read = {head // group_size for head in range(shard.q_start, shard.q_stop)}
        assert read == set(range(shard.kv_start, shard.kv_stop))
        assert shard.num_q % shard.num_kv == 0


@settings(deadline=None)
@given(case=cases())
def test_head_slice_after_the_exchange_is_number_rank(case: tuple[ModelSpec, Layout]) -> None:
    spec, layout = case
    width = -(-spec.num_heads // layout.tpa // layout.kvp)
    places: list[int | None] = []
    for group in layout.groups("kvp"):
        shard = attention_shard(spec, layout, group[0])
        heads: list[int | None] = list(range(shard.q_start, shard.q_stop))
        places += heads + [None] * (layout.kvp * width - len(heads))
    assert len(places) == layout.num_ranks * width
    for rank in range(layout.num_ranks):
        shard = attention_shard(spec, layout, rank)
        mine = [head for head in places[rank * width : (rank + 1) * width] if head is not None]
        assert shard.exchange_heads == width
        assert list(range(shard.out_start, shard.out_stop)) == mine
    assert places.count(None) == padded_heads(spec, layout)
    assert sorted(head for head in places if head is not None) == list(range(spec.num_heads))


@settings(deadline=None)
@given(case=cases())
def test_every_weight_of_the_ffn_and_the_vocabulary_is_held_once(case: tuple[ModelSpec, Layout]) -> None:
    spec, layout = case
    num_ranks = layout.num_ranks
    check_cover([padded_slice(spec.vocab_size, num_ranks, rank) for rank in range(num_ranks)], spec.vocab_size)
    num_experts = spec.moe.num_experts if spec.moe else 1
    width = spec.moe.expert_width if spec.moe else spec.intermediate_size
    held: Counter[tuple[int, int]] = Counter()
    for rank in range(num_ranks):
        at = layout.coords(rank)
        experts = uneven_slice(num_experts, layout.ep, at.ep_rank)
        columns = padded_slice(width, layout.tpf, at.tpf_rank)
        held.update(product(range(experts.start, experts.stop), range(columns.start, columns.stop)))
    assert held == dict.fromkeys(product(range(num_experts), range(width)), 1)


@pytest.mark.parametrize(
    ("layout", "heads_per_rank", "out"),
    [
        (Layout(kvp=2, tpf=2), 5, [(0, 5), (5, 9)]),
        (Layout(kvp=4, tpf=4), 3, [(0, 3), (3, 6), (6, 9), (9, 9)]),
        (Layout(kvp=6, tpf=6), 2, [(0, 2), (2, 4), (4, 6), (6, 8), (8, 9), (9, 9)]),
        (Layout(kvp=2, tpa=3, tpf=6), 2, [(0, 2), (2, 3), (3, 5), (5, 6), (6, 8), (8, 9)]),
        (Layout(kvp=3, tpa=3, tpf=9), 1, [(head, head + 1) for head in range(9)]),
    ],
    ids=str,
)
def test_nine_heads(layout: Layout, heads_per_rank: int, out: list[tuple[int, int]]) -> None:
    assert layout_problem(SMOLLM, layout) is None
    shards = [attention_shard(SMOLLM, layout, rank) for rank in range(layout.num_ranks)]
    assert [(shard.out_start, shard.out_stop) for shard in shards] == out
    assert {shard.exchange_heads for shard in shards} == {heads_per_rank}
    assert {shard.num_q for shard in shards} == {9 // layout.tpa}
    assert [shard.kv_start for shard in shards] == [
        3 // layout.tpa * (rank // layout.kvp) for rank in range(len(shards))
    ]
    assert padded_heads(SMOLLM, layout) == heads_per_rank * layout.num_ranks - 9


def test_128_heads_over_8_kv_heads() -> None:
    layout = Layout(kvp=8, tpa=8, tpf=64)
    assert layout_problem(LLAMA_405B, layout) is None
    shard = attention_shard(LLAMA_405B, layout, 8 * 3 + 5)
    assert (shard.q_start, shard.q_stop, shard.kv_start, shard.kv_stop) == (48, 64, 3, 4)
    assert (shard.exchange_heads, shard.out_start, shard.out_stop) == (2, 58, 60)
    assert padded_heads(LLAMA_405B, layout) == 0
    copied = attention_shard(LLAMA_405B, Layout(tpa=64, tpf=64, duplicate_kv=True), 29)
    assert (copied.q_start, copied.q_stop, copied.kv_start, copied.kv_stop) == (58, 60, 3, 4)


def test_latent_attention_cuts_the_sequence_only() -> None:
    layout = Layout(kvp=32, tpf=1, ep=32)
    assert layout_problem(DEEPSEEK, layout) is None
    shard = attention_shard(DEEPSEEK, layout, 7)
    assert (shard.num_q, shard.kv_start, shard.kv_stop) == (128, 0, 1)
    assert (shard.out_start, shard.out_stop) == (28, 32)
    problem = layout_problem(DEEPSEEK, Layout(kvp=16, tpa=2, tpf=1, ep=32))
    assert problem is not None
    assert "layout.tpa=2" in problem
    assert "latent" in problem
    assert {one.tpa for one in legal_layouts(DEEPSEEK, 32)} == {1}


# Pages


@settings(deadline=None)
@given(page_tokens=st.integers(1, 9), kvp=st.integers(1, 7), num_tokens=st.integers(0, 150))
def test_page_ownership_equals_counting(page_tokens: int, kvp: int, num_tokens: int) -> None:
    rule = PageRule(page_tokens, kvp)
    assert rule.row_tokens == page_tokens * kvp
    owned: list[list[int]] = [[] for _ in range(kvp)]
    position, owner = 0, 0
    while position < num_tokens:  # whole pages are dealt out in turn
        page = range(position, min(position + page_tokens, num_tokens))
        owned[owner] += page
        position, owner = position + page_tokens, (owner + 1) % kvp
    for rank, positions in enumerate(owned):
        assert [rule.owner(one) for one in positions] == [rank] * len(positions)
        assert [rule.local_slot(one) for one in positions] == list(range(len(positions)))
        assert rule.local_len(num_tokens, rank) == len(positions)
    assert sum(rule.local_len(num_tokens, rank) for rank in range(kvp)) == num_tokens
    fullest = max(len(positions) for positions in owned)
    assert rule.rows_for(num_tokens) == -(-fullest // page_tokens)


@given(
    page_tokens=st.integers(1, 256), kvp=st.integers(1, 512), position=st.integers(0, 10**8), rank=st.integers(0, 511)
)
def test_query_sees_its_own_slot_last(page_tokens: int, kvp: int, position: int, rank: int) -> None:
    rule, rank = PageRule(page_tokens, kvp), rank % kvp
    before, after = rule.local_len(position, rank), rule.local_len(position + 1, rank)
    if rule.owner(position) == rank:
        assert (before, after) == (rule.local_slot(position), rule.local_slot(position) + 1)
    else:
        assert before == after
    assert sum(rule.local_len(position, one) for one in range(kvp)) == position
    assert rule.rows_for(position) * page_tokens >= before


# Legality


def is_legal(spec: ModelSpec, layout: Layout) -> bool:
    """The rules of the design, said once more in another way."""
    kvp, tpa, tpf, ep = layout.kvp, layout.tpa, layout.tpf, layout.ep
    if min(kvp, tpa, tpf, ep) < 1 or kvp * tpa != tpf * ep or spec.num_heads % tpa:
        return False
    kv_cut, kv_copied = spec.cache_heads % tpa == 0, tpa % spec.cache_heads == 0
    attention = kvp == 1 and (kv_cut or kv_copied) if layout.duplicate_kv else kv_cut
    experts, width = (spec.moe.num_experts, spec.moe.expert_width) if spec.moe else (1, spec.intermediate_size)
    return attention and ep <= experts and tpf <= width


def check_message(spec: ModelSpec, layout: Layout, problem: str) -> None:
    """The message gives at least one field of the layout, with the value that it has."""
    named = re.findall(r"\b(kvp|tpa|tpf|ep)=(-?\d+)", problem)
    assert named, problem
    wrong = [(name, value) for name, value in named if int(value) != getattr(layout, name)]
    assert wrong in ([], [("kvp", "1")]), problem  # "needs kvp=1"
    assert problem.startswith("layout.")


@settings(max_examples=400, deadline=None)
@given(spec=specs(), layout=any_layouts())
def test_legality_and_its_messages(spec: ModelSpec, layout: Layout) -> None:
    problem = layout_problem(spec, layout)
    assert (problem is None) == is_legal(spec, layout)
    if problem is None:
        check_layout(spec, layout)
        return
    check_message(spec, layout, problem)
    with pytest.raises(LayoutError) as caught:
        check_layout(spec, layout)
    near = nearest_layouts(spec, layout)
    assert str(caught.value).startswith(problem)
    assert all(str(one) in str(caught.value) for one in near)


@pytest.mark.parametrize(
    ("spec", "layout", "message"),
    [
        (SMOLLM, Layout(kvp=0), "layout.kvp=0 must be at least 1"),
        (SMOLLM, Layout(kvp=2, tpf=2, ep=-3), "layout.ep=-3 must be at least 1"),
        (SMOLLM, Layout(kvp=2, tpa=3, tpf=4), "layout.tpf=4 x layout.ep=1 is 4 ranks, but kvp=2 x tpa=3 is 6"),
        (SMOLLM, Layout(tpa=2, tpf=2), "layout.tpa=2 does not divide the model's 9 query heads"),
        (SMOLLM, Layout(tpa=9, tpf=9), "layout.tpa=9 is more than 3 KV heads, which would copy the KV cache"),
        (make_spec(12, 6), Layout(tpa=4, tpf=4), "layout.tpa=4 does not divide 6 KV heads"),
        (SMOLLM, Layout(kvp=2, tpa=3, tpf=6, duplicate_kv=True), "layout.duplicate_kv .* not kvp=2"),
        (make_spec(24, 6), Layout(tpa=4, tpf=4, duplicate_kv=True), "layout.tpa=4 with duplicate_kv .* 6 KV heads"),
        (SMOLLM, Layout(kvp=3, ep=3), "layout.ep=3 needs a model with experts; tiny is dense"),
        (make_spec(4, 1, num_experts=2), Layout(kvp=3, ep=3), "layout.ep=3 is more than the model's 2 experts"),
        (make_spec(4, 1, width=5), Layout(kvp=6, tpf=6), "layout.tpf=6 is more than the FFN width 5"),
    ],
    ids=str,
)
def test_each_message(spec: ModelSpec, layout: Layout, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        check_layout(spec, layout)


def test_refusal_ends_with_the_nearest_legal_layouts() -> None:
    with pytest.raises(LayoutError, match=r"; nearest legal: kvp=3 tpa=3 tpf=9 ep=1 \| kvp=9 tpa=1 tpf=9 ep=1$"):
        check_layout(SMOLLM, Layout(tpa=9, tpf=9))
    with pytest.raises(LayoutError, match=r"FFN width 5$"):
        check_layout(make_spec(4, 1, width=5), Layout(kvp=6, tpf=6))


@settings(deadline=None)
@given(spec=specs(), num_ranks=st.integers(1, 16))
def test_legal_layouts_are_exactly_those_that_copy_no_kv(spec: ModelSpec, num_ranks: int) -> None:
    found = list(legal_layouts(spec, num_ranks))
    sizes = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
    options = [Layout(kvp=num_ranks // tpa, tpa=tpa, tpf=num_ranks // ep, ep=ep) for tpa in sizes for ep in sizes]
    assert set(found) == {layout for layout in options if is_legal(spec, layout)}
    assert len(found) == len(set(found))
    assert all(layout.tpa <= spec.cache_heads and not layout.duplicate_kv for layout in found)


@settings(deadline=None)
@given(spec=specs(), layout=any_layouts(), count=st.integers(1, 5))
def test_nearest_layouts(spec: ModelSpec, layout: Layout, count: int) -> None:
    near = nearest_layouts(spec, layout, count)
    options = list(legal_layouts(spec, max(layout.num_ranks, 1)))
    assert len(near) == min(count, len(options))
    assert all(layout_problem(spec, one) is None for one in near)

    def num_changes(one: Layout) -> int:
        return sum(getattr(one, name) != getattr(layout, name) for name in FIELDS)

    changes = [num_changes(one) for one in near]
    assert changes == sorted(changes)
    assert not near or max(changes) <= min([num_changes(one) for one in options if one not in near], default=4)
    if layout in options:
        assert near[0] == layout


def test_fewest_changes_come_before_small_ones() -> None:
    near = nearest_layouts(make_spec(16, 8, width=300, num_experts=32), Layout(kvp=2, tpa=3, tpf=3, ep=2))
    assert [str(one) for one in near] == [
        "kvp=3 tpa=2 tpf=3 ep=2",
        "kvp=6 tpa=1 tpf=3 ep=2",
        "kvp=3 tpa=2 tpf=2 ep=3",
    ]


# Defaults


@pytest.mark.parametrize(
    ("sizes", "num_ranks", "expected"),
    [
        ({}, None, Layout()),
        ({}, 6, Layout(kvp=6, tpf=6)),
        ({"kvp": 3}, None, Layout(kvp=3, tpf=3)),
        ({"kvp": 3}, 8, Layout(kvp=3, tpf=3)),
        ({"kvp": 3, "tpa": 2}, 6, Layout(kvp=3, tpa=2, tpf=6)),
        ({"tpa": 2}, 6, Layout(kvp=3, tpa=2, tpf=6)),
        ({"tpa": 4}, 2, Layout(kvp=1, tpa=4, tpf=4)),
        ({"kvp": 8, "ep": 8}, None, Layout(kvp=8, tpf=1, ep=8)),
        ({"kvp": 8, "ep": 2}, None, Layout(kvp=8, tpf=4, ep=2)),
        ({"kvp": 8, "tpf": 2}, None, Layout(kvp=8, tpf=2, ep=4)),
        ({"kvp": 8, "tpf": 2, "ep": 2}, None, Layout(kvp=8, tpf=2, ep=2)),
        ({"kvp": 8, "tpf": 3}, None, Layout(kvp=8, tpf=3, ep=1)),
        ({"kvp": 8, "ep": 3}, None, Layout(kvp=8, tpf=8, ep=3)),
        ({"kvp": 8, "tpf": 0}, None, Layout(kvp=8, tpf=0, ep=1)),
        ({"kvp": 8, "ep": 0}, None, Layout(kvp=8, tpf=8, ep=0)),
        ({"tpa": 4, "duplicate_kv": True}, 4, Layout(tpa=4, tpf=4, duplicate_kv=True)),
        ({"tpa": 2, "duplicate_kv": True}, 4, Layout(tpa=2, tpf=2, duplicate_kv=True)),
        ({"tpa": 0}, 4, Layout(kvp=4, tpa=0, tpf=0)),
    ],
    ids=str,
)
def test_with_defaults(sizes: dict[str, int | bool], num_ranks: int | None, expected: Layout) -> None:
    assert with_defaults(sizes, num_ranks) == expected


@given(layout=grids(), given_fields=st.sets(st.sampled_from(("tpf", "ep")), max_size=2))
def test_defaults_complete_what_was_given(layout: Layout, given_fields: set[str]) -> None:
    sizes = {name: getattr(layout, name) for name in given_fields}
    expected = layout if given_fields else replace(layout, tpf=layout.num_ranks, ep=1)
    assert with_defaults({"tpa": layout.tpa, **sizes}, layout.num_ranks) == expected
    assert with_defaults({"kvp": layout.kvp, "tpa": layout.tpa, **sizes}) == expected


@pytest.mark.parametrize(
    ("spec", "num_ranks", "expected"),
    [
        (SMOLLM, 1, Layout()),
        (SMOLLM, 2, Layout(kvp=2, tpf=2)),
        (SMOLLM, 3, Layout(kvp=1, tpa=3, tpf=3)),
        (SMOLLM, 6, Layout(kvp=2, tpa=3, tpf=6)),
        (SMOLLM, 9, Layout(kvp=3, tpa=3, tpf=9)),
        (LLAMA_405B, 64, Layout(kvp=8, tpa=8, tpf=64)),
        (DEEPSEEK, 32, Layout(kvp=32, tpf=1, ep=32)),
        (make_spec(20, 4), 10, Layout(kvp=5, tpa=2, tpf=10)),
    ],
    ids=str,
)
def test_default_layout(spec: ModelSpec, num_ranks: int, expected: Layout) -> None:
    layout, reason = default_layout(spec, num_ranks)
    assert layout == expected
    assert "no KV copied" in reason


@settings(deadline=None)
@given(spec=specs(), num_ranks=st.integers(1, 24))
def test_default_layout_is_legal_and_no_layout_pads_less(spec: ModelSpec, num_ranks: int) -> None:
    options = list(legal_layouts(spec, num_ranks))
    if not options:
        with pytest.raises(LayoutError, match=f"no legal layout on {num_ranks} ranks"):
            default_layout(spec, num_ranks)
        return
    layout, _ = default_layout(spec, num_ranks)
    assert layout in options
    assert padded_heads(spec, layout) == min(padded_heads(spec, one) for one in options)
