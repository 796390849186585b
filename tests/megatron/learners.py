"""An engine that learns, one training step of it on made-up samples, and what it holds afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megarl.algorithms import denominators
from megarl.batch import Level
from tests.megatron.harness import random_batch
from tests.megatron.layouts import OBJECTIVE


def learner(folder: str, place: Any, *, recompute: str = "none", dtype: str = "float32", **settings: Any) -> Any:
    """`settings`: those of the optimizer."""
    from megarl.megatron.engine import EngineSettings, MegatronEngine
    from megarl.megatron.optimizer_settings import OptimizerSettings

    return MegatronEngine(
        Path(folder),
        place,
        EngineSettings(dtype, recompute=recompute, micro_batch_tokens=40),
        optimizer=OptimizerSettings(**settings),
        total_updates=8,
    )


def train(engine: Any, seed: int = 2, *, groups: int = 4) -> dict[str, float]:
    batch = random_batch(engine.map.dims.vocab, groups=groups)
    size = int(batch.response_lengths.sum())
    g = torch.Generator().manual_seed(seed)
    batch = batch.set("advantages", torch.randn(size, generator=g), Level.RESPONSE)
    batch = batch.set("old_log_probs", torch.randn(size, generator=g) - 4.0, Level.RESPONSE)
    return engine.train(batch, OBJECTIVE, denominators(batch.padded("loss_mask")), temperature=1.0)


def weights(engine: Any) -> dict[str, torch.Tensor]:
    return {p.name: t.detach().float().clone() for p, t in engine.parameters()}


def gradients(engine: Any) -> dict[str, torch.Tensor]:
    return {p.name: t.main_grad.clone() for p, t in engine.parameters() if t.requires_grad}
