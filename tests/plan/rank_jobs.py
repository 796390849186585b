"""What real ranks hold after a training step and how much more they take in one, beside what is planned."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from megarl import models
from megarl.algorithms import Objective, denominators
from megarl.bridge.activations import Estimate, Layout, MicroBatch
from megarl.bridge.grid import Seat, seat
from megarl.bridge.heads import Head
from megarl.bridge.model_map import ModelMap
from megarl.bridge.states import Learning, States
from megarl.config.schema import OptimizerConfig, ParallelConfig
from tests.megatron.harness import joined
from tests.megatron.memory_jobs import Case as Samples
from tests.megatron.memory_jobs import Peak, equal_samples

KINDS = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True)
class Case:
    model: str
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    dtype: str = "bfloat16"
    distributed: bool = True
    frozen: tuple[str, ...] = ()
    head: Head | None = None
    recompute: str = "none"
    samples: Samples | None = None  # None: what is held is all that is measured


@dataclass(frozen=True)
class Found:
    """Bytes on a rank."""

    case: Case
    rank: int
    held: dict[str, int]
    planned: dict[str, int]
    peak: int = 0  # beside what is held
    activations: int = 0  # planned


def found(rank: int, world: int, port: int, cases: list[Case]) -> list[Found]:
    return [_found(rank, port + number, case) for number, case in enumerate(cases)]


def _found(rank: int, port: int, case: Case) -> Found:
    from megarl.megatron.engine import EngineSettings, MegatronEngine
    from megarl.megatron.offload import Memory

    cut, folder = case.parallel, models.resolve(f"tiny-{case.model}")
    with joined(rank, cut.ranks, cut, port) as place:
        samples = case.samples or Samples("", prompt=5, response=7, samples=8, together=2)
        settings = EngineSettings(
            case.dtype,
            cut.sequence,
            case.recompute,
            micro_batch_tokens=samples.together * (samples.prompt + samples.response),
            share_prompts=False,
            stage_layers=tuple(cut.stage_layers) if cut.stage_layers else None,
        )
        optimizer = OptimizerConfig(distributed=case.distributed, frozen=list(case.frozen))
        states, where = _states(case, folder, rank, place)
        planned = {kind: getattr(states(where), kind) for kind in KINDS}
        if case.head is not None:
            engine: Any = _critic(folder, place, settings, case.head, optimizer)
        else:
            engine = MegatronEngine(folder, place, settings, optimizer=optimizer)
        order = [p.name for p, tensor in engine.parameters() if isinstance(tensor, torch.nn.Parameter)]
        assert order == [p.name for chunk in states.parameters(where) for p in chunk if not p.float32]
        _train(engine, samples, case.head)
        memory = Memory(engine.chunks, engine.optimizer, even_on_cpu=True)
        held, peak, activations = memory.held(), 0, 0
        if case.samples is not None:
            known = [tensor for kind in KINDS for tensor in memory._tensors(kind)]
            with Peak(*known) as counted:
                _train(engine, samples, case.head)
            peak = counted.peak
            activations = _activations(case, engine.map, place)
    return Found(case, rank, held, planned, peak, activations)


def _critic(folder: Any, place: Any, settings: Any, head: Head, optimizer: OptimizerConfig) -> Any:
    from megarl.megatron.valued import ValueEngine

    return ValueEngine(folder, place, settings, head, optimizer=optimizer)


def _train(engine: Any, samples: Samples, head: Head | None) -> None:
    if head is not None:
        engine.optimizer.update()  # of gradients that are all zero: the states are made all the same
        return
    batch = equal_samples(samples)
    totals = denominators(batch.padded("loss_mask"))
    engine.train(batch.shard(engine.place.data, engine.place.data_size), Objective(), totals)


def _states(case: Case, folder: Any, rank: int, place: Any) -> tuple[States, Seat]:
    from megarl.megatron import parameter_groups

    model = ModelMap.from_hf(folder, case.head)
    where = seat(rank, case.parallel)
    assert {n: v for n, v in vars(where).items() if vars(place).get(n) != v} == {}, (where, place)
    frozen = frozenset(parameter_groups.frozen(model, case.frozen))
    states = States(
        model,
        Layout.of(case.parallel),
        dtype=case.dtype,
        learning=Learning(distributed=case.distributed, frozen=frozen),
    )
    return states, where


def _activations(case: Case, model: ModelMap, place: Any) -> int:
    samples = case.samples
    assert samples is not None
    estimate = Estimate(model, Layout.of(case.parallel), dtype=case.dtype, recompute=case.recompute)
    length, together = samples.prompt + samples.response, samples.together
    micro = MicroBatch.of([length - 1] * together, samples.response * together)
    count = samples.samples // (together * place.data_size)
    return estimate(micro, micro_batches=count, rank=place.pipeline).total
