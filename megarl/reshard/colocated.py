"""Weights from the trainer's shards into the engines of the same node, through buckets in shared memory.

Two buckets alternate: while the engines load one, the ranks write the next. Each rank writes only its slices, straight to their
places, so nothing is gathered. Their pages are used again by every bucket and every update.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from megarl.bridge.model_map import ModelMap
from megarl.reshard.bucket import BucketSpec
from megarl.reshard.transfer import Receivers, Transfer, Writers

_SHARED_MEMORY = Path("/dev/shm")


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
        folder: Path = _SHARED_MEMORY,
    ):
        super().__init__(model_map, dtype=dtype, bucket_bytes=bucket_bytes, verify=verify, full_every=full_every)
        _remove_stale(folder)
        stem = folder / f"megarl-{os.getpid()}-{id(self):x}"
        self._paths = [f"{stem}-{i}" for i in range(min(2, len(self.buckets)))]
        largest = max(self.buckets, key=lambda b: b.nbytes)
        for path in self._paths:
            replace(largest, path=path).create()

    def close(self) -> None:
        """Give the shared memory back."""
        for path in self._paths:
            Path(path).unlink(missing_ok=True)

    def _move(
        self, buckets: Sequence[BucketSpec], shards: Writers, receivers: Receivers, version: int
    ) -> list[dict[str, int]]:
        shares: list[dict[str, int]] = []
        loading: list[object | None] = [None] * len(self._paths)
        for i, bucket in enumerate(buckets):
            slot = i % len(self._paths)
            if loading[slot] is not None:
                receivers.loaded(loading[slot])  # the engines have let go of this bucket
            placed = self._placed(bucket, slot)
            shares += shards.write(placed)
            loading[slot] = receivers.load(placed)
        for token in loading:
            if token is not None:
                receivers.loaded(token)
        return shares

    def tensors(self, shards: Writers) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor under the checkpoint's name, in its order: for an export. A tensor is valid until the next is asked for."""
        for bucket in self.buckets:
            placed = self._placed(bucket, 0)
            shards.write(placed)
            yield from placed.views().items()

    def _placed(self, bucket: BucketSpec, slot: int) -> BucketSpec:
        return replace(bucket, path=self._paths[slot], reused=True)


def _remove_stale(folder: Path) -> None:
    """Buckets of runs that were killed would hold shared memory for ever."""
    for path in folder.glob("megarl-*"):
        owner = re.match(r"megarl-(\d+)-", path.name)
        if owner and not Path(f"/proc/{owner.group(1)}").exists():
            path.unlink(missing_ok=True)
