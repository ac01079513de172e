"""The page allocator: unit cases, and any sequence of calls against a plain set."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helix.cache.allocator import PageAllocator


def test_rows_are_handed_out_lowest_first() -> None:
    allocator = PageAllocator(6)
    assert allocator.take(4) == [0, 1, 2, 3]
    allocator.release([2, 0])
    assert allocator.num_free == 4
    assert allocator.take(3) == [0, 2, 4]


def test_order_of_release_does_not_matter() -> None:
    one, other = PageAllocator(8), PageAllocator(8)
    for allocator, rows in ((one, [5, 1, 3]), (other, [3, 5, 1])):
        allocator.take(8)
        allocator.release(rows)
    assert one.take(3) == other.take(3) == [1, 3, 5]


def test_take_is_all_or_nothing() -> None:
    allocator = PageAllocator(3)
    allocator.take(1)
    with pytest.raises(ValueError, match="3 page rows: 2 of 3"):
        allocator.take(3)
    with pytest.raises(ValueError, match="-1 page rows"):
        allocator.take(-1)
    assert allocator.num_free == 2
    assert allocator.take(0) == []
    assert allocator.take(2) == [1, 2]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([0, 3], "row 3 is released, but it is already free"),
        ([0, 4], "row 4 does not exist: rows are 0 to 3"),
        ([0, -1], "row -1 does not exist"),
        ([0, 1, 0], "listed twice"),
    ],
)
def test_wrong_release_raises_and_frees_nothing(rows: list[int], message: str) -> None:
    allocator = PageAllocator(4)
    allocator.take(3)
    with pytest.raises(ValueError, match=message):
        allocator.release(rows)
    assert allocator.num_free == 1
    assert allocator.take(1) == [3]


def test_double_free_raises() -> None:
    allocator = PageAllocator(2)
    rows = allocator.take(2)
    allocator.release(rows)
    with pytest.raises(ValueError, match="already free"):
        allocator.release(rows)
    assert allocator.num_free == 2


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="num_rows=0"):
        PageAllocator(0)


@given(st.integers(1, 12), st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=40), st.randoms())
def test_like_a_set(num_rows: int, calls: list[tuple[bool, int]], random: Random) -> None:
    allocator, free = PageAllocator(num_rows), set(range(num_rows))
    for is_take, size in calls:
        if is_take and size > len(free):
            with pytest.raises(ValueError, match="cannot take"):
                allocator.take(size)
        elif is_take:
            rows = allocator.take(size)
            assert rows == sorted(free)[:size]
            free -= set(rows)
        else:
            held = sorted(set(range(num_rows)) - free)
            random.shuffle(held)
            allocator.release(held[:size])
            free |= set(held[:size])
        assert allocator.num_free == len(free)
