"""What a plan may choose besides the layout, and what a step is asked to do: `Choices`, `Formats`, `Workload`.

Imports no torch; names follow the YAML keys of `comm`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from helix.cost.hardware import Transport
from helix.errors import ConfigError
from helix.layout import Layout

VALUE_BYTES: Final[Mapping[str, float]] = MappingProxyType(
    {
        "float32": 4.0,
        "bfloat16": 2.0,
        "float16": 2.0,
        "float8": 1.0,
        "float4": 0.5,
        # Four bits and one 8-bit scale for 16 values (NVIDIA's NVFP4).
        "nvfp4": 0.5625,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """How a layout is run. `overlap` is the number of batch chunks of HOP-B (1: lockstep).

    `merge` is the form of the exchange: one packed all-to-all; all-gather of lse and reduce-scatter of outputs; or
    `gather`, where every rank of the KVP group gets all partial results (Medha's), which this engine does not run.
    """

    query: Literal["replicate", "gather"] = "replicate"
    exchange_space: Literal["latent", "value"] = "latent"
    merge: Literal["a2a", "ag_rs", "gather"] = "a2a"
    dispatch: Literal["local", "alltoall"] = "local"
    overlap: int = 1
    transport: Transport = "collective"


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """Number formats: of the layers' weights, of the cache, of activations (and embedding, head, norms, router).

    `products` is the format the layers' products run in, `attention_products` that of attention.
    """

    weights: str = "bfloat16"
    cache: str = "bfloat16"
    activations: str = "bfloat16"
    products: str = "bfloat16"
    attention_products: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in (self.weights, self.cache, self.activations, self.products, self.attention_products):
            if name not in VALUE_BYTES:
                raise ConfigError(f"number format {name!r} is not known; there are {', '.join(VALUE_BYTES)}")

    @property
    def weight_bytes(self) -> float:
        return VALUE_BYTES[self.weights]

    @property
    def cache_bytes(self) -> float:
        return VALUE_BYTES[self.cache]

    @property
    def activation_bytes(self) -> int:
        return int(VALUE_BYTES[self.activations])


def make_formats(weights: str, cache: str | None = None, activations: str | None = None) -> Formats:
    """Formats that follow from that of the weights: activations in 16 bit (or 32 with them), the cache like those.

    Products run in the weights' format. Attention runs in the cache's format where it has 16 bits or more.
    """
    dense = weights if VALUE_BYTES.get(weights, 0) >= 2 else "bfloat16"
    activations = activations or dense
    cache = cache or activations
    attention = cache if VALUE_BYTES.get(cache, 0) >= 2 else activations
    return Formats(
        weights=weights, cache=cache, activations=activations, products=weights, attention_products=attention
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One decode step: `batch` sequences of `context` tokens, one new token each.

    `routing` says which experts the tokens hit: at random (`random`: the busiest rank of EP sets the time), or spread
    as evenly as the mean (`balanced`); a number is a count of distinct experts that was observed in a whole layer.
    """

    batch: int
    context: int
    page_tokens: int = 64
    routing: Literal["random", "balanced"] | float = "random"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a model's parts run: one attention grid and one FFN grid, as a `Layout`, `dp` and `pp` times over.

    A Helix layout is `Placement(layout=layout)`: both grids are the same ranks. For the rivals the grids may differ:
    `dp` attention replicas share one FFN grid of ``tpf * ep`` ranks, or (Medha) the FFN runs on ``tpf`` ranks of each
    KVP shard. `pp` pipeline stages hold a part of the layers each.
    """

    layout: Layout
    choices: Choices = Choices()
    dp: int = 1
    pp: int = 1

    @property
    def attention_ranks(self) -> int:
        """Ranks of one attention grid."""
        return self.layout.num_ranks

    @property
    def ffn_ranks(self) -> int:
        """Ranks of one FFN grid."""
        return self.layout.tpf * self.layout.ep

    @property
    def num_ranks(self) -> int:
        return max(self.attention_ranks * self.dp, self.ffn_ranks) * self.pp

    @property
    def stage_ranks(self) -> int:
        return self.num_ranks // self.pp
