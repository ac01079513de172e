"""Random weights of the right shapes, made on the device, the same whole model in every layout.

Each value is a hash of (seed, tensor name, place in the whole checkpoint tensor), so two ranks that hold the same
rectangle hold the same values, and any layout of a model gives the same logits as one rank does.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from importlib import import_module
from math import prod, sqrt

import torch
from torch import Tensor, nn

from helix.weights.packing import held_in_fp8
from helix.weights.pieces import Piece, declare, padding_size

STANDARD_DEVIATION = 0.02
# Of dummy FP8 weights: their values are normal with deviation 10, far inside e4m3's range of 448.
FP8_SCALE = 2.0**-9
# Values hashed at a time: few launches on a GPU; what stays in a core's cache on the CPU (three times faster there).
CHUNK_VALUES = 1 << 24
CPU_CHUNK_VALUES = 1 << 16


def dummy_weights(model: nn.Module, seed: int, *, progress: Callable[[str, int], None] | None = None) -> None:
    """Fill everything that `model` declares with values of a normal distribution of deviation 0.02, on its device.

    Norm weights become one, padding zero; weights held in FP8 get scales of a power of two that puts their values in
    e4m3's range. `progress` is called as (parameter name, bytes filled) after each parameter.

    Raises ValueError where the declarations are wrong (see `declare`) or parameters are on the meta device.
    """
    with torch.inference_mode():
        scales = {id(one.packed.values): one.packed.scale.fill_(FP8_SCALE) for one in held_in_fp8(model)}
        for name, tensor, pieces in declare(model):
            if tensor.is_meta:
                raise ValueError(f"{name} is on the meta device and cannot be filled; materialise the model first")
            if padding_size(tensor, pieces):
                tensor.zero_()
            factor = 1 / FP8_SCALE if id(tensor) in scales else 1.0
            for piece in pieces:
                _fill_random(piece.view(tensor), piece, seed, factor)
            if progress is not None:
                progress(name, tensor.numel() * tensor.element_size())


def _fill_random(target: Tensor, piece: Piece, seed: int, factor: float) -> None:
    """Fill the view `target` of a parameter, which has the piece's size, with `factor` times its values."""
    if piece.name.endswith("norm.weight"):
        target.fill_(1.0)
        return
    if not piece.numel:
        return
    keys = _dim_keys(seed, piece.name, max(len(piece.shape), 1))
    if target.device.type == "cuda" and target.dim() == 2 and target.stride(1) == 1:
        # One pass instead of twenty. Its module needs a compiler, so it is imported here.
        fill = import_module("helix.kernels.triton_fill").fill_normal
        (first_row, _), (first_column, _) = piece.source
        fill(target, (first_row, first_column), (keys[0], keys[1]), sqrt(2.0) * STANDARD_DEVIATION * factor)
        return
    if not piece.shape:
        target.copy_(_normal(_scramble(torch.tensor(keys[0], dtype=torch.int32, device=target.device))))
        return
    # Rows at a time, so that the hash takes only a few buffers of one chunk.
    (first, last), rest = piece.source[0], piece.source[1:]
    chunk = CPU_CHUNK_VALUES if target.device.type == "cpu" else CHUNK_VALUES
    step = max(chunk // prod(piece.size[1:]), 1)
    for start in range(first, last, step):
        stop = min(start + step, last)
        hashed = _place_hash(((start, stop), *rest), keys, target.device)
        target[start - first : stop - first].copy_(_normal(hashed).mul_(factor))


def _dim_keys(seed: int, name: str, count: int) -> list[int]:
    """`count` signed 32-bit keys from seed and tensor name."""
    digest = blake2b(f"{seed}:{name}".encode(), digest_size=4 * count).digest()
    return [int.from_bytes(digest[4 * i : 4 * i + 4], "little", signed=True) for i in range(count)]


def _place_hash(source: tuple[tuple[int, int], ...], keys: list[int], device: torch.device) -> Tensor:
    """32-bit hash of each place of the rectangle `source`; int32 of the rectangle's shape."""
    hashed = torch.zeros((1,) * len(source), dtype=torch.int32, device=device)
    for dim, ((start, stop), key) in enumerate(zip(source, keys, strict=True)):
        places = _scramble(torch.arange(start, stop, dtype=torch.int32, device=device) ^ key)
        hashed = hashed ^ places.view([-1 if other == dim else 1 for other in range(len(source))])
    return _scramble(hashed)


def _scramble(x: Tensor) -> Tensor:
    """Mix int32 values in place, one to one: Wellons' two-round multiply-xorshift ("lowbias32").

    A right shift of int32 repeats the sign bit, hence the masks; products wrap around.
    """
    x ^= (x >> 16) & 0xFFFF
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x846CA68B - (1 << 32)
    x ^= (x >> 16) & 0xFFFF
    return x


def _normal(hashed: Tensor) -> Tensor:
    """fp32 normal values from int32 hashes: 24 bits give a uniform value inside (-1, 1), erfinv bends it."""
    uniform = (hashed >> 8).to(torch.float32).add_(0.5).mul_(2.0**-23)
    return uniform.erfinv_().mul_(sqrt(2.0) * STANDARD_DEVIATION)
