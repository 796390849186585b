"""The processes of an engine, which form a session: who they are, what they leave behind when they are killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

_SHARED_MEMORY = "/dev/shm"
_THEIRS = (
    "sem.mp-",
    "sglang_",
    "sgl_shm_",
)  # multiprocessing's semaphores, SGLang's counters of load and queues between ranks


def processes(session: int) -> Iterator[int]:
    """Living processes of a session."""
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it ended while we looked
                continue
            if int(fields[3]) == session and fields[0] not in "ZX":
                yield int(entry.name)


def shared_files(session: int) -> set[Path]:
    """Files that Python and SGLang made in shared memory for a session: they are left there for ever when it is killed.

    Known by their inodes: a named semaphore is not mapped under its name.
    """
    where = os.stat(_SHARED_MEMORY).st_dev
    device = f"{os.major(where):02x}:{os.minor(where):02x}"
    mapped: set[int] = set()
    for pid in processes(session):
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue
        rows = (line.split(maxsplit=5) for line in lines)
        mapped.update(int(row[4]) for row in rows if row[3] == device)
    return {
        Path(entry.path)
        for entry in os.scandir(_SHARED_MEMORY)
        if entry.name.startswith(_THEIRS) and entry.inode() in mapped
    }


def remove(files: set[Path]) -> None:
    for path in files:
        path.unlink(missing_ok=True)


def kill(session: int) -> None:
    """Kill every process of a session; returns when they are gone."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.killpg(session, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return
        if not any(processes(session)):
            return
        time.sleep(0.02)
