"""The trainer's side of a transfer without ranks: a checkpoint is read and written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from megarl.errors import RunError
from megarl.reshard.bucket import BucketSpec
from megarl.reshard.exposure import Exposure, meeting
from megarl.reshard.fingerprint import fingerprint
from megarl.reshard.stream import Control, Stream
from megarl.reshard.transfer import Member


class Whole:
    """One rank that has everything. `halt`: at the bucket that holds this tensor it fails."""

    def __init__(self, folder: Path, halt: str = ""):
        self.tensors = load_file(folder / "model.safetensors")
        self.halt = halt

    def __len__(self) -> int:
        return 1

    def write(self, bucket: BucketSpec) -> list[dict[str, int]]:
        for name, view in bucket.views().items():
            if name == self.halt:
                raise RunError("a rank was lost")
            view.copy_(self.tensors[name])
        return self.shares({item.name: item.dtype for item in bucket.tensors if item.name in bucket.prove})

    def write_stream(self, stream: Stream) -> list[dict[str, int]]:
        control, shares = Control(stream), {}
        for number, bucket in enumerate(stream.buckets):
            control.wait_loaded(number + 1 - stream.places)
            shares |= self.write(bucket)[0]
            control.wrote(0, number + 1)
        return [shares]

    def open(self, engines: Mapping[Member, Sequence[Exposure]]) -> list[dict[Member, int]]:
        self.engines = {
            member: [(name, e.spots[name], view) for e in ranks for name, view in e.views().items()]
            for member, ranks in engines.items()
        }
        return [{member: sum(spot.nbytes for _, spot, _ in parts) for member, parts in self.engines.items()}]

    def write_in_place(self, members: Sequence[Member]) -> None:
        for member in members:
            for name, spot, view in self.engines[member]:
                whole = self.tensors[name]
                common = meeting([slice(0, size) for size in whole.shape], spot.origin, spot.shape)
                assert common is not None
                view[common[1]].copy_(whole[common[0]])

    def shares(self, kinds: Mapping[str, str]) -> list[dict[str, int]]:
        return [{name: fingerprint(self.tensors[name].to(getattr(torch, kind))) for name, kind in kinds.items()}]
