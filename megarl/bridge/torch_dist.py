"""Megatron's torch_dist checkpoints, read without Megatron and without running anything that a file says.

A folder of the format holds

    metadata.json     the format's name
    .metadata         a pickle of torch.distributed.checkpoint's `Metadata`: every tensor's dtype and shape, and which chunk of it lies
                      where in which file
    *.distcp          the chunks, each as `torch.save` writes a tensor: a zip archive of a pickle and of the bytes
    common.pt         what is no tensor (iteration, arguments), as `torch.save` writes it

Pickles can run code. The two kinds that are needed here are read by unpicklers that know the few classes which belong there and
refuse every other name; common.pt is read by torch's own restricted unpickler where it is wanted (`weights_only`), not at all here.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from megarl.bridge.layout import Shape
from megarl.bridge.raw_io import Files, Run, raw, read_exactly, reading
from megarl.bridge.torch_frame import FRAMED, frame
from megarl.errors import RunError, UserError

CONFIG, METADATA, COMMON = "metadata.json", ".metadata", "common.pt"
LATEST = "latest_checkpointed_iteration.txt"  # of a folder of Megatron-LM: names the checkpoint in it
_BLOCK_BYTES = 16 << 20  # read at a time where rows are cut

# Every class that `Metadata` is made of, in the versions of torch and of megatron-core that write it. None is needed itself: what they
# hold is read into `_Record`s.
_METADATA_CLASSES: Mapping[str, frozenset[str]] = {
    "torch.distributed.checkpoint.metadata": frozenset(
        {
            *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
            *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        }
    ),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo", "_StoragePrefix"}),
    "torch.distributed.checkpoint.planner": frozenset({"SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "megatron.core.dist_checkpointing.strategies.torch": frozenset({"MCoreMetadata", "MCoreSavePlan"}),
    "pathlib": frozenset({"PosixPath", "PurePosixPath"}),
}
_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}

# How `torch.save` names the kind of a tensor's elements.
_STORAGES = {
    "FloatStorage": torch.float32,
    "BFloat16Storage": torch.bfloat16,
    "HalfStorage": torch.float16,
    "DoubleStorage": torch.float64,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a tensor and the bytes of a file that hold it."""

    offsets: Shape
    sizes: Shape
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint."""

    dtype: torch.dtype
    shape: Shape
    chunks: tuple[Chunk, ...]


def _overlap(one: tuple[slice, ...], other: tuple[slice, ...]) -> bool:
    return all(a.start < b.stop and b.start < a.stop for a, b in zip(one, other, strict=True))


class DistReader:
    """The tensors of a torch_dist checkpoint, any region of them. Everything that is wrong with it is a UserError."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        check_format(self.folder)
        self.tensors, self.objects = read_metadata(self.folder)
        self._files = Files()
        self._by_first: dict[
            str, dict[int, list[Chunk]] | None
        ] = {}  # of a key: its chunks by their first index, if each has one
        self._data: dict[Chunk, int] = {}  # where a chunk's first element lies in its file
        self._paths: dict[str, Path] = {}
        self._check_files()

    def read(self, key: str, region: tuple[slice, ...], out: Tensor) -> None:
        """Fills `out`, of any dtype, with a region of a tensor; leading axes of length 1 may be missing in `out`."""
        stored = self.tensors[key]
        sizes = tuple(s.stop - s.start for s in region)
        target, left = out.view(sizes), torch.Size(sizes).numel()
        filled: list[tuple[slice, ...]] = []
        for chunk in self._near(key, region):
            meets = [
                slice(max(s.start, offset), min(s.stop, offset + size))
                for s, offset, size in zip(region, chunk.offsets, chunk.sizes, strict=True)
            ]
            if any(s.start >= s.stop for s in meets):
                continue
            inside = tuple(slice(s.start - o, s.stop - o) for s, o in zip(meets, chunk.offsets, strict=True))
            place = tuple(slice(s.start - r.start, s.stop - r.start) for s, r in zip(meets, region, strict=True))
            if any(_overlap(place, other) for other in filled):
                raise UserError(f"{self.folder}: chunks of {key} lie over each other.")
            filled.append(place)
            part = target[place]
            self._read_chunk(stored, chunk, inside, part)
            left -= part.numel()
        if left:
            raise UserError(
                f"{self.folder}: the chunks of {key} do not cover {tuple((s.start, s.stop) for s in region)}."
            )

    def run(self, key: str, region: tuple[slice, ...]) -> Run | None:
        """Where the bytes of a region lie, if they lie one after another in one chunk."""
        stored = self.tensors[key]
        around = [
            chunk
            for chunk in self._near(key, region)
            if all(o <= s.start and s.stop <= o + n for s, o, n in zip(region, chunk.offsets, chunk.sizes, strict=True))
        ]
        if len(around) != 1:
            return None
        (chunk,) = around
        inside = tuple(slice(s.start - o, s.stop - o) for s, o in zip(region, chunk.offsets, strict=True))
        cut = _cut(chunk, inside)
        if any(s.stop - s.start != 1 for s in inside[:cut]):
            return None
        width = stored.dtype.itemsize
        first = _flat(tuple(s.start for s in inside), chunk.sizes) * width
        length = torch.Size([s.stop - s.start for s in inside]).numel() * width
        start = self._data_start(stored, chunk) + first
        return Run(self._path(chunk.file), self._files, start, length)

    def _near(self, key: str, region: tuple[slice, ...]) -> Iterable[Chunk]:
        """The chunks of a tensor that may meet a region: there are as many as layers, or experts, of which one is wanted."""
        chunks = self.tensors[key].chunks
        if key not in self._by_first:
            found: dict[int, list[Chunk]] | None = None
            if all(chunk.sizes[:1] == (1,) for chunk in chunks):
                found = defaultdict(list)
                for chunk in chunks:
                    found[chunk.offsets[0]].append(chunk)
            self._by_first[key] = found
        by_first = self._by_first[key]
        if by_first is None:
            return chunks
        return [chunk for first in range(region[0].start, region[0].stop) for chunk in by_first.get(first, ())]

    def read_common(self) -> dict[str, Any]:
        """What is no tensor, by torch's restricted unpickler."""
        path = self.folder / COMMON
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # damaged bytes make it raise anything
            raise UserError(f"{path} cannot be read: {_first_line(error)}.") from error
        if not isinstance(found, dict):
            raise UserError(f"{path} holds a {type(found).__name__}, not what a checkpoint has in common.")
        return found

    def read_object(self, key: str) -> Any:
        """What is stored under a key of `objects`, by torch's restricted unpickler."""
        file, start, length = self.objects[key]
        data = os.pread(self._open(file).fileno(), length, start)
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:
            raise UserError(f"{self.folder / file}: {key} cannot be read: {_first_line(error)}.") from error

    def check_objects(self) -> None:
        """Raises UserError unless what is no tensor, which conversions do not read, is an archive as `torch.save` writes it. Nothing
        is unpickled."""
        path = self.folder / COMMON
        if not path.is_file():
            raise UserError(f"{self.folder} holds no {COMMON}, without which Megatron does not load it.")
        with reading(path), path.open("rb") as file:
            _demand_archive(file, path, 0, path.stat().st_size)
        for name, start, length in self.objects.values():
            _demand_archive(self._open(name), self.folder / name, start, length)

    def _read_chunk(self, stored: Stored, chunk: Chunk, inside: tuple[slice, ...], out: Tensor) -> None:
        """A box of a chunk: whole runs of it are read where they are wanted, cut rows through a block of bounded size."""
        start, width = self._data_start(stored, chunk), stored.dtype.itemsize
        file = self._open(chunk.file).fileno()
        cut = _cut(chunk, inside)
        run = torch.Size(chunk.sizes[cut + 1 :]).numel()
        outer, rows = inside[:cut], inside[cut] if inside else slice(0, 1)
        for index in _indices(outer):
            first = _flat(index, chunk.sizes[:cut]) * (chunk.sizes[cut] if chunk.sizes else 1)
            offset = start + (first + rows.start) * run * width
            place = tuple(i - s.start for i, s in zip(index, outer, strict=True))
            self._fill(file, chunk.file, offset, stored.dtype, out[place] if place else out)

    def _fill(self, file: int, name: str, offset: int, dtype: torch.dtype, out: Tensor) -> None:
        """Consecutive elements of a file into `out`."""
        if out.dtype == dtype and out.is_contiguous() and out.device.type == "cpu":
            self._read_bytes(file, name, offset, out)
            return
        while out.dim() > 1 and len(out) == 1:
            out = out[0]
        rows = out.view(1) if out.dim() == 0 else out
        each = max(1, _BLOCK_BYTES // max(1, dtype.itemsize * rows[:1].numel()))
        for part in rows.split(each):
            block = torch.empty(part.shape, dtype=dtype)
            self._read_bytes(file, name, offset, block)
            part.copy_(block)
            offset += block.numel() * dtype.itemsize

    def _read_bytes(self, file: int, name: str, offset: int, out: Tensor) -> None:
        with reading(self.folder / name, RunError):
            whole = read_exactly(file, offset, raw(out))
        if not whole:
            raise UserError(f"{self.folder / name} is cut short.")

    def _data_start(self, stored: Stored, chunk: Chunk) -> int:
        if chunk not in self._data:
            try:
                file = self._open(chunk.file)
                start = _framed(file, stored.dtype, chunk)
                self._data[chunk] = _locate(file, stored.dtype, chunk) if start is None else start
            except _Odd as error:
                raise UserError(f"{self._path(chunk.file)} is damaged at byte {chunk.start}: {error}.") from error
        return self._data[chunk]

    def _open(self, name: str) -> BinaryIO:
        """It may be closed by the next call."""
        path = self._path(name)
        with reading(path):
            return self._files.open(path)

    def _path(self, name: str) -> Path:
        """Kept: of thousands of chunks each asks for it, and to join a path takes longer than to read a small one."""
        if name not in self._paths:
            self._paths[name] = self.folder / name
        return self._paths[name]

    def _check_files(self) -> None:
        """Every file is there and long enough."""
        needed: dict[str, int] = {}
        for file, end in (
            *((c.file, c.start + c.length) for stored in self.tensors.values() for c in stored.chunks),
            *((file, start + length) for file, start, length in self.objects.values()),
        ):
            needed[file] = max(needed.get(file, 0), end)
        for file, end in needed.items():
            path = self.folder / file
            if not path.is_file():
                raise UserError(f"{path} is missing, though {METADATA} names it.")
            if path.stat().st_size < end:
                raise UserError(f"{path} is cut short: it has {path.stat().st_size} bytes of {end}.")


def _demand_archive(file: BinaryIO, path: Path, start: int, length: int) -> None:
    try:
        zipfile.ZipFile(_Part(file, start, length)).close()
    except _DAMAGE as error:
        raise UserError(f"{path} is damaged at byte {start}: nothing is saved there ({_first_line(error)}).") from error


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is, or points to, a checkpoint of Megatron."""
    return any((folder / name).is_file() for name in (CONFIG, METADATA, LATEST))


def resolve(folder: Path) -> Path:
    """The checkpoint itself, where `folder` is one of Megatron-LM that names its latest iteration."""
    pointer = folder / LATEST
    if (folder / CONFIG).is_file() or not pointer.is_file():
        return folder
    with reading(pointer):
        text = pointer.read_text(encoding="utf-8", errors="replace").strip()
    if not (text == "release" or (text.isascii() and text.isdigit() and len(text) < 20)):
        raise UserError(f"{pointer} must hold a number or the word release, not {text[:40]!r}.")
    named = folder / (text if text == "release" else f"iter_{int(text):07d}")
    if not named.is_dir():
        raise UserError(f"{pointer} names {text!r}, but there is no {named}.")
    return named


def check_format(folder: Path) -> None:
    """Raises UserError unless a folder says that it is a torch_dist checkpoint."""
    path = folder / CONFIG
    if not folder.is_dir():
        raise UserError(f"There is no checkpoint folder {folder}.")
    if old := sorted(folder.glob("mp_rank_*/*.pt")):
        raise UserError(f"{old[0]} is a pickle, which can run code: save the checkpoint in the torch_dist format.")
    if not path.is_file():
        raise UserError(f"{folder} holds no {CONFIG}, so it is no finished checkpoint of Megatron.")
    try:
        kind = json.loads(path.read_text(encoding="utf-8"))["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error!r}.") from error
    if kind != "torch_dist":
        raise UserError(f"{folder} is a checkpoint of the kind {kind!r}; torch_dist can be read.")
    if not (folder / METADATA).is_file():
        raise UserError(f"{folder} holds no {METADATA}, so it is no finished checkpoint of Megatron.")


def read_metadata(folder: Path) -> tuple[dict[str, Stored], dict[str, tuple[str, int, int]]]:
    """Of a checkpoint: its tensors, and of everything else where it lies (file, first byte, bytes)."""
    path = folder / METADATA
    metadata = safe_metadata(path)
    tensors: dict[str, Stored] = {}
    objects: dict[str, tuple[str, int, int]] = {}
    try:
        where = {}
        for index, info in metadata.storage_data.items():
            offset = getattr(index, "offset", None)  # missing: of what is no tensor
            where[index.fqn, None if offset is None else tuple(offset)] = info
        for key, entry in metadata.state_dict_metadata.items():
            if not hasattr(entry, "chunks"):
                objects[key] = _place(where[key, None])
                continue
            chunks = tuple(
                Chunk(_counts(c.offsets), _counts(c.sizes), *_place(where[key, tuple(c.offsets)])) for c in entry.chunks
            )
            dtype = entry.properties.state[0]  # its own order: dtype, layout, requires_grad, memory format, pinned
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"{key} has the dtype {dtype!r}")
            tensors[key] = Stored(dtype, _counts(entry.size), chunks)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} does not describe a checkpoint: {error!r}.") from error
    return tensors, objects


def safe_metadata(path: Path) -> Any:
    """The `Metadata` of a checkpoint. Raises UserError for a file that names anything else."""
    try:
        with reading(path), path.open("rb") as file:
            found = _Metadata(file, path).load()
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{path} is damaged: {_first_line(error)}.") from error
    if not isinstance(found, _Record):
        raise UserError(f"{path} holds a {type(found).__name__} where a checkpoint's metadata was expected.")
    return found


class _Metadata(pickle.Unpickler):
    def __init__(self, file: BinaryIO, path: Path):
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        module = module.removesuffix("._local")  # pathlib's, since Python 3.13
        if name in _METADATA_CLASSES.get(module, ()):
            return _Record
        if module == "torch" and (name == "Size" or name in _DTYPES):
            return torch.Size if name == "Size" else _DTYPES[name]
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        raise UserError(
            f"{self._path} is a pickle that names {module}.{name}, which no checkpoint needs and which could run code: refused."
        )


class _Record:
    """What an object of a class that is not loaded was made from."""

    def __init__(self, *args: Any):
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


class _Odd(Exception):
    """A chunk that is not what `torch.save` writes of one tensor."""


# What the readers of archives and pickles raise where the bytes are not theirs.
_DAMAGE = (
    zipfile.BadZipFile,
    pickle.UnpicklingError,
    struct.error,
    OSError,
    EOFError,
    LookupError,
    ValueError,
    AttributeError,
)


def _framed(file: BinaryIO, dtype: torch.dtype, chunk: Chunk) -> int | None:
    """`_locate` of a chunk around whose elements is to the byte what this torch would write; None: of any other."""
    size = torch.Size(chunk.sizes).numel() * dtype.itemsize
    if size < FRAMED:
        return None
    before, after = frame(dtype, chunk.sizes)
    start, end = chunk.start + len(before), chunk.start + len(before) + size
    if chunk.length != len(before) + size + len(after):
        return None
    found = [os.pread(file.fileno(), len(part), at) for part, at in ((before, chunk.start), (after, end))]
    return start if found == [before, after] else None


def _locate(file: BinaryIO, dtype: torch.dtype, chunk: Chunk) -> int:
    """The byte of `file` where a chunk's elements begin, in their order."""
    try:
        with zipfile.ZipFile(_Part(file, chunk.start, chunk.length)) as archive:
            records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        # Not through ZipFile: torch may have been told to leave the checksums out, and its own readers do not look at them.
        said = _Tensor(io.BytesIO(_content(file, chunk, records["data.pkl"]))).load()
        if "byteorder" in records and _content(file, chunk, records["byteorder"]) != b"little":
            raise _Odd("its bytes are big-endian")
        record = records[f"data/{said.key}"]
        start = _content_start(file, chunk, record)
    except _DAMAGE as error:
        raise _Odd(f"there is no saved tensor there ({_first_line(error)})") from error
    count = torch.Size(chunk.sizes).numel()
    if said.dtype != dtype or said.size != chunk.sizes:
        raise _Odd(f"the tensor there is {said.dtype} {said.size}, not {dtype} {chunk.sizes}")
    if count > 1 and not _in_order(chunk.sizes, said.stride):
        raise _Odd(f"the tensor there has strides {said.stride}")
    if record.compress_type != zipfile.ZIP_STORED or record.file_size < (said.offset + count) * dtype.itemsize:
        raise _Odd(f"the tensor there has {record.file_size} bytes")
    return start + said.offset * dtype.itemsize


def _content(file: BinaryIO, chunk: Chunk, record: zipfile.ZipInfo) -> bytes:
    return os.pread(file.fileno(), min(record.file_size, _BLOCK_BYTES), _content_start(file, chunk, record))


def _content_start(file: BinaryIO, chunk: Chunk, record: zipfile.ZipInfo) -> int:
    """Behind the record's own header, whose name and extra field may be longer than those of the directory."""
    header = os.pread(file.fileno(), 30, chunk.start + record.header_offset)
    name, extra = struct.unpack("<HH", header[26:30])
    return chunk.start + record.header_offset + 30 + name + extra


@dataclass(frozen=True)
class _Description:
    """What data.pkl says of a tensor."""

    dtype: torch.dtype
    key: str
    offset: int
    size: Shape
    stride: Shape


class _Tensor(pickle.Unpickler):
    """Reads the pickle that `torch.save` writes of one tensor, and nothing else."""

    def persistent_load(self, pid: Any) -> Any:
        kind, dtype, key, *_ = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError(f"{kind!r} in place of a storage")
        return dtype, str(key)

    def find_class(self, module: str, name: str) -> Callable[..., Any] | torch.dtype:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _described
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        raise pickle.UnpicklingError(f"its pickle names {module}.{name}")


def _described(storage: Any, offset: int, size: Any, stride: Any, *_: Any) -> _Description:
    dtype, key = storage
    return _Description(dtype, key, offset, tuple(size), tuple(stride))


class _Part(io.RawIOBase):
    """A stretch of a file as a file of its own."""

    def __init__(self, file: BinaryIO, start: int, length: int):
        self._file, self._start, self._length, self._at = file.fileno(), start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), self._length - self._at)
        got = os.pread(self._file, wanted, self._start + self._at) if wanted > 0 else b""
        buffer[: len(got)] = got
        self._at += len(got)
        return len(got)


def _place(info: Any) -> tuple[str, int, int]:
    """File, first byte and bytes, the file's name checked to be one of the folder."""
    name, start, length = info.relative_path, info.offset, info.length
    if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
        raise ValueError(f"{name!r} is no file of the folder")
    if info.__dict__.get("transform_descriptors"):
        raise ValueError(f"{name} is encoded by {info.transform_descriptors}")
    first, size = _counts((start, length))
    return name, first, size


def _counts(numbers: Iterable[Any]) -> Shape:
    """Whole numbers as files have them; no sentence could be said of longer ones."""
    found = tuple(numbers)
    if not all(isinstance(n, int) and 0 <= n < 1 << 63 for n in found):
        raise ValueError("it has numbers that no file has")
    return found


def _cut(chunk: Chunk, inside: tuple[slice, ...]) -> int:
    """An axis after which all are wanted whole, so that every index of the axes up to it begins a run of bytes."""
    return max((axis for axis, s in enumerate(inside) if s.stop - s.start < chunk.sizes[axis]), default=0)


def _in_order(sizes: Shape, strides: Shape) -> bool:
    """Whether elements lie one after another. Nothing is stepped over along an axis of length 1, whose stride may be any."""
    step = 1
    if len(strides) != len(sizes):
        return False
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size > 1 and stride != step:
            return False
        step *= size
    return True


def _indices(region: tuple[slice, ...]) -> Iterator[Shape]:
    if not region:
        yield ()
        return
    for first in range(region[0].start, region[0].stop):
        for rest in _indices(region[1:]):
            yield (first, *rest)


def _flat(index: Shape, sizes: Shape) -> int:
    place = 0
    for i, size in zip(index, sizes, strict=True):
        place = place * size + i
    return place


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0].rstrip(".")
