"""Weights from the trainer's shards into the engines by way of a folder: safetensors that the ranks write and the engines read.

For engines that share no memory with the ranks. All see the folder under the same path, and its file system keeps what one process
has mapped and written in step with what another reads: a local disk does, for processes of one machine.

Every update is a whole checkpoint of its own, written aside and renamed, so that nobody ever finds half of one; when the engines have
loaded it, those before it are removed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Unpack

import torch

from megarl.bridge import fp8
from megarl.bridge.folders import new_folder
from megarl.bridge.hf_io import INDEX, STORED, copy_companions
from megarl.bridge.model_map import ModelMap
from megarl.bridge.quantised import FIELD
from megarl.errors import RunError, UserError
from megarl.reshard.bucket import BucketSpec, BucketTensor
from megarl.reshard.transfer import Proof, Receivers, Settings, Transfer, Writers

_PREFIX = "version-"
_KINDS = {str(dtype).removeprefix("torch."): kind for kind, dtype in STORED.items()}


class Disk(Transfer):
    """A folder `version-N` in `folder` for every update N, with all that belongs to a checkpoint taken from `source`."""

    def __init__(
        self,
        model_map: ModelMap,
        *,
        folder: Path,
        source: Path,
        **settings: Unpack[Settings],
    ):
        super().__init__(model_map, **settings)
        self._folder, self._source, self._dtype = folder.absolute(), source, getattr(torch, settings["dtype"])
        self._ours = not folder.exists()

    def close(self) -> None:
        """Remove what was written, and the folder if it was not there before."""
        self._remove(keep=None)
        if self._ours:
            with suppress(OSError):  # nothing was written, or somebody else put something there
                self._folder.rmdir()

    def _move(self, buckets: Sequence[BucketSpec], shards: Writers, receivers: Receivers, version: int) -> Proof:
        target = self._folder / f"{_PREFIX}{version}"
        names = [f"model-{number:05d}-of-{len(buckets):05d}.safetensors" for number in range(1, len(buckets) + 1)]
        files = [as_file(bucket) for bucket in buckets]
        shares: list[dict[str, int]] = []
        try:
            with new_folder(target, overwrite=True) as building:
                changes = {FIELD: fp8.CONFIG} if self.quantised else {}
                copy_companions(self._source, building, self._dtype, changes)
                for name, (spec, header) in zip(names, files, strict=True):
                    placed = replace(spec, path=str(building / name))
                    _begin(placed, header)
                    shares += shards.write(placed)
                where = {item.name: name for name, (spec, _) in zip(names, files, strict=True) for item in spec.tensors}
                index = {"metadata": {"total_size": self.bytes}, "weight_map": where}
                (building / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
        except UserError as error:  # there can be no such folder
            raise RunError(f"weight sync: {error}") from None
        except OSError as error:
            raise RunError(f"weight sync: {target} cannot be written: {error.strerror or error}") from error
        there = [replace(spec, path=str(target / name)) for name, (spec, _) in zip(names, files, strict=True)]
        receivers.loaded(receivers.load(there))
        self._remove(keep=target)
        return Proof(shares, receivers.end_update())

    def _remove(self, keep: Path | None) -> None:
        for path in self._folder.glob(f"{_PREFIX}*"):
            if path != keep:
                shutil.rmtree(path, ignore_errors=True)


def as_file(bucket: BucketSpec) -> tuple[BucketSpec, bytes]:
    """The same tensors laid out as safetensors, one right after the other; and the file's header. float32 comes first, so that every
    tensor is aligned to its elements."""
    ordered = sorted(bucket.tensors, key=lambda item: -getattr(torch, item.dtype).itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for item in ordered:
        end = at + item.nbytes
        header[item.name] = {"dtype": _KINDS[item.dtype], "shape": item.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    starts = [header[item.name]["data_offsets"][0] + 8 + len(text) for item in ordered]  # type: ignore[index]
    tensors = [BucketTensor(i.name, i.dtype, i.shape, start) for i, start in zip(ordered, starts, strict=True)]
    return replace(bucket, tensors=tensors), len(text).to_bytes(8, "little") + text


def _begin(spec: BucketSpec, header: bytes) -> None:
    """Make a file with its header and all its room. OSError where there is none."""
    handle = os.open(spec.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        os.posix_fallocate(handle, 0, max(spec.nbytes, len(header)))
        os.write(handle, header)
    finally:
        os.close(handle)
