"""The engines' side of a transfer, without an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Thread

from torch import Tensor

from megarl.reshard.bucket import BucketSpec, BucketTensor
from megarl.reshard.fingerprint import fingerprint
from megarl.reshard.link import Inlet, Meeting, Regions
from megarl.reshard.stream import Control, Stream


class Receiver:
    """Copies what it is given, and takes fingerprints of its own copy. `fault` may change the copy before."""

    def __init__(self, fault: Callable[[dict[str, Tensor]], object] = lambda tensors: None):
        self._inlet: Inlet
        self.tensors: dict[str, Tensor] = {}
        self.arrivals: list[str] = []
        self.buckets: list[list[str]] = []
        self.versions: list[int] = []
        self._fault = fault

    def members(self) -> tuple[object, ...]:
        return (self,)

    def ranks(self) -> int:
        return 1

    def link(self, meeting: Meeting, sources: list[Regions], plan: list[list[BucketTensor]]) -> object:
        """As an engine does in its own process, beside the ranks that join."""
        joining = Thread(target=lambda: setattr(self, "_inlet", Inlet(meeting, meeting.sources, sources, plan)))
        joining.start()
        return joining

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
            self.take(bucket.views() if bucket.number is None else self._inlet.receive(bucket.number))

    def loaded(self, token: object) -> None:
        assert isinstance(token, Thread)
        token.join()

    def take(self, views: dict[str, Tensor]) -> None:
        self.buckets.append(list(views))
        self.arrivals += views
        self.tensors |= {name: view.clone() for name, view in views.items()}

    def end_update(self) -> list[dict[str, int]]:
        self._fault(self.tensors)
        return [{name: fingerprint(tensor) for name, tensor in self.tensors.items()}]
