"""Hugging Face folders on disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megarl.errors import UserError


@contextmanager
def new_folder(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A folder to build in, which becomes `target` when the block ends well and vanishes when it does not.

    So nothing half-written ever has the final name. Raises UserError where `target` exists and may not be replaced.
    """
    if target.exists() and not overwrite and not (target.is_dir() and not any(target.iterdir())):
        raise UserError(f"{target} exists already and is not overwritten.")
    building = target.with_name(f"{target.name}.tmp-{os.getpid()}")
    try:
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        yield building
        if target.is_dir():
            shutil.rmtree(target)
        building.rename(target)
    finally:
        shutil.rmtree(building, ignore_errors=True)
