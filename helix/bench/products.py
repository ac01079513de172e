"""Timings of products with bf16 weights on a GPU, and of the router, as shares of the time to read the bytes.

Shapes are those of whole models on one rank: experts of DeepSeek-V2-Lite with tokens that choose at random, and linear
layers of V2-Lite and Llama-3.1-8B. Weights rotate, so that none is found in the cache, and the first call of each case
is compared with the fp32 twin.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from helix.bench.kernels import H200, relative_error, time_calls
from helix.kernels import linear, route
from helix.kernels.linear import linear as linear_twin
from helix.kernels.router import route as route_twin
from helix.layers.moe import expert_products, products_by_loop
from helix.model_spec import MoESpec

_COLD_BYTES = 400 << 20
_CALLS = 12
_BYTES = 2
_TOLERANCE = 1e-2

# Outputs by inputs.
LINEARS = ((2048, 2048), (3648, 2048), (6144, 4096), (4096, 4096), (4096, 14336), (102400, 2048))
LINEAR_TOKENS = (1, 8, 32)
# DeepSeek-V2-Lite: width, width of an expert.
HIDDEN, WIDTH = 2048, 1408
V2_LITE = MoESpec(num_experts=64, experts_per_token=6, expert_width=WIDTH)
EXPERT_TOKENS = (1, 4, 8, 32, 128)
# DeepSeek-R1: groups and a correction bias.
R1 = MoESpec(
    num_experts=256,
    experts_per_token=8,
    expert_width=2048,
    score="sigmoid",
    num_groups=8,
    topk_groups=4,
    group_score="top2_sum",
    normalise=True,
    scaling=2.5,
    correction_bias=True,
)
ROUTER_TOKENS = (1, 8, 128)


def bench_linear(device: torch.device) -> Iterator[dict[str, Any]]:
    """Records of linear layers, one token to a batch."""
    for outputs, inputs in LINEARS:
        copies = max(_COLD_BYTES // (outputs * inputs * _BYTES), 2)
        weights = [_normal(device, outputs, inputs) for _ in range(copies)]
        for tokens in LINEAR_TOKENS:
            x = _normal(device, tokens, inputs)
            error = relative_error(linear(x, weights[0]), linear_twin(x.float(), weights[0].float()))
            times = time_calls([partial(linear, x, weight) for weight in weights])
            yield _record("linear", f"{outputs} x {inputs}, {tokens} tokens", times, outputs * inputs * _BYTES, error)


def bench_experts(device: torch.device) -> Iterator[dict[str, Any]]:
    """Records of the experts; bytes are those of the experts that are hit, in the mean of the calls."""
    gate_up = _normal(device, V2_LITE.num_experts, 2 * WIDTH, HIDDEN)
    down = _normal(device, V2_LITE.num_experts, HIDDEN, WIDTH)
    for tokens in EXPERT_TOKENS:
        generator = torch.Generator().manual_seed(tokens)
        picks = [_pick(tokens, V2_LITE, generator) for _ in range(_CALLS)]
        hit = sum(pick.unique().numel() for pick in picks) / _CALLS
        x = _normal(device, tokens, HIDDEN)
        share = torch.rand(tokens, V2_LITE.experts_per_token, device=device)
        calls = [partial(expert_products, x, pick.to(device), share, gate_up, down, "silu") for pick in picks]
        want = products_by_loop(x.float(), picks[0].to(device), share, gate_up.float(), down.float(), "silu")
        error = relative_error(calls[0](), want)
        num_bytes = int(hit * 3 * HIDDEN * WIDTH * _BYTES)
        yield _record("experts", f"V2-Lite, {tokens} tokens, {hit:.1f} hit", time_calls(calls), num_bytes, error)


def bench_router(device: torch.device) -> Iterator[dict[str, Any]]:
    """Records of choosing experts from their logits; bytes are those of the logits."""
    for name, moe in (("V2-Lite", V2_LITE), ("R1", R1)):
        bias = torch.rand(moe.num_experts, device=device) if moe.correction_bias else None
        for tokens in ROUTER_TOKENS:
            logits = torch.randn(tokens, moe.num_experts, device=device)
            error = relative_error(route(logits, bias, moe)[1], route_twin(logits, bias, moe)[1])
            times = time_calls([partial(route, logits, bias, moe)] * _CALLS)
            yield _record("router", f"{name}, {tokens} tokens", times, logits.numel() * logits.itemsize, error)


def _normal(device: torch.device, *size: int) -> Tensor:
    return torch.empty(size, dtype=torch.bfloat16, device=device).normal_(std=size[-1] ** -0.5)


def _pick(tokens: int, moe: MoESpec, generator: torch.Generator) -> Tensor:
    rows = [torch.randperm(moe.num_experts, generator=generator)[: moe.experts_per_token] for _ in range(tokens)]
    return torch.stack(rows)


def _record(family: str, shape: str, times: tuple[float, float, float], num_bytes: int, error: float) -> dict[str, Any]:
    if not error < _TOLERANCE:
        raise AssertionError(f"{family}, {shape}: off by {error:.2e} of the norm")
    median, low, high = times
    rate = num_bytes / median / 1e6
    return {
        "family": family,
        "shape": shape,
        "median_us": round(median, 3),
        "low_us": round(low, 3),
        "high_us": round(high, 3),
        "tb_per_s": round(rate, 3),
        "share_of_ceiling": round(1e12 * rate / H200.read_bytes_per_s, 3),
        "out_error": error,
    }
