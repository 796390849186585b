"""Weights from the trainer's shards into the engines of the same node, through buckets in shared memory.

Two buckets alternate: while the engines load one, the ranks write the next. Each rank writes only its slices, straight to their
places, so nothing is gathered. Their pages are used again by every bucket and every update.

With `in_place` that is how an engine's first update goes, which SGLang's own loader takes and which therefore proves what lies where
in its weights. From then on ranks write straight into those (`megarl.reshard.exposure`), and the buckets' memory is given back.

On GPUs buckets lie in their memory (`megarl.reshard.devices`), where every engine's rank shares its GPU with one of the trainer's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Protocol, Unpack

import torch

from megarl.bridge.model_map import ModelMap
from megarl.errors import RunError
from megarl.reshard.bucket import BucketSpec, BucketTensor
from megarl.reshard.exposure import Exposure
from megarl.reshard.stream import Control, Stream
from megarl.reshard.transfer import Member, Proof, Receivers, Settings, Transfer, Writers

_SHARED_MEMORY = Path("/dev/shm")


class StreamWriters(Writers, Protocol):
    """All ranks that hold a model, on this node."""

    def __len__(self) -> int: ...

    def offer(self, kind: str, paths: Sequence[str], size: int) -> list[str]:
        """Have every rank hold memory of its device for these buckets, and for no other; of each why it cannot, empty where it can."""

    def write_stream(self, stream: Stream) -> list[dict[str, int]]:
        """Have every rank write its slices of every bucket; each rank's shares of the fingerprints that the buckets ask for."""

    def open(self, engines: Mapping[Member, Sequence[Exposure]]) -> list[dict[Member, int]]:
        """Have every rank map the weights of these engines, and let go of all others; bytes that it will write into each."""

    def write_in_place(self, members: Sequence[Member]) -> object:
        """Have every rank write its slices into these engines."""

    def shares(self, kinds: Mapping[str, str]) -> list[dict[str, int]]:
        """Each rank's shares of the fingerprints of the named tensors, taken in the dtypes that stand beside their names."""


class StreamReceivers(Receivers, Protocol):
    """The engines' side, on this node."""

    def ranks(self) -> int:
        """Of all engines that take part in this update together."""

    def reach(self, kind: str, paths: Sequence[str]) -> list[str]:
        """Have every engine's ranks open these buckets in the memory of their devices; why some cannot."""

    def expose(self, tensors: Sequence[BucketTensor]) -> dict[Member, list[Exposure]]:
        """Of each engine, rank by rank, where these tensors of a checkpoint lie in its weights."""

    def load_stream(self, stream: Stream, control: Control) -> None:
        """Have every engine load every bucket. Of an engine that is lost over it, `control` is told that its ranks are gone."""


class Colocated(Transfer):
    """Two buckets in shared memory, by turns, or the engines' own weights."""

    def __init__(
        self,
        model_map: ModelMap,
        *,
        timeout: float = 600.0,
        in_place: bool = False,
        device: str = "",
        note: Callable[[str], None] = lambda _: None,
        folder: Path = _SHARED_MEMORY,
        **settings: Unpack[Settings],
    ):
        """`timeout`: seconds that ranks and engines wait for each other. `in_place`: the engines' weights lie in host memory,
        and after an engine's first update ranks write straight into them; not those that are `quantised`. `device`: the kind of
        devices in whose memory buckets are to lie; `note` is told when they cannot."""
        super().__init__(model_map, **settings)
        assert not (in_place and self.quantised)
        _remove_stale(folder)
        stem = folder / f"megarl-{os.getpid()}-{id(self):x}"
        self._timeout = timeout
        self._in_place, self._kinds = in_place, 1 + in_place
        self._open: dict[Member, list[Exposure]] = {}
        self._control = f"{stem}-control"
        self.paths = [f"{stem}-{i}" for i in range(min(2, len(self.buckets)))]
        self._device, self._note = device, note
        self._reached: set[Member] = set()  # who has opened the buckets in devices' memory
        if not device:
            self._take()

    def _take(self) -> None:
        """Memory for the buckets, where they do not have it."""
        largest = max(self.buckets, key=lambda b: b.nbytes)
        for path in self.paths:
            replace(largest, path=path).create()

    def _give_back(self) -> None:
        """The buckets' memory; whoever has mapped them can use them again after the next `_take`."""
        for path in self.paths:
            os.truncate(path, 0)

    def close(self) -> None:
        """Give the shared memory back."""
        for path in (*self.paths, self._control):
            Path(path).unlink(missing_ok=True)
        for handle in (handle for path in self.paths for handle in Path(path).parent.glob(f"{Path(path).name}-*")):
            handle.unlink(missing_ok=True)

    def _move(
        self, buckets: Sequence[BucketSpec], shards: StreamWriters, receivers: StreamReceivers, version: int
    ) -> Proof:
        members = receivers.members()
        if self._in_place and all(member in self._open for member in members):
            prove = {
                item.name: item.dtype for bucket in buckets for item in bucket.tensors if item.name in bucket.prove
            }
            shards.write_in_place(members)
            with ThreadPoolExecutor(1) as beside:  # both sides take their fingerprints at the same time
                shares = beside.submit(shards.shares, prove) if prove else None
                engines = receivers.end_update(list(prove))
                return Proof(shares.result() if shares else [], engines)
        shares = self._stream(buckets, shards, receivers)
        fault = self._expose(shards, receivers) if self._in_place else None
        proof = Proof(shares, receivers.end_update())
        if fault is not None and members == receivers.members():  # no engine's loss was the cause
            raise fault
        return proof

    def _expose(self, shards: StreamWriters, receivers: StreamReceivers) -> RunError | None:
        """Map the weights of engines that have taken theirs from buckets. A fault where they cannot be mapped, or ranks would leave a
        byte of them out."""
        try:
            self._open = self._exposed(shards, receivers)
        except RunError as error:
            return error
        self._give_back()
        return None

    def _exposed(self, shards: StreamWriters, receivers: StreamReceivers) -> dict[Member, list[Exposure]]:
        new = receivers.expose([item for bucket in self.buckets for item in bucket.tensors])
        places = {place for place, _ in new}
        known = {member: held for member, held in self._open.items() if member[0] not in places} | new
        covered = shards.open(known)
        for member, exposures in new.items():
            written, held = sum(rank[member] for rank in covered), sum(exposure.nbytes for exposure in exposures)
            if written != held:
                raise RunError(
                    f"weight sync: the ranks answer for {written} of the {held} bytes of engine {member[0]}'s weights"
                )
        return known

    def _stream(
        self, buckets: Sequence[BucketSpec], shards: StreamWriters, receivers: StreamReceivers
    ) -> list[dict[str, int]]:
        if self._device:
            self._meet(shards, receivers)
        if not self._device:
            self._take()
        placed = [replace(self._placed(bucket, number), device=self._device) for number, bucket in enumerate(buckets)]
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

    def _meet(self, shards: StreamWriters, receivers: StreamReceivers) -> None:
        """Have ranks make the buckets in their devices' memory, and engines open them. Where one cannot, the host's memory serves
        all from now on."""
        if self._reached.issuperset(receivers.members()):
            return
        largest = max(bucket.nbytes for bucket in self.buckets)
        refused = [why for why in shards.offer(self._device, self.paths, largest) if why]
        refused = refused or receivers.reach(self._device, self.paths)
        if refused:
            self._note(f"weights go through the host's memory, not through the GPUs': {refused[0]}")
            shards.offer(self._device, [], 0)
            self._device = ""
        self._reached.update(receivers.members())

    def tensors(self, shards: Writers) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor under the checkpoint's name, in its order: for an export. A tensor is valid until the next is asked for."""
        self._take()
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
