"""A rank of a world that is not there: Megatron's model, buffers and optimizer, built under a fake process group of the whole world
(torch's `fake` backend) out of tensors that have shapes and no memory (torch's `meta` device)."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch.testing._internal.distributed.fake_pg import FakeStore

from megarl.bridge.model_map import ModelMap
from megarl.config.schema import OptimizerConfig, ParallelConfig
from megarl.cpu.megatron_hook import Cuda
from megarl.megatron import model as stage
from megarl.megatron import parallel
from megarl.megatron.engine import EngineSettings
from megarl.megatron.offload import Memory
from megarl.megatron.optimizer import Optimizer, learning
from megarl.megatron.precision import PrecisionSettings


class Built(NamedTuple):
    """What a rank holds, in bytes, and where it stands."""

    place: dict[str, int]
    parameters: int
    gradients: int
    optimizer: int
    seconds: float


def build(
    model: ModelMap,
    layout: ParallelConfig,
    rank: int,
    settings: EngineSettings,
    optimizer: OptimizerConfig | None,
    *,
    steps: bool,
) -> Built:
    """`optimizer` None: of a role that does not learn. `steps`: AdamW counts steps parameter by parameter, as torch's does."""
    begun = time.perf_counter()
    with _world(layout, rank) as place, _without_memory():
        precision = settings.precision or PrecisionSettings(settings.dtype)
        config = stage.transformer_config(
            model,
            place,
            dtype=settings.dtype,
            sequence=settings.sequence,
            recompute=settings.recompute,
            stage_layers=settings.stage_layers,
            precision=precision,
        )
        chunks: Any = stage.build(model, place, config)
        made: Optimizer | None = None
        if optimizer is not None:
            chunks, made = learning(
                chunks,
                list(stage.parameters_of(chunks, model)),
                model,
                config,
                optimizer,
                dtype=settings.dtype,
                ranks=place.data_size * place.context_size,
                total_updates=1,
                fp8_params=precision.fp8_params,
            )
            _begin(made, steps)
        held = Memory(chunks, made, even_on_cpu=True).held()
    return Built(dataclasses.asdict(place), **held, seconds=time.perf_counter() - begun)


@contextmanager
def _world(layout: ParallelConfig, rank: int) -> Iterator[parallel.Place]:
    """One rank in a world of them, of whom nobody answers."""
    group = dist.new_group

    def fake(*arguments: Any, backend: Any = None, **options: Any) -> Any:
        return group(*arguments, **options)  # also of those that Megatron wants of gloo

    dist.init_process_group("fake", rank=rank, world_size=layout.ranks, store=FakeStore())
    try:
        with _instead(dist, "new_group", fake):
            place = parallel.grid(
                rank,
                layout.ranks,
                tensor=layout.tensor,
                pipeline=layout.pipeline,
                context=layout.context,
                expert=layout.expert,
                expert_tensor=layout.expert_tensor,
                virtual=layout.virtual,
            )
        yield place
    finally:
        mpu.destroy_model_parallel()
        dist.destroy_process_group()


@contextmanager
def _without_memory() -> Iterator[None]:
    """Whatever is made is made on the meta device, also what Megatron names a device for, and what it would send goes nowhere."""
    meta, cuda = torch.device("meta"), torch.cuda.is_available()
    kind = torch.Tensor.type  # Megatron asks for it by name, and knows the names of two devices

    def named(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        answer = kind(tensor, *arguments, **options)
        real = "torch.cuda." if cuda else "torch."
        return answer.replace("torch.meta.", real) if isinstance(answer, str) else answer

    with ExitStack() as stack:
        stack.enter_context(meta)
        stack.enter_context(parallel.building_on(meta))
        stack.enter_context(_instead(torch.Tensor, "type", named))
        for name in ("cpu", "cuda"):
            stack.enter_context(_instead(torch.Tensor, name, lambda tensor, *_, **__: tensor))
        if cuda:
            stack.enter_context(_instead(torch.cuda, "current_device", lambda: meta))
        else:
            stack.enter_context(_instead(Cuda, "current_device", lambda _: meta))
        stack.enter_context(_instead(dist, "all_reduce", lambda *_, **__: None))
        yield


@contextmanager
def _instead(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Another value of an attribute for the block."""
    own = name in vars(holder)
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        if own:
            setattr(holder, name, before)
        else:
            delattr(holder, name)


def _begin(optimizer: Optimizer, steps: bool) -> None:
    """The states that the first update makes."""
    for part in getattr(optimizer.inner, "chained_optimizers", [optimizer.inner]):
        adam = part.optimizer
        for group in adam.param_groups if adam is not None else ():
            for parameter in group["params"]:
                names = ("exp_avg", "exp_avg_sq")
                adam.state[parameter].update({name: torch.zeros_like(parameter) for name in names})
                if steps:
                    adam.state[parameter]["step"] = torch.zeros(())
