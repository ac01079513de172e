"""Model families Helix can run, one file each, named by the checkpoint's ``model_type``.

Reads JSON only: no code and no pickle of a checkpoint is ever loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol

from helix.errors import CheckpointError
from helix.model_spec import ModelSpec
from model_zoo import deepseek_v2, deepseek_v3, kimi_k2, kimi_k25, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe
from model_zoo.hf_config import ConfigReader

__all__ = [
    "FAMILIES",
    "Family",
    "generation_eos",
    "load_spec",
    "skipped_tensors",
    "spec_from_config",
    "text_names",
]


class Family(Protocol):
    """What a family's module provides."""

    def spec(self, hf: Mapping[str, Any]) -> ModelSpec:
        """`ModelSpec` of a raw ``config.json``; raises CheckpointError."""
        ...


FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "deepseek_v2": deepseek_v2,
        "deepseek_v3": deepseek_v3,
        "kimi_k2": kimi_k2,
        "kimi_k25": kimi_k25,
        "llama": llama,
        "mistral": mistral,
        "mixtral": mixtral,
        "qwen2": qwen2,
        "qwen3": qwen3,
        "qwen3_moe": qwen3_moe,
    }
)

# Families whose checkpoints call the text model's tensors by other names than its layers do.
_TEXT_NAMES: Final[Mapping[str, Callable[[str], str]]] = MappingProxyType(
    {"kimi_k25": kimi_k25.text_name, "mixtral": mixtral.text_name}
)
# Families whose checkpoints hold tensors that the text model does not have.
_SKIPPED: Final[Mapping[str, Callable[[ModelSpec], tuple[str, ...]]]] = MappingProxyType(
    {
        "deepseek_v3": deepseek_v3.skipped_tensors,
        "kimi_k2": kimi_k2.skipped_tensors,
        "kimi_k25": kimi_k25.skipped_tensors,
    }
)


def text_names(spec: ModelSpec) -> Callable[[str], str] | None:
    """How a tensor's name in the files becomes the name that layers use; None where they are the same."""
    return _TEXT_NAMES.get(spec.model_type)


def skipped_tensors(spec: ModelSpec) -> tuple[str, ...]:
    """Patterns, of names in the files, of what a checkpoint holds besides the text model: vision, token prediction."""
    skipped = _SKIPPED.get(spec.model_type)
    return skipped(spec) if skipped else ()


def load_spec(directory: Path) -> ModelSpec:
    """`ModelSpec` of the checkpoint in `directory`, from its ``config.json``.

    Raises: CheckpointError, naming the file, if the directory or the file is missing or broken, the model type is not
    known, or a setting is not supported.
    """
    path = _config_path(directory)
    return _spec_of(_read_object(path), path)


def spec_from_config(hf: Mapping[str, Any]) -> ModelSpec:
    """`ModelSpec` of a raw ``config.json`` mapping, by its ``model_type``. Raises: CheckpointError."""
    model_type = hf.get("model_type")
    supported = ", ".join(sorted(FAMILIES))
    if model_type is None:
        raise CheckpointError(f"model_type is missing; supported are {supported}")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        nearest = get_close_matches(str(model_type), FAMILIES, n=1)
        hint = f" (nearest: {nearest[0]})" if nearest else ""
        raise CheckpointError(f"model_type {model_type!r} is not supported; supported are {supported}{hint}")
    return FAMILIES[model_type].spec(hf)


def generation_eos(directory: Path) -> tuple[int, ...]:
    """Ids that end a generation: those of ``generation_config.json`` (optional), then those of ``config.json``.

    The family's default id counts only where neither file names one. Raises: CheckpointError.
    """
    path = _config_path(directory)
    hf = _read_object(path)
    spec = _spec_of(hf, path)
    generation_path = directory / "generation_config.json"
    if not generation_path.is_file():
        return spec.eos_token_ids
    generation = ConfigReader(_read_object(generation_path), f"{generation_path}: ")
    stops = generation.token_ids("eos_token_id", None, spec.vocab_size)
    if stops and "eos_token_id" not in hf:
        return stops
    return tuple(dict.fromkeys(stops + spec.eos_token_ids))


def _spec_of(hf: Mapping[str, Any], path: Path) -> ModelSpec:
    try:
        return spec_from_config(hf)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _config_path(directory: Path) -> Path:
    """``config.json`` of `directory`; raises with the nearest names if either is not there."""
    if not directory.is_dir():
        what = "is not a directory" if directory.exists() else "does not exist"
        raise CheckpointError(f"checkpoint directory {directory} {what}{_nearest_directories(directory)}")
    path = directory / "config.json"
    if not path.is_file():
        inside = sorted(
            found.parent for pattern in ("*", "snapshots/*") for found in directory.glob(f"{pattern}/config.json")
        )
        hint = f"; there is one in {', '.join(map(str, inside[:3]))}" if inside else ""
        raise CheckpointError(f"checkpoint directory {directory} has no config.json{hint}")
    return path


def _nearest_directories(directory: Path) -> str:
    parent = directory.absolute().parent
    if not parent.is_dir():
        return f"; neither does {parent}" if not parent.exists() else ""
    names = [entry.name for entry in parent.iterdir() if entry.is_dir()]
    nearest = get_close_matches(directory.name, names, n=3)
    return f"; nearest in {parent}: {', '.join(nearest)}" if nearest else ""


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}; it must be an object")
    return value
