"""`RowCache`: which page rows are held, and which of them hold tokens that another request begins with.

Pure host state, no tensors. Every rank owns one and makes the same calls, so a row id names the same row on all ranks
and no message is needed.

A full row is *published* under its content: its tokens, and the row that stands before it in the sequence, hence all
tokens from the first one on. The index is a dict, which finds a row by the hash of that key and then compares the
tokens themselves, so two contents never meet in one row. A published row is never written again and may have any
number of holders. Without holders it stays idle, to be found again, until its place is needed: then the one that was
idle for longest goes first. A holder of a row holds all rows before it and gives them back last row first, so a row
never goes before one that stands behind it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from helix.cache.allocator import PageAllocator


@dataclass(frozen=True, slots=True)
class _Content:
    """What a published row holds: `key` is (number of the content before it, its tokens). Numbers are never reused."""

    number: int
    key: tuple[int, bytes]


class RowCache:
    """`num_rows` page rows. With `reuse` off nothing is published, and a row without a holder is free at once."""

    def __init__(self, num_rows: int, *, reuse: bool) -> None:
        self.reuse = reuse
        self._allocator = PageAllocator(num_rows)
        self._num_holders = [0] * num_rows
        self._index: dict[tuple[int, bytes], int] = {}
        self._contents: dict[int, _Content] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # longest idle first
        self._numbers = count(1)

    @property
    def num_rows(self) -> int:
        return self._allocator.num_rows

    @property
    def num_free(self) -> int:
        """Rows that `take` can give: the empty ones and the idle ones."""
        return self._allocator.num_free + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Rows that nobody holds and that can be found by their content."""
        return len(self._idle)

    def count_idle(self, rows: Iterable[int]) -> int:
        """How many of `rows` have no holder."""
        return sum(not self._num_holders[row] for row in rows)

    def find(self, root: int, keys: Iterable[bytes]) -> list[int]:
        """The published rows that hold `keys`, the tokens of one full row after another, up to the first miss.

        `root` is at most 0 and tells apart sequences whose equal tokens have different keys and values. `keys` is read
        only as far as it is found. Nobody holds the rows by this: call `hold` before anything else.
        """
        rows: list[int] = []
        number = root
        for key in keys:
            row = self._index.get((number, key))
            if row is None:
                break
            rows.append(row)
            number = self._contents[row].number
        return rows

    def hold(self, rows: Sequence[int]) -> None:
        """One more holder for each of `rows`, which `find` gave."""
        for row in rows:
            if row not in self._contents:
                raise ValueError(f"page row {row} is not published; only rows that were found can be shared")
        for row in rows:
            self._num_holders[row] += 1
            self._idle.pop(row, None)

    def take(self, num: int) -> list[int]:
        """`num` rows of unknown content with one holder each: the lowest empty ones, then the longest idle ones.

        Raises ValueError and takes none where fewer are free.
        """
        if not 0 <= num <= self.num_free:
            raise ValueError(f"cannot take {num} page rows: {self.num_free} of {self.num_rows} are free")
        while num > self._allocator.num_free:
            row, _ = self._idle.popitem(last=False)
            self._forget(row)
            self._allocator.release([row])
        rows = self._allocator.take(num)
        for row in rows:
            self._num_holders[row] = 1
        return rows

    def publish(self, root: int, before: int | None, row: int, key: bytes) -> int:
        """Make the full `row`, which its one holder has just filled with the tokens `key`, findable.

        `before` is the row before it in the sequence, None for the first. Returns the row that the holder holds from
        now on: where the same content is there already that is the older row, and `row` is free again.
        """
        if not self.reuse:
            return row
        if row in self._contents or self._num_holders[row] != 1:
            raise ValueError(f"page row {row} is published, but it has several holders or was published before")
        full_key = (root if before is None else self._contents[before].number, key)
        known = self._index.get(full_key)
        if known is not None:
            self.hold([known])
            self.release([row])
            return known
        self._index[full_key] = row
        self._contents[row] = _Content(next(self._numbers), full_key)
        return row

    def release(self, rows: Sequence[int], *, keep: bool = True) -> None:
        """One holder less for each of `rows`, in the order of the sequence.

        Without `keep`, the content of those that have none left is forgotten. A row that does not exist, has no holder
        or is repeated raises ValueError, and nothing is given back.
        """
        for row in rows:
            if not 0 <= row < self.num_rows:
                raise ValueError(f"page row {row} does not exist: rows are 0 to {self.num_rows - 1}")
            if not self._num_holders[row]:
                raise ValueError(f"page row {row} is released, but it is already free")
        if len(set(rows)) != len(rows):
            raise ValueError(f"page rows {list(rows)} are released at once, but one of them is listed twice")
        for row in reversed(rows):
            self._num_holders[row] -= 1
            if self._num_holders[row]:
                continue
            if keep and row in self._contents:
                self._idle[row] = None
            else:
                self._forget(row)
                self._allocator.release([row])

    def _forget(self, row: int) -> None:
        """Rows behind it that are idle can then no longer be found; they go when their place is needed."""
        content = self._contents.pop(row, None)
        if content is not None:
            del self._index[content.key]
