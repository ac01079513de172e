"""Latent attention: every way of making queries and of exchanging, in both forms, equals transformers.

What all families are tested for (layouts, prompt lengths, batches) is in test_parity; here are the choices that only
latent attention has, and one oracle that is not transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from helix.comm.world import World
from helix.engine.engine import Engine
from helix.layers import mla
from helix.layers.batch import Batch
from tests import tiny as tiny_models
from tests.parallel import jobs
from tests.parallel.test_parity import NUM_TOKENS, PAGE_TOKENS, border_prompts, settings
from tests.ranks import RankPool
from tests.tiny import TinyModels, prompt

# The smallest chunk that takes the expanded form: every one, none, or the model's own 15 of prefill chunks of 20.
ALWAYS, NEVER, OWN = 1, None, 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the covering list."""

    family: str
    kvp: int
    query: str
    space: str
    merge: str = "a2a"
    threshold: int | None = OWN

    def __str__(self) -> str:
        return f"{self.family} kvp{self.kvp} {self.query} {self.space} {self.merge} from{self.threshold}"


# 6 heads (V2) do not divide by 4, 5 heads (V3) by nothing; on kvp 4 the last of its ranks has no head at all.
CASES = [
    Case(family="deepseek_v2", kvp=1, query="gather", space="value"),
    Case(family="deepseek_v3", kvp=1, query="replicate", space="latent", threshold=ALWAYS),
    Case(family="deepseek_v2", kvp=2, query="gather", space="latent", threshold=ALWAYS),
    Case(family="deepseek_v3", kvp=2, query="replicate", space="value", threshold=NEVER),
    Case(family="deepseek_v2", kvp=3, query="replicate", space="value", merge="ag_rs"),
    Case(family="deepseek_v3", kvp=3, query="gather", space="latent", merge="ag_rs", threshold=NEVER),
    Case(family="deepseek_v3", kvp=4, query="gather", space="value"),
    Case(family="deepseek_v2", kvp=4, query="replicate", space="latent", threshold=ALWAYS),
    Case(family="deepseek_v3", kvp=6, query="gather", space="latent"),
]


def job(world: World, config: dict[str, Any], threshold: int | None, prompts: list[list[int]]) -> Any:
    """Logits and greedy tokens with the expanded form from `threshold` on, and the forms that steps took."""
    seen: set[tuple[bool, ...]] = set()
    split = mla.split_by_form

    def spy(batch: Batch, own: int | None) -> tuple[mla.Part, ...]:
        assert own == OWN
        parts = split(batch, threshold)
        seen.add(tuple(part.expanded for part in parts))
        return parts

    with mock.patch.object(mla, "split_by_form", spy):
        return jobs.drive(world, config, jobs.logits_and_tokens, prompts, NUM_TOKENS), seen


def check(
    ranks: RankPool, tiny: TinyModels, family: str, num_ranks: int, config: dict[str, Any], threshold: int | None
) -> set[tuple[bool, ...]]:
    # One token, then a long prompt: their first step takes both forms at once.
    first, *others = border_prompts(num_ranks)
    prompts = [first, prompt(43, 7), *others]
    results = ranks.run(num_ranks, job, config, threshold, prompts)
    (logits, tokens), seen = results[0]
    for one, got in zip(prompts, logits, strict=True):
        np.testing.assert_allclose(got, tiny.logits(family, one).numpy(), atol=1e-4, rtol=0)
    for one, got in zip(prompts, tokens, strict=True):
        assert got == tiny.greedy(family, one, NUM_TOKENS), f"prompt of {len(one)} tokens"
    assert all(other == seen for _, other in results), "all ranks take the same form"
    return set(seen)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ways_equal_transformers(ranks: RankPool, tiny: TinyModels, case: Case) -> None:
    config = settings(
        tiny.path(case.family),
        {"kvp": case.kvp},
        comm={"merge": case.merge, "query": case.query, "exchange_space": case.space},
        # Prompts found again would leave no chunk long enough for the expanded form.
        cache={"prefix_reuse": False},
    )
    seen = check(ranks, tiny, case.family, case.kvp, config, case.threshold)
    wanted = {ALWAYS: {(True,)}, NEVER: {(False,)}, OWN: {(True,), (False,), (False, True)}}
    assert seen == wanted[case.threshold]


@pytest.mark.parametrize(("family", "tpa", "query"), [("deepseek_v2", 3, "gather"), ("deepseek_v3", 5, "replicate")])
def test_tensor_parallel_with_copied_latents(
    ranks: RankPool, tiny: TinyModels, family: str, tpa: int, query: str
) -> None:
    layout = {"tpa": tpa, "duplicate_kv": True}
    config = settings(tiny.path(family), layout, comm={"query": query, "exchange_space": "value"})
    check(ranks, tiny, family, tpa, config, OWN)


VARIANTS: dict[str, Callable[[], Any]] = {
    "v3 with halves, not interleaved pairs": lambda: tiny_models.deepseek_v3(rope_interleave=False),
    "v3 without query latent, with bias": lambda: tiny_models.deepseek_v3(q_lora_rank=None),
    "v3 without scaling": lambda: tiny_models.deepseek_v3(
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0}, attention_bias=False
    ),
    "v2 with query latent, bias, tied head": lambda: tiny_models.deepseek_v2(
        q_lora_rank=20, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "v2 with one head": lambda: tiny_models.deepseek_v2(num_attention_heads=1, num_key_value_heads=1),
    "v2 with yarn without mscale": lambda: tiny_models.deepseek_v2(
        rope_parameters={k: v for k, v in tiny_models.DEEPSEEK_ROPE.items() if "mscale" not in k}
    ),
    "v2 with linear scaling": lambda: tiny_models.deepseek_v2(
        rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_equal_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiny_models.FAMILIES, "variant", VARIANTS[name])
    models = TinyModels(tmp_path)
    with Engine(None, **settings(models.path("variant"), {"kvp": 1})) as engine:
        for length in (1, 14, 50):
            tokens = prompt(length)
            want = models.logits("variant", tokens).numpy()
            np.testing.assert_allclose(engine.logits(tokens).numpy(), want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_equals_the_papers(tiny: TinyModels, family: str) -> None:
    """transformers before 5.17 left the mscale of YaRN out of V2's softmax, so it is no oracle by itself."""
    tokens = prompt(60, 3)
    model = tiny.model(family)
    want = plain_logits(model.config.to_dict(), dict(model.named_parameters()), tokens)
    with Engine(None, **settings(tiny.path(family), {"kvp": 1})) as engine:
        assert (engine.logits(tokens).double() - want).abs().max() < 1e-4
    assert (tiny.logits(family, tokens).double() - want).abs().max() < 1e-4


def plain_logits(config: dict[str, Any], weights: dict[str, Tensor], tokens: list[int]) -> Tensor:
    """fp64 logits of a dense DeepSeek model, written from the V2 paper (section 2.1) and YaRN's (section 3)."""
    w = {name: weight.detach().double() for name, weight in weights.items()}
    heads, nope, rope = config["num_attention_heads"], config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    eps, length = config["rms_norm_eps"], len(tokens)
    angle, of_rope, of_softmax = plain_yarn(config["rope_parameters"], rope, length)
    x = w["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        attn = at + "self_attn."
        h = plain_norm(x, w[at + "input_layernorm.weight"], eps)
        if config["q_lora_rank"] is None:
            q = h @ w[attn + "q_proj.weight"].T
        else:
            latent = h @ w[attn + "q_a_proj.weight"].T + w.get(attn + "q_a_proj.bias", 0.0)
            q = plain_norm(latent, w[attn + "q_a_layernorm.weight"], 1e-6) @ w[attn + "q_b_proj.weight"].T
        q = q.view(length, heads, nope + rope)
        compressed = h @ w[attn + "kv_a_proj_with_mqa.weight"].T + w.get(attn + "kv_a_proj_with_mqa.bias", 0.0)
        latent = plain_norm(compressed[:, : config["kv_lora_rank"]], w[attn + "kv_a_layernorm.weight"], 1e-6)
        kv = (latent @ w[attn + "kv_b_proj.weight"].T).view(length, heads, -1)
        q_rope = plain_turn(q[..., nope:], angle[:, None]) * of_rope
        k_rope = plain_turn(compressed[:, None, config["kv_lora_rank"] :], angle[:, None]) * of_rope
        score = torch.einsum("qhd,khd->hqk", q[..., :nope], kv[..., :nope])
        score = (score + torch.einsum("qhd,kd->hqk", q_rope, k_rope[:, 0])) * of_softmax / math.sqrt(nope + rope)
        hidden = torch.ones(length, length).triu(1).bool()
        out = torch.einsum("hqk,khv->qhv", score.masked_fill(hidden, -torch.inf).softmax(-1), kv[..., nope:])
        x = x + out.flatten(1) @ w[attn + "o_proj.weight"].T + w.get(attn + "o_proj.bias", 0.0)
        h = plain_norm(x, w[at + "post_attention_layernorm.weight"], eps)
        gate, up = h @ w[at + "mlp.gate_proj.weight"].T, h @ w[at + "mlp.up_proj.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ w[at + "mlp.down_proj.weight"].T
    return plain_norm(x, w["model.norm.weight"], eps) @ w["lm_head.weight"].T


def plain_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def plain_turn(x: Tensor, angle: Tensor) -> Tensor:
    """Neighbours (x[2j], x[2j + 1]) turned by angle j, as complex numbers."""
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(torch.ones_like(angle), angle)
    return torch.view_as_real(turned).flatten(-2)


def plain_yarn(rope: dict[str, Any], dim: int, length: int) -> tuple[Tensor, float, float]:
    """Angles [length, dim / 2] and the factors on rotated vectors and on the softmax's argument."""
    original, factor, theta = rope["original_max_position_embeddings"], rope["factor"], rope["rope_theta"]

    def pair_of(turns: float) -> float:
        return dim * math.log(original / (2 * math.pi * turns)) / (2 * math.log(theta))

    low, high = max(math.floor(pair_of(32)), 0), min(math.ceil(pair_of(1)), dim - 1)
    speeds = []
    for pair in range(dim // 2):
        plain = theta ** (-2 * pair / dim)
        stretched = min(max((pair - low) / max(high - low, 1e-3), 0.0), 1.0)
        speeds.append(plain * (1 - stretched) + plain / factor * stretched)

    def mscale(given: float) -> float:
        return 0.1 * given * math.log(factor) + 1

    angle = torch.arange(length).double()[:, None] * torch.tensor(speeds).double()
    return angle, mscale(rope["mscale"]) / mscale(rope["mscale_all_dim"]), mscale(rope["mscale_all_dim"]) ** 2


def test_page_and_chunk_sizes_that_the_cases_count_on() -> None:
    """A row of 4 pages holds a prompt that is expanded and one that is not; a chunk of 20 tokens is."""
    assert PAGE_TOKENS * 3 < OWN <= PAGE_TOKENS * 4
    assert settings("", {})["engine"]["prefill_chunk"] >= OWN
