"""Hugging Face folder → torch_dist checkpoint, parameter by parameter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.bridge.dist_keys import extra_states, written
from megarl.bridge.hf_io import config_text, copy_texts
from megarl.bridge.layout import Cut
from megarl.bridge.megatron_io import is_straight, standing
from megarl.bridge.model_map import Parameter
from megarl.bridge.raw_io import Run, reading
from megarl.bridge.torch_dist_write import ChunkFile, write_common, write_metadata
from megarl.bridge.torch_frame import FRAMED
from megarl.convert.job import Job, carry_out
from megarl.convert.processes import ALONE, Processes
from megarl.convert.source import Source, main_dtype, open_hf
from megarl.convert.unfinished import Unfinished
from megarl.convert.work import AS_IT_IS, Options, Scratch, Watch, check_finite, copied, target_dtypes, undisturbed
from megarl.errors import RunError, UserError

# Megatron reads these; a checkpoint without a training run behind it is iteration 0.
COMMON = {"checkpoint_version": 3.0, "iteration": 0}


def hf_to_megatron(
    source: Path, target: Path, options: Options = AS_IT_IS, among: Processes = ALONE, *, show: bool = True
) -> Path:
    """Writes `target`, a checkpoint that Megatron loads in any layout, with config.json, tokenizer and chat template beside it.
    Raises as `carry_out`."""
    with undisturbed():
        return carry_out(_ToMegatron(open_hf(source), options), target, among, show=show)


class _ToMegatron(Job[Parameter, ChunkFile]):
    kind = "hf-to-megatron"

    def __init__(self, origin: Source, options: Options):
        super().__init__(origin, options)
        self.model = origin.model
        self.dtypes = target_dtypes(origin.dtypes, options.dtype, self.model.float32)
        self.parameters = [parameter for parameter in self.model.parameters if parameter.exported]
        self.scratch = Scratch(max(self.bytes(parameter) for parameter in self.parameters))
        self.files = self._files()

    def dtype(self, parameter: Parameter) -> torch.dtype:
        """The one dtype of all that a parameter is made of."""
        found = {self.dtypes[name] for name in parameter.hf_names}
        if len(found) > 1:
            said = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in found))
            raise UserError(
                f"{self.origin.folder}: {', '.join(parameter.hf_names)} are one tensor in Megatron but are stored as {said}: "
                "choose with --dtype."
            )
        return found.pop()

    def bytes(self, item: Parameter) -> int:
        return torch.Size(item.local_shape(Cut())).numel() * self.dtype(item).itemsize

    def _files(self) -> dict[str, list[Parameter]]:
        """In the order of the model."""
        runs: list[list[Parameter]] = [[]]
        used = 0
        for parameter in self.parameters:
            size = self.bytes(parameter)
            if runs[-1] and used + size > self.options.shard_bytes:
                runs.append([])
                used = 0
            runs[-1].append(parameter)
            used += size
        return {f"__{number}_0.distcp": run for number, run in enumerate(runs)}

    def open(self, folder: Path, name: str) -> ChunkFile:
        return ChunkFile(folder / name, self.blocks, durable=self.options.durable)

    def write(self, file: ChunkFile, item: Parameter) -> None:
        name, dtype, slot = (
            f"{self.origin.folder}: {' with '.join(item.hf_names)}",
            self.dtype(item),
            written(self.model, item),
        )
        framed = self.bytes(item) >= FRAMED  # any smaller one is written with all around it
        if runs := copied(self._runs(item, dtype) if framed else None):
            watch = Watch(self.options)
            file.copy(slot.key, runs, dtype, slot.sizes, slot.offsets, slot.global_shape, watch)
            watch.complain(name, dtype)
            return
        whole = self.scratch.tensor(item.local_shape(Cut()), dtype)
        self._fill(item, whole)
        check_finite(name, whole, self.options)
        file.write(slot.key, whole.view(slot.sizes), slot.offsets, slot.global_shape)

    def _runs(self, parameter: Parameter, dtype: torch.dtype) -> list[Run] | None:
        """Where its bytes lie, if they lie as they are to be."""
        found: list[Run] = []
        for copy in sorted(parameter.copies(Cut()), key=lambda copy: copy.local[0].start):
            runs = self.origin.reader.runs(copy.hf_name, copy.hf, dtype) if is_straight(copy) else None
            if runs is None:
                return None
            found += runs
        return found

    def _fill(self, parameter: Parameter, whole: Tensor) -> None:
        """The parameter as a rank holds it that has all of it."""
        for copy in parameter.copies(Cut()):
            if is_straight(copy):
                self.origin.reader.read(copy.hf_name, copy.hf, whole[copy.local])
            else:
                whole[copy.local] = standing(copy, self.origin.reader.get_slice(copy.hf_name, copy.hf))

    def record(self, file: ChunkFile) -> dict[str, Any]:
        return {"chunks": file.records}

    def finish(self, growing: Unfinished) -> None:
        records = []
        for name in self.files:
            record = growing.record(name)
            if record is None:
                raise RunError(f"{growing.files / name} was not finished.")
            records += record["chunks"]
        with ChunkFile(growing.files / f"__{len(self.files)}_0.distcp") as file:
            file.write_alike(extra_states(self.model), [None])
            file.end()
        folder, origin = growing.files, self.origin
        copy_texts(origin.texts, folder)
        if self.options.dtype is None and not origin.quantised:
            with reading(origin.texts / "config.json"):
                text = (origin.texts / "config.json").read_text(encoding="utf-8")
        else:
            text = config_text(origin.config, main_dtype(self.dtypes, self.model.hf_shapes))
        (folder / "config.json").write_text(text, encoding="utf-8")
        write_metadata(folder, [*records, *file.records])
        write_common(folder, COMMON)
