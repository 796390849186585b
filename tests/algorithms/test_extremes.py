"""Numbers at the end of their range, and arguments of odd kinds: an error or the right number, never a silent 0."""

import warnings

import pytest
import torch

from megarl.algorithms import Objective, get_advantage
from megarl.algorithms.groups import Groups

ONES = torch.ones(3, 1)


@pytest.mark.parametrize("scores", [[1e308, -1e308, 0.0], [8e307, -8e307, 0.0], [1e308, 0.0, 1e308]])
@pytest.mark.parametrize(
    "name", ["grpo", "group_norm", "grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline"]
)
def test_scores_too_far_apart_are_an_error_and_nobody_else_warns(name, scores):
    reward = torch.tensor(scores, dtype=torch.float64)[:, None]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            result = get_advantage(name)(reward, ONES, [0, 0, 0]).advantages_BT
        except ValueError as error:
            assert "sample" in str(error)
        else:  # it can be computed after all
            assert bool(result.isfinite().all()) and bool(result.any())


def test_scores_far_apart_that_can_be_told():
    reward = torch.tensor([[4e307], [-4e307], [0.0]], dtype=torch.float64)
    assert get_advantage("grpo")(reward, ONES, [0, 0, 0]).advantages_BT[:, 0].tolist() == pytest.approx([1, -1, 0])


@pytest.mark.parametrize("name", ["remax", "reinforce_plus_plus"])
def test_a_return_beyond_the_range_is_an_error(name):
    more = {"baseline_B": torch.zeros(2)} if name == "remax" else {"whiten": False}
    reward = torch.tensor([[0.0, 1.0, 0.0], [-3e38, 3e38, 3e38]])
    with pytest.raises(ValueError, match="the return of sample 1 is inf"):
        get_advantage(name)(reward, torch.ones(2, 3), **more)


def test_kl_cov_does_not_hide_nan():
    objective = Objective(policy_loss="kl_cov")
    old = torch.full((2, 3), -1.0)
    old[0, 0] = float("nan")
    data = {
        "old_log_probs": old,
        "advantages": torch.tensor([[1.0, 1, 1], [-1, -1, -1]]),
        "loss_mask": torch.ones(2, 3),
    }
    assert objective.prepare(data)["selected"].sum() == 1


def test_groups_of_values_of_any_kind():
    groups = Groups([1, 1, 2], torch.tensor([True, True, True]))
    assert groups.max(torch.tensor([1, 0, 1])).tolist() == [1, 1, 1]
    assert groups.min(torch.tensor([True, False, True])).tolist() == [0, 0, 1]
    values = torch.tensor([1.0, 2.0, 5.0], requires_grad=True)
    (groups.centred(values)[0] * 3).backward()
    assert values.grad.tolist() == pytest.approx([1.5, -1.5, 0])


@pytest.mark.parametrize("names", [{"a": 0, "b": 1}, {"a", "b"}, frozenset("ab")])
def test_what_has_no_order_names_no_groups(names):
    with pytest.raises(ValueError, match="it must be a list of names, one a sample"):
        Groups(names, torch.tensor([True, True]))


def test_names_that_are_one_number_and_names_that_hold_nan():
    counts = torch.tensor([True, True])
    assert Groups([torch.tensor([4]), 4], counts).size_B.tolist() == [2, 2]
    with pytest.raises(ValueError, match="holds NaN"):
        Groups([frozenset([float("nan")]), 1], counts)
