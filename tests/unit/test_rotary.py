"""Rotary frequencies, tables and rotation against transformers, for every scaling kind and both config styles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DeepseekV3Config, GlmConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v2.modeling_deepseek_v2 import apply_rotary_emb as deepseek_v2_apply
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3RotaryEmbedding,
    apply_rotary_pos_emb_interleave,
)
from transformers.models.glm.modeling_glm import GlmRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from helix.kernels import apply_rotary
from helix.layers.rotary import Rotary
from helix.model_spec import RotarySpec, yarn_mscale
from model_zoo import spec_from_config
from model_zoo.hf_config import ConfigReader, rotary_spec

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
# name -> rope settings, rope_theta, max_position_embeddings
STATIC: dict[str, tuple[dict[str, Any], float, int]] = {
    "default": ({"rope_type": "default"}, 500000.0, 8192),
    "default integer theta": ({"rope_type": "default"}, 1000000, 8192),
    "linear": ({"rope_type": "linear", "factor": 4.0}, 10000.0, 4096),
    "llama3": (LLAMA3, 500000.0, 131072),
    "llama3 smollm": ({**LLAMA3, "factor": 32.0}, 100000.0, 131072),
    "yarn": (YARN, 1000000.0, 32768),
    "yarn no original": ({"rope_type": "yarn", "factor": 4.0}, 10000.0, 4096),
    "yarn attention_factor": ({**YARN, "attention_factor": 0.75}, 10000.0, 131072),
    "yarn betas": ({**YARN, "beta_fast": 16.0, "beta_slow": 2.0}, 10000.0, 131072),
    "yarn not truncated": ({**YARN, "truncate": False}, 150000.0, 131072),
    "yarn mscale": ({**YARN, "factor": 40.0, "mscale": 0.9, "mscale_all_dim": 0.707}, 10000.0, 163840),
    "yarn mscale alone": ({**YARN, "factor": 40.0, "mscale": 0.707}, 10000.0, 163840),
    "yarn zeros": ({**YARN, "beta_fast": 0, "mscale": 1.0, "mscale_all_dim": 0}, 10000.0, 131072),
    "yarn narrow ramp": ({**YARN, "beta_fast": 1.0, "beta_slow": 1.0, "truncate": False}, 10000.0, 131072),
    "yarn shrinking": ({**YARN, "factor": 1.0}, 10000.0, 32768),
}
LONG_POSITIONS = [0, 1, 2, 63, 4095, 4096, 131071, 1_000_003, 8_388_609, 16_777_217]
DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "factor": 2.5}
ORIGINAL = 64


def hf_dict(rope: dict[str, Any], theta: float, max_positions: int, style: str) -> dict[str, Any]:
    """A small llama config.json with its rope settings in one of the three styles found in checkpoints."""
    base = {
        "model_type": "llama",
        "hidden_size": 256,
        "num_attention_heads": 4,
        "max_position_embeddings": max_positions,
    }
    if style == "v5":
        return base | {"rope_parameters": rope | {"rope_theta": theta}}
    if style == "type":
        rope = {"type" if key == "rope_type" else key: value for key, value in rope.items()}
    return base | {"rope_theta": theta, "rope_scaling": rope}


def ours_and_theirs(hf: dict[str, Any]) -> tuple[Rotary, LlamaRotaryEmbedding]:
    spec = spec_from_config(hf)
    theirs = LlamaRotaryEmbedding(LlamaConfig(**{k: dict(v) if isinstance(v, dict) else v for k, v in hf.items()}))
    return Rotary(spec.rotary, hf["max_position_embeddings"]), theirs


def their_tables(module: LlamaRotaryEmbedding, positions: list[int]) -> tuple[Tensor, Tensor]:
    """transformers' cos and sin of the first half of the width (the second repeats it)."""
    cos, sin = module(torch.zeros(1), torch.tensor([positions]))
    half = cos.shape[-1] // 2
    assert torch.equal(cos[..., :half], cos[..., half:])
    return cos[0, :, :half], sin[0, :, :half]


@pytest.mark.parametrize("style", ["type", "rope_type", "v5"])
@pytest.mark.parametrize("name", STATIC)
def test_frequencies_and_tables_equal_transformers(name: str, style: str) -> None:
    rope, theta, max_positions = STATIC[name]
    rotary, theirs = ours_and_theirs(hf_dict(rope, theta, max_positions, style))
    assert rotary.inv_freq.dtype == torch.float32
    assert torch.equal(rotary.inv_freq, theirs.inv_freq)
    assert rotary.attention_factor == theirs.attention_scaling
    if rope["rope_type"] != "default":
        inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs.config)
        assert torch.equal(rotary.inv_freq, inv_freq)
        assert rotary.attention_factor == attention_factor
    cos_TR, sin_TR = rotary.tables(torch.tensor(LONG_POSITIONS))
    their_cos, their_sin = their_tables(theirs, LONG_POSITIONS)
    assert cos_TR.dtype == sin_TR.dtype == torch.float32
    assert torch.equal(cos_TR, their_cos)
    assert torch.equal(sin_TR, their_sin)


def test_scaled_kinds_differ_from_the_default() -> None:
    """Guards the oracle: each case above must change something."""
    plain = Rotary(RotarySpec(theta=10000.0, dim=64), 4096)
    for name, (rope, _, max_positions) in STATIC.items():
        if rope["rope_type"] == "default" or name == "yarn shrinking":
            continue
        rotary, _ = ours_and_theirs(hf_dict(rope, 10000.0, max_positions, "v5"))
        assert not torch.equal(rotary.inv_freq, plain.inv_freq), name


@pytest.mark.parametrize("prompt_len", [1, ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 3 * ORIGINAL])
def test_dynamic_follows_transformers_from_prompt_to_generated_tokens(prompt_len: int) -> None:
    rotary, theirs = ours_and_theirs(hf_dict(DYNAMIC, 10000.0, ORIGINAL, "v5"))
    num_generated = ORIGINAL + 10
    expected = [their_tables(theirs, list(range(prompt_len)))]
    expected += [their_tables(theirs, [position]) for position in range(prompt_len, prompt_len + num_generated)]
    cos, sin = (torch.cat(parts) for parts in zip(*expected, strict=True))

    positions_T = torch.arange(prompt_len + num_generated)
    rotary_len_T = (positions_T + 1).clamp(min=prompt_len)
    ours = rotary.tables(positions_T, rotary_len_T)
    torch.testing.assert_close(ours[0], cos, rtol=0, atol=2e-5)
    torch.testing.assert_close(ours[1], sin, rtol=0, atol=2e-5)
    beyond = prompt_len + num_generated - 1
    assert not torch.allclose(rotary.tables(positions_T[-1:], torch.tensor([ORIGINAL]))[0], cos[beyond:], atol=1e-3)


def test_dynamic_token_depends_on_its_own_length_alone() -> None:
    """Mixed lengths in one call equal each alone, bit for bit, whatever its place in the step."""
    rotary, _ = ours_and_theirs(hf_dict(DYNAMIC, 10000.0, ORIGINAL, "v5"))
    positions_T = torch.arange(203) * 37
    rotary_len_T = torch.tensor([1, ORIGINAL, ORIGINAL + 1, 1000, 70000, 5_000_000, 77])[torch.arange(203) % 7]
    cos_TR, sin_TR = rotary.tables(positions_T, rotary_len_T)
    for token in range(0, 203, 5):
        alone = rotary.tables(positions_T[token : token + 1], rotary_len_T[token : token + 1])
        assert torch.equal(alone[0][0], cos_TR[token])
        assert torch.equal(alone[1][0], sin_TR[token])


@pytest.mark.parametrize("length", [ORIGINAL + 1, 1000, 123_457, 4_000_000])
def test_dynamic_frequencies_of_long_sequences(length: int) -> None:
    rotary, theirs = ours_and_theirs(hf_dict(DYNAMIC, 10000.0, ORIGINAL, "rope_type"))
    cos, sin = their_tables(theirs, [7, length - 1])
    ours = rotary.tables(torch.tensor([7, length - 1]), torch.tensor([length, length]))
    tolerance = 1e-6 + length * 2e-7
    torch.testing.assert_close(ours[0], cos, rtol=0, atol=tolerance)
    torch.testing.assert_close(ours[1], sin, rtol=0, atol=tolerance)


def test_only_dynamic_needs_a_length() -> None:
    dynamic, _ = ours_and_theirs(hf_dict(DYNAMIC, 10000.0, ORIGINAL, "v5"))
    default, _ = ours_and_theirs(hf_dict({"rope_type": "default"}, 10000.0, ORIGINAL, "v5"))
    positions_T = torch.arange(4)
    assert dynamic.uses_length
    assert not default.uses_length
    with pytest.raises(ValueError, match="rotary_len_T"):
        dynamic.tables(positions_T)
    assert torch.equal(default.tables(positions_T)[0], default.tables(positions_T, positions_T + 500)[0])


@settings(max_examples=60, deadline=None)
@given(position=st.integers(0, 2**24))
def test_angle_error_stays_within_the_stated_bound(position: int) -> None:
    rotary = Rotary(RotarySpec(theta=10000.0, dim=64), 4096)
    exact = 10000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64) * position
    bound = exact * 2.0**-21 + 2.0**-22
    cos_TR, sin_TR = rotary.tables(torch.tensor([position]))
    assert bool(((cos_TR[0] - exact.cos()).abs() <= bound).all())
    assert bool(((sin_TR[0] - exact.sin()).abs() <= bound).all())


def test_tables_ignore_the_default_dtype() -> None:
    rotary = Rotary(RotarySpec(theta=10000.0, dim=64), 4096)
    positions_T = torch.tensor([3, 99_999])
    expected = rotary.tables(positions_T)
    torch.set_default_dtype(torch.bfloat16)
    try:
        again = Rotary(RotarySpec(theta=10000.0, dim=64), 4096).tables(positions_T)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(again[0], expected[0])
    assert torch.equal(again[1], expected[1])


def test_partial_rotary_width() -> None:
    """Half of the head turns: frequencies as in a family of transformers that has this, the other half untouched."""
    hf = hf_dict(YARN, 10000.0, 131072, "v5") | {"partial_rotary_factor": 0.5}
    spec = spec_from_config(hf)
    theirs = ROPE_INIT_FUNCTIONS["yarn"](LlamaConfig(**hf))
    assert spec.rotary.dim == 32
    assert torch.equal(Rotary(spec.rotary, 131072).inv_freq, theirs[0])

    glm = GlmConfig(head_dim=64, rope_parameters={"rope_theta": 10000.0, "partial_rotary_factor": 0.5})
    rotary = Rotary(RotarySpec(theta=10000.0, dim=32), 4096)
    assert torch.equal(rotary.inv_freq, GlmRotaryEmbedding(glm).inv_freq)
    x_THD = torch.randn(5, 2, 64)
    for interleaved in (False, True):
        out_THD = apply_rotary(x_THD, *rotary.tables(torch.arange(5)), interleaved=interleaved)
        assert torch.equal(out_THD[..., 32:], x_THD[..., 32:])
        assert not torch.equal(out_THD[1:, :, :32], x_THD[1:, :, :32])
        narrow = apply_rotary(x_THD[..., :32], *rotary.tables(torch.arange(5)), interleaved=interleaved)
        assert torch.equal(out_THD[..., :32], narrow)


@pytest.mark.parametrize("name", ["default", "yarn", "llama3"])
def test_rotation_equals_transformers_in_fp32(name: str) -> None:
    rotary, theirs = ours_and_theirs(hf_dict(*STATIC[name], "v5"))
    positions = [0, 5, 1000, 99_999]
    q_THD, k_TKD = torch.randn(4, 3, 64), torch.randn(4, 1, 64)
    cos, sin = theirs(q_THD, torch.tensor([positions]))
    expected = apply_rotary_pos_emb(q_THD[None].transpose(1, 2), k_TKD[None].transpose(1, 2), cos, sin)
    tables = rotary.tables(torch.tensor(positions))
    for x, want in zip((q_THD, k_TKD), expected, strict=True):
        before = x.clone()
        assert torch.equal(apply_rotary(x, *tables, interleaved=False), want[0].transpose(0, 1))
        assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rotation_in_half_precision_rounds_once(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rotary, theirs = ours_and_theirs(hf_dict(*STATIC["default"], "v5"))
    positions_T = torch.arange(100, 164)
    x_THD = torch.randn(64, 3, 64).to(dtype)
    ours = apply_rotary(x_THD, *rotary.tables(positions_T), interleaved=False)
    exact = apply_rotary(x_THD.float(), *rotary.tables(positions_T), interleaved=False)
    cos, sin = theirs(x_THD, positions_T[None])
    x_1HTD = x_THD[None].transpose(1, 2)
    their = apply_rotary_pos_emb(x_1HTD, x_1HTD, cos, sin)[0][0].transpose(0, 1)
    assert ours.dtype == dtype
    assert torch.equal(ours, exact.to(dtype))
    torch.testing.assert_close(ours, their, rtol=0, atol=8 * float(x_THD.abs().max()) * torch.finfo(dtype).eps)
    assert (ours.float() - exact).abs().mean() < (their.float() - exact).abs().mean()


def test_interleaved_pairs_equal_deepseek() -> None:
    """Same values as deepseek_v2's complex product, in place; same q.k as deepseek_v3, which reorders into halves."""
    config = DeepseekV3Config(
        qk_rope_head_dim=64,
        max_position_embeddings=163840,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
    )
    hf = config.to_dict()
    spec = rotary_spec(ConfigReader(hf), config.qk_rope_head_dim, hf["max_position_embeddings"], interleaved=True)
    rotary = Rotary(spec, config.max_position_embeddings)
    positions_T = torch.tensor([0, 3, 4096, 150_000])
    q_THD, k_TKD = torch.randn(4, 3, 64), torch.randn(4, 1, 64)
    tables = rotary.tables(positions_T)
    ours_q, ours_k = (apply_rotary(x, *tables, interleaved=True) for x in (q_THD, k_TKD))

    q_1HTD, k_1KTD = q_THD[None].transpose(1, 2), k_TKD[None].transpose(1, 2)
    cos, sin = DeepseekV3RotaryEmbedding(config)(q_THD, positions_T[None])
    v3_q, v3_k = apply_rotary_pos_emb_interleave(q_1HTD, k_1KTD, cos, sin)
    in_halves = torch.cat((ours_q[..., 0::2], ours_q[..., 1::2]), dim=-1)
    assert torch.equal(in_halves, v3_q[0].transpose(0, 1))
    torch.testing.assert_close(
        torch.einsum("thd,skd->hts", ours_q, ours_k), torch.einsum("xhtd,xksd->hts", v3_q, v3_k), rtol=1e-5, atol=1e-5
    )

    v2_q, v2_k = deepseek_v2_apply(q_1HTD, k_1KTD, torch.complex(*tables)[None])
    torch.testing.assert_close(ours_q, v2_q[0].transpose(0, 1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours_k, v2_k[0].transpose(0, 1), rtol=1e-6, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(interleaved=st.booleans(), first=st.integers(0, 5000), second=st.integers(0, 5000), shift=st.integers(0, 5000))
def test_scores_depend_on_distance_alone(interleaved: bool, first: int, second: int, shift: int) -> None:
    rotary = Rotary(RotarySpec(theta=10000.0, dim=32, interleaved=interleaved), 4096)
    generator = torch.Generator().manual_seed(first)
    qk_THD = torch.randn(2, 1, 32, generator=generator)

    def score(*positions: int) -> float:
        turned = apply_rotary(qk_THD, *rotary.tables(torch.tensor(positions)), interleaved=interleaved)
        torch.testing.assert_close(turned.norm(dim=-1), qk_THD.norm(dim=-1))
        return float((turned[0] * turned[1]).sum())

    assert score(first, second) == pytest.approx(score(first + shift, second + shift), abs=0.02)


def test_yarn_mscale_of_deepseek() -> None:
    assert yarn_mscale(40.0, 0.707) == pytest.approx(1.2608, abs=1e-4)
    assert yarn_mscale(40.0) == pytest.approx(1.36889, abs=1e-5)
    assert yarn_mscale(0.5) == 1.0


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (RotarySpec(theta=10000.0, dim=63), "63"),
        (RotarySpec(theta=10000.0, dim=0), "0"),
        (RotarySpec(theta=10000.0, dim=2, kind="dynamic", parameters=(("factor", 2.0),)), "at least 4"),
        (RotarySpec(theta=10000.0, dim=64, kind="linear"), "factor"),
        (RotarySpec(theta=10000.0, dim=64, kind="yarn"), "factor"),
        (RotarySpec(theta=10000.0, dim=64, kind="llama3", parameters=(("factor", 2.0),)), "low_freq_factor"),
    ],
)
def test_incomplete_specs_are_refused(spec: RotarySpec, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rotary(spec, 4096)
