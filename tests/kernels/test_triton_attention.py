"""The GPU's attention kernels against the contract of `attend`: hostile cases, every tiling, graphs, large pools.

On a GPU they run as they are, in bf16 too; elsewhere the Triton ones run through Triton's interpreter, in a process of
its own, because the interpreter must be chosen before the kernels are defined. The Gluon kernel needs its GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from helix.kernels import attention
from tests.kernels import test_attention as contract
from tests.kernels.cases import AttentionCase, Shape, Tolerance, assert_close, assert_same_bits, build_case

if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
    from helix.kernels.triton_attention import Tiling, attend, attend_into

ON_GPU = torch.cuda.is_available()
CPU = torch.device("cpu")
GPU = torch.device("cuda")

# Sequences of one latent width, as DeepSeek has it: around the tile, one slot only, and several tiles long.
LATENT = Shape(
    lengths=(700, 63, 64, 65, 1, 400),
    queries=(1,) * 6,
    num_heads=16,
    num_kv_heads=1,
    width=576,
    v_width=512,
    page_tokens=64,
    latent=True,
)
LATENTS = {
    "8 heads": replace(LATENT, num_heads=8),
    "16 heads": LATENT,
    "40 heads, long pages": replace(LATENT, num_heads=40, page_tokens=128),
    "64 heads": replace(LATENT, num_heads=64),
    "128 heads, kvp 3": replace(LATENT, num_heads=128, kvp=3, kvp_rank=2),
    "16 heads, short pages": replace(LATENT, page_tokens=16),
    "verification": replace(LATENT, lengths=(700, 300, 65), queries=(4, 4, 4)),
    "chunk": replace(LATENT, lengths=(400, 90, 33), queries=(150, 7, 33)),
    "chunk, 128 heads, kvp 2": replace(LATENT, lengths=(400, 90), queries=(50, 7), num_heads=128, kvp=2, kvp_rank=1),
    "nothing visible": replace(LATENT, lengths=(3, 12, 20), queries=(3, 1, 2), kvp=6, kvp_rank=5),
    "one sequence": replace(LATENT, lengths=(700,), queries=(1,)),
}
GROUPED = Shape(lengths=(300, 63, 64, 65, 1), queries=(1,) * 5, num_heads=32, num_kv_heads=4, page_tokens=64)
WIDTHS = (64, 80, 96, 128, 192, 256)


def run(case: AttentionCase, device: torch.device, workers: int | None, tiling: Tiling | None = None) -> None:
    """One call on the device, into memory that was NaN, against the fp64 reference."""
    check_case(case, *call(case, device, workers, tiling))


def call(
    case: AttentionCase, device: torch.device, workers: int | None, tiling: Tiling | None = None
) -> tuple[Tensor, Tensor]:
    moved = to(case, device)
    tokens, heads, _ = moved.q_THD.shape
    out = torch.full((tokens, heads, moved.v_PBKV.shape[3]), torch.nan, dtype=moved.q_THD.dtype, device=device)
    lse = torch.full((tokens, heads), torch.nan, device=device)
    attend_into(out, lse, *moved.arguments, num_workers=workers, tiling=tiling)
    return out.cpu(), lse.cpu()


def check_case(case: AttentionCase, out: Tensor, lse: Tensor) -> None:
    """Against the fp64 reference; for a large case against the twin in fp32, which is itself tested against that."""
    if case.k_PBKD.numel() * case.q_THD.shape[1] < 1 << 24:
        contract.check(lambda *_: (out, lse), case)
        return
    want_out, want_lse = attention.attend(case.q_THD.float(), *case.arguments[1:])
    assert_close(out, want_out)
    assert_close(lse, want_lse, Tolerance(absolute=2e-5, relative=2e-5, overall=1e-5))


def to(case: AttentionCase, device: torch.device) -> AttentionCase:
    """`case` on `device`; values that are the first columns of the keys stay so."""
    tensors = {one.name: getattr(case, one.name) for one in fields(case)}
    moved = replace(case, **{name: value.to(device) for name, value in tensors.items() if isinstance(value, Tensor)})
    if case.v_PBKV.data_ptr() != case.k_PBKD.data_ptr():
        return moved
    return replace(moved, v_PBKV=moved.k_PBKD[..., : case.v_PBKV.shape[3]])


def check_hostile(device: torch.device, dtype: torch.dtype, names: tuple[str, ...], workers: tuple[int, ...]) -> None:
    for name in names:
        for count in workers:
            run(build_case(contract.SHAPES[name], dtype), device, count)


def check_tilings(device: torch.device, dtype: torch.dtype) -> None:
    """Both sides of the product, tiles of a page, of part of one and of several, one row more than a block takes."""
    case = build_case(Shape(lengths=(70,), queries=(3,), page_tokens=16), dtype)
    grouped = build_case(
        Shape(lengths=(70, 9), queries=(1, 2), num_heads=18, num_kv_heads=1, width=24, v_width=16, page_tokens=32),
        dtype,
    )
    for swap, rows, slots in ((False, 16, 16), (True, 16, 64), (True, 32, 16), (False, 64, 32)):
        tiling = Tiling(rows=rows, slots=slots, warps=4, stages=2, workers_per_sm=1, min_tiles=1, swap=swap)
        run(case if slots == 16 else grouped, device, 3, tiling)


def check_one_program_a_block(device: torch.device, dtype: torch.dtype) -> None:
    """So few workers that splitting is left out: every block is one program's, the empty ones too."""
    run(build_case(Shape(lengths=(9, 6), queries=(1, 2), num_heads=4, num_kv_heads=4), dtype), device, 1)
    run(build_case(Shape(lengths=(9, 3), queries=(9, 3), kvp=2, kvp_rank=1), dtype), device, 1)


def check_loud_nan(device: torch.device, dtype: torch.dtype) -> None:
    """NaN among what a query sees comes out beside a finite lse, whether or not its block was split."""
    for workers in (1, 40):
        case = build_case(Shape(lengths=(9, 150), queries=(1, 1)), dtype)
        case.v_PBKV[case.page_table_SR[0, 1], 2, 1] = torch.nan
        case.k_PBKD[case.page_table_SR[1, 30], 2, 0] = torch.nan
        out, lse = call(case, device, workers)
        assert out[0, 3:].isnan().sum() == 3 * 8, "the heads of the second KV head, in the first sequence"
        assert out[1, :3].isnan().all(), "the heads of the first KV head, in the second sequence"
        assert not out[0, :3].isnan().any()
        assert not out[1, 3:].isnan().any()
        assert lse.isfinite().all()


def check_written_in_place(device: torch.device, dtype: torch.dtype) -> None:
    """Results go into rows of a message with room for the lse behind each, and beside them nothing changes."""
    case = build_case(contract.SHAPES["verification of drafts"], dtype)
    moved = to(case, device)
    tokens, heads, _ = moved.q_THD.shape
    message = torch.full((heads, tokens, 8 + 4), 7.0, dtype=dtype, device=device)
    lse = torch.full((heads, tokens), torch.nan, device=device)
    attend_into(message[..., :8].transpose(0, 1), lse.T, *moved.arguments, num_workers=5)
    check_case(case, message[..., :8].transpose(0, 1).cpu(), lse.T.cpu())
    assert (message[..., 8:] == 7.0).all()


def check_bad_pools(device: torch.device, dtype: torch.dtype) -> None:
    case = to(build_case(contract.DECODE, dtype), device)
    apart = case.k_PBKD[::2]
    with pytest.raises(ValueError, match="pages without gaps"):
        attend(case.q_THD, apart, apart, *case.arguments[3:])


INTERPRETED = {
    torch.float32: ("decode", "pages of one token", "wide values", "latent", "kvp 6, all shards empty but one"),
    torch.float16: (
        "lengths around the page",
        "verification of drafts",
        "group 3, 9 heads",
        "kvp 6, all shards empty",
    ),
}


def interpret() -> None:
    """What the CPU can do in bearable time, in the dtypes that the interpreter gets right."""
    for dtype, names in INTERPRETED.items():
        check_hostile(CPU, dtype, names, (5,))
    check_loud_nan(CPU, torch.float16)
    check_written_in_place(CPU, torch.float16)
    check_bad_pools(CPU, torch.float16)
    check_tilings(CPU, torch.float16)
    check_one_program_a_block(CPU, torch.float32)


@pytest.mark.skipif(ON_GPU, reason="the kernels run on the GPU here")
def test_through_the_interpreter() -> None:
    root = Path(__file__).parents[2]
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(root), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "tests.kernels.test_triton_attention"]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["done"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", contract.SHAPES)
def test_hostile_cases(name: str, dtype: torch.dtype) -> None:
    case = build_case(contract.SHAPES[name], dtype)
    for workers in (None, 1, 3, 7):
        run(case, GPU, workers)


@pytest.mark.gpu
@pytest.mark.parametrize("check", [check_tilings, check_one_program_a_block, check_loud_nan, check_written_in_place])
def test_parts_of_the_contract(check: object) -> None:
    assert callable(check)
    check(GPU, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LATENTS)
def test_latents(name: str, dtype: torch.dtype) -> None:
    case = build_case(LATENTS[name], dtype)
    for workers in (None, 1, 3):
        run(case, GPU, workers)


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [1, 3, 40])
@pytest.mark.parametrize("width", WIDTHS)
def test_head_widths(width: int, queries: int) -> None:
    lengths = tuple(max(length, queries) for length in GROUPED.lengths)
    shape = replace(GROUPED, width=width, v_width=width, lengths=lengths, queries=(queries,) * 5)
    case = build_case(shape, torch.bfloat16)
    for workers in (None, 3):
        run(case, GPU, workers)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [LATENT, replace(LATENT, num_heads=8), GROUPED], ids=["latent", "8 heads", "grouped"])
def test_replayed_graph_follows_the_lengths(shape: Shape) -> None:
    """One graph; between replays the lengths shrink, grow and become 0, as the rows of a batch bucket do."""
    case = build_case(shape, torch.bfloat16)
    moved = to(case, GPU)
    full = moved.visible_len_T.clone()
    attend(*moved.arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend(*moved.arguments)
    for lengths in (full, full // 3, torch.zeros_like(full), torch.where(full > 64, 1, full), full):
        moved.visible_len_T.copy_(lengths)
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        want_out, want_lse = attend(*moved.arguments)
        assert_same_bits(out.cpu(), want_out.cpu())
        assert_same_bits(lse.cpu(), want_lse.cpu())
        twin = attention.attend(case.q_THD.float(), *case.arguments[1:5], lengths.cpu(), case.scale)
        assert_close(out.cpu(), twin[0])
        assert_close(lse.cpu(), twin[1], Tolerance(absolute=2e-5, relative=2e-5, overall=1e-5))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [LATENT, GROUPED], ids=["latent", "grouped"])
def test_never_waits_for_the_device(shape: Shape) -> None:
    case = to(build_case(shape, torch.bfloat16), GPU)
    attend(*case.arguments)
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend(*case.arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [8, 16, 128])
def test_addresses_beyond_32_bits(num_heads: int) -> None:
    """A pool of more than 4 million tokens, of which the last pages are read."""
    pages, slots = 70_000, 64
    pool = torch.full((pages, slots, 1, 576), torch.nan, dtype=torch.bfloat16, device=GPU)
    generator = torch.Generator(GPU).manual_seed(0)
    pool[-3:].normal_(generator=generator)
    q = torch.empty(1, num_heads, 576, dtype=torch.bfloat16, device=GPU).normal_(generator=generator)
    table = torch.tensor([[pages - 1, pages - 3, pages - 2]], dtype=torch.int32, device=GPU)
    starts, visible = torch.tensor([0, 1], device=GPU), torch.tensor([150], device=GPU)
    out, lse = attend(q, pool, pool[..., :512], table, starts, visible, 0.05)
    near = pool[[pages - 1, pages - 3, pages - 2]].cpu()
    want = attention.attend(
        q.cpu().float(), near, near[..., :512], torch.tensor([[0, 1, 2]]), starts.cpu(), visible.cpu(), 0.05
    )
    assert_close(out.cpu(), want[0])
    assert_close(lse.cpu(), want[1], Tolerance(absolute=2e-5, relative=2e-5, overall=1e-5))


if __name__ == "__main__":
    interpret()
    print("done")
