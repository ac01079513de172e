"""Tiny random checkpoints of each family, made with transformers, and what transformers computes from them.

Widths are chosen to be awkward: vocabularies and FFN widths that divide by nothing, heads that KVP does not divide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

_COMMON = {
    "hidden_size": 48,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "vocab_size": 97,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _llama(**changes: Any) -> Any:
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
    return transformers.LlamaConfig(**(_COMMON | heads | changes))


_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}

_LATENT = {
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
}

# The two mscales differ, so that the softmax's part cannot be taken for that of cos and sin.
DEEPSEEK_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.707,
    "mscale_all_dim": 1.0,
}


def deepseek_v2(**changes: Any) -> Any:
    """All layers dense; no query latent, as in V2-Lite."""
    dense = {"q_lora_rank": None, "first_k_dense_replace": 2, "rope_parameters": DEEPSEEK_ROPE}
    return transformers.DeepseekV2Config(**(_COMMON | _LATENT | dense | changes))


def deepseek_v3(**changes: Any) -> Any:
    """All layers dense, 5 heads. The norms' epsilon is large because that of the latents' norms is another one."""
    dense = {"q_lora_rank": 20, "first_k_dense_replace": 2, "rope_parameters": DEEPSEEK_ROPE}
    extra = {"num_attention_heads": 5, "num_key_value_heads": 5, "attention_bias": True, "rms_norm_eps": 1e-2}
    return transformers.DeepseekV3Config(**(_COMMON | _LATENT | dense | extra | changes))


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: _llama(rope_parameters=_LLAMA3_ROPE),
    "llama_bias": lambda: _llama(
        attention_bias=True,
        mlp_bias=True,
        num_key_value_heads=1,
        rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    ),
    "llama_dynamic": lambda: _llama(
        max_position_embeddings=32, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    ),
    "smollm": lambda: _llama(hidden_size=72, num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True),
    "mistral": lambda: transformers.MistralConfig(
        **_COMMON, num_attention_heads=8, num_key_value_heads=4, head_dim=8, sliding_window=None
    ),
    "qwen2": lambda: transformers.Qwen2Config(
        **(_COMMON | {"hidden_size": 40}), num_attention_heads=5, num_key_value_heads=1, rope_parameters=_YARN_ROPE
    ),
    "qwen3": lambda: transformers.Qwen3Config(
        **_COMMON, num_attention_heads=6, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True
    ),
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "mixtral": lambda: transformers.MixtralConfig(
        **(_COMMON | {"intermediate_size": 26}),
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=7,
        num_experts_per_tok=2,
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **_COMMON,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        mlp_only_layers=[0],
        num_experts=9,
        num_experts_per_tok=3,
        moe_intermediate_size=22,
        norm_topk_prob=True,
    ),
    "deepseek_v2_moe": lambda: transformers.DeepseekV2Config(
        **(_COMMON | _LATENT),
        q_lora_rank=None,
        first_k_dense_replace=1,
        n_routed_experts=8,
        n_shared_experts=2,
        moe_intermediate_size=11,
        num_experts_per_tok=3,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
    ),
    "deepseek_v3_moe": lambda: transformers.DeepseekV3Config(
        **(_COMMON | _LATENT),
        q_lora_rank=20,
        first_k_dense_replace=1,
        n_routed_experts=10,
        n_shared_experts=1,
        moe_intermediate_size=22,
        num_experts_per_tok=3,
        n_group=2,
        topk_group=1,
    ),
}


class TinyModels:
    """Makes each family's checkpoint once under `directory` and keeps the transformers model beside it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._models: dict[str, Any] = {}
        self._answers: dict[tuple[str, tuple[int, ...], int], list[int]] = {}

    def path(self, family: str) -> str:
        self.model(family)
        return str(self.directory / family)

    def model(self, family: str) -> Any:
        if family not in self._models:
            torch.manual_seed(sum(family.encode()))
            model = transformers.AutoModelForCausalLM.from_config(
                FAMILIES[family](), attn_implementation="eager", experts_implementation="eager"
            )
            _disturb(model)
            model.generation_config.eos_token_id = None
            model.float().eval().save_pretrained(self.directory / family)
            self._models[family] = model
        return self._models[family]

    def logits(self, family: str, token_ids: Sequence[int]) -> Tensor:
        """fp32 logits [len, V] by transformers."""
        with torch.inference_mode():
            logits: Tensor = self.model(family)(torch.tensor([list(token_ids)])).logits[0]
        return logits.float()

    def greedy(self, family: str, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """Greedy continuation by transformers; asked for once, since layouts share prompts."""
        key = (family, tuple(token_ids), num_tokens)
        if key not in self._answers:
            prompt = torch.tensor([list(token_ids)])
            mask = torch.ones_like(prompt)
            with torch.inference_mode():
                full = self.model(family).generate(
                    prompt, attention_mask=mask, max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
                )
            self._answers[key] = full[0, len(token_ids) :].tolist()
        return self._answers[key]


def _disturb(model: Any) -> None:
    """Norm weights and biases start as ones and zeros, which would hide a wrong order or a dropped bias."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                noise = 0.2 * torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise if "bias" in name or "norm" in name else 0.0)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.2 * torch.randn(buffer.shape, generator=generator))


def prompt(length: int, seed: int = 0, vocab: int = 97) -> list[int]:
    """A reproducible random prompt."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, vocab, (length,), generator=generator).tolist()
