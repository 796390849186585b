"""Made-up runs: batches as they leave the rewarder, and metrics of a model that learns."""

from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.batch import Batch, Level, Sample
from megarl.config.schema import Config


@pytest.fixture
def config(tmp_path: Path) -> Config:
    config = Config()
    config.run.name, config.run.root, config.run.steps = "made-up", str(tmp_path / "runs"), 4
    return config


def scored_batch(responses: list[str], rewards: list[float]) -> Batch:
    """Two samples a prompt; the last one was cut off."""
    samples = []
    for at in range(len(responses)):
        size, payload = at + 2, {"prompt": f"say {at // 2}", "answer": str(at // 2)}
        reason = "length" if at == len(responses) - 1 else "stop"
        samples.append(
            Sample(
                f"train-{at // 2}",
                f"g{at // 2}",
                [1, 2],
                [4] * size,
                [1] * size,
                [-0.1] * size,
                reason,
                payload=payload,
            )
        )
    texts = np.empty(len(responses), dtype=object)
    texts[:] = responses
    batch = Batch.from_samples(samples).set("reward", torch.tensor(rewards), Level.SAMPLE)
    return batch.set("response_text", texts, Level.SAMPLE)


def metrics_of(step: int) -> dict[str, float]:
    """Accuracy rises by 0.1 a step from 0.2; a step takes 4 seconds."""
    accuracy = min(1.0, 0.1 + 0.1 * step)
    return {
        "reward/mean": accuracy,
        "reward/accuracy": accuracy,
        "response/length_mean": 12.0,
        "actor/entropy": 0.5,
        "actor/ppo_kl": 1.2e-5,
        "actor/clip_fraction": 0.034,
        "actor/grad_norm": 1.5,
        "mismatch/abs_mean": 0.01 * step,
        "mismatch/abs_max": 0.1 * step,
        "reshard/verified": 1.0,
        "throughput/tokens_per_second": 1234.0,
        "time/rollout": 1.0,
        "time/log_probs": 0.5,
        "time/update": 2.0,
        "time/reshard": 0.5,
        "time/step": 4.0,
    }


@pytest.fixture
def batch() -> Batch:
    return scored_batch(["0", "I say 5", "one", "1"], [1.0, 0.0, 0.0, 1.0])
