"""Merge of partial results: against fp64, against attention over the union, and what empty parts may hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helix.kernels import attend, merge
from tests.kernels.cases import (
    DTYPES,
    TOLERANCES,
    Shape,
    assert_close,
    assert_same_bits,
    bits,
    build_case,
    dense_attention,
    dense_merge,
    random_partials,
)

Merge = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
IMPLEMENTATIONS: dict[str, Merge] = {"torch": merge}
PARTS = (1, 2, 3, 6, 8)
EMPTY_LSE = (-torch.inf, torch.inf, torch.nan)
EMPTY_OUT = (torch.nan, torch.inf, -torch.inf)


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> Merge:
    return IMPLEMENTATIONS[request.param]


def check(implementation: Merge, out_ZTHD: Tensor, lse_ZTH: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = implementation(out_ZTHD, lse_ZTH)
    want_out, want_lse = dense_merge(out_ZTHD, lse_ZTH)
    assert out.dtype == out_ZTHD.dtype
    assert lse.dtype == torch.float32
    assert_close(out, want_out)
    assert_close(lse, want_lse)
    return out, lse


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize(("tokens", "heads", "width"), [(1, 1, 8), (5, 9, 80), (17, 3, 64)])
def test_equals_dense_merge(
    implementation: Merge, parts: int, tokens: int, heads: int, width: int, dtype: torch.dtype
) -> None:
    partials = random_partials(parts, tokens, heads, width, dtype, seed=parts)
    before = [bits(tensor) for tensor in partials]
    out, lse = check(implementation, *partials)
    assert all(torch.equal(bits(tensor), was) for tensor, was in zip(partials, before, strict=True))
    assert_same_bits(out[0], torch.zeros_like(out[0]))
    assert lse[0].isneginf().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("lse_value", EMPTY_LSE)
@pytest.mark.parametrize("out_value", [0.0, *EMPTY_OUT])
def test_all_parts_empty(
    implementation: Merge, parts: int, lse_value: float, out_value: float, dtype: torch.dtype
) -> None:
    partial = torch.full((parts, 3, 5, 8), out_value, dtype=dtype)
    out, lse = implementation(partial, torch.full((parts, 3, 5), lse_value))
    assert_same_bits(out, torch.zeros(3, 5, 8, dtype=dtype))
    assert_same_bits(lse, torch.full((3, 5), -torch.inf))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("parts", PARTS)
def test_empty_parts_are_not_read(implementation: Merge, parts: int, dtype: torch.dtype) -> None:
    out_ZTHD, lse_ZTH = random_partials(parts, 12, 5, 8, dtype, seed=3)
    empty_ZTH = lse_ZTH.isneginf()
    which = torch.arange(lse_ZTH.numel()).view_as(lse_ZTH)
    dirty_lse = torch.where(empty_ZTH, torch.tensor(EMPTY_LSE)[which % 3], lse_ZTH)
    dirty_out = torch.where(
        empty_ZTH.unsqueeze(-1), torch.tensor(EMPTY_OUT, dtype=dtype)[which // 3 % 3, None], out_ZTHD
    )
    clean, dirty = implementation(out_ZTHD, lse_ZTH), check(implementation, dirty_out, dirty_lse)
    assert dirty_lse.isnan().any()
    assert dirty_out.isnan().any()
    assert_same_bits(dirty[0], clean[0])
    assert_same_bits(dirty[1], clean[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nan_lse", [2.0, -500.0], ids=["weighty", "weight underflows"])
def test_nan_output_with_finite_lse_stays_nan(implementation: Merge, nan_lse: float, dtype: torch.dtype) -> None:
    out_ZTHD, lse_ZTH = random_partials(4, 6, 3, 8, dtype)
    out_ZTHD[1, 2, 1, 5] = torch.nan
    lse_ZTH[:, 2, 1] = torch.tensor([1.0, nan_lse, 3.0, -torch.inf])
    out, lse = implementation(out_ZTHD, lse_ZTH)
    assert torch.nonzero(out.isnan()).tolist() == [[2, 1, 5]]
    assert not lse.isnan().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_part_is_given_back_unchanged(implementation: Merge, dtype: torch.dtype) -> None:
    out_ZTHD, lse_ZTH = random_partials(1, 9, 5, 64, dtype)
    out, lse = implementation(out_ZTHD, lse_ZTH)
    assert_same_bits(out, out_ZTHD[0])
    assert_same_bits(lse, lse_ZTH[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("parts", PARTS)
def test_order_of_parts_does_not_matter(implementation: Merge, parts: int, dtype: torch.dtype) -> None:
    out_ZTHD, lse_ZTH = random_partials(parts, 7, 5, 64, dtype, seed=4)
    want_out, want_lse = implementation(out_ZTHD, lse_ZTH)
    for order in (torch.arange(parts).flip(0), torch.randperm(parts, generator=torch.Generator().manual_seed(1))):
        out, lse = implementation(out_ZTHD[order], lse_ZTH[order])
        assert_close(out, want_out)
        assert_close(lse, want_lse)


@pytest.mark.parametrize("shift", [-3000.0, -90.0, 90.0, 3000.0])
def test_size_of_the_lse_does_not_matter(implementation: Merge, shift: float) -> None:
    out_ZTHD, lse_ZTH = random_partials(6, 7, 5, 8, seed=5)
    check(implementation, out_ZTHD, lse_ZTH + shift)


def test_part_far_below_the_others_adds_nothing(implementation: Merge) -> None:
    out = torch.stack([torch.full((1, 1, 8), 3.0), torch.full((1, 1, 8), 5.0)])
    merged, lse = implementation(out, torch.tensor([[[-200.0]], [[250.0]]]))
    assert_same_bits(merged, torch.full((1, 1, 8), 5.0))
    assert_same_bits(lse, torch.tensor([[250.0]]))


def test_partials_may_be_views_of_a_message(implementation: Merge) -> None:
    out_ZTHD, lse_ZTH = random_partials(3, 4, 5, 8)
    message = torch.cat((out_ZTHD, lse_ZTH.unsqueeze(-1)), -1)
    check(implementation, message[..., :8], message[..., 8])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kvp", PARTS)
def test_shards_of_a_sequence_merge_to_attention_over_all_of_it(
    implementation: Merge, kvp: int, dtype: torch.dtype
) -> None:
    shape = Shape(
        lengths=(45, 3, 17, 1), queries=(20, 1, 5, 1), num_heads=9, num_kv_heads=3, width=64, v_width=64, kvp=kvp
    )
    cases = [build_case(replace(shape, kvp_rank=rank), dtype) for rank in range(kvp)]
    partials = [attend(*case.arguments) for case in cases]
    out, lse = implementation(torch.stack([out for out, _ in partials]), torch.stack([lse for _, lse in partials]))
    want_out, want_lse = cases[0].reference(all_ranks=True)
    assert_close(out, want_out, TOLERANCES[dtype].times(1.0 if kvp == 1 else 1.5))  # partials are rounded once more
    assert_close(lse, want_lse)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@settings(max_examples=60, deadline=None)
@given(
    part_of_key=st.lists(st.integers(0, 5), min_size=1, max_size=40),
    num_tokens=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_any_split_of_the_keys_gives_the_same(name: str, part_of_key: list[int], num_tokens: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    length, part_L = len(part_of_key), torch.tensor(part_of_key)
    q_THD = torch.randn(num_tokens, 6, 8, generator=generator)
    k_LKD, v_LKV = (torch.randn(length, 2, 8, generator=generator) for _ in range(2))
    seen_TL = torch.arange(length) <= torch.arange(num_tokens).unsqueeze(1) + length - num_tokens
    partials = [dense_attention(q_THD, k_LKD, v_LKV, seen_TL & (part_L == part), 0.3) for part in range(6)]
    out_ZTHD = torch.stack([out for out, _ in partials]).float()
    lse_ZTH = torch.stack([lse for _, lse in partials]).float()
    out, lse = IMPLEMENTATIONS[name](out_ZTHD, lse_ZTH)
    want_out, want_lse = dense_attention(q_THD, k_LKD, v_LKV, seen_TL, 0.3)
    assert_close(out, want_out)
    assert_close(lse, want_lse)
