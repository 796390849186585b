"""One rank of the trainer: a process that hosts the roles over the Megatron room. The controller makes it a Ray actor."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megarl.algorithms import Denominators, Objective
from megarl.batch import Batch
from megarl.config import Config
from megarl.reshard.bucket import BucketSpec
from megarl.roles.ports import unused_port


class Worker:
    """Methods are called on all ranks at the same time, with the same arguments but for the shard of the batch."""

    def __init__(self, config: Config, folder: str):
        self.config = config
        self.folder = Path(folder)

    def address(self) -> tuple[str, int]:
        """An address of this host and a free port on it, for the ranks to meet at."""
        alone = self.config.cluster.address is None
        return "127.0.0.1" if alone else socket.gethostbyname(socket.gethostname()), unused_port()

    def start(self, rank: int, world: int, address: str, port: int, total_updates: int) -> dict[str, Any]:
        """Join the job and build the roles; answers where the rank stands."""
        import torch

        from megarl.megatron import parallel
        from megarl.megatron.engine import EngineSettings, MegatronEngine
        from megarl.reshard.writer import ShardWriter

        actor = self.config.actor
        if actor.threads is not None:
            torch.set_num_threads(actor.threads)
        self.place = parallel.start(
            rank,
            world,
            address,
            port,
            tensor=actor.parallel.tensor,
            pipeline=actor.parallel.pipeline,
            seed=self.config.run.seed,
            timeout=self.config.cluster.worker_timeout,
        )
        settings = EngineSettings.of(self.config)
        self.actor = MegatronEngine(
            self.folder, self.place, settings, optimizer=actor.optimizer, total_updates=total_updates
        )
        self.reference = None
        if self.config.algorithm.reference:
            self.reference = MegatronEngine(self.folder, self.place, settings)
        self.objective = Objective.from_config(self.config.algorithm)
        self.writer = ShardWriter(self.actor.parameters(), self.place)
        return asdict(self.place) | {"primary": self.place.primary, "pid": os.getpid()}

    def log_probs(self, batch: Batch) -> Batch | None:
        """RESPONSE fields `old_log_probs` and `entropy` of the actor as it is now (at the sampling temperature)."""
        done = self.actor.log_probs(batch, temperature=self.config.rollout.temperature)
        return self._answer(done, {"log_probs": "old_log_probs", "entropy": "entropy"})

    def reference_log_probs(self, batch: Batch) -> Batch | None:
        """RESPONSE field `ref_log_probs`."""
        done = self.reference.log_probs(batch, temperature=self.config.rollout.temperature)
        return self._answer(done, {"log_probs": "ref_log_probs"})

    def update(self, batch: Batch, denominators: Denominators) -> dict[str, float]:
        """One optimizer step on this data-parallel rank's shard of a mini-batch."""
        return self.actor.train(batch, self.objective, denominators, temperature=self.config.rollout.temperature)

    def score(self, batch: Batch) -> Batch | None:
        """RESPONSE field `log_probs` at temperature 1, for probes."""
        return self._answer(self.actor.log_probs(batch, temperature=1.0), {"log_probs": "log_probs"})

    def write(self, bucket: BucketSpec) -> None:
        """Put this rank's slices of a bucket's tensors to their places in the shared bucket."""
        self.writer.write(bucket)

    def fingerprints(self, names: list[str], dtype: str) -> dict[str, int]:
        """This rank's share of each tensor's fingerprint; the shares of all ranks add up to the whole."""
        return self.writer.fingerprints(names, dtype)

    def _answer(self, done: Batch | None, names: dict[str, str]) -> Batch | None:
        """Only the primary rank of a data-parallel group sends an answer; the others hold the same one or none."""
        if done is None or not self.place.primary:
            return None
        answer = done.select([])
        for old, new in names.items():
            answer = answer.set(new, done[old], done.level(old))
        return answer
