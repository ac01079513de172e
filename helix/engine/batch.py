"""Builds a step's `Batch` from the scheduler's plan; every rank does the same from the same plan."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from helix.engine.scheduler import StepPlan
from helix.layers.batch import Batch
from helix.layout import PageRule


def build_batch(plan: StepPlan, rule: PageRule, kvp_rank: int, device: torch.device) -> Batch:
    """Lay out `plan` as tensors for the rank with this KVP coordinate. A pending token is left 0.

    The copies to the device are not waited for.
    """
    counts = [item.count for item in plan.items]
    query_start = np.concatenate(([0], np.cumsum(counts)))
    table = np.zeros((len(plan.items), max(len(item.request.rows) for item in plan.items)), dtype=np.int32)
    ids, positions, lengths, slots = [], [], [], []
    for index, item in enumerate(plan.items):
        rows = np.asarray(item.request.rows, dtype=np.int32)
        table[index, : len(rows)] = rows
        position = np.arange(item.start, item.start + item.count, dtype=np.int64)
        known = item.token_ids
        ids.append(np.array(known + [0] * (item.count - len(known)), dtype=np.int64))
        positions.append(position)
        lengths.append(np.maximum(position + 1, len(item.request.prompt_ids)))
        slots.append(_slots(position, rows, rule, kvp_rank))
    position_T = np.concatenate(positions)
    samples = [start - 1 for start, item in zip(query_start[1:], plan.items, strict=True) if item.samples]

    def tensor(values: np.ndarray) -> Tensor:
        return host_tensor(values, device).to(device, non_blocking=True)

    return Batch(
        token_ids_T=tensor(np.concatenate(ids)),
        position_T=tensor(position_T),
        rotary_len_T=tensor(np.concatenate(lengths)),
        slot_T=tensor(np.concatenate(slots)),
        visible_len_T=tensor(local_len(position_T + 1, rule, kvp_rank)),
        query_start_S1=tensor(query_start.astype(np.int64)),
        page_table_SR=tensor(table),
        sample_T=tensor(np.asarray(samples, dtype=np.int64)),
        counts_S=tuple(counts),
    )


def host_tensor(values: np.ndarray, device: torch.device) -> Tensor:
    """`values` on the host as a copy to `device` takes them without waiting: pinned, where it is a GPU."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.pin_memory() if device.type == "cuda" else tensor


def local_len(num_tokens: np.ndarray, rule: PageRule, kvp_rank: int) -> np.ndarray:
    """`PageRule.local_len` over an array."""
    full, rest = np.divmod(num_tokens, rule.row_tokens)
    lengths: np.ndarray = full * rule.page_tokens
    lengths += np.clip(rest - kvp_rank * rule.page_tokens, 0, rule.page_tokens)
    return lengths


def _slots(position: np.ndarray, rows: np.ndarray, rule: PageRule, kvp_rank: int) -> np.ndarray:
    page_number, offset = np.divmod(position, rule.page_tokens)
    row, owner = np.divmod(page_number, rule.kvp)
    return np.where(owner == kvp_rank, rows[row].astype(np.int64) * rule.page_tokens + offset, -1)
