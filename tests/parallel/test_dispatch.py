"""Expert products and both ways of dispatch against every expert computed densely, with routings that are hostile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.moe.ep_experts import GroupedExperts
from torch import Tensor, nn

from helix.comm.mesh import build_mesh
from helix.comm.world import World, single_world
from helix.layers.dispatch import pack, resolve_dispatch, unpack
from helix.layers.mlp import ACTIVATIONS
from helix.layers.moe import MoE, expert_products, products_by_loop, products_grouped
from helix.layers.router import Router
from helix.layout import Layout
from helix.model_spec import ModelSpec, MoESpec, RotarySpec
from helix.weights import dummy_weights
from tests.ranks import RankPool

HIDDEN, WIDTH, SHARED = 12, 9, 7
ROUTINGS = ("spread", "one expert", "last experts", "first rank idle")


def spec_of(num_experts: int, per_token: int, shared: int = SHARED, mlp_bias: bool = False) -> ModelSpec:
    """A model of which only the FFN matters."""
    return ModelSpec(
        model_type="test",
        num_layers=1,
        hidden_size=HIDDEN,
        num_heads=8,
        num_kv_heads=1,
        head_dim=4,
        intermediate_size=8,
        vocab_size=8,
        max_context=8,
        norm_eps=1e-6,
        rotary=RotarySpec(theta=1e4, dim=4),
        mlp_bias=mlp_bias,
        moe=MoESpec(
            num_experts=num_experts, experts_per_token=per_token, expert_width=WIDTH, shared_width=shared, scaling=2.0
        ),
    )


def tokens(count: int) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(count))


def forced(routing: str, num_experts: int, per_token: int, count: int) -> Tensor:
    """Expert ids [T, k], distinct per token."""
    generator = torch.Generator().manual_seed(3)
    if routing == "one expert":
        return torch.arange(per_token).repeat(count, 1)
    if routing == "last experts":
        return torch.arange(num_experts - per_token, num_experts).repeat(count, 1)
    ids = torch.stack([torch.randperm(num_experts, generator=generator) for _ in range(count)])
    if routing == "first rank idle":
        # The upper half of the experts: with EP of 2 or more the first rank has no token.
        half = num_experts - num_experts // 2
        ids = half + torch.stack([torch.randperm(num_experts // 2, generator=generator) for _ in range(count)])
    return ids[:, :per_token]


class ForcedRouter(Router):
    """Sends tokens where the test says, with weights from the true scores. Knows tokens by their values."""

    def __init__(self, router: Router, x_TC: Tensor, expert_Tk: Tensor) -> None:
        nn.Module.__init__(self)
        self.weight = router.weight
        self.x_TC = x_TC
        self.expert_Tk = expert_Tk

    def forward(self, x_TC: Tensor) -> tuple[Tensor, Tensor]:
        places = [int((self.x_TC == row).all(dim=1).nonzero()[0, 0]) for row in x_TC]
        expert_Tk = self.expert_Tk[places]
        return expert_Tk, (x_TC @ self.weight.T).gather(1, expert_Tk)


def layer_outputs(
    world: World, layout: Layout, spec: ModelSpec, dispatch: str, cases: list[tuple[str, int]]
) -> list[tuple[Any, dict[str, dict[str, int]]]]:
    """On one rank: the layer's output [T, C] and the calls of each group, for each (routing, number of tokens)."""
    mesh = build_mesh(layout, world)
    layer = make_layer(spec, mesh, dispatch)
    router, results = layer.router, []
    for routing, count in cases:
        x_TC = tokens(count)
        if spec.moe is not None and routing != "router":
            ids = forced(routing, spec.moe.num_experts, spec.moe.experts_per_token, count)
            layer.router = ForcedRouter(router, x_TC, ids)
        groups = {"world": mesh.world, "tpf": mesh.tpf, "ep": mesh.ep}
        for group in groups.values():
            group.traffic.clear()
        with torch.inference_mode():
            y_TC = layer(x_TC)
        results.append((y_TC.numpy(), {axis: dict(group.traffic.calls) for axis, group in groups.items()}))
        layer.router = router
    return results


def make_layer(spec: ModelSpec, mesh: Any, dispatch: Any) -> MoE:
    """The same layer in every layout, with weights large enough to tell experts apart."""
    layer = MoE("mlp", spec, mesh, dispatch, dtype=torch.float32, device=torch.device("cpu"))
    dummy_weights(layer, seed=5)
    for parameter in layer.parameters():
        parameter.mul_(20)
    return layer


def dense_output(spec: ModelSpec, routing: str, count: int) -> Tensor:
    """The layer written down: every expert on every token, weighted by 0 where it was not chosen."""
    assert spec.moe is not None
    layer = make_layer(spec, build_mesh(Layout(), single_world(torch.device("cpu"))), "local")
    x_TC = tokens(count)
    if routing == "router":
        expert_Tk, weight_Tk = layer.router(x_TC)
    else:
        expert_Tk = forced(routing, spec.moe.num_experts, spec.moe.experts_per_token, count)
        weight_Tk = (x_TC @ layer.router.weight.T).gather(1, expert_Tk)
    y_TC = dense_products(x_TC, expert_Tk, weight_Tk, layer.experts.gate_up, layer.experts.down)
    if layer.shared is not None:
        gate, up = layer.shared.gate_up(x_TC).chunk(2, dim=-1)
        y_TC = y_TC + layer.shared.down(torch.nn.functional.silu(gate) * up)
        y_TC = y_TC if layer.shared.down_bias is None else y_TC + layer.shared.down_bias
    return y_TC


def dense_products(x_TC: Tensor, expert_Tk: Tensor, weight_Tk: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate_ETW, up_ETW = torch.einsum("tc,ewc->etw", x_TC, gate_up).chunk(2, dim=-1)
    all_ETC = torch.einsum("etw,ecw->etc", torch.nn.functional.silu(gate_ETW) * up_ETW, down)
    weight_TE = torch.zeros(x_TC.shape[0], gate_up.shape[0] + 1).scatter(1, expert_Tk, weight_Tk)
    return torch.einsum("te,etc->tc", weight_TE[:, :-1], all_ETC)


GRIDS = [
    # (kvp, tpf, ep), experts, experts per token: 30 on 8 and 384 on 7 do not divide, 6 on 6 leaves one expert a rank.
    ((2, 1, 2), 5, 2),
    ((2, 2, 1), 5, 2),
    ((3, 1, 3), 4, 3),
    ((4, 2, 2), 7, 3),
    ((6, 2, 3), 8, 4),
    ((6, 1, 6), 6, 2),
    ((8, 1, 8), 30, 6),
    ((7, 1, 7), 384, 8),
]


@pytest.mark.parametrize("dispatch", ["local", "alltoall"])
@pytest.mark.parametrize(("grid", "num_experts", "per_token"), GRIDS)
def test_every_grid_equals_all_experts_densely(
    ranks: RankPool, grid: tuple[int, int, int], num_experts: int, per_token: int, dispatch: str
) -> None:
    kvp, tpf, ep = grid
    spec = spec_of(num_experts, per_token)
    cases = [("router", 1), ("router", 2 * ep + 1)]
    cases += [(one, count) for one in ROUTINGS for count in (1, ep + 1) if fits(one, num_experts, per_token)]
    everyone = ranks.run(kvp, layer_outputs, Layout(kvp=kvp, tpf=tpf, ep=ep), spec, dispatch, cases)
    for place, (routing, count) in enumerate(cases):
        expected = dense_output(spec, routing, count).numpy()
        for rank, results in enumerate(everyone):
            np.testing.assert_allclose(
                results[place][0], expected, atol=1e-5, rtol=1e-5, err_msg=f"{routing}, {count} tokens, rank {rank}"
            )


def fits(routing: str, num_experts: int, per_token: int) -> bool:
    return routing != "first rank idle" or num_experts // 2 >= per_token


@pytest.mark.parametrize("shared", [0, SHARED])
def test_local_dispatch_is_one_all_reduce(ranks: RankPool, shared: int) -> None:
    layout = Layout(kvp=4, tpf=2, ep=2)
    everyone = ranks.run(4, layer_outputs, layout, spec_of(6, 2, shared), "local", [("one expert", 3)])
    for results in everyone:
        assert results[0][1] == {"world": {"all_reduce": 1}, "tpf": {}, "ep": {}}


@pytest.mark.parametrize("shared", [0, SHARED])
def test_every_rank_enters_every_collective_of_alltoall(ranks: RankPool, shared: int) -> None:
    layout = Layout(kvp=4, tpf=2, ep=2)
    everyone = ranks.run(4, layer_outputs, layout, spec_of(6, 2, shared), "alltoall", [("one expert", 1)])
    over_ep = {"all_to_all": 3, "all_gather": 1} | ({"reduce_scatter": 1} if shared else {})
    for results in everyone:
        assert results[0][1] == {"world": {}, "tpf": {"all_reduce": 1}, "ep": over_ep}


@pytest.mark.parametrize("dispatch", ["local", "alltoall"])
def test_bias_of_the_shared_expert_counts_once(ranks: RankPool, dispatch: str) -> None:
    spec = spec_of(5, 2, mlp_bias=True)
    everyone = ranks.run(4, layer_outputs, Layout(kvp=4, tpf=2, ep=2), spec, dispatch, [("router", 3)])
    for results in everyone:
        np.testing.assert_allclose(results[0][0], dense_output(spec, "router", 3).numpy(), atol=1e-5, rtol=1e-5)


def test_auto_resolves_to_local() -> None:
    assert [resolve_dispatch(one) for one in ("auto", "local", "alltoall")] == ["local", "local", "alltoall"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_message_keeps_every_bit(dtype: torch.dtype, rows: int) -> None:
    x = torch.randn(rows, 7).to(dtype)
    expert = torch.randint(0, 384, (rows, 3))
    weight = torch.rand(rows, 3)
    got = unpack(pack(x, expert, weight), 7)
    for one, expected in zip(got, (x, expert, weight), strict=True):
        assert one.dtype == expected.dtype
        assert torch.equal(one, expected)


def random_stack(num_experts: int, width: int, hidden: int = HIDDEN) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    gate_up = 0.4 * torch.randn(num_experts, 2 * width, hidden, generator=generator)
    return gate_up, 0.4 * torch.randn(num_experts, hidden, width, generator=generator)


@pytest.mark.parametrize("count", [0, 1, 9])
def test_products_skip_experts_of_other_ranks(count: int) -> None:
    gate_up, down = random_stack(4, WIDTH)
    expert = forced("spread", 8, 3, max(count, 1))[:count]
    weight = torch.rand(count, 3)
    absent = expert >= 4
    got = expert_products(tokens(count), expert, weight, gate_up, down, "silu")
    expected = dense_products(tokens(count), expert.clamp(max=4), weight.masked_fill(absent, 0), gate_up, down)
    torch.testing.assert_close(got, expected)


def test_products_read_only_the_experts_that_are_hit() -> None:
    gate_up, down = random_stack(4, WIDTH)
    expected = dense_products(tokens(3), torch.full((3, 1), 2), torch.ones(3, 1), gate_up, down)
    for idle in (0, 1, 3):
        gate_up[idle] = down[idle] = torch.nan
    got = products_by_loop(tokens(3), torch.full((3, 1), 2), torch.ones(3, 1), gate_up, down, "silu")
    torch.testing.assert_close(got, expected)


def test_products_equal_deepspeeds_grouped_experts() -> None:
    gate_up, down = random_stack(5, 8)
    theirs = GroupedExperts(HIDDEN, 8, 5, use_grouped_mm=False)
    gate, up = gate_up.chunk(2, dim=1)
    theirs.w1, theirs.w3, theirs.w2 = (nn.Parameter(one.contiguous()) for one in (gate, up, down))
    counts = torch.tensor([3, 0, 4, 1, 0])
    x_TC = tokens(8)
    expert = torch.repeat_interleave(torch.arange(5), counts).unsqueeze(1)
    with torch.no_grad():
        expected = theirs(x_TC, counts)
    torch.testing.assert_close(expert_products(x_TC, expert, torch.ones(8, 1), gate_up, down, "silu"), expected)


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_products_use_the_models_activation(activation: str) -> None:
    gate_up, down = random_stack(2, WIDTH)
    x_TC, expert = tokens(2), torch.tensor([[1], [0]])
    got = expert_products(x_TC, expert, torch.ones(2, 1), gate_up, down, activation)
    for row, (x, which) in enumerate(zip(x_TC, (1, 0), strict=True)):
        gate, up = (gate_up[which] @ x).chunk(2)
        torch.testing.assert_close(got[row], down[which] @ (ACTIVATIONS[activation](gate) * up))


@pytest.mark.gpu
@pytest.mark.parametrize("count", [0, 1, 3, 200])
@pytest.mark.parametrize(("held", "activation"), [(6, "silu"), (16, "silu"), (6, "gelu")])
def test_grouped_products_equal_the_loop_on_a_gpu(count: int, held: int, activation: str) -> None:
    """`held` of 16 experts are here; sizes of the groups are not aligned to anything."""
    gate_up, down = (one.to("cuda", torch.bfloat16) for one in random_stack(held, 24, 64))
    x_TC = torch.randn(count, 64, dtype=torch.bfloat16, device="cuda")
    expert = forced("spread", 16, 4, max(count, 1))[:count].cuda()
    weight = torch.rand(count, 4, device="cuda")
    got = products_grouped(x_TC, expert, weight, gate_up, down, activation).float()
    expected = products_by_loop(x_TC.float(), expert, weight, gate_up.float(), down.float(), activation)
    assert torch.isfinite(got).all()
    assert (got - expected).norm() <= 1e-2 * expected.norm()
