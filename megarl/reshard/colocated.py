"""Weights from the trainer's shards into the engines of the same node, through buckets in shared memory, and the proof of it.

Two buckets alternate: while the engines load one, the ranks write the next. Each rank writes only its slices, straight to their
places, so nothing is gathered. Afterwards the fingerprints of the engines' own copies must equal the sums of the shards'.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from megarl.bridge.model_map import ModelMap
from megarl.errors import RunError
from megarl.reshard.bucket import BucketSpec
from megarl.reshard.fingerprint import combine

_SHARED_MEMORY = Path("/dev/shm")
_SAMPLED = 8  # "sampled" proves every eighth tensor, another eighth each time


class Writers(Protocol):
    """All ranks that hold a model."""

    def write(self, bucket: BucketSpec) -> None:
        """Return when every rank has written its slices."""


class Shards(Writers, Protocol):
    """The trainer's side: all ranks of the actor."""

    def fingerprints(self, names: Sequence[str], dtype: str) -> list[dict[str, int]]:
        """Each rank's shares."""


class Receivers(Protocol):
    """The engines' side."""

    def begin_update(self, version: int) -> None: ...

    def load(self, bucket: BucketSpec) -> object:
        """Start loading; the answer is waited for with `loaded`."""

    def loaded(self, token: object) -> None: ...

    def end_update(self) -> list[dict[str, int]]:
        """Finish; the fingerprints that each engine took of its own copy."""


@dataclass(frozen=True)
class ReshardReport:
    seconds: float
    verify_seconds: float
    bytes: int
    tensors: int
    verified: int  # tensors proved equal on every engine

    def metrics(self) -> dict[str, float]:
        return {
            "reshard/seconds": self.seconds,
            "reshard/verify_seconds": self.verify_seconds,
            "reshard/gigabytes": self.bytes / 1e9,
            "reshard/verified": float(self.verified),
            "reshard/tensors": float(self.tensors),
        }


class Colocated:
    """Moves all weights, bucket by bucket, and proves their arrival."""

    def __init__(
        self, model_map: ModelMap, *, dtype: str, bucket_bytes: int, verify: str, folder: Path = _SHARED_MEMORY
    ):
        _remove_stale(folder)
        self._verify = verify
        self._dtype = dtype
        self._turn = 0
        kind = getattr(torch, dtype)
        self._buckets = _plan(model_map, kind, bucket_bytes)
        stem = folder / f"megarl-{os.getpid()}-{id(self):x}"
        self._paths = [f"{stem}-{i}" for i in range(min(2, len(self._buckets)))]
        largest = max(self._buckets, key=lambda b: b.nbytes)
        for path in self._paths:
            replace(largest, path=path).create()
        self.bytes = sum(b.nbytes for b in self._buckets)

    def close(self) -> None:
        """Give the shared memory back."""
        for path in self._paths:
            Path(path).unlink(missing_ok=True)

    def push(self, shards: Shards, receivers: Receivers, version: int) -> ReshardReport:
        """Give the engines the trainer's weights as `version`. Raises RunError naming the first tensor that is not equal."""
        start = time.perf_counter()
        proved = self._to_prove()
        receivers.begin_update(version)
        loading: list[object | None] = [None] * len(self._paths)
        for i, bucket in enumerate(self._buckets):
            slot = i % len(self._paths)
            if loading[slot] is not None:
                receivers.loaded(loading[slot])  # the engines have let go of this bucket
            placed = replace(bucket, path=self._paths[slot], fingerprint=self._verify != "off")
            shards.write(placed)
            loading[slot] = receivers.load(placed)
        for token in loading:
            if token is not None:
                receivers.loaded(token)
        engines = receivers.end_update()
        moved = time.perf_counter()
        if proved:
            shares = shards.fingerprints(proved, self._dtype)
            _compare(proved, shares, engines)
        self._turn += 1
        end = time.perf_counter()
        tensors = sum(len(b.tensors) for b in self._buckets)
        return ReshardReport(end - start, end - moved, self.bytes, tensors, len(proved))

    def tensors(self, shards: Writers) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor under the checkpoint's name, in its order: for an export. A tensor is valid until the next is asked for."""
        for bucket in self._buckets:
            placed = replace(bucket, path=self._paths[0])
            shards.write(placed)
            yield from placed.views().items()

    def _to_prove(self) -> list[str]:
        names = [t.name for b in self._buckets for t in b.tensors]
        if self._verify == "off":
            return []
        return names if self._verify == "full" else names[self._turn % _SAMPLED :: _SAMPLED]


def _plan(model_map: ModelMap, dtype: torch.dtype, bucket_bytes: int) -> list[BucketSpec]:
    """Every tensor of the checkpoint once, in order, as `dtype` or, where it stays that, as float32; a tensor larger than a bucket
    travels alone in one of its own size."""
    groups: list[list[tuple[str, torch.dtype, tuple[int, ...]]]] = []
    kept = model_map.float32
    for name, shape in model_map.hf_shapes.items():
        tensor = (name, torch.float32 if name in kept else dtype, tuple(shape))
        if groups and BucketSpec.plan("", [*groups[-1], tensor]).nbytes <= bucket_bytes:
            groups[-1].append(tensor)
        else:
            groups.append([tensor])
    return [BucketSpec.plan("", group) for group in groups]


def _compare(names: list[str], shares: list[dict[str, int]], engines: list[dict[str, int]]) -> None:
    for name in names:
        parts = [s[name] for s in shares if name in s]
        if not parts:
            raise RunError(f"weight sync: no trainer rank answers for {name}")
        whole = combine(parts)
        for number, engine in enumerate(engines):
            if name not in engine:
                raise RunError(f"weight sync: engine {number} did not report {name}: it was never loaded")
            if engine[name] != whole:
                raise RunError(
                    f"weight sync: {name} in engine {number} differs from the trainer's "
                    f"(fingerprint {engine[name]:016x}, should be {whole:016x})"
                )


def _remove_stale(folder: Path) -> None:
    """Buckets of runs that were killed would hold shared memory for ever."""
    for path in folder.glob("megarl-*"):
        owner = re.match(r"megarl-(\d+)-", path.name)
        if owner and not Path(f"/proc/{owner.group(1)}").exists():
            path.unlink(missing_ok=True)
