"""An engine's own weights in memory that other processes of its machine can map: ranks write their slices straight into them.

Nothing lies between, so a sync copies every byte once. Which part of which tensor lies where is known from the engine's own
parameters; that this is true was proved by the update before, which went through SGLang's own loader.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch

from megarl.cpu.memory import SHARED
from megarl.errors import RunError


class Spot(NamedTuple):
    """The part of a checkpoint's tensor that one rank of an engine has."""

    dtype: str  # as torch names it, without "torch.": "bfloat16"
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # elements
    offset: int  # bytes from the start of the memory
    origin: tuple[int, ...]  # where its first element lies in the checkpoint's tensor

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True)
class Exposure:
    """What one rank of an engine exposes. `path`: a file that all processes of the user can map while that rank lives."""

    path: str
    size: int  # bytes
    spots: Mapping[str, Spot]  # by the checkpoint's name

    @property
    def nbytes(self) -> int:
        """Of all spots together."""
        return sum(spot.nbytes for spot in self.spots.values())

    def views(self) -> dict[str, torch.Tensor]:
        """Map the memory and return the engine's weights: whoever writes to them changes the engine.

        Raises RunError where the engine's rank is gone or the memory may not be mapped.
        """
        try:  # a number may be used again, and means something else in another container
            mine = os.readlink(self.path).startswith(f"/memfd:{SHARED}") and os.stat(self.path).st_size == self.size
        except OSError:
            mine = False
        if not mine:
            raise RunError(
                f"the weights of an engine at {self.path} cannot be mapped: the engine is gone, or ranks run as another user or "
                "in another container; then set reshard.in_place=false"
            )
        memory = torch.from_file(self.path, shared=True, size=self.size, dtype=torch.uint8)
        return {name: _view(memory, spot) for name, spot in self.spots.items()}

    def to_json(self) -> dict[str, Any]:
        return vars(self) | {"spots": {name: list(spot) for name, spot in self.spots.items()}}

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Exposure:
        spots = {
            name: Spot(dtype, tuple(shape), tuple(stride), offset, tuple(origin))
            for name, (dtype, shape, stride, offset, origin) in raw["spots"].items()
        }
        return cls(raw["path"], raw["size"], spots)


def _view(memory: torch.Tensor, spot: Spot) -> torch.Tensor:
    elements = memory[spot.offset :]
    dtype: torch.dtype = getattr(torch, spot.dtype)
    elements = elements[: len(elements) // dtype.itemsize * dtype.itemsize].view(dtype)
    return elements.as_strided(spot.shape, spot.stride, elements.storage_offset())


def meeting(
    region: Sequence[slice], origin: Sequence[int], shape: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """What a region of a checkpoint's tensor and the part of `shape` that begins at `origin` have in common, as indices into the one
    and into the other; None: nothing."""
    ours, theirs = [], []
    for part, begin, size in zip(region, origin, shape, strict=True):
        step = part.step or 1  # rows of gate and up may take turns
        first = max(0, -(-(begin - part.start) // step))
        count = len(range(part.start + first * step, min(part.stop, begin + size), step))
        if not count:
            return None
        start = part.start + first * step - begin
        ours.append(slice(first, first + count))
        theirs.append(slice(start, start + (count - 1) * step + 1, step))
    return tuple(ours), tuple(theirs)
