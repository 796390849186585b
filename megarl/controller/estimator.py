"""From rewards to advantages, by the estimator that the configuration names."""

from __future__ import annotations

from typing import Any

import torch

from megarl.algorithms import Advantage, call, get_advantage
from megarl.batch import Batch, Level
from megarl.config.schema import AlgorithmConfig
from megarl.errors import RunError

# What an estimator may ask for, by the field that holds it. Fields that a recipe does not make are not offered.
PADDED = {
    "reward_BT": "token_rewards",
    "mask_BT": "loss_mask",
    "old_log_probs_BT": "old_log_probs",
    "entropy_BT": "entropy",
    "sum_p2_BT": "sum_p2",
    "values_BT": "values",
}
PLAIN = {"baseline_B": "baseline", "reward_parts_BK": "reward_parts"}


class Estimator:
    """Adds `advantages` and `returns` (RESPONSE) to a batch with token rewards."""

    def __init__(self, config: AlgorithmConfig):
        self._name = config.advantage
        self._advantage = get_advantage(config.advantage)
        self._options = {
            "normalize_std": config.normalize_std,
            "gamma": config.gamma,
            "lam": config.lam,
            **config.advantage_options,
        }

    def __call__(self, batch: Batch) -> Batch:
        offered = {name: batch.padded(field) for name, field in PADDED.items() if field in batch}
        offered |= {name: batch[field] for name, field in PLAIN.items() if field in batch}
        offered |= {"group_B": list(batch["group"]), **self._options}
        for name, values_BT in zip(("advantages", "returns"), self._checked(offered), strict=True):
            batch = batch.set(name, batch.unpad(values_BT), Level.RESPONSE)
        return batch

    def _checked(self, offered: dict[str, Any]) -> Advantage:
        """What it answers, float32. RunError names the estimator, which may be the user's own, where it gives none."""
        try:
            result = call(self._advantage, offered)
        except (Exception, SystemExit) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise RunError(f"the advantage estimator {self._name!r} failed: {reason}") from error
        if not isinstance(result, Advantage):
            raise RunError(
                f"the advantage estimator {self._name!r} must return an Advantage, not {type(result).__name__}"
            )
        return Advantage(*(self._float(values_BT, offered["mask_BT"]) for values_BT in result))

    def _float(self, values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
        given, wanted = tuple(values_BT.shape), tuple(mask_BT.shape)
        if given != wanted:
            raise RunError(f"the advantage estimator {self._name!r} gave a shape of {given}, not {wanted}")
        values_BT = values_BT.float()
        if not bool(values_BT[mask_BT > 0].isfinite().all()):
            raise RunError(f"the advantage estimator {self._name!r} gave a value that is not a finite number")
        return values_BT
