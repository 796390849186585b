"""The example with a user's own estimator and loss, run for real; beside them everything that stands between reward and loss."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.controller.runs import Run

EXAMPLE = "examples/custom_estimator/config.yaml"
BETWEEN = (
    "reward.name=tests.controller.hooks.share_of_vowels",
    "actor.optimizer.lr=1e-3",
    "algorithm.mini_batches=2",
    "algorithm.shaping.overlong_buffer=8",
    "algorithm.shaping.kl_coefficient=0.5",
    "algorithm.shaping.kl_target=1e-6",
    "algorithm.shaping.kl_horizon=16",
    "algorithm.correction.level=token",
    "algorithm.correction.rejection.sequence_max_ratio=2.0",
)


def test_own_functions_with_all_that_lies_between_reward_and_loss(tmp_path: Path) -> None:
    with Run(tmp_path, *BETWEEN, config=EXAMPLE) as run:
        assert run.finish() == 0, run.err
        first, second = run.steps()
    assert first["shaping/reward_mean"] < first["reward/mean"]  # some responses are as long as they may be
    assert first["shaping/kl"] == pytest.approx(0.0, abs=1e-6) and first["shaping/kl_coefficient"] == 0.5
    assert abs(second["shaping/kl"]) > 1e-6  # two updates away from the reference
    assert second["shaping/kl_coefficient"] != 0.5
    for row in (first, second):
        assert row["correction/rejected_fraction"] == 0.0 and row["actor/learned_fraction"] == 1.0
        assert row["correction/weight_mean"] == pytest.approx(1.0, abs=1e-4)
        assert row["actor/ratio_max"] > 1.0 and row["actor/grad_norm"] > 1e-3 and row["actor/applied"] == 1.0


@pytest.mark.slow
def test_remax_subtracts_the_greedy_answer(tmp_path: Path) -> None:
    with Run(tmp_path, *BETWEEN[:1], "algorithm.advantage=remax", "algorithm.policy_loss=reinforce") as run:
        assert run.finish() == 0, run.err
        for row in run.steps():
            assert row["actor/grad_norm"] > 1e-3 and row["actor/applied"] == 1.0


@pytest.mark.slow
def test_the_engines_log_probs_in_place_of_the_trainers(tmp_path: Path) -> None:
    with Run(tmp_path, *BETWEEN[:1], "algorithm.correction.bypass=true") as run:
        assert run.finish() == 0, run.err
        for row in run.steps():
            assert "mismatch/abs_mean" not in row
            assert row["actor/ratio_max"] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.slow
def test_the_optimal_token_baseline_gets_its_squared_probabilities(tmp_path: Path) -> None:
    with Run(tmp_path, *BETWEEN[:1], "algorithm.advantage=optimal_token_baseline") as run:
        assert run.finish() == 0, run.err
        for row in run.steps():
            assert row["actor/grad_norm"] > 1e-3 and row["actor/ratio_max"] == 1.0
