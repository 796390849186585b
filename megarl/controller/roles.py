"""The roles of a recipe beside the actor, each with an empty twin for recipes that lack it.

Each asks a group of ranks, the actor's or one of its own, and its answers are begun here and waited for later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from megarl.algorithms.masking import as_mask
from megarl.batch import Batch, Level
from megarl.config.schema import RewardModelConfig
from megarl.controller.calls import Later, now
from megarl.controller.workers import WorkerGroup
from megarl.errors import RunError


@dataclass
class Reference:
    """The reference model of the recipe."""

    group: WorkerGroup

    def log_probs(self, batch: Batch) -> Later[Batch]:
        """`ref_log_probs` (RESPONSE field): while the actor is what the reference is, exactly its log-probs (on ranks of
        another layout, but for rounding)."""
        return self.group.in_parts("reference_log_probs", "reference log-probs", batch)


class NoReference:
    """For recipes without a reference: has nothing to say."""

    def log_probs(self, batch: Batch) -> Later[Batch]:
        return now(batch.select([]))


@dataclass
class Critic:
    """The critic of the recipe."""

    group: WorkerGroup

    def values(self, batch: Batch) -> Later[Batch]:
        """`values` (RESPONSE field): exactly those that the first update starts at."""
        return self.group.in_parts("values", "values", batch)

    def update(self, batch: Batch) -> Later[dict[str, float]]:
        """The optimizer steps of one step of training, on `values`, `returns` and `loss_mask`; metrics as the actor's, and
        explained_variance: 1 - Var(return - value) / Var(return), of the values before these steps."""
        explained = explained_variance(batch)
        return self.group.update_critic(batch).then(lambda metrics: {**metrics, "explained_variance": explained})

    @property
    def offending(self) -> dict[str, list[str]]:
        """As the group's."""
        return self.group.offending


class NoCritic:
    """For recipes without a critic: has no values and learns nothing."""

    def values(self, batch: Batch) -> Later[Batch]:
        return now(batch.select([]))

    def update(self, batch: Batch) -> Later[dict[str, float]]:
        return now({})

    offending: ClassVar[dict[str, list[str]]] = {}


@dataclass
class Learner:
    """The actor as one who learns: not in the first `wait` steps, in which its critic has nothing to say yet."""

    actor: WorkerGroup
    wait: int = 0

    def update(self, batch: Batch, step: int) -> Later[dict[str, float]]:
        """As the actor's; {} while it waits. `step` counts from 1."""
        return self.actor.update(batch) if step > self.wait else now({})

    @property
    def offending(self) -> dict[str, list[str]]:
        """As the group's."""
        return self.actor.offending


@dataclass
class RewardModel:
    """The reward model of the recipe: its score of a sample, times the coefficient, is a part of the reward."""

    group: WorkerGroup
    settings: RewardModelConfig

    def add(self, batch: Batch) -> Batch:
        """A scored batch with the part `reward_model` added to `reward` and `reward_parts`; the reward function's own sum is kept
        as `rule_reward` (SAMPLE). RunError names a sample whose score is not finite."""
        scores_BK = self.group.forward("reward_scores", "the reward model's scores", batch)["scores"]
        label = self.settings.label
        score_B = scores_BK.sum(dim=1) if label is None else scores_BK[:, label]
        if not bool(score_B.isfinite().all()):
            at = int((~score_B.isfinite()).nonzero()[0])
            raise RunError(
                f"the reward model scored sample {at} of the step (problem {batch['uid'][at]}) {score_B[at]}"
            )
        rule_B = torch.as_tensor(batch["reward"], dtype=torch.float32)
        part_B = self.settings.coefficient * score_B
        parts_BK, names = rule_B[:, None], ["rule"]
        if "reward_parts" in batch:
            parts_BK, names = batch["reward_parts"], list(batch.meta["reward_parts"])
        result = batch.set("reward", rule_B + part_B, Level.SAMPLE).set("rule_reward", rule_B, Level.SAMPLE)
        result = result.set("reward_parts", torch.cat([parts_BK, part_B[:, None]], dim=1), Level.SAMPLE)
        result.meta["reward_parts"] = [*names, "reward_model"]
        return result


class NoRewardModel:
    """For recipes without a reward model: adds nothing."""

    def add(self, batch: Batch) -> Batch:
        return batch


def explained_variance(batch: Batch) -> float:
    """1 - Var(return - value) / Var(return) over the tokens that the loss counts; 0 where all returns are equal."""
    counted = as_mask(batch["loss_mask"])
    returns, values = batch["returns"][counted].double(), batch["values"][counted].double()
    if not len(returns) or not (spread := float(returns.var(unbiased=False))):
        return 0.0
    return 1.0 - float((returns - values).var(unbiased=False)) / spread
