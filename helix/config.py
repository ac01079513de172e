"""`RunConfig`: what a person asks for, read from YAML, keyword arguments and ``key.path=value`` overrides.

Owns the names, types, ranges and defaults of every setting; also the only reader of the environment (`launch_env`).
`helix.config_yaml` reads the text, `helix.config_faults` words the complaints. Values stay as given ("auto" included):
whoever knows the model and the machine resolves them. Imports no torch.
"""

from __future__ import annotations

import difflib
import functools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from helix.config_faults import explain, fault_of, kind_of, origin_of, show, token_count
from helix.config_yaml import parse_yaml, read_yaml
from helix.errors import ConfigError

_DTYPE_ALIASES: Final[Mapping[str, str]] = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp8": "float8",
}


def _dtype_name(value: object) -> object:
    return _DTYPE_ALIASES.get(value, value) if isinstance(value, str) else value


def _switch_name(value: object) -> object:
    """YAML 1.1 reads a bare ``on`` or ``off`` as a boolean; give the word back."""
    return ("on" if value else "off") if isinstance(value, bool) else value


# What ``comm.transport: auto`` tries first; symmetric once its new way of waiting has run on several GPUs.
AUTO_TRANSPORT: Literal["collective", "symmetric"] = "collective"
# Token, page and layer counts end up in int32 index tensors, hence the upper limit.
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Text = Annotated[str, Field(min_length=1)]
DTypeName = Annotated[Literal["auto", "bfloat16", "float16", "float32"], BeforeValidator(_dtype_name)]
CacheDTypeName = Annotated[Literal["auto", "bfloat16", "float16", "float32", "float8"], BeforeValidator(_dtype_name)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ModelConfig(_Section):
    """Which model: a checkpoint directory (`path`) or a model card (`card`), exactly one of them.

    `quantize`: `auto` keeps the FP8 weights of a checkpoint in FP8 where the device has products for them, `fp8` keeps
    them anywhere and quantises what the checkpoint holds in other formats, `none` dequantises to `dtype`.
    """

    path: Text | None = None
    card: Text | None = None
    dtype: DTypeName = "auto"
    load: Literal["safetensors", "dummy"] = "safetensors"
    num_layers: Count | None = None
    quantize: Literal["auto", "none", "fp8"] = "auto"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.path is None) == (self.card is None):
            have = "both are given" if self.path else "neither is given"
            raise ValueError(f"set exactly one of path (a checkpoint directory) and card (a model card); {have}")
        if self.num_layers is not None and self.load != "dummy":
            raise ValueError(f"num_layers={self.num_layers} needs load: dummy; a real checkpoint runs all its layers")
        return self


class LayoutConfig(_Section):
    """The sizes of a layout that were given; `helix.layout.with_defaults` completes `sizes()` once N is known."""

    kvp: Count | None = None
    tpa: Count | None = None
    tpf: Count | None = None
    ep: Count | None = None
    duplicate_kv: bool = False

    def sizes(self) -> dict[str, int | bool]:
        """What was given, without what was not."""
        return self.model_dump(exclude_defaults=True)


class CacheConfig(_Section):
    """The paged KV cache; `memory_fraction` is the part of a device's memory that Helix may use."""

    page_tokens: Count = 64
    num_page_rows: Literal["auto"] | Count = "auto"
    memory_fraction: float = Field(default=0.9, gt=0, le=1)
    dtype: CacheDTypeName = "auto"
    prefix_reuse: bool = True


class CommConfig(_Section):
    """How ranks exchange; `overlap` is the number of chunks of the batch, or off for the lockstep order.

    `shared_projections`: steps of at least that many tokens are projected (QKV, or MLA's down-projections) in shares by
    the ranks of a KVP group and gathered; others, and all with off, are projected by each rank as a whole.
    """

    transport: Literal["auto", "collective", "symmetric"] = "auto"
    merge: Literal["a2a", "ag_rs"] = "a2a"
    overlap: Annotated[Literal["auto", "off"] | Count, BeforeValidator(_switch_name)] = "auto"
    query: Literal["auto", "replicate", "gather"] = "auto"
    exchange_space: Literal["auto", "latent", "value"] = "auto"
    dispatch: Literal["auto", "local", "alltoall"] = "auto"
    shared_projections: Annotated[Literal["auto", "off"] | Count, BeforeValidator(_switch_name)] = "auto"


class EngineConfig(_Section):
    """The step loop. `stall_timeout_s` stays below the 30 s within which every rank has ended after a fault."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_batch: Count = 64
    max_context: Annotated[
        Literal["auto"] | Count, BeforeValidator(token_count), Field(description="also as 128K or 1M")
    ] = "auto"
    prefill_chunk: Count = 2048
    graphs: Annotated[Literal["auto", "on", "off"], BeforeValidator(_switch_name)] = "auto"
    ahead: Annotated[Literal["auto", "on", "off"], BeforeValidator(_switch_name)] = "auto"
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    check_schedule: bool = False
    stall_timeout_s: float = Field(default=20.0, gt=0, le=28)


class ServerConfig(_Section):
    """The HTTP server. `api_key` is kept out of repr and of error messages.

    `model_name` is what clients call the model (default: the last part of its path, or its card). Beside the
    `engine.max_batch` requests that run, `max_queue` may wait; one that is not done in `request_timeout_s` is ended.
    """

    host: Text = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    api_key: Text | None = Field(default=None, repr=False, json_schema_extra={"writeOnly": True})
    model_name: Text | None = None
    max_queue: Count = 256
    request_timeout_s: float = Field(default=600.0, gt=0, le=86400)
    max_body_bytes: Count = 32 << 20


class RunConfig(_Section):
    """All settings of one engine: immutable, hashable, picklable. Made by `load_config` or `make_config`."""

    model: ModelConfig
    layout: Literal["auto"] | LayoutConfig = "auto"
    cache: CacheConfig = CacheConfig()
    comm: CommConfig = CommConfig()
    engine: EngineConfig = EngineConfig()
    server: ServerConfig = ServerConfig()

    @field_validator("layout", mode="after")
    @classmethod
    def _no_sizes_is_auto(cls, value: Literal["auto"] | LayoutConfig) -> Literal["auto"] | LayoutConfig:
        return value if isinstance(value, LayoutConfig) and value.sizes() else "auto"


_SECTIONS: Final[Mapping[str, type[_Section]]] = {
    "model": ModelConfig,
    "layout": LayoutConfig,
    "cache": CacheConfig,
    "comm": CommConfig,
    "engine": EngineConfig,
    "server": ServerConfig,
}


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> RunConfig:
    """The config in the YAML file at `path`, with ``section.key=value`` overrides on top; the last one wins.

    A relative ``model.path`` in the file is looked for in the current directory, then in the file's directory, then in
    that directory's parent; where it is in none of them it stays as written. Raises `ConfigError`.
    """
    name = os.fsdecode(path)
    return _build([_read_file(name), parse_overrides(overrides)], origin_of(name, overridden=bool(overrides)))


def make_config(source: str | os.PathLike[str] | Mapping[str, Any] | None = None, **sections: object) -> RunConfig:
    """A config from a YAML file or a mapping, and from section keyword arguments that override it key by key.

    Each section takes a mapping, or None for "not given". `layout` also takes ``"auto"``; `model` also takes a string:
    the path of a directory, or else the name of a model card. Naming one of ``model.path`` and ``model.card`` replaces
    the other. Raises `ConfigError`.
    """
    layers, origin = [], ""
    if isinstance(source, Mapping):
        layers.append(_place_model(source))
    elif isinstance(source, (str, os.PathLike)):
        name = os.fsdecode(source)
        layers.append(_read_file(name))
        origin = origin_of(name, overridden=any(section is not None for section in sections.values()))
    elif source is not None:
        raise ConfigError(f"a config is a YAML file's path or a mapping, not {show(source)}")
    return _build([*layers, _place_model(sections)], origin)


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """``["cache.page_tokens=16"]`` -> ``{"cache": {"page_tokens": 16}}``; each value is read as YAML."""
    layer: dict[Any, Any] = {}
    for override in overrides:
        dotted, equals, text = override.partition("=")
        dotted = dotted.strip()
        keys = dotted.split(".")
        origin = f"override {origin_of(dotted)}"
        if not equals or not all(keys):
            raise ConfigError(f"{origin} is not of the form key.path=value, such as cache.page_tokens=16")
        value = parse_yaml(text, origin)
        if value is None and len(keys) == 1:
            raise ConfigError(f"{origin} has no value; write {dotted}=value or {dotted}.key=value")
        for key in reversed(keys[1:]):
            value = {key: value}
        layer = _merge(layer, _place_model({keys[0]: value}))
    return layer


def config_to_dict(config: RunConfig) -> dict[str, Any]:
    """Plain mappings, strings and numbers; `make_config` of it is `config` again. Holds ``server.api_key``."""
    tree = config.model_dump(mode="python")
    if isinstance(config.layout, LayoutConfig):
        tree["layout"] = config.layout.sizes()
    return tree


def dump_yaml(config: RunConfig) -> str:
    """`config` as a YAML file that `load_config` reads back to the same value. Holds ``server.api_key``."""
    return yaml.safe_dump(config_to_dict(config), sort_keys=False)


_LAUNCH_NAMES: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchEnv:
    """What the launcher told this process: its place among the ranks, and where they meet."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    master_addr: str
    master_port: int


def launch_env(environ: Mapping[str, str] | None = None) -> LaunchEnv | None:
    """The launcher's variables from `environ` (default: the process environment), or None in a plain process.

    A process counts as launched when RANK, WORLD_SIZE or LOCAL_RANK is set; then all are needed. MASTER_ADDR and
    MASTER_PORT alone do not count: shells and clusters export them for other reasons. Raises `ConfigError`.
    """
    source = os.environ if environ is None else environ
    env = {name: source.get(name, "").strip() for name in _LAUNCH_NAMES}
    if not (env["RANK"] or env["WORLD_SIZE"] or env["LOCAL_RANK"]):
        return None
    env["LOCAL_SIZE"] = env["LOCAL_SIZE"] or source.get("LOCAL_WORLD_SIZE", "").strip()
    missing = [name for name in _LAUNCH_NAMES if not env[name]]
    if missing:
        found = ", ".join(name for name in _LAUNCH_NAMES if env[name])
        raise ConfigError(
            f"environment variable {', '.join(missing)} is not set although {found} is; "
            "start the ranks with `deepspeed`, or unset them to run in a plain process"
        )

    def number(name: str, low: int, high: int) -> int:
        text = env[name]
        if not re.fullmatch(r"-?[0-9]{1,9}", text) or not low <= int(text) <= high:
            raise ConfigError(
                f"environment variable {name}={show(text)} must be a whole number from {low} to {high}; "
                "the `deepspeed` launcher sets it"
            )
        return int(text)

    world_size = number("WORLD_SIZE", 1, 10**6)
    local_size = number("LOCAL_SIZE", 1, world_size)
    return LaunchEnv(
        rank=number("RANK", 0, world_size - 1),
        world_size=world_size,
        local_rank=number("LOCAL_RANK", 0, local_size - 1),
        local_size=local_size,
        master_addr=env["MASTER_ADDR"],
        master_port=number("MASTER_PORT", 1, 65535),
    )


# ---- layers: a file, then overrides or keyword arguments ----


def _merge(base: Mapping[Any, Any], layer: Mapping[Any, Any]) -> dict[Any, Any]:
    """`layer` over `base`, section by section and key by key; a section that is None says nothing."""
    merged = dict(base)
    for name, section in layer.items():
        below = merged.get(name)
        if section is None:
            merged.setdefault(name, None)
        elif isinstance(section, Mapping) and isinstance(below, Mapping):
            chosen = [key for key in ("path", "card") if name == "model" and section.get(key) is not None]
            kept = {key: value for key, value in below.items() if not chosen or key not in ("path", "card")}
            merged[name] = {**kept, **section}
        else:
            merged[name] = section
    return merged


def _place_model(layer: Mapping[Any, Any], directories: Sequence[Path] = (Path(),)) -> dict[Any, Any]:
    """`layer` with its model section as a mapping, and ``model.path`` found in the first of `directories` it is in."""
    placed = dict(layer)
    model = placed.get("model")
    if isinstance(model, os.PathLike):
        model = {"path": model}
    if isinstance(model, str):
        found = _find(model, directories)
        is_path = os.sep in model or model.startswith((".", "~")) or (found is not None and found.is_dir())
        placed["model"] = {"path": str(found or model)} if is_path else {"card": model}
    elif isinstance(model, Mapping) and isinstance(model.get("path"), (str, os.PathLike)):
        text = os.fsdecode(model["path"])
        placed["model"] = {**model, "path": str(_find(text, directories) or text)}
    return placed


def _find(text: str, directories: Sequence[Path]) -> Path | None:
    for directory in directories if text else ():
        try:
            candidate = directory / Path(text).expanduser()
            if candidate.exists():
                return candidate
        except (OSError, RuntimeError, ValueError):
            continue  # a name too long, an unknown ~user, a NUL byte: not there, as the loader will say
    return None


def _read_file(name: str) -> dict[Any, Any]:
    """The sections in the YAML file `name`, its ``model.path`` found."""
    content, origin = read_yaml(name), origin_of(name)
    if content is None:
        raise ConfigError(f"{origin}: is empty; it needs at least a model, such as: model: {{path: DIRECTORY}}")
    if not isinstance(content, dict):
        raise ConfigError(f"{origin}: is {kind_of(content)}; expected a mapping with the keys {', '.join(_SECTIONS)}")
    here = Path(name).parent.resolve()
    return _place_model(content, (Path(), here, here.parent))


# ---- checking, and saying what is wrong ----


def _build(layers: Iterable[Mapping[Any, Any]], origin: str) -> RunConfig:
    """Validate the merged `layers`; all problems go into one `ConfigError`."""
    tree: dict[Any, Any] = {}
    for layer in layers:
        tree = _merge(tree, layer)
    problems = [_unknown_key("", key) for key in tree if key not in _SECTIONS]
    parts: dict[str, Any] = {}
    for name, model in _SECTIONS.items():
        section = {} if tree.get(name) is None else tree[name]
        if isinstance(section, Mapping):
            unknown = [_unknown_key(name, key) for key in section if key not in model.model_fields]
            problems += unknown
            try:
                parts[name] = model.model_validate({k: v for k, v in section.items() if k in model.model_fields})
            except ValidationError as error:
                problems += _field_problems(name, error, whole_section=not unknown)
        elif name == "layout" and isinstance(section, str):
            parts[name] = section
            if section != "auto":
                problems.append(f"layout: {show(section)} {fault_of(section, ('auto',), None, set())}{_takes(name)}")
        else:
            problems.append(f"{name}: {show(section)} is {kind_of(section)}{_takes(name)}")
    if len(problems) > 1:
        raise ConfigError("\n  ".join([f"{origin or 'config'}: {len(problems)} problems", *problems]))
    if problems:
        raise ConfigError(f"{origin}: {problems[0]}" if origin else problems[0])
    return RunConfig(**parts)


def _takes(section: str) -> str:
    auto = "auto or " if section == "layout" else ""
    return f" (expected {auto}a mapping with the keys {', '.join(_SECTIONS[section].model_fields)})"


def _unknown_key(section: str, key: object) -> str:
    legal = list(_SECTIONS[section].model_fields if section else _SECTIONS)
    name = key if isinstance(key, str) and key.isprintable() and key else show(key)
    near = [f"{other}.{name}" for other, model in _SECTIONS.items() if name in model.model_fields]
    if not near:
        prefix = f"{section}." if section else ""
        near = [prefix + one for one in difflib.get_close_matches(name, legal, n=1, cutoff=0.5)]
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return f"{section + '.' if section else ''}{name}: unknown key{hint} (expected one of {', '.join(legal)})"


@functools.cache
def _field_schemas(section: str) -> Mapping[str, Mapping[str, Any]]:
    """The JSON schema of each field: the one source of the ranges and choices that messages give."""
    properties: dict[str, Mapping[str, Any]] = _SECTIONS[section].model_json_schema()["properties"]
    return properties


def _field_problems(section: str, error: ValidationError, *, whole_section: bool) -> list[str]:
    """One line per wrong field; rules over several fields only with `whole_section`, when no key is misspelt."""
    properties = _field_schemas(section)
    lines: dict[object, str] = {}
    for one in error.errors(include_url=False):
        field = str(one["loc"][0]) if one["loc"] else None
        if field is not None:  # a union reports each of its branches; one line is enough
            lines[field] = f"{section}.{field}: {explain(one['input'], properties[field])}"
        elif whole_section:
            lines[field] = f"{section}: {one['ctx']['error']}"
    return list(lines.values())
