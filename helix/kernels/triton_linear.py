"""Products of few tokens with weight matrices on a GPU in Triton: the contracts of `helix.kernels.linear`.

A program takes some rows of the weight. One token takes vector products, and a program reads the first columns of its
rows into registers while the kernel ahead still runs: what is in flight then hides the change of kernels. More tokens,
and long rows, go to `gluon_linear` where it can be used; elsewhere the matrix instructions are taken where that saves
a launch, and a library's products for all others.

Letters: T tokens, H heads with a matrix each, N outputs, K inputs, W width of an FFN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from helix.kernels import gluon_linear
from helix.kernels.linear import head_linear as head_linear_twin
from helix.kernels.linear import linear as linear_twin
from helix.kernels.linear import linear_fp32 as linear_fp32_twin
from helix.kernels.triton_launch import begin, launch_options
from helix.kernels.triton_swiglu import swiglu

# Most tokens for the matrix instructions here: of gated products, and of products of heads.
_GATED_TOKENS, _HEAD_TOKENS = 16, 64
# Rows and columns of the weight that a program reads at once; half of the rows where each has a gate.
_VECTOR_ROWS, _VECTOR_COLUMNS, _VECTOR_WARPS = 4, 2048, 4
_MATRIX_ROWS, _MATRIX_COLUMNS = 32, 128
# One token's product with so many values or more is better off with `gluon_linear`.
_MANY_VALUES = 6 << 20
# A router has few outputs: its weight is cut finely, and each piece serves more tokens than would pay elsewhere.
_FEW_OUTPUTS, _SMALL_TOKENS, _SMALL_ROWS = 512, 16, 2


@triton.jit
def _finish(gate_tn, up_tn, bias_ptr, row_n, live_n, N, out_ptr, GATED: tl.constexpr, BIAS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bias and activation, rounded where PyTorch rounds."""
    if BIAS:
        gate_tn += tl.load(bias_ptr + row_n, mask=live_n, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if BIAS:
            up_tn += tl.load(bias_ptr + N + row_n, mask=live_n, other=0.0).to(tl.float32)[None, :]
        kind = out_ptr.dtype.element_ty
        gate_tn = gate_tn.to(kind).to(tl.float32)
        gate_tn = (gate_tn / (1.0 + tl.exp(-gate_tn))).to(kind).to(tl.float32) * up_tn.to(kind).to(tl.float32)
    return gate_tn


@triton.jit(do_not_specialize=["num_tokens", "N"])
def _vector_products(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, bias_ptr, out_ptr, N, K, head_rows, x_token_stride, x_head_stride, num_tokens,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """ROWS outputs of each of up to TOKENS tokens."""
    first = tl.program_id(0) * ROWS
    row_n = first + tl.arange(0, ROWS)
    column_c = tl.arange(0, COLUMNS)
    live_n = row_n < N
    at_nc = weight_ptr + row_n.to(tl.int64)[:, None] * K + column_c[None, :]
    live_nc = live_n[:, None] & (column_c < K)[None, :]
    gate_nc = tl.load(at_nc, mask=live_nc, other=0.0)
    if GATED:
        up_nc = tl.load(at_nc + N.to(tl.int64) * K, mask=live_nc, other=0.0)
    begin(DEPENDENT)
    x_ptr += first // head_rows * x_head_stride
    token_t = tl.arange(0, TOKENS)
    gate_tn = tl.zeros((TOKENS, ROWS), tl.float32)
    up_tn = tl.zeros((TOKENS, ROWS), tl.float32)
    for start in range(0, K, COLUMNS):
        wide_nc = gate_nc.to(tl.float32)
        next_c = start + COLUMNS + column_c
        live_nc = live_n[:, None] & (next_c < K)[None, :]
        gate_nc = tl.load(at_nc + start + COLUMNS, mask=live_nc, other=0.0)
        if GATED:
            wide_up_nc = up_nc.to(tl.float32)
            up_nc = tl.load(at_nc + N.to(tl.int64) * K + start + COLUMNS, mask=live_nc, other=0.0)
        for token in tl.static_range(TOKENS):
            # Places behind the last token are nobody's memory.
            limit = tl.where(token < num_tokens, K, 0)
            at_c = x_ptr + token * x_token_stride + start + column_c
            x_c = tl.load(at_c, mask=start + column_c < limit, other=0.0).to(tl.float32)
            sum_n = tl.sum(wide_nc * x_c[None, :], 1)
            gate_tn += tl.where(token_t[:, None] == token, sum_n[None, :], 0.0)
            if GATED:
                sum_n = tl.sum(wide_up_nc * x_c[None, :], 1)
                up_tn += tl.where(token_t[:, None] == token, sum_n[None, :], 0.0)
    out_tn = _finish(gate_tn, up_tn, bias_ptr, row_n, live_n, N, out_ptr, GATED, BIAS)
    at_tn = out_ptr + token_t[:, None] * N.to(tl.int64) + row_n[None, :]
    tl.store(at_tn, out_tn, mask=(token_t < num_tokens)[:, None] & live_n[None, :])


@triton.jit(do_not_specialize=["num_tokens", "N"])
def _matrix_products(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, bias_ptr, out_ptr, N, K, head_rows, x_token_stride, x_head_stride, num_tokens,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """ROWS outputs of each of up to TOKENS tokens."""
    first = tl.program_id(0) * ROWS
    row_n = first + tl.arange(0, ROWS)
    column_c = tl.arange(0, COLUMNS)
    token_t = tl.arange(0, TOKENS)
    live_n = row_n < N
    live_t = token_t < num_tokens
    at_nc = weight_ptr + row_n.to(tl.int64)[:, None] * K + column_c[None, :]
    up_rows = N.to(tl.int64) * K
    begin(DEPENDENT)
    x_tc = (
        x_ptr + first // head_rows * x_head_stride + token_t.to(tl.int64)[:, None] * x_token_stride + column_c[None, :]
    )
    gate_tn = tl.zeros((TOKENS, ROWS), tl.float32)
    up_tn = tl.zeros((TOKENS, ROWS), tl.float32)
    for start in range(0, K, COLUMNS):
        inside_c = start + column_c < K
        live_nc = live_n[:, None] & inside_c[None, :]
        here_tc = tl.load(x_tc + start, mask=live_t[:, None] & inside_c[None, :], other=0.0)
        gate_nc = tl.load(at_nc + start, mask=live_nc, other=0.0)
        gate_tn = tl.dot(here_tc, gate_nc.T, gate_tn, input_precision=PRECISION)
        if GATED:
            up_nc = tl.load(at_nc + up_rows + start, mask=live_nc, other=0.0)
            up_tn = tl.dot(here_tc, up_nc.T, up_tn, input_precision=PRECISION)
    out_tn = _finish(gate_tn, up_tn, bias_ptr, row_n, live_n, N, out_ptr, GATED, BIAS)
    at_tn = out_ptr + token_t[:, None] * N.to(tl.int64) + row_n[None, :]
    tl.store(at_tn, out_tn, mask=live_t[:, None] & live_n[None, :])


def linear(x_TC: Tensor, weight_NC: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """`helix.kernels.linear.linear` on the device."""
    if not _pays(x_TC, weight_NC):
        return linear_twin(x_TC, weight_NC, bias_N)
    out_TN = x_TC.new_empty(x_TC.shape[0], weight_NC.shape[0])
    _launch(x_TC.unsqueeze(1), weight_NC, bias_N, out_TN)
    return out_TN


def linear_fp32(x_TC: Tensor, weight_NC: Tensor) -> Tensor:
    """`helix.kernels.linear.linear_fp32` on the device."""
    if _pays(x_TC, weight_NC):
        out_TN = x_TC.new_empty(x_TC.shape[0], weight_NC.shape[0], dtype=torch.float32)
        _launch(x_TC.unsqueeze(1), weight_NC, None, out_TN)
        return out_TN
    if x_TC.dtype == torch.float32:
        return linear_fp32_twin(x_TC, weight_NC)
    return torch.mm(x_TC, weight_NC.t(), out_dtype=torch.float32)


def gated_linear(x_TC: Tensor, weight_NC: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """`helix.kernels.linear.gated_linear` on the device."""
    if not _fits(x_TC, weight_NC, _GATED_TOKENS):
        return swiglu(linear_twin(x_TC, weight_NC, bias_N))
    out_TW = x_TC.new_empty(x_TC.shape[0], weight_NC.shape[0] // 2)
    _launch(x_TC.unsqueeze(1), weight_NC, bias_N, out_TW, gated=True)
    return out_TW


def head_linear(x_THC: Tensor, weight_HNC: Tensor) -> Tensor:
    """`helix.kernels.linear.head_linear` on the device."""
    if not _fits(x_THC, weight_HNC, _HEAD_TOKENS) or weight_HNC.shape[1] % _MATRIX_ROWS:
        return head_linear_twin(x_THC, weight_HNC)
    out_THN = x_THC.new_empty(x_THC.shape[0], *weight_HNC.shape[:2])
    _launch(x_THC, weight_HNC.flatten(0, 1), None, out_THN, head_rows=weight_HNC.shape[1])
    return out_THN


def _pays(x_TC: Tensor, weight_NC: Tensor) -> bool:
    """Whether a plain product is faster here than in a library."""
    if weight_NC.shape[0] > _FEW_OUTPUTS:
        return _fits(x_TC, weight_NC, 1) or gluon_linear.fits(x_TC.unsqueeze(1), weight_NC, None)
    return _fits(x_TC, weight_NC, _SMALL_TOKENS)


def _fits(x: Tensor, weight: Tensor, max_tokens: int) -> bool:
    """Whether the kernels here take these: few tokens, one dtype, rows that are contiguous."""
    rows = x.stride(-1) == 1 and weight.is_contiguous() and x.dtype == weight.dtype
    return rows and 0 < x.shape[0] <= max_tokens and weight.numel() > 0


def _launch(
    x_THC: Tensor,
    weight_NC: Tensor,
    bias_N: Tensor | None,
    out: Tensor,
    *,
    gated: bool = False,
    head_rows: int | None = None,
) -> None:
    """`out` [T, N], contiguous; with `head_rows` each so many rows belong to a head, that has its own inputs."""
    tokens, outputs, inputs = x_THC.shape[0], weight_NC.shape[0] // (2 if gated else 1), weight_NC.shape[1]
    few_outputs = outputs <= _FEW_OUTPUTS
    vectors = tokens <= (_SMALL_TOKENS if few_outputs else 1)
    streamed = not vectors or not (few_outputs or gated or weight_NC.numel() < _MANY_VALUES)
    if streamed and gluon_linear.fits(x_THC, weight_NC, head_rows):
        gluon_linear.products(x_THC, weight_NC, bias_N, out, gated=gated, head_rows=head_rows)
        return
    rows = _MATRIX_ROWS
    if vectors:
        rows = _SMALL_ROWS if few_outputs else _VECTOR_ROWS // (2 if gated else 1)
    arguments = (
        x_THC,
        weight_NC,
        weight_NC if bias_N is None else bias_N,
        out,
        outputs,
        inputs,
        head_rows or outputs,
        *x_THC.stride()[:2],
        tokens,
    )
    options = {"ROWS": rows, "GATED": gated, "BIAS": bias_N is not None, **launch_options(x_THC.device)}
    grid = (triton.cdiv(outputs, rows),)
    if vectors:
        padded = triton.next_power_of_2(tokens)
        columns = min(triton.next_power_of_2(inputs), _VECTOR_COLUMNS)
        _vector_products[grid](*arguments, TOKENS=padded, COLUMNS=columns, num_warps=_VECTOR_WARPS, **options)
        return
    _matrix_products[grid](
        *arguments,
        TOKENS=max(triton.next_power_of_2(tokens), 16),
        COLUMNS=_MATRIX_COLUMNS,
        PRECISION="ieee" if x_THC.dtype == torch.float32 else None,
        num_warps=2 if tokens <= 16 else 4,
        num_stages=4 if x_THC.element_size() == 2 else 2,
        **options,
    )
