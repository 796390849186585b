"""Hugging Face folder → torch_dist checkpoint, parameter by parameter."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from megarl.bridge.dist_keys import extra_states, written
from megarl.bridge.hf_io import copy_texts
from megarl.bridge.layout import Cut
from megarl.bridge.megatron_io import is_straight, standing
from megarl.bridge.model_map import Parameter
from megarl.bridge.torch_dist_write import ChunkFile, write_common, write_metadata
from megarl.convert.processes import ALONE, Processes
from megarl.convert.progress import ByteProgress
from megarl.convert.source import Source, config_text, main_dtype, open_hf
from megarl.convert.unfinished import Unfinished, not_written, unfinished
from megarl.convert.work import AS_IT_IS, FORGET_BYTES, Options, Scratch, check_finite, one_thread, target_dtypes
from megarl.errors import RunError, UserError

# Megatron reads these; a checkpoint without a training run behind it is iteration 0.
COMMON = {"checkpoint_version": 3.0, "iteration": 0}


def hf_to_megatron(
    source: Path, target: Path, options: Options = AS_IT_IS, among: Processes = ALONE, *, show: bool = True
) -> Path:
    """Writes `target`, a checkpoint that Megatron loads in any layout, with config.json, tokenizer and chat template beside it.

    Raises UserError for what is wrong with `source` or where `target` exists, RunError where the disk does not take it. What a
    kill or a full disk leaves is taken up by the next call with the same arguments.
    """
    try:
        return _converted(open_hf(source), target, options, among, show)
    except OSError as error:
        raise not_written(target, error) from error


def _converted(origin: Source, target: Path, options: Options, among: Processes, show: bool) -> Path:
    work = _Work(origin, options)
    plan = {"kind": "hf-to-megatron", "source": origin.identity(), "dtype": str(options.dtype)}
    plan |= {"shard_bytes": options.shard_bytes, "allow_nonfinite": options.allow_nonfinite}
    files = work.files()
    mine = list(files)[among.rank :: among.world]
    with unfinished(target, plan, among) as growing:
        mine = growing.left(mine, show=show and among.first)
        total = sum(work.bytes(parameter) for name in mine for parameter in files[name])
        problem: BaseException | None = None
        try:
            with one_thread(), ByteProgress(f"writing {target.name}", total, show=show and among.first) as progress:
                for name in mine:
                    work.write(growing, name, files[name], progress)
        except (UserError, OSError) as error:
            problem = error
        among.agree(problem)
        if among.first:
            work.finish(growing, files)
            growing.publish()
        among.agree()
    return target


class _Work:
    """The parameters of a model and the files that they go into."""

    def __init__(self, origin: Source, options: Options):
        self.origin, self.options = origin, options
        self.model = origin.model
        self.dtypes = target_dtypes(origin.dtypes, options.dtype, self.model.float32)
        self.parameters = [parameter for parameter in self.model.parameters if parameter.exported]
        self.scratch = Scratch(max(self.bytes(parameter) for parameter in self.parameters))

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

    def bytes(self, parameter: Parameter) -> int:
        return torch.Size(parameter.local_shape(Cut())).numel() * self.dtype(parameter).itemsize

    def files(self) -> dict[str, list[Parameter]]:
        """The parameters of each file, in the order of the model."""
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

    def write(self, growing: Unfinished, name: str, parameters: Iterable[Parameter], progress: ByteProgress) -> None:
        """One file."""
        reader, mapped = self.origin.reader, 0
        with ChunkFile(growing.files / name) as file:
            for parameter in parameters:
                whole = self.scratch.tensor(parameter.local_shape(Cut()), self.dtype(parameter))
                self._fill(parameter, whole)
                check_finite(f"{self.origin.folder}: {' with '.join(parameter.hf_names)}", whole, self.options)
                slot = written(self.model, parameter)
                file.write(slot.key, whole.view(slot.sizes), slot.offsets, slot.global_shape)
                size = self.bytes(parameter)
                progress.add(size)
                mapped += size
                if mapped > FORGET_BYTES:
                    reader.forget()
                    mapped = 0
            file.sync()
        growing.finished(name, chunks=file.records)

    def _fill(self, parameter: Parameter, whole: Tensor) -> None:
        """The parameter as a rank holds it that has all of it."""
        for copy in parameter.copies(Cut()):
            if is_straight(copy):
                self.origin.reader.read(copy.hf_name, copy.hf, whole[copy.local])
            else:
                whole[copy.local] = standing(copy, self.origin.reader.get_slice(copy.hf_name, copy.hf))

    def finish(self, growing: Unfinished, files: Iterable[str]) -> None:
        """All that is beside the weights."""
        records = []
        for name in files:
            record = growing.record(name)
            if record is None:
                raise RunError(f"{growing.files / name} was not finished.")
            records += record["chunks"]
        with ChunkFile(growing.files / f"__{len(list(files))}_0.distcp") as file:
            for key in extra_states(self.model):
                file.write_object(key, [None])
            file.sync()
        folder, origin = growing.files, self.origin
        copy_texts(origin.texts, folder)
        if self.options.dtype is None:
            shutil.copyfile(origin.texts / "config.json", folder / "config.json")
        else:
            dtype = main_dtype(self.dtypes, self.model.hf_shapes)
            (folder / "config.json").write_text(config_text(origin.config, dtype), encoding="utf-8")
        write_metadata(folder, [*records, *file.records])
        write_common(folder, COMMON)
