"""Real models on real ranks that read and write torch_dist checkpoints."""

from __future__ import annotations

import importlib
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.megatron.harness import Layout, joined


@dataclass(frozen=True)
class Job:
    """A model of the Hugging Face folder `hf` on a layout reads `checkpoint`, and is saved to `ours` and, by Megatron's own
    writer, to `theirs`."""

    layout: Layout
    hf: str
    checkpoint: str
    ours: str
    port: int
    theirs: str | None = None
    dtype: str = "float32"


def run_jobs(rank: int, world: int, port: int, jobs: list[Job]) -> list[list[str]]:
    """Of each job: the parameters that were not read as they are in the Hugging Face folder."""
    return [_run(rank, world, job) for job in jobs]


def _run(rank: int, world: int, job: Job) -> list[str]:
    from megarl.bridge.head_io import stored_head
    from megarl.bridge.model_map import ModelMap
    from megarl.megatron import dist_checkpoint, model

    with joined(rank, world, job.layout, job.port) as place:
        map_ = ModelMap.from_hf(job.hf, stored_head(job.hf))
        settings = {"dtype": job.dtype, "sequence": job.layout.sequence, "stage_layers": job.layout.stage_layers}
        chunks = model.build(map_, place, model.transformer_config(map_, place, **settings))
        model.load_hf(chunks, map_, Path(job.hf), place)
        want = {parameter.name: tensor.detach().clone() for parameter, tensor in model.parameters_of(chunks, map_)}

        dist_checkpointing = importlib.import_module("megatron.core.dist_checkpointing")  # not before megarl.megatron

        def load_by_megatron() -> None:
            state = {name: model.unwrap(chunk).sharded_state_dict() for name, chunk in named(chunks)}
            loaded = dist_checkpointing.load(state, job.checkpoint)
            for name, chunk in named(chunks):
                model.unwrap(chunk).load_state_dict(loaded[name])

        faults: list[str] = []
        readers: dict[str, Callable[[], Any]] = {
            "ours": lambda: dist_checkpoint.load(Path(job.checkpoint), chunks),
            "Megatron's": load_by_megatron,
        }
        for who, read in readers.items():
            for _, tensor in model.parameters_of(chunks, map_):
                tensor.data.fill_(float("nan"))
            read()
            faults += [
                f"{parameter.name} by {who}"
                for parameter, tensor in model.parameters_of(chunks, map_)
                if not torch.equal(tensor.data, want[parameter.name])
            ]
        dist_checkpoint.save(Path(job.ours), chunks, common={"step": 7, "shares": [0.5, 0.25]})
        if job.theirs is not None:
            if rank == 0:
                Path(job.theirs).mkdir()
            torch.distributed.barrier()
            state = {name: model.unwrap(chunk).sharded_state_dict() for name, chunk in named(chunks)}
            with _may_fork():
                dist_checkpointing.save(state, job.theirs)
        return faults


def named(chunks: list[Any]) -> list[tuple[str, Any]]:
    """As Megatron-LM names the parts of a model."""
    return [("model" if len(chunks) == 1 else f"model{number}", chunk) for number, chunk in enumerate(chunks)]


@contextmanager
def _may_fork() -> Iterator[None]:
    """Megatron's writer is processes of its own, which a process of the harness may not have."""
    settings = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    kept = settings.pop("daemon", None)
    try:
        yield
    finally:
        settings["daemon"] = kept
