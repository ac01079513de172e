"""Hashed normal numbers in Triton: what `helix.weights.dummy` computes for a matrix, in one pass over it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 1024


@triton.jit
def _scramble(x):  # type: ignore[no-untyped-def]
    """Wellons' "lowbias32" on uint32."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def _inverse_error_function(x):  # type: ignore[no-untyped-def]
    """erfinv in fp32 within a few units in the last place, for -1 < x < 1.

    Formula: M. Giles, "Approximating the erfinv function", 2010.
    """
    w = -tl.log((1.0 - x) * (1.0 + x))
    near = w - 2.5
    p = 2.81022636e-08
    p = 3.43273939e-07 + p * near
    p = -3.5233877e-06 + p * near
    p = -4.39150654e-06 + p * near
    p = 0.00021858087 + p * near
    p = -0.00125372503 + p * near
    p = -0.00417768164 + p * near
    p = 0.246640727 + p * near
    p = 1.50140941 + p * near
    far = tl.sqrt(w) - 3.0
    q = -0.000200214257
    q = 0.000100950558 + q * far
    q = 0.00134934322 + q * far
    q = -0.00367342844 + q * far
    q = 0.00573950773 + q * far
    q = -0.0076224613 + q * far
    q = 0.00943887047 + q * far
    q = 1.00167406 + q * far
    q = 2.83297682 + q * far
    return tl.where(w < 5.0, p, q) * x


@triton.jit(do_not_specialize=["first_row", "first_column", "row_key", "column_key", "num_columns"])
def _fill(  # type: ignore[no-untyped-def]
    out_ptr,
    row_stride,
    num_columns,
    first_row,
    first_column,
    row_key,
    column_key,
    scale,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row_hash = _scramble((first_row + row).to(tl.uint32) ^ row_key.to(tl.uint32))
    column_hash = _scramble((first_column + column).to(tl.uint32) ^ column_key.to(tl.uint32))
    hashed = _scramble(row_hash ^ column_hash).to(tl.int32, bitcast=True)
    uniform = ((hashed >> 8).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    value = _inverse_error_function(uniform) * scale
    place = out_ptr + row.to(tl.int64) * row_stride + column
    tl.store(place, value.to(out_ptr.dtype.element_ty), mask=column < num_columns)


def fill_normal(target_RC: Tensor, first: tuple[int, int], keys: tuple[int, int], scale: float) -> None:
    """Fill `target_RC` (dense columns) with ``scale * erfinv(u)``, u in (-1, 1) hashed from the place.

    Place (r, c) is ``(first[0] + r, first[1] + c)``; `keys` are signed 32-bit numbers, one a dim.
    """
    num_rows, num_columns = target_RC.shape
    if target_RC.stride(1) != 1 and num_columns > 1:
        raise ValueError(f"columns must be dense, but their stride is {target_RC.stride(1)}")
    # The grid's second dim holds at most 65535 programs.
    for start in range(0, num_rows, 65535):
        part = target_RC[start : start + 65535]
        _fill[(triton.cdiv(num_columns, _COLUMNS), part.shape[0])](
            part, part.stride(0), num_columns, first[0] + start, first[1], *keys, scale, COLUMNS=_COLUMNS
        )
