"""From rewards to advantages, by the estimator that the configuration names."""

from __future__ import annotations

import torch

from megarl.algorithms import call, get_advantage
from megarl.batch import Batch, Level
from megarl.config.schema import AlgorithmConfig


class Estimator:
    """Adds `advantages` (RESPONSE) to a scored batch. A sample's reward counts at its last response token."""

    def __init__(self, config: AlgorithmConfig):
        self._advantage = get_advantage(config.advantage)
        self._options = {"normalize_std": config.normalize_std}

    def __call__(self, batch: Batch) -> Batch:
        offered = {
            "reward_BT": token_rewards(batch),
            "mask_BT": batch.padded("loss_mask"),
            "group_B": list(batch["group"]),
            **self._options,
        }
        advantages_BT = call(self._advantage, offered).advantages_BT
        return batch.set("advantages", batch.unpad(advantages_BT.float()), Level.RESPONSE)


def token_rewards(batch: Batch) -> torch.Tensor:
    """(B, T): each sample's reward at its last token that the loss counts, zero elsewhere."""
    mask_BT = batch.padded("loss_mask") > 0
    width = mask_BT.shape[1]
    last_B = (mask_BT * torch.arange(1, width + 1)).amax(dim=1) - 1
    reward_BT = torch.zeros(mask_BT.shape, dtype=torch.float32)
    counted = last_B >= 0
    reward_BT[counted, last_B[counted]] = torch.as_tensor(batch["reward"], dtype=torch.float32)[counted]
    return reward_BT
