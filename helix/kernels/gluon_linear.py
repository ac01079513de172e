"""Products of few tokens with weight matrices for Hopper, in Triton's Gluon dialect: what `triton_linear` does there.

A program makes some rows of the result. The copy engine fetches the rows' weights through a ring of buffers in shared
memory, and fills the whole ring while the kernel ahead still runs, since weights do not depend on it. So the memory is
busy over the change of kernels too, which for products of a few microseconds is most of their time.

Letters: T tokens, H heads with a matrix each, N outputs, K inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from helix.kernels.gluon_tiles import control, descriptor, fetch, is_hopper, wait_for_inputs
from helix.kernels.triton_launch import launch_options

MAX_TOKENS = 16
# What one column of a matrix instruction's places holds.
_FEW_TOKENS = 8
_ALIGNED_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """How a product is cut: rows of the result a program, columns a buffer, buffers, and warps."""

    rows: int
    columns: int
    stages: int
    warps: int


@gluon.jit
def _begin_stage(  # type: ignore[no-untyped-def]
    weight_desc, first, N, stage, at, full, gate, up, SIZE: gl.constexpr, GATED: gl.constexpr
):
    """Have the columns from `at` on of the program's weights fetched; the inputs' share of `SIZE` follows."""
    mbarrier.expect(full.index(stage), SIZE)
    fetch(weight_desc, [first, at], full.index(stage), gate.index(stage))
    if GATED:
        fetch(weight_desc, [N + first, at], full.index(stage), up.index(stage))


@gluon.jit
def _finish(gate, up, bias_ptr, row, live, N, kind: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Bias and activation, rounded where PyTorch rounds."""
    if BIAS:
        gate += gl.load(bias_ptr + row, mask=live, other=0.0).to(gl.float32)
    if GATED:
        if BIAS:
            up += gl.load(bias_ptr + N + row, mask=live, other=0.0).to(gl.float32)
        gate = gate.to(kind).to(gl.float32)
        gate = (gate / (1.0 + gl.exp(-gate))).to(kind).to(gl.float32) * up.to(kind).to(gl.float32)
    return gate


@gluon.jit(do_not_specialize=["num_tokens", "N"])
def _stream_products(  # type: ignore[no-untyped-def]
    x_desc, weight_desc, bias_ptr, out_ptr, N, K, head_rows, num_tokens, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    TOKENS: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = weight_desc.dtype
    SIZE: gl.constexpr = (ROWS * (2 if GATED else 1) + TOKENS) * COLUMNS * 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [gl.num_warps(), 1], [16, 8])
    row_operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    token_operand: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    gate = gl.allocate_shared_memory(dtype, [STAGES, ROWS, COLUMNS], weight_desc.layout)
    up = gate
    if GATED:
        up = gl.allocate_shared_memory(dtype, [STAGES, ROWS, COLUMNS], weight_desc.layout)
    x = gl.allocate_shared_memory(dtype, [STAGES, TOKENS, COLUMNS], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    first = gl.program_id(0) * ROWS
    x_first = first // head_rows * K
    for i in gl.static_range(STAGES):
        if i * COLUMNS < K:
            _begin_stage(weight_desc, first, N, i, i * COLUMNS, full, gate, up, SIZE, GATED)
    if DEPENDENT:
        control("griddepcontrol.launch_dependents; // dummy $0")
    wait_for_inputs(DEPENDENT)
    for i in gl.static_range(STAGES):
        if i * COLUMNS < K:
            fetch(x_desc, [0, x_first + i * COLUMNS], full.index(i), x.index(i))
    gate_acc = gl.full([ROWS, TOKENS], 0.0, gl.float32, layout=layout)
    up_acc = gl.full([ROWS, TOKENS], 0.0, gl.float32, layout=layout)
    num_chunks = (K + COLUMNS - 1) // COLUMNS
    for i in range(num_chunks):
        stage = i % STAGES
        mbarrier.wait(full.index(stage), i // STAGES & 1)
        tokens = x.index(stage).permute((1, 0)).load(token_operand)
        gate_acc = mma_v2(gate.index(stage).load(row_operand), tokens, gate_acc)
        if GATED:
            up_acc = mma_v2(up.index(stage).load(row_operand), tokens, up_acc)
        if i + STAGES < num_chunks:
            at = (i + STAGES) * COLUMNS
            _begin_stage(weight_desc, first, N, stage, at, full, gate, up, SIZE, GATED)
            fetch(x_desc, [0, x_first + at], full.index(stage), x.index(stage))
    row = gl.expand_dims(first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout)), 1)
    token = gl.expand_dims(gl.arange(0, TOKENS, layout=gl.SliceLayout(0, layout)), 0)
    kind: gl.constexpr = out_ptr.dtype.element_ty
    out = _finish(gate_acc, up_acc, bias_ptr, row, row < N, N, kind, GATED, BIAS)
    gl.store(out_ptr + token * N.to(gl.int64) + row, out.to(kind), mask=(token < num_tokens) & (row < N))


def choose_ring(tokens: int, gated: bool) -> Ring:
    """The ring that was best on an H200."""
    if gated and tokens <= _FEW_TOKENS:
        return Ring(rows=16, columns=256, stages=3, warps=1)
    return Ring(rows=32, columns=256, stages=2 if gated else 4, warps=2)


def fits(x_THC: Tensor, weight_NC: Tensor, head_rows: int | None) -> bool:
    """Whether the copy engine can read these: 16-bit values on Hopper, and all rows at multiples of 16 bytes."""
    if not (0 < x_THC.shape[0] <= MAX_TOKENS and x_THC.element_size() == 2 and is_hopper(x_THC.device)):
        return False
    if x_THC.stride(2) != 1 or not weight_NC.is_contiguous() or x_THC.dtype != weight_NC.dtype:
        return False
    if head_rows is not None:
        ring = choose_ring(x_THC.shape[0], gated=False)
        if not x_THC.is_contiguous() or head_rows % ring.rows or x_THC.shape[2] % ring.columns:
            return False
    strides = (x_THC.stride(0), weight_NC.stride(0))
    aligned = all(stride * x_THC.element_size() % _ALIGNED_BYTES == 0 for stride in strides)
    return aligned and all(one.data_ptr() % _ALIGNED_BYTES == 0 for one in (x_THC, weight_NC))


def products(
    x_THC: Tensor,
    weight_NC: Tensor,
    bias_N: Tensor | None,
    out: Tensor,
    *,
    gated: bool,
    head_rows: int | None,
    ring: Ring | None = None,
) -> None:
    """Write `out` [T, N]; see `triton_linear._launch`. `ring` replaces the one that would be chosen."""
    tokens, outputs, inputs = x_THC.shape[0], out.numel() // x_THC.shape[0], weight_NC.shape[1]
    ring = ring or choose_ring(tokens, gated)
    padded = max(triton.next_power_of_2(tokens), _FEW_TOKENS)
    _stream_products[(triton.cdiv(outputs, ring.rows),)](
        descriptor(x_THC.flatten(1), padded, ring.columns),
        descriptor(weight_NC, ring.rows, ring.columns),
        weight_NC if bias_N is None else bias_N,
        out,
        outputs,
        inputs,
        head_rows or outputs,
        tokens,
        ROWS=ring.rows,
        COLUMNS=ring.columns,
        TOKENS=padded,
        STAGES=ring.stages,
        GATED=gated,
        BIAS=bias_N is not None,
        num_warps=ring.warps,
        **launch_options(x_THC.device),
    )
