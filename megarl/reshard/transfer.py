"""What every way of moving weights has in common: buckets planned once from the model's map, the order of an update, and its proof."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, Required, TypedDict

import torch

from megarl.bridge import fp8
from megarl.bridge.model_map import ModelMap
from megarl.errors import RunError
from megarl.reshard.bucket import BucketSpec
from megarl.reshard.fingerprint import combine

Member = tuple[int, int]  # an engine's place among all, and how often it was started

SAMPLED = 64  # "sampled" proves every so manieth tensor, others each time


class Writers(Protocol):
    """All ranks that hold a model."""

    def measure(self, shapes: Mapping[str, Sequence[int]]) -> object:
        """Have the ranks find together, for this update, the scales of the matrices that engines get in float8."""

    def write(self, bucket: BucketSpec) -> list[dict[str, int]]:
        """Return when every rank has written its slices: each rank's shares of the fingerprints that the bucket asks for."""


class Receivers(Protocol):
    """The engines' side."""

    def begin_update(self, version: int) -> None: ...

    def load(self, buckets: Sequence[BucketSpec]) -> object:
        """Start loading, one after the other; the answer is waited for with `loaded`."""

    def loaded(self, token: object) -> None: ...

    def members(self) -> tuple[Member, ...]:
        """The engines that take part in this update; one that was started anew is another."""

    def end_update(self, in_place: Sequence[str] | None = None) -> list[dict[str, int]]:
        """Finish; the fingerprints that each engine took of its own copy: those that buckets asked for, or where all was written in
        place, of the tensors named `in_place`."""


class Proof(NamedTuple):
    """Fingerprints of an update, taken by either side."""

    ranks: list[dict[str, int]]  # each rank's shares of them
    engines: list[dict[str, int]]


@dataclass(frozen=True)
class ReshardReport:
    seconds: float
    bytes: int
    tensors: int
    verified: int  # tensors proved equal on every engine

    def metrics(self) -> dict[str, float]:
        return {
            "reshard/seconds": self.seconds,
            "reshard/gigabytes": self.bytes / 1e9,
            "reshard/verified": float(self.verified),
            "reshard/tensors": float(self.tensors),
        }


class Settings(TypedDict, total=False):
    """What every way of weights takes: see `Transfer`."""

    dtype: Required[str]
    bucket_bytes: Required[int]
    verify: Required[str]
    full_every: int
    quantised: bool


class Transfer(ABC):
    """Moves all weights, bucket by bucket, and proves their arrival. `_kinds`: in so many ways, the first of which an engine's first
    update takes.

    Every rank takes the fingerprints of its own weights when it writes them, the engines take theirs of their own copies when
    they have loaded: both while the other side is at work on another bucket.
    """

    _kinds = 1

    def __init__(
        self,
        model_map: ModelMap,
        *,
        dtype: str,
        bucket_bytes: int,
        verify: str,
        full_every: int = 0,
        quantised: bool = False,
    ):
        """`verify`: full, sampled or off. `full_every`: with "sampled" one update of so many is proved in full; 0: the first.
        `quantised`: engines hold linear layers in float8 by blocks (`megarl.bridge.fp8`), and are given them so."""
        self.quantised = fp8.quantised(model_map) if quantised else {}
        self.buckets = plan(model_map, getattr(torch, dtype), bucket_bytes, self.quantised)
        self.bytes = sum(b.nbytes for b in self.buckets)
        self._verify = verify
        self._full_every = full_every
        self._turn = 0
        self._whole: dict[Member, int] = {}  # how often all of an engine's weights were proved

    def push(self, shards: Writers, receivers: Receivers, version: int) -> ReshardReport:
        """Give the engines the trainer's weights as `version`. Raises RunError naming the first tensor that is not equal."""
        start = time.perf_counter()
        if self.quantised:
            shards.measure(self.quantised)
        receivers.begin_update(version)
        members = receivers.members()
        proved = self._to_prove(members)
        asking = [self._asking(bucket, proved) for bucket in self.buckets]
        _compare(proved, self._move(asking, shards, receivers, version))
        self._turn += 1
        if len(proved) == sum(len(bucket.tensors) for bucket in self.buckets):
            kept = {m: count for m, count in self._whole.items() if m[0] not in {place for place, _ in members}}
            self._whole = kept | {member: self._whole.get(member, 0) + 1 for member in members}
        tensors = sum(len(b.tensors) for b in self.buckets)
        return ReshardReport(time.perf_counter() - start, self.bytes, tensors, len(proved))

    @abstractmethod
    def _move(self, buckets: Sequence[BucketSpec], shards: Writers, receivers: Receivers, version: int) -> Proof:
        """Have all that the buckets hold written and loaded, and end the update."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the transfer holds."""

    def _to_prove(self, members: Sequence[Member]) -> set[str]:
        """Whatever is sampled, an engine's first update of each kind is proved in full: it shows that everything has its place."""
        names = [t.name for b in self.buckets for t in b.tensors]
        if self._verify == "off":
            return set()
        full = self._turn % self._full_every == 0 if self._full_every else self._turn == 0
        if self._verify == "full" or full or any(self._whole.get(member, 0) < self._kinds for member in members):
            return set(names)
        every = min(SAMPLED, len(names))
        return set(names[self._turn % every :: every])

    @staticmethod
    def _asking(bucket: BucketSpec, proved: set[str]) -> BucketSpec:
        return replace(bucket, prove=tuple(t.name for t in bucket.tensors if t.name in proved))


def plan(
    model_map: ModelMap, dtype: torch.dtype, bucket_bytes: int, quantised: Collection[str] = ()
) -> list[BucketSpec]:
    """Every tensor of the checkpoint once, in order, as `dtype` or, where it stays that, as float32; a tensor larger than a bucket
    travels alone in one of its own size. Of those that are `quantised` the scales follow the numbers."""
    groups: list[list[tuple[str, torch.dtype, tuple[int, ...]]]] = []
    kept = model_map.float32
    used = 0
    tensors: list[tuple[str, torch.dtype, tuple[int, ...]]] = []
    for name, shape in model_map.hf_shapes.items():
        if name in quantised:
            tensors += [(name, fp8.DTYPE, tuple(shape)), (fp8.scales_name(name), torch.float32, fp8.blocks(shape))]
        else:
            tensors.append((name, torch.float32 if name in kept else dtype, tuple(shape)))
    for tensor in tensors:
        size = BucketSpec.plan("", [tensor, tensor]).tensors[1].offset  # with what aligns the next
        if groups and used + size <= bucket_bytes:
            groups[-1].append(tensor)
            used += size
        else:
            groups.append([tensor])
            used = size
    return [BucketSpec.plan("", group) for group in groups]


def _compare(names: set[str], proof: Proof) -> None:
    parts: dict[str, list[int]] = defaultdict(list)
    for share in proof.ranks:
        for name, part in share.items():
            parts[name].append(part)
    for name in sorted(names):
        if name not in parts:
            raise RunError(f"weight sync: no trainer rank answers for {name}")
        whole = combine(parts[name])
        for number, engine in enumerate(proof.engines):
            if name not in engine:
                raise RunError(f"weight sync: engine {number} did not report {name}: it was never loaded")
            if engine[name] != whole:
                raise RunError(
                    f"weight sync: {name} in engine {number} differs from the trainer's "
                    f"(fingerprint {engine[name]:016x}, should be {whole:016x})"
                )
