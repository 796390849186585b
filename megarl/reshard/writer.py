"""The trainer's side of a transfer: each rank writes the slices it owns straight to their places in a shared bucket."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from megarl.bridge.layout import Copy
from megarl.bridge.model_map import Parameter
from megarl.megatron.parallel import Place
from megarl.reshard.bucket import BucketSpec
from megarl.reshard.copying import copy_all
from megarl.reshard.exposure import Exposure, meeting
from megarl.reshard.fingerprint import combine, partial
from megarl.reshard.link import Outlet, Region
from megarl.reshard.stream import Control, Stream
from megarl.reshard.transfer import Member


class _Slice(NamedTuple):
    parameter: torch.Tensor
    copy: Copy

    @property
    def tensor(self) -> torch.Tensor:
        """What the parameter holds now: whoever trains it may give it another storage."""
        return self.parameter.data


_Pairs = dict[str, list[tuple[torch.Tensor, torch.Tensor]]]  # by the tensor's name: where to, and what


class _Opened(NamedTuple):
    exposures: Sequence[Exposure]
    pairs: _Pairs
    held: list[int]  # addresses of what the pairs are of

    @property
    def nbytes(self) -> int:
        return sum(there.nbytes for pairs in self.pairs.values() for there, _ in pairs)


class ShardWriter:
    """Knows which regions of the checkpoint's tensors this rank answers for: over all ranks, every element once.

    Tensors that several ranks hold alike are shared out: replicated ones go to the first tensor-parallel rank, and the ranks
    with the same part (data and context parallelism; of experts, what is left of a stage) take turns tensor by tensor.
    """

    def __init__(self, parameters: Iterable[tuple[Parameter, torch.Tensor]], place: Place):
        self._slices: dict[str, list[_Slice]] = defaultdict(list)
        self._engines: dict[Member, _Opened] = {}
        turns: dict[bool, int] = {False: 0, True: 0}  # experts are counted by themselves: other ranks share them
        for parameter, tensor in parameters:
            of_experts = parameter.expert is not None
            turns[of_experts] += 1
            replica = parameter.replica(place)
            if not parameter.exported or replica is None or turns[of_experts] % replica[1] != replica[0]:
                continue
            for copy in parameter.copies(place):
                self._slices[copy.hf_name].append(_Slice(tensor, copy))

    @torch.no_grad()
    def write(self, bucket: BucketSpec) -> dict[str, int]:
        """Write this rank's part of a bucket, in the bucket's dtype; its shares of the fingerprints that the bucket asks for.

        A share is taken of the rank's own weights, not of what it wrote; right after, since they are still in the cache.
        """
        self._copy(bucket)
        return self._shares(bucket)

    @torch.no_grad()
    def write_stream(self, stream: Stream, rank: int) -> dict[str, int]:
        """`write` of every bucket as soon as its place is free, as writer number `rank`."""
        control = Control(stream)
        shares: dict[str, int] = {}
        for number, bucket in enumerate(stream.buckets):
            control.wait_loaded(number + 1 - stream.places)
            self._copy(bucket)
            control.wrote(rank, number + 1)
            shares |= self._shares(bucket)
        return shares

    def open(self, engines: Mapping[Member, Sequence[Exposure]]) -> dict[Member, int]:
        """Map the weights of engines, and let go of all others; bytes that this rank will write into each."""
        found: dict[Member, _Opened] = {}
        for member, exposures in engines.items():
            opened = self._engines.get(member)
            if opened is None or opened.exposures != exposures:
                opened = self._opened(exposures)
            found[member] = opened
        self._engines = found  # not before all are mapped
        return {member: opened.nbytes for member, opened in self._engines.items()}

    def _opened(self, exposures: Sequence[Exposure]) -> _Opened:
        return _Opened(exposures, self._pairs(exposures), self._held())

    def _held(self) -> list[int]:
        return [piece.tensor.data_ptr() for pieces in self._slices.values() for piece in pieces]

    def _pairs(self, exposures: Sequence[Exposure]) -> _Pairs:
        pairs: _Pairs = defaultdict(list)
        for exposure in exposures:
            views = exposure.views()
            for name, spot in exposure.spots.items():
                for piece in self._slices.get(name, ()):
                    if common := meeting(piece.copy.hf, spot.origin, spot.shape):
                        ours, theirs = common
                        pairs[name].append((views[name][theirs], _region(piece)[ours]))
        return pairs

    @torch.no_grad()
    def write_in_place(self, members: Sequence[Member]) -> None:
        """Write this rank's slices into engines that are `open`, in the engines' dtype."""
        held = self._held()
        for member in members:
            if self._engines[member].held != held:  # parameters have moved, and the pairs may be of where they were
                self._engines[member] = self._opened(self._engines[member].exposures)
        copy_all(pair for member in members for pairs in self._engines[member].pairs.values() for pair in pairs)

    def _copy(self, bucket: BucketSpec) -> None:
        bucket.clear()
        if any(item.name in self._slices for item in bucket.tensors):
            for name, whole in bucket.views().items():
                for piece in self._slices.get(name, ()):
                    piece.copy.of(whole[piece.copy.hf]).copy_(piece.tensor[piece.copy.local])
        bucket.gather()

    def _shares(self, bucket: BucketSpec) -> dict[str, int]:
        return self.shares({item.name: item.dtype for item in bucket.tensors if item.name in bucket.prove})

    @torch.no_grad()
    def pieces(self, bucket: BucketSpec) -> list[tuple[Copy, torch.Tensor]]:
        """Copies of this rank's part of a bucket, in the bucket's dtype and in CPU memory, each with where it belongs."""
        return [
            (piece.copy, piece.tensor[piece.copy.local].to("cpu", getattr(torch, item.dtype), copy=True))
            for item in bucket.tensors
            for piece in self._slices.get(item.name, ())
        ]

    def regions(self) -> dict[str, list[Region]]:
        """What this rank answers for."""
        return {
            name: [tuple((s.start, s.stop, s.step or 1) for s in piece.copy.hf) for piece in pieces]
            for name, pieces in self._slices.items()
        }

    @torch.no_grad()
    def send(self, buckets: Sequence[BucketSpec], outlet: Outlet) -> dict[str, int]:
        """Send this rank's part of buckets, one after the other; its shares of the fingerprints that they ask for."""
        shares: dict[str, int] = {}
        for bucket in buckets:
            held = [item.name for item in bucket.tensors if item.name in self._slices]
            outlet.send(bucket.tensors, {name: [_region(p) for p in self._slices[name]] for name in held})
            shares |= self._shares(bucket)  # while it is under way
        outlet.flush()
        return shares

    @torch.no_grad()
    def shares(self, kinds: Mapping[str, str]) -> dict[str, int]:
        """This rank's shares of the fingerprints of the named tensors, modulo 2**64, taken of its own weights in the dtypes that stand
        beside their names."""
        return {n: _share(self._slices[n], getattr(torch, kind)) for n, kind in kinds.items() if n in self._slices}


def _region(piece: _Slice) -> torch.Tensor:
    """As it stands in the checkpoint's tensor."""
    return piece.copy.back(piece.tensor[piece.copy.local])


def _share(pieces: Sequence[_Slice], dtype: torch.dtype) -> int:
    return combine([partial(_spread(p, dtype), [s.start for s in p.copy.hf]) for p in pieces])


def _spread(piece: _Slice, dtype: torch.dtype) -> torch.Tensor:
    """A region with all that lies between its rows, which counts as zeros: where gate and up take turns, the other's."""
    region, steps = _region(piece).to(dtype), [s.step or 1 for s in piece.copy.hf]
    if all(step == 1 for step in steps):
        return region
    whole = region.new_zeros([s.stop - s.start for s in piece.copy.hf])
    whole[tuple(slice(None, None, step) for step in steps)] = region
    return whole
