"""Writing a torch_dist checkpoint without Megatron: files of chunks one after another, then what says where everything lies."""

from __future__ import annotations

import io
import json
import pickle
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, cast

import torch
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
    """One file of chunks. `records` is what `write_metadata` needs of them, as JSON may hold it. With `blocks` `copy` may be used."""

    def __init__(self, path: Path, blocks: Blocks | None = None, *, durable: bool = True):
        self._file = PlainFile(path) if blocks is None else BlockFile(path, blocks, durable=durable)
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

        def elements() -> None:
            for run in runs:
                file.copy(run, dtype, look)

        self._record(key, dtype, self._framed(dtype, sizes, elements), sizes, offsets, shape)

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
    """CRC-32 of a file: two gigabytes a second."""
    found = 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            found = zlib.crc32(block, found)
    return found


def write_checksums(folder: Path, found: Mapping[str, int]) -> None:
    """Of every file by its name."""
    (folder / CHECKSUMS).write_text(json.dumps(dict(found), indent=1), encoding="utf-8")


def altered(folder: Path, share: int = 0, shares: int = 1) -> str | None:
    """Reads every `shares`th of the files that have a checksum, from number `share` on: a sentence where one is not what was written,
    None where all are, or where the checkpoint has no checksums."""
    path = folder / CHECKSUMS
    if not path.is_file():
        return None
    try:
        wanted = json.loads(path.read_text(encoding="utf-8"))
        for name in sorted(wanted)[share::shares]:
            if not (folder / name).is_file():
                return f"{folder / name} is missing, though {CHECKSUMS} names it."
            if checksum(folder / name) != wanted[name]:
                return f"{folder / name} is damaged: its checksum is not the one it was written with."
    except (OSError, ValueError, TypeError) as error:
        return f"{path} cannot be read: {error!r}."
    return None


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
