"""The example of a user's own functions: accepted, called with the options of its configuration, and right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megarl.algorithms import Objective, advantage, call, denominators, get_advantage, get_policy_loss, policy_loss
from megarl.config import Config, load, problems

FOLDER = Path(__file__).parents[2] / "examples" / "custom_estimator"


@pytest.fixture(scope="module")
def cfg() -> Config:
    return load(FOLDER / "config.yaml")


def test_the_configuration_is_good_and_names_what_is_there(cfg: Config) -> None:
    assert not problems(cfg)
    a = cfg.algorithm
    for registry, name, options in (
        (advantage, a.advantage, a.advantage_options),
        (policy_loss, a.policy_loss, a.policy_loss_options),
    ):
        assert name.startswith("examples.custom_estimator.own.")
        assert registry.get(name).__name__ == name.rpartition(".")[2]
        registry.check_options(name, options)
        assert options
    with pytest.raises(ValueError, match="has no option 'blme'; did you mean 'blame'"):
        advantage.check_options(a.advantage, {"blme": 0.1})


def test_the_advantage(cfg: Config) -> None:
    offered = {
        "reward_BT": torch.tensor([[0.0, 1.0], [0.0, 0.0], [5.0, float("nan")], [3.0, 0.0]]),
        "mask_BT": torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, 0.0], [0.0, 0.0]]),
        "group_B": ["a", "a", "b", "b"],
        **cfg.algorithm.advantage_options,
    }
    result = call(get_advantage(cfg.algorithm.advantage), offered)
    assert result.advantages_BT.tolist() == [[0.5, 0.5], [-0.125, -0.125], [0.0, 0.0], [0.0, 0.0]]


def test_the_loss_begins_as_the_policy_gradient_and_saturates(cfg: Config) -> None:
    """Its gradient by the log-prob is -A r / cosh^2((r - 1) / w), checked by finite differences too."""
    loss, width = get_policy_loss(cfg.algorithm.policy_loss), cfg.algorithm.policy_loss_options["width"]
    old = torch.tensor([[-1.0, -2.0, -0.5]], dtype=torch.float64)
    advantages = torch.tensor([[2.0, -1.0, 0.5]], dtype=torch.float64)
    for drift in (0.0, 0.4, -0.4):
        log_probs = (old + drift).requires_grad_()
        result = loss(log_probs, old, advantages, torch.ones(1, 3), width=width)
        result.loss_BT.sum().backward()
        ratio = (log_probs - old).detach().exp()
        assert torch.allclose(log_probs.grad, -advantages * ratio / torch.cosh((ratio - 1) / width) ** 2)
        assert bool(result.clipped_BT.all()) == (drift != 0)
        assert torch.autograd.gradcheck(lambda x: loss(x, old, advantages, torch.ones(1, 3), width=width)[0], log_probs)


def test_the_objective_takes_it(cfg: Config) -> None:
    mask = torch.tensor([[1.0, 1.0, 0.0]])
    log_probs = torch.tensor([[-1.0, -2.0, float("nan")]], requires_grad=True)
    data = {
        "old_log_probs": log_probs.detach(),
        "advantages": torch.tensor([[1.0, -3.0, float("inf")]]),
        "loss_mask": mask,
    }
    result = Objective.from_config(cfg.algorithm)(log_probs, torch.zeros(1, 3), data, denominators(mask))
    result.loss.backward()
    assert log_probs.grad is not None
    assert log_probs.grad[0].tolist() == pytest.approx([-0.5, 1.5, 0.0])
    assert float(result.sums["clip_fraction"]) == 0.0
