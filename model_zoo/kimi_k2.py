"""Kimi-K2 (text): ``model_type`` "kimi_k2". The architecture is DeepSeek-V3's, with 384 experts and 64 heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from helix.model_spec import ModelSpec
from model_zoo import deepseek_v3
from model_zoo.hf_config import ConfigReader

skipped_tensors = deepseek_v3.skipped_tensors


def spec(hf: Mapping[str, Any]) -> ModelSpec:
    """`ModelSpec` of a raw ``config.json``. Raises: CheckpointError for a setting that is wrong or not supported."""
    return deepseek_v3.spec_as("kimi_k2", ConfigReader(hf))
