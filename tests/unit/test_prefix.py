"""Shared page rows: unit cases, and any sequence of calls against a plain model of who holds what."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helix.cache.prefix import RowCache

Path = tuple[bytes, ...]


def fill(cache: RowCache, *keys: bytes, root: int = 0) -> list[int]:
    """What a request does: share the rows that are there, take the others and publish them."""
    rows = cache.find(root, keys)
    cache.hold(rows)
    for key in keys[len(rows) :]:
        row = cache.take(1)[0]
        rows.append(cache.publish(root, rows[-1] if rows else None, row, key))
    return rows


def test_a_prefix_is_found_up_to_the_first_other_row() -> None:
    cache = RowCache(8, reuse=True)
    rows = fill(cache, b"a", b"b", b"c")
    assert cache.find(0, [b"a", b"b", b"x", b"c"]) == rows[:2]
    assert cache.find(0, [b"b"]) == [], "the same tokens after other ones are another content"
    assert cache.find(-5, [b"a"]) == [], "another root is another sequence"
    assert fill(cache, b"a", b"b", b"d") == [*rows[:2], 3]
    assert (cache.num_free, cache.num_idle) == (4, 0)


def test_rows_without_a_holder_stay_until_their_place_is_needed_longest_idle_first() -> None:
    cache = RowCache(4, reuse=True)
    for key in (b"a", b"b"):
        cache.release(fill(cache, key, key))
    assert (cache.num_free, cache.num_idle) == (4, 4)
    again = cache.find(0, [b"a", b"a"])
    cache.hold(again)
    cache.release(again)
    assert len(cache.take(1)) == 1
    assert cache.find(0, [b"b", b"b"]) == cache.find(0, [b"b"]) != [], "the last row of the older one went first"
    assert cache.find(0, [b"a", b"a"]) == again
    cache.take(2)
    assert (cache.find(0, [b"b"]), cache.find(0, [b"a", b"a"])) == ([], again[:1])


def test_empty_rows_are_taken_before_any_content_goes() -> None:
    cache = RowCache(3, reuse=True)
    cache.release(fill(cache, b"a"))
    assert cache.take(2) == [1, 2]
    assert cache.find(0, [b"a"]) == [0]


def test_two_that_compute_the_same_end_up_with_one_row() -> None:
    cache = RowCache(4, reuse=True)
    one, other = cache.take(1)[0], cache.take(1)[0]
    assert cache.publish(0, None, one, b"a") == one
    assert cache.publish(0, None, other, b"a") == one
    assert cache.num_free == 3
    cache.release([one])
    assert cache.num_idle == 0
    cache.release([one])
    assert (cache.num_idle, cache.num_free) == (1, 4)


def test_what_a_failed_request_held_alone_is_forgotten() -> None:
    cache = RowCache(4, reuse=True)
    shared = fill(cache, b"a")
    failed = fill(cache, b"a", b"b")
    cache.release(failed, keep=False)
    assert cache.find(0, [b"a", b"b"]) == shared
    cache.release(shared)
    assert (cache.num_idle, cache.num_free) == (1, 4)


def test_without_reuse_nothing_is_found() -> None:
    cache = RowCache(2, reuse=False)
    rows = fill(cache, b"a")
    assert cache.find(0, [b"a"]) == []
    cache.release(rows)
    assert (cache.num_idle, cache.num_free) == (0, 2)


def test_wrong_calls_raise_and_change_nothing() -> None:
    cache = RowCache(4, reuse=True)
    rows = fill(cache, b"a", b"b")
    private = cache.take(1)
    for wrong, message in (
        ([*rows, 3], "row 3 is released, but it is already free"),
        ([*rows, 4], "row 4 does not exist: rows are 0 to 3"),
        ([-1], "row -1 does not exist"),
        ([*rows, rows[0]], "listed twice"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.release(wrong)
    with pytest.raises(ValueError, match="2 page rows: 1 of 4"):
        cache.take(2)
    with pytest.raises(ValueError, match="not published"):
        cache.hold([rows[0], *private])
    with pytest.raises(ValueError, match="published before"):
        cache.publish(0, None, rows[0], b"z")
    assert (cache.num_free, cache.find(0, [b"a", b"b"])) == (1, rows)
    cache.release(rows)
    with pytest.raises(ValueError, match="already free"):
        cache.release(rows)
    assert (cache.num_free, cache.num_idle) == (3, 2)


class PlainModel:
    """Who holds which content, in lists that are walked from end to end."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.holders: dict[Path, int] = {}
        self.idle: list[Path] = []  # longest idle first
        self.num_private = 0

    def fill(self, path: Path, private: int) -> None:
        for depth in range(1, len(path) + 1):
            part = path[:depth]
            if part in self.idle:
                self.idle.remove(part)
            elif part not in self.holders:
                self.make_room(1)
            self.holders[part] = self.holders.get(part, 0) + 1
        self.make_room(private)
        self.num_private += private

    def make_room(self, num: int) -> None:
        used = len(self.holders) + self.num_private + len(self.idle)
        del self.idle[: max(0, used + num - self.num_rows)]

    def release(self, path: Path, private: int) -> None:
        self.num_private -= private
        for depth in range(len(path), 0, -1):
            part = path[:depth]
            self.holders[part] -= 1
            if not self.holders[part]:
                del self.holders[part]
                self.idle.append(part)

    def knows(self, path: Path) -> bool:
        return path in self.holders or path in self.idle


@settings(deadline=None)
@given(st.integers(4, 14), st.lists(st.tuples(st.booleans(), st.integers(0, 2**30)), max_size=50))
def test_like_the_plain_model(num_rows: int, calls: list[tuple[bool, int]]) -> None:
    """No leak, no double use, right counts, right order of going; two ranks that get the same calls stay equal."""
    cache, twin, model = RowCache(num_rows, reuse=True), RowCache(num_rows, reuse=True), PlainModel(num_rows)
    held: list[tuple[Path, list[int], int]] = []
    for is_start, seed in calls:
        random = Random(seed)
        if is_start:
            path = tuple(random.choice([b"x", b"y"]) for _ in range(random.randint(0, 4)))
            private = random.randint(0, 2)
            found = cache.find(0, path)
            if len(path) - len(found) + cache.count_idle(found) + private > cache.num_free:
                continue
            rows = fill(cache, *path) + cache.take(private)
            assert fill(twin, *path) + twin.take(private) == rows
            model.fill(path, private)
            held.append((path, rows, private))
        elif held:
            path, rows, private = held.pop(random.randrange(len(held)))
            cache.release(rows)
            twin.release(rows)
            model.release(path, private)
        owners: dict[int, set[object]] = {}
        for number, (path, rows, _) in enumerate(held):
            for depth, row in enumerate(rows, 1):
                owners.setdefault(row, set()).add(path[:depth] if depth <= len(path) else (number, depth))
        assert all(len(one) == 1 for one in owners.values()), "one row holds two contents"
        assert cache.num_free == num_rows - len(owners)
        assert cache.num_idle == len(model.idle)
        for path in (*model.holders, *model.idle):
            assert len(cache.find(0, path)) == len(path), "a row went before one behind it, or too early"
        assert all(model.knows(path[:depth]) for path, _, _ in held for depth in range(1, len(path) + 1))
    for _path, rows, _private in held:
        cache.release(rows)
    assert cache.num_free == num_rows
    assert len(cache.take(num_rows)) == num_rows
    assert cache.num_idle == 0
