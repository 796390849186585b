"""Checkpoints of what is being trained, in Megatron's torch_dist format: written in one layout, read in any.

Megatron says what lies where (`sharded_state_dict`); the bytes go through the bridge's reader and writer. So no pickle is read that
could run code, nothing is copied before it is written, and `megarl convert` takes a checkpoint of a run as it is.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.strategies.base import (
    LoadCommonStrategy,
    LoadShardedStrategy,
    SaveShardedStrategy,
)

from megarl.bridge.torch_dist import DistReader
from megarl.bridge.torch_dist_write import ChunkFile, write_metadata
from megarl.errors import RunError, UserError
from megarl.megatron.model import unwrap
from megarl.megatron.optimizer import Optimizer

# Optimizer states as tensors of the parameters' shapes, which is what any other layout can read; gathered over gloo.
_OPTIMIZER = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
    "chained_optim_avoid_prefix": True,
}


def save(
    folder: Path,
    chunks: Sequence[torch.nn.Module],
    *,
    optimizer: Optimizer | None = None,
    common: Mapping[str, Any] | None = None,
) -> None:
    """Writes the parameters of this rank's chunks, and the optimizer's states and schedule where one is given.

    Collective over the world. `common`: anything plain (numbers, texts, lists, dicts, tensors) that is the same on all ranks. Written
    aside and renamed: `folder` must not exist, and is whole when it does. Raises UserError where it exists, RunError on all ranks
    where a disk does not take it.
    """
    aside = folder.with_name(f".{folder.name}.unfinished")
    _agree(_emptied(folder, aside) if dist.get_rank() == 0 else None, UserError)
    problem = None
    try:
        state = {**_state(chunks, optimizer, loading=False), "common": dict(common or {})}
        dist_checkpointing.save(state, str(aside), _Saving("torch_dist", 1))
        if dist.get_rank() == 0:
            aside.rename(folder)
    except OSError as error:
        problem = f"{folder} could not be written: {error.strerror or error}."
    _agree(problem, RunError)


def load(folder: Path, chunks: Sequence[torch.nn.Module], *, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Fills this rank's chunks, and the optimizer where one is given, from a checkpoint of any layout. Answers with `common`.

    Collective. Raises UserError for what is missing, misshapen or damaged. Parameters are cast to the model's dtype.
    """
    state = _state(chunks, optimizer, loading=True)
    loaded = dist_checkpointing.load(state, str(folder), _Loading(), _Common())
    for name, chunk in _named(chunks):
        unwrap(chunk).load_state_dict(loaded[name])
    if optimizer is not None:
        optimizer.inner.load_state_dict(loaded["optimizer"])
        optimizer.schedule.load_state_dict(loaded["schedule"])
    found: dict[str, Any] = loaded.get("common", {})
    return found


def _named(chunks: Sequence[torch.nn.Module]) -> list[tuple[str, torch.nn.Module]]:
    """As Megatron-LM names them."""
    return [("model" if len(chunks) == 1 else f"model{number}", chunk) for number, chunk in enumerate(chunks)]


def _state(chunks: Sequence[torch.nn.Module], optimizer: Optimizer | None, *, loading: bool) -> dict[str, Any]:
    state: dict[str, Any] = {name: unwrap(chunk).sharded_state_dict() for name, chunk in _named(chunks)}
    if optimizer is not None:
        models = dict(state)
        # A single model's is looked through directly, several by their names.
        models = next(iter(models.values())) if len(models) == 1 else models
        state["optimizer"] = optimizer.inner.sharded_state_dict(models, is_loading=loading, metadata=dict(_OPTIMIZER))
        state["schedule"] = optimizer.schedule.state_dict()
    return state


class _Saving(SaveShardedStrategy):
    """Every rank writes what it answers for into one file."""

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        folder, rank = Path(checkpoint_dir), dist.get_rank()
        problem = None
        records: list[dict[str, Any]] = []
        try:
            with ChunkFile(folder / f"__{rank}_0.distcp") as file:
                for item in nested_values(sharded_state_dict):
                    if is_main_replica(item.replica_id):
                        _write(file, item)
                file.sync()
                records = file.records
        except OSError as error:
            problem = f"{folder} could not be written: {error.strerror or error}."
        _agree(problem, RunError)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, records)
        if rank == 0:
            write_metadata(folder, [record for one in everyone for record in one])


def _write(file: ChunkFile, item: ShardedTensor | ShardedObject) -> None:
    if isinstance(item, ShardedObject):
        file.write_object(item.unique_key, [item.data])
        return
    tensor = item.data.detach().to("cpu")
    file.write(
        item.key, tensor.view(*(1,) * item.prepend_axis_num, *item.local_shape), item.global_offset, item.global_shape
    )


class _Reading:
    """What Megatron asks of whoever reads."""

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def check_backend_compatibility(self, loaded_backend: Any) -> None:
        pass

    def check_version_compatibility(self, loaded_version: Any) -> None:
        pass


class _Loading(_Reading, LoadShardedStrategy):
    """Every rank reads its own regions."""

    def load(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> Any:
        reader = DistReader(checkpoint_dir)
        problems = [fault for item in nested_values(sharded_state_dict) if (fault := _misfit(reader, item))]
        if problems:
            more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
            raise UserError(f"{checkpoint_dir} is no checkpoint of this model: {'; '.join(problems[:3])}{more}.")
        return dict_list_map_outplace(lambda item: _read(reader, item), sharded_state_dict)

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> dict[str, ShardedTensor]:
        stored = DistReader(checkpoint_dir).tensors
        return {
            key: ShardedTensor.from_rank_offsets(
                key, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            ).without_data()
            for key, tensor in stored.items()
        }

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        objects = DistReader(checkpoint_dir).objects
        return {key: ShardedObject.empty_from_unique_key(key) for key in objects} | self.load_tensors_metadata(
            checkpoint_dir
        )


class _Common(_Reading, LoadCommonStrategy):
    def load_common(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        return DistReader(checkpoint_dir).read_common()

    def load_sharded_objects(self, sharded_objects_state_dict: Any, checkpoint_dir: str | Path) -> Any:
        raise NotImplementedError("objects are read with the tensors")


def _misfit(reader: DistReader, item: ShardedTensor | ShardedObject) -> str | None:
    if isinstance(item, ShardedObject):
        return None if item.unique_key in reader.objects else f"it lacks {item.unique_key}"
    if item.key not in reader.tensors:
        return f"it lacks {item.key}"
    shape = reader.tensors[item.key].shape
    if shape == tuple(item.global_shape) or item.allow_shape_mismatch:
        return None
    return f"{item.key} has shape {shape}, not {tuple(item.global_shape)}"


def _read(reader: DistReader, item: ShardedTensor | ShardedObject) -> Any:
    if isinstance(item, ShardedObject):
        return reader.read_object(item.unique_key)[0]
    if item.data is None:
        item.init_data(torch.device("cpu"))
    out = item.data.detach()
    region = [
        slice(offset, offset + size)
        for offset, size in zip(item.global_offset, (1,) * item.prepend_axis_num + tuple(item.local_shape), strict=True)
    ]
    stored = reader.tensors[item.key].shape
    if item.allow_shape_mismatch:  # a vocabulary, padded for another layout
        out.zero_()
        axis = item.prepend_axis_num
        region[axis] = slice(region[axis].start, min(region[axis].stop, stored[axis]))
        out = out[: max(0, region[axis].stop - region[axis].start)]
    if out.numel():
        reader.read(item.key, tuple(region), out)
    return item.data


def _emptied(folder: Path, aside: Path) -> str | None:
    """Makes the folder to write in; a sentence where that cannot be."""
    if folder.exists():
        return f"{folder} exists already and is not overwritten."
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    except OSError as error:
        return f"{folder} cannot be made: {error.strerror or error}."
    return None


def _agree(problem: str | None, kind: type[UserError] | type[RunError]) -> None:
    """Waits for all ranks. Raises on each of them where one has a problem."""
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, problem)
    for text in said:
        if text is not None:
            raise kind(text)
