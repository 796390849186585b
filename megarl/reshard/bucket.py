"""A bucket: some tensors under the checkpoint's names, side by side in one file of shared memory that several processes map."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megarl.errors import RunError
from megarl.reshard import devices

ALIGN = 64  # bytes; a cache line, and a multiple of every element's size


class BucketTensor(NamedTuple):
    name: str
    dtype: str  # as torch names it, without "torch.": "bfloat16"
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file

    @classmethod
    def of(cls, raw: Sequence[Any]) -> BucketTensor:
        """From what JSON makes of it."""
        name, dtype, shape, offset = raw
        return cls(name, dtype, tuple(shape), offset)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True)
class BucketSpec:
    """Where the tensors of a bucket lie, and of which of them both sides take fingerprints (`prove`).

    `reused`: the file is written again and again, so whoever has mapped it keeps the mapping: its pages cost more than what is copied.
    """

    path: str
    tensors: list[BucketTensor]
    prove: tuple[str, ...] = ()
    reused: bool = False
    number: int | None = None  # of a bucket that comes as messages (`Distributed`), in the plan
    in_place: bool = False  # of such a bucket: its messages go straight into the engine's weights
    device: str = ""  # of a bucket that lies in GPUs' memory, at `path` on each: the kind (`megarl.reshard.devices`)

    @classmethod
    def plan(
        cls, path: str, tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], prove: Iterable[str] = ()
    ) -> BucketSpec:
        """Lay tensors out one after the other, each aligned to a cache line."""
        placed, offset = [], 0
        for name, dtype, shape in tensors:
            item = BucketTensor(name, str(dtype).removeprefix("torch."), tuple(shape), offset)
            placed.append(item)
            offset += -(-item.nbytes // ALIGN) * ALIGN
        return cls(path, placed, tuple(prove))

    @property
    def nbytes(self) -> int:
        """Bytes from the start of the file to the end of the last tensor."""
        return max((item.offset + item.nbytes for item in self.tensors), default=0)

    def create(self) -> None:
        """Make the file with all its memory taken, so that a full /dev/shm is an error here and not a SIGBUS later.

        Raises RunError when there is no room.
        """
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(handle, 0, max(self.nbytes, 1))
        except OSError as error:
            Path(self.path).unlink(missing_ok=True)
            raise RunError(
                f"no room for a weight bucket of {self.nbytes / 2**20:.0f} MiB at {self.path} ({error.strerror}): "
                "make reshard.bucket_mb smaller or give the machine more shared memory"
            ) from error
        finally:
            os.close(handle)

    def views(self) -> dict[str, torch.Tensor]:
        """Map the file and return its tensors: shared and writable, no copy. The mapping lives as long as a view of it, or is kept.

        Raises RunError when the file is missing or shorter than the tensors say.
        """
        data = self._bytes()
        return {
            item.name: data[item.offset : item.offset + item.nbytes].view(getattr(torch, item.dtype)).view(item.shape)
            for item in self.tensors
        }

    def clear(self) -> None:
        """Before a rank writes: where each has a bucket of its own it must be zero but for what is written."""
        if self.device:
            self._bytes().zero_()

    def gather(self) -> None:
        """After ranks have written, on every rank: where each has a bucket of its own, each gets what all have written."""
        if self.device:
            devices.gather(self._bytes())

    def settle(self) -> None:
        """Return when what was begun to be read from it has been."""
        if self.device:
            devices.settle(self._bytes())

    def _bytes(self) -> torch.Tensor:
        need = max(self.nbytes, 1)
        if self.device:
            return devices.memory(self.device, self.path)[:need]
        try:
            found = os.stat(self.path)
        except OSError as error:
            raise RunError(f"weight bucket {self.path}: {error.strerror}") from error
        if found.st_size < need:
            raise RunError(f"weight bucket {self.path} has {found.st_size} bytes, its tensors need {need}")
        return _kept(self.path, found.st_ino, found.st_size) if self.reused else _mapped(self.path, need)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> BucketSpec:
        raw = json.loads(text)
        tensors = [BucketTensor.of(item) for item in raw["tensors"]]
        return cls(**raw | {"tensors": tensors, "prove": tuple(raw["prove"])})


_mappings: dict[tuple[str, int, int], torch.Tensor] = {}  # of this process


def _kept(path: str, inode: int, size: int) -> torch.Tensor:
    """The mapping of a whole file, made once. Those of files that are gone would keep their memory: they are given up."""
    key = (path, inode, size)
    if key not in _mappings:
        for old in [old for old in _mappings if old[0] == path or not os.path.exists(old[0])]:
            del _mappings[old]
        _mappings[key] = _mapped(path, size)
    return _mappings[key]


def _mapped(path: str, size: int) -> torch.Tensor:
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
