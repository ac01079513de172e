"""The capability table: what it refuses, and that the README prints this table and no other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helix.capabilities import CAPABILITIES, check_capabilities, markdown_table
from helix.config import make_config
from helix.errors import ConfigError
from model_zoo.cards import load_card

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.parametrize(
    ("card", "sections", "words"),
    [
        ("llama-3.1-8b", {"comm": {"transport": "symmetric"}}, "comm.transport=symmetric"),
        ("llama-3.1-8b", {"comm": {"exchange_space": "value"}}, "comm.exchange_space=value"),
        ("llama-3.1-8b", {"comm": {"dispatch": "alltoall"}}, "comm.dispatch=alltoall"),
        ("llama-3.1-8b", {"engine": {"graphs": "on"}}, "engine.graphs=on"),
    ],
)
def test_refused_before_anything_starts(card: str, sections: dict[str, dict[str, Any]], words: str) -> None:
    model = {"card": card, "load": "dummy"} | sections.pop("model", {})
    config = make_config(None, model=model, **sections)
    with pytest.raises(ConfigError, match=words):
        check_capabilities(config, load_card(card), "cpu")


def test_several_problems_are_all_named() -> None:
    config = make_config(
        None,
        model={"card": "llama-3.1-8b"},
        comm={"dispatch": "local", "exchange_space": "value"},
        engine={"graphs": "on"},
    )
    with pytest.raises(ConfigError) as refused:
        check_capabilities(config, load_card("llama-3.1-8b"), "cpu")
    assert str(refused.value).count("\n") == 2


def test_what_works_passes() -> None:
    comm = {"query": "gather", "exchange_space": "value", "dispatch": "alltoall", "merge": "ag_rs", "overlap": 4}
    check_capabilities(make_config(None, model={"card": "deepseek-r1"}, comm=comm), load_card("deepseek-r1"), "cpu")


def test_blocks_that_no_kernel_reads_are_refused_on_a_gpu_only() -> None:
    spec = replace(load_card("deepseek-r1"), fp8_block=(128, 96))
    config = make_config(None, model={"card": "deepseek-r1", "load": "dummy", "quantize": "fp8"})
    check_capabilities(config, spec, "cpu")
    with pytest.raises(ConfigError, match=r"model\.quantize=fp8: the checkpoint's blocks of \[128, 96\]"):
        check_capabilities(config, spec, "cuda")


def test_readme_prints_this_table() -> None:
    assert markdown_table() in README.read_text()


def test_every_field_is_a_key_of_the_config() -> None:
    fields = make_config(None, model={"card": "llama-3.1-8b"})
    for one in CAPABILITIES:
        section, key = one.field.split(",")[0].split(".")
        owner = getattr(fields, section)
        assert section == "layout" or hasattr(owner, key), one.field
