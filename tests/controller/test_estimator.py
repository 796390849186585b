"""What an estimator of a user's own may do wrong is one sentence that names it."""

from __future__ import annotations

import sys

import pytest
import torch

from megarl.algorithms import Advantage
from megarl.batch import Batch, Level, Sample
from megarl.config.schema import AlgorithmConfig
from megarl.controller.estimator import Estimator
from megarl.errors import RunError


def batch() -> Batch:
    samples = [
        Sample(f"p{i}", "g", [1], [2] * length, [1] * length, [0.0] * length, reward=float(i))
        for i, length in enumerate((2, 0, 3))
    ]
    return Batch.from_samples(samples).set("token_rewards", torch.tensor([0.0, 0.0, 0.0, 0.0, 2.0]), Level.RESPONSE)


def raises(reward_BT):
    raise KeyError("two\nlines")


def leaves(reward_BT):
    sys.exit(0)


def nothing(reward_BT):
    return None


def wrong_shape(reward_BT):
    return Advantage(reward_BT[:1], reward_BT)


def lists(reward_BT):
    return Advantage([1.0], [2.0])


def half(reward_BT):
    return Advantage(reward_BT, None)


def asks(reward_BT, reward_parts_BK):
    return Advantage(reward_BT, reward_BT)


def not_finite(reward_BT):
    return Advantage(reward_BT * float("nan"), reward_BT)


def junk_where_masked(reward_BT, mask_BT):
    advantages_BT = torch.where(mask_BT > 0, reward_BT, float("nan"))
    return Advantage(advantages_BT, advantages_BT)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("raises", "failed: KeyError: 'two\\nlines'"),
        ("leaves", "failed: SystemExit: 0"),
        ("nothing", "must return an Advantage, not NoneType"),
        ("wrong_shape", "gave advantages_BT of a shape of (1, 3), not (3, 3)"),
        ("not_finite", "gave advantages_BT with a value that is not a finite number"),
        ("lists", "gave a list as advantages_BT, not a tensor"),
        ("half", "gave a NoneType as returns_BT, not a tensor"),
        ("asks", "needs reward_parts_BK, and the reward function answered one number and no named parts"),
    ],
)
def test_a_bad_estimator_stops_the_run(name: str, said: str) -> None:
    with pytest.raises(RunError) as caught:
        Estimator(AlgorithmConfig(advantage=f"{__name__}.{name}"))(batch())
    assert str(caught.value) == f"the advantage estimator '{__name__}.{name}' {said}"


def test_what_is_masked_may_hold_anything() -> None:
    done = Estimator(AlgorithmConfig(advantage=f"{__name__}.junk_where_masked"))(batch())
    assert done["advantages"].tolist() == [0.0, 0.0, 0.0, 0.0, 2.0]


def test_what_an_estimator_does_to_its_arguments_stays_with_it():
    """Neither the batch nor the check of what it answers sees it."""
    given = batch().set("reward_parts", torch.ones(3, 2), Level.SAMPLE)
    with pytest.raises(RunError, match="not a finite number"):
        Estimator(AlgorithmConfig(advantage=f"{__name__}.destroys"))(given)
    assert bool((given["reward_parts"] == 1).all()) and bool((given["loss_mask"] == 1).all())


def destroys(reward_BT, mask_BT, reward_parts_BK):
    reward_parts_BK.zero_()
    mask_BT.zero_()
    return Advantage(reward_BT * float("nan"), reward_BT)
