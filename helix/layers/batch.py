"""`Batch`: the tensors of one step, as the layers read them.

Only `visible_len_T` and `slot_T` differ between ranks, and both are closed formulas of the global position.
Letters: T tokens, S sequences, R page rows of the longest sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from helix.layers.overlap import LOCKSTEP, Overlap


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs of one forward pass on one rank.

    `position_T` are global positions; `visible_len_T` counts the local slots a token sees; `slot_T` is where this rank
    stores the token's KV (-1: another rank does). `rotary_len_T` is read by length-dependent rotary only: the prompt's
    length for prompt tokens, position + 1 for generated ones. `sample_T` are the rows whose logits give a token.
    `counts_S`, on the host, are the tokens of each sequence: layers choose by them without asking the device. `overlap`
    says how attention and exchange are interleaved.
    """

    token_ids_T: Tensor
    position_T: Tensor
    rotary_len_T: Tensor
    slot_T: Tensor
    visible_len_T: Tensor
    query_start_S1: Tensor
    page_table_SR: Tensor
    sample_T: Tensor
    counts_S: tuple[int, ...]
    overlap: Overlap = LOCKSTEP
