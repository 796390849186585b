"""What real ranks send in a step, by torch's own operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megarl import models
from megarl.algorithms import Objective, denominators
from megarl.config import Config
from tests.megatron.harness import joined
from tests.megatron.memory_jobs import Case as Samples
from tests.megatron.memory_jobs import equal_samples


class Sent(TorchDispatchMode):
    """Bytes that this rank sends in collectives that go round in a ring, and to single ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.bytes += self._of(func.__name__.split(".")[0], args)
        return func(*args, **(kwargs or {}))

    def _of(self, name: str, args: Any) -> float:
        if name in ("send", "recv_", "recv_any_source_"):
            return float(sum(t.nbytes for t in args[0])) if name == "send" else 0.0
        ranks = next(dist.ProcessGroup.unbox(a).size() for a in args if isinstance(a, torch.ScriptObject))
        part = (ranks - 1) / ranks
        if name in ("allreduce_", "allreduce_coalesced_"):
            return 2 * part * sum(t.nbytes for t in args[0])
        if name == "allgather_":  # (outputs of each input, inputs, group)
            return (ranks - 1) * sum(t.nbytes for t in args[1])
        whole = {"_allgather_base_": 0, "_reduce_scatter_base_": 1, "alltoall_base_": 1}
        lists = {"allgather_into_tensor_coalesced_": 0, "reduce_scatter_tensor_coalesced_": 1}
        if name in lists:
            return part * sum(t.nbytes for t in args[lists[name]])
        return part * args[whole[name]].nbytes


@dataclass(frozen=True)
class Case:
    config: Config
    samples: Samples


def sent(rank: int, world: int, port: int, cases: list[Case]) -> list[float]:
    return [_sent(rank, port + number, case) for number, case in enumerate(cases)]


def _sent(rank: int, port: int, case: Case) -> float:
    from megarl.megatron.engine import EngineSettings, MegatronEngine

    cfg, cut = case.config, case.config.actor.parallel
    with joined(rank, cut.ranks, cut, port) as place:
        engine = MegatronEngine(
            models.resolve(cfg.model.path), place, EngineSettings.of(cfg), optimizer=cfg.actor.optimizer
        )
        batch = equal_samples(case.samples)
        own, totals = batch.shard(place.data, place.data_size), denominators(batch.padded("loss_mask"))
        with Sent() as counted:
            engine.log_probs(own, temperature=1.0)
            engine.train(own, Objective(), totals)
    return counted.bytes
