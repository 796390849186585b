"""A few optimizer steps on real ranks, from the start or from a checkpoint, to a checkpoint."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.algorithms import denominators
from tests.megatron.harness import Layout, cut_otherwise, engine_settings, joined, random_batch, share
from tests.megatron.layouts import OBJECTIVE, with_rollouts
from tests.megatron.ten_steps import OPTIMIZER, STEPS, mini_batches


@dataclass(frozen=True)
class Job:
    """Steps `first` to `last` (exclusive) of ten."""

    layout: Layout
    folder: str
    port: int
    first: int
    last: int
    start: str | None
    end: str
    dtype: str = "float32"
    frozen: tuple[str, ...] = ()
    meanwhile: bool = False  # one more step is made while the checkpoint is being written


def run_jobs(rank: int, world: int, port: int, jobs: list[Job]) -> list[Any]:
    """Of each job: what the checkpoint that it started from has in common."""
    return [_run(rank, world, job) for job in jobs]


def _run(rank: int, world: int, job: Job) -> Any:
    from megarl.config import schema
    from megarl.megatron import dist_checkpoint
    from megarl.megatron.engine import MegatronEngine

    with joined(rank, world, job.layout, job.port) as place:
        optimizer = schema.OptimizerConfig(
            **vars(OPTIMIZER) | {"distributed": job.layout.distributed, "frozen": list(job.frozen)}
        )
        settings = engine_settings(job.layout, job.dtype)
        engine = MegatronEngine(Path(job.folder), place, settings, optimizer=optimizer, total_updates=STEPS)
        cut_otherwise(engine, job.layout)
        common = None
        if job.start is not None:
            common = dist_checkpoint.load(Path(job.start), engine.chunks, optimizer=engine.optimizer)
        batch = random_batch(engine.map.dims.vocab)
        generator = torch.Generator().manual_seed(11)
        log_probs = -5.0 + torch.randn(int(batch.response_lengths.sum()), generator=generator)
        parts = mini_batches(with_rollouts(batch, log_probs))

        def train(first: int, last: int) -> None:
            for part in parts[first:last]:
                mine = share(part, job.layout, place)
                engine.train(part.take(mine), OBJECTIVE, denominators(part.padded("loss_mask")), temperature=1.0)

        train(job.first, job.last)
        state = {"optimizer": engine.optimizer, "common": {"step": job.last, "name": "a run"}}
        if job.meanwhile:
            dist_checkpoint._SMALL = 0  # nothing is copied before it must be
            copies = dist_checkpoint.Copies()
            engine.memory.before_change = copies.settle
            writing = dist_checkpoint.begin(Path(job.end), engine.chunks, **state, copies=copies)
            train(job.last, job.last + 1)
            writing.finish()
        else:
            dist_checkpoint.save(Path(job.end), engine.chunks, **state)
        return common


def complaints(rank: int, world: int, port: int, folder: str, other: str, scratch: str, meeting: int) -> dict[str, str]:
    """What is said of checkpoints that cannot be loaded, and where one cannot be saved."""
    from megarl.config import schema
    from megarl.errors import RunError, UserError
    from megarl.megatron import dist_checkpoint
    from megarl.megatron.engine import MegatronEngine

    said: dict[str, str] = {}

    def told(what: str, act: Callable[[], Any]) -> None:
        try:
            act()
            said[what] = "nothing"
        except (UserError, RunError) as error:
            said[what] = f"{type(error).__name__}: {error}"

    with joined(rank, world, Layout(), meeting) as place:
        settings = engine_settings(Layout())
        engine = MegatronEngine(Path(folder), place, settings, optimizer=schema.OptimizerConfig(), total_updates=STEPS)
        another = MegatronEngine(Path(other), place, settings)
        saved = Path(scratch) / "saved"
        dist_checkpoint.save(saved, engine.chunks)
        told("saved twice", lambda: dist_checkpoint.save(saved, engine.chunks))
        told("read", lambda: dist_checkpoint.load(saved, engine.chunks))
        told("of another model", lambda: dist_checkpoint.load(saved, another.chunks))
        told("without an optimizer", lambda: dist_checkpoint.load(saved, engine.chunks, optimizer=engine.optimizer))
        told("nowhere", lambda: dist_checkpoint.load(saved / "nowhere", engine.chunks))
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        kept = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
        told("a full disk", lambda: dist_checkpoint.save(Path(scratch) / "full", engine.chunks))
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, kept)
        file = saved / "__0_0.distcp"
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        told("an altered file", lambda: dist_checkpoint.load(saved, engine.chunks))
        file.write_bytes(content[:-50])
        (saved / "checksums.json").unlink()
        told("a truncated file", lambda: dist_checkpoint.load(saved, engine.chunks))
    return said
