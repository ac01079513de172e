"""What this version can do and refuses: one table, which starting an engine checks and the docs print.

A value that is not supported is refused before any weight is read, with the field, the value and what would be right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from helix.config import RunConfig
from helix.errors import ConfigError
from helix.model_spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """One configurable feature: where its values work, and `problem`, which says what is wrong with a configuration."""

    field: str
    values: str
    works: str
    problem: Callable[[RunConfig, ModelSpec, str], str | None]


def _none(_config: RunConfig, _spec: ModelSpec, _device: str) -> str | None:
    return None


def _transport(config: RunConfig, _spec: ModelSpec, device: str) -> str | None:
    if config.comm.transport != "symmetric" or device == "cuda":
        return None
    return (
        f"comm.transport=symmetric: needs GPUs that address each other's memory, not {device}; use auto or collective"
    )


def _exchange_space(config: RunConfig, spec: ModelSpec, _device: str) -> str | None:
    if config.comm.exchange_space == "auto" or spec.mla:
        return None
    value = config.comm.exchange_space
    return f"comm.exchange_space={value}: needs latent attention (MLA), {spec.model_type} has none; use auto"


def _dispatch(config: RunConfig, spec: ModelSpec, _device: str) -> str | None:
    if config.comm.dispatch == "auto" or spec.moe:
        return None
    return f"comm.dispatch={config.comm.dispatch}: needs a model with experts, {spec.model_type} has none; use auto"


def _graphs(config: RunConfig, spec: ModelSpec, device: str) -> str | None:
    if config.engine.graphs != "on":
        return None
    if device != "cuda":
        return "engine.graphs=on: CUDA graphs need a GPU; use auto or off"
    if spec.moe is not None and config.comm.dispatch == "alltoall":
        return "engine.graphs=on: comm.dispatch=alltoall reads row counts on the host; use auto, or dispatch local"
    return None


def packs_on_gpu(block: tuple[int, int]) -> bool:
    """Whether the FP8 kernels take weights with blocks of this size: they read a block's columns at once."""
    return block[1] in (32, 64, 128, 256)


def _quantize(config: RunConfig, spec: ModelSpec, device: str) -> str | None:
    block = spec.fp8_block
    if config.model.quantize != "fp8" or device != "cuda" or block is None or packs_on_gpu(block):
        return None
    return (
        f"model.quantize=fp8: the checkpoint's blocks of {list(block)} have no products on a GPU, which takes 32, 64, "
        "128 or 256 columns; set it to none, and the weights are dequantised to model.dtype while they are loaded"
    )


CAPABILITIES = (
    Capability(
        field="layout.kvp, tpa, tpf, ep", values="any legal size, 3 and 6 too", works="all models", problem=_none
    ),
    Capability(field="layout.duplicate_kv", values="true, false", works="all models, with kvp 1", problem=_none),
    Capability(field="comm.merge", values="a2a, ag_rs", works="all models", problem=_none),
    Capability(
        field="comm.transport",
        values="auto, collective; symmetric",
        works="gloo, NCCL; on request: one GPU a rank, on one node with peer access",
        problem=_transport,
    ),
    Capability(
        field="comm.overlap",
        values="auto, off, a number of chunks",
        works="decode steps; on GPUs with two streams",
        problem=_none,
    ),
    Capability(field="comm.query", values="replicate, gather", works="all models", problem=_none),
    Capability(field="comm.exchange_space", values="latent, value", works="MLA", problem=_exchange_space),
    Capability(field="comm.dispatch", values="local, alltoall", works="models with experts", problem=_dispatch),
    Capability(
        field="comm.shared_projections",
        values="auto, off, a number of tokens",
        works="all models; prompts with kvp above 1",
        problem=_none,
    ),
    Capability(
        field="engine.graphs",
        values="auto, on, off",
        works="GPUs, one rank or NCCL; experts in bfloat16 with dispatch local",
        problem=_graphs,
    ),
    Capability(
        field="engine.ahead", values="auto, on, off", works="all models; auto: on GPUs, off on a CPU", problem=_none
    ),
    Capability(
        field="model.quantize",
        values="auto, none, fp8",
        works="all models; FP8 products on GPUs from compute capability 8.9, elsewhere auto dequantises at load",
        problem=_quantize,
    ),
    Capability(
        field="cache.dtype",
        values="bfloat16, float16, float32; fp8",
        works="all models; a scale for each token and head, rotary part of latents in model.dtype",
        problem=_none,
    ),
    Capability(field="cache.prefix_reuse", values="true, false", works="all models", problem=_none),
)


def check_capabilities(config: RunConfig, spec: ModelSpec, device: str) -> None:
    """Raise `ConfigError` naming everything in `config` that cannot be done for `spec` on a `device` (cpu or cuda)."""
    problems = [text for one in CAPABILITIES if (text := one.problem(config, spec, device)) is not None]
    if problems:
        raise ConfigError("\n".join(problems))


def markdown_table() -> str:
    """The table as the README prints it."""
    lines = ["| field | values | where |", "|---|---|---|"]
    lines += [f"| `{one.field}` | {one.values} | {one.works} |" for one in CAPABILITIES]
    return "\n".join(lines)
