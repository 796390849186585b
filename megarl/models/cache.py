"""Where models that megarl makes by itself are kept, and how two processes that want the same one agree."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megarl.errors import UserError


def cache_dir() -> Path:
    """$MEGARL_CACHE, or ~/.cache/megarl."""
    return Path(os.environ.get("MEGARL_CACHE") or Path.home() / ".cache" / "megarl").expanduser()


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Holds the cache's lock of this name; waits while another process has it. The lock dies with its holder."""
    folder = cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = open(folder / f".{name}.lock", "w")  # noqa: SIM115 (closed below, which also unlocks)
    except OSError as error:
        raise UserError(f"The cache folder {folder} cannot be written ({error.strerror}); set MEGARL_CACHE.") from error
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
