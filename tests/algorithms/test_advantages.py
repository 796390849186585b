"""Every estimator that compares samples within groups against a plain loop over groups in float64."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.algorithms import call, get_advantage
from megarl.algorithms.advantages import gdpo, gpg, group_norm, grpo, grpo_passk, optimal_token_baseline, remax
from megarl.algorithms.advantages import reinforce_plus_plus_baseline as baseline

many = settings(max_examples=40, deadline=None)
seeds = st.integers(0, 2**32 - 1)
singletons = st.sampled_from(["zero", "score"])
NAMES: list[Hashable] = ["a", 7, ("x", 1), "7", 3.5, None, True, frozenset({1})]
Scores = list[float]


class Case(NamedTuple):
    reward: Tensor
    mask: Tensor
    group: list[Hashable]


def random_case(seed: int) -> Case:
    """Rewards on several tokens, holes in the masks, rows all masked; unequal interleaved groups, some of one.

    Rewards are quarters: exact in every precision, equal in many a group.
    """
    generator = np.random.default_rng(seed)
    shape = int(generator.integers(1, 30)), int(generator.integers(1, 6))
    reward = torch.from_numpy(generator.integers(-3, 4, shape) / 4).to(
        [torch.float32, torch.float64, torch.bfloat16, torch.float16][seed % 4]
    )
    mask = torch.from_numpy((generator.random(shape) < 0.7).astype(np.float32))
    return Case(reward, mask, [NAMES[i] for i in generator.integers(0, int(generator.integers(1, 9)), shape[0])])


def loop(case: Case, of_group: Callable[[Scores, list[int]], Scores], singleton: str = "zero") -> list[float]:
    """One value a sample, one group after another; of_group gets the scores and lengths of two samples or more."""
    result = [0.0] * len(case.group)
    for name in set(case.group):
        members = [i for i, other in enumerate(case.group) if other == name and case.mask[i].any()]
        scores = [math.fsum(float(r) for r, m in zip(case.reward[i], case.mask[i], strict=True) if m) for i in members]
        lengths = [int(case.mask[i].sum()) for i in members]
        if len(members) == 1:
            result[members[0]] = scores[0] if singleton == "score" else 0.0
        elif members:
            for i, value in zip(members, of_group(scores, lengths), strict=True):
                result[i] = value
    return result


def counted(case: Case) -> list[int]:
    return [i for i in range(len(case.group)) if case.mask[i].any()]


def all_scores(case: Case) -> list[float]:
    return [math.fsum(float(r) for r, m in zip(case.reward[i], case.mask[i], strict=True) if m) for i in counted(case)]


def check(result: Any, expected: list[float], case: Case) -> None:
    wanted = torch.tensor(expected, dtype=torch.float64)[:, None] * (case.mask != 0)
    assert result.advantages_BT.dtype == (torch.float64 if case.reward.dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(result.advantages_BT.double(), wanted, rtol=1e-5, atol=1e-5)
    assert result.returns_BT is result.advantages_BT


def centred(scores: Scores, lengths: list[int]) -> Scores:
    return [s - statistics.fmean(scores) for s in scores]


def normalised(scores: Scores, lengths: list[int]) -> Scores:
    return [c / (statistics.stdev(scores) + 1e-6) for c in centred(scores, lengths)]


def leave_one_out(scores: Scores, lengths: list[int]) -> Scores:
    return [s - statistics.fmean(scores[:i] + scores[i + 1 :]) for i, s in enumerate(scores)]


def by_length(scores: Scores, lengths: list[int]) -> Scores:
    mean = math.fsum(s * n for s, n in zip(scores, lengths, strict=True)) / sum(lengths)
    return [s - mean for s in scores]


def lead(scores: Scores, lengths: list[int]) -> Scores:
    return [max(scores) - max(scores[:i] + scores[i + 1 :]) for i in range(len(scores))]


def lead_normalised(scores: Scores, lengths: list[int]) -> Scores:
    return [x / (statistics.stdev(scores) + 1e-6) for x in lead(scores, lengths)]


def best_of(k: int, normalize: bool) -> Callable[[Scores, list[int]], Scores]:
    """Every subset written out."""

    def of_group(scores: Scores, lengths: list[int]) -> Scores:
        if len(scores) < k:
            return [0.0] * len(scores)
        subsets = list(itertools.combinations(range(len(scores)), k))
        best = [max(scores[i] for i in subset) for subset in subsets]
        mean, scale = statistics.fmean(best), (statistics.pstdev(best) + 1e-6 if normalize else 1.0)
        with_it = [
            statistics.fmean(b for b, s in zip(best, subsets, strict=True) if i in s) for i in range(len(scores))
        ]
        return [(x - mean) / scale for x in with_it]

    return of_group


@pytest.mark.parametrize(
    ("name", "options", "of_group"),
    [
        ("grpo", {}, normalised),
        ("grpo", {"normalize_std": False}, centred),
        ("rloo", {}, leave_one_out),
        ("opo", {}, by_length),
        ("grpo_passk", {}, lead_normalised),
        ("grpo_passk", {"normalize_std": False}, lead),
        ("group_norm", {"mean_level": "group", "std_level": "group"}, normalised),
        ("group_norm", {"mean_level": "group", "std_level": "none"}, centred),
        ("group_norm", {"mean_level": "group", "std_level": "none", "leave_one_out": True}, leave_one_out),
    ],
)
def test_group_statistics_equal_a_plain_loop(name: str, options: dict[str, Any], of_group: Any) -> None:
    @many
    @given(seeds, singletons)
    def run(seed: int, singleton: str) -> None:
        case = random_case(seed)
        check(get_advantage(name)(*case, singleton=singleton, **options), loop(case, of_group, singleton), case)

    run()


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("normalize", [True, False])
def test_pass_at_k_equals_every_subset_written_out(k: int, normalize: bool) -> None:
    @settings(max_examples=15, deadline=None)
    @given(seeds)
    def run(seed: int) -> None:
        case = random_case(seed)
        group = [name for name in case.group if case.group.count(name) in (1, *range(k, 10))]
        rows = [i for i, name in enumerate(case.group) if name in group]
        case = Case(case.reward[rows], case.mask[rows], group)
        result = grpo_passk(*case, k=k, normalize_std=normalize)
        check(result, loop(case, best_of(k, normalize)), case)

    run()


def test_pass_at_k_of_right_and_wrong_answers_is_the_papers_formula() -> None:
    n, wrong, k = 10, 7, 4
    reward = torch.tensor([[0.0]] * wrong + [[1.0]] * (n - wrong))
    mean = 1 - math.comb(wrong, k) / math.comb(n, k)
    std = math.sqrt(mean * (1 - mean))
    right = (1 - mean) / std
    lost = (1 - mean - math.comb(wrong - 1, k - 1) / math.comb(n - 1, k - 1)) / std
    result = grpo_passk(reward, torch.ones(n, 1), ["g"] * n, k=k).advantages_BT[:, 0]
    torch.testing.assert_close(result, torch.tensor([lost] * wrong + [right] * (n - wrong)), rtol=1e-5, atol=1e-5)


def test_pass_at_k_is_exactly_zero_where_every_try_is_as_good() -> None:
    """Fewer wrong answers than k: one of k is always right, and rounding noise must not be divided by its own size."""
    reward = torch.tensor([[0.1]] * 5 + [[0.0]] * 3)
    assert not grpo_passk(reward, torch.ones(8, 1), ["g"] * 8, k=4).advantages_BT.any()
    assert grpo_passk(reward, torch.ones(8, 1), ["g"] * 8, k=3).advantages_BT.any()


def test_pass_at_k_of_a_large_group() -> None:
    """The numbers of subsets overflow a float; their ratios do not."""
    scores = np.random.default_rng(0).normal(size=1000)
    result = grpo_passk(torch.from_numpy(scores)[:, None], torch.ones(1000, 1), [0] * 1000, k=400, normalize_std=False)
    order = np.argsort(scores)
    weight = np.array([math.comb(r, 399) / math.comb(1000, 400) for r in range(1000)])
    mean = float(weight @ scores[order])
    highest = result.advantages_BT[order[-1], 0].item()
    assert highest == pytest.approx(scores.max() - mean, rel=1e-9)
    assert abs(float(result.advantages_BT.sum())) < 1e-9


def test_too_few_samples_for_pass_at_k() -> None:
    one = torch.ones(3, 1)
    with pytest.raises(ValueError, match="group 'b' has 2 samples; pass@3 needs at least 3"):
        grpo_passk(torch.ones(5, 1), torch.ones(5, 1), ["a", "b", "a", "a", "b"], k=3)
    with pytest.raises(ValueError, match="grpo_passk: k is 0; it must be a whole number from 1, or none"):
        grpo_passk(one, one, ["a"] * 3, k=0)
    mask = torch.tensor([[1.0], [1.0], [0.0]])  # masked later on: nothing is said, nothing is learned
    assert not grpo_passk(torch.tensor([[1.0], [0.0], [1.0]]), mask, ["a"] * 3, k=3).advantages_BT.any()


@many
@given(seeds, singletons, st.sampled_from(["scores", "groups"]))
def test_gpg(seed: int, singleton: str, scale: str) -> None:
    case = random_case(seed)
    scores = dict(zip(counted(case), all_scores(case), strict=True))
    differ = [i for i in scores if len({scores[j] for j in scores if case.group[j] == case.group[i]}) > 1]
    carries = len(differ) if scale == "groups" else sum(s != 0 for s in scores.values())
    alpha = len(scores) / max(carries, 1)
    expected = [alpha * x / 2 for x in loop(case, centred, singleton)]
    check(gpg(*case, singleton=singleton, scale=scale, f_norm=2.0), expected, case)


@many
@given(seeds, st.sampled_from(["group", "batch", "none"]), st.sampled_from(["group", "batch", "none"]), st.booleans())
def test_group_norm_at_every_level(seed: int, mean_level: str, std_level: str, leave_out: bool) -> None:
    case = random_case(seed)
    whole = Case(case.reward, case.mask, [0] * len(case.group))
    levels = {"group": case, "batch": whole}
    formula = leave_one_out if leave_out else centred
    scores = dict(zip(counted(case), all_scores(case), strict=True))
    raw = [scores.get(i, 0.0) for i in range(len(case.group))]
    numerator = raw if mean_level == "none" else loop(levels[mean_level], formula)
    result = group_norm(*case, mean_level=mean_level, std_level=std_level, leave_one_out=leave_out)
    used = [levels[name] for name in {mean_level, std_level} - {"none"}]
    expected = numerator
    if std_level != "none":
        std = loop(levels[std_level], lambda s, n: [statistics.stdev(s)] * len(s))
        expected = [x / (s + 1e-6) if s > 1e-9 else 0.0 for x, s in zip(numerator, std, strict=True)]
    for level in used:  # alone at a level that is used: 0
        expected = [x * y for x, y in zip(expected, loop(level, lambda s, n: [1.0] * len(s)), strict=True)]
    check(result, expected, case)


def whitened(values: list[float], weights: list[int]) -> list[float]:
    """Each value repeated as often as its weight says."""
    spread = [v for v, w in zip(values, weights, strict=True) for _ in range(w)]
    if len(set(spread)) < 2:
        return [0.0] * len(values)
    mean, variance = statistics.fmean(spread), statistics.variance(spread)
    return [(v - mean) / math.sqrt(variance + 1e-8) for v in values]


def unequal(case: Case) -> list[bool]:
    return [x != 0 for x in loop(case, lambda s, n: [float(len(set(s)) > 1)] * len(s))]


@many
@given(seeds)
def test_reinforce_plus_plus_baseline(seed: int) -> None:
    case = random_case(seed)
    lengths = [int(row.sum()) for row in case.mask]
    centre = loop(case, centred)
    check(baseline(*case, whiten=False), centre, case)
    white = whitened(centre, lengths)
    check(baseline(*case), [x if differs else 0.0 for x, differs in zip(white, unequal(case), strict=True)], case)


def test_singletons_of_whitened_estimators() -> None:
    """Zero: exactly 0, not the batch's -mean / std. Score: the raw score, whitened like all others."""
    reward, mask = (
        torch.tensor([[1.0, 0.0], [0.0, 0.0], [4.0, 0.0]]),
        torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 0.0]]),
    )
    assert baseline(reward, mask, ["a", "a", "b"]).advantages_BT[2].tolist() == [0.0, 0.0]
    scored = baseline(reward, mask, ["a", "a", "b"], singleton="score").advantages_BT[:, 0]
    expected = whitened([0.5, -0.5, 4.0], [2, 1, 1])
    torch.testing.assert_close(scored, torch.tensor(expected), rtol=1e-5, atol=1e-5)


@many
@given(seeds, st.sampled_from(["sample", "token", "none"]), st.booleans())
def test_gdpo(seed: int, whiten: str, normalize: bool) -> None:
    case = random_case(seed)
    generator = np.random.default_rng(seed)
    parts = torch.from_numpy(generator.integers(-2, 3, (len(case.group), 3)) / 4).to(case.reward.dtype)
    weights = [1.0, 0.5, -2.0]
    total, differs = [0.0] * len(case.group), [False] * len(case.group)
    for k, weight in enumerate(weights):
        part = torch.zeros(case.reward.shape, dtype=torch.float64)
        for i in counted(case):
            part[i, int(case.mask[i].nonzero()[0])] = parts[i, k].double()
        one = Case(part, case.mask, case.group)
        total = [t + weight * x for t, x in zip(total, loop(one, normalised if normalize else centred), strict=True)]
        differs = [d or x for d, x in zip(differs, unequal(one), strict=True)]
    if whiten != "none":
        counts = [int(row.sum()) if whiten == "token" else int(row.any()) for row in case.mask]
        total = [x if d else 0.0 for x, d in zip(whitened(total, counts), differs, strict=True)]
    junk = torch.where(case.mask.any(-1)[:, None], parts, float("nan"))
    result = gdpo(*case, junk, weights=weights, whiten=whiten, normalize_std=normalize)
    check(result, total, case)


def test_rewards_that_cancel_leave_no_noise() -> None:
    """Each has another mean; normalised they are each other's opposite, and no noise is made large."""
    parts = torch.tensor([[0.0, 1.0], [0.25, 0.75], [1.0, 0.0]])
    one = torch.ones(3, 1)
    assert gdpo(one, one, ["a"] * 3, parts).advantages_BT.abs().max() < 1e-6
    assert gdpo(one, one, ["a"] * 3, parts, weights=[1.0, -1.0]).advantages_BT.abs().max() > 1


def test_gdpo_refuses_what_does_not_fit() -> None:
    one = torch.ones(2, 1)
    with pytest.raises(ValueError, match=r"reward_parts_BK is \(2,\); it must be \(2, K\)"):
        gdpo(one, one, ["a", "a"], torch.ones(2))
    with pytest.raises(ValueError, match="weights has 1 numbers, there are 2 rewards a sample"):
        gdpo(one, one, ["a", "a"], torch.ones(2, 2), weights=[1.0])
    with pytest.raises(ValueError, match="group 'a': the reward 1 of sample 0 is inf"):
        gdpo(one, one, ["a", "a"], torch.tensor([[0.0, math.inf], [0.0, 0.0]]))


@many
@given(seeds, singletons)
def test_optimal_token_baseline(seed: int, singleton: str) -> None:
    """Token by token, trajectory by trajectory, observations taken out first."""
    case = random_case(seed)
    generator = np.random.default_rng(seed)
    log_prob = torch.from_numpy(-generator.exponential(1.0, case.mask.shape))
    sum_p2 = torch.from_numpy(generator.random(case.mask.shape))
    expected = torch.zeros(case.mask.shape, dtype=torch.float64)
    for name in set(case.group):
        members = [i for i, other in enumerate(case.group) if other == name]
        at = {i: [t for t in range(case.mask.shape[1]) if case.mask[i, t]] for i in members}
        for n in range(case.mask.shape[1]):
            there = [i for i in members if len(at[i]) > n]
            to_go = {i: sum(float(case.reward[i, t]) for t in at[i][n:]) for i in there}
            noise = {
                i: sum(max(0.0, float(1 - 2 * log_prob[i, t].exp() + sum_p2[i, t])) for t in at[i][: n + 1]) + 1e-8
                for i in there
            }
            for i in there:
                value = to_go[i] - sum(noise[j] * to_go[j] for j in there) / sum(noise.values())
                expected[i, at[i][n]] = value if len(there) > 1 else to_go[i] * (singleton == "score")
    result = optimal_token_baseline(*case, log_prob, sum_p2, singleton=singleton)
    torch.testing.assert_close(result.advantages_BT.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [0.1, -1 / 3, 1e-30, 12345.678])
@pytest.mark.parametrize("size", [2, 3, 7, 64])
def test_equal_rewards_are_exactly_zero(value: float, size: int) -> None:
    """A mean of 0.1, 0.1, 0.1 is not 0.1 in floating point; the noise divided by eps would be an advantage of 0.1.
    Beside a group that differs, so that a batch's mean and deviation are not 0."""
    reward = torch.zeros(size + 3, 4)
    reward[:size, 2], reward[-1, 0] = value, 1.0
    mask = torch.ones(size + 3, 4)
    mask[0, 3] = mask[-1, 1] = 0.0
    group = ["g"] * size + ["other"] * 3
    offered = {"reward_BT": reward, "mask_BT": mask, "group_B": group, "reward_parts_BK": reward.sum(-1, keepdim=True)}
    offered |= {"old_log_probs_BT": -mask, "sum_p2_BT": 0.3 * mask}
    for name in ("grpo", "grpo_passk", "rloo", "opo", "gpg", "gdpo", "group_norm", "reinforce_plus_plus_baseline"):
        for options in ({}, {"normalize_std": False}, {"k": 2}, {"std_level": "group", "mean_level": "none"}):
            result = call(get_advantage(name), offered | options).advantages_BT
            assert not result[:size].any() and result[size:].any(), name
    result = call(get_advantage("optimal_token_baseline"), offered).advantages_BT
    assert not result[:size].any() and result[size:].any()


def test_a_masked_row_is_in_nobodys_statistics() -> None:
    reward = torch.tensor([[1.0], [0.0], [5.0]])
    mask = torch.tensor([[1.0], [1.0], [0.0]])
    result = grpo(reward, mask, ["g", "g", "g"]).advantages_BT
    assert torch.equal(result[:2], grpo(reward[:2], mask[:2], ["g", "g"]).advantages_BT)
    assert result[2].item() == 0.0


def test_half_precision_is_summed_in_float32() -> None:
    reward = torch.full((2, 512), 1.0, dtype=torch.bfloat16)  # bfloat16 cannot count beyond 256
    reward[1] = 0.5
    result = grpo(reward, torch.ones(2, 512), ["g", "g"], normalize_std=False).advantages_BT
    assert result[0, 0].item() == 128.0


def test_what_is_not_defined_is_said() -> None:
    reward, mask = torch.tensor([[1.0], [math.nan]]), torch.ones(2, 1)
    with pytest.raises(ValueError, match="group 'odd': the score of sample 1 is nan"):
        grpo(reward, mask, ["even", "odd"])
    with pytest.raises(ValueError, match="grpo: singleton is 'mean'; it may be 'zero', 'score'"):
        grpo(mask, mask, ["g", "g"], singleton="mean")
    with pytest.raises(ValueError, match="names 3 samples, the rewards are for 2"):
        grpo(mask, mask, ["g", "g", "g"])
    with pytest.raises(ValueError, match="group_B holds what cannot name a group: unhashable type: 'list'"):
        grpo(mask, mask, [["g"], ["g"]])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"must be one \(B, T\)"):
        grpo(mask, torch.ones(2, 2), ["g", "g"])
    with pytest.raises(ValueError, match="mean_level is 'grop'; it may be 'batch', 'group', 'none'"):
        group_norm(mask, mask, ["g", "g"], mean_level="grop")
    with pytest.raises(ValueError, match="gpg: f_norm is 0.0; it must be a finite number above 0"):
        gpg(mask, mask, ["g", "g"], f_norm=0.0)
    with pytest.raises(ValueError, match="the baseline_B of sample 1 is nan"):
        remax(mask, mask, reward[:, 0])
    with pytest.raises(ValueError, match=r"baseline_B is \(2, 1\); it must be \(2,\)"):
        remax(mask, mask, mask)


def test_the_estimator_is_called_by_name_with_what_it_takes() -> None:
    mask = torch.ones(2, 1)
    offered = {"reward_BT": torch.tensor([[1.0], [3.0]]), "mask_BT": mask, "group_B": ["g", "g"], "values_BT": None}
    offered["normalize_std"] = False
    assert call(get_advantage("grpo"), offered).advantages_BT.tolist() == [[-1.0], [1.0]]
