"""How many chunks HOP-B cuts a step into: the number with the shortest predicted step."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from helix.cost.choices import Formats, Placement, Workload
from helix.cost.hardware import Hardware
from helix.cost.step import placement_cost
from helix.cost.work import local_sequences
from helix.model_spec import ModelSpec

CHUNK_COUNTS: Final = (1, 2, 4)
# Share of a step that must be gained. The model does not see attention and messages take turns on the processors.
_LEAST_GAIN: Final = 0.01


def best_overlap(
    spec: ModelSpec, placement: Placement, formats: Formats, hardware: Hardware, workload: Workload
) -> int:
    """The chunks that a step of `workload` should run in, whatever `placement` says; 1 where overlap gains nothing.

    What a number of chunks gains does not fall with the context: longer attention hides as much or more of the same
    message. So a choice for some context is safe for all longer ones.
    """
    sequences = local_sequences(placement, workload)
    counts = [count for count in CHUNK_COUNTS if count <= max(sequences, 1)]
    steps = {
        count: placement_cost(spec, with_overlap(placement, count), formats, hardware, workload).ttl_us
        for count in counts
    }
    best = min(counts, key=lambda count: (steps[count], count))
    return best if steps[best] <= (1.0 - _LEAST_GAIN) * steps[1] else 1


def with_overlap(placement: Placement, num_chunks: int) -> Placement:
    """`placement` with the batch in `num_chunks` chunks."""
    return replace(placement, choices=replace(placement.choices, overlap=num_chunks))
