"""The loop, as the paper writes it: one step on one screen, each arrow one call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megarl.batch import Batch
from megarl.controller.baseline import GreedyBaseline, NoBaseline
from megarl.controller.estimator import Estimator
from megarl.controller.metrics import StepMetrics
from megarl.controller.rollout import Rollout
from megarl.controller.selection import Bypassed, Selection
from megarl.controller.shaping import Shaping
from megarl.controller.sync import WeightSync
from megarl.controller.workers import NoReference, Reference, WorkerGroup
from megarl.data import PromptSource
from megarl.observe.stages import Stages
from megarl.rewards import Rewarder


@dataclass
class Trainer:
    """What a step needs; parts that a recipe lacks are empty objects, not branches."""

    prompts: PromptSource
    prompts_per_step: int
    rollout: Rollout
    rewards: Rewarder
    baseline: GreedyBaseline | NoBaseline
    actor: WorkerGroup
    old_policy: WorkerGroup | Bypassed
    reference: Reference | NoReference
    shaping: Shaping
    estimator: Estimator
    selection: Selection
    sync: WeightSync
    stage: Stages
    metrics: StepMetrics = field(default_factory=StepMetrics)

    def step(self, number: int) -> tuple[Batch, Mapping[str, float]]:
        """prompts → rollout → reward → log-probs → advantages → update → reshard; the samples, and the step's metrics."""
        with self.stage("rollout"):
            batch = self.rollout.collect(self.prompts.take(self.prompts_per_step), number)
        with self.stage("score"):
            batch = batch.union(self.rewards.score(batch), self.baseline.scores(batch))
        with self.stage("log_probs"):
            batch = batch.union(self.old_policy.log_probs(batch), self.reference.log_probs(batch))
        with self.stage("advantages"):
            batch = self.selection(self.estimator(self.shaping(batch)))
        with self.stage("update"):
            update = self.actor.update(batch)
        with self.stage("reshard"):
            report = self.sync.push(number)
        return batch, self.metrics.of(batch, update, report, self.stage.collect())
