"""Weights from the actor into the engines, and the proof that they arrived."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ray
import torch

from megarl.batch import Batch, Sample
from megarl.bridge.model_map import ModelMap
from megarl.config import Config
from megarl.config.paths import user_path
from megarl.controller.engines import EngineGroup
from megarl.controller.workers import WorkerGroup
from megarl.errors import RunError
from megarl.reshard.colocated import Colocated
from megarl.reshard.disk import Disk
from megarl.reshard.distributed import Distributed
from megarl.reshard.transfer import Receivers, Transfer

_TOLERANCE = {"float32": 1e-5, "bfloat16": 0.25}  # bfloat16: two different orders of rounding, no more is promised
_PROBE_TOKENS = 48


def transport(
    cfg: Config, model: ModelMap, source: Path, folder: Path, note: Callable[[str], None] = lambda _: None
) -> Transfer:
    """The way of the weights that a configuration names. `source`: the model's folder; `folder`: where weights go that travel by disk,
    unless it names another. `note` is told when weights take another way than they could."""
    r = cfg.reshard
    timeout, quantised = cfg.cluster.worker_timeout, cfg.rollout.quantization is not None
    options = {
        "dtype": cfg.rollout.dtype or cfg.model.dtype,
        "bucket_bytes": r.bucket_mb << 20,
        "verify": r.verify,
        "full_every": r.full_every,
        "quantised": quantised,
    }
    if r.transport == "disk":
        return Disk(model, **options, folder=user_path(r.folder) if r.folder else folder, source=source)
    if r.transport == "distributed":
        host = "127.0.0.1" if cfg.cluster.address is None else ray.util.get_node_ip_address()
        return Distributed(model, **options, timeout=timeout, host=host)
    if torch.cuda.is_available():
        return Colocated(model, **options, timeout=timeout, device="cuda", note=note)
    # Float8 SGLang may turn into another form after each update.
    return Colocated(model, **options, timeout=timeout, in_place=r.in_place and not quantised)


@dataclass
class WeightSync:
    """`push` returns when every engine has the actor's weights, proved by fingerprints and on request by log-probs."""

    actor: WorkerGroup
    engines: EngineGroup
    transfer: Transfer
    dtype: str  # the coarser one of the trainer's and the engines'
    probe: bool
    probe_tolerance: float | None
    vocabulary: int
    version: int = 0  # of the weights that the engines are given

    def push(self, version: int) -> dict[str, float]:
        """Metrics of the sync. Raises RunError where anything did not arrive. Afterwards the ranks rest.

        Engines that gave memory back have it again: for the weights before they come, for the cache when nothing else needs room.
        """
        self.version = version
        self.engines.resume("weights")
        metrics = self.transfer.push(self.actor, self.engines, version).metrics()
        if self.probe:
            self.engines.resume("cache")
            metrics |= self.probe_engines()
        metrics |= self.actor.rest()
        self.engines.resume("cache")
        return metrics

    def release(self) -> None:
        """The engines give memory back until the next `push`, as far as the configuration says."""
        self.engines.release()

    def renew(self, receivers: Receivers) -> None:
        """Give engines that were started anew the weights that all others have."""
        self.transfer.push(self.actor, receivers, self.version)

    def probe_engines(self) -> dict[str, float]:
        """Compare log-probs of one fixed random sequence, trainer against every engine."""
        ids = torch.randint(0, self.vocabulary, (_PROBE_TOKENS,), generator=torch.Generator().manual_seed(20)).tolist()
        sample = Sample(
            uid="probe",
            group="probe",
            prompt_ids=ids[:1],
            response_ids=ids[1:],
            loss_mask=[1] * (len(ids) - 1),
            rollout_log_probs=[0.0] * (len(ids) - 1),
            stop_reason="length",
            weight_version=0,
            reward=None,
            payload={},
        )
        # Every data-parallel rank needs a sample.
        batch = Batch.from_samples([sample] * self.actor.data_size)
        ours = self.actor.score(batch)["log_probs"][: len(ids) - 1]
        worst = 0.0
        for number, theirs in enumerate(self.engines.score([ids])):
            difference = float((ours - torch.tensor(theirs[0], dtype=torch.float32)).abs().max())
            worst = max(worst, difference)
            limit = self.probe_tolerance if self.probe_tolerance is not None else _TOLERANCE[self.dtype]
            if not difference <= limit:
                raise RunError(
                    f"weight sync: engine {number} answers the probe with log-probs up to {difference:.2e} away from the "
                    f"trainer's; at most {limit:.0e} is rounding"
                )
        return {"reshard/probe_abs_max": worst}
