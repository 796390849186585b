"""The trained model as a Hugging Face folder, straight from the ranks' shards."""

from __future__ import annotations

from pathlib import Path

import torch

from megarl.bridge.hf_io import save_hf
from megarl.config import Config
from megarl.controller.preflight import Prepared
from megarl.controller.sync import WeightSync
from megarl.reshard.colocated import Colocated


def export_hf(cfg: Config, prepared: Prepared, sync: WeightSync, target: Path) -> Path:
    """Write weights, configuration, tokenizer and chat template to `target`; tensors stream through one shared bucket."""
    dtype = cfg.export.dtype or cfg.model.dtype
    transfer = Colocated(prepared.model, dtype=dtype, bucket_bytes=cfg.reshard.bucket_mb << 20, verify="off")
    try:
        save_hf(
            target,
            transfer.tensors(sync.actor),
            prepared.folder,
            shapes=prepared.model.hf_shapes,
            dtype=getattr(torch, dtype),
            float32=prepared.model.float32,
        )
    finally:
        transfer.close()
    return target
