"""Writing to a run folder so that a full disk is one sentence and a killed run leaves what it wrote."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from megarl.errors import RunError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn trouble of the file system inside the block into a RunError, one sentence that names the file."""
    try:
        yield
    except OSError as error:
        raise RunError(trouble(path, error)) from error


def trouble(path: Path, error: OSError) -> str:
    """What a person should read about a write that failed."""
    reasons = {
        errno.ENOSPC: "the disk is full",
        errno.EDQUOT: "the disk quota is used up",
        errno.EROFS: "the file system is read-only",
        errno.EACCES: "permission denied",
        errno.ENOENT: "its folder is gone",
    }
    reason = reasons.get(error.errno or 0, error.strerror or str(error))
    return f"cannot write {path}: {reason}"


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that it is there whole or not at all. RunError if it cannot be written."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    with writing(path):
        try:
            aside.write_bytes(content.encode() if isinstance(content, str) else content)
            os.replace(aside, path)
        except OSError:
            aside.unlink(missing_ok=True)
            raise


class Appender:
    """A file that grows by whole records, each handed to the system at once: what was added survives a kill."""

    def __init__(self, path: Path):
        self.path = path
        with writing(path):
            self._file: BinaryIO | Any = open(path, "ab", buffering=0)  # noqa: SIM115  open as long as the run

    def write(self, record: bytes) -> None:
        """Append one record. RunError if the disk does not take all of it."""
        rest = memoryview(record)
        with writing(self.path):
            while rest:  # an unbuffered write may take a part, and the next one then says why
                rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        """Close the file; network file systems tell of a full disk only here."""
        with writing(self.path):
            self._file.close()


class JsonLines(Appender):
    """One JSON object a line."""

    def add(self, record: Mapping[str, Any]) -> None:
        """Append one object. Numbers that JSON cannot hold become "NaN", "Infinity" or "-Infinity"."""
        self.write((to_json(record) + "\n").encode())


def cut_after(path: Path, step: int) -> list[dict[str, Any]]:
    """Take the lines of later steps, and one that a kill left in two, off a file of JSON objects with a `step`, where there is one.
    Answers with the objects that stay. RunError if it cannot be written."""
    kept: list[dict[str, Any]] = []
    if not path.is_file():
        return kept
    with writing(path), path.open("r+b") as file:
        end = 0
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                record = json.loads(line)
                if record["step"] > step:
                    break
                kept.append(record)
            except (ValueError, KeyError, TypeError):
                pass  # it is not ours to take away
            end += len(line)
        file.truncate(end)
    return kept


def to_json(value: Any, indent: int | None = None) -> str:
    """Strict JSON of plain values, numpy and torch scalars; anything else becomes its text."""
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False, indent=indent)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()  # a lone surrogate cannot be written
    if isinstance(value, float):
        return (
            float(value) if math.isfinite(value) else str(float(value)).replace("inf", "Infinity").replace("nan", "NaN")
        )
    if hasattr(value, "tolist"):  # numpy and torch: scalars become Python numbers, arrays lists
        return _plain(value.tolist())
    return str(value)
