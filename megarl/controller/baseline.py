"""What a prompt's greedy answer earns: the baseline of ReMax."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from megarl.batch import Batch, Level, Prompt
from megarl.config.schema import RolloutConfig
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
    rollout: RolloutConfig

    def scores(self, batch: Batch) -> Batch:
        """SAMPLE fields of the greedy answer to each sample's prompt: its reward `baseline` (float32), and `baseline_lengths`
        (int64, tokens)."""
        first: dict[Hashable, int] = {}
        for at, group in enumerate(batch["group"]):
            first.setdefault(group, at)
        prompts = [_prompt(batch, at) for at in first.values()]
        r = self.rollout
        greedy = Sampling(
            n=1,
            temperature=0.0,
            max_new_tokens=r.max_new_tokens,
            stop=tuple(r.stop),
            stop_token_ids=tuple(r.stop_token_ids),
        )
        answers = Batch.from_samples(self.engines.generate(prompts, greedy, group_suffix="@greedy"))
        rewards = self.reward_model.add(answers.union(self.rewards.score(answers)))["reward"]
        numbers = {group: number for number, group in enumerate(first)}
        of_sample = torch.tensor([numbers[group] for group in batch["group"]], dtype=torch.long)
        done = batch.select([]).set("baseline", rewards.float()[of_sample], Level.SAMPLE)
        return done.set("baseline_lengths", answers.response_lengths[of_sample], Level.SAMPLE)


class NoBaseline:
    """For estimators that need none: has nothing to say."""

    def scores(self, batch: Batch) -> Batch:
        return batch.select([])


def _prompt(batch: Batch, at: int) -> Prompt:
    start = int(batch.cu_seqlens[at])
    tokens = batch["tokens"][start : start + int(batch.prompt_lengths[at])].tolist()
    payload = batch["payload"][at]
    return Prompt(batch["uid"][at], tokens, payload.get("prompt", ""), payload.get("answer"), payload)
