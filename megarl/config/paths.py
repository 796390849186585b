"""Paths as a person writes them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from megarl.errors import UserError


def path_fault(text: str | Path) -> str | None:
    """Why nothing can have this path, as half a sentence; None where something can, whether it is there or not."""
    if "\0" in str(text):
        return "holds a zero byte"
    expanded = os.path.expanduser(text)
    if str(expanded).startswith("~"):
        return "begins with the home folder of somebody who is not known here; write ./~ for a folder of that name"
    try:
        os.lstat(expanded)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return "is too long for a path"
    return None


def user_path(text: str | Path) -> Path:
    """The path, `~` resolved. UserError where nothing can have it."""
    if fault := path_fault(text):
        raise UserError(f"{str(text)[:60]!r} {fault}.")
    return Path(os.path.expanduser(text))
