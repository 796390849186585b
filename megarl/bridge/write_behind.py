"""Files whose bytes go to the disk while more are being written, so that the wait at the end is short."""

from __future__ import annotations

import ctypes
import os
from typing import IO

_EACH = 32 << 20  # bytes
_WRITE = 2  # SYNC_FILE_RANGE_WRITE of linux/fs.h: begin, do not wait


class WriteBehind:
    """Tells the kernel now and then to begin with what `file` was given. Elsewhere than on Linux it does nothing before `sync`."""

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
