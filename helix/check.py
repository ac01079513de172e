"""`helix check`: what a configuration would do, from integers alone: no GPU, no rank, no weight read.

The configuration may be for another machine. What depends on the machine, the number of page rows that `auto` gives, is
worked out for this one; where the weights do not fit this one it stays open, which is not an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from helix.cache.pools import page_bytes
from helix.comm.mesh import planning_mesh
from helix.config import CommConfig, RunConfig
from helix.cost.size import ParameterCount, parameter_count
from helix.engine.build import (
    cache_budget,
    device_and_formats,
    fitting_rows,
    ignored_tensors,
    resolve_cache_dtype,
    resolve_context,
    resolve_dtype,
    resolve_layout,
    resolve_packing,
    resolve_spec,
)
from helix.engine.runner import batch_buckets
from helix.layers.decoder import Block, Decoder, make_block
from helix.layout import Layout, PageRule, padded_heads
from helix.model_spec import ModelSpec
from helix.planner.auto import overlap_rule
from helix.weights import Packing, check_checkpoint, declare, held_in_fp8, weight_bytes
from model_zoo import text_names


@dataclass(frozen=True, slots=True)
class Checked:
    """A valid configuration, worked out. Bytes are per rank.

    `weights_format` is of the layers' weights: `dtype`, or float8 with `scale_bytes` of scales (on the rank with the
    most; part of `weights_bytes`, and more than four bytes for each block where slices cut blocks).

    `num_page_rows` and `capacity_tokens` are None where they depend on a machine that is not this one; `page_rows_from`
    says where the rows come from, or why they are not known. `chunks` are those that a decode step is cut into on the
    devices of this machine, by the size that batches are padded to, where all sequences have the longest context.
    """

    spec: ModelSpec
    layout: Layout
    dtype: str
    weights_format: str
    cache_format: str
    parameters: ParameterCount
    weights_bytes: tuple[int, ...]
    scale_bytes: int
    kv_bytes_per_token: float
    page_row_bytes: int
    num_page_rows: int | None
    page_rows_from: str
    capacity_tokens: int | None
    max_context: int
    padded_heads: int
    chunks: dict[int, int]

    def groups(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Rank groups of every axis."""
        return {axis: self.layout.groups(axis) for axis in ("kvp", "tpa", "tpf", "ep")}


def check(config: RunConfig, num_ranks: int | None = None) -> Checked:
    """Validate `config` for `num_ranks` ranks (None: as many as its layout asks for).

    Raises
    ------
    ConfigError, LayoutError, CheckpointError
        What starting the engine would raise, before anything is started.
    """
    spec = resolve_spec(config)
    layout = resolve_layout(config, spec, num_ranks)
    device = torch.device("cuda" if config.engine.device != "cpu" and torch.cuda.is_available() else "cpu")
    dtype = resolve_dtype(config.model.dtype, spec, device)
    # A config that asks for a GPU is checked for one, wherever that is.
    target = torch.device("cuda") if config.engine.device == "cuda" else device
    packing = resolve_packing(config, spec, target)
    if config.model.load == "safetensors":
        _check_weights(config, spec, layout, dtype, packing)
    ranks = range(layout.num_ranks)
    weights = tuple(rank_weight_bytes(spec, layout, rank, config.comm, dtype, packing) for rank in ranks)
    scales = [rank_scale_bytes(spec, layout, rank, config.comm, packing) for rank in ranks] if packing else [0]
    rule = PageRule(config.cache.page_tokens, layout.kvp)
    max_context = resolve_context(config, spec)
    cache_dtype = resolve_cache_dtype(config, dtype)
    row_bytes = page_bytes(spec, layout, rule.page_tokens, cache_dtype.itemsize, dtype.itemsize)
    budget = cache_budget(config, device, layout.num_ranks, max(weights))
    rows = fitting_rows(config, rule, max_context, row_bytes, budget)
    overlap = overlap_rule(config, spec, layout, *device_and_formats(config, spec))
    return Checked(
        spec=spec,
        layout=layout,
        dtype=str(dtype).removeprefix("torch."),
        weights_format=str(dtype).removeprefix("torch.") if packing is None else "float8",
        cache_format="float8" if cache_dtype is torch.float8_e4m3fn else str(cache_dtype).removeprefix("torch."),
        parameters=parameter_count(spec),
        weights_bytes=weights,
        scale_bytes=max(scales),
        kv_bytes_per_token=row_bytes / rule.row_tokens,
        page_row_bytes=row_bytes,
        num_page_rows=rows or None,
        page_rows_from=_rows_from(config, device, budget, rows),
        capacity_tokens=rows * rule.row_tokens or None,
        max_context=max_context,
        padded_heads=padded_heads(spec, layout),
        chunks={size: overlap.num_chunks(size, max_context) for size in batch_buckets(config.engine.max_batch)},
    )


def rank_weight_bytes(
    spec: ModelSpec, layout: Layout, rank: int, comm: CommConfig, dtype: torch.dtype, packing: Packing | None = None
) -> int:
    """Bytes of the weights of `rank`.

    One layer of each kind (with experts, without) stands for all of its kind, so that hundreds of layers on hundreds of
    ranks cost nothing.
    """
    meta = torch.device("meta")
    bare = Decoder(replace(spec, num_layers=0), planning_mesh(layout, rank), comm, dtype=dtype, device=meta)
    blocks = _one_of_each_kind(spec, layout, rank, comm, dtype, packing)
    return weight_bytes(bare) + sum(count * weight_bytes(block) for block, count in blocks)


def rank_scale_bytes(spec: ModelSpec, layout: Layout, rank: int, comm: CommConfig, packing: Packing) -> int:
    """Bytes of the scales of FP8 weights on `rank`."""
    return sum(
        count * sum(one.packed.scale.numel() * one.packed.scale.element_size() for one in held_in_fp8(block))
        for block, count in _one_of_each_kind(spec, layout, rank, comm, torch.bfloat16, packing)
    )


def _one_of_each_kind(
    spec: ModelSpec, layout: Layout, rank: int, comm: CommConfig, dtype: torch.dtype, packing: Packing | None
) -> Iterator[tuple[Block, int]]:
    """A layer with experts and one without, without memory, and how many there are of each."""
    mesh, meta = planning_mesh(layout, rank), torch.device("meta")
    layers = range(spec.num_layers)
    dense = [index for index in layers if spec.moe is None or spec.moe.is_dense(index)]
    sparse = [index for index in layers if index not in set(dense)]
    for kind in (dense, sparse):
        if kind:
            yield make_block(kind[0], spec, mesh, comm, packing, dtype=dtype, device=meta), len(kind)


def _check_weights(
    config: RunConfig, spec: ModelSpec, layout: Layout, dtype: torch.dtype, packing: Packing | None
) -> None:
    """Raise CheckpointError where the checkpoint's headers do not fit what rank 0 declares: all tensors."""
    meta = torch.device("meta")
    model = Decoder(spec, planning_mesh(layout, 0), config.comm, packing, dtype=dtype, device=meta)
    check_checkpoint(
        declare(model),
        Path(str(config.model.path)),
        ignore=ignored_tensors(model, spec),
        rename=text_names(spec),
        held=held_in_fp8(model),
    )


def _rows_from(config: RunConfig, device: torch.device, budget: int, rows: int) -> str:
    if config.cache.num_page_rows != "auto":
        return "cache.num_page_rows"
    if rows:
        return f"this machine's {device.type}"
    what = "a page row does" if budget > 0 else "the weights do"
    return f"{what} not fit in this machine's {device.type} memory"
