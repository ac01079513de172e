"""Cases of the FP8 kernels; as a program it runs them all on the CPU (for Triton's interpreter) and prints names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from helix.kernels import triton_fp8_experts, triton_fp8_linear
from helix.kernels.fp8 import Packed, linear_fp8, quantise_groups
from helix.layers.moe import products_by_loop
from helix.layout import ScaleGrid, scale_grid
from tests.kernels.pointwise_cases import CPU, Case, assert_near, values


def packed(*size: int, grid: ScaleGrid, seed: int = 0, spread: int = 3) -> Packed:
    """FP8 numbers of every size, scales over 2 * `spread` powers of two with a block of zero scale among them, and NaN
    in the columns of the scales that no value has."""
    generator = torch.Generator().manual_seed(seed + sum(size))
    numbers = torch.randn(size, generator=generator) * torch.exp2(torch.randint(-8, 3, size, generator=generator))
    rows, columns = grid.shape(*size[-2:])
    scale = torch.exp2(torch.randint(-spread, spread, (*size[:-2], rows, columns), generator=generator).float())
    scale[..., 0, 0] = 0.0
    scale[..., -(-(grid.skip + size[-1]) // grid.cols) :] = torch.nan
    return Packed(numbers.to(torch.float8_e4m3fn), scale, grid)


def on(device: torch.device, weight: Packed) -> Packed:
    return Packed(weight.values.to(device), weight.scale.to(device), weight.grid)


GRIDS = (
    ScaleGrid(128, 128, 0),
    # Slices that cut a block: of rows into cells of 8, of columns 40 behind its corner.
    scale_grid((128, 128), [(24, 0, 0), (24, 40, 0)]),
    scale_grid((128, 128), [(0, 0, 168)]),
    scale_grid((16, 32), [(0, 0, 33)]),
)


# With parts of K that some programs have nothing of.
SPLIT = triton_fp8_linear.Tile(rows=32, unroll=2, split=4, warps=4, stages=3)


def check_linear(device: torch.device, dtype: torch.dtype) -> None:
    """Sizes off every tile, each grid, with and without a bias, from one token to more than a tile."""
    sizes = ((72, 300),) if device.type == "cpu" else ((72, 300), (576, 1536))
    for outputs, inputs in sizes:
        for grid in GRIDS:
            weight = packed(outputs, inputs, grid=grid)
            for tokens in (1, 5, 33):
                x = values(CPU, dtype, tokens, inputs)
                bias = None if tokens == 5 else values(CPU, dtype, outputs)
                want = linear_fp8(x.float(), weight, None if bias is None else bias.float()).to(dtype)
                moved = None if bias is None else bias.to(device)
                for tile in (None, SPLIT) if tokens == 33 or device.type != "cpu" else (None,):
                    got = triton_fp8_linear.weight_only(x.to(device), on(device, weight), moved, tile)
                    assert_near(got, want, dtype)
    assert triton_fp8_linear.weight_only(x[:0].to(device), on(device, weight)).shape == (0, outputs)


def check_ranges(device: torch.device, dtype: torch.dtype) -> None:
    """Scales near both ends of fp32: each block is scaled on its own, and nothing overflows on the way."""
    grid = ScaleGrid(128, 128, 0)
    weight = packed(32, 256, grid=grid)
    for low, high in ((2.0**-120, 2.0**-118), (2.0**-126, 0.0), (2.0**100, 2.0**90)):
        weight.scale[:, 0], weight.scale[:, 1] = low, high
        for tokens in (1, 3):
            x = values(CPU, torch.float32, tokens, 256) * (2.0**-100 if low > 1 else 1.0)
            want = nn.functional.linear(x.double(), weight.dequantise(torch.float64))
            got = triton_fp8_linear.weight_only(x.to(device), on(device, weight)).cpu().double()
            assert got.isfinite().all()
            assert (got - want).abs().max() <= 1e-5 * want.abs().max()


def check_groups(device: torch.device, _dtype: torch.dtype) -> None:
    """Activations in FP8: the scales of the twin, its values but where the interpreter rounds wrongly, and padding."""
    x = values(CPU, torch.float32, 5, 384) * torch.logspace(-3, 3, 384)
    x[2, :128] = 0.0
    want, want_scale = quantise_groups(x, 128)
    got, scale = triton_fp8_linear.quantise_groups(x.to(device))
    assert got.shape == (16, 384)
    assert scale.stride() == (1, 16)
    assert torch.equal(scale[:5].cpu(), want_scale)
    differ = (got[:5].cpu().float() != want.float()).float().mean()
    assert differ < (0.1 if device.type == "cpu" else 1e-6), differ
    assert not got[5:].float().any()


def check_many_tokens(device: torch.device, dtype: torch.dtype) -> None:
    """Activations in FP8 where blocks lie whole and the device has products for them; otherwise as few tokens do."""
    if device.type != "cuda" or dtype is not torch.bfloat16:
        return
    for outputs, inputs in ((576, 1536), (256, 2304)):
        for grid in GRIDS:
            weight = packed(outputs, inputs, grid=grid)
            weight.scale.nan_to_num_(0.0)
            for tokens in (65, 300):
                x = values(CPU, dtype, tokens, inputs)
                want = linear_fp8(x.double().float(), weight).double()
                got = triton_fp8_linear.linear_fp8(x.to(device), on(device, weight)).cpu().double()
                assert (got - want).norm() <= 0.04 * want.norm(), (outputs, inputs, grid, tokens)


def experts_case(
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
    tokens: int,
    ids: Tensor,
    cut: int,
    ways: Sequence[Callable[..., Tensor]],
) -> None:
    """One set of stacks whose slice of the width begins `cut` places inside the experts' own."""
    experts, hidden, width = sizes
    # The interpreter takes milliseconds a program, so it gets small blocks.
    block = (16, 32) if device.type == "cpu" else (128, 128)
    up_grid = scale_grid(block, [(cut, 0, 0), (cut, width, 0)])
    gate_up = packed(experts, 2 * width, hidden, grid=up_grid, seed=1, spread=2)
    down = packed(experts, hidden, width, grid=scale_grid(block, [(0, 0, cut)]), seed=2, spread=2)
    x, weight = values(CPU, dtype, tokens, hidden) * 0.1, values(CPU, torch.float32, *ids.shape).abs()
    want = products_by_loop(x.float(), ids, weight, gate_up, down, "silu").to(dtype)
    moved = (x.to(device), ids.to(device), weight.to(device), on(device, gate_up), on(device, down))
    for way in ways:
        assert_near(way(*moved), want, dtype)


def check_experts(device: torch.device, dtype: torch.dtype) -> None:
    """Few tokens, each expert's own; a token without any; widths off the blocks."""
    ids = torch.tensor([[0, 1, 2], [2, -1, 3], [3, 6, -4], [1, 2, 0]])
    both = (triton_fp8_experts.few, triton_fp8_experts.sorted_by_expert)
    sizes = ((3, 40, 12), (3, 12, 40)) if device.type == "cpu" else ((3, 136, 24), (3, 24, 136), (3, 600, 1100))
    for one, cut in zip(sizes, (0, 8, 64), strict=False):
        experts_case(device, dtype, one, 4, ids, cut, both)


def check_sorted(device: torch.device, dtype: torch.dtype) -> None:
    """Experts with no pair, with few, with more than one tile of them; more pairs than one kernel sorts."""
    experts, hidden, width = (5, 40, 24) if device.type == "cpu" else (64, 256, 88)
    generator = torch.Generator().manual_seed(0)
    for tokens in (23,) if device.type == "cpu" else (23, 128, 700, 3000):
        chance = torch.ones(experts + 1).index_fill(0, torch.tensor([1]), 30.0).index_fill(0, torch.tensor([3]), 0.0)
        ids = torch.multinomial(chance.expand(tokens, -1), 3, generator=generator)
        experts_case(device, dtype, (experts, hidden, width), tokens, ids, 16, (triton_fp8_experts.sorted_by_expert,))


CASES: Mapping[str, Case] = {
    "linear": check_linear,
    "ranges": check_ranges,
    "groups": check_groups,
    "many_tokens": check_many_tokens,
    "experts": check_experts,
    "sorted": check_sorted,
}

if __name__ == "__main__":
    for name, case in CASES.items():
        case(CPU, torch.float32)
        print(name)
