"""Weights: declared rectangles are filled exactly once from safetensors, strictly both ways, reading slices only."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from helix.errors import CheckpointError
from helix.layout import padded_slice, uneven_slice
from helix.weights import (
    Piece,
    block,
    check_checkpoint,
    checkpoint,
    cols,
    declare,
    declared_names,
    dummy,
    dummy_weights,
    load,
    load_weights,
    rows,
    weight_bytes,
    whole,
)

FP8_CONFIG = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 3]}}


class Shard(nn.Module):
    """One parameter `weight`, filled with garbage so that a place which is not written shows."""

    def __init__(
        self, shape: tuple[int, ...], *pieces: Piece, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full(shape, 7.0, dtype=dtype, device=device), requires_grad=False)
        self.declared = {"weight": pieces}


def write(directory: Path, *shards: dict[str, Tensor], config: Mapping[str, object] | None = None) -> Path:
    """A checkpoint of one file, or of one shard per dict with an index; returns the directory."""
    if len(shards) == 1:
        save_file(shards[0], directory / "model.safetensors")
    else:
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
        for name, shard in zip(names, shards, strict=True):
            save_file(shard, directory / name)
        listed = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        write_index(directory, listed)
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    return directory


def write_index(directory: Path, listed: object) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))


def grid(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """1, 2, 3 ... of `shape`: no two places alike, none zero."""
    return torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape).to(dtype)


def failure(model: nn.Module, directory: Path, **options: object) -> str:
    """The message of the CheckpointError that both the check and the load raise."""
    with pytest.raises(CheckpointError) as checked:
        check_checkpoint(declare(model), directory, **options)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError) as loaded:
        load_weights(model, directory, **options)  # type: ignore[arg-type]
    assert str(checked.value) == str(loaded.value)
    return str(loaded.value)


# Pieces and declarations


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        (((0, 3),), ((0, 3), (0, 2)), "one range per dim"),
        (((0, 5), (0, 2)), ((0, 5), (0, 2)), "not inside shape"),
        (((3, 2), (0, 2)), ((0, 0), (0, 2)), "not inside shape"),
        (((0, 3), (0, 2)), ((0, 3), 1, (0, 2)), "an int comes after a range"),
        (((0, 3), (0, 2)), ((0, 2), (0, 3)), "source has size"),
        (((0, 3), (0, 2)), (1, (0, 3)), "source has size"),
    ],
)
def test_piece_that_does_not_fit_names_its_tensor(source: object, target: object, reason: str) -> None:
    with pytest.raises(ValueError, match=f"piece of w: .*{reason}"):
        Piece("w", (4, 2), source, target)  # type: ignore[arg-type]


def test_constructors_spell_source_and_target() -> None:
    assert rows("w", (8, 3), 2, 5, at=1) == Piece("w", (8, 3), ((2, 5), (0, 3)), ((1, 4), (0, 3)))
    assert rows("b", (8,), 2, 5) == Piece("b", (8,), ((2, 5),), ((0, 3),))
    assert cols("w", (8, 6), 2, 5, at=1, select=(4,)) == Piece("w", (8, 6), ((0, 8), (2, 5)), (4, (0, 8), (1, 4)))
    assert whole("w", (2, 3), at=5) == Piece("w", (2, 3), ((0, 2), (0, 3)), ((5, 7), (0, 3)))
    assert block("w", (4, 4), ((1, 2), (2, 4)), (3, 0)) == Piece("w", (4, 4), ((1, 2), (2, 4)), ((3, 4), (0, 2)))


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ((rows("w", (9, 2), 0, 5),), "not inside the parameter's shape"),
        ((rows("w", (9, 2), 0, 2, at=3),), "not inside the parameter's shape"),
        ((rows("w", (9,), 0, 2),), "not inside the parameter's shape"),
        ((rows("w", (9, 2), 0, 2), rows("v", (9, 2), 4, 6, at=1)), "w at .* and v at .* fill the same places"),
        ((whole("w", (4, 2)), rows("w", (9, 2), 3, 3), block("v", (1, 1), ((0, 1), (0, 1)), (3, 1))), "same places"),
    ],
)
def test_wrong_target_or_overlap_names_parameter(pieces: tuple[Piece, ...], reason: str) -> None:
    with pytest.raises(ValueError, match=f"weight: .*{reason}"):
        list(declare(Shard((4, 2), *pieces)))


def test_overlap_of_selected_place_and_range() -> None:
    stack = Shard((3, 2, 2), whole("a", (2, 2), select=(1,)), whole("b", (2, 2, 2)))
    with pytest.raises(ValueError, match="same places"):
        list(declare(stack))
    apart = Shard((3, 2, 2), whole("a", (2, 2), select=(2,)), whole("b", (2, 2, 2)))
    assert [name for name, _, _ in declare(apart)] == ["weight"]


def test_overlap_is_found_in_any_order_and_empty_pieces_meet_nothing() -> None:
    apart = rows("a", (9, 2), 0, 2), rows("b", (9, 2), 0, 1, at=3), rows("c", (9, 2), 9, 9, at=1)
    assert len(list(declare(Shard((4, 2), *apart)))) == 1
    with pytest.raises(ValueError, match=r"a at .* and d at .* fill the same places"):
        list(declare(Shard((4, 2), *apart, rows("d", (9, 2), 0, 1, at=1))))


def test_every_parameter_must_be_declared_and_every_declaration_must_exist() -> None:
    bare = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="Linear '0' does not declare its parameters bias, weight"):
        list(declare(bare))
    shard = Shard((2,), whole("w", (2,)))
    shard.declared["scale"] = ()
    with pytest.raises(ValueError, match="scale is declared but is neither a parameter nor a buffer of Shard"):
        list(declare(shard))


def test_shared_tensor_comes_once_and_must_be_declared_alike(tmp_path: Path) -> None:
    embed, head = Shard((4, 2), whole("embed", (4, 2))), Shard((4, 2), whole("embed", (4, 2)))
    head.weight = embed.weight
    model = nn.ModuleDict({"embed": embed, "head": head})
    assert [name for name, _, _ in declare(model)] == ["embed.weight"]
    assert weight_bytes(model) == 32
    load_weights(model, write(tmp_path, {"embed": grid(4, 2)}))
    assert head.weight.equal(grid(4, 2))
    head.declared["weight"] = (whole("head", (4, 2)),)
    with pytest.raises(ValueError, match=r"embed\.weight and head\.weight are one tensor"):
        list(declare(model))


def test_buffers_are_filled_where_declared_and_left_alone_elsewhere(tmp_path: Path) -> None:
    model = Shard((2,), whole("w", (2,)))
    model.register_buffer("bias", torch.zeros(3))
    model.register_buffer("table", torch.ones(3))
    model.declared["bias"] = (whole("b", (3,)),)
    load_weights(model, write(tmp_path, {"w": grid(2), "b": grid(3)}))
    assert model.get_buffer("bias").equal(grid(3))
    assert model.get_buffer("table").equal(torch.ones(3))


def test_weight_bytes_from_a_meta_model() -> None:
    model = nn.Sequential(
        Shard((1000, 10), dtype=torch.bfloat16, device="meta"), Shard((7,), whole("n", (7,)), device="meta")
    )
    assert weight_bytes(model) == 20_000 + 28


# Slices of all ranks make the whole


@settings(max_examples=30, deadline=None)
@given(
    num_rows=st.integers(1, 9),
    num_cols=st.integers(1, 9),
    tp=st.integers(1, 5),
    ep=st.integers(1, 4),
    num_experts=st.integers(1, 6),
    seed=st.integers(0, 99),
)
def test_ranks_hold_the_whole_exactly_once(
    num_rows: int, num_cols: int, tp: int, ep: int, num_experts: int, seed: int
) -> None:
    """Fused rows, columns, a bias, and experts on a TPF x EP grid, in a random split over two shards."""
    shape = (num_rows, num_cols)
    names = ["up", "gate", "down", "bias", *(f"experts.{e}.{w}" for e in range(num_experts) for w in ("up", "down"))]
    tensors = {name: grid(*(shape[:1] if name == "bias" else shape)) + 1000 * i for i, name in enumerate(names)}
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(seed)).tolist()
    shards = ({names[i]: tensors[names[i]] for i in order[:3]}, {names[i]: tensors[names[i]] for i in order[3:]})
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    with tempfile.TemporaryDirectory() as folder:
        directory = write(Path(folder), *shards)
        for rank in range(tp * ep):
            model = mixed_rank(shape, rank % tp, tp, uneven_slice(num_experts, ep, rank // tp))
            load_weights(model, directory, known=frozenset(names))
            for _, tensor, pieces in declare(model):
                left = tensor.clone()
                for piece in pieces:
                    if rank < tp or piece.name.startswith("experts."):
                        source = tuple(slice(*one) for one in piece.source)
                        found[piece.name][source] += piece.view(tensor)
                    piece.view(left).zero_()
                assert not left.any(), "padding is zero"
    for name, tensor in tensors.items():
        assert found[name].equal(tensor), name


def mixed_rank(shape: tuple[int, int], tp_rank: int, tp: int, experts: object) -> nn.Module:
    """What one rank of a TPF x EP grid declares, column-parallel, row-parallel and by expert, padded."""
    num_rows, num_cols = shape
    row, col = padded_slice(num_rows, tp, tp_rank), padded_slice(num_cols, tp, tp_rank)
    mine = range(experts.start, experts.stop)  # type: ignore[attr-defined]
    return nn.ModuleDict(
        {
            "fused": Shard(
                (2 * row.padded, num_cols),
                rows("up", shape, row.start, row.stop),
                rows("gate", shape, row.start, row.stop, at=row.padded),
            ),
            "down": Shard((num_rows, col.padded), cols("down", shape, col.start, col.stop)),
            "bias": Shard((row.padded,), rows("bias", shape[:1], row.start, row.stop)),
            "up": Shard(
                (len(mine), row.padded, num_cols),
                *(rows(f"experts.{e}.up", shape, row.start, row.stop, select=(i,)) for i, e in enumerate(mine)),
            ),
            "out": Shard(
                (len(mine), num_rows, col.padded),
                *(cols(f"experts.{e}.down", shape, col.start, col.stop, select=(i,)) for i, e in enumerate(mine)),
            ),
        }
    )


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_casts_to_the_parameters_dtype(tmp_path: Path, source: torch.dtype, target: torch.dtype) -> None:
    values = torch.randn(5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(source)
    model = Shard((2, 6), rows("w", (5, 6), 1, 3), dtype=target)
    load_weights(model, write(tmp_path, {"w": values}))
    assert model.weight.dtype is target
    assert model.weight.equal(values[1:3].to(target))


def test_value_beyond_float16_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"w": torch.tensor([1.0, 70000.0], dtype=torch.bfloat16)})
    with pytest.raises(CheckpointError, match=r"w \(BF16\) holds values that float16 cannot; set model.dtype"):
        load_weights(Shard((2,), whole("w", (2,)), dtype=torch.float16), tmp_path)


def test_scalar_and_empty_tensors(tmp_path: Path) -> None:
    model = nn.ModuleDict({"s": Shard((), whole("s", ())), "e": Shard((0, 3), rows("w", (4, 3), 4, 4))})
    report = load_weights(model, write(tmp_path, {"s": torch.tensor(3.0), "w": grid(4, 3)}))
    assert model.get_parameter("s.weight").item() == 3.0
    assert report.read_bytes == 4


# What is read


def test_progress_report_and_file_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"b": grid(8, 4), "vision.x": grid(2)}, {"a": grid(8, 4).half(), "c": grid(3)})
    pieces = rows("a", (8, 4), 0, 2), rows("b", (8, 4), 0, 4, at=2), rows("b", (8, 4), 6, 8, at=6)
    model = nn.ModuleDict({"x": Shard((9, 4), *pieces), "y": Shard((3,), whole("c", (3,)))})
    seen: list[tuple[str, int]] = []
    opened: list[str] = []
    open_file = checkpoint.open_file

    def spy(file: Path) -> AbstractContextManager[object]:
        opened.append(file.name)
        return open_file(file)

    monkeypatch.setattr(load, "open_file", spy)
    report = load_weights(
        model, tmp_path, ignore=["vision.*"], progress=lambda name, num_bytes: seen.append((name, num_bytes))
    )
    assert opened == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert seen[0] == ("b", 6 * 4 * 4)
    assert sorted(seen[1:]) == [("a", 2 * 4 * 2), ("c", 12)]
    assert report.read_bytes == sum(num_bytes for _, num_bytes in seen)
    assert report.largest_bytes == 64
    assert (report.num_files, report.num_tensors) == (2, 3)
    assert report.ignored == ("vision.x",)
    assert report.padded == ("x.weight",)
    assert check_checkpoint(declare(model.to("meta")), tmp_path, ignore=["vision.*"]) == report


@pytest.mark.parametrize("part", ["rows", "cols"])
def test_an_eighth_is_read_without_the_whole(tmp_path: Path, part: str) -> None:
    """A 16 MiB tensor: loading an eighth into place allocates next to nothing."""
    size, eighth = 2048, 256
    values = torch.randn(size, size, generator=torch.Generator().manual_seed(0))
    write(tmp_path, {"w": values})
    if part == "rows":
        model, expected = Shard((eighth, size), rows("w", (size, size), 256, 512)), values[256:512]
    else:
        model, expected = Shard((size, eighth), cols("w", (size, size), 256, 512)), values[:, 256:512]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        report = load_weights(model, tmp_path)
    allocated = sum(max(event.self_cpu_memory_usage, 0) for event in profiled.key_averages())
    assert model.weight.equal(expected)
    assert report.read_bytes == size * eighth * 4
    assert allocated < size * eighth * 4 / 8


# Strict both ways


def test_missing_and_extra_tensors_are_named(tmp_path: Path) -> None:
    write(tmp_path, {"model.w": grid(2), "odd": grid(1)})
    message = failure(Shard((2,), whole("w", (2,))), tmp_path)
    assert "lacks 1 of the 1 tensors that the model needs: w; it holds 2 tensors of other names: " in message
    assert "model.w" in message
    message = failure(Shard((2,), whole("model.w", (2,))), tmp_path)
    assert "holds 1 tensors that the model does not use: odd;" in message


def test_long_lists_are_cut_after_ten(tmp_path: Path) -> None:
    write(tmp_path, {"w": grid(2), **{f"extra.{i:02d}": grid(1) for i in range(13)}})
    message = failure(Shard((2,), whole("w", (2,))), tmp_path)
    assert "extra.09 and 3 more;" in message
    assert "extra.10" not in message


@pytest.mark.parametrize("ignore", [("vision.*", "odd"), "*i*", lambda name: name != "w"])
def test_ignore_takes_patterns_or_a_function(tmp_path: Path, ignore: tuple[str, ...] | Callable[[str], bool]) -> None:
    write(tmp_path, {"w": grid(2), "vision.a": grid(1), "vision.odd": grid(1)})
    report = load_weights(Shard((2,), whole("w", (2,))), tmp_path, ignore=ignore)
    assert sorted(report.ignored) == ["vision.a", "vision.odd"]


def test_misshapen_tensor_gives_both_shapes(tmp_path: Path) -> None:
    write(tmp_path, {"w": grid(4, 3)})
    message = failure(Shard((3, 4), whole("w", (3, 4))), tmp_path)
    assert "tensor w has shape [4, 3], but the model needs [3, 4]" in message
    empty = Shard((0, 4), rows("w", (3, 4), 3, 3))
    assert "tensor w has shape" in failure(empty, tmp_path)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool, torch.float8_e5m2, torch.complex64])
def test_dtype_that_is_no_weight_is_named(tmp_path: Path, dtype: torch.dtype) -> None:
    write(tmp_path, {"w": torch.ones(2, 2).to(dtype)}, config={"quantization_config": {"quant_method": "gptq"}})
    message = failure(Shard((2, 2), whole("w", (2, 2))), tmp_path)
    assert "tensor w has dtype " in message
    assert "cannot fill weight (torch.float32)" in message
    assert "quant_method is 'gptq'" in message


def test_only_floating_parameters_are_filled(tmp_path: Path) -> None:
    write(tmp_path, {"w": grid(2)})
    with pytest.raises(ValueError, match=r"weight has dtype torch\.int32"):
        load_weights(Shard((2,), whole("w", (2,)), dtype=torch.int32), tmp_path)


def test_meta_parameters_are_refused_by_the_loader(tmp_path: Path) -> None:
    write(tmp_path, {"w": grid(2)})
    model = Shard((2,), whole("w", (2,)), device="meta")
    with pytest.raises(ValueError, match=r"meta device.*weight"):
        load_weights(model, tmp_path)
    with pytest.raises(ValueError, match="meta device"):
        dummy_weights(model, 0)


def test_another_ranks_tensor_is_neither_extra_nor_read(tmp_path: Path) -> None:
    write(tmp_path, {f"experts.{e}": grid(2, 3) + e for e in range(4)})
    ranks = [
        Shard((2, 2, 3), *(whole(f"experts.{e}", (2, 3), select=(e % 2,)) for e in range(first, first + 2)))
        for first in (0, 2)
    ]
    unsharded = Shard((4, 2, 3), *(whole(f"experts.{e}", (2, 3), select=(e,)) for e in range(4)), device="meta")
    known = declared_names(declare(unsharded))
    assert "does not use: experts.2, experts.3;" in failure(ranks[0], tmp_path)
    for first, model in enumerate(ranks):
        report = load_weights(model, tmp_path, known=known)
        assert report.num_tensors == 2
        assert report.read_bytes == 48
        assert model.weight[1].equal(grid(2, 3) + 2 * first + 1)
    assert "lacks 1 of the 5 tensors that the model needs: experts.4" in failure(
        ranks[0], tmp_path, known=known | {"experts.4"}
    )


def test_rename_maps_file_names_to_declared_names(tmp_path: Path) -> None:
    write(tmp_path, {"language_model.w": grid(2), "vision.w": grid(2)})
    model = Shard((2,), whole("w", (2,)))
    load_weights(model, tmp_path, rename=lambda name: name.removeprefix("language_model."), ignore=("vision.*",))
    assert model.weight.equal(grid(2))
    message = failure(model, tmp_path, rename=lambda name: name.rpartition(".")[2])
    assert "tensor w is there twice" in message
    assert "language_model.w" in message
    assert "vision.w" in message


# Broken directories


def one() -> Shard:
    return Shard((2,), whole("w", (2,)))


def test_no_directory_and_empty_directory(tmp_path: Path) -> None:
    assert "none does not exist" in failure(one(), tmp_path / "none")
    assert "has no weights (it is empty); expected model.safetensors" in failure(one(), tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "it holds config.json" in failure(one(), tmp_path)


def test_pickle_is_never_loaded(tmp_path: Path) -> None:
    torch.save({"w": grid(2)}, tmp_path / "pytorch_model.bin")
    message = failure(one(), tmp_path)
    assert "pytorch_model.bin" in message
    assert "pickle is never loaded" in message
    assert "convert" in message


def test_shards_without_index(tmp_path: Path) -> None:
    save_file({"w": grid(2)}, tmp_path / "model-00001-of-00002.safetensors")
    assert "model-00001-of-00002.safetensors but neither" in failure(one(), tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 30])
def test_file_cut_in_its_header(tmp_path: Path, keep: int) -> None:
    file = write(tmp_path, {"w": grid(2)}) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    message = failure(one(), tmp_path)
    assert f"model.safetensors ({keep} bytes) is not a safetensors file or is cut off" in message


def test_truncated_file_names_the_first_tensor_cut_off(tmp_path: Path) -> None:
    file = write(tmp_path, {"a": grid(9), "w": grid(9), "z": grid(9)}) / "model.safetensors"
    whole_size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-40])
    message = failure(one(), tmp_path)
    assert f"is truncated: it has {whole_size - 40} bytes of {whole_size}" in message
    assert "cuts off tensor w and 1 more; fetch the file again" in message


def test_corrupt_header_trailing_bytes_and_lfs_pointer(tmp_path: Path) -> None:
    file = write(tmp_path, {"w": grid(2)}) / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content.replace(b'"dtype"', b'"dtype\x00'))
    assert "model.safetensors has a corrupt safetensors header" in failure(one(), tmp_path)
    file.write_bytes(content.replace(b"[0,8]", b"[8,0]"))
    assert "model.safetensors is corrupt" in failure(one(), tmp_path)
    file.write_bytes(content + b"more")
    assert "model.safetensors is corrupt" in failure(one(), tmp_path)
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "is a Git LFS pointer, not weights; run 'git lfs pull'" in failure(one(), tmp_path)


def test_index_and_shards_must_agree(tmp_path: Path) -> None:
    write(tmp_path, {"w": grid(2)}, {"v": grid(2)})
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    write_index(tmp_path, {"w": first, "v": second, "u": second})
    assert f"lists tensors that the shards do not hold: u (in {second})" in failure(one(), tmp_path)
    write_index(tmp_path, {"w": second, "v": second, "u": first})
    assert f"w (in {second}), u (in {first})" in failure(one(), tmp_path)
    write_index(tmp_path, {"w": first, "v": second, "u": "model-00003-of-00003.safetensors"})
    assert "shards that are not there: model-00003-of-00003.safetensors" in failure(one(), tmp_path)
    save_file({"v": grid(2), "w": grid(2)}, tmp_path / second)
    write_index(tmp_path, {"w": first, "v": second})
    message = failure(one(), tmp_path)
    assert "tensor w is there twice" in message
    assert first in message
    assert second in message


@pytest.mark.parametrize("shard", ["../model.safetensors", "/model.safetensors", "model.bin", 3, ""])
def test_index_may_only_name_plain_safetensors_files(tmp_path: Path, shard: object) -> None:
    write_index(tmp_path, {"w": shard})
    assert f"weight_map gives {shard!r} for tensor w" in failure(one(), tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{", "{}", '{"weight_map": {}}', '{"weight_map": []}'])
def test_index_that_is_no_index(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json" in failure(one(), tmp_path)


# FP8 with block scales


def quantised(num_rows: int, num_cols: int, *stack: int) -> tuple[Tensor, Tensor, Tensor]:
    """An FP8 weight, its scales in blocks of 4 x 3, and the exact fp32 product: scales are powers of two."""
    generator = torch.Generator().manual_seed(num_rows * 100 + num_cols)
    values = torch.randint(-15, 16, (*stack, num_rows, num_cols), generator=generator).float()
    exponents = torch.randint(-6, 3, (*stack, -(-num_rows // 4), -(-num_cols // 3)), generator=generator)
    scales = torch.exp2(exponents.float())
    dense = torch.empty_like(values)
    for i in range(num_rows):
        for j in range(num_cols):
            dense[..., i, j] = values[..., i, j] * scales[..., i // 4, j // 3]
    return values.to(torch.float8_e4m3fn), scales, dense


def test_fp8_is_exact_on_every_slice(tmp_path: Path) -> None:
    """Partial last blocks, and every pair of cuts through rows and through columns."""
    shape = (10, 8)
    weight, scales, dense = quantised(*shape)
    write(tmp_path, {"w": weight, "w_scale_inv": scales, "n": grid(3).bfloat16()}, config=FP8_CONFIG)
    parts = [
        block("w", shape, ((r0, r1), (c0, c1)))
        for r0 in range(10)
        for r1 in range(r0 + 1, 11)
        for c0, c1 in ((0, 8), (2, 5), (3, 6), (7, 8))
    ]
    parts += [block("w", shape, ((3, 9), (c0, c1))) for c0 in range(8) for c1 in range(c0 + 1, 9)]
    model = nn.ModuleList([Shard(part.size, part) for part in parts])
    model.append(Shard((3,), whole("n", (3,))))
    load_weights(model, tmp_path)
    for part, shard in zip(parts, model, strict=False):
        (r0, r1), (c0, c1) = part.source
        assert shard.get_parameter("weight").equal(dense[r0:r1, c0:c1]), part.source
    assert model[-1].get_parameter("weight").equal(grid(3)), "a module that was not converted"


@settings(max_examples=20, deadline=None)
@given(num_rows=st.integers(1, 20), num_cols=st.integers(1, 14), parts=st.integers(1, 6), by_rows=st.booleans())
def test_fp8_ranks_hold_the_whole(num_rows: int, num_cols: int, parts: int, by_rows: bool) -> None:
    shape = (num_rows, num_cols)
    weight, scales, dense = quantised(*shape)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), {"w": weight}, {"w_scale_inv": scales}, config=FP8_CONFIG)
        held = []
        for rank in range(parts):
            part = padded_slice(num_rows if by_rows else num_cols, parts, rank)
            if by_rows:
                model = Shard((part.padded, num_cols), rows("w", shape, part.start, part.stop), dtype=torch.bfloat16)
            else:
                model = Shard((num_rows, part.padded), cols("w", shape, part.start, part.stop), dtype=torch.bfloat16)
            load_weights(model, Path(folder))
            assert not model.weight.narrow(0 if by_rows else 1, part.size, part.padding).any()
            held.append(model.weight.narrow(0 if by_rows else 1, 0, part.size))
    assert torch.cat(held, dim=0 if by_rows else 1).equal(dense.bfloat16())


def test_fp8_blocks_of_128_with_576_rows(tmp_path: Path) -> None:
    """The shape of DeepSeek's kv_a_proj: four and a half blocks of rows."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-8, 9, (576, 256), generator=generator).float()
    scales = torch.exp2(torch.arange(10.0)).reshape(5, 2)
    dense = values * scales.repeat_interleave(128, 0)[:576].repeat_interleave(128, 1)
    config = {"text_config": {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}}
    write(tmp_path, {"w": values.to(torch.float8_e4m3fn), "w_scale_inv": scales}, config=config)
    model = Shard((376, 256), rows("w", (576, 256), 200, 576))
    report = load_weights(model, tmp_path)
    assert model.weight.equal(dense[200:])
    assert report.read_bytes == 376 * 256 + 4 * 2 * 4, "scales of the blocks 1 to 4 only"


def test_fp8_stack_of_experts_in_one_tensor(tmp_path: Path) -> None:
    weight, scales, dense = quantised(6, 7, 3)
    write(tmp_path, {"w": weight, "w_scale_inv": scales.bfloat16()}, config=FP8_CONFIG)
    model = Shard((2, 3, 7), block("w", (3, 6, 7), ((1, 3), (2, 5), (0, 7))))
    load_weights(model, tmp_path)
    assert model.weight.equal(dense[1:3, 2:5])


def test_fp8_of_another_rank_uses_its_scales_too(tmp_path: Path) -> None:
    weight, scales, dense = quantised(4, 3)
    tensors = {"a": weight, "a_scale_inv": scales, "b": weight.clone(), "b_scale_inv": scales.clone()}
    write(tmp_path, tensors, config=FP8_CONFIG)
    model = Shard((4, 3), whole("a", (4, 3)))
    load_weights(model, tmp_path, known=frozenset({"a", "b"}))
    assert model.weight.equal(dense)
    assert "holds 2 tensors that the model does not use: " in failure(model, tmp_path)


def test_fp8_faults_are_named(tmp_path: Path) -> None:
    weight, scales, _ = quantised(8, 3)
    model = Shard((8, 3), whole("w", (8, 3)))
    write(tmp_path, {"w": weight}, config=FP8_CONFIG)
    assert "its block scales w_scale_inv are missing" in failure(model, tmp_path)
    write(tmp_path, {"w": weight, "w_scale_inv": grid(3, 1)}, config=FP8_CONFIG)
    assert "scales w_scale_inv have shape [3, 1], but w of [8, 3] in blocks of [4, 3] needs [2, 1]" in failure(
        model, tmp_path
    )
    write(tmp_path, {"w": weight, "w_scale_inv": scales.int()}, config=FP8_CONFIG)
    assert "scales w_scale_inv have dtype I32" in failure(model, tmp_path)
    write(tmp_path, {"w": weight, "w_scale_inv": scales}, config={})
    assert "config.json gives no quantization_config.weight_block_size" in failure(model, tmp_path)
    write(tmp_path, {"w": weight, "w_scale_inv": scales}, config={"quantization_config": {"weight_block_size": [4]}})
    assert "weight_block_size is [4]; it must be two positive integers" in failure(model, tmp_path)
    write(tmp_path, {"w": weight[0].clone(), "w_scale_inv": scales}, config=FP8_CONFIG)
    assert "block scales need at least two dims" in failure(Shard((3,), whole("w", (3,))), tmp_path)
    write(tmp_path, {"w": weight.float(), "w_scale_inv": scales}, config=FP8_CONFIG)
    assert "does not use: w_scale_inv" in failure(model, tmp_path), "scales of a weight that is not FP8"
    with pytest.raises(ValueError, match="FP8 parameters are those that `pack` made"):
        load_weights(Shard((8, 3), whole("w", (8, 3)), dtype=torch.float8_e4m3fn), tmp_path, ignore=["w_scale_inv"])


# Dummy weights


def filled(*args: object, seed: int = 0, **options: object) -> Tensor:
    model = Shard(*args, **options)  # type: ignore[arg-type]
    dummy_weights(model, seed)
    return model.weight.detach()


def test_dummy_slices_are_slices_of_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas agree, and so does every cut, wherever it lies in the parameter and however it is chunked."""
    shape = (12, 10)
    full = filled(shape, whole("w", shape))
    assert filled(shape, whole("w", shape)).equal(full)
    monkeypatch.setattr(dummy, "CPU_CHUNK_VALUES", 25)
    assert filled(shape, whole("w", shape)).equal(full)
    part = filled((2, 9, 4), block("w", shape, ((3, 9), (5, 8)), (2, 1), select=(1,)))
    assert part[1, 2:8, 1:4].equal(full[3:9, 5:8])
    part[1, 2:8, 1:4] = 0
    assert not part.any(), "padding is zero"


def test_dummy_values_look_normal_and_depend_on_seed_and_name() -> None:
    shape = (300, 400)
    values = filled(shape, whole("w", shape))
    assert abs(values.mean().item()) < 3e-4
    assert abs(values.std().item() - 0.02) < 2e-4
    assert abs((values.abs() < 0.02).float().mean().item() - 0.6827) < 0.005
    assert values.isfinite().all()
    assert len(set(values.flatten().tolist())) > 0.95 * values.numel()
    corr = torch.corrcoef(values[:50])
    assert (corr - torch.eye(50)).abs().max() < 0.3
    for other in (filled(shape, whole("w", shape), seed=1), filled(shape, whole("v", shape))):
        assert abs(torch.corrcoef(torch.stack([values.flatten(), other.flatten()]))[0, 1].item()) < 0.02


def test_dummy_norms_are_one_and_dtypes_kept() -> None:
    for name in ("model.norm.weight", "layers.0.input_layernorm.weight", "q_norm.weight"):
        assert filled((5,), whole(name, (5,))).equal(torch.ones(5))
    assert not filled((5,), whole("norm.bias", (5,))).equal(torch.ones(5))
    assert filled((5, 3), whole("w", (5, 3)), dtype=torch.bfloat16).equal(
        filled((5, 3), whole("w", (5, 3))).to(torch.bfloat16)
    )
    assert filled((), whole("s", ())).isfinite().all()
    assert not filled((3, 2), rows("w", (4, 2), 4, 4)).any()


def test_dummy_progress() -> None:
    heartbeats: list[tuple[str, int]] = []
    model = nn.ModuleList([Shard((4, 2), whole("a", (4, 2))), Shard((3,), whole("b", (3,)), dtype=torch.float16)])
    dummy_weights(model, 0, progress=lambda name, num_bytes: heartbeats.append((name, num_bytes)))
    assert heartbeats == [("0.weight", 32), ("1.weight", 6)]
