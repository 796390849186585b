"""Bytes of tensors straight from and to files, without maps and copies between."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import torch
from torch import Tensor

from megarl.errors import RunError, UserError

_EACH = 32 << 20  # bytes
_AT_ONCE = 16 << 20  # bytes
_NOT_IN_THE_KERNEL = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)
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


class Run(NamedTuple):
    """Bytes of a file, one after another."""

    path: Path
    file: int  # a descriptor
    start: int
    length: int


@contextmanager
def mapped(run: Run, dtype: torch.dtype) -> Iterator[Tensor]:
    """(elements,) of a run, not to be written to. Where the disk does not give them the process ends, so they were read before."""
    before = run.start % mmap.ALLOCATIONGRANULARITY
    with mmap.mmap(run.file, before + run.length, prot=mmap.PROT_READ, offset=run.start - before) as memory:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is not to be written to
            tensor = torch.frombuffer(memory, dtype=dtype, offset=before, count=run.length // dtype.itemsize)
        yield tensor
        del tensor  # what is still referred to cannot be unmapped


def copy_run(run: Run, target: IO[bytes]) -> None:
    """Appends a run to a file at its place, in the kernel where that is possible: it takes half the time of reading and writing."""
    target.flush()
    done, at = 0, target.tell()
    while done < run.length:
        got = _copied(run, done, target.fileno(), at + done)
        if not got:
            raise UserError(f"{run.path} is cut short.")
        done += got
    target.seek(at + run.length)


def _copied(run: Run, done: int, target: int, at: int) -> int:
    """Some of a run, from its byte `done` on. Answers how many bytes."""
    count = min(run.length - done, _AT_ONCE)
    try:
        return os.copy_file_range(run.file, target, count, run.start + done, at)
    except OSError as error:
        if error.errno == errno.EIO:  # of either file
            raise RunError(f"{run.path} could not be copied: {error.strerror}.") from error
        if error.errno not in _NOT_IN_THE_KERNEL:
            raise
    with reading(run.path, RunError):
        block = os.pread(run.file, count, run.start + done)
    return os.pwrite(target, block, at)


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
