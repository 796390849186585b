"""Process groups of a rank: torch.distributed and Megatron's tensor / pipeline / data grid, over NCCL or gloo."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed


@dataclass(frozen=True)
class Place:
    """Where a rank stands in the grid. `primary` is the one rank of its data-parallel group that answers for it.

    Layers that are not experts: tensor x context x data x pipeline. Experts cut the same ranks of a pipeline stage another way:
    expert_tensor x expert x expert_data.
    """

    rank: int
    world: int
    tensor: int
    tensor_size: int
    pipeline: int
    pipeline_size: int
    data: int
    data_size: int
    context: int = 0
    context_size: int = 1
    expert: int = 0
    expert_size: int = 1
    expert_tensor: int = 0
    expert_tensor_size: int = 1
    expert_data: int = 0
    virtual_size: int = 1  # model chunks of a rank (interleaved pipeline)

    @property
    def primary(self) -> bool:
        return self.tensor == 0 and self.context == 0 and self.pipeline == self.pipeline_size - 1

    @property
    def last_stage(self) -> bool:
        return self.pipeline == self.pipeline_size - 1


_instead: torch.device | None = None


def device() -> torch.device:
    """The device this rank computes on."""
    if _instead is not None:
        return _instead
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@contextmanager
def building_on(other: torch.device) -> Iterator[None]:
    """Another `device()` for the block: meta, where nothing takes memory (dry_run.py)."""
    global _instead
    _instead = other
    try:
        yield
    finally:
        _instead = None


def start(
    rank: int,
    world: int,
    address: str,
    port: int,
    *,
    tensor: int,
    pipeline: int,
    seed: int,
    context: int = 1,
    expert: int = 1,
    expert_tensor: int | None = None,
    virtual: int = 1,
    timeout: float = 600.0,
) -> Place:
    """Join the job: one process group for the world, Megatron's grid over it, and the random states of the rank.

    `expert_tensor` None: as `tensor`. `timeout` (seconds) bounds every collective, so that a dead peer is an error and not a hang.
    """
    if torch.cuda.is_available():
        torch.cuda.set_device(0)  # Ray shows each worker its own device as number 0
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        init_method=f"tcp://{address}:{port}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
    )
    place = grid(
        rank,
        world,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        expert=expert,
        expert_tensor=expert_tensor,
        virtual=virtual,
        timeout=timeout,
    )
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    return place


def grid(
    rank: int,
    world: int,
    *,
    tensor: int,
    pipeline: int,
    context: int = 1,
    expert: int = 1,
    expert_tensor: int | None = None,
    virtual: int = 1,
    timeout: float = 600.0,
) -> Place:
    """Megatron's grid over the ranks of torch.distributed, which has been started."""
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        context_parallel_size=context,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=expert_tensor,
        distributed_timeout_minutes=max(1, int(timeout // 60)),
        create_gloo_process_groups=True,
    )
    return Place(
        rank=rank,
        world=world,
        tensor=mpu.get_tensor_model_parallel_rank(),
        tensor_size=tensor,
        pipeline=mpu.get_pipeline_model_parallel_rank(),
        pipeline_size=pipeline,
        data=mpu.get_data_parallel_rank(),
        data_size=mpu.get_data_parallel_world_size(),
        context=mpu.get_context_parallel_rank(),
        context_size=context,
        expert=mpu.get_expert_model_parallel_rank(),
        expert_size=expert,
        expert_tensor=mpu.get_expert_tensor_parallel_rank(),
        expert_tensor_size=mpu.get_expert_tensor_parallel_world_size(),
        expert_data=mpu.get_expert_data_parallel_rank(),
        virtual_size=virtual,
    )


def stop() -> None:
    """Leave the job."""
    mpu.destroy_model_parallel()
    dist.destroy_process_group()
