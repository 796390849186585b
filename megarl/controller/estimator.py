"""From rewards to advantages, by the estimator that the configuration names."""

from __future__ import annotations

from typing import Any

import torch

from megarl.algorithms import Advantage, call, get_advantage
from megarl.batch import Batch, Level
from megarl.config.schema import AlgorithmConfig
from megarl.errors import RunError


class Estimator:
    """Adds `advantages` (RESPONSE) to a scored batch. A sample's reward counts at its last response token."""

    def __init__(self, config: AlgorithmConfig):
        self._name = config.advantage
        self._advantage = get_advantage(config.advantage)
        self._options = {"normalize_std": config.normalize_std}

    def __call__(self, batch: Batch) -> Batch:
        offered = {
            "reward_BT": token_rewards(batch),
            "mask_BT": batch.padded("loss_mask"),
            "group_B": list(batch["group"]),
            **self._options,
        }
        advantages_BT = self._checked(offered)
        return batch.set("advantages", batch.unpad(advantages_BT), Level.RESPONSE)

    def _checked(self, offered: dict[str, Any]) -> torch.Tensor:
        """The advantages, float32. RunError names the estimator, which may be the user's own, where it gives none."""
        try:
            result = call(self._advantage, offered)
        except (Exception, SystemExit) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise RunError(f"the advantage estimator {self._name!r} failed: {reason}") from error
        if not isinstance(result, Advantage):
            raise RunError(
                f"the advantage estimator {self._name!r} must return an Advantage, not {type(result).__name__}"
            )
        given, wanted = tuple(result.advantages_BT.shape), tuple(offered["mask_BT"].shape)
        if given != wanted:
            raise RunError(f"the advantage estimator {self._name!r} gave a shape of {given}, not {wanted}")
        advantages_BT = result.advantages_BT.float()
        if not bool(advantages_BT[offered["mask_BT"] > 0].isfinite().all()):
            raise RunError(f"the advantage estimator {self._name!r} gave a value that is not a finite number")
        return advantages_BT


def token_rewards(batch: Batch) -> torch.Tensor:
    """(B, T): each sample's reward at its last token that the loss counts, zero elsewhere."""
    mask_BT = batch.padded("loss_mask") > 0
    width = mask_BT.shape[1]
    last_B = (mask_BT * torch.arange(1, width + 1)).amax(dim=1) - 1
    reward_BT = torch.zeros(mask_BT.shape, dtype=torch.float32)
    counted = last_B >= 0
    reward_BT[counted, last_B[counted]] = torch.as_tensor(batch["reward"], dtype=torch.float32)[counted]
    return reward_BT
