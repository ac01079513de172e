"""Specs from config.json: transformers' own configs (v5 form), hand-written older ones, and every refusal."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from helix.errors import CheckpointError
from helix.model_spec import ModelSpec, RotarySpec
from model_zoo import generation_eos, load_spec, spec_from_config

CONFIGS: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}
SMALL: dict[str, Any] = {
    "vocab_size": 331,
    "hidden_size": 96,
    "intermediate_size": 224,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 640,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "hidden_act": "gelu_pytorch_tanh",
    "bos_token_id": 3,
    "eos_token_id": [7, 9],
    "dtype": "float32",
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 640, "rope_theta": 1000000.0}

LLAMA_2_7B = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "pretraining_tp": 2,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vocab_size": 32000,
}
LLAMA_31_405B = {
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 128,
    "num_hidden_layers": 126,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
SMOLLM2_135M = {
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 49152,
}
QWEN_25_7B_YARN = {
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 152064,
}


def small(model_type: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": model_type, **SMALL, **changes}


def as_tuple(ids: int | list[int] | None) -> tuple[int, ...]:
    return () if ids is None else tuple(ids) if isinstance(ids, list) else (ids,)


def check_against(spec: ModelSpec, config: Any) -> None:
    """Every number of `spec` that a transformers config has under its own name."""
    assert spec.model_type == config.model_type
    assert spec.num_layers == config.num_hidden_layers
    assert spec.hidden_size == config.hidden_size
    assert spec.num_heads == config.num_attention_heads
    assert spec.num_kv_heads == config.num_key_value_heads
    assert spec.head_dim == getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    assert spec.intermediate_size == config.intermediate_size
    assert spec.vocab_size == config.vocab_size
    assert spec.norm_eps == config.rms_norm_eps
    assert spec.activation == config.hidden_act
    assert spec.tie_embeddings == config.tie_word_embeddings
    assert spec.bos_token_id == config.bos_token_id
    assert spec.eos_token_ids == as_tuple(config.eos_token_id)
    assert spec.rotary.theta == config.rope_parameters["rope_theta"]
    assert spec.rotary.kind == config.rope_parameters["rope_type"]
    assert spec.rotary.dim == spec.head_dim


@pytest.mark.parametrize("form", ["dict", "file"])
@pytest.mark.parametrize("settings", [{}, SMALL, SMALL | {"rope_parameters": YARN}], ids=["defaults", "small", "yarn"])
@pytest.mark.parametrize("model_type", CONFIGS)
def test_configs_of_transformers(model_type: str, settings: dict[str, Any], form: str, tmp_path: Path) -> None:
    config = CONFIGS[model_type](**{k: dict(v) if isinstance(v, dict) else v for k, v in settings.items()})
    if form == "dict":
        spec = spec_from_config(config.to_dict())
    else:
        config.save_pretrained(tmp_path)
        spec = load_spec(tmp_path)
    check_against(spec, config)
    assert spec.dtype == ("float32" if settings else "bfloat16")
    assert not spec.mlp_bias
    assert spec.qkv_bias == (model_type == "qwen2")
    assert not spec.output_bias
    assert spec.qk_norm == (model_type == "qwen3")
    assert spec.mla is None
    assert spec.moe is None
    scaled = 4 if "rope_parameters" in settings else 1
    window = config.sliding_window if model_type == "mistral" else None
    assert spec.max_context == min(scaled * config.max_position_embeddings, window or 10**9)
    hash(spec)


@pytest.mark.parametrize("model_type", CONFIGS)
def test_absent_keys_take_the_defaults_of_transformers(model_type: str) -> None:
    assert spec_from_config({"model_type": model_type}) == spec_from_config(CONFIGS[model_type]().to_dict())


@pytest.mark.parametrize("model_type", CONFIGS)
def test_null_keys(model_type: str) -> None:
    """Null KV heads mean one per query head; null ids mean none; other nulls count as absent."""
    spec = spec_from_config(
        small(model_type, num_key_value_heads=None, head_dim=None, eos_token_id=None, bos_token_id=None, dtype=None)
    )
    assert spec.num_kv_heads == 6
    assert spec.head_dim == (128 if model_type == "qwen3" else 16)
    assert spec.eos_token_ids == ()
    assert spec.bos_token_id is None
    assert spec.dtype == "bfloat16"


def test_llama_2_7b() -> None:
    assert spec_from_config(LLAMA_2_7B) == ModelSpec(
        model_type="llama",
        num_layers=32,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        intermediate_size=11008,
        vocab_size=32000,
        max_context=4096,
        norm_eps=1e-5,
        rotary=RotarySpec(theta=10000.0, dim=128),
        dtype="float16",
        bos_token_id=1,
        eos_token_ids=(2,),
    )


def test_llama_31_405b() -> None:
    spec = spec_from_config(LLAMA_31_405B)
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (126, 128, 8, 128)
    assert spec.intermediate_size == 53248
    assert spec.max_context == 131072
    assert spec.eos_token_ids == (128001, 128008, 128009)
    assert spec.cache_values_per_token == 2 * 8 * 128
    assert spec.rotary == RotarySpec(
        theta=500000.0,
        dim=128,
        kind="llama3",
        parameters=(
            ("factor", 8.0),
            ("high_freq_factor", 4.0),
            ("low_freq_factor", 1.0),
            ("original_max_position_embeddings", 8192),
        ),
    )


def test_smollm2_135m() -> None:
    spec = spec_from_config(SMOLLM2_135M)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.tie_embeddings) == (9, 3, 64, True)
    assert spec.rotary == RotarySpec(theta=100000.0, dim=64)
    assert spec.max_context == 8192


def test_qwen_25_with_yarn_reaches_the_stretched_context() -> None:
    spec = spec_from_config(QWEN_25_7B_YARN)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (28, 4, 128)
    assert (spec.qkv_bias, spec.output_bias) == (True, False)
    assert spec.max_context == 131072
    assert spec.rotary == RotarySpec(
        theta=1000000.0,
        dim=128,
        kind="yarn",
        parameters=(("factor", 4.0), ("original_max_position_embeddings", 32768), ("truncate", True)),
    )
    assert spec_from_config(QWEN_25_7B_YARN | {"rope_scaling": None}).max_context == 32768


@pytest.mark.parametrize(
    ("scaling", "max_positions", "expected"),
    [
        ({"type": "linear", "factor": 4.0}, 4096, 16384),
        ({"type": "dynamic", "factor": 2}, 4096, 8192),
        ({"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}, 163840, 163840),
        ({"type": "yarn", "original_max_position_embeddings": 4096}, 16384, 16384),
        (LLAMA_31_405B["rope_scaling"], 131072, 131072),
    ],
)
def test_context_that_the_scaling_is_made_for(scaling: dict[str, Any], max_positions: int, expected: int) -> None:
    spec = spec_from_config(small("llama", rope_scaling=scaling, max_position_embeddings=max_positions))
    assert spec.max_context == expected


def test_dynamic_keeps_the_length_it_was_trained_for() -> None:
    spec = spec_from_config(small("llama", rope_scaling={"type": "dynamic", "factor": 2.0}))
    assert spec.max_context == 1280
    assert spec.rotary.get("original_max_position_embeddings") == 640


def test_yarn_factor_from_the_two_lengths() -> None:
    scaling = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 160}
    assert spec_from_config(small("llama", rope_scaling=scaling)).rotary.get("factor") == 4.0


def test_original_context_outside_the_rope_table_wins() -> None:
    hf = small("llama", rope_scaling=YARN, original_max_position_embeddings=320)
    assert spec_from_config(hf).rotary.get("original_max_position_embeddings") == 320
    config = LlamaConfig(**(hf | {"rope_scaling": dict(YARN)}))
    LlamaRotaryEmbedding(config)
    assert config.rope_parameters["original_max_position_embeddings"] == 320


def test_rope_tables_old_and_new_together() -> None:
    new = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5, "original_max_position_embeddings": 640}
    old = {"type": "yarn", "factor": 4.0}
    both = spec_from_config(small("llama", rope_parameters=new, rope_scaling=old))
    assert both == spec_from_config(small("llama", rope_parameters=new))
    with pytest.raises(CheckpointError, match=r"rope_scaling\.factor is 2\.0; it must be 4\.0"):
        spec_from_config(small("llama", rope_parameters=new, rope_scaling={"type": "yarn", "factor": 2.0}))


def test_rope_theta_in_the_table_wins() -> None:
    hf = small("llama", rope_theta=20000.0, rope_parameters={"rope_type": "default", "rope_theta": 30000.0})
    assert spec_from_config(hf).rotary.theta == 30000.0
    assert LlamaConfig(**hf).rope_parameters["rope_theta"] == 30000.0


def test_rope_keys_that_are_not_read_are_named(caplog: pytest.LogCaptureFixture) -> None:
    scaling = {"type": "linear", "factor": 2.0, "finetuned": True}
    with caplog.at_level(logging.WARNING):
        spec_from_config(small("llama", rope_scaling=scaling))
    assert "rope_scaling.finetuned" in caplog.text


def test_partial_rotary_factor() -> None:
    assert spec_from_config(small("llama", partial_rotary_factor=0.5)).rotary.dim == 8
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    assert spec_from_config(small("qwen3", head_dim=32, rope_parameters=rope)).rotary.dim == 8


@pytest.mark.parametrize("attention_bias", [False, True])
def test_biases(attention_bias: bool) -> None:
    llama = spec_from_config(small("llama", attention_bias=attention_bias, mlp_bias=True))
    assert (llama.qkv_bias, llama.output_bias, llama.mlp_bias) == (attention_bias, attention_bias, True)
    qwen3 = spec_from_config(small("qwen3", attention_bias=attention_bias))
    assert (qwen3.qkv_bias, qwen3.output_bias) == (attention_bias, attention_bias)
    qwen2 = spec_from_config(small("qwen2", attention_bias=attention_bias))
    assert (qwen2.qkv_bias, qwen2.output_bias) == (True, False)
    mistral = spec_from_config(small("mistral", attention_bias=attention_bias))
    assert (mistral.qkv_bias, mistral.output_bias) == (False, False)


@pytest.mark.parametrize(
    ("key", "value"), [("dtype", "float16"), ("torch_dtype", "float16"), ("dtype", "torch.float16")]
)
def test_dtype_keys(key: str, value: str) -> None:
    hf = {k: v for k, v in small("llama").items() if k != "dtype"}
    assert spec_from_config(hf | {key: value}).dtype == "float16"
    assert spec_from_config(hf | {"torch_dtype": "float32", key: value}).dtype == "float16"


def test_ids_outside_the_vocabulary_are_left_out() -> None:
    spec = spec_from_config(small("llama", eos_token_id=[7, -1, 331, 7, 330], bos_token_id=-1))
    assert spec.eos_token_ids == (7, 330)
    assert spec.bos_token_id is None


def test_mistral_window_limits_the_context(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert spec_from_config(small("mistral", sliding_window=None)).max_context == 640
        assert spec_from_config(small("mistral", sliding_window=640)).max_context == 640
        assert spec_from_config(small("mistral")).max_context == 640
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert spec_from_config(small("mistral", sliding_window=100)).max_context == 100
    assert "sliding_window 100" in caplog.text
    assert "640" in caplog.text
    absent = {k: v for k, v in small("mistral").items() if k != "max_position_embeddings"}
    assert spec_from_config(absent).max_context == 4096


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_qwen_windows(model_type: str) -> None:
    used = {"use_sliding_window": True, "sliding_window": 64}
    assert spec_from_config(small(model_type, **used, max_window_layers=3)).max_context == 640
    assert spec_from_config(small(model_type, use_sliding_window=False, sliding_window=64)).max_context == 640
    assert spec_from_config(small(model_type, use_sliding_window=True, sliding_window=None)).max_context == 640
    for layers in (0, 2):
        with pytest.raises(CheckpointError, match="use_sliding_window is True; it must be false"):
            spec_from_config(small(model_type, **used, max_window_layers=layers))
    config = CONFIGS[model_type](**SMALL, **used, max_window_layers=2)
    with pytest.raises(CheckpointError, match="layer_types"):
        spec_from_config(config.to_dict())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "tanh"}, r"hidden_act is 'tanh'; it must be one of silu, gelu, gelu_pytorch_tanh, relu"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, r"quantization_config .*'awq'"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compression_config.*'compressed-tensors'"),
        ({"dtype": "float64"}, "dtype is 'float64'; it must be one of bfloat16, float16, float32"),
        ({"dtype": None, "torch_dtype": "int8"}, "torch_dtype is 'int8'"),
        ({"vocab_size": "331"}, "vocab_size is '331'; it must be an integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"intermediate_size": 224.0}, "intermediate_size is 224.0"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'; it must be true or false"),
        ({"num_key_value_heads": 4}, r"num_key_value_heads is 4; it must be a divisor of num_attention_heads \(6\)"),
        ({"eos_token_id": "2"}, "eos_token_id is '2'; it must be a token id or a list"),
        ({"eos_token_id": [2, None]}, "eos_token_id"),
        ({"eos_token_id": True}, "eos_token_id"),
        ({"rope_scaling": [1]}, r"rope_scaling is \[1\]; it must be an object"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0; it must be a number above 1"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_type is 'longrope'; .*default, linear, dynamic"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "rope_parameters.rope_type is 'proportional'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters.full_attention"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling.rope_type is None; .*factor"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {"type": "dynamic", "factor": "2"}}, "rope_scaling.factor is '2'"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}}, "low_freq_factor is missing"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}},
            "high_freq_factor is 4.0; it must be above 4.0",
        ),
        ({"rope_scaling": YARN | {"truncate": 1}}, "truncate is 1; it must be true or false"),
        ({"rope_scaling": YARN | {"attention_factor": -0.5}}, "attention_factor is -0.5"),
        ({"partial_rotary_factor": 0.3, "head_dim": 10}, "partial_rotary_factor 0.3 of head_dim 10 gives 3"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5"),
        ({"head_dim": 15}, "head_dim 15 gives 15 rotary dims; it must be an even number"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    spec_from_config(small("llama"))
    for model_type in CONFIGS:
        with pytest.raises(CheckpointError, match=message):
            spec_from_config(small(model_type, **changes))


def test_hidden_size_must_divide_where_head_dim_is_not_given() -> None:
    with pytest.raises(
        CheckpointError, match=r"hidden_size is 100; it must be a multiple of num_attention_heads \(6\)"
    ):
        spec_from_config(small("llama", hidden_size=100))
    assert spec_from_config(small("llama", hidden_size=100, head_dim=16)).head_dim == 16


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        (None, "model_type is missing; supported are .*llama, mistral, .*qwen2, qwen3"),
        ("qwen", r"model_type 'qwen' is not supported; supported are .*llama.*\(nearest: qwen"),
        ("gpt2", "'gpt2' is not supported; supported are .*llama, mistral, .*qwen2, qwen3"),
        (7, "model_type 7 is not supported"),
        (["llama"], "is not supported"),
    ],
)
def test_model_types(model_type: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        spec_from_config({"model_type": model_type})


def write(directory: Path, name: str, value: object) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")


def test_load_spec_reads_the_file(tmp_path: Path) -> None:
    write(tmp_path, "config.json", LLAMA_31_405B)
    assert load_spec(tmp_path) == spec_from_config(LLAMA_31_405B)
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(SMOLLM2_135M).encode())
    assert load_spec(tmp_path) == spec_from_config(SMOLLM2_135M)


def test_missing_directory_names_the_nearest(tmp_path: Path) -> None:
    write(tmp_path / "llama-3.1-8b", "config.json", LLAMA_2_7B)
    with pytest.raises(CheckpointError, match=r"llama-3\.1-8 does not exist; nearest in .*: llama-3\.1-8b"):
        load_spec(tmp_path / "llama-3.1-8")
    with pytest.raises(CheckpointError, match=r"does not exist; neither does .*nowhere"):
        load_spec(tmp_path / "nowhere" / "llama")
    with pytest.raises(CheckpointError, match=r"config\.json is not a directory"):
        load_spec(tmp_path / "llama-3.1-8b" / "config.json")


def test_missing_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json$"):
        load_spec(tmp_path)
    write(tmp_path / "snapshots" / "abc", "config.json", LLAMA_2_7B)
    with pytest.raises(CheckpointError, match=r"has no config\.json; there is one in .*snapshots/abc"):
        load_spec(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_type": "llama",', r"config\.json is not valid JSON: .*line 1"),
        ("", r"config\.json is not valid JSON"),
        ("[1, 2]", r"config\.json holds a JSON list; it must be an object"),
        ("[" * 100_000, r"config\.json is not valid JSON"),
        ('{"model_type": "llama", "vocab_size": 0}', r"config\.json: vocab_size is 0"),
        ('{"model_type": "lama"}', r"config\.json: model_type 'lama' .*nearest: llama"),
    ],
)
def test_broken_config(tmp_path: Path, text: str, message: str) -> None:
    write(tmp_path, "config.json", text)
    with pytest.raises(CheckpointError, match=message):
        load_spec(tmp_path)


def test_config_in_another_encoding(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b'{"model_type": "\xff\xfe"}')
    with pytest.raises(CheckpointError, match="not valid JSON"):
        load_spec(tmp_path)


@pytest.mark.parametrize(
    ("config_eos", "generation", "expected"),
    [
        (7, None, (7,)),
        (7, {}, (7,)),
        (7, {"eos_token_id": 9}, (9, 7)),
        ([7, 9], {"eos_token_id": [9, 11]}, (9, 11, 7)),
        (None, {"eos_token_id": 9}, (9,)),
        (7, {"eos_token_id": None}, (7,)),
        ("absent", {"eos_token_id": [300]}, (300,)),
        ("absent", {}, (2,)),
        ("absent", None, (2,)),
    ],
)
def test_generation_eos(tmp_path: Path, config_eos: object, generation: object, expected: tuple[int, ...]) -> None:
    hf = small("llama", eos_token_id=config_eos)
    if config_eos == "absent":
        del hf["eos_token_id"]
    write(tmp_path, "config.json", hf)
    if generation is not None:
        write(tmp_path, "generation_config.json", generation)
    assert generation_eos(tmp_path) == expected


@pytest.mark.parametrize(
    ("generation", "message"),
    [("{", "not valid JSON"), ("3", "must be an object"), ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'")],
)
def test_broken_generation_config(tmp_path: Path, generation: object, message: str) -> None:
    write(tmp_path, "config.json", small("llama"))
    write(tmp_path, "generation_config.json", generation)
    with pytest.raises(CheckpointError, match=rf"generation_config\.json.*{message}"):
        generation_eos(tmp_path)
