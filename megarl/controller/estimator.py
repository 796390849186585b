"""From rewards to advantages, by the estimator that the configuration names."""

from __future__ import annotations

from typing import Any

import torch

from megarl.algorithms import Advantage, advantage, call, get_advantage
from megarl.batch import Batch, Level
from megarl.config.schema import AlgorithmConfig
from megarl.errors import RunError

# What an estimator may ask for, by the field that holds it. Fields that a recipe does not make are not offered.
PADDED = {
    "reward_BT": "token_rewards",
    "old_log_probs_BT": "old_log_probs",
    "entropy_BT": "entropy",
    "sum_p2_BT": "sum_p2",
    "values_BT": "values",
}
PLAIN = {"baseline_B": "baseline", "reward_parts_BK": "reward_parts"}
# Where it comes from, for who asks for it in vain.
MAKER = {
    "reward_parts_BK": "the reward function answered one number and no named parts",
    "values_BT": "the recipe has no critic",
    "baseline_B": "nobody sampled greedy answers",
    "sum_p2_BT": "the trainer's own log-prob pass was left out",
    "entropy_BT": "the trainer's own log-prob pass was left out",
}


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
        mask_BT = batch.padded("loss_mask") > 0
        # Copies, all of them: what a user's estimator does to its arguments must reach neither the batch nor the check.
        offered: dict[str, Any] = {"mask_BT": mask_BT.clone()}
        offered |= {name: batch.padded(field) for name, field in PADDED.items() if field in batch}
        offered |= {name: torch.as_tensor(batch[field]).clone() for name, field in PLAIN.items() if field in batch}
        offered |= {"group_B": list(batch["group"]), **self._options}
        for needed in advantage.required(self._name):
            if needed not in offered:
                raise RunError(f"the advantage estimator {self._name!r} needs {needed}, and {MAKER[needed]}")
        for name, values_BT in zip(("advantages", "returns"), self._checked(offered, mask_BT), strict=True):
            batch = batch.set(name, batch.unpad(values_BT), Level.RESPONSE)
        return batch

    def _checked(self, offered: dict[str, Any], mask_BT: torch.Tensor) -> list[torch.Tensor]:
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
        return [self._float(name, values_BT, mask_BT) for name, values_BT in result._asdict().items()]

    def _float(self, name: str, values_BT: object, mask_BT: torch.Tensor) -> torch.Tensor:
        who = f"the advantage estimator {self._name!r} gave"
        if not isinstance(values_BT, torch.Tensor):
            raise RunError(f"{who} a {type(values_BT).__name__} as {name}, not a tensor")
        given, wanted = tuple(values_BT.shape), tuple(mask_BT.shape)
        if given != wanted:
            raise RunError(f"{who} {name} of a shape of {given}, not {wanted}")
        values_BT = values_BT.detach().float()
        if not bool(values_BT[mask_BT].isfinite().all()):
            raise RunError(f"{who} {name} with a value that is not a finite number")
        return values_BT
