"""Bytes of tensors straight from and to files, without maps and copies between."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from megarl.errors import RunError, UserError

MOST_OPEN = 128  # files of a reader: a process may have 1,024 as a rule, and up to four readers


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
    assert tensor.is_contiguous()
    # Not view(-1): where an axis has length 1, its stride may be any, and torch keeps it.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    view: memoryview = flat.view(torch.uint8).numpy().data
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

    def fill(self, out: Tensor, skip: int = 0) -> bool:
        """Fills a contiguous tensor with what lies behind the first `skip` bytes. False: the file ends before it. Raises OSError."""
        return read_exactly(self.files.open(self.path).fileno(), self.start + skip, out)
