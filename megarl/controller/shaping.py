"""From the reward of a sample to the rewards of its tokens, as the configuration's `algorithm.shaping` says."""

from __future__ import annotations

from typing import Any

import torch

from megarl.algorithms import shaping
from megarl.algorithms.kl_control import kl_controller
from megarl.algorithms.running import RunningStatistics
from megarl.batch import Batch, Level
from megarl.config.schema import ShapingConfig
from megarl.controller.metrics import noted


class Shaping:
    """Adds `token_rewards` (RESPONSE, float32) to a scored batch: what an estimator sees. The raw `reward` stays."""

    def __init__(self, config: ShapingConfig, max_new_tokens: int):
        self._config = config
        self._max_new_tokens = max_new_tokens
        self._statistics = RunningStatistics()
        self._kl = kl_controller(config.kl_coefficient, config.kl_target, config.kl_horizon)

    def __call__(self, batch: Batch) -> Batch:
        """Penalty for length, clipping, normalising of a sample's reward, which then counts at its last token that the loss
        counts; less the KL of every token. Metrics: shaping/reward_mean; reward_kl, kl_coefficient where there is a KL."""
        c = self._config
        mask_BT = batch.padded("loss_mask") > 0
        score_B = self._shaped(batch["reward"], batch.response_lengths, mask_BT.any(-1))
        if "baseline" in batch:  # of the same answers as it were: what is done to the one is done to the other
            baseline_B = self._shaped(batch["baseline"], batch["baseline_lengths"], None)
            batch = batch.set("baseline", baseline_B, Level.SAMPLE)
        metrics = {"shaping/reward_mean": float(score_B.mean())}
        reward_BT = at_last_token(score_B, mask_BT)
        if c.kl_coefficient:
            coefficient = self._kl.coefficient
            reward_BT, kl_BT = shaping.subtract_kl(
                reward_BT,
                batch.padded("old_log_probs"),
                batch.padded("ref_log_probs"),
                mask_BT,
                coefficient,
                c.kl_estimator,
            )
            kl = float(kl_BT.sum() / mask_BT.sum().clamp(min=1))
            metrics |= {"shaping/kl": kl, "shaping/kl_coefficient": coefficient}
            self._kl.update(kl, len(batch))
        return noted(batch.set("token_rewards", batch.unpad(reward_BT), Level.RESPONSE), metrics)

    def _shaped(self, score_B: torch.Tensor, length_B: torch.Tensor, counts_B: torch.Tensor | None) -> torch.Tensor:
        """`counts_B`: samples that enter the running statistics; None: none does."""
        c = self._config
        score_B = torch.as_tensor(score_B, dtype=torch.float32)
        if c.overlong_buffer:
            score_B = score_B + shaping.overlong_penalty(
                length_B, self._max_new_tokens, c.overlong_buffer, c.overlong_factor
            )
        score_B = shaping.clip_scores(score_B, c.clip_low, c.clip_high)
        if c.normalize:
            score_B = shaping.normalize_scores(score_B, self._statistics, counts_B, update=counts_B is not None)
        return score_B

    def state_dict(self) -> dict[str, Any]:
        return {"statistics": self._statistics.state_dict(), "kl": self._kl.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._statistics.load_state_dict(state["statistics"])
        self._kl.load_state_dict(state["kl"])


def at_last_token(score_B: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """(B, T): each score at its sample's last unmasked token, zero elsewhere; a sample without one has none."""
    last_B = (mask_BT * torch.arange(1, mask_BT.shape[1] + 1)).amax(dim=1) - 1
    reward_BT = torch.zeros(mask_BT.shape, dtype=torch.float32)
    counted = last_B >= 0
    reward_BT[counted, last_B[counted]] = score_B[counted]
    return reward_BT
