"""Kimi-K2.5 and its successors: ``model_type`` "kimi_k25". A Kimi-K2 text model inside a wrapper with a vision tower.

The text model's settings are ``text_config`` of config.json, its tensors carry a prefix. The vision part is skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from helix.model_spec import ModelSpec
from model_zoo import deepseek_v3
from model_zoo.hf_config import ConfigReader

TEXT_PREFIX = "language_model."
TEXT_TYPES = ("kimi_k2", "deepseek_v3")


def spec(hf: Mapping[str, Any]) -> ModelSpec:
    """`ModelSpec` of the text model of a raw ``config.json``.

    ``text_config`` takes dtype, token ids and quantisation of the whole from the top level where it has none of its
    own; whether embeddings are tied is the top level's to say (an absent key means that they are, as in transformers).

    Raises: CheckpointError for a setting that is wrong or not supported.
    """
    whole = ConfigReader(hf)
    text = dict(whole.table("text_config"))
    ConfigReader(text, "text_config.").choice("model_type", "deepseek_v3", TEXT_TYPES)
    if "dtype" not in text and "torch_dtype" not in text:
        text |= {key: hf[key] for key in ("dtype", "torch_dtype") if key in hf}
    for key in ("bos_token_id", "eos_token_id", "quantization_config"):
        if key in hf:
            text.setdefault(key, hf[key])
    tied = whole.flag("tie_word_embeddings", True)
    return deepseek_v3.spec_as("kimi_k25", ConfigReader(text | {"tie_word_embeddings": tied}, "text_config."))


def text_name(name: str) -> str:
    """The name that layers use for the tensor that the files call `name`."""
    return name.removeprefix(TEXT_PREFIX)


def skipped_tensors(spec: ModelSpec) -> tuple[str, ...]:
    """Patterns of checkpoint tensors that the text model does not have, by their names in the files."""
    text = (TEXT_PREFIX + pattern for pattern in deepseek_v3.skipped_tensors(spec))
    return ("vision_tower.*", "mm_projector.*", *text)
