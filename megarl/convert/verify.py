"""Whether two models on disk are the same: names, shapes, dtypes, every byte; on request what they answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megarl.bridge.hf_config import NEUTRAL
from megarl.bridge.layout import Shape
from megarl.bridge.torch_dist import DistReader
from megarl.convert.progress import ByteProgress
from megarl.convert.source import Source, differing, open_source
from megarl.convert.whole import altered, compare_texts, looking
from megarl.convert.work import FORGET_BYTES, Scratch, nonfinite, undisturbed


@dataclass
class Comparison:
    """What was looked at, and a sentence for each difference."""

    tensors: int = 0
    bytes: int = 0
    differences: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what is odd, be it equal


def compare(first: Source, second: Source, *, show: bool = True) -> Comparison:
    """What two models are by their config.json, by what else is beside the weights, and every tensor of them, bit by bit. Raises
    UserError for a folder that is not what was written into it."""
    result = Comparison(notes=[*first.notes, *second.notes])
    dist = [source.folder for source in (first, second) if source.kind == "megatron"]
    for folder in dist:
        DistReader(folder).check_objects()
    _compare_configs(first, second, result)
    compare_texts(first.texts, second.texts, result.differences, result.notes)
    shapes, others = first.model.hf_shapes, second.model.hf_shapes
    for ours, theirs, folder in ((shapes, others, second.folder), (others, shapes, first.folder)):
        result.differences += [f"{folder} has no {name}" for name in ours if name not in theirs]
    common = [name for name in shapes if name in others]
    total = sum(_whole_bytes(first, name) for name in common)
    mapped = 0
    memory = [Scratch(max(_whole_bytes(source, name) for name in source.model.hf_shapes)) for source in (first, second)]
    with (
        undisturbed(),
        looking(*(partial(altered, folder) for folder in dist)),
        ByteProgress("comparing", total, show=show) as progress,
    ):
        if cast := _cast(common, first, second):
            result.differences.append(cast)
            common = []
        for name in common:
            size = _whole_bytes(first, name)
            fault = _compared(name, first, second, memory, result)
            result.differences += [fault] if fault else []
            result.tensors += 1
            result.bytes += size
            progress.add(size)
            mapped += size
            if mapped > FORGET_BYTES:
                first.reader.forget()
                second.reader.forget()
                mapped = 0
    return result


def _compare_configs(first: Source, second: Source, result: Comparison) -> None:
    """A field under which the model computes something else is a difference; one that only says the same in other words, or nothing
    of the arithmetic, is a note."""
    same = first.model.arithmetic() == second.model.arithmetic()
    notes = []
    for key in differing(first.config, second.config):
        if same or (key in NEUTRAL and key != "model_type"):
            notes.append(key)
            continue
        ours, theirs = (_short(source.config.get(key)) for source in (first, second))
        result.differences.append(f"config.json: {key} is {ours} and {theirs}")
    if notes:
        result.notes.append(f"config.json: {', '.join(notes)} differ, which changes nothing of what the model computes")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def verify(first: Path, second: Path, config: Path | None = None, *, show: bool = True) -> Comparison:
    """`compare` of two folders, each of Hugging Face or of Megatron."""
    return compare(open_source(first, config), open_source(second, config), show=show)


def _cast(names: Sequence[str], first: Source, second: Source) -> str | None:
    """One sentence where tensors of the same shapes are all stored in another dtype there, as after `--dtype`."""
    if any(first.model.hf_shapes[name] != second.model.hf_shapes[name] for name in names):
        return None
    pairs = {(first.reader.dtype(name), second.reader.dtype(name)) for name in names}
    if len(pairs) != 1 or len(names) < 2:
        return None
    ((ours, theirs),) = pairs
    return None if ours == theirs else f"all {len(names)} tensors are stored as {_named(ours)} and as {_named(theirs)}"


def _whole_bytes(source: Source, name: str) -> int:
    return _bytes(source.model.hf_shapes[name], source.reader.dtype(name))


def _compared(name: str, first: Source, second: Source, memory: Sequence[Scratch], result: Comparison) -> str | None:
    shape, other = first.model.hf_shapes[name], second.model.hf_shapes[name]
    if shape != other:
        return f"{name} has shape {shape} and {other}"
    dtype, other_dtype = first.reader.dtype(name), second.reader.dtype(name)
    if dtype != other_dtype:
        return f"{name} is stored as {_named(dtype)} and as {_named(other_dtype)}"
    ours, theirs = (scratch.tensor(shape, dtype) for scratch in memory)
    for source, tensor in ((first, ours), (second, theirs)):
        source.reader.read(name, tuple(slice(0, size) for size in shape), tensor)
    count = torch.Size(shape).numel()
    if odd := nonfinite(ours):
        result.notes.append(f"{name} holds {odd} elements that are NaN or infinite, in {first.folder}")
    if torch.equal(_bits(ours), _bits(theirs)):
        return None
    differ = int((_bits(ours) != _bits(theirs)).sum())
    return f"{name} differs in {differ} of {count} elements"


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize])


def _bytes(shape: Shape, dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
