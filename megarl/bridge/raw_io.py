"""Bytes of tensors straight from and to files, without maps and copies between."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from megarl.errors import RunError, UserError

_EACH = 32 << 20  # bytes
_WRITE = 2  # SYNC_FILE_RANGE_WRITE of linux/fs.h: begin, do not wait


@contextmanager
def reading(path: Path, error: type[UserError | RunError] = UserError) -> Iterator[None]:
    """What the system says of a file that is read, as one sentence that names it; without it, it would be taken for the file that is
    written meanwhile. `RunError` where the same may go well at another time: a disk that was found readable."""
    try:
        yield
    except OSError as said:
        raise error(f"{said.filename or path} cannot be read: {said.strerror or said}.") from said


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in memory, which are not copied."""
    view: memoryview = tensor.detach().view(-1).view(torch.uint8).numpy().data
    return view


def read_exactly(file: int, offset: int, out: Tensor) -> bool:
    """Fills a contiguous tensor from a file's descriptor. False: the file ends before it."""
    view, done = raw(out), 0
    while done < len(view):
        got = os.preadv(file, [view[done:]], offset + done)
        if not got:
            return False
        done += got
    return True


class WriteBehind:
    """A file whose bytes go to the disk while more are being written, so that the wait at the end is short.

    Tells the kernel now and then to begin with what `file` was given. Elsewhere than on Linux it does nothing before `sync`.
    """

    def __init__(self, file: IO[bytes]):
        self._file, self._since = file, 0
        self._begin = getattr(ctypes.CDLL(None), "sync_file_range", None)
        if self._begin is not None:
            self._begin.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]

    def wrote(self, count: int) -> None:
        """So many bytes more. What the call answers is not asked: `sync` will tell."""
        self._since += count
        if self._since >= _EACH and self._begin is not None:
            self._begin(self._file.fileno(), 0, 0, _WRITE)
            self._since = 0

    def sync(self) -> None:
        """Waits until all of it is on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
