"""Hugging Face checkpoints on disk: read in slices through a memory map, written tensor by tensor into planned shards."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megarl.bridge.folders import new_folder
from megarl.bridge.layout import Cut, Shape, Where
from megarl.bridge.model_map import ModelMap, Parameter
from megarl.bridge.out_file import BlockFile, Blocks, Look, PlainFile
from megarl.bridge.raw_io import Files, Run, raw, reading
from megarl.errors import RunError, UserError

INDEX = "model.safetensors.index.json"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_Starts = dict[str, tuple[int, Shape, str]]  # of a file's tensors: first byte, shape, dtype in the file's words
# What quantised weights are stored as beside these.
STORED = {**DTYPES, "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn}
_AT_ONCE = 256 << 10  # elements that are read where the dtype changes: they stay in a core's cache
_KINDS = {dtype: kind for kind, dtype in DTYPES.items()}
SHARD_BYTES = 5_000_000_000
# What belongs to a checkpoint besides its weights; the folder's own records (sha256.json) and documents stay behind.
COMPANIONS = (
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "*.tiktoken"),
    *("chat_template.json", "chat_template.jinja", "additional_chat_templates/*"),
)


class HFReader:
    """The tensors of a folder of safetensors, memory-mapped. Everything that is wrong with the folder is a UserError."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._files: dict[str, Any] = {}  # by file name; opened once, and mapped until the reader goes
        self._starts: dict[str, _Starts] = {}
        self._read = Files()  # opened again, not mapped
        self._file_of = self._indexed() if (self.folder / INDEX).is_file() else self._listed()

    @property
    def names(self) -> list[str]:
        return list(self._file_of)

    @property
    def paths(self) -> list[Path]:
        """The files that hold the tensors, which an index may name outside of the folder, and that index."""
        index = [INDEX] if (self.folder / INDEX).is_file() else []
        return [self.folder / file for file in [*index, *dict.fromkeys(filter(None, self._file_of.values()))]]

    def altered(self, share: int, shares: int, stop: Callable[[], bool]) -> str | None:
        """Safetensors have no checksums."""
        return None

    def shape(self, name: str) -> Shape:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        kind = self._slice(name).get_dtype()
        if kind not in DTYPES:
            raise UserError(f"{self.folder}: {name} is stored as {kind}; {', '.join(DTYPES)} can be read.")
        return DTYPES[kind]

    def get(self, name: str) -> Tensor:
        return self.get_slice(name, tuple(slice(0, size) for size in self.shape(name)))

    def get_slice(self, name: str, region: tuple[slice, ...]) -> Tensor:
        """A region of a tensor, in the checkpoint's dtype: read, or of small parts of rows only the pages that hold them, mapped."""
        tensor: Tensor = self._slice(name)[region]
        return tensor

    def read(self, name: str, region: tuple[slice, ...], out: Tensor) -> None:
        """Fills `out` with a region of a tensor: whole rows straight from the file, some at a time where the dtype changes."""
        runs = self.runs(name, region, self.dtype(name)) if out.is_contiguous() and not out.is_cuda else None
        if runs is None:
            out.copy_(self.get_slice(name, region))
        elif out.dtype == self.dtype(name):
            self._fill(runs[0], out)
        else:
            flat, start = out.view(-1), runs[0].start
            block = torch.empty(min(len(flat), _AT_ONCE), dtype=self.dtype(name))
            for part in flat.split(_AT_ONCE):
                self._fill(runs[0]._replace(start=start), block[: len(part)])
                part.copy_(block[: len(part)])
                start += len(part) * block.itemsize

    def _fill(self, run: Run, out: Tensor) -> None:
        with reading(run.path, RunError):
            whole = run.fill(raw(out))
        if not whole:
            raise UserError(f"{run.path} is damaged or cut short.")

    def runs(self, name: str, region: tuple[slice, ...], dtype: torch.dtype) -> list[Run] | None:
        """Where the bytes of a region lie, one run: of whole rows that are stored as `dtype`; None: of any other."""
        place = self._place(name)
        if place is None or self.dtype(name) != dtype or any(s.step not in (None, 1) for s in region):
            return None
        rows = self.shape(name)[1:]
        if not all(not s.start and s.stop == size for s, size in zip(region[1:], rows, strict=True)):
            return None
        return [self._run(place, region[0] if region else slice(0, 1))]

    def _run(self, place: tuple[str, str], rows: slice) -> Run:
        """Where rows of a stored tensor lie, one after another."""
        file, stored = place
        if file not in self._starts:
            self._starts[file] = _starts(self.folder / file)
        start, shape, kind = self._starts[file][stored]
        each = math.prod(shape[1:]) * STORED[kind].itemsize
        first, count = rows.start or 0, rows.stop - (rows.start or 0)
        return Run(self.folder / file, self._read, start + first * each, count * each)

    def _place(self, name: str) -> tuple[str, str] | None:
        """File and name in it of a tensor; None: no file has it."""
        return self._file_of[name], name

    def forget(self) -> None:
        """Unmaps the files, whose pages count as this process's memory; they are opened again where they are needed."""
        self._files.clear()

    def check(self, model: ModelMap) -> None:
        """Raises UserError unless the folder holds exactly the tensors that the map knows, in their shapes.

        Three kinds of tensors may be there in excess: the output layer of a model with tied embeddings, where it is equal to them
        (else `transformers` does not tie them), and, as `transformers` ignores them too, the rotary frequencies that old checkpoints
        carry and the layers for multi-token prediction where the map leaves them out.
        """
        found = {name: self.shape(name) for name in self.names}
        missing = [name for name in model.hf_shapes if name not in found]
        extra = [name for name in found if name not in model.hf_shapes and not _ignorable(name, model)]
        wrong = [
            f"{name} has shape {found[name]}, not {shape}"
            for name, shape in model.hf_shapes.items()
            if name in found and found[name] != shape
        ]
        wrong += [
            f"{name} differs from {other}, and tie_word_embeddings says that they are one (set it to false)"
            for name, other in model.ties
            if name in found and other in found and not self._same(name, other)
        ]
        parts = [
            *([f"lacks {_some(missing)}"] if missing else []),
            *([f"holds {_some(extra)}, which no rule of {model.family} knows"] if extra else []),
            *wrong[:3],
        ]
        if parts:
            raise UserError(f"{self.folder} does not fit its config.json: {'; '.join(parts)}.")
        for name in model.hf_shapes:
            self.dtype(name)

    def _same(self, name: str, other: str) -> bool:
        """Whether two tensors are equal, or of the same bits, which NaN may be among."""
        for each in (name, other):
            self.dtype(each)  # of float8 torch cannot say it
        one, two = self.get(name), self.get(other)
        if torch.equal(one, two):
            return True
        alike = (one.dtype, one.shape) == (two.dtype, two.shape) and one.dim() > 0
        return alike and torch.equal(one.view(torch.uint8), two.view(torch.uint8))

    def _slice(self, name: str) -> Any:
        if name not in self._file_of:
            raise UserError(f"{self.folder} holds no tensor {name}.")
        return self._stored(self._file_of[name], name)

    def _stored(self, file: str, name: str) -> StoredSlice:
        return StoredSlice(
            self._open(file).get_slice(name), lambda rows, out: self._fill(self._run((file, name), rows), out)
        )

    def _open(self, file: str) -> Any:
        if file not in self._files:
            path = self.folder / file
            _demand_target(path)
            if not path.is_file():
                raise UserError(
                    f"{path} is no file." if path.exists() else f"{path} is missing, though {INDEX} names it."
                )
            with reading(path):
                path.open("rb").close()  # safetensors would say of a file that may not be read that it is damaged
            try:
                self._files[file] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise UserError(f"{path} is damaged or cut short: {error}.") from error
        return self._files[file]

    def _indexed(self) -> dict[str, str]:
        path = self.folder / INDEX
        try:
            weight_map: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"{path} cannot be read: {error!r}.") from error
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise UserError(f"{path}: weight_map must name a file for every tensor.")
        for name, file in weight_map.items():
            if (self.folder / file).is_dir():
                raise UserError(
                    f"{path}: weight_map must name a file for every tensor, and {file!r} for {name} is a folder."
                )
        whole = "model.safetensors"
        if (self.folder / whole).is_file() and whole not in weight_map.values():
            raise UserError(
                f"{self.folder} holds {whole}, which transformers would read, and {INDEX}, which names other files: "
                "remove one of them."
            )
        for file in dict.fromkeys(weight_map.values()):
            held = set(self._open(file).keys())
            named = {name for name, where in weight_map.items() if where == file}
            if held != named:
                raise UserError(f"{path} and {file} disagree about {_some(sorted(held ^ named))}.")
        return weight_map

    def _listed(self) -> dict[str, str]:
        if not self.folder.is_dir():
            raise UserError(f"There is no model folder {self.folder}.")
        files = sorted(path.name for path in self.folder.glob("*.safetensors"))
        if not files:
            pickled = sorted(path.name for path in self.folder.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
            if pickled:
                raise UserError(f"{self.folder / pickled[0]} is a pickle, which can run code: give safetensors.")
            raise UserError(f"{self.folder} holds no safetensors.")
        # Shards without an index are as good as one file, unless one is missing, which their names tell.
        where: dict[str, str] = {}
        for file in files:
            _, of, total = file.removesuffix(".safetensors").rpartition("-of-")
            if of and total.isascii() and total.isdigit() and int(total) != len(files):
                raise UserError(f"{self.folder} holds {len(files)} of the {int(total)} shards that {file} tells of.")
            held = self._open(file).keys()
            for name in held:
                if name in where:
                    raise UserError(f"{self.folder}: {name} is in {where[name]} and in {file}.")
                where[name] = file
        return where


class StoredSlice:
    """A tensor of a file, with the manners of a safetensors slice. A region that is most of the rows it is in is read: a map of a file
    that is cut short meanwhile would end the process."""

    def __init__(self, mapped: Any, fill: Callable[[slice, Tensor], None]):
        self._mapped, self._fill_rows = mapped, fill

    def get_shape(self) -> list[int]:
        shape: list[int] = self._mapped.get_shape()
        return shape

    def get_dtype(self) -> str:
        kind: str = self._mapped.get_dtype()
        return kind

    def __getitem__(self, region: slice | tuple[slice, ...]) -> Tensor:
        shape, dtype = self.get_shape(), STORED.get(self.get_dtype())
        given = region if isinstance(region, tuple) else (region,)
        parts = [*given, *(slice(None) for _ in shape[len(given) :])]
        bounds = [part.indices(size)[:2] for part, size in zip(parts, shape, strict=True)]
        wanted, whole = math.prod(stop - start for start, stop in bounds[1:]), math.prod(shape[1:])
        if dtype is None or not shape or 2 * wanted <= whole or bounds[0][0] >= bounds[0][1]:
            tensor: Tensor = self._mapped[region]
            return tensor
        first, last = bounds[0]
        rows = torch.empty((last - first, *shape[1:]), dtype=dtype)
        self._fill_rows(slice(first, last), rows)
        return rows[(slice(None, None, parts[0].step), *parts[1:])]


def _starts(path: Path) -> _Starts:
    """Where the tensors are of a file of safetensors that was found whole."""
    with reading(path, RunError), path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        text = file.read(size)
    try:
        header = json.loads(text)
    except ValueError as error:
        raise UserError(f"{path} is damaged or cut short.") from error
    header.pop("__metadata__", None)
    return {
        name: (8 + size + entry["data_offsets"][0], tuple(entry["shape"]), entry["dtype"])
        for name, entry in header.items()
    }


class HFWriter:
    """Safetensors files whose places are planned from names and shapes: tensors come one by one and in any order.

    `folder` exists and is the caller's to rename. On leaving the block without an error, every tensor must have come once.
    Tensors are written as `dtype`, those of `float32` as float32.
    """

    def __init__(
        self,
        folder: Path,
        shapes: Mapping[str, Shape],
        dtype: torch.dtype,
        shard_bytes: int = SHARD_BYTES,
        float32: Collection[str] = (),
    ):
        dtypes = {name: torch.float32 if name in float32 else dtype for name in shapes}
        shards = plan_shards(shapes, dtypes, shard_bytes)
        self._left = set(shapes)
        self._stack = ExitStack()
        self._shard: dict[str, ShardFile] = {}
        for file, names in shards.items():
            shard = self._stack.enter_context(ShardFile(folder / file, names, shapes, dtypes))
            self._shard |= dict.fromkeys(names, shard)
        write_index(folder, shards, shapes, dtypes)

    def write(self, name: str, tensor: Tensor) -> None:
        """Writes one tensor, cast to its dtype. Raises ValueError for one that is unknown, misshapen or came before."""
        if name not in self._left:
            raise ValueError(f"{name} was written before" if name in self._shard else f"{name} is not to be written")
        self._shard[name].write(name, tensor)
        self._left.discard(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:  # closes the files whatever comes
            if kind is not None:
                return
            if self._left:
                raise ValueError(f"these tensors never came: {_some(sorted(self._left))}")
            for shard in set(self._shard.values()):
                shard.end()


def plan_shards(
    shapes: Mapping[str, Shape], dtypes: Mapping[str, torch.dtype], shard_bytes: int = SHARD_BYTES
) -> dict[str, list[str]]:
    """Tensors by file, in their order, each file up to `shard_bytes` (or one tensor). Raises UserError for a dtype that files of
    safetensors are not written in."""
    if odd := {dtype for dtype in dtypes.values() if dtype not in _KINDS}:
        raise UserError(f"Weights cannot be written as {odd.pop()}; {', '.join(map(str, _KINDS))} can.")
    shards: list[list[str]] = [[]]
    used = 0
    for name, shape in shapes.items():
        size = _bytes(shape, dtypes[name])
        if shards[-1] and used + size > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return {_shard_name(number, len(shards)): shard for number, shard in enumerate(shards)}


def write_index(
    folder: Path, shards: Mapping[str, list[str]], shapes: Mapping[str, Shape], dtypes: Mapping[str, torch.dtype]
) -> None:
    """Which file holds which tensor; nothing where there is one file."""
    if len(shards) > 1:
        total = sum(_bytes(shape, dtypes[name]) for name, shape in shapes.items())
        weight_map = {tensor: file for file, names in shards.items() for tensor in names}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


class ShardFile:
    """One file of safetensors with a place for each of `names`. With `blocks` they come in this order, and `copy` may be used."""

    def __init__(
        self,
        path: Path,
        names: Iterable[str],
        shapes: Mapping[str, Shape],
        dtypes: Mapping[str, torch.dtype],
        blocks: Blocks | None = None,
        *,
        durable: bool = True,
    ):
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in names:
            start, end = end, end + _bytes(shapes[name], dtypes[name])
            kind = _KINDS[dtypes[name]]
            header[name] = {"dtype": kind, "shape": list(shapes[name]), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # tensors start aligned
        self._file = PlainFile(path) if blocks is None else BlockFile(path, blocks, durable=durable)
        self._file.write(len(text).to_bytes(8, "little") + text)
        del header["__metadata__"]
        self._place = {name: self._file.tell() + entry["data_offsets"][0] for name, entry in header.items()}
        self._shapes, self._dtypes = shapes, dtypes

    def write(self, name: str, tensor: Tensor) -> None:
        """Writes one tensor, cast to its dtype. Raises ValueError for one that is misshapen."""
        if tuple(tensor.shape) != tuple(self._shapes[name]):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, not {self._shapes[name]}")
        self._file.seek(self._place[name])
        flat = tensor.detach().to("cpu", self._dtypes[name]).contiguous().flatten()
        self._file.write(raw(flat))

    def copy(self, name: str, runs: Iterable[Run], look: Look) -> None:
        """Writes one tensor, whose bytes lie in other files as they are to be."""
        assert isinstance(self._file, BlockFile)
        self._file.seek(self._place[name])
        self._file.copy(runs, self._dtypes[name], look)

    def end(self) -> None:
        """All has come; waits until it is on the disk, if it is to be durable."""
        self._file.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _bytes(shape: Shape, dtype: torch.dtype) -> int:
    return int(torch.Size(shape).numel()) * dtype.itemsize


def save_hf(
    folder: str | Path,
    tensors: Iterable[tuple[str, Tensor]],
    source: str | Path,
    *,
    shapes: Mapping[str, Shape],
    dtype: torch.dtype,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
    changes: Mapping[str, Any] | None = None,
    float32: Collection[str] = (),
) -> Path:
    """Writes a Hugging Face folder: `tensors` (exactly those of `shapes`) as `dtype`, but those of `float32` as float32;
    everything else from `source`; `changes` are fields of config.json.

    It is written aside and renamed. Raises UserError where `folder` exists, RunError where the disk does not take it.
    """
    target, origin = Path(folder), Path(source)
    try:
        with new_folder(target, overwrite=overwrite) as building:
            copy_companions(origin, building, dtype, changes or {})
            with HFWriter(building, shapes, dtype, shard_bytes, float32) as writer:
                for name, tensor in tensors:
                    writer.write(name, tensor)
    except OSError as error:
        raise RunError(f"The model could not be written to {target}: {error.strerror or error}.") from error
    return target


def left_out(source: Path, model: ModelMap) -> tuple[ModelMap, Iterator[tuple[str, Tensor]]]:
    """The map of all that a folder holds, and what `model`, of the same folder, leaves out: layers for multi-token prediction."""
    reader = HFReader(source)
    whole = ModelMap.from_hf(source, names=reader.names)
    return whole, ((name, reader.get(name)) for name in whole.hf_shapes if name not in model.hf_shapes)


def copy_companions(source: Path, folder: Path, dtype: torch.dtype, changes: Mapping[str, Any]) -> None:
    """config.json (its dtype brought up to date, and with `changes`), tokenizer, chat template and generation config."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8")) | dict(changes)
    (folder / "config.json").write_text(config_text(config, dtype), encoding="utf-8")
    copy_texts(source, folder)


def config_text(config: Mapping[str, Any], dtype: torch.dtype) -> str:
    """config.json with the dtype that the weights have."""
    # transformers 5 writes `dtype`, transformers 4 `torch_dtype`; each reads the other's, and some tools write both.
    keys = [key for key in ("torch_dtype", "dtype") if key in config] or ["dtype"]
    return json.dumps({**config, **dict.fromkeys(keys, str(dtype).removeprefix("torch."))}, indent=2) + "\n"


def copy_texts(source: Path, folder: Path) -> None:
    """Tokenizer, chat template and generation config."""
    for name in companions(source):
        with reading(source / name):
            content = (source / name).read_bytes()
        copy = folder / name
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(content)


def companions(source: Path) -> list[str]:
    """The names of a folder's tokenizer, chat template and generation config. Raises UserError for one that nothing can be read from,
    as a pipe, which would be waited for."""
    found: list[str] = []
    for pattern in COMPANIONS:
        # Not through `glob` where there is one: it passes over a link that leads nowhere, and the copy would lack it.
        paths = sorted(source.glob(pattern)) if "*" in pattern else filter(os.path.lexists, [source / pattern])
        for path in paths:
            if path.exists() and not path.is_file():
                raise UserError(f"{path} is no file.")
            _demand_target(path)
            found.append(str(path.relative_to(source)))
    return found


def _demand_target(path: Path) -> None:
    """Raises UserError for a link that leads nowhere, or that cannot be followed."""
    if path.is_symlink():
        with reading(path):
            try:
                path.stat()
            except FileNotFoundError as error:
                raise UserError(f"{path} is a link to {path.readlink()}, where nothing is.") from error


def load_parameter(reader: HFReader, parameter: Parameter, where: Where, out: Tensor) -> None:
    """Fills a rank's tensor, in its own dtype, reading only its slices of the checkpoint. Vocabulary padding becomes 0."""
    copies = parameter.copies(where)
    if not copies and not parameter.pad_vocabulary:
        raise ValueError(f"{parameter.name} is not on expert-parallel rank {where.expert} of {where.expert_size}")
    if tuple(out.shape) != parameter.local_shape(where):
        rank = f"rank {where.tensor} of {where.tensor_size}"
        if parameter.expert is not None:
            rank = f"expert-tensor rank {where.expert_tensor} of {where.expert_tensor_size}"
        shapes = f"{tuple(out.shape)}, not {parameter.local_shape(where)}"
        raise ValueError(f"{parameter.name} on {rank} has shape {shapes}")
    with torch.no_grad():
        if parameter.pad_vocabulary:
            out[max((copy.local[0].stop for copy in copies), default=0) :].zero_()
        for copy in copies:
            out[copy.local].copy_(copy.of(reader.get_slice(copy.hf_name, copy.hf)))


def export_tensors(
    model: ModelMap, fetch: Callable[[Parameter, Cut], Tensor], sizes: Where
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the checkpoint, once, in the order of `model.hf_shapes`, in the dtype of Megatron's tensors.

    `fetch(parameter, where)` returns a rank's tensor; it is asked for each part once (`Parameter.holders`).
    """
    exported = [parameter for parameter in model.parameters if parameter.exported]
    left = Counter(name for parameter in exported for name in parameter.hf_names)  # parameters that are still to come
    whole: dict[str, Tensor] = {}
    for parameter in exported:
        for where in parameter.holders(sizes):
            local = fetch(parameter, where).detach()
            for name, shape in zip(parameter.hf_names, parameter.hf_shapes, strict=True):
                if name not in whole:
                    whole[name] = local.new_empty(shape)
            for copy in parameter.copies(where):
                copy.of(whole[copy.hf_name][copy.hf]).copy_(local[copy.local])
        left.subtract(parameter.hf_names)
        yield from ((name, whole.pop(name)) for name in parameter.hf_names if left[name] == 0)


def _ignorable(name: str, model: ModelMap) -> bool:
    return model.leaves_out(name) or name.endswith("rotary_emb.inv_freq") or (model.tied and name == "lm_head.weight")


def _shard_name(number: int, total: int) -> str:
    return "model.safetensors" if total == 1 else f"model-{number + 1:05d}-of-{total:05d}.safetensors"


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
