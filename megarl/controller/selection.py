"""What of a step is learned from, and with what weight: filters, and the correction for how the samples were drawn."""

from __future__ import annotations

from dataclasses import asdict

import torch

from megarl.algorithms.diagnostics import off_policy_diagnostics
from megarl.algorithms.rollout_correction import CorrectionSettings, correct
from megarl.algorithms.shaping import informative, keep_finished
from megarl.batch import Batch, Level
from megarl.config.schema import AlgorithmConfig
from megarl.controller.calls import Later, now
from megarl.controller.metrics import noted


class Selection:
    """Narrows `loss_mask` (RESPONSE) to the tokens that are learned from, and adds `correction_weights` (RESPONSE) where
    there are any.

    It comes after the estimator: what is not learned from still counts in the statistics of its group.
    """

    def __init__(self, config: AlgorithmConfig):
        self._shaping = config.shaping
        self._settings = CorrectionSettings(**asdict(config.correction))

    def __call__(self, batch: Batch) -> Batch:
        """Metrics: mismatch/* of trainer against engine (not with bypass: they are one), correction/*, and the share of tokens
        learned from."""
        whole_BT = mask_BT = batch.padded("loss_mask") > 0
        if self._shaping.skip_cut:
            cut_B = torch.tensor([reason == "length" for reason in batch["stop_reason"]])
            mask_BT = keep_finished(mask_BT, cut_B)
        if self._shaping.skip_equal_groups:
            told_B = informative(torch.as_tensor(batch["reward"]), list(batch["group"]), whole_BT.any(-1))
            mask_BT = mask_BT & told_B[:, None]
        metrics = {}
        old_BT, rollout_BT = batch.padded("old_log_probs"), batch.padded("rollout_log_probs")
        if not self._settings.bypass:
            apart = off_policy_diagnostics(old_BT, rollout_BT, whole_BT)
            metrics |= {f"mismatch/{name}": value for name, value in apart.items()}
        if self._settings.acts:
            correction = correct(old_BT, rollout_BT, mask_BT, self._settings)
            mask_BT = correction.mask_BT
            batch = batch.set("correction_weights", batch.unpad(correction.weights_BT), Level.RESPONSE)
            metrics |= {f"correction/{name}": value for name, value in correction.metrics.items()}
        metrics["actor/learned_fraction"] = float(mask_BT.sum() / whole_BT.sum().clamp(min=1))
        return noted(batch.set("loss_mask", batch.unpad(mask_BT.float()), Level.RESPONSE), metrics)


class Bypassed:
    """In place of the actor's own log-probs, with `correction.bypass`: those that the engine sampled with."""

    def log_probs(self, batch: Batch) -> Later[Batch]:
        """`old_log_probs` (RESPONSE)."""
        return now(batch.select([]).set("old_log_probs", batch["rollout_log_probs"], Level.RESPONSE))


class Scored:
    """In place of the rewarder where groups come scored already, one by one while others were sampled."""

    def score(self, batch: Batch) -> Batch:
        return batch.select([])


def unequal(group: Batch) -> bool:
    """Whether the samples of one group, scored, do not all have one reward (`informative`)."""
    return bool(informative(torch.as_tensor(group["reward"]), list(group["group"])).any())
