"""Weights from the trainer's shards into the engines as messages of a process group (NCCL, gloo): for engines on other nodes.

The group is made anew whenever other engines are to be given weights than the last time, and after a failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from megarl.bridge.model_map import ModelMap
from megarl.reshard.bucket import BucketSpec, BucketTensor
from megarl.reshard.link import Meeting, Regions
from megarl.reshard.transfer import Member, Proof, Receivers, Transfer, Writers


class Senders(Writers, Protocol):
    """All ranks that hold a model, each with an `Outlet`."""

    def meeting_place(self) -> tuple[str, int]:
        """Address of the first rank's host and a free port there."""

    def regions(self) -> list[Regions]:
        """What each rank answers for."""

    def link(self, meeting: Meeting) -> None: ...

    def send(self, buckets: Sequence[BucketSpec]) -> list[dict[str, int]]:
        """Return when everything has been taken: each rank's shares of the fingerprints that the buckets ask for."""


class LinkedReceivers(Receivers, Protocol):
    """The engines' side, each rank of an engine with an `Inlet`."""

    def ranks(self) -> int:
        """Of all members together."""

    def link(self, meeting: Meeting, sources: list[Regions], plan: list[list[BucketTensor]]) -> object:
        """Begin to join; waited for with `loaded`."""


class Distributed(Transfer):
    """Bucket by bucket, two under way at a time."""

    _kinds = 2  # through SGLang's own loader, and straight to its place

    def __init__(
        self,
        model_map: ModelMap,
        *,
        dtype: str,
        bucket_bytes: int,
        verify: str,
        full_every: int = 0,
        timeout: float = 600.0,
    ):
        """`timeout`: seconds that ranks wait for each other."""
        super().__init__(model_map, dtype=dtype, bucket_bytes=bucket_bytes, verify=verify, full_every=full_every)
        self._timeout = timeout
        self._joined: tuple[Member, ...] | None = None

    def close(self) -> None:
        """Nothing is held here: the group ends with its processes."""

    def _move(self, buckets: Sequence[BucketSpec], shards: Senders, receivers: LinkedReceivers, version: int) -> Proof:
        members = receivers.members()
        known = members == self._joined
        if not known:
            self._join(shards, receivers)
        self._joined = None  # whatever fails from here on leaves messages that nobody takes
        # SGLang's own loader takes engines' first update, which proves what lies where in their weights; later ones go straight there
        numbered = [replace(bucket, number=number, in_place=known) for number, bucket in enumerate(buckets)]
        loading = receivers.load(numbered)
        shares = shards.send(numbered)
        receivers.loaded(loading)
        self._joined = members
        return Proof(shares, receivers.end_update())

    def _join(self, shards: Senders, receivers: LinkedReceivers) -> None:
        sources = shards.regions()
        address, port = shards.meeting_place()
        meeting = Meeting(address, port, len(sources), len(sources) + receivers.ranks(), self._timeout)
        joining = receivers.link(meeting, sources, [bucket.tensors for bucket in self.buckets])
        shards.link(meeting)
        receivers.loaded(joining)
