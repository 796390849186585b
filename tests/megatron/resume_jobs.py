"""A few optimizer steps on real ranks, from the start or from a checkpoint, to a checkpoint."""

from __future__ import annotations

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


def run_jobs(rank: int, world: int, port: int, jobs: list[Job]) -> list[Any]:
    """Of each job: what the checkpoint that it started from has in common."""
    return [_run(rank, world, job) for job in jobs]


def _run(rank: int, world: int, job: Job) -> Any:
    from megarl.config import schema
    from megarl.megatron import dist_checkpoint
    from megarl.megatron.engine import MegatronEngine

    with joined(rank, world, job.layout, job.port) as place:
        optimizer = schema.OptimizerConfig(**vars(OPTIMIZER) | {"distributed": job.layout.distributed})
        settings = engine_settings(job.layout, job.dtype)
        engine = MegatronEngine(Path(job.folder), place, settings, optimizer=optimizer, total_updates=STEPS)
        cut_otherwise(engine, job.layout)
        common = None
        if job.start is not None:
            common = dist_checkpoint.load(Path(job.start), engine.chunks, optimizer=engine.optimizer)
        batch = random_batch(engine.map.dims.vocab)
        generator = torch.Generator().manual_seed(11)
        log_probs = -5.0 + torch.randn(int(batch.response_lengths.sum()), generator=generator)
        for part in mini_batches(with_rollouts(batch, log_probs))[job.first : job.last]:
            mine = share(part, job.layout, place)
            engine.train(part.take(mine), OBJECTIVE, denominators(part.padded("loss_mask")), temperature=1.0)
        dist_checkpoint.save(
            Path(job.end), engine.chunks, optimizer=engine.optimizer, common={"step": job.last, "name": "a run"}
        )
        return common
