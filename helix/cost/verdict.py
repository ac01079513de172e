"""A measured step beside its ceiling and its prediction, from the same formulas that price a plan.

The ceiling is what the device's best measured read and product rates allow: every byte read once, every product at its
rate, no fixed cost and no message. What lies between ceiling and prediction are the costs that the model knows of; what
lies between prediction and measurement it does not.
"""

from __future__ import annotations

from dataclasses import dataclass

from helix.cost.choices import Formats, Placement, Workload
from helix.cost.hardware import Hardware
from helix.cost.step import placement_cost
from helix.model_spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Times of one decode step, microseconds."""

    achieved_us: float
    ceiling_us: float
    predicted_us: float

    @property
    def share_of_ceiling(self) -> float:
        """1 is the device's limit."""
        return self.ceiling_us / self.achieved_us

    @property
    def prediction_error(self) -> float:
        """Relative to what was measured; above 0 the step was faster than predicted."""
        return self.predicted_us / self.achieved_us - 1.0

    def line(self) -> str:
        """All of it in one line."""
        return (
            f"achieved {self.achieved_us / 1e3:.2f} ms | ceiling {self.ceiling_us / 1e3:.2f} ms "
            f"({self.share_of_ceiling:.0%} of it reached) | predicted {self.predicted_us / 1e3:.2f} ms "
            f"({self.prediction_error:+.0%})"
        )


def judge(
    achieved_us: float,
    spec: ModelSpec,
    placement: Placement,
    formats: Formats,
    hardware: Hardware,
    workload: Workload,
) -> Verdict:
    """Hold a measured step against the model; `workload.routing` takes the number of experts that were really hit."""
    return Verdict(
        achieved_us=achieved_us,
        ceiling_us=placement_cost(spec, placement, formats, hardware.ideal(), workload).ttl_us,
        predicted_us=placement_cost(spec, placement, formats, hardware, workload).ttl_us,
    )
