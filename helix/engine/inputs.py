"""`StaticInputs`: a decode step's tensors at addresses that never change, which a captured graph needs.

One row a sequence. A step of fewer sequences than its bucket is padded with rows that see nothing (`visible_len` 0) and
store nothing (slot -1), so that they change no other row. What changes in a step goes to the device in one copy; page
tables stay there, and only page rows that are new since the last step follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from helix.engine.batch import local_len
from helix.engine.scheduler import StepItem
from helix.layers.batch import Batch
from helix.layout import PageRule

_FIELDS = 5  # token id, position, rotary length, slot, visible length


@dataclass(frozen=True, slots=True)
class _Held:
    """What a row of the device's page table holds: the first `count` entries of the list `rows`."""

    rows: list[int]
    count: int


class StaticInputs:
    """Inputs of decode steps of up to `max_batch` sequences of up to `max_rows` page rows, on one rank."""

    def __init__(self, max_batch: int, max_rows: int, rule: PageRule, kvp_rank: int, device: torch.device) -> None:
        self.rule = rule
        self.kvp_rank = kvp_rank
        self._host = torch.zeros(_FIELDS, max_batch, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._numbers = torch.zeros(_FIELDS, max_batch, dtype=torch.int64, device=device)
        self._table = torch.zeros(max_batch, max_rows, dtype=torch.int32, device=device)
        self._place = torch.arange(max_batch + 1, dtype=torch.int64, device=device)
        self._held: list[_Held] = [_Held([], 0)] * max_batch

    def batch(self, size: int) -> Batch:
        """The tensors of a step of `size` rows, views of the static ones."""
        token_ids, position, rotary_len, slot, visible_len = self._numbers[:, :size]
        return Batch(
            token_ids_T=token_ids,
            position_T=position,
            rotary_len_T=rotary_len,
            slot_T=slot,
            visible_len_T=visible_len,
            query_start_S1=self._place[: size + 1],
            page_table_SR=self._table[:size],
            sample_T=self._place[:size],
            counts_S=(1,) * size,
        )

    def write(self, items: Sequence[StepItem]) -> None:
        """Write a step of one token for each of `items`; all further rows become padding.

        The copy to the device is not waited for. The host side may be written again only once the step is over, which
        its tokens tell.
        """
        position = np.array([item.start for item in items], dtype=np.int64)
        row, offset = np.divmod(position, self.rule.row_tokens)
        owner, offset = np.divmod(offset, self.rule.page_tokens)
        page = np.array([item.request.rows[at] for item, at in zip(items, row.tolist(), strict=True)], dtype=np.int64)
        size = len(items)
        host = self._host.numpy()
        host[:, size:] = np.array([0, 0, 1, -1, 0])[:, None]
        host[0, :size] = [item.token_ids[0] for item in items]
        host[1, :size] = position
        host[2, :size] = np.maximum(position + 1, [len(item.request.prompt_ids) for item in items])
        host[3, :size] = np.where(owner == self.kvp_rank, page * self.rule.page_tokens + offset, -1)
        host[4, :size] = local_len(position + 1, self.rule, self.kvp_rank)
        self._numbers.copy_(self._host, non_blocking=True)
        for place, item in enumerate(items):
            self._write_rows(place, item.request.rows)

    def _write_rows(self, place: int, rows: list[int]) -> None:
        """Bring one page table up to date. A request's list only grows; where its rows were freed it has a new one."""
        held = self._held[place]
        start = held.count if held.rows is rows else 0
        if start < len(rows):
            self._table[place, start : len(rows)].copy_(torch.tensor(rows[start:], dtype=torch.int32))
            self._held[place] = _Held(rows, len(rows))
