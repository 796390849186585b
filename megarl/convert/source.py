"""What is converted or compared: a Hugging Face folder, or a checkpoint of Megatron."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from megarl import models
from megarl.bridge import head_io, megatron_io, quantised
from megarl.bridge.head_io import HeadReader
from megarl.bridge.heads import Head
from megarl.bridge.hf_config import read_config
from megarl.bridge.layout import Shape
from megarl.bridge.megatron_io import MegatronReader
from megarl.bridge.model_map import ModelMap
from megarl.bridge.quantised import QuantisedReader
from megarl.bridge.raw_io import Run, reading
from megarl.bridge.torch_dist import CONFIG, DistReader, is_checkpoint, resolve
from megarl.convert.carried import CarriedReader
from megarl.convert.unfinished import said_of
from megarl.errors import UserError


class Reader(Protocol):
    """The tensors of a model under the names of Hugging Face."""

    @property
    def names(self) -> list[str]: ...
    @property
    def paths(self) -> list[Path]: ...
    def altered(self, share: int, shares: int, stop: Callable[[], bool]) -> str | None: ...
    def shape(self, name: str) -> Shape: ...
    def dtype(self, name: str) -> torch.dtype: ...
    def get(self, name: str) -> Tensor: ...
    def read(self, name: str, region: tuple[slice, ...], out: Tensor) -> None: ...
    def get_slice(self, name: str, region: tuple[slice, ...]) -> Tensor: ...
    def runs(self, name: str, region: tuple[slice, ...], dtype: torch.dtype) -> list[Run] | None: ...
    def forget(self) -> None: ...


# Of config.json: says nothing about the model.
ASIDE = frozenset({"dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache"})


@dataclass(frozen=True)
class Source:
    """A model on disk, checked to hold exactly what its config.json asks for."""

    kind: Literal["hf", "megatron"]
    folder: Path
    texts: Path  # where config.json and the tokenizer are
    config: Mapping[str, Any]
    head: Head | None
    model: ModelMap
    reader: Reader
    quantised: str | None = None  # how the weights are stored, which are read as bfloat16
    ahead: Path | None = None  # where layers for multi-token prediction are, of a checkpoint that has none

    @property
    def notes(self) -> list[str]:
        """What is not as it may seem."""
        said = []
        if self.quantised:
            said.append(f"the weights of {self.folder} are quantised ({self.quantised}) and are taken as bfloat16")
        if isinstance(self.reader, HeadReader):
            said += [
                f"{name} of {self.folder} is left out: a score head stands in its place" for name in self.reader.dropped
            ]
        if self.ahead:
            said.append(f"the layers for multi-token prediction are those of {self.ahead}: {self.folder} has none")
        elif self.model.ahead and not self.model.dims.mtp:
            more = "; --config with the folder that was trained brings them" if self.kind == "megatron" else ""
            said.append(
                f"{self.folder} has none of the layers for multi-token prediction that its config.json tells of{more}"
            )
        return said

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        return {name: self.reader.dtype(name) for name in self.model.hf_shapes}

    def identity(self) -> dict[str, Any]:
        """What tells whether the files are those that they were."""
        stats = {str(path.absolute()): _stat(path) for path in [*self.reader.paths, self.texts / "config.json"]}
        return {"folder": str(self.folder.absolute()), "files": stats, "config": dict(self.config)}


def _stat(path: Path) -> list[int]:
    """Of the file that a path leads to. The time of its content can be set to what it was, that of its inode cannot."""
    with reading(path):
        found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def open_source(folder: Path, config: Path | None = None) -> Source:
    """Whichever of the two a folder holds."""
    with reading(folder):
        return _megatron(folder, config) if is_checkpoint(folder) else _hf(folder)


def open_hf(folder: Path) -> Source:
    """A Hugging Face folder, of a causal language model or of one with a score head."""
    with reading(folder):
        return _hf(folder)


def open_megatron(folder: Path, config: Path | None = None) -> Source:
    """A torch_dist checkpoint. `config`: the Hugging Face folder of the model that was trained, where the checkpoint has no
    config.json of its own, or lacks layers for multi-token prediction, which training leaves out: they are that folder's then."""
    with reading(folder):
        return _megatron(folder, config)


def _hf(folder: Path) -> Source:
    if is_checkpoint(folder):
        raise UserError(f"{folder} is a checkpoint of Megatron, not a Hugging Face folder.")
    if not folder.is_dir():
        if said := said_of(folder):
            raise UserError(said)
        known = str(folder) in models.names()
        hint = f" `megarl models get {folder}` makes one of the model that megarl knows by that name." if known else ""
        raise UserError(f"There is no model folder {folder}.{hint}")
    _look_inside(folder)
    head = head_io.stored_head(folder)  # complains of weights before anything is said of the config
    config = read_config(folder)
    kind = quantised.method(config)
    if kind and head is not None:
        raise UserError(f"{folder} has quantised weights and a score head: only of language models can they be read.")
    reader = QuantisedReader(folder, config) if kind else head_io.open_checkpoint(folder, head)
    config = quantised.plain(config)
    model = ModelMap.from_hf(config, head, reader.names)
    reader.check(model)
    return Source("hf", folder, folder, config, head, model, reader, kind)


def _megatron(folder: Path, config: Path | None) -> Source:
    _look_inside(folder)
    checkpoint = resolve(folder)
    own = next((path for path in (checkpoint, folder) if (path / "config.json").is_file()), None)
    texts = config or own
    if config is not None and own is not None:
        _demand_same(read_config(config), read_config(own), config, own)
    dist = DistReader(checkpoint)
    if texts is None:
        raise UserError(
            f"{checkpoint} holds no config.json: name the Hugging Face folder of the model that was trained with --config."
        )
    head = megatron_io.stored_head(dist)
    said = quantised.plain(read_config(texts))  # of the folder that was trained; no checkpoint is quantised
    model = ModelMap.from_hf(said, head, dist.tensors)
    reader = MegatronReader(dist, model)
    reader.check(model)
    if config is not None and head is None and model.ahead and not model.dims.mtp and any(config.glob("*.safetensors")):
        trained = _hf(config)
        if trained.model.dims.mtp:
            dtypes = {name: reader.dtype(name) for name in model.hf_shapes}
            carried = CarriedReader(reader, trained.reader, trained.model, main_dtype(dtypes, model.hf_shapes))
            return Source("megatron", checkpoint, texts, said, None, trained.model, carried, ahead=config)
    return Source("megatron", checkpoint, texts, said, head, model, reader)


def _demand_same(given: Mapping[str, Any], own: Mapping[str, Any], config: Path, folder: Path) -> None:
    """Of equal shapes, other heads or another base of positions would be another model, and nothing else would tell."""
    if different := differing(quantised.plain(given), quantised.plain(own)):
        raise UserError(
            f"{folder} has a config.json of its own, and --config {config} says otherwise of {', '.join(different[:5])}; leave "
            "--config out."
        )


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The fields of which two config.json say different things; one that is missing says null."""
    return sorted(key for key in (one.keys() | other.keys()) - ASIDE if one.get(key) != other.get(key))


def _look_inside(folder: Path) -> None:
    """Raises UserError for a folder that is no model but has some in it, that of a run or of one of its checkpoints, or only
    adapters, or for one that is not finished."""
    if said := said_of(folder):
        raise UserError(said)
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        raise UserError(
            f"{folder} holds adapters (LoRA), not a model: merge them into theirs first (peft's merge_and_unload)."
        )
    if is_checkpoint(folder) or (folder / "config.json").exists() or any(folder.glob("*.safetensors")):
        return
    found = [path.parent for depth in ("*/", "*/*/", "*/*/*/") for path in folder.glob(f"{depth}{CONFIG}")]
    if found:
        named = ", ".join(str(path) for path in sorted(found, reverse=True)[:4])
        raise UserError(f"{folder} is no model but holds some: name one of them ({named}).")


def main_dtype(dtypes: Mapping[str, torch.dtype], shapes: Mapping[str, Shape]) -> torch.dtype:
    """The dtype of most elements."""
    count: dict[torch.dtype, int] = {}
    for name, dtype in dtypes.items():
        count[dtype] = count.get(dtype, 0) + torch.Size(shapes[name]).numel()
    return max(count, key=lambda dtype: count[dtype])
