"""Checkpoints of what is being trained, in Megatron's torch_dist format: written in one layout, read in any.

Megatron says where a rank's parameters lie in the whole (`sharded_state_dict`); the bytes go through the bridge's reader and writer.
So no pickle is read that could run code, nothing is gathered or copied before it is written, and `megarl convert` takes a checkpoint
of a run as it is.

Of the optimizer the moments, the float32 master weights and the number of steps are kept, each as a tensor of its parameter's shape
whatever optimizer holds it (`optimizer.state.exp_avg.…`): a rank's share of a distributed optimizer, which is a run of a parameter's
elements, is written as the rectangles that it is.
"""

from __future__ import annotations

import copy
import math
import os
import shutil
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from torch import Tensor

from megarl.bridge.layout import Shape
from megarl.bridge.out_file import Blocks
from megarl.bridge.torch_dist import COMMON, METADATA, DistReader
from megarl.bridge.torch_dist_write import (
    ChunkFile,
    altered,
    checksum,
    write_checksums,
    write_common,
    write_metadata,
)
from megarl.errors import RunError, UserError
from megarl.megatron.model import unwrap
from megarl.megatron.optimizer import Optimizer

_STEP = "step"
_SMALL = 1 << 20  # bytes: quickly copied, and not only updates change what experts' routers count
Sums = tuple[int, int, int]  # as `write_checksums` takes them
_STATE = "optimizer.state."  # before the state's name and the parameter's key


@dataclass(frozen=True)
class Piece:
    """A rectangle of a checkpoint's tensor, and this rank's memory that holds it."""

    key: str
    data: Tensor
    offsets: Shape
    shape: Shape  # of the whole tensor
    mine: bool  # of all ranks that hold it, this one writes it
    padded: bool = False  # a vocabulary, whose length depends on the layout
    leading: int = 0  # axes that the checkpoint has in front: layers, experts
    learns: bool = True  # whether the optimizer has states of it

    @property
    def sizes(self) -> Shape:
        return (1,) * self.leading + tuple(self.data.shape)


class Copies:
    """What a checkpoint is written from while training goes on.

    What lies on a GPU is copied to the host at once. What lies in host memory is written from there, until `settle`, which must be
    called before any of it changes: what is left then is copied. Before the next update most is written, and to copy everything took a
    twentieth of a step. Copies are kept from one checkpoint to the next: fresh pages cost as much as the copying.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, Shape], Tensor] = {}
        self._left: deque[Piece] = deque()  # to be written
        self._live = False  # whether some of that is not copied
        self._turn = threading.Condition()  # who holds it reads what is left
        self._settling = False

    def of(self, pieces: Iterable[Piece]) -> Generator[Piece]:
        """Each of the pieces, which must be written before the next is asked for, or the generator closed."""
        self._left = deque(self._copied(p) if p.data.is_cuda or p.data.nbytes < _SMALL else p for p in pieces)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._live = True
        return self._one_by_one()

    def settle(self) -> None:
        """Whatever is being saved may change from now on."""
        if not self._live:
            return
        self._settling = True
        with self._turn:
            self._left = deque(self._copied(piece) for piece in self._left)
            self._live = self._settling = False
            self._turn.notify_all()

    def _one_by_one(self) -> Generator[Piece]:
        while True:
            with self._turn:
                # A lock alone is no turn: who lets go of it may have it again.
                self._turn.wait_for(lambda: not self._settling)
                if not self._left:
                    return
                yield self._left.popleft()

    def _copied(self, piece: Piece) -> Piece:
        name, data = (piece.key, piece.offsets), piece.data
        kept = self._kept.get(name)
        if data is kept:
            return piece
        if kept is None or (kept.shape, kept.dtype) != (data.shape, data.dtype):
            kept = self._kept[name] = torch.empty(data.shape, dtype=data.dtype, pin_memory=data.is_cuda)
        return replace(piece, data=kept.copy_(data, non_blocking=True))


@dataclass(frozen=True)
class Unfinished:
    """A checkpoint that is being written by a thread of each rank."""

    folder: Path
    aside: Path
    common: dict[str, Any]
    steps: int  # updates that this rank's optimizer has made, if it has anything to update
    frozen: dict[str, int]  # by key, elements of parameters that are this rank's to write and have no optimizer state
    written: Future[
        tuple[str, list[dict[str, Any]], Sums]
    ]  # this rank's file: name, what the metadata needs of it, checksums

    def finish(self) -> None:
        """Waits for all ranks, and makes it whole. Collective over the world. Raises RunError on all ranks where a disk does not
        take it."""
        rank = dist.get_rank()
        try:
            files = _everyones(lambda: (*self.written.result(), self.steps, self.frozen), self.folder)
            _everyones(lambda: self._complete(files) if rank == 0 else None, self.folder)
        except RunError:
            if rank == 0:
                shutil.rmtree(self.aside, ignore_errors=True)  # the disk may be full
            raise

    def _complete(self, files: Sequence[tuple[str, list[dict[str, Any]], Sums, int, dict[str, int]]]) -> None:
        records = [record for _, of_file, *_ in files for record in of_file]
        _demand_whole(records, sum((Counter(frozen) for *_, frozen in files), Counter()))
        if "optimizer" in self.common:
            self.common["optimizer"][_STEP] = max(steps for *_, steps, _ in files)
        write_metadata(self.aside, records)
        write_common(self.aside, self.common)
        sums: dict[str, Any] = {name: found for name, _, found, *_ in files}
        write_checksums(self.aside, sums | {name: checksum(self.aside / name) for name in (METADATA, COMMON)})
        self.aside.rename(self.folder)


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
    begin(folder, chunks, optimizer=optimizer, common=common).finish()


def begin(
    folder: Path,
    chunks: Sequence[torch.nn.Module],
    *,
    optimizer: Optimizer | None = None,
    common: Mapping[str, Any] | None = None,
    copies: Copies | None = None,
) -> Unfinished:
    """`save`, whose end is waited for later (`finish`). With `copies` training may go on meanwhile, if they are told to `settle`
    before an update; without, nothing that is being saved may change before it is finished."""
    rank = dist.get_rank()
    aside = folder.with_name(f".{folder.name}.unfinished")
    _agree(_emptied(folder, aside) if rank == 0 else None, UserError)
    mine = aside / f"__{rank}_0.distcp"
    entries = _entries(chunks)
    pieces = [piece for entry in entries for piece in _pieces(entry)]
    frozen = Counter[str]()
    if optimizer is not None:
        for piece in pieces:
            if piece.mine and not piece.learns:
                frozen[piece.key] += piece.data.numel()
        pieces += _state_pieces(optimizer, entries)
    pieces = [piece for piece in pieces if piece.mine]
    objects = {
        entry.unique_key: copy.deepcopy(entry.data)
        for entry in entries
        if isinstance(entry, ShardedObject) and is_main_replica(entry.replica_id)
    }
    one_by_one = copies.of(pieces) if copies is not None else (piece for piece in pieces)

    def write() -> tuple[str, list[dict[str, Any]], Sums]:
        if copies is not None:  # of this thread: what trains comes first
            os.setpriority(os.PRIO_PROCESS, 0, min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10))
        with closing(one_by_one):
            return mine.name, *_write(mine, one_by_one, objects)

    writer = ThreadPoolExecutor(1, "checkpoint")
    written = writer.submit(write)
    writer.shutdown(wait=False)
    steps = max([_steps(part.optimizer) for part in _parts(optimizer)], default=0) if optimizer is not None else 0
    return Unfinished(folder, aside, _common(optimizer, common or {}), steps, dict(frozen), written)


def load(folder: Path, chunks: Sequence[torch.nn.Module], *, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Fills this rank's chunks, and the optimizer where one is given, from a checkpoint of any layout. Answers with `common`.

    Collective over the world: the ranks share the files out to look at their checksums. Raises UserError for what is missing,
    misshapen or damaged. What is stored in another dtype is cast.
    """
    problem, common = altered(folder, dist.get_rank(), dist.get_world_size()), {}
    _agree(problem, UserError)
    try:
        common = _loaded(DistReader(folder), chunks, optimizer)
    except UserError as error:
        problem = str(error)
    _agree(problem, UserError)
    return common


def _loaded(reader: DistReader, chunks: Sequence[torch.nn.Module], optimizer: Optimizer | None) -> dict[str, Any]:
    """This rank's part of `load`."""
    entries = _entries(chunks)
    pieces = [piece for entry in entries for piece in _pieces(entry)]
    if optimizer is not None:
        for part in _parts(optimizer):
            _allocate(part.optimizer)
        pieces += _state_pieces(optimizer, entries)
    problems = [fault for piece in pieces if (fault := _misfit(reader, piece))]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise UserError(f"{reader.folder} is no checkpoint of this model: {'; '.join(problems[:3])}{more}.")
    for piece in pieces:
        _read(reader, piece)
    found = reader.read_common()
    if optimizer is not None:
        _restore(optimizer, found, reader.folder)
    common: dict[str, Any] = found.get("common", {})
    return common


# -- parameters


def _entries(chunks: Sequence[torch.nn.Module]) -> list[Any]:
    """Megatron's descriptions of all that the chunks hold, the parameters in them being the chunks' own."""
    return [entry for chunk in chunks for entry in nested_values(unwrap(chunk).sharded_state_dict())]


def _pieces(entry: Any) -> list[Piece]:
    """A parameter's rectangles, in the order of its rows: one, or gate and up."""
    if isinstance(entry, ShardedTensorFactory):
        learns = entry.data.requires_grad  # its parts are made without gradients
        parts = [piece for part in nested_values(entry.build()) for piece in _pieces(part)]
        return [replace(piece, learns=learns) for piece in parts]
    if isinstance(entry, ShardedObject):
        return []
    return [
        Piece(
            entry.key,
            entry.data.detach(),
            tuple(entry.global_offset),
            tuple(entry.global_shape),
            is_main_replica(entry.replica_id),
            entry.allow_shape_mismatch,
            entry.prepend_axis_num,
            entry.data.requires_grad,
        )
    ]


# -- optimizer


def _parts(optimizer: Optimizer) -> list[Any]:
    """Megatron's optimizers: one, or one for experts too. One without parameters holds nothing."""
    parts = getattr(optimizer.inner, "chained_optimizers", [optimizer.inner])
    return [part for part in parts if part.optimizer is not None]


def _state_pieces(optimizer: Optimizer, entries: Iterable[Any]) -> list[Piece]:
    """The rectangles of this rank's optimizer states."""
    of_parameter = {
        id(entry.data): entry for entry in entries if isinstance(entry, ShardedTensor | ShardedTensorFactory)
    }
    found: list[Piece] = []
    for part in _parts(optimizer):
        for parameter, main, run in _held(part):
            pieces = _pieces(of_parameter[id(parameter)])
            if run is not None:  # nobody else has these elements of the parameter
                first = is_main_replica((*of_parameter[id(parameter)].replica_id[:-1], 0))
                pieces = [replace(piece, mine=first) for piece in pieces]
            states = {
                k: v for k, v in part.optimizer.state[main].items() if torch.is_tensor(v) and v.numel() == main.numel()
            }
            states.pop(_STEP, None)
            if main.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr():
                states["fp32_param"] = main
            for name, state in states.items():
                prefix = f"{_STATE}{name}."
                found += _cut(pieces, state.detach(), prefix, run if run is not None else (0, parameter.numel()))
    return found


def _held(part: Any) -> Iterable[tuple[Tensor, Tensor, tuple[int, int] | None]]:
    """Of a Megatron optimizer: each parameter, what the optimizer holds of it (its master weights, or itself), and which run of
    its elements that is; None: all of them, on every rank that has the parameter."""
    if hasattr(part, "gbuf_ranges"):  # distributed
        for buffer in part.gbuf_ranges:
            for bucket in (bucket for buckets in buffer.values() for bucket in buckets):
                for parameter, ranges in bucket["param_map"].items():
                    group, order = part.model_param_group_index_map[parameter]
                    main = part.optimizer.param_groups[group]["params"][order]
                    yield parameter, main, (ranges["param"].start, ranges["param"].end)
    elif hasattr(part, "float16_groups"):
        for models, mains in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            yield from ((model, main, None) for model, main in zip(models, mains, strict=True))
        for models in part.fp32_from_fp32_groups:
            yield from ((model, model, None) for model in models)
    else:
        for group in part.optimizer.param_groups:
            yield from ((model, model, None) for model in group["params"])


def _cut(pieces: Iterable[Piece], state: Tensor, prefix: str, run: tuple[int, int]) -> list[Piece]:
    """A run of a parameter's elements as rectangles: of each of its pieces whole rows, and parts of the first and the last."""
    flat, found, before = state.view(-1), [], 0
    for piece in pieces:
        count, width = piece.data.numel(), math.prod(piece.data.shape[1:])
        start, stop = (min(max(bound - before, 0), count) for bound in run)
        rows = sorted({start, min(-(-start // width) * width, stop), max(stop // width * width, start), stop})
        for a, b in pairwise(rows):
            values = flat[a + before - run[0] : b + before - run[0]]
            shape, offset = _rectangle(piece.data.shape, width, a, b)
            lead = piece.leading
            offsets = (*piece.offsets[:lead], *(o + d for o, d in zip(piece.offsets[lead:], offset, strict=True)))
            found.append(replace(piece, key=prefix + piece.key, data=values.view(shape), offsets=offsets))
        before += count
    return found


def _rectangle(whole: Shape, width: int, start: int, stop: int) -> tuple[Shape, Shape]:
    """Shape and place of elements `start` to `stop`: of whole rows, or within one."""
    if len(whole) < 2:
        return (stop - start,), (start,)
    row, column = divmod(start, width)
    if column or stop - start < width:
        assert len(whole) == 2, "rows of more than one axis are not cut"
        return (1, stop - start), (row, column)
    return ((stop - start) // width, *whole[1:]), (row, *(0 for _ in whole[1:]))


def _allocate(inner: Any) -> None:
    """States of an optimizer that has not made a step yet."""
    for group in inner.param_groups:
        for parameter in group["params"]:
            state = inner.state[parameter]
            if state:
                continue
            if hasattr(inner, "initialize_state"):  # Transformer Engine's
                inner.initialize_state(parameter, False)
                continue
            state[_STEP] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}


def _common(optimizer: Optimizer | None, common: Mapping[str, Any]) -> dict[str, Any]:
    """`checkpoint_version` and `iteration` are what Megatron-LM looks for."""
    found: dict[str, Any] = {"checkpoint_version": 3.0, "iteration": 0, "common": dict(common)}
    if optimizer is not None:
        found["optimizer"] = {}  # the number of steps, which not every rank knows
        found["schedule"] = optimizer.schedule.state_dict()
    return found


def _steps(inner: Any) -> int:
    """Updates that an optimizer has made."""
    counts = [group[_STEP] for group in inner.param_groups if _STEP in group]
    counts += [state[_STEP] for state in inner.state.values() if _STEP in state]
    return max((int(count) for count in counts), default=0)


def _restore(optimizer: Optimizer, found: Mapping[str, Any], folder: Path) -> None:
    """Counts of steps. The learning rate follows from the present schedule at the place where the run was."""
    try:
        step, done = found["optimizer"][_STEP], found["schedule"]["num_steps"]
    except (KeyError, TypeError) as error:
        raise UserError(f"{folder} holds no optimizer that megarl saved: it lacks {error}.") from error
    for part in _parts(optimizer):
        for group in part.optimizer.param_groups:
            if _STEP in group:
                group[_STEP] = step
        for state in part.optimizer.state.values():
            if _STEP in state:
                state[_STEP].fill_(step)
    optimizer.schedule.num_steps = 0
    optimizer.schedule.step(int(done))


# -- disk


def _write(path: Path, pieces: Iterable[Piece], objects: Mapping[str, Any]) -> tuple[list[dict[str, Any]], Sums]:
    """This rank's file: what the metadata needs of it, and its sums. Weights come first in it, so that a conversion, which leaves the
    optimizer, need not read all. It goes past the page cache, whose pages would cost as much again as the bytes."""
    with ChunkFile(path, Blocks(), summed=True) as file:
        front: tuple[int, int] | None = None
        for piece in pieces:
            if front is None and piece.key.startswith(_STATE):
                front = file.so_far()
            file.write(piece.key, piece.data.to("cpu").reshape(piece.sizes), piece.offsets, piece.shape)
        front = front or file.so_far()
        for key, value in objects.items():
            file.write_object(key, [value])
        _, whole = file.so_far()
        file.end()
    return file.records, (whole, *front)


def _misfit(reader: DistReader, piece: Piece) -> str | None:
    stored = reader.tensors.get(piece.key)
    if stored is None:
        return f"it lacks {piece.key}"
    shape, wanted, axis = stored.shape, piece.shape, piece.leading
    if piece.padded and len(shape) == len(wanted):
        shape, wanted = shape[:axis] + shape[axis + 1 :], wanted[:axis] + wanted[axis + 1 :]
    return None if shape == wanted else f"{piece.key} has shape {stored.shape}, not {piece.shape}"


def _read(reader: DistReader, piece: Piece) -> None:
    out = piece.data
    region = [slice(offset, offset + size) for offset, size in zip(piece.offsets, piece.sizes, strict=True)]
    if piece.padded:
        axis = piece.leading
        end = max(region[axis].start, min(region[axis].stop, reader.tensors[piece.key].shape[axis]))
        region[axis] = slice(region[axis].start, end)
        out[end - region[axis].start :].zero_()
        out = out[: end - region[axis].start]
    if out.numel():
        reader.read(piece.key, tuple(region), out)


def _demand_whole(records: Iterable[Mapping[str, Any]], frozen: Mapping[str, int]) -> None:
    """Raises ValueError unless the ranks together wrote as many elements of every tensor as it has; of optimizer states those of
    frozen parameters are missing, of which there are so many by the parameter's key."""
    left: dict[str, int] = {}
    for record in records:
        if "shape" in record:
            left.setdefault(record["key"], math.prod(record["shape"]))
            left[record["key"]] -= math.prod(record["sizes"])
    of_parameter = {key: key.removeprefix(_STATE).partition(".")[2] for key in left if key.startswith(_STATE)}
    if wrong := [key for key, count in left.items() if count != frozen.get(of_parameter.get(key, ""), 0)]:
        raise ValueError(f"no rank, or more than one, wrote all of {wrong[:3]}")


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


def _everyones(work: Callable[[], Any], folder: Path) -> list[Any]:
    """All ranks' answers. Raises RunError on each of them where the disk failed one."""
    problem, answer = None, None
    try:
        answer = work()
    except OSError as error:
        problem = f"{folder} could not be written: {error.strerror or error}."
    _agree(problem, RunError)
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, answer)
    return answers


def _agree(problem: str | None, kind: type[UserError] | type[RunError]) -> None:
    """Waits for all ranks. Raises on each of them where one has a problem."""
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, problem)
    for text in said:
        if text is not None:
            raise kind(text)
