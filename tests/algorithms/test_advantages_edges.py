"""Where estimators have nothing to hold on to: rounding noise, no spread, huge scores, odd names, options out of range."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megarl.algorithms import Advantage, advantage, call, get_advantage
from megarl.algorithms.advantages import gdpo, gpg, group_norm, grpo, grpo_passk, reinforce_plus_plus, rloo, spread
from megarl.algorithms.groups import Groups
from megarl.algorithms.rows import masked_sums
from megarl.algorithms.whitening import masked_whiten

every_estimator = pytest.mark.parametrize("name", advantage.names)
BAD_NUMBERS: tuple[Any, ...] = (
    -1,
    -1e-9,
    math.nan,
    math.inf,
    10**400,
    "abc",
    "1",
    None,
    True,
    [1.0],
    1j,
    Decimal(1),
    torch.ones(()),
)
BAD_WORDS: tuple[Any, ...] = ("foo", "", None, 3, True, ["zero"], np.array(["zero", "score"]), torch.ones(2))
BAD_BOOLS: tuple[Any, ...] = ("none", "false", "", 0, 1, None, np.bool_(True), torch.tensor(True))
BAD: dict[str, tuple[Any, ...]] = {
    "eps": BAD_NUMBERS,
    "gamma": (*BAD_NUMBERS, 1.5),
    "lam": (*BAD_NUMBERS, 1.5),
    "f_norm": (*BAD_NUMBERS, 0, 0.0, -0.0),
    "k": tuple(value for value in BAD_NUMBERS if value is not None) + (0, 2.0, np.float64(2), 2**40),
    "weights": ("abc", 3, [1.0, "2"], [1.0, None], [1.0, math.nan], [1.0, True], np.array([1.0, math.inf]), {1.0, 2.0}),
    "singleton": BAD_WORDS,
    "scale": BAD_WORDS,
    "mean_level": BAD_WORDS,
    "std_level": BAD_WORDS,
    "normalize_std": BAD_BOOLS,
    "leave_one_out": BAD_BOOLS,
    "whiten": BAD_BOOLS,
}


def offered(scores: list[float], group: Any, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """One token a sample, all else without influence."""
    reward_BT = torch.tensor(scores, dtype=dtype)[:, None]
    return {
        "reward_BT": reward_BT,
        "mask_BT": torch.ones(reward_BT.shape),
        "group_B": group,
        "values_BT": torch.zeros_like(reward_BT),
        "baseline_B": torch.zeros_like(reward_BT[:, 0]),
        "old_log_probs_BT": -torch.ones_like(reward_BT),
        "sum_p2_BT": torch.full_like(reward_BT, 0.5),
        "reward_parts_BK": reward_BT.repeat(1, 2),
    }


def of(name: str, scores: list[float], group: Any = None, dtype: torch.dtype = torch.float32, **options: Any) -> Tensor:
    inputs = offered(scores, ["g"] * len(scores) if group is None else group, dtype)
    return call(get_advantage(name), inputs | options).advantages_BT[:, 0]


@every_estimator
def test_every_value_of_an_option_is_checked(name: str) -> None:
    """And an option that nobody has thought of here is not there."""
    for option in advantage.options(name):
        values = BAD_WORDS if (name, option) == ("gdpo", "whiten") else BAD[option]
        for value in values:
            with pytest.raises(ValueError, match=f"^{name}: {option} is .*; it m") as error:
                of(name, [1.0, 0.0, 2.0], **{option: value})
            assert str(error.value).count("\n") == 0 or isinstance(value, Tensor | np.ndarray)


def test_an_option_is_checked_where_it_has_no_effect_too() -> None:
    with pytest.raises(ValueError, match="group_norm: singleton is 'bogus'"):
        of("group_norm", [1.0, 0.0], mean_level="none", std_level="none", singleton="bogus")
    with pytest.raises(ValueError, match="gdpo: weights has 3 numbers, there are 2 rewards a sample"):
        of("gdpo", [1.0, 0.0], weights=[1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match=r"optimal_token_baseline: eps is 0; it must be a finite number in 1e-20..1"):
        of("optimal_token_baseline", [1.0, 0.0], eps=0)


def test_numbers_of_other_types_are_as_good() -> None:
    scores = [1.0, 0.0, 0.5, 2.0]
    assert torch.equal(of("grpo_passk", scores, k=np.int64(2)), of("grpo_passk", scores, k=2))
    assert torch.equal(of("grpo", scores, eps=Fraction(1, 2)), of("grpo", scores, eps=0.5))
    assert torch.equal(of("gpg", scores, f_norm=np.float32(2)), of("gpg", scores, f_norm=2))
    assert torch.equal(of("gdpo", scores, weights=torch.tensor([1.0, 3.0])), of("gdpo", scores, weights=[1, 3]))
    assert torch.equal(of("gae", scores, gamma=np.float64(0.5), lam=1), of("gae", scores, gamma=0.5, lam=1.0))


RELATIVE = tuple(name for name in advantage.names if "group_B" in advantage.required(name))


@pytest.mark.parametrize("name", RELATIVE)
def test_scores_that_differ_by_the_order_of_addition_are_equal(name: str) -> None:
    """0.1 + 0.5 + 0.7 and 0.5 + 0.7 + 0.1; beside a group that differs, which keeps its spread."""
    first, second = torch.tensor([[0.1, 0.5, 0.7], [0.5, 0.7, 0.1]]).sum(1).tolist()
    assert 0 < abs(first - second) < 2e-7
    options: list[dict[str, Any]] = [{}, {"eps": 0.0}, {"normalize_std": False}, {"k": 2}, {"std_level": "group"}]
    for option in options if name != "optimal_token_baseline" else ():
        result = of(name, [first, second, second, first, 1.0, 0.0, 0.25], list("aaaabbb"), **option)
        assert not result[:4].any() and result[4:].any(), option
    if name == "optimal_token_baseline":  # not divided by anything, so the noise stays what it is
        assert of(name, [first, second, second, first]).abs().max() < 2e-7


def test_what_is_more_than_rounding_is_a_difference() -> None:
    ulp = 2.0**-23
    for name in ("grpo", "rloo", "opo", "gdpo", "group_norm", "reinforce_plus_plus_baseline"):
        assert not of(name, [1.0, 1.0 + 4 * ulp, 1.0]).any(), name
        assert of(name, [1.0, 1.0 + 5 * ulp, 1.0]).all(), name
        assert of(name, [1.0, 1.0 + 4 * ulp, 1.0], dtype=torch.float64).all(), (
            name
        )  # there it is far more than rounding
        assert of(name, [-1.0, -1.0 - 5 * ulp, -1.0]).all() and not of(name, [-1.0, -1.0 - 4 * ulp, -1.0]).any(), name
    assert of("grpo", [1e-30, 0.0]).tolist() == pytest.approx([5e-25, -5e-25], rel=1e-5)  # small is not equal


def test_a_batch_that_differs_by_rounding_is_whitened_to_zero() -> None:
    near = [1.3, 1.3 + 2**-23, 1.3]
    assert not of("reinforce_plus_plus", near).any() and not of("gae", near).any()
    assert not of("group_norm", near, list("abc"), mean_level="batch", std_level="batch").any()
    assert not of("group_norm", near, list("abc"), mean_level="none", std_level="batch").any()
    assert not of("reinforce_plus_plus_baseline", near, list("abc"), singleton="score").any()
    assert of("reinforce_plus_plus", [1.3, 1.30001, 1.3]).all()
    back = masked_whiten(torch.tensor([near]), torch.ones(1, 3), shift_mean=False)
    torch.testing.assert_close(back, torch.full((1, 3), 1.3))


def test_pass_at_k_among_best_answers_that_differ_by_rounding() -> None:
    """Three of four are the best but for rounding: each try of two holds one of them."""
    best = [1.3, 1.3 + 2**-23, 1.3 - 2**-23]
    assert not of("grpo_passk", [0.0, *best], k=2).any()
    assert not of("grpo_passk", [0.0, *best], k=2, eps=0.0).any()
    assert not of("grpo_passk", [0.0, *best]).any()  # nobody leads


def test_eps_of_0() -> None:
    """No spread gives 0, and spread is divided by exactly."""
    for name in ("grpo", "grpo_passk", "gdpo", "group_norm"):
        for scores in ([0.0, 0.0], [0.1] * 7, [5.0]):
            assert not of(name, scores, eps=0.0).any(), name
    assert of("grpo", [1.0, 0.0], eps=0.0).tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)])
    assert of("grpo", [1e-30, 0.0], eps=0.0).tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)])
    assert not of("grpo_passk", [0.0, 1.0, 1.0, 1.0], k=2, eps=0.0).any()


@pytest.mark.parametrize("name", RELATIVE)
def test_names_of_one_number_each(name: str) -> None:
    scores = [1.0, 0.0, 3.0, 0.5]
    plain = of(name, scores, [0, 0, 1, 1])
    for group in (
        list(torch.tensor([0, 0, 1, 1])),
        [("p", torch.tensor(i)) for i in (0, 0, 1, 1)],
        [np.int64(0), np.float32(0), 1.0, torch.tensor(1)],
        "aabb",
    ):
        assert torch.equal(of(name, scores, group), plain)


@pytest.mark.parametrize("name", RELATIVE)
def test_what_cannot_name_groups(name: str) -> None:
    nan = math.nan
    for group, said in (
        (None, "group_B is None; it must be a list of names, one a sample"),
        (3, "group_B is 3; it must be a list of names"),
        (torch.tensor(3), r"group_B is tensor\(3\); it must be a list of names"),
        (np.array(3), r"group_B is array\(3\); it must be a list of names"),
        ([nan, 1.0], "group_B holds NaN, which cannot name a group"),
        ([np.float32(nan), 1.0], "group_B holds NaN"),
        ([("a", nan), ("a", nan)], "group_B holds NaN"),
        (torch.tensor([nan, nan]), "group_B holds NaN"),
        (torch.ones(2, 2), "group_B holds what cannot name a group: unhashable type: 'list'"),
        ([torch.ones(2), torch.ones(2)], r"group_B holds a tensor of shape \(2,\); a name is one number"),
        ([{}, {}], "group_B holds what cannot name a group: unhashable type: 'dict'"),
    ):
        with pytest.raises(ValueError, match=said):
            call(get_advantage(name), offered([1.0, 0.0], group))


@every_estimator
def test_huge_scores_are_finite_or_a_clear_error(name: str) -> None:
    """In float32 their distances overflow, and in float64 those of 1.7e308."""
    for dtype, huge in ((torch.float32, 3e38), (torch.float64, 1.7e308)):
        for scores in ([huge, -huge, 0.0, 0.0], [huge, huge], [huge, -huge], [huge], [-huge, huge, huge]):
            for option in ({}, {"normalize_std": False, "whiten": False}, {"mean_level": "batch", "k": 2}):
                option = {key: value for key, value in option.items() if (name, key) != ("gdpo", "whiten")}
                if len(scores) < 2:
                    option = option | {"singleton": "score"}
                try:
                    result = of(name, scores, dtype=dtype, **option)
                except ValueError as error:
                    assert "of sample" in str(error) or "to be whitened is from" in str(error)
                else:
                    assert result.isfinite().all()


def test_distances_that_float32_cannot_hold() -> None:
    assert of("grpo", [3e38, -3e38, 0.0, 0.0]).tolist() == pytest.approx([1.2247449, -1.2247449, 0.0, 0.0])
    assert of("grpo", [3e38, -3e38], normalize_std=False).tolist() == pytest.approx([3e38, -3e38])
    with pytest.raises(ValueError, match="the advantage of sample 0 is inf"):
        rloo(torch.tensor([[3e38], [-3e38]]), torch.ones(2, 1), ["g", "g"])
    with pytest.raises(ValueError, match="the score of sample 0 is inf"):
        grpo(torch.full((2, 4096), 1e35), torch.ones(2, 4096), ["g", "g"])
    with pytest.raises(ValueError, match="from -2e.38 to 2e.38: their sum or distance is too large for torch.float32"):
        masked_whiten(torch.tensor([[2e38, -2e38]]), torch.ones(1, 2))
    with pytest.raises(ValueError, match="what is to be whitened is from"):
        masked_whiten(torch.tensor([[1.0, math.nan]]), torch.ones(1, 2))
    assert not masked_whiten(torch.tensor([[math.nan, math.inf]]), torch.zeros(1, 2)).any()
    masked = torch.tensor([[1.0], [1.0], [0.0]])  # one that does not count is nobody's error either
    assert grpo(torch.full((3, 1), 3e38), masked, ["g"] * 3, normalize_std=False).advantages_BT.tolist() == [[0.0]] * 3
    apart = rloo(torch.tensor([[3e38], [2.9e38], [0.0]]), masked, ["g"] * 3).advantages_BT[:, 0]
    assert apart.tolist() == pytest.approx([1e37, -1e37, 0.0], rel=1e-5)


def test_large_groups_lose_nothing() -> None:
    """A million scores of 100 to 100.1: sums in float32, one after another, are 5e-4 off."""
    scores = torch.linspace(100.0, 100.1, 1_000_000)
    exact = (scores.double() - scores.double().mean()) / (scores.double().std() + 1e-6)
    one, group = torch.ones(len(scores), 1), [0] * len(scores)
    for result in (
        group_norm(scores[:, None], one, group, mean_level="batch", std_level="batch"),
        grpo(scores[:, None], one, group),
        gdpo(scores[:, None], one, group, scores[:, None], whiten="none"),
    ):
        torch.testing.assert_close(result.advantages_BT[:, 0].double(), exact, rtol=0, atol=2e-7)
    mean_B = Groups(group, one[:, 0] > 0).mean(scores)
    assert mean_B[0].item() == pytest.approx(scores.double().mean().item(), rel=1e-12)


def test_long_rows_are_summed_exactly() -> None:
    assert masked_sums(torch.full((1, 1 << 20), 0.1), torch.ones(1, 1 << 20)).item() == pytest.approx(
        0.1 * (1 << 20), rel=2e-7
    )


def test_float64_keeps_its_digits() -> None:
    """In every factor: n / (n - 1), and the samples over those that carry a gradient."""
    scores = [0.1, 0.3, 0.7]
    mean = math.fsum(scores) / 3
    wanted = [1.5 * (s - mean) for s in scores]
    options = {"mean_level": "group", "std_level": "none", "leave_one_out": True}
    assert of("group_norm", scores, dtype=torch.float64, **options).tolist() == pytest.approx(wanted, rel=1e-14)
    assert of("rloo", scores, dtype=torch.float64).tolist() == pytest.approx(wanted, rel=1e-14)
    scores = [0.0, 0.3, 0.7, 0.1, 0.2, 0.2, 0.2]
    for scale, carries in (("scores", 6), ("groups", 4)):
        mean = math.fsum(scores[:4]) / 4
        wanted = [7 / carries * (s - mean) for s in scores[:4]] + [0.0] * 3
        result = of("gpg", scores, list("aaaabbb"), torch.float64, scale=scale)
        assert result.tolist() == pytest.approx(wanted, rel=1e-14, abs=0)


@every_estimator
def test_rewards_with_a_gradient_give_advantages_without(name: str) -> None:
    inputs = offered([1.0, 0.0, 0.5], ["g"] * 3)
    for key in ("reward_BT", "values_BT", "baseline_B", "old_log_probs_BT", "sum_p2_BT", "reward_parts_BK"):
        inputs[key] = inputs[key].clone().requires_grad_()
    assert not any(x.requires_grad for x in call(get_advantage(name), inputs))


@every_estimator
def test_results_share_no_memory_with_inputs_nor_returns_with_advantages(name: str) -> None:
    """Save where an estimator has no returns: there both are one tensor."""
    for option in ({}, {"whiten": False}) if name != "gdpo" else ({},):
        inputs = offered([1.0, 0.0, 0.5], ["g"] * 3)
        result = call(get_advantage(name), inputs | option)
        memory = [x.untyped_storage().data_ptr() for x in inputs.values() if isinstance(x, Tensor)]
        assert not {x.untyped_storage().data_ptr() for x in result} & set(memory)
        shared = result.advantages_BT.untyped_storage().data_ptr() == result.returns_BT.untyped_storage().data_ptr()
        assert shared == (result.returns_BT is result.advantages_BT)
        assert shared == (name not in ("gae", "reinforce_plus_plus", "remax", "optimal_token_baseline"))


def test_equal_groups_and_a_mean_of_the_batch() -> None:
    """The mean of the batch says that one group is better than the other; only a std or mean of the group itself gives 0."""
    scores, groups = [1.0, 1.0, 0.0, 0.0], list("aabb")
    assert of("group_norm", scores, groups, mean_level="batch", std_level="none").tolist() == [0.5, 0.5, -0.5, -0.5]
    assert not of("group_norm", scores, groups, mean_level="batch", std_level="group").any()
    assert not of("group_norm", scores, groups, mean_level="group", std_level="batch").any()


def test_groups_levels_only_what_counts() -> None:
    values = torch.tensor([1.0, 1.0 + 2**-23, 7.0, 2.0, 3.0])
    groups = Groups(list("aaabb"), torch.tensor([True, True, False, True, True]))
    assert groups.levelled(values)[[0, 1, 3, 4]].tolist() == [1.0, 1.0, 2.0, 3.0]
    assert groups.size_B.tolist() == [2, 2, 2, 2, 2]


def test_spread_in_another_precision() -> None:
    result = spread(torch.tensor([1.0, 2.0], dtype=torch.float64), torch.ones(2, 2), torch.float32)
    assert isinstance(result, Advantage) and result.advantages_BT.dtype == torch.float32
    assert result.advantages_BT.tolist() == [[1.0, 1.0], [2.0, 2.0]]


def test_returns_beside_advantages_that_are_not_whitened() -> None:
    reward = torch.tensor([[1.0, 2.0]])
    result = reinforce_plus_plus(reward, torch.ones(1, 2), whiten=False)
    result.advantages_BT.zero_()
    assert result.returns_BT.tolist() == [[3.0, 2.0]]
    assert gpg(reward, torch.ones(1, 2), ["g"]).advantages_BT.tolist() == [[0.0, 0.0]]
    assert not grpo_passk(reward, torch.ones(1, 2), ["g"], k=5).advantages_BT.any()
