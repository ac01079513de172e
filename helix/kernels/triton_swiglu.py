"""``silu(gate) * up`` of stacked gate and up values on a GPU in Triton, in one launch.

Letters: T tokens, W width of the FFN.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from helix.kernels.triton_launch import begin, launch_options

_COLUMNS = 1024


@triton.jit
def _swiglu(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, token_stride, W: tl.constexpr, COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr
):
    """A part of one token's row. Rounds where PyTorch does: the activation, and its product with `up`."""
    begin(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    column_w = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there_w = column_w < W
    gate_w = tl.load(x_ptr + token * token_stride + column_w, mask=there_w, other=0.0)
    up_w = tl.load(x_ptr + token * token_stride + W + column_w, mask=there_w, other=0.0)
    wide_w = gate_w.to(tl.float32)
    active_w = (wide_w / (1.0 + tl.exp(-wide_w))).to(gate_w.dtype).to(tl.float32)
    tl.store(out_ptr + token * W + column_w, active_w * up_w.to(tl.float32), mask=there_w)


def swiglu(both: Tensor) -> Tensor:
    """[T, 2 W], gate first -> ``silu(gate) * up`` [T, W] in the same dtype."""
    tokens, width = both.shape[0], both.shape[1] // 2
    out = both.new_empty(tokens, width)
    if both.stride(1) != 1:
        both = both.contiguous()
    if out.numel():
        columns = min(triton.next_power_of_2(width), _COLUMNS)
        _swiglu[(tokens, triton.cdiv(width, columns))](
            both, out, both.stride(0), W=width, COLUMNS=columns, **launch_options(both.device)
        )
    return out
