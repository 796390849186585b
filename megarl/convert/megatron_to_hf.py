"""torch_dist checkpoint, of whatever layout → Hugging Face folder, tensor by tensor."""

from __future__ import annotations

from pathlib import Path

import torch

from megarl.bridge.hf_io import ShardFile, copy_texts, plan_shards, write_index
from megarl.bridge.megatron_io import MegatronReader
from megarl.convert.processes import ALONE, Processes
from megarl.convert.progress import ByteProgress
from megarl.convert.source import Source, config_text, main_dtype, open_megatron
from megarl.convert.unfinished import Unfinished, not_written, unfinished
from megarl.convert.work import AS_IT_IS, Options, Scratch, check_finite, one_thread, target_dtypes
from megarl.errors import UserError


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

    `config`: the Hugging Face folder of the model that was trained, where the checkpoint has no config.json. Raises and resumes as
    `hf_to_megatron`.
    """
    try:
        return _converted(open_megatron(source, config), target, options, among, show)
    except OSError as error:
        raise not_written(target, error) from error


def _converted(origin: Source, target: Path, options: Options, among: Processes, show: bool) -> Path:
    shapes = origin.model.hf_shapes
    dtypes = target_dtypes(origin.dtypes, options.dtype, origin.model.float32)
    files = plan_shards(shapes, dtypes, options.shard_bytes)
    plan = {"kind": "megatron-to-hf", "source": origin.identity(), "dtype": str(options.dtype)}
    plan |= {"shard_bytes": options.shard_bytes, "allow_nonfinite": options.allow_nonfinite}
    mine = list(files)[among.rank :: among.world]
    work = _Work(origin, options, dtypes)
    with unfinished(target, plan, among) as growing:
        mine = growing.left(mine, show=show and among.first)
        total = sum(work.bytes(name) for file in mine for name in files[file])
        problem: BaseException | None = None
        try:
            with one_thread(), ByteProgress(f"writing {target.name}", total, show=show and among.first) as progress:
                for file in mine:
                    work.write(growing, file, files[file], progress)
        except (UserError, OSError) as error:
            problem = error
        among.agree(problem)
        if among.first:
            write_index(growing.files, files, shapes, dtypes)
            copy_texts(origin.texts, growing.files)
            changes = origin.head.exported(origin.config) if origin.head is not None else {}
            text = config_text({**origin.config, **changes}, main_dtype(dtypes, shapes))
            (growing.files / "config.json").write_text(text, encoding="utf-8")
            growing.publish()
        among.agree()
    return target


class _Work:
    """The tensors of a model, read one at a time."""

    def __init__(self, origin: Source, options: Options, dtypes: dict[str, torch.dtype]):
        assert isinstance(origin.reader, MegatronReader)
        self.origin, self.reader, self.options, self.dtypes = origin, origin.reader, options, dtypes
        self.shapes, self.stored = origin.model.hf_shapes, origin.dtypes
        self.scratch = Scratch(max(self._stored_bytes(name) for name in self.shapes))

    def bytes(self, name: str) -> int:
        return torch.Size(self.shapes[name]).numel() * self.dtypes[name].itemsize

    def _stored_bytes(self, name: str) -> int:
        return torch.Size(self.shapes[name]).numel() * self.stored[name].itemsize

    def write(self, growing: Unfinished, file: str, names: list[str], progress: ByteProgress) -> None:
        """One file."""
        with ShardFile(growing.files / file, names, self.shapes, self.dtypes) as shard:
            for name in names:
                tensor = self.scratch.tensor(self.shapes[name], self.stored[name])
                self.reader.read(name, tuple(slice(0, size) for size in self.shapes[name]), tensor)
                tensor = tensor.to(self.dtypes[name])
                check_finite(f"{self.origin.folder}: {name}", tensor, self.options)
                shard.write(name, tensor)
                progress.add(self.bytes(name))
            shard.sync()
        growing.finished(file)
