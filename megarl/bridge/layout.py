"""How Hugging Face tensors lie in a rank's Megatron tensor, as rectangular copies (or every so manyth row of a rectangle).

A layout is two choices: how each Hugging Face tensor is cut over the ranks (`Split`), and how the cut parts are laid one
after another into the rank's tensor (a join). Both only ever name regions, so loading, exporting and resharding are one set
of rules read in one direction or the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]


class Where(Protocol):
    """Where a rank stands in the axes that cut tensors: tensor parallelism for what is no expert; for experts, expert parallelism
    (which of them it holds) and expert tensor parallelism (which part of each)."""

    @property
    def tensor(self) -> int: ...
    @property
    def tensor_size(self) -> int: ...
    @property
    def expert(self) -> int: ...
    @property
    def expert_size(self) -> int: ...
    @property
    def expert_tensor(self) -> int: ...
    @property
    def expert_tensor_size(self) -> int: ...


class Standing(Where, Protocol):
    """`Where`, and the axes along which ranks hold the same: data and context parallelism, for experts what is left of a stage."""

    @property
    def world(self) -> int: ...
    @property
    def pipeline_size(self) -> int: ...
    @property
    def data(self) -> int: ...
    @property
    def data_size(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def context_size(self) -> int: ...
    @property
    def expert_data(self) -> int: ...


@dataclass(frozen=True)
class Cut:
    """`Where` by itself, without a process behind it."""

    tensor: int = 0
    tensor_size: int = 1
    expert: int = 0
    expert_size: int = 1
    expert_tensor: int = 0
    expert_tensor_size: int = 1


class Copy(NamedTuple):
    """A region of a Hugging Face tensor and the region of a rank's Megatron tensor that holds the same numbers."""

    hf_name: str
    hf: tuple[slice, ...]
    local: tuple[slice, ...]
    fused: bool = False  # the first axis of `hf` is one expert of a tensor that holds all of a layer
    transposed: bool = False  # of a matrix: rows and columns of `hf` are columns and rows of `local`

    @property
    def extents(self) -> list[int]:
        """Of the region of the Hugging Face tensor, as it stands in the local one."""
        sizes = [len(range(s.start, s.stop, s.step or 1)) for s in self.hf[self.fused :]]
        return sizes[::-1] if self.transposed else sizes

    def of(self, region: Tensor) -> Tensor:
        """A view of `tensor[hf]` that has the shape of the local region."""
        if self.fused:
            region = region[0]
        return region.t() if self.transposed else region

    def back(self, part: Tensor) -> Tensor:
        """The other way round: a view of `tensor[local]` that has the shape of the region of the Hugging Face tensor."""
        if self.transposed:
            part = part.t()
        return part[None] if self.fused else part


class Part(NamedTuple):
    """A run of rows of a Hugging Face tensor that is cut by itself, mostly all of them: of gate over up in one tensor each half."""

    tensor: int  # which of a parameter's tensors
    first: int  # row of it
    shape: Shape
    step: int = 1  # every so manyth row of the tensor: 2 where rows of gate and up take turns

    def rows(self, start: int, count: int) -> slice:
        """Some of its rows, as rows of the tensor."""
        if self.step == 1:
            return slice(self.first + start, self.first + start + count)
        first = self.first + start * self.step
        return slice(first, first + (count - 1) * self.step + 1, self.step)


class Split(Enum):
    """What tensor parallelism cuts, or expert tensor parallelism in an expert. ROWS and COLUMNS are axes 0 and 1 of the Hugging
    Face tensor, of one that is transposed in the checkpoint as it stands in Megatron."""

    NONE = None  # every rank holds all of it
    ROWS = 0
    COLUMNS = 1


class Piece(NamedTuple):
    """Rows of one part, and where they go in the joined tensor. All counts are rows within a rank."""

    part: int
    source: int
    target: int
    length: int


Join = Callable[[Sequence[int], int], list[Piece]]


def stacked(rows: Sequence[int], groups: int) -> list[Piece]:
    """Part after part: with one part the identity, with two gate over up."""
    pieces, target = [], 0
    for part, length in enumerate(rows):
        pieces.append(Piece(part, 0, target, length))
        target += length
    return pieces


def interleaved_by_group(rows: Sequence[int], groups: int) -> list[Piece]:
    """Query group by query group, each as its queries, its key, its value: `[q…q k v] [q…q k v] …`."""
    pieces, target = [], 0
    for group in range(groups):
        for part, length in enumerate(rows):
            share = length // groups
            pieces.append(Piece(part, group * share, target, share))
            target += share
    return pieces


def uncovered(shape: Shape, regions: Sequence[tuple[slice, ...]]) -> str | None:
    """None where `regions` cover every element of `shape` exactly once, else what is wrong, in words."""
    regions, shape = _unfolded(regions, shape)
    boxes = [tuple((s.start, s.stop) for s in region) for region in regions]
    for box in boxes:
        if len(box) != len(shape) or any(
            not 0 <= start < stop <= size for (start, stop), size in zip(box, shape, strict=True)
        ):
            return f"a region {box} lies outside of {shape}"
    volume = sum(_volume(box) for box in boxes)
    whole = _volume(tuple((0, size) for size in shape))
    if volume < whole:
        return f"{whole - volume} of {whole} elements are not covered"
    # Sorted by their first axis, only neighbours whose first intervals meet can overlap.
    boxes.sort()
    for index, box in enumerate(boxes):
        for other in boxes[index + 1 :]:
            if other[0][0] >= box[0][1]:
                break
            if all(a[0] < b[1] and b[0] < a[1] for a, b in zip(box, other, strict=True)):
                return f"regions {box} and {other} overlap"
    return None if volume == whole else f"{volume} elements are written for {whole}"


def _unfolded(regions: Sequence[tuple[slice, ...]], shape: Shape) -> tuple[Sequence[tuple[slice, ...]], Shape]:
    """Where regions take every so manyth place of an axis, the same with that axis as two: the places, and which of so many."""
    steps = [
        max((region[axis].step or 1 for region in regions if len(region) == len(shape)), default=1)
        for axis in range(len(shape))
    ]
    if max(steps, default=1) == 1:
        return regions, shape
    unfolded = []
    for region in regions:
        axes: list[slice] = []
        for part, step in zip(region, steps, strict=True):
            if step == 1:
                axes.append(part)
            elif part.step == step:
                axes += [
                    slice(part.start // step, (part.stop - 1) // step + 1),
                    slice(part.start % step, part.start % step + 1),
                ]
            else:  # whole rows of places, as far as the tensors here go
                axes += [slice(part.start // step, part.stop // step), slice(0, step)]
        unfolded.append(tuple(axes))
    sizes = [
        size
        for length, step in zip(shape, steps, strict=True)
        for size in ((length,) if step == 1 else (length // step, step))
    ]
    return unfolded, tuple(sizes)


def _volume(box: tuple[tuple[int, int], ...]) -> int:
    total = 1
    for start, stop in box:
        total *= stop - start
    return total
