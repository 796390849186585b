"""Files of weights on their way to the disk: in any order, or front to back beside what makes the next bytes."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
from isal import isal_zlib
from torch import Tensor

from megarl.bridge.raw_io import Run, reading
from megarl.errors import RunError, UserError

_EACH = 32 << 20  # bytes
_ALIGNED = 4096  # what disks want of offsets and lengths
_PIECE = 1 << 20  # bytes: stays in a core's cache between reading and being looked at
_AT_ONCE = (
    512 << 10
)  # bytes to the page cache: for more it looks for larger pages, which now and then takes far longer than to copy
_WRITE = 2  # SYNC_FILE_RANGE_WRITE of linux/fs.h: begin, do not wait

Look = Callable[[Tensor], object]


class PlainFile:
    """Written in any order, and on the disk at its `end`."""

    def __init__(self, path: Path):
        self._file = path.open("wb")
        self._behind = _Behind(self._file.fileno())

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, at: int) -> None:
        self._file.seek(at)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _AT_ONCE):
            self._file.write(view[start : start + _AT_ONCE])
        self._behind.wrote(len(view))
        return len(view)

    def flush(self) -> None:
        self._file.flush()

    def end(self) -> None:
        """All has come: waits until it is on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class Blocks:
    """Memory that goes back and forth between who fills it and who writes it; for one file after another."""

    def __init__(self, size: int = 2 << 20, count: int = 4):
        self.size = size
        self.free: SimpleQueue[memoryview] = SimpleQueue()
        for _ in range(count):  # page by page, as the disk wants it
            self.free.put(memoryview(mmap.mmap(-1, size)))
        self.aside = memoryview(bytearray(_PIECE))  # where no element would begin where elements may


class BlockFile:
    """Written front to back, block by block, by a thread of its own. With `durable` it is on the disk at its `end`; where that is a
    disk of the machine's, past the page cache: the disk takes the bytes from the block itself, and little is left to wait for.

    What the disk does not take is raised by one of the calls that follow.
    """

    def __init__(self, path: Path, blocks: Blocks, *, durable: bool, summed: bool = False):
        """`summed`: `sum` is the CRC-32 of all that was written (`copy` may not be used)."""
        self.sum, self._summed = 0, summed
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        self._durable, self._direct = durable, durable and _on_a_disk(path.parent)
        try:
            self._file = os.open(path, flags | (os.O_DIRECT if self._direct else 0), 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._direct, self._file = False, os.open(path, flags, 0o666)
        self._behind = _Behind(self._file)
        self._blocks, self._block = blocks, blocks.free.get()
        self._start = self._used = 0  # where in the file the block is to go; its bytes that are filled
        self._full: SimpleQueue[tuple[memoryview, int] | None] = SimpleQueue()
        self._writer: Thread | None = None
        self._error: OSError | None = None

    def tell(self) -> int:
        return self._start + self._used

    def seek(self, at: int) -> None:
        """Forward, over zeros. Raises ValueError for what lies behind."""
        if at < self.tell():
            raise ValueError(f"byte {at} was written before")
        self.write(bytes(at - self.tell()))

    def write(self, data: Any) -> int:
        view, done = memoryview(data).cast("B"), 0
        while done < len(view):
            room = self._room(len(view) - done)
            room[:] = view[done : done + len(room)]
            if self._summed:  # of what is still in the core's cache
                self.sum = isal_zlib.crc32(room, self.sum)
            self._used += len(room)
            done += len(room)
        return done

    def flush(self) -> None:
        """`torch.save` asks for it; `end` is what does it."""

    def copy(self, runs: Iterable[Run], dtype: torch.dtype, look: Look) -> None:
        """Appends the bytes of a tensor, which lie in other files; `look` is shown all of them as elements, some at a time."""
        assert not self._summed
        for run in runs:
            self._copy(run, dtype, look)

    def _copy(self, run: Run, dtype: torch.dtype, look: Look) -> None:
        done, aligned = 0, self.tell() % dtype.itemsize == 0
        while done < run.length:
            wanted = min(_PIECE, run.length - done)
            part = self._room(wanted) if aligned else self._blocks.aside[:wanted]
            with reading(run.path, RunError):
                whole = run.fill(part, done)
            if not whole:
                raise UserError(f"{run.path} is cut short.")
            look(torch.frombuffer(part, dtype=dtype))
            if aligned:
                self._used += len(part)
            else:
                self.write(part)
            done += len(part)

    def end(self) -> None:
        """All has come."""
        length, used = self.tell(), -(-self._used // _ALIGNED) * _ALIGNED
        self._block[self._used : used] = bytes(used - self._used)
        self._join()
        if self._error is not None:
            raise self._error
        self._put(self._block[:used], self._start)
        os.ftruncate(self._file, length)
        if self._durable:
            os.fsync(self._file)

    def close(self) -> None:
        self._join()
        os.close(self._file)
        self._blocks.free.put(self._block)

    def _room(self, wanted: int) -> memoryview:
        """Bytes of the block that are not filled, at most so many."""
        if self._used == self._blocks.size:
            self._hand_over()
        return self._block[self._used : self._used + wanted]

    def _hand_over(self) -> None:
        if self._writer is None:
            self._writer = Thread(target=self._write_blocks, daemon=True)
            self._writer.start()
        self._full.put((self._block, self._start))
        self._start += self._used
        self._block, self._used = self._blocks.free.get(), 0
        if self._error is not None:
            raise self._error

    def _write_blocks(self) -> None:
        while (found := self._full.get()) is not None:
            block, at = found
            try:
                if self._error is None:
                    self._put(block, at)
            except OSError as error:
                self._error = error
            self._blocks.free.put(block)

    def _put(self, view: memoryview, at: int) -> None:
        done = 0
        while done < len(view):
            try:
                part = view[done:] if self._direct else view[done : done + _AT_ONCE]
                done += os.pwrite(self._file, part, at + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._no_longer_direct()
        if self._durable and not self._direct:
            self._behind.wrote(len(view))

    def _no_longer_direct(self) -> None:
        """A file system that does not take blocks after all, or the last bytes that a disk takes."""
        self._direct = False
        fcntl.fcntl(self._file, fcntl.F_SETFL, fcntl.fcntl(self._file, fcntl.F_GETFL) & ~os.O_DIRECT)

    def _join(self) -> None:
        if self._writer is not None:
            self._full.put(None)
            self._writer.join()
            self._writer = None


class _Behind:
    """Tells the kernel now and then to begin with what a file was given, so that the wait at the end is short. Elsewhere
    than on Linux it does nothing."""

    def __init__(self, file: int):
        self._file, self._since = file, 0
        self._begin = getattr(ctypes.CDLL(None), "sync_file_range", None)
        if self._begin is not None:
            self._begin.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]

    def wrote(self, count: int) -> None:
        """So many bytes more. What the call answers is not asked: waiting will tell."""
        self._since += count
        if self._since >= _EACH and self._begin is not None:
            self._begin(self._file, 0, 0, _WRITE)
            self._since = 0


def _on_a_disk(folder: Path) -> bool:
    """Not in memory or over a network, whose file systems have no device."""
    return hasattr(os, "O_DIRECT") and os.major(folder.stat().st_dev) != 0
