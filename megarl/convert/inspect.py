"""What a folder holds, in words."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch

from megarl.bridge.raw_io import reading
from megarl.bridge.torch_dist import DistReader, is_checkpoint, resolve
from megarl.convert.source import Source, open_hf, open_megatron
from megarl.errors import UserError


def inspect(folder: Path, config: Path | None = None, *, tensors: bool = False) -> list[str]:
    """Lines about a Hugging Face folder or a checkpoint of Megatron; `tensors`: with one for each tensor that is stored."""
    with reading(folder):
        if is_checkpoint(folder):
            return _megatron(folder, config, tensors)
        return _model(open_hf(folder), tensors=tensors)


def _model(source: Source, *, tensors: bool) -> list[str]:
    model, dtypes = source.model, source.dtypes
    counts = {name: torch.Size(shape).numel() for name, shape in model.hf_shapes.items()}
    stored: Counter[str] = Counter()
    for name, count in counts.items():
        stored[str(dtypes[name]).removeprefix("torch.")] += count
    size = sum(count * dtypes[name].itemsize for name, count in counts.items())
    kind = {"hf": "Hugging Face folder", "megatron": "torch_dist checkpoint of Megatron"}[source.kind]
    lines = [
        f"{source.folder}: {kind}",
        f"  model       {model.family}, {model.dims.layers} layers, hidden size {model.dims.hidden}",
        f"  parameters  {sum(counts.values()):,} in {len(counts)} tensors, {size / 1e9:.3f} GB",
        f"  dtypes      {', '.join(f'{name} {share / sum(counts.values()):.1%}' for name, share in stored.most_common())}",
    ]
    if model.has_experts:
        lines.append(f"  experts     {model.dims.experts} a layer, in {sum(map(int, model.dims.sparse))} layers")
    if source.head is not None:
        lines.append(
            f"  head        {_count(source.head.labels, 'score')}{', with a bias' if source.head.bias else ''}"
        )
    if model.tied:
        lines.append("  output      tied to the embedding")
    if model.dims.mtp:
        lines.append(f"  ahead       layers for multi-token prediction: {model.dims.mtp}, which training leaves out")
    lines += [f"  note        {note}" for note in source.notes]
    if tensors and source.kind == "hf":
        lines += [f"  {name}  {tuple(shape)}  {dtypes[name]}" for name, shape in model.hf_shapes.items()]
    return lines


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _megatron(folder: Path, config: Path | None, tensors: bool) -> list[str]:
    checkpoint = resolve(folder)
    reader = DistReader(checkpoint)
    states = [key for key in reader.tensors if ".exp_avg." in key or key.startswith(("optimizer.", "chained_"))]
    try:
        lines = _model(open_megatron(folder, config), tensors=False)
    except UserError as error:
        lines = [f"{checkpoint}: torch_dist checkpoint of Megatron", f"  as a model: {error}"]
    files = {chunk.file for stored in reader.tensors.values() for chunk in stored.chunks}
    chunks = sum(len(stored.chunks) for stored in reader.tensors.values())
    stored = f"{len(reader.tensors)} tensors in {_count(chunks, 'chunk')} in {_count(len(files), 'file')}"
    lines += [
        f"  stored      {stored}, {_count(len(reader.objects), 'object')}",
        f"  optimizer   {f'{len(states)} tensors of state' if states else 'none'}",
    ]
    if tensors:
        lines += [
            f"  {key}  {stored.shape}  {stored.dtype}  {_count(len(stored.chunks), 'chunk')}"
            for key, stored in reader.tensors.items()
        ]
    return lines
