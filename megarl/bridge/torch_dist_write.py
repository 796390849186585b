"""Writing a torch_dist checkpoint without Megatron: files of chunks one after another, then what says where everything lies."""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, cast

import torch
from isal import isal_zlib
from torch import Tensor

from megarl.bridge.layout import Shape
from megarl.bridge.out_file import BlockFile, Blocks, Look, PlainFile
from megarl.bridge.raw_io import Run, raw
from megarl.bridge.torch_dist import COMMON, CONFIG, METADATA
from megarl.bridge.torch_frame import FRAMED, frame, without_checksums

CHECKSUMS = "checksums.json"
_ALIGNED = 64
_BLOCK_BYTES = 4 << 20  # stays in a core's cache between reading and summing


class ChunkFile:
    """One file of chunks. `records` is what `write_metadata` needs of them, as JSON may hold it. With `blocks` `copy` may be used, or,
    with `summed`, `so_far`."""

    def __init__(self, path: Path, blocks: Blocks | None = None, *, durable: bool = True, summed: bool = False):
        self._file = PlainFile(path) if blocks is None else BlockFile(path, blocks, durable=durable, summed=summed)
        self._name = path.name
        self.records: list[dict[str, Any]] = []

    def write(self, key: str, tensor: Tensor, offsets: Shape, shape: Shape) -> None:
        """A chunk of the tensor `key` of the given whole shape, which lies at `offsets` in it."""
        tensor = tensor.detach().contiguous()
        if tensor.nbytes < FRAMED:
            start = self._save(tensor.clone())  # of a view all of the storage would be written
        else:
            start = self._framed(tensor.dtype, tuple(tensor.shape), lambda: self._file.write(raw(tensor)))
        self._record(key, tensor.dtype, start, tuple(tensor.shape), offsets, shape)

    def copy(
        self,
        key: str,
        runs: Sequence[Run],
        dtype: torch.dtype,
        sizes: Shape,
        offsets: Shape,
        shape: Shape,
        look: Look,
    ) -> None:
        """A chunk of so many `sizes`, of FRAMED bytes or more, which lie in other files as they are to be."""
        file = self._file
        assert isinstance(file, BlockFile)
        start = self._framed(dtype, sizes, lambda: file.copy(runs, dtype, look))
        self._record(key, dtype, start, sizes, offsets, shape)

    def _framed(self, dtype: torch.dtype, sizes: Shape, elements: Callable[[], Any]) -> int:
        """What `torch.save` would write of a tensor; where it begins. Elements are as far from there as vectors of them like it."""
        start = -(-self._file.tell() // _ALIGNED) * _ALIGNED
        self._file.seek(start)
        before, after = frame(dtype, sizes)
        self._file.write(before)
        elements()
        self._file.write(after)
        return start

    def _record(self, key: str, dtype: torch.dtype, start: int, sizes: Shape, offsets: Shape, shape: Shape) -> None:
        self.records.append(
            {
                "key": key,
                "dtype": str(dtype).removeprefix("torch."),
                "shape": list(shape),
                "offsets": list(offsets),
                "sizes": list(sizes),
                "file": self._name,
                "start": start,
                "length": self._file.tell() - start,
            }
        )

    def so_far(self) -> tuple[int, int]:
        """Bytes that were written, and their CRC-32."""
        assert isinstance(self._file, BlockFile)
        return self._file.tell(), self._file.sum

    def write_object(self, key: str, value: Any) -> None:
        """Anything else that `torch.save` takes."""
        start = self._save(value)
        self.records.append({"key": key, "file": self._name, "start": start, "length": self._file.tell() - start})

    def write_alike(self, keys: Iterable[str], value: Any) -> None:
        """The same under many keys."""
        saved = io.BytesIO()
        with without_checksums():
            torch.save(value, saved)
        for key in keys:
            start = self._file.tell()
            self._file.write(saved.getvalue())
            self.records.append({"key": key, "file": self._name, "start": start, "length": self._file.tell() - start})

    def end(self) -> None:
        """All has come; waits until it is on the disk, if it is to be durable."""
        self._file.end()

    def _save(self, value: Any) -> int:
        start = self._file.tell()
        try:
            with without_checksums():
                torch.save(value, cast(IO[bytes], self._file))
        except RuntimeError as error:  # torch's, over what the file said
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None
        return start

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def checksum(path: Path) -> int:
    """CRC-32 of a file. (By ISA-L: zlib's own takes ten times as long, which is longer than to read the file.)"""
    return checksums(path)[0]


def checksums(
    path: Path, front: int = 0, *, only_front: bool = False, stop: Callable[[], bool] = lambda: False
) -> tuple[int, int]:
    """CRC-32 of a file and of its first `front` bytes, in one go; `only_front`: no more is read, and the first says nothing. What is
    answered after `stop` said yes is worth nothing."""
    found, of_front, left = 0, 0, front
    with path.open("rb", buffering=0) as file:
        while not (only_front and not left) and not stop():
            block = file.read(min(left, _BLOCK_BYTES) or _BLOCK_BYTES)
            if not block:
                break
            found = isal_zlib.crc32(block, found)
            if left:
                left, of_front = left - len(block), found
    return found, of_front


def write_checksums(folder: Path, found: Mapping[str, int | tuple[int, int, int]]) -> None:
    """Of every file by its name: CRC-32 of the whole, or that, how many bytes its weights take at its front, and theirs."""
    (folder / CHECKSUMS).write_text(json.dumps(dict(found), indent=1), encoding="utf-8")


def altered(
    folder: Path,
    share: int = 0,
    shares: int = 1,
    *,
    weights: Mapping[str, int] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> str | None:
    """Reads every `shares`th of the files that have a checksum, from number `share` on: a sentence where one is not what was written
    or should have a checksum and has none, None where all are well, or where the checkpoint has no checksums.

    `weights`: only these files, of which so many bytes are wanted (0: all), and no more is read where those have a checksum of their
    own. `stop` is asked now and then whether the answer is still wanted.
    """
    path = folder / CHECKSUMS
    if not os.path.lexists(path):
        return None
    if path.exists() and not path.is_file():
        return f"{path} is no file."
    try:
        wanted = {name: _sums(value) for name, value in json.loads(path.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        return f"{path} cannot be read: {error!r}."
    there = [METADATA, COMMON, *(file.name for file in folder.glob("*.distcp"))]
    names = sorted({*wanted, *there} if weights is None else weights)
    for name in names[share::shares]:
        if name not in wanted:
            return f"{path} does not name {name}, so nothing tells whether that is what was written."
        if said := _altered(folder / name, wanted[name], 0 if weights is None else weights[name], stop):
            return said
    return None


def _altered(path: Path, wanted: tuple[int, int, int], needed: int, stop: Callable[[], bool]) -> str | None:
    """A sentence where a file, or the front of it that is needed, is not what was written."""
    whole, front, of_front = wanted
    if not path.is_file():
        return f"{path} is missing, though {CHECKSUMS} names it."
    try:
        if 0 < needed <= front:
            same = checksums(path, front, only_front=True, stop=stop)[1] == of_front
        else:
            same = checksums(path, stop=stop)[0] == whole
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}."
    return None if same or stop() else f"{path} is damaged: its checksum is not the one it was written with."


def _sums(value: Any) -> tuple[int, int, int]:
    """Of the whole file, how long its front is, and of that. Raises TypeError for what `write_checksums` does not write."""
    found = (value, 0, 0) if isinstance(value, int) else tuple(value)
    if len(found) != 3 or not all(isinstance(part, int) for part in found):
        raise TypeError(f"{value!r} is no checksum")
    return found


def write_metadata(folder: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """What says where every chunk lies."""
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    entries: dict[str, Any] = {}
    storage = {}
    for record in records:
        key, info = record["key"], _StorageInfo(record["file"], record["start"], record["length"])
        if "dtype" not in record:
            entries[key] = dcp.BytesStorageMetadata()
            storage[dcp.MetadataIndex(key)] = info
            continue
        if key not in entries:
            properties = dcp.TensorProperties(dtype=getattr(torch, record["dtype"]))
            entries[key] = dcp.TensorStorageMetadata(properties, torch.Size(record["shape"]), [])
        chunk = dcp.ChunkStorageMetadata(torch.Size(record["offsets"]), torch.Size(record["sizes"]))
        storage[dcp.MetadataIndex(key, chunk.offsets, len(entries[key].chunks))] = info
        entries[key].chunks.append(chunk)
    (folder / METADATA).write_bytes(pickle.dumps(dcp.Metadata(entries, planner_data={}, storage_data=storage)))


def write_common(folder: Path, common: Mapping[str, Any]) -> None:
    """What is no tensor, and the format's name, which makes the folder a checkpoint."""
    whole = io.BytesIO()
    torch.save(dict(common), whole)  # to a file it would not say that a disk is full
    (folder / COMMON).write_bytes(whole.getvalue())
    config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    config |= {"common_backend": "torch", "common_backend_version": 1}
    (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")
