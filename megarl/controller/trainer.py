"""The loop, as the paper writes it: one step on one screen, each arrow one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megarl.batch import Batch
from megarl.controller.baseline import GreedyBaseline, NoBaseline
from megarl.controller.calls import all_of
from megarl.controller.estimator import Estimator
from megarl.controller.metrics import StepMetrics
from megarl.controller.phases import Phases
from megarl.controller.roles import Critic, Learner, NoCritic, NoReference, NoRewardModel, Reference, RewardModel
from megarl.controller.rollout import Rollout
from megarl.controller.selection import Bypassed, Scored, Selection
from megarl.controller.shaping import Shaping
from megarl.controller.sync import WeightSync
from megarl.controller.workers import WorkerGroup
from megarl.data import PromptSource
from megarl.rewards import Rewarder


@dataclass
class Trainer:
    """What a step needs; parts that a recipe lacks are empty objects, not branches."""

    prompts: PromptSource
    prompts_per_step: int
    rollout: Rollout
    rewards: Rewarder | Scored
    reward_model: RewardModel | NoRewardModel
    baseline: GreedyBaseline | NoBaseline
    old_policy: WorkerGroup | Bypassed
    reference: Reference | NoReference
    critic: Critic | NoCritic
    actor: Learner
    shaping: Shaping
    estimator: Estimator
    selection: Selection
    sync: WeightSync
    stage: Phases
    metrics: StepMetrics = field(default_factory=StepMetrics)
    while_idle: Callable[[], None] = lambda: None  # called when the ranks have nothing to do, before and after sampling

    def step(self, number: int) -> tuple[Batch, Mapping[str, float]]:
        """prompts → rollout → reward → log-probs, values → advantages → updates → reshard; the samples, and the step's metrics."""
        self.while_idle()
        with self.stage("rollout"):
            batch = self.rollout.collect(self.prompts.take(self.prompts_per_step), number)
        self.while_idle()
        with self.stage("score"):
            batch = batch.union(self.rewards.score(batch), self.baseline.scores(batch))
            self.sync.release()  # nothing is sampled from here to the next weights
            batch = self.reward_model.add(batch)
        with self.stage("log_probs"):
            batch = batch.union(
                *all_of(self.old_policy.log_probs(batch), self.reference.log_probs(batch), self.critic.values(batch))
            )
        with self.stage("advantages"):
            batch = self.selection(self.estimator(self.shaping(batch)))
        with self.stage("update"):
            critic, actor = all_of(self.critic.update(batch), self.actor.update(batch, number))
        with self.stage("reshard"):
            report = self.sync.push(number)
        report |= self.stage.peaks()
        return batch, self.metrics.of(batch, {"critic": critic, "actor": actor}, report, self.stage.collect())

    def state_dict(self) -> dict[str, Any]:
        """The part of a checkpoint that is no role's; plain values."""
        return {name: part.state_dict() for name, part in self._stateful().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, part in self._stateful().items():
            part.load_state_dict(state[name])

    def _stateful(self) -> dict[str, Any]:
        return {"prompts": self.prompts, "shaping": self.shaping, "rollout": self.rollout}

    def skipped(self, number: int, metrics: Mapping[str, float]) -> Iterator[str]:
        """A sentence for each role whose gradient was not finite, so that nothing was learned from it."""
        for role, problems in (self.critic.offending | self.actor.offending).items():
            if count := metrics.get(f"{role}/skipped", 0):
                names = list(dict.fromkeys(problems))
                named = f" (samples of {', '.join(names[:5])}{' …' if len(names) > 5 else ''})" if names else ""
                yield (
                    f"step {number}: {count:.0f} update{'s' if count > 1 else ''} of the {role} left out, whose gradient was not "
                    f"finite{named}; nothing was learned from it"
                )
