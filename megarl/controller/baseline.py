"""What a prompt's greedy answer earns: the baseline of ReMax."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from megarl.batch import Batch, Level, Prompt
from megarl.controller.engines import EngineGroup
from megarl.controller.roles import NoRewardModel, RewardModel
from megarl.rewards import Rewarder
from megarl.rollout.sampling import Sampling


@dataclass
class GreedyBaseline:
    """Asks the engines, which still have the weights that the step was sampled with, for one greedy answer a prompt."""

    engines: EngineGroup
    rewards: Rewarder
    reward_model: RewardModel | NoRewardModel
    max_new_tokens: int

    def scores(self, batch: Batch) -> Batch:
        """`baseline` (SAMPLE, float32): the reward of the greedy answer to each sample's prompt."""
        first: dict[Hashable, int] = {}
        for at, group in enumerate(batch["group"]):
            first.setdefault(group, at)
        prompts = [_prompt(batch, at) for at in first.values()]
        greedy = Sampling(n=1, temperature=0.0, max_new_tokens=self.max_new_tokens)
        answers = Batch.from_samples(self.engines.generate(prompts, greedy, group_suffix="@greedy"))
        rewards = self.reward_model.add(answers.union(self.rewards.score(answers)))["reward"].tolist()
        by_group = dict(zip(first, rewards, strict=True))
        baseline = torch.tensor([by_group[group] for group in batch["group"]], dtype=torch.float32)
        return batch.select([]).set("baseline", baseline, Level.SAMPLE)


class NoBaseline:
    """For estimators that need none: has nothing to say."""

    def scores(self, batch: Batch) -> Batch:
        return batch.select([])


def _prompt(batch: Batch, at: int) -> Prompt:
    start = int(batch.cu_seqlens[at])
    tokens = batch["tokens"][start : start + int(batch.prompt_lengths[at])].tolist()
    payload = batch["payload"][at]
    return Prompt(batch["uid"][at], tokens, payload.get("prompt", ""), payload.get("answer"), payload)
