"""The engines' side of a transfer, without an engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from threading import Thread

import torch
from torch import Tensor

from megarl.cpu.memory import SHARED
from megarl.reshard import devices
from megarl.reshard.bucket import BucketSpec, BucketTensor
from megarl.reshard.exposure import Exposure, Spot
from megarl.reshard.fingerprint import combine, fingerprint, partial
from megarl.reshard.link import Inlet, Meeting, Part, Regions
from megarl.reshard.stream import Control, Stream
from megarl.reshard.transfer import Member


class Receiver:
    """Copies what it is given, and takes fingerprints of its own copy. `fault` may change the copy before."""

    def __init__(self, fault: Callable[[dict[str, Tensor]], object] = lambda tensors: None):
        self._inlet: Inlet
        self.tensors: dict[str, Tensor] = {}
        self.arrivals: list[str] = []
        self.buckets: list[list[str]] = []
        self.versions: list[int] = []
        self._fault = fault

    def members(self) -> tuple[Member, ...]:
        return ((0, 1),)

    def ranks(self) -> int:
        return 1

    def link(self, meeting: Meeting, sources: list[Regions], plan: list[list[BucketTensor]]) -> object:
        """As an engine does in its own process, beside the ranks that join."""
        self._weights = {
            item.name: Part(torch.zeros(item.shape, dtype=getattr(torch, item.dtype)), [0] * len(item.shape))
            for tensors in plan
            for item in tensors
        }
        joining = Thread(target=lambda: setattr(self, "_inlet", Inlet(meeting, meeting.sources, sources, plan)))
        joining.start()
        return joining

    def lost(self, token: object, wait: float) -> bool:
        return False

    def unlink(self, token: object) -> None: ...

    def reach(self, kind: str, paths: Sequence[str]) -> list[str]:
        return [why for why in [devices.reach(kind, paths)] if why]

    def load_stream(self, stream: Stream, control: Control) -> None:
        for number, bucket in enumerate(stream.buckets):
            control.wait_written(number + 1)
            self.take(bucket.views())
            control.loaded(0, number + 1)

    def begin_update(self, version: int) -> None:
        self.versions.append(version)
        self.tensors, self.arrivals, self.buckets = {}, [], []

    def load(self, buckets: Sequence[BucketSpec]) -> Thread:
        loading = Thread(target=self._load, args=(buckets,))
        loading.start()
        return loading

    def _load(self, buckets: Sequence[BucketSpec]) -> None:
        for bucket in buckets:
            if bucket.in_place:
                assert bucket.number is not None
                self._inlet.receive_into(bucket.number, self._weights)
                self.take({item.name: self._weights[item.name].view for item in bucket.tensors})
            else:
                self.take(bucket.views() if bucket.number is None else self._inlet.receive(bucket.number))

    def loaded(self, token: object) -> None:
        assert isinstance(token, Thread)
        token.join()

    def take(self, views: dict[str, Tensor]) -> None:
        self.buckets.append(list(views))
        self.arrivals += views
        self.tensors |= {name: view.clone() for name, view in views.items()}

    def end_update(self, in_place: Sequence[str] | None = None) -> list[dict[str, int]]:
        assert in_place is None
        self._fault(self.tensors)
        return [{name: fingerprint(tensor) for name, tensor in self.tensors.items()}]


class Exposing(Receiver):
    """An engine of two ranks whose weights lie where others can write to them: matrices are cut by rows or by columns, in turns, each
    row with a gap behind it; vectors are whole on both ranks."""

    exposures: list[Exposure]
    fault: Callable[[dict[str, Tensor]], object] = staticmethod(lambda tensors: None)  # changes a rank's weights

    def __init__(self, number: int = 0):
        super().__init__()
        self.number, self.starts = number, 1
        self.exposed = 0  # how often it was asked

    def members(self) -> tuple[Member, ...]:
        return ((self.number, self.starts),)

    def expose(self, tensors: Sequence[BucketTensor]) -> dict[Member, list[Exposure]]:
        self.exposed += 1
        self.exposures = [self._expose(tensors, rank) for rank in range(2)]
        for name, region, view in self._parts():
            view.copy_(self.tensors[name][region])
        return {self.members()[0]: self.exposures}

    def _expose(self, tensors: Sequence[BucketTensor], rank: int) -> Exposure:
        spots, at = {}, 0
        for number, item in enumerate(tensors):
            shape, origin = list(item.shape), [0] * len(item.shape)
            if len(shape) > 1:
                half = shape[number % 2] // 2
                shape[number % 2], origin[number % 2] = (half, shape[number % 2] - half)[rank], rank * half
            row = shape[-1] + 3
            stride = (shape[-2] * row, row, 1)[-len(shape) :] if len(shape) > 1 else (1,)
            spots[item.name] = Spot(item.dtype, tuple(shape), stride, at, tuple(origin))
            at += -(-shape[0] * stride[0] * 4 // 64) * 64
        handle = os.memfd_create(SHARED)
        os.posix_fallocate(handle, 0, at)
        return Exposure(f"/proc/{os.getpid()}/fd/{handle}", at, spots)

    def _parts(self) -> Iterator[tuple[str, tuple[slice, ...], Tensor]]:
        for exposure in self.exposures:
            views = exposure.views()
            self.fault(views)
            for name, spot in exposure.spots.items():
                ends = zip(spot.origin, spot.shape, strict=True)
                yield name, tuple(slice(start, start + size) for start, size in ends), views[name]

    def end_update(self, in_place: Sequence[str] | None = None) -> list[dict[str, int]]:
        if in_place is None:
            return super().end_update()
        found: dict[str, dict[tuple[int, ...], int]] = {name: {} for name in in_place}
        for name, region, view in self._parts():
            if name in found:
                origin = tuple(part.start for part in region)
                value = partial(view, origin)
                assert found[name].setdefault(origin, value) == value, f"the ranks hold {name} differently"
        return [{name: combine(list(parts.values())) for name, parts in found.items()}]
