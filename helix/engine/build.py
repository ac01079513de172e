"""Composition root: a validated `RunConfig` and a joined `World` become an `EngineCore` on this rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import psutil
import torch

from helix.cache.pools import build_cache, page_bytes
from helix.capabilities import check_capabilities, packs_on_gpu
from helix.comm.group import Group
from helix.comm.mesh import Mesh, build_mesh
from helix.comm.symmetric import choose_transport
from helix.comm.world import World
from helix.config import CommConfig, RunConfig
from helix.engine.ahead import plans_ahead
from helix.engine.core import EngineCore
from helix.engine.runner import Runner, choose_mode
from helix.engine.scheduler import Scheduler
from helix.errors import ConfigError
from helix.layers.decoder import Decoder
from helix.layout import Layout, PageRule, check_layout, with_defaults
from helix.model_spec import ModelSpec
from helix.planner.auto import choose_layout, overlap_rule, resolve_sharing
from helix.weights import Packing, dummy_weights, fp8_tensors, load_weights
from model_zoo import load_spec, skipped_tensors, text_names
from model_zoo.cards import load_card

log = logging.getLogger("helix")

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
CACHE_DTYPES = DTYPES | {"float8": torch.float8_e4m3fn}

# The first compute capability with FP8 products.
FP8_CAPABILITY = (8, 9)

# Exchanges that may run at a time where ``comm.overlap`` does not say.
_MAX_CHUNKS = 4
# On a CPU the cache shares the memory with everything else on the machine, so only a quarter of what is free is taken.
_CPU_SHARE = 0.25


def resolve_spec(config: RunConfig) -> ModelSpec:
    """The model's spec, from its checkpoint directory or its card, cut to `model.num_layers`, for a supported config.

    Raises
    ------
    ConfigError, CheckpointError
        No such card or checkpoint, a card without ``load: dummy``, or what `helix.capabilities` refuses.
    """
    card = config.model.card
    spec = load_card(card) if card else load_spec(Path(str(config.model.path)))
    if card and config.model.load != "dummy":
        raise ConfigError(
            f"model.card={card} has no weights; set model.load: dummy for random weights of its shapes, "
            "or give model.path the directory of a checkpoint"
        )
    device = "cuda" if config.engine.device != "cpu" and torch.cuda.is_available() else "cpu"
    check_capabilities(config, spec, device)
    return with_num_layers(spec, config.model.num_layers)


def resolve_layout(config: RunConfig, spec: ModelSpec, num_ranks: int | None) -> Layout:
    """The layout of `config` on `num_ranks` ranks (None: as many as the layout asks for), checked against the model.

    Raises
    ------
    LayoutError
        Not legal for this model, or for another number of ranks than were started.
    """
    if config.layout == "auto":
        layout, reason = choose_layout(config, spec, num_ranks or 1, *device_and_formats(config, spec))
        log.info("layout: auto -> %s (%s)", layout, reason)
        return layout
    sizes = {name: value for name, value in config.layout.model_dump().items() if value is not None}
    layout = with_defaults(sizes, num_ranks)
    check_layout(spec, layout)
    return layout


def device_and_formats(config: RunConfig, spec: ModelSpec) -> tuple[str, str, str]:
    """What the first device calls itself ("cpu" without one), and the names of the dtype of activations on it and of
    the format of the layers' weights."""
    on_gpu = config.engine.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    name = torch.cuda.get_device_name(device) if on_gpu else "cpu"
    dtype = str(resolve_dtype(config.model.dtype, spec, device)).removeprefix("torch.")
    return name, dtype, dtype if resolve_packing(config, spec, device) is None else "float8"


def resolve_dtype(name: str, spec: ModelSpec, device: torch.device) -> torch.dtype:
    """`auto` is the checkpoint's dtype, except float16 on a CPU, which has no fast products: float32 there."""
    if name != "auto":
        return DTYPES[name]
    if device.type == "cpu" and spec.dtype == "float16":
        return torch.float32
    return DTYPES[spec.dtype]


def resolve_packing(config: RunConfig, spec: ModelSpec, device: torch.device) -> Packing | None:
    """Which weights are held in FP8 on `device`, or None.

    Raises
    ------
    ConfigError
        ``quantize: fp8`` on a GPU without FP8 products.
    """
    wanted, block = config.model.quantize, spec.fp8_block
    if wanted == "none" or (wanted == "auto" and (block is None or device.type != "cuda" or not packs_on_gpu(block))):
        return None
    if (
        device.type == "cuda"
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability(device) < FP8_CAPABILITY
    ):
        if wanted == "auto":
            return None
        raise ConfigError(
            f"model.quantize=fp8: {torch.cuda.get_device_name(device)} has no FP8 products (compute capability 8.9 and "
            "later have); use auto or none"
        )
    if block is None:
        return Packing()
    if wanted == "fp8" or config.model.load == "dummy":
        return Packing(block)
    return Packing(block, fp8_tensors(Path(str(config.model.path)), text_names(spec)))


def resolve_cache_dtype(config: RunConfig, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the cache; `auto` is that of the activations."""
    return dtype if config.cache.dtype == "auto" else CACHE_DTYPES[config.cache.dtype]


def resolve_context(config: RunConfig, spec: ModelSpec) -> int:
    """Longest sequence, in tokens, that a request may reach."""
    wanted = config.engine.max_context
    if wanted == "auto":
        return spec.max_context
    if wanted > spec.max_context:
        raise ConfigError(
            f"engine.max_context={wanted} is more than the {spec.max_context} tokens that the model was made for"
        )
    return wanted


def build_core(
    config: RunConfig,
    spec: ModelSpec,
    layout: Layout,
    world: World,
    progress: Callable[[str, int], None] | None = None,
    *,
    mesh: Mesh | None = None,
) -> EngineCore:
    """Build and load this rank's model and cache. Collective over all ranks of `world`.

    `progress(tensor name, bytes)` is called for each tensor read. `mesh` takes the place of the groups of `layout` over
    `world` (see `helix.comm.stand_in`).
    """
    device = world.device
    dtype = resolve_dtype(config.model.dtype, spec, device)
    if mesh is None:
        mesh = build_mesh(layout, world)
        connect(mesh, world, config.comm)
        config = with_transport(config, mesh)
    packing = resolve_packing(config, spec, device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    comm = resolve_sharing(config.comm, spec, layout, name, str(dtype).removeprefix("torch."))
    model = Decoder(spec, mesh, comm, packing, dtype=dtype, device=device)
    _fill(model, spec, config, world, progress)
    rule = PageRule(config.cache.page_tokens, layout.kvp)
    max_context = resolve_context(config, spec)
    cache_dtype = resolve_cache_dtype(config, dtype)
    num_rows = _agree(
        world.group, page_rows(config, spec, layout, rule, max_context, cache_dtype, dtype, device, world.local_size)
    )
    scheduler = Scheduler(
        rule=rule,
        num_rows=num_rows,
        max_batch=config.engine.max_batch,
        max_context=max_context,
        prefill_chunk=config.engine.prefill_chunk,
        prefix_reuse=config.cache.prefix_reuse,
        fixed_up_to=model.rotary.original_context if model.rotary.uses_length else None,
    )
    cache = build_cache(spec, layout, mesh.rank, num_rows, rule.page_tokens, cache_dtype, device, dtype)
    runner = Runner(
        model,
        cache,
        rule,
        mesh,
        world,
        choose_chunks=overlap_rule(config, spec, layout, *device_and_formats(config, spec)).num_chunks,
        mode=choose_mode(config, spec, world, dtype),
        max_batch=config.engine.max_batch,
        max_context=max_context,
    )
    return EngineCore(
        world,
        mesh,
        model,
        rule,
        scheduler,
        cache,
        runner,
        plans_ahead=plans_ahead(config, device),
        check_schedule=config.engine.check_schedule,
    )


def connect(mesh: Mesh, world: World, comm: CommConfig) -> None:
    """Give the groups of `mesh` the transport that `comm` asks for. Collective over all ranks of `world`."""
    # The world's group outlives the mesh, and may have had another transport in an earlier one.
    mesh.world.direct = mesh.kvp.direct = None
    if choose_transport(comm.transport, world) == "symmetric":
        from helix.layers.direct import connect_peers

        connect_peers(mesh, world, comm.overlap if isinstance(comm.overlap, int) else _MAX_CHUNKS)


def with_transport(config: RunConfig, mesh: Mesh) -> RunConfig:
    """`config` with the transport that the groups of `mesh` have."""
    return config.model_copy(update={"comm": config.comm.model_copy(update={"transport": mesh.transport})})


def page_rows(
    config: RunConfig,
    spec: ModelSpec,
    layout: Layout,
    rule: PageRule,
    max_context: int,
    cache_dtype: torch.dtype,
    dtype: torch.dtype,
    device: torch.device,
    ranks_here: int,
) -> int:
    """Page rows of this rank's pool, once its weights are loaded."""
    row_bytes = page_bytes(spec, layout, rule.page_tokens, cache_dtype.itemsize, dtype.itemsize)
    budget = cache_budget(config, device, ranks_here)
    rows = fitting_rows(config, rule, max_context, row_bytes, budget)
    if rows < 1:
        raise ConfigError(
            f"cache: one page row takes {row_bytes} bytes on each rank, but only {budget} are left after the "
            "weights; use more ranks, a smaller cache.page_tokens, or a higher cache.memory_fraction"
        )
    return rows


def cache_budget(config: RunConfig, device: torch.device, ranks_here: int, weights_bytes: int = 0) -> int:
    """Bytes that this rank's cache may take of the memory that is free now, less `weights_bytes` not yet loaded.

    `ranks_here` ranks share the memory of a CPU. Below zero where the weights do not fit.
    """
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        return int((free - weights_bytes) * config.cache.memory_fraction)
    free = psutil.virtual_memory().available // ranks_here
    return int((free - weights_bytes) * config.cache.memory_fraction * _CPU_SHARE)


def fitting_rows(config: RunConfig, rule: PageRule, max_context: int, row_bytes: int, budget: int) -> int:
    """Page rows as configured, or what `budget` bytes hold, but never more than max_batch full contexts need."""
    if config.cache.num_page_rows != "auto":
        return config.cache.num_page_rows
    useful = rule.rows_for(max_context) * config.engine.max_batch
    return min(max(budget, 0) // row_bytes, useful)


def _fill(
    model: Decoder,
    spec: ModelSpec,
    config: RunConfig,
    world: World,
    progress: Callable[[str, int], None] | None,
) -> None:
    def report(name: str, num_bytes: int) -> None:
        world.monitor.work(f"loading {name}")
        if progress is not None:
            progress(name, num_bytes)

    if config.model.load == "dummy":
        dummy_weights(model, config.engine.seed, progress=report)
        return
    ignore = ignored_tensors(model, spec)
    loaded = load_weights(
        model,
        Path(str(config.model.path)),
        ignore=ignore,
        rename=text_names(spec),
        progress=report,
    )
    if loaded.ignored and world.rank == 0:
        log.info("weights: %s", skipped_line(loaded.ignored, ignore))


def ignored_tensors(model: Decoder, spec: ModelSpec) -> tuple[str, ...]:
    """Patterns of checkpoint tensors that no layer reads: what is not of the text model, and what is stored twice."""
    # Scales of activations and cached values, fixed when a checkpoint was quantised: here they follow the values.
    fixed = ("*.input_scale", "*.output_scale", "*.k_scale", "*.v_scale")
    patterns = (*skipped_tensors(spec), "*.rotary_emb.inv_freq", *fixed)
    return (*patterns, "lm_head.weight") if model.head.linear is None else patterns


def skipped_line(names: Sequence[str], patterns: Sequence[str]) -> str:
    """What a checkpoint holds that is not loaded: one line, with a count for each pattern, for thousands of tensors."""
    counts = {pattern: sum(fnmatchcase(name, pattern) for name in names) for pattern in patterns}
    parts = ", ".join(f"{pattern} ({count})" for pattern, count in counts.items() if count)
    return f"skipped {len(names)} tensors of the checkpoint that the model does not use: {parts}"


def _agree(group: Group, value: int) -> int:
    """The smallest `value` among the ranks: capacity is decided by the fullest one."""
    mine = torch.tensor([value], dtype=torch.int64)
    return int(group.all_gather(mine.new_empty(group.size, 1), mine).min())


def with_num_layers(spec: ModelSpec, num_layers: int | None) -> ModelSpec:
    """`spec` cut to its first `num_layers` layers (for timing a part of a large model with dummy weights)."""
    return spec if num_layers is None else replace(spec, num_layers=num_layers)
