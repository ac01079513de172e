"""Routing: hand-worked cases, a property against plain Python, transformers' four gates, DeepSpeed's router."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from deepspeed.moe.ep_router import TokenChoiceTopKRouter
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from helix.kernels import route
from helix.layers.router import Router
from helix.model_spec import ModelSpec, MoESpec
from model_zoo import spec_from_config

CPU = torch.device("cpu")
HIDDEN = 32


def moe(num_experts: int, per_token: int, **settings: Any) -> MoESpec:
    return MoESpec(num_experts=num_experts, experts_per_token=per_token, expert_width=8, **settings)


def logits(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float32)


def of_scores(*rows: list[float]) -> Tensor:
    """Gate outputs whose sigmoids are `rows`."""
    return torch.tensor(rows, dtype=torch.float64).logit().float()


def test_weights_are_softmax_over_all_experts_and_come_best_first() -> None:
    expert, weight = route(logits([0.0, 2.0, 1.0, -1.0]), None, moe(4, 2))
    assert expert.tolist() == [[1, 2]]
    expected = torch.softmax(torch.tensor([0.0, 2.0, 1.0, -1.0]), 0)[[1, 2]]
    torch.testing.assert_close(weight[0], expected)


def test_normalised_weights_add_up_before_the_scaling() -> None:
    expert, weight = route(of_scores([0.2, 0.6, 0.3]), None, moe(3, 2, score="sigmoid", normalise=True, scaling=2.5))
    assert expert.tolist() == [[1, 2]]
    torch.testing.assert_close(weight, torch.tensor([[2.5 * 0.6 / 0.9, 2.5 * 0.3 / 0.9]]))


def test_scaling_without_normalisation() -> None:
    _, weight = route(of_scores([0.2, 0.6, 0.3]), None, moe(3, 2, score="sigmoid", scaling=2.0))
    torch.testing.assert_close(weight, torch.tensor([[1.2, 0.6]]))


def test_scores_that_vanish_do_not_divide_by_zero() -> None:
    _, weight = route(logits([-200.0, -200.0]), None, moe(2, 2, score="sigmoid", normalise=True))
    assert weight.tolist() == [[0.0, 0.0]]


def test_ties_go_to_the_lower_expert() -> None:
    # From logit 17 on a sigmoid is 1.0 in fp32, so these four tie although their logits differ.
    expert, _ = route(logits([3.0, 40.0, 60.0, 50.0, 45.0]), None, moe(5, 3, score="sigmoid"))
    assert expert.tolist() == [[1, 2, 3]]


def test_tied_groups_go_to_the_lower_group() -> None:
    spec = moe(6, 2, score="sigmoid", num_groups=3, topk_groups=1, group_score="top2_sum")
    expert, _ = route(of_scores([0.1, 0.1, 0.4, 0.4, 0.4, 0.4]), None, spec)
    assert expert.tolist() == [[2, 3]]


def test_bias_changes_the_choice_and_not_the_weight() -> None:
    spec = moe(3, 1, score="sigmoid", correction_bias=True)
    scores = of_scores([0.5, 0.4, 0.1])
    assert route(scores, torch.tensor([0.0, 0.0, 0.0]), spec)[0].tolist() == [[0]]
    expert, weight = route(scores, torch.tensor([-0.3, 0.0, 0.25]), spec)
    assert expert.tolist() == [[1]]
    torch.testing.assert_close(weight, torch.tensor([[0.4]]))


def test_masked_groups_lose_against_negative_scores() -> None:
    # Group 1 wins by its sum (0.1 - 0.2 against -0.3 - 0.4), but its second best is below 0: a mask of 0 would let in
    # an expert of group 0.
    spec = moe(4, 2, score="sigmoid", num_groups=2, topk_groups=1, group_score="top2_sum", correction_bias=True)
    bias = torch.tensor([-0.8, -0.9, -0.4, -0.7])
    expert, weight = route(of_scores([0.5, 0.5, 0.5, 0.5]), bias, spec)
    assert expert.tolist() == [[2, 3]]
    torch.testing.assert_close(weight, torch.tensor([[0.5, 0.5]]))


def test_groups_by_best_expert_and_by_the_two_best_differ() -> None:
    scores = of_scores([0.9, 0.1, 0.6, 0.5])
    spec = {"score": "sigmoid", "num_groups": 2, "topk_groups": 1}
    assert route(scores, None, moe(4, 2, **spec, group_score="max"))[0].tolist() == [[0, 1]]
    assert route(scores, None, moe(4, 2, **spec, group_score="top2_sum"))[0].tolist() == [[2, 3]]


def test_no_token() -> None:
    spec = moe(8, 2, score="sigmoid", num_groups=4, topk_groups=2, group_score="top2_sum", normalise=True)
    expert, weight = route(torch.empty(0, 8), torch.zeros(8), spec)
    assert expert.shape == weight.shape == (0, 2)


# Few distinct values, so that experts and groups tie often.
_VALUES = st.sampled_from([-2.0, -0.5, 0.0, 1.5])


@given(data=st.data())
def test_route_equals_plain_python(data: st.DataObject) -> None:
    groups, size = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 4))
    kept = data.draw(st.integers(1, groups))
    per_token = data.draw(st.integers(1, kept * size))
    by = data.draw(st.sampled_from(["max", "top2_sum"]))
    row = data.draw(st.lists(_VALUES, min_size=groups * size, max_size=groups * size))
    bias = torch.tensor(data.draw(st.lists(_VALUES, min_size=groups * size, max_size=groups * size)))
    spec = moe(groups * size, per_token, score="sigmoid", num_groups=groups, topk_groups=kept, group_score=by)
    scores = torch.sigmoid(logits(row)[0])
    corrected = (scores + bias).tolist()
    ranked = [sorted(corrected[g * size : (g + 1) * size], reverse=True) for g in range(groups)]
    group_scores = [values[0] if by == "max" else float(torch.tensor(values[:2]).sum()) for values in ranked]
    best = sorted(range(groups), key=lambda g: -group_scores[g])[:kept]
    open_experts = sorted(g * size + i for g in best for i in range(size))
    expected = sorted(open_experts, key=lambda e: -corrected[e])[:per_token]
    expert, weight = route(logits(row), bias, spec)
    assert expert.tolist() == [expected]
    assert weight.tolist() == [scores[expected].tolist()]


def test_gate_of_half_precision_values_is_multiplied_in_fp32() -> None:
    # 256 + 1 and 256 + 0.5 are both 256 in bf16 arithmetic, which would tie and choose expert 0.
    router = Router("gate", 2, moe(2, 1), dtype=torch.bfloat16, device=CPU)
    router.weight.copy_(torch.tensor([[1.0, 0.5], [1.0, 1.0]]))
    expert, weight = router(torch.tensor([[256.0, 1.0]], dtype=torch.bfloat16))
    assert expert.tolist() == [[1]]
    assert weight.dtype is torch.float32
    torch.testing.assert_close(weight, torch.softmax(torch.tensor([[257.0, 256.5]]), -1)[:, :1])


def test_correction_bias_stays_fp32_in_a_half_precision_model() -> None:
    router = Router("gate", 2, moe(2, 1, correction_bias=True), dtype=torch.bfloat16, device=CPU)
    assert router.weight.dtype is torch.bfloat16
    assert router.correction_bias is not None
    assert router.correction_bias.dtype is torch.float32


_SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": 8,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
_DEEPSEEK = {
    "first_k_dense_replace": 0,
    "n_routed_experts": 12,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
}
GATES = [
    (MixtralTopKRouter, transformers.MixtralConfig, {"num_local_experts": 8, "num_experts_per_tok": 2}),
    (Qwen3MoeTopKRouter, transformers.Qwen3MoeConfig, {"num_experts": 12, "num_experts_per_tok": 5}),
    (Qwen3MoeTopKRouter, transformers.Qwen3MoeConfig, {"num_experts": 12, "norm_topk_prob": True}),
    (DeepseekV2TopkRouter, transformers.DeepseekV2Config, {"num_experts_per_tok": 6, "routed_scaling_factor": 1.5}),
    (DeepseekV2TopkRouter, transformers.DeepseekV2Config, {**_DEEPSEEK, "topk_method": "group_limited_greedy"}),
    (DeepseekV3TopkRouter, transformers.DeepseekV3Config, _DEEPSEEK),
    (DeepseekV3TopkRouter, transformers.DeepseekV3Config, {**_DEEPSEEK, "n_group": 1, "topk_group": 1}),
    (DeepseekV3TopkRouter, transformers.DeepseekV3Config, {**_DEEPSEEK, "norm_topk_prob": False}),
]


@pytest.mark.parametrize(("gate_class", "config_class", "settings"), GATES)
def test_equals_the_gate_of_transformers(gate_class: Any, config_class: Any, settings: dict[str, Any]) -> None:
    torch.manual_seed(1)
    config = config_class(**(_SIZES | settings))
    gate = gate_class(config)
    gate.weight.data.normal_(std=0.5)
    spec: ModelSpec = spec_from_config(config.to_dict())
    assert spec.moe is not None
    router = Router("gate", HIDDEN, spec.moe, dtype=torch.float32, device=CPU)
    router.weight.copy_(gate.weight)
    if router.correction_bias is not None:
        # Wide enough to make corrected scores negative, which a mask of 0 would get wrong.
        gate.e_score_correction_bias.normal_()
        router.correction_bias.copy_(gate.e_score_correction_bias)
    x = torch.randn(64, HIDDEN)
    with torch.no_grad():
        _, theirs_weight, theirs = gate(x)
        assert_same_routing(router(x), (theirs, theirs_weight))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("groups", "kept", "by"), [(1, 1, "max"), (4, 2, "max"), (4, 2, "top2_sum")])
@pytest.mark.parametrize("corrected", [False, True])
def test_equals_the_router_of_deepspeed_on_fp32(score: str, groups: int, kept: int, by: str, corrected: bool) -> None:
    torch.manual_seed(2)
    spec = moe(
        12,
        4,
        score=score,
        num_groups=groups,
        topk_groups=kept,
        group_score=by,
        normalise=corrected,
        scaling=2.5,
        correction_bias=corrected,
    )
    router = Router("gate", HIDDEN, spec, dtype=torch.float32, device=CPU)
    router.weight.normal_(std=0.5)
    limited = groups > 1
    theirs = TokenChoiceTopKRouter(
        HIDDEN,
        12,
        groups if limited else None,
        kept if limited else None,
        4,
        score,
        route_norm=corrected,
        route_scale=2.5,
        gate_bias=False,
        group_score_func=by,
    )
    theirs.gate.weight = nn.Parameter(router.weight.clone())
    if router.correction_bias is not None:
        router.correction_bias.normal_()
        theirs.e_score_correction_bias = router.correction_bias.clone()
    x = torch.randn(64, HIDDEN)
    with torch.no_grad():
        weight, expert, _ = theirs(x)
        assert_same_routing(router(x), (expert, weight))


def assert_same_routing(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> None:
    """The same experts with the same weights, in any order."""
    (expert, weight), (other_expert, other_weight) = ours, theirs
    expert, order = expert.sort(dim=-1)
    other_expert, other_order = other_expert.sort(dim=-1)
    assert expert.tolist() == other_expert.tolist()
    torch.testing.assert_close(weight.gather(1, order), other_weight.gather(1, other_order))
