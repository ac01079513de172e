"""Model cards: the architecture numbers of public models, for planning and for timing without their weights.

A card is a YAML file under cards/. Its `config` holds the keys of the model's public ``config.json``, so that the
family's own parser reads it; its numbers are checked against published parameter counts in the tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, Literal

import yaml

from helix.errors import ConfigError
from helix.model_spec import ModelSpec
from model_zoo import spec_from_config

__all__ = ["Card", "card_names", "load_card", "read_card"]

_DIRECTORY: Final = Path(__file__).parent / "cards"


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One model card. `source` says where the numbers are from, `checkpoint_dtype` how the public weights are stored.

    ``float8_e4m3fn`` means FP8 weights with block scales, which `model.quantize` keeps or dequantises while loading.
    """

    name: str
    source: str
    checkpoint_dtype: Literal["bfloat16", "float8_e4m3fn"]
    config: Mapping[str, Any]

    @property
    def spec(self) -> ModelSpec:
        """`ModelSpec` of the card's config."""
        return spec_from_config(self.config)


def card_names() -> tuple[str, ...]:
    """Names that `model.card` takes, sorted."""
    return tuple(sorted(path.stem for path in _DIRECTORY.glob("*.yaml")))


def read_card(name: str) -> Card:
    """The card called `name`. Raises: ConfigError with the nearest names if there is none."""
    names = card_names()
    if name not in names:
        near = get_close_matches(name.lower(), names, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"cards are {', '.join(names)}"
        raise ConfigError(
            f"model.card={name!r} is neither a model card nor a checkpoint directory; {hint} "
            "(`helix models` lists the cards; a checkpoint directory goes to model.path)"
        )
    return Card(**yaml.safe_load((_DIRECTORY / f"{name}.yaml").read_text(encoding="utf-8")))


def load_card(name: str) -> ModelSpec:
    """`ModelSpec` of the card called `name`. Raises: ConfigError with the nearest names if there is none."""
    return read_card(name).spec
