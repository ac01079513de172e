"""The chunks that the engine cuts its decode steps into, from ``comm.overlap`` and the cost model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from helix.cost.choices import Formats, Placement, Workload
from helix.cost.hardware import Hardware
from helix.cost.overlap import best_overlap
from helix.model_spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapRule:
    """``comm.overlap`` for a model as it lies on its ranks. A pure function, so that all ranks find the same.

    `hardware` is the card of the devices; None, for devices that no card describes, makes ``auto`` the lockstep order.
    """

    setting: Literal["auto", "off"] | int
    spec: ModelSpec
    placement: Placement
    formats: Formats
    hardware: Hardware | None
    page_tokens: int

    def num_chunks(self, batch: int, context: int) -> int:
        """Chunks of a decode step of `batch` sequences, `context` tokens long in the mean; 1 is the lockstep order."""
        if self.setting == "off":
            return 1
        if self.setting != "auto":
            return min(self.setting, batch)
        if self.hardware is None or self.placement.layout.kvp == 1:
            return 1
        workload = Workload(batch=batch, context=context, page_tokens=self.page_tokens)
        return best_overlap(self.spec, self.placement, self.formats, self.hardware, workload)
