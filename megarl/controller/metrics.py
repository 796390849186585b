"""A step in numbers, under flat names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megarl.batch import Batch
from megarl.rewards import accuracy


@dataclass
class StepMetrics:
    """Collects what the parts of a step said."""

    def of(
        self,
        batch: Batch,
        updates: Mapping[str, Mapping[str, float]],
        sync: Mapping[str, float],
        seconds: Mapping[str, float],
    ) -> dict[str, float]:
        """Means are over samples (reward, response) or over response tokens that the loss counts (the rest). What the parts of
        the step noted in the batch comes first. `updates`: of each role that learns. Accuracy is that of the reward function."""
        rewards = torch.as_tensor(batch["reward"], dtype=torch.float32)
        lengths = batch.response_lengths.float()
        cut = sum(reason == "length" for reason in batch["stop_reason"])
        step = sum(seconds.values())
        tokens = int(batch.total_lengths.sum())
        metrics = dict(batch.meta.get("metrics", {}))
        ruled = "rule_reward" if "rule_reward" in batch else "reward"
        metrics |= {
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std(unbiased=False)),
            "reward/accuracy": accuracy(batch[ruled]),
            "reward/groups_all_equal": _all_equal(batch, rewards),
            "response/length_mean": float(lengths.mean()),
            "response/length_max": float(lengths.max()),
            "response/clipped_fraction": cut / len(batch),
            "throughput/tokens_per_second": tokens / step,
            "throughput/samples_per_second": len(batch) / step,
        }
        if "reward_parts" in batch:
            means = batch["reward_parts"].mean(dim=0).tolist()
            metrics |= {f"reward_part/{k}": v for k, v in zip(batch.meta["reward_parts"], means, strict=True)}
        metrics |= {f"rollout/{k}": float(v) for k, v in batch.meta.get("rollout", {}).items()}
        metrics |= {f"{role}/{k}": v for role, update in updates.items() for k, v in update.items()}
        metrics |= sync
        metrics |= {f"time/{name}": value for name, value in seconds.items()}
        return metrics | {"time/step": step}


def noted(batch: Batch, metrics: Mapping[str, float]) -> Batch:
    """The batch with metrics added to what earlier parts of the step noted in it."""
    result = batch.select(batch.names)
    result.meta["metrics"] = {**batch.meta.get("metrics", {}), **metrics}
    return result


def _all_equal(batch: Batch, rewards: torch.Tensor) -> float:
    """Share of groups whose samples all have one reward: they teach a group-relative estimator nothing."""
    groups: dict[object, set[float]] = {}
    for group, reward in zip(batch["group"], rewards.tolist(), strict=True):
        groups.setdefault(group, set()).add(reward)
    return sum(len(values) == 1 for values in groups.values()) / max(len(groups), 1)
