"""Weights from the trainer's shards into the engines as messages of a process group (NCCL, gloo): for engines on other nodes.

The group is made anew whenever other engines are to be given weights than the last time, and after a failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, Unpack

from torch.distributed import TCPStore

from megarl.bridge.model_map import ModelMap
from megarl.errors import RunError
from megarl.reshard.bucket import BucketSpec, BucketTensor
from megarl.reshard.link import Meeting, Regions, call_off
from megarl.reshard.transfer import Member, Proof, Receivers, Settings, Transfer, Writers

_LOOK = 0.5  # seconds between two looks at whether all who are to join live
_GRACE = 5.0  # seconds in which the death of an engine's process is known


class Senders(Writers, Protocol):
    """All ranks that hold a model, each with an `Outlet`."""

    def regions(self) -> list[Regions]:
        """What each rank answers for."""

    def link(self, meeting: Meeting) -> object:
        """Begin to join."""

    def linked(self, token: object, wait: float) -> bool:
        """Whether all have joined within `wait` seconds. RunError where one cannot."""

    def unlink(self, token: object) -> None:
        """Return when all have given up."""

    def send(self, buckets: Sequence[BucketSpec]) -> list[dict[str, int]]:
        """Return when everything has been taken: each rank's shares of the fingerprints that the buckets ask for."""


class LinkedReceivers(Receivers, Protocol):
    """The engines' side, each rank of an engine with an `Inlet`."""

    def ranks(self) -> int:
        """Of all members together."""

    def link(self, meeting: Meeting, sources: list[Regions], plan: list[list[BucketTensor]]) -> object:
        """Begin to join; waited for with `loaded`."""

    def lost(self, token: object, wait: float) -> bool:
        """Whether an engine that joins is gone, after `wait` seconds at most. RunError where one lives and cannot join."""

    def unlink(self, token: object) -> None:
        """Return when all who are left have given up; their update goes on."""


class Distributed(Transfer):
    """Bucket by bucket, two under way at a time."""

    def __init__(
        self,
        model_map: ModelMap,
        *,
        timeout: float = 600.0,
        host: str = "127.0.0.1",
        **settings: Unpack[Settings],
    ):
        """`timeout`: seconds that ranks wait for each other. `host`: this process's, as ranks and engines reach it."""
        super().__init__(model_map, **settings)
        # Through SGLang's own loader, and straight to its place. SGLang may turn float8 into another form after each update.
        self._kinds = 1 if self.quantised else 2
        self._timeout = timeout
        self._host = host
        self._joined: tuple[Member, ...] | None = None
        self._store: TCPStore | None = None  # of those who have joined: NCCL looks into it later, too

    def close(self) -> None:
        """The group itself ends with its processes."""
        self._store = None

    def _move(self, buckets: Sequence[BucketSpec], shards: Senders, receivers: LinkedReceivers, version: int) -> Proof:
        known = receivers.members() == self._joined
        while not known and not self._join(shards, receivers):
            pass  # without those that were lost
        members = receivers.members()
        self._joined = None  # whatever fails from here on leaves messages that nobody takes
        # SGLang's own loader takes engines' first update, which proves what lies where in their weights; later ones go straight there
        in_place = known and not self.quantised
        numbered = [replace(bucket, number=number, in_place=in_place) for number, bucket in enumerate(buckets)]
        loading = receivers.load(numbered)
        shares = shards.send(numbered)
        receivers.loaded(loading)
        self._joined = members
        return Proof(shares, receivers.end_update())

    def _join(self, shards: Senders, receivers: LinkedReceivers) -> bool:
        """Make the group; False where an engine was lost over it."""
        sources = shards.regions()
        store = TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
        meeting = Meeting(self._host, store.port, len(sources), len(sources) + receivers.ranks(), self._timeout)
        joining = receivers.link(meeting, sources, [bucket.tensors for bucket in self.buckets])
        linking = shards.link(meeting)
        complete = False
        try:
            complete = _all_come(shards, linking, receivers, joining)
        finally:
            if not complete:
                call_off(store, meeting.world)
                shards.unlink(linking)
        if not complete:
            receivers.unlink(joining)
            return False
        receivers.loaded(joining)
        self._store = store
        return True


def _all_come(shards: Senders, linking: object, receivers: LinkedReceivers, joining: object) -> bool:
    """False where an engine is lost meanwhile, for which all others would wait in vain."""
    while not receivers.lost(joining, 0.0):
        try:
            if shards.linked(linking, _LOOK):
                return True
        except RunError:
            if receivers.lost(joining, _GRACE):  # a rank found nobody where an engine was
                return False
            raise
    return False
