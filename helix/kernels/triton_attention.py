"""Paged attention on a GPU in Triton: the contract of `helix.kernels.attention.attend`, no host synchronisation.

Work is counted in tiles of `tokens` slots. All tiles of the step, over query blocks and KV heads, lie in one row, and
each worker (a fixed number a multiprocessor) takes an equal, contiguous run of it: one sequence of a million tokens and
a batch of mixed lengths fill the device alike, from lengths that only the device knows. Where a run covers a query
block's row of tiles from end to end the result is final; otherwise the worker leaves a partial result, and a second
kernel merges those that belong together. Steps with very many query blocks (prefill) give one block to each program.

Letters: T tokens, S sequences, H query heads, K KV heads, G = H / K, D and V widths of keys and values, P pages,
B page_tokens, R rows of the page table, M rows (query token x head of the group) and N slots of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from helix.kernels import gluon_latent, gluon_packed
from helix.kernels.fp8_cache import Fp8Rows
from helix.kernels.triton_launch import launch_options
from helix.kernels.triton_paged import attend_runs, merge_runs, plan_blocks

# Below this many query blocks every program can afford to look at the lengths of all of them.
_MAX_SPLIT_BLOCKS = 1024
# Query blocks x KV heads per worker from which splitting has nothing left to balance.
_WHOLE_BLOCKS_FROM = 16
_LOG2_E = 1.4426950408889634
_MERGE_CONSTANTS = ("G", "K", "BLOCK_Q", "HEAD_BLOCKS", "M", "N", "MIN_TILES", "PAD")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How one call is cut: M rows by N slots a tile, and how the programs that read them are built and counted.

    `stages` tiles are in flight or in use at once. `min_tiles` is the least run of tiles worth a worker: a shorter one
    costs more to merge than it saves. `swap`: keys take the side of a matrix product that has 64 places at least, so
    that few rows waste none of it. `roles`: the kernel of `gluon_latent`, or
    of `gluon_packed` for FP8 rows, whose warps divide the work by kind.
    """

    rows: int
    slots: int
    warps: int
    stages: int
    workers_per_sm: int
    min_tiles: int = 2
    swap: bool = False
    roles: bool = False


def choose_tiling(rows: int, width: int, v_width: int, itemsize: int, *, shared: bool, roles: bool) -> Tiling:
    """The tiling that was best on an H200 for `rows` query rows over cache rows of `width` (and `v_width`) values.

    `shared`: values are the first columns of the keys, as for MLA latents. `roles`: `gluon_latent` can be used,
    or for FP8 rows `gluon_packed`.
    """
    rows = min(triton.next_power_of_2(rows), 128)
    row_bytes = (_pad(width) if shared else _pad_parts(width) + _pad(v_width)) * itemsize
    if roles:
        rows = 8 if rows <= 8 else 16 if rows <= 16 else 64
        return Tiling(rows=rows, slots=64, warps=4, stages=3 if rows == 8 else 2, workers_per_sm=1, roles=True)
    rows = max(rows, 16)
    if itemsize > 2:
        return Tiling(rows=min(rows, 32), slots=32 if row_bytes <= 2048 else 16, warps=4, stages=2, workers_per_sm=1)
    if row_bytes > 1024:
        # Keys and values that are not one take twice the shared memory.
        slots = 64 if shared else 32
        return Tiling(rows=min(rows, 64), slots=slots, warps=8, stages=3 if rows <= 16 else 2, workers_per_sm=1)
    if rows <= 32:
        workers = 2 if row_bytes <= 512 else 1
        return Tiling(rows=rows, slots=64, warps=4, stages=3, workers_per_sm=workers, swap=True)
    rows = rows if row_bytes <= 640 else 64
    return Tiling(rows=rows, slots=64, warps=8 if rows > 64 else 4, stages=3, workers_per_sm=1)


def attend(
    q_THD: Tensor,
    k_PBKD: Tensor | Fp8Rows,
    v_PBKV: Tensor | Fp8Rows,
    page_table_SR: Tensor,
    query_start_S1: Tensor,
    visible_len_T: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """`helix.kernels.attention.attend` on the device; can be captured, never waits for the device.

    Every token must belong to a sequence (``query_start[-1] == T``), and rows of pages must be contiguous.
    """
    num_tokens, num_heads, _ = q_THD.shape
    out_THV = q_THD.new_empty(num_tokens, num_heads, v_PBKV.shape[3])
    lse_TH = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=q_THD.device)
    attend_into(out_THV, lse_TH, q_THD, k_PBKD, v_PBKV, page_table_SR, query_start_S1, visible_len_T, scale)
    return out_THV, lse_TH


def attend_into(
    out_THV: Tensor,
    lse_TH: Tensor,
    q_THD: Tensor,
    k_PBKD: Tensor | Fp8Rows,
    v_PBKV: Tensor | Fp8Rows,
    page_table_SR: Tensor,
    query_start_S1: Tensor,
    visible_len_T: Tensor,
    scale: float,
    *,
    tiling: Tiling | None = None,
    num_workers: int | None = None,
) -> None:
    """`attend` that writes where it is told, so that an exchange can read the result where it lies.

    `out_THV` and `lse_TH` may be views with any strides, but for contiguous rows of `out_THV`. `tiling` and
    `num_workers` replace what would be chosen from the shapes and the device.
    """
    if q_THD.shape[0] == 0:
        return
    q_THD = q_THD if q_THD.stride(2) == 1 else q_THD.contiguous()
    call = _Call.of(q_THD, k_PBKD, v_PBKV, query_start_S1, tiling, num_workers)
    part, part_lse = call.partials(lse_TH)
    plan = length = visible_len_T
    if call.block_q > 1:
        plan = length = torch.empty(3, call.num_blocks, dtype=torch.int32, device=q_THD.device)
        plan_blocks[(call.num_blocks,)](
            query_start_S1, visible_len_T, plan, call.num_blocks, call.num_sequences, BLOCK_Q=call.block_q, num_warps=1
        )
    tensors = (
        page_table_SR,
        query_start_S1,
        visible_len_T,
        length,
        plan,
        out_THV,
        lse_TH,
        part,
        part_lse,
    )
    numbers = (scale * _LOG2_E, call.num_blocks, call.num_sequences, call.num_workers, page_table_SR.stride(0))
    out_strides = (*out_THV.stride()[:2], *lse_TH.stride())
    pools = _Pools.of(k_PBKD, v_PBKV, call.first)
    if call.tiling.roles:
        rest = (tensors, (*numbers, *out_strides), call.constants(), launch_options(call.device), call.num_programs)
        if isinstance(k_PBKD, Fp8Rows):
            gluon_packed.attend_tiles(q_THD, k_PBKD, *rest)
        else:
            gluon_latent.attend_tiles(q_THD, k_PBKD, *rest)
    else:
        attend_runs[(call.num_programs,)](
            q_THD,
            pools.k_PBKD,
            pools.v_PBKV,
            pools.tail_PBKR,
            pools.k_scale,
            pools.v_scale,
            *tensors,
            *numbers,
            *q_THD.stride()[:2],
            *pools.k_PBKD.stride()[1:3],
            *pools.v_PBKV.stride()[1:3],
            *pools.tail_PBKR.stride()[1:3],
            *out_strides,
            **call.constants(),
            **launch_options(call.device),
            **call.widths(),
            SCALED=isinstance(k_PBKD, Fp8Rows),
            PRECISION="ieee" if q_THD.dtype == torch.float32 else None,
            num_warps=call.tiling.warps,
            num_stages=call.tiling.stages,
        )
    if call.split:
        _launch_merge(call, tensors, out_strides)


def _launch_merge(call: _Call, tensors: tuple[Tensor, ...], out_strides: tuple[int, ...]) -> None:
    """Put the unfinished blocks together; one that a worker did alone costs a look at the lengths."""
    _, start, _, length, plan, out_THV, lse_TH, part, part_lse = tensors
    # As many partial results at a time as are to be expected, since each round waits for memory once.
    expected = 2 * call.num_workers // (call.num_blocks * call.num_kv_heads)
    parts = min(max(triton.next_power_of_2(expected), 8), 256)
    columns = min(call.v_pad, max(8192 // parts, 32), 256)
    constants = {name: call.constants()[name] for name in _MERGE_CONSTANTS}
    merge_runs[(call.num_blocks * call.block_q * call.num_heads, triton.cdiv(call.v_width, columns))](
        part,
        part_lse,
        start,
        length,
        plan,
        out_THV,
        lse_TH,
        call.num_blocks,
        call.num_workers,
        *out_strides,
        **constants,
        **launch_options(call.device),
        V=call.v_width,
        V_PAD=call.v_pad,
        COLUMNS=columns,
        PARTS=parts,
        num_warps=8 if parts * columns >= 8192 else 4,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pools:
    """The pools as the kernel reads them; scales stand for nothing where rows are not FP8."""

    k_PBKD: Tensor
    v_PBKV: Tensor
    tail_PBKR: Tensor
    k_scale: Tensor
    v_scale: Tensor

    @classmethod
    def of(cls, k_PBKD: Tensor | Fp8Rows, v_PBKV: Tensor | Fp8Rows, first: int) -> _Pools:
        """`first`: values of a plain key in its first part; the others are its tail."""
        if isinstance(k_PBKD, Fp8Rows) and isinstance(v_PBKV, Fp8Rows):
            k, v, tail = k_PBKD.values_PBKD, v_PBKV.values_PBKD, k_PBKD.tail_PBKR
            return cls(
                k_PBKD=k,
                v_PBKV=v,
                tail_PBKR=k if tail is None else tail,
                k_scale=k_PBKD.scale_PBK,
                v_scale=v_PBKV.scale_PBK,
            )
        if isinstance(k_PBKD, Fp8Rows) or isinstance(v_PBKV, Fp8Rows):
            raise TypeError("keys and values must both be plain or both FP8")
        tail = k_PBKD[..., first:] if first < k_PBKD.shape[3] else k_PBKD
        return cls(k_PBKD=k_PBKD, v_PBKV=v_PBKV, tail_PBKR=tail, k_scale=k_PBKD, v_scale=v_PBKV)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """What of one call is known on the host."""

    tiling: Tiling
    device: torch.device
    page_tokens: int
    num_blocks: int
    num_sequences: int
    num_workers: int
    num_heads: int
    num_kv_heads: int
    block_q: int
    width: int
    v_width: int
    shared: bool
    scaled: bool

    @classmethod
    def of(
        cls,
        q_THD: Tensor,
        k_PBKD: Tensor | Fp8Rows,
        v_PBKV: Tensor | Fp8Rows,
        query_start_S1: Tensor,
        tiling: Tiling | None,
        num_workers: int | None,
    ) -> _Call:
        num_tokens, num_heads, width = q_THD.shape
        _, page_tokens, kv_heads, v_width = v_PBKV.shape
        sequences, group = query_start_S1.shape[0] - 1, num_heads // kv_heads
        scaled = isinstance(k_PBKD, Fp8Rows)
        k, v = (pool.values_PBKD if isinstance(pool, Fp8Rows) else pool for pool in (k_PBKD, v_PBKV))
        for pool in (k, v):
            if pool.stride(3) != 1 or pool.stride(0) != page_tokens * pool.stride(1):
                raise ValueError(f"pages with strides {pool.stride()}: rows must be contiguous, and pages without gaps")
        shared = v_width <= width and k.data_ptr() == v.data_ptr() and k.stride() == v.stride()
        # Tokens of a sequence that are read together: as many as it has on average, so one each in a decode step.
        tokens = triton.next_power_of_2(triton.cdiv(num_tokens, sequences))
        if tiling is None:
            few = min(tokens, 128) * group
            roles = shared and num_tokens + sequences <= gluon_latent.MAX_BLOCKS
            if isinstance(k_PBKD, Fp8Rows):
                # Several tokens of a sequence at once were not timed with FP8 rows.
                roles = roles and tokens == 1 and gluon_packed.fits(q_THD, k_PBKD, few)
            else:
                roles = roles and gluon_latent.fits(q_THD, k)
            # FP8 rows take 16 bits in the products.
            itemsize = q_THD.element_size() if scaled else k.element_size()
            tiling = choose_tiling(few, width, v_width, itemsize, shared=shared, roles=roles)
        block_q = max(min(tokens, tiling.rows // group), 1)
        if num_workers is None:
            processors = torch.cuda.get_device_properties(q_THD.device).multi_processor_count
            num_workers = max(processors * tiling.workers_per_sm // triton.cdiv(group, tiling.rows), 1)
        return cls(
            tiling=tiling,
            device=q_THD.device,
            page_tokens=page_tokens,
            num_blocks=num_tokens if block_q == 1 else num_tokens // block_q + sequences,
            num_sequences=sequences,
            num_workers=num_workers,
            num_heads=num_heads,
            num_kv_heads=kv_heads,
            block_q=block_q,
            width=width,
            v_width=v_width,
            shared=shared,
            scaled=scaled,
        )

    @property
    def first(self) -> int:
        """Values of a key in its first part, which is the value too, or a power of two, or all that one scale is for.

        So a key of 192 values is padded to as many, and not to 256.
        """
        if self.shared:
            return self.v_width
        return self.width if self.scaled else _first_part(self.width)

    @property
    def head_blocks(self) -> int:
        """Blocks of rows that the heads of one group take; they read the same keys side by side."""
        return -(-self.num_heads // self.num_kv_heads // self.tiling.rows)

    @property
    def split(self) -> bool:
        """Whether workers take runs of tiles; otherwise each program takes a block."""
        if self.tiling.roles:
            return True
        few = self.num_blocks * self.num_kv_heads < _WHOLE_BLOCKS_FROM * self.num_workers
        return few and max(self.num_blocks, self.num_sequences) <= _MAX_SPLIT_BLOCKS

    @property
    def num_programs(self) -> int:
        return (self.num_workers if self.split else self.num_blocks * self.num_kv_heads) * self.head_blocks

    @property
    def v_pad(self) -> int:
        return _pad(self.v_width)

    def partials(self, lse_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Room for the unfinished blocks of every worker, or a stand-in where there are none."""
        if not self.split:
            return lse_TH, lse_TH
        rows = 2 * self.num_workers * self.head_blocks * self.tiling.rows
        part = torch.empty(rows, self.v_pad, dtype=torch.float32, device=self.device)
        return part, torch.empty(rows, dtype=torch.float32, device=self.device)

    def constants(self) -> dict[str, int]:
        """What all kernels are compiled for."""
        return {
            "G": self.num_heads // self.num_kv_heads,
            "K": self.num_kv_heads,
            "BLOCK_Q": self.block_q,
            "HEAD_BLOCKS": self.head_blocks,
            "M": self.tiling.rows,
            "N": self.tiling.slots,
            "PAGE_TOKENS": self.page_tokens,
            "MIN_TILES": self.tiling.min_tiles,
            "PAD": _padded_count(max(self.num_blocks if self.split else 1, self.num_sequences)),
        }

    def widths(self) -> dict[str, int | bool]:
        """What only `attend_runs` is compiled for."""
        first = self.first
        second = self.width - first
        return {
            "D1": first,
            "D1_PAD": _pad(first),
            "D2": second,
            "D2_PAD": _pad(second),
            "V": self.v_width,
            "V_PAD": self.v_pad,
            "SHARED": self.shared,
            "SPLIT": self.split,
            "SWAP": self.tiling.swap,
        }


def _first_part(width: int) -> int:
    """The largest power of two in `width` values; what is left is the second part of a key."""
    return 1 << (width.bit_length() - 1)


def _pad_parts(width: int) -> int:
    """Values that a key of `width` takes where its two parts are padded each."""
    first = _first_part(width)
    return _pad(first) + _pad(width - first)


def _pad(width: int) -> int:
    """The block width for `width` values: a power of two, and at least what a matrix instruction takes."""
    padded: int = triton.next_power_of_2(width)
    return max(padded, 16) if width else 0


def _padded_count(count: int) -> int:
    """Few sizes, since each is compiled anew; one block needs no search."""
    if count == 1:
        return 1
    padded: int = triton.next_power_of_2(count)
    return 64 if count <= 64 else max(padded, _MAX_SPLIT_BLOCKS)
