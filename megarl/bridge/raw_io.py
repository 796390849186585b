"""Bytes of tensors straight from and to files, without maps and copies between."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from megarl.errors import RunError, UserError

MOST_OPEN = 128  # files of a reader: a process may have 1,024 as a rule, and up to four readers


class reading:  # named as what it is used as; a generator's manager would cost ten times as much, and each piece has one
    """What the system says of a file that is read, as one sentence that names it; without it, it would be taken for the file that is
    written meanwhile. `RunError` where the same may go well at another time: a disk that was found readable."""

    def __init__(self, path: Path, error: type[UserError | RunError] = UserError):
        self._path, self._error = path, error

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(
        self, kind: type[BaseException] | None, said: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(said, OSError):
            raise self._error(f"{said.filename or self._path} cannot be read: {said.strerror or said}.") from said


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in memory, which are not copied."""
    assert tensor.is_contiguous()
    # Not view(-1): where an axis has length 1, its stride may be any, and torch keeps it.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    view: memoryview = flat.view(torch.uint8).numpy().data
    return view


def read_exactly(file: int, offset: int, out: memoryview) -> bool:
    """Fills memory from a file's descriptor. False: the file ends before it."""
    done = 0
    while done < len(out):
        got = os.preadv(file, [out[done:]], offset + done)
        if not got:
            return False
        done += got
    return True


class Files:
    """Files that are read here and there, opened when they are needed: the one that was not for longest is closed where there are too
    many. For one thread."""

    def __init__(self) -> None:
        self._open: dict[Path, BinaryIO] = {}  # the latest used last

    def open(self, path: Path) -> BinaryIO:
        """It may be closed by the next call. Raises OSError."""
        file = self._open.pop(path, None)
        if file is None:
            while len(self._open) >= MOST_OPEN:
                self._open.pop(next(iter(self._open))).close()
            file = path.open("rb")
        self._open[path] = file
        return file


class Run(NamedTuple):
    """Bytes of a file, one after another."""

    path: Path
    files: Files  # that it is one of
    start: int
    length: int

    def fill(self, out: memoryview, skip: int = 0) -> bool:
        """Fills memory with what lies behind the first `skip` bytes. False: the file ends before it. Raises OSError."""
        return read_exactly(self.files.open(self.path).fileno(), self.start + skip, out)
