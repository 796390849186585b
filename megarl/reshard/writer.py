"""The trainer's side of a transfer: each rank writes the slices it owns straight to their places in a shared bucket."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch

from megarl.bridge import fp8
from megarl.bridge.layout import Copy
from megarl.bridge.model_map import Parameter
from megarl.errors import RunError
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


class _Piece(NamedTuple):
    """A region of a tensor that travels, and the numbers that go there."""

    region: tuple[slice, ...]
    numbers: torch.Tensor


_Pieces = dict[str, list[_Piece]]  # by the tensor's name
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
        self._scales: dict[str, torch.Tensor] = {}  # of matrices that travel in float8, by the matrix's name
        self._scaled: dict[str, str] = {}  # the matrix's name by that of its scales
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
        pieces = self._pieces(bucket)
        self._copy(bucket, pieces)
        return _shares(bucket, pieces)

    @torch.no_grad()
    def write_stream(self, stream: Stream, rank: int) -> dict[str, int]:
        """`write` of every bucket as soon as its place is free, as writer number `rank`."""
        control = Control(stream)
        shares: dict[str, int] = {}
        for number, bucket in enumerate(stream.buckets):
            pieces = self._pieces(bucket)
            control.wait_loaded(number + 1 - stream.places)
            self._copy(bucket, pieces)
            control.wrote(rank, number + 1)
            shares |= _shares(bucket, pieces)
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
        return _Opened(exposures, self._pairs(exposures), self._addresses())

    def _addresses(self) -> list[int]:
        return [piece.tensor.data_ptr() for pieces in self._slices.values() for piece in pieces]

    def _pairs(self, exposures: Sequence[Exposure]) -> _Pairs:
        pairs: _Pairs = defaultdict(list)
        for exposure in exposures:
            views = exposure.views()
            for name, spot in exposure.spots.items():
                for piece in self._held(name):
                    if common := meeting(piece.copy.hf, spot.origin, spot.shape):
                        ours, theirs = common
                        pairs[name].append((views[name][theirs], _region(piece)[ours]))
        return pairs

    @torch.no_grad()
    def write_in_place(self, members: Sequence[Member]) -> None:
        """Write this rank's slices into engines that are `open`, in the engines' dtype."""
        held = self._addresses()
        for member in members:
            if self._engines[member].held != held:  # parameters have moved, and the pairs may be of where they were
                self._engines[member] = self._opened(self._engines[member].exposures)
        copy_all(pair for member in members for pairs in self._engines[member].pairs.values() for pair in pairs)

    def _copy(self, bucket: BucketSpec, pieces: _Pieces) -> None:
        bucket.clear()
        if pieces:
            views = bucket.views()
            for name, held in pieces.items():
                for piece in held:
                    views[name][piece.region].copy_(piece.numbers)
        bucket.gather()

    @torch.no_grad()
    def measure(self, shapes: Mapping[str, Sequence[int]], largest: Callable[[torch.Tensor], object]) -> None:
        """Find the scales of all blocks of the matrices that travel in float8, for one update: a block may be several ranks'.

        `largest` sets each element of a float32 tensor to the largest of all ranks'. Raises RunError on every rank, naming the matrix,
        where a number is not finite.
        """
        sizes = {name: fp8.blocks(shape) for name, shape in shapes.items()}
        device = "cuda" if torch.cuda.is_available() else "cpu"
        flat = torch.zeros(sum(map(prod, sizes.values())), device=device)
        cut = flat.split([prod(size) for size in sizes.values()])
        whole = {name: part.view(sizes[name]) for name, part in zip(sizes, cut, strict=True)}
        for name, found in whole.items():
            for piece in self._held(name):
                where, magnitudes = fp8.magnitudes(_region(piece), _origin(piece.copy.hf))
                found[where] = found[where].maximum(magnitudes)
        largest(flat)
        if not flat.isfinite().all():
            name = next(name for name, found in whole.items() if not found.isfinite().all())
            raise RunError(f"weight sync: {name} has numbers that are not finite, which have no place in float8")
        self._scales = {name: fp8.scales_of(found) for name, found in whole.items()}
        self._scaled = {fp8.scales_name(name): name for name in whole}

    def _pieces(self, bucket: BucketSpec) -> _Pieces:
        """This rank's part of a bucket: of its own weights, or what was made of them for float8."""
        found: _Pieces = {}
        for item in bucket.tensors:
            if name := self._scaled.get(item.name):
                made = [_Piece(region, self._scales[name][region]) for region in self._owned_scales(name)]
            elif getattr(torch, item.dtype) == fp8.DTYPE:
                made = [_Piece(piece.copy.hf, self._quantise(item.name, piece)) for piece in self._held(item.name)]
            else:
                made = [_Piece(piece.copy.hf, _region(piece)) for piece in self._held(item.name)]
            if made:
                found[item.name] = made
        return found

    def _held(self, name: str) -> Sequence[_Slice]:
        return self._slices.get(name, ())

    def _quantise(self, name: str, piece: _Slice) -> torch.Tensor:
        return fp8.quantise(_region(piece), _origin(piece.copy.hf), self._scales[name])

    def _owned_scales(self, name: str) -> list[tuple[slice, slice]]:
        """The blocks of a matrix whose scales this rank answers for."""
        regions = [fp8.owned_scales(piece.copy.hf) for piece in self._held(name)]
        return [region for region in regions if all(part.start < part.stop for part in region)]

    @torch.no_grad()
    def pieces(self, bucket: BucketSpec) -> list[tuple[Copy, torch.Tensor]]:
        """Copies of this rank's part of a bucket, in the bucket's dtype and in CPU memory, each with where it belongs."""
        return [
            (piece.copy, piece.tensor[piece.copy.local].to("cpu", getattr(torch, item.dtype), copy=True))
            for item in bucket.tensors
            for piece in self._held(item.name)
        ]

    def regions(self) -> dict[str, list[Region]]:
        """What this rank answers for."""
        numbers = {name: [piece.copy.hf for piece in pieces] for name, pieces in self._slices.items()}
        scales = {scaled: owned for scaled, name in self._scaled.items() if (owned := self._owned_scales(name))}
        return {
            name: [tuple((s.start, s.stop, s.step or 1) for s in region) for region in regions]
            for name, regions in (*numbers.items(), *scales.items())
        }

    @torch.no_grad()
    def send(self, buckets: Sequence[BucketSpec], outlet: Outlet) -> dict[str, int]:
        """Send this rank's part of buckets, one after the other; its shares of the fingerprints that they ask for."""
        shares: dict[str, int] = {}
        for bucket in buckets:
            pieces = self._pieces(bucket)
            outlet.send(bucket.tensors, {name: [piece.numbers for piece in held] for name, held in pieces.items()})
            shares |= _shares(bucket, pieces)  # while it is under way
        outlet.flush()
        return shares

    @torch.no_grad()
    def shares(self, kinds: Mapping[str, str]) -> dict[str, int]:
        """This rank's shares of the fingerprints of the named tensors, modulo 2**64, taken of its own weights in the dtypes that stand
        beside their names."""
        return {
            name: _share([_Piece(piece.copy.hf, _region(piece)) for piece in self._slices[name]], getattr(torch, kind))
            for name, kind in kinds.items()
            if name in self._slices
        }


def _region(piece: _Slice) -> torch.Tensor:
    """As it stands in the checkpoint's tensor."""
    return piece.copy.back(piece.tensor[piece.copy.local])


def _origin(region: Sequence[slice]) -> list[int]:
    return [part.start for part in region]


def _shares(bucket: BucketSpec, pieces: _Pieces) -> dict[str, int]:
    """Of the fingerprints that a bucket asks for."""
    kinds = {item.name: getattr(torch, item.dtype) for item in bucket.tensors}
    return {name: _share(pieces[name], kinds[name]) for name in bucket.prove if name in pieces}


def _share(pieces: Sequence[_Piece], dtype: torch.dtype) -> int:
    return combine([partial(_spread(piece, dtype), _origin(piece.region)) for piece in pieces])


def _spread(piece: _Piece, dtype: torch.dtype) -> torch.Tensor:
    """A region with all that lies between its rows, which counts as zeros: where gate and up take turns, the other's."""
    numbers, steps = piece.numbers.to(dtype), [s.step or 1 for s in piece.region]
    if all(step == 1 for step in steps):
        return numbers
    whole = numbers.new_zeros([s.stop - s.start for s in piece.region])
    whole[tuple(slice(None, None, step) for step in steps)] = numbers
    return whole
