"""What a recipe's functions are tried on before anything starts."""

from __future__ import annotations

import torch

from megarl import config
from megarl.algorithms import Advantage, PolicyLoss, advantage, policy_loss
from megarl.controller import rehearsal
from tests.controller.runs import CONFIG, ROOT


def said(*overrides: str) -> list[str]:
    return list(rehearsal.problems(config.load(ROOT / CONFIG, list(overrides))))


def test_every_registered_function_passes() -> None:
    for name in advantage.names:
        assert said(f"algorithm.advantage={name}") == [], name
    for name in policy_loss.names:
        assert said(f"algorithm.policy_loss={name}") == [], name


def no_gradient(log_probs_BT, mask_BT):
    return PolicyLoss(log_probs_BT.detach() * 0.0, torch.ones_like(log_probs_BT), mask_BT)


def leaves(log_probs_BT):
    raise SystemExit("gone")


def nonsense(reward_BT):
    return Advantage(reward_BT / 0, reward_BT)


def test_what_would_fail_after_minutes_fails_here() -> None:
    (problem,) = said(f"algorithm.policy_loss={__name__}.leaves")
    assert "gone" in problem and problem.startswith(
        f"algorithm.policy_loss={__name__}.leaves, tried on made-up samples: "
    )
    (problem,) = said(f"algorithm.advantage={__name__}.nonsense")
    assert problem.endswith("gave advantages_BT with a value that is not a finite number")
    assert len(said(f"algorithm.policy_loss={__name__}.no_gradient", "algorithm.entropy_coefficient=0.0")) == 1
    (problem,) = said("algorithm.advantage=grpo_passk", "algorithm.advantage_options.k=5", "rollout.n=4")
    assert "tried on made-up samples: the advantage estimator 'grpo_passk' failed" in problem
    assert said("algorithm.advantage=grpo_passk", "algorithm.advantage_options.k=4", "rollout.n=4") == []


def test_one_sample_a_problem_where_it_means_something() -> None:
    """What compares within groups of one has nothing to say; what compares in the batch has."""
    for name in ("grpo", "rloo", "gpg", "opo"):
        (problem,) = said(f"algorithm.advantage={name}", "rollout.n=1")
        assert problem.startswith("rollout.n=1 leaves a sample alone in its group"), name
    assert said("algorithm.advantage=grpo", "algorithm.advantage_options.singleton=score", "rollout.n=1") == []
    levels = ("algorithm.advantage_options={mean_level: batch, std_level: batch}", "rollout.n=1")
    assert said("algorithm.advantage=group_norm", *levels) == []
    assert said("algorithm.advantage=reinforce_plus_plus", "rollout.n=1") == []
