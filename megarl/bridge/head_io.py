"""Checkpoints of models with a score head: what head a folder holds, reading it under one set of names, writing it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.bridge.heads import BIAS, PREFIX, STORED, WEIGHT, Head, found_head
from megarl.bridge.hf_config import read_config
from megarl.bridge.hf_io import HFReader, save_hf
from megarl.bridge.model_map import ModelMap
from megarl.errors import UserError

_OUTPUT = "lm_head.weight"


def stored_head(folder: str | Path) -> Head | None:
    """The head that a folder holds; None: it is a causal language model."""
    reader = HFReader(folder)
    found = _stored(reader)
    if WEIGHT not in found:
        return None
    return found_head(reader.shape(found[WEIGHT]), BIAS in found, folder, found[WEIGHT])


def critic_head(folder: str | Path, *, std: float = 0.0, seed: int = 0) -> Head:
    """The head of a critic that starts from this folder: its own where that has one score, else a fresh one."""
    found = stored_head(folder)
    return found if found is not None and found.labels == 1 else Head(fresh=True, std=std, seed=seed)


def reward_head(folder: str | Path) -> Head:
    """The head of a reward model. UserError where the folder holds none."""
    found = stored_head(folder)
    if found is None:
        raise UserError(
            f"{folder} holds no score head ({WEIGHT}), so it is no reward model: give a folder of a sequence classifier."
        )
    return found


def open_checkpoint(folder: str | Path, head: Head | None) -> HFReader:
    """The reader of a folder under the names of its map: `ModelMap.from_hf(folder, head)`."""
    return HFReader(folder) if head is None else HeadReader(folder, head)


class HeadReader(HFReader):
    """A folder as the map of its body with a score head names it: without an output layer, with the head, be it fresh."""

    def __init__(self, folder: str | Path, head: Head):
        super().__init__(folder)
        stored = _stored(self)
        self.dropped = [name for name in self.names if _output(name)]  # the head stands in its place
        self._theirs = {
            name.removeprefix(PREFIX): name for name in self.names if name not in stored.values() and not _output(name)
        }
        self._made: dict[str, Tensor] = {}
        if head.fresh:
            self._made = _fresh(head, ModelMap.from_hf(self.folder, head).dims.hidden)
        else:
            self._theirs |= {name: stored[name] for name in head.names if name in stored}
        made = dict.fromkeys(self._made, "")
        self._file_of = {ours: self._file_of[theirs] for ours, theirs in self._theirs.items()} | made

    def _slice(self, name: str) -> Any:
        if name in self._made:
            return _Made(self._made[name])
        if name not in self._theirs:
            raise UserError(f"{self.folder} holds no tensor {name}.")
        return self._stored(self._file_of[name], self._theirs[name])

    def _place(self, name: str) -> tuple[str, str] | None:
        return None if name in self._made else (self._file_of[name], self._theirs[name])


class _Made:
    """A tensor that no file holds, with the manners of a safetensors slice."""

    def __init__(self, tensor: Tensor):
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, region: Any) -> Tensor:
        return self._tensor[region]


def save_head_hf(
    folder: str | Path,
    tensors: Iterable[tuple[str, Tensor]],
    source: str | Path,
    head: Head,
    *,
    dtype: torch.dtype,
    overwrite: bool = False,
) -> Path:
    """Writes a model with a head as a Hugging Face folder that `transformers` opens: a sequence classifier, or, with a bias, a
    token classifier. `source`: the folder that it started from. Otherwise as `save_hf`."""
    model = ModelMap.from_hf(source, head)
    changes = head.exported(read_config(Path(source)))
    return save_hf(
        folder,
        tensors,
        source,
        shapes=model.hf_shapes,
        dtype=dtype,
        overwrite=overwrite,
        float32=model.float32,
        changes=changes,
    )


def _stored(reader: HFReader) -> dict[str, str]:
    """Our names of a head -> the folder's. Of two heads (trl wraps a reward model) the value head counts."""
    names = set(reader.names)
    for kind in range(len(STORED[WEIGHT])):
        if STORED[WEIGHT][kind] in names:
            return {ours: theirs[kind] for ours, theirs in STORED.items() if theirs[kind] in names}
    return {}


def _output(name: str) -> bool:
    return name.removeprefix(PREFIX) == _OUTPUT


def _fresh(head: Head, hidden: int) -> dict[str, Tensor]:
    """Drawn whole by every rank, alike."""
    generator = torch.Generator().manual_seed(head.seed)
    shapes = head.shapes(hidden)
    made = {WEIGHT: torch.randn(shapes[WEIGHT], generator=generator) * head.std}
    return made | ({BIAS: torch.zeros(shapes[BIAS])} if head.bias else {})
