"""torch_dist checkpoint, of whatever layout → Hugging Face folder, tensor by tensor."""

from __future__ import annotations

from pathlib import Path

import torch

from megarl.bridge.hf_io import ShardFile, config_text, copy_texts, plan_shards, write_index
from megarl.convert.job import Job, carry_out
from megarl.convert.processes import ALONE, Processes
from megarl.convert.source import Source, main_dtype, open_megatron
from megarl.convert.unfinished import Unfinished
from megarl.convert.work import AS_IT_IS, Options, Scratch, Watch, check_finite, copied, target_dtypes, undisturbed


def megatron_to_hf(
    source: Path,
    target: Path,
    options: Options = AS_IT_IS,
    among: Processes = ALONE,
    *,
    config: Path | None = None,
    show: bool = True,
) -> Path:
    """Writes `target`, a folder that `transformers` opens. The optimizer's state stays behind.

    `config`: the Hugging Face folder of the model that was trained, where the checkpoint has no config.json. Raises as `carry_out`.
    """
    with undisturbed():
        return carry_out(_ToHF(open_megatron(source, config), options), target, among, show=show)


class _ToHF(Job[str, ShardFile]):
    kind = "megatron-to-hf"

    def __init__(self, origin: Source, options: Options):
        super().__init__(origin, options)
        self.shapes, self.stored = origin.model.hf_shapes, origin.dtypes
        self.dtypes = target_dtypes(self.stored, options.dtype, origin.model.float32)
        self.scratch = Scratch(max(self._stored_bytes(name) for name in self.shapes))
        self.files = plan_shards(self.shapes, self.dtypes, options.shard_bytes)

    def bytes(self, item: str) -> int:
        return torch.Size(self.shapes[item]).numel() * self.dtypes[item].itemsize

    def _stored_bytes(self, name: str) -> int:
        return torch.Size(self.shapes[name]).numel() * self.stored[name].itemsize

    def open(self, folder: Path, name: str) -> ShardFile:
        durable = self.options.durable
        return ShardFile(folder / name, self.files[name], self.shapes, self.dtypes, self.blocks, durable=durable)

    def write(self, file: ShardFile, item: str) -> None:
        name, dtype, whole = (
            f"{self.origin.folder}: {item}",
            self.dtypes[item],
            tuple(slice(0, n) for n in self.shapes[item]),
        )
        if runs := copied(self.origin.reader.runs(item, whole, dtype)):
            watch = Watch(self.options)
            file.copy(item, runs, watch)
            watch.complain(name, dtype)
            return
        tensor = self.scratch.tensor(self.shapes[item], self.stored[item])
        self.origin.reader.read(item, whole, tensor)
        tensor = tensor.to(dtype)
        check_finite(name, tensor, self.options)
        file.write(item, tensor)

    def finish(self, growing: Unfinished) -> None:
        origin = self.origin
        write_index(growing.files, self.files, self.shapes, self.dtypes)
        copy_texts(origin.texts, growing.files)
        changes = origin.head.exported(origin.config) if origin.head is not None else {}
        text = config_text({**origin.config, **changes}, main_dtype(self.dtypes, self.shapes))
        (growing.files / "config.json").write_text(text, encoding="utf-8")
