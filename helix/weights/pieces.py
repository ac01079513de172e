"""Declarations: which rectangle of which checkpoint tensor fills which rectangle of each parameter of this rank.

A module that owns parameters holds ``self.declared: dict[str, tuple[Piece, ...]]``, from its own parameter (or buffer)
names to pieces. Places of a parameter that no piece covers are padding and are set to zero. Everything here is pure
data: `declare` reads shapes only, so it works on a model on the meta device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from torch import Tensor, nn

Range: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Piece:
    """One rectangle of a checkpoint tensor and the rectangle of the parameter that it fills.

    `name` and `shape` are the tensor's name and full shape in the checkpoint. `source` has a (start, stop) for each dim
    of it; an empty range reads nothing but still asks that the tensor is there with this shape. `target` indexes the
    parameter, one entry per dim: an int selects one place, a (start, stop) slices; ints come first, and the slices
    stand in the order of the dims of `source` with the same sizes.

    Raises ValueError where the rectangle does not fit `shape` or where source and target differ in size.
    """

    name: str
    shape: tuple[int, ...]
    source: tuple[Range, ...]
    target: tuple[int | Range, ...]

    def __post_init__(self) -> None:
        if len(self.source) != len(self.shape):
            raise ValueError(f"piece of {self.name}: source {self.source} needs one range per dim of {self.shape}")
        for (start, stop), size in zip(self.source, self.shape, strict=True):
            if not 0 <= start <= stop <= size:
                raise ValueError(f"piece of {self.name}: source {self.source} is not inside shape {self.shape}")
        if self.target != self.select + self.box:
            raise ValueError(f"piece of {self.name}: in target {self.target} an int comes after a range")
        sizes = tuple(stop - start for start, stop in self.box)
        if sizes != self.size:
            raise ValueError(f"piece of {self.name}: source has size {self.size}, target {self.target} has {sizes}")

    @property
    def select(self) -> tuple[int, ...]:
        """The ints of `target`."""
        return tuple(entry for entry in self.target if isinstance(entry, int))

    @property
    def box(self) -> tuple[Range, ...]:
        """The ranges of `target`."""
        return tuple(entry for entry in self.target if not isinstance(entry, int))

    @property
    def size(self) -> tuple[int, ...]:
        """Shape of the rectangle that is read."""
        return tuple(stop - start for start, stop in self.source)

    @property
    def numel(self) -> int:
        """Values that are read."""
        return prod(self.size)

    def view(self, tensor: Tensor) -> Tensor:
        """The rectangle of the parameter `tensor` that this piece fills, as a view."""
        return tensor[tuple(entry if isinstance(entry, int) else slice(*entry) for entry in self.target)]


Declaration: TypeAlias = tuple[str, Tensor, tuple[Piece, ...]]


def block(
    name: str,
    shape: tuple[int, ...],
    source: tuple[Range, ...],
    at: tuple[int, ...] | None = None,
    *,
    select: tuple[int, ...] = (),
) -> Piece:
    """Any rectangle `source` of a tensor, put at offset `at` (default: the origin) of place `select`."""
    offsets = (0,) * len(shape) if at is None else at
    box = tuple((offset, offset + stop - start) for offset, (start, stop) in zip(offsets, source, strict=True))
    return Piece(name, shape, source, select + box)


def rows(
    name: str, shape: tuple[int, ...], start: int, stop: int, at: int = 0, *, select: tuple[int, ...] = ()
) -> Piece:
    """Entries [start, stop) of the first dim, put at row `at`: column-parallel weights, biases, heads, vocabulary."""
    source = ((start, stop), *((0, size) for size in shape[1:]))
    return block(name, shape, source, (at, *(0 for _ in shape[1:])), select=select)


def cols(
    name: str, shape: tuple[int, ...], start: int, stop: int, at: int = 0, *, select: tuple[int, ...] = ()
) -> Piece:
    """Entries [start, stop) of the last dim, put at column `at`: row-parallel weights (output and down projections)."""
    source = (*((0, size) for size in shape[:-1]), (start, stop))
    return block(name, shape, source, (*(0 for _ in shape[:-1]), at), select=select)


def whole(name: str, shape: tuple[int, ...], at: int = 0, *, select: tuple[int, ...] = ()) -> Piece:
    """The whole tensor, put at row `at`: what every rank holds, or one expert of a stack."""
    offsets = (at, *(0 for _ in shape[1:])) if shape else ()
    return block(name, shape, tuple((0, size) for size in shape), offsets, select=select)


def declare(module: nn.Module) -> Iterator[Declaration]:
    """(name, parameter or buffer, pieces) for everything under `module` that a checkpoint fills, in module order.

    A tensor that two modules share (tied embeddings) comes once.

    Raises:
        ValueError: a parameter that no module declares, a declaration without a tensor, a piece outside its parameter,
            pieces that overlap, or a shared tensor declared in two ways. Each is a mistake in the layer, not in the
            checkpoint.
    """
    seen: dict[int, tuple[str, tuple[Piece, ...]]] = {}
    for path, child in module.named_modules():
        declared: dict[str, tuple[Piece, ...]] = vars(child).get("declared", {})
        own = dict(child.named_parameters(recurse=False))
        undeclared = sorted(set(own) - set(declared))
        if undeclared:
            raise ValueError(f"{type(child).__name__} {path!r} does not declare its parameters {', '.join(undeclared)}")
        own.update(child.named_buffers(recurse=False))
        for local_name, pieces in declared.items():
            name = f"{path}.{local_name}" if path else local_name
            if local_name not in own:
                raise ValueError(
                    f"{name} is declared but is neither a parameter nor a buffer of {type(child).__name__}"
                )
            tensor = own[local_name]
            first = seen.setdefault(id(tensor), (name, pieces))
            if first[0] != name:
                if first[1] != pieces:
                    raise ValueError(f"{first[0]} and {name} are one tensor but are declared with different pieces")
                continue
            _check_pieces(name, tensor, pieces)
            yield name, tensor, pieces


def declared_names(declarations: Iterable[Declaration]) -> frozenset[str]:
    """Checkpoint tensors that `declarations` use.

    For `known` of `load_weights`, pass the declarations of the model built unsharded on the meta device: it declares
    what all ranks together declare.
    """
    return frozenset(piece.name for _, _, pieces in declarations for piece in pieces)


def padding_size(tensor: Tensor, pieces: tuple[Piece, ...]) -> int:
    """Values of `tensor` that no piece fills (pieces do not overlap, see `declare`)."""
    return tensor.numel() - sum(piece.numel for piece in pieces)


def weight_bytes(module: nn.Module) -> int:
    """Bytes that parameters and buffers of `module` take, shared tensors once; meta tensors count as real."""
    tensors = {id(tensor): tensor for group in (module.parameters(), module.buffers()) for tensor in group}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _check_pieces(name: str, tensor: Tensor, pieces: tuple[Piece, ...]) -> None:
    """Raise ValueError where a piece does not fit `tensor` or where two pieces fill one place."""
    shape = tuple(tensor.shape)
    boxes: list[tuple[tuple[Range, ...], Piece]] = []
    for piece in pieces:
        box = tuple((place, place + 1) for place in piece.select) + piece.box
        inside = all(0 <= start <= stop <= size for (start, stop), size in zip(box, shape, strict=False))
        if len(box) != len(shape) or not inside:
            raise ValueError(
                f"{name}: target {piece.target} of {piece.name} is not inside the parameter's shape {shape}"
            )
        if piece.numel:
            boxes.append((box, piece))
    boxes.sort(key=lambda entry: entry[0])
    # Sorted by the first range, so a box can only meet those that follow until one starts behind its end.
    for index, (box, piece) in enumerate(boxes):
        for other_box, other in boxes[index + 1 :]:
            if box and other_box[0][0] >= box[0][1]:
                break
            if all(a[0] < b[1] and b[0] < a[1] for a, b in zip(box, other_box, strict=True)):
                raise ValueError(
                    f"{name}: {piece.name} at {piece.target} and {other.name} at {other.target} fill the same places"
                )
