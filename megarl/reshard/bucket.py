"""A bucket: some tensors under the checkpoint's names, side by side in one file of shared memory that several processes map."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from megarl.errors import RunError

_ALIGN = 64  # bytes; a cache line, and a multiple of every element's size


class BucketTensor(NamedTuple):
    name: str
    dtype: str  # as torch names it, without "torch.": "bfloat16"
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True)
class BucketSpec:
    """Where the tensors of a bucket lie. `fingerprint` asks the receiver for the fingerprints of its own copy."""

    path: str
    tensors: list[BucketTensor]
    fingerprint: bool = False

    @classmethod
    def plan(
        cls, path: str, tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], fingerprint: bool = False
    ) -> BucketSpec:
        """Lay tensors out one after the other, each aligned to a cache line."""
        placed, offset = [], 0
        for name, dtype, shape in tensors:
            item = BucketTensor(name, str(dtype).removeprefix("torch."), tuple(shape), offset)
            placed.append(item)
            offset += -(-item.nbytes // _ALIGN) * _ALIGN
        return cls(path, placed, fingerprint)

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
        """Map the file and return its tensors: shared and writable, no copy. The mapping lives as long as a view of it.

        Raises RunError when the file is missing or shorter than the tensors say.
        """
        need = max(self.nbytes, 1)
        try:
            size = os.stat(self.path).st_size
        except OSError as error:
            raise RunError(f"weight bucket {self.path}: {error.strerror}") from error
        if size < need:
            raise RunError(f"weight bucket {self.path} has {size} bytes, its tensors need {need}")
        data = torch.from_file(self.path, shared=True, size=need, dtype=torch.uint8)
        return {
            item.name: data[item.offset : item.offset + item.nbytes].view(getattr(torch, item.dtype)).view(item.shape)
            for item in self.tensors
        }

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> BucketSpec:
        raw = json.loads(text)
        tensors = [BucketTensor(name, dtype, tuple(shape), offset) for name, dtype, shape, offset in raw["tensors"]]
        return cls(raw["path"], tensors, raw["fingerprint"])
