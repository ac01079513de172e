"""Which page rows are free: pure host state, no tensors.

A page row is `kvp` pages, one on each KVP rank, under one row id. Every rank owns its own `PageAllocator`, and since
all ranks make the same calls, a row id names the same row on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush


class PageAllocator:
    """Free list over the row ids ``0 .. num_rows - 1``.

    The lowest free ids are handed out first. So the next rows depend only on which rows are held, never on the order in
    which they came back, and ranks that hold the same rows stay equal.
    """

    def __init__(self, num_rows: int) -> None:
        if num_rows < 1:
            raise ValueError(f"num_rows={num_rows} must be at least 1")
        self.num_rows = num_rows
        self._free = list(range(num_rows))  # ascending, hence already a heap
        self._held = bytearray(num_rows)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """The `count` lowest free row ids, ascending; raises ValueError and takes none where fewer are free."""
        if not 0 <= count <= len(self._free):
            raise ValueError(f"cannot take {count} page rows: {len(self._free)} of {self.num_rows} are free")
        rows = [heappop(self._free) for _ in range(count)]
        for row in rows:
            self._held[row] = 1
        return rows

    def release(self, rows: Sequence[int]) -> None:
        """Give `rows` back; an unknown, free or repeated row raises ValueError and nothing is given back."""
        for row in rows:
            if not 0 <= row < self.num_rows:
                raise ValueError(f"page row {row} does not exist: rows are 0 to {self.num_rows - 1}")
            if not self._held[row]:
                raise ValueError(f"page row {row} is released, but it is already free")
        if len(set(rows)) != len(rows):
            raise ValueError(f"page rows {list(rows)} are released at once, but one of them is listed twice")
        for row in rows:
            self._held[row] = 0
            heappush(self._free, row)
