"""The engines of a rank's roles, all on the layout of its ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.bridge.head_io import critic_head, reward_head
from megarl.config import Config
from megarl.config.schema import ParallelConfig
from megarl.megatron.engine import EngineSettings, MegatronEngine
from megarl.megatron.parallel import Place
from megarl.megatron.valued import ValueEngine
from megarl.roles.hosted import Hosted
from megarl.roles.models import Models, updates


def build(cfg: Config, models: Models, place: Place, layout: ParallelConfig) -> Hosted:
    """Every role that has a model, each on the layout of these ranks."""
    stages = tuple(layout.stage_layers) if layout.stage_layers else None
    settings = replace(EngineSettings.of(cfg), sequence=layout.sequence, stage_layers=stages)
    steps = updates(cfg)
    engines: dict[str, Any] = {}
    offload = {"actor": cfg.actor.offload, "reference": cfg.reference.offload}
    if models.actor is not None:
        engines["actor"] = MegatronEngine(
            Path(models.actor), place, settings, optimizer=cfg.actor.optimizer, total_updates=steps["actor"]
        )
    if models.reference is not None:
        engines["reference"] = MegatronEngine(Path(models.reference), place, settings)
        if models.reference == models.actor and cfg.actor.offload != "all":
            share_frozen(engines["actor"], engines["reference"])
    if models.critic is not None and (critic := cfg.critic) is not None:
        folder = Path(models.critic)
        engines["critic"] = ValueEngine(
            folder,
            place,
            replace(settings, micro_batch_tokens=critic.micro_batch_tokens or settings.micro_batch_tokens),
            critic_head(folder, std=critic.head_std, seed=cfg.run.seed),
            optimizer=critic.optimizer,
            total_updates=steps["critic"],
        )
        offload["critic"] = critic.offload
    if models.reward_model is not None and (reward := cfg.reward_model) is not None:
        folder = Path(models.reward_model)
        size = reward.micro_batch_tokens or settings.micro_batch_tokens
        own = replace(settings, micro_batch_tokens=size)
        engines["reward_model"] = ValueEngine(folder, place, own, reward_head(folder))
        offload["reward_model"] = reward.offload
    return Hosted(engines, offload)


def share_frozen(actor: MegatronEngine, reference: MegatronEngine) -> int:
    """Give the reference the actor's own storage of what the actor never changes; how many bytes that spares.

    Only of frozen parameters can the two be one: what the actor learns it overwrites, and the optimizer's float32 master copies
    follow it, so that of its start nothing remains.
    """
    frozen = {parameter.name: tensor for parameter, tensor in actor.parameters() if not tensor.requires_grad}
    spared = 0
    for parameter, tensor in reference.parameters():
        if (kept := frozen.get(parameter.name)) is not None and kept.shape == tensor.shape:
            tensor.data = kept.data
            spared += kept.numel() * kept.element_size()
    return spared
