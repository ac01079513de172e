"""Paged attention against dense fp64 attention: one contract for every implementation of `attend`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helix.kernels import attend, attention, merge
from tests.kernels.cases import (
    DTYPES,
    AttentionCase,
    Shape,
    assert_close,
    assert_same_bits,
    bits,
    build_case,
    dense_attention,
)

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
IMPLEMENTATIONS: dict[str, Attend] = {"torch": attend}

DECODE = Shape(lengths=(5, 17, 64, 1), queries=(1, 1, 1, 1))
SHAPES = {
    "decode": DECODE,
    "lengths around the page": Shape(
        lengths=(7, 8, 9, 15, 16, 17), queries=(1,) * 6, page_tokens=8, width=64, v_width=64
    ),
    "one page holds all": Shape(lengths=(3, 11), queries=(1, 2), page_tokens=64),
    "pages of one token": Shape(lengths=(9, 4), queries=(1, 4), page_tokens=1),
    "whole prompts": Shape(lengths=(13, 5, 1), queries=(13, 5, 1)),
    "later chunk of a prompt": Shape(lengths=(70, 41), queries=(29, 8), page_tokens=16),
    "verification of drafts": Shape(lengths=(50, 21, 33), queries=(4, 5, 2)),
    "decode, prefill and a sequence without tokens": Shape(lengths=(30, 20, 12, 9), queries=(1, 20, 0, 3)),
    "group 1": Shape(lengths=(19, 6), queries=(2, 6), num_heads=7, num_kv_heads=7),
    "group 2, 5 KV heads": Shape(lengths=(19, 6), queries=(2, 6), num_heads=10, num_kv_heads=5, width=64, v_width=64),
    "group 3, 9 heads": Shape(lengths=(19, 6), queries=(2, 6), num_heads=9, num_kv_heads=3, width=80, v_width=80),
    "group 8": Shape(lengths=(19, 6), queries=(2, 6), num_heads=24, num_kv_heads=3, width=64, v_width=64),
    "group 5, 1 KV head": Shape(lengths=(19, 6), queries=(2, 6), num_heads=5, num_kv_heads=1),
    "narrow values": Shape(lengths=(19, 6), queries=(2, 6), width=80, v_width=64),
    "wide values": Shape(lengths=(19, 6), queries=(2, 6), width=8, v_width=80),
    "latent": Shape(lengths=(19, 6), queries=(2, 6), num_heads=11, num_kv_heads=1, width=80, v_width=64, latent=True),
    "kvp 2, first tokens see nothing": Shape(lengths=(30, 7), queries=(30, 7), kvp=2, kvp_rank=1),
    "kvp 3, last rank": Shape(lengths=(29, 40, 8, 9), queries=(4, 1, 8, 9), kvp=3, kvp_rank=2),
    "kvp 6, all shards empty but one": Shape(lengths=(3, 4, 24, 20, 21), queries=(1, 1, 1, 1, 1), kvp=6, kvp_rank=5),
    "kvp 6, all shards empty": Shape(lengths=(3, 12, 20), queries=(3, 1, 2), kvp=6, kvp_rank=5),
}


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> Attend:
    return IMPLEMENTATIONS[request.param]


def check(implementation: Attend, case: AttentionCase) -> None:
    out, lse = implementation(*case.arguments)
    want_out, want_lse = case.reference()
    assert out.dtype == case.q_THD.dtype
    assert lse.dtype == torch.float32
    assert_close(out, want_out)
    assert_close(lse, want_lse)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_equals_dense_attention(implementation: Attend, shape: Shape, dtype: torch.dtype) -> None:
    check(implementation, build_case(shape, dtype))


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    sizes = draw(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 12)), min_size=1, max_size=5))
    sizes[0] = (sizes[0][0], max(sizes[0][1], 1))
    kv_heads, kvp = draw(st.integers(1, 4)), draw(st.sampled_from((1, 2, 3, 4, 6)))
    return Shape(
        lengths=tuple(length for length, _ in sizes),
        queries=tuple(min(length, count) for length, count in sizes),
        num_heads=kv_heads * draw(st.sampled_from((1, 2, 3, 8))),
        num_kv_heads=kv_heads,
        width=draw(st.sampled_from((8, 64, 80))),
        v_width=draw(st.sampled_from((8, 64, 80))),
        page_tokens=draw(st.integers(1, 9)),
        kvp=kvp,
        kvp_rank=draw(st.integers(0, kvp - 1)),
    )


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@settings(max_examples=60, deadline=None)
@given(shape=shapes(), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99))
def test_equals_dense_attention_for_any_shape(name: str, shape: Shape, dtype: torch.dtype, seed: int) -> None:
    check(IMPLEMENTATIONS[name], build_case(shape, dtype, seed))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_visible_reads_nothing(implementation: Attend, dtype: torch.dtype) -> None:
    case = build_case(SHAPES["kvp 6, all shards empty"], dtype)
    assert case.k_PBKD.isnan().all()
    assert case.v_PBKV.isnan().all()
    out, lse = implementation(*case.arguments)
    assert_same_bits(out, torch.zeros_like(out))
    assert_same_bits(lse, torch.full_like(lse, -torch.inf))


def test_one_key_gives_its_value_and_its_score(implementation: Attend) -> None:
    case = build_case(Shape(lengths=(1,), queries=(1,), num_heads=2, num_kv_heads=1))
    key, value = case.sequences[0].k_LKD[0, 0], case.sequences[0].v_LKV[0, 0]
    out, lse = implementation(*case.arguments)
    assert_close(out, value.expand(1, 2, -1))
    assert_close(lse, case.scale * (case.q_THD.double() @ key.double()))


def test_equal_scores_give_the_mean_and_a_natural_log(implementation: Attend) -> None:
    case = build_case(Shape(lengths=(11,), queries=(3,)))
    case.q_THD.zero_()
    out, lse = implementation(*case.arguments)
    for token, count in enumerate((9, 10, 11)):
        mean_KV = case.sequences[0].v_LKV[:count].double().mean(0)
        assert_close(out[token], mean_KV.repeat_interleave(3, 0))
        assert_close(lse[token], torch.full((6,), math.log(count)))


@pytest.mark.parametrize("shift", [-400.0, 400.0])
def test_scores_beyond_the_range_of_exp(implementation: Attend, shift: float) -> None:
    case = build_case(replace(SHAPES["verification of drafts"], width=9, v_width=8))
    case.q_THD[..., -1] = shift
    for tensor in (case.k_PBKD, *(one.k_LKD for one in case.sequences)):
        tensor[..., -1] = torch.where(tensor[..., -1].isnan(), torch.nan, 1.0)
    for one, queries in zip(case.sequences, torch.split(case.q_THD, [4, 5, 2]), strict=True):
        one.q_THD.copy_(queries)
    want_out, want_lse = case.reference()
    assert set(want_lse.sign().flatten().tolist()) == {math.copysign(1.0, shift)}
    assert want_lse.abs().min() > 100
    out, lse = implementation(*case.arguments)
    assert (out - want_out).abs().max() < 1e-4
    assert_close(lse, want_lse)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_queries_may_be_a_view_of_the_whole_projection(implementation: Attend, dtype: torch.dtype) -> None:
    case = build_case(SHAPES["group 3, 9 heads"], dtype)
    tokens, _, width = case.q_THD.shape
    projected = torch.full((tokens, 15, width), torch.nan, dtype=dtype)
    projected[:, :9] = case.q_THD
    view = replace(case, q_THD=projected[:, :9])
    assert not view.q_THD.is_contiguous()
    check(implementation, view)


def test_inputs_are_left_alone(implementation: Attend) -> None:
    case = build_case(SHAPES["kvp 3, last rank"])
    tensors = [argument for argument in case.arguments if isinstance(argument, Tensor)]
    before = [bits(tensor) for tensor in tensors]
    implementation(*case.arguments)
    assert all(torch.equal(bits(tensor), was) for tensor, was in zip(tensors, before, strict=True))


def test_nan_in_a_visible_value_stays_loud(implementation: Attend) -> None:
    case = build_case(replace(DECODE, lengths=(9, 6), queries=(1, 1)))
    case.v_PBKV[case.page_table_SR[0, 1], 2, 1] = torch.nan
    case.sequences[0].v_LKV[6, 1] = torch.nan
    out, lse = implementation(*case.arguments)
    want_out, want_lse = case.reference()
    assert out.isnan().sum() == 3 * 8, "the three heads of the second KV head, in the first sequence"
    assert_close(out, want_out)
    assert_close(lse, want_lse)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_scores_without_a_value_stay_loud_through_the_merge(
    implementation: Attend, value: float, dtype: torch.dtype
) -> None:
    """An lse of NaN or inf would pass for an empty shard, and the merge would leave out what went wrong."""
    case = build_case(replace(DECODE, lengths=(9, 6), queries=(1, 1)), dtype)
    clean_out, clean_lse = implementation(*case.arguments)
    case.q_THD[..., 0].abs_()
    case.k_PBKD[case.page_table_SR[0, 1], 2, 1, 0] = value
    out, lse = implementation(*case.arguments)
    assert lse.isfinite().all()
    merged, _ = merge(torch.stack((clean_out, out)), torch.stack((clean_lse, lse)))
    for result in (out, merged):
        assert result[0, 3:].isnan().all(), "the three heads of the second KV head, in the first sequence"
        assert result[0, :3].isfinite().all()
        assert result[1].isfinite().all()


def test_long_chunk_is_cut_into_blocks(implementation: Attend) -> None:
    case = build_case(Shape(lengths=(3300,), queries=(900,), page_tokens=64))
    assert attention._SCORE_BYTES < 4 * 900 * 6 * 3300
    one, some = case.sequences[0], slice(None, None, 29)
    out, lse = implementation(*case.arguments)
    want_out, want_lse = dense_attention(one.q_THD[some], one.k_LKD, one.v_LKV, one.seen_TL[some], case.scale)
    assert_close(out[some], want_out)
    assert_close(lse[some], want_lse)
    assert not out.isnan().any()


@pytest.mark.parametrize("num_bytes", [1, 1500, 3000, 20_000])
def test_size_of_the_blocks_of_the_twin_changes_nothing(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(attention, "_SCORE_BYTES", num_bytes)
    check(attend, build_case(SHAPES["later chunk of a prompt"]))
    check(attend, build_case(SHAPES["kvp 2, first tokens see nothing"]))
