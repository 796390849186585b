"""Greedy answers to held-out problems."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.batch import Batch
from megarl.config import Config
from megarl.controller.engines import EngineGroup
from megarl.data import PromptSource
from megarl.rewards import Rewarder, accuracy
from megarl.rollout.sampling import Sampling


@dataclass
class Evaluation:
    """`run` asks the engines for one greedy answer to every held-out problem."""

    prompts: PromptSource | None
    engines: EngineGroup
    rewards: Rewarder
    config: Config

    def due(self, step: int) -> bool:
        """Before the first step, after the last one, and every `evaluation.every` steps where that is set."""
        if self.prompts is None:
            return False
        every = self.config.evaluation.every
        return step in (0, self.config.run.steps) or (every > 0 and step % every == 0)

    def run(self, step: int) -> tuple[dict[str, float], Batch]:
        """`eval/accuracy` and `eval/length_mean`, and the answers."""
        tokens = self.config.evaluation.max_new_tokens or self.config.rollout.max_new_tokens
        r = self.config.rollout
        ends = {"stop": tuple(r.stop), "stop_token_ids": tuple(r.stop_token_ids)}
        greedy = Sampling(n=1, temperature=0.0, max_new_tokens=tokens, **ends)
        samples = self.engines.generate(self.prompts.all(), greedy, group_suffix=f"@eval{step}")
        batch = Batch.from_samples(samples)
        batch = batch.union(self.rewards.score(batch))
        metrics = {
            "eval/accuracy": accuracy(batch["reward"]),
            "eval/length_mean": float(batch.response_lengths.float().mean()),
        }
        return metrics, batch
