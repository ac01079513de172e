"""Timings of products with FP8 weights on a GPU, as shares of the time in which the weights could be read.

Shapes are those of one rank: the linear layers of DeepSeek-R1 on KVP 8, and the experts of R1 (32 of 256 on the rank)
and of DeepSeek-V2-Lite (all 64), with tokens that choose their experts at random.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from helix.bench.kernels import H200, time_calls
from helix.kernels import linear_fp8
from helix.kernels.fp8 import Packed
from helix.kernels.triton_fp8_experts import expert_products
from helix.layout import ScaleGrid

_GRID = ScaleGrid(128, 128, 0)
_COLD_BYTES = 400 << 20
_CALLS = 12

LINEARS = {
    "down": (2112, 7168),
    "query up": (24576, 1536),
    "out": (7168, 2048),
    "mlp gate and up": (4608, 7168),
    "mlp down": (7168, 2304),
    "shared gate and up": (512, 7168),
    "shared down": (7168, 256),
}
# Model width, width of an expert, experts held, experts in all, experts of a token.
EXPERTS = {"r1": (7168, 2048, 32, 256, 8), "v2-lite": (2048, 1408, 64, 64, 6)}
TOKENS = (1, 8, 32)


def bench_linear(device: torch.device) -> Iterator[dict[str, Any]]:
    """Records of the linear layers, few tokens to many."""
    for name, (outputs, inputs) in LINEARS.items():
        copies = max(_COLD_BYTES // (outputs * inputs), 2)
        weights = [_weight(device, outputs, inputs) for _ in range(copies)]
        for tokens in (*TOKENS, 128, 2048):
            x = torch.randn(tokens, inputs, device=device).bfloat16()
            times = time_calls([partial(linear_fp8, x, weight) for weight in weights])
            yield _record("linear_fp8", name, tokens, times, outputs * inputs)


def bench_experts(device: torch.device) -> Iterator[dict[str, Any]]:
    """Records of the experts; bytes are those of the experts that are hit, in the mean of the calls."""
    for name, (hidden, width, held, total, per_token) in EXPERTS.items():
        gate_up, down = _weight(device, held, 2 * width, hidden), _weight(device, held, hidden, width)
        for tokens in TOKENS:
            generator = torch.Generator().manual_seed(tokens)
            picks = [
                torch.stack([torch.randperm(total, generator=generator)[:per_token] for _ in range(tokens)])
                for _ in range(_CALLS)
            ]
            hit = sum(int((pick.unique() < held).sum()) for pick in picks) / _CALLS
            x = torch.randn(tokens, hidden, device=device).bfloat16()
            share = torch.rand(tokens, per_token, device=device)
            calls = [partial(expert_products, x, pick.to(device), share, gate_up, down) for pick in picks]
            yield _record("experts_fp8", name, tokens, time_calls(calls), int(hit * 3 * hidden * width))


def _weight(device: torch.device, *size: int) -> Packed:
    # Bytes of every sign and exponent but those of NaN, 127 and 255.
    values = torch.randint(0, 120, size, dtype=torch.uint8, device=device)
    values += 128 * torch.randint(0, 2, size, dtype=torch.uint8, device=device)
    values = values.view(torch.float8_e4m3fn)
    shape = (*size[:-2], *_GRID.shape(*size[-2:]))
    return Packed(values, torch.full(shape, 2.0**-9, device=device), _GRID)


def _record(family: str, shape: str, tokens: int, times: tuple[float, float, float], num_bytes: int) -> dict[str, Any]:
    median, low, high = times
    rate = num_bytes / median / 1e6
    return {
        "family": family,
        "shape": f"{shape}, {tokens} tokens",
        "median_us": round(median, 3),
        "low_us": round(low, 3),
        "high_us": round(high, 3),
        "tb_per_s": round(rate, 2),
        "share_of_ceiling": round(1e12 * rate / H200.read_bytes_per_s, 3),
    }
