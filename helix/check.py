"""`helix check`: what a configuration would do, from integers alone: no GPU, no rank, no weight read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from helix.cache.pools import page_bytes
from helix.comm.mesh import planning_mesh
from helix.config import RunConfig
from helix.engine.build import (
    DTYPES,
    ignored_tensors,
    page_rows,
    resolve_context,
    resolve_dtype,
    resolve_layout,
    resolve_spec,
)
from helix.layers.decoder import Decoder
from helix.layout import Layout, PageRule, padded_heads
from helix.model_spec import ModelSpec
from helix.weights import check_checkpoint, weight_bytes


@dataclass(frozen=True, slots=True)
class Checked:
    """A valid configuration, worked out. Bytes are per rank."""

    spec: ModelSpec
    layout: Layout
    dtype: str
    weights_bytes: tuple[int, ...]
    kv_bytes_per_token: float
    page_row_bytes: int
    num_page_rows: int
    page_rows_from: str
    capacity_tokens: int
    max_context: int
    padded_heads: int

    def groups(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Rank groups of every axis."""
        return {axis: self.layout.groups(axis) for axis in ("kvp", "tpa", "tpf", "ep")}


def check(config: RunConfig, num_ranks: int | None = None) -> Checked:
    """Validate `config` for `num_ranks` ranks (None: as many as its layout asks for).

    The page pool is sized for this machine where `cache.num_page_rows` is auto: for its CPU memory unless it has a GPU.

    Raises
    ------
    ConfigError, LayoutError, CheckpointError
        What starting the engine would raise, before anything is started.
    """
    spec = resolve_spec(config)
    layout = resolve_layout(config, spec, num_ranks)
    device = torch.device("cuda" if config.engine.device != "cpu" and torch.cuda.is_available() else "cpu")
    dtype = resolve_dtype(config.model.dtype, spec, device)
    models = [
        Decoder(spec, planning_mesh(layout, rank), config.comm, dtype=dtype, device=torch.device("meta"))
        for rank in range(layout.num_ranks)
    ]
    if config.model.load == "safetensors":
        check_checkpoint(models[0], Path(str(config.model.path)), ignore=ignored_tensors(models[0]))
    rule = PageRule(config.cache.page_tokens, layout.kvp)
    max_context = resolve_context(config, spec)
    cache_dtype = dtype if config.cache.dtype == "auto" else DTYPES[config.cache.dtype]
    row_bytes = page_bytes(spec, layout, rule.page_tokens, cache_dtype.itemsize)
    rows = page_rows(config, spec, layout, rule, max_context, cache_dtype, device, layout.num_ranks)
    return Checked(
        spec=spec,
        layout=layout,
        dtype=str(dtype).removeprefix("torch."),
        weights_bytes=tuple(weight_bytes(model) for model in models),
        kv_bytes_per_token=row_bytes / rule.row_tokens,
        page_row_bytes=row_bytes,
        num_page_rows=rows,
        page_rows_from="cache.num_page_rows" if config.cache.num_page_rows != "auto" else f"this machine's {device.type}",
        capacity_tokens=rows * rule.row_tokens,
        max_context=max_context,
        padded_heads=padded_heads(spec, layout),
    )
