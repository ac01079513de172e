"""The `helix` command: what each prints, and errors as one message with an exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from helix.cli import main
from tests.tiny import TinyModels

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call


@pytest.fixture
def config(tiny: TinyModels, tmp_path: Path) -> str:
    content = {
        "model": {"path": tiny.path("smollm"), "dtype": "float32"},
        "layout": {"kvp": 2},
        "cache": {"page_tokens": 4, "num_page_rows": 32},
        "engine": {"device": "cpu", "max_context": 256},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def test_check_says_what_each_rank_holds(run: Run, config: str) -> None:
    code, out, _err = run("check", "--config", config, "--set", "layout.kvp=6", "--json")
    assert code == 0
    found = json.loads(out.splitlines()[-1])
    assert found["layout"] == {"kvp": 6, "tpa": 1, "tpf": 6, "ep": 1, "duplicate_kv": False}
    assert found["groups"]["kvp"] == [[0, 1, 2, 3, 4, 5]]
    assert found["capacity_tokens"] == 32 * 6 * 4
    assert found["padded_heads"] == 3
    assert found["kv_bytes_per_token"] == pytest.approx(2 * 2 * 3 * 8 * 4 / 6)
    assert len(found["weights_bytes"]) == 6


def test_check_for_people(run: Run, config: str) -> None:
    code, out, _err = run("check", "--config", config)
    assert code == 0
    for part in ("kvp=2", "capacity", "256 tokens", "weights a rank"):
        assert part in out


def test_verify_finds_the_layout_exact(run: Run, config: str) -> None:
    code, out, err = run("verify", "--config", config, "--prompt-ids", "1,2,3,4,5,6,7,8,9", "--json")
    assert code == 0, err
    report = json.loads(out.splitlines()[-1])
    assert report["exact"] is True
    assert report["first_layer"] is None
    assert report["prompts"][0]["equal_tokens"] == report["prompts"][0]["checked_tokens"] == 32


def test_verify_fails_beyond_the_tolerance(run: Run, config: str) -> None:
    code, out, _err = run("verify", "--config", config, "--prompt-ids", "1,2,3", "--tolerance", "1e-12")
    assert code == 1
    assert "DIFFERS" in out


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("cache.page_token=4", "page_tokens"),
        ("layout.kvp='2'", "layout.kvp"),
        ("layout.tpa=2", "nearest legal"),
        ("model.path=/no/such/place", "/no/such/place"),
    ],
)
def test_errors_are_one_message(run: Run, config: str, setting: str, words: str) -> None:
    code, out, err = run("check", "--config", config, "--set", setting)
    assert code != 0
    assert out == ""
    assert words in err
    assert "Traceback" not in err


def test_debug_shows_the_traceback(run: Run, config: str) -> None:
    code, _out, err = run("check", "--config", config, "--set", "layout.tpa=2", "--debug")
    assert code != 0
    assert "Traceback" in err


def test_generate_streams_and_sums_up(run: Run, smollm2: Path, tmp_path: Path) -> None:
    path = tmp_path / "one.yaml"
    path.write_text(yaml.safe_dump({"model": {"path": str(smollm2)}, "engine": {"device": "cpu", "max_context": 512}}))
    code, out, err = run("generate", "--config", str(path), "--prompt", "What is the capital of France?")
    assert code == 0, err
    assert "Paris" in out
    assert out.splitlines()[-1].startswith("layout kvp=1")
    code, out, _err = run(
        "generate", "--config", str(path), "--raw", "--json", "--prompt", "1, 2, 3,", "--max-tokens", "4"
    )
    assert code == 0
    assert len(json.loads(out.splitlines()[-1])["outputs"][0]["token_ids"]) == 4
