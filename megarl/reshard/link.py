"""A process group for weights alone: the trainer's ranks and, after them, the ranks of engines. Messages instead of shared memory.

Of each bucket every trainer's rank sends one message to every engine's rank: its slices of the bucket's tensors, one after the other.
Both sides know the plan, so that nothing but weights travels; both keep two buffers for each partner and use them again, so that one
message is under way while the one before is unpacked and loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist

from megarl.reshard.bucket import ALIGN, BucketTensor

Region = tuple[tuple[int, int, int], ...]  # (start, stop, step) along each dimension of a checkpoint's tensor
Regions = Mapping[str, Sequence[Region]]  # what one rank has of which tensor


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of a group find each other. The first `sources` are the trainer's, the others an engine's, in order."""

    address: str
    port: int
    sources: int
    world: int
    timeout: float  # seconds


class _Piece(NamedTuple):
    name: str
    number: int  # among the rank's regions of this tensor
    region: Region
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the message


def _layout(tensors: Sequence[BucketTensor], regions: Regions) -> tuple[list[_Piece], int]:
    """What a rank's message of a bucket holds, and its bytes."""
    pieces, at = [], 0
    for item in tensors:
        dtype = getattr(torch, item.dtype)
        for number, region in enumerate(regions.get(item.name, ())):
            shape = tuple(len(range(*ends)) for ends in region)
            pieces.append(_Piece(item.name, number, region, dtype, shape, at))
            at += -(-prod(shape) * dtype.itemsize // ALIGN) * ALIGN
    return pieces, at


def _view(buffer: torch.Tensor, piece: _Piece) -> torch.Tensor:
    size = prod(piece.shape) * piece.dtype.itemsize
    return buffer[piece.offset : piece.offset + size].view(piece.dtype).view(piece.shape)


def join(meeting: Meeting, rank: int) -> dist.ProcessGroup:
    """A group beside the process's others. Returns when all have come; raises RuntimeError where they do not in time."""
    limit = timedelta(seconds=meeting.timeout)
    store = dist.TCPStore(meeting.address, meeting.port, meeting.world, is_master=rank == 0, timeout=limit)
    if torch.cuda.is_available():
        return dist.ProcessGroupNCCL(store, rank, meeting.world, limit)
    return dist.ProcessGroupGloo(store, rank, meeting.world, limit)


class _Buffers:
    """Two for each partner, by turns, as large as the largest message."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], torch.Tensor] = {}

    def get(self, partner: int, turn: int, size: int) -> torch.Tensor:
        key = (partner, turn % 2)
        if key not in self._kept or len(self._kept[key]) < size:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            self._kept[key] = torch.empty(size, dtype=torch.uint8, device=device)
        return self._kept[key][:size]


class Outlet:
    """A trainer's rank's end of a link. A partner that is gone is left out from then on: its end is the engine's side to see."""

    def __init__(self, meeting: Meeting, rank: int, regions: Regions):
        self._group = join(meeting, rank)
        self._partners = list(range(meeting.sources, meeting.world))
        self._regions = regions
        self._buffers = _Buffers()
        self._turn = 0
        self._under_way: dict[int, list[tuple[int, dist.Work]]] = {0: [], 1: []}

    def send(self, tensors: Sequence[BucketTensor], slices: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Begin to send this rank's `slices` of a bucket's tensors. They are copied first and may change when this returns."""
        turn = self._turn % 2
        self._turn += 1
        self._wait(turn)
        pieces, size = _layout(tensors, self._regions)
        if not pieces:
            return
        message = self._buffers.get(0, turn, size)
        for piece in pieces:
            _view(message, piece).copy_(slices[piece.name][piece.number])
        for partner in list(self._partners):
            try:
                self._under_way[turn].append((partner, self._group.send([message], partner, turn)))
            except RuntimeError:
                self._partners.remove(partner)

    def flush(self) -> None:
        """Return when everything has been taken."""
        for turn in (0, 1):
            self._wait(turn)

    def _wait(self, turn: int) -> None:
        works, self._under_way[turn] = self._under_way[turn], []
        for partner, work in works:
            try:
                work.wait()
            except RuntimeError:
                if partner in self._partners:
                    self._partners.remove(partner)


class Inlet:
    """An engine's rank's end of a link. `plan`: the tensors of every bucket, in the order in which they come, again and again."""

    def __init__(self, meeting: Meeting, rank: int, sources: Sequence[Regions], plan: Sequence[Sequence[BucketTensor]]):
        self._group = join(meeting, rank)
        self._sources = sources
        self._plan = plan
        self._buffers = _Buffers()
        self._whole = _Buffers()
        self._turn = 0
        self._coming: list[tuple[list[_Piece], torch.Tensor, dist.Work]] | None = None

    def receive(self, number: int) -> dict[str, torch.Tensor]:
        """Bucket `number`'s tensors, valid until the bucket after the next is asked for. Meanwhile the next one may come."""
        coming = self._coming if self._coming is not None else self._begin(number)
        for _, _, work in coming:
            work.wait()
        self._coming = self._begin(number + 1) if number + 1 < len(self._plan) else None
        return self._assemble(number, [(pieces, message) for pieces, message, _ in coming])

    def _begin(self, number: int) -> list[tuple[list[_Piece], torch.Tensor, dist.Work]]:
        turn = self._turn % 2
        self._turn += 1
        coming = []
        for source, regions in enumerate(self._sources):
            pieces, size = _layout(self._plan[number], regions)
            if pieces:
                message = self._buffers.get(source, turn, size)
                coming.append((pieces, message, self._group.recv([message], source, turn)))
        return coming

    def _assemble(self, number: int, messages: list[tuple[list[_Piece], torch.Tensor]]) -> dict[str, torch.Tensor]:
        """What came whole stays where it is; the rest is put together in a buffer of its own."""
        tensors = self._plan[number]
        whole = {item.name: tuple((0, size, 1) for size in item.shape) for item in tensors}
        found = {p.name: _view(m, p) for pieces, m in messages for p in pieces if p.region == whole[p.name]}
        cut = [item for item in tensors if item.name not in found]
        sizes = [-(-item.nbytes // ALIGN) * ALIGN for item in cut]
        room = self._whole.get(0, 0, sum(sizes))
        for item, start in zip(cut, (sum(sizes[:i]) for i in range(len(sizes))), strict=True):
            found[item.name] = room[start : start + item.nbytes].view(getattr(torch, item.dtype)).view(item.shape)
        cut_names = {item.name for item in cut}
        for pieces, message in messages:
            for piece in pieces:
                if piece.name in cut_names:
                    found[piece.name][tuple(slice(*ends) for ends in piece.region)].copy_(_view(message, piece))
        return {item.name: found[item.name] for item in tensors}
