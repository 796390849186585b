"""A folder that grows file by file, survives a kill, and gets its name when it is whole."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megarl.convert.processes import Processes
from megarl.convert.progress import tell
from megarl.errors import RunError, UserError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # of a disk that may take it at another time
_NAMES = ("lock", "files", "done", "plan.json")
_PREFIX, _SUFFIX = ".", ".unfinished"
_CHANGED = {  # parts of a plan
    "kind": "in the other direction",
    "source": "from another source, or one that has changed since",
    "dtype": "with another --dtype",
    "shard_bytes": "with another --shard-gb",
    "allow_nonfinite": "with another --allow-nonfinite",
}


class Unfinished:
    """`.NAME.unfinished` beside the target NAME, or, where that is a link, beside what it names:

    lock        comes first and goes last: a folder without it is not ours
    files/      what becomes the target
    done/       a record for each file that is finished
    plan.json   what is made from what: records of another plan are worth nothing
    """

    def __init__(self, target: Path):
        self.target = Path(os.path.realpath(target))
        self.root = self.target.parent / f"{_PREFIX}{self.target.name}{_SUFFIX}"
        self.lock, self.files, self._done, self._plan = (self.root / name for name in _NAMES)
        self._made: list[Path] = []

    def foreign(self) -> str | None:
        """Why what is there under the name of `root` is somebody else's; None: it is ours, or empty, or nothing is there."""
        if self.root.is_symlink():
            return "which is a link"
        if self.root.exists() and not self.root.is_dir():
            return "which is no folder"
        try:
            held = {path.name: path for path in self.root.iterdir()}
        except FileNotFoundError:
            return None
        odd = sorted(name for name, path in held.items() if name not in _NAMES or path.is_symlink())
        odd += [] if not held or self.lock.is_file() else sorted(held)
        return f"which holds {odd[0]}" if odd else None

    def record(self, name: str) -> dict[str, Any] | None:
        """Of a finished file; None: it is not finished, or the machine was started anew before it was on the disk."""
        try:
            record: dict[str, Any] = json.loads((self._done / f"{name}.json").read_text(encoding="utf-8"))
            there = record["boot"] in (None, _boot())
            return record if there and (self.files / name).stat().st_size == record["bytes"] else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def count(self) -> int:
        """Of finished files."""
        return sum(self.record(path.stem) is not None for path in self._done.glob("*.json"))

    def left(self, names: list[str], *, show: bool) -> list[str]:
        """Those of a process's files that are not finished; `show`: it says so where some are."""
        left = [name for name in names if self.record(name) is None]
        if show and len(left) < len(names):
            tell(f"going on: {len(names) - len(left)} of {len(names)} files are there already")
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

    def begin(self, plan: Mapping[str, Any], *, show: bool) -> None:
        """Makes the folder, or takes up one that was left with the same plan; `show`: it says so where one of another is lost."""
        try:
            kept = json.loads(self._plan.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            kept = None
        try:
            if kept != plan:
                if show and isinstance(kept, dict) and (lost := self.count()):
                    files = (
                        "the file that is there already was"
                        if lost == 1
                        else f"the {lost} files that are there already were"
                    )
                    tell(f"beginning anew: {files} made {_otherwise(kept, plan)}")
                for path in (self.files, self._done):
                    shutil.rmtree(path, ignore_errors=True)
                self._plan.write_text(json.dumps(plan), encoding="utf-8")
            for path in (self.files, self._done):
                path.mkdir(exist_ok=True)
            for path in self.files.iterdir():  # a tokenizer that the source has no longer, or half a file
                if self.record(path.name) is None:
                    _remove(path)
        except OSError:
            if kept != plan:  # there is nothing to go on from
                self.discard()
            raise

    def publish(self, *, durable: bool) -> None:
        """The folder is whole: it gets its name. `durable`: it is on the disk before, and its name when this returns."""
        if durable:
            self._sync_rest()
        if self.target.is_dir():
            self.target.rmdir()  # an empty one
        self.files.rename(self.target)
        if durable:
            _synced(self.target.parent)  # which holds the name
        self.discard()

    def _sync_rest(self) -> None:
        """All that nobody has waited for yet."""
        records = {path: self.record(path.name) for path in self.files.rglob("*")}
        left = [path for path, record in records.items() if record is None or record["boot"] is not None]
        with ThreadPoolExecutor() as pool:  # the disk takes them at once
            for _ in pool.map(_synced, [*left, self.files]):
                pass

    def discard(self) -> None:
        """Clears away what is ours."""
        for path in (self.files, self._done):
            shutil.rmtree(path, ignore_errors=True)
        with suppress(OSError):
            self._plan.unlink(missing_ok=True)
            self.lock.unlink(missing_ok=True)
        self.unmake()

    def make(self) -> None:
        """The folder, and those that it is to lie in."""
        self._made = [folder for folder in self.root.parents if not folder.exists()]
        self.root.mkdir(parents=True, exist_ok=True)

    def unmake(self) -> None:
        """Takes it back, where they are empty."""
        for folder in (self.root, *self._made):
            with suppress(OSError):
                folder.rmdir()


@contextmanager
def unfinished(target: Path, plan: Mapping[str, Any], among: Processes, *, show: bool = False) -> Iterator[Unfinished]:
    """The folder to write in, for all processes; it is kept after a kill or a full disk, and thrown away where the input is wrong.

    The first process makes it while nobody else has its lock, then all share the lock for as long as they live: so nobody takes the
    folder over while one of them may still write in it, be it that the first has died. Raises UserError where the target exists, or
    where another conversion is making it.
    """
    growing = Unfinished(target)
    lock = None
    try:
        for turn in (among.first, not among.first):
            problem: BaseException | None = None
            try:
                if turn:
                    lock = _begun(growing, plan, show) if among.first else _joined(growing)
            except (UserError, OSError) as error:
                problem = error if isinstance(error, UserError) else _cannot(target, error)
            among.agree(problem)
        yield growing
    except UserError:
        if among.first and lock is not None:
            growing.discard()
        raise
    finally:
        if lock is not None:
            os.close(lock)


def _begun(growing: Unfinished, plan: Mapping[str, Any], show: bool) -> int:
    """The lock, shared, of a folder that was made or taken up while nobody else had it."""
    _demand_free(growing)
    if said := growing.foreign():
        raise UserError(
            f"{growing.target} cannot be made: it would grow in {growing.root}, {said} and is not a conversion's; move that away."
        )
    try:
        growing.make()
        lock = _locked(growing, fcntl.LOCK_EX)
    except OSError:
        growing.unmake()
        raise
    try:
        _demand_free(growing)  # nobody has finished it since
        growing.begin(plan, show=show)
        _lock(lock, fcntl.LOCK_SH, growing)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _joined(growing: Unfinished) -> int:
    """The lock, shared with the process that made the folder."""
    if not growing.lock.exists():
        raise UserError(f"{growing.target} cannot be made: it must lie where all processes see the same files.")
    return _locked(growing, fcntl.LOCK_SH)


def _demand_free(growing: Unfinished) -> None:
    """Raises UserError unless the target can still be made."""
    target = growing.target
    if target.is_symlink():  # that leads back to itself: any other has been followed
        raise UserError(f"{target} cannot be made: it is a symbolic link to itself.")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        if growing.foreign() is None and growing.lock.exists() and not growing.files.exists():
            growing.discard()  # killed between getting its name and clearing up
        raise UserError(f"{target} exists already and is not overwritten.")
    if target.is_mount():
        raise UserError(
            f"{target} is a mount point, in whose place no folder can be put: name one that is to be made in it."
        )


def _locked(growing: Unfinished, kind: int) -> int:
    """The lock's file, opened and locked."""
    path = growing.lock
    lock = os.open(path, os.O_CREAT | os.O_RDWR)
    try:
        _lock(lock, kind, growing)
        if not path.exists() or os.fstat(lock).st_ino != path.stat().st_ino:
            raise _taken(growing)  # whose folder this was has just cleared it away
    except BaseException:
        os.close(lock)
        raise
    return lock


def _lock(lock: int, kind: int, growing: Unfinished) -> None:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _taken(growing) from None


def _taken(growing: Unfinished) -> UserError:
    return UserError(
        f"another process is making {growing.target}: wait for it, or end it (of a conversion by torchrun that was killed some "
        "processes may be left)."
    )


def _boot() -> str:
    """Of this start of the machine: until the next one what was written is read again, be it on the disk or not."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _remove(path: Path) -> None:
    """A file or link, or a folder with all that is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _synced(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def said_of(folder: Path) -> str | None:
    """A sentence where a folder, or what stands in its place so far, is of a conversion that has not finished it."""
    name = folder.absolute().name
    if name.startswith(_PREFIX) and name.endswith(_SUFFIX):
        name = name.removeprefix(_PREFIX).removesuffix(_SUFFIX)
    try:
        growing = Unfinished(folder.absolute().with_name(name))
        if growing.target.exists() or not growing.lock.is_file() or growing.foreign():
            return None
        done = growing.count()
    except (OSError, ValueError):  # no name of a folder, or one that nobody may look into
        return None
    return (
        f"{growing.target} is not finished: {growing.root} holds {done} of its files. A conversion is at work on it, or was ended: "
        "then the same one started again goes on with them, and who does not want it may remove that folder."
    )


def _otherwise(kept: Mapping[str, Any], plan: Mapping[str, Any]) -> str:
    """What makes a plan another one than that which was kept."""
    how = [said for part, said in _CHANGED.items() if kept.get(part) != plan.get(part)]
    if kept.get("kind") != plan.get("kind"):
        how = how[:1]  # with the direction everything else is another
    return " and ".join(how) or "otherwise"


def not_written(target: Path, error: OSError) -> RunError:
    """The disk does not take it."""
    kept = Unfinished(target).root
    again = f" What is finished is kept in {kept}: start again to go on." if kept.exists() else ""
    return RunError(f"{target} could not be written: {error.strerror or error}.{again}")


def _cannot(target: Path, error: OSError) -> UserError | RunError:
    kind = RunError if error.errno in _FULL else UserError
    return kind(f"{target} cannot be made: {error.strerror or error}.")
