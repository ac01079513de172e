"""Cases of the FP8 cache; as a program it runs them all on the CPU (for Triton's interpreter) and prints names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from helix.kernels import attention, fp8_cache, triton_fp8_cache
from helix.kernels.fp8_cache import Fp8Rows, append_fp8, quantise_rows
from helix.kernels.triton_attention import Tiling, attend_into
from tests.kernels.cases import AttentionCase, Shape, build_case
from tests.kernels.pointwise_cases import CPU, Case, assert_near, values


def packed(pool_PBKX: Tensor, width: int) -> Fp8Rows:
    """A pool in FP8 of the same rows, the first `width` values of each; NaN in what was never written stays NaN."""
    rows_SKX = pool_PBKX.flatten(0, 1)
    values_SKD, scale_SK = quantise_rows(rows_SKX[..., :width])
    size = pool_PBKX.shape[:2]
    tail = pool_PBKX[..., width:].contiguous() if width < pool_PBKX.shape[3] else None
    return Fp8Rows(values_SKD.unflatten(0, size), scale_SK.unflatten(0, size), tail)


def on(device: torch.device, pool: Fp8Rows) -> Fp8Rows:
    tail = None if pool.tail_PBKR is None else pool.tail_PBKR.to(device)
    return Fp8Rows(pool.values_PBKD.to(device), pool.scale_PBK.to(device), tail)


def check_append(device: torch.device, dtype: torch.dtype) -> None:
    """Rows of every size, one of zeros, one with NaN, from a tensor whose rows lie apart."""
    for heads, width, tail in ((3, 24, 0), (1, 48, 8)):
        rows = values(CPU, dtype, 5, 2 * heads, width + tail)[:, :heads]
        rows[1] = 0.0
        rows[2] *= 1e-30 if dtype != torch.float16 else 1e-6
        rows[3] *= 1e4
        slots = torch.tensor([7, 0, -1, 22, 9])
        never = torch.full((6, 4, heads, width + tail), torch.nan, dtype=dtype)
        want, got = packed(never.clone(), width), on(device, packed(never, width))
        for one in (want, got):
            one.scale_PBK.fill_(torch.nan)
        append_fp8(want, rows, slots)
        moved = rows.to(device)
        triton_fp8_cache.append_fp8(got, moved, slots.to(device))
        written = [7, 0, 22, 9]
        where = (want.scale_PBK.flatten(0, 1)[written], got.scale_PBK.cpu().flatten(0, 1)[written])
        assert torch.allclose(*where, rtol=1e-6, atol=0.0)
        assert int(got.scale_PBK.isnan().sum()) == (24 - len(written)) * heads
        ours, theirs = got.float().cpu().flatten(0, 1)[written], want.float().flatten(0, 1)[written]
        # Triton's interpreter rounds up to a power of two wrongly, once in some tens of values.
        differ = (ours != theirs).float().mean()
        assert differ < (0.1 if device.type == "cpu" else 0.002), differ
        back = rows[[0, 1, 3, 4]].float()
        assert ((theirs - back).abs() <= back.abs() / 15 + where[0].unsqueeze(2) * 2**-9).all()
        rows[0, 0, 0] = torch.nan
        triton_fp8_cache.append_fp8(got, rows.to(device), slots.to(device))
        assert got.float().flatten(0, 1)[7, 0, 0].isnan(), "NaN stays loud"


def check_attend(device: torch.device, dtype: torch.dtype) -> None:
    """Grouped heads and latents; empty sequences; both sides of the product; blocks split over workers and whole."""
    shapes = (
        (Shape(lengths=(170, 3, 40), queries=(1, 2, 1), page_tokens=16, kvp=2, kvp_rank=1), None),
        (Shape(lengths=(33,), queries=(3,), num_heads=4, num_kv_heads=1, width=24, v_width=16, latent=True), 16),
    )
    for shape, first in shapes:
        case = build_case(shape, dtype)
        for tiling in (None, Tiling(rows=16, slots=16, warps=4, stages=2, workers_per_sm=1, min_tiles=1, swap=True)):
            run(case, first, device, tiling)


def check_latents(device: torch.device, dtype: torch.dtype) -> None:
    """DeepSeek's widths, for which Hopper has a kernel of its own: ends inside a tile, no token at all, and heads and
    queries for which it is not taken."""
    if device.type == "cpu":
        return
    sizes: dict[str, Any] = {"num_kv_heads": 1, "width": 576, "v_width": 512, "latent": True, "page_tokens": 64}
    for lengths, queries, heads in (
        ((700, 1, 64, 333), 1, 16),
        ((2000, 130), 1, 5),
        ((500, 90), 3, 16),
        ((200,), 1, 40),
    ):
        shape = Shape(lengths=lengths, queries=(queries,) * len(lengths), num_heads=heads, **sizes)
        run(build_case(shape, dtype), 512, device, None)
    shape = Shape(lengths=(9, 1, 300), queries=(1, 1, 1), num_heads=16, kvp=2, kvp_rank=1, **sizes)
    run(build_case(shape, dtype), 512, device, None)


def check_loud(device: torch.device, dtype: torch.dtype) -> None:
    """NaN in one written row reaches the result of its sequence, and no other."""
    width, first, page = (576, 512, 64) if device.type != "cpu" else (40, 32, 16)
    pool = packed(values(CPU, dtype, 2, page, 1, width), first)
    pool.scale_PBK[0, 3] = torch.nan
    moved = on(device, pool)
    query = values(CPU, dtype, 2, 4, width).to(device)
    table = torch.tensor([[0], [1]], dtype=torch.int32, device=device)
    starts, lengths = torch.arange(3, device=device), torch.tensor([page, page], device=device)
    rows = Fp8Rows(moved.values_PBKD, moved.scale_PBK)
    out, lse = torch.empty(2, 4, first, dtype=dtype, device=device), torch.empty(2, 4, device=device)
    attend_into(out, lse, query, moved, rows, table, starts, lengths, 0.1, num_workers=3)
    assert out[0].isnan().any(dim=1).all()
    assert out[1].isfinite().all()


def run(case: AttentionCase, first: int | None, device: torch.device, tiling: Tiling | None) -> None:
    k = packed(case.k_PBKD, first or case.k_PBKD.shape[3])
    v = packed(case.v_PBKV, case.v_PBKV.shape[3]) if first is None else Fp8Rows(k.values_PBKD, k.scale_PBK)
    rest = case.arguments[3:]
    want_out, want_lse = attention.attend(case.q_THD.float(), k, v, *rest)
    moved_k = on(device, k)
    moved_v = on(device, v) if first is None else Fp8Rows(moved_k.values_PBKD, moved_k.scale_PBK)
    out = torch.full(want_out.shape, torch.nan, dtype=dtype_of(case), device=device)
    lse = torch.full(want_lse.shape, torch.nan, device=device)
    moved = [one.to(device) if isinstance(one, Tensor) else one for one in rest]
    attend_into(out, lse, case.q_THD.to(device), moved_k, moved_v, *moved, tiling=tiling, num_workers=5)
    assert_near(out, want_out.to(out.dtype), out.dtype)
    empty = want_lse == -torch.inf
    assert torch.equal(lse.cpu() == -torch.inf, empty)
    assert (lse.cpu() - want_lse).masked_fill(empty, 0.0).abs().max() <= (2e-5 if out.dtype == torch.float32 else 1e-2)


def dtype_of(case: AttentionCase) -> torch.dtype:
    return case.q_THD.dtype


def check_rows(_device: torch.device, _dtype: torch.dtype) -> None:
    """A row depends on its own token: quantised among others or alone, it is the same."""
    rows = values(CPU, torch.float32, 6, 2, 40) * torch.logspace(-20, 20, 6).view(6, 1, 1)
    together = fp8_cache.quantise_rows(rows)
    for token in range(6):
        alone = fp8_cache.quantise_rows(rows[token : token + 1])
        assert torch.equal(alone[0].float(), together[0][token : token + 1].float())
        assert torch.equal(alone[1], together[1][token : token + 1])


CASES: Mapping[str, Case] = {
    "append": check_append,
    "attend": check_attend,
    "latents": check_latents,
    "loud": check_loud,
    "rows": check_rows,
}

if __name__ == "__main__":
    for name, case in CASES.items():
        case(CPU, torch.float32)
        print(name)
