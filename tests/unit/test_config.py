"""helix/config.py: what is accepted, what it becomes, and that every refusal names field, value and remedy."""

from __future__ import annotations

import itertools
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from helix.config import (
    LaunchEnv,
    LayoutConfig,
    RunConfig,
    config_to_dict,
    dump_yaml,
    launch_env,
    load_config,
    make_config,
    parse_overrides,
)
from helix.errors import ConfigError

REPO = Path(__file__).resolve().parents[2]
MODEL = {"card": "tiny"}
SECTIONS = ("model", "layout", "cache", "comm", "engine", "server")


def write(tmp_path: Path, text: str, name: str = "run.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def refusal(*args: Any, **sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        make_config(*args, **sections)
    return str(caught.value)


def file_refusal(tmp_path: Path, text: str, overrides: Sequence[str] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text), overrides)
    return str(caught.value)


# ---- what is accepted ----


def test_defaults_are_the_documented_ones() -> None:
    tree = config_to_dict(make_config(model=MODEL))
    assert tree == {
        "model": {
            "path": None,
            "card": "tiny",
            "dtype": "auto",
            "load": "safetensors",
            "num_layers": None,
            "quantize": "auto",
        },
        "layout": "auto",
        "cache": {
            "page_tokens": 64,
            "num_page_rows": "auto",
            "memory_fraction": 0.9,
            "dtype": "auto",
            "prefix_reuse": True,
        },
        "comm": {
            "transport": "auto",
            "merge": "a2a",
            "overlap": "auto",
            "query": "auto",
            "exchange_space": "auto",
            "dispatch": "auto",
            "shared_projections": "auto",
        },
        "engine": {
            "device": "auto",
            "max_batch": 64,
            "max_context": "auto",
            "prefill_chunk": 2048,
            "graphs": "auto",
            "ahead": "auto",
            "seed": 0,
            "check_schedule": False,
            "stall_timeout_s": 20.0,
        },
        "server": {
            "host": "127.0.0.1",
            "port": 8000,
            "api_key": None,
            "model_name": None,
            "max_queue": 256,
            "request_timeout_s": 600.0,
            "max_body_bytes": 32 << 20,
        },
    }


def test_layout_keeps_only_what_was_given() -> None:
    layout = make_config(model=MODEL, layout={"kvp": 4, "duplicate_kv": False}).layout
    assert isinstance(layout, LayoutConfig)
    assert (layout.kvp, layout.tpa, layout.tpf, layout.ep) == (4, None, None, None)
    assert layout.sizes() == {"kvp": 4}
    baseline = make_config(model=MODEL, layout={"tpa": 4, "duplicate_kv": True}).layout
    assert isinstance(baseline, LayoutConfig)
    assert baseline.sizes() == {"tpa": 4, "duplicate_kv": True}


@pytest.mark.parametrize("empty", [{}, {"kvp": None}, {"duplicate_kv": False}, None, "auto"])
def test_a_layout_without_sizes_is_auto(empty: object) -> None:
    assert make_config(model=MODEL, layout=empty).layout == "auto"


def test_a_section_with_nothing_in_it_has_its_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {card: tiny}\ncache:\n  # page_tokens: 16\nlayout:\n")
    assert load_config(path) == make_config(model=MODEL)


@pytest.mark.parametrize(
    ("text", "name"),
    [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32"), ("bfloat16", "bfloat16"), ("auto", "auto")],
)
def test_dtype_aliases(text: str, name: str) -> None:
    config = make_config(model={**MODEL, "dtype": text}, cache={"dtype": text})
    assert (config.model.dtype, config.cache.dtype) == (name, name)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("auto", "auto"), ("4096", 4096), ("128K", 131072), ("128k", 131072), ("1M", 1048576), ("1_000", 1000)],
)
def test_max_context_takes_units(tmp_path: Path, text: str, tokens: object) -> None:
    path = write(tmp_path, f"model: {{card: tiny}}\nengine: {{max_context: {text}}}\n")
    assert load_config(path).engine.max_context == tokens


@pytest.mark.parametrize(("text", "overlap"), [("off", "off"), ('"off"', "off"), ("auto", "auto"), ("4", 4)])
def test_overlap_survives_yaml_booleans(tmp_path: Path, text: str, overlap: object) -> None:
    assert load_config(write(tmp_path, f"model: tiny\ncomm: {{overlap: {text}}}\n")).comm.overlap == overlap


@pytest.mark.parametrize(("text", "graphs"), [("off", "off"), ("on", "on"), ('"on"', "on"), ("auto", "auto")])
def test_graphs_survives_yaml_booleans(tmp_path: Path, text: str, graphs: str) -> None:
    assert load_config(write(tmp_path, f"model: tiny\nengine: {{graphs: {text}}}\n")).engine.graphs == graphs


def test_whole_numbers_are_fine_where_a_fraction_is_taken() -> None:
    assert make_config(model=MODEL, engine={"stall_timeout_s": 28}, cache={"memory_fraction": 1}).cache.memory_fraction


def test_byte_order_mark_and_merge_keys(tmp_path: Path) -> None:
    text = "\ufeffmodel: {card: tiny}\ncache: &c {page_tokens: 8, dtype: fp32}\n"
    assert load_config(write(tmp_path, text)).cache.page_tokens == 8
    merged = "model:\n  <<: {card: tiny, dtype: fp32}\n  dtype: fp16\n"
    assert load_config(write(tmp_path, merged)).model.dtype == "float16"


def test_import_is_light() -> None:
    code = "import sys, helix.config; sys.exit(int(bool({'torch', 'deepspeed'} & set(sys.modules))))"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO, check=False).returncode == 0


# ---- layers ----


def test_keywords_override_a_file_key_by_key(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {card: tiny, dtype: fp16}\ncache: {page_tokens: 8, prefix_reuse: false}\n")
    config = make_config(path, cache={"page_tokens": 16}, model={"dtype": "fp32"}, engine=None)
    assert (config.cache.page_tokens, config.cache.prefix_reuse) == (16, False)
    assert (config.model.card, config.model.dtype) == ("tiny", "float32")
    assert make_config(str(path), layout={"kvp": 2}).layout == LayoutConfig(kvp=2)
    assert make_config(write(tmp_path, "model: tiny\nlayout: {kvp: 2}\n"), layout="auto").layout == "auto"


def test_a_mapping_is_a_source() -> None:
    config = make_config({"model": "tiny", "cache": {"page_tokens": 8}}, cache={"prefix_reuse": False})
    assert (config.cache.page_tokens, config.cache.prefix_reuse) == (8, False)


def test_choosing_a_model_replaces_the_other_choice(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {card: tiny, load: dummy}\n")
    for config in (make_config(path, model={"path": "x/y"}), load_config(path, ["model.path=x/y"])):
        assert (config.model.path, config.model.card, config.model.load) == ("x/y", None, "dummy")
    assert make_config(path, model="other").model.card == "other"
    assert make_config(path, model=str(tmp_path)).model.path == str(tmp_path)
    assert "both are given" in refusal(path, model={"path": "x", "card": "y"})


def test_model_as_text_is_a_directory_or_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    assert make_config(model="here").model.path == "here"
    assert make_config(model="there").model.card == "there"
    assert make_config(model="./there").model.path == "./there"
    assert make_config(model=tmp_path / "gone").model.path == str(tmp_path / "gone")
    assert make_config(model={"path": tmp_path}).model.path == str(tmp_path)
    assert make_config(model="~no-such-user/there").model.path == "~no-such-user/there"
    assert make_config(model={"path": "x" * 5000}).model.path == "x" * 5000
    assert make_config(model="~\0/there").model.path == "~\0/there"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert make_config(model="~/here").model.path == str(tmp_path / "here")


def test_overrides(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {card: tiny}\ncache: {page_tokens: 8}\n")
    chosen = [
        "cache.page_tokens=16",
        "layout={kvp: 2, tpa: 1}",
        "comm.overlap=off",
        "engine.graphs=on",
        "cache.dtype=bf16",
    ]
    config = load_config(
        path, [*chosen, "cache.page_tokens=32", "layout.kvp=3", "server.api_key=a=b", "engine.max_context=1M"]
    )
    assert (config.cache.page_tokens, config.cache.dtype, config.comm.overlap) == (32, "bfloat16", "off")
    assert config.layout == LayoutConfig(kvp=3, tpa=1)
    assert (config.server.api_key, config.engine.graphs, config.engine.max_context) == ("a=b", "on", 1 << 20)
    assert load_config(path, ["layout.kvp=3", "layout=auto"]).layout == "auto"
    assert make_config(None, **parse_overrides(["model=tiny", "model.dtype=fp32"])).model.dtype == "float32"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("cache.page_token=16", ["cache.page_token: unknown key", "did you mean cache.page_tokens?"]),
        ("cach.page_tokens=16", ["cach: unknown key", "did you mean cache?"]),
        ("port=80", ["port: unknown key", "did you mean server.port?"]),
        ("cache.page_tokens.x=16", ["cache.page_tokens: {'x': 16} is a mapping", "a whole number"]),
        ("cache.page_tokens", ["cache.page_tokens is not of the form key.path=value"]),
        ("=3", ["not of the form key.path=value"]),
        ("cache.=3", ["cache. is not of the form"]),
        ("layout=", ["layout has no value"]),
        ("cache.page_tokens=", ["cache.page_tokens: null is no value"]),
        ('cache.page_tokens="8"', ['cache.page_tokens: "8" is text', "write 8 without quotes"]),
        ("layout={kvp: 2, kvp: 3}", ["override layout, line 1", "duplicate key kvp"]),
        ("layout={kvp: 2", ["override layout, line 1"]),
    ],
)
def test_bad_overrides(tmp_path: Path, override: str, words: list[str]) -> None:
    message = file_refusal(tmp_path, "model: tiny\n", [override])
    assert all(word in message for word in words), message


# ---- where the model is ----


def test_model_path_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    (project / "configs").mkdir(parents=True)
    elsewhere.mkdir()
    path = write(project / "configs", "model: {path: models/m}\n")
    monkeypatch.chdir(elsewhere)
    assert load_config(path).model.path == "models/m"
    for base in (project, project / "configs"):  # later ones are nearer
        (base / "models" / "m").mkdir(parents=True)
        assert load_config(path).model.path == str(base / "models" / "m")
        assert load_config(os.path.relpath(path)).model.path == str(base / "models" / "m")
    assert load_config(path, ["model.path=models/m"]).model.path == "models/m"
    (elsewhere / "models" / "m").mkdir(parents=True)
    assert load_config(path).model.path == "models/m"


def test_shipped_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(REPO / "configs" / "smollm2.yaml")
    assert config.model.path is not None
    assert config.model.path.endswith("models/smollm2-135m-instruct")
    assert config.layout == LayoutConfig(kvp=3, tpa=1)
    assert (config.cache.page_tokens, config.model.dtype, config.engine.device) == (16, "float32", "cpu")


# ---- values that are refused ----

WRONG = [
    ("cache", "page_tokens", "8", ['"8" is text, not a number', "write 8 without quotes", "from 1 to"]),
    ("cache", "page_tokens", True, ["true is a yes/no value", "a whole number"]),
    ("cache", "page_tokens", 8.0, ["8.0 is not a whole number", "write 8"]),
    ("cache", "page_tokens", 8.5, ["8.5 is not a whole number"]),
    ("cache", "page_tokens", 0, ["0 is out of range", "from 1 to"]),
    ("cache", "page_tokens", 1 << 40, ["is out of range"]),
    ("cache", "page_tokens", None, ["null is no value", "leave the key out"]),
    ("cache", "page_tokens", [8], ["[8] is a list"]),
    ("cache", "num_page_rows", True, ["true is a yes/no value", "auto or a whole number"]),
    ("cache", "num_page_rows", "atuo", ['"atuo" is not known', "did you mean auto?"]),
    ("cache", "num_page_rows", "2K", ["write 2048"]),
    ("cache", "memory_fraction", 0, ["0 is out of range", "above 0 and at most 1"]),
    ("cache", "memory_fraction", 1.5, ["1.5 is out of range"]),
    ("cache", "memory_fraction", float("nan"), ["not a finite number"]),
    ("cache", "memory_fraction", "0.9", ["write 0.9 without quotes"]),
    ("cache", "memory_fraction", "1e-1", ["YAML reads 1e-1 as text", "write 0.1"]),
    ("cache", "dtype", "bfloat", ['"bfloat" is not known, did you mean bfloat16?', "float32 or float8"]),
    ("cache", "prefix_reuse", 1, ["1 is a number", "true or false"]),
    ("cache", "prefix_reuse", "true", ['"true" is text', "write true without quotes"]),
    ("comm", "merge", "a2b", ['"a2b" is not known', "did you mean a2a?", "a2a or ag_rs"]),
    ("comm", "transport", "symetric", ["did you mean symmetric?"]),
    ("comm", "query", False, ["false is a yes/no value", "auto, replicate or gather"]),
    ("comm", "overlap", 0, ["0 is out of range", "auto, off or a whole number"]),
    ("comm", "overlap", True, ['"on" is not known']),
    ("comm", "overlap", "8", ["write 8 without quotes"]),
    ("engine", "prefill_chunk", "1e6", ["YAML reads 1e6 as text", "write 1000000"]),
    ("engine", "prefill_chunk", 1e6, ["1000000.0 is not a whole number", "write 1000000"]),
    ("engine", "prefill_chunk", "1.5", ['"1.5" is text']),
    ("engine", "max_context", "128Q", ['"128Q"', "also as 128K or 1M"]),
    ("engine", "max_context", "0K", ["0 is out of range"]),
    ("engine", "seed", -1, ["-1 is out of range", "from 0 to"]),
    ("engine", "stall_timeout_s", 29, ["29 is out of range", "at most 28"]),
    ("engine", "stall_timeout_s", 0.0, ["0.0 is out of range"]),
    ("engine", "device", "cudaa", ["did you mean cuda?"]),
    ("engine", "graphs", 1, ["1 is a number", "auto, on or off"]),
    ("server", "port", "8000", ["write 8000 without quotes"]),
    ("server", "port", 0, ["from 1 to 65535"]),
    ("server", "port", 65536, ["65536 is out of range"]),
    ("server", "host", 127, ["127 is a number: put it in quotes"]),
    ("server", "host", "", ["is empty"]),
    ("server", "max_queue", 0, ["0 is out of range"]),
    ("server", "request_timeout_s", 0, ["0 is out of range", "at most 86400"]),
    ("server", "max_body_bytes", "32M", ['"32M" is text']),
    ("model", "num_layers", 0, ["0 is out of range"]),
    ("model", "path", "", ["is empty"]),
    ("model", "load", "dumy", ["did you mean dummy?"]),
    ("model", "card", 7, ["put it in quotes"]),
    ("layout", "kvp", "8", ["write 8 without quotes"]),
    ("layout", "ep", 0, ["0 is out of range"]),
    ("layout", "tpa", True, ["true is a yes/no value"]),
    ("layout", "duplicate_kv", 1, ["true or false"]),
]


@pytest.mark.parametrize(("section", "key", "value", "words"), WRONG)
def test_wrong_value(section: str, key: str, value: object, words: list[str]) -> None:
    base: dict[str, Any] = {"model": MODEL}
    message = refusal(**{**base, section: {**base.get(section, {}), key: value}})
    assert message.startswith(f"{section}.{key}: ")
    assert "\n" not in message
    assert all(word in message for word in words), message
    assert not any(jargon in message for jargon in ("pydantic", "Input should", "literal[", "int_type")), message


def test_a_number_too_long_to_print() -> None:
    assert "cache.page_tokens: the value is out of range" in refusal(model=MODEL, cache={"page_tokens": 10**5000})


def test_secrets_are_not_repeated() -> None:
    assert "31337" not in refusal(model=MODEL, server={"api_key": 31337})
    assert "hush" not in repr(make_config(model=MODEL, server={"api_key": "hush"}))


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"cach": {}}, ["cach: unknown key", "did you mean cache?", "model, layout, cache, comm, engine, server"]),
        ({"cache": {"page_token": 1}}, ["cache.page_token: unknown key", "cache.page_tokens?", "num_page_rows"]),
        ({"layout": {"kpv": 2}}, ["layout.kpv: unknown key", "did you mean layout.kvp?"]),
        ({"engine": {"page_tokens": 2}}, ["engine.page_tokens: unknown key", "did you mean cache.page_tokens?"]),
        ({"dtype": "fp32"}, ["dtype: unknown key", "did you mean model.dtype or cache.dtype?"]),
        ({"engine": {True: 2}}, ["engine.true: unknown key"]),
        ({"engine": {"a\nb": 2}}, ['engine."a\\nb": unknown key']),
        ({"cache": 5}, ["cache: 5 is a number", "a mapping with the keys page_tokens"]),
        ({"cache": [1]}, ["cache: [1] is a list"]),
        ({"layout": "atuo"}, ['layout: "atuo" is not known, did you mean auto?', "auto or a mapping"]),
        ({"layout": 8}, ["layout: 8 is a number", "auto or a mapping"]),
    ],
)
def test_unknown_keys_and_sections_of_the_wrong_shape(sections: dict[str, Any], words: list[str]) -> None:
    message = refusal({"model": MODEL, **sections})
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_rules_over_several_fields() -> None:
    assert "exactly one of path" in refusal()
    assert "neither is given" in refusal(model={"dtype": "fp32"})
    assert "both are given" in refusal(model={"path": "a", "card": "b"})
    assert "num_layers=2 needs load: dummy" in refusal(model={"card": "tiny", "num_layers": 2})
    assert make_config(model={"card": "tiny", "num_layers": 2, "load": "dummy"}).model.num_layers == 2
    misspelt = refusal(model={"pth": "a"})
    assert "did you mean model.path?" in misspelt
    assert "neither" not in misspelt


def test_all_problems_are_listed(tmp_path: Path) -> None:
    message = file_refusal(tmp_path, "model: {path: m}\ncache: {page_tokens: 0, dtypes: 1}\nserver: {port: 0}\n")
    lines = message.splitlines()
    assert lines[0].endswith("run.yaml: 3 problems")
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["cache.dtypes", "cache.page_tokens", "server.port"]


def test_a_source_of_another_type() -> None:
    assert "not 5" in refusal(5)


# ---- files that are refused ----


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["is empty", "model"]),
        ("# only a comment\n\n", ["is empty"]),
        ("- a\n- b\n", ["is a list", "a mapping with the keys model"]),
        ("just words\n", ["is text"]),
        (
            "model: {card: a}\ncache:\n  page_tokens: 8\n  page_tokens: 9\n",
            ["line 4, column 3", "duplicate key page_tokens", "line 3"],
        ),
        ("model: a\nmodel: b\n", ["line 2, column 1", "duplicate key model"]),
        ("model: a\nmodel: b\ncache: {dtype: a, dtype: b}\n", ["duplicate key model", "line 3", "duplicate key dtype"]),
        ("model: a\ncache: [{a: 1, a: 2}]\n", ["line 2, column 16", "duplicate key a"]),
        ("model: a\ncache: {<<: {a: 1}, <<: {b: 2}}\n", ["line 2", "duplicate key <<"]),
        ("model: {card: a\ncache: 3\n", ["line 2", "column"]),
        ("model:\n\tcard: a\n", ["line 2, column 1", "a tab character", "spaces"]),
        ("model:\n  card: a\n\tdtype: b\n", ["line 3", "a tab character"]),
        ("model: a\nx: [1\n", ["line 3", "flow sequence"]),
        ("model: a\n---\nmodel: b\n", ["line 2", "document"]),
        ("model: !!python/object/apply:os.system [ls]\n", ["line 1, column 8", "python/object/apply:os.system"]),
        ("model: *nowhere\n", ["line 1", "undefined alias"]),
        ("? [a]\n: b\n", ["line 1", "unhashable"]),
        ("model: 2024-13-45\n", ["a value cannot be read", "quotes"]),
        ("model: !!bool maybe\n", ["a value cannot be read"]),
        ("model: a\nserver:\n  port: 010\n", ["line 3, column 9", "base 8", "base 10"]),
        ("model: a\nserver: {api_key: 12:30}\n", ["line 2", "base 8 or 60", "quotes"]),
        ("model: a\x00b\n", ["not a text file"]),
        ("[" * 600, ["nested too deeply"]),
        ("model: a\nengine: {prefill_chunk: 1e6}\n", ["YAML reads 1e6 as text", "write 1000000"]),
    ],
)
def test_bad_yaml(tmp_path: Path, text: str, words: list[str]) -> None:
    message = file_refusal(tmp_path, text)
    assert "run.yaml" in message
    assert all(word in message for word in words), message


def test_a_tab_inside_quotes_is_not_blamed(tmp_path: Path) -> None:
    for text in ('model: "a\tb"\ncache: [1\n', 'model: "a\tb" x\n'):
        assert "a tab character" not in file_refusal(tmp_path, text)


def test_aliases_into_a_mapping_with_merge_keys(tmp_path: Path) -> None:
    text = "x-a: &a {k: 1}\nx-b: &b {<<: *a, k: 2}\nmodel: a\ncache: {<<: *b}\n"
    message = file_refusal(tmp_path, text)
    assert "duplicate" not in message
    assert "cache.k: unknown key" in message


def test_a_file_that_contains_itself(tmp_path: Path) -> None:
    message = file_refusal(tmp_path, "model: a\ncache: &c\n  dtype: *c\n")
    assert "cache.dtype: " in message


def test_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes("model: a\nserver: {host: fä}\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin.yaml, line 2: byte 0xe4 is not UTF-8"):
        load_config(path)


def test_missing_file_names_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "", "smollm2.yaml")
    write(tmp_path, "", "unrelated.txt")
    with pytest.raises(ConfigError, match=r"smolm2.yaml: there is no such file; in .*: smollm2.yaml$"):
        load_config(tmp_path / "smolm2.yaml")
    with pytest.raises(ConfigError, match=r"there is no such file; in .*: smollm2.yaml$"):
        load_config(tmp_path / "zzz")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^smolm2.yaml: there is no such file; in the current directory: smollm2"):
        load_config("smolm2.yaml")
    with pytest.raises(ConfigError, match=r"there is no such file, nor a directory .*nowhere"):
        load_config(tmp_path / "nowhere" / "a.yaml")


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"is a directory, not a YAML file; .*model.path"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read: Not a directory"):
        load_config(write(tmp_path, "") / "below")
    with pytest.raises(ConfigError, match=r"cannot be read: .*null byte"):
        load_config("a\0b")
    with pytest.raises(ConfigError, match="not a config file"):
        load_config(write(tmp_path, "#" * (1 << 20) + "\n"))

    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.open", denied)
    with pytest.raises(ConfigError, match=r"run.yaml: cannot be read: Permission denied"):
        load_config(tmp_path / "run.yaml")


# ---- the value ----


def test_frozen_hashable_and_picklable() -> None:
    config = make_config(model=MODEL, layout={"kvp": 2})
    for target, key in itertools.product((config, config.cache, config.layout), ("cache", "page_tokens", "kvp", "new")):
        with pytest.raises((ValidationError, ValueError)):
            setattr(target, key, 1)
    copy = pickle.loads(pickle.dumps(config))  # spawned ranks get the config this way
    assert copy == config
    assert hash(copy) == hash(config)


def counts() -> st.SearchStrategy[int]:
    return st.integers(1, 2**31 - 1)


def settings_strategy() -> st.SearchStrategy[dict[str, Any]]:
    dtype = st.sampled_from(["auto", "bf16", "fp16", "fp32", "bfloat16", "float16", "float32"])
    text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
    sizes = st.fixed_dictionaries({}, optional={key: counts() for key in ("kvp", "tpa", "tpf", "ep")})
    optional: dict[str, dict[str, st.SearchStrategy[Any]]] = {
        "cache": {
            "page_tokens": counts(),
            "num_page_rows": st.just("auto") | counts(),
            "memory_fraction": st.floats(0, 1, exclude_min=True),
            "dtype": dtype,
            "prefix_reuse": st.booleans(),
        },
        "comm": {
            "merge": st.sampled_from(["a2a", "ag_rs"]),
            "overlap": st.sampled_from(["auto", "off", False]) | counts(),
            "query": st.sampled_from(["auto", "replicate", "gather"]),
        },
        "engine": {
            "max_context": st.sampled_from(["auto", "1M", "3k"]) | counts(),
            "graphs": st.sampled_from(["auto", "on", "off", True, False]),
            "ahead": st.sampled_from(["auto", "on", "off", True, False]),
            "seed": st.integers(0, 2**63 - 1),
            "stall_timeout_s": st.floats(0, 28, exclude_min=True) | st.integers(1, 28),
        },
        "server": {"host": text, "port": st.integers(1, 65535), "api_key": st.none() | text},
    }
    sections = {name: st.fixed_dictionaries({}, optional=keys) for name, keys in optional.items()}
    model = st.fixed_dictionaries(
        {"card": text}, optional={"dtype": dtype, "quantize": st.sampled_from(["auto", "none", "fp8"])}
    )
    layout = st.just("auto") | st.builds(lambda d, flag: {**d, "duplicate_kv": flag}, sizes, st.booleans())
    return st.fixed_dictionaries({"model": model, "layout": layout, **sections})


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=settings_strategy())
def test_round_trip(tmp_path: Path, tree: dict[str, Any]) -> None:
    config = make_config(tree)
    assert make_config(config_to_dict(config)) == config
    assert load_config(write(tmp_path, dump_yaml(config))) == config
    for section in ("cache", "comm", "engine", "server"):
        for key, value in tree[section].items():
            if not isinstance(value, bool) and value not in ("1M", "3k", "bf16", "fp16", "fp32"):
                assert getattr(getattr(config, section), key) == value


def any_keys(names: Sequence[str]) -> st.SearchStrategy[Any]:
    return st.sampled_from(names) | st.text(max_size=4) | st.booleans() | st.integers() | st.none()


FIELDS = sorted({key for section in SECTIONS[2:] for key in config_to_dict(make_config(model=MODEL))[section]})
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(), max_size=6)
    | st.sampled_from(["8", "1e6", "1E9999", "auto", "128K", "off", "٣K", "~\0"])
    | st.binary(max_size=3)
    | st.dates()
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(any_keys(["path"]), inner, max_size=2)
)
TREES = st.dictionaries(
    any_keys(SECTIONS),
    VALUES
    | st.dictionaries(any_keys([*FIELDS, "path", "card", "num_layers", "kvp", "duplicate_kv"]), VALUES, max_size=6),
    max_size=6,
)


def accepted(tree: Mapping[Any, Any]) -> bool:
    """Whether `tree` makes a config; anything but a config or a plain ConfigError fails the test."""
    try:
        config = make_config(tree)
    except ConfigError as error:
        str(error).encode()  # a message must be printable
        return False
    assert isinstance(config, RunConfig)
    return make_config(config_to_dict(config)) == config


@settings(max_examples=120, deadline=None)
@given(tree=TREES)
def test_any_mapping_gives_a_config_or_a_config_error(tree: dict[Any, Any]) -> None:
    if accepted(tree):
        assert isinstance(tree["model"], (str, dict))
        assert not set(tree) - set(SECTIONS)


def message_of(act: Callable[[], object]) -> str:
    """What `act` complains about, or both words where it does not complain."""
    try:
        act()
    except ConfigError as error:
        return str(error)
    return "run.yaml override"


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.sampled_from("model: {}[]&*!?|>-#'\"\t\n0189.e,%@`~<é\x00"), max_size=40) | TREES.map(yaml.dump))
def test_any_text_gives_a_config_or_a_config_error(tmp_path: Path, text: str) -> None:
    assert "run.yaml" in message_of(lambda: load_config(write(tmp_path, text)))
    assert "override" in message_of(lambda: parse_overrides([text, f"cache.dtype={text}"]))


# ---- the launcher's environment ----

LAUNCHED = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_SIZE": "4",
    "MASTER_ADDR": "node-0",
    "MASTER_PORT": "29500",
}


def test_launch_env(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = LaunchEnv(rank=5, world_size=8, local_rank=1, local_size=4, master_addr="node-0", master_port=29500)
    assert launch_env(LAUNCHED) == expected
    torchrun = {**LAUNCHED, "LOCAL_SIZE": "", "LOCAL_WORLD_SIZE": "4"}
    assert launch_env(torchrun) == expected
    for name, text in LAUNCHED.items():
        monkeypatch.setenv(name, text)
    assert launch_env() == expected
    with pytest.raises(AttributeError):
        expected.rank = 1  # type: ignore[misc]


def test_plain_process_has_no_launch_env() -> None:
    assert launch_env({}) is None
    assert launch_env({"MASTER_ADDR": "x", "MASTER_PORT": "1", "LOCAL_SIZE": "2", "RANK": ""}) is None


@pytest.mark.parametrize("name", LAUNCHED)
@pytest.mark.parametrize("text", [None, "", " "])
def test_partial_launch_env_names_the_variable(name: str, text: str | None) -> None:
    env = {key: value for key, value in LAUNCHED.items() if key != name} | ({} if text is None else {name: text})
    with pytest.raises(ConfigError, match=f"variable {name} is not set although"):
        launch_env(env)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("RANK", "x"),
        ("RANK", "8"),
        ("RANK", "-1"),
        ("RANK", "1.0"),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", "9" * 5000),
        ("LOCAL_RANK", "4"),
        ("LOCAL_SIZE", "9"),
        ("MASTER_PORT", "70000"),
        ("MASTER_PORT", "http"),
    ],
)
def test_bad_launch_env_names_variable_and_value(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=rf'variable {name}="{text[:80]}.*must be a whole number from'):
        launch_env({**LAUNCHED, name: text})
