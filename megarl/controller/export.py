"""The trained models as Hugging Face folders, straight from the ranks' shards."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch

from megarl.bridge.head_io import critic_head, save_head_hf
from megarl.bridge.hf_io import left_out, save_hf
from megarl.bridge.model_map import ModelMap
from megarl.config import Config
from megarl.controller.preflight import Prepared
from megarl.controller.sync import WeightSync
from megarl.controller.workers import WorkerGroup
from megarl.reshard.bucket import BucketSpec
from megarl.reshard.colocated import Colocated


def export_hf(cfg: Config, prepared: Prepared, sync: WeightSync, target: Path) -> Path:
    """Write weights, configuration, tokenizer and chat template to `target`; tensors stream through one shared bucket. Layers for
    multi-token prediction, which training leaves out, are carried over as they were."""
    whole, rest = left_out(prepared.folder, prepared.model)
    dtype = cfg.export.dtype or cfg.model.dtype
    transfer = Colocated(prepared.model, dtype=dtype, bucket_bytes=cfg.reshard.bucket_mb << 20, verify="off")
    try:
        save_hf(
            target,
            chain(transfer.tensors(sync.actor), rest),
            prepared.folder,
            shapes=whole.hf_shapes,
            dtype=getattr(torch, dtype),
            float32=whole.float32,
        )
    finally:
        transfer.close()
    return target


def export_critic(cfg: Config, prepared: Prepared, ranks: WorkerGroup, target: Path) -> Path:
    """The critic: a classifier with one label, as `critic.path` and `transformers` take it."""
    assert prepared.models.critic is not None
    source = Path(prepared.models.critic)
    head = critic_head(source)
    dtype = cfg.export.dtype or cfg.model.dtype
    model = ModelMap.from_hf(source, head)
    transfer = Colocated(model, dtype=dtype, bucket_bytes=cfg.reshard.bucket_mb << 20, verify="off")
    try:
        tensors = transfer.tensors(_Critic(ranks))
        return save_head_hf(target, tensors, source, head, dtype=getattr(torch, dtype))
    finally:
        transfer.close()


@dataclass
class _Critic:
    """The critic's shards on all ranks."""

    ranks: WorkerGroup

    def write(self, bucket: BucketSpec) -> list[dict[str, int]]:
        return self.ranks.write(bucket, "critic")
