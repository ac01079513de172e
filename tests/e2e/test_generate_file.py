"""``helix generate --input FILE --output FILE``: every line answered once, also when the run is killed on its way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from helix.cli import main
from helix.engine.jsonl import Answers, Line, Settings
from helix.engine.sampling import SamplingParams
from helix.errors import ConfigError
from tests.e2e.planted_fault import ROOT
from tests.tiny import TinyModels, prompt

Generate = Callable[..., tuple[int, str, str]]

NUM_LINES = 24
BAD_LINES: dict[bytes, str] = {
    b'"text"': "tokenizer",
    b'{"messages": [{"role": "user", "content": "x"}]}': "tokenizer",
    b'{"messages": "x"}': "messages",
    b'{"prompt": [1], "messages": []}': "not both",
    b"{}": "prompt or messages",
    b'{"prompt": [1, 97]}': "97",
    b'{"prompt": [1, true]}': "token ids",
    b'{"prompt": []}': "empty",
    b'{"prompt": [1], "temprature": 1}': "temperature",
    b'{"prompt": [1], "temperature": NaN}': "NaN",
    b'{"prompt": [1], "max_tokens": -1}': "max_tokens",
    b'{"prompt": [1], "id": [1]}': "id",
    b'{"prompt": [1], "tools": []}': "tools",
    b'{"prompt": [1' + b", 1" * 300 + b"]}": "301",
    b'{"prompt": [1' + b"0" * 5000 + b"]}": "JSON",
    b"[" * 100_000: "nested",
    b"[1]": "list",
    b"\xff\xfe": "UTF-8",
    b'{"prompt": [1]': "JSON",
}


@pytest.fixture
def config(tiny: TinyModels, tmp_path: Path) -> Path:
    content = {
        "model": {"path": tiny.path("smollm"), "dtype": "float32"},
        "layout": {"kvp": 1},
        "cache": {"page_tokens": 4, "num_page_rows": 80},
        "engine": {"device": "cpu", "max_context": 256, "max_batch": 2},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture
def generate(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Generate:
    def call(*more: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(arguments(config, tmp_path, *more))
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call


def arguments(config: Path, directory: Path, *more: str) -> list[str]:
    files = ("--input", str(directory / "in.jsonl"), "--output", str(directory / "out.jsonl"))
    return ["generate", "--config", str(config), *files, "--max-tokens", "12", "--temperature", "1", *more]


def write_prompts(directory: Path) -> None:
    lines = [json.dumps({"id": f"n{number}", "prompt": prompt(5 + number % 7, number)}) for number in range(NUM_LINES)]
    (directory / "in.jsonl").write_text("\n".join(lines) + "\n")


def read_answers(directory: Path) -> dict[int, dict[str, Any]]:
    """The answers by line; no line has two."""
    answers = [json.loads(line) for line in (directory / "out.jsonl").read_text().splitlines()]
    by_line = {answer["line"]: answer for answer in answers}
    assert len(by_line) == len(answers)
    return by_line


def test_a_killed_run_goes_on_where_it_stopped(generate: Generate, config: Path, tmp_path: Path) -> None:
    """The answers are those of an undisturbed run, sampled ones too."""
    write_prompts(tmp_path)
    out = tmp_path / "out.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-c", "from helix.cli import main; main()", *arguments(config, tmp_path)],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 120
    while (not out.exists() or out.read_bytes().count(b"\n") < 3) and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    num_before = len(read_answers(tmp_path))
    assert 3 <= num_before < NUM_LINES, "it was not killed in the middle"
    with out.open("ab") as file:
        file.write(b'{"line":1,"id":"n0","digest"')  # what a write that was cut off leaves
    code, printed, err = generate("--json")
    assert code == 0, err
    counts = json.loads(printed.splitlines()[-1])
    assert (counts["num_lines"], counts["num_before"]) == (NUM_LINES, num_before)
    assert (counts["num_answered"], counts["num_errors"]) == (NUM_LINES - num_before, 0)
    resumed = read_answers(tmp_path)
    assert [resumed[number + 1]["id"] for number in range(NUM_LINES)] == [f"n{number}" for number in range(NUM_LINES)]
    assert len({tuple(answer["token_ids"]) for answer in resumed.values()}) > NUM_LINES // 2
    out.unlink()
    generate()
    assert read_answers(tmp_path) == resumed


def test_what_is_wrong_with_a_line_is_its_answer(generate: Generate, tiny: TinyModels, tmp_path: Path) -> None:
    good = {"prompt": prompt(9), "temperature": 0, "max_tokens": 8, "logprobs": 1, "id": 7}
    content = [json.dumps(good).encode(), b"", *BAD_LINES, b'"\\ud800"']
    (tmp_path / "in.jsonl").write_bytes(b"\r\n".join(content))
    code, printed, err = generate()
    assert code == 0, err
    assert f"{len(content) - 1} lines, 0 answered before, 1 now, {len(content) - 2} errors" in printed
    answers = read_answers(tmp_path)
    assert answers[1]["token_ids"] == tiny.greedy("smollm", prompt(9), 8)
    assert (answers[1]["id"], answers[1]["finish_reason"], len(answers[1]["logprobs"])) == (7, "length", 8)
    for number, words in enumerate(BAD_LINES.values(), 3):
        assert words in answers[number]["error"], answers[number]
        assert len(answers[number]["error"]) < 400
    assert 2 not in answers


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (b"{}\n", "line 1 is no answer"),
        (b"text\n", "line 1 is no answer"),
        (b'{"line": 1, "digest": "0"}\n', "another prompt"),
        (b'{"line": 99, "digest": "0"}\n', "line 99"),
    ],
)
def test_another_file_is_not_written_to(generate: Generate, tmp_path: Path, out: bytes, words: str) -> None:
    write_prompts(tmp_path)
    (tmp_path / "out.jsonl").write_bytes(out)
    code, _printed, err = generate()
    assert code != 0
    assert words in err
    assert (tmp_path / "out.jsonl").read_bytes() == out


def test_options_that_do_not_fit(generate: Generate, tmp_path: Path) -> None:
    assert "--prompt" in generate("--prompt", "x")[2]
    assert "cannot be read" in generate()[2]
    (tmp_path / "in.jsonl").touch()
    (tmp_path / "out.jsonl").unlink(missing_ok=True)
    (tmp_path / "out.jsonl").mkdir()
    assert "cannot be written" in generate()[2]


def test_one_process_writes_at_a_time_and_only_whole_lines_stay(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    long = "x" * 200_000
    path.write_text('{"line": 3, "digest": "a"}\n{"line": 4, "text": "' + long)
    answers = Answers(path)
    assert answers.digests == {3: "a"}
    with pytest.raises(ConfigError, match="another process"):
        Answers(path)
    answers.write([{"line": 5, "digest": "b", "id": "\ud800"}])
    answers.close()
    again = Answers(path)
    assert again.digests == {3: "a", 5: "b"}
    again.close()
    path.write_text(long)
    assert Answers(path).digests == {}
    assert path.read_bytes() == b""


def test_a_digest_tells_lines_and_settings_apart() -> None:
    greedy, other = SamplingParams(temperature=0.0), SamplingParams(temperature=0.5)
    digests = {
        settings.digest(Line(1, content))
        for settings in (Settings(greedy, False), Settings(greedy, True), Settings(other, False))
        for content in (b"1", b"2")
    }
    assert len(digests) == 6
