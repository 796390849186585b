"""Folders that are either whole or not there."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megarl.errors import UserError


@contextmanager
def new_folder(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A folder to build in, which becomes `target` when the block ends well and vanishes when it does not.

    So nothing half-written ever has the final name. Where `target` is a symbolic link, the folder that it names is made. Raises
    UserError where that exists and may not be replaced, or where it cannot be made.
    """
    target = Path(os.path.realpath(target))
    if target.is_symlink() or target.parent == target:
        raise UserError(f"{target} is no name for a new folder.")
    empty = target.is_dir() and not any(target.iterdir())
    if target.exists() and not overwrite and not empty:
        raise UserError(f"{target} exists already and is not overwritten.")
    building = target.with_name(f"{target.name}.tmp-{os.getpid()}")
    replaced = target.with_name(f"{target.name}.old-{os.getpid()}")
    made = [folder for folder in target.parents if not folder.exists()]
    try:
        shutil.rmtree(building, ignore_errors=True)
        try:
            building.mkdir(parents=True)
        except OSError as error:
            raise UserError(f"{target} cannot be made: {error.strerror}.") from error
        yield building
        if target.exists():
            target.rename(replaced)
        building.rename(target)
    finally:
        shutil.rmtree(building, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)
        for folder in made:
            with suppress(OSError):  # it holds the target
                folder.rmdir()


def clear_unfinished(target: Path) -> None:
    """Removes what killed builds of `target` left behind, which is named after a process that is no more; only for a caller that knows
    that no build is going on. Where another process has that number by now it stays: nothing tells it from a build's."""
    if not target.parent.is_dir():
        return
    ours = re.compile(rf"{re.escape(target.name)}\.(tmp|old)-(\d+)(-\w+)?")
    for leftover in target.parent.iterdir():
        found = ours.fullmatch(leftover.name)
        if found and not Path(f"/proc/{found.group(2)}").exists():
            shutil.rmtree(leftover, ignore_errors=True)
