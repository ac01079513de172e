"""Weights that stay FP8: which of a model's parameters are held as e4m3 with block scales, and where each scale lies.

`pack` turns the parameters that a layer offers (`Packable`) into FP8 before memory is allocated: the parameter takes
one byte a value, and a buffer beside it holds fp32 scales on a grid (`helix.layout.scale_grid`). The loader fills both:
from FP8 tensors as they are stored, from others by quantising whole blocks of the tensor, so that a slice gets the same
values in every layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from helix.kernels.fp8 import Packed
from helix.layout import ScaleGrid, scale_grid
from helix.weights.pieces import Piece

BLOCK = (128, 128)
"""Values that share a scale where a checkpoint does not say it."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Blocks that share a scale, and the checkpoint tensors that are held in FP8 (None: all that layers offer)."""

    block: tuple[int, int] = BLOCK
    names: frozenset[str] | None = None

    def takes(self, pieces: tuple[Piece, ...]) -> bool:
        """Whether a parameter made of `pieces` is held in FP8: it is where all of them are."""
        return self.names is None or all(piece.name in self.names for piece in pieces)


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter held in FP8, and the `block` size that its grid was made for."""

    packed: Packed
    block: tuple[int, int]


class Packable(nn.Module):
    """A module that can hold its parameters `packable`, matrices or stacks of them, in FP8."""

    packable: ClassVar[tuple[str, ...]] = ()
    declared: dict[str, tuple[Piece, ...]]

    def __init__(self) -> None:
        super().__init__()
        self.grids: dict[str, ScaleGrid] = {}
        self.block = BLOCK

    def pack(self, packing: Packing) -> None:
        """Hold the parameters that `packing` takes in FP8, still empty, on the device where they are."""
        self.block = packing.block
        for name in self.packable:
            pieces = self.declared[name]
            if packing.takes(pieces):
                self._hold(name, scale_grid(packing.block, _cuts(pieces)))

    def packed(self, name: str) -> Packed | None:
        """Parameter `name` with its scales, or None where it is not held in FP8."""
        grid = self.grids.get(name)
        return None if grid is None else Packed(self.get_parameter(name), self.get_buffer(f"{name}_scale"), grid)

    def _hold(self, name: str, grid: ScaleGrid) -> None:
        old = self.get_parameter(name)
        values = torch.empty(old.shape, dtype=torch.float8_e4m3fn, device=old.device)
        size = (*old.shape[:-2], *grid.shape(*old.shape[-2:]))
        self.register_parameter(name, nn.Parameter(values, requires_grad=False))
        self.register_buffer(f"{name}_scale", torch.empty(size, dtype=torch.float32, device=old.device))
        self.grids[name] = grid


def pack(model: nn.Module, packing: Packing) -> None:
    """`Packable.pack` for every module of `model` that is one."""
    for module in model.modules():
        if isinstance(module, Packable):
            module.pack(packing)


def held_in_fp8(model: nn.Module) -> Iterator[Held]:
    """Every parameter under `model` that is held in FP8; ``packed.values`` is the parameter itself."""
    for module in model.modules():
        if isinstance(module, Packable):
            for name in module.grids:
                found = module.packed(name)
                if found is not None:
                    yield Held(found, module.block)


def place_scales(source: Tensor, piece: Piece, block: tuple[int, int], packed: Packed) -> None:
    """Write the scales `source` of the blocks of size `block` that `piece` meets to the cells that it fills."""
    (first_row, last_row), (first_column, last_column) = piece.source
    (target_row, _), _ = piece.box
    grid, scale = packed.grid, packed.scale
    first_cell = target_row // grid.rows
    cells = torch.arange(first_cell, -(-(target_row + last_row - first_row) // grid.rows), device=scale.device)
    rows = (cells * grid.rows - target_row + first_row) // block[0] - first_row // block[0]
    start = first_column - grid.skip
    columns = torch.arange(-(-(last_column - start) // grid.cols), device=scale.device)
    places = (columns * grid.cols + start).clamp_(min=first_column) // block[1] - first_column // block[1]
    part = source.to(device=scale.device, dtype=torch.float32).index_select(0, rows).index_select(1, places)
    scale[piece.select][first_cell : first_cell + len(cells), : len(columns)] = part


def _cuts(pieces: tuple[Piece, ...]) -> Iterator[tuple[int, int, int]]:
    """Where each piece that reads something begins, for `scale_grid`."""
    for piece in pieces:
        if piece.numel:
            (row, _), (column, _) = piece.source
            (target_row, _), (target_column, _) = piece.box
            if target_column:
                raise ValueError(f"{piece.name} is put at column {target_column}; FP8 weights must begin at column 0")
            yield row, target_row, column
