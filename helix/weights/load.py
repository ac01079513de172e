"""Fills the parameters of one rank from safetensors files, reading only the slices that it declares.

Plan first, from headers alone (`check_checkpoint`), then read (`load_weights`): files in order, each once, one slice in
memory at a time. Block-quantised FP8 weights stay as they are where the parameter is FP8 (`helix.weights.packing`) and
are dequantised while a slice is read where it is not; other weights are quantised for an FP8 parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from math import prod
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn

from helix.errors import CheckpointError
from helix.kernels.fp8 import quantise
from helix.weights.checkpoint import (
    COMPRESSED,
    Checkpoint,
    Reader,
    TensorHeader,
    listing,
    open_checkpoint,
    open_file,
    read_slice,
)
from helix.weights.packing import Held, held_in_fp8, place_scales
from helix.weights.pieces import Declaration, Piece, Range, declare, padding_size

Ignore: TypeAlias = Sequence[str] | Callable[[str], bool]

FP8 = "F8_E4M3"
VALUE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, FP8: 1}
SCALE_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E8M0": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What one rank reads: `read_bytes` from the files in all, `largest_bytes` in its largest single slice.

    `ignored` names the checkpoint tensors that matched `ignore`, `padded` the parameters with zeroed places.
    """

    num_files: int
    num_tensors: int
    read_bytes: int
    largest_bytes: int
    padded: tuple[str, ...]
    ignored: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """Scales of an FP8 tensor: entry (i, j) multiplies rows [i * bm, (i + 1) * bm) and columns likewise.

    `block_size` has one entry per dim of the weight; the dims before the last two are not blocked. The file may leave
    out dims of one entry: a scale for each row, or one for all.
    """

    header: TensorHeader
    block_size: tuple[int, ...]

    @property
    def block(self) -> tuple[int, int]:
        return self.block_size[-2], self.block_size[-1]

    def source(self, piece: Piece) -> tuple[Range, ...]:
        """The scales that cover the piece's rectangle, blocks that it cuts included."""
        return tuple(
            (start // size, -(-stop // size)) for (start, stop), size in zip(piece.source, self.block_size, strict=True)
        )

    def read(self, reader: Reader, piece: Piece) -> Tensor:
        """The scales of `source`, in as many dims as the weight has."""
        source = self.source(piece)
        part = read_slice(reader, self.header, source[: len(self.header.shape)])
        return part.reshape([stop - start for start, stop in source])

    def num_bytes(self, piece: Piece) -> int:
        return prod(stop - start for start, stop in self.source(piece)) * SCALE_BYTES[self.header.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fill:
    """One piece to read into one parameter: `scale` where the tensor is FP8, `held` where the parameter is."""

    parameter_name: str
    parameter: Tensor
    piece: Piece
    header: TensorHeader
    scale: _Scale | None
    held: Held | None

    @property
    def source(self) -> tuple[Range, ...]:
        """What is read of the tensor: the piece, and the rest of the blocks it cuts where it is to be quantised."""
        if self.held is None or self.scale is not None:
            return self.piece.source
        return tuple(
            (start - start % size, min(-(-stop // size) * size, end))
            for (start, stop), size, end in zip(self.piece.source, self.held.block, self.header.shape, strict=True)
        )

    @property
    def num_bytes(self) -> int:
        """Bytes read from the files."""
        if not self.piece.numel:
            return 0
        scale_bytes = self.scale.num_bytes(self.piece) if self.scale else 0
        return prod(stop - start for start, stop in self.source) * VALUE_BYTES[self.header.dtype] + scale_bytes


def check_checkpoint(
    declarations: Iterable[Declaration],
    directory: Path,
    *,
    ignore: Ignore = (),
    known: frozenset[str] | None = None,
    rename: Callable[[str], str] | None = None,
    held: Iterable[Held] = (),
) -> LoadReport:
    """Everything that `load_weights` checks before it reads, from headers alone; parameters may be on the meta device.

    Arguments and errors are those of `load_weights`; `held` are the FP8 parameters among the declarations
    (`held_in_fp8`). The report says what a load would read.
    """
    return _plan(tuple(declarations), held, open_checkpoint(directory, rename), ignore, known)[1]


def fp8_tensors(directory: Path, rename: Callable[[str], str] | None = None) -> frozenset[str]:
    """Names, through `rename`, of the tensors that the checkpoint in `directory` stores in FP8. Reads headers only."""
    return frozenset(name for name, header in open_checkpoint(directory, rename).tensors.items() if header.dtype == FP8)


def load_weights(
    model: nn.Module,
    directory: Path,
    *,
    ignore: Ignore = (),
    known: frozenset[str] | None = None,
    progress: Callable[[str, int], None] | None = None,
    rename: Callable[[str], str] | None = None,
) -> LoadReport:
    """Fill every parameter that `model` declares from the safetensors in `directory`, cast to its dtype, on its device.

    Args:
        model: modules with ``declared`` (see `helix.weights.pieces`), materialised.
        directory: a Hugging Face checkpoint directory.
        ignore: checkpoint tensors (by their name in the files) that nobody needs: shell patterns such as
            ``vision_tower.*``, or a function that says so.
        known: names that the whole model declares, over all ranks (`declared_names` of the unsharded model). A tensor
            of another rank, such as an expert of another EP rank, is not extra. Default: this rank's names.
        progress: called as (tensor name, bytes read for it) after each tensor; the bytes add up to `read_bytes`.
        rename: maps a tensor's name in the files to the name that the pieces use.

    An FP8 tensor needs block scales in ``<name>_scale_inv`` and ``quantization_config.weight_block_size`` in
    config.json; one of a ``compressed-tensors`` checkpoint needs scales in ``<name>_scale``, for blocks, for rows, or
    one for all. It is dequantised, unless the parameter is held in FP8 itself: then values and scales are copied as
    they are. Other tensors are quantised for such a parameter.

    Raises:
        CheckpointError: a file is missing, truncated or corrupt, a tensor is missing, misshapen, extra, there twice, or
            of a dtype that cannot fill the parameter.
        ValueError: the model's declarations are wrong (see `declare`) or its parameters are on the meta device.
    """
    declarations = tuple(declare(model))
    on_meta = [name for name, tensor, _ in declarations if tensor.is_meta]
    if on_meta:
        raise ValueError(
            f"parameters on the meta device cannot be filled, materialise them first: {listing(on_meta, 3)}"
        )
    held = tuple(held_in_fp8(model))
    fills, report = _plan(declarations, held, open_checkpoint(directory, rename), ignore, known)
    with torch.inference_mode(), ExitStack() as stack:
        for _, tensor, pieces in declarations:
            if padding_size(tensor, pieces):
                tensor.zero_()
        for one in held:
            one.packed.scale.zero_()
        scale_readers: dict[Path, Reader] = {}
        for file, in_file in groupby(fills, key=lambda fill: fill.header.file):
            with open_file(file) as reader:
                for name, of_tensor in groupby(in_file, key=lambda fill: fill.piece.name):
                    num_bytes = sum(_read(fill, reader, scale_readers, stack) for fill in of_tensor)
                    if progress is not None:
                        progress(name, num_bytes)
    return report


def _plan(
    declarations: tuple[Declaration, ...],
    held: Iterable[Held],
    checkpoint: Checkpoint,
    ignore: Ignore,
    known: frozenset[str] | None,
) -> tuple[list[_Fill], LoadReport]:
    """All fills in the order of files and offsets, after every check that headers allow."""
    wanted: dict[str, list[tuple[str, Tensor, Piece]]] = {}
    for parameter_name, tensor, pieces in declarations:
        for piece in pieces:
            wanted.setdefault(piece.name, []).append((parameter_name, tensor, piece))
    known = frozenset(wanted) | (known or frozenset())
    _check_missing(known, checkpoint)
    in_fp8 = {id(one.packed.values): one for one in held}
    fills: list[_Fill] = []
    for name, header in checkpoint.tensors.items():
        fills.extend(
            _make_fill(checkpoint, header, parameter_name, tensor, piece, in_fp8.get(id(tensor)))
            for parameter_name, tensor, piece in wanted.get(name, ())
        )
    ignored = _check_extra(checkpoint, ignore, known)
    report = LoadReport(
        num_files=len({fill.header.file for fill in fills}),
        num_tensors=len(wanted),
        read_bytes=sum(fill.num_bytes for fill in fills),
        largest_bytes=max((fill.num_bytes for fill in fills), default=0),
        padded=tuple(name for name, tensor, pieces in declarations if padding_size(tensor, pieces)),
        ignored=ignored,
    )
    return fills, report


def _check_missing(known: frozenset[str], checkpoint: Checkpoint) -> None:
    missing = sorted(known - checkpoint.tensors.keys())
    if not missing:
        return
    unused = [header.name for name, header in checkpoint.tensors.items() if name not in known]
    others = f"; it holds {len(unused)} tensors of other names: {listing(unused, 3)}" if unused else ""
    raise CheckpointError(
        f"{checkpoint.directory} lacks {len(missing)} of the {len(known)} tensors that the model needs: "
        f"{listing(missing)}{others}{_quantization_hint(checkpoint)}"
    )


def _check_extra(checkpoint: Checkpoint, ignore: Ignore, known: frozenset[str]) -> tuple[str, ...]:
    """Names that `ignore` matched; CheckpointError where a tensor is neither used by any rank nor ignored."""
    ignored: list[str] = []
    extra: list[str] = []
    for name, header in checkpoint.tensors.items():
        weight = name.removesuffix(checkpoint.scale_suffix)
        is_scale = weight != name and weight in known and checkpoint.tensors[weight].dtype == FP8
        if name in known or is_scale:
            continue
        (ignored if _is_ignored(header.name, ignore) else extra).append(header.name)
    if extra:
        raise CheckpointError(
            f"{checkpoint.directory} holds {len(extra)} tensors that the model does not use: {listing(extra)}; "
            f"it is of another model, or of a variant of it that Helix does not know{_quantization_hint(checkpoint)}"
        )
    return tuple(ignored)


def _is_ignored(name: str, ignore: Ignore) -> bool:
    if callable(ignore):
        return ignore(name)
    patterns = (ignore,) if isinstance(ignore, str) else ignore
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _quantization_hint(checkpoint: Checkpoint) -> str:
    if checkpoint.quant_method in (None, "fp8", COMPRESSED):
        return ""
    return (
        f"; config.json says quantization_config.quant_method is {checkpoint.quant_method!r}, and Helix reads only fp8 "
        f"with weight_block_size, {COMPRESSED} in FP8, or weights that are not quantised"
    )


def _make_fill(
    checkpoint: Checkpoint,
    header: TensorHeader,
    parameter_name: str,
    parameter: Tensor,
    piece: Piece,
    held: Held | None,
) -> _Fill:
    """One fill, after checking shape and dtype of its tensor."""
    where = f"{header.file}: tensor {header.name}"
    if header.shape != piece.shape:
        raise CheckpointError(
            f"{where} has shape {list(header.shape)}, but the model needs {list(piece.shape)}; the checkpoint and its "
            "config.json do not belong together"
        )
    if not parameter.is_floating_point():
        raise ValueError(f"{parameter_name} has dtype {parameter.dtype}; only floating-point tensors are loaded")
    if header.dtype not in VALUE_BYTES:
        raise CheckpointError(
            f"{where} has dtype {header.dtype}, which cannot fill {parameter_name} ({parameter.dtype}); expected one "
            f"of {', '.join(VALUE_BYTES)}{_quantization_hint(checkpoint)}"
        )
    if (parameter.dtype is torch.float8_e4m3fn) != (held is not None):
        raise ValueError(f"{parameter_name} has dtype {parameter.dtype}; FP8 parameters are those that `pack` made")
    scale = _find_scale(checkpoint, header, piece) if header.dtype == FP8 else None
    return _Fill(parameter_name=parameter_name, parameter=parameter, piece=piece, header=header, scale=scale, held=held)


def _find_scale(checkpoint: Checkpoint, header: TensorHeader, piece: Piece) -> _Scale:
    """The block scales of an FP8 tensor, after checking that they are there and fit it."""
    name = piece.name + checkpoint.scale_suffix
    where = f"{header.file}: tensor {header.name} has dtype {FP8}"
    scale = checkpoint.tensors.get(name)
    if scale is None:
        raise CheckpointError(f"{where}, but its block scales {name} are missing{_quantization_hint(checkpoint)}")
    if len(header.shape) < 2:
        raise CheckpointError(f"{where} and shape {list(header.shape)}; block scales need at least two dims")
    if scale.dtype not in SCALE_BYTES:
        raise CheckpointError(
            f"{scale.file}: scales {name} have dtype {scale.dtype}; expected one of {', '.join(SCALE_BYTES)}"
        )
    block = checkpoint.block_size
    if block is None and checkpoint.quant_method != COMPRESSED:
        raise CheckpointError(
            f"{where}, but config.json gives no quantization_config.weight_block_size (such as [128, 128])"
        )
    if block is None:
        one = prod(scale.shape) == 1
        block = (header.shape[-2] if one else 1, header.shape[-1])
    block_size = (1,) * (len(header.shape) - 2) + block
    needed = tuple(-(-size // length) for size, length in zip(header.shape, block_size, strict=True))
    if scale.shape != needed and (checkpoint.block_size is not None or scale.shape not in ((needed[0],), ())):
        raise CheckpointError(
            f"{scale.file}: scales {name} have shape {list(scale.shape)}, but {header.name} of {list(header.shape)} in "
            f"blocks of {list(block)} needs {list(needed)}"
        )
    return _Scale(header=scale, block_size=block_size)


def _read(fill: _Fill, reader: Reader, others: dict[Path, Reader], stack: ExitStack) -> int:
    """Copy one slice into its place: moved to the device, (de)quantised where it has to be, cast. Returns bytes read.

    Scales may lie in another shard than `reader`'s; that one stays open in `others` until `stack` closes.
    """
    if not fill.piece.numel:
        return 0
    target = fill.piece.view(fill.parameter)
    part = read_slice(reader, fill.header, fill.source)
    if fill.scale is None:
        if fill.held is not None:
            _quantise(fill, fill.held, part)
            return fill.num_bytes
    else:
        file = fill.scale.header.file
        if file != fill.header.file:
            if file not in others:
                others[file] = stack.enter_context(open_file(file))
            reader = others[file]
        scales = fill.scale.read(reader, fill.piece).to(target.device).to(torch.float32)
        # FP8 travels to the device as it is; only there it grows to fp32.
        part = part.to(target.device)
        if fill.held is not None:
            place_scales(scales, fill.piece, fill.scale.block, fill.held.packed)
        else:
            part = part.to(torch.float32)
            _multiply_blocks(part, scales, fill.piece.source, fill.scale.block_size)
    target.copy_(part)
    if target.dtype is torch.float16 and not torch.isfinite(target).all():
        raise CheckpointError(
            f"{fill.header.file}: tensor {fill.header.name} ({fill.header.dtype}) holds values that float16 cannot; "
            "set model.dtype to bfloat16 or float32"
        )
    return fill.num_bytes


def _quantise(fill: _Fill, held: Held, part: Tensor) -> None:
    """Fill a rectangle of an FP8 parameter and its scales from `part`, whole blocks in another format."""
    target = fill.piece.view(fill.parameter)
    values, scales = quantise(part.to(target.device).to(torch.float32), held.block)
    if not torch.isfinite(scales).all():
        raise CheckpointError(
            f"{fill.header.file}: tensor {fill.header.name} ({fill.header.dtype}) holds values that are not finite, "
            "which FP8 cannot; set model.quantize to none"
        )
    cut = tuple(
        slice(start - whole, stop - whole)
        for (start, stop), (whole, _) in zip(fill.piece.source, fill.source, strict=True)
    )
    target.copy_(values[cut])
    place_scales(scales, fill.piece, held.block, held.packed)


def _multiply_blocks(part: Tensor, scales: Tensor, source: tuple[Range, ...], block_size: tuple[int, ...]) -> None:
    """Multiply the rectangle `source` of a weight, given as fp32 `part`, in place by the scales of the blocks it meets.

    Blocks count from the tensor's own origin, so a rectangle may begin and end inside one. `scales` has the same dims:
    [..., blocks of rows, blocks of columns].
    """
    (row_start, row_stop), (col_start, col_stop) = source[-2:]
    bm, bn = block_size[-2:]
    if bm == 1 and bn >= col_stop:
        part.mul_(scales)
        return
    columns = torch.arange(col_start, col_stop, device=part.device) // bn - col_start // bn
    column_scales = scales.index_select(-1, columns)
    # One block row at a time: the scales of the whole rectangle would take as much memory as the weight itself.
    for row, begin in enumerate(range(row_start - row_start % bm, row_stop, bm)):
        block_rows = slice(max(begin, row_start) - row_start, min(begin + bm, row_stop) - row_start)
        part[..., block_rows, :].mul_(column_scales[..., row : row + 1, :])
