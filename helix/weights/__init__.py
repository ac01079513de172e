"""Weights: what each rank declares, and the loaders that fill it.

Layers declare as data which rectangle of which checkpoint tensor fills which rectangle of each parameter (`pieces`);
`load_weights` executes that from safetensors files and is strict both ways; `dummy_weights` fills the same
declarations with random values. Pickle is never read.
"""

from __future__ import annotations

from helix.weights.checkpoint import Checkpoint, TensorHeader, open_checkpoint
from helix.weights.dummy import dummy_weights
from helix.weights.load import LoadReport, check_checkpoint, fp8_tensors, load_weights
from helix.weights.packing import Held, Packable, Packing, held_in_fp8, pack
from helix.weights.pieces import (
    Declaration,
    Piece,
    block,
    cols,
    declare,
    declared_names,
    padding_size,
    rows,
    weight_bytes,
    whole,
)

__all__ = [
    "Checkpoint",
    "Declaration",
    "Held",
    "LoadReport",
    "Packable",
    "Packing",
    "Piece",
    "TensorHeader",
    "block",
    "check_checkpoint",
    "cols",
    "declare",
    "declared_names",
    "dummy_weights",
    "fp8_tensors",
    "held_in_fp8",
    "load_weights",
    "open_checkpoint",
    "pack",
    "padding_size",
    "rows",
    "weight_bytes",
    "whole",
]
