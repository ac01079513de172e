"""`StaticInputs`: a decode step's tensors at addresses that never change, which a captured graph needs.

One row a sequence. A step of fewer sequences than its bucket is padded with rows that see nothing (`visible_len` 0) and
store nothing (slot -1), so that they change no other row. What changes in a step goes to the device in one copy from
pinned memory, which nobody waits for; page tables stay there, and only page rows that are new since the last step
follow. A token that the step before chose never comes to the host on its way in: `_SOURCE` says which row it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from helix.engine.batch import host_tensor, local_len
from helix.engine.draw import NUM_NUMBERS
from helix.engine.scheduler import StepItem
from helix.layers.batch import Batch
from helix.layout import PageRule

# Rows of the device's buffer. The first is written by steps, all others by the host; the first two are one pool of
# tokens, in which a source is an index.
_CHOSEN, _KNOWN, _SOURCE, _POSITION, _ROTARY, _SLOT, _VISIBLE, _NUMBERS = range(8)
_NUM_ROWS = _NUMBERS + NUM_NUMBERS
_PADDING = np.array([0] * _ROTARY + [1, -1, 0] + [0] * NUM_NUMBERS, dtype=np.int64)


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
        self.max_batch = max_batch
        self._fields = torch.zeros(_NUM_ROWS, max_batch, dtype=torch.int64, device=device)
        self._token_ids = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self._table = torch.zeros(max_batch, max_rows, dtype=torch.int32, device=device)
        self._place = torch.arange(max_batch + 1, dtype=torch.int64, device=device)
        self._held: list[_Held] = [_Held([], 0)] * max_batch

    @property
    def chosen_B(self) -> Tensor:
        """int64 [max_batch]: the tokens of the last step, row by row; steps write to it."""
        return self._fields[_CHOSEN]

    def numbers_R5(self, size: int) -> Tensor:
        """fp64 [size, 5]: what draws each row's token, see `helix.engine.draw`."""
        return self._fields[_NUMBERS:, :size].view(torch.float64).T

    def take_tokens(self, size: int) -> None:
        """The first act of a step of `size` rows, on the device: collect its tokens, chosen or known."""
        pool = self._fields[: _KNOWN + 1].view(-1)
        torch.index_select(pool, 0, self._fields[_SOURCE, :size], out=self._token_ids[:size])

    def batch(self, size: int) -> Batch:
        """The tensors of a step of `size` rows, views of the static ones."""
        fields = self._fields[:, :size]
        return Batch(
            token_ids_T=self._token_ids[:size],
            position_T=fields[_POSITION],
            rotary_len_T=fields[_ROTARY],
            slot_T=fields[_SLOT],
            visible_len_T=fields[_VISIBLE],
            query_start_S1=self._place[: size + 1],
            page_table_SR=self._table[:size],
            sample_T=self._place[:size],
            counts_S=(1,) * size,
        )

    def write(
        self,
        items: Sequence[StepItem],
        chosen: Mapping[int, int] = MappingProxyType({}),
        numbers_R5: np.ndarray | None = None,
    ) -> None:
        """Write a step of one token for each of `items`; all further rows become padding.

        `chosen` gives the row of `chosen_B` that holds a request's pending token, by request id. Nothing is waited for:
        each step's host side is memory of its own.
        """
        size = len(items)
        host = np.repeat(_PADDING[:, None], self.max_batch, axis=1)
        position = np.array([item.start for item in items], dtype=np.int64)
        row, offset = np.divmod(position, self.rule.row_tokens)
        owner, offset = np.divmod(offset, self.rule.page_tokens)
        page = np.array([item.request.rows[at] for item, at in zip(items, row.tolist(), strict=True)], dtype=np.int64)
        host[_SOURCE] = np.arange(self.max_batch, 2 * self.max_batch)
        for place, item in enumerate(items):
            if item.feeds_pending:
                host[_SOURCE, place] = chosen[item.request.request_id]
            else:
                host[_KNOWN, place] = item.token_ids[0]
        host[_POSITION, :size] = position
        host[_ROTARY, :size] = np.maximum(position + 1, [len(item.request.prompt_ids) for item in items])
        host[_SLOT, :size] = np.where(owner == self.kvp_rank, page * self.rule.page_tokens + offset, -1)
        host[_VISIBLE, :size] = local_len(position + 1, self.rule, self.kvp_rank)
        if numbers_R5 is not None:
            host[_NUMBERS:, :size] = numbers_R5.T.copy().view(np.int64)
        self._fields[_KNOWN:].copy_(host_tensor(host[_KNOWN:], self._fields.device), non_blocking=True)
        self._move_rows(items)
        self._write_rows(items)

    def _move_rows(self, items: Sequence[StepItem]) -> None:
        """Where requests ended, the ones behind them change places: their page tables move with them, on the device.

        A table may have ten thousands of entries, and to write all of them anew would take longer than a step.
        """
        where: dict[int, int] = {}
        for place, held in enumerate(self._held):
            best = where.get(id(held.rows))
            if best is None or held.count > self._held[best].count:
                where[id(held.rows)] = place
        order = [where.get(id(item.request.rows), place) for place, item in enumerate(items)]
        if order != list(range(len(items))):
            device = self._table.device
            order_S = host_tensor(np.array(order, dtype=np.int64), device).to(device, non_blocking=True)
            self._table[: len(order)] = self._table.index_select(0, order_S)
            self._held[: len(order)] = [self._held[place] for place in order]

    def _write_rows(self, items: Sequence[StepItem]) -> None:
        """Bring page tables up to date. A request's list only grows; where its rows were freed it has a new one."""
        places, values = [], []
        for place, item in enumerate(items):
            rows, held = item.request.rows, self._held[place]
            start = held.count if held.rows is rows else 0
            if start < len(rows):
                first = place * self._table.shape[1]
                places.append(np.arange(first + start, first + len(rows), dtype=np.int64))
                values.append(np.array(rows[start:], dtype=np.int64))
                self._held[place] = _Held(rows, len(rows))
        if places:
            new = host_tensor(np.stack([np.concatenate(places), np.concatenate(values)]), self._table.device)
            new_2N = new.to(self._table.device, non_blocking=True)
            self._table.view(-1).index_copy_(0, new_2N[0], new_2N[1].int())
