"""RMSNorm on a GPU in Triton, with the residual's addition in the same pass: the contract of `helix.kernels.norm`.

Letters: T tokens, C width of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from helix.kernels.triton_launch import begin, launch_options


@triton.jit
def _rms_norm(  # type: ignore[no-untyped-def]
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    x_stride,
    residual_stride,
    eps,
    C: tl.constexpr,
    C_PAD: tl.constexpr,
    ADD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, C_PAD)
    inside_c = c < C
    weight_c = tl.load(weight_ptr + c, mask=inside_c, other=0.0)
    begin(DEPENDENT)
    x_c = tl.load(x_ptr + token * x_stride + c, mask=inside_c, other=0.0)
    if ADD:
        residual_c = tl.load(residual_ptr + token * residual_stride + c, mask=inside_c, other=0.0)
        x_c = (x_c.to(tl.float32) + residual_c.to(tl.float32)).to(x_c.dtype)
        tl.store(total_ptr + token * C + c, x_c, mask=inside_c)
    wide_c = x_c.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide_c * wide_c, 0) / C + eps)
    normed_c = (wide_c * scale).to(x_c.dtype)
    out_c = weight_c.to(tl.float32) * normed_c.to(tl.float32)
    tl.store(out_ptr + token * C + c, out_c.to(out_ptr.dtype.element_ty), mask=inside_c)


def rms_norm(x_TC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    """`helix.kernels.norm.rms_norm` on the device. Rows may be views with any distance between them."""
    rows = _rows(x_TC)
    out = _empty_like(x_TC, weight_C)
    _launch(rows, rows, weight_C, out, out, eps, add=False)
    return out


def add_rms_norm(x_TC: Tensor, residual_TC: Tensor, weight_C: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`helix.kernels.norm.add_rms_norm` on the device, for x and residual of one dtype."""
    out, total = _empty_like(x_TC, weight_C), torch.empty_like(x_TC, memory_format=torch.contiguous_format)
    _launch(_rows(x_TC), _rows(residual_TC), weight_C, out, total, eps, add=True)
    return out, total


def _launch(
    x_TC: Tensor, residual_TC: Tensor, weight_C: Tensor, out: Tensor, total: Tensor, eps: float, *, add: bool
) -> None:
    tokens, width = x_TC.shape
    if tokens == 0:
        return
    padded = triton.next_power_of_2(width)
    _rms_norm[(tokens,)](
        x_TC,
        residual_TC,
        weight_C,
        out,
        total,
        x_TC.stride(0),
        residual_TC.stride(0),
        eps,
        C=width,
        C_PAD=padded,
        ADD=add,
        num_warps=min(max(padded // 512, 1), 16),
        **launch_options(x_TC.device),
    )


def _rows(x: Tensor) -> Tensor:
    """[T, C] with contiguous rows; a copy only where no view is that."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _empty_like(x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype), device=x.device)
