"""Weights from the trainer's shards into the engines of the same node, through buckets in shared memory.

Two buckets alternate: while the engines load one, the ranks write the next. Each rank writes only its slices, straight to their
places, so nothing is gathered. Their pages are used again by every bucket and every update.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from megarl.bridge.model_map import ModelMap
from megarl.reshard.bucket import BucketSpec
from megarl.reshard.stream import Control, Stream
from megarl.reshard.transfer import Receivers, Transfer, Writers

_SHARED_MEMORY = Path("/dev/shm")


class StreamWriters(Writers, Protocol):
    """All ranks that hold a model, on this node."""

    def __len__(self) -> int: ...

    def write_stream(self, stream: Stream) -> list[dict[str, int]]:
        """Have every rank write its slices of every bucket; each rank's shares of the fingerprints that the buckets ask for."""


class StreamReceivers(Receivers, Protocol):
    """The engines' side, on this node."""

    def ranks(self) -> int:
        """Of all engines that take part in this update together."""

    def load_stream(self, stream: Stream, control: Control) -> None:
        """Have every engine load every bucket. Of an engine that is lost over it, `control` is told that its ranks are gone."""


class Colocated(Transfer):
    """Two buckets in shared memory, by turns."""

    def __init__(
        self,
        model_map: ModelMap,
        *,
        dtype: str,
        bucket_bytes: int,
        verify: str,
        full_every: int = 0,
        timeout: float = 600.0,
        folder: Path = _SHARED_MEMORY,
    ):
        """`timeout`: seconds that ranks and engines wait for each other."""
        super().__init__(model_map, dtype=dtype, bucket_bytes=bucket_bytes, verify=verify, full_every=full_every)
        _remove_stale(folder)
        stem = folder / f"megarl-{os.getpid()}-{id(self):x}"
        self._timeout = timeout
        self._control = f"{stem}-control"
        self.paths = [f"{stem}-{i}" for i in range(min(2, len(self.buckets)))]
        largest = max(self.buckets, key=lambda b: b.nbytes)
        for path in self.paths:
            replace(largest, path=path).create()

    def close(self) -> None:
        """Give the shared memory back."""
        for path in (*self.paths, self._control):
            Path(path).unlink(missing_ok=True)

    def _move(
        self, buckets: Sequence[BucketSpec], shards: StreamWriters, receivers: StreamReceivers, version: int
    ) -> list[dict[str, int]]:
        placed = [self._placed(bucket, number) for number, bucket in enumerate(buckets)]
        stream = Stream(self._control, placed, len(self.paths), len(shards), receivers.ranks(), self._timeout)
        control = Control.begin(stream)

        def write() -> list[dict[str, int]]:
            try:
                return shards.write_stream(stream)
            except BaseException:
                control.abandon()  # the engines would wait for what nobody writes
                raise

        with ThreadPoolExecutor(1) as beside:
            writing = beside.submit(write)
            try:
                receivers.load_stream(stream, control)
            except BaseException:
                ranks_failed = writing.done() and writing.exception() is not None
                control.abandon()
                if ranks_failed:
                    writing.result()  # the cause of the engines' failure
                raise
            return writing.result()

    def tensors(self, shards: Writers) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor under the checkpoint's name, in its order: for an export. A tensor is valid until the next is asked for."""
        for bucket in self.buckets:
            placed = self._placed(bucket, 0)
            shards.write(placed)
            yield from placed.views().items()

    def _placed(self, bucket: BucketSpec, number: int) -> BucketSpec:
        return replace(bucket, path=self.paths[number % len(self.paths)], reused=True)


def _remove_stale(folder: Path) -> None:
    """Buckets of runs that were killed would hold shared memory for ever."""
    for path in folder.glob("megarl-*"):
        owner = re.match(r"megarl-(\d+)-", path.name)
        if owner and not Path(f"/proc/{owner.group(1)}").exists():
            path.unlink(missing_ok=True)
