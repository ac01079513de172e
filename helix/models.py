"""`helix models`: what the model cards say, and which layouts each model can take."""

from __future__ import annotations

from dataclasses import dataclass

from helix.cost.size import kv_bytes_per_token, parameter_count
from helix.layout import Layout, default_layout, legal_layouts
from helix.model_spec import ModelSpec
from model_zoo.cards import card_names, read_card

NUM_RANKS = (8, 16, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """Legal layouts on `num_ranks` GPUs: how many there are, and one to begin with (`helix plan` prices them all)."""

    num_ranks: int
    count: int
    example: Layout

    @property
    def example_text(self) -> str:
        one = self.example
        return f"{one.kvp}x{one.tpa}|{one.tpf}x{one.ep}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """One card. `kv_bytes_per_token` is of the whole model, all layers and KV heads, in bf16.

    `num_kv_heads` are the heads that the cache holds: with `latent` attention (MLA) the one that all query heads read.
    """

    card: str
    name: str
    source: str
    checkpoint_dtype: str
    parameters: int
    active_parameters: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    latent: bool
    kv_bytes_per_token: int
    max_context: int
    layouts: tuple[Layouts, ...]


def survey() -> tuple[ModelInfo, ...]:
    """All cards, by name."""
    return tuple(describe(name) for name in card_names())


def describe(name: str) -> ModelInfo:
    """The card called `name`. Raises: ConfigError if there is none."""
    card = read_card(name)
    spec = card.spec
    count = parameter_count(spec)
    return ModelInfo(
        card=name,
        name=card.name,
        source=card.source,
        checkpoint_dtype=card.checkpoint_dtype,
        parameters=count.total,
        active_parameters=count.active,
        num_layers=spec.num_layers,
        num_query_heads=spec.num_heads,
        num_kv_heads=spec.cache_heads,
        latent=spec.mla is not None,
        kv_bytes_per_token=kv_bytes_per_token(spec),
        max_context=spec.max_context,
        layouts=tuple(_layouts(spec, num_ranks) for num_ranks in NUM_RANKS),
    )


def _layouts(spec: ModelSpec, num_ranks: int) -> Layouts:
    count = sum(1 for _ in legal_layouts(spec, num_ranks))
    return Layouts(num_ranks=num_ranks, count=count, example=default_layout(spec, num_ranks)[0])
