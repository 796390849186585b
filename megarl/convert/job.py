"""What both directions do: file by file, each process its own, taken up after a kill, named when it is whole."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from megarl.bridge.hf_io import ShardFile, companions
from megarl.bridge.out_file import Blocks
from megarl.bridge.torch_dist_write import ChunkFile
from megarl.convert.processes import Processes
from megarl.convert.progress import ByteProgress, tell
from megarl.convert.source import Source
from megarl.convert.unfinished import Unfinished, not_written, unfinished
from megarl.convert.whole import looking
from megarl.convert.work import FORGET_BYTES, Options
from megarl.errors import RunError, UserError

Item = TypeVar("Item")  # what is written at a time
File = TypeVar("File", ShardFile, ChunkFile)


class Job(ABC, Generic[Item, File]):
    """A conversion: what goes into which file, and how one of it is written."""

    kind: str

    def __init__(self, origin: Source, options: Options):
        self.origin, self.options, self.blocks = origin, options, Blocks()
        self.files: Mapping[str, Sequence[Item]] = {}  # what goes into each, in order

    @abstractmethod
    def bytes(self, item: Item) -> int:
        """In the target."""

    @abstractmethod
    def open(self, folder: Path, name: str) -> File:
        """A new file."""

    @abstractmethod
    def write(self, file: File, item: Item) -> None:
        """Reads one and writes it."""

    def record(self, file: File) -> dict[str, Any]:
        """What `finish` needs to know of a file, be it written by another process or before a kill."""
        return {}

    @abstractmethod
    def finish(self, growing: Unfinished) -> None:
        """All that is beside the weights."""


def carry_out(job: Job[Item, File], target: Path, among: Processes, *, show: bool) -> Path:
    """Writes `target`, on all processes.

    Raises UserError for what is wrong with the source or where `target` exists, RunError where the disk does not give or take it. What
    a kill or a full disk leaves is taken up by the next call of the same job.
    """
    plan = {"kind": job.kind, "source": job.origin.identity(), **job.options.plan()}
    companions(job.origin.texts)  # complains now of what `finish` could not copy
    mine = list(job.files)[among.rank :: among.world]
    try:
        with unfinished(target, plan, among, show=show and among.first) as growing:
            if show and among.first:
                for note in job.origin.notes:
                    tell(f"note: {note}")
            mine = growing.left(mine, show=show and among.first)
            total = sum(job.bytes(item) for name in mine for item in job.files[name])
            problem: BaseException | None = None
            try:
                with (
                    looking(partial(job.origin.reader.altered, among.rank, among.world)),
                    ByteProgress(f"writing {target.name}", total, show=show and among.first) as progress,
                ):
                    _write_all(job, growing, mine, progress)
            except (UserError, RunError, OSError) as error:
                problem = error
            among.agree(_said(problem, target))
            if among.first:
                problem = _ended(job, growing, plan["source"])
            among.agree(_said(problem, target))
    except OSError as error:
        raise not_written(target, error) from error
    return target


def _said(problem: BaseException | None, target: Path) -> BaseException | None:
    """A whole sentence of what the disk did not take: the other processes say it, too."""
    return not_written(target, problem) if isinstance(problem, OSError) else problem


def _ended(job: Job[Item, File], growing: Unfinished, source: object) -> BaseException | None:
    """Gives the target its name, once the source is seen to be still what it was at the beginning. Answers what stands in the way."""
    try:
        job.finish(growing)
        if job.origin.identity() != source:
            return UserError(f"{job.origin.folder} changed while it was converted.")
        growing.publish(durable=job.options.durable)
    except (UserError, RunError, OSError) as error:
        return error
    return None


def _write_all(job: Job[Item, File], growing: Unfinished, names: Sequence[str], progress: ByteProgress) -> None:
    """File by file. While one is written the one before it goes to the disk: so not more than two wait for it, and what is taken up
    after a power cut is what was finished."""
    settling: Future[None] | None = None
    with ThreadPoolExecutor(1) as pool:
        for name in names:
            _write(job, growing, name, progress)
            if settling is not None:
                settling.result()
            if name != names[-1] and not job.options.durable:
                settling = pool.submit(growing.settle, name)


def _write(job: Job[Item, File], growing: Unfinished, name: str, progress: ByteProgress) -> None:
    """One file."""
    mapped = 0
    with job.open(growing.files, name) as file:
        for item in job.files[name]:
            job.write(file, item)
            size = job.bytes(item)
            progress.add(size)
            mapped += size
            if mapped > FORGET_BYTES:
                job.origin.reader.forget()
                mapped = 0
        file.end()
    growing.finished(name, durable=job.options.durable, **job.record(file))
