"""A checkpoint of training, which leaves out layers for multi-token prediction, with those of the folder that was trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from megarl.bridge.hf_io import HFReader
from megarl.bridge.layout import Shape
from megarl.bridge.megatron_io import MegatronReader
from megarl.bridge.model_map import ModelMap
from megarl.bridge.raw_io import Run


class CarriedReader:
    """A Reader of `own` and, for the tensors of `whole` that it lacks, of `rest`: in the dtype that most of `own` has, as an export
    of the training writes them."""

    def __init__(self, own: MegatronReader, rest: HFReader, whole: ModelMap, dtype: torch.dtype):
        self.folder: Path = own.folder
        self._own, self._rest = own, rest
        held = frozenset(own.names)
        self._carried = {
            name: torch.float32 if name in whole.float32 else dtype for name in whole.hf_shapes if name not in held
        }

    @property
    def names(self) -> list[str]:
        return [*self._own.names, *self._carried]

    @property
    def paths(self) -> list[Path]:
        return [*self._own.paths, *self._rest.paths]

    def altered(self, share: int, shares: int, stop: Callable[[], bool]) -> str | None:
        return self._own.altered(share, shares, stop)

    def shape(self, name: str) -> Shape:
        return self._of(name).shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._carried[name] if name in self._carried else self._own.dtype(name)

    def get(self, name: str) -> Tensor:
        return self._of(name).get(name).to(self.dtype(name))

    def get_slice(self, name: str, region: tuple[slice, ...]) -> Tensor:
        return self._of(name).get_slice(name, region).to(self.dtype(name))

    def read(self, name: str, region: tuple[slice, ...], out: Tensor) -> None:
        self._of(name).read(name, region, out)

    def runs(self, name: str, region: tuple[slice, ...], dtype: torch.dtype) -> list[Run] | None:
        return self._of(name).runs(name, region, dtype)

    def forget(self) -> None:
        self._own.forget()
        self._rest.forget()

    def _of(self, name: str) -> MegatronReader | HFReader:
        return self._rest if name in self._carried else self._own
