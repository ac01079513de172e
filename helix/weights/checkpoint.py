"""The checkpoint directory as headers: which tensors there are, where, of what shape and dtype. Reads no tensor data.

Only safetensors are read: one ``model.safetensors``, or shards named by ``model.safetensors.index.json``. Every fault
of the files becomes a `CheckpointError` that names file and tensor and says what to do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from helix.errors import CheckpointError
from helix.weights.pieces import Range

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
COMPRESSED = "compressed-tensors"
GIT_LFS_START = b"version https://git-lfs"
FETCH_AGAIN = "fetch the file again"


class LazyTensor(Protocol):
    """A tensor of a mapped file: its header, and any rectangle of it as a view."""

    def get_dtype(self) -> str: ...
    def get_shape(self) -> list[int]: ...
    def __getitem__(self, index: tuple[slice, ...] | EllipsisType) -> Tensor: ...


class Reader(Protocol):
    """What is used of safetensors' `safe_open`, which ships no types."""

    def offset_keys(self) -> list[str]: ...
    def get_slice(self, name: str) -> LazyTensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHeader:
    """One tensor of a checkpoint: `name` as the file spells it, `dtype` as safetensors spells it (``BF16``)."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """All headers of a directory, by (renamed) tensor name, in the order of files and of offsets in each file.

    The scales of an FP8 tensor are the tensor of its name and `scale_suffix`. `block_size` is the size of the blocks
    that share one, None where the scales' own shape says it (one for the tensor, or one for each row); `quant_method`
    is ``quantization_config.quant_method`` of config.json, None where
    config.json gives none.
    """

    directory: Path
    tensors: dict[str, TensorHeader]
    block_size: tuple[int, int] | None
    quant_method: str | None
    scale_suffix: str = "_scale_inv"


def open_checkpoint(directory: Path, rename: Callable[[str], str] | None = None) -> Checkpoint:
    """Read the headers of every safetensors file of the checkpoint in `directory`.

    `rename` maps a tensor's name in the files to the name that declarations use.

    Raises:
        CheckpointError: no such directory, no safetensors in it, a shard that is missing, cut off or corrupt, an index
            that does not fit its shards, or a tensor that is there twice.
    """
    files, listed = _weight_files(directory)
    tensors: dict[str, TensorHeader] = {}
    for file in files:
        for header in _read_headers(file):
            name = rename(header.name) if rename else header.name
            if name in tensors:
                other = tensors[name]
                raise CheckpointError(
                    f"{directory}: tensor {name} is there twice, as {other.name} in {other.file.name} and as "
                    f"{header.name} in {file.name}; remove the file that does not belong to this checkpoint"
                )
            tensors[name] = header
    held = {(header.name, header.file.name) for header in tensors.values()}
    absent = [f"{name} (in {shard})" for name, shard in listed.items() if (name, shard) not in held]
    if absent:
        raise CheckpointError(
            f"{directory / INDEX_FILE} lists tensors that the shards do not hold: {listing(absent)}; index and shards "
            "are of different checkpoints, fetch them again together"
        )
    section = _quantization(directory / "config.json")
    method = section.get("quant_method")
    compressed = method == COMPRESSED
    return Checkpoint(
        directory=directory,
        tensors=tensors,
        block_size=_block_size(directory / "config.json", compressed_weights(section) if compressed else section),
        quant_method=method,
        scale_suffix="_scale" if compressed else "_scale_inv",
    )


@contextmanager
def open_file(file: Path) -> Iterator[Reader]:
    """A safetensors reader over the memory-mapped `file`; CheckpointError where the file is not whole."""
    try:
        reader = safe_open(file, framework="pt", device="cpu")
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing; {FETCH_AGAIN}") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(_file_problem(file, error)) from error
    with reader:
        yield reader


def read_slice(reader: Reader, header: TensorHeader, source: tuple[Range, ...]) -> Tensor:
    """The rectangle `source` of one tensor, as a view of the mapped file: pages are read when the view is."""
    index = tuple(slice(start, stop) for start, stop in source) if source else ...
    try:
        return reader.get_slice(header.name)[index]
    except (SafetensorError, RuntimeError) as error:
        raise CheckpointError(f"{header.file}: cannot read tensor {header.name} at {source}: {error}") from error


def listing(items: Iterable[str], limit: int = 10) -> str:
    """The first `limit` items, and how many more there are."""
    every = list(items)
    more = f" and {len(every) - limit} more" if len(every) > limit else ""
    return ", ".join(every[:limit]) + more


def _weight_files(directory: Path) -> tuple[list[Path], dict[str, str]]:
    """The safetensors files of the checkpoint, and the index's tensor -> shard map (empty for a single file)."""
    if not directory.is_dir():
        raise CheckpointError(
            f"checkpoint directory {directory} does not exist; give the path of a Hugging Face directory"
        )
    if (directory / SINGLE_FILE).is_file():
        return [directory / SINGLE_FILE], {}
    index = directory / INDEX_FILE
    if not index.is_file():
        raise CheckpointError(_no_weights(directory))
    listed = _read_index(index)
    files = [directory / shard for shard in sorted(set(listed.values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(
            f"{index} names shards that are not there: {listing(missing)}; fetch them into {directory}"
        )
    return files, listed


def _no_weights(directory: Path) -> str:
    """Why a directory without ``model.safetensors`` and without an index has no weights to load."""
    names = sorted(path.name for path in directory.iterdir())
    shards = [name for name in names if name.endswith(".safetensors")]
    if shards:
        return (
            f"{directory} holds {listing(shards, 3)} but neither {SINGLE_FILE} nor {INDEX_FILE}; fetch the index, or "
            f"name the file {SINGLE_FILE} if it is the whole checkpoint"
        )
    pickles = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
    if pickles:
        return (
            f"{directory} holds {listing(pickles, 3)} but no safetensors; pickle is never loaded, because it can run "
            f"code; convert the checkpoint to safetensors"
        )
    found = f"it holds {listing(names, 5)}" if names else "it is empty"
    return f"{directory} has no weights ({found}); expected {SINGLE_FILE} or {INDEX_FILE} with its shards"


def _read_index(index: Path) -> dict[str, str]:
    """The index's ``weight_map``, tensor -> shard file in the same directory."""
    content = _read_json(index)
    listed = content.get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{index} has no weight_map with tensor names and shard files; {FETCH_AGAIN}")
    for name, shard in listed.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(
                f"{index}: weight_map gives {shard!r} for tensor {name}; it must be the plain name of a .safetensors "
                "file in the same directory"
            )
    return listed


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is not readable JSON ({error}); {FETCH_AGAIN}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} must hold a JSON object, not {type(content).__name__}; {FETCH_AGAIN}")
    return content


def _quantization(config: Path) -> dict[str, Any]:
    """``quantization_config`` of config.json, or of the text model's part for wrapper models; empty without one."""
    content = _read_json(config) if config.is_file() else {}
    text = content.get("text_config")
    section = content.get("quantization_config") or (
        text.get("quantization_config") if isinstance(text, dict) else None
    )
    return section if isinstance(section, dict) else {}


def compressed_weights(section: dict[str, Any]) -> dict[str, Any]:
    """What a ``compressed-tensors`` section says about the weights of its first group of layers; empty if nothing."""
    groups = section.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    weights = first.get("weights") if isinstance(first, dict) else None
    return weights if isinstance(weights, dict) else {}


def _block_size(config: Path, table: dict[str, Any]) -> tuple[int, int] | None:
    key = "block_structure" if "block_structure" in table else "weight_block_size"
    size = table.get(key)
    if size is None:
        return None
    if not (isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)):
        raise CheckpointError(
            f"{config}: quantization_config.{key} is {size!r}; it must be two positive integers such as [128, 128]"
        )
    return (size[0], size[1])


def _read_headers(file: Path) -> list[TensorHeader]:
    with open_file(file) as reader:
        headers = []
        for name in reader.offset_keys():
            part = reader.get_slice(name)
            headers.append(TensorHeader(name=name, file=file, dtype=part.get_dtype(), shape=tuple(part.get_shape())))
        return headers


def _file_problem(file: Path, error: Exception) -> str:
    """What is wrong with a file that safetensors refuses, naming the first tensor that is cut off where one is.

    The layout of the file is 8 bytes with the header's length, the header in JSON, then the data.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        if (start + stream.read(len(GIT_LFS_START))).startswith(GIT_LFS_START):
            return f"{file} is a Git LFS pointer, not weights; run 'git lfs pull' in its directory"
        stream.seek(8)
        length = int.from_bytes(start, "little")
        if size < 8 or length > size - 8:
            return f"{file} ({size} bytes) is not a safetensors file or is cut off inside its header; {FETCH_AGAIN}"
        text = stream.read(length)
    try:
        ends = {
            name: 8 + length + entry["data_offsets"][1]
            for name, entry in json.loads(text).items()
            if name != "__metadata__"
        }
        cut = sorted((end, name) for name, end in ends.items() if end > size)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return f"{file} has a corrupt safetensors header ({error}); {FETCH_AGAIN}"
    if not cut:
        return f"{file} is corrupt: {error}; {FETCH_AGAIN}"
    more = f" and {len(cut) - 1} more" if len(cut) > 1 else ""
    cut_off = f"cuts off tensor {cut[0][1]}{more}"
    return f"{file} is truncated: it has {size} bytes of {cut[-1][0]}, which {cut_off}; {FETCH_AGAIN}"
