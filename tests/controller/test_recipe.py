"""Shaping, estimator, selection and objective, one after another as a step runs them, on a batch like a rollout's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megarl.algorithms import Objective, advantage, denominators, policy_loss
from megarl.batch import Batch, Level, Sample
from megarl.config.schema import AlgorithmConfig, CorrectionConfig, ShapingConfig
from megarl.controller.estimator import Estimator
from megarl.controller.metrics import StepMetrics
from megarl.controller.selection import Bypassed, Selection
from megarl.controller.shaping import Shaping

LONGEST = 6


def rollout(rewards: list[float] | None = None) -> Batch:
    """Four groups of three, lengths from 0 to 6, an observation token in the middle of some responses; all fields that the
    trainer can make."""
    random = np.random.default_rng(0)
    samples = []
    for at in range(12):
        length = int(random.integers(0, LONGEST + 1))
        mask = [0 if token == 2 and at % 4 == 0 else 1 for token in range(length)]
        reward = float(random.integers(0, 2)) if rewards is None else rewards[at]
        cut = "length" if length == LONGEST else "stop"
        samples.append(
            Sample(f"p{at // 3}", f"g{at // 3}", [1], [2] * length, mask, [-1.0] * length, cut, reward=reward)
        )
    batch = Batch.from_samples(samples)
    size = len(batch["rollout_log_probs"])
    generator = torch.Generator().manual_seed(0)
    for name, spread in (("old_log_probs", 0.3), ("ref_log_probs", 0.5), ("values", 1.0)):
        batch = batch.set(name, -1.0 + spread * torch.randn(size, generator=generator), Level.RESPONSE)
    batch = batch.set("entropy", torch.rand(size, generator=generator), Level.RESPONSE)
    batch = batch.set("sum_p2", torch.rand(size, generator=generator), Level.RESPONSE)
    batch = batch.set("baseline", torch.full((12,), 0.5), Level.SAMPLE)
    batch = batch.set("baseline_lengths", torch.full((12,), LONGEST - 1), Level.SAMPLE)
    return batch.set("reward_parts", torch.rand(12, 2, generator=generator), Level.SAMPLE)


def prepared(config: AlgorithmConfig, batch: Batch) -> Batch:
    shaped = Shaping(config.shaping, LONGEST)(batch)
    return Selection(config)(Estimator(config)(shaped))


@pytest.mark.parametrize("loss", policy_loss.names)
@pytest.mark.parametrize("estimator", advantage.names)
def test_every_estimator_goes_with_every_loss(estimator: str, loss: str) -> None:
    config = AlgorithmConfig(advantage=estimator, policy_loss=loss, kl_coefficient=0.1, entropy_coefficient=0.01)
    config.correction.level = "token"
    batch = prepared(config, rollout())
    objective = Objective.from_config(config)
    data = {name: batch.padded(name) for name in objective.reads if name in batch}
    data |= objective.prepare(data)
    log_probs = (batch.padded("old_log_probs") + 0.1).requires_grad_()
    result = objective(log_probs, batch.padded("entropy"), data, denominators(data["loss_mask"], LONGEST))
    result.loss.backward()
    assert result.loss.isfinite() and log_probs.grad.isfinite().all() and log_probs.grad.count_nonzero() > 0
    assert not log_probs.grad[data["loss_mask"] == 0].count_nonzero()


def test_shaping_acts_in_the_order_of_the_field_and_leaves_the_raw_reward() -> None:
    batch = rollout([1.0] * 12)
    config = ShapingConfig(overlong_buffer=3, overlong_factor=0.5, clip_low=0.75)
    shaped = Shaping(config, LONGEST)(batch)
    assert torch.equal(shaped["reward"], batch["reward"])
    wanted = (1.0 - 0.5 * ((batch.response_lengths - 3) / 3).clamp(0, 1)).clamp(min=0.75)
    wanted[batch.padded("loss_mask").sum(-1) == 0] = 0.0  # no token to carry a reward
    torch.testing.assert_close(shaped.padded("token_rewards").sum(-1), wanted)
    last = [int(row.nonzero()[-1]) for row in batch.padded("loss_mask") if row.any()]
    given = [int(row.nonzero()[-1]) for row in shaped.padded("token_rewards") if row.any()]
    assert given == last


def test_what_is_done_to_a_score_is_done_to_the_greedy_baseline() -> None:
    shaping = Shaping(ShapingConfig(overlong_buffer=3, clip_low=0.3, normalize=True), LONGEST)
    scores = [float(at) for at in range(12)]
    batch = rollout(scores)
    shaped = shaping(batch)
    assert len(set(shaped["baseline"].tolist())) == 1
    penalty = [max(0, min(1, (length - 3) / 3)) for length in batch.response_lengths.tolist()]
    moved = [max(0.3, score - less) for score, less in zip(scores, penalty, strict=True)]
    counted = [score for score, row in zip(moved, batch.padded("loss_mask"), strict=True) if row.any()]
    wanted = (max(0.3, 0.5 - 2 / 3) - np.mean(counted)) / np.std(counted, ddof=1)
    assert float(shaped["baseline"][0]) == pytest.approx(wanted, rel=1e-5)


def test_kl_is_taken_off_every_token_and_its_coefficient_follows_the_target() -> None:
    config = ShapingConfig(kl_coefficient=0.5, kl_estimator="k1", kl_target=1e-3, kl_horizon=24)
    batch, shaping = rollout(), Shaping(config, LONGEST)
    plain = Shaping(ShapingConfig(), LONGEST)(batch)
    shaped = shaping(batch)
    kl = (batch["old_log_probs"] - batch["ref_log_probs"]) * batch["loss_mask"]
    torch.testing.assert_close(shaped["token_rewards"], plain["token_rewards"] - 0.5 * kl)
    said = shaped.meta["metrics"]
    assert said["shaping/kl"] == pytest.approx(float(kl.sum() / batch["loss_mask"].sum()), rel=1e-5)
    assert said["shaping/kl_coefficient"] == 0.5
    moved = 1 + 0.2 * (1 if said["shaping/kl"] > 1e-3 else -1) * 12 / 24  # the error is clipped to 0.2
    assert shaping(batch).meta["metrics"]["shaping/kl_coefficient"] == pytest.approx(0.5 * moved)


def test_running_statistics_and_coefficient_are_resumed() -> None:
    config = ShapingConfig(normalize=True, kl_coefficient=0.5, kl_target=1e-3)
    whole, first, second = (Shaping(config, LONGEST) for _ in range(3))
    whole(rollout()), first(rollout())
    second.load_state_dict(first.state_dict())
    other = rollout([float(at) for at in range(12)])
    assert torch.equal(whole(other)["token_rewards"], second(other)["token_rewards"])


def test_what_is_filtered_is_not_learned_from_but_counts_in_its_group() -> None:
    rewards = [1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0]
    batch = rollout(rewards)
    config = AlgorithmConfig(shaping=ShapingConfig(skip_cut=True, skip_equal_groups=True))
    done, whole = prepared(config, batch), prepared(AlgorithmConfig(), batch)
    assert torch.equal(done["advantages"], whole["advantages"])
    cut = batch.response_lengths == LONGEST
    assert cut.any() and not cut.all()
    equal = torch.tensor([at // 3 in (0, 2) for at in range(12)])
    wanted = batch.padded("loss_mask") * ~(cut | equal)[:, None]
    assert torch.equal(done.padded("loss_mask"), wanted)
    assert done.meta["metrics"]["actor/learned_fraction"] == pytest.approx(
        float(wanted.sum() / batch["loss_mask"].sum())
    )


def test_correction_gives_weights_and_a_mask_and_says_so() -> None:
    correction = CorrectionConfig(level="token", upper=1.1, rejection={"token_ratio": [0.8, 1.4]})
    batch = rollout()
    done = prepared(AlgorithmConfig(correction=correction), batch)
    ratio = (batch["old_log_probs"] - batch["rollout_log_probs"]).exp()
    kept = (batch["loss_mask"] > 0) & (ratio >= 0.8) & (ratio <= 1.4)
    assert torch.equal(done["loss_mask"] > 0, kept)
    torch.testing.assert_close(done["correction_weights"], torch.where(kept, ratio.clamp(max=1.1), 0.0))
    said = done.meta["metrics"]
    assert 0 < said["correction/rejected_fraction"] < 1 and said["mismatch/abs_mean"] > 0.1
    assert "correction_weights" not in prepared(AlgorithmConfig(), batch)


def test_bypass_takes_the_engines_log_probs() -> None:
    batch = rollout().pop(["old_log_probs"])
    batch = batch.union(Bypassed().log_probs(batch).get())
    done = prepared(AlgorithmConfig(correction=CorrectionConfig(bypass=True)), batch)
    assert torch.equal(done["old_log_probs"], batch["rollout_log_probs"])
    assert "mismatch/abs_mean" not in done.meta["metrics"]


def test_notes_of_the_parts_become_metrics_of_the_step() -> None:
    done = prepared(AlgorithmConfig(), rollout())
    done.meta["reward_parts"] = ["format", "right"]
    metrics: dict[str, Any] = StepMetrics().of(done, {"actor": {"loss": 1.0}}, {}, {"rollout": 2.0})
    assert metrics["shaping/reward_mean"] == metrics["reward/mean"] and metrics["mismatch/abs_max"] > 0
    assert metrics["reward_part/right"] == pytest.approx(float(done["reward_parts"][:, 1].mean()))
