"""What both directions share: the targets' dtypes, memory that is used again, a look for numbers that are none."""

from __future__ import annotations

import gc
import math
import mmap
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megarl.bridge.layout import Shape
from megarl.bridge.raw_io import Run
from megarl.errors import UserError

SHARD_BYTES = 2_000_000_000  # of a file, which is what a conversion that is started again does not do twice
LEAST_BYTES = 32 << 10  # of each of several runs that are read by themselves: a call for each costs as much
FORGET_BYTES = 256 << 20  # of mapped files: their pages count as memory of the process


@dataclass(frozen=True)
class Options:
    dtype: torch.dtype | None = None  # of the target; None: every tensor keeps its own
    shard_bytes: int = SHARD_BYTES
    allow_nonfinite: bool = False  # carry NaN and infinity over, bit by bit
    durable: bool = False  # the target is on the disk before it gets its name

    def plan(self) -> dict[str, Any]:
        """As JSON may hold it."""
        return {"dtype": str(self.dtype), "shard_bytes": self.shard_bytes, "allow_nonfinite": self.allow_nonfinite}


AS_IT_IS = Options()


def target_dtypes(
    dtypes: Mapping[str, torch.dtype], wanted: torch.dtype | None, float32: Collection[str]
) -> dict[str, torch.dtype]:
    """Of each tensor: its own, or `wanted`, but float32 for what stays so whatever the model's dtype."""
    if wanted is None:
        return dict(dtypes)
    return {name: torch.float32 if name in float32 else wanted for name in dtypes}


class Scratch:
    """One stretch of memory as tensors of any shape, one at a time: memory that is used again need not be cleared again."""

    def __init__(self, size: int):
        self._memory = mmap.mmap(-1, max(1, size))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)

    def tensor(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Uninitialised."""
        count = torch.Size(shape).numel()
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=count).view(shape)


def check_finite(name: str, tensor: Tensor, options: Options) -> None:
    """Raises UserError for a tensor of the target that holds NaN or infinity, unless it may."""
    if not options.allow_nonfinite:
        _complain(name, nonfinite(tensor), tensor.numel(), tensor.dtype, options)


class Watch:
    """The same of one that is copied piece by piece."""

    def __init__(self, options: Options):
        self._options, self._bad, self._count = options, 0, 0

    def __call__(self, piece: Tensor) -> None:
        if not self._options.allow_nonfinite:
            self._bad += nonfinite(piece)
            self._count += piece.numel()

    def complain(self, name: str, dtype: torch.dtype) -> None:
        _complain(name, self._bad, self._count, dtype, self._options)


def copied(runs: Sequence[Run] | None) -> Sequence[Run] | None:
    """Runs that are worth it."""
    if runs is None or (len(runs) > 1 and any(run.length < LEAST_BYTES for run in runs)):
        return None
    return runs


def _complain(name: str, bad: int, count: int, dtype: torch.dtype, options: Options) -> None:
    if bad:
        stored = "" if options.dtype is None else f", as {str(dtype).removeprefix('torch.')},"
        raise UserError(
            f"{name}{stored} holds {bad} elements that are NaN or infinite (of {count}); "
            "--allow-nonfinite carries them over."
        )


def nonfinite(tensor: Tensor) -> int:
    """How many elements are NaN or infinite."""
    if not tensor.numel():
        return 0
    low, high = torch.aminmax(tensor)  # NaN where one is NaN; fifty times as fast as looking at each
    if math.isfinite(low) and math.isfinite(high):
        return 0
    return tensor.numel() - int(torch.isfinite(tensor).sum())


@contextmanager
def undisturbed() -> Iterator[None]:
    """Copying is bound by memory and disk: a second thread gains little, and waits for its core where the machine is busy. To look for
    garbage among all that torch consists of takes as long as to copy half a gigabyte."""
    threads, collects = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(1)
    gc.disable()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if collects:
            gc.enable()
