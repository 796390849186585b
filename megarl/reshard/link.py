"""A process group for weights alone: the trainer's ranks and, after them, the ranks of engines. Messages instead of shared memory.

Of each bucket every trainer's rank sends its slices of the bucket's tensors to every engine's rank: the small ones together as one
message, each of the others by itself. Both sides know the plan, so that nothing but weights travels. Large slices go as they lie,
without a copy; the others through two buffers for each partner, which are used again, so that one message is under way while the one
before is unpacked and loaded.

An engine's first update goes through SGLang's own loader. From then on what comes is put straight into its weights (`receive_into`), a
large slice without a copy in between.
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
from megarl.reshard.copying import copy_all
from megarl.reshard.exposure import meeting

Region = tuple[tuple[int, int, int], ...]  # (start, stop, step) along each dimension of a checkpoint's tensor
Regions = Mapping[str, Sequence[Region]]  # what one rank has of which tensor


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of a group find each other: in the store of who has called them, and may call them off again (`call_off`) while
    they wait. The first `sources` are the trainer's, the others an engine's, in order."""

    address: str
    port: int
    sources: int
    world: int
    timeout: float  # seconds


_OFF = "off"  # in a meeting's store
_ALONE = 1 << 19  # bytes from which on a slice is a message by itself


class Part(NamedTuple):
    """What an engine's rank holds of a checkpoint's tensor."""

    view: torch.Tensor
    origin: Sequence[int]  # of its first element, in that tensor


class _Piece(NamedTuple):
    name: str
    number: int  # among the rank's regions of this tensor
    region: Region
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the buffer

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class _Layout(NamedTuple):
    """What a rank sends of a bucket: first the pieces that go alone, then a message of all others. In a buffer these come first."""

    together: list[_Piece]
    alone: list[_Piece]
    packed: int  # bytes of those that go together
    size: int  # of all

    @property
    def pieces(self) -> list[_Piece]:
        return [*self.together, *self.alone]


def _layout(tensors: Sequence[BucketTensor], regions: Regions) -> _Layout:
    found: list[list[_Piece]] = [[], []]
    for item in tensors:
        dtype = getattr(torch, item.dtype)
        for number, region in enumerate(regions.get(item.name, ())):
            shape = tuple(len(range(*ends)) for ends in region)
            piece = _Piece(item.name, number, region, dtype, shape, 0)
            found[piece.nbytes >= _ALONE].append(piece)
    ends = [0]
    for piece in (*found[0], *found[1]):
        ends.append(ends[-1] + -(-piece.nbytes // ALIGN) * ALIGN)
    placed = [piece._replace(offset=at) for piece, at in zip((*found[0], *found[1]), ends, strict=False)]
    count = len(found[0])
    return _Layout(placed[:count], placed[count:], ends[count], ends[-1])


def _view(buffer: torch.Tensor, piece: _Piece) -> torch.Tensor:
    return buffer[piece.offset : piece.offset + piece.nbytes].view(piece.dtype).view(piece.shape)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8)


def join(meeting: Meeting, rank: int) -> dist.ProcessGroup:
    """A group beside the process's others. Returns when all have come; raises RuntimeError where they do not in time, and at once when
    the meeting is called off."""
    limit = timedelta(seconds=meeting.timeout)
    store = dist.TCPStore(meeting.address, meeting.port, is_master=False, wait_for_workers=False, timeout=limit)
    # Here and not in the group, which nobody can call off: gloo waits five times its limit for one that has died.
    store.set(_here(rank), "")
    store.wait([_here(other) for other in range(meeting.world)], limit)
    if store.check([_OFF]):
        raise RuntimeError("the meeting was called off")
    if torch.cuda.is_available():
        return dist.ProcessGroupNCCL(store, rank, meeting.world, limit)
    return dist.ProcessGroupGloo(store, rank, meeting.world, limit)


def call_off(store: dist.Store, world: int) -> None:
    """Let all fail who wait for a meeting's others, or will."""
    store.set(_OFF, "")
    for rank in range(world):
        store.set(_here(rank), "")


def _here(rank: int) -> str:
    return f"here/{rank}"


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
        self._layouts: dict[tuple[BucketTensor, ...], _Layout] = {}
        self._turn = 0
        self._under_way: dict[int, list[tuple[int, dist.Work]]] = {0: [], 1: []}

    def send(self, tensors: Sequence[BucketTensor], slices: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Begin to send this rank's `slices` of a bucket's tensors. They may not change before `flush`."""
        turn = self._turn % 2
        self._turn += 1
        self._wait(turn)
        layout = self._layout(tuple(tensors))
        alone = [slices[piece.name][piece.number] for piece in layout.alone]
        as_they_lie = all(s.dtype == p.dtype and s.is_contiguous() for s, p in zip(alone, layout.alone, strict=True))
        buffer = self._buffers.get(0, turn, layout.packed if as_they_lie else layout.size)
        for number, (piece, source) in enumerate(zip(layout.alone, alone, strict=True), 1):
            if source.dtype == piece.dtype and source.is_contiguous():
                self._begin(_bytes(source), number, turn)
            else:
                self._begin(_bytes(_view(buffer, piece).copy_(source)), number, turn)
        # On one thread: what was begun keeps the other cores busy.
        copy_all(((_view(buffer, piece), slices[piece.name][piece.number]) for piece in layout.together), threads=1)
        if layout.packed:
            self._begin(buffer[: layout.packed], 0, turn)

    def _begin(self, message: torch.Tensor, number: int, turn: int) -> None:
        for partner in list(self._partners):
            try:
                self._under_way[turn].append((partner, self._group.send([message], partner, 2 * number + turn)))
            except RuntimeError:
                self._partners.remove(partner)

    def _layout(self, tensors: tuple[BucketTensor, ...]) -> _Layout:
        if tensors not in self._layouts:
            self._layouts[tensors] = _layout(tensors, self._regions)
        return self._layouts[tensors]

    def flush(self) -> None:
        """Return when everything has been taken."""
        for turn in (0, 1):
            self._wait(turn)

    def _wait(self, turn: int) -> None:
        works, self._under_way[turn] = self._under_way[turn], []
        for partner, work in reversed(works):  # as they end in order, one sleep
            try:
                work.wait()
            except RuntimeError:
                if partner in self._partners:
                    self._partners.remove(partner)


class Inlet:
    """An engine's rank's end of a link. `plan`: the tensors of every bucket, in the order in which they come, again and again."""

    def __init__(self, meeting: Meeting, rank: int, sources: Sequence[Regions], plan: Sequence[Sequence[BucketTensor]]):
        self._group = join(meeting, rank)
        self._plan = plan
        self._buffers = _Buffers()
        self._whole = _Buffers()
        self._layouts = [[_layout(tensors, regions) for regions in sources] for tensors in plan]
        self._turn = 0
        self._coming: _Coming | None = None
        self._parts: Mapping[str, Part] = {}  # of the last update
        self._targets: dict[_Piece, _Target | None] = {}  # where pieces go among them; None: nowhere

    def receive(self, number: int) -> dict[str, torch.Tensor]:
        """Bucket `number`'s tensors, valid until the bucket after the next is asked for. Meanwhile the next one may come."""
        return self._assemble(number, self._next(number, {}))

    def receive_into(self, number: int, parts: Mapping[str, Part]) -> None:
        """Put bucket `number` to its places among the `parts` that an engine's rank holds. Meanwhile the next one may come. Given the
        same `parts` as before, their tensors lie where they did."""
        if parts is not self._parts:
            self._parts, self._targets = parts, {}
        pairs = []
        for piece, came in self._next(number, parts):
            if target := self._target(piece, parts):
                pairs.append((target.view, came[target.common]))
        copy_all(pairs, threads=1)

    def _target(self, piece: _Piece, parts: Mapping[str, Part]) -> _Target | None:
        if piece not in self._targets:
            part = parts[piece.name]
            common = meeting(_slices(piece.region), part.origin, part.view.shape)
            self._targets[piece] = None if common is None else _Target(part.view[common[1]], common[0])
        return self._targets[piece]

    def _place(self, piece: _Piece, parts: Mapping[str, Part]) -> torch.Tensor | None:
        """Where a piece can be received as a whole, and nowhere else."""
        target = self._target(piece, parts) if piece.name in parts else None
        if target is None or piece.dtype != target.view.dtype or tuple(target.view.shape) != piece.shape:
            return None
        return target.view if target.view.is_contiguous() else None

    def _next(self, number: int, parts: Mapping[str, Part]) -> list[tuple[_Piece, torch.Tensor]]:
        """What bucket `number` brings that is not in its place among `parts` already."""
        coming = self._coming if self._coming is not None else self._begin(number, parts)
        for work in reversed(coming.works):  # they end in order: one sleep instead of one for each
            work.wait()
        self._coming = self._begin(number + 1, parts) if number + 1 < len(self._plan) else None
        return coming.pieces

    def _begin(self, number: int, parts: Mapping[str, Part]) -> _Coming:
        turn = self._turn % 2
        self._turn += 1
        coming = _Coming([], [])
        for source, layout in enumerate(self._layouts[number]):
            places = {piece: self._place(piece, parts) for piece in layout.alone}
            in_place = {piece: place for piece, place in places.items() if place is not None}
            buffer = self._buffers.get(
                source, turn, layout.packed if len(in_place) == len(layout.alone) else layout.size
            )
            messages = {}
            for at, piece in enumerate(layout.alone, 1):
                messages[at] = in_place[piece] if piece in in_place else _view(buffer, piece)
            if layout.packed:
                messages[0] = buffer[: layout.packed]
            for at, message in messages.items():  # in the order in which they are sent
                coming.works.append(self._group.recv([_bytes(message)], source, 2 * at + turn))
            coming.pieces.extend((piece, _view(buffer, piece)) for piece in layout.pieces if piece not in in_place)
        return coming

    def _assemble(self, number: int, came: list[tuple[_Piece, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """What came whole stays where it is; the rest is put together in a buffer of its own."""
        tensors = self._plan[number]
        whole = {item.name: tuple((0, size, 1) for size in item.shape) for item in tensors}
        found = {piece.name: view for piece, view in came if piece.region == whole[piece.name]}
        cut = [item for item in tensors if item.name not in found]
        sizes = [-(-item.nbytes // ALIGN) * ALIGN for item in cut]
        room = self._whole.get(0, 0, sum(sizes))
        for item, start in zip(cut, (sum(sizes[:i]) for i in range(len(sizes))), strict=True):
            found[item.name] = room[start : start + item.nbytes].view(getattr(torch, item.dtype)).view(item.shape)
        cut_names = {item.name for item in cut}
        for piece, view in came:
            if piece.name in cut_names:
                found[piece.name][_slices(piece.region)].copy_(view)
        return {item.name: found[item.name] for item in tensors}


class _Target(NamedTuple):
    """Of a piece, among what an engine's rank holds."""

    view: torch.Tensor
    common: tuple[slice, ...]  # what of the piece goes there


class _Coming(NamedTuple):
    """A bucket under way."""

    pieces: list[tuple[_Piece, torch.Tensor]]  # that come into a buffer, and where in it
    works: list[dist.Work]


def _slices(region: Region) -> tuple[slice, ...]:
    return tuple(slice(*ends) for ends in region)
