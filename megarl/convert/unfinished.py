"""A folder that grows file by file, survives a kill, and gets its name when it is whole."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megarl.convert.processes import Processes
from megarl.errors import RunError, UserError


class Unfinished:
    """`.NAME.unfinished` beside the target NAME, or, where that is a link, beside what it names:

    files/      what becomes the target
    done/       a record for each file that is finished
    plan.json   what is made from what: records of another plan are worth nothing
    """

    def __init__(self, target: Path):
        self.target = Path(os.path.realpath(target))
        self.root = self.target.parent / f".{self.target.name}.unfinished"
        self.files, self._done, self._plan = (self.root / name for name in ("files", "done", "plan.json"))

    def record(self, name: str) -> dict[str, Any] | None:
        """Of a finished file; None: it is not finished, or the machine was started anew before it was on the disk."""
        try:
            record: dict[str, Any] = json.loads((self._done / f"{name}.json").read_text(encoding="utf-8"))
            there = record["boot"] in (None, _boot())
            return record if there and (self.files / name).stat().st_size == record["bytes"] else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def left(self, names: list[str], *, show: bool) -> list[str]:
        """Those of a process's files that are not finished; `show`: it says so where some are."""
        left = [name for name in names if self.record(name) is None]
        if show and len(left) < len(names):
            print(f"going on: {len(names) - len(left)} of {len(names)} files are there already", file=sys.stderr)
        return left

    def finished(self, name: str, *, durable: bool, **record: Any) -> None:
        """Notes that a file is whole, and on the disk if it is `durable`."""
        boot = None if durable else _boot()
        self._note(name, {"bytes": (self.files / name).stat().st_size, "boot": boot, **record})

    def settle(self, name: str) -> None:
        """Waits until a finished file is on the disk, and notes it."""
        _synced(self.files / name)
        record = self.record(name)
        assert record is not None
        self._note(name, {**record, "boot": None})

    def _note(self, name: str, record: Mapping[str, Any]) -> None:
        path = self._done / f"{name}.json"
        aside = path.with_suffix(".part")
        aside.write_text(json.dumps(record), encoding="utf-8")
        aside.rename(path)

    def begin(self, plan: Mapping[str, Any]) -> None:
        """Makes the folder, or takes up one that was left with the same plan."""
        try:
            kept = json.loads(self._plan.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            kept = None
        if kept != plan:
            for path in (self.files, self._done):
                shutil.rmtree(path, ignore_errors=True)
        for path in (self.files, self._done):
            path.mkdir(exist_ok=True)
        self._plan.write_text(json.dumps(plan), encoding="utf-8")

    def publish(self, *, durable: bool) -> None:
        """The folder is whole: it gets its name. `durable`: it is on the disk before."""
        if durable:
            self._sync_rest()
        if self.target.is_dir():
            self.target.rmdir()  # an empty one
        self.files.rename(self.target)
        self.discard()

    def _sync_rest(self) -> None:
        """All that nobody has waited for yet."""
        records = {path: self.record(path.name) for path in self.files.rglob("*")}
        left = [path for path, record in records.items() if record is None or record["boot"] is not None]
        with ThreadPoolExecutor() as pool:  # the disk takes them at once
            for _ in pool.map(_synced, [*left, self.files]):
                pass

    def discard(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


@contextmanager
def unfinished(target: Path, plan: Mapping[str, Any], among: Processes) -> Iterator[Unfinished]:
    """The folder to write in, for all processes; it is kept after a kill or a full disk, and thrown away where the input is wrong.

    Raises UserError where the target exists, or where another process is making it.
    """
    growing = Unfinished(target)
    lock = None
    problem: BaseException | None = None
    if among.first:
        try:
            lock = _begun(growing, plan)
        except (UserError, OSError) as error:
            problem = error if isinstance(error, UserError) else _cannot(target, error)
    among.agree(problem)
    try:
        yield growing
    except UserError:
        if among.first:
            growing.discard()
        raise
    finally:
        if lock is not None:
            os.close(lock)


def _begun(growing: Unfinished, plan: Mapping[str, Any]) -> int:
    target = growing.target
    if target.is_symlink():  # that leads back to itself: any other has been followed
        raise UserError(f"{target} cannot be made: it is a symbolic link to itself.")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        if growing.root.exists() and not growing.files.exists():
            growing.discard()  # killed between getting its name and clearing up
        raise UserError(f"{target} exists already and is not overwritten.")
    growing.root.mkdir(parents=True, exist_ok=True)
    lock = os.open(growing.root / "lock", os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise UserError(f"another process is making {target}.") from None
    growing.begin(plan)
    return lock


def _boot() -> str:
    """Of this start of the machine: until the next one what was written is read again, be it on the disk or not."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _synced(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def not_written(target: Path, error: OSError) -> RunError:
    """The disk does not take it."""
    kept = Unfinished(target).root
    again = f" What is finished is kept in {kept}: start again to go on." if kept.exists() else ""
    return RunError(f"{target} could not be written: {error.strerror or error}.{again}")


def _cannot(target: Path, error: OSError) -> UserError:
    return UserError(f"{target} cannot be made: {error.strerror or error}.")
