"""Rotary position embedding: frequencies of every scaling kind, and cos/sin tables for a step.

One `Rotary` serves all layers of a model: the tables of a step are computed once, from global positions, and each layer
applies them to its own heads (`helix.kernels.apply_rotary`). Formulas and order of operations are those of
`transformers.modeling_rope_utils` (5.x), so that fp32 results agree bit for bit.

Shape letters: T tokens of the step, H heads, D head width, R rotated pairs (half the rotary width).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from helix.model_spec import RotarySpec, yarn_mscale


class Rotary:
    """Frequencies of one `RotarySpec`, held on `device`.

    `max_context` stands in for ``original_max_position_embeddings`` where the spec has none. `inv_freq` is fp32 [R] in
    radians per token, computed on the CPU whatever the device, so that all ranks hold the same bits;
    `attention_factor` multiplies cos and sin (yarn; 1.0 for the other kinds).
    """

    def __init__(self, spec: RotarySpec, max_context: int, *, device: torch.device | str = "cpu") -> None:
        if spec.dim < 2 or spec.dim % 2:
            raise ValueError(f"rotary dim is {spec.dim}; it must be a positive even number")
        if spec.kind == "dynamic" and spec.dim == 2:
            raise ValueError("rotary dim is 2; kind 'dynamic' needs at least 4")
        self.spec = spec
        self.original_context = int(spec.get("original_max_position_embeddings") or max_context)
        self.attention_factor = _attention_factor(spec)
        exponent_R = _exponents(spec.dim)
        self.inv_freq = _frequencies(spec, exponent_R, self.original_context).to(device)
        self.exponent_R = exponent_R.to(device)

    @property
    def uses_length(self) -> bool:
        """Whether `tables` needs `rotary_len_T` (kind ``dynamic`` only)."""
        return self.spec.kind == "dynamic"

    def tables(self, positions_T: Tensor, rotary_len_T: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """cos_TR and sin_TR (fp32, R = dim / 2: one entry per rotated pair) at global `positions_T` (int64).

        `rotary_len_T` (int64) is the sequence length that a token's frequencies were chosen for: the length of the
        whole prompt for a prompt token, position + 1 for a generated one. ``dynamic`` must be given it, the other kinds
        do not read it. A token keeps its length for good, so that computing it again gives the same key. transformers
        does the same for one sequence in a fresh model (there, state carries over between sequences and batch rows).

        The angle is one fp32 product, position * inv_freq, as in transformers and for equality with it. Positions are
        exact up to 2**24 (16.7 million), above they are rounded. An angle is off by less than
        position * inv_freq * 2**-21 rad: about 0.1 rad for the fast pairs at a million tokens, the same for everybody
        who runs such a model in fp32.
        """
        angle_TR = positions_T.float()[:, None] * self._frequencies_for(rotary_len_T)
        return angle_TR.cos() * self.attention_factor, angle_TR.sin() * self.attention_factor

    def _frequencies_for(self, rotary_len_T: Tensor | None) -> Tensor:
        """inv_freq, [R] or for ``dynamic`` [T, R]."""
        if not self.uses_length:
            return self.inv_freq
        if rotary_len_T is None:
            raise ValueError("rotary kind 'dynamic' needs rotary_len_T")
        factor, dim, original = _number(self.spec, "factor"), self.spec.dim, self.original_context
        length_T = rotary_len_T.clamp(min=original).float()
        stretch_T = factor * length_T / original - (factor - 1)
        # In double: vectorised fp32 powers round differently by lane, but a base may depend on nothing but the length.
        base_T = self.spec.theta * stretch_T.double().pow(dim / (dim - 2)).float()
        stretched_TR = 1.0 / base_T[:, None] ** self.exponent_R
        return torch.where(rotary_len_T[:, None] > original, stretched_TR, self.inv_freq)


def _attention_factor(spec: RotarySpec) -> float:
    """Factor on cos and sin: given, or from `mscale` and `mscale_all_dim`, or from the yarn factor alone."""
    if spec.kind != "yarn":
        return 1.0
    given = spec.get("attention_factor")
    if given is not None:
        return float(given)
    factor = _number(spec, "factor")
    mscale, mscale_all_dim = spec.get("mscale"), spec.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    return yarn_mscale(factor)


def _number(spec: RotarySpec, key: str) -> float:
    value = spec.get(key)
    if value is None:
        raise ValueError(f"rotary kind {spec.kind!r} needs the parameter {key!r}")
    return value


def _exponents(dim: int) -> Tensor:
    """2j / dim for pair j, fp32 [R]."""
    return torch.arange(0, dim, 2, dtype=torch.int64, device="cpu").float() / dim


def _frequencies(spec: RotarySpec, exponent_R: Tensor, original: int) -> Tensor:
    """inv_freq of `spec`, fp32 [R] on the CPU; for ``dynamic`` the one of lengths up to `original`."""
    if spec.kind == "yarn":
        return _yarn_frequencies(spec, exponent_R, original)
    if spec.kind == "dynamic":
        factor = _number(spec, "factor")
        stretch = factor * original / original - (factor - 1)  # 1 but for rounding, and transformers rounds here
        inv_freq: Tensor = 1.0 / (spec.theta * math.pow(stretch, spec.dim / (spec.dim - 2))) ** exponent_R
        return inv_freq
    inv_freq = 1.0 / spec.theta**exponent_R
    if spec.kind == "linear":
        return inv_freq / _number(spec, "factor")
    if spec.kind == "llama3":
        return _llama3_frequencies(spec, inv_freq, original)
    return inv_freq


def _llama3_frequencies(spec: RotarySpec, inv_freq: Tensor, original: int) -> Tensor:
    """Llama 3.1: short waves stay, long waves are stretched by `factor`, those between are blended."""
    factor = _number(spec, "factor")
    low, high = _number(spec, "low_freq_factor"), _number(spec, "high_freq_factor")
    wavelength = 2 * math.pi / inv_freq
    stretched = torch.where(wavelength > original / low, inv_freq / factor, inv_freq)
    blend = (original / wavelength - low) / (high - low)
    blended = (1 - blend) * stretched / factor + blend * stretched
    between = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(between, blended, stretched)


def _yarn_frequencies(spec: RotarySpec, exponent_R: Tensor, original: int) -> Tensor:
    """YaRN "by parts": pairs that turn often over `original` tokens stay, slow ones are stretched, a ramp between."""
    dim, theta, factor = spec.dim, spec.theta, _number(spec, "factor")

    def pair_with(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with(spec.get("beta_fast") or 32.0), pair_with(spec.get("beta_slow") or 1.0)
    if spec.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    period = theta**exponent_R
    keep = 1 - ramp
    return 1.0 / (factor * period) * (1 - keep) + 1.0 / period * keep
