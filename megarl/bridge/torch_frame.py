"""What `torch.save` writes around a tensor's elements: the directory of an archive, which depends on dtype and shape alone."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, cast

import torch

from megarl.bridge.layout import Shape

FRAMED = 1 << 10  # bytes from which a tensor is written by itself: more than anything else in its archive


@contextmanager
def without_checksums() -> Iterator[None]:
    """Nothing that reads these archives looks at the checksums in them, which take longer than writing."""
    kept = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(kept)


class _Sink:
    """Takes what `torch.save` writes, but for the elements."""

    def __init__(self, elements: int):
        self._elements, self.parts = elements, [b"", b""]
        self._behind = False

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if size == self._elements:
            self._behind = True
        else:
            self.parts[self._behind] += bytes(data)
        return size

    def flush(self) -> None:
        """`torch.save` asks for it."""


@functools.lru_cache(maxsize=256)
def frame(dtype: torch.dtype, shape: Shape) -> tuple[bytes, bytes]:
    """What `torch.save` writes before and after the elements of a tensor of FRAMED bytes or more."""
    tensor = torch.empty(shape, dtype=dtype)  # never touched, so it takes no memory
    sink = _Sink(tensor.nbytes)
    with without_checksums():
        torch.save(tensor, cast(IO[bytes], sink))
    return sink.parts[0], sink.parts[1]
