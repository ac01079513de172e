"""Cases of the small kernels; as a program it runs them all on the CPU (for Triton's interpreter) and prints names."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from helix import kernels
from helix.kernels import (
    choice,
    embedding,
    rotary,
    router,
    triton_append,
    triton_choice,
    triton_draw,
    triton_embedding,
    triton_experts,
    triton_fill,
    triton_grouped,
    triton_heads,
    triton_latent,
    triton_linear,
    triton_norm,
    triton_rotary,
    triton_router,
    triton_swiglu,
)
from helix.kernels import heads as heads_twin
from helix.kernels import latent as latent_twin
from helix.kernels.draw import draw_tokens
from helix.layers.moe import products_by_loop
from helix.layers.norm import RMSNorm
from helix.model_spec import MoESpec
from helix.weights import dummy
from tests.kernels.guarded import at_the_end

Case = Callable[[torch.device, torch.dtype], None]
CPU = torch.device("cpu")


def values(device: torch.device, dtype: torch.dtype, *size: int, seed: int = 0) -> Tensor:
    """Normal numbers, the same on every device; on a CPU nothing behind them may be read."""
    generator = torch.Generator().manual_seed(seed + sum(size))
    return at_the_end(torch.randn(size, generator=generator).to(dtype)).to(device)


def assert_near(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """Near as the dtype allows: a unit or two in the last place, of the largest value."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    bound = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    error = (got.cpu().double() - want.cpu().double()).abs().max()
    assert error <= bound * want.double().abs().max().clamp(min=1.0).cpu(), error


def check_append(device: torch.device, dtype: torch.dtype) -> None:
    for tail, slots in (((3, 8), [5, -1, 23, 0]), ((1, 576), [-1, -1, 7, 11]), ((8, 128), [3, 2, 1, -1])):
        for strided in (False, True):
            pool = values(device, dtype, 6, 4, *tail)
            pool[0, 0] = torch.nan
            rows = values(device, dtype, len(slots), tail[0] * (2 if strided else 1), *tail[1:], seed=1)[:, : tail[0]]
            want = pool.clone().flatten(0, 1)
            for row, slot in enumerate(slots):
                if slot >= 0:
                    want[slot] = rows[row]
            triton_append.append(pool, rows, torch.tensor(slots, device=device))
            assert torch.equal(pool.flatten(0, 1).nan_to_num(7.5), want.nan_to_num(7.5))
    triton_append.append(pool, rows[:0], torch.tensor([], dtype=torch.int64, device=device))


def check_norm(device: torch.device, dtype: torch.dtype) -> None:
    for width in (16, 1000):
        norm = RMSNorm("norm", width, 1e-5, dtype=dtype, device=CPU)
        norm.weight.copy_(values(CPU, dtype, width, seed=3))
        weight = norm.weight.to(device)
        x, add = values(CPU, dtype, 5, 3, width), values(CPU, dtype, 5, width, seed=1)
        for view in (x, x[:, 1:], x[:, 0]):
            on_device = x.to(device)[:, x.shape[1] - view.shape[1] :] if view.dim() == 3 else x.to(device)[:, 0]
            assert_near(triton_norm.rms_norm(on_device, weight, 1e-5), norm(view), dtype)
        out, total = triton_norm.add_rms_norm(x[:, 0].to(device), add.to(device), weight, 1e-5)
        want_total, want = norm.after_adding(x[:, 0], add)
        assert torch.equal(total.cpu(), want_total)
        assert_near(out, want, dtype)


def check_rotary(device: torch.device, dtype: torch.dtype) -> None:
    angle = values(CPU, torch.float32, 4, 12)
    cos, sin = angle.cos(), angle.sin()
    for interleaved in (False, True):
        for width, start in ((24, 0), (40, 16), (56, 16)):
            x = values(CPU, dtype, 4, 4, width)
            for one in (x, x[:, 1:3]):
                want = rotary.apply_rotary(one, cos, sin, interleaved=interleaved, start=start)
                moved = x.to(device) if one is x else x.to(device)[:, 1:3]
                got = triton_rotary.apply_rotary(
                    moved, cos.to(device), sin.to(device), interleaved=interleaved, start=start
                )
                assert_near(got, want, dtype)


def check_latent(device: torch.device, dtype: torch.dtype) -> None:
    """Norm, rotation and append at once, from rows that lie apart."""
    angle = values(CPU, torch.float32, 4, 6)
    tables = (angle.cos(), angle.sin())
    norm = RMSNorm("norm", 24, 1e-6, dtype=dtype, device=CPU)
    norm.weight.copy_(values(CPU, dtype, 24, seed=3))
    latent = values(CPU, dtype, 4, 50)
    slot = torch.tensor([7, -1, 0, 23])
    for interleaved in (False, True):
        pool = torch.full((6, 4, 1, 36), torch.nan, dtype=dtype)
        moved = pool.to(device)
        latent_twin.store_latents(latent[:, 14:], norm.weight, 1e-6, tables, pool, slot, interleaved=interleaved)
        triton_latent.store_latents(
            latent.to(device)[:, 14:],
            norm.weight.to(device),
            1e-6,
            (tables[0].to(device), tables[1].to(device)),
            moved,
            slot.to(device),
            interleaved=interleaved,
        )
        assert torch.equal(moved.isnan().cpu(), pool.isnan())
        assert_near(moved.nan_to_num(), pool.nan_to_num(), dtype)


def check_absorb(device: torch.device, dtype: torch.dtype) -> None:
    """Queries that lie apart; more tokens than a tile; widths off the tile; far more tokens go to the twin."""
    for tokens, heads, nope, latent, pairs in ((1, 3, 20, 72, 6), (17, 2, 16, 64, 4), (300, 1, 16, 16, 2)):
        angle = values(CPU, torch.float32, tokens, pairs)
        tables = (angle.cos(), angle.sin())
        weight = nope**-0.5 * values(CPU, dtype, heads, nope, latent)
        query = values(CPU, dtype, tokens, heads * (nope + 2 * pairs) + 7)
        moved = (tables[0].to(device), tables[1].to(device))
        for interleaved in (False, True):
            want = latent_twin.absorb(query[:, 7:].unflatten(1, (heads, -1)), weight, tables, interleaved=interleaved)
            apart = query.to(device)[:, 7:].unflatten(1, (heads, -1))
            assert_near(triton_latent.absorb(apart, weight.to(device), moved, interleaved=interleaved), want, dtype)


def check_heads(device: torch.device, dtype: torch.dtype) -> None:
    """Rotation and append at once; the last heads' values may be wider than what is rotated."""
    angle = values(CPU, torch.float32, 3, 4)
    tables = (angle.cos(), angle.sin())
    slot = torch.tensor([9, -1, 2])
    for interleaved, width, normed in itertools.product((False, True), (8, 12), (False, True)):
        heads = values(CPU, dtype, 3, 3 + 2 * 2, width)
        weights = (values(CPU, dtype, width, seed=3), values(CPU, dtype, width, seed=4))
        pools = [torch.full((5, 2, 2, width), torch.nan, dtype=dtype) for _ in range(2)]
        moved = [pool.to(device) for pool in pools]
        norms = (*weights, 1e-6) if normed else None
        moved_norms = (weights[0].to(device), weights[1].to(device), 1e-6) if normed else None
        want = heads_twin.store_heads(heads, 3, norms, tables, pools[0], pools[1], slot, interleaved=interleaved)
        on_device = (tables[0].to(device), tables[1].to(device))
        got = triton_heads.store_heads(
            heads.to(device), 3, moved_norms, on_device, moved[0], moved[1], slot.to(device), interleaved=interleaved
        )
        assert_near(got, want, dtype)
        for pool, wanted in zip(moved, pools, strict=True):
            assert torch.equal(pool.isnan().cpu(), wanted.isnan())
            assert_near(pool.nan_to_num(), wanted.nan_to_num(), dtype)


def check_swiglu(device: torch.device, dtype: torch.dtype) -> None:
    for width in (8, 50, 1408):
        both = values(CPU, dtype, 3, 2 * width)
        gate, up = both.chunk(2, dim=-1)
        assert_near(triton_swiglu.swiglu(both.to(device)), nn.functional.silu(gate) * up, dtype)


def check_linear(device: torch.device, dtype: torch.dtype) -> None:
    """One token to more than the kernels take; outputs and inputs off every tile; biases; rows that lie apart."""
    shapes = [(1, 37, 40), (2, 5, 2100), (3, 70, 160), (17, 33, 136), (80, 12, 16)]
    skips = [9]
    if device.type == "cuda":
        # The copy engine takes only rows that start at multiples of 16 bytes, and many outputs.
        skips += [8]
        shapes += [(1, 600, 520), (7, 521, 264), (11, 700, 2056)]
    for (tokens, outputs, inputs), skip in itertools.product(shapes, skips):
        x = values(CPU, dtype, tokens, inputs + skip)
        weight = inputs**-0.5 * values(CPU, dtype, 2 * outputs, inputs)
        for bias in (None, values(CPU, dtype, 2 * outputs, seed=2)):
            moved = (x.to(device)[:, skip:], weight.to(device), None if bias is None else bias.to(device))
            for name in ("linear", "gated_linear"):
                want = kernels.TWINS[name](x[:, skip:], weight, bias)
                assert_near(getattr(triton_linear, name)(*moved), want, dtype)
        got = triton_linear.linear_fp32(*moved[:2])
        error = (got.cpu() - kernels.TWINS["linear_fp32"](x[:, skip:], weight)).abs().max()
        assert got.dtype == torch.float32
        assert error < 2e-4, "sums are not rounded to the dtype of x"


def check_head_linear(device: torch.device, dtype: torch.dtype) -> None:
    shapes = ((1, 3, 32, 48), (2, 2, 64, 20), (5, 3, 32, 130), (2, 3, 20, 16), (1, 3, 16, 512), (9, 2, 32, 256))
    for (tokens, heads, outputs, inputs), first in itertools.product(shapes, (0, 1)):
        x = values(CPU, dtype, tokens, heads + first, inputs)
        weight = inputs**-0.5 * values(CPU, dtype, heads, outputs, inputs)
        want = kernels.TWINS["head_linear"](x[:, first:], weight)
        assert_near(triton_linear.head_linear(x.to(device)[:, first:], weight.to(device)), want, dtype)


def check_embedding(device: torch.device, dtype: torch.dtype) -> None:
    """Ids before and behind what is held, the padded rows among them, from ids that lie apart."""
    for width in (24, 1030):
        weight = values(CPU, dtype, 7, width)
        weight[5:] = torch.nan
        ids = torch.tensor([[12, 3], [10, 0], [14, 0], [9, 0], [15, 0], [0, 0]])[:, 0]
        want = embedding.embed(ids, weight, 10, 5)
        moved = torch.stack((ids, ids), 1).to(device)[:, 0]
        assert torch.equal(triton_embedding.embed(moved, weight.to(device), 10, 5).cpu(), want)
        assert int(want.abs().sum(1).eq(0).sum()) == 3


def check_choice(device: torch.device, _dtype: torch.dtype) -> None:
    for vocab in (1, 50, 4099):
        logits = values(CPU, torch.float32, 6, vocab + 3)[:, :vocab]
        logits[1, vocab // 2 :] = 9.0
        logits[2, vocab - 1] = torch.nan
        logits[3, vocab // 3] = torch.inf
        logits[4] = -torch.inf
        want = choice.best_tokens(logits, -7)
        moved = torch.nn.functional.pad(logits, (0, 3)).to(device)[:, :vocab]
        assert triton_choice.best_tokens(moved, -7).tolist() == want.tolist()
        assert want[1] == vocab // 2
        assert want[2:5].tolist() == [-7] * 3


MOE = MoESpec(num_experts=10, experts_per_token=3, expert_width=16, scaling=1.5)
ROUTES = (
    replace(MOE),
    replace(MOE, num_experts=64, experts_per_token=6, normalise=True),
    replace(MOE, num_experts=64, experts_per_token=6, score="sigmoid", normalise=True),
    replace(MOE, num_experts=60, experts_per_token=6, num_groups=3, topk_groups=2),
    replace(MOE, num_experts=64, score="sigmoid", num_groups=8, topk_groups=4, group_score="top2_sum", normalise=True),
)


def check_router(device: torch.device, _dtype: torch.dtype) -> None:
    for spec in ROUTES:
        logits = 3.0 * values(CPU, torch.float32, 4, spec.num_experts)
        logits[0] = 0.0  # all equal: the lowest ids
        logits[1, 4] = logits[1, 2] = 20.0
        for bias in (None, values(CPU, torch.float32, spec.num_experts, seed=5)):
            want_experts, want_weights = router.route(logits, bias, spec)
            got_experts, got_weights = triton_router.route(
                logits.to(device), None if bias is None else bias.to(device), spec
            )
            assert torch.equal(got_experts.cpu(), want_experts), spec
            assert_near(got_weights, want_weights, torch.float32)
    ids, weights = triton_router.route(torch.full((2, 10), torch.nan, device=device), None, MOE)
    assert ((ids >= 0) & (ids < 10)).all()
    assert weights.isnan().all(), "NaN stays loud"


def check_experts(device: torch.device, dtype: torch.dtype) -> None:
    wide = (600, 2100) if device.type == "cuda" else (24, 20)  # the interpreter takes milliseconds a program
    for experts, hidden, width in ((5, 24, 12), (3, wide[0], 10), (2, 20, wide[1])):
        gate_up = 0.1 * values(CPU, dtype, experts, 2 * width, hidden)
        down = 0.1 * values(CPU, dtype, experts, hidden, width)
        x, weight = values(CPU, dtype, 4, hidden), values(CPU, torch.float32, 4, 3).abs()
        expert = torch.tensor([[0, 1, 2], [2, -1, experts], [experts, experts + 3, -7], [1, -experts, 0]])
        want = products_by_loop(x, expert, weight, gate_up, down, "silu")
        for products in (triton_experts.expert_products, triton_grouped.expert_products):
            got = products(*(one.to(device) for one in (x, expert, weight, gate_up, down)))
            assert got[2].eq(0).all(), "no expert of this token is here"
            assert_near(got, want, dtype)
            add = values(CPU, dtype, 4, hidden, seed=7)
            got = products(*(one.to(device) for one in (x, expert, weight, gate_up, down, add)))
            assert_near(got, want + add, dtype)


def check_grouped(device: torch.device, dtype: torch.dtype) -> None:
    """Experts with no pair, with few, and with more than one tile of them; more pairs than are ordered at once."""
    experts, hidden, width, tokens, per_token = 9, 16, 8, 130, 8
    gate_up, down = values(CPU, dtype, experts, 2 * width, hidden), values(CPU, dtype, experts, hidden, width)
    x, weight = 0.2 * values(CPU, dtype, tokens, hidden), values(CPU, torch.float32, tokens, per_token).abs()
    expert = torch.rand(tokens, experts + 2, generator=torch.Generator().manual_seed(1)).argsort(1)[:, :per_token] - 1
    want = products_by_loop(x, expert, weight, gate_up, down, "silu")
    got = triton_grouped.expert_products(*(one.to(device) for one in (x, expert, weight, gate_up, down)))
    assert_near(got, want, dtype)
    experts, hidden, width = (64, 256, 88) if device.type == "cuda" else (5, 40, 24)
    gate_up = 0.1 * values(CPU, dtype, experts, 2 * width, hidden)
    down = 0.1 * values(CPU, dtype, experts, hidden, width)
    generator = torch.Generator().manual_seed(0)
    for tokens in (1, 23, 128) if device.type == "cuda" else (23,):
        x, weight = values(CPU, dtype, tokens, hidden), values(CPU, torch.float32, tokens, 3).abs()
        chance = torch.ones(experts + 1).index_fill(0, torch.tensor([1]), 30.0).index_fill(0, torch.tensor([3]), 0.0)
        expert = torch.multinomial(chance.expand(tokens, -1), 3, generator=generator)
        want = products_by_loop(x, expert, weight, gate_up, down, "silu")
        got = triton_grouped.expert_products(*(one.to(device) for one in (x, expert, weight, gate_up, down)))
        assert_near(got, want, dtype)


def check_fill(device: torch.device, dtype: torch.dtype) -> None:
    """A cut of a matrix far from its beginning, inside a larger one: nothing beside it is written."""
    for size, first, keys in (((7, 1397), (1_000_003, 77), (5, -7)), ((1, 1), (0, 0), (-(2**31), 2**31 - 1))):
        source = tuple((start, start + length) for start, length in zip(first, size, strict=True))
        want = dummy._normal(dummy._place_hash(source, list(keys), CPU)) / dummy.STANDARD_DEVIATION
        target = torch.zeros(size[0] + 2, size[1] + 5, dtype=dtype, device=device)
        triton_fill.fill_normal(target[1:-1, 2:-3], first, keys, 2**0.5)
        assert_near(target[1:-1, 2:-3], want.to(dtype), dtype)
        target[1:-1, 2:-3] = 0
        assert not target.any()


def check_draw(device: torch.device, dtype: torch.dtype) -> None:
    """Rows inside a larger tensor: cold and hot ones, greedy ones, one without a best token, banned tokens, ties."""
    for vocab in (3, 1024, 5000):
        wide = torch.full((7, vocab + 9), torch.nan, dtype=dtype)
        wide[:, :vocab] = values(CPU, dtype, 7, vocab) * 3
        wide[:, 1:vocab:5] = -torch.inf
        wide[3, :vocab:2] = 4.0
        greedy = wide[:, :vocab].float().argmax(-1)
        greedy[5] = -1
        temperature = torch.tensor([1.0, 0.0, 1e-300, 2.0, 1e300, 1.0, 0.7], dtype=torch.float64)
        min_p = torch.tensor([0.0, 0.0, 0.0, 0.3, 0.0, 0.0, 1.0], dtype=torch.float64)
        for uniform in (0.0, 0.37, 1 - 2**-52):
            numbers = torch.stack([temperature, min_p, torch.full_like(min_p, uniform)])
            want = draw_tokens(wide[:, :vocab], greedy, *numbers)
            there = numbers.T.contiguous().to(device).T
            got = triton_draw.draw_tokens(wide.to(device)[:, :vocab], greedy.to(device), *there)
            assert torch.equal(got.cpu(), want), (vocab, uniform, got, want)


CASES: Mapping[str, Case] = {
    "draw": check_draw,
    "fill": check_fill,
    "append": check_append,
    "norm": check_norm,
    "rotary": check_rotary,
    "heads": check_heads,
    "latent": check_latent,
    "absorb": check_absorb,
    "swiglu": check_swiglu,
    "linear": check_linear,
    "head_linear": check_head_linear,
    "embedding": check_embedding,
    "choice": check_choice,
    "router": check_router,
    "experts": check_experts,
    "grouped": check_grouped,
}

if __name__ == "__main__":
    for name, case in CASES.items():
        case(CPU, torch.float32)
        print(name)
