"""Reading a Hugging Face ``config.json`` strictly: typed keys, rotary settings, and the numbers dense models share.

Every family file in this package builds its `ModelSpec` with these helpers. An absent or null key takes the default
of the family's transformers config class; a value of the wrong type, or a setting that would change the arithmetic in
a way that is not supported, raises `CheckpointError` naming the key and what would be right.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from helix.errors import CheckpointError
from helix.model_spec import ModelSpec, RotarySpec

logger = logging.getLogger(__name__)

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
DTYPES = ("bfloat16", "float16", "float32")

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]
ORIGINAL_CONTEXT = "original_max_position_embeddings"
_REQUIRED_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_YARN_NUMBERS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_READ_ELSEWHERE = {"rope_type", "rope_theta", "partial_rotary_factor", ORIGINAL_CONTEXT, *_YARN_NUMBERS}


@dataclass(frozen=True, slots=True)
class ConfigReader:
    """Typed access to the keys of one JSON object; `prefix` is put before keys in messages."""

    values: Mapping[str, Any]
    prefix: str = ""

    def given(self, key: str) -> bool:
        """Whether `key` is there and not null."""
        return self.values.get(key) is not None

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """An integer of at least `minimum`."""
        right = f"an integer of at least {minimum}"
        value = self._value(key, default, right)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(key, value, right)
        return value

    def number(self, key: str, default: float | None = None, *, above: float = 0.0) -> float:
        """A finite number greater than `above`."""
        right = f"a number above {above:g}"
        value = self._value(key, default, right)
        if isinstance(value, bool) or not isinstance(value, int | float) or not above < value < math.inf:
            raise self.error(key, value, right)
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default, "true or false")
        if not isinstance(value, bool):
            raise self.error(key, value, "true or false")
        return value

    def choice(self, key: str, default: str, supported: tuple[str, ...]) -> str:
        """One of the strings `supported`."""
        value = self._value(key, default, _one_of(supported))
        if not isinstance(value, str) or value not in supported:
            raise self.error(key, value, _one_of(supported))
        return value

    def table(self, key: str) -> Mapping[str, Any]:
        """A JSON object; empty where the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.error(key, value, "an object or null")
        return value

    def token_ids(self, key: str, default: int | None, vocab_size: int) -> tuple[int, ...]:
        """Token ids given as an integer, a list of integers or null (none); `default` where the key is absent.

        Ids outside the vocabulary can never be sampled (-1 stands for "none" in some checkpoints) and are left out.
        """
        value = self.values.get(key, default)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) for item in ids):
            raise self.error(key, value, "a token id or a list of token ids")
        return tuple(dict.fromkeys(item for item in ids if 0 <= item < vocab_size))

    def error(self, key: str, value: object, right: str) -> CheckpointError:
        return CheckpointError(f"{self.prefix}{key} is {value!r}; it must be {right}")

    def _value(self, key: str, default: object, right: str) -> object:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self.prefix}{key} is missing; it must be {right}")
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseDefaults:
    """What a family's transformers config class assumes for absent keys.

    `num_kv_heads` None means as many as query heads; `head_dim` None means hidden_size / num_heads.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    max_context: int
    num_layers: int = 32
    num_heads: int = 32
    num_kv_heads: int | None = None
    head_dim: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None


def dense_spec(config: ConfigReader, model_type: str, defaults: DenseDefaults) -> ModelSpec:
    """The part of `ModelSpec` that llama, mistral, qwen2 and qwen3 read alike; biases and q/k norm are the family's."""
    hidden_size = config.integer("hidden_size", defaults.hidden_size)
    num_heads = config.integer("num_attention_heads", defaults.num_heads)
    head_dim = _head_dim(config, hidden_size, num_heads, defaults.head_dim)
    max_positions = config.integer("max_position_embeddings", defaults.max_context)
    rotary = rotary_spec(config, head_dim, max_positions)
    vocab_size = config.integer("vocab_size", defaults.vocab_size)
    bos = config.token_ids("bos_token_id", defaults.bos_token_id, vocab_size)
    return ModelSpec(
        model_type=model_type,
        num_layers=config.integer("num_hidden_layers", defaults.num_layers),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(config, num_heads, defaults.num_kv_heads),
        head_dim=head_dim,
        intermediate_size=config.integer("intermediate_size", defaults.intermediate_size),
        vocab_size=vocab_size,
        max_context=context_limit(rotary, max_positions),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        rotary=rotary,
        activation=config.choice("hidden_act", "silu", ACTIVATIONS),
        tie_embeddings=config.flag("tie_word_embeddings", False),
        dtype=weight_dtype(config),
        fp8_block=fp8_block(config),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=config.token_ids("eos_token_id", defaults.eos_token_id, vocab_size),
    )


def fp8_block(config: ConfigReader) -> tuple[int, int] | None:
    """Rows and columns that share a scale in a checkpoint of FP8 weights; None where the weights are not quantised.

    `quant_method` ``fp8`` names its blocks; ``compressed-tensors`` in FP8 has a scale for blocks, for each row (one row
    here, in blocks of 128 columns) or for a whole tensor (blocks of 128 x 128, that share it). Which tensors are FP8
    their dtype says, tensor by tensor; so the lists of those that are stored as they are need no reading.

    Raises: CheckpointError for any other quantisation.
    """
    for key in ("quantization_config", "compression_config"):
        table = config.table(key)
        if not table:
            continue
        method = table.get("quant_method", "unknown")
        if method == "compressed-tensors":
            return _compressed_block(ConfigReader(table, f"{config.prefix}{key}."))
        if method != "fp8":
            raise CheckpointError(
                f"{config.prefix}{key} says that the weights are quantised (quant_method {method!r}); supported are "
                "quant_method 'fp8' with weight_block_size, 'compressed-tensors' in FP8, and unquantised checkpoints "
                f"in {_one_of(DTYPES)}"
            )
        size = table.get("weight_block_size")
        if not (isinstance(size, list) and len(size) == 2 and all(type(one) is int and one > 0 for one in size)):
            right = "the size of the blocks that share a scale, such as [128, 128]; other FP8 forms are not supported"
            raise ConfigReader(table, f"{config.prefix}{key}.").error("weight_block_size", size, right)
        return size[0], size[1]
    return None


def _compressed_block(table: ConfigReader) -> tuple[int, int]:
    """`fp8_block` of a ``compressed-tensors`` section, whose groups must agree."""
    found: set[tuple[int, int]] = set()
    for name, group in table.table("config_groups").items():
        at = f"{table.prefix}config_groups.{name}.weights."
        weights = ConfigReader((group or {}).get("weights") or {}, at)
        if (weights.values.get("type"), weights.values.get("num_bits")) != ("float", 8):
            raise CheckpointError(
                f"{at[:-1]} (quant_method 'compressed-tensors') has num_bits {weights.values.get('num_bits')!r} and "
                f"type {weights.values.get('type')!r}; supported is FP8 (num_bits 8, type 'float')"
            )
        strategy = weights.choice("strategy", "tensor", ("tensor", "channel", "block"))
        size = (
            weights.values.get("block_structure") if strategy == "block" else [128 if strategy == "tensor" else 1, 128]
        )
        if not (isinstance(size, list) and len(size) == 2 and all(type(one) is int and one > 0 for one in size)):
            raise weights.error(
                "block_structure", size, "the size of the blocks that share a scale, such as [128, 128]"
            )
        found.add((size[0], size[1]))
    if len(found) != 1:
        right = "groups of layers whose FP8 weights are scaled alike"
        raise table.error("config_groups", sorted(found), f"{right} (quant_method 'compressed-tensors')")
    return found.pop()


def refuse_sliding_layers(config: ConfigReader, num_layers: int) -> None:
    """Raise if any layer of a Qwen2-style config (`use_sliding_window`, `layer_types`) attends to a window only."""
    layer_types = config.values.get("layer_types")
    if layer_types is not None:
        if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
            raise config.error("layer_types", layer_types, "a list of 'full_attention' only")
        return
    windowed = config.flag("use_sliding_window", False) and config.values.get("sliding_window", 4096) is not None
    if windowed and config.integer("max_window_layers", 28, minimum=0) < num_layers:
        raise config.error("use_sliding_window", True, "false: attention over a window is not supported")


def weight_dtype(config: ConfigReader) -> str:
    """`dtype` (or the older `torch_dtype`), with or without "torch." before it; bfloat16 where neither is given."""
    key = "dtype" if config.given("dtype") else "torch_dtype"
    value = config.values.get(key)
    if isinstance(value, str):
        value = value.removeprefix("torch.")
    return ConfigReader({key: value}, config.prefix).choice(key, "bfloat16", DTYPES)


def rotary_spec(
    config: ConfigReader, head_dim: int, max_positions: int, *, theta: float = 10000.0, interleaved: bool = False
) -> RotarySpec:
    """Rotary settings from ``rope_theta`` + ``rope_scaling`` or from transformers v5's ``rope_parameters``.

    `head_dim` is the width that ``partial_rotary_factor`` is a share of (qk_rope_head_dim for MLA), `max_positions` the
    config's max_position_embeddings, `theta` the family's default. The returned parameters are complete: every number
    that a kind reads is there, so nothing else of the config is needed to compute frequencies.

    A ``partial_rotary_factor`` is honoured for every kind; transformers' llama, mistral and qwen classes ignore it for
    ``default`` and fail on it for the others.
    """
    rope = _rope_table(config)
    kind = cast(RopeKind, rope.choice("rope_type", "default", get_args(RopeKind)))
    base = rope if rope.given("rope_theta") else config
    share = rope if rope.given("partial_rotary_factor") else config
    factor = share.number("partial_rotary_factor", 1.0)
    dim = int(head_dim * factor)
    if factor > 1 or dim < 2 or dim % 2 or (kind == "dynamic" and dim == 2):
        raise CheckpointError(
            f"partial_rotary_factor {factor:g} of head_dim {head_dim} gives {dim} rotary dims; "
            f"it must be an even number from {4 if kind == 'dynamic' else 2} to {head_dim}"
        )
    return RotarySpec(
        theta=float(base.number("rope_theta", theta, above=1.0)),
        dim=dim,
        kind=kind,
        parameters=tuple(sorted(_rope_parameters(config, rope, kind, max_positions).items())),
        interleaved=interleaved,
    )


def context_limit(rotary: RotarySpec, max_positions: int) -> int:
    """Longest sequence the rotary settings are made for, in tokens.

    `linear` and `dynamic` leave max_position_embeddings at the trained length and stretch it by `factor`; `yarn`
    stretches its original length, and max_position_embeddings may or may not have been raised to match; for `llama3` it
    has been.
    """
    factor = rotary.get("factor", 1.0) or 1.0
    if rotary.kind in ("linear", "dynamic"):
        return max(max_positions, int(max_positions * factor))
    if rotary.kind == "yarn":
        return max(max_positions, int((rotary.get(ORIGINAL_CONTEXT) or 0) * factor))
    return max_positions


def _rope_table(config: ConfigReader) -> ConfigReader:
    """Old and new rope keys as one table; where both tables are given they must agree."""
    old, new = _normal_rope(config, "rope_scaling"), _normal_rope(config, "rope_parameters")
    for key in sorted(old.keys() & new.keys()):
        if old[key] != new[key]:
            raise config.error(f"rope_scaling.{key}", old[key], f"{new[key]!r} as in rope_parameters, or left out")
    rope = ConfigReader({**new, **old}, config.prefix + ("rope_scaling." if old else "rope_parameters."))
    if rope.given("factor") and not rope.given("rope_type"):
        raise rope.error("rope_type", None, _one_of(get_args(RopeKind)) + ", as a factor is given")
    return rope


def _normal_rope(config: ConfigReader, name: str) -> dict[str, Any]:
    """One rope table without nulls, its kind under ``rope_type`` ("type" is the older name and yields to it)."""
    table = {key: value for key, value in config.table(name).items() if value is not None}
    for key, value in table.items():
        if isinstance(value, dict):
            raise config.error(f"{name}.{key}", value, "a number: rotary settings per kind of layer are not supported")
    if "type" in table:
        table.setdefault("rope_type", table["type"])
        del table["type"]
    return table


def _rope_parameters(
    config: ConfigReader, rope: ConfigReader, kind: RopeKind, max_positions: int
) -> dict[str, float | bool]:
    """The numbers that `kind` reads; keys it does not read are named in the log and dropped."""
    found: dict[str, float | bool] = {key: rope.number(key) for key in _REQUIRED_NUMBERS.get(kind, ())}
    if kind == "dynamic":
        found[ORIGINAL_CONTEXT] = max_positions
    elif kind in ("llama3", "yarn"):
        original = config if config.given(ORIGINAL_CONTEXT) else rope
        found[ORIGINAL_CONTEXT] = original.integer(ORIGINAL_CONTEXT, max_positions)
    if kind == "yarn":
        found["factor"] = rope.number("factor", max_positions / found[ORIGINAL_CONTEXT])
        found["truncate"] = rope.flag("truncate", True)
        # transformers reads a zero in these as "not given".
        found |= {key: rope.number(key) for key in _YARN_NUMBERS if rope.values.get(key)}
    if kind == "llama3" and found["low_freq_factor"] >= found["high_freq_factor"]:
        raise rope.error("high_freq_factor", found["high_freq_factor"], f"above {found['low_freq_factor']}")
    ignored = rope.values.keys() - found.keys() - _READ_ELSEWHERE
    if ignored:
        logger.warning("%s%s: not read by rope type %r", rope.prefix, ", ".join(sorted(ignored)), kind)
    return found


def _head_dim(config: ConfigReader, hidden_size: int, num_heads: int, default: int | None) -> int:
    if default is None and not config.given("head_dim"):
        if hidden_size % num_heads:
            raise config.error("hidden_size", hidden_size, f"a multiple of num_attention_heads ({num_heads})")
        default = hidden_size // num_heads
    return config.integer("head_dim", default)


def _num_kv_heads(config: ConfigReader, num_heads: int, default: int | None) -> int:
    """An absent key takes the family's default; null has always meant multi-head attention."""
    if default is None or "num_key_value_heads" in config.values:
        default = num_heads
    num_kv_heads = config.integer("num_key_value_heads", default)
    if num_heads % num_kv_heads:
        raise config.error("num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads ({num_heads})")
    return num_kv_heads


def _one_of(options: tuple[str, ...]) -> str:
    return "one of " + ", ".join(options)
