"""The trained models as Hugging Face folders, straight from the ranks' shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import ray
import torch

from megarl.bridge.head_io import critic_head, save_head_hf
from megarl.bridge.hf_io import left_out, save_hf
from megarl.bridge.layout import Copy
from megarl.bridge.model_map import ModelMap
from megarl.config import Config
from megarl.controller.preflight import Prepared
from megarl.controller.sync import WeightSync
from megarl.controller.workers import WorkerGroup
from megarl.reshard.bucket import BucketSpec
from megarl.reshard.colocated import Colocated
from megarl.reshard.gathered import gathered
from megarl.reshard.transfer import plan


def export_hf(cfg: Config, prepared: Prepared, sync: WeightSync, target: Path) -> Path:
    """Write weights, configuration, tokenizer and chat template to `target`; tensors stream by, a bucket at a time. Layers for
    multi-token prediction, which training leaves out, are carried over as they were."""
    whole, rest = left_out(prepared.folder, prepared.model)
    dtype = cfg.export.dtype or cfg.model.dtype
    with _tensors(cfg, prepared.model, sync.actor, "actor") as tensors:
        save_hf(
            target,
            chain(tensors, rest),
            prepared.folder,
            shapes=whole.hf_shapes,
            dtype=getattr(torch, dtype),
            float32=whole.float32,
        )
    return target


def export_critic(cfg: Config, prepared: Prepared, ranks: WorkerGroup, target: Path) -> Path:
    """The critic: a classifier with one label, as `critic.path` and `transformers` take it."""
    assert prepared.models.critic is not None
    source = Path(prepared.models.critic)
    head = critic_head(source)
    dtype = cfg.export.dtype or cfg.model.dtype
    with _tensors(cfg, ModelMap.from_hf(source, head), ranks, "critic") as tensors:
        return save_head_hf(target, tensors, source, head, dtype=getattr(torch, dtype))


@contextmanager
def _tensors(
    cfg: Config, model: ModelMap, ranks: WorkerGroup, role: str
) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
    """Every tensor of a role under the checkpoint's name, in its order, valid until the next is asked for: through a bucket in shared
    memory on one machine, else as messages of Ray's."""
    dtype, size = cfg.export.dtype or cfg.model.dtype, cfg.reshard.bucket_mb << 20
    if sum(node["Alive"] for node in ray.nodes()) > 1:
        yield gathered(plan(model, getattr(torch, dtype), size), _Shards(ranks, role))
        return
    transfer = Colocated(model, dtype=dtype, bucket_bytes=size, verify="off")
    try:
        yield transfer.tensors(_Shards(ranks, role))
    finally:
        transfer.close()


@dataclass
class _Shards:
    """A role's shards on all ranks."""

    ranks: WorkerGroup
    role: str

    def write(self, bucket: BucketSpec) -> list[dict[str, int]]:
        return self.ranks.write(bucket, self.role)

    def pieces(self, bucket: BucketSpec) -> list[list[tuple[Copy, torch.Tensor]]]:
        return self.ranks.pieces(bucket, self.role)
