"""Append moves bits: owned slots hold exactly what was given, every other slot what it held before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helix.kernels import append
from tests.kernels.cases import DTYPES, assert_same_bits, bits

Append = Callable[[Tensor, Tensor, Tensor], None]
IMPLEMENTATIONS: dict[str, Append] = {"torch": append}
INTEGERS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> Append:
    return IMPLEMENTATIONS[request.param]


def any_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Random bit patterns: numbers of every size, both zeros, infinities and all kinds of NaN."""
    kind = INTEGERS[dtype]
    limits, generator = torch.iinfo(kind), torch.Generator().manual_seed(seed)
    return torch.randint(limits.min, limits.max, shape, dtype=kind, generator=generator).view(dtype)


def check(implementation: Append, pool: Tensor, values: Tensor, slots: list[int]) -> None:
    want = bits(pool).flatten(0, 1)
    for row, slot in zip(bits(values), slots, strict=True):
        if slot >= 0:
            want[slot] = row
    given_bits = bits(values)
    implementation(pool, values, torch.tensor(slots, dtype=torch.int64))
    assert torch.equal(bits(pool).flatten(0, 1), want)
    assert torch.equal(bits(values), given_bits)


@st.composite
def slot_lists(draw: st.DrawFn) -> list[int]:
    """Distinct slots of a pool of 6 x 4, some of them another rank's."""
    slots = draw(st.lists(st.integers(0, 23), unique=True, max_size=24))
    return [slot if mine else -1 for slot, mine in zip(slots, draw(st.lists(st.booleans(), min_size=24)), strict=False)]


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@settings(max_examples=60, deadline=None)
@given(
    slots=slot_lists(),
    tail=st.sampled_from([(3, 8), (1, 80), (7, 5), (576,)]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_only_owned_slots_change(
    name: str, slots: list[int], tail: tuple[int, ...], dtype: torch.dtype, seed: int
) -> None:
    pool, values = any_bits((6, 4, *tail), dtype, seed), any_bits((len(slots), *tail), dtype, seed + 100)
    check(IMPLEMENTATIONS[name], pool, values, slots)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slots", [[-1, -1, -1], [], [23], [0, -1, 5, 4, -1, 22]], ids=str)
def test_negative_slots_and_borders(implementation: Append, slots: list[int], dtype: torch.dtype) -> None:
    check(implementation, any_bits((6, 4, 3, 8), dtype, 1), any_bits((len(slots), 3, 8), dtype, 2), slots)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_may_be_a_view_of_the_whole_projection(implementation: Append, dtype: torch.dtype) -> None:
    projected = any_bits((5, 12, 8), dtype, 3)
    check(implementation, any_bits((6, 4, 3, 8), dtype, 4), projected[:, 6:9], [7, -1, 0, 19, 6])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pool_may_be_a_view_of_wider_rows(implementation: Append, dtype: torch.dtype) -> None:
    rows = any_bits((6, 4, 1, 80), dtype, 5)
    beside = bits(rows[..., 64:])
    check(implementation, rows[..., :64], any_bits((3, 1, 64), dtype, 6), [11, -1, 2])
    assert torch.equal(bits(rows[..., 64:]), beside)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_wider_values_are_rounded_to_the_pool(implementation: Append, dtype: torch.dtype) -> None:
    pool = torch.zeros(2, 4, 3, 8, dtype=dtype)
    values = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    implementation(pool, values, torch.tensor([6, -1]))
    assert_same_bits(pool[1, 2], values[0].to(dtype))
    assert pool.count_nonzero() == 24
