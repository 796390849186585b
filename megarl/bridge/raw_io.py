"""Bytes of tensors straight from and to files, without maps and copies between."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.errors import RunError, UserError


@contextmanager
def reading(path: Path, error: type[UserError | RunError] = UserError) -> Iterator[None]:
    """What the system says of a file that is read, as one sentence that names it; without it, it would be taken for the file that is
    written meanwhile. `RunError` where the same may go well at another time: a disk that was found readable."""
    try:
        yield
    except OSError as said:
        raise error(f"{said.filename or path} cannot be read: {said.strerror or said}.") from said


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in memory, which are not copied."""
    view: memoryview = tensor.detach().view(-1).view(torch.uint8).numpy().data
    return view


def read_exactly(file: int, offset: int, out: Tensor) -> bool:
    """Fills a contiguous tensor from a file's descriptor. False: the file ends before it."""
    view, done = raw(out), 0
    while done < len(view):
        got = os.preadv(file, [view[done:]], offset + done)
        if not got:
            return False
        done += got
    return True


class Run(NamedTuple):
    """Bytes of a file, one after another."""

    path: Path
    file: int  # a descriptor
    start: int
    length: int
