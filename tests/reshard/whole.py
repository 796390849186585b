"""The trainer's side of a transfer without ranks: a checkpoint is read and written."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from megarl.errors import RunError
from megarl.reshard.bucket import BucketSpec
from megarl.reshard.stream import Control, Stream


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
        return []

    def write_stream(self, stream: Stream) -> list[dict[str, int]]:
        control = Control(stream)
        for number, bucket in enumerate(stream.buckets):
            control.wait_loaded(number + 1 - stream.places)
            self.write(bucket)
            control.wrote(0, number + 1)
        return []
