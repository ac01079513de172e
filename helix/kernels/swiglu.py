"""``silu(gate) * up`` of stacked gate and up values.

Letters: T tokens, W width of the FFN.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import silu


def swiglu(both_TW: Tensor) -> Tensor:
    """[T, 2 W], gate first -> ``silu(gate) * up`` [T, W] in the same dtype."""
    gate_TW, up_TW = both_TW.chunk(2, dim=-1)
    return silu(gate_TW) * up_TW
